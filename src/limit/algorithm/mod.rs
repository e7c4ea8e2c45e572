//! The limiting arithmetic: state and time go in, a judgement and the next state come out.
//!
//! Pure: no clock, no store, nothing but `std`. `lua/` says the same in Lua, and a test of the Redis store holds the
//! two to the same answers, step by step. Every number stays below 2^53, which a Lua number holds exactly.
//!
//! A request is decided in two rounds ([`decide`]): every limit judges it without changing anything, and only when it
//! fits all of them are they all charged. So a refusal charges nobody. What a request did cost may be known only behind its
//! answer; then [`settle`] puts the charge right.

use std::num::NonZeroU64;

mod concurrency;
mod quota;
mod share;
mod sliding_window;
mod token_bucket;

pub use concurrency::{Concurrency, TRY_AGAIN};
pub use quota::{Period, Quota, Used};
pub use share::Share;
pub use sliding_window::{EXACT_MAX, SlidingWindow, WINDOW_MAX, WindowLog};
pub use token_bucket::{Bucket, TokenBucket};

/// A point in time or a span, in microseconds; see [`crate::clock::Micros`], which this room may not import.
pub type Micros = u64;

/// The largest amount a limit may have: what fits the 15 digits of an RFC 9651 Integer.
pub const AMOUNT_MAX: u64 = 999_999_999_999_999;

/// The shortest and the longest `per`: a millisecond, and 400 days.
pub const PER_RANGE: std::ops::RangeInclusive<Micros> = 1_000..=400 * 86_400 * 1_000_000;

/// How one limit stands towards one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// When the request fits: `Some(0)` now, `Some(wait)` after exactly so many microseconds, `None` never.
    pub wait: Option<Micros>,
    /// Whole units left.
    pub remaining: u64,
    /// Microseconds until more units become available; 0 when nothing is used.
    pub next: Micros,
}

/// Amounts that an algorithm cannot hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unusable {
    /// `per` is outside [`PER_RANGE`].
    Per,
    /// An amount is above [`AMOUNT_MAX`].
    Amount,
    /// The limit of a sliding window is above [`WINDOW_MAX`].
    Window,
    /// `burst` times `per` (after cancelling common factors with `limit`) would not fit a Lua number.
    Precision,
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Per => "`per` must lie between \"1ms\" and \"400d\"",
            Self::Amount => "an amount may be 999999999999999 at most",
            Self::Window => {
                "a sliding window may hold 100000000000000 at most; a token bucket or a quota may hold more"
            }
            Self::Precision => {
                "these amounts cannot be counted exactly; choose a rounder `limit`, a smaller `burst` or a shorter `per`"
            }
        })
    }
}

impl std::error::Error for Unusable {}

/// What is kept of one limit for one caller.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum State {
    /// Nothing yet, or nothing that still counts.
    #[default]
    Vacant,
    /// Of a sliding window.
    Window(WindowLog),
    /// Of a token bucket.
    Bucket(Bucket),
    /// Of a quota.
    Quota(Used),
    /// Of a limit on requests in flight: slots that are taken.
    Slots(u64),
}

/// How a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Never more than the limit in any window.
    SlidingWindow(SlidingWindow),
    /// Never more than the burst plus what was refilled.
    TokenBucket(TokenBucket),
    /// Never more than the limit in a period of the calendar.
    Quota(Quota),
    /// Never more than the limit in flight.
    Concurrency(Concurrency),
}

/// How a limit takes part in a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It has a say: a request that does not fit it is refused.
    Enforced,
    /// It only watches: it is charged when the request fits it, and refuses nobody.
    Shadow,
    /// It belongs to the candidates, which refuse nobody either, but are charged all together or not at all: as they would
    /// be if they were enforced.
    Candidate,
}

/// Decides one request of `cost` at `now` against several limits, all or nothing.
///
/// Writes how each limit stands: after the charge if the request fits all that are enforced, else before it, with every
/// state as it was. The others have no say.
pub fn decide(limits: &mut [Limited<'_>], now: Micros, cost: NonZeroU64) {
    for limited in limits.iter_mut() {
        limited.algorithm.align(limited.state, limited.period, now);
        limited.standing = limited.judge(now, cost);
    }
    let verdict = Verdict::of(limits.iter().map(|limited| (limited.role, limited.standing)));
    for limited in limits.iter_mut().filter(|limited| verdict.charges(limited.role, limited.standing)) {
        limited.standing = limited.charge(now, cost);
    }
}

/// What all limits of a request together say of it: the one rule of which of them it is charged to.
#[derive(Debug, Clone, Copy)]
pub struct Verdict {
    /// Whether it fits all limits that are enforced.
    pass: bool,
    /// Whether it fits all candidates.
    candidates_pass: bool,
}

impl Verdict {
    /// Of limits that take part and stand like this, before a charge or behind it.
    #[must_use]
    pub fn of(limits: impl Iterator<Item = (Role, Standing)>) -> Self {
        let all = Self { pass: true, candidates_pass: true };
        limits.filter(|(_, standing)| standing.wait != Some(0)).fold(all, |verdict, (role, _)| match role {
            Role::Enforced => Self { pass: false, ..verdict },
            Role::Candidate => Self { candidates_pass: false, ..verdict },
            Role::Shadow => verdict,
        })
    }

    /// Whether the request passes.
    #[must_use]
    pub fn passes(self) -> bool {
        self.pass
    }

    /// Whether it is charged to one of the limits.
    #[must_use]
    pub fn charges(self, role: Role, standing: Standing) -> bool {
        self.pass && standing.wait == Some(0) && (role != Role::Candidate || self.candidates_pass)
    }
}

/// Settles a charge of `reserved` units made at the moment `charged`: the request did cost `spent`.
///
/// What was taken too much is given back while it counts, what is missing is charged now, whether it fits or not.
pub fn settle(limited: &mut Limited<'_>, now: Micros, charged: Micros, reserved: NonZeroU64, spent: u64) {
    limited.algorithm.align(limited.state, limited.period, now);
    let back = reserved.get().saturating_sub(spent);
    if let Some(more) = NonZeroU64::new(spent.saturating_sub(reserved.get())) {
        limited.surcharge(now, more);
    } else if back > 0 {
        limited.refund(now, charged, back);
    }
}

/// One limit in a decision: how it counts, what is kept of it, and how it stands.
#[derive(Debug)]
pub struct Limited<'a> {
    /// How it counts.
    pub algorithm: &'a Algorithm,
    /// What is kept of it.
    pub state: &'a mut State,
    /// The period of the calendar that the decision falls into, for a quota.
    pub period: Period,
    /// How it takes part.
    pub role: Role,
    /// How it stands; written by [`decide`].
    pub standing: Standing,
}

impl<'a> Limited<'a> {
    /// A limit that is yet to be decided.
    pub fn new(algorithm: &'a Algorithm, state: &'a mut State, period: Period, role: Role) -> Self {
        Self { algorithm, state, period, role, standing: Standing { wait: None, remaining: 0, next: 0 } }
    }

    fn judge(&self, now: Micros, cost: NonZeroU64) -> Standing {
        match self.algorithm {
            Algorithm::SlidingWindow(window) => window.judge(self.state.window(), now, cost),
            Algorithm::TokenBucket(bucket) => bucket.judge(self.state.bucket(), now, cost),
            Algorithm::Quota(quota) => quota.judge(self.state.quota(), self.period, now, cost),
            Algorithm::Concurrency(concurrency) => concurrency.judge(self.state.slots()),
        }
    }

    fn charge(&mut self, now: Micros, cost: NonZeroU64) -> Standing {
        match self.algorithm {
            Algorithm::SlidingWindow(window) => {
                let (log, standing) = window.charge(self.take_window(), now, cost);
                *self.state = State::Window(log);
                standing
            }
            Algorithm::TokenBucket(bucket) => {
                let (level, standing) = bucket.charge(self.state.bucket(), now, cost);
                *self.state = State::Bucket(level);
                standing
            }
            Algorithm::Quota(quota) => {
                let (used, standing) = quota.charge(self.state.quota(), self.period, now, cost);
                *self.state = State::Quota(used);
                standing
            }
            Algorithm::Concurrency(concurrency) => {
                let (taken, standing) = concurrency.charge(self.state.slots());
                *self.state = State::Slots(taken);
                standing
            }
        }
    }

    fn surcharge(&mut self, now: Micros, units: NonZeroU64) {
        *self.state = match self.algorithm {
            Algorithm::SlidingWindow(window) => {
                State::Window(window.surcharge(self.take_window(), now, units))
            }
            Algorithm::TokenBucket(bucket) => {
                State::Bucket(bucket.surcharge(self.state.bucket(), now, units))
            }
            Algorithm::Quota(_) => State::Quota(Quota::surcharge(self.state.quota(), self.period, units)),
            // A slot is given back, and not settled.
            Algorithm::Concurrency(_) => return,
        };
    }

    fn refund(&mut self, now: Micros, charged: Micros, units: u64) {
        match (self.algorithm, &mut *self.state) {
            (Algorithm::SlidingWindow(window), State::Window(log)) => {
                window.refund(log, now, charged, units);
            }
            (Algorithm::TokenBucket(bucket), State::Bucket(level)) => {
                *level = bucket.refund(level, now, units);
            }
            (Algorithm::Quota(_), State::Quota(used)) => {
                *used = Quota::refund(*used, self.period, charged, units);
            }
            _ => {}
        }
    }

    fn take_window(&mut self) -> Option<WindowLog> {
        match std::mem::take(self.state) {
            State::Window(log) => Some(log),
            State::Vacant | State::Bucket(_) | State::Quota(_) | State::Slots(_) => None,
        }
    }
}

impl Algorithm {
    /// The most units that the limit can ever hold: a request that costs more can never pass.
    #[must_use]
    pub fn capacity(&self) -> NonZeroU64 {
        match self {
            Self::SlidingWindow(window) => window.limit(),
            Self::TokenBucket(bucket) => bucket.burst(),
            Self::Quota(quota) => quota.limit(),
            // A request takes one slot, whatever it costs.
            Self::Concurrency(_) => NonZeroU64::MAX,
        }
    }

    /// How the limit stands, which stood like this, at once after it was given back what a request of `cost` took.
    #[must_use]
    pub fn given_back(&self, standing: Standing, cost: NonZeroU64) -> Standing {
        let (units, most) = match self {
            Self::Concurrency(concurrency) => (1, concurrency.limit().get()),
            Self::SlidingWindow(_) | Self::TokenBucket(_) | Self::Quota(_) => {
                (cost.get(), self.capacity().get())
            }
        };
        let remaining = standing.remaining.saturating_add(units).min(most);
        Standing { remaining, next: if remaining == most { 0 } else { standing.next }, ..standing }
    }

    /// Brings a state to this algorithm's form and to `now`, without charging. A state of another algorithm is
    /// forgotten: a limit that counts in another way is a new limit.
    fn align(&self, state: &mut State, period: Period, now: Micros) {
        match (self, state) {
            (Self::SlidingWindow(window), State::Window(log)) => window.align(log, now),
            (Self::TokenBucket(bucket), State::Bucket(level)) => bucket.align(level, now),
            (Self::Quota(_), State::Quota(used)) => Quota::align(used, period),
            (Self::Concurrency(_), State::Slots(_)) => {}
            (_, state) => *state = State::Vacant,
        }
    }

    /// Microseconds until the state is as good as none, and may be forgotten.
    #[must_use]
    pub fn expires_in(&self, state: &State, period: Period, now: Micros) -> Micros {
        match (self, state) {
            (Self::SlidingWindow(window), State::Window(log)) => window.expires_in(log, now),
            (Self::TokenBucket(bucket), State::Bucket(level)) => bucket.expires_in(level, now),
            (Self::Quota(_), State::Quota(_)) => period.end.saturating_sub(now),
            _ => 0,
        }
    }
}

impl State {
    fn window(&self) -> Option<&WindowLog> {
        match self {
            Self::Window(log) => Some(log),
            Self::Vacant | Self::Bucket(_) | Self::Quota(_) | Self::Slots(_) => None,
        }
    }

    fn bucket(&self) -> Option<&Bucket> {
        match self {
            Self::Bucket(bucket) => Some(bucket),
            Self::Vacant | Self::Window(_) | Self::Quota(_) | Self::Slots(_) => None,
        }
    }

    fn quota(&self) -> Option<&Used> {
        match self {
            Self::Quota(used) => Some(used),
            Self::Vacant | Self::Window(_) | Self::Bucket(_) | Self::Slots(_) => None,
        }
    }

    /// Slots that are taken; none in any other state.
    #[must_use]
    pub fn slots(&self) -> u64 {
        match self {
            Self::Slots(taken) => *taken,
            Self::Vacant | Self::Window(_) | Self::Bucket(_) | Self::Quota(_) => 0,
        }
    }
}

/// What every algorithm asks of its numbers.
fn check_range(per: Micros, amounts: &[NonZeroU64]) -> Result<(), Unusable> {
    if !PER_RANGE.contains(&per) {
        return Err(Unusable::Per);
    }
    if amounts.iter().any(|amount| amount.get() > AMOUNT_MAX) {
        return Err(Unusable::Amount);
    }
    Ok(())
}
