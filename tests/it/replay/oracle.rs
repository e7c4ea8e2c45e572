//! The brute-force oracle: what limits promise, written down from the manual and not from the source.
//!
//! All it knows is a list of charges, each a time and units. Every question is answered from the whole list and from the
//! definition; nothing is kept between two questions, nothing is rounded, and numbers are wide enough for all of it.

use std::cmp::Reverse;

/// A moment in microseconds since 1970, or a span.
pub(super) type Micros = u64;

const DAY: Micros = 86_400 * 1_000_000;

/// A limit of a plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    /// Its name in the configuration.
    pub(super) name: &'static str,
    /// What it promises.
    pub(super) promise: Promise,
}

/// What a limit promises.
#[derive(Debug, Clone, Copy)]
pub(super) enum Promise {
    /// At most `limit` units in any window `(t - per, t]`, and whatever fits that is admitted.
    Window { limit: u64, per: Micros },
    /// The same, and what fits a window of `per` and a sixtieth is admitted; in between it may be refused.
    Bucketed { limit: u64, per: Micros },
    /// In any span `t` at most `burst + limit * t / per` units, and whatever fits that is admitted.
    Bucket { limit: u64, per: Micros, burst: u64 },
    /// At most `limit` units in a calendar month of UTC, and whatever fits that is admitted.
    Month { limit: u64 },
}

/// Units that were taken, or that may have been.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Charge {
    /// The earliest and the latest moment at which it was made: the same one for a decision that said when.
    pub(super) from: Micros,
    pub(super) to: Micros,
    /// How many.
    pub(super) units: u64,
    /// `false`: up to so many. Nobody knows whether the call was executed.
    pub(super) certain: bool,
    /// The server that wrote it down has lost it.
    pub(super) lost: bool,
}

/// What of the charges is taken for true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    /// As little as can be: what is certain, as early as it can have been, in the narrowest windows.
    Least,
    /// As much as can be: all that may have been charged, as late as it can have been, in the widest windows.
    Most,
    /// As [`View::Most`], but of what is certain only.
    Certain,
    /// As [`View::Least`], and what was lost besides.
    Remembered,
}

impl Limit {
    /// The most units that it ever holds.
    pub(super) fn capacity(&self) -> u64 {
        match self.promise {
            Promise::Window { limit, .. } | Promise::Bucketed { limit, .. } | Promise::Month { limit } => {
                limit
            }
            Promise::Bucket { burst, .. } => burst,
        }
    }

    /// Whether it says how many units are left to the unit.
    pub(super) fn is_exact(&self) -> bool {
        !matches!(self.promise, Promise::Bucketed { .. })
    }

    /// How long a charge matters to it; `None` for ever.
    pub(super) fn memory(&self) -> Option<Micros> {
        match self.promise {
            Promise::Window { per, .. } => Some(per),
            Promise::Bucketed { per, .. } => Some(widest(per)),
            Promise::Bucket { .. } | Promise::Month { .. } => None,
        }
    }

    /// Units left at `now`.
    pub(super) fn available(&self, charges: &[Charge], view: View, now: Micros) -> u64 {
        let taken = taken(charges, view, now);
        match self.promise {
            Promise::Window { limit, per } => limit.saturating_sub(sum_since(&taken, now, per)),
            Promise::Bucketed { limit, per } => {
                limit.saturating_sub(sum_since(&taken, now, width(per, view)))
            }
            Promise::Month { limit } => {
                let (begin, _) = month_of(now);
                limit
                    .saturating_sub(taken.iter().filter(|(at, _)| *at >= begin).map(|(_, units)| units).sum())
            }
            Promise::Bucket { limit, per, burst } => {
                let (limit, per, burst) = (i128::from(limit), i128::from(per), i128::from(burst));
                // The span since each of the charges: what it allows, less what was taken in it, in parts of a unit.
                let spans = spans(taken).map(|(at, sum)| {
                    burst * per + limit * i128::from(now.saturating_sub(at)) - i128::from(sum) * per
                });
                let least = spans.min().unwrap_or(burst * per).min(burst * per);
                u64::try_from(least.div_euclid(per)).unwrap_or(0)
            }
        }
    }

    /// The first moment from `now` on at which `units` fit, if nothing else is taken meanwhile; `None` if never.
    pub(super) fn fits_at(&self, charges: &[Charge], view: View, now: Micros, units: u64) -> Option<Micros> {
        if units > self.capacity() {
            return None;
        }
        let taken = taken(charges, view, now);
        Some(match self.promise {
            Promise::Window { limit, per } => free_again(taken, now, per, limit - units),
            Promise::Bucketed { limit, per } => free_again(taken, now, width(per, view), limit - units),
            Promise::Month { limit } => {
                let (begin, end) = month_of(now);
                let used: u64 = taken.iter().filter(|(at, _)| *at >= begin).map(|(_, units)| units).sum();
                if used + units <= limit { now } else { end }
            }
            Promise::Bucket { limit, per, burst } => {
                // In the span since each of the charges, these units included: taken * per <= burst * per + limit * span.
                let until = |(at, sum): (Micros, u64)| {
                    let excess = (i128::from(sum) + i128::from(units) - i128::from(burst)).max(0);
                    let span = (excess * i128::from(per) + i128::from(limit) - 1) / i128::from(limit);
                    at + u64::try_from(span).expect("spans are short")
                };
                spans(taken).map(until).max().unwrap_or(now).max(now)
            }
        })
    }
}

/// The longest window in which the oldest part of a bucketed one may still count.
fn widest(per: Micros) -> Micros {
    per.div_ceil(60) * 61
}

/// The window of a bucketed limit in this view.
fn width(per: Micros, view: View) -> Micros {
    match view {
        View::Least | View::Remembered => per,
        View::Most | View::Certain => widest(per),
    }
}

/// What counts in this view: (time, units), oldest first.
fn taken(charges: &[Charge], view: View, now: Micros) -> Vec<(Micros, u64)> {
    let counts = |charge: &&Charge| match view {
        View::Least => !charge.lost && charge.certain && charge.to <= now,
        View::Remembered => charge.certain && charge.to <= now,
        View::Most => !charge.lost && charge.from <= now,
        View::Certain => !charge.lost && charge.certain && charge.from <= now,
    };
    let place = |charge: &Charge| match view {
        View::Least | View::Remembered => charge.from,
        View::Most | View::Certain => charge.to,
    };
    let mut taken: Vec<(Micros, u64)> =
        charges.iter().filter(counts).map(|charge| (place(charge), charge.units)).collect();
    taken.sort_unstable();
    taken
}

/// The sum in the window `(now - per, now]`; what is yet to come counts, too.
fn sum_since(taken: &[(Micros, u64)], now: Micros, per: Micros) -> u64 {
    taken.iter().filter(|(at, _)| at + per > now).map(|(_, units)| units).sum()
}

/// The first moment from `now` on at which a window of `per` has at most `rest` units in it.
fn free_again(taken: Vec<(Micros, u64)>, now: Micros, per: Micros, rest: u64) -> Micros {
    let mut used = sum_since(&taken, now, per);
    let mut moment = now;
    for (at, units) in taken.into_iter().filter(|(at, _)| at + per > now) {
        if used <= rest {
            break;
        }
        used -= units;
        moment = at + per;
    }
    moment
}

/// For each charge the span from it on: when it begins, and the units taken in it.
fn spans(mut taken: Vec<(Micros, u64)>) -> impl Iterator<Item = (Micros, u64)> {
    taken.sort_unstable_by_key(|(at, _)| Reverse(*at));
    taken.into_iter().scan(0, |sum, (at, units)| {
        *sum += units;
        Some((at, *sum))
    })
}

/// The calendar month in UTC that `moment` falls into: its first moment, and that of the next one.
fn month_of(moment: Micros) -> (Micros, Micros) {
    let mut begin = 0;
    for year in 1970.. {
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        for days in [31, if is_leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            let end = begin + days * DAY;
            if moment < end {
                return (begin, end);
            }
            begin = end;
        }
    }
    unreachable!("there is always another year")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Micros = 1_000_000;

    fn charges(list: &[(Micros, u64)]) -> Vec<Charge> {
        let charge = |&(at, units)| Charge { from: at, to: at, units, certain: true, lost: false };
        list.iter().map(charge).collect()
    }

    /// Units left of the limit at each of these moments.
    #[track_caller]
    fn check(promise: Promise, taken: &[(Micros, u64)], left: &[(Micros, u64)]) {
        let limit = Limit { name: "limit", promise };
        for &(now, units) in left {
            let charges = charges(taken);
            assert_eq!(limit.available(&charges, View::Least, now), units, "at {now}");
            // What is left fits at once, and one more does not.
            if units > 0 {
                assert_eq!(limit.fits_at(&charges, View::Least, now, units), Some(now));
            }
            assert!(limit.fits_at(&charges, View::Least, now, units + 1).is_none_or(|at| at > now));
        }
    }

    #[test]
    fn a_window_is_open_at_its_beginning() {
        let promise = Promise::Window { limit: 3, per: SECOND };
        let taken = [(5 * SECOND, 2), (5 * SECOND + 10, 1)];
        check(
            promise,
            &taken,
            &[(6 * SECOND - 1, 0), (6 * SECOND, 2), (6 * SECOND + 9, 2), (6 * SECOND + 10, 3)],
        );
        let limit = Limit { name: "limit", promise };
        assert_eq!(limit.fits_at(&charges(&taken), View::Least, 5 * SECOND + 20, 2), Some(6 * SECOND));
        assert_eq!(limit.fits_at(&charges(&taken), View::Least, 5 * SECOND + 20, 3), Some(6 * SECOND + 10));
        assert_eq!(limit.fits_at(&charges(&taken), View::Least, 5 * SECOND + 20, 4), None);
    }

    #[test]
    fn a_bucket_brings_its_units_evenly() {
        let promise = Promise::Bucket { limit: 2, per: SECOND, burst: 4 };
        let taken = [(10 * SECOND, 4)];
        check(
            promise,
            &taken,
            &[(10 * SECOND, 0), (10 * SECOND + 499_999, 0), (10 * SECOND + 500_000, 1), (60 * SECOND, 4)],
        );
        let limit = Limit { name: "limit", promise };
        assert_eq!(limit.fits_at(&charges(&taken), View::Least, 10 * SECOND, 3), Some(11 * SECOND + 500_000));
    }

    #[test]
    fn a_month_is_one_of_the_calendar() {
        let promise = Promise::Month { limit: 5 };
        // 1 March 2028; the day before is the 29 February.
        let march = 1_835_481_600 * SECOND;
        check(promise, &[(march - DAY, 3)], &[(march - 1, 2), (march, 5)]);
        let limit = Limit { name: "limit", promise };
        let taken = charges(&[(march - DAY, 3)]);
        assert_eq!(limit.fits_at(&taken, View::Least, march - 1, 3), Some(march));
    }
}
