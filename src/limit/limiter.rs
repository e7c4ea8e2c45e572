//! One verb, `admit`: the store decides, and when it cannot, `on_failure` does.

use std::sync::Arc;
use std::time::Duration;

use super::decision::{Decision, Source};
use super::rule::OnFailure;
use super::store::{Charge, Guarded, MemoryStore, Store, StoreError};
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
pub struct Pass {
    ruling: Ruling,
}

/// Why a request may not pass.
#[derive(Debug)]
pub enum Denied {
    /// A limit refuses it.
    ByLimit(Ruling),
    /// The store cannot answer, and `on_failure` is `deny`.
    StoreAway(Ruling),
}

/// What was decided, by whom, and what it cost to ask.
#[derive(Debug)]
pub struct Ruling {
    /// The state of every limit; `None` when nobody counted.
    pub decision: Option<Decision>,
    /// Who decided.
    pub source: Source,
    /// How long Redis was asked, and how it failed if it did; `None` when it was not asked.
    pub asked: Option<Asked>,
}

/// One question to Redis.
#[derive(Debug)]
pub struct Asked {
    /// How long it took.
    pub took: Duration,
    /// How it failed; `None` if it did not.
    pub error: Option<StoreError>,
}

impl Pass {
    /// What was decided.
    #[must_use]
    pub fn ruling(&self) -> &Ruling {
        &self.ruling
    }
}

impl Limiter {
    /// A limiter on the memory store.
    #[must_use]
    pub fn in_memory(memory: Arc<MemoryStore>) -> Self {
        Self { memory, redis: None }
    }

    /// A limiter on Redis, with `memory` to count in while Redis cannot.
    #[must_use]
    pub fn on_redis(redis: Guarded, memory: Arc<MemoryStore>) -> Self {
        Self {
            memory,
            redis: Some(redis),
        }
    }

    /// Charges every limit of the request, or none.
    ///
    /// # Errors
    /// The refusal, if a limit refuses, or if the store is away and `on_failure` is `deny`.
    pub async fn admit(&self, charge: Charge<'_>, on_failure: OnFailure) -> Result<Pass, Denied> {
        if charge.rules.is_empty() {
            return Ok(Pass {
                ruling: Ruling {
                    decision: None,
                    source: Source::None,
                    asked: None,
                },
            });
        }
        let Some(redis) = &self.redis else {
            return rule(self.memory.decide_now(charge), Source::Store, None);
        };
        let started = clock::instant();
        let answer = redis.decide(charge).await;
        let took = started.elapsed();
        match answer {
            Ok(decision) => rule(decision, Source::Store, Some(Asked { took, error: None })),
            Err(error) => self.without_store(
                charge,
                on_failure,
                Asked {
                    took,
                    error: Some(error),
                },
            ),
        }
    }

    fn without_store(&self, charge: Charge<'_>, on_failure: OnFailure, asked: Asked) -> Result<Pass, Denied> {
        let uncounted = |asked| Ruling {
            decision: None,
            source: Source::None,
            asked: Some(asked),
        };
        match on_failure {
            OnFailure::Local => rule(self.memory.decide_now(charge), Source::Local, Some(asked)),
            OnFailure::Allow => Ok(Pass {
                ruling: uncounted(asked),
            }),
            OnFailure::Deny => Err(Denied::StoreAway(uncounted(asked))),
        }
    }
}

fn rule(decision: Decision, source: Source, asked: Option<Asked>) -> Result<Pass, Denied> {
    let allowed = decision.allowed;
    let ruling = Ruling {
        decision: Some(decision),
        source,
        asked,
    };
    if allowed {
        Ok(Pass { ruling })
    } else {
        Err(Denied::ByLimit(ruling))
    }
}
