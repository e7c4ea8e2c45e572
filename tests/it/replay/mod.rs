//! Every decision of a fleet under faults, held against a brute-force oracle.
//!
//! Three gateways with 64 connections each count on one Redis, which is paused, restarted and failed over at random; or on a
//! cluster. Each decision is in a gateway's log, with the moment at which the store made it (`decided_at`), and in a client's
//! answer, with what is left of each limit and when there is more. The trace of all of them, in the order of the store's
//! clock, goes through an [`oracle`] that knows the definitions of the manual and nothing of the source.
//!
//! # When a decision is right
//!
//! 1. No two decisions of a store have the same time, and none has a time at which no server ran.
//! 2. A call is admitted if and only if it fits every limit of its plan, as the definitions have it; a bucketed window may
//!    also refuse what fits a window of `per` and not one of `per` and a sixtieth. A refusal names a limit that refuses.
//! 3. The answer says exactly how many units are left of each limit (of a bucketed window: between what the two windows
//!    say), in how many seconds there are more, and after how many to come again.
//!
//! # What may explain a decision that looks wrong
//!
//! Two things, and each has bounds:
//!
//! * **A call without an answer.** A gateway that gives up on the store writes another `source` into its log, and, unless it did
//!   not ask at all, nobody knows whether the call was executed. Was it, then after the client sent it and before its end
//!   (`not_after`), at a moment when
//!   a server ran. Until more is known all of these calls, some or none may have been charged. Where the next answer says how
//!   many units are left, and only one number of units explains it, that number is certain from then on; of a bucket the
//!   answer tells the level, to a unit. In a cluster a call whose server was killed may have been sent again, so one that was
//!   decided by the next server may also have been charged by the first.
//! * **A loss.** An empty restart loses every charge before it, no more and no less. A failover loses every charge after one
//!   single moment and none before it; the moment is the same for all accounts of that server, it is none at which the
//!   replica is known to have had all that was written, and none after the replica was promoted (in a cluster: after its
//!   primary was killed). A restart with its data and a failover that both sides agree on lose nothing.
//!
//! All pasts that these rules allow are followed side by side; a decision is wrong when it contradicts every one of them.
//! Without a fault there is one past, and so no tolerance at all.
//!
//! Deliberately not here: concurrency limits and settled charges, of which no log says when a slot or units came back; what a
//! gateway counts by itself and writes back; a primary that is replaced while it stands still, and then decides on for a
//! moment, of which no log says which server decided.

mod check;
mod oracle;
mod random;
mod servers;
mod traffic;

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use check::{Call, Decision, Loss, Tally, Trace, check, ordered};
use oracle::Promise;
use random::Random;
use servers::{History, Pair, Shards, Store};
use traffic::{Calls, account_names, call_all, config, summary, traces};

use crate::support::{self, Backend, Gateway};

/// Of so many decisions one at most may need an explanation by a call without an answer.
const OWED_AT_MOST: u64 = 10;

/// How long gateways may take to ask a store again that is back. What it has lost shows only then.
const RETURNED: Duration = Duration::from_secs(2);

/// Makes a decision another one, or leaves it as it is where that would be no lie.
type Forgery = fn(&mut Decision);

/// Makes each account's trace wrong at a random place, in each of several ways, and wants the oracle to see it.
///
/// Not of the bucketed window: there a single unit more or less may be within what it promises.
#[track_caller]
fn sees_forgeries(traces: &[Trace], random: &mut Random) {
    let forgeries: [(&str, Forgery); 4] = [
        ("a refusal for an admission", |decision| decision.allowed = false),
        ("an admission for a refusal", |decision| decision.allowed = true),
        ("a unit more", |decision| decision.left[0].remaining += 1),
        ("an admission that was long before", |decision| {
            decision.at -= u64::from(decision.allowed) * 1_000_000;
        }),
    ];
    let exact = |trace: &&Trace| !matches!(trace.limits[0].promise, Promise::Bucketed { .. });
    for trace in traces.iter().filter(exact) {
        check(std::slice::from_ref(trace), &[]).expect("this was checked before");
        for (what, forge) in &forgeries {
            let mut forged = trace.clone();
            let (before, decision) = loop {
                let place = random.below(forged.calls.len());
                let Call::Decided(decision) = &mut forged.calls[place] else { continue };
                let before = decision.clone();
                forge(decision);
                if decision.allowed {
                    (decision.refused_by, decision.retry_after) = (String::new(), None);
                } else if before.allowed {
                    let name = trace.limits[0].name.to_owned();
                    (decision.refused_by, decision.retry_after) = (name, Some(1));
                }
                if *decision != before {
                    break (before, decision.clone());
                }
            };
            let outcome = check(&[forged], &[]);
            assert!(outcome.is_err(), "{what} was not seen: {decision:?}, which was {before:?}");
        }
    }
}

/// Holds the traces against the oracle and says what came of it.
#[track_caller]
fn holds(what: &str, traces: &[Trace], losses: &[Loss]) -> Tally {
    let begun = Instant::now();
    let (tally, moments) =
        check(traces, losses).unwrap_or_else(|disagreement| panic!("{what}: {disagreement}"));
    println(&format!("{what}: {tally:?} in {:?};{}", begun.elapsed(), summary(traces)));
    for (loss, moment) in losses.iter().zip(moments) {
        if let Loss::Suffix { latest, killed, .. } = loss {
            let before = |at| (at - i128::from(moment)) / 1_000;
            let (early, late) = (before(i128::from(*latest)), before(i128::from(*killed)));
            println(&format!(
                "{what}: a failover lost what was written {early} ms before the promotion, {late} ms in all"
            ));
        }
    }
    for trace in traces {
        let refused = |call: &Call| matches!(call, Call::Decided(decision) if !decision.allowed);
        let never_refused = !trace.calls.iter().any(refused);
        assert!(!never_refused, "{what}: {} was never refused, which shows nothing", trace.account);
    }
    tally
}

#[expect(clippy::print_stdout, reason = "the seed and the numbers, for whoever reads the output of a test")]
fn println(text: &str) {
    println!("{text}");
}

/// A seed that was never used, or the one that `REPLAY_SEED` names.
#[expect(clippy::disallowed_methods, reason = "the one place that reads it")]
fn random(what: &str) -> Random {
    let fresh = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros().to_string();
    let seed = std::env::var("REPLAY_SEED").unwrap_or_else(|_| fresh());
    println(&format!("{what}: REPLAY_SEED={seed}"));
    Random::new(seed.parse().unwrap())
}

/// Gateways on one store, and all calls to them so far.
struct Fleet<S> {
    store: S,
    gateways: Vec<Gateway>,
    calls: Calls,
    _backend: Backend,
}

impl<S: Store> Fleet<S> {
    fn start(store: S) -> Self {
        let backend = Backend::ok();
        let gateway = |on_failure| {
            Gateway::start(&config(&backend).server("workers = 2").table(&store.tables(on_failure)))
        };
        // None counts by itself: what it writes back later, nobody could tell from a charge of the store's own.
        let gateways = ["allow", "deny", "allow"].map(gateway).into();
        Self { store, gateways, calls: Calls::default(), _backend: backend }
    }

    /// A fleet after so much peace, in which no call was left without an answer: with no tolerance at all, that is.
    ///
    /// A machine that stands still for the whole budget of a call is no fault of ours, and so there is another attempt.
    #[track_caller]
    fn after_peace(what: &str, start: fn() -> S, calm: Duration, random: &mut Random) -> Self {
        for _ in 0..ATTEMPTS {
            let mut fleet = Self::start(start());
            call_all(&fleet.gateways, &mut fleet.calls, random, || thread::sleep(calm));
            let quiet = History::default();
            let traces = traces(&fleet.gateways, &fleet.calls, |_| &quiet);
            if is_strict(what, &traces, random) {
                return fleet;
            }
        }
        panic!("{what}: calls without an answer in peace, {ATTEMPTS} times");
    }
}

/// How often there may be peace.
const ATTEMPTS: usize = 3;

/// Holds a trace without faults against the oracle. `true` if no call was left without an answer: then there was no
/// tolerance at all, and no lie is taken for the truth.
#[track_caller]
fn is_strict(what: &str, traces: &[Trace], random: &mut Random) -> bool {
    let tally = holds(&format!("{what}, in peace"), traces, &[]);
    if tally.unanswered > 0 {
        return false;
    }
    assert_eq!((tally.owed_to_unanswered, tally.owed_to_loss), (0, 0), "{what}");
    sees_forgeries(traces, random);
    true
}

/// Three gateways on a store: first in peace, then with so many rounds of faults.
#[track_caller]
fn three_gateways<S: Store>(
    what: &str,
    start: fn() -> S,
    calm: Duration,
    rounds: usize,
    pause: Duration,
) -> Tally {
    let mut random = random(what);
    let mut fleet = Fleet::after_peace(what, start, calm, &mut random);
    let homes: HashMap<_, _> =
        account_names().map(|account| (account, fleet.store.counts(account))).collect();
    let mut choice = random.fork();
    call_all(&fleet.gateways, &mut fleet.calls, &mut random, || {
        for _ in 0..rounds {
            fleet.store.suffer(pause, &mut choice);
        }
        thread::sleep(pause + RETURNED);
    });
    let histories = fleet.store.histories();
    let traces = traces(&fleet.gateways, &fleet.calls, |account| &histories[homes[account]]);
    let mut tally = Tally::default();
    for (number, history) in histories.iter().enumerate() {
        let here = |trace: &&Trace| homes[trace.account.as_str()] == number;
        let here: Vec<Trace> = traces.iter().filter(here).cloned().collect();
        ordered(&here).unwrap_or_else(|disagreement| panic!("{what}: {disagreement}"));
        tally.add(&holds(&format!("{what}, server {number}"), &here, &history.losses));
    }
    println(&format!("{what}, in all: {tally:?}"));
    assert!(tally.unanswered > 0, "{what}: no call was held up");
    assert!(tally.owed_to_unanswered * OWED_AT_MOST <= tally.decisions, "{what}: {tally:?}");
    // Where something was lost, nothing else explains what came behind it. (A cluster need not lose anything: what has gone
    // to the replica's socket is not lost with its primary.)
    assert!(tally.owed_to_loss == 0 || check(&traces, &[]).is_err(), "{what}: the losses explain nothing");
    tally
}

#[test]
fn every_decision_of_three_gateways_equals_the_oracle() {
    let (calm, pause) = (Duration::from_millis(2_000), Duration::from_millis(800));
    let tally = three_gateways("one redis", Pair::start, calm, 1, pause);
    assert!(tally.owed_to_loss > 0, "the server with the data was gone, and nobody gained by it");
}

#[test]
#[ignore = "takes minutes: ./test long"]
fn every_decision_of_three_gateways_equals_the_oracle_for_minutes() {
    // Several times: the oracle goes through its whole list for every question, so a minute is as long as a list may grow.
    let (calm, pause) = (Duration::from_secs(5), Duration::from_millis(1_500));
    for time in 1..=4 {
        let tally = three_gateways(&format!("one redis, {time}"), Pair::start, calm, 6, pause);
        assert!(tally.owed_to_loss > 0, "the server with the data was gone, and nobody gained by it");
    }
}

#[test]
#[ignore = "takes minutes: ./test long"]
fn every_decision_of_three_gateways_on_a_cluster_equals_the_oracle_for_minutes() {
    let (calm, pause) = (Duration::from_secs(5), Duration::from_millis(1_500));
    three_gateways("a cluster", Shards::start, calm, 6, pause);
}

#[test]
fn every_decision_of_one_gateway_in_memory_equals_the_oracle() {
    let mut random = random("memory");
    let backend = Backend::ok();
    let config = config(&backend).server("workers = 4").store(&support::Store::Memory);
    let gateways = [Gateway::start(&config)];
    let mut calls = Calls::default();
    call_all(&gateways, &mut calls, &mut random, || thread::sleep(Duration::from_millis(2_000)));
    let quiet = History::default();
    let is_strict = is_strict("memory", &traces(&gateways, &calls, |_| &quiet), &mut random);
    assert!(is_strict, "the memory always answers");
}
