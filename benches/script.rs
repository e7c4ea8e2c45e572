//! What one decision costs Redis: microseconds of script time by `INFO commandstats`, and bytes by `MEMORY USAGE`.
//!
//! ```text
//! cargo bench --bench script
//! ```
//!
//! Starts a redis-server of its own, prints a table, and is no criterion benchmark: the figures are the server's, not
//! this process's.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot be set up has nothing to measure")]
#![expect(clippy::print_stdout, reason = "the table is what it is for")]

use std::num::NonZeroU64;
use std::process::{Command, Stdio};
use std::time::Duration;

use redis::Connection;
use tollgate::limit::algorithm::{Algorithm, SlidingWindow, TokenBucket};
use tollgate::limit::store::{Charge, RedisSettings, RedisStore, Store, Topology};
use tollgate::limit::{Rule, Scope};

const MINUTE: u64 = 60_000_000;
const CALLS: u64 = 20_000;

fn n(value: u64) -> NonZeroU64 {
    NonZeroU64::new(value).unwrap()
}

fn window(name: &str, limit: u64) -> Rule {
    Rule::new(name, Scope::Plan, Algorithm::SlidingWindow(SlidingWindow::new(n(limit), MINUTE).unwrap()))
}

fn bucket(name: &str, limit: u64) -> Rule {
    Rule::new(
        name,
        Scope::Plan,
        Algorithm::TokenBucket(TokenBucket::new(n(limit), MINUTE, n(limit)).unwrap()),
    )
}

#[actix_rt::main]
async fn main() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("redis.sock");
    let mut server = Command::new("redis-server")
        .args(["--port", "0", "--save", "", "--unixsocket"])
        .arg(&socket)
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server is needed: ./test installs it");
    let url = format!("redis+unix://{}", socket.display());
    let mut admin = loop {
        if let Ok(connection) = redis::Client::open(url.as_str()).unwrap().get_connection() {
            break connection;
        }
    };
    let topology = Topology::Standalone(url.into());
    let settings = RedisSettings { topology, budget: Duration::from_secs(5), prefix: "bench".to_owned() };
    let store = RedisStore::new(&settings, std::sync::Arc::default()).unwrap();

    println!("{:34}{:>12}{:>12}{:>14}", "limits", "us a pass", "us a denial", "bytes a caller");
    for limit in [100, 1_000, 10_000] {
        measure(&store, &mut admin, &format!("sliding_window {limit}, exact"), &[window("a", limit)]).await;
    }
    measure(&store, &mut admin, "sliding_window 1000000, bucketed", &[window("a", 1_000_000)]).await;
    measure(&store, &mut admin, "token_bucket", &[bucket("a", 10_000)]).await;
    let three = [bucket("a", 10_000), window("b", 10_000), window("c", 1_000_000)];
    measure(&store, &mut admin, "three: bucket, exact, bucketed", &three).await;
    let five = [
        bucket("a", 10_000),
        window("b", 100),
        window("c", 1_000),
        window("d", 10_000),
        window("e", 1_000_000),
    ];
    measure(&store, &mut admin, "five: all of these", &five).await;

    server.kill().unwrap();
    server.wait().unwrap();
}

/// Fills the limits with passes, then asks on until as many are refused.
async fn measure(store: &RedisStore, admin: &mut Connection, name: &str, rules: &[Rule]) {
    redis::cmd("FLUSHALL").exec(admin).unwrap();
    let least = rules.iter().map(|rule| rule.algorithm.capacity().get()).min().unwrap_or(1);
    let passes = least.min(CALLS);
    let pass = script_time(store, admin, rules, "acct.bench", passes).await;
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(admin).unwrap();
    let bytes: u64 =
        keys.iter().map(|key| redis::cmd("MEMORY").arg("USAGE").arg(key).query::<u64>(admin).unwrap()).sum();
    // A plan whose limits are far away never denies within a benchmark.
    let denial =
        if least <= CALLS { script_time(store, admin, rules, "acct.bench", CALLS).await } else { f64::NAN };
    println!("{name:34}{pass:>12.1}{denial:>12.1}{bytes:>14}");
}

/// Microseconds of `EVALSHA` for each call, as the server counts them.
async fn script_time(
    store: &RedisStore,
    admin: &mut Connection,
    rules: &[Rule],
    caller: &str,
    calls: u64,
) -> f64 {
    redis::cmd("CONFIG").arg("RESETSTAT").exec(admin).unwrap();
    for _ in 0..calls {
        let charge = Charge::new(caller, "plan", rules, NonZeroU64::MIN);
        store.decide(charge).await.unwrap();
    }
    let info: String = redis::cmd("INFO").arg("commandstats").query(admin).unwrap();
    let line = info.lines().find(|line| line.starts_with("cmdstat_evalsha")).unwrap();
    line.split("usec_per_call=").nth(1).unwrap().split(',').next().unwrap().parse().unwrap()
}
