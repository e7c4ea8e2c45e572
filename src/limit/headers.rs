//! How limits read on the wire.
//!
//! `RateLimit` and `RateLimit-Policy` of draft-ietf-httpapi-ratelimit-headers-11, and the older `X-RateLimit-*`. Pure
//! text; which of them an answer carries is the configuration's choice.

use std::fmt::Write;

use super::algorithm::{Algorithm, Micros, Role, Standing};
use super::decision::Decision;
use super::rule::Rule;

/// Which rate-limit header fields answers carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `RateLimit` and `RateLimit-Policy` of draft-ietf-httpapi-ratelimit-headers-11.
    Draft11,
    /// `X-RateLimit-Limit`, `-Remaining`, `-Reset` of the [`Tightest`] limit.
    XRateLimit,
    /// Both.
    Both,
    /// Neither.
    Off,
}

const SECOND: Micros = 1_000_000;

/// `"burst";q=10;w=1, "minute";q=300;w=60`: the limits that are enforced for a caller of this [`draw`](super::rule::draw).
///
/// `w` is whole seconds in the draft; a window of, say, 1500 ms has none.
#[must_use]
pub fn policy(rules: &[Rule], draw: u8) -> String {
    list(rules.iter().filter(|rule| rule.role(draw) == Role::Enforced), |text, rule| {
        let (limit, per) = amount(rule);
        if rule.lends_slots() {
            write!(text, "\"{}\";q={limit};qu=\"concurrent-requests\"", rule.name)
        } else if per % SECOND == 0 {
            write!(text, "\"{}\";q={limit};w={}", rule.name, per / SECOND)
        } else {
            write!(text, "\"{}\";q={limit}", rule.name)
        }
    })
}

/// `"burst";r=9;t=1, "minute";r=299;t=60`: what is left, and whole seconds (rounded up) until there is more. Without `t`
/// when nothing is used.
#[must_use]
pub fn state(rules: &[Rule], decision: &Decision) -> String {
    let states = rules.iter().zip(&decision.states).enumerate().filter(|(index, _)| decision.shows(*index));
    list(states, |text, (_, (rule, state))| match state.next {
        0 => write!(text, "\"{}\";r={}", rule.name, state.remaining),
        next => write!(text, "\"{}\";r={};t={}", rule.name, state.remaining, seconds(next)),
    })
}

/// The one limit that the older header fields can tell about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tightest {
    /// `X-RateLimit-Limit`
    pub limit: u64,
    /// `X-RateLimit-Remaining`
    pub remaining: u64,
    /// `X-RateLimit-Reset`: whole seconds until there is more, rounded up. A span, not a date.
    pub reset: u64,
}

/// The limit that refuses, else the one with the least left; `None` without limits.
#[must_use]
pub fn tightest(rules: &[Rule], decision: &Decision) -> Option<Tightest> {
    let shown = || (0..decision.states.len()).filter(|&index| decision.shows(index));
    let least = || shown().min_by_key(|&index| decision.states[index].remaining);
    let index = decision.binding().or_else(least)?;
    let Standing { remaining, next, .. } = decision.states[index];
    let (limit, _) = amount(rules.get(index)?);
    Some(Tightest { limit, remaining, reset: seconds(next) })
}

/// `Retry-After`: whole seconds, never too early and never 0.
#[must_use]
pub fn retry_after(wait: Micros) -> u64 {
    seconds(wait).max(1)
}

/// Units and the span that brings them; of a calendar period the usual length, since the field must stay the same.
fn amount(rule: &Rule) -> (u64, Micros) {
    match &rule.algorithm {
        Algorithm::SlidingWindow(window) => (window.limit().get(), window.per()),
        Algorithm::TokenBucket(bucket) => (bucket.limit().get(), bucket.per()),
        Algorithm::Quota(quota) => {
            let seconds = rule.calendar.as_ref().map_or(0, |calendar| calendar.unit().usual_seconds());
            (quota.limit().get(), seconds * SECOND)
        }
        Algorithm::Concurrency(concurrency) => (concurrency.limit().get(), 0),
    }
}

fn seconds(micros: Micros) -> u64 {
    micros.div_ceil(SECOND)
}

fn list<T>(
    items: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut String, T) -> std::fmt::Result,
) -> String {
    let mut text = String::with_capacity(64);
    for item in items {
        if !text.is_empty() {
            text.push_str(", ");
        }
        write(&mut text, item).expect("writing to a String cannot fail");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::limit::Scope;
    use crate::limit::algorithm::{SlidingWindow, TokenBucket};

    fn n(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).unwrap()
    }

    fn rules() -> Vec<Rule> {
        let bucket = TokenBucket::new(n(10), SECOND, n(20)).unwrap();
        let window = |per| Algorithm::SlidingWindow(SlidingWindow::new(n(300), per).unwrap());
        vec![
            Rule::new("burst", Scope::Plan, Algorithm::TokenBucket(bucket)),
            Rule::new("minute", Scope::Plan, window(60 * SECOND)),
            Rule::new("odd", Scope::Plan, window(SECOND * 3 / 2)),
        ]
    }

    fn decision(states: &[(Option<Micros>, u64, Micros)]) -> Decision {
        let states = states.iter().map(|&(wait, remaining, next)| Standing { wait, remaining, next });
        Decision::new(0, states.collect(), &rules(), 0)
    }

    #[test]
    fn the_policy_names_every_limit() {
        assert_eq!(policy(&rules(), 0), r#""burst";q=10;w=1, "minute";q=300;w=60, "odd";q=300"#);
    }

    #[test]
    fn the_state_rounds_seconds_up_and_omits_what_is_full() {
        let decision = decision(&[(Some(0), 9, 1), (Some(0), 299, 59_000_001), (Some(0), 300, 0)]);
        assert_eq!(state(&rules(), &decision), r#""burst";r=9;t=1, "minute";r=299;t=60, "odd";r=300"#);
    }

    #[test]
    fn the_older_fields_tell_about_the_limit_that_refuses() {
        let refused = decision(&[(Some(0), 1, 5), (Some(2_500_000), 7, 2_500_000), (Some(0), 0, 9)]);
        assert_eq!(tightest(&rules(), &refused), Some(Tightest { limit: 300, remaining: 7, reset: 3 }));
        let allowed = decision(&[(Some(0), 1, 5), (Some(0), 7, 1), (Some(0), 2, 9)]);
        assert_eq!(tightest(&rules(), &allowed), Some(Tightest { limit: 10, remaining: 1, reset: 1 }));
        assert_eq!(tightest(&[], &decision(&[])), None);
    }

    #[test]
    fn retry_after_is_never_zero_and_never_early() {
        assert_eq!([1, 999_999, 1_000_000, 1_000_001].map(retry_after), [1, 1, 1, 2]);
    }
}
