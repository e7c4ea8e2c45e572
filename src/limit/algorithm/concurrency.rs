//! The limit on requests in flight: never more than `limit` slots taken at the same time.
//!
//! A request takes one slot, whatever it costs, and gives it back when its answer is through. Where slots are lent and how
//! they come back when a gateway dies is the store's business; here they are a number.

use std::num::NonZeroU64;

use super::{AMOUNT_MAX, Micros, Standing, Unusable};

/// What a refused request is told to wait, in microseconds: nobody knows when a slot comes back.
pub const TRY_AGAIN: Micros = 1_000_000;

/// At most `limit` requests in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Concurrency {
    limit: NonZeroU64,
}

impl Concurrency {
    /// `limit` slots.
    ///
    /// # Errors
    /// When the limit is out of range.
    pub fn new(limit: NonZeroU64) -> Result<Self, Unusable> {
        if limit.get() > AMOUNT_MAX { Err(Unusable::Amount) } else { Ok(Self { limit }) }
    }

    /// The most requests in flight.
    #[must_use]
    pub fn limit(&self) -> NonZeroU64 {
        self.limit
    }

    /// How a request stands while `taken` slots are, taking none.
    #[must_use]
    pub fn judge(&self, taken: u64) -> Standing {
        let wait = if taken < self.limit.get() { 0 } else { TRY_AGAIN };
        Standing { wait: Some(wait), ..self.standing(taken) }
    }

    /// Takes a slot, which [`judge`](Self::judge) found to be free; the number taken then, and how it stands.
    #[must_use]
    pub fn charge(&self, taken: u64) -> (u64, Standing) {
        (taken + 1, self.standing(taken + 1))
    }

    /// Without `next`: there is no telling when more become free.
    fn standing(&self, taken: u64) -> Standing {
        Standing { wait: Some(0), remaining: self.limit.get().saturating_sub(taken), next: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_run_out_and_come_back() {
        let two = Concurrency::new(NonZeroU64::new(2).unwrap()).unwrap();
        let (taken, standing) = two.charge(0);
        assert_eq!((taken, standing.remaining), (1, 1));
        let (taken, _) = two.charge(taken);
        assert_eq!(two.judge(taken), Standing { wait: Some(TRY_AGAIN), remaining: 0, next: 0 });
        assert_eq!(two.judge(taken - 1).wait, Some(0));
        // More than the limit, after it was lowered.
        assert_eq!(two.judge(7), Standing { wait: Some(TRY_AGAIN), remaining: 0, next: 0 });
    }
}
