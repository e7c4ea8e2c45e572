//! Counters in this process: nothing to install, shared by all workers, bounded, expiring.
//!
//! All limits of a caller live in one entry, and entries are spread over stripes by a keyed hash of the caller; so one
//! lock makes a decision atomic, and callers hardly ever wait for each other.
//!
//! Everything has an end. A caller whose limits are all as good as new is forgotten. At `max_callers`, who is not known
//! yet shares one overflow entry with everybody else on the same plan who is not: strict, but no attacker can push out a
//! caller that was denied, nor win a fresh allowance by making the store forget, nor use up what another plan has. Who gets
//! an entry of its own while the shared one still counts begins with a copy of it: part of that may have been its use.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{Charge, Decision, Settlement, Store, StoreError};
use crate::clock::{Clock, Micros};
use crate::limit::algorithm::{self, Limited, State};
use crate::limit::stripes::Stripes;
use crate::limit::{Anchor, Rule};

/// A full table looks for expired callers at most so often, in microseconds: the search costs more than a decision.
const SWEEP_PAUSE: Micros = 100_000;

/// Counters in this process.
#[derive(Debug)]
pub struct MemoryStore {
    clock: Arc<dyn Clock>,
    stripes: Stripes<Stripe>,
    /// What callers of a plan share that came when the table was full. As many entries as there are plans and pools.
    overflow: Mutex<HashMap<Box<str>, Caller>>,
    max_callers: AtomicUsize,
    callers: AtomicUsize,
    overflowed: AtomicU64,
}

/// The keys of the limits of one charge.
type Keys<'a> = SmallVec<[Cow<'a, Arc<str>>; 4]>;

#[derive(Debug, Default)]
struct Stripe {
    callers: HashMap<Box<str>, Caller>,
    swept: Micros,
}

/// All that is kept of one caller.
#[derive(Debug, Default, Clone)]
struct Caller {
    /// From when on all of it is as good as nothing.
    expires: Micros,
    limits: SmallVec<[(Arc<str>, State); 2]>,
}

impl MemoryStore {
    /// An empty store for at most `max_callers` callers, that takes its time from `clock`.
    #[must_use]
    pub fn new(max_callers: usize, clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            stripes: Stripes::default(),
            overflow: Mutex::default(),
            max_callers: AtomicUsize::new(max_callers),
            callers: AtomicUsize::new(0),
            overflowed: AtomicU64::new(0),
        }
    }

    /// Holds at most so many callers from now on. Where there are more, none is forgotten before its time; there is only no
    /// room for others.
    pub fn hold_at_most(&self, max_callers: usize) {
        self.max_callers.store(max_callers, Ordering::Relaxed);
    }

    /// Decides at once: nothing here waits for anybody but a lock held for a few hundred nanoseconds.
    ///
    /// Slots that are taken stay taken; a request takes them through [`admit`](Self::admit).
    #[must_use]
    pub fn decide_now(&self, charge: Charge<'_>) -> Decision {
        self.decide_somewhere(charge, nothing).0
    }

    /// Decides at once; says where the charge was written, and which slots the request holds from now on, if any limit lends
    /// them. `seed` says with what a limit begins instead of with what is kept of it, by its place, the time, and whether
    /// anything is kept.
    #[must_use]
    pub fn admit(
        self: &Arc<Self>,
        charge: Charge<'_>,
        seed: impl Fn(usize, Micros, bool) -> Option<State>,
    ) -> (Decision, Place, Option<MemorySlots>) {
        let (decision, place) = self.decide_somewhere(charge, seed);
        let lent = charge.rules.iter().zip(decision.charged());
        let lent = lent.filter(|(rule, charged)| *charged && rule.lends_slots());
        let keys: SmallVec<[Arc<str>; 2]> =
            lent.map(|(rule, _)| rule.key(charge.api_key).into_owned()).collect();
        let (caller, plan) = (charge.caller, charge.plan);
        let slots = (!keys.is_empty()).then(|| MemorySlots {
            store: Arc::clone(self),
            caller: caller.into(),
            plan: plan.into(),
            place,
            keys,
        });
        (decision, place, slots)
    }

    /// Settles a charge that was written at this place. What is no longer kept needs no settling but for what is missing.
    pub fn settle(&self, settlement: Settlement<'_>, place: Place) {
        let charge = settlement.charge;
        match place {
            Place::Own => {
                let mut stripe = self.stripes.of(charge.caller).lock();
                let now = self.clock.now();
                if let Some(caller) = stripe.callers.get_mut(charge.caller) {
                    caller.settle(settlement, now);
                } else if settlement.spent > charge.cost.get() && self.has_room(&mut stripe, now) {
                    let mut caller = self.newcomer(charge.plan, now);
                    caller.settle(settlement, now);
                    stripe.callers.insert(charge.caller.into(), caller);
                    self.callers.fetch_add(1, Ordering::Relaxed);
                }
            }
            Place::Overflow => {
                let now = self.clock.now();
                self.overflow.lock().entry(charge.plan.into()).or_default().settle(settlement, now);
            }
        }
    }

    fn decide_somewhere(
        &self,
        charge: Charge<'_>,
        seed: impl Fn(usize, Micros, bool) -> Option<State>,
    ) -> (Decision, Place) {
        let mut stripe = self.stripes.of(charge.caller).lock();
        // Read behind the lock, so that time never runs backwards between two decisions of a caller.
        let now = self.clock.now();
        if let Some(caller) = stripe.callers.get_mut(charge.caller) {
            return (caller.decide(charge, now, seed), Place::Own);
        }
        if !self.has_room(&mut stripe, now) {
            drop(stripe);
            self.overflowed.fetch_add(1, Ordering::Relaxed);
            let mut overflow = self.overflow.lock();
            let shared = overflow.entry(charge.plan.into()).or_default();
            return (shared.decide(charge, now, nothing), Place::Overflow);
        }
        let mut caller = self.newcomer(charge.plan, now);
        let decision = caller.decide(charge, now, seed);
        // Who is refused at once has used nothing, unless something was known of it.
        if caller.expires > now || caller.holds_slots() {
            stripe.callers.insert(charge.caller.into(), caller);
            self.callers.fetch_add(1, Ordering::Relaxed);
        }
        (decision, Place::Own)
    }

    /// What is kept of a caller alone for a limit, by its key.
    #[must_use]
    pub fn kept(&self, caller: &str, key: &str) -> Option<State> {
        let stripe = self.stripes.of(caller).lock();
        let limits = &stripe.callers.get(caller)?.limits;
        limits.iter().find(|(name, _)| **name == *key).map(|(_, state)| state.clone())
    }

    /// Forgets that.
    pub fn forget(&self, caller: &str, key: &str) {
        let mut stripe = self.stripes.of(caller).lock();
        if let Some(caller) = stripe.callers.get_mut(caller) {
            caller.take(key);
        }
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Micros {
        self.clock.now()
    }

    fn give_back(&self, slots: &MemorySlots) {
        match slots.place {
            Place::Own => {
                let mut stripe = self.stripes.of(&slots.caller).lock();
                stripe
                    .callers
                    .get_mut(&*slots.caller)
                    .into_iter()
                    .for_each(|caller| caller.give_back(&slots.keys));
            }
            Place::Overflow => {
                let mut overflow = self.overflow.lock();
                overflow.get_mut(&*slots.plan).into_iter().for_each(|caller| caller.give_back(&slots.keys));
            }
        }
    }

    /// Callers that are held at the moment.
    #[must_use]
    pub fn callers(&self) -> usize {
        self.callers.load(Ordering::Relaxed)
    }

    /// Decisions that were made on the shared overflow entry, since the start.
    #[must_use]
    pub fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Forgets the expired callers of one stripe, the `turn`-th in an endless round. Called about once a second, so that
    /// memory falls back after a rush without anybody ever waiting for the whole table.
    pub fn sweep(&self, turn: usize) {
        let now = self.clock.now();
        let mut stripe = self.stripes.in_turn(turn).lock();
        self.forget_expired(&mut stripe, now);
    }

    /// What a caller begins with that gets an entry of its own.
    fn newcomer(&self, plan: &str, now: Micros) -> Caller {
        if self.overflowed() == 0 {
            return Caller::default();
        }
        let mut overflow = self.overflow.lock();
        match overflow.get(plan) {
            Some(shared) if shared.expires > now => shared.without_slots(),
            // Slots that are lent come back to this entry, so it stays for as long as there are any.
            Some(shared) if !shared.holds_slots() => {
                overflow.remove(plan);
                Caller::default()
            }
            Some(_) | None => Caller::default(),
        }
    }

    fn has_room(&self, stripe: &mut Stripe, now: Micros) -> bool {
        let full = || self.callers.load(Ordering::Relaxed) >= self.max_callers.load(Ordering::Relaxed);
        if full() && now.saturating_sub(stripe.swept) >= SWEEP_PAUSE {
            self.forget_expired(stripe, now);
        }
        !full()
    }

    fn forget_expired(&self, stripe: &mut Stripe, now: Micros) {
        let before = stripe.callers.len();
        stripe.swept = now;
        stripe.callers.retain(|_, caller| caller.expires > now || caller.holds_slots());
        let after = stripe.callers.len();
        self.callers.fetch_sub(before - after, Ordering::Relaxed);
        if after < stripe.callers.capacity() / 4 {
            stripe.callers.shrink_to(after * 2);
        }
    }
}

/// Every limit goes on with what is kept of it.
pub fn nothing(_: usize, _: Micros, _: bool) -> Option<State> {
    None
}

/// Where a charge was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the caller's own entry.
    Own,
    /// In what the callers of the plan share.
    Overflow,
}

/// Slots that one request holds. Dropping them gives them back.
#[derive(Debug)]
pub struct MemorySlots {
    store: Arc<MemoryStore>,
    caller: Box<str>,
    plan: Box<str>,
    place: Place,
    keys: SmallVec<[Arc<str>; 2]>,
}

impl Drop for MemorySlots {
    fn drop(&mut self) {
        self.store.give_back(self);
    }
}

impl Store for MemoryStore {
    async fn decide(&self, charge: Charge<'_>) -> Result<Decision, StoreError> {
        Ok(self.decide_now(charge))
    }
}

impl Caller {
    fn decide(
        &mut self,
        charge: Charge<'_>,
        now: Micros,
        seed: impl Fn(usize, Micros, bool) -> Option<State>,
    ) -> Decision {
        let keys: Keys<'_> = charge.rules.iter().map(|rule| rule.key(charge.api_key)).collect();
        let kept = keys.iter().enumerate().map(|(at, key)| {
            let kept = self.take(key);
            seed(at, now, kept != State::Vacant).unwrap_or(kept)
        });
        let mut states: SmallVec<[State; 4]> = kept.collect();
        let mut limits: SmallVec<[Limited<'_>; 4]> = charge
            .rules
            .iter()
            .zip(&mut states)
            .map(|(rule, state)| {
                let period = rule.period_of(now, charge.anchor);
                Limited::new(&rule.algorithm, state, period, rule.role(charge.draw))
            })
            .collect();
        algorithm::decide(&mut limits, now, charge.cost);
        let standings = limits.iter().map(|limited| limited.standing).collect();
        let decision = Decision::new(now, standings, charge.rules, charge.draw);
        drop(limits);
        for ((rule, key), state) in charge.rules.iter().zip(&keys).zip(states) {
            self.keep(rule, key, state, charge.anchor, now);
        }
        decision
    }

    fn settle(&mut self, settlement: Settlement<'_>, now: Micros) {
        let Settlement { charge, charged, at, spent } = settlement;
        for (rule, _) in charge.rules.iter().zip(charged).filter(|(_, charged)| **charged) {
            let key = rule.key(charge.api_key);
            let mut state = self.take(&key);
            let period = rule.period_of(now, charge.anchor);
            let mut limited = Limited::new(&rule.algorithm, &mut state, period, rule.role(charge.draw));
            algorithm::settle(&mut limited, now, at, charge.cost, spent);
            self.keep(rule, &key, state, charge.anchor, now);
        }
    }

    fn keep(&mut self, rule: &Rule, key: &Arc<str>, state: State, anchor: Anchor, now: Micros) {
        let expires_in = rule.algorithm.expires_in(&state, rule.period_of(now, anchor), now);
        self.expires = self.expires.max(now.saturating_add(expires_in));
        self.put(key, state);
    }

    /// The same usage for somebody else. Slots stay behind: whoever holds one gives it back where it was lent.
    fn without_slots(&self) -> Self {
        let mut other = self.clone();
        other.limits.retain(|(_, state)| state.slots() == 0);
        other
    }

    fn holds_slots(&self) -> bool {
        self.limits.iter().any(|(_, state)| state.slots() > 0)
    }

    fn give_back(&mut self, keys: &[Arc<str>]) {
        for (_, state) in self.limits.iter_mut().filter(|(name, _)| keys.contains(name)) {
            *state = State::Slots(state.slots().saturating_sub(1));
        }
    }

    fn take(&mut self, key: &str) -> State {
        self.limits
            .iter_mut()
            .find(|(name, _)| &**name == key)
            .map(|(_, state)| std::mem::take(state))
            .unwrap_or_default()
    }

    fn put(&mut self, key: &Arc<str>, state: State) {
        match self.limits.iter_mut().find(|(name, _)| name == key) {
            Some((_, place)) => *place = state,
            None => self.limits.push((Arc::clone(key), state)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::time::Duration;

    use super::*;
    use crate::clock::ManualClock;
    use crate::limit::algorithm::{Algorithm, SlidingWindow};
    use crate::limit::stripes::STRIPES;
    use crate::limit::{Rule, Scope};

    fn rules(limit: u64) -> [Rule; 1] {
        let window = SlidingWindow::new(NonZeroU64::new(limit).unwrap(), 1_000_000).unwrap();
        [Rule::new("second", Scope::Plan, Algorithm::SlidingWindow(window))]
    }

    fn charge<'a>(caller: &'a str, rules: &'a [Rule]) -> Charge<'a> {
        Charge::new(caller, "plan", rules, NonZeroU64::MIN)
    }

    #[test]
    fn a_full_table_forgets_nobody_and_strangers_share_one_allowance() {
        let clock = Arc::new(ManualClock::at(1));
        let store = MemoryStore::new(2, clock.clone());
        let rules = rules(2);
        let ask = |caller| store.decide_now(charge(caller, &rules)).allowed;
        assert!(ask("a") && ask("a") && ask("b"));
        // The table is full: c and d share two units, and a stays denied.
        assert!(ask("c") && ask("d"));
        assert!(!ask("c") && !ask("e") && !ask("a"));
        assert!(ask("b"));
        assert_eq!((store.callers(), store.overflowed()), (2, 4));
        // Once a and b have expired there is room again.
        clock.advance(Duration::from_secs(2));
        (0..STRIPES).for_each(|turn| store.sweep(turn));
        assert_eq!(store.callers(), 0);
        assert!(ask("c") && ask("c") && !ask("c"));
    }

    #[test]
    fn a_caller_that_leaves_the_shared_allowance_wins_no_second_one() {
        let clock = Arc::new(ManualClock::at(1));
        let store = MemoryStore::new(1, clock.clone());
        let rules = rules(2);
        let ask = |caller| store.decide_now(charge(caller, &rules)).allowed;
        let sweep = || (0..STRIPES).for_each(|turn| store.sweep(turn));
        assert!(ask("a"));
        clock.advance(Duration::from_millis(500));
        assert!(ask("b") && ask("b") && !ask("b"));
        // a has expired and left room, and what b has used still counts.
        clock.advance(Duration::from_millis(600));
        sweep();
        assert!(!ask("b"));
        clock.advance(Duration::from_millis(400));
        assert!(ask("b") && ask("b") && !ask("b"));
        assert_eq!(store.callers(), 1);
    }

    /// A caller who left the shared allowance took a copy of the slots that others held in it, and nobody gave those back.
    #[test]
    fn leaving_the_shared_allowance_takes_no_slot_along() {
        use crate::limit::algorithm::Concurrency;
        let clock = Arc::new(ManualClock::at(1));
        let store = Arc::new(MemoryStore::new(1, clock.clone()));
        let slots = Concurrency::new(NonZeroU64::new(1).unwrap()).unwrap();
        let window = SlidingWindow::new(NonZeroU64::new(100).unwrap(), 10_000_000).unwrap();
        let short = rules(1);
        let both = [
            Rule::new("inflight", Scope::Plan, Algorithm::Concurrency(slots)),
            Rule::new("ten", Scope::Plan, Algorithm::SlidingWindow(window)),
        ];
        assert!(store.decide_now(charge("a", &short)).allowed);
        // The table is full: b holds its slot in the shared entry.
        let (_, _, held) = store.admit(charge("b", &both), nothing);
        assert!(held.is_some());
        // There is room again, and c takes the shared usage over, but not the slot of b.
        clock.advance(Duration::from_secs(2));
        (0..STRIPES).for_each(|turn| store.sweep(turn));
        let (decision, _, own) = store.admit(charge("c", &both), nothing);
        assert!(decision.allowed);
        drop((held, own));
        for caller in ["b", "c"] {
            clock.advance(Duration::from_secs(20));
            (0..STRIPES).for_each(|turn| store.sweep(turn));
            assert!(store.admit(charge(caller, &both), nothing).0.allowed, "{caller}");
        }
    }

    #[test]
    fn threads_that_collide_admit_exactly_the_limit() {
        let store = MemoryStore::new(10, Arc::new(crate::clock::SystemClock::new()));
        // Sixty seconds, so that no unit comes back during the test.
        let window = SlidingWindow::new(NonZeroU64::new(1_000).unwrap(), 60_000_000).unwrap();
        let rules = [Rule::new("minute", Scope::Plan, Algorithm::SlidingWindow(window))];
        let admitted = AtomicUsize::new(0);
        let barrier = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    barrier.wait();
                    for _ in 0..500 {
                        let allowed = store.decide_now(charge("same", &rules)).allowed;
                        admitted.fetch_add(usize::from(allowed), Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 1_000);
    }
}
