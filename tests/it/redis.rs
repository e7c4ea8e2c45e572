//! Redis as the store: its keys, their expiry, scripts that are gone, a restart.

use std::thread;
use std::time::{Duration, Instant};

use crate::support::load::{count, only, under_load};
use crate::support::{Backend, Config, Gateway, Redis, Request, eventually, sleep_until, tree};

/// A failure of the store is loud, and a busy machine does not make one.
fn strict(redis: &Redis) -> String {
    redis.tables("deny", "2s")
}

#[test]
fn keys_are_named_as_the_contract_says() {
    // The names are public: operators delete by them, ACLs are written for them, and the braces choose the slot.
    let backend = Backend::ok();
    let redis = Redis::start();
    let config = Config::open(&backend)
        .plan("free", r#"{ name = "minute", limit = 5, per = "60s" }"#)
        .plan_on_route("free", "rest", r#"{ name = "search", limit = 5, per = "60s" }"#)
        .plan("anonymous", r#"{ name = "minute", limit = 5, per = "60s" }"#)
        .key("k", "acme", "free")
        .anonymous("anonymous")
        .behind_loopback_proxy()
        .table(&strict(&redis));
    let gateway = Gateway::start(&config);
    gateway.get("/x").key("k").send().expect(200);
    gateway.get("/x").header("X-Forwarded-For", "203.0.113.9").send().expect(200);
    assert_eq!(
        redis.keys(),
        [
            "tollgate:{acct.acme}:plan:minute",
            "tollgate:{acct.acme}:route.rest:search",
            "tollgate:{net.203.0.113.9}:plan:minute",
        ]
    );
}

#[test]
fn a_prefix_keeps_two_gateways_apart() {
    // Two systems on one Redis with one prefix charge each other's callers.
    let backend = Backend::ok();
    let redis = Redis::start();
    let plain = Config::shared(&backend).table(&strict(&redis));
    let renamed = Config::shared(&backend).table(&format!("{}\nprefix = \"staging\"", strict(&redis)));
    let (plain, renamed) = (Gateway::start(&plain), Gateway::start(&renamed));
    assert_eq!(plain.exhaust("/x", "k-free-1").0, 5);
    assert_eq!(renamed.exhaust("/x", "k-free-1").0, 5);
    assert_eq!(redis.keys(), ["staging:{acct.one}:plan:window", "tollgate:{acct.one}:plan:window"]);
}

#[test]
fn a_refused_call_changes_nothing_in_redis() {
    // ACC-4: what a refusal writes is work for the store and for its replicas, at the caller's will.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = Gateway::start(&Config::shared(&backend).table(&strict(&redis)));
    gateway.exhaust("/x", "k-free-1");
    let key = "tollgate:{acct.one}:plan:window";
    // Redis counts every write, one that changes an expiry only as well.
    let state = || (redis.value(key), redis.info("persistence", "rdb_changes_since_last_save").unwrap());
    let before = state();
    gateway.get("/x").key("k-free-1").send().expect(429);
    assert_eq!(state(), before);
}

#[test]
fn every_key_expires_within_two_windows() {
    // TTL-1, TTL-2: keys without an expiry deny for days; milliseconds taken for seconds keep them a thousand times too long.
    // TTL-5: the counters of days and months were to live for fifty years.
    let backend = Backend::ok();
    let redis = Redis::start();
    let windows = [("second", "1s", 1_000), ("ten", "10s", 10_000), ("hour", "1h", 3_600_000)];
    let limits: Vec<String> = windows
        .iter()
        .flat_map(|(name, per, _)| {
            [
                format!("{{ name = \"{name}\", limit = 50, per = \"{per}\" }}"),
                format!("{{ name = \"{name}-wide\", limit = 50000, per = \"{per}\" }}"),
                format!(
                    "{{ name = \"{name}-bucket\", limit = 50, per = \"{per}\", algorithm = \"token_bucket\", burst = 50 }}"
                ),
            ]
        })
        .collect();
    let day = 86_400_000;
    let quotas = [("day", day), ("week", 7 * day), ("month", 31 * day)];
    let limits = limits.into_iter().chain(quotas.iter().map(|(per, _)| {
        format!("{{ name = \"of-{per}\", limit = 50, per = \"{per}\", algorithm = \"quota\" }}")
    }));
    let limits: Vec<String> = limits.collect();
    let gateway = Gateway::start(
        &Config::open(&backend).plan("all", &limits.join(", ")).key("k", "one", "all").table(&strict(&redis)),
    );
    gateway.get("/x").key("k").send().expect(200);
    let mut seen = 0;
    for (name, _, window) in windows {
        for suffix in ["", "-wide", "-bucket"] {
            let form = if suffix == "-bucket" { ":bucket" } else { "" };
            let key = format!("tollgate:{{acct.one}}:plan:{name}{suffix}{form}");
            let lifetime = redis.number(&["PTTL", &key]);
            // -2: a bucket that was full again after 20 ms, or a window of a second on a slow machine, is gone already.
            if lifetime == -2 && name != "hour" {
                continue;
            }
            // 0 is less than a millisecond; what has no expiry says -1.
            assert!((0..=2 * window + 1_000).contains(&lifetime), "{key} lives {lifetime} ms");
            seen += 1;
        }
    }
    assert!(seen >= 5, "only {seen} keys were there to look at");
    for (per, longest) in quotas {
        let lifetime = redis.number(&["PTTL", &format!("tollgate:{{acct.one}}:plan:of-{per}:quota.{per}")]);
        assert!((1..=longest + 1_000).contains(&lifetime), "of-{per} lives {lifetime} ms");
    }
}

#[test]
fn a_key_that_lost_its_expiry_heals() {
    // TTL-1: a counter with TTL -1 at its limit blocks its caller for ever.
    let backend = Backend::ok();
    let redis = Redis::start();
    let limits = [
        ("exact", r#"limit = 2, per = "1s""#),
        ("bucketed", r#"limit = 20000, per = "1s""#),
        ("bucket", r#"limit = 2, per = "1s", algorithm = "token_bucket", burst = 2"#),
        ("quota", r#"limit = 2, per = "month", algorithm = "quota""#),
    ];
    // What a call costs, so that each limit is exhausted with the second one.
    let config = Config::bare(backend.address())
        .route("one", "/one", "plans = [\"exact\", \"bucket\", \"quota\"]")
        .route("many", "/many", "cost = 10000\nplans = [\"bucketed\"]");
    let config = limits.iter().fold(config, |config, (name, limit)| {
        config.plan(name, &format!("{{ name = \"limit\", {limit} }}")).key(name, name, name)
    });
    let gateway = Gateway::start(&config.table(&strict(&redis)));
    let path = |plan: &str| if plan == "bucketed" { "/many" } else { "/one" };
    let call = |plan: &str| gateway.get(path(plan)).key(plan).send();
    let key = |plan: &str| match plan {
        "bucket" => format!("tollgate:{{acct.{plan}}}:plan:limit:bucket"),
        "quota" => format!("tollgate:{{acct.{plan}}}:plan:limit:quota.month"),
        _ => format!("tollgate:{{acct.{plan}}}:plan:limit"),
    };
    let lifetime = |plan: &str| redis.number(&["PTTL", &key(plan)]);
    for (plan, _) in limits {
        gateway.exhaust(path(plan), plan);
        redis.cmd(&["PERSIST", &key(plan)]);
        let persisted = Instant::now();
        // The expiry is gone, the state is there: this is the fault itself.
        assert_eq!(lifetime(plan), -1, "{plan}");
        // The next refusal heals it already, so that a caller who never comes back leaves nothing behind.
        if call(plan).status == 429 {
            assert!(lifetime(plan) > 0, "{plan} has no expiry");
            redis.cmd(&["PERSIST", &key(plan)]);
        }
        if plan == "quota" {
            // Its month may be long; the refusal was the test.
            continue;
        }
        sleep_until(persisted + Duration::from_secs(2));
        call(plan).expect(200);
        assert!(lifetime(plan) > 0, "{plan} has no expiry");
    }
}

#[test]
fn a_flushed_script_cache_is_healed_within_the_call() {
    // RSC-1: after SCRIPT FLUSH every call answered 500 until the service was started again.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = Gateway::start(&Config::shared(&backend).table(&strict(&redis)));
    let request = Request::get("/x").key("k-free-1");
    let mut connection = gateway.connect();
    for _ in 0..3 {
        request.on(&mut connection).expect(200);
    }
    redis.cmd(&["SCRIPT", "FLUSH"]);
    let statuses = [(); 3].map(|()| request.on(&mut connection).status);
    assert_eq!(statuses, [200, 200, 429]);
    assert!(gateway.decided_without_store() < 1.0);
    let answered = [("store", "redis"), ("result", "ok")];
    assert!(gateway.metric("tollgate_store_seconds_count", &answered) >= 6.0);
}

#[test]
fn counters_survive_a_restart_of_redis_with_its_data() {
    // RSC-1: with the data back but the scripts gone, the limiter failed open for good.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    let config = Config::open(&backend)
        .plan("free", r#"{ name = "window", limit = 5, per = "10m" }"#)
        .key("k", "one", "free")
        .key("k-fresh", "two", "free")
        .table(&redis.tables("allow", "200ms"));
    let gateway = Gateway::start(&config);
    assert_eq!(gateway.exhaust("/x", "k").0, 5);
    redis.cmd(&["SAVE"]);
    redis.restart();
    eventually("the restarted store to refuse", Duration::from_secs(10), || {
        (gateway.get("/x").key("k").send().status == 429).then_some(())
    });
    // Without data: a fresh window, enforced from its first call.
    redis.cmd(&["FLUSHALL"]);
    redis.cmd(&["SAVE"]);
    redis.restart();
    eventually("the store to count again", Duration::from_secs(10), || {
        gateway.get("/x").key("k-fresh").send();
        (!redis.keys().is_empty()).then_some(())
    });
    assert_eq!(gateway.exhaust("/x", "k").0, 5);
}

#[test]
fn flush_and_restart_under_load_cause_no_error() {
    // Must show: a cure that works for one call at a time fails when a hundred meet the empty cache at once.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    let config = Config::open(&backend)
        .plan("wide", r#"{ name = "window", limit = 1000, per = "1s" }"#)
        .key("k", "one", "wide")
        .table(&redis.tables("local", "20ms"));
    let gateway = Gateway::start(&config);
    let request = Request::get("/x").key("k");
    let (samples, ()) = under_load(gateway.address(), 16, Duration::from_millis(1), &request, || {
        for _ in 0..10 {
            redis.cmd(&["SCRIPT", "FLUSH"]);
            thread::sleep(Duration::from_millis(100));
        }
        redis.restart();
        thread::sleep(Duration::from_secs(1));
        for _ in 0..5 {
            redis.cmd(&["SCRIPT", "FLUSH"]);
            thread::sleep(Duration::from_millis(100));
        }
    });
    assert!(samples.len() > 500, "only {} calls", samples.len());
    only(&samples, &[200, 429]);
    assert!(count(&samples, 200) > 0);
    eventually("the store to count again", Duration::from_secs(10), || {
        gateway.get("/x").key("k").send();
        (!redis.keys().is_empty()).then_some(())
    });
}

#[test]
fn a_value_that_is_not_ours_is_a_failure_of_the_store() {
    // A script that meets another type or a broken value must not answer 500, and must not pass as "no state yet".
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = Gateway::start(&Config::shared(&backend).table(&strict(&redis)));
    let key = "tollgate:{acct.one}:plan:window";
    redis.cmd(&["LPUSH", key, "not", "ours"]);
    gateway.get("/x").key("k-free-1").send().expect(503);
    for value in ["rubbish", "\u{2}w of another version"] {
        redis.cmd(&["SET", key, value]);
        gateway.get("/x").key("k-free-1").send().expect(503);
    }
    gateway.get("/x").key("k-free-2").send().expect(200);
    let unreadable = gateway.metric("tollgate_store_seconds_count", &[("result", "unreadable")]);
    assert_eq!(unreadable.to_string(), "3");
    let said = |line: &String| line.contains("Redis answers, and does not decide");
    assert!(gateway.log_lines().iter().any(said));
}

#[test]
fn a_call_that_nobody_waits_for_any_more_is_charged_to_nobody() {
    // What a frozen Redis finds in its socket when it wakes was charged then: the caller paid for refusals.
    let backend = Backend::ok();
    let redis = Redis::start();
    let config = Config::open(&backend)
        .plan("p", r#"{ name = "window", limit = 100, per = "10m" }"#)
        .key("k", "one", "p")
        .server("workers = 1")
        .table(&redis.tables("deny", "60ms"));
    let gateway = Gateway::start(&config);
    // Also the very first calls, before the gateway has heard the time of Redis.
    eventually("a connection", Duration::from_secs(5), || {
        gateway.log_lines().iter().any(|line| line.contains("connected to Redis")).then_some(())
    });
    for _ in 0..4 {
        redis.stop();
        // Fewer than would drop the connection: what was sent stays in the socket.
        for _ in 0..3 {
            gateway.get("/x").key("k").send().expect(503);
        }
        // A call may be worth something for a budget longer than somebody waits: the gateway's idea of Redis's time is so exact.
        std::thread::sleep(Duration::from_millis(120));
        redis.cont();
        eventually("the store to decide", Duration::from_secs(5), || {
            (gateway.get("/x").key("k").send().status == 200).then_some(())
        });
    }
    // Each of the three rounds ended with one that passed.
    assert_eq!(gateway.get("/x").key("k").send().expect(200).remaining("window"), 95);
}

#[test]
fn a_full_redis_is_a_failure_of_the_store() {
    // RSC-8: at maxmemory the script is refused, and the API answered 500 everywhere.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = Gateway::start(
        &Config::open(&backend)
            .plan("free", r#"{ name = "window", limit = 5, per = "60s" }"#)
            .key_series("k", 20, "free")
            .table(&strict(&redis)),
    );
    gateway.get("/x").key("k-0").send().expect(200);
    redis.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    redis.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    for number in 1..20 {
        gateway.get("/x").key(&format!("k-{number}")).send().expect(503);
    }
    assert_eq!(redis.keys().len(), 1, "half-written keys");
    redis.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    eventually("the store to count again", Duration::from_secs(10), || {
        (gateway.get("/x").key("k-1").send().status == 200).then_some(())
    });
}

/// Waits until a gateway has asked this Redis about itself `times` times since its statistics were reset.
#[track_caller]
fn was_looked_at(redis: &Redis, times: usize) {
    let mut own = 0;
    eventually("the gateway to look", Duration::from_secs(10), || {
        let asked = redis.info("commandstats", "cmdstat_info").map_or(0, |stats| {
            let calls = stats.strip_prefix("calls=").and_then(|rest| rest.split(',').next());
            calls.and_then(|calls| calls.parse::<usize>().ok()).expect("a number of calls")
        });
        // The question of the moment is not counted yet.
        let by_others = asked - own;
        own += 1;
        (by_others >= times).then_some(())
    });
}

/// The lines of the log that warn of eviction.
fn warnings_of_eviction(gateway: &Gateway) -> Vec<String> {
    gateway.log_lines().into_iter().filter(|line| line.contains("evict")).collect()
}

#[test]
fn a_redis_that_may_evict_counters_is_warned_of_once() {
    // RSC-9: the cure for a full Redis, an LRU policy, throws counters away, and with each a limit, without a sign.
    let backend = Backend::ok();
    for (policy, maxmemory, warns) in [
        ("allkeys-lru", "100mb", true),
        // Every counter has an expiry, so these choose among counters only.
        ("volatile-ttl", "100mb", true),
        ("noeviction", "100mb", false),
        // Without a bound nothing is ever evicted.
        ("allkeys-lru", "0", false),
    ] {
        let redis = Redis::start();
        redis.cmd(&["CONFIG", "SET", "maxmemory-policy", policy]);
        redis.cmd(&["CONFIG", "SET", "maxmemory", maxmemory]);
        redis.cmd(&["CONFIG", "RESETSTAT"]);
        let config = Config::shared(&backend).server("workers = 2").table(&strict(&redis));
        let gateway = Gateway::start(&config);
        was_looked_at(&redis, 2);
        // A connection that replaces another looks again, and must not warn again.
        redis.cmd(&["CONFIG", "RESETSTAT"]);
        redis.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
        gateway.get("/x").key("k-pro-1").send();
        was_looked_at(&redis, 1);
        if warns {
            eventually("a warning", Duration::from_secs(10), || {
                (!warnings_of_eviction(&gateway).is_empty()).then_some(())
            });
        }
        let warnings = warnings_of_eviction(&gateway);
        assert_eq!(warnings.len(), usize::from(warns), "{policy} {maxmemory}: {warnings:#?}");
    }
}

#[test]
fn the_commands_of_the_manual_are_enough() {
    // An ACL by the book must not turn out too narrow on the day of the first reconnect.
    let backend = Backend::ok();
    let redis = Redis::start();
    let manual = tree::text("lua/README.md");
    let rule = manual.lines().find(|line| line.starts_with("ACL SETUSER gateway")).expect("an example");
    redis.cmd(&rule.replace("PASSWORD", "secret").split(' ').collect::<Vec<_>>());
    let url = redis.url().replace("redis://", "redis://gateway:secret@");
    let config = Config::open(&backend)
        .plan(
            "every",
            r#"{ name = "window", limit = 2, per = "10m" },
               { name = "wide", limit = 20000, per = "10m" },
               { name = "bucket", limit = 5, per = "10m", algorithm = "token_bucket" },
               { name = "month", limit = 5, per = "month", algorithm = "quota", zone = "UTC" },
               { name = "inflight", limit = 5, algorithm = "concurrency" }"#,
        )
        .key("k", "one", "every")
        .table(&strict(&redis).replace(&redis.url(), &url));
    let gateway = Gateway::start(&config);
    assert_eq!(gateway.exhaust("/x", "k").0, 2);
    redis.cmd(&["SCRIPT", "FLUSH"]);
    gateway.get("/x").key("k").send().expect(429);
    gateway.admin("/readyz").expect(200);
    assert!(gateway.decided_without_store() < 1.0);
}

#[test]
fn a_window_that_was_made_longer_keeps_what_it_counts() {
    // A refusal named the end of the longer window, and the key ended with the shorter one: a whole new allowance.
    let backend = Backend::ok();
    let redis = Redis::start();
    let limits = |per: &str| {
        let bucket =
            format!(r#"{{ name = "bucket", limit = 5, per = "{per}", algorithm = "token_bucket" }}"#);
        let large = format!(r#"{{ name = "large", limit = 20000, per = "{per}" }}"#);
        format!(r#"{{ name = "window", limit = 5, per = "{per}" }}, {bucket}, {large}"#)
    };
    let with = |per: &str| {
        let config = Config::open(&backend).plan("edited", &limits(per)).key("k", "one", "edited");
        Gateway::start(&config.table(&strict(&redis)))
    };
    let before = with("20s");
    assert_eq!(before.exhaust("/x", "k").0, 5);
    drop(before);
    with("10m").get("/x").key("k").send().expect(429);
    for key in redis.keys() {
        let lifetime = redis.number(&["PTTL", &key]);
        assert!(lifetime > 60_000, "{key} ends in {lifetime} ms");
    }
}

#[test]
fn readiness_comes_back_after_a_lost_connection() {
    // The probe kept its dead connection for ever: one restart of Redis took every gateway out of the load balancer for good.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = Gateway::start(&Config::shared(&backend).table(&strict(&redis)));
    let ready = || (gateway.admin("/readyz").status == 200).then_some(());
    eventually("the gateway to be ready", Duration::from_secs(5), ready);
    for _ in 0..3 {
        redis.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
        eventually("the gateway to be ready again", Duration::from_secs(5), ready);
    }
}
