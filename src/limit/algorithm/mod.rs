//! The limiting arithmetic: state and time go in, a judgement and the next state come out.
//!
//! Pure: no clock, no store, nothing but `std`. `lua/` says the same in Lua, and `tests/it/parity.rs` holds the two
//! to the same answers, step by step. Every number stays below 2^53, which a Lua number holds exactly.
//!
//! A store decides a request in two rounds. It first asks every limit to [`judge`](State) without changing anything;
//! only when the request fits all of them does it charge them all. So a refusal charges nobody.

mod sliding_window;
mod token_bucket;

pub use sliding_window::{EXACT_MAX, SlidingWindow, WindowLog};
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
    /// `burst` times `per` (after cancelling common factors with `limit`) would not fit a Lua number.
    Precision,
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Per => "`per` must lie between \"1ms\" and \"400d\"",
            Self::Amount => "an amount may be 999999999999999 at most",
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
}
