//! What happens to counters behind the requests' backs, counted for whoever shows it.

use std::sync::atomic::{AtomicU64, Ordering};

use super::store::FailureKind;

/// Counts since the start, of all workers together.
#[derive(Debug)]
pub struct Tally {
    lost: AtomicU64,
    /// By the place of the kind.
    failures: [AtomicU64; FailureKind::ALL.len()],
    /// Connections to a Redis that may evict.
    evicting: AtomicU64,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            lost: AtomicU64::default(),
            failures: std::array::from_fn(|_| AtomicU64::default()),
            evicting: AtomicU64::default(),
        }
    }
}

impl Tally {
    /// Messages to Redis that were lost: charges that were not settled, slots that come back only when their lease ends.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn count_lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the store failed in each way, questions and attempts to connect together.
    pub fn failures(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.failures.iter().map(|count| count.load(Ordering::Relaxed));
        FailureKind::ALL.iter().map(|kind| kind.name()).zip(counts)
    }

    pub(super) fn count_failure(&self, kind: FailureKind) {
        if let Some(count) = self.failures.get(kind.place()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether Redis may evict counters, as far as a connection has been told.
    #[must_use]
    pub fn may_evict(&self) -> bool {
        self.evicting.load(Ordering::Relaxed) > 0
    }

    /// A connection sees a Redis that may evict, or sees it no more. Whether it is the first one that does.
    pub(super) fn note_eviction(&self, seen: bool) -> bool {
        if seen {
            self.evicting.fetch_add(1, Ordering::Relaxed) == 0
        } else {
            self.evicting.fetch_sub(1, Ordering::Relaxed);
            false
        }
    }
}
