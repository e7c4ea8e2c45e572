//! Holds a trace against the oracle, line by line. [`super`] has the rules.

use std::collections::BTreeMap;

use super::oracle::{Charge, Limit, Micros, View};

/// One call of an account, as the gateway's log and the client's answer tell it.
#[derive(Debug, Clone)]
pub(super) enum Call {
    /// The store decided.
    Decided(Decision),
    /// The gateway did not wait for the store. Was the call executed, then between these two moments.
    Unanswered { from: Micros, to: Micros, cost: u64 },
}

/// A decision of the store.
#[derive(Debug, Clone)]
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
    fn killed(self) -> Micros {
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
pub(super) fn check(traces: &[Trace], losses: &[Loss]) -> Result<Tally, Disagreement> {
    let mut tally = Tally::default();
    let mut cuts: Vec<Vec<Cuts>> = Vec::new();
    for trace in traces {
        let world = replay(trace, losses)?;
        tally.add(&world.tally);
        cuts.push(world.cuts);
    }
    for (number, loss) in losses.iter().enumerate() {
        let of_all: Vec<&Cuts> = cuts.iter().map(|cuts| &cuts[number]).collect();
        if !of_all.is_empty() && !share_a_moment(&of_all) {
            return Err(Disagreement(format!(
                "no single moment explains what {loss:?} took from each account"
            )));
        }
    }
    Ok(tally)
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

fn share_a_moment(of_all: &[&Cuts]) -> bool {
    let begins = of_all.iter().flat_map(|cuts| cuts.iter().map(|(begin, _)| *begin));
    let holds = |cuts: &Cuts, moment| cuts.iter().any(|&(begin, end)| begin <= moment && moment < end);
    begins.into_iter().any(|moment| of_all.iter().all(|cuts| holds(cuts, moment)))
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
    worlds.iter_mut().for_each(|world| world.charges.clear());
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
    let memory =
        limits.iter().map(Limit::memory).collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max());
    for world in worlds.iter_mut() {
        world.forget(memory, now);
    }
    if worlds.len() < 2 {
        return;
    }
    let mut merged: Vec<World> = Vec::new();
    for world in worlds.drain(..) {
        match merged.iter_mut().find(|other| other.charges == world.charges) {
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

    fn fits(&self, limit: &Limit, view: View, decision: &Decision) -> bool {
        limit.fits_at(&self.charges, view, decision.at, decision.cost) == Some(decision.at)
    }

    fn admit(&mut self, limits: &[Limit], decision: &Decision) -> Result<(), Disagreement> {
        if let Some(limit) = limits.iter().find(|limit| !self.fits(limit, View::Least, decision)) {
            return Err(self.disagreement(
                limits,
                decision,
                &format!("admitted, but {} is exhausted", limit.name),
            ));
        }
        self.tally.decisions += 1;
        if !limits.iter().all(|limit| self.fits(limit, View::Remembered, decision)) {
            self.tally.owed_to_loss += 1;
        }
        let (at, units) = (decision.at, decision.cost);
        self.charges.push(Charge { from: at, to: at, units, certain: true, lost: false });
        Ok(())
    }

    fn refuse(&mut self, limits: &[Limit], decision: &Decision) -> Result<(), Disagreement> {
        let refusing = limits.iter().filter(|limit| !self.fits(limit, View::Most, decision));
        if !refusing.clone().any(|limit| limit.name == decision.refused_by) {
            let names: Vec<&str> = refusing.map(|limit| limit.name).collect();
            return Err(self.disagreement(
                limits,
                decision,
                &format!("refused, but of the limits {names:?} do"),
            ));
        }
        self.tally.decisions += 1;
        self.tally.refused += 1;
        if limits.iter().all(|limit| self.fits(limit, View::Certain, decision)) {
            self.tally.owed_to_unanswered += 1;
        }
        Ok(())
    }

    /// Holds what the answer says of the limits against the oracle: what is left, when there is more, when to come again.
    fn compare(&self, limits: &[Limit], decision: &Decision) -> Result<(), Disagreement> {
        for (limit, left) in limits.iter().zip(&decision.left) {
            let view = |view| limit.available(&self.charges, view, decision.at);
            let (least, most) = (view(View::Most), view(View::Least));
            if !(least..=most).contains(&left.remaining) {
                let text = format!("of {} are left {}, not {least}..={most}", limit.name, left.remaining);
                return Err(self.disagreement(limits, decision, &text));
            }
            let more_at = |view| {
                let at = limit.fits_at(&self.charges, view, decision.at, left.remaining + 1);
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
            let waits =
                limits.iter().map(|limit| limit.fits_at(&self.charges, view, decision.at, decision.cost));
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

    /// The answer says how many units are left; so it may say how many the calls without an answer took, all in all. When
    /// only one number explains it, that is what they took, at some moment or other.
    fn learn(&mut self, limits: &[Limit], decision: &Decision) {
        let is_open = |charge: &Charge| !charge.certain && !charge.lost && charge.to <= decision.at;
        let open = || self.charges.iter().filter(|charge| is_open(charge));
        let total: u64 = open().map(|charge| charge.units).sum();
        if total == 0 || total > OPEN_MAX {
            return;
        }
        let from = open().map(|charge| charge.from).min().unwrap_or(0);
        let to = open().map(|charge| charge.to).max().unwrap_or(0);
        let mut charges: Vec<Charge> =
            self.charges.iter().filter(|charge| !is_open(charge)).copied().collect();
        // In the order of the calls, its place is before this one, which may have been charged already.
        let place = charges.len() - usize::from(charges.last().is_some_and(|last| last.from == decision.at));
        charges.insert(place, Charge { from, to, units: 0, certain: true, lost: false });
        let explains = |charges: &[Charge]| {
            limits.iter().zip(&decision.left).filter(|(limit, _)| limit.is_exact()).all(|(limit, left)| {
                let view = |view| limit.available(charges, view, decision.at);
                (view(View::Most)..=view(View::Least)).contains(&left.remaining)
            })
        };
        let mut possible = (0..=total).filter(|&units| {
            charges[place].units = units;
            explains(&charges)
        });
        if let (Some(units), None) = (possible.next(), possible.next()) {
            charges[place].units = units;
            charges.retain(|charge| charge.units > 0);
            self.charges = charges;
        }
    }

    fn without_everything(mut self, killed: Micros, launched: Micros) -> Self {
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
    fn forget(&mut self, memory: Option<Micros>, now: Micros) {
        if let Some(memory) = memory {
            self.charges.retain(|charge| charge.to + memory > now);
        }
    }

    /// Two pasts that the future cannot tell apart.
    fn absorb(&mut self, other: Self) {
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

/// With more units than that in the balance, nothing is learned of them.
const OPEN_MAX: u64 = 2_000;

impl Tally {
    fn owed(&self) -> (u64, u64) {
        (self.owed_to_unanswered + self.owed_to_loss, self.lost)
    }

    /// Adds what another check has seen.
    pub(super) fn add(&mut self, other: &Self) {
        self.decisions += other.decisions;
        self.refused += other.refused;
        self.unanswered += other.unanswered;
        self.owed_to_unanswered += other.owed_to_unanswered;
        self.lost += other.lost;
        self.owed_to_loss += other.owed_to_loss;
    }
}
