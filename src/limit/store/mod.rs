//! Where counters live. One trait with one verb, and one contract test suite that every store passes.

mod breaker;
mod failure;
mod guard;
mod memory;
mod redis;
mod shard;

use std::future::Future;
use std::num::NonZeroU64;
use std::time::Instant;

pub use breaker::Phase;
pub(super) use failure::FailureKind;
pub(super) use guard::within;
pub use memory::{MemorySlots, MemoryStore, Place, nothing};
pub(super) use redis::SharedMap;
pub use redis::{
    Identity, Login, OpenError, Password, RedisSettings, RedisSlot, RedisStore, SentinelSettings, Server,
    Tls, Topology,
};
pub(super) use shard::Shard;

use super::algorithm::Micros;
use super::calendar::Anchor;
use super::decision::Decision;
use super::rule::{Rule, draw};

/// Which store counts.
#[derive(Debug, Clone)]
pub enum StoreKind {
    /// This process.
    Memory,
    /// Redis, shared by all gateways.
    Redis(Box<RedisSettings>),
}

/// One request, as a store sees it.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'a> {
    /// The caller's part of the key, already encoded.
    pub caller: &'a str,
    /// The name of the caller's API key, for limits that count each key on its own; empty when it has none.
    pub api_key: &'a str,
    /// The caller's plan, or the pool in its place. No part of any key: usage outlives a change of plan.
    pub plan: &'a str,
    /// Where the caller stands in the order of percentages; see [`draw`].
    pub draw: u8,
    /// When the months of the caller's quotas begin. Those of a pool begin on the first.
    pub anchor: Anchor,
    /// What stands in the caller's place in the keys of a pool's limits; empty when there are none.
    pub pool: &'a str,
    /// Every limit that applies; those of a pool behind all others.
    pub rules: &'a [Rule],
    /// Units the request takes from each.
    pub cost: NonZeroU64,
    /// When nobody waits for the decision any more; `None` before the limiter has said so. The memory store, which decides at
    /// once, does not look.
    pub deadline: Option<Instant>,
    /// What a slot of a concurrency limit is lent under, if one of the rules lends any: unlike that of every other request.
    pub lease: &'a str,
}

impl<'a> Charge<'a> {
    /// A request of `cost` by `caller` on `plan`, by no API key, with months that begin on the first, and under no lease yet:
    /// the limiter names one when a limit lends slots.
    #[must_use]
    pub fn new(caller: &'a str, plan: &'a str, rules: &'a [Rule], cost: NonZeroU64) -> Self {
        let draw = if rules.iter().any(Rule::draws) { draw(caller) } else { 0 };
        let (api_key, pool, lease) = ("", "", "");
        Self { caller, api_key, plan, draw, anchor: Anchor::FIRST, pool, rules, cost, deadline: None, lease }
    }
}

/// A charge whose request turned out to cost something else.
#[derive(Debug, Clone, Copy)]
pub struct Settlement<'a> {
    /// The charge as it was made.
    pub charge: Charge<'a>,
    /// For each of its rules, whether it was charged.
    pub charged: &'a [bool],
    /// When that was, by the store's clock.
    pub at: Micros,
    /// Units that the request did cost.
    pub spent: u64,
}

/// Decides a request against all its limits in one atomic step.
///
/// The whole request is one verb, so there is no room for a look first and a charge later.
pub trait Store {
    /// Charges every limit, or none of them if any refuses.
    fn decide(&self, charge: Charge<'_>) -> impl Future<Output = Result<Decision, StoreError>>;
}

/// Why a store could not answer. What then happens to the request is `on_failure`'s to say.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The budget ran out.
    #[error("the store did not answer within the budget")]
    Timeout,
    /// Too many requests were waiting for the store already.
    #[error("too many requests are waiting for the store")]
    Saturated,
    /// There is no connection to the store at the moment.
    #[error("there is no connection to the store")]
    Disconnected,
    /// What is kept of a caller is damaged, or was written by another version. It is left as it is: to begin anew would be
    /// to forget what was used.
    #[error("the store holds something that cannot be read: {0}")]
    Unreadable(String),
    /// The connection to the store broke while it was asked.
    #[error("the connection to the store was lost")]
    Lost,
    /// Nobody asks the store at the moment: it has failed too often.
    #[error("the store fails, and is not asked")]
    Tripped,
    /// It was asked, and failed so often meanwhile that nobody waits for it any longer.
    #[error("the store has failed too often meanwhile")]
    GivenUp,
    /// The store's clock says another period of a quota than this machine's.
    #[error("its clock and the gateway's are more than a period of a quota apart")]
    ClocksApart,
    /// The store answered with an error.
    #[error("the store refused: {0}")]
    Refused(String),
    /// The store answered something that is not a decision.
    #[error("the store's answer makes no sense: {0}")]
    Nonsense(&'static str),
}
