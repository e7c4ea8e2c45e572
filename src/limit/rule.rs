//! One limit of a plan, resolved: everything in it is valid and nothing is looked up again.

use std::borrow::Cow;
use std::num::NonZeroU64;
use std::sync::Arc;

use super::algorithm::{Algorithm, Micros, Period, Quota, Role, Share};
use super::calendar::{Anchor, Boundaries, Calendar};

/// What one counter covers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scope {
    /// A caller on all routes of the plan. Written `plan` in keys.
    Plan,
    /// A caller on one route. Written `route.NAME` in keys.
    Route(Arc<str>),
    /// One API key of a caller. Written `key.NAME` in keys; a caller without one is a key of its own, `key`.
    Key,
    /// Everybody on a route together. Written `pool` in keys, behind `pool.ROUTE` in the caller's place.
    Pool,
}

/// Whether a limit refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforcement {
    /// It does.
    On,
    /// It does for this percentage of the callers, from 1 to 99, and only watches the others. Who belongs to them depends
    /// on the caller alone, and a larger percentage takes nobody out.
    Percent(u8),
    /// It only watches.
    Shadow,
    /// It only watches, together with the other candidates of its plan; see [`Role::Candidate`].
    Candidate,
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
    /// Whether it refuses.
    pub enforcement: Enforcement,
    /// Where the periods of a quota begin; `None` for the other algorithms.
    pub calendar: Option<Arc<Calendar>>,
    /// The part of the store key behind the caller: `scope:name` of a sliding window, and `scope:name:bucket`,
    /// `scope:name:quota.month`, `scope:name:leases` of the others; without its scope where that is the caller's key.
    key: Arc<str>,
}

impl Rule {
    /// A limit named `name` over `scope`.
    ///
    /// Names come from the configuration, which allows letters, digits, `_`, `-` and `.` only, so no name can forge a
    /// separator of the key.
    #[must_use]
    pub fn new(name: &str, scope: Scope, algorithm: Algorithm) -> Self {
        Self::counted_by(None, name, scope, algorithm)
    }

    fn counted_by(calendar: Option<Arc<Calendar>>, name: &str, scope: Scope, algorithm: Algorithm) -> Self {
        let scoped = match &scope {
            Scope::Plan => format!("plan:{name}"),
            Scope::Route(route) => format!("route.{route}:{name}"),
            Scope::Key => format!(":{name}"),
            Scope::Pool => format!("pool:{name}"),
        };
        // Another algorithm is another counter. Under one key each would take the other's state for none and write over it:
        // two gateways, or two plans, that call different algorithms by one name would refuse nobody. So is another unit of
        // the calendar: a counter by the day forgets what a month has used, as often as a day begins.
        let unit = calendar.as_ref().map_or("none", |calendar| calendar.unit().as_str());
        let key = match &algorithm {
            Algorithm::SlidingWindow(_) => scoped,
            Algorithm::TokenBucket(_) => format!("{scoped}:bucket"),
            Algorithm::Quota(_) => format!("{scoped}:quota.{unit}"),
            Algorithm::Concurrency(_) => format!("{scoped}:leases"),
        };
        let enforcement = Enforcement::On;
        Self { name: name.into(), scope, algorithm, enforcement, calendar, key: key.into() }
    }

    /// A quota named `name` over `scope`, by the periods of `calendar`.
    #[must_use]
    pub fn quota(name: &str, scope: Scope, quota: Quota, calendar: Calendar) -> Self {
        Self::counted_by(Some(Arc::new(calendar)), name, scope, Algorithm::Quota(quota))
    }

    /// The same limit, refusing nobody.
    #[must_use]
    pub fn in_shadow(self) -> Self {
        Self { enforcement: Enforcement::Shadow, ..self }
    }

    /// The same limit, refusing some callers only.
    #[must_use]
    pub fn for_percent(self, percent: u8) -> Self {
        Self { enforcement: Enforcement::Percent(percent), ..self }
    }

    /// The limit as a gateway with this share counts it by itself, for a request that takes `cost`.
    #[must_use]
    pub fn shared(&self, share: Share, cost: NonZeroU64) -> Self {
        Self { algorithm: self.algorithm.shared(share, cost), ..self.clone() }
    }

    /// The same limit as a candidate. It counts under a name of its own, `candidate/NAME`, as the limit that it may replace
    /// has the same name.
    #[must_use]
    pub fn as_candidate(self) -> Self {
        let candidate = format!("candidate/{}", self.name);
        let named = Self::counted_by(self.calendar, &candidate, self.scope, self.algorithm);
        Self { enforcement: Enforcement::Candidate, ..named }
    }

    /// Whether it matters where a caller stands in the order of percentages.
    #[must_use]
    pub fn draws(&self) -> bool {
        matches!(self.enforcement, Enforcement::Percent(_))
    }

    /// How it takes part in a decision about the caller of this [`draw`].
    #[must_use]
    pub fn role(&self, draw: u8) -> Role {
        match self.enforcement {
            Enforcement::Percent(percent) if draw < percent => Role::Enforced,
            Enforcement::On => Role::Enforced,
            Enforcement::Percent(_) | Enforcement::Shadow => Role::Shadow,
            Enforcement::Candidate => Role::Candidate,
        }
    }

    /// The part of the store key behind the caller, for a request with this API key; empty when it has none.
    #[must_use]
    pub fn key(&self, api_key: &str) -> Cow<'_, Arc<str>> {
        match self.scope {
            Scope::Key if api_key.is_empty() => Cow::Owned(format!("key{}", self.key).into()),
            Scope::Key => Cow::Owned(format!("key.{api_key}{}", self.key).into()),
            Scope::Plan | Scope::Route(_) | Scope::Pool => Cow::Borrowed(&self.key),
        }
    }

    /// Whether the limit lends slots, which come back when the request has ended.
    #[must_use]
    pub fn lends_slots(&self) -> bool {
        matches!(self.algorithm, Algorithm::Concurrency(_))
    }

    /// The period that `now`, in microseconds since 1970, falls into, for an account of this anchor.
    #[must_use]
    pub fn period_of(&self, now: Micros, anchor: Anchor) -> Period {
        self.boundaries_around(now, anchor).period_of(now).unwrap_or(Period::NONE)
    }

    /// The periods around `now`, in microseconds since 1970; all zero for a rule that is no quota.
    #[must_use]
    pub fn boundaries_around(&self, now: Micros, anchor: Anchor) -> Boundaries {
        self.calendar.as_ref().map_or(Boundaries([0; 4]), |calendar| calendar.around(now, anchor))
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

/// Where a caller stands in the order in which percentages take callers in, from 0 to 99.
///
/// FNV-1a (Fowler, Noll, Vo 1991) over the caller, mixed as `SplitMix64` does (Steele, Lea, Flood 2014), since alone it puts
/// callers side by side whose names are: the same in every gateway and every version.
#[must_use]
pub fn draw(caller: &str) -> u8 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = caller.bytes().fold(0xcbf2_9ce4_8422_2325, step);
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    u8::try_from(((hash >> 32) * 100) >> 32).unwrap_or(99)
}

/// Microseconds in the largest unit that needs no fraction.
fn span(micros: Micros) -> String {
    let units =
        [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"), (1_000, "ms")];
    let unit = units.into_iter().find(|(size, _)| micros.is_multiple_of(*size));
    unit.map_or_else(|| format!("{micros} us"), |(size, name)| format!("{} {name}", micros / size))
}

#[cfg(test)]
mod tests {
    use super::draw;

    #[test]
    fn a_percentage_takes_in_about_so_many_callers() {
        let below =
            |percent| (0..10_000).filter(|number| draw(&format!("acct.k_{number}")) < percent).count();
        for percent in [1, 10, 50, 90] {
            let expected = usize::from(percent) * 100;
            assert!(below(percent).abs_diff(expected) < 150, "{percent} %: {}", below(percent));
        }
        // The same for ever: who is enforced today is enforced after an upgrade.
        assert_eq!(["acct.acme", "net.203.0.113.9", ""].map(draw), [52, 96, 95]);
    }
}
