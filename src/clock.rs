//! Time as a value that can be held still.
//!
//! Everything that decides by time takes a [`Micros`] as an argument; only the edges read a clock. Two clocks exist:
//! [`SystemClock`], which never goes backwards, and [`ManualClock`] for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A point in time, in microseconds since 1970, by the clock it was read from.
///
/// Points of two different clocks must never be compared. Below 2^53, so that a Lua number holds every value exactly.
pub type Micros = u64;

/// Where a store takes its time from.
pub trait Clock: Send + Sync + std::fmt::Debug + 'static {
    /// The current time.
    fn now(&self) -> Micros;
}

/// The monotonic clock of the machine, set once by the wall clock: it knows the date, for quotas, and never steps when
/// somebody sets the wall clock later.
#[derive(Debug)]
pub struct SystemClock {
    beginning: Instant,
    /// The wall clock's time at the beginning.
    wall: Micros,
}

impl SystemClock {
    /// A clock that goes on from the wall clock's time.
    #[must_use]
    pub fn new() -> Self {
        Self { beginning: instant(), wall: wall_micros() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Micros {
        self.wall + micros(self.beginning.elapsed())
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

/// The wall clock in microseconds since 1970; 0 if it is set to before. It says the date, for calendars; nothing may
/// depend on how it moves.
#[must_use]
pub fn wall_micros() -> Micros {
    wall().duration_since(std::time::SystemTime::UNIX_EPOCH).map_or(0, micros)
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
