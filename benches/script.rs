//! What one decision costs Redis, and what a caller costs both stores: microseconds of script time by `INFO commandstats`,
//! the slowest call by `SLOWLOG`, bytes by `MEMORY USAGE` and by the resident size of this process.
//!
//! ```text
//! cargo bench --bench script
//! ```
//!
//! Starts a redis-server of its own, prints a table, and is no criterion benchmark: the figures are the server's, not
//! this process's. Calls come one after the other and then in batches, as a busy Redis sees them.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot be set up has nothing to measure")]
#![expect(clippy::print_stdout, reason = "the table is what it is for")]

use std::num::NonZeroU64;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::{Connection, Value};
use tollgate::clock::SystemClock;
use tollgate::limit::algorithm::{Algorithm, Concurrency, Quota, SlidingWindow, TokenBucket};
use tollgate::limit::store::{Charge, MemoryStore, RedisSettings, RedisStore, Store, Topology};
use tollgate::limit::{Calendar, Rule, Scope, Unit};

const MINUTE: u64 = 60_000_000;

/// Calls of one measurement.
const CALLS: u64 = 10_000;

/// Calls that are under way at a time.
const BATCH: u64 = 50;

/// Calls that took longer, in microseconds, are looked up one by one.
const SLOW: u64 = 50;

/// So many of those at most.
const SLOW_MAX: u64 = 100_000;

/// Each measurement is made so often, and the best is shown: other work on the machine only ever adds. What is a call's own
/// work is there in each of them, also in the slowest.
const ROUNDS: u64 = 5;

/// What all callers of one measurement of memory may hold together, in units of limits.
const UNITS_IN_MEMORY: u64 = 4_000_000;

fn n(value: u64) -> NonZeroU64 {
    NonZeroU64::new(value).unwrap()
}

fn window(name: &str, limit: u64) -> Rule {
    Rule::new(name, Scope::Plan, Algorithm::SlidingWindow(SlidingWindow::new(n(limit), MINUTE).unwrap()))
}

fn bucket(name: &str, limit: u64) -> Rule {
    let bucket = TokenBucket::new(n(limit), MINUTE, n(limit)).unwrap();
    Rule::new(name, Scope::Plan, Algorithm::TokenBucket(bucket))
}

fn quota(name: &str, limit: u64) -> Rule {
    let month = Calendar::new(Unit::Month, "UTC").unwrap();
    Rule::quota(name, Scope::Plan, Quota::new(n(limit)).unwrap(), month)
}

fn slots(name: &str, limit: u64) -> Rule {
    Rule::new(name, Scope::Plan, Algorithm::Concurrency(Concurrency::new(n(limit)).unwrap()))
}

/// A server of the benchmark's own.
struct Bench {
    store: RedisStore,
    admin: Connection,
    /// Memory stores that were measured: what is freed stays resident, and the next one would find room in it.
    kept: Vec<MemoryStore>,
}

/// What one measurement has found.
#[derive(Clone, Copy)]
struct Found {
    /// Microseconds a call.
    mean: f64,
    /// Microseconds of the slowest, 0 if none took longer than [`SLOW`].
    slowest: u64,
}

impl Found {
    const NONE: Self = Self { mean: f64::NAN, slowest: u64::MAX };

    fn or_better(self, other: Self) -> Self {
        Self { mean: self.mean.min(other.mean), slowest: self.slowest.min(other.slowest) }
    }
}

/// So many callers.
fn callers(name: &str, count: u64) -> Vec<String> {
    (0..count).map(|number| format!("{name}.{number}")).collect()
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
    let admin = loop {
        if let Ok(connection) = redis::Client::open(url.as_str()).unwrap().get_connection() {
            break connection;
        }
    };
    let topology = Topology::Standalone(url.into());
    let settings = RedisSettings {
        topology,
        budget: Duration::from_secs(5),
        prefix: "bench".to_owned(),
        local_share: None,
    };
    let store = RedisStore::new(&settings, Arc::default()).unwrap();
    let mut bench = Bench { store, admin, kept: Vec::new() };

    println!(
        "{:34}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "", "pass, alone", "pass, busy", "denial, busy", "slowest", "in Redis", "in memory"
    );
    for limit in [100, 1_000, 10_000, 1_000_000] {
        bench.measure(&format!("sliding_window {limit}"), &[window("a", limit)]).await;
    }
    for limit in [100, 1_000_000] {
        bench.measure(&format!("token_bucket {limit}"), &[bucket("a", limit)]).await;
        bench.measure(&format!("quota {limit}"), &[quota("a", limit)]).await;
    }
    for limit in [100, 1_000, 10_000] {
        bench.measure(&format!("concurrency {limit}"), &[slots("a", limit)]).await;
    }
    let three = [bucket("a", 10_000), window("b", 10_000), quota("c", 1_000_000)];
    bench.measure("three: bucket, exact, quota", &three).await;
    let five = [
        bucket("a", 10_000),
        window("b", 10_000),
        window("d", 1_000_000),
        quota("e", 1_000_000),
        quota("f", 1_000_000),
    ];
    bench.measure("five: these, bucketed, quota", &five).await;

    server.kill().unwrap();
    server.wait().unwrap();
}

impl Bench {
    /// Fills the limits with passes, then asks on until as many are refused.
    async fn measure(&mut self, name: &str, rules: &[Rule]) {
        redis::cmd("FLUSHALL").exec(&mut self.admin).unwrap();
        let least = rules.iter().map(capacity).min().unwrap_or(1);
        let passes = least.min(CALLS);
        self.ask(rules, &callers("acct.measured", 1), passes, BATCH).await;
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut self.admin).unwrap();
        let bytes: u64 = keys.iter().map(|key| self.bytes_of(key)).sum();
        // A limit that is small is filled by several callers, so that there is something to measure.
        let count = CALLS.div_ceil(passes);
        let (mut alone, mut denial, mut busy) = (Found::NONE, Found::NONE, Found::NONE);
        for round in 0..ROUNDS {
            let (one, many) =
                (callers(&format!("acct.one{round}"), count), callers(&format!("acct.many{round}"), count));
            alone = alone.or_better(self.ask(rules, &one, passes, 1).await);
            busy = busy.or_better(self.ask(rules, &many, passes, BATCH).await);
            // A plan whose limits are far away never denies within a benchmark.
            if least <= CALLS {
                denial = denial.or_better(self.ask(rules, &many, passes, BATCH).await);
            }
            redis::cmd("FLUSHALL").exec(&mut self.admin).unwrap();
        }
        let (in_memory, memory) = bytes_in_memory(rules, passes);
        println!(
            "{name:34}{:>12.1}{:>12.1}{:>12.1}{:>12}{bytes:>12}{in_memory:>12}",
            alone.mean, busy.mean, denial.mean, busy.slowest,
        );
        self.kept.push(memory);
    }

    fn bytes_of(&mut self, key: &str) -> u64 {
        redis::cmd("MEMORY").arg("USAGE").arg(key).arg("SAMPLES").arg(0).query(&mut self.admin).unwrap()
    }

    /// Asks so often for each caller, `batch` calls at a time.
    async fn ask(&mut self, rules: &[Rule], callers: &[String], calls: u64, batch: u64) -> Found {
        redis::cmd("CONFIG")
            .arg("SET")
            .arg("slowlog-log-slower-than")
            .arg(SLOW)
            .exec(&mut self.admin)
            .unwrap();
        redis::cmd("CONFIG").arg("SET").arg("slowlog-max-len").arg(SLOW_MAX).exec(&mut self.admin).unwrap();
        redis::cmd("SLOWLOG").arg("RESET").exec(&mut self.admin).unwrap();
        redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut self.admin).unwrap();
        for caller in callers {
            for first in (0..calls).step_by(usize::try_from(batch).unwrap()) {
                let leases: Vec<String> =
                    (first..calls.min(first + batch)).map(|number| number.to_string()).collect();
                let charge = |lease| Charge { lease, ..Charge::new(caller, "plan", rules, NonZeroU64::MIN) };
                let decisions = join_all(leases.iter().map(|lease| self.store.decide(charge(lease)))).await;
                decisions.into_iter().for_each(|decision| drop(decision.unwrap()));
            }
        }
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut self.admin).unwrap();
        let line = info.lines().find(|line| line.starts_with("cmdstat_evalsha")).unwrap();
        let mean = line.split("usec_per_call=").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
        let slow: Vec<Vec<Value>> =
            redis::cmd("SLOWLOG").arg("GET").arg(SLOW_MAX).query(&mut self.admin).unwrap();
        let took = |entry: &Vec<Value>| match entry[2] {
            Value::Int(micros) => u64::try_from(micros).unwrap(),
            _ => 0,
        };
        Found { mean, slowest: slow.iter().map(took).max().unwrap_or(0) }
    }
}

/// Units that a limit holds, slots included.
fn capacity(rule: &Rule) -> u64 {
    match &rule.algorithm {
        Algorithm::Concurrency(concurrency) => concurrency.limit().get(),
        other => other.capacity().get(),
    }
}

/// Bytes that a caller takes in the memory store after so many passes, and that store.
fn bytes_in_memory(rules: &[Rule], passes: u64) -> (u64, MemoryStore) {
    let callers = (UNITS_IN_MEMORY / passes.max(100)).max(200);
    let memory = MemoryStore::new(1_000_000, Arc::new(SystemClock::new()));
    let before = resident();
    for caller in 0..callers {
        let caller = format!("acct.{caller}");
        for _ in 0..passes {
            std::hint::black_box(memory.decide_now(Charge::new(&caller, "plan", rules, NonZeroU64::MIN)));
        }
    }
    let bytes = resident().saturating_sub(before) / callers;
    (bytes, memory)
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4_096
}
