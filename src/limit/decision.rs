//! What a store answers: allowed or denied, with the state of every limit that applies.

use smallvec::SmallVec;

use super::algorithm::Standing;
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
    /// Whether the request passes, and every limit that it fits was charged (`true`), or none was (`false`).
    pub allowed: bool,
    /// One state per rule, in the rules' order.
    pub states: States,
    /// The indexes of the limits that do not fit the request and are enforced.
    refusing: SmallVec<[usize; 2]>,
    /// The indexes of those that are not enforced.
    would_refuse: SmallVec<[usize; 2]>,
}

impl Decision {
    /// The answer that these states of these rules amount to: allowed if and only if the request fits every limit that is
    /// enforced.
    #[must_use]
    pub fn new(states: States, rules: &[Rule]) -> Self {
        let unfit = states.iter().zip(rules).enumerate().filter(|(_, (state, _))| state.wait != Some(0));
        let (mut refusing, mut would_refuse) = (SmallVec::new(), SmallVec::new());
        for (index, (_, rule)) in unfit {
            if rule.shadow { would_refuse.push(index) } else { refusing.push(index) }
        }
        Self { allowed: refusing.is_empty(), states, refusing, would_refuse }
    }

    /// The indexes of the limits that refuse.
    pub fn refusing(&self) -> impl Iterator<Item = usize> + '_ {
        self.refusing.iter().copied()
    }

    /// The limit with the longest wait: the one to name when only one can be named.
    #[must_use]
    pub fn binding(&self) -> Option<usize> {
        self.longest_wait(&self.refusing)
    }

    /// The limit that would refuse the request if it were enforced, when the request passes.
    #[must_use]
    pub fn would_refuse(&self) -> Option<usize> {
        self.longest_wait(&self.would_refuse).filter(|_| self.allowed)
    }

    fn longest_wait(&self, indexes: &[usize]) -> Option<usize> {
        indexes.iter().copied().max_by_key(|&index| self.states[index].wait.unwrap_or(Micros::MAX))
    }

    /// Microseconds until the request would pass if nothing else is admitted meanwhile: the longest wait of all
    /// limits that are enforced. `None`: it never will.
    #[must_use]
    pub fn wait(&self) -> Option<Micros> {
        self.refusing().try_fold(0, |longest, index| self.states[index].wait.map(|wait| wait.max(longest)))
    }
}
