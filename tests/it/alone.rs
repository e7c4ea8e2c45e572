//! While Redis is away: each gateway counts its share, callers go on from where they stood, and what they use is written back.

use std::time::Duration;

use crate::support::{Backend, Config, Gateway, Redis, Request, eventually};

/// How soon Redis decides again when it is back, on a busy machine.
const BACK_WITHIN: Duration = Duration::from_secs(10);

/// Long enough for a Redis on a busy machine: what these tests count is exact only while no answer is late.
const BUDGET: &str = "100ms";

/// Gateways on one Redis that count equal shares while it is away, each of which has heard of all.
fn fleet(backend: &Backend, redis: &Redis, limits: &str, count: usize) -> Vec<Gateway> {
    let tables = redis.tables("local", BUDGET).replace("\"100%\"", "\"equal\"");
    let config = Config::open(backend).plan("p", limits).key_series("k", 20, "p").table(&tables);
    let gateways: Vec<Gateway> = (0..count).map(|_| Gateway::start(&config)).collect();
    for gateway in &gateways {
        eventually("all gateways to be heard of", BACK_WITHIN, || {
            (shown(gateway, "tollgate_store_gateways", &[]) == count.to_string()).then_some(())
        });
    }
    gateways
}

/// What `/metrics` shows, as it is written there.
#[track_caller]
fn shown(gateway: &Gateway, name: &str, labels: &[(&str, &str)]) -> String {
    gateway.metric(name, labels).to_string()
}

/// So many calls of this caller; how many pass.
#[track_caller]
fn passes(gateway: &Gateway, caller: usize, calls: usize) -> usize {
    let mut connection = gateway.connect();
    let request = Request::get("/x").key(&format!("k-{caller}"));
    let answers = (0..calls).map(|_| request.on(&mut connection).status);
    answers
        .inspect(|status| assert!([200, 429].contains(status), "{status}"))
        .filter(|status| *status == 200)
        .count()
}

/// Waits until the breaker says so.
#[track_caller]
fn breaker(gateway: &Gateway, state: &str) {
    eventually("the breaker to change", BACK_WITHIN, || {
        (shown(gateway, "tollgate_store_breaker", &[]) == state).then_some(())
    });
}

const MINUTES: &str = r#"{ name = "window", limit = 10, per = "10m" }"#;

#[test]
fn gateways_share_a_limit_while_redis_is_away() {
    // OUT-7: during an outage each instance counted alone, and ten of them admitted ten times the limit.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    let gateways = fleet(&backend, &redis, MINUTES, 2);
    redis.kill();
    let passed: Vec<usize> = gateways.iter().map(|gateway| passes(gateway, 0, 20)).collect();
    assert_eq!(passed, [5, 5]);
    assert_eq!(shown(&gateways[0], "tollgate_decisions_total", &[("source", "local")]), "20");
    // A client that has counted to five must not think that ten are five.
    let refusal = gateways[0].get("/x").key("k-0").send().expect(429).text();
    assert!(refusal.contains("this gateway counts its share of the limit by itself"), "{refusal}");
}

#[test]
fn a_caller_goes_on_with_its_share_of_what_was_left() {
    // Counting from nothing, everybody got a second allowance by the failure itself.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    let gateways = fleet(&backend, &redis, MINUTES, 2);
    // Both have heard that 4 are left of 10.
    assert_eq!(passes(&gateways[0], 0, 5) + passes(&gateways[1], 0, 1) + passes(&gateways[0], 0, 1), 7);
    // And that nothing is left of another's.
    for gateway in [0, 1, 0, 1] {
        passes(&gateways[gateway], 1, 6);
    }
    redis.kill();
    let passed = |caller| gateways.iter().map(|gateway| passes(gateway, caller, 10)).collect::<Vec<_>>();
    // The first gateway has heard of 3 that are left, the second of 4.
    assert_eq!(passed(0), [1, 2]);
    assert_eq!(passed(1), [0, 0]);
    // Nobody has heard of this one.
    assert_eq!(passed(2), [5, 5]);
}

#[test]
fn what_was_used_while_redis_was_away_is_written_back() {
    // Else a caller has its limit, then its share of the limit, and then the rest of its limit.
    let backend = Backend::ok();
    let redis = Redis::start();
    let limits = r#"{ name = "window", limit = 100, per = "10m" }, { name = "day", limit = 200, per = "day", algorithm = "quota" },
        { name = "slow", limit = 50, per = "10m", algorithm = "token_bucket", burst = 50 }"#;
    let gateways = fleet(&backend, &redis, limits, 1);
    for caller in 0..3 {
        assert_eq!(passes(&gateways[0], caller, 10), 10);
    }
    redis.stop();
    passes(&gateways[0], 9, 10);
    breaker(&gateways[0], "2");
    for caller in 0..3 {
        assert_eq!(passes(&gateways[0], caller, 15), 15);
    }
    redis.cont();
    breaker(&gateways[0], "0");
    // Two come by themselves, and the third does not.
    for caller in 0..2 {
        let answer = gateways[0].get("/x").key(&format!("k-{caller}")).send().expect(200);
        let left = ["window", "day", "slow"].map(|limit| answer.remaining(limit));
        assert_eq!(left, [74, 174, 24], "10 by Redis, 15 alone, and this one");
        assert_eq!(gateways[0].logged(&answer)["source"], "store");
    }
    eventually("the third to be written back", BACK_WITHIN, || {
        (shown(&gateways[0], "tollgate_store_debtors", &[]) == "0").then_some(())
    });
    assert_eq!(gateways[0].get("/x").key("k-2").send().expect(200).remaining("window"), 74);
    assert_eq!(shown(&gateways[0], "tollgate_store_messages_lost_total", &[]), "0");
}

#[test]
fn the_worst_case_is_what_was_used_and_one_share_for_each_gateway() {
    // The promise of docs/guides/when-redis-fails.md: over a whole outage a caller has at most what it had used of its limit, and
    // one share of the limit for each gateway. Here Redis forgets everything, which is the worst it can do.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    let gateways = fleet(&backend, &redis, MINUTES, 3);
    let before = passes(&gateways[0], 0, 10);
    redis.kill();
    let during: usize = gateways.iter().map(|gateway| passes(gateway, 0, 10)).sum();
    assert_eq!(before, 10);
    assert_eq!(during, 6, "the gateway that has heard of the use lets nothing pass, the others 3 each");
    redis.launch();
    for gateway in &gateways {
        eventually("Redis to decide", BACK_WITHIN, || {
            let answer = gateway.get("/x").key("k-19").send();
            (gateway.logged(&answer)["source"] == "store").then_some(())
        });
    }
    for gateway in &gateways {
        eventually("what was used to be written back", BACK_WITHIN, || {
            (shown(gateway, "tollgate_store_debtors", &[]) == "0").then_some(())
        });
    }
    for gateway in &gateways {
        assert_eq!(shown(gateway, "tollgate_store_messages_lost_total", &[]), "0");
    }
    // What was used meanwhile still counts.
    let after: usize = gateways.iter().map(|gateway| passes(gateway, 0, 10)).sum();
    assert!(during + after <= 10, "{during} and then {after}");
}

#[test]
fn calls_at_the_same_time_do_not_overtake_what_is_owed() {
    // One of them took the debt and waited until it was paid; the others asked Redis meanwhile, which knew of nothing.
    let backend = Backend::ok();
    let redis = Redis::start();
    let config = Config::open(&backend).plan("p", MINUTES).key_series("k", 20, "p");
    let gateway = &Gateway::start(&config.server("workers = 4").table(&redis.tables("local", BUDGET)));
    eventually("Redis to decide", BACK_WITHIN, || {
        let answer = gateway.get("/x").key("k-17").send();
        (gateway.logged(&answer)["source"] == "store").then_some(())
    });
    assert_eq!(passes(gateway, 0, 1), 1);
    freeze(gateway, &redis, 18);
    assert_eq!(passes(gateway, 0, 10), 9);
    redis.cont();
    eventually("Redis to decide", BACK_WITHIN, || {
        let passed: usize = std::thread::scope(|scope| {
            let calling: Vec<_> = (0..8).map(|_| scope.spawn(|| passes(gateway, 0, 3))).collect();
            calling.into_iter().map(|passed| passed.join().unwrap()).sum()
        });
        assert_eq!(passed, 0, "more than the limit passed");
        let refusal = gateway.get("/x").key("k-0").send();
        (gateway.logged(&refusal)["source"] == "store").then_some(())
    });
}

#[test]
fn a_refund_of_what_was_counted_alone_reaches_redis_as_less() {
    // A charge that was made in memory and settled there must not be written back in full.
    let backend = Backend::ok();
    let redis = Redis::start();
    let tables = redis.tables("local", BUDGET);
    let config = Config::open(&backend)
        .plan("p", r#"{ name = "window", limit = 100, per = "10m" }"#)
        .key("k", "one", "p")
        .route("dear", "/dear", "cost = 10\nrefund_on = [200]")
        .table(&tables);
    let gateway = Gateway::start(&config);
    gateway.get("/x").key("k").send().expect(200);
    redis.stop();
    for _ in 0..10 {
        gateway.get("/dear").key("k").send().expect(200);
    }
    breaker(&gateway, "2");
    gateway.get("/x").key("k").send().expect(200);
    redis.cont();
    breaker(&gateway, "0");
    assert_eq!(gateway.get("/x").key("k").send().expect(200).remaining("window"), 97);
}

/// Freezes Redis and waits until nobody asks it.
fn freeze(gateway: &Gateway, redis: &Redis, by: usize) {
    redis.stop();
    passes(gateway, by, 10);
    breaker(gateway, "2");
}

/// Wakes Redis and waits until it decides, and has heard of all that was used.
fn wake(gateway: &Gateway, redis: &Redis) {
    redis.cont();
    breaker(gateway, "0");
    eventually("what was used to be written back", BACK_WITHIN, || {
        (shown(gateway, "tollgate_store_debtors", &[]) == "0").then_some(())
    });
}

#[test]
fn a_redis_that_is_away_twice_does_not_give_a_share_twice() {
    // What was written back was forgotten, and the caller began anew from how it had stood before the first time: each time
    // that Redis was away it had its share again.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateways = fleet(&backend, &redis, MINUTES, 1);
    assert_eq!(passes(&gateways[0], 0, 1), 1);
    let alone: Vec<usize> = [18, 19]
        .into_iter()
        .map(|other| {
            freeze(&gateways[0], &redis, other);
            let passed = passes(&gateways[0], 0, 10);
            wake(&gateways[0], &redis);
            passed
        })
        .collect();
    assert_eq!(alone, [9, 0]);
}

#[test]
fn what_was_kept_of_an_earlier_time_counts_no_more_when_redis_has_decided_since() {
    // Who was refused while Redis was away owed nothing, so nothing was written back, and nothing forgotten: the next time that
    // Redis was away it went on from where it had stood the first time.
    let backend = Backend::ok();
    let redis = Redis::start();
    let tables = redis.tables("local", BUDGET);
    let config = Config::open(&backend)
        .plan("p", MINUTES)
        .key_series("k", 20, "p")
        .route("dear", "/dear", "cost = 10")
        .table(&tables);
    let gateway = Gateway::start(&config);
    eventually("Redis to decide", BACK_WITHIN, || {
        let answer = gateway.get("/x").key("k-17").send();
        (gateway.logged(&answer)["source"] == "store").then_some(())
    });
    assert_eq!(passes(&gateway, 0, 1), 1);
    freeze(&gateway, &redis, 18);
    gateway.get("/dear").key("k-0").send().expect(429);
    wake(&gateway, &redis);
    assert_eq!(passes(&gateway, 0, 10), 9);
    freeze(&gateway, &redis, 19);
    assert_eq!(passes(&gateway, 0, 10), 0);
}

#[test]
fn what_has_left_its_window_is_not_written_back() {
    // Of a caller without an entry of its own everything was written back that it had used in the whole outage: so somebody
    // who had used nothing for a whole window was refused by the Redis that was back.
    let backend = Backend::ok();
    let redis = Redis::start();
    let limits = r#"{ name = "window", limit = 5, per = "2s" }"#;
    let tables = redis.tables("local", BUDGET);
    let config = Config::open(&backend).plan("p", limits).key_series("k", 20, "p").table(&tables);
    let gateway = Gateway::start(&config.table("[store.memory]\nmax_callers = 1\n"));
    eventually("Redis to decide", BACK_WITHIN, || {
        let answer = gateway.get("/x").key("k-19").send();
        (gateway.logged(&answer)["source"] == "store").then_some(())
    });
    freeze(&gateway, &redis, 18);
    eventually("the shared entry to let it pass", BACK_WITHIN, || (passes(&gateway, 0, 5) > 0).then_some(()));
    std::thread::sleep(Duration::from_secs(3));
    redis.cont();
    breaker(&gateway, "0");
    assert_eq!(gateway.get("/x").key("k-0").send().expect(200).remaining("window"), 4);
}
