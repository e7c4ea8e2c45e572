//! Charges that are put right behind the answer: what a request did cost, and answers that cost nothing.

use std::io::Write as _;
use std::time::Duration;

use crate::support::backend::{After, response};
use crate::support::{
    Answer, Backend, Config, Connection, Gateway, Request, Store, eventually, for_every_store,
};

/// What a settled charge may take to arrive in the store.
const SETTLED: Duration = Duration::from_secs(2);

/// Every algorithm that counts units, a hundred each.
const ALL: &str = r#"{ name = "window", limit = 100, per = "1h" },
    { name = "large", limit = 20000, per = "1h" },
    { name = "bucket", limit = 1, per = "1h", algorithm = "token_bucket", burst = 100 },
    { name = "month", limit = 100, per = "month", algorithm = "quota", zone = "UTC" }"#;

/// Used units of each of them in an answer.
fn used(answer: &Answer) -> [i64; 4] {
    let left = ["window", "large", "bucket", "month"].map(|limit| answer.remaining(limit).cast_signed());
    [100 - left[0], 20_000 - left[1], 100 - left[2], 100 - left[3]]
}

/// An upstream that answers with the status and the cost that its path names: `/200/7`, `/500/-`.
fn named_by_the_path() -> Backend {
    Backend::answering(|request| {
        let mut words = request.target().trim_start_matches('/').split('/');
        let (status, cost) = (words.next().unwrap_or("200"), words.next().unwrap_or("-"));
        let fields = if cost == "-" { vec![] } else { vec![("X-Request-Cost", cost)] };
        response(&format!("{status} Whatever"), &fields, b"ok")
    })
}

fn gateway(backend: &Backend, route: &str, store: &Store) -> Gateway {
    let config = Config::bare(backend.address())
        .route("all", "/*", route)
        .plan("all", ALL)
        .key_series("k", 12, "all")
        .store(store);
    Gateway::start(&config)
}

/// Calls `target` once, and waits until the next call finds `expected` units used: by the first, and its own `cost`.
#[track_caller]
fn settles(gateway: &Gateway, key: &str, target: &str, expected: i64, cost: i64) {
    let first = gateway.get(target).key(key).send();
    assert_eq!(used(&first), [cost; 4], "the answer tells how things stood when it was admitted");
    assert!(first.header("x-request-cost").is_none(), "the client does not see what it did cost");
    let mut looks = 0;
    eventually("the charge to be settled", SETTLED, || {
        looks += 1;
        let found = used(&gateway.get("/200/-").key(key).send().expect(200));
        (found == [expected + looks * cost; 4]).then_some(())
    });
}

for_every_store! {
    fn a_charge_is_settled_at_what_the_answer_says(store) {
        let backend = named_by_the_path();
        let gateway = gateway(&backend, "cost = 5\ncost_from = \"x-request-cost\"", store);
        // Less, more, nothing, the same; no cost, and texts that are none.
        for (caller, (named, expected)) in
            [("2", 2), ("40", 40), ("0", 0), ("5", 5), ("-", 5), ("many", 5), ("1.5", 5), ("%2D1", 5)].into_iter().enumerate()
        {
            settles(&gateway, &format!("k-{caller}"), &format!("/200/{named}"), expected, 5);
        }
        let settlements = |kind| gateway.metric("tollgate_settlements_total", &[("plan", "all"), ("route", "all"), ("kind", kind)]);
        let kinds = ["refund", "surcharge", "unclear"].map(|kind| settlements(kind).to_string());
        assert_eq!(kinds, ["2", "1", "3"]);
        assert!(gateway.metric("tollgate_store_messages_lost_total", &[]) < 1.0);
    }

    fn more_than_the_limit_is_a_debt_and_no_overflow(store) {
        // A cost that the upstream names must neither pass for nothing nor lock anybody out for ever, nor break the numbers.
        let backend = named_by_the_path();
        let route = "cost_from = \"x-request-cost\"";
        let config = Config::bare(backend.address())
            .route("all", "/*", route)
            .plan("window", r#"{ name = "window", limit = 10, per = "1s" }"#)
            .plan("large", r#"{ name = "window", limit = 20000, per = "1s" }"#)
            .plan("bucket", r#"{ name = "window", limit = 100, per = "1s", algorithm = "token_bucket", burst = 10 }"#)
            .key("window", "a", "window")
            .key("large", "b", "large")
            .key("bucket", "c", "bucket")
            .store(store);
        let gateway = Gateway::start(&config);
        for (key, cost) in [("window", "999999999999999"), ("large", "999999999999999"), ("bucket", "60")] {
            gateway.get(&format!("/200/{cost}")).key(key).send().expect(200);
            let refusal = eventually("the debt", SETTLED, || {
                let answer = gateway.get("/200/1").key(key).send();
                (answer.status == 429).then_some(answer)
            });
            assert_eq!(refusal.remaining("window"), 0, "{key}");
            // Buckets may be late by a sixtieth of the window.
            assert!(refusal.retry_after().is_some_and(|wait| wait <= 2), "{key}");
            eventually("the debt to be worked off", Duration::from_secs(5), || {
                (gateway.get("/200/1").key(key).send().status == 200).then_some(())
            });
        }
    }

    fn server_errors_cost_nothing_where_the_route_says_so(store) {
        // Half of the field bills a customer for the provider's own 500.
        let backend = named_by_the_path();
        let gateway = gateway(&backend, "cost = 5\ncharge_when = \"not_5xx\"\nrefund_on = [404, 409]", store);
        for (caller, (status, expected)) in
            [("500", 0), ("503", 0), ("404", 0), ("409", 0), ("400", 5), ("200", 5), ("301", 5)].into_iter().enumerate()
        {
            settles(&gateway, &format!("k-{caller}"), &format!("/{status}/-"), expected, 5);
        }
    }

    fn a_backend_that_is_away_costs_nothing_where_the_route_says_so(store) {
        let refusing = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = refusing.local_addr().unwrap();
        drop(refusing);
        let config = Config::bare(address)
            .route("free", "/free", "charge_when = \"not_5xx\"")
            .route("charged", "/charged", "")
            .plan("all", ALL)
            .key("k", "one", "all")
            .store(store);
        let gateway = Gateway::start(&config);
        for _ in 0..10 {
            gateway.get("/free").key("k").send().expect(502);
        }
        eventually("the charges to come back", SETTLED, || {
            (used(&gateway.get("/free").key("k").send().expect(502)) == [1; 4]).then_some(())
        });
        gateway.get("/charged").key("k").send().expect(502);
        eventually("the free ones to come back", SETTLED, || {
            (used(&gateway.get("/free").key("k").send().expect(502)) == [2; 4]).then_some(())
        });
    }

    fn a_method_may_cost_more(store) {
        let backend = Backend::ok();
        let gateway = gateway(&backend, "cost = 2\nmethod_costs = { POST = 7, GET = 3 }", store);
        let mut expected = 0;
        for (method, cost) in [("GET", 3), ("HEAD", 3), ("POST", 7), ("DELETE", 2)] {
            expected += cost;
            assert_eq!(used(&gateway.call(method, "/200/-").key("k-0").send().expect(200)), [expected; 4]);
        }
    }

    fn a_client_that_leaves_has_used_what_was_reserved(store) {
        // Else leaving a moment before the answer would be free, however much it made the backend work.
        let backend = Backend::with(|request, stream| {
            if request.target() == "/slow" {
                std::thread::sleep(Duration::from_millis(700));
            }
            stream.write_all(&response("200 OK", &[("X-Request-Cost", "0")], b"ok"))?;
            Ok(After::Keep)
        });
        let gateway = gateway(&backend, "cost = 5\ncost_from = \"x-request-cost\"", store);
        let mut leaving: Connection = gateway.raw(&Request::get("/slow").key("k-0").to_bytes());
        eventually("the upstream to be called", Duration::from_secs(5), || (backend.count() == 1).then_some(()));
        leaving.finish_sending();
        drop(leaving);
        assert_eq!(gateway.access_log(1)[0]["status"], 499, "the gateway has seen the client leave");
        assert_eq!(used(&gateway.get("/quick").key("k-0").send().expect(200)), [10; 4]);
    }

    fn the_log_says_what_was_taken_and_what_it_did_cost(store) {
        let backend = named_by_the_path();
        let gateway = gateway(&backend, "cost = 5\ncost_from = \"x-request-cost\"", store);
        gateway.get("/200/2").key("k-0").send().expect(200);
        gateway.get("/200/-").key("k-0").send().expect(200);
        let line = |path: &str| {
            eventually("the log line", Duration::from_secs(5), || {
                gateway.access_log(2).into_iter().find(|line| line["path"] == path)
            })
        };
        let (settled, plain) = (line("/200/2"), line("/200/-"));
        assert_eq!((&settled["cost"], &settled["spent"]), (&5.into(), &2.into()));
        assert_eq!((&plain["cost"], plain.get("spent")), (&5.into(), None));
        let at = |line: &serde_json::Value| line["decided_at"].as_u64().unwrap();
        assert!(at(&settled) < at(&plain));
    }
}

#[test]
fn months_begin_on_the_accounts_own_day() {
    let backend = Backend::ok();
    let config = Config::open(&backend)
        .plan("q", r#"{ name = "month", limit = 100, per = "month", algorithm = "quota", zone = "UTC" }"#)
        .key("k-one", "one", "q")
        .key("k-two", "two", "q")
        .key("k-first", "first", "q")
        .table("[accounts.one]\nanchor_day = 15\n[accounts.two]\nanchor_day = 16");
    let gateway = Gateway::start(&config);
    let ends = |key| gateway.get("/x").key(key).send().expect(200).rate_limit("month", "t").unwrap();
    let (one, two, first) = (ends("k-one"), ends("k-two"), ends("k-first"));
    // A day apart, or a month less a day when the 15th has just begun; and never with the first.
    let day = 86_400;
    let apart = two.abs_diff(one);
    assert!(apart.abs_diff(day) <= 2 || (27 * day - 2..=30 * day + 2).contains(&apart), "{one} {two}");
    assert!(first.abs_diff(one) > day, "{one} {first}");
}
