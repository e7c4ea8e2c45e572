//! The sliding window: never more than `limit` units in ANY window of length `per`.
//!
//! Two forms of the same promise, chosen by the limit:
//!
//! * **Exact** up to [`EXACT_MAX`]: the times of the last admissions, 4 bytes each. Admission times never decrease, so a
//!   request fits if and only if the units admitted within the last `per`, plus its cost, are at most `limit`: the
//!   definition itself. Nothing is over- or under-counted, and `wait` is exact. Times are kept to the microsecond in
//!   windows up to 17 minutes, and rounded up to `per / 2^30` in longer ones (2.4 ms in 30 days): a unit may come back
//!   that much late, and never early.
//! * **Bucketed** above: `per` is cut into [`BUCKETS`] parts and the oldest, partly covered one is counted in full. What is
//!   counted is a superset of the window, so there is never more than `limit` in any; and it spans less than
//!   `per + per / BUCKETS`, so at least `1 / (1 + 1 / BUCKETS)` = 98.3 % of the rate stays usable. Memory is constant.
//!
//! A clock that steps back neither frees units nor locks anybody out: time stands still for the log across the step
//! ([`SlidingWindow::align`]) and goes on from there.

use std::collections::VecDeque;
use std::num::NonZeroU64;

use super::{Micros, Standing, Unusable, check_range};

/// The largest limit that is counted exactly. Above it memory would grow past 40 KB a caller.
pub const EXACT_MAX: u64 = 10_000;

/// The largest limit of a window: the sums of all buckets that count, none of which holds more, stay below 2^53.
pub const WINDOW_MAX: u64 = 100_000_000_000_000;

/// Parts that a bucketed window is cut into.
const BUCKETS: u64 = 60;

/// Buckets that count at any time: all parts of the window and the partly covered oldest one.
const COUNTED: usize = 61;

/// An exact window spans at most so many ticks, which leaves room in a `u32` for the log to grow old.
const TICKS: u64 = 1 << 30;

/// A log older than so many ticks moves its base.
const REBASE: u64 = 3 << 30;

/// At most `limit` units in any window of `per`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow {
    limit: NonZeroU64,
    per: Micros,
    /// Microseconds of one tick (exact) or of one bucket (bucketed).
    grain: Micros,
}

/// What was admitted, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WindowLog {
    /// Every admission on its own.
    Exact(Ring),
    /// Sums of admissions.
    Bucketed(Buckets),
}

/// The times of the last admissions, in ticks since `base`, oldest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    tick: Micros,
    base: i64,
    times: VecDeque<u32>,
}

/// Units admitted in each bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    width: Micros,
    base: i64,
    /// The time of the last admission, relative to `base`.
    newest: u64,
    /// Units of a charge at this time or before do not stand where their time says: a clock that stepped back, or an edit,
    /// has moved them since.
    moved: i64,
    /// Units of bucket `i` at `i % COUNTED`.
    counts: Box<[u64; COUNTED]>,
}

impl SlidingWindow {
    /// `limit` units in any `per` microseconds.
    ///
    /// # Errors
    /// When the limit or `per` is out of range.
    pub fn new(limit: NonZeroU64, per: Micros) -> Result<Self, Unusable> {
        check_range(per, &[limit])?;
        if limit.get() > WINDOW_MAX {
            return Err(Unusable::Window);
        }
        let grain = if limit.get() <= EXACT_MAX { per.div_ceil(TICKS) } else { per.div_ceil(BUCKETS) };
        Ok(Self { limit, per, grain })
    }

    /// The most units in any window.
    #[must_use]
    pub fn limit(&self) -> NonZeroU64 {
        self.limit
    }

    /// The length of the window, in microseconds.
    #[must_use]
    pub fn per(&self) -> Micros {
        self.per
    }

    /// Whether every admission is counted on its own.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.limit.get() <= EXACT_MAX
    }

    /// Microseconds of one tick (exact) or of one bucket (bucketed); what the Lua side is told.
    #[must_use]
    pub fn grain(&self) -> Micros {
        self.grain
    }

    /// Brings a log to this window's form and to `now`: converts it when the limit was edited, and lets time stand
    /// still where the clock has stepped back.
    pub fn align(&self, log: &mut WindowLog, now: Micros) {
        log.stand_still(now);
        // Two limits may use one log in turns, call by call: making it over must not be what each of them does. So a log
        // keeps the coarser form until nothing in it counts and it begins anew.
        let fits = match log {
            WindowLog::Exact(ring) => self.is_exact() && ring.tick >= self.grain,
            WindowLog::Bucketed(buckets) => buckets.width >= self.width(),
        };
        match log {
            log if !fits => *log = self.converted(log, now),
            WindowLog::Exact(ring) => ring.rebase(self.per, now),
            WindowLog::Bucketed(_) => {}
        }
    }

    /// How a request of `cost` stands, charging nothing. Call [`align`](Self::align) first.
    #[must_use]
    pub fn judge(&self, log: Option<&WindowLog>, now: Micros, cost: NonZeroU64) -> Standing {
        let Some(log) = log else {
            return Standing { wait: self.wait_when_empty(cost), remaining: self.limit.get(), next: 0 };
        };
        let (used, next) = self.usage(log, now);
        let excess = used.saturating_add(cost.get()).saturating_sub(self.limit.get());
        let wait = match self.wait_when_empty(cost) {
            Some(_) if excess > 0 => Some(self.until_freed(log, now, excess)),
            other => other,
        };
        Standing { wait, remaining: self.limit.get().saturating_sub(used), next }
    }

    /// Takes `cost` units, which [`judge`](Self::judge) found to fit.
    #[must_use]
    pub fn charge(&self, log: Option<WindowLog>, now: Micros, cost: NonZeroU64) -> (WindowLog, Standing) {
        // Where nothing counts any more, a log begins anew.
        let log = log.filter(|log| self.usage(log, now).0 > 0);
        let mut log = log.unwrap_or_else(|| self.empty(now));
        match &mut log {
            WindowLog::Exact(ring) => ring.admit(self.per, now, cost.get()),
            WindowLog::Bucketed(buckets) => buckets.admit(now, cost.get()),
        }
        let (used, next) = self.usage(&log, now);
        let standing = Standing { wait: Some(0), remaining: self.limit.get().saturating_sub(used), next };
        (log, standing)
    }

    /// Gives back up to `units` that were charged at the moment `charged`, as far as they still count.
    ///
    /// What remains is the log without them, so every promise holds as if they had never been taken. Only units with that
    /// very time are given back: where an edited limit or a clock that stepped back has moved it, they stay charged.
    pub fn refund(&self, log: &mut WindowLog, now: Micros, charged: Micros, units: u64) {
        match log {
            WindowLog::Exact(ring) => ring.remove(self.per, now, charged, units),
            WindowLog::Bucketed(buckets) => buckets.remove(self.back(buckets), now, charged, units),
        }
    }

    /// Charges `units` more, whether they fit or not. No log outgrows its bounds: more than the largest limit decide nothing
    /// that the largest limit would not.
    #[must_use]
    pub fn surcharge(&self, log: Option<WindowLog>, now: Micros, units: NonZeroU64) -> WindowLog {
        let log = log.filter(|log| self.usage(log, now).0 > 0);
        let mut log = log.unwrap_or_else(|| self.empty(now));
        match &mut log {
            WindowLog::Exact(ring) => {
                let units = units.get().min(EXACT_MAX);
                let live = ring.live(self.per, now);
                let spare = (live.len() as u64 + units).saturating_sub(EXACT_MAX);
                let dropped = live.start + usize::try_from(spare).unwrap_or(usize::MAX).min(live.len());
                ring.times.drain(..dropped);
                if ring.times.is_empty() {
                    (ring.tick, ring.base) = (self.grain, now.cast_signed());
                }
                ring.admit(self.per, now, units);
            }
            WindowLog::Bucketed(buckets) => {
                let units = units.get().min(WINDOW_MAX.saturating_sub(buckets.at(now)));
                if units > 0 {
                    buckets.admit(now, units);
                }
            }
        }
        log
    }

    /// Microseconds until nothing in the log counts any more.
    #[must_use]
    pub fn expires_in(&self, log: &WindowLog, now: Micros) -> Micros {
        match log {
            WindowLog::Exact(ring) => {
                ring.times.back().map_or(0, |&newest| ring.until(newest, self.per, now))
            }
            WindowLog::Bucketed(buckets) => buckets.until_left(BUCKETS, buckets.newest / buckets.width, now),
        }
    }

    /// A request may fit an empty window at once, or never.
    fn wait_when_empty(&self, cost: NonZeroU64) -> Option<Micros> {
        (cost <= self.limit).then_some(0)
    }

    /// Units that count at `now`, and the time until the first of them no longer does.
    fn usage(&self, log: &WindowLog, now: Micros) -> (u64, Micros) {
        match log {
            WindowLog::Exact(ring) => {
                let live = ring.live(self.per, now);
                let next = ring.times.get(live.start).map_or(0, |&oldest| ring.until(oldest, self.per, now));
                (live.len() as u64, next)
            }
            WindowLog::Bucketed(buckets) => {
                let back = self.back(buckets);
                let used = buckets.counted(back, now).map(|(_, count)| count).sum();
                let oldest = buckets.counted(back, now).find(|&(_, count)| count > 0);
                (used, oldest.map_or(0, |(bucket, _)| buckets.until_left(back, bucket, now)))
            }
        }
    }

    /// The time until the oldest `units` of the live ones no longer count.
    fn until_freed(&self, log: &WindowLog, now: Micros, units: u64) -> Micros {
        match log {
            WindowLog::Exact(ring) => {
                let live = ring.live(self.per, now);
                let last = live.start + usize::try_from(units - 1).unwrap_or(usize::MAX - live.start);
                ring.times.get(last).map_or(0, |&time| ring.until(time, self.per, now))
            }
            WindowLog::Bucketed(buckets) => {
                let mut freed = 0;
                let back = self.back(buckets);
                let last = buckets.counted(back, now).find(|&(_, count)| {
                    freed += count;
                    freed >= units
                });
                last.map_or(0, |(bucket, _)| buckets.until_left(back, bucket, now))
            }
        }
    }

    fn empty(&self, now: Micros) -> WindowLog {
        self.empty_of(self.is_exact(), now)
    }

    fn empty_of(&self, exact: bool, now: Micros) -> WindowLog {
        let base = now.cast_signed();
        if exact {
            WindowLog::Exact(Ring { tick: self.grain, base, times: VecDeque::new() })
        } else {
            let counts = Box::new([0; COUNTED]);
            WindowLog::Bucketed(Buckets { width: self.width(), base, newest: 0, moved: 0, counts })
        }
    }

    /// Microseconds of one bucket, also where an exact window has to do with buckets for a while.
    fn width(&self) -> Micros {
        self.per.div_ceil(BUCKETS)
    }

    /// Buckets that count behind that of now: 60, or fewer where a longer window has left wider ones.
    fn back(&self, buckets: &Buckets) -> u64 {
        self.per.div_ceil(buckets.width).min(BUCKETS)
    }

    /// The same admissions in this window's form; where a time is only known to lie in a bucket, the end of the bucket
    /// is taken, so that nothing is forgotten too early. No unit is dropped, also where there are more than the limit: it
    /// may be raised again.
    fn converted(&self, log: &WindowLog, now: Micros) -> WindowLog {
        let mut history = log.history(now);
        // Rounded up to a tick, the time of an admission may lie a little ahead; it was not after now.
        history.iter_mut().for_each(|(time, _)| *time = (*time).min(now.cast_signed()));
        history.retain(|&(time, _)| time + self.per.cast_signed() > now.cast_signed());
        let oldest = history.first().map_or(now.cast_signed(), |&(time, _)| time);
        let exact = self.is_exact() && (matches!(log, WindowLog::Exact(_)) || history.is_empty());
        let mut new = self.empty_of(exact, oldest.cast_unsigned());
        match &mut new {
            WindowLog::Exact(ring) => {
                for (time, units) in history {
                    let tick = u64::try_from(time - oldest).unwrap_or(0).div_ceil(ring.tick);
                    let tick = u32::try_from(tick).unwrap_or(u32::MAX);
                    ring.times.extend(std::iter::repeat_n(tick, usize::try_from(units).unwrap_or(0)));
                }
            }
            WindowLog::Bucketed(buckets) => {
                for (time, units) in history {
                    buckets.admit(time.cast_unsigned(), units);
                }
                buckets.moved = now.cast_signed();
            }
        }
        new
    }
}

impl WindowLog {
    /// Where the clock has stepped back behind the newest admission, moves the base so that no time has passed since.
    fn stand_still(&mut self, now: Micros) {
        let now = now.cast_signed();
        match self {
            Self::Exact(ring) => {
                let newest = ring.times.back().map_or(0, |&tick| i64::from(tick));
                if ring.relative(now) < newest {
                    ring.base = now - newest * ring.tick.cast_signed();
                }
            }
            Self::Bucketed(buckets) => {
                if now - buckets.base < buckets.newest.cast_signed() {
                    buckets.moved = buckets.moved.max(buckets.base + buckets.newest.cast_signed());
                    buckets.base = now - buckets.newest.cast_signed();
                }
            }
        }
    }

    /// Admissions as (time, units), oldest first, none of them after `now`.
    fn history(&self, now: Micros) -> Vec<(i64, u64)> {
        match self {
            Self::Exact(ring) => ring
                .times
                .iter()
                .map(|&tick| (ring.base + i64::from(tick) * ring.tick.cast_signed(), 1))
                .collect(),
            Self::Bucketed(buckets) => buckets
                .counted(BUCKETS, now)
                .filter(|&(_, count)| count > 0)
                .map(|(bucket, count)| {
                    let end = ((bucket + 1) * buckets.width - 1).min(buckets.newest);
                    (buckets.base + end.cast_signed(), count)
                })
                .collect(),
        }
    }
}

impl Ring {
    /// `now` in ticks since `base`, rounded up: what is stored is never earlier than what happened.
    fn relative(&self, now: i64) -> i64 {
        let tick = self.tick.cast_signed();
        let since = now - self.base;
        since.div_euclid(tick) + i64::from(since.rem_euclid(tick) > 0)
    }

    fn ticks_at(&self, now: Micros) -> u64 {
        u64::try_from(self.relative(now.cast_signed())).unwrap_or(0)
    }

    /// When the admission stored as `tick` no longer counts in a window of `per`.
    fn leaves(&self, tick: u32, per: Micros) -> i64 {
        self.base + i64::from(tick) * self.tick.cast_signed() + per.cast_signed()
    }

    /// The places of the admissions that count at `now`.
    fn live(&self, per: Micros, now: Micros) -> std::ops::Range<usize> {
        let dead = |&tick: &u32| self.leaves(tick, per) <= now.cast_signed();
        self.times.partition_point(dead)..self.times.len()
    }

    /// Microseconds until the admission stored as `tick` no longer counts.
    fn until(&self, tick: u32, per: Micros, now: Micros) -> Micros {
        u64::try_from(self.leaves(tick, per) - now.cast_signed()).unwrap_or(0)
    }

    fn admit(&mut self, per: Micros, now: Micros, units: u64) {
        let dead = self.live(per, now).start;
        self.times.drain(..dead);
        let tick = u32::try_from(self.ticks_at(now)).unwrap_or(u32::MAX);
        self.times.extend(std::iter::repeat_n(tick, usize::try_from(units).unwrap_or(0)));
    }

    /// Takes out up to `units` of those that were admitted at the moment `charged`.
    fn remove(&mut self, per: Micros, now: Micros, charged: Micros, units: u64) {
        if self.live(per, now).is_empty() {
            return;
        }
        let tick = self.relative(charged.cast_signed());
        let first = self.times.partition_point(|&time| i64::from(time) < tick);
        let behind = self.times.partition_point(|&time| i64::from(time) <= tick);
        let last = first + usize::try_from(units).unwrap_or(usize::MAX).min(behind - first);
        self.times.drain(first..last);
    }

    /// Keeps the offsets small: an old log begins at its oldest admission that counts.
    fn rebase(&mut self, per: Micros, now: Micros) {
        let live = self.live(per, now);
        if self.ticks_at(now) <= REBASE || live.is_empty() {
            return;
        }
        self.times.drain(..live.start);
        let oldest = self.times.front().copied().unwrap_or_default();
        self.base += i64::from(oldest) * self.tick.cast_signed();
        for time in &mut self.times {
            *time -= oldest;
        }
    }
}

impl Buckets {
    fn relative(&self, now: Micros) -> u64 {
        u64::try_from(now.cast_signed() - self.base).unwrap_or(0)
    }

    /// Bucket numbers and counts, oldest first, of the bucket of `now` and so many `back`.
    fn counted(&self, back: u64, now: Micros) -> impl Iterator<Item = (u64, u64)> + '_ {
        let current = self.relative(now) / self.width;
        let newest = self.newest / self.width;
        let oldest = current.saturating_sub(back).max(newest.saturating_sub(BUCKETS));
        (oldest..=newest).map(|bucket| (bucket, self.counts[Self::place(bucket)]))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the remainder is below 61")]
    fn place(bucket: u64) -> usize {
        (bucket % COUNTED as u64) as usize
    }

    /// Microseconds until a bucket is no longer one of those so many `back`.
    fn until_left(&self, back: u64, bucket: u64, now: Micros) -> Micros {
        ((bucket + back + 1) * self.width).saturating_sub(self.relative(now))
    }

    /// Clears the buckets between the newest one and that of `now`.
    fn advance(&mut self, now: Micros) {
        let (newest, current) = (self.newest / self.width, self.relative(now) / self.width);
        for bucket in (newest + 1..=current).take(COUNTED) {
            self.counts[Self::place(bucket)] = 0;
        }
        self.newest = self.newest.max(self.relative(now));
    }

    /// Units in the bucket of `now`.
    fn at(&self, now: Micros) -> u64 {
        let current = self.relative(now) / self.width;
        if current == self.newest / self.width { self.counts[Self::place(current)] } else { 0 }
    }

    /// Takes out up to `units` of the bucket of the moment `charged`, if it still counts.
    fn remove(&mut self, back: u64, now: Micros, charged: Micros, units: u64) {
        if charged.cast_signed() <= self.moved {
            return;
        }
        let bucket = (charged.cast_signed() - self.base).div_euclid(self.width.cast_signed());
        let found = self.counted(back, now).find(|&(counted, _)| counted.cast_signed() == bucket);
        if let Some((bucket, _)) = found {
            let count = &mut self.counts[Self::place(bucket)];
            *count -= units.min(*count);
        }
    }

    fn admit(&mut self, now: Micros, units: u64) {
        self.advance(now);
        let place = Self::place(self.newest / self.width);
        // More decide what so many do, as no limit is larger: after an edit, several buckets of debts may become one.
        self.counts[place] = self.counts[place].saturating_add(units).min(WINDOW_MAX);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::AMOUNT_MAX;
    use super::*;

    const SECOND: Micros = 1_000_000;

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    fn window(limit: u64, per: Micros) -> SlidingWindow {
        SlidingWindow::new(n(limit), per).unwrap()
    }

    /// A caller of one window: what the memory store does, for one limit.
    #[derive(Default)]
    struct Caller(Option<WindowLog>);

    impl Caller {
        fn ask(&mut self, window: &SlidingWindow, now: Micros, cost: u64) -> Standing {
            if let Some(log) = &mut self.0 {
                window.align(log, now);
            }
            let standing = window.judge(self.0.as_ref(), now, n(cost));
            if standing.wait != Some(0) {
                return standing;
            }
            let (log, standing) = window.charge(self.0.take(), now, n(cost));
            self.0 = Some(log);
            standing
        }
    }

    /// A window through a table of (time in ms, cost, expected wait in ms, remaining after, next in ms).
    #[track_caller]
    fn check(window: SlidingWindow, rows: &[(u64, u64, Option<u64>, u64, u64)]) {
        let mut caller = Caller::default();
        for &(at, cost, wait, remaining, next) in rows {
            let expected = Standing { wait: wait.map(|ms| ms * 1_000), remaining, next: next * 1_000 };
            assert_eq!(caller.ask(&window, at * 1_000, cost), expected, "at {at} ms");
        }
    }

    #[test]
    fn a_unit_comes_back_when_its_admission_leaves_the_window() {
        check(
            window(3, 10 * SECOND),
            &[
                (0, 1, Some(0), 2, 10_000),
                (4_000, 2, Some(0), 0, 6_000),
                // The first unit comes back at 10 s, and not one millisecond earlier.
                (5_000, 1, Some(5_000), 0, 5_000),
                (9_999, 1, Some(1), 0, 1),
                // Two units need the second admission gone as well.
                (9_999, 2, Some(4_001), 0, 1),
                (10_000, 1, Some(0), 0, 4_000),
                // More than the limit never fits.
                (10_000, u64::MAX, None, 0, 4_000),
                (60_000, 4, None, 3, 0),
            ],
        );
    }

    #[test]
    fn a_bucketed_window_frees_late_by_a_bucket_at_most() {
        let limit = EXACT_MAX + 2;
        check(
            window(limit, 60 * SECOND),
            &[
                (0, limit - 1, Some(0), 1, 61_000),
                (30_500, 1, Some(0), 0, 30_500),
                (30_500, 1, Some(30_500), 0, 30_500),
                (60_999, 1, Some(1), 0, 1),
                (61_000, 1, Some(0), limit - 2, 30_000),
                // After a long silence everything is free again.
                (600_000, limit, Some(0), 0, 61_000),
            ],
        );
    }

    #[test]
    fn a_clock_that_steps_back_frees_nothing_and_locks_nobody_out() {
        for limit in [2, EXACT_MAX + 1] {
            let window = window(limit, 10 * SECOND);
            let mut caller = Caller::default();
            assert_eq!(caller.ask(&window, 3_600 * SECOND, limit).wait, Some(0));
            let wait = caller.ask(&window, 0, 1).wait.unwrap();
            assert!((10 * SECOND..=11 * SECOND).contains(&wait), "{wait}");
            assert_eq!(caller.ask(&window, wait - 1, 1).wait, Some(1));
            assert_eq!(caller.ask(&window, wait, 1).wait, Some(0));
        }
    }

    #[test]
    fn an_edited_limit_keeps_what_was_used() {
        let mut caller = Caller::default();
        let at = |second| second * SECOND;
        assert_eq!(caller.ask(&window(100, at(60)), at(0), 10).remaining, 90);
        // Lowered below what is used, raised, made coarser, bucketed, and exact again.
        assert_eq!(caller.ask(&window(5, at(60)), at(1), 1).wait, Some(at(59)));
        assert_eq!(caller.ask(&window(20, at(60)), at(2), 1).remaining, 9);
        assert_eq!(caller.ask(&window(20, at(86_400)), at(3), 1).remaining, 8);
        assert_eq!(caller.ask(&window(EXACT_MAX + 20, at(86_400)), at(4), 1).remaining, EXACT_MAX + 7);
        assert_eq!(caller.ask(&window(20, at(86_400)), at(5), 1).remaining, 6);
    }

    #[test]
    fn a_log_that_grows_old_moves_its_base() {
        // 2^30 ticks of 1 us are 1,074 s: a caller who never pauses passes that many times.
        let window = window(3, 1_000 * SECOND);
        let mut caller = Caller::default();
        for round in 0..30 {
            let now = round * 400 * SECOND;
            assert_eq!(caller.ask(&window, now, 1).wait, Some(0), "round {round}");
        }
    }

    #[test]
    fn windows_out_of_range_are_refused() {
        assert_eq!(SlidingWindow::new(n(1), 999), Err(Unusable::Per));
        assert_eq!(SlidingWindow::new(n(1), 401 * 86_400 * SECOND), Err(Unusable::Per));
        assert_eq!(SlidingWindow::new(n(AMOUNT_MAX + 1), SECOND), Err(Unusable::Amount));
    }

    fn units_within(admitted: &[(Micros, u64)], after: i64, until: i64) -> u64 {
        let within = |&&(time, _): &&(Micros, u64)| (after + 1..=until).contains(&time.cast_signed());
        admitted.iter().filter(within).map(|&(_, units)| units).sum()
    }

    proptest! {
        /// The exact window is its own definition: a request passes if and only if the units admitted within the last
        /// `per` leave room, and the wait it is told is right to the microsecond.
        #[test]
        fn exact_equals_the_definition(
            limit in 1u64..12,
            per in 1_000u64..200_000,
            steps in prop::collection::vec((0u64..60_000, 1u64..4), 1..200),
        ) {
            let window = window(limit, per);
            let mut caller = Caller::default();
            let mut admitted: Vec<(Micros, u64)> = Vec::new();
            let mut now: Micros = 0;
            for (pause, cost) in steps {
                now += pause;
                let fits = |at: Micros| {
                    let until = at.cast_signed();
                    units_within(&admitted, until - per.cast_signed(), until) + cost <= limit
                };
                let standing = caller.ask(&window, now, cost);
                match standing.wait {
                    Some(0) => {
                        prop_assert!(fits(now));
                        admitted.push((now, cost));
                    }
                    Some(wait) => prop_assert!(!fits(now) && !fits(now + wait - 1) && fits(now + wait)),
                    None => prop_assert!(cost > limit),
                }
                let used = units_within(&admitted, now.cast_signed() - per.cast_signed(), now.cast_signed());
                prop_assert_eq!(standing.remaining, limit - used);
            }
        }

        /// The bucketed window never admits more than `limit` in any window, and everything that an exact window of one
        /// bucket more would admit.
        #[test]
        fn bucketed_is_safe_and_generous(
            per in 1_000u64..200_000,
            steps in prop::collection::vec((0u64..20_000, 1u64..6_000), 1..200),
        ) {
            let limit = EXACT_MAX + 1;
            let window = window(limit, per);
            let mut caller = Caller::default();
            let mut admitted: Vec<(Micros, u64)> = Vec::new();
            let mut now: Micros = 0;
            for (pause, cost) in steps {
                now += pause;
                let until = now.cast_signed();
                let used = |span: Micros| units_within(&admitted, until - span.cast_signed(), until);
                let (strict, loose) = (used(per), used((BUCKETS + 1) * window.grain()));
                let standing = caller.ask(&window, now, cost);
                if standing.wait == Some(0) {
                    prop_assert!(strict + cost <= limit);
                    admitted.push((now, cost));
                } else {
                    prop_assert!(loose + cost > limit);
                    let mut later = Caller(caller.0.clone());
                    prop_assert_eq!(later.ask(&window, now + standing.wait.unwrap(), cost).wait, Some(0));
                    let mut sooner = Caller(caller.0.clone());
                    prop_assert_ne!(sooner.ask(&window, now + standing.wait.unwrap() - 1, cost).wait, Some(0));
                }
            }
        }

        /// A coarse tick (long windows) never admits more than the limit, and delays by a tick at most.
        #[test]
        fn coarse_ticks_are_safe(steps in prop::collection::vec(0u64..40_000_000_000, 1..100)) {
            let per = 400 * 86_400 * SECOND;
            let window = window(2, per);
            let mut caller = Caller::default();
            let mut admitted: Vec<(Micros, u64)> = Vec::new();
            let mut now: Micros = 0;
            for pause in steps {
                now += pause * 500;
                let until = now.cast_signed();
                let used = |span: Micros| units_within(&admitted, until - span.cast_signed(), until);
                let (strict, loose) = (used(per), used(per + window.grain()));
                if caller.ask(&window, now, 1).wait == Some(0) {
                    prop_assert!(strict < 2);
                    admitted.push((now, 1));
                } else {
                    prop_assert!(loose >= 2);
                }
            }
        }
    }
}
