//! The brute-force oracle: what limits promise, written down from the manual and not from the source.
//!
//! All it knows is a list of charges, each a time and units. Every question is answered from the whole list and from the
//! definition; nothing is kept between two questions, nothing is rounded, and numbers are wide enough for all of it.

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

/// What an answer has told of a bucket: its level at a moment, in parts of a unit (as many as `per` has microseconds).
///
/// Only needed behind calls without an answer. Where nothing is in doubt, a bucket is judged from its charges alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) at: Micros,
    pub(super) least: i128,
    pub(super) most: i128,
}

/// All that a limit is judged by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Past<'a> {
    pub(super) charges: &'a [Charge],
    /// For a bucket: what makes all charges up to then irrelevant.
    pub(super) known: Option<Known>,
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

    /// Whether the units that are left tell those that were taken, whenever that was.
    pub(super) fn tells_usage(&self) -> bool {
        matches!(self.promise, Promise::Window { .. } | Promise::Month { .. })
    }

    /// Whether a charge of then still counts at `now`.
    pub(super) fn counts(&self, then: Micros, now: Micros) -> bool {
        match self.promise {
            Promise::Window { per, .. } | Promise::Bucketed { per, .. } => then + per > now,
            Promise::Month { .. } => then >= month_of(now).0,
            Promise::Bucket { .. } => true,
        }
    }

    /// Whether it counts by the calendar.
    pub(super) fn is_month(&self) -> bool {
        matches!(self.promise, Promise::Month { .. })
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
    pub(super) fn available(&self, past: Past<'_>, view: View, now: Micros) -> u64 {
        match self.promise {
            Promise::Bucket { per, .. } => {
                u64::try_from(self.level(past, view, now).div_euclid(i128::from(per))).unwrap_or(0)
            }
            _ => self.capacity().saturating_sub(self.used(past, view, now)),
        }
    }

    /// Units that count at `now`; 0 of a bucket, which has a level instead.
    pub(super) fn used(&self, past: Past<'_>, view: View, now: Micros) -> u64 {
        let taken = taken(past.charges, view, now);
        match self.promise {
            Promise::Window { per, .. } => sum_since(&taken, now, per),
            Promise::Bucketed { per, .. } => sum_since(&taken, now, width(per, view)),
            Promise::Month { .. } => used_in_month(&taken, now),
            Promise::Bucket { .. } => 0,
        }
    }

    /// The level of a bucket at `now`, in parts of a unit: the least that any span allows. 0 of any other limit.
    pub(super) fn level(&self, past: Past<'_>, view: View, now: Micros) -> i128 {
        let Promise::Bucket { limit, per, burst } = self.promise else { return 0 };
        let full = i128::from(burst) * i128::from(per);
        let spans = spans(past, view, now, full, i128::from(per));
        let levels = spans.map(|(at, rest)| rest + i128::from(limit) * i128::from(now.saturating_sub(at)));
        levels.min().unwrap_or(full).min(full)
    }

    /// The first moment from `now` on at which `units` fit, if nothing else is taken meanwhile; `None` if never.
    pub(super) fn fits_at(&self, past: Past<'_>, view: View, now: Micros, units: u64) -> Option<Micros> {
        if units > self.capacity() {
            return None;
        }
        let taken = || taken(past.charges, view, now);
        Some(match self.promise {
            Promise::Window { limit, per } => free_again(taken(), now, per, limit - units),
            Promise::Bucketed { limit, per } => free_again(taken(), now, width(per, view), limit - units),
            Promise::Month { limit } => {
                if used_in_month(&taken(), now) + units <= limit {
                    now
                } else {
                    month_of(now).1
                }
            }
            Promise::Bucket { limit, per, burst } => {
                let (limit, per) = (i128::from(limit), i128::from(per));
                let until = |(at, rest): (Micros, i128)| {
                    let missing = (i128::from(units) * per - rest).max(0);
                    at + u64::try_from((missing + limit - 1) / limit).expect("spans are short")
                };
                let spans = spans(past, view, now, i128::from(burst) * per, per);
                spans.map(until).max().unwrap_or(now).max(now)
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

/// The spans that limit a bucket: one from each charge on, at which it was `full` at most. For each, when it begins, and
/// what it had then less all that was taken since, a unit being `per`.
fn spans(
    past: Past<'_>,
    view: View,
    now: Micros,
    full: i128,
    per: i128,
) -> impl Iterator<Item = (Micros, i128)> {
    let known = past.known.map(|known| match view {
        View::Most => (known.at, known.least),
        View::Least | View::Certain | View::Remembered => (known.at, known.most),
    });
    let mut taken = taken(past.charges, view, now);
    taken.retain(|(at, _)| known.is_none_or(|(since, _)| *at > since));
    let sum: u64 = taken.iter().map(|(_, units)| units).sum();
    let before = known.map(|(at, level)| (at, level - i128::from(sum) * per));
    // From the newest to the oldest.
    let each = taken.into_iter().rev().scan(0, move |sum, (at, units)| {
        *sum += i128::from(units);
        Some((at, full - *sum * per))
    });
    each.chain(before)
}

fn used_in_month(taken: &[(Micros, u64)], now: Micros) -> u64 {
    let (begin, _) = month_of(now);
    taken.iter().filter(|(at, _)| *at >= begin).map(|(_, units)| units).sum()
}

/// The calendar month in UTC that `moment` falls into: its first moment, and that of the next one.
pub(super) fn month_of(moment: Micros) -> (Micros, Micros) {
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

    /// When `units` fit, at `now`, behind these charges.
    fn fits_at(promise: Promise, taken: &[(Micros, u64)], now: Micros, units: u64) -> Option<Micros> {
        let past = Past { charges: &charges(taken), known: None };
        Limit { name: "limit", promise }.fits_at(past, View::Least, now, units)
    }

    /// Units left of the limit at each of these moments.
    #[track_caller]
    fn check(promise: Promise, taken: &[(Micros, u64)], left: &[(Micros, u64)]) {
        let limit = Limit { name: "limit", promise };
        for &(now, units) in left {
            let charges = charges(taken);
            let past = Past { charges: &charges, known: None };
            assert_eq!(limit.available(past, View::Least, now), units, "at {now}");
            // What is left fits at once, and one more does not.
            if units > 0 {
                assert_eq!(limit.fits_at(past, View::Least, now, units), Some(now));
            }
            assert!(limit.fits_at(past, View::Least, now, units + 1).is_none_or(|at| at > now));
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
        let later = 5 * SECOND + 20;
        assert_eq!(fits_at(promise, &taken, later, 2), Some(6 * SECOND));
        assert_eq!(fits_at(promise, &taken, later, 3), Some(6 * SECOND + 10));
        assert_eq!(fits_at(promise, &taken, later, 4), None);
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
        assert_eq!(fits_at(promise, &taken, 10 * SECOND, 3), Some(11 * SECOND + 500_000));
    }

    #[test]
    fn a_month_is_one_of_the_calendar() {
        let promise = Promise::Month { limit: 5 };
        // 1 March 2028; the day before is the 29 February.
        let march = 1_835_481_600 * SECOND;
        check(promise, &[(march - DAY, 3)], &[(march - 1, 2), (march, 5)]);
        assert_eq!(fits_at(promise, &[(march - DAY, 3)], march - 1, 3), Some(march));
    }
}
