//! Redis, and what a gateway does by itself while it cannot decide: it counts its share of the limits in memory, and writes back what
//! was used.

use std::cell::OnceCell;
use std::num::NonZeroU64;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::task::JoinHandle;

use super::algorithm::Share;
use super::common::Common;
use super::decision::Decision;
use super::local::{Dues, Taken};
use super::rule::Rule;
use super::store::{
    Charge, MemorySlots, MemoryStore, OpenError, Place, RedisSettings, RedisStore, Settlement, StoreError,
    within,
};
use crate::clock;

/// Redis, and what is needed while it cannot decide.
#[derive(Debug)]
pub(super) struct Remote {
    pub(super) store: Rc<RedisStore>,
    pub(super) common: Arc<Common>,
    /// What this gateway counts by itself; `None`: an equal share for each that lives.
    share: Option<Share>,
    /// What writes back the use of callers that do not come by themselves; `None` before the worker is connected.
    paying: OnceCell<JoinHandle<()>>,
}

impl Remote {
    /// Redis as `settings` say. Nothing connects yet.
    ///
    /// # Errors
    /// When its address cannot be understood.
    pub(super) fn new(settings: &RedisSettings, common: Arc<Common>) -> Result<Self, OpenError> {
        let store = Rc::new(RedisStore::new(settings, Arc::clone(&common))?);
        Ok(Self { store, common, share: settings.local_share, paying: OnceCell::new() })
    }

    /// Begins to connect, and to write back what is owed. Only inside of a worker's runtime.
    pub(super) fn connect(&self, memory: &Arc<MemoryStore>) {
        self.store.connect();
        self.paying.get_or_init(|| {
            let (store, common) = (Rc::downgrade(&self.store), Arc::clone(&self.common));
            tokio::task::spawn_local(keep_paying(store, common, Arc::clone(memory)))
        });
    }

    fn share(&self) -> Share {
        self.share.unwrap_or_else(|| self.common.local().equal_share())
    }

    /// The limits as a gateway with this share counts them by itself.
    fn shared(charge: Charge<'_>, share: Share) -> SmallVec<[Rule; 4]> {
        charge.rules.iter().map(|rule| rule.shared(share, charge.cost)).collect()
    }

    /// Decides in this process, on its share of the limits, going on from what the store has last said.
    pub(super) fn decide_alone(
        &self,
        charge: Charge<'_>,
        memory: &Arc<MemoryStore>,
    ) -> (Decision, Place, Option<MemorySlots>) {
        let (local, share) = (self.common.local(), self.share());
        let shared = Self::shared(charge, share);
        let seed = |at: usize, now, is_kept| {
            local.seed(charge, &charge.rules[at], &shared[at].algorithm, share, now, is_kept)
        };
        let (decision, place, slots) = memory.admit(Charge { rules: &shared, ..charge }, seed);
        if decision.allowed {
            local.owe(charge, &shared, decision.charged(), charge.cost.get(), decision.at);
        }
        (decision, place, slots)
    }

    /// Settles a charge that was made in this process.
    pub(super) fn settle_alone(&self, settlement: Settlement<'_>, place: Place, memory: &MemoryStore) {
        let charge = settlement.charge;
        let shared = Self::shared(charge, self.share());
        memory.settle(Settlement { charge: Charge { rules: &shared, ..charge }, ..settlement }, place);
        let charged = settlement.charged.iter().copied();
        let missing = settlement.spent.saturating_sub(charge.cost.get());
        let back = charge.cost.get().saturating_sub(settlement.spent);
        if missing > 0 {
            self.common.local().owe(charge, &shared, charged, missing, memory.now());
        } else if back > 0 {
            self.common.local().owe_less(charge, charged, back);
        }
    }

    /// Begins to write back what the caller has used while the store was away. Then the store may be asked to decide: it hears of
    /// the question behind that.
    ///
    /// What this worker asks behind a payment goes over the same connection, so nobody waits for the payment's answer: there may
    /// be no time left then. Another worker's payment is waited for.
    ///
    /// # Errors
    /// When the question would be ahead of a payment; with the store's own failure, if it is one.
    pub(super) async fn collect(
        &self,
        charge: Charge<'_>,
        memory: &Arc<MemoryStore>,
    ) -> Result<(), Option<StoreError>> {
        let (local, caller) = (self.common.local(), charge.caller);
        let (started, mut has_paid) = (clock::instant(), false);
        while local.is_owed() {
            match local.dues(caller) {
                Dues::Nothing => break,
                // A payment that is not answered is lost. Questions end the doubt, one way or the other.
                Dues::Owed if !self.store.admits_beyond_doubt(caller) => break,
                // It came back at once, and would again.
                Dues::Owed if has_paid => return Err(None),
                Dues::Owed => {
                    // The question would wait for that, too.
                    if self.store.connected(caller, charge.deadline).await.is_err() {
                        break;
                    }
                    self.pay_in_passing(caller, memory);
                    has_paid = true;
                }
                Dues::Paying(mut until) => {
                    let settled = until.changed().map(|_| Ok(()));
                    if within(charge.deadline, settled).await.is_err() {
                        // It was sent, and not answered for as long as an answer may take.
                        if local.is_newly_late(caller) {
                            self.store.note_late(caller);
                        }
                        return Err(Some(StoreError::Timeout));
                    }
                    // The store would take about as long again.
                    let waited = started.elapsed();
                    if charge.deadline.is_some_and(|deadline| clock::instant() + waited > deadline) {
                        return Err(None);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends what this caller owes, and leaves the answer to a task of its own, which outlives a client that leaves.
    fn pay_in_passing(&self, caller: &str, memory: &Arc<MemoryStore>) {
        let Some(taken) = self.common.local().take(caller) else { return };
        let (store, common, memory) = (Rc::clone(&self.store), Arc::clone(&self.common), Arc::clone(memory));
        let mut paying = Box::pin(async move { pay(&store, &common, &memory, &taken).await });
        // With this it is sent.
        if paying.as_mut().now_or_never().is_none() {
            tokio::task::spawn_local(paying);
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.paying.get().into_iter().for_each(JoinHandle::abort);
    }
}

/// How often it is looked whether callers have used something that can be written back.
const PAY_EVERY: Duration = Duration::from_secs(1);

/// Callers whose use is written back at the same time.
const PAYING_MAX: usize = 64;

/// Writes back the use of callers that do not come by themselves, for as long as the store is there.
async fn keep_paying(store: Weak<RedisStore>, common: Arc<Common>, memory: Arc<MemoryStore>) {
    loop {
        tokio::time::sleep(PAY_EVERY).await;
        loop {
            let Some(store) = store.upgrade() else { return };
            if !common.local().is_owed() || common.has_tripped() {
                break;
            }
            let debtors = common.local().debtors(PAYING_MAX, |caller| store.admits_beyond_doubt(caller));
            if debtors.is_empty() {
                break;
            }
            let taken: Vec<Taken> = debtors.iter().filter_map(|caller| common.local().take(caller)).collect();
            if taken.is_empty() {
                break;
            }
            let paying = taken.iter().map(|taken| pay(&store, &common, &memory, taken));
            // Without a connection this would come back at once, again and again, and let nobody else work.
            if join_all(paying).await.contains(&false) {
                break;
            }
        }
    }
}

/// Writes back what a caller has used, as far as it still counts; then this process keeps nothing of it.
///
/// What was surely not done is owed on. What may have been, and is not answered in time, is not sent again: a caller pays once
/// at most. Returns whether nothing is owed on.
async fn pay(store: &RedisStore, common: &Common, memory: &MemoryStore, taken: &Taken) -> bool {
    let caller = taken.caller();
    let paid = join_all(taken.owed().iter().map(|owed| async move {
        let key = owed.key();
        let now = memory.now();
        let counting = owed.counting(memory.kept(caller, &key), now);
        let standing = owed.counted.standing(counting, owed.rule.period_of(now, owed.anchor), now);
        let counts = owed.counted.capacity().get().saturating_sub(standing.remaining);
        // What the store knew of is older than what was used since, and so gone first: all of the rest is new.
        let units = owed.units.min(counts);
        if units == 0 {
            return true;
        }
        let charge = Charge {
            api_key: &owed.api_key,
            anchor: owed.anchor,
            ..Charge::new(caller, "", std::slice::from_ref(&owed.rule), NonZeroU64::MIN)
        };
        let settlement = Settlement { charge, charged: &[true], at: 0, spent: units.saturating_add(1) };
        match store.settle_now(settlement).await {
            Ok(()) => {
                common.local().note_written_back(caller, owed, standing, now);
                memory.forget(caller, &key);
            }
            // Not sent, or an error is all that came of it.
            Err(StoreError::Tripped | StoreError::Disconnected | StoreError::Refused(_)) => {
                common.local().owe_again(caller, owed);
                return false;
            }
            Err(_) => common.count_lost(),
        }
        true
    }));
    paid.await.into_iter().all(|paid| paid)
}
