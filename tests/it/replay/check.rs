//! Holds a trace against the oracle, line by line. [`super`] has the rules.

use std::collections::BTreeMap;

use super::oracle::{Charge, Known, Limit, Micros, Past, Promise, View, month_of};

/// One call of an account, as the gateway's log and the client's answer tell it.
#[derive(Debug, Clone)]
pub(super) enum Call {
    /// The store decided.
    Decided(Decision),
    /// The gateway did not wait for the store. Was the call executed, then between these two moments.
    Unanswered { from: Micros, to: Micros, cost: u64 },
}

/// A decision of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decision {
    /// By the store's clock.
    pub(super) at: Micros,
    /// Units that were asked for.
    pub(super) cost: u64,
    /// Whether they were given.
    pub(super) allowed: bool,
    /// The limit that refused, as the log has it.
    pub(super) refused_by: String,
    /// What the answer says of each limit, in the order of the plan.
    pub(super) left: Vec<Left>,
    /// `Retry-After` of the answer, in seconds.
    pub(super) retry_after: Option<u64>,
}

/// What an answer says of one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Left {
    /// Units left.
    pub(super) remaining: u64,
    /// Whole seconds until there are more; `None` when nothing is used.
    pub(super) more_in: Option<u64>,
}

/// What a server lost that decided, and from when on another one did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// All. It was gone at `killed`, and an empty one began at `launched`.
    Everything { killed: Micros, launched: Micros },
    /// All it wrote after one single moment, which lies between `earliest` and `latest`. It was gone at `killed`.
    Suffix { earliest: Micros, latest: Micros, killed: Micros },
}

impl Loss {
    /// When the server that lost something was gone.
    pub(super) fn killed(self) -> Micros {
        match self {
            Self::Everything { killed, .. } | Self::Suffix { killed, .. } => killed,
        }
    }
}

/// An account: its plan, and its calls.
#[derive(Debug, Clone)]
pub(super) struct Trace {
    pub(super) account: String,
    pub(super) limits: Vec<Limit>,
    pub(super) calls: Vec<Call>,
}

/// What a check has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Decisions that were held against the oracle.
    pub(super) decisions: u64,
    /// Of these, how many were refused.
    pub(super) refused: u64,
    /// Calls that the gateways did not wait for and that a server may have executed.
    pub(super) unanswered: u64,
    /// Units that these turned out to have taken.
    pub(super) taken_by_unanswered: u64,
    /// Refusals that only such a call explains.
    pub(super) owed_to_unanswered: u64,
    /// Acknowledged charges that a server lost.
    pub(super) lost: u64,
    /// Admissions that only a lost charge explains.
    pub(super) owed_to_loss: u64,
}

/// A trace that the oracle contradicts.
#[derive(Debug)]
pub(super) struct Disagreement(String);

impl std::fmt::Display for Disagreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The moments between which a server forgot what came later.
type Cuts = Vec<(Micros, Micros)>;

/// Holds the traces of one store's accounts against the oracle. `losses` are in the order of time.
///
/// With the tally comes, for each loss, the last moment that it can have begun at.
pub(super) fn check(traces: &[Trace], losses: &[Loss]) -> Result<(Tally, Vec<Micros>), Disagreement> {
    let mut tally = Tally::default();
    let mut cuts: Vec<Vec<Cuts>> = Vec::new();
    for trace in traces {
        let world = replay(trace, losses)?;
        tally.add(&world.tally);
        cuts.push(world.cuts);
    }
    let moments = losses.iter().enumerate().map(|(number, loss)| {
        let of_all: Vec<&Cuts> = cuts.iter().map(|cuts| &cuts[number]).collect();
        let moment = shared_moment(&of_all).filter(|_| !of_all.is_empty());
        moment.ok_or_else(|| {
            Disagreement(format!(
                "no single moment explains what {loss:?} took from each account: {of_all:?}"
            ))
        })
    });
    let moments = moments.collect::<Result<_, _>>()?;
    Ok((tally, moments))
}

/// No two decisions of a Redis at the same moment: else nothing would say which of them came first.
pub(super) fn ordered(traces: &[Trace]) -> Result<(), Disagreement> {
    let mut seen: BTreeMap<Micros, &str> = BTreeMap::new();
    for trace in traces {
        for call in &trace.calls {
            let Call::Decided(decision) = call else { continue };
            if let Some(other) = seen.insert(decision.at, &trace.account) {
                return Err(Disagreement(format!(
                    "{other} and {} were decided both at {}",
                    trace.account, decision.at
                )));
            }
        }
    }
    Ok(())
}

/// The last moment that lies in a gap of each account.
fn shared_moment(of_all: &[&Cuts]) -> Option<Micros> {
    let ends = of_all.iter().flat_map(|cuts| cuts.iter().map(|(_, end)| end - 1));
    let holds = |cuts: &Cuts, moment| cuts.iter().any(|&(begin, end)| begin <= moment && moment < end);
    ends.filter(|&moment| of_all.iter().all(|cuts| holds(cuts, moment))).max()
}

/// One account's trace through the oracle. What is left when several pasts explain it: the one that needs the fewest
/// explanations, with the cuts of all.
fn replay(trace: &Trace, losses: &[Loss]) -> Result<World, Disagreement> {
    let mut calls: Vec<&Call> = trace.calls.iter().collect();
    calls.sort_by_key(|call| call.order());
    let mut worlds = vec![World::default()];
    let mut losses = losses.iter().copied().peekable();
    for call in calls {
        while let Some(loss) = losses.next_if(|loss| loss.killed() < call.begin()) {
            worlds = lose(worlds, loss);
        }
        let mut reason = None;
        worlds.retain_mut(|world| match world.take(&trace.limits, call) {
            Ok(()) => true,
            Err(disagreement) => {
                reason = Some(disagreement);
                false
            }
        });
        if worlds.is_empty() {
            let reason = reason.map(|reason| reason.0).unwrap_or_default();
            return Err(Disagreement(format!("{}: {reason}\nat {call:?}", trace.account)));
        }
        merge(&mut worlds, &trace.limits, call.begin());
    }
    for loss in losses {
        worlds = lose(worlds, loss);
    }
    // With nothing left to tell them apart.
    worlds.iter_mut().for_each(World::forget_all);
    merge(&mut worlds, &[], 0);
    Ok(worlds.swap_remove(0))
}

/// What a loss makes of each of the pasts that are possible.
fn lose(worlds: Vec<World>, loss: Loss) -> Vec<World> {
    worlds
        .into_iter()
        .flat_map(|world| match loss {
            Loss::Everything { killed, launched } => vec![world.without_everything(killed, launched)],
            Loss::Suffix { earliest, latest, killed } => {
                let cuts = world.gaps(earliest, latest);
                cuts.into_iter().map(|cut| world.without_suffix(cut, killed)).collect()
            }
        })
        .collect()
}

/// Makes one of all worlds whose charges are the same from now on.
fn merge(worlds: &mut Vec<World>, limits: &[Limit], now: Micros) {
    for world in worlds.iter_mut() {
        world.forget(limits, now);
    }
    if worlds.len() < 2 {
        return;
    }
    let mut merged: Vec<World> = Vec::new();
    for mut world in worlds.drain(..) {
        world.sum_up(limits, now);
        match merged.iter_mut().find(|other| other.is_like(&world)) {
            Some(other) => other.absorb(world),
            None => merged.push(world),
        }
    }
    *worlds = merged;
}

impl Call {
    fn begin(&self) -> Micros {
        match self {
            Self::Decided(decision) => decision.at,
            Self::Unanswered { from, .. } => *from,
        }
    }

    /// By time; and where a store decides two at the same moment, in the order in which the units went.
    fn order(&self) -> (Micros, std::cmp::Reverse<u64>, bool) {
        match self {
            Self::Decided(decision) => {
                let remaining = decision.left.iter().map(|left| left.remaining).min().unwrap_or(0);
                (decision.at, std::cmp::Reverse(remaining), !decision.allowed)
            }
            Self::Unanswered { from, .. } => (*from, std::cmp::Reverse(u64::MAX), false),
        }
    }
}

/// One past that the trace so far allows.
#[derive(Debug, Clone, Default)]
struct World {
    /// In the order of the calls.
    charges: Vec<Charge>,
    /// For each limit what answers have told of it where the charges leave it in doubt, oldest first. The newest counts; the
    /// older ones are for the day on which a failover undoes it.
    known: Vec<Vec<Known>>,
    /// For each loss so far, when it can have begun.
    cuts: Vec<Cuts>,
    tally: Tally,
}

impl World {
    /// Goes on by one call, if this past allows it.
    fn take(&mut self, limits: &[Limit], call: &Call) -> Result<(), Disagreement> {
        match call {
            Call::Unanswered { from, to, cost } => {
                self.tally.unanswered += 1;
                self.charges.push(Charge { from: *from, to: *to, units: *cost, certain: false, lost: false });
            }
            Call::Decided(decision) if decision.allowed => {
                self.admit(limits, decision)?;
                self.compare(limits, decision)?;
                self.learn(limits, decision);
            }
            Call::Decided(decision) => {
                self.refuse(limits, decision)?;
                self.compare(limits, decision)?;
                self.learn(limits, decision);
            }
        }
        Ok(())
    }

    /// The limits of the plan, each with all that it is judged by.
    fn judged<'a>(&'a self, limits: &'a [Limit]) -> impl Iterator<Item = (&'a Limit, Past<'a>)> {
        limits.iter().enumerate().map(|(number, limit)| {
            let known = self.known.get(number).and_then(|known| known.last()).copied();
            (limit, Past { charges: &self.charges, known })
        })
    }

    /// The limits that refuse this call.
    fn refusing<'a>(
        &'a self,
        limits: &'a [Limit],
        view: View,
        decision: &'a Decision,
    ) -> impl Iterator<Item = &'a str> {
        let fits = move |limit: &Limit, past| {
            limit.fits_at(past, view, decision.at, decision.cost) == Some(decision.at)
        };
        self.judged(limits).filter(move |(limit, past)| !fits(limit, *past)).map(|(limit, _)| limit.name)
    }

    fn admit(&mut self, limits: &[Limit], decision: &Decision) -> Result<(), Disagreement> {
        if let Some(limit) = self.refusing(limits, View::Least, decision).next() {
            return Err(self.disagreement(limits, decision, &format!("admitted, but {limit} is exhausted")));
        }
        self.tally.decisions += 1;
        if self.refusing(limits, View::Remembered, decision).next().is_some() {
            self.tally.owed_to_loss += 1;
        }
        let (at, units) = (decision.at, decision.cost);
        self.charges.push(Charge { from: at, to: at, units, certain: true, lost: false });
        Ok(())
    }

    fn refuse(&mut self, limits: &[Limit], decision: &Decision) -> Result<(), Disagreement> {
        let refusing: Vec<&str> = self.refusing(limits, View::Most, decision).collect();
        if !refusing.contains(&decision.refused_by.as_str()) {
            let text = format!("refused by {:?}, but those that do are {refusing:?}", decision.refused_by);
            return Err(self.disagreement(limits, decision, &text));
        }
        self.tally.decisions += 1;
        self.tally.refused += 1;
        if self.refusing(limits, View::Certain, decision).next().is_none() {
            self.tally.owed_to_unanswered += 1;
        }
        Ok(())
    }

    /// Holds what the answer says of the limits against the oracle: what is left, when there is more, when to come again.
    fn compare(&self, limits: &[Limit], decision: &Decision) -> Result<(), Disagreement> {
        for ((limit, past), left) in self.judged(limits).zip(&decision.left) {
            let view = |view| limit.available(past, view, decision.at);
            let (least, most) = (view(View::Most), view(View::Least));
            if !(least..=most).contains(&left.remaining) {
                let text = format!("of {} are left {}, not {least}..={most}", limit.name, left.remaining);
                return Err(self.disagreement(limits, decision, &text));
            }
            let more_at = |view| {
                let at = limit.fits_at(past, view, decision.at, left.remaining + 1);
                at.map(|at| (at - decision.at).div_ceil(SECOND))
            };
            let (soonest, latest) = (more_at(View::Least), more_at(View::Most));
            if !(soonest..=latest).contains(&left.more_in) {
                let text =
                    format!("more of {} in {:?}, not {soonest:?}..={latest:?}", limit.name, left.more_in);
                return Err(self.disagreement(limits, decision, &text));
            }
        }
        let again = |view| {
            let fits_at =
                |(limit, past): (&Limit, Past<'_>)| limit.fits_at(past, view, decision.at, decision.cost);
            let waits = self.judged(limits).map(fits_at);
            let longest = waits.map(|at| at.map(|at| at - decision.at)).collect::<Option<Vec<_>>>();
            longest.map_or(0, |waits| waits.into_iter().max().unwrap_or(0).div_ceil(SECOND).max(1))
        };
        match (decision.allowed, decision.retry_after) {
            (true, None) => Ok(()),
            (false, Some(seconds)) if (again(View::Least)..=again(View::Most)).contains(&seconds) => Ok(()),
            (_, seconds) => {
                let text =
                    format!("Retry-After is {seconds:?}, not {}..={}", again(View::Least), again(View::Most));
                Err(self.disagreement(limits, decision, &text))
            }
        }
    }

    /// Learns what the answer tells of calls without an answer.
    fn learn(&mut self, limits: &[Limit], decision: &Decision) {
        self.learn_units(limits, decision);
        self.learn_levels(limits, decision);
    }

    /// A bucket in doubt: the answer says its level, to a unit. The next one says more.
    fn learn_levels(&mut self, limits: &[Limit], decision: &Decision) {
        if self
            .charges
            .iter()
            .any(|charge| !charge.lost && charge.from <= decision.at && charge.to > decision.at)
        {
            return;
        }
        let known = |((limit, past), left): ((&Limit, Past<'_>), &Left)| {
            let Promise::Bucket { per, .. } = limit.promise else { return None };
            let per = i128::from(per);
            let view = |view| limit.level(past, view, decision.at);
            let (least, most) = (view(View::Most), view(View::Least));
            let told = i128::from(left.remaining) * per;
            let known = Known { at: decision.at, least: least.max(told), most: most.min(told + per - 1) };
            (least != most).then_some(known)
        };
        let learnt: Vec<Option<Known>> = self.judged(limits).zip(&decision.left).map(known).collect();
        self.known.resize(limits.len(), Vec::new());
        for (known, learnt) in self.known.iter_mut().zip(learnt) {
            known.extend(learnt);
            let undoable = known.partition_point(|known| known.at + UNDONE_MAX < decision.at);
            known.drain(..undoable.saturating_sub(1));
        }
    }

    /// The answer says how many units are left; so it may say how many the calls without an answer took, all in all. When
    /// only one number explains it, that is what they took, at some moment or other.
    fn learn_units(&mut self, limits: &[Limit], decision: &Decision) {
        let is_open = |charge: &Charge| !charge.certain && !charge.lost && charge.to <= decision.at;
        let (open, mut rest): (Vec<Charge>, Vec<Charge>) = self.charges.iter().copied().partition(is_open);
        let (Some(from), Some(to)) =
            (open.iter().map(|charge| charge.from).min(), open.iter().map(|charge| charge.to).max())
        else {
            return;
        };
        let (mut least, mut most): (u64, u64) = (0, open.iter().map(|charge| charge.units).sum());
        for (limit, left) in limits.iter().zip(&decision.left).filter(|(limit, _)| limit.tells_usage()) {
            let used = |view| limit.used(Past { charges: &rest, known: None }, view, decision.at);
            let told = limit.capacity() - left.remaining;
            least = least.max(told.saturating_sub(used(View::Most)));
            if limit.counts(from, decision.at) {
                most = most.min(told.saturating_sub(used(View::Least)));
            }
        }
        if least != most {
            return;
        }
        if most > 0 {
            // In the order of the calls, its place is before this one, which may have been charged already.
            let place = rest.len() - usize::from(rest.last().is_some_and(|last| last.from == decision.at));
            rest.insert(place, Charge { from, to, units: most, certain: true, lost: false });
        }
        self.charges = rest;
        self.tally.taken_by_unanswered += most;
    }

    fn without_everything(mut self, killed: Micros, launched: Micros) -> Self {
        self.known.clear();
        for charge in self.charges.iter_mut().filter(|charge| !charge.lost) {
            if charge.to > launched {
                // Only a call whose answer nobody saw can belong to the new server.
                charge.from = charge.from.max(launched);
            } else {
                self.tally.lost += u64::from(charge.certain);
                charge.lost = true;
            }
        }
        self.cuts.push(vec![(0, killed)]);
        self
    }

    /// The moments between charges in this span: whichever of one gap the server lost from on, the outcome is the same.
    fn gaps(&self, earliest: Micros, latest: Micros) -> Vec<(Micros, Micros)> {
        let within = |charge: &&Charge| charge.certain && charge.from == charge.to && !charge.lost;
        let moments = self.charges.iter().filter(within).map(|charge| charge.from);
        let mut edges: Vec<Micros> = moments.filter(|at| (earliest..latest).contains(at)).collect();
        edges.insert(0, earliest);
        edges.push(latest);
        edges.windows(2).map(|pair| (pair[0], pair[1])).filter(|(begin, end)| begin < end).collect()
    }

    /// Without what was charged after the moment of this gap, on a server that was gone at `killed`.
    fn without_suffix(&self, (begin, end): (Micros, Micros), killed: Micros) -> Self {
        let mut world = self.clone();
        world.known.iter_mut().for_each(|known| known.retain(|known| known.at <= begin));
        for charge in world.charges.iter_mut().filter(|charge| !charge.lost) {
            if charge.to <= begin {
                continue;
            }
            if charge.from < end {
                // Before the cut or behind it: nobody knows.
                charge.certain = false;
            } else if charge.to <= killed {
                world.tally.lost += u64::from(charge.certain);
                charge.lost = true;
            } else {
                charge.from = charge.from.max(killed);
            }
        }
        world.cuts.push(vec![(begin, end)]);
        world
    }

    /// Forgets the charges that are of no account any more.
    fn forget(&mut self, limits: &[Limit], now: Micros) {
        let needed_since = self.needed_since(limits, now).unwrap_or(0);
        if !limits.iter().any(Limit::is_month) {
            self.charges.retain(|charge| charge.to > needed_since);
        }
    }

    /// Since when the single charges matter to each limit but a quota; `None` if all do.
    fn needed_since(&self, limits: &[Limit], now: Micros) -> Option<Micros> {
        // What a failover may undo makes nothing superfluous.
        let lasts = |known: &&Known| known.at + UNDONE_MAX < now;
        let known_since = |number: usize| self.known.get(number)?.first().filter(lasts).map(|known| known.at);
        let others = limits.iter().enumerate().filter(|(_, limit)| !limit.is_month());
        let since = others.map(|(number, limit)| match limit.memory() {
            Some(memory) => Some(now.saturating_sub(memory)),
            None => known_since(number),
        });
        since.collect::<Option<Vec<_>>>().map(|since| since.into_iter().min().unwrap_or(now))
    }

    /// Makes one charge of those that only a quota still counts: when they were made makes no difference to it, and so should
    /// make none between two pasts.
    fn sum_up(&mut self, limits: &[Limit], now: Micros) {
        let Some(since) = self.needed_since(limits, now) else { return };
        let (begin, _) = month_of(now);
        let since = since.min(now.saturating_sub(UNDONE_MAX));
        for lost in [true, false] {
            let is_old = |charge: &Charge| {
                charge.certain && charge.lost == lost && charge.from >= begin && charge.to <= since
            };
            let units = self.charges.iter().filter(|charge| is_old(charge)).map(|charge| charge.units).sum();
            self.charges.retain(|charge| !is_old(charge));
            if units > 0 {
                self.charges.insert(0, Charge { from: begin, to: begin, units, certain: true, lost });
            }
        }
    }

    /// Whether the future cannot tell this past from the other, but for the level of a bucket.
    fn is_like(&self, other: &Self) -> bool {
        let counting = |world: &Self| -> Vec<Charge> {
            world.charges.iter().filter(|charge| !charge.lost).copied().collect()
        };
        let moments = |world: &Self| -> Vec<Vec<Micros>> {
            world.known.iter().map(|known| known.iter().map(|known| known.at).collect()).collect()
        };
        counting(self) == counting(other) && moments(self) == moments(other)
    }

    fn forget_all(&mut self) {
        self.charges.clear();
        self.known.clear();
    }

    /// One past of two that are alike: what is known of a bucket is what both allow.
    fn absorb(&mut self, other: Self) {
        for (known, other) in self.known.iter_mut().flatten().zip(other.known.into_iter().flatten()) {
            known.least = known.least.min(other.least);
            known.most = known.most.max(other.most);
        }
        for (cuts, more) in self.cuts.iter_mut().zip(other.cuts) {
            cuts.extend(more);
            cuts.sort_unstable();
            cuts.dedup();
        }
        if other.tally.owed() < self.tally.owed() {
            self.tally = other.tally;
        }
    }

    fn disagreement(&self, limits: &[Limit], decision: &Decision, what: &str) -> Disagreement {
        let newest = &self.charges[self.charges.len().saturating_sub(30)..];
        let lines: Vec<String> = newest
            .iter()
            .map(|charge| {
                let ago = |at: Micros| i128::from(decision.at) - i128::from(at);
                let kind = if charge.lost {
                    "lost"
                } else if charge.certain {
                    ""
                } else {
                    "perhaps"
                };
                format!("  {} to {} us ago: {} {kind}", ago(charge.from), ago(charge.to), charge.units)
            })
            .collect();
        Disagreement(format!("{what}\nlimits: {limits:?}\nthe last charges:\n{}", lines.join("\n")))
    }
}

const SECOND: Micros = 1_000_000;

/// A failover undoes nothing that is older.
const UNDONE_MAX: Micros = 2 * SECOND;

impl Tally {
    fn owed(&self) -> (u64, u64) {
        (self.owed_to_unanswered + self.owed_to_loss, self.lost)
    }

    /// Adds what another check has seen.
    pub(super) fn add(&mut self, other: &Self) {
        self.decisions += other.decisions;
        self.refused += other.refused;
        self.unanswered += other.unanswered;
        self.taken_by_unanswered += other.taken_by_unanswered;
        self.owed_to_unanswered += other.owed_to_unanswered;
        self.lost += other.lost;
        self.owed_to_loss += other.owed_to_loss;
    }
}

#[cfg(test)]
mod tests {
    use super::super::oracle::Promise;
    use super::*;

    /// When the traces begin.
    const START: Micros = 1_800_000_000 * SECOND;

    /// 2 units a second.
    const TWO: Limit = Limit { name: "two", promise: Promise::Window { limit: 2, per: SECOND } };

    /// A call of one unit, so many milliseconds after [`START`]: admitted, with so many left and more in a second.
    fn admitted(at: Micros, remaining: u64) -> Decision {
        let left = vec![Left { remaining, more_in: Some(1) }];
        let at = START + at * 1_000;
        Decision { at, cost: 1, allowed: true, refused_by: String::new(), left, retry_after: None }
    }

    fn refused(at: Micros) -> Decision {
        Decision { allowed: false, refused_by: "two".to_owned(), retry_after: Some(1), ..admitted(at, 0) }
    }

    fn unanswered(from: Micros, to: Micros) -> Call {
        Call::Unanswered { from: START + from * 1_000, to: START + to * 1_000, cost: 1 }
    }

    fn trace(decisions: Vec<Decision>) -> Vec<Trace> {
        with(decisions, Vec::new())
    }

    fn with(decisions: Vec<Decision>, mut calls: Vec<Call>) -> Vec<Trace> {
        calls.extend(decisions.into_iter().map(Call::Decided));
        vec![Trace { account: "acme".to_owned(), limits: vec![TWO], calls }]
    }

    fn honest() -> Vec<Decision> {
        vec![admitted(0, 1), admitted(300, 0), refused(500), refused(999), admitted(1_000, 0), refused(1_299)]
    }

    #[track_caller]
    fn passes(traces: &[Trace], losses: &[Loss]) -> Tally {
        check(traces, losses).unwrap_or_else(|disagreement| panic!("{disagreement}")).0
    }

    #[track_caller]
    fn fails(traces: &[Trace], losses: &[Loss], reason: &str) {
        let disagreement = check(traces, losses).expect_err("the oracle contradicts this").to_string();
        assert!(disagreement.contains(reason), "{disagreement}");
    }

    #[test]
    fn an_honest_trace_passes_in_any_order() {
        let mut decisions = honest();
        decisions.reverse();
        let tally = passes(&trace(decisions), &[]);
        assert_eq!((tally.decisions, tally.refused, tally.lost), (6, 3, 0));
    }

    #[test]
    fn one_admission_too_many_is_seen() {
        let mut decisions = honest();
        decisions[3] = admitted(999, 0);
        fails(&trace(decisions), &[], "admitted, but two is exhausted");
    }

    #[test]
    fn one_wrong_refusal_is_seen() {
        let mut decisions = honest();
        decisions[4] = refused(1_000);
        fails(&trace(decisions), &[], "refused by");
    }

    #[test]
    fn a_refusal_by_another_limit_is_seen() {
        let mut decisions = honest();
        decisions[2].refused_by = "three".to_owned();
        fails(&trace(decisions), &[], "refused by");
    }

    #[test]
    fn an_admission_that_is_missing_is_seen() {
        let mut decisions = honest();
        decisions.remove(1);
        fails(&trace(decisions), &[], "refused by");
    }

    #[test]
    fn a_wrong_number_is_seen() {
        for (forge, reason) in [
            (|decision: &mut Decision| decision.left[0].remaining += 1, "of two are left"),
            (|decision: &mut Decision| decision.left[0].more_in = Some(2), "more of two in"),
            (|decision: &mut Decision| decision.left[0].more_in = None, "more of two in"),
            (|decision: &mut Decision| decision.retry_after = Some(2), "Retry-After"),
        ] as [(fn(&mut Decision), &str); 4]
        {
            let mut decisions = honest();
            forge(&mut decisions[2]);
            fails(&trace(decisions), &[], reason);
        }
    }

    #[test]
    fn a_time_that_two_decisions_have_is_seen() {
        let mut decisions = honest();
        assert!(ordered(&trace(decisions.clone())).is_ok());
        decisions[3].at = decisions[2].at;
        assert!(ordered(&trace(decisions)).is_err());
    }

    #[test]
    fn a_call_without_an_answer_explains_one_unit_while_it_counts() {
        // What the gateway did not wait for took the second unit.
        let refusals = || vec![admitted(0, 1), refused(500), refused(700)];
        let tally = passes(&with(refusals(), vec![unanswered(100, 400)]), &[]);
        assert_eq!(
            (tally.owed_to_unanswered, tally.taken_by_unanswered),
            (1, 1),
            "the second refusal is certain"
        );
        // It need not have been executed.
        passes(&with(honest(), vec![unanswered(100, 200)]), &[]);
        // It explains nothing before it was sent, nor a second after its end.
        fails(&with(refusals(), vec![unanswered(800, 900)]), &[], "refused by");
        let late = vec![admitted(0, 1), refused(1_500)];
        fails(&with(late, vec![unanswered(100, 400)]), &[], "refused by");
        // And it is one unit: an answer that shows both left of it and none does not add up.
        let both = vec![admitted(0, 1), refused(500), admitted(700, 0)];
        fails(&with(both, vec![unanswered(100, 400)]), &[], "exhausted");
    }

    #[test]
    fn an_empty_restart_explains_a_fresh_start_and_nothing_else() {
        let at = |milliseconds: Micros| START + milliseconds * 1_000;
        let restart = Loss::Everything { killed: at(510), launched: at(520) };
        let fresh =
            || vec![admitted(0, 1), admitted(300, 0), refused(500), admitted(600, 1), admitted(610, 0)];
        let tally = passes(&trace(fresh()), &[restart]);
        assert_eq!((tally.lost, tally.owed_to_loss), (2, 2));
        fails(&trace(fresh()), &[], "exhausted");
        fails(&trace(honest()), &[restart], "refused by");
        // All is lost, and not a part of it.
        let partly = vec![admitted(0, 1), admitted(300, 0), refused(500), admitted(600, 0)];
        fails(&trace(partly), &[restart], "are left");
    }

    #[test]
    fn a_failover_loses_the_end_and_for_all_accounts_the_same() {
        let at = |milliseconds: Micros| START + milliseconds * 1_000;
        let failover = Loss::Suffix { earliest: at(200), latest: at(400), killed: at(510) };
        // The second admission is lost, the first is too old for that.
        let loses_one =
            || vec![admitted(0, 1), admitted(300, 0), refused(500), admitted(600, 0), refused(610)];
        let tally = passes(&trace(loses_one()), &[failover]);
        assert_eq!((tally.lost, tally.owed_to_loss), (1, 1));
        fails(&trace(loses_one()), &[], "exhausted");
        let loses_both = vec![admitted(0, 1), admitted(300, 0), admitted(600, 1)];
        fails(&trace(loses_both), &[failover], "");
        // Another account has lost nothing, though it was charged later.
        let mut traces = trace(loses_one());
        let keeps_all = vec![admitted(10, 1), admitted(350, 0), refused(700)];
        traces.extend(trace(keeps_all));
        fails(&traces, &[failover], "no single moment");
        // Or earlier.
        let mut traces = trace(loses_one());
        traces.extend(trace(vec![admitted(10, 1), admitted(250, 0), refused(700)]));
        let (_, moments) = check(&traces, &[failover]).unwrap();
        assert_eq!(moments, [at(300) - 1]);
    }

    #[test]
    fn a_bucketed_window_has_a_sixtieth_of_freedom_and_no_more() {
        let per = 600_000;
        let limit = Limit { name: "two", promise: Promise::Bucketed { limit: 2, per } };
        // The first unit leaves the window at 600 ms, and the wider one at 610.
        let at = |milliseconds, allowed: bool, remaining| {
            let decision = if allowed { admitted(milliseconds, remaining) } else { refused(milliseconds) };
            Call::Decided(decision)
        };
        let check_last = |last| {
            let calls = vec![at(0, true, 1), at(300, true, 0), last];
            check(&[Trace { account: "acme".to_owned(), limits: vec![limit], calls }], &[]).map(drop)
        };
        assert!(check_last(at(599, true, 0)).is_err());
        assert!(check_last(at(605, true, 0)).is_ok());
        assert!(check_last(at(605, false, 0)).is_ok());
        assert!(check_last(at(611, false, 0)).is_err());
    }

    #[test]
    fn a_failover_undoes_what_was_known_of_a_bucket() {
        // Two units at once and one each 100 s: a call without an answer leaves in doubt which of them are there, and an
        // answer says it. Then a server takes over that has not seen that call.
        let promise = Promise::Bucket { limit: 1, per: 100 * SECOND, burst: 2 };
        let limit = Limit { name: "two", promise };
        let at = |milliseconds: Micros| START + milliseconds * 1_000;
        let left = |decision: Decision, more_in| {
            let left = vec![Left { more_in: Some(more_in), ..decision.left[0] }];
            let retry_after = decision.retry_after.map(|_| more_in);
            Call::Decided(Decision { left, retry_after, ..decision })
        };
        let calls = vec![left(admitted(0, 1), 100), unanswered(100, 200), left(refused(300), 100)];
        let failover = Loss::Suffix { earliest: at(50), latest: at(60), killed: at(310) };
        let with_last = |last| {
            let calls = [calls.clone(), vec![last]].concat();
            check(&[Trace { account: "acme".to_owned(), limits: vec![limit], calls }], &[failover]).map(drop)
        };
        // One unit was charged before the cut, and counts.
        with_last(left(admitted(400, 0), 100)).unwrap_or_else(|disagreement| panic!("{disagreement}"));
        assert!(with_last(left(admitted(400, 1), 100)).is_err());
        assert!(with_last(left(refused(400), 100)).is_err());
    }
}
