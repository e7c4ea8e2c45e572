//! Exact counts: windows, buckets, several limits at once, and amounts at the edge.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::support::load::{at_once, count, only, sample};
use crate::support::{
    Backend, Config, Connection, Fleet, Gateway, Redis, Request, Store, fake_clock, for_every_fleet,
    for_every_store, second_of_day, sleep_until,
};

/// Connections per gateway in the tests about races.
const CONNECTIONS: usize = 64;

/// Runs of a test about races; each has an account of its own, so that none waits for the window of another.
const RUNS: usize = 20;

const HUNDRED: &str = r#"{ name = "window", limit = 100, per = "10s" }"#;

/// Every run: all connections call at once, and exactly 100 calls pass.
#[track_caller]
fn exactly_a_hundred_pass(gateways: &[&Gateway]) {
    let lanes: Vec<&Gateway> =
        gateways.iter().flat_map(|gateway| std::iter::repeat_n(*gateway, CONNECTIONS)).collect();
    let start = Barrier::new(lanes.len());
    let passes: Vec<AtomicUsize> = (0..RUNS).map(|_| AtomicUsize::new(0)).collect();
    let refusals: Vec<AtomicUsize> = (0..RUNS).map(|_| AtomicUsize::new(0)).collect();
    thread::scope(|scope| {
        for gateway in &lanes {
            let (start, passes, refusals) = (&start, &passes, &refusals);
            scope.spawn(move || {
                let mut connection = gateway.connect();
                for run in 0..RUNS {
                    let request = Request::get("/x").key(&format!("k-{run}"));
                    start.wait();
                    let began = Instant::now();
                    for _ in 0..3 {
                        let counter = match request.on(&mut connection).status {
                            200 => &passes[run],
                            429 => &refusals[run],
                            status => panic!("status {status}"),
                        };
                        counter.fetch_add(1, Ordering::Relaxed);
                    }
                    let took = began.elapsed();
                    assert!(took < Duration::from_secs(9), "a run outlasted its window: {took:?}");
                }
            });
        }
    });
    for run in 0..RUNS {
        assert_eq!(passes[run].load(Ordering::Relaxed), 100, "passes of run {run}");
        assert_eq!(refusals[run].load(Ordering::Relaxed), lanes.len() * 3 - 100, "refusals of run {run}");
    }
    // The runs show something only when the gateways really competed.
    for gateway in gateways {
        let allowed = gateway.metric("tollgate_decisions_total", &[("outcome", "allowed")]);
        assert!(allowed >= 1.0, "one gateway admitted nothing in {RUNS} runs");
    }
}

#[test]
fn two_gateways_on_one_redis_admit_exactly_the_limit() {
    // Must show: two processes that read, decide and write back share the last units between them.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let config = Config::open(&backend).plan("race", HUNDRED).key_series("k", RUNS, "race").store(&redis);
    let (one, two) = (Gateway::start(&config), Gateway::start(&config));
    exactly_a_hundred_pass(&[&one, &two]);
}

#[test]
fn four_workers_on_the_memory_store_admit_exactly_the_limit() {
    // Must show: a store that is one per worker, or that is read and written in two steps, admits more.
    let backend = Backend::ok();
    let config =
        Config::open(&backend).server("workers = 4").plan("race", HUNDRED).key_series("k", RUNS, "race");
    let gateway = Gateway::start(&config);
    exactly_a_hundred_pass(&[&gateway]);
}

for_every_store! {
    fn the_101st_is_told_exactly_when(store) {
        // Must show: a Retry-After that is rounded down invites a call that is refused again; one that is late wastes a second.
        let backend = Backend::ok();
        let config = Config::open(&backend)
            .plan("race", r#"{ name = "window", limit = 100, per = "3s" }"#)
            .key_series("k", 5, "race")
            .store(store);
        let gateway = Gateway::start(&config);
        let mut connection = gateway.connect();
        for attempt in 0..5 {
            let request = Request::get("/x").key(&format!("k-{attempt}"));
            let began = Instant::now();
            for _ in 0..100 {
                request.on(&mut connection).expect(200);
            }
            let refusal = request.on(&mut connection).expect(429);
            let refused = Instant::now();
            // The hundred must be spent in well under a second: only then is "one second earlier" certainly early.
            if refused - began > Duration::from_millis(700) {
                continue;
            }
            let wait = Duration::from_secs(refusal.retry_after().expect("a refusal says when to come back"));
            assert_eq!(wait, Duration::from_secs(3));
            sleep_until(refused + wait - Duration::from_secs(1));
            request.on(&mut connection).expect(429);
            sleep_until(refused + wait);
            request.on(&mut connection).expect(200);
            return;
        }
        panic!("this machine never sent 100 calls within 0.7 s");
    }

    fn a_call_that_one_limit_refuses_is_charged_to_none(store) {
        // ACC-5: limits checked one after the other let a burst that the second refuses eat the quota of the day.
        let backend = Backend::ok();
        let short = r#"{ name = "short", limit = 2, per = "2s" }"#;
        let long = r#"{ name = "long", limit = 10, per = "60s" }"#;
        let config = Config::open(&backend)
            .plan("short_first", &format!("{short}, {long}"))
            .plan("long_first", &format!("{long}, {short}"))
            .key("k-short-first", "one", "short_first")
            .key("k-long-first", "two", "long_first")
            .store(store);
        let gateway = Gateway::start(&config);
        for key in ["k-short-first", "k-long-first"] {
            let request = Request::get("/x").key(key);
            let mut connection = gateway.connect();
            let answers: Vec<_> = (0..20).map(|_| request.on(&mut connection)).collect();
            let refused = Instant::now();
            let passed = answers.iter().filter(|answer| answer.status == 200).count();
            assert_eq!(passed, 2, "{key}");
            let last = &answers[19];
            assert_eq!((last.status, last.remaining("short"), last.remaining("long")), (429, 0, 8), "{key}");
            sleep_until(refused + Duration::from_secs(last.retry_after().unwrap()));
            let next = request.on(&mut connection).expect(200);
            assert_eq!((next.remaining("short"), next.remaining("long")), (1, 7), "{key}");
        }
    }

    fn a_long_limit_that_refuses_leaves_the_short_one_alone(store) {
        // ACC-5, the other way round: the bucket is drained by calls that the window refuses.
        let backend = Backend::ok();
        let limits = r#"{ name = "bucket", limit = 1, per = "60s", algorithm = "token_bucket", burst = 10 },
            { name = "window", limit = 3, per = "60s" }"#;
        let gateway = Gateway::start(
            &Config::open(&backend).plan("both", limits).key("k", "one", "both").store(store),
        );
        let (passed, refusal) = gateway.exhaust("/x", "k");
        assert_eq!(passed, 3);
        assert_eq!((refusal.remaining("bucket"), refusal.remaining("window")), (7, 0));
        let again = gateway.get("/x").key("k").send().expect(429);
        assert_eq!((again.remaining("bucket"), again.remaining("window")), (7, 0));
    }

    fn a_window_is_not_aligned_to_the_clock(store) {
        // TIME-3: windows aligned to the wall clock let a full budget pass just before and just after the tick.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan("free", r#"{ name = "window", limit = 5, per = "4s" }"#)
                .key("k", "one", "free")
                .store(store),
        );
        let request = Request::get("/x").key("k");
        let mut connection = gateway.connect();
        let period = Duration::from_secs(4).as_millis();
        let phase = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() % period;
        let until_just_before_the_tick = (2 * period - 100 - phase) % period;
        thread::sleep(Duration::from_millis(until_just_before_the_tick.try_into().unwrap()));
        let before: Vec<_> = (0..5).map(|_| sample(&mut connection, &request)).collect();
        only(&before, &[200]);
        thread::sleep(Duration::from_millis(200));
        for _ in 0..5 {
            let refusal = request.on(&mut connection).expect(429);
            let wait = Duration::from_secs(refusal.retry_after().unwrap());
            // Never before the first of the five leaves the window.
            assert!(Instant::now() + wait >= before[0].sent + Duration::from_secs(4), "{wait:?}");
            assert!(wait <= Duration::from_secs(4), "{wait:?}");
        }
    }

    fn a_limit_of_one_opens_on_time_and_not_before(store) {
        // TIME-5: a fraction that is rounded down opens a limit of 1 early; rounded up, it never opens.
        let backend = Backend::ok();
        let config = Config::open(&backend)
            .plan("single", r#"{ name = "window", limit = 1, per = "2s" }"#)
            .key_series("k", 20, "single")
            .store(store);
        let gateway = Gateway::start(&config);
        thread::scope(|scope| {
            for number in 0..20_u32 {
                let gateway = &gateway;
                scope.spawn(move || {
                    // Each caller begins at another phase of the second.
                    thread::sleep(Duration::from_millis(50) * number);
                    single_opens_on_time(gateway, &format!("k-{number}"));
                });
            }
        });
    }

    fn calls_of_one_instant_count_one_by_one(store) {
        // ACC-1: a time stamp as the member of a sorted set makes one of all calls in the same tick.
        let backend = Backend::ok();
        let gateway = Gateway::start(&Config::shared(&backend).store(store));
        let request = Request::get("/x").key("k-free-1");
        let samples = at_once(&[gateway.address(); 50], 4, &request).concat();
        only(&samples, &[200, 429]);
        assert_eq!(count(&samples, 200), 5);
        assert_eq!(gateway.get("/x").key("k-free-1").send().expect(429).remaining("window"), 0);
        if let Some(redis) = store.redis() {
            let length = redis.number(&["STRLEN", "tollgate:{acct.one}:plan:window"]);
            assert!((1..=128).contains(&length), "{length} bytes for five admissions");
        }
    }

    fn parallel_calls_never_share_the_last_unit(store) {
        // ACC-2: read, judge, write back; a burst passes several times the limit.
        ten_of_three_hundred(&store.tables());
    }

    fn a_caller_that_hammers_recovers(store) {
        // ACC-4: refused calls that are charged keep an eager caller out for ever, and its state grows.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan("free", r#"{ name = "window", limit = 5, per = "2s" }"#)
                .key("k", "one", "free")
                .store(store),
        );
        let request = Request::get("/x").key("k");
        let mut connection = gateway.connect();
        let began = Instant::now();
        let mut samples = Vec::new();
        let mut longest = 0;
        for call in 0..60_u32 {
            sleep_until(began + Duration::from_millis(200) * call);
            samples.push(sample(&mut connection, &request));
            if let Some(redis) = store.redis() {
                longest = longest.max(redis.number(&["STRLEN", "tollgate:{acct.one}:plan:window"]));
            }
        }
        only(&samples, &[200, 429]);
        let passed = count(&samples, 200);
        // 5 in every 2 s of 12 s; fewer only as far as a busy machine sends late.
        assert!((25..=30).contains(&passed), "{passed} of 60 passed");
        never_more_in_any_window(&samples, 5, Duration::from_secs(2));
        assert!(longest <= 128, "{longest} bytes for five admissions");
    }

    fn routes_have_counters_of_their_own(store) {
        // ACC-7: a key that holds only the caller lets route A fill route B, and the first one fixes the expiry of both.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::bare(backend.address())
                .route("a", "/a", "")
                .route("b", "/b", "")
                .plan("free", "")
                .plan_on_route("free", "a", r#"{ name = "window", limit = 10, per = "60s" }"#)
                .plan_on_route("free", "b", r#"{ name = "window", limit = 5, per = "5s" }"#)
                .key("k", "one", "free")
                .store(store),
        );
        for _ in 0..6 {
            gateway.get("/a").key("k").send().expect(200);
        }
        for _ in 0..5 {
            gateway.get("/b").key("k").send().expect(200);
        }
        assert_eq!(gateway.get("/a").key("k").send().expect(200).remaining("window"), 3);
        gateway.get("/b").key("k").send().expect(429);
        if let Some(redis) = store.redis() {
            assert_eq!(
                redis.keys(),
                ["tollgate:{acct.one}:route.a:window", "tollgate:{acct.one}:route.b:window"]
            );
            let lifetime = |route: &str| redis.number(&["PTTL", &format!("tollgate:{{acct.one}}:route.{route}:window")]);
            assert!((5_001..=60_000 * 2).contains(&lifetime("a")), "{}", lifetime("a"));
            assert!((1..=5_000 * 2).contains(&lifetime("b")), "{}", lifetime("b"));
        }
    }

    fn a_costly_route_takes_its_cost(store) {
        // A cost that is checked but not charged, or charged as 1, sells the dear call at the price of the cheap one.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::bare(backend.address())
                .route("cheap", "/cheap", "")
                .route("dear", "/dear", "cost = 4")
                .plan("free", r#"{ name = "window", limit = 10, per = "60s" }"#)
                .key("k", "one", "free")
                .store(store),
        );
        assert_eq!(gateway.get("/dear").key("k").send().expect(200).remaining("window"), 6);
        assert_eq!(gateway.get("/dear").key("k").send().expect(200).remaining("window"), 2);
        gateway.get("/dear").key("k").send().expect(429);
        assert_eq!(gateway.get("/cheap").key("k").send().expect(200).remaining("window"), 1);
    }

    fn two_keys_of_an_account_share_its_budget(store) {
        // Counters belong to the account: an account with ten keys must not have ten budgets.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan("free", r#"{ name = "window", limit = 5, per = "60s" }"#)
                .key("k-1", "one", "free")
                .key("k-2", "one", "free")
                .store(store),
        );
        gateway.get("/x").key("k-1").send().expect(200);
        let (passed, _) = gateway.exhaust("/x", "k-2");
        assert_eq!(passed, 4);
        gateway.get("/x").key("k-1").send().expect(429);
    }

    fn remaining_is_never_negative(store) {
        // ACC-11: -1 as the silent mark of something else reached the client.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan("single", r#"{ name = "window", limit = 1, per = "10s" }"#)
                .key("k", "one", "single")
                .store(store),
        );
        let answers = [(); 3].map(|()| gateway.get("/x").key("k").send());
        assert_eq!(answers.each_ref().map(|answer| answer.status), [200, 429, 429]);
        assert_eq!(answers.each_ref().map(|answer| answer.remaining("window")), [0, 0, 0]);
    }

    fn a_wait_of_less_than_a_second_is_still_a_wait(store) {
        // NUM-1: a fraction of a second that leaves Lua as an integer is 0, and reads as "not refused".
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan("quick", r#"{ name = "window", limit = 2, per = "1s" }"#)
                .key("k", "one", "quick")
                .store(store),
        );
        let request = Request::get("/x").key("k");
        let mut connection = gateway.connect();
        let first = sample(&mut connection, &request);
        let second = sample(&mut connection, &request);
        only([&first, &second], &[200]);
        for step in 1..=9 {
            sleep_until(first.sent + Duration::from_millis(100) * step);
            let answer = request.on(&mut connection);
            if first.sent.elapsed() >= Duration::from_secs(1) {
                break;
            }
            assert_eq!((answer.status, answer.retry_after()), (429, Some(1)), "step {step}");
        }
    }

    fn big_round_numbers_stay_numbers(store) {
        // NUM-2: Lua prints 1e+08, and integer commands and clients fail on it.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan(
                    "huge",
                    r#"{ name = "window", limit = 100_000_000, per = "100000s" },
                       { name = "bucket", limit = 200_000_000, per = "100000s", algorithm = "token_bucket", burst = 300_000_000 },
                       { name = "quota", limit = 200_000_000, per = "month", algorithm = "quota" },
                       { name = "inflight", limit = 400_000_000, algorithm = "concurrency" }"#,
                )
                .key("k", "one", "huge")
                .store(store),
        );
        for used in 1..=3 {
            let answer = gateway.get("/x").key("k").send().expect(200);
            assert_eq!(answer.remaining("window"), 100_000_000 - used);
            assert_eq!(answer.remaining("quota"), 200_000_000 - used);
            // The slot of the call before may be on its way back still.
            assert!((400_000_000 - used..400_000_000).contains(&answer.remaining("inflight")), "{:?}", answer.head);
            // The bucket refills 2,000 units a second: it may have made up for what was taken, never more.
            assert!((300_000_000 - used..300_000_000).contains(&answer.remaining("bucket")), "{:?}", answer.head);
        }
    }

    fn a_limit_beyond_32_bits_is_not_cut(store) {
        // NUM-4: 4294967297 cut to 32 bits is a limit of 1.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan(
                    "wide",
                    r#"{ name = "window", limit = 4_294_967_297, per = "60s" },
                       { name = "wider", limit = 1_099_511_627_776, per = "60s" }"#,
                )
                .key("k", "one", "wide")
                .store(store),
        );
        for used in 1..=3 {
            let answer = gateway.get("/x").key("k").send().expect(200);
            assert_eq!(answer.remaining("wider"), (1 << 40) - used);
            assert_eq!(answer.remaining("window"), 4_294_967_297 - used);
            assert_eq!(answer.policy("window", "q"), Some(4_294_967_297));
        }
    }
}

#[test]
fn parallel_calls_never_share_the_last_unit_in_local_fallback() {
    // ACC-2 in an outage: the fallback is a limiter as well, and as exact for one process.
    ten_of_three_hundred(&Redis::absent().tables("local", "20ms"));
}

#[test]
fn fresh_connections_meet_one_limiter() {
    // ACC-3: a limiter made by the application factory exists once per worker.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend).server("workers = 4"));
    let statuses: Vec<u16> = (0..40).map(|_| gateway.get("/x").key("k-free-1").send().status).collect();
    assert_eq!(statuses.iter().filter(|&&status| status == 200).count(), 5, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|&&status| status == 429).count(), 35, "{statuses:?}");
}

#[test]
fn a_gateway_whose_clock_lags_refills_nothing() {
    // TIME-1: with the caller's clock in the script, one call stamped ten seconds early refills the bucket for all.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let config = Config::open(&backend)
        .plan(
            "bucket",
            r#"{ name = "bucket", limit = 2, per = "1s", algorithm = "token_bucket", burst = 4 }"#,
        )
        .key("k", "one", "bucket")
        .store(&redis);
    let on_time = Gateway::start(&config);
    let late = Gateway::start_with(&config.text(), &fake_clock("-10"));
    assert_lags_by_ten_seconds(&late, &on_time);

    let request = Request::get("/x").key("k");
    let (mut to_on_time, mut to_late) = (on_time.connect(), late.connect());
    let began = Instant::now();
    let mut passed = 0;
    let mut call = |connection: &mut Connection| {
        passed += u32::from(request.on(connection).status == 200);
    };
    for _ in 0..4 {
        call(&mut to_on_time);
    }
    call(&mut to_late);
    for _ in 0..4 {
        call(&mut to_on_time);
    }
    let earned = f64::from(2) * began.elapsed().as_secs_f64();
    assert!(f64::from(passed) <= 4.0 + earned, "{passed} passed, {earned} were earned");
    assert!(passed >= 4, "{passed} passed of a burst of 4");
}

#[test]
fn a_clock_that_lags_moves_no_window() {
    // TIME-1 for the window: stamps from two clocks ten seconds apart must not double what passes.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let config = Config::shared(&backend).store(&redis);
    let on_time = Gateway::start(&config);
    let late = Gateway::start_with(&config.text(), &fake_clock("-10"));
    let passed = (0..20)
        .map(|call| if call % 2 == 0 { &on_time } else { &late })
        .filter(|gateway| gateway.get("/x").key("k-free-1").send().status == 200)
        .count();
    assert_eq!(passed, 5);
}

/// Fails unless the wall clock of `late` really is behind: without this the test could pass with no fake clock at all.
#[track_caller]
fn assert_lags_by_ten_seconds(late: &Gateway, on_time: &Gateway) {
    let lag = (second_of_day(on_time) - second_of_day(late)).rem_euclid(86_400);
    assert!((8..=12).contains(&lag), "the second gateway lags by {lag} s, not by 10");
}

/// 300 calls over 50 connections on a limit of 10: exactly 10 pass.
#[track_caller]
fn ten_of_three_hundred(store_tables: &str) {
    let backend = Backend::ok();
    let config = Config::open(&backend)
        .plan("ten", r#"{ name = "window", limit = 10, per = "60s" }"#)
        .key("k", "one", "ten")
        .table(store_tables);
    let gateway = Gateway::start(&config);
    let samples = at_once(&[gateway.address(); 50], 6, &Request::get("/x").key("k")).concat();
    only(&samples, &[200, 429]);
    assert_eq!(count(&samples, 200), 10);
}

/// Calls at 0, 1.0, 1.9 and 2.1 s on a limit of 1 in 2 s, judged by when they were really sent and answered.
#[track_caller]
fn single_opens_on_time(gateway: &Gateway, key: &str) {
    let request = Request::get("/x").key(key);
    let mut connection = gateway.connect();
    let first = sample(&mut connection, &request);
    assert_eq!(first.status, 200, "the first call of {key}");
    for offset in [1_000, 1_900] {
        sleep_until(first.sent + Duration::from_millis(offset));
        let early = sample(&mut connection, &request);
        if early.received - first.sent < Duration::from_secs(2) {
            assert_eq!(early.status, 429, "{key} after {:?}", early.received - first.sent);
        } else if early.status == 200 {
            // A busy machine sent it late, and it passed with right. The next call belongs to the next window.
            return;
        }
    }
    sleep_until(first.received + Duration::from_millis(2_100));
    assert_eq!(sample(&mut connection, &request).status, 200, "{key} after 2.1 s");
}

/// No span of `window` holds more than `limit` passes, measured from the answer of the first to the sending of the last.
#[track_caller]
fn never_more_in_any_window(samples: &[crate::support::load::Sample], limit: usize, window: Duration) {
    let passes: Vec<_> = samples.iter().filter(|sample| sample.status == 200).collect();
    for span in passes.windows(limit + 1) {
        let longest = span[limit].received - span[0].sent;
        assert!(longest >= window, "{} passes within {longest:?}", limit + 1);
    }
}

for_every_store! {
    fn a_limit_in_shadow_counts_and_refuses_nobody(store) {
        // Envoy's shadow mode replaces the rule, so nobody sees what the live limit and the planned one say of one request.
        let backend = Backend::ok();
        let limits = r#"{ name = "live", limit = 5, per = "1m" },
            { name = "planned", limit = 2, per = "1m", enforce = "shadow" },
            { name = "retired", limit = 1, per = "1m", enforce = "off" }"#;
        let gateway = Gateway::start(&Config::open(&backend).plan("p", limits).key("k", "one", "p").store(store));
        let answers = [(); 6].map(|()| gateway.get("/x").key("k").send());
        assert_eq!(answers.each_ref().map(|answer| answer.status), [200, 200, 200, 200, 200, 429]);
        for answer in &answers {
            assert_eq!(answer.policy("live", "q"), Some(5));
            assert_eq!(answer.header("ratelimit-policy"), Some(r#""live";q=5;w=60"#));
        }
        assert_eq!(answers[5].json()["violated-policies"], serde_json::json!(["live"]));
        let decided = |outcome, limit| {
            let labels = [("plan", "p"), ("route", "rest"), ("outcome", outcome), ("limit", limit)];
            gateway.metric("tollgate_decisions_total", &labels)
        };
        assert_eq!((decided("allowed", ""), decided("would_deny", "planned"), decided("denied", "live")), (2.0, 3.0, 1.0));
    }
}

#[test]
fn a_plan_in_shadow_refuses_nobody_but_what_says_otherwise() {
    let backend = Backend::ok();
    let plan = r#"[plans.p]
        enforce = "shadow"
        limits = [{ name = "soft", limit = 1, per = "1m" }, { name = "hard", limit = 3, per = "1m", enforce = "on" }]"#;
    let gateway = Gateway::start(&Config::open(&backend).table(plan).key("k", "one", "p"));
    let answers = [(); 4].map(|()| gateway.get("/x").key("k").send().status);
    assert_eq!(answers, [200, 200, 200, 429]);
}

for_every_fleet! {
    fn an_idle_caller_may_take_the_burst_and_what_flows_in(fleet) {
        // ACC-9: a bucket that may hold a whole minute starts full, so tests of the cap ran over it for minutes.
        // Gates have a minute on their clock; on Redis the same passes in two seconds.
        let (limit, per, pause) = match fleet {
            Fleet::Gates { .. } => (100_u32, Duration::from_secs(60), Duration::from_millis(250)),
            Fleet::Gateways { .. } => (20, Duration::from_secs(2), Duration::from_millis(40)),
        };
        let amounts = format!("name = \"limit\", limit = {limit}, per = \"{}s\"", per.as_secs());
        let config = Config::default()
            .route("rest", "/*", "")
            .plan("bucket", &format!("{{ {amounts}, algorithm = \"token_bucket\" }}"))
            .plan("window", &format!("{{ {amounts} }}"))
            .key("bucket", "one", "bucket")
            .key("window", "two", "window");
        let member = fleet.start(&config);
        for key in ["bucket", "window"] {
            member.passes(1, key);
        }
        fleet.wait(per * 2);
        let began = fleet.now();
        let (mut of_bucket, mut of_window, mut elapsed) = (0, 0, Duration::ZERO);
        while elapsed < per * 9 / 10 {
            let (bucket, window) = (member.call("bucket"), member.call("window"));
            elapsed = fleet.now() - began;
            of_bucket += u32::from(bucket.status == 200);
            if elapsed < per {
                of_window += u32::from(window.status == 200);
            }
            if bucket.status == 429 {
                // The burst is a number of its own, and a refusal names it.
                assert!(bucket.text().contains(&format!("up to {limit} at once")), "{}", bucket.text());
            }
            fleet.wait(pause);
        }
        let flowed_in = f64::from(limit) * elapsed.as_secs_f64() / per.as_secs_f64();
        assert!(f64::from(of_bucket) <= f64::from(limit) + flowed_in, "{of_bucket} of the bucket, {flowed_in} flowed in");
        assert!(of_window <= limit, "{of_window} of the window");
        // A busy machine may send too little to tell how much would have passed; a clock that the test moves tells.
        if let Fleet::Gates { .. } = fleet {
            assert_eq!((of_bucket, of_window), (limit + 90, limit));
        }
    }
}
