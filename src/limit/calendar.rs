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
    /// From the first of a month to the first of the next.
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
    fn first_day(self, date: Date) -> Date {
        match self {
            Self::Day => date,
            Self::Week => date.saturating_sub(i64::from(date.weekday().since(Weekday::Monday)).days()),
            Self::Month => date.first_of_month(),
        }
    }

    fn next(self, first: Date) -> Date {
        first.saturating_add(match self {
            Self::Day => 1.day(),
            Self::Week => 1.week(),
            Self::Month => 1.month(),
        })
    }

    fn previous(self, first: Date) -> Date {
        self.first_day(first.saturating_sub(1.day()))
    }
}

/// Periods of one length in one time zone.
#[derive(Debug)]
pub struct Calendar {
    unit: Unit,
    zone: TimeZone,
    /// The last answer: it holds for as long as its period lasts, and working it out takes a microsecond or two.
    latest: Mutex<Boundaries>,
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
        Ok(Self { unit, zone, latest: Mutex::new(Boundaries([0; 4])) })
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

    /// The period of `now` and its neighbours.
    #[must_use]
    pub fn around(&self, now: Micros) -> Boundaries {
        let mut latest = self.latest.lock();
        if !(latest.0[1]..latest.0[2]).contains(&now) {
            *latest = self.work_out(now);
        }
        *latest
    }

    fn work_out(&self, now: Micros) -> Boundaries {
        let now = Timestamp::from_microsecond(now.cast_signed()).unwrap_or(Timestamp::MAX);
        let first = self.unit.first_day(self.zone.to_datetime(now).date());
        let next = self.unit.next(first);
        Boundaries(
            [self.unit.previous(first), first, next, self.unit.next(next)].map(|date| self.midnight(date)),
        )
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
        let micros = |text: &str| {
            let time: Timestamp = text.parse().unwrap();
            time.as_microsecond().cast_unsigned()
        };
        let calendar = Calendar::new(unit, zone).unwrap();
        let now = micros(moment);
        let period = calendar.around(now).period_of(now).unwrap();
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
        let boundaries = calendar.around(10 * day + 5);
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
