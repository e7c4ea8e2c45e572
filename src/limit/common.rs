//! What the limiters of all workers share about the store: they learn from each other how it does.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::local::Local;
use super::random;
use super::store::{FailureKind, Phase, Shard, SharedMap};

/// Shared by the limiters of all workers.
#[derive(Debug)]
pub struct Common {
    /// A name for the process, unlike that of every other.
    id: Box<str>,
    /// Whether the log is left to others who see the same servers.
    is_quiet: bool,
    lost: AtomicU64,
    failures: Failures,
    /// Connections to a Redis that may evict.
    evicting: AtomicU64,
    shards: Mutex<Shards>,
    hash_slots: SharedMap,
    local: Arc<Local>,
    /// Nobody counts the gateways again before.
    counted_until: Mutex<Option<Instant>>,
    /// Until then workers wait for the store before they serve.
    prepared_by: OnceLock<Instant>,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            id: format!("{:016x}{:016x}", random::bits(), random::bits()).into(),
            is_quiet: false,
            lost: AtomicU64::new(0),
            failures: Failures::default(),
            evicting: AtomicU64::new(0),
            shards: Mutex::default(),
            hash_slots: SharedMap::default(),
            local: Arc::default(),
            counted_until: Mutex::default(),
            prepared_by: OnceLock::new(),
        }
    }
}

/// How often the store failed, by the place of the kind.
#[derive(Debug)]
struct Failures([AtomicU64; FailureKind::ALL.len()]);

impl Default for Failures {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::default()))
    }
}

#[derive(Debug, Default)]
struct Shards {
    /// By address.
    known: HashMap<Box<str>, Arc<Shard>>,
    /// Trips of those that are known no more.
    past: u64,
}

impl Common {
    /// For a look at the servers beside that of the limiters, which write the log.
    #[must_use]
    pub fn quiet() -> Self {
        Self { is_quiet: true, ..Self::default() }
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.is_quiet
    }

    /// Messages to Redis that were lost: charges that were not settled or written back, slots that come back only when their lease
    /// ends.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed).saturating_add(self.local.lost())
    }

    pub(super) fn count_lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the store failed in each way, questions and attempts to connect together.
    pub fn failures(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.failures.0.iter().map(|count| count.load(Ordering::Relaxed));
        FailureKind::ALL.iter().map(|kind| kind.name()).zip(counts)
    }

    pub(super) fn count_failure(&self, kind: FailureKind) {
        if let Some(count) = self.failures.0.get(kind.place()) {
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

    /// Whether the store is asked for nobody: it has tripped, of several shards all of them.
    #[must_use]
    pub fn has_tripped(&self) -> bool {
        let shards = self.shards.lock();
        !shards.known.is_empty() && shards.known.values().all(|shard| shard.phase() == Phase::Tripped)
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

    /// How many gateways count in the store, as far as it was heard; 0 before.
    #[must_use]
    pub fn gateways(&self) -> u64 {
        self.local.gateways()
    }

    /// Callers whose use, while the store was away, is yet to be written back.
    #[must_use]
    pub fn debtors(&self) -> usize {
        self.local.owing()
    }

    /// What is kept for the time when the store cannot decide.
    pub(super) fn local(&self) -> &Arc<Local> {
        &self.local
    }

    /// A name for the process, unlike that of every other.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Whether whoever asks is to count the gateways now. Nobody else is told so for `pause`.
    pub(super) fn claims_count(&self, now: Instant, pause: Duration) -> bool {
        let mut until = self.counted_until.lock();
        let is_due = until.is_none_or(|until| until <= now);
        if is_due {
            *until = Some(now + pause);
        }
        is_due
    }

    /// Until when a worker waits for the store before it serves: what the first of them has said.
    pub(super) fn prepared_by(&self, at_latest: Instant) -> Instant {
        *self.prepared_by.get_or_init(|| at_latest)
    }

    /// Which node of a cluster keeps which hash slot.
    pub(super) fn hash_slots(&self) -> &SharedMap {
        &self.hash_slots
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
