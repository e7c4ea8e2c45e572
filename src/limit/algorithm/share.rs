//! Counting a share of a limit: what one of several gateways does that cannot reach the store they share.
//!
//! Each counts its share of every limit on its own. So all of them together admit about the limit, and never more than the
//! sum of their shares.

use std::num::NonZeroU64;

use super::{Algorithm, Concurrency, Limited, Micros, Period, Quota, Role, SlidingWindow, Standing, State};

/// What a gateway may count of a limit: so many parts of so many, 1 at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    part: NonZeroU64,
    of: NonZeroU64,
}

/// Use that was seen elsewhere is taken to be spread over a window in so many steps.
const STEPS: u64 = 8;

impl Share {
    /// All of it.
    pub const WHOLE: Self = Self { part: NonZeroU64::MIN, of: NonZeroU64::MIN };

    /// An equal share for each of so many gateways.
    #[must_use]
    pub fn of_each(gateways: NonZeroU64) -> Self {
        Self { part: NonZeroU64::MIN, of: gateways }
    }

    /// So many hundredths, from 1 to 100.
    #[must_use]
    pub fn percent(percent: NonZeroU64) -> Self {
        let hundred = NonZeroU64::MIN.saturating_add(99);
        Self { part: percent.min(hundred), of: hundred }
    }

    /// This share of an amount, rounded down.
    #[must_use]
    pub fn of(self, amount: u64) -> u64 {
        let part = u128::from(amount) * u128::from(self.part.get()) / u128::from(self.of.get());
        u64::try_from(part).unwrap_or(amount).min(amount)
    }

    /// This share of what is allowed: rounded down, but enough for one request that takes `cost`, if all of it is.
    #[must_use]
    pub fn of_limit(self, limit: NonZeroU64, cost: NonZeroU64) -> NonZeroU64 {
        NonZeroU64::new(self.of(limit.get())).map_or(cost, |part| part.max(cost)).min(limit)
    }
}

impl Algorithm {
    /// The limit that a gateway with this share counts by itself, for a request that takes `cost`.
    #[must_use]
    pub fn shared(&self, share: Share, cost: NonZeroU64) -> Self {
        // What is no larger than a limit that can be counted can be counted, too.
        match self {
            Self::SlidingWindow(window) => {
                SlidingWindow::new(share.of_limit(window.limit(), cost), window.per())
                    .map_or(*self, Self::SlidingWindow)
            }
            Self::TokenBucket(bucket) => Self::TokenBucket(bucket.shared(share, cost)),
            Self::Quota(quota) => Quota::new(share.of_limit(quota.limit(), cost)).map_or(*self, Self::Quota),
            Self::Concurrency(slots) => Concurrency::new(share.of_limit(slots.limit(), NonZeroU64::MIN))
                .map_or(*self, Self::Concurrency),
        }
    }

    /// A state in which `used` units count that were seen at the moment `seen`, when the first of them was to come back after
    /// `next` microseconds. When the others do is not known: they are taken to come back one by one until the limit is as good
    /// as new.
    #[must_use]
    pub fn seeded(&self, used: NonZeroU64, seen: Micros, next: Micros, period: Period) -> State {
        match self {
            Self::SlidingWindow(window) => {
                let steps = used.get().min(STEPS);
                let first = seen.saturating_sub(window.per().saturating_sub(next));
                let mut log = None;
                for step in 0..steps {
                    let time = first + (seen - first) / steps * (step + 1);
                    let units = used.get() * (step + 1) / steps - used.get() * step / steps;
                    let units = NonZeroU64::new(units).unwrap_or(NonZeroU64::MIN);
                    log = Some(window.surcharge(log, time, units));
                }
                log.map_or(State::Vacant, State::Window)
            }
            Self::TokenBucket(bucket) => State::Bucket(bucket.surcharge(None, seen, used)),
            Self::Quota(_) if (period.start..period.end).contains(&seen) => {
                State::Quota(Quota::surcharge(None, period, used))
            }
            Self::Quota(_) | Self::Concurrency(_) => State::Vacant,
        }
    }

    /// How a caller stands at `now` of which this is kept, asking for one unit.
    #[must_use]
    pub fn standing(&self, mut state: State, period: Period, now: Micros) -> Standing {
        let limited = Limited::new(self, &mut state, period, Role::Enforced);
        limited.algorithm.align(limited.state, period, now);
        limited.judge(now, NonZeroU64::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AMOUNT_MAX, PER_RANGE, TokenBucket, decide};
    use super::*;

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    /// Units that still count at `now`.
    fn used(algorithm: &Algorithm, state: State, now: Micros) -> u64 {
        algorithm.capacity().get() - algorithm.standing(state, Period::NONE, now).remaining
    }

    /// Units that pass at `now`, one by one.
    fn passes(algorithm: &Algorithm, state: &mut State, period: Period, now: Micros) -> u64 {
        let passed = (0..10_000).take_while(|_| {
            let mut limits = [Limited::new(algorithm, state, period, Role::Enforced)];
            decide(&mut limits, now, n(1));
            limits[0].standing.wait == Some(0)
        });
        passed.count() as u64
    }

    #[test]
    fn shares_together_are_no_more_than_the_limit() {
        for (limit, gateways) in [(100, 3), (10, 2), (7, 7), (1, 1), (AMOUNT_MAX, 1_000)] {
            let part = Share::of_each(n(gateways)).of_limit(n(limit), n(1)).get();
            assert!(part * gateways <= limit, "{limit} / {gateways}");
        }
        // One each is the least: so many may be more than the limit.
        assert_eq!(Share::of_each(n(5)).of_limit(n(3), n(1)), n(1));
        // A request that fits the whole limit fits the share.
        assert_eq!(Share::of_each(n(5)).of_limit(n(10), n(4)), n(4));
        assert_eq!(Share::of_each(n(5)).of_limit(n(10), n(11)), n(10));
        assert_eq!(
            (Share::percent(n(25)).of(10), Share::percent(n(900)).of(10), Share::WHOLE.of(9)),
            (2, 10, 9)
        );
    }

    #[test]
    fn a_part_of_any_bucket_is_never_more_than_its_share() {
        for (limit, per, burst) in [
            (10, 1_000_000, 20),
            (1_000_000_000, *PER_RANGE.end(), 1_000_000_000),
            (999_999_999, 86_400_000_000, 100),
            (7, 1_000, 1),
        ] {
            let whole = TokenBucket::new(n(limit), per, n(burst)).unwrap();
            for gateways in [1, 2, 3, 7, 100] {
                let Algorithm::TokenBucket(part) =
                    Algorithm::TokenBucket(whole).shared(Share::of_each(n(gateways)), n(1))
                else {
                    panic!("a bucket stays a bucket")
                };
                let most = |amount: u64| (amount / gateways).max(1);
                assert!(part.limit().get() <= most(limit) && part.burst().get() <= most(burst), "{part:?}");
                assert!(part.limit().get() * 2 > most(limit), "{part:?} of {whole:?} by {gateways}");
            }
        }
    }

    #[test]
    fn what_was_seen_counts_and_comes_back() {
        let second = 1_000_000;
        let window = Algorithm::SlidingWindow(SlidingWindow::new(n(100), 10 * second).unwrap());
        let seen = 1_000 * second;
        // 80 of 100 are used, and the first comes back in 2 s.
        let state = window.seeded(n(80), seen, 2 * second, Period::NONE);
        assert_eq!(passes(&window, &mut state.clone(), Period::NONE, seen), 20);
        assert_eq!(used(&window, state.clone(), seen), 80);
        let half = passes(&window, &mut state.clone(), Period::NONE, seen + 6 * second);
        assert!((40..=70).contains(&half), "{half}");
        assert_eq!(passes(&window, &mut state.clone(), Period::NONE, seen + 10 * second), 100);
        // Nothing counts that was seen longer ago than a window lasts.
        assert_eq!(used(&window, state, seen + 11 * second), 0);

        let bucket = Algorithm::TokenBucket(TokenBucket::new(n(10), second, n(20)).unwrap());
        let state = bucket.seeded(n(20), seen, 0, Period::NONE);
        assert_eq!(passes(&bucket, &mut state.clone(), Period::NONE, seen), 0);
        assert_eq!(passes(&bucket, &mut state.clone(), Period::NONE, seen + second), 10);

        let quota = Algorithm::Quota(Quota::new(n(50)).unwrap());
        let period = Period { start: seen - second, end: seen + second };
        let mut state = quota.seeded(n(30), seen, 0, period);
        assert_eq!(passes(&quota, &mut state, period, seen), 20);
        let next = Period { start: seen + second, end: seen + 2 * second };
        assert_eq!(quota.seeded(n(30), seen, 0, next), State::Vacant);
    }

    #[test]
    fn windows_of_any_size_can_be_seeded_in_full() {
        for limit in [1, 2, 9, 10_000, 10_001, 1_000_000] {
            for per in [*PER_RANGE.start(), 1_000_000, *PER_RANGE.end()] {
                let window = Algorithm::SlidingWindow(SlidingWindow::new(n(limit), per).unwrap());
                for seen in [1, 1_800_000_000_000_000] {
                    let state = window.seeded(n(limit), seen, 0, Period::NONE);
                    let used = used(&window, state, seen);
                    assert!(used <= limit && used + limit.div_ceil(4) >= limit, "{used} of {limit} in {per}");
                }
            }
        }
    }
}
