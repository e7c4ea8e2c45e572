//! One verb, `admit`: the store decides, and when it cannot, `on_failure` does.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::calendar::Anchor;
use super::common::Common;
use super::decision::{Decision, Source};
use super::random;
use super::remote::Remote;
use super::rule::{OnFailure, Rule, Scope};
use super::store::{
    Charge, MemorySlots, MemoryStore, OpenError, Place, RedisSlot, Settlement, Store, StoreError, StoreKind,
    nothing,
};
use crate::clock::{self, Micros};

/// Decides whether requests may pass. One for each worker thread; the memory behind all of them is shared.
#[derive(Debug)]
pub struct Limiter {
    /// The store, when it is the memory; else what counts while Redis cannot.
    memory: Arc<MemoryStore>,
    redis: Option<Remote>,
    leases: LeaseIds,
}

/// Makes the ids of leases: a random beginning and a count, so that no two of a fleet are alike.
#[derive(Debug)]
struct LeaseIds {
    worker: u64,
    count: Cell<u64>,
}

impl LeaseIds {
    fn new() -> Self {
        Self { worker: random::bits(), count: Cell::new(0) }
    }

    fn next(&self) -> String {
        self.count.set(self.count.get().wrapping_add(1));
        format!("{:016x}-{:x}", self.worker, self.count.get())
    }
}

/// The permission to forward one request. Only [`Limiter::admit`] gives one, and forwarding takes one.
#[derive(Debug)]
#[must_use = "a permission that is not used lets nothing through"]
pub struct Pass {
    _only_the_limiter_makes_one: (),
}

impl Pass {
    fn granted() -> Self {
        Self { _only_the_limiter_makes_one: () }
    }

    /// A pass that nobody decided on.
    #[cfg(test)]
    pub(crate) fn for_tests() -> Self {
        Self::granted()
    }
}

/// What was decided, by whom, and what it took to ask.
#[derive(Debug)]
pub struct Ruling {
    /// The state of every limit; `None` when nobody counted: no limits, or no store.
    pub decision: Option<Decision>,
    /// Who decided.
    pub source: Source,
    /// The question to the configured store; `None` when there was nothing to ask.
    pub asked: Option<Asked>,
    /// The slots that the request holds until this is dropped, if a concurrency limit lends any.
    pub slots: SmallVec<[Slots; 1]>,
    /// What it takes to settle what was charged.
    pub receipts: Receipts,
}

/// Slots of concurrency limits that one request holds. Dropping them gives them back.
#[derive(Debug)]
pub enum Slots {
    /// In this process.
    Memory(MemorySlots),
    /// In Redis.
    Redis(RedisSlot),
}

/// What it takes to settle the charges of one request: one for its caller's limits, one for a pool's.
#[derive(Debug, Default)]
pub struct Receipts {
    own: Option<Receipt>,
    pool: Option<Receipt>,
}

/// One charge that was made.
#[derive(Debug)]
struct Receipt {
    at: Micros,
    /// For each of the rules, whether it was charged.
    charged: SmallVec<[bool; 4]>,
    kept: Kept,
}

/// Where a charge was written.
#[derive(Debug, Clone, Copy)]
enum Kept {
    Memory(Place),
    Redis,
}

/// One question to the configured store.
#[derive(Debug)]
pub struct Asked {
    /// Which store, as in `store.kind`.
    pub store: &'static str,
    /// How long it took.
    pub took: Duration,
    /// How it failed; `None` if it did not.
    pub error: Option<StoreError>,
}

/// How long a process that starts waits for its store before it serves.
const PREPARED_WITHIN: Duration = Duration::from_millis(500);

impl Limiter {
    /// A limiter on a store of this kind. `memory` is that store, or what counts while Redis cannot.
    ///
    /// # Errors
    /// When the address of Redis cannot be understood. A Redis that is away is no error.
    pub fn new(kind: &StoreKind, memory: Arc<MemoryStore>, common: Arc<Common>) -> Result<Self, OpenError> {
        let redis = match kind {
            StoreKind::Memory => None,
            StoreKind::Redis(settings) => Some(Remote::new(settings, common)?),
        };
        Ok(Self { memory, redis, leases: LeaseIds::new() })
    }

    /// Begins to connect to the store, if it is one that must be connected to. Only inside of a worker's runtime.
    pub fn connect(&self) {
        if let Some(redis) = &self.redis {
            redis.connect(&self.memory);
        }
    }

    /// Waits until the store can be asked, or is found to be away; half a second at most, all workers together.
    pub async fn prepared(&self) {
        if let Some(redis) = &self.redis {
            redis.store.prepared(redis.common.prepared_by(clock::instant() + PREPARED_WITHIN)).await;
        }
    }

    /// Charges every limit of the request, or none. Without a [`Pass`] a limit refuses, as the decision says; or, where
    /// there is no decision, the store is away and `on_failure` is `deny`.
    ///
    /// The limits of a pool are asked behind the caller's own, in a step of their own: they are counted for everybody, and so
    /// somewhere else. When they refuse, the caller gets back what was charged.
    pub async fn admit(&self, charge: Charge<'_>, on_failure: OnFailure) -> (Ruling, Option<Pass>) {
        // Only Redis wants to know who holds a slot, and until when an answer is of use. One deadline for both steps: a request
        // spends its budget once.
        let deadline = self.redis.as_ref().map(|redis| redis.store.deadline());
        let lease = deadline.map_or_else(String::new, |_| self.lease_for(charge));
        let charge = Charge { lease: &lease, deadline, ..charge };
        let (own, pool) = own_and_pool(charge);
        let (mut ruling, pass) = self.admit_part(own, on_failure).await;
        let Some(pool) = pool.filter(|_| pass.is_some()) else {
            return (ruling, pass);
        };
        // Whatever ends this before the pool has agreed, be it that the client leaves, gives the charge back.
        let mut unfinished = Unfinished { limiter: self, charge: own, receipt: ruling.receipts.own.take() };
        let (of_pool, pass) = match &self.redis {
            Some(redis) if !redis.store.has_time(deadline) => {
                self.without_store(redis, pool, on_failure, None)
            }
            _ => self.admit_part(pool, on_failure).await,
        };
        if pass.is_some() {
            ruling.receipts.own = unfinished.receipt.take();
        } else {
            ruling.slots.clear();
        }
        drop(unfinished);
        (ruling.with_pool(of_pool, own), pass)
    }

    /// Puts the charge of a request right that did cost `spent` units. Nobody waits for it.
    pub fn settle(&self, charge: Charge<'_>, receipts: Receipts, spent: u64) {
        if spent == charge.cost.get() {
            return;
        }
        let (own, pool) = own_and_pool(charge);
        self.settle_part(own, receipts.own, spent);
        if let Some(pool) = pool {
            self.settle_part(pool, receipts.pool, spent);
        }
    }

    /// Decides on the limits of one caller, or of one pool.
    async fn admit_part(&self, charge: Charge<'_>, on_failure: OnFailure) -> (Ruling, Option<Pass>) {
        if charge.rules.is_empty() {
            return (uncounted(None), Some(Pass::granted()));
        }
        let started = clock::instant();
        let Some(redis) = &self.redis else {
            let (decision, place, slots) = self.memory.admit(charge, nothing);
            let asked = Asked { store: "memory", took: started.elapsed(), error: None };
            return counted(
                decision,
                Kept::Memory(place),
                slots.map(Slots::Memory),
                Source::Store,
                Some(asked),
            );
        };
        if let Err(failure) = redis.collect(charge, &self.memory).await
            && on_failure == OnFailure::Local
        {
            let asked = |error| Asked { store: "redis", took: started.elapsed(), error: Some(error) };
            return self.without_store(redis, charge, on_failure, failure.map(asked));
        }
        let answer = redis.store.decide(charge).await;
        let took = started.elapsed();
        match answer {
            Ok(decision) => {
                if on_failure == OnFailure::Local {
                    redis.common.local().note(charge, &decision, self.memory.now());
                }
                let slots = redis.store.slots(charge, &decision).map(Slots::Redis);
                let asked = Asked { store: "redis", took, error: None };
                counted(decision, Kept::Redis, slots, Source::Store, Some(asked))
            }
            // Nobody was asked.
            Err(StoreError::Tripped) => self.without_store(redis, charge, on_failure, None),
            Err(error) => {
                let asked = Asked { store: "redis", took, error: Some(error) };
                self.without_store(redis, charge, on_failure, Some(asked))
            }
        }
    }

    fn without_store(
        &self,
        redis: &Remote,
        charge: Charge<'_>,
        on_failure: OnFailure,
        asked: Option<Asked>,
    ) -> (Ruling, Option<Pass>) {
        match on_failure {
            OnFailure::Local => {
                let (decision, place, slots) = redis.decide_alone(charge, &self.memory);
                counted(decision, Kept::Memory(place), slots.map(Slots::Memory), Source::Local, asked)
            }
            OnFailure::Allow => (uncounted(asked), Some(Pass::granted())),
            OnFailure::Deny => (uncounted(asked), None),
        }
    }

    fn settle_part(&self, charge: Charge<'_>, receipt: Option<Receipt>, spent: u64) {
        let Some(receipt) = receipt else { return };
        let settlement = Settlement { charge, charged: &receipt.charged, at: receipt.at, spent };
        match (receipt.kept, &self.redis) {
            (Kept::Memory(place), None) => self.memory.settle(settlement, place),
            (Kept::Memory(place), Some(redis)) => redis.settle_alone(settlement, place, &self.memory),
            (Kept::Redis, Some(redis)) => redis.store.settle(settlement),
            // Only a limiter that has a Redis gives such a receipt.
            (Kept::Redis, None) => {}
        }
    }

    /// A new id if one of the limits lends slots.
    fn lease_for(&self, charge: Charge<'_>) -> String {
        if charge.rules.iter().any(Rule::lends_slots) { self.leases.next() } else { String::new() }
    }
}

/// A charge that is given back unless somebody takes its receipt.
struct Unfinished<'a> {
    limiter: &'a Limiter,
    charge: Charge<'a>,
    receipt: Option<Receipt>,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.limiter.settle_part(self.charge, self.receipt.take(), 0);
    }
}

/// The caller's own limits of a charge, and those of the pool.
///
/// A pool is the same one whoever calls: nothing of the caller or its plan may choose the counter or the month.
fn own_and_pool(charge: Charge<'_>) -> (Charge<'_>, Option<Charge<'_>>) {
    let own = charge.rules.partition_point(|rule| rule.scope != Scope::Pool);
    let (own, pool) = charge.rules.split_at(own);
    let of_pool =
        Charge { caller: charge.pool, plan: charge.pool, anchor: Anchor::FIRST, rules: pool, ..charge };
    (Charge { rules: own, ..charge }, (!pool.is_empty()).then_some(of_pool))
}

impl Ruling {
    /// This ruling on the caller's own limits, which let the request pass, with the one on the pool.
    fn with_pool(self, pool: Self, own: Charge<'_>) -> Self {
        let decision = match (self.decision, pool.decision) {
            (Some(decision), Some(of_pool)) => Some(decision.with_pool(of_pool, own.rules, own.cost)),
            (None, of_pool) if own.rules.is_empty() => of_pool,
            // Without an answer on one of them there is no decision on all.
            _ => None,
        };
        let mut slots = self.slots;
        slots.extend(pool.slots);
        Self {
            decision,
            source: self.source.with(pool.source),
            asked: Asked::both(self.asked, pool.asked),
            slots,
            receipts: Receipts { own: self.receipts.own, pool: pool.receipts.own },
        }
    }
}

impl Asked {
    /// Two questions, one after the other, as one.
    fn both(first: Option<Self>, second: Option<Self>) -> Option<Self> {
        match (first, second) {
            (Some(first), Some(second)) => Some(Self {
                store: second.store,
                took: first.took + second.took,
                error: second.error.or(first.error),
            }),
            (first, second) => second.or(first),
        }
    }
}

fn counted(
    decision: Decision,
    kept: Kept,
    slots: Option<Slots>,
    source: Source,
    asked: Option<Asked>,
) -> (Ruling, Option<Pass>) {
    let pass = decision.allowed.then(Pass::granted);
    let receipt = || Receipt { at: decision.at, charged: decision.charged().collect(), kept };
    let receipts = Receipts { own: pass.is_some().then(receipt), pool: None };
    let slots = slots.into_iter().collect();
    (Ruling { decision: Some(decision), source, asked, slots, receipts }, pass)
}

fn uncounted(asked: Option<Asked>) -> Ruling {
    let (slots, receipts) = (SmallVec::new(), Receipts::default());
    Ruling { decision: None, source: Source::None, asked, slots, receipts }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::clock::ManualClock;
    use crate::limit::algorithm::{Algorithm, Quota, SlidingWindow};
    use crate::limit::{Calendar, Unit};

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    /// A limiter on the memory, for so many callers, at noon of 18 March 2026.
    fn limiter(max_callers: usize) -> Limiter {
        let clock = Arc::new(ManualClock::at(1_773_835_200_000_000));
        let memory = Arc::new(MemoryStore::new(max_callers, clock));
        Limiter::new(&StoreKind::Memory, memory, Arc::default()).unwrap()
    }

    fn passes(limiter: &Limiter, charge: Charge<'_>) -> bool {
        let answer = limiter.admit(charge, OnFailure::Deny).now_or_never();
        answer.expect("the memory answers at once").1.is_some()
    }

    /// A pool had the month of whoever called: the first caller of another anchor day found nothing used.
    #[test]
    fn a_pools_month_is_the_same_for_all_callers() {
        let calendar = Calendar::new(Unit::Month, "UTC").unwrap();
        let rules = [Rule::quota("month", Scope::Pool, Quota::new(n(2)).unwrap(), calendar)];
        let limiter = limiter(100);
        let passed = (0..8).filter(|call| {
            let anchor = Anchor::on(if call % 2 == 0 { 1 } else { 15 }).unwrap();
            let charge = Charge::new("acct.one", "free", &rules, n(1));
            passes(&limiter, Charge { pool: "pool.search", anchor, ..charge })
        });
        assert_eq!(passed.count(), 2);
    }

    /// Where the memory is full, callers share an entry of their plan: a pool had one for each plan, and so its limit.
    #[test]
    fn a_pool_of_a_full_memory_is_one_pool_for_all_plans() {
        let window = |name, scope, limit| {
            Rule::new(
                name,
                scope,
                Algorithm::SlidingWindow(SlidingWindow::new(n(limit), 60_000_000).unwrap()),
            )
        };
        let rules = [window("own", Scope::Plan, 100), window("all", Scope::Pool, 2)];
        let limiter = limiter(1);
        assert!(passes(&limiter, Charge::new("acct.first", "free", &rules[..1], n(1))));
        let passed = (0..8).filter(|call| {
            let plan = if call % 2 == 0 { "free" } else { "pro" };
            let charge = Charge::new("acct.one", plan, &rules, n(1));
            passes(&limiter, Charge { pool: "pool.search", ..charge })
        });
        assert_eq!(passed.count(), 2);
    }
}
