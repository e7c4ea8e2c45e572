//! What a store answers: allowed or denied, with the state of every limit that applies.

use smallvec::SmallVec;

use super::algorithm::Standing;
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
    /// Whether every limit was charged (`true`) or none (`false`).
    pub allowed: bool,
    /// One state per rule, in the rules' order.
    pub states: States,
}

impl Decision {
    /// The answer that these states amount to: allowed if and only if the request fits every limit.
    #[must_use]
    pub fn from_states(states: States) -> Self {
        let allowed = states.iter().all(|state| state.wait == Some(0));
        Self { allowed, states }
    }

    /// The indexes of the limits that refuse.
    pub fn refusing(&self) -> impl Iterator<Item = usize> + '_ {
        self.states.iter().enumerate().filter(|(_, state)| state.wait != Some(0)).map(|(index, _)| index)
    }

    /// The limit with the longest wait: the one to name when only one can be named.
    #[must_use]
    pub fn binding(&self) -> Option<usize> {
        self.refusing().max_by_key(|&index| self.states[index].wait.unwrap_or(Micros::MAX))
    }

    /// Microseconds until the request would pass if nothing else is admitted meanwhile: the longest wait of all
    /// limits. `None`: it never will.
    #[must_use]
    pub fn wait(&self) -> Option<Micros> {
        self.states.iter().try_fold(0, |longest, state| state.wait.map(|wait| wait.max(longest)))
    }
}
