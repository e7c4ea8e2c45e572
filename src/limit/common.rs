//! What the limiters of all workers share about the store: they learn from each other how it does.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::store::{Phase, Shard, SharedMap};

/// Shared by the limiters of all workers.
#[derive(Debug, Default)]
pub struct Common {
    lost: AtomicU64,
    shards: Mutex<Shards>,
    slots: SharedMap,
}

#[derive(Debug, Default)]
struct Shards {
    /// By address.
    known: HashMap<Box<str>, Arc<Shard>>,
    /// Trips of those that are known no more.
    past: u64,
}

impl Common {
    /// Messages to Redis that were lost: charges that were not settled, slots that come back only when their lease ends.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn count_lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Where the breaker of the store stands; of several shards, that of the worst.
    #[must_use]
    pub fn phase(&self) -> Phase {
        let shards = self.shards.lock();
        shards.known.values().map(|shard| shard.phase()).max().unwrap_or(Phase::Healthy)
    }

    /// How often breakers have tripped, since the start.
    #[must_use]
    pub fn trips(&self) -> u64 {
        let shards = self.shards.lock();
        shards.past + shards.known.values().map(|shard| shard.trips()).sum::<u64>()
    }

    /// Which node of a cluster keeps which slot.
    pub(super) fn slots(&self) -> &SharedMap {
        &self.slots
    }

    /// The server at this address, which is told from all others by it.
    pub(super) fn shard(&self, address: &str) -> Arc<Shard> {
        let mut shards = self.shards.lock();
        if let Some(shard) = shards.known.get(address) {
            return Arc::clone(shard);
        }
        let shard = Arc::new(Shard::new(address));
        shards.known.insert(address.into(), Arc::clone(&shard));
        shard
    }

    /// Forgets servers that keep no counters any more.
    pub(super) fn keep_shards(&self, is_kept: impl Fn(&str) -> bool) {
        let mut shards = self.shards.lock();
        let Shards { known, past } = &mut *shards;
        known.retain(|address, shard| {
            let kept = is_kept(address);
            if !kept {
                *past += shard.trips();
            }
            kept
        });
    }
}
