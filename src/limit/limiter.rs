//! One verb, `admit`: the store decides, and when it cannot, `on_failure` does.

use std::sync::Arc;
use std::time::Duration;

use super::decision::{Decision, Source};
use super::rule::OnFailure;
use super::store::{Charge, Guarded, MemoryStore, OpenError, Store, StoreError, StoreKind};
use crate::clock;

/// Decides whether requests may pass. One for each worker thread; the memory behind all of them is shared.
#[derive(Debug)]
pub struct Limiter {
    /// The store, when it is the memory; else what counts while Redis cannot.
    memory: Arc<MemoryStore>,
    redis: Option<Guarded>,
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
        Ok(Self { memory, redis })
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
            let decision = self.memory.decide_now(charge);
            let asked = Asked { store: "memory", took: started.elapsed(), error: None };
            return counted(decision, Source::Store, Some(asked));
        };
        let answer = redis.decide(charge).await;
        let took = started.elapsed();
        match answer {
            Ok(decision) => {
                counted(decision, Source::Store, Some(Asked { store: "redis", took, error: None }))
            }
            Err(error) => {
                self.without_store(charge, on_failure, Asked { store: "redis", took, error: Some(error) })
            }
        }
    }

    fn without_store(
        &self,
        charge: Charge<'_>,
        on_failure: OnFailure,
        asked: Asked,
    ) -> (Ruling, Option<Pass>) {
        match on_failure {
            OnFailure::Local => counted(self.memory.decide_now(charge), Source::Local, Some(asked)),
            OnFailure::Allow => (uncounted(Some(asked)), Some(Pass::granted())),
            OnFailure::Deny => (uncounted(Some(asked)), None),
        }
    }
}

fn counted(decision: Decision, source: Source, asked: Option<Asked>) -> (Ruling, Option<Pass>) {
    let pass = decision.allowed.then(Pass::granted);
    (Ruling { decision: Some(decision), source, asked }, pass)
}

fn uncounted(asked: Option<Asked>) -> Ruling {
    Ruling { decision: None, source: Source::None, asked }
}
