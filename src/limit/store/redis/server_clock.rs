//! What is known of Redis's clock: enough to say, in its time, when nobody waits for an answer any more.
//!
//! A request that was given up on may still lie in a socket, and a Redis that wakes from a pause would charge it. So each
//! call says until when it is worth executing. Redis's clock and ours differ by anything; every reply says how far Redis is
//! ahead of us at most, since it was written after we asked. The largest of the last replies is taken: then no call is ever
//! refused too early, whichever node of a cluster decides, and one that is refused late is late by what a reply may take,
//! which is the budget.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::clock::{self, Micros};

/// How long a reply is remembered at least; twice as long at most. Clocks drift.
const REMEMBERED: Duration = Duration::from_secs(30);

/// How far Redis's clock may be ahead of ours.
#[derive(Debug)]
pub(super) struct ServerClock {
    beginning: Instant,
    period: Cell<Period>,
}

/// The largest leads seen: in the running period, and in the one before.
#[derive(Debug, Clone, Copy)]
struct Period {
    began: Instant,
    lead: Option<i64>,
    before: Option<i64>,
}

impl ServerClock {
    pub(super) fn new() -> Self {
        let beginning = clock::instant();
        Self { beginning, period: Cell::new(Period { began: beginning, lead: None, before: None }) }
    }

    /// Whether anything is known.
    pub(super) fn is_known(&self) -> bool {
        let Period { lead, before, .. } = self.period.get();
        lead.or(before).is_some()
    }

    /// The latest that it may be in Redis's time at this moment; 0 while nothing is known of that time.
    pub(super) fn latest_at(&self, moment: Instant) -> Micros {
        let Period { lead, before, .. } = self.period.get();
        // Saturating, as below: what Redis says may be any number.
        let latest = lead.max(before).map(|lead| self.ours(moment).saturating_add(lead));
        latest.map_or(0, |latest| u64::try_from(latest).unwrap_or(0))
    }

    /// A reply to a call that was issued then: Redis's clock read `at` at some moment since.
    pub(super) fn learn(&self, issued: Instant, at: Micros) {
        let mut period = self.period.get();
        if issued.saturating_duration_since(period.began) > REMEMBERED {
            period = Period { began: issued, lead: None, before: period.lead };
        }
        period.lead = period.lead.max(Some(at.cast_signed().saturating_sub(self.ours(issued))));
        self.period.set(period);
    }

    /// What was known is wrong: Redis's clock has been set forward.
    pub(super) fn forget(&self) {
        self.period.set(Period { began: clock::instant(), lead: None, before: None });
    }

    fn ours(&self, moment: Instant) -> i64 {
        clock::micros(moment.saturating_duration_since(self.beginning)).cast_signed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(20);

    #[test]
    fn a_call_is_never_over_before_its_budget_and_at_most_one_reply_later() {
        let clock = ServerClock::new();
        let issued = clock.beginning;
        assert_eq!(clock.latest_at(issued + BUDGET), 0, "nothing is known yet");
        // Redis is 1,000 s ahead; its reply was written 300 us after we asked.
        clock.learn(issued, 1_000_000_300);
        assert_eq!(clock.latest_at(issued + BUDGET), 1_000_020_300);
        // A quicker reply changes nothing: another node of the cluster may be the one that is ahead.
        clock.learn(issued, 1_000_000_100);
        assert_eq!(clock.latest_at(issued + BUDGET + BUDGET), 1_000_040_300);
    }

    #[test]
    fn replies_are_forgotten_in_time() {
        let clock = ServerClock::new();
        let at = |seconds| clock.beginning + Duration::from_secs(seconds);
        clock.learn(at(0), 5_000_000);
        clock.learn(at(31), 32_000_000);
        assert_eq!(clock.latest_at(at(31) + BUDGET), 36_020_000);
        clock.learn(at(62), 63_000_000);
        assert_eq!(clock.latest_at(at(62) + BUDGET), 63_020_000);
        clock.forget();
        assert_eq!(clock.latest_at(at(62) + BUDGET), 0);
    }
}
