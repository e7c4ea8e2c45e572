//! What one decision costs: the arithmetic and the memory store, by algorithm, by number of limits, by size.
//!
//! ```text
//! cargo bench --bench decide
//! ```
//!
//! Redis is measured where its cost arises, in the server: `cargo bench --bench script`.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot be set up has nothing to measure")]

use std::hint::black_box;
use std::num::NonZeroU64;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use tollgate::clock::SystemClock;
use tollgate::limit::algorithm::{Algorithm, SlidingWindow, TokenBucket};
use tollgate::limit::store::{Charge, MemoryStore};
use tollgate::limit::{Rule, Scope};

const MINUTE: u64 = 60_000_000;

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

fn charge<'a>(caller: &'a str, rules: &'a [Rule]) -> Charge<'a> {
    Charge::new(caller, "plan", rules, NonZeroU64::MIN)
}

/// A caller whose limits are nearly used up, so that every window is as full as it gets.
fn busy(rules: &[Rule]) -> MemoryStore {
    let store = MemoryStore::new(10, Arc::new(SystemClock::new()));
    let least = rules.iter().map(|rule| rule.algorithm.capacity().get()).min().unwrap_or(1);
    for _ in 0..least.min(20_000) {
        let _used = store.decide_now(charge("acct.busy", rules));
    }
    store
}

/// One caller who is refused, at different sizes of its limit: the answer of a gateway under attack.
fn refusals(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("refuse");
    for limit in [10, 100, 1_000, 10_000] {
        let rules = [window("minute", limit)];
        let store = busy(&rules);
        group.bench_with_input(BenchmarkId::new("sliding_window", limit), &limit, |bencher, _| {
            bencher.iter(|| store.decide_now(black_box(charge("acct.busy", &rules))));
        });
    }
    group.finish();
}

/// A thousand callers who pass, by number and kind of limits.
fn passes(criterion: &mut Criterion) {
    let callers: Vec<String> = (0..1_000).map(|number| format!("acct.caller{number}")).collect();
    let far = 1_000_000_000;
    let tables = [
        ("token_bucket", vec![bucket("a", far)]),
        ("bucketed_window", vec![window("a", far)]),
        ("three", vec![bucket("a", far), window("b", far), window("c", far)]),
        ("five", ["a", "b", "c", "d", "e"].map(|name| bucket(name, far)).to_vec()),
    ];
    let mut group = criterion.benchmark_group("pass");
    for (name, rules) in tables {
        let store = MemoryStore::new(10_000, Arc::new(SystemClock::new()));
        let mut turn = callers.iter().cycle();
        group.bench_function(name, |bencher| {
            bencher.iter(|| store.decide_now(black_box(charge(turn.next().unwrap(), &rules))));
        });
    }
    group.finish();
}

criterion_group!(benches, refusals, passes);
criterion_main!(benches);
