//! Amounts with and without units: durations, sizes, whole numbers. Exact: nothing goes through a float.

use std::num::NonZeroU64;
use std::time::Duration;

use super::mistakes::Fault;
use super::reader::Scalar;

/// Milliseconds of each unit of time.
const TIMES: &[(&str, u64)] = &[("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// Bytes of each unit of size.
const SIZES: &[(&str, u64)] = &[("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// A duration such as `"250ms"`, `"10s"`, `"1m"`, `"1h"` or `"1d"`, zero included.
pub(super) fn duration(value: Scalar<'_>) -> Result<Duration, Fault> {
    with_unit(value, "duration", TIMES, "s").map(Duration::from_millis)
}

/// A duration of `shortest` to `longest`, both of them as they would be written.
pub(super) fn duration_in(
    shortest: &'static str,
    longest: &'static str,
) -> impl Fn(Scalar<'_>) -> Result<Duration, Fault> {
    move |value| {
        let range = duration(Scalar::Text(shortest))?..=duration(Scalar::Text(longest))?;
        // A bare number most probably meant a unit with which it is a possible one.
        let is_possible = |unit: &&str| {
            let with_it = bare(value).map(|number| format!("{number}{unit}"));
            let meant = with_it.and_then(|text| duration(Scalar::Text(&text)).ok());
            meant.is_some_and(|meant| range.contains(&meant))
        };
        let usual = ["s", "ms"].into_iter().find(is_possible).unwrap_or("s");
        let wanted = with_unit(value, "duration", TIMES, usual).map(Duration::from_millis)?;
        if range.contains(&wanted) {
            return Ok(wanted);
        }
        Err(Fault::new(format!("must lie between \"{shortest}\" and \"{longest}\"")))
    }
}

/// The number that was written without a unit.
fn bare(value: Scalar<'_>) -> Option<String> {
    match value {
        Scalar::Text(text) | Scalar::Bare(text) => {
            text.chars().all(|letter| letter.is_ascii_digit()).then(|| text.to_owned())
        }
        Scalar::Whole(number) => Some(number.to_string()),
        Scalar::Fraction(_) | Scalar::Flag(_) => None,
    }
}

/// A size in bytes such as `"512B"`, `"16KiB"`, `"1MiB"` or `"2GiB"`, at least one byte.
pub(super) fn size(value: Scalar<'_>) -> Result<u64, Fault> {
    match with_unit(value, "size", SIZES, "KiB")? {
        0 => Err(Fault::new("must be more than nothing")),
        bytes => Ok(bytes),
    }
}

/// A size of at least `least`, as it would be written.
pub(super) fn size_from(least: &'static str) -> impl Fn(Scalar<'_>) -> Result<u64, Fault> {
    move |value| {
        let wanted = size(value)?;
        if wanted >= size(Scalar::Text(least))? {
            return Ok(wanted);
        }
        Err(Fault::new(format!("must be at least \"{least}\"")))
    }
}

/// A whole number, zero included.
pub(super) fn whole(value: Scalar<'_>) -> Result<u64, Fault> {
    let number = match value {
        Scalar::Whole(number) => number,
        Scalar::Bare(text) => text.parse().map_err(|_| Fault::new("expected a whole number"))?,
        Scalar::Text(text) if text.parse::<i128>().is_ok() => {
            return Err(Fault::new("expected a whole number").hint("remove the quotes"));
        }
        Scalar::Fraction(number) => {
            return Err(Fault::new(format!("expected a whole number, and is {number}")));
        }
        Scalar::Text(_) | Scalar::Flag(_) => return Err(Fault::new("expected a whole number")),
    };
    if number < 0 {
        return Err(negative(number));
    }
    u64::try_from(number).map_err(|_| Fault::new("is too large"))
}

/// A whole number of `least` to `most`.
pub(super) fn whole_in(least: u64, most: u64) -> impl Fn(Scalar<'_>) -> Result<u64, Fault> {
    move |value| match whole(value)? {
        number if (least..=most).contains(&number) => Ok(number),
        _ => Err(Fault::new(format!("must lie between {least} and {most}"))),
    }
}

/// The amount of a limit.
pub(super) fn limit(value: Scalar<'_>) -> Result<NonZeroU64, Fault> {
    NonZeroU64::new(whole(value)?).ok_or_else(|| {
        Fault::new("a limit is at least 1").hint("to close a route to a plan, use routes.X.plans")
    })
}

/// Any other amount that cannot be zero.
pub(super) fn at_least_one(value: Scalar<'_>) -> Result<NonZeroU64, Fault> {
    NonZeroU64::new(whole(value)?).ok_or_else(|| Fault::new("must be at least 1"))
}

fn negative(value: impl std::fmt::Display) -> Fault {
    Fault::new(format!("must not be negative, and is {value}"))
}

/// Digits and a unit. `usual` is the unit that a bare number most probably meant.
fn with_unit(value: Scalar<'_>, what: &str, units: &[(&str, u64)], usual: &str) -> Result<u64, Fault> {
    let text = match value {
        Scalar::Text(text) | Scalar::Bare(text) => text,
        Scalar::Whole(number) if number >= 0 => return Err(unit_missing(what, number, usual)),
        Scalar::Whole(number) => return Err(negative(number)),
        Scalar::Fraction(_) | Scalar::Flag(_) => return Err(not_this(what, units)),
    };
    if text.starts_with('-') {
        return Err(negative(text));
    }
    let digits_end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits_end);
    if digits.is_empty() {
        return Err(not_this(what, units));
    }
    if unit.is_empty() {
        return Err(unit_missing(what, digits, usual));
    }
    let Some((_, factor)) = units.iter().find(|(name, _)| *name == unit) else {
        return Err(not_this(what, units));
    };
    let amount = digits.parse::<u64>().ok();
    amount.and_then(|amount| amount.checked_mul(*factor)).ok_or_else(|| Fault::new("is too large"))
}

fn unit_missing(what: &str, number: impl std::fmt::Display, usual: &str) -> Fault {
    Fault::new(format!("a {what} needs a unit")).hint(format!("write \"{number}{usual}\""))
}

fn not_this(what: &str, units: &[(&str, u64)]) -> Fault {
    let names: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
    Fault::new(format!("is not a {what}")).hint(format!(
        "write a whole number and one of {}, for example \"{}{}\"",
        names.join(", "),
        10,
        names[1]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let read = |text| duration(Scalar::Text(text));
        assert_eq!(read("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(read("0s"), Ok(Duration::ZERO));
        assert_eq!(read("1m"), Ok(Duration::from_secs(60)));
        assert_eq!(read("2h"), Ok(Duration::from_secs(7_200)));
        assert_eq!(read("400d"), Ok(Duration::from_secs(400 * 86_400)));
        for wrong in ["", "s", "1", "1.5s", "1 s", "1S", "1h30m", "-5s", "+5s", "٣s", "inf", "1e3s", "1month"]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert_eq!(read("99999999999999999999s"), Err(Fault::new("is too large")));
        assert_eq!(read("18446744073709551615d"), Err(Fault::new("is too large")));
    }

    #[test]
    fn sizes() {
        let read = |text| size(Scalar::Text(text));
        assert_eq!(read("512B"), Ok(512));
        assert_eq!(read("16KiB"), Ok(16_384));
        assert_eq!(read("2GiB"), Ok(1 << 31));
        for wrong in ["", "16", "16KB", "16kib", "0B", "1.5MiB", "99999999999999GiB"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bare_numbers_are_told_what_to_write() {
        let expected = Fault::new("a duration needs a unit").hint("write \"60s\"");
        assert_eq!(duration(Scalar::Whole(60)), Err(expected));
        let expected = Fault::new("a size needs a unit").hint("write \"16KiB\"");
        assert_eq!(size(Scalar::Bare("16")), Err(expected));
    }

    #[test]
    fn whole_numbers_keep_every_digit() {
        assert_eq!(whole(Scalar::Whole(4_294_967_297)), Ok(4_294_967_297));
        assert_eq!(whole(Scalar::Whole(u64::MAX.into())), Ok(u64::MAX));
        assert_eq!(whole(Scalar::Bare("18446744073709551615")), Ok(u64::MAX));
        for wrong in ["", "-1", "1e5", "0x1F", "inf", "nan", ".inf", "1e-9", "1_000", "18446744073709551616"]
        {
            assert!(whole(Scalar::Bare(wrong)).is_err(), "{wrong}");
        }
        assert!(whole(Scalar::Text("5")).is_err());
        assert!(whole(Scalar::Whole(-1)).is_err());
        assert!(whole(Scalar::Fraction(0.5)).is_err());
    }
}
