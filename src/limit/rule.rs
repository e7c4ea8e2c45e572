//! One limit of a plan, resolved: everything in it is valid and nothing is looked up again.

use std::sync::Arc;

use super::algorithm::{Algorithm, Micros, Period, Quota};
use super::calendar::{Boundaries, Calendar};

/// What one counter covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scope {
    /// A caller on all routes of the plan. Written `plan` in keys.
    Plan,
    /// A caller on one route. Written `route.NAME` in keys.
    Route(Arc<str>),
}

/// One limit of a plan: a name, a scope, an algorithm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The operator's name for it, as in `violated-policies` and the `limit` label.
    pub name: Arc<str>,
    /// What one counter of it covers.
    pub scope: Scope,
    /// How it counts.
    pub algorithm: Algorithm,
    /// Whether it only watches: what it would refuse is counted, and passes.
    pub shadow: bool,
    /// Where the periods of a quota begin; `None` for the other algorithms.
    pub calendar: Option<Arc<Calendar>>,
    /// `scope:name`, the part of the store key behind the caller; `scope:name:leases` of a concurrency limit.
    pub key: Arc<str>,
}

impl Rule {
    /// A limit named `name` over `scope`.
    ///
    /// Names come from the configuration, which allows letters, digits, `_`, `-` and `.` only, so no name can forge a
    /// separator of the key.
    #[must_use]
    pub fn new(name: &str, scope: Scope, algorithm: Algorithm) -> Self {
        let scoped = match &scope {
            Scope::Plan => format!("plan:{name}"),
            Scope::Route(route) => format!("route.{route}:{name}"),
        };
        // Leases are kept in another kind of value than everything else, and so under another key.
        let key =
            if matches!(algorithm, Algorithm::Concurrency(_)) { format!("{scoped}:leases") } else { scoped };
        Self { name: name.into(), scope, algorithm, shadow: false, calendar: None, key: key.into() }
    }

    /// The same limit, refusing nobody.
    #[must_use]
    pub fn in_shadow(self) -> Self {
        Self { shadow: true, ..self }
    }

    /// Whether the limit lends slots, which come back when the request has ended.
    #[must_use]
    pub fn lends_slots(&self) -> bool {
        matches!(self.algorithm, Algorithm::Concurrency(_))
    }

    /// A quota named `name` over `scope`, by the periods of `calendar`.
    #[must_use]
    pub fn quota(name: &str, scope: Scope, quota: Quota, calendar: Calendar) -> Self {
        Self { calendar: Some(Arc::new(calendar)), ..Self::new(name, scope, Algorithm::Quota(quota)) }
    }

    /// The period that `now`, in microseconds since 1970, falls into.
    #[must_use]
    pub fn period_of(&self, now: Micros) -> Period {
        self.boundaries_around(now).period_of(now).unwrap_or(Period::NONE)
    }

    /// The periods around `now`, in microseconds since 1970; all zero for a rule that is no quota.
    #[must_use]
    pub fn boundaries_around(&self, now: Micros) -> Boundaries {
        self.calendar.as_ref().map_or(Boundaries([0; 4]), |calendar| calendar.around(now))
    }

    /// What the limit allows, for people: `20 in any 1 min`.
    #[must_use]
    pub fn promise(&self) -> String {
        match &self.algorithm {
            Algorithm::SlidingWindow(window) => format!("{} in any {}", window.limit(), span(window.per())),
            Algorithm::TokenBucket(bucket) => {
                format!("{} each {}, up to {} at once", bucket.limit(), span(bucket.per()), bucket.burst())
            }
            Algorithm::Quota(quota) => {
                let period =
                    self.calendar.as_ref().map(|calendar| (calendar.unit().as_str(), calendar.zone()));
                let (unit, zone) = period.unwrap_or_default();
                format!("{} a {unit} ({zone})", quota.limit())
            }
            Algorithm::Concurrency(concurrency) => format!("{} at the same time", concurrency.limit()),
        }
    }
}

/// Microseconds in the largest unit that needs no fraction.
fn span(micros: Micros) -> String {
    let units =
        [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"), (1_000, "ms")];
    let unit = units.into_iter().find(|(size, _)| micros.is_multiple_of(*size));
    unit.map_or_else(|| format!("{micros} us"), |(size, name)| format!("{} {name}", micros / size))
}

/// What to do when the store cannot answer in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// Let the request pass, uncounted.
    Allow,
    /// Refuse it with 503.
    Deny,
    /// Count in this process alone.
    Local,
}
