//! What a store answers: allowed or denied, with the state of every limit that applies.

use smallvec::SmallVec;

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

/// When a refused request would fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The request fits this limit now.
    Fits,
    /// It fits after this many microseconds, if nothing else is admitted meanwhile, and not one earlier.
    After(Micros),
    /// It never fits: it costs more than the limit can hold.
    Never,
}

/// One limit after the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitState {
    /// Whether the request fits this limit.
    pub verdict: Verdict,
    /// Whole units left, after the charge if there was one.
    pub remaining: u64,
    /// Microseconds until more units become available; 0 when nothing is used.
    pub next: Micros,
}

/// The states of all limits that apply, in the order of the rules.
pub type States = SmallVec<[LimitState; 4]>;

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
        let allowed = states.iter().all(|state| state.verdict == Verdict::Fits);
        Self { allowed, states }
    }

    /// The indexes of the limits that refuse.
    pub fn refusing(&self) -> impl Iterator<Item = usize> + '_ {
        self.states
            .iter()
            .enumerate()
            .filter(|(_, state)| state.verdict != Verdict::Fits)
            .map(|(index, _)| index)
    }

    /// When the request would pass: the longest wait of all refusing limits. [`Verdict::Never`] outlasts all.
    #[must_use]
    pub fn retry(&self) -> Verdict {
        self.states
            .iter()
            .fold(Verdict::Fits, |longest, state| match (longest, state.verdict) {
                (Verdict::Never, _) | (_, Verdict::Never) => Verdict::Never,
                (Verdict::After(a), Verdict::After(b)) => Verdict::After(a.max(b)),
                (Verdict::Fits, other) | (other, Verdict::Fits) => other,
            })
    }

    /// The limit with the longest wait: the one to name when only one can be named.
    #[must_use]
    pub fn binding(&self) -> Option<usize> {
        self.refusing()
            .max_by_key(|&index| match self.states[index].verdict {
                Verdict::Never => Micros::MAX,
                Verdict::After(wait) => wait,
                Verdict::Fits => 0,
            })
    }
}
