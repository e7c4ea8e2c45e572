//! A store that may fail, with its failures bounded: one deadline for the whole step, a cap on what waits, no queue.
//!
//! Nobody else knows that Redis can fail. What a failure means for the request is `on_failure`'s to say, in
//! [`Limiter`](crate::limit::Limiter).

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{
    Charge, Decision, FailureKind, OpenError, RedisSettings, RedisSlot, RedisStore, Settlement, Store,
    StoreError,
};
use crate::clock;
use crate::limit::Tally;

/// Requests of one worker that may wait for Redis at the same time. One more does not queue: it is a failure at once.
const IN_FLIGHT_MAX: usize = 256;

/// After so many timeouts in a row the connection is dropped: a frozen Redis would take thousands of checks into its
/// socket buffers and execute them all when it wakes.
const TIMEOUTS_MAX: u32 = 5;

/// How often a worker says that Redis refuses to decide, for each kind of refusal: with every request it would fill the log.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// Redis within a budget.
#[derive(Debug)]
pub struct Guarded {
    store: RedisStore,
    budget: Duration,
    in_flight: Cell<usize>,
    timeouts: Cell<u32>,
    tally: Arc<Tally>,
    /// When it was last said that Redis refuses, by the place of the kind.
    complained: RefCell<[Option<Instant>; FailureKind::ALL.len()]>,
}

impl Guarded {
    /// A Redis store that may take `settings.budget` for each decision.
    ///
    /// # Errors
    /// When an address cannot be understood.
    pub fn new(settings: &RedisSettings, tally: Arc<Tally>) -> Result<Self, OpenError> {
        let store = RedisStore::new(settings, Arc::clone(&tally))?;
        let (in_flight, timeouts) = Default::default();
        let complained = RefCell::new([None; FailureKind::ALL.len()]);
        Ok(Self { store, budget: settings.budget, in_flight, timeouts, tally, complained })
    }

    /// Begins to connect; see [`RedisStore::connect`].
    pub fn connect(&self) {
        self.store.connect();
    }

    /// The slots that a request of this decision holds; see [`RedisStore::slots`].
    #[must_use]
    pub fn slots(&self, charge: Charge<'_>, decision: &Decision) -> Option<RedisSlot> {
        self.store.slots(charge, decision)
    }

    /// Settles a charge soon; see [`RedisStore::settle`].
    pub fn settle(&self, settlement: Settlement<'_>) {
        self.store.settle(settlement);
    }

    /// When a request that comes now is no longer waited for.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        clock::instant() + self.budget
    }

    fn enter(&self) -> Option<InFlight<'_>> {
        let now = self.in_flight.get();
        (now < IN_FLIGHT_MAX).then(|| {
            self.in_flight.set(now + 1);
            InFlight(&self.in_flight)
        })
    }

    /// Says what is wrong with Redis or with what it holds: it answers, so nobody would look for it there.
    fn complain(&self, error: &StoreError) {
        let (now, kind) = (clock::instant(), error.kind());
        let mut complained = self.complained.borrow_mut();
        let Some(last) = complained.get_mut(kind.place()) else { return };
        if last.is_none_or(|last| now.duration_since(last) >= COMPLAIN_EVERY) {
            *last = Some(now);
            tracing::warn!(kind = kind.name(), %error, "Redis answers, and does not decide");
        }
    }

    fn count_timeout(&self) {
        self.timeouts.set(self.timeouts.get() + 1);
        if self.timeouts.get() >= TIMEOUTS_MAX {
            self.timeouts.set(0);
            tracing::warn!(timeouts = TIMEOUTS_MAX, "Redis does not answer; dropping the connection");
            self.store.disconnect();
        }
    }
}

impl Store for Guarded {
    async fn decide(&self, charge: Charge<'_>) -> Result<Decision, StoreError> {
        let _in_flight = self.enter().ok_or_else(|| {
            self.tally.count_failure(FailureKind::Saturated);
            StoreError::Saturated
        })?;
        let deadline = charge.deadline.unwrap_or_else(|| self.deadline());
        let charge = Charge { deadline: Some(deadline), ..charge };
        let answer = tokio::time::timeout_at(deadline.into(), self.store.decide(charge)).await;
        let answer = answer.unwrap_or(Err(StoreError::Timeout));
        if let Err(error) = &answer {
            self.tally.count_failure(error.kind());
        }
        match &answer {
            Err(StoreError::Timeout) => self.count_timeout(),
            _ => self.timeouts.set(0),
        }
        if let Err(error @ (StoreError::Refused(_) | StoreError::Unreadable(_) | StoreError::Nonsense(_))) =
            &answer
        {
            self.complain(error);
        }
        answer
    }
}

/// One request that waits; counted down when it is answered or given up, in whatever way.
struct InFlight<'a>(&'a Cell<usize>);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
