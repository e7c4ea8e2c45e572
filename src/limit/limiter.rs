//! One verb, `admit`: the store decides, and when it cannot, `on_failure` does.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use super::decision::{Decision, Source};
use super::rule::OnFailure;
use super::rule::Rule;
use super::store::{
    Charge, Guarded, MemorySlots, MemoryStore, OpenError, RedisSlot, Store, StoreError, StoreKind,
};
use crate::clock;

/// Decides whether requests may pass. One for each worker thread; the memory behind all of them is shared.
#[derive(Debug)]
pub struct Limiter {
    /// The store, when it is the memory; else what counts while Redis cannot.
    memory: Arc<MemoryStore>,
    redis: Option<Guarded>,
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
        Self { worker: RandomState::new().hash_one(()), count: Cell::new(0) }
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
    pub slots: Option<Slots>,
}

/// Slots of concurrency limits that one request holds. Dropping them gives them back.
#[derive(Debug)]
pub enum Slots {
    /// In this process.
    Memory(MemorySlots),
    /// In Redis.
    Redis(RedisSlot),
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

impl Limiter {
    /// A limiter on a store of this kind. `memory` is that store, or what counts while Redis cannot.
    ///
    /// # Errors
    /// When the address of Redis cannot be understood. A Redis that is away is no error.
    pub fn new(kind: &StoreKind, memory: Arc<MemoryStore>) -> Result<Self, OpenError> {
        let redis = match kind {
            StoreKind::Memory => None,
            StoreKind::Redis(settings) => Some(Guarded::new(settings)?),
        };
        Ok(Self { memory, redis, leases: LeaseIds::new() })
    }

    /// Begins to connect to the store, if it is one that must be connected to. Only inside of a worker's runtime.
    pub fn connect(&self) {
        if let Some(redis) = &self.redis {
            redis.connect();
        }
    }

    /// Charges every limit of the request, or none. Without a [`Pass`] a limit refuses, as the decision says; or, where
    /// there is no decision, the store is away and `on_failure` is `deny`.
    pub async fn admit(&self, charge: Charge<'_>, on_failure: OnFailure) -> (Ruling, Option<Pass>) {
        if charge.rules.is_empty() {
            return (uncounted(None), Some(Pass::granted()));
        }
        let started = clock::instant();
        let Some(redis) = &self.redis else {
            let (decision, slots) = self.memory.admit(charge);
            let asked = Asked { store: "memory", took: started.elapsed(), error: None };
            return counted(decision, slots.map(Slots::Memory), Source::Store, asked);
        };
        let lease = self.lease_for(charge);
        let charge = Charge { lease: &lease, ..charge };
        let answer = redis.decide(charge).await;
        let took = started.elapsed();
        match answer {
            Ok(decision) => {
                let slots = if decision.allowed { redis.slots(charge) } else { None };
                let asked = Asked { store: "redis", took, error: None };
                counted(decision, slots.map(Slots::Redis), Source::Store, asked)
            }
            Err(error) => {
                self.without_store(charge, on_failure, Asked { store: "redis", took, error: Some(error) })
            }
        }
    }

    /// A new id if one of the limits lends slots.
    fn lease_for(&self, charge: Charge<'_>) -> String {
        if charge.rules.iter().any(Rule::lends_slots) { self.leases.next() } else { String::new() }
    }

    fn without_store(
        &self,
        charge: Charge<'_>,
        on_failure: OnFailure,
        asked: Asked,
    ) -> (Ruling, Option<Pass>) {
        match on_failure {
            OnFailure::Local => {
                let (decision, slots) = self.memory.admit(charge);
                counted(decision, slots.map(Slots::Memory), Source::Local, asked)
            }
            OnFailure::Allow => (uncounted(Some(asked)), Some(Pass::granted())),
            OnFailure::Deny => (uncounted(Some(asked)), None),
        }
    }
}

fn counted(decision: Decision, slots: Option<Slots>, source: Source, asked: Asked) -> (Ruling, Option<Pass>) {
    let pass = decision.allowed.then(Pass::granted);
    (Ruling { decision: Some(decision), source, asked: Some(asked), slots }, pass)
}

fn uncounted(asked: Option<Asked>) -> Ruling {
    Ruling { decision: None, source: Source::None, asked, slots: None }
}
