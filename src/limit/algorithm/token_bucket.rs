//! The token bucket: a level that refills steadily up to the burst.
//!
//! Promise: in any span `t`, never more than `burst + limit * t / per` units. Kept as a level and the time of the last
//! charge (Turner's leaky bucket as a meter, 1986), not as a "theoretical arrival time", so that an amount may change
//! under it: what was used stays used.
//!
//! Exact in whole numbers: the level is counted in *credits*. One unit is `per / g` credits and every microsecond brings
//! `limit / g` credits, where `g` is the greatest common divisor of the two; no fraction is ever rounded away.

use std::num::NonZeroU64;

use super::{Micros, PER_RANGE, Share, Standing, Unusable, check_range};

/// `limit` units each `per`, and up to `burst` units saved up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    limit: NonZeroU64,
    per: Micros,
    burst: NonZeroU64,
    /// Credits that make one unit.
    unit: u64,
    /// Credits that one microsecond brings.
    rate: u64,
}

/// The state of one bucket. A caller without one has a full bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bucket {
    /// Credits that made one unit when this was written; differs from today's after the limit was edited.
    unit: u64,
    /// Credits at `stamp`; below zero after a request that cost more than it had reserved.
    level: i64,
    /// When `level` held.
    stamp: Micros,
}

/// Lua numbers are exact up to here.
const EXACT: u64 = 1 << 53;

impl TokenBucket {
    /// `limit` units each `per` microseconds, `burst` at once.
    ///
    /// # Errors
    /// When an amount or `per` is out of range, or the arithmetic would not be exact in a Lua number.
    pub fn new(limit: NonZeroU64, per: Micros, burst: NonZeroU64) -> Result<Self, Unusable> {
        check_range(per, &[limit, burst])?;
        let common = greatest_common_divisor(limit.get(), per);
        let (unit, rate) = (per / common, limit.get() / common);
        let full = burst.get().checked_mul(unit).ok_or(Unusable::Precision)?;
        if full.saturating_add(rate) >= EXACT {
            return Err(Unusable::Precision);
        }
        Ok(Self { limit, per, burst, unit, rate })
    }

    /// This share of the bucket, for a request that takes `cost`: of what comes, and of what can be saved up.
    #[must_use]
    pub(super) fn shared(self, share: Share, cost: NonZeroU64) -> Self {
        let burst = share.of_limit(self.burst, cost);
        let limit = share.of_limit(self.limit, NonZeroU64::MIN);
        // A part of a round number need not be one, and may not be countable. The largest one below it that is has fewer digits.
        let rounder = std::iter::successors(Some(1_u64), |ten| ten.checked_mul(10));
        let limits = rounder.map_while(|ten| NonZeroU64::new(limit.get() / ten * ten));
        let bucket = limits.into_iter().find_map(|limit| Self::new(limit, self.per, burst).ok());
        bucket.unwrap_or_else(|| {
            let most = NonZeroU64::new((EXACT - 2) / self.per).unwrap_or(NonZeroU64::MIN);
            Self::new(NonZeroU64::MIN, self.per, burst.min(most)).unwrap_or(self)
        })
    }

    /// Units that one `per` brings.
    #[must_use]
    pub fn limit(&self) -> NonZeroU64 {
        self.limit
    }

    /// The span in which `limit` units come, in microseconds.
    #[must_use]
    pub fn per(&self) -> Micros {
        self.per
    }

    /// The most units that can be taken at once.
    #[must_use]
    pub fn burst(&self) -> NonZeroU64 {
        self.burst
    }

    /// Credits that make one unit; what the Lua side is told.
    #[must_use]
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// Credits that one microsecond brings; what the Lua side is told.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rate
    }

    /// Credits of a full bucket.
    fn full(&self) -> i64 {
        (self.burst.get() * self.unit).cast_signed()
    }

    /// The lowest level: a debt is never larger than what the longest of all windows brings, nor than a Lua number is exact.
    fn lowest(&self) -> i64 {
        self.full() - self.rate.saturating_mul(*PER_RANGE.end()).min(EXACT - 1).cast_signed()
    }

    /// Forgets a clock that has stepped back: nothing is credited for the step, and refilling goes on from `now`.
    pub fn align(&self, bucket: &mut Bucket, now: Micros) {
        bucket.stamp = bucket.stamp.min(now);
    }

    /// How a request of `cost` stands, charging nothing. Call [`align`](Self::align) first.
    #[must_use]
    pub fn judge(&self, bucket: Option<&Bucket>, now: Micros, cost: NonZeroU64) -> Standing {
        let level = self.level(bucket, now);
        let wait = match cost.get() {
            cost if cost > self.burst.get() => None,
            cost => Some(self.until((cost * self.unit).cast_signed(), level)),
        };
        Standing { wait, ..self.standing(level) }
    }

    /// Takes `cost` units, which [`judge`](Self::judge) found to fit.
    #[must_use]
    pub fn charge(&self, bucket: Option<&Bucket>, now: Micros, cost: NonZeroU64) -> (Bucket, Standing) {
        let level = self.level(bucket, now) - (cost.get() * self.unit).cast_signed();
        (Bucket { unit: self.unit, level, stamp: now }, self.standing(level))
    }

    /// Gives back up to `units` that were charged, and never above a full bucket.
    #[must_use]
    pub fn refund(&self, bucket: &Bucket, now: Micros, units: u64) -> Bucket {
        let level = self.level(Some(bucket), now);
        if level == self.full() {
            return *bucket;
        }
        let credits = units.saturating_mul(self.unit).min(EXACT).cast_signed();
        let level = (level + credits).min(self.full());
        Bucket { unit: self.unit, level, stamp: now }
    }

    /// Charges `units` more, whether they are there or not: the level falls below zero, by what 400 days bring at most.
    #[must_use]
    pub fn surcharge(&self, bucket: Option<&Bucket>, now: Micros, units: NonZeroU64) -> Bucket {
        let level = self.level(bucket, now);
        let deepest = (level - self.lowest()).cast_unsigned() / self.unit;
        let credits = units.get().min(deepest) * self.unit;
        Bucket { unit: self.unit, level: level - credits.cast_signed(), stamp: now }
    }

    /// Microseconds until the bucket is full, and so as good as none.
    #[must_use]
    pub fn expires_in(&self, bucket: &Bucket, now: Micros) -> Micros {
        self.until(self.full(), self.level(Some(bucket), now))
    }

    fn level(&self, bucket: Option<&Bucket>, now: Micros) -> i64 {
        let full = self.full();
        let Some(bucket) = bucket else { return full };
        let level = if bucket.unit == self.unit {
            bucket.level
        } else {
            let whole_units = bucket.level.div_euclid(bucket.unit.cast_signed());
            whole_units.saturating_mul(self.unit.cast_signed())
        };
        let level = level.clamp(self.lowest(), full);
        let elapsed = now.saturating_sub(bucket.stamp);
        // The multiplication cannot overflow: below the time to full, it stays below `full - level + rate`.
        if elapsed >= self.until(full, level) { full } else { level + (elapsed * self.rate).cast_signed() }
    }

    /// Microseconds until `level` has risen to `wanted`.
    fn until(&self, wanted: i64, level: i64) -> Micros {
        u64::try_from(wanted - level).unwrap_or(0).div_ceil(self.rate)
    }

    fn standing(&self, level: i64) -> Standing {
        let unit = self.unit.cast_signed();
        let next = match level {
            level if level == self.full() => 0,
            level if level < 0 => self.until(unit, level),
            level => self.until(unit, level % unit),
        };
        Standing { wait: Some(0), remaining: u64::try_from(level / unit).unwrap_or(0), next }
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::super::AMOUNT_MAX;
    use super::*;

    const SECOND: Micros = 1_000_000;

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    /// One bucket through a table of (time in ms, cost, expected wait in ms, remaining after).
    #[track_caller]
    fn check(bucket: TokenBucket, rows: &[(u64, u64, Option<u64>, u64)]) {
        let mut state: Option<Bucket> = None;
        for &(at, cost, wait, remaining) in rows {
            let now = at * 1_000;
            if let Some(state) = &mut state {
                bucket.align(state, now);
            }
            let mut standing = bucket.judge(state.as_ref(), now, n(cost));
            assert_eq!(standing.wait, wait.map(|ms| ms * 1_000), "wait at {at} ms");
            if standing.wait == Some(0) {
                let (next, after) = bucket.charge(state.as_ref(), now, n(cost));
                (state, standing) = (Some(next), after);
            }
            assert_eq!(standing.remaining, remaining, "remaining at {at} ms");
        }
    }

    #[test]
    fn refills_steadily_up_to_the_burst() {
        let bucket = TokenBucket::new(n(2), SECOND, n(4)).unwrap();
        check(
            bucket,
            &[
                // A full bucket gives its burst at once.
                (0, 3, Some(0), 1),
                (0, 1, Some(0), 0),
                // One unit comes every 500 ms, and not one millisecond earlier.
                (0, 1, Some(500), 0),
                (499, 1, Some(1), 0),
                (500, 1, Some(0), 0),
                // More than the burst never fits.
                (500, 5, None, 0),
                // Idleness fills the bucket, and never above the burst.
                (60_000, 1, Some(0), 3),
            ],
        );
    }

    #[test]
    fn a_clock_that_steps_back_gives_no_credit_and_locks_nobody_out() {
        let bucket = TokenBucket::new(n(1), SECOND, n(1)).unwrap();
        check(bucket, &[(3_600_000, 1, Some(0), 0), (0, 1, Some(1_000), 0), (1_000, 1, Some(0), 0)]);
    }

    #[test]
    fn an_edited_limit_keeps_the_level() {
        let before = TokenBucket::new(n(10), SECOND, n(10)).unwrap();
        let after = TokenBucket::new(n(7), SECOND, n(20)).unwrap();
        let (state, _) = before.charge(None, 0, n(6));
        assert_eq!(after.judge(Some(&state), 0, n(1)).remaining, 4);
    }

    #[test]
    fn amounts_that_would_round_are_refused() {
        assert_eq!(TokenBucket::new(n(1), 0, n(1)), Err(Unusable::Per));
        assert_eq!(TokenBucket::new(n(AMOUNT_MAX + 1), SECOND, n(1)), Err(Unusable::Amount));
        assert_eq!(TokenBucket::new(n(1 << 40), SECOND, n(1 << 40)), Err(Unusable::Precision));
        assert!(TokenBucket::new(n(1_000_000), SECOND, n(1_000_000)).is_ok());
    }
}
