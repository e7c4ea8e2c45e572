//! What a gateway remembers of its callers while the store decides, and owes the store when it had to decide alone.
//!
//! While the store is away each gateway counts its [`Share`] of every limit in its own memory. A caller does not begin anew
//! then: what the store had [last said](Local::note) of it counts. And what it uses meanwhile is [written back](Debt) when the
//! store returns.

use std::borrow::Cow;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::watch;

use super::algorithm::{Algorithm, Micros, Share, Standing, State};
use super::calendar::Anchor;
use super::decision::Decision;
use super::rule::Rule;
use super::store::Charge;
use super::stripes::{STRIPES, Stripes};

/// Callers of which it is remembered how they stood, at most; those who came last.
const SEEN_MAX: usize = 131_072;

/// Callers whose use can be written back. That of further ones is lost to the store.
const OWING_MAX: usize = 65_536;

/// What the workers of one process share for the time when the store cannot decide.
#[derive(Debug, Default)]
pub(super) struct Local {
    stripes: Stripes<Stripe>,
    /// Callers with debts, those included whose debts are being written back.
    owing: AtomicUsize,
    /// How often use was not kept to be written back: there were too many debtors.
    lost: AtomicU64,
    gateways: Mutex<Heard>,
}

/// How many gateways count in the store: the largest number of the running period, and of the one before. 0 before any was heard.
#[derive(Debug, Default)]
struct Heard {
    began: Option<Instant>,
    most: u64,
    before: u64,
}

/// How long a number of gateways is remembered at least; twice as long at most. A store that has lost its data hears of them one by
/// one, and a gateway that believed the first number would count a whole limit.
const HEARD_FOR: Duration = Duration::from_secs(7);

#[derive(Debug, Default)]
struct Stripe {
    /// How callers stood, by caller. When the younger half is full, the older one is forgotten.
    younger: HashMap<Box<str>, Seen>,
    older: HashMap<Box<str>, Seen>,
    debts: HashMap<Box<str>, Debt>,
    /// What is being written back.
    paying: HashMap<Box<str>, Paying>,
}

/// What one caller owes and a worker is writing back.
#[derive(Debug)]
struct Paying {
    debt: Arc<Debt>,
    by: ThreadId,
    /// Dropped when that has ended.
    under_way: watch::Sender<()>,
    /// Whether a request has waited for it in vain.
    is_late: bool,
}

/// What stands between a caller and the store's decision.
#[derive(Debug)]
pub(super) enum Dues {
    /// Nothing: it owes nothing, or what it owes is ahead of whatever this worker asks.
    Nothing,
    /// It owes something that nobody is writing back.
    Owed,
    /// That is being written back until this changes.
    Paying(watch::Receiver<()>),
}

/// How a caller stood with its limits, by their keys.
type Seen = SmallVec<[(Arc<str>, Stood); 2]>;

#[derive(Debug, Clone, Copy)]
struct Stood {
    remaining: u64,
    next: Micros,
    /// When, by the memory's clock.
    at: Micros,
    /// Whether this process has counted on from here since, in its memory.
    is_counted_on: bool,
}

/// What one caller has used while the store was away.
#[derive(Debug, Default)]
struct Debt(SmallVec<[Owed; 2]>);

impl Debt {
    /// What it has used of the limit of this key.
    fn of(&mut self, key: &str) -> Option<&mut Owed> {
        self.0.iter_mut().find(|owed| **owed.key() == *key)
    }

    /// The units that it has used of the limit of this key.
    fn units(&self, key: &str) -> u64 {
        self.0.iter().find(|owed| **owed.key() == *key).map_or(0, |owed| owed.units)
    }
}

/// What it has used of one limit.
#[derive(Debug, Clone)]
pub(super) struct Owed {
    pub(super) rule: Rule,
    /// What was counted of it: this gateway's share.
    pub(super) counted: Algorithm,
    pub(super) api_key: Box<str>,
    pub(super) anchor: Anchor,
    pub(super) units: u64,
    /// When it last used some, by the memory's clock.
    pub(super) at: Micros,
}

impl Owed {
    /// The key of the limit.
    pub(super) fn key(&self) -> Cow<'_, Arc<str>> {
        self.rule.key(&self.api_key)
    }

    /// What counts of it now, as far as this process knows, if this is `kept` of it. Nothing is kept of a caller who shared an
    /// entry with others, or whose entry has expired: then it counts as if all of it had been used when the last of it was.
    pub(super) fn counting(&self, kept: Option<State>, now: Micros) -> State {
        let used = NonZeroU64::new(self.units.min(self.counted.capacity().get()));
        let alone = || {
            used.map(|used| {
                self.counted.seeded(used, self.at, Micros::MAX, self.rule.period_of(now, self.anchor))
            })
        };
        kept.filter(|state| *state != State::Vacant).or_else(alone).unwrap_or_default()
    }
}

/// What was taken of a caller to be written back. Until this is dropped it counts among those that owe, and nobody asks the store
/// to decide for it ahead of the payment.
#[derive(Debug)]
pub(super) struct Taken {
    caller: Box<str>,
    debt: Arc<Debt>,
    local: Arc<Local>,
}

impl Taken {
    pub(super) fn caller(&self) -> &str {
        &self.caller
    }

    pub(super) fn owed(&self) -> &[Owed] {
        &self.debt.0
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.local.stripes.of(&self.caller).lock().paying.remove(&self.caller);
        self.local.owing.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Local {
    /// So many gateways count in the store at `now`.
    pub(super) fn hear_gateways(&self, gateways: u64, now: Instant) {
        let mut heard = self.gateways.lock();
        if heard.began.is_none_or(|began| now.saturating_duration_since(began) >= HEARD_FOR) {
            *heard = Heard { began: Some(now), most: 0, before: heard.most };
        }
        heard.most = heard.most.max(gateways);
    }

    /// How many gateways count in the store, as far as it was heard; 0 before.
    pub(super) fn gateways(&self) -> u64 {
        let heard = self.gateways.lock();
        heard.most.max(heard.before)
    }

    /// The share of this gateway, if all of them have the same.
    pub(super) fn equal_share(&self) -> Share {
        NonZeroU64::new(self.gateways()).map_or(Share::WHOLE, Share::of_each)
    }

    /// The store has decided: remembers how the caller stands now.
    pub(super) fn note(&self, charge: Charge<'_>, decision: &Decision, now: Micros) {
        let mut stripe = self.stripes.of(charge.caller).lock();
        let seen = stripe.seen(charge.caller);
        for (rule, state) in charge.rules.iter().zip(&decision.states).filter(|(rule, _)| !rule.lends_slots())
        {
            let (remaining, next) = (state.remaining, state.next);
            let stood = Stood { remaining, next, at: now, is_counted_on: false };
            remember(seen, rule.key(charge.api_key), stood);
        }
    }

    /// What this caller has used of a limit alone is written back, and as far as this process knows it stands like this with
    /// the share of it that was counted. Should the store go away again before it decides for the caller, it goes on from here,
    /// and not from how it stood before.
    pub(super) fn note_written_back(&self, caller: &str, owed: &Owed, standing: Standing, now: Micros) {
        let (whole, shared) = (owed.rule.algorithm.capacity().get(), owed.counted.capacity().get());
        let remaining = u128::from(standing.remaining) * u128::from(whole) / u128::from(shared);
        let remaining = u64::try_from(remaining).unwrap_or(whole).min(whole);
        let stood = Stood { remaining, next: standing.next, at: now, is_counted_on: false };
        remember(self.stripes.of(caller).lock().seen(caller), owed.key(), stood);
    }

    /// What counts of a limit when this gateway goes on alone from what was heard; `None` if it is to go on from what it keeps
    /// itself, or nothing was heard. `shared` is its share of the limit; `is_kept`: it keeps something of it. What it keeps from
    /// an earlier time counts no more when the store has decided since.
    pub(super) fn seed(
        &self,
        charge: Charge<'_>,
        rule: &Rule,
        shared: &Algorithm,
        share: Share,
        now: Micros,
        is_kept: bool,
    ) -> Option<State> {
        let key = rule.key(charge.api_key);
        let mut stripe = self.stripes.of(charge.caller).lock();
        let owed = stripe.owed(charge.caller, &key);
        let stood = stripe.stood(charge.caller, &key)?;
        if stood.is_counted_on && is_kept {
            return None;
        }
        stood.is_counted_on = true;
        // Whoever has enough left for a request has it here, too.
        let cost = charge.cost.get();
        let for_one = if stood.remaining >= cost { cost } else { 0 };
        let (whole, left) = (shared.capacity().get(), share.of(stood.remaining).max(for_one));
        // What was counted alone before, and the store does not know of yet, counts as well.
        let used = whole.saturating_sub(left).saturating_add(owed).min(whole);
        let state = NonZeroU64::new(used)
            .map(|used| shared.seeded(used, stood.at, stood.next, rule.period_of(now, charge.anchor)));
        Some(state.unwrap_or_default())
    }

    /// The caller has used so much of its limits at `now`, while the store was away. `shared` is what was counted of each.
    pub(super) fn owe(
        &self,
        charge: Charge<'_>,
        shared: &[Rule],
        charged: impl Iterator<Item = bool>,
        units: u64,
        now: Micros,
    ) {
        let mut stripe = self.stripes.of(charge.caller).lock();
        let Some(debt) = self.debt(&mut stripe, charge.caller) else { return };
        for ((rule, shared), _) in
            charge.rules.iter().zip(shared).zip(charged).filter(|(_, charged)| *charged)
        {
            if rule.lends_slots() {
                continue;
            }
            match debt.of(&rule.key(charge.api_key)) {
                Some(owed) => {
                    owed.units = owed.units.saturating_add(units);
                    owed.counted = shared.algorithm;
                    owed.at = now;
                }
                None => debt.0.push(Owed {
                    rule: rule.clone(),
                    counted: shared.algorithm,
                    api_key: charge.api_key.into(),
                    anchor: charge.anchor,
                    units,
                    at: now,
                }),
            }
        }
    }

    /// The caller got so much back of what it had used, unless that is written back already.
    pub(super) fn owe_less(&self, charge: Charge<'_>, charged: impl Iterator<Item = bool>, units: u64) {
        let mut stripe = self.stripes.of(charge.caller).lock();
        let Some(debt) = stripe.debts.get_mut(charge.caller) else { return };
        for (rule, _) in charge.rules.iter().zip(charged).filter(|(_, charged)| *charged) {
            if let Some(owed) = debt.of(&rule.key(charge.api_key)) {
                owed.units = owed.units.saturating_sub(units);
            }
        }
    }

    /// What was taken could not be written back yet.
    pub(super) fn owe_again(&self, caller: &str, owed: &Owed) {
        let mut stripe = self.stripes.of(caller).lock();
        let Some(debt) = self.debt(&mut stripe, caller) else { return };
        match debt.of(&owed.key()) {
            Some(known) => {
                known.units = known.units.saturating_add(owed.units);
                known.at = known.at.max(owed.at);
            }
            None => debt.0.push(owed.clone()),
        }
    }

    /// The debt of a caller; `None` when there are too many debtors.
    fn debt<'t>(&self, stripe: &'t mut Stripe, caller: &str) -> Option<&'t mut Debt> {
        if !stripe.debts.contains_key(caller) {
            if self.owing.load(Ordering::Relaxed) >= OWING_MAX {
                self.lost.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            self.owing.fetch_add(1, Ordering::Relaxed);
            stripe.debts.insert(caller.into(), Debt::default());
        }
        stripe.debts.get_mut(caller)
    }

    /// Callers that owe something, or whose debt is being written back.
    pub(super) fn owing(&self) -> usize {
        self.owing.load(Ordering::Relaxed)
    }

    /// How often use was lost to the store, because there were too many debtors.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Whether anybody owes anything.
    pub(super) fn is_owed(&self) -> bool {
        self.owing() > 0
    }

    /// What stands between this caller and the store's decision, for the worker that asks.
    pub(super) fn dues(&self, caller: &str) -> Dues {
        let stripe = self.stripes.of(caller).lock();
        let owes_more = stripe.debts.contains_key(caller);
        match stripe.paying.get(caller) {
            Some(paying) if owes_more || paying.by != std::thread::current().id() => {
                Dues::Paying(paying.under_way.subscribe())
            }
            Some(_) => Dues::Nothing,
            None if owes_more => Dues::Owed,
            None => Dues::Nothing,
        }
    }

    /// A request has waited in vain for this caller's payment. Whether it is the first one: one late answer is one failure, however
    /// many wait for it.
    pub(super) fn is_newly_late(&self, caller: &str) -> bool {
        let mut stripe = self.stripes.of(caller).lock();
        stripe.paying.get_mut(caller).is_some_and(|paying| !std::mem::replace(&mut paying.is_late, true))
    }

    /// Takes what this caller owes, unless a part of it is being written back.
    pub(super) fn take(self: &Arc<Self>, caller: &str) -> Option<Taken> {
        let mut stripe = self.stripes.of(caller).lock();
        if stripe.paying.contains_key(caller) {
            return None;
        }
        let (caller, debt) = stripe.debts.remove_entry(caller)?;
        let debt = Arc::new(debt);
        let (by, under_way) = (std::thread::current().id(), watch::Sender::new(()));
        let paying = Paying { debt: Arc::clone(&debt), by, under_way, is_late: false };
        stripe.paying.insert(caller.clone(), paying);
        Some(Taken { caller, debt, local: Arc::clone(self) })
    }

    /// Some of the callers who owe something and can be written back.
    pub(super) fn debtors(&self, most: usize, can_pay: impl Fn(&str) -> bool) -> Vec<Box<str>> {
        let mut debtors = Vec::new();
        for stripe in self.stripes.iter() {
            let stripe = stripe.lock();
            let room = most - debtors.len();
            debtors.extend(stripe.debts.keys().filter(|caller| can_pay(caller)).take(room).cloned());
        }
        debtors
    }
}

/// Remembers how a caller stands with the limit of this key, unless something newer is known.
fn remember(seen: &mut Seen, key: Cow<'_, Arc<str>>, stood: Stood) {
    match seen.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &key) || *known == *key) {
        Some((_, known)) if known.at > stood.at => {}
        Some((_, known)) => *known = stood,
        None => seen.push((key.into_owned(), stood)),
    }
}

impl Stripe {
    /// How a caller stood, to be brought up to date.
    fn seen(&mut self, caller: &str) -> &mut Seen {
        if !self.younger.contains_key(caller) {
            if self.younger.len() >= SEEN_MAX / STRIPES / 2 {
                self.older = std::mem::take(&mut self.younger);
            }
            let seen = self.older.remove(caller).unwrap_or_default();
            self.younger.insert(caller.into(), seen);
        }
        self.younger.entry(caller.into()).or_default()
    }

    fn stood(&mut self, caller: &str, key: &str) -> Option<&mut Stood> {
        let Self { younger, older, .. } = self;
        let seen = younger.get_mut(caller).or_else(|| older.get_mut(caller))?;
        seen.iter_mut().find(|(known, _)| **known == *key).map(|(_, stood)| stood)
    }

    /// What a caller owes of one limit, whether or not that is being written back.
    fn owed(&self, caller: &str, key: &str) -> u64 {
        let owed = self.debts.get(caller).map_or(0, |debt| debt.units(key));
        let paying = self.paying.get(caller).map_or(0, |paying| paying.debt.units(key));
        owed.saturating_add(paying)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::algorithm::{SlidingWindow, Standing};
    use crate::limit::{Scope, States};

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    fn rules() -> [Rule; 1] {
        let window = SlidingWindow::new(n(10), 10_000_000).unwrap();
        [Rule::new("ten", Scope::Plan, Algorithm::SlidingWindow(window))]
    }

    fn decision(rules: &[Rule], remaining: u64) -> Decision {
        let states: States = [Standing { wait: Some(0), remaining, next: 1 }].into_iter().collect();
        Decision::new(1_000, states, rules, 0)
    }

    /// What is left of the share of a half, as it is seeded.
    fn left(local: &Local, caller: &str, rules: &[Rule]) -> Option<u64> {
        let charge = Charge::new(caller, "plan", rules, n(1));
        let share = Share::of_each(n(2));
        let shared = rules[0].algorithm.shared(share, n(1));
        let state = local.seed(charge, &rules[0], &shared, share, 2_000, false)?;
        Some(shared.standing(state, rules[0].period_of(2_000, Anchor::FIRST), 2_000).remaining)
    }

    #[test]
    fn a_caller_goes_on_with_its_share_of_what_was_left() {
        let (local, rules) = (Local::default(), rules());
        assert_eq!(left(&local, "a", &rules), None);
        for (remaining, share) in [(9, 4), (10, 5), (1, 1), (0, 0), (7, 3)] {
            local.note(Charge::new("a", "plan", &rules, n(1)), &decision(&rules, remaining), 1_500);
            assert_eq!(left(&local, "a", &rules).unwrap_or(5), share, "{remaining}");
        }
    }

    #[test]
    fn those_who_came_last_are_remembered_and_memory_is_bounded() {
        let (local, rules) = (Local::default(), rules());
        let caller = |number: usize| format!("acct.{number}");
        for number in 0..SEEN_MAX * 2 {
            local.note(Charge::new(&caller(number), "plan", &rules, n(1)), &decision(&rules, 0), 1_500);
        }
        let kept = local.stripes.iter().map(|stripe| {
            let stripe = stripe.lock();
            stripe.younger.len() + stripe.older.len()
        });
        assert!(kept.sum::<usize>() <= SEEN_MAX);
        assert_eq!(left(&local, &caller(SEEN_MAX * 2 - 1), &rules), Some(0));
        assert_eq!(left(&local, &caller(0), &rules), None);
    }

    #[test]
    fn a_store_that_has_lost_its_data_hears_of_the_gateways_one_by_one() {
        // The first number was believed: each gateway counted more than its part.
        let (local, now) = (Local::default(), crate::clock::instant());
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(local.gateways(), 0);
        local.hear_gateways(3, now);
        local.hear_gateways(1, after(2));
        local.hear_gateways(2, after(8));
        assert_eq!(local.gateways(), 3);
        // One is really gone.
        local.hear_gateways(2, after(16));
        assert_eq!(local.gateways(), 2);
    }

    #[test]
    fn what_too_many_debtors_use_is_counted_as_lost() {
        let (local, rules) = (Local::default(), rules());
        for number in 0..OWING_MAX + 3 {
            let caller = format!("acct.{number}");
            local.owe(Charge::new(&caller, "plan", &rules, n(1)), &rules, [true].into_iter(), 1, 1_500);
        }
        assert_eq!((local.owing(), local.lost()), (OWING_MAX, 3));
    }

    #[test]
    fn debts_add_up_and_are_taken_once() {
        let (local, rules) = (Arc::new(Local::default()), rules());
        assert!(!local.is_owed());
        for _ in 0..3 {
            local.owe(Charge::new("a", "plan", &rules, n(2)), &rules, [true].into_iter(), 2, 1_500);
        }
        assert_eq!(local.debtors(10, |_| true), [Box::from("a")]);
        assert!(local.debtors(10, |caller| caller == "b").is_empty());
        local.owe_less(Charge::new("a", "plan", &rules, n(2)), [true].into_iter(), 1);
        let taken = local.take("a").unwrap();
        assert_eq!(taken.owed()[0].units, 5);
        assert!(local.take("a").is_none());
        // Not written back yet: until then nobody may say that nothing is owed, or ask ahead of that over another connection.
        assert_eq!(local.owing(), 1);
        assert!(matches!(local.dues("a"), Dues::Nothing));
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(matches!(local.dues("a"), Dues::Paying(_))));
        });
        // And what it uses meanwhile is written back behind that.
        local.owe(Charge::new("a", "plan", &rules, n(2)), &rules, [true].into_iter(), 2, 1_500);
        assert!(matches!(local.dues("a"), Dues::Paying(_)));
        assert!(local.take("a").is_none());
        assert_eq!(local.stripes.of("a").lock().owed("a", &rules[0].key("")), 5 + 2);
        drop(taken);
        assert!(matches!(local.dues("a"), Dues::Owed));
        assert_eq!(local.take("a").unwrap().owed()[0].units, 2);
        assert!(!local.is_owed());
    }
}
