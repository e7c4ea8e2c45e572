//! One server that keeps counters, as all workers of the process see it together: what one of them finds out about it, the
//! others know.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::breaker::{Breaker, Phase};
use super::{FailureKind, StoreError};
use crate::clock;
use crate::limit::random;
use crate::limit::rule::draw;

/// How often it is said that a server fails, for each kind of failure: with every request it would fill the log.
pub(super) const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// One server that keeps counters.
#[derive(Debug)]
pub(in crate::limit) struct Shard {
    /// What the log calls it. No secret.
    name: Box<str>,
    breaker: Mutex<Breaker>,
    phase: watch::Sender<Phase>,
    /// How often it has tripped.
    trips: AtomicU64,
    /// When it was last said that it fails, by the place of the kind.
    complained: Mutex<[Option<Instant>; FailureKind::ALL.len()]>,
}

impl Shard {
    /// A server that nobody has asked yet.
    #[must_use]
    pub(in crate::limit) fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            breaker: Mutex::new(Breaker::new(clock::instant())),
            phase: watch::Sender::new(Phase::Healthy),
            trips: AtomicU64::new(0),
            complained: Mutex::new([None; FailureKind::ALL.len()]),
        }
    }

    /// What the log calls it.
    #[must_use]
    pub(in crate::limit) fn name(&self) -> &str {
        &self.name
    }

    /// Whether it may be asked for this caller.
    #[must_use]
    pub(in crate::limit) fn admits(&self, caller: &str) -> bool {
        self.with(|breaker, now| breaker.admits(now, || draw(caller)), None)
    }

    /// Whether it may be asked for this caller, and there is no doubt that it will answer.
    #[must_use]
    pub(in crate::limit) fn admits_beyond_doubt(&self, caller: &str) -> bool {
        let admits =
            |breaker: &mut Breaker, now| breaker.is_beyond_doubt(now) && breaker.admits(now, || draw(caller));
        self.with(admits, None)
    }

    /// A call was answered, or failed like this.
    pub(in crate::limit) fn record(&self, outcome: Result<(), &StoreError>) {
        self.with(|breaker, now| breaker.record(now, outcome.is_ok()), outcome.err());
        if let Err(error @ (StoreError::Refused(_) | StoreError::Nonsense(_))) = outcome {
            self.complain(error);
        }
    }

    /// Where its breaker stands.
    #[must_use]
    pub(in crate::limit) fn phase(&self) -> Phase {
        self.with(Breaker::phase, None)
    }

    /// Where its breaker stands, and every change of it.
    #[must_use]
    pub(in crate::limit) fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// When the next probe is due; `None` if none is needed.
    #[must_use]
    pub(in crate::limit) fn next_probe(&self) -> Option<Instant> {
        self.breaker.lock().next_probe()
    }

    /// Whether whoever asks is to probe now, which may take `patience`.
    #[must_use]
    pub(in crate::limit) fn claim_probe(&self, patience: Duration) -> bool {
        self.with(|breaker, now| breaker.claim_probe(now, patience), None)
    }

    /// A probe was answered, or not.
    pub(in crate::limit) fn probed(&self, answered: bool) {
        self.with(|breaker, now| breaker.probed(now, answered, jitter()), None);
        if answered {
            // The phase is the same. But now is the time to connect.
            self.phase.send_modify(|_| {});
        }
    }

    /// Whether it has tripped and answers probes: callers may return soon.
    #[must_use]
    pub(in crate::limit) fn is_answering(&self) -> bool {
        self.breaker.lock().is_answering()
    }

    /// How often it has tripped, since the start.
    #[must_use]
    pub(in crate::limit) fn trips(&self) -> u64 {
        self.trips.load(Ordering::Relaxed)
    }

    /// Says what is wrong with the server or with what it holds: it answers, so nobody would look for it there.
    pub(in crate::limit) fn complain(&self, error: &StoreError) {
        let kind = error.kind();
        if self.may_complain(kind) {
            tracing::warn!(server = %self.name, kind = kind.name(), %error, "Redis answers, and does not decide");
        }
    }

    /// Whether it is time to say that the server fails in this way. Whoever asks is to say it.
    #[must_use]
    pub(in crate::limit) fn may_complain(&self, kind: FailureKind) -> bool {
        let now = clock::instant();
        let mut complained = self.complained.lock();
        let Some(last) = complained.get_mut(kind.place()) else { return false };
        let is_time = last.is_none_or(|last| now.duration_since(last) >= COMPLAIN_EVERY);
        if is_time {
            *last = Some(now);
        }
        is_time
    }

    /// Works on the breaker, and tells everybody if that, or time alone, has changed its phase.
    fn with<T>(&self, work: impl FnOnce(&mut Breaker, Instant) -> T, error: Option<&StoreError>) -> T {
        let mut breaker = self.breaker.lock();
        let now = clock::instant();
        let before = breaker.last_phase();
        let result = work(&mut breaker, now);
        let phase = breaker.phase(now);
        if phase != before {
            // Under the lock, so that changes are told in their order.
            self.tell(phase, error);
        }
        result
    }

    fn tell(&self, phase: Phase, error: Option<&StoreError>) {
        let server = &*self.name;
        match phase {
            Phase::Tripped => {
                self.trips.fetch_add(1, Ordering::Relaxed);
                let error = error.map(ToString::to_string).unwrap_or_default();
                tracing::warn!(
                    server,
                    error,
                    "Redis fails too often: on_failure decides, and nobody asks it until it answers probes"
                );
            }
            Phase::Probing => tracing::info!(server, "Redis answers probes: callers return to it"),
            Phase::Healthy => tracing::info!(server, "Redis decides again"),
        }
        self.phase.send_replace(phase);
    }
}

/// A random number from 0 to 1.
fn jitter() -> f64 {
    let bits = u32::try_from(random::bits() >> 32).unwrap_or(0);
    f64::from(bits) / f64::from(u32::MAX)
}
