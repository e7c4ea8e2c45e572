//! What the promises say, word by word and with no thought of speed: lists, sums and exact fractions.
//!
//! Written from the definitions and not from the algorithms, so that a mistake of thought in those does not stand here a
//! second time. Tests hold the memory store and the scripts to it.

use std::num::NonZeroU64;

use super::algorithm::{Algorithm, Standing};
use super::calendar::Anchor;
use super::rule::Rule;

/// All that ever happened to one limit of one caller.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// Units that were admitted, and when, in microseconds; oldest first.
    admitted: Vec<(i128, i128)>,
    /// Of a token bucket: the level in units times `per`, and when it held. `None`: full.
    level: Option<(i128, i128)>,
    /// Of a quota: when the latest period began in which something was taken.
    begun: i128,
}

impl History {
    /// How the limit stands towards a request of `cost`.
    pub(crate) fn standing(&mut self, rule: &Rule, now: u64, cost: u64) -> Standing {
        let (now, cost) = (i128::from(now), i128::from(cost));
        match &rule.algorithm {
            Algorithm::SlidingWindow(window) => {
                self.stand_still(now);
                let (limit, per) = (int(window.limit()), i128::from(window.per()));
                let used = |at: i128| self.used_since(at - per);
                let leaves = self.admitted.iter().map(|(time, _)| time + per - now).filter(|wait| *wait > 0);
                let mut waits = std::iter::once(0).chain(leaves.clone());
                let wait = waits.find(|wait| used(now + wait) + cost <= limit);
                standing(wait, limit - used(now), leaves.min().unwrap_or(0))
            }
            Algorithm::TokenBucket(bucket) => {
                let (limit, per) = (int(bucket.limit()), i128::from(bucket.per()));
                let full = int(bucket.burst()) * per;
                let level = self.refilled(full, limit, now);
                let until = |level_then: i128| (level_then - level + limit - 1).div_euclid(limit).max(0);
                let wait = (cost * per <= full).then(|| until(cost * per));
                let next = if level == full { 0 } else { until((level.div_euclid(per) + 1).max(1) * per) };
                standing(wait, level.div_euclid(per), next)
            }
            Algorithm::Quota(quota) => {
                let period = |at: i128| rule.period_of(u64::try_from(at).unwrap(), Anchor::FIRST);
                // Where the clock has stepped back into an earlier period, the one that has begun goes on.
                let (start, end) =
                    (i128::from(period(now).start).max(self.begun), i128::from(period(now).end));
                let (limit, used) = (int(quota.limit()), self.used_since(start - 1));
                let waits = if cost > limit {
                    None
                } else if used + cost <= limit {
                    Some(0)
                } else {
                    Some(end - now)
                };
                standing(waits, limit - used, if used > 0 { end - now } else { 0 })
            }
            Algorithm::Concurrency(_) => unreachable!("slots are no history"),
        }
    }

    /// Takes `units`, whether they fit or not.
    pub(crate) fn charge(&mut self, rule: &Rule, now: u64, units: u64) {
        let (now, units) = (i128::from(now), i128::from(units));
        if let Algorithm::TokenBucket(bucket) = &rule.algorithm {
            let per = i128::from(bucket.per());
            let level = self.refilled(int(bucket.burst()) * per, int(bucket.limit()), now);
            self.level = Some((level - units * per, now));
            return;
        }
        match &rule.algorithm {
            Algorithm::Quota(_) => self.begun = self.begun.max(start_of(rule, now)),
            // What no longer counts when something newer does is gone for good, wherever the clock steps to.
            Algorithm::SlidingWindow(window) => {
                self.admitted.retain(|(time, _)| *time > now - i128::from(window.per()));
            }
            Algorithm::TokenBucket(_) | Algorithm::Concurrency(_) => {}
        }
        let newest = self.admitted.last().map_or(now, |(newest, _)| *newest);
        let at = now.max(newest).max(self.begun);
        self.admitted.push((at, units));
    }

    /// Gives back up to `units` of those that were taken at the moment `charged`.
    pub(crate) fn refund(&mut self, rule: &Rule, now: u64, charged: u64, units: u64) {
        let (charged, mut units) = (i128::from(charged), i128::from(units));
        if let Algorithm::TokenBucket(bucket) = &rule.algorithm {
            let per = i128::from(bucket.per());
            let full = int(bucket.burst()) * per;
            let level = self.refilled(full, int(bucket.limit()), i128::from(now));
            // What is full already gets nothing back.
            if level < full {
                self.level = Some(((level + units * per).min(full), i128::from(now)));
            }
            return;
        }
        match &rule.algorithm {
            // What no longer counts is not given back.
            Algorithm::SlidingWindow(window)
                if self.used_since(i128::from(now) - i128::from(window.per())) == 0 =>
            {
                return;
            }
            Algorithm::Quota(_) if charged < self.begun || self.begun < start_of(rule, now.into()) => return,
            _ => {}
        }
        let is_quota = matches!(rule.algorithm, Algorithm::Quota(_));
        for (time, admitted) in &mut self.admitted {
            // Of a window, what was taken at that moment; of a quota, what was taken in the period.
            let is_ours = if is_quota { *time >= self.begun } else { *time == charged };
            if is_ours {
                let back = units.min(*admitted);
                (*admitted, units) = (*admitted - back, units - back);
            }
        }
        self.admitted.retain(|(_, units)| *units > 0);
    }

    /// Units after the moment `then`.
    fn used_since(&self, then: i128) -> i128 {
        self.admitted.iter().filter(|(time, _)| *time > then).map(|(_, units)| units).sum()
    }

    /// Where the clock has stepped back behind the newest admission, no time has passed since that.
    fn stand_still(&mut self, now: i128) {
        let ahead = self.admitted.last().map_or(0, |(newest, _)| newest - now).max(0);
        self.admitted.iter_mut().for_each(|(time, _)| *time -= ahead);
    }

    /// The level of a bucket, in units times `per`.
    fn refilled(&mut self, full: i128, limit: i128, now: i128) -> i128 {
        let (level, at) = self.level.unwrap_or((full, now));
        // Nothing is credited for a step back, and refilling goes on from there.
        self.level = Some((level, at.min(now)));
        (level + (now - at).max(0) * limit).min(full)
    }
}

/// When the period of this moment began.
fn start_of(rule: &Rule, at: i128) -> i128 {
    rule.period_of(u64::try_from(at).unwrap(), Anchor::FIRST).start.into()
}

fn int(amount: NonZeroU64) -> i128 {
    amount.get().into()
}

fn standing(wait: Option<i128>, remaining: i128, next: i128) -> Standing {
    let micros = |span: i128| u64::try_from(span).unwrap();
    Standing { wait: wait.map(micros), remaining: micros(remaining.max(0)), next: micros(next) }
}
