//! What happens to counters behind the requests' backs, counted for whoever shows it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts since the start, of all workers together.
#[derive(Debug, Default)]
pub struct Tally {
    lost: AtomicU64,
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
}
