//! Where calendar periods begin: days, weeks and months in a time zone.
//!
//! The gateway knows time zones, the store knows the time. So a store is not told "this month" but the boundaries of a few
//! periods around the gateway's own idea of now ([`Boundaries`]), and picks the one that its own clock is in. A gateway
//! whose clock is wrong by less than a whole period charges the right one all the same.

use jiff::civil::{Date, Weekday};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use parking_lot::Mutex;

use super::algorithm::{Micros, Period};

/// The length of a calendar period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// From midnight to midnight.
    Day,
    /// From Monday's midnight to the next one (ISO 8601).
    Week,
    /// From the first of a month to the first of the next, or between the days that an account's [`Anchor`] names.
    Month,
}

impl Unit {
    /// The word in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        }
    }

    /// Seconds of a usual one: what a header can say that must not change from answer to answer.
    #[must_use]
    pub fn usual_seconds(self) -> u64 {
        match self {
            Self::Day => 86_400,
            Self::Week => 7 * 86_400,
            Self::Month => 30 * 86_400,
        }
    }

    /// The first day of the period that `date` is in.
    fn first_day(self, date: Date, anchor: Anchor) -> Date {
        match self {
            Self::Day => date,
            Self::Week => date.saturating_sub(i64::from(date.weekday().since(Weekday::Monday)).days()),
            Self::Month => {
                let own = anchor.in_month_of(date);
                if own <= date {
                    own
                } else {
                    anchor.in_month_of(date.first_of_month().saturating_sub(1.day()))
                }
            }
        }
    }

    fn next(self, first: Date, anchor: Anchor) -> Date {
        match self {
            Self::Day => first.saturating_add(1.day()),
            Self::Week => first.saturating_add(1.week()),
            Self::Month => anchor.in_month_of(first.last_of_month().saturating_add(1.day())),
        }
    }

    fn previous(self, first: Date, anchor: Anchor) -> Date {
        self.first_day(first.saturating_sub(1.day()), anchor)
    }
}

/// The day of the month on which an account's months begin, from 1 to 31. In a shorter month it is the last day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Anchor(u8);

impl Anchor {
    /// The first of the month: what applies to whom nothing else is said of.
    pub const FIRST: Self = Self(1);

    /// This day of the month.
    #[must_use]
    pub fn on(day: u8) -> Option<Self> {
        (1..=31).contains(&day).then_some(Self(day))
    }

    /// The day.
    #[must_use]
    pub fn day(self) -> u8 {
        self.0
    }

    fn in_month_of(self, date: Date) -> Date {
        let last = date.last_of_month();
        let days_before_last = last.day().cast_unsigned().saturating_sub(self.0);
        last.saturating_sub(i64::from(days_before_last).days())
    }
}

/// Periods of one length in one time zone.
#[derive(Debug)]
pub struct Calendar {
    unit: Unit,
    zone: TimeZone,
    /// The last answer for each anchor: it holds for as long as its period lasts, and working it out takes a microsecond or
    /// two. Only months have more than one.
    latest: Box<[Mutex<Boundaries>]>,
}

impl PartialEq for Calendar {
    fn eq(&self, other: &Self) -> bool {
        (self.unit, &self.zone) == (other.unit, &other.zone)
    }
}

impl Eq for Calendar {}

/// The time zone database does not know the name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("is not a time zone of the IANA database; for example \"UTC\" or \"Europe/Berlin\"")]
pub struct UnknownZone;

impl Calendar {
    /// Periods of `unit` in the zone of this IANA name.
    ///
    /// # Errors
    /// When there is no such zone.
    pub fn new(unit: Unit, zone: &str) -> Result<Self, UnknownZone> {
        let zone = TimeZone::get(zone).map_err(|_| UnknownZone)?;
        let anchors = if unit == Unit::Month { 31 } else { 1 };
        Ok(Self { unit, zone, latest: (0..anchors).map(|_| Mutex::new(Boundaries([0; 4]))).collect() })
    }

    /// The length of the periods.
    #[must_use]
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// The zone's name.
    #[must_use]
    pub fn zone(&self) -> &str {
        self.zone.iana_name().unwrap_or("UTC")
    }

    /// The period of `now` and its neighbours, for an account of this anchor.
    #[must_use]
    pub fn around(&self, now: Micros, anchor: Anchor) -> Boundaries {
        let anchor = if self.unit == Unit::Month { anchor } else { Anchor::FIRST };
        let mut latest = self.latest[usize::from(anchor.0) - 1].lock();
        if !(latest.0[1]..latest.0[2]).contains(&now) {
            *latest = self.work_out(now, anchor);
        }
        *latest
    }

    fn work_out(&self, now: Micros, anchor: Anchor) -> Boundaries {
        let now = Timestamp::from_microsecond(now.cast_signed()).unwrap_or(Timestamp::MAX);
        let first = self.unit.first_day(self.zone.to_datetime(now).date(), anchor);
        let (previous, next) = (self.unit.previous(first, anchor), self.unit.next(first, anchor));
        let dates = [previous, first, next, self.unit.next(next, anchor)];
        Boundaries(dates.map(|date| self.midnight(date)))
    }

    /// The first moment of a day: midnight, or what there is instead where daylight saving skips midnight.
    fn midnight(&self, date: Date) -> Micros {
        let start = date.to_zoned_datetime(self.zone.clone());
        start.map_or(Micros::MAX, |start| u64::try_from(start.timestamp().as_microsecond()).unwrap_or(0))
    }
}

/// The beginnings of four periods in a row; the second one is that of the moment asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundaries(pub [Micros; 4]);

impl Boundaries {
    /// The period that `now` is in, if it is one of the three.
    #[must_use]
    pub fn period_of(&self, now: Micros) -> Option<Period> {
        let mut periods = self.0.windows(2).map(|pair| Period { start: pair[0], end: pair[1] });
        periods.find(|period| (period.start..period.end).contains(&now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The period of a moment, both written as civil times with the zone's offset.
    #[track_caller]
    fn check(unit: Unit, zone: &str, moment: &str, start: &str, end: &str) {
        check_anchored(unit, 1, zone, moment, start, end);
    }

    #[track_caller]
    fn check_anchored(unit: Unit, day: u8, zone: &str, moment: &str, start: &str, end: &str) {
        let micros = |text: &str| {
            let time: Timestamp = text.parse().unwrap();
            time.as_microsecond().cast_unsigned()
        };
        let calendar = Calendar::new(unit, zone).unwrap();
        let now = micros(moment);
        let period = calendar.around(now, Anchor::on(day).unwrap()).period_of(now).unwrap();
        assert_eq!(period, Period { start: micros(start), end: micros(end) }, "{zone} {moment}");
    }

    #[test]
    fn months_end_where_they_end() {
        // TIME-7: "one month ago" on 31 March became 3 March, and the quota window shrank.
        let month = |moment, start, end| check(Unit::Month, "UTC", moment, start, end);
        month("2026-03-31T12:00:00Z", "2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z");
        month("2026-03-31T23:59:59.999999Z", "2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z");
        month("2026-04-01T00:00:00Z", "2026-04-01T00:00:00Z", "2026-05-01T00:00:00Z");
        month("2026-01-31T08:00:00Z", "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z");
        month("2028-02-29T08:00:00Z", "2028-02-01T00:00:00Z", "2028-03-01T00:00:00Z");
        month("2026-12-31T23:00:00Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z");
    }

    #[test]
    fn an_accounts_months_begin_on_its_own_day() {
        let month = |day, moment, start, end| check_anchored(Unit::Month, day, "UTC", moment, start, end);
        month(15, "2026-03-14T23:59:59Z", "2026-02-15T00:00:00Z", "2026-03-15T00:00:00Z");
        month(15, "2026-03-15T00:00:00Z", "2026-03-15T00:00:00Z", "2026-04-15T00:00:00Z");
        // A month without the day ends on its last one, and the next one is back on the day.
        month(31, "2026-02-10T00:00:00Z", "2026-01-31T00:00:00Z", "2026-02-28T00:00:00Z");
        month(31, "2026-02-28T00:00:00Z", "2026-02-28T00:00:00Z", "2026-03-31T00:00:00Z");
        month(30, "2028-02-29T12:00:00Z", "2028-02-29T00:00:00Z", "2028-03-30T00:00:00Z");
        month(29, "2026-02-28T12:00:00Z", "2026-02-28T00:00:00Z", "2026-03-29T00:00:00Z");
        month(31, "2026-12-31T12:00:00Z", "2026-12-31T00:00:00Z", "2027-01-31T00:00:00Z");
        month(1, "2026-12-31T12:00:00Z", "2026-12-01T00:00:00Z", "2027-01-01T00:00:00Z");
        // And with daylight saving in between.
        check_anchored(
            Unit::Month,
            29,
            "Europe/Berlin",
            "2026-03-29T00:00:00+01:00",
            "2026-03-29T00:00:00+01:00",
            "2026-04-29T00:00:00+02:00",
        );
        assert_eq!([0, 32].map(Anchor::on), [None, None]);
    }

    #[test]
    fn days_of_daylight_saving_have_23_and_25_hours() {
        let berlin = |moment, start, end| check(Unit::Day, "Europe/Berlin", moment, start, end);
        berlin("2026-03-29T12:00:00+02:00", "2026-03-29T00:00:00+01:00", "2026-03-30T00:00:00+02:00");
        berlin("2026-10-25T12:00:00+01:00", "2026-10-25T00:00:00+02:00", "2026-10-26T00:00:00+01:00");
        let new_york = |moment, start, end| check(Unit::Day, "America/New_York", moment, start, end);
        new_york("2026-03-08T12:00:00-04:00", "2026-03-08T00:00:00-05:00", "2026-03-09T00:00:00-04:00");
        new_york("2026-11-01T12:00:00-05:00", "2026-11-01T00:00:00-04:00", "2026-11-02T00:00:00-05:00");
        // Where midnight itself is skipped, the day begins with the first moment there is.
        check(
            Unit::Day,
            "America/Santiago",
            "2026-09-06T12:00:00-03:00",
            "2026-09-06T01:00:00-03:00",
            "2026-09-07T00:00:00-03:00",
        );
    }

    #[test]
    fn weeks_begin_on_monday_and_zones_may_be_half_an_hour_off() {
        let week = |zone, moment, start, end| check(Unit::Week, zone, moment, start, end);
        week("UTC", "2026-11-29T23:59:59Z", "2026-11-23T00:00:00Z", "2026-11-30T00:00:00Z");
        week("UTC", "2026-11-30T00:00:00Z", "2026-11-30T00:00:00Z", "2026-12-07T00:00:00Z");
        let kolkata = "Asia/Kolkata";
        week(kolkata, "2026-11-29T18:29:59Z", "2026-11-22T18:30:00Z", "2026-11-29T18:30:00Z");
        check(Unit::Month, kolkata, "2026-01-31T18:30:00Z", "2026-01-31T18:30:00Z", "2026-02-28T18:30:00Z");
    }

    #[test]
    fn a_store_whose_clock_differs_picks_its_own_period() {
        let calendar = Calendar::new(Unit::Day, "UTC").unwrap();
        let day = 86_400_000_000;
        let boundaries = calendar.around(10 * day + 5, Anchor::FIRST);
        assert_eq!(boundaries.period_of(9 * day), Some(Period { start: 9 * day, end: 10 * day }));
        assert_eq!(boundaries.period_of(12 * day - 1), Some(Period { start: 11 * day, end: 12 * day }));
        assert_eq!((boundaries.period_of(9 * day - 1), boundaries.period_of(12 * day)), (None, None));
    }

    #[test]
    fn zones_that_do_not_exist_are_refused() {
        assert_eq!(Calendar::new(Unit::Day, "Europe/Berlinn"), Err(UnknownZone));
        assert_eq!(Calendar::new(Unit::Day, ""), Err(UnknownZone));
    }
}
