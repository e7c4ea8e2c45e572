//! Whom a limit counts: pools of everybody on a route, single keys of an account; and limits that are only tried out.

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::support::{Backend, Cluster, Config, Gateway, Request, Store, eventually, for_every_store, run};

/// What a charge that is given back may take to arrive.
const GIVEN_BACK: Duration = Duration::from_secs(2);

const HUNDRED: &str = r#"{ name = "window", limit = 100, per = "10m" }"#;

/// A route whose pool holds `limit`, and callers with far more of their own.
fn pooled(backend: &Backend, limit: u64, store: &Store) -> Config {
    Config::bare(backend.address())
        .route(
            "shared",
            "/shared",
            &format!(r#"limits = [{{ name = "pool", limit = {limit}, per = "10m" }}]"#),
        )
        .route("rest", "/*", "")
        .plan("many", HUNDRED)
        .key_series("k", 8, "many")
        .store(store)
}

for_every_store! {
    fn a_pool_holds_for_everybody_together(store) {
        // A limit per caller protects no backend: eight callers within theirs are eight times as many.
        let backend = Backend::ok();
        let gateway = Gateway::start(&pooled(&backend, 50, store));
        let (start, passed) = (Barrier::new(8), AtomicUsize::new(0));
        thread::scope(|scope| {
            for caller in 0..8 {
                let (start, passed, gateway) = (&start, &passed, &gateway);
                scope.spawn(move || {
                    let mut connection = gateway.connect();
                    let request = Request::get("/shared").key(&format!("k-{caller}"));
                    start.wait();
                    for _ in 0..20 {
                        let answer = request.on(&mut connection);
                        passed.fetch_add(usize::from(answer.status == 200), Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(passed.into_inner(), 50);
        let refusal = gateway.get("/shared").key("k-0").send().expect(429);
        assert_eq!(refusal.json()["violated-policies"], json!(["pool"]));
        assert!(refusal.retry_after().is_some_and(|wait| (1..=600).contains(&wait)));
        // The rest of the gateway is open to all.
        gateway.get("/elsewhere").key("k-0").send().expect(200);
    }

    fn whom_the_pool_refuses_gets_back_what_its_own_limits_took(store) {
        // ACC-5 between two nodes: what cannot be one step is a step and a step back.
        let backend = Backend::ok();
        let gateway = Gateway::start(&pooled(&backend, 3, store));
        for _ in 0..3 {
            gateway.get("/shared").key("k-0").send().expect(200);
        }
        for call in 0..5 {
            let refusal = gateway.get("/shared").key("k-1").send().expect(429);
            // Told as it stands once the unit is back; those of the calls before may still be on their way.
            assert!((100 - call..=100).contains(&refusal.remaining("window")), "{}", refusal.remaining("window"));
            assert_eq!(refusal.remaining("pool"), 0);
        }
        eventually("the units to come back", GIVEN_BACK, || {
            let left = gateway.get("/elsewhere").key("k-1").send().expect(200).remaining("window");
            // One unit for each look, and no other.
            (left >= 90).then_some(())
        });
        let used = 100 - gateway.get("/elsewhere").key("k-1").send().expect(200).remaining("window");
        assert!((2..=10).contains(&used), "{used}");
    }

    fn a_caller_whom_its_own_limits_refuse_takes_nothing_of_the_pool(store) {
        let backend = Backend::ok();
        let config = Config::bare(backend.address())
            .route("shared", "/shared", r#"limits = [{ name = "pool", limit = 10, per = "10m" }]"#)
            .plan("few", r#"{ name = "window", limit = 2, per = "10m" }"#)
            .key_series("k", 2, "few")
            .store(store);
        let gateway = Gateway::start(&config);
        let (passed, refusal) = gateway.exhaust("/shared", "k-0");
        assert_eq!(passed, 2);
        assert_eq!(refusal.json()["violated-policies"], json!(["window"]));
        for _ in 0..5 {
            gateway.get("/shared").key("k-0").send().expect(429);
        }
        let answer = gateway.get("/shared").key("k-1").send().expect(200);
        assert_eq!(answer.remaining("pool"), 7);
        assert_eq!(answer.header("ratelimit-policy"), Some(r#""window";q=2;w=600, "pool";q=10;w=600"#));
    }

    fn slots_of_a_pool_come_back_when_a_caller_is_refused(store) {
        // The caller's own slot is taken first, and must not stay taken when the pool has none.
        let backend = Backend::ok();
        let config = Config::bare(backend.address())
            .route("shared", "/shared", r#"limits = [{ name = "pool", limit = 1, per = "10m" }]"#)
            .route("rest", "/*", "")
            .plan("slots", r#"{ name = "inflight", limit = 1, algorithm = "concurrency" }"#)
            .key_series("k", 1, "slots")
            .store(store);
        let gateway = Gateway::start(&config);
        gateway.get("/shared").key("k-0").send().expect(200);
        for _ in 0..5 {
            eventually("the slot to come back", GIVEN_BACK, || {
                let refusal = gateway.get("/shared").key("k-0").send().expect(429);
                let by_the_pool = refusal.json()["violated-policies"] == json!(["pool"]);
                // Told as it stands once the slot is back.
                assert_eq!(refusal.remaining("inflight"), u64::from(by_the_pool));
                by_the_pool.then_some(())
            });
        }
        eventually("the slot to come back", GIVEN_BACK, || {
            (gateway.get("/x").key("k-0").send().status == 200).then_some(())
        });
    }

    fn a_request_gives_back_its_callers_slot_and_the_one_of_the_pool(store) {
        // Both slots had one id, and Redis was told of the second alone: the caller's own stayed taken for ten seconds.
        let backend = Backend::ok();
        let slots = |name: &str| format!(r#"{{ name = "{name}", limit = 1, algorithm = "concurrency" }}"#);
        let config = Config::bare(backend.address())
            .route("shared", "/shared", &format!("limits = [{}]", slots("all")))
            .plan("slots", &slots("own"))
            .key_series("k", 2, "slots")
            .store(store);
        let gateway = Gateway::start(&config);
        for call in 0..6 {
            let key = format!("k-{}", call % 2);
            eventually("both slots to be free", GIVEN_BACK, || {
                (gateway.get("/shared").key(&key).send().status == 200).then_some(())
            });
        }
    }

    fn keys_of_one_account_have_limits_of_their_own_inside_of_the_accounts(store) {
        // One key that leaks must not eat what the account bought; and ten keys are not ten accounts.
        let backend = Backend::ok();
        let plan = r#"[plans.team]
            limits = [{ name = "account", limit = 8, per = "10m" }]
            per_key = [{ name = "key", limit = 5, per = "10m" }]"#;
        let config = Config::open(&backend)
            .table(plan)
            .key("first", "acme", "team")
            .key("second", "acme", "team")
            .key("other", "umbrella", "team")
            .store(store);
        let gateway = Gateway::start(&config);
        let (passed, refusal) = gateway.exhaust("/x", "first");
        assert_eq!((passed, refusal.remaining("account")), (5, 3));
        assert_eq!(refusal.json()["violated-policies"], json!(["key"]));
        let (passed, refusal) = gateway.exhaust("/x", "second");
        assert_eq!((passed, refusal.remaining("key")), (3, 2));
        assert_eq!(refusal.json()["violated-policies"], json!(["account"]));
        assert_eq!(gateway.exhaust("/x", "other").0, 5);
        if let Some(redis) = store.redis() {
            let keys = redis.keys();
            assert!(keys.contains(&"tollgate:{acct.acme}:key.key_1:key".to_owned()), "{keys:?}");
        }
    }

    fn a_percentage_enforces_for_the_same_callers_on_every_gateway(store) {
        // A coin that is tossed for each request makes a limit of 1 in 2 look like none; and raising the share must take nobody out.
        let backend = Backend::ok();
        let config = |percent: &str| {
            let plan = format!(r#"{{ name = "window", limit = 1, per = "10m", enforce = "{percent}" }}"#);
            Config::open(&backend).plan("p", &plan).key_series("k", 200, "p").store(store)
        };
        let enforced = |gateway: &Gateway| -> BTreeSet<usize> {
            let mut connection = gateway.connect();
            let mut refused = |caller: &usize| {
                let request = Request::get("/x").key(&format!("k-{caller}"));
                let told = request.on(&mut connection).header("ratelimit-policy").is_some();
                let refused = request.on(&mut connection).status == 429;
                assert_eq!(told, refused, "who is refused is told of the limit, and nobody else");
                refused
            };
            (0..200).filter(|caller| refused(caller)).collect()
        };
        let (one, two) = (Gateway::start(&config("20%")), Gateway::start(&config("20%")));
        let (first, again) = (enforced(&one), enforced(&two));
        assert_eq!(first, again);
        assert!((20..=60).contains(&first.len()), "{} of 200", first.len());
        let would_deny = one.metric("tollgate_decisions_total", &[("outcome", "would_deny"), ("limit", "window")]);
        assert!(would_deny >= 140.0, "{would_deny}");
        let more = enforced(&Gateway::start(&config("60%")));
        assert!(more.is_superset(&first) && (90..=150).contains(&more.len()), "{} of 200", more.len());
    }

    fn candidates_are_decided_as_a_set_and_refuse_nobody(store) {
        // In shadow each limit counts alone: the day would be charged for calls that the minute had refused.
        let backend = Backend::ok();
        let plan = r#"[plans.p]
            limits = [{ name = "minute", limit = 6, per = "10m" }]
            candidate = [{ name = "minute", limit = 2, per = "10m" }, { name = "day", limit = 100, per = "1d" }]"#;
        let gateway = Gateway::start(&Config::open(&backend).table(plan).key("k", "one", "p").store(store));
        let answers = [(); 7].map(|()| gateway.get("/x").key("k").send());
        assert_eq!(answers.each_ref().map(|answer| answer.status), [200, 200, 200, 200, 200, 200, 429]);
        assert_eq!(answers[5].header("ratelimit-policy"), Some(r#""minute";q=6;w=600"#));
        assert_eq!(answers[5].remaining("minute"), 0);
        let would_deny = [("outcome", "would_deny"), ("limit", "candidate/minute")];
        assert_eq!(gateway.metric("tollgate_decisions_total", &would_deny).to_string(), "4");
        if let Some(redis) = store.redis() {
            // Two admissions of the day, as if the minute had been enforced: a header of 30 bytes, and 4 for each.
            let length = redis.number(&["STRLEN", "tollgate:{acct.one}:plan:candidate/day"]);
            assert_eq!(length, 30 + 4 * 2);
        }
    }
}

#[test]
fn a_pool_in_a_cluster_is_counted_on_its_own_node() {
    // CROSSSLOT would turn every call into a failure of the store.
    let backend = Backend::ok();
    let cluster = Cluster::start();
    let config = Config::bare(backend.address())
        .route("shared", "/shared", r#"limits = [{ name = "pool", limit = 30, per = "10m" }]"#)
        .plan("many", HUNDRED)
        .key_series("k", 10, "many")
        .table(&cluster.tables("deny", "2s"));
    let gateway = Gateway::start(&config);
    let mut connection = gateway.connect();
    let mut passed = 0;
    for call in 0..100 {
        let answer = Request::get("/shared").key(&format!("k-{}", call % 10)).on(&mut connection);
        assert!([200, 429].contains(&answer.status), "{}", answer.status);
        passed += u32::from(answer.status == 200);
    }
    assert_eq!(passed, 30);
}

#[test]
fn explain_says_whom_each_limit_counts() {
    let config = Config::bare("127.0.0.1:9".parse().unwrap())
        .route(
            "all",
            "/*",
            "limits = [{ name = \"pool\", limit = 9, per = \"1m\" }]\nmethod_costs = { POST = 3 }\ncost_from = \"x-cost\"",
        )
        .table(
            r#"[plans.p]
            limits = [{ name = "half", limit = 9, per = "1m", enforce = "50%" }]
            per_key = [{ name = "key", limit = 9, per = "1m" }]
            candidate = [{ name = "half", limit = 9, per = "1m" }]
            [accounts.one]
            anchor_day = 15
            [store]
            kind = "redis""#,
        )
        .key("k", "one", "p")
        .text();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.toml");
    std::fs::write(&file, &config).unwrap();
    assert_eq!(run("check", &config, &[]).code, 0);
    let output = crate::support::tollgate()
        .args(["explain", "--method", "POST", "--path", "/x", "--key", "k", "-c"])
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    for line in [
        "route    all (/*), cost 3",
        "         settled at what x-cost of the answer says",
        "         its months begin on day 15",
        "limit    half: 9 in any 1 min (enforced for 50 % of the callers",
        "limit    key: 9 in any 1 min, for this key alone",
        "         key tollgate:{acct.one}:key.key_1:key",
        "limit    candidate/half: 9 in any 1 min (a candidate: only watches)",
        "limit    pool: 9 in any 1 min, for everybody on the route together",
        "         key tollgate:{pool.all}:pool:pool",
    ] {
        assert!(said.contains(line), "{line:?} in\n{said}");
    }
}
