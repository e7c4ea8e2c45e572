//! The wall clock of the machine: set back and forward while a gateway runs, and near the end of a month.
//!
//! Clocks of several gateways on one Redis are in `limits`; that Redis's own clock steps is played on a clock that stands
//! still, in `src/limit/store/redis/tests.rs`.

use std::thread;
use std::time::{Duration, Instant};

use crate::support::{
    Backend, Config, Gateway, Request, SteppedClock, eventually, fake_clock, second_of_day, sleep_until,
};

/// Seconds from the time of day of `gateway` to the true one.
fn lag(true_time: &Gateway, gateway: &Gateway) -> i64 {
    (second_of_day(true_time) - second_of_day(gateway)).rem_euclid(86_400)
}

#[test]
fn a_wall_clock_that_is_set_back_and_forward_moves_no_window() {
    // TIME-2: a clock that was set back made the elapsed time negative: an error, a free refill, or an hour of refusals.
    let backend = Backend::ok();
    let limits = [
        ("window", r#"{ name = "limit", limit = 5, per = "10s" }"#),
        ("bucket", r#"{ name = "limit", limit = 5, per = "50s", algorithm = "token_bucket" }"#),
        ("quota", r#"{ name = "limit", limit = 5, per = "month", algorithm = "quota" }"#),
    ];
    let config = limits
        .iter()
        .fold(Config::open(&backend), |config, (name, limit)| config.plan(name, limit).key(name, name, name));
    let on_time = Gateway::start(&config);
    let clock = SteppedClock::new();
    let gateway = Gateway::start_with(&config.text(), &clock.environment());
    let mut connection = gateway.connect();
    let mut call = |key: &str| Request::get("/x").key(key).on(&mut connection);
    let mut statuses = |calls: usize| -> Vec<Vec<u16>> {
        let of = |(key, _): &(&str, &str)| (0..calls).map(|_| call(key).status).collect();
        limits.iter().map(of).collect()
    };
    let began = Instant::now();
    assert_eq!(statuses(3), [[200; 3]; 3]);
    clock.set("-3600");
    // Without this the test could pass with a clock that nobody has set.
    eventually("the clock to be an hour late", Duration::from_secs(5), || {
        (3_590..=3_610).contains(&lag(&on_time, &gateway)).then_some(())
    });
    assert_eq!(statuses(3), [[200, 200, 429]; 3]);
    clock.set("+0");
    eventually("the clock to be on time", Duration::from_secs(5), || {
        (lag(&on_time, &gateway) + 10).rem_euclid(86_400).le(&20).then_some(())
    });
    for (key, _) in limits {
        let refusal = call(key).expect(429);
        assert_eq!(refusal.remaining("limit"), 0);
        let wait = refusal.retry_after().unwrap();
        assert!(key == "quota" || (1..=10).contains(&wait), "{key}: {wait}");
    }
    // Only then was nothing earned meanwhile.
    assert!(began.elapsed() < Duration::from_secs(9), "this machine was too slow to tell");
}

#[test]
fn a_month_ends_where_the_calendar_says() {
    // TIME-7: "a month ago" on the 31st was the 3rd, and the quota was that much shorter.
    let backend = Backend::ok();
    let quota = |zone: &str| {
        format!(r#"{{ name = "month", limit = 10, per = "month", algorithm = "quota", zone = "{zone}" }}"#)
    };
    // Each begins three seconds before a month ends, in UTC.
    let ends = [
        ("@2026-03-31 23:59:57", "UTC"),
        ("@2026-01-31 23:59:57", "UTC"),
        ("@2027-02-28 23:59:57", "UTC"),
        ("@2028-02-29 23:59:57", "UTC"),
        // In Berlin the clocks have gone forward by then; in Kolkata noon is no whole number of hours away.
        ("@2026-03-31 21:59:57", "Europe/Berlin"),
        ("@2026-01-31 18:29:57", "Asia/Kolkata"),
    ];
    thread::scope(|scope| {
        for (time, zone) in ends {
            let config = Config::open(&backend).plan("p", &quota(zone)).key("k", "one", "p");
            scope.spawn(move || ends_in_three_seconds(&config, time));
        }
    });
}

/// A quota is spent in the last three seconds of its month, and is there again in the next.
#[track_caller]
fn ends_in_three_seconds(config: &Config, time: &str) {
    let gateway = Gateway::start_with(&config.text(), &fake_clock(time));
    let (passed, refusal) = gateway.exhaust("/x", "k");
    let refused = Instant::now();
    assert_eq!(passed, 10, "{time}");
    let wait = refusal.retry_after().unwrap();
    assert!((1..=3).contains(&wait), "{time}: {wait}");
    sleep_until(refused + Duration::from_secs(wait));
    let (passed, refusal) = gateway.exhaust("/x", "k");
    assert_eq!(passed, 10, "{time}, a month later");
    // The next month is whole.
    let wait = refusal.retry_after().unwrap();
    assert!((28 * 86_400 - 4_000..=31 * 86_400 + 4_000).contains(&wait), "{time}: {wait}");
}
