//! What is written into a call, and how its reply is read. `lua/README.md` is the contract.

use ::redis::{Cmd, Value};
use smallvec::SmallVec;

use super::super::{Charge, Decision, Settlement, StoreError};
use super::leases::LEASE;
use super::script::Script;
use crate::clock::{self, Micros};
use crate::limit::algorithm::{Algorithm, Role, Standing};
use crate::limit::{Rule, States};

/// Writes calls about keys that begin alike.
#[derive(Debug)]
pub(super) struct Calls {
    prefix: Box<str>,
}

impl Calls {
    /// Calls about keys that begin with `prefix`.
    pub(super) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into() }
    }

    /// `{prefix}:{<caller>}:<scope>:<limit>`. The braces are the hash tag: all counters of a caller share a hash slot.
    pub(super) fn key(&self, charge: Charge<'_>, rule: &Rule) -> String {
        let own = rule.key(charge.api_key);
        let mut key = String::with_capacity(self.prefix.len() + charge.caller.len() + own.len() + 4);
        for part in [&self.prefix, ":{", charge.caller, "}:", &own] {
            key.push_str(part);
        }
        key
    }

    /// The key of the set of gateways. `tag` stands where callers stand in other keys.
    pub(super) fn gateways(&self, tag: &str) -> String {
        format!("{}:{{{tag}}}:live", self.prefix)
    }

    /// A call that decides, worth nothing after `end` by Redis's clock; 0: whenever it comes. `wall` is the gateway's clock.
    pub(super) fn deciding(&self, script: &Script, charge: Charge<'_>, end: Micros, wall: Micros) -> Cmd {
        self.call(script, charge, charge.rules.iter(), &[charge.cost.get(), end], wall)
    }

    /// A call that settles the charge of the limits that were charged; `None` if there is none to settle. `wall` is the
    /// gateway's clock.
    pub(super) fn settling(&self, script: &Script, settlement: Settlement<'_>, wall: Micros) -> Option<Cmd> {
        let Settlement { charge, charged, at, spent } = settlement;
        // Slots are given back, and not settled.
        let settled =
            charge.rules.iter().zip(charged).filter(|(rule, charged)| **charged && !rule.lends_slots());
        let rules: SmallVec<[&Rule; 4]> = settled.map(|(rule, _)| rule).collect();
        let numbers = [at, charge.cost.get(), spent];
        (!rules.is_empty()).then(|| self.call(script, charge, rules.iter().copied(), &numbers, wall))
    }

    /// A call of a script about these limits of a charge: their keys, some numbers, and the fields of each limit.
    fn call<'r>(
        &self,
        script: &Script,
        charge: Charge<'_>,
        rules: impl ExactSizeIterator<Item = &'r Rule> + Clone,
        numbers: &[u64],
        wall: Micros,
    ) -> Cmd {
        let mut call = script.by_hash();
        call.arg(rules.len());
        for rule in rules.clone() {
            call.arg(self.key(charge, rule));
        }
        call.arg(numbers);
        for rule in rules {
            arguments(rule, charge, wall, &mut call);
        }
        call
    }
}

/// The fields of a limit; `lua/README.md` names them.
fn arguments(rule: &Rule, charge: Charge<'_>, wall: Micros, call: &mut Cmd) {
    // The letter of the form, and behind it how the limit takes part.
    let form = |[enforced, shadow, candidate]: [&'static str; 3]| match rule.role(charge.draw) {
        Role::Enforced => enforced,
        Role::Shadow => shadow,
        Role::Candidate => candidate,
    };
    match &rule.algorithm {
        Algorithm::SlidingWindow(window) => {
            let forms = if window.is_exact() { ["w", "w?", "w~"] } else { ["b", "b?", "b~"] };
            call.arg(form(forms)).arg(&[window.limit().get(), window.grain(), window.per()])
        }
        Algorithm::TokenBucket(bucket) => {
            call.arg(form(["t", "t?", "t~"])).arg(&[bucket.burst().get(), bucket.unit(), bucket.rate()])
        }
        Algorithm::Concurrency(concurrency) => call
            .arg(form(["c", "c?", "c~"]))
            .arg(&[concurrency.limit().get(), clock::micros(LEASE)])
            .arg(charge.lease),
        // The gateway's clock only says which periods are near; Redis's says which of them it is.
        Algorithm::Quota(quota) => {
            let boundaries = rule.boundaries_around(wall, charge.anchor);
            call.arg(form(["q", "q?", "q~"])).arg(quota.limit().get()).arg(&boundaries.0)
        }
    };
}

/// What the script answers.
#[derive(Debug)]
pub(super) enum Reply {
    Decided(Decision),
    /// The script that can do what is rarely needed must be asked.
    Rare,
    /// The call came after its end.
    TooLate,
}

/// Reads `{ now, wait, remaining, next, ... }`, `{ now, 1 }` or `{ now }`.
pub(super) fn reply(value: &Value, charge: Charge<'_>) -> Result<Reply, StoreError> {
    let Value::Array(items) = value else {
        return Err(StoreError::Nonsense("not a list"));
    };
    let numbers: SmallVec<[i64; 16]> = items
        .iter()
        .map(|item| match item {
            Value::Int(number) => Ok(*number),
            _ => Err(StoreError::Nonsense("not a whole number")),
        })
        .collect::<Result<_, _>>()?;
    match *numbers {
        [_] => return Ok(Reply::TooLate),
        [_, 1] => return Ok(Reply::Rare),
        _ if numbers.len() == 1 + 3 * charge.rules.len() => {}
        _ => return Err(StoreError::Nonsense("a list of the wrong length")),
    }
    let at = u64::try_from(numbers[0]).map_err(|_| StoreError::Nonsense("a time before 1970"))?;
    let states: Option<States> =
        numbers[1..].chunks_exact(3).map(|state| standing(state[0], state[1], state[2])).collect();
    let states = states.ok_or(StoreError::Nonsense("a negative number"))?;
    Ok(Reply::Decided(Decision::new(at, states, charge.rules, charge.draw)))
}

fn standing(wait: i64, remaining: i64, next: i64) -> Option<Standing> {
    let wait = if wait == -1 { None } else { Some(u64::try_from(wait).ok()?) };
    Some(Standing { wait, remaining: u64::try_from(remaining).ok()?, next: u64::try_from(next).ok()? })
}
