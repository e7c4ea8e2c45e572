//! Redis absent, refusing, frozen: no call hangs, none answers 500, and the configured policy rules.

use std::thread;
use std::time::{Duration, Instant};

use crate::support::load::{Sample, only, under_load};
use crate::support::{Answer, Backend, Config, Gateway, Redis, Request, eventually};

const POLICIES: [&str; 3] = ["allow", "deny", "local"];

/// The longest any call may take with a budget of 20 ms: the rest is what a busy machine of two cores adds.
const LONGEST: Duration = Duration::from_millis(250);

/// What half of the calls must stay under.
const MEDIAN: Duration = Duration::from_millis(60);

fn gateway(backend: &Backend, redis: &Redis, on_failure: &str) -> Gateway {
    Gateway::start(&Config::shared(backend).table(&redis.tables(on_failure, "20ms")))
}

/// Twenty calls, and what they must be while Redis cannot answer.
#[track_caller]
fn follows_the_policy(gateway: &Gateway, policy: &str) {
    let mut connection = gateway.connect();
    let request = Request::get("/x").key("k-free-2");
    let answers: Vec<Answer> = (0..20).map(|_| request.on(&mut connection)).collect();
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    let wanted = match policy {
        "allow" => vec![200; 20],
        "deny" => vec![503; 20],
        _ => [vec![200; 5], vec![429; 15]].concat(),
    };
    assert_eq!(statuses, wanted, "{policy}");
    for answer in &answers {
        if answer.status >= 400 {
            assert!(answer.retry_after().is_some_and(|seconds| seconds >= 1), "{:#?}", answer.head);
        }
        // ACC-11: -1 as the mark of an outage. Absent, or a number that a limit can have.
        if let Some(remaining) = answer.rate_limit("window", "r") {
            assert!(remaining <= 5, "{:#?}", answer.head);
        }
    }
}

#[test]
fn a_refusing_redis_is_answered_by_policy() {
    // OUT-1: with the store unreachable the limiter failed the call, although "fault tolerant" was on.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    let gateways = POLICIES.map(|policy| gateway(&backend, &redis, policy));
    for gateway in &gateways {
        gateway.get("/x").key("k-pro-1").send().expect(200);
    }
    redis.kill();
    for (gateway, policy) in gateways.iter().zip(POLICIES) {
        follows_the_policy(gateway, policy);
        gateway.admin("/livez").expect(200);
    }
    let source =
        |gateway: &Gateway, source| gateway.metric("tollgate_decisions_total", &[("source", source)]);
    assert!(source(&gateways[0], "none") >= 20.0);
    assert!(source(&gateways[2], "local") >= 20.0);
}

#[test]
fn a_route_or_a_plan_may_choose_its_own_policy() {
    // One switch for everything makes the payment route as open as the search.
    let backend = Backend::ok();
    let config = Config::open(&backend)
        .route("pay", "/pay", "on_failure = \"deny\"")
        .with_shared_callers()
        .table("[plans.careful]\non_failure = \"deny\"\nlimits = [{ name = \"window\", limit = 5, per = \"10s\" }]")
        .key("k-careful", "careful", "careful")
        .table(&Redis::absent().tables("allow", "20ms"));
    let gateway = Gateway::start(&config);
    gateway.get("/x").key("k-free-1").send().expect(200);
    gateway.get("/pay").key("k-free-1").send().expect(503);
    gateway.get("/x").key("k-careful").send().expect(503);
}

#[test]
fn a_frozen_redis_costs_no_more_than_the_budget() {
    // OUT-2: fail-open was on, yet every call first waited out the client's timeout of 1 to 60 s.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateways = POLICIES.map(|policy| gateway(&backend, &redis, policy));
    for gateway in &gateways {
        gateway.get("/x").key("k-pro-1").send().expect(200);
    }
    redis.stop();
    thread::scope(|scope| {
        for (gateway, policy) in gateways.iter().zip(POLICIES) {
            scope.spawn(move || {
                let request = Request::get("/x").key("k-pro-1");
                let (samples, ()) =
                    under_load(gateway.address(), 1, Duration::from_millis(30), &request, || {
                        thread::sleep(Duration::from_secs(3));
                    });
                only(&samples, if policy == "deny" { &[503] } else { &[200, 429] });
                answered_in_time(&samples, policy);
            });
        }
    });
    for (gateway, policy) in gateways.iter().zip(POLICIES) {
        follows_the_policy(gateway, policy);
        gateway.admin("/livez").expect(200);
    }
}

#[test]
fn freezing_redis_under_load_hangs_no_call() {
    // Must show: what is in flight at the moment of the freeze is the hard part, and the queue behind it.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = gateway(&backend, &redis, "allow");
    let request = Request::get("/x").key("k-pro-1");
    let (samples, (frozen, thawed)) =
        under_load(gateway.address(), 16, Duration::from_millis(10), &request, || {
            thread::sleep(Duration::from_millis(500));
            redis.stop();
            let frozen = Instant::now();
            thread::sleep(Duration::from_secs(2));
            let thawed = Instant::now();
            redis.cont();
            thread::sleep(Duration::from_millis(500));
            (frozen, thawed)
        });
    only(&samples, &[200, 429]);
    let during: Vec<Sample> =
        samples.iter().filter(|sample| sample.received >= frozen && sample.sent <= thawed).copied().collect();
    answered_in_time(&during, "allow");
    eventually("enforcement to be back", Duration::from_secs(10), || {
        (gateway.get("/x").key("k-free-1").send().status == 429).then_some(())
    });
}

#[test]
fn a_gateway_that_starts_without_redis_finds_it_later() {
    // OUT-10: it crash-looped, or served unprotected for ever.
    let backend = Backend::ok();
    let mut redis = Redis::absent();
    let gateways = POLICIES.map(|policy| gateway(&backend, &redis, policy));
    for (gateway, policy) in gateways.iter().zip(POLICIES) {
        gateway.admin("/livez").expect(200);
        follows_the_policy(gateway, policy);
    }
    redis.launch();
    for (gateway, policy) in gateways.iter().zip(POLICIES) {
        redis.cmd(&["FLUSHALL"]);
        let mut passed = 0;
        eventually(&format!("enforcement by the store ({policy})"), Duration::from_secs(15), || {
            let answer = gateway.get("/x").key("k-free-1").send();
            let by_store = gateway.logged(&answer)["source"] == "store";
            passed += u32::from(by_store && answer.status == 200);
            (by_store && answer.status == 429).then_some(())
        });
        assert!(passed <= 5, "{policy}: the store let {passed} pass");
    }
}

/// Every call within [`LONGEST`], half of them within [`MEDIAN`].
#[track_caller]
fn answered_in_time(samples: &[Sample], policy: &str) {
    let mut durations: Vec<Duration> = samples.iter().map(Sample::duration).collect();
    durations.sort();
    assert!(durations.len() >= 20, "{policy}: only {} calls", durations.len());
    let (median, longest) = (durations[durations.len() / 2], durations[durations.len() - 1]);
    assert!(median < MEDIAN, "{policy}: half of the calls took longer than {median:?}");
    assert!(longest < LONGEST, "{policy}: one call took {longest:?}");
}
