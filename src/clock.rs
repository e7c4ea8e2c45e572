//! Time as a value that can be held still.
//!
//! Everything that decides by time takes a [`Micros`] as an argument; only the edges read a clock. Two clocks exist:
//! [`SystemClock`], which never goes backwards, and [`ManualClock`] for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A point in time, in microseconds since the clock's own beginning.
///
/// Redis counts from the Unix epoch, [`SystemClock`] from an arbitrary moment before the process began. Points of two
/// different clocks must never be compared. Below 2^53, so that a Lua number holds every value exactly.
pub type Micros = u64;

/// Where a store takes its time from.
pub trait Clock: Send + Sync + std::fmt::Debug + 'static {
    /// The current time.
    fn now(&self) -> Micros;
}

/// The monotonic clock of the machine: never steps when somebody sets the wall clock.
#[derive(Debug)]
pub struct SystemClock {
    beginning: Instant,
}

/// So that "long before the first request" can be written as a time: one day, in microseconds.
const HEAD_START: Micros = 86_400_000_000;

impl SystemClock {
    /// A clock whose beginning lies one day before now.
    #[must_use]
    pub fn new() -> Self {
        Self { beginning: instant() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Micros {
        HEAD_START + micros(self.beginning.elapsed())
    }
}

/// A clock that moves only when told to, in both directions.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that stands at `now`.
    #[must_use]
    pub fn at(now: Micros) -> Self {
        Self(AtomicU64::new(now))
    }

    /// Sets the clock, forwards or backwards.
    pub fn set(&self, now: Micros) {
        self.0.store(now, Ordering::SeqCst);
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(micros(by), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Micros {
        self.0.load(Ordering::SeqCst)
    }
}

/// The machine's monotonic time, for measuring how long something took.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the monotonic clock")]
#[must_use]
pub fn instant() -> Instant {
    Instant::now()
}

/// The wall clock, for log lines and metrics: no decision may depend on it.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the wall clock")]
#[must_use]
pub fn wall() -> std::time::SystemTime {
    std::time::SystemTime::now()
}

/// A duration in whole microseconds, capped at `u64::MAX` (584,000 years).
#[must_use]
pub fn micros(duration: Duration) -> Micros {
    Micros::try_from(duration.as_micros()).unwrap_or(Micros::MAX)
}
