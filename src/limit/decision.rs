//! What a store answers: allowed or denied, with the state of every limit that applies.

use std::num::NonZeroU64;

use smallvec::SmallVec;

use super::algorithm::{Role, Standing, Verdict};
use super::rule::Rule;
use crate::clock::Micros;

/// Who decided. The values of the `source` label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The configured store.
    Store,
    /// This process alone, because the store could not answer (`on_failure = "local"`).
    Local,
    /// Nobody: the plan has no limits, or the store could not answer and `on_failure` says allow or deny.
    None,
}

impl Source {
    /// Who decided when a first part was decided by this one and the second by `other`: where they differ, the one that the
    /// operator would want to know of.
    pub(super) fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Local, _) | (_, Self::Local) => Self::Local,
            (Self::Store, _) | (_, Self::Store) => Self::Store,
            (Self::None, Self::None) => Self::None,
        }
    }

    /// The word used in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Local => "local",
            Self::None => "none",
        }
    }
}

/// The states of all limits that apply, in the order of the rules.
pub type States = SmallVec<[Standing; 4]>;

/// The answer to one charge: all or nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether the request passes and its limits were charged (`true`; see [`charged`](Self::charged)), or none was (`false`).
    pub allowed: bool,
    /// When it was made, by the store's clock, in microseconds since 1970. Redis runs one script at a time and none takes
    /// less than a microsecond, so this also orders all decisions of a node.
    pub at: Micros,
    /// One state per rule, in the rules' order. Where a request is refused by its caller's own limits, those of a pool are
    /// not asked, and there is no state of them.
    pub states: States,
    roles: SmallVec<[Role; 4]>,
}

impl Decision {
    /// The answer that these states of these rules amount to, for a caller of this [`draw`](super::rule::draw): allowed if
    /// and only if the request fits every limit that is enforced.
    #[must_use]
    pub fn new(at: Micros, states: States, rules: &[Rule], draw: u8) -> Self {
        let roles: SmallVec<[Role; 4]> =
            rules.iter().take(states.len()).map(|rule| rule.role(draw)).collect();
        let allowed = Verdict::of(roles.iter().copied().zip(states.iter().copied())).passes();
        Self { allowed, at, states, roles }
    }

    /// This decision on the caller's own limits, which allowed the request, with the one on the pool behind it. If the pool
    /// refuses, the others are shown as they stand after `cost` was given back.
    #[must_use]
    pub fn with_pool(mut self, pool: Self, rules: &[Rule], cost: NonZeroU64) -> Self {
        if !pool.allowed {
            let charged: SmallVec<[bool; 4]> = self.charged().collect();
            for ((state, rule), charged) in self.states.iter_mut().zip(rules).zip(charged) {
                if charged {
                    *state = rule.algorithm.given_back(*state, cost);
                }
            }
        }
        self.allowed = pool.allowed;
        self.states.extend(pool.states);
        self.roles.extend(pool.roles);
        self
    }

    /// For each limit, whether it was charged.
    pub fn charged(&self) -> impl Iterator<Item = bool> + '_ {
        let limits = || self.roles.iter().copied().zip(self.states.iter().copied());
        let verdict = Verdict::of(limits());
        limits().map(move |(role, state)| verdict.charges(role, state))
    }

    /// Whether clients are told of the limit of this index: one that only watches is the operator's business.
    #[must_use]
    pub fn shows(&self, index: usize) -> bool {
        self.roles.get(index) == Some(&Role::Enforced)
    }

    /// The indexes of the limits that refuse.
    pub fn refusing(&self) -> impl Iterator<Item = usize> + '_ {
        self.unfit().filter(|&index| self.shows(index))
    }

    /// The limit with the longest wait: the one to name when only one can be named.
    #[must_use]
    pub fn binding(&self) -> Option<usize> {
        self.longest_wait(self.refusing())
    }

    /// The limit that would refuse the request if it were enforced, when the request passes.
    #[must_use]
    pub fn would_refuse(&self) -> Option<usize> {
        self.longest_wait(self.unfit()).filter(|_| self.allowed)
    }

    fn unfit(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.states.len()).filter(|&index| self.states[index].wait != Some(0))
    }

    fn longest_wait(&self, indexes: impl Iterator<Item = usize>) -> Option<usize> {
        indexes.max_by_key(|&index| self.states[index].wait.unwrap_or(Micros::MAX))
    }

    /// Microseconds until the request would pass if nothing else is admitted meanwhile: the longest wait of all
    /// limits that are enforced. `None`: it never will.
    #[must_use]
    pub fn wait(&self) -> Option<Micros> {
        self.refusing().try_fold(0, |longest, index| self.states[index].wait.map(|wait| wait.max(longest)))
    }
}
