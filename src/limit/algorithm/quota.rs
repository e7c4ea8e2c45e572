//! The quota: never more than `limit` units in a calendar period.
//!
//! Where a period begins and ends is the calendar's to say ([`crate::limit::Calendar`]); here it is a span like any other.
//! Kept is how much was used, and of which period. When a new period has begun, nothing is used; when the clock has
//! stepped back into an earlier one, what was used still counts, so nobody gets a period twice.

use std::num::NonZeroU64;

use super::{AMOUNT_MAX, Micros, Standing, Unusable};

/// At most `limit` units in each period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    limit: NonZeroU64,
}

/// A span of the calendar: from `start`, and up to but not at `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period {
    /// Its first moment.
    pub start: Micros,
    /// The first moment of the next one.
    pub end: Micros,
}

impl Period {
    /// No period at all, for the algorithms that know none.
    pub const NONE: Self = Self { start: 0, end: 0 };
}

/// The most units that are kept of a period: what a Lua number holds exactly.
const UNITS_MAX: u64 = (1 << 53) - 1;

/// What was used, and of the period that began when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    start: Micros,
    units: u64,
}

impl Quota {
    /// `limit` units in each period.
    ///
    /// # Errors
    /// When the limit is out of range.
    pub fn new(limit: NonZeroU64) -> Result<Self, Unusable> {
        if limit.get() > AMOUNT_MAX { Err(Unusable::Amount) } else { Ok(Self { limit }) }
    }

    /// The most units in a period.
    #[must_use]
    pub fn limit(&self) -> NonZeroU64 {
        self.limit
    }

    /// Forgets how far ahead a clock was that has stepped back by more than a period: what was used counts in this one,
    /// and not in all that come until the clock is there again.
    pub fn align(used: &mut Used, period: Period) {
        if used.start > period.end {
            used.start = period.start;
        }
    }

    /// How a request of `cost` stands in `period`, charging nothing.
    #[must_use]
    pub fn judge(&self, used: Option<&Used>, period: Period, now: Micros, cost: NonZeroU64) -> Standing {
        let used = Self::used_in(used, period);
        let wait = if cost > self.limit {
            None
        } else if used.saturating_add(cost.get()) <= self.limit.get() {
            Some(0)
        } else {
            Some(period.end.saturating_sub(now))
        };
        Standing { wait, ..self.standing(used, period, now) }
    }

    /// Takes `cost` units, which [`judge`](Self::judge) found to fit.
    #[must_use]
    pub fn charge(
        &self,
        used: Option<&Used>,
        period: Period,
        now: Micros,
        cost: NonZeroU64,
    ) -> (Used, Standing) {
        let start = used.map_or(period.start, |used| used.start.max(period.start));
        let units = Self::used_in(used, period).saturating_add(cost.get());
        (Used { start, units }, self.standing(units, period, now))
    }

    /// Gives back up to `units` that were charged at the moment `charged`, if what was used then still counts in `period`.
    #[must_use]
    pub fn refund(used: Used, period: Period, charged: Micros, units: u64) -> Used {
        if used.start > charged || used.start < period.start {
            return used;
        }
        Used { units: used.units.saturating_sub(units), ..used }
    }

    /// Charges `units` more, whether they fit or not, as far as numbers are exact.
    #[must_use]
    pub fn surcharge(used: Option<&Used>, period: Period, units: NonZeroU64) -> Used {
        let start = used.map_or(period.start, |used| used.start.max(period.start));
        let units = Self::used_in(used, period).saturating_add(units.get()).min(UNITS_MAX);
        Used { start, units }
    }

    /// Units that count in `period`: those of its own, and those of a later one if the clock has stepped back.
    fn used_in(used: Option<&Used>, period: Period) -> u64 {
        used.filter(|used| used.start >= period.start).map_or(0, |used| used.units)
    }

    fn standing(&self, used: u64, period: Period, now: Micros) -> Standing {
        let next = if used == 0 { 0 } else { period.end.saturating_sub(now) };
        Standing { wait: Some(0), remaining: self.limit.get().saturating_sub(used), next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    const FIRST: Period = Period { start: 100, end: 200 };
    const SECOND: Period = Period { start: 200, end: 300 };

    #[test]
    fn a_period_gives_its_quota_once() {
        let quota = Quota::new(n(5)).unwrap();
        let (used, standing) = quota.charge(None, FIRST, 150, n(4));
        assert_eq!(standing, Standing { wait: Some(0), remaining: 1, next: 50 });
        // Two more fit when the next period begins, and not one microsecond earlier.
        assert_eq!(quota.judge(Some(&used), FIRST, 199, n(2)).wait, Some(1));
        assert_eq!(
            quota.judge(Some(&used), SECOND, 200, n(2)),
            Standing { wait: Some(0), remaining: 5, next: 0 }
        );
        assert_eq!(quota.judge(Some(&used), SECOND, 200, n(6)).wait, None);
    }

    #[test]
    fn a_clock_that_steps_back_gives_no_period_twice() {
        let quota = Quota::new(n(5)).unwrap();
        let (used, _) = quota.charge(None, SECOND, 200, n(5));
        assert_eq!(quota.judge(Some(&used), FIRST, 150, n(1)).wait, Some(50));
        let (raised, _) = Quota::new(n(9)).unwrap().charge(Some(&used), FIRST, 150, n(1));
        assert_eq!(quota.judge(Some(&raised), SECOND, 250, n(1)).remaining, 0);
    }
}
