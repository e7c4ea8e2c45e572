//! Counters in Redis, shared by all gateways. The only room that names the `redis` crate.
//!
//! One script call decides all limits of a request (`lua/README.md`). Nothing here waits longer than its caller allows:
//! [`Guarded`](super::Guarded) puts one deadline around the whole step, connecting and healing included.

mod connection;
mod leases;
mod script;

use std::rc::Rc;
use std::time::Duration;

use ::redis::{Cmd, RedisError, Value};
use smallvec::SmallVec;

use connection::{Connection, Link};
pub use connection::{OpenError, Topology};
pub use leases::RedisSlot;
use leases::{LEASE, Leases};
use script::Deciding;

use super::{Charge, Decision, Store, StoreError};
use crate::clock::{self, Micros};
use crate::limit::algorithm::{Algorithm, Standing};
use crate::limit::{Rule, States};

/// `[store.redis]`, resolved.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// How the nodes form one store.
    pub topology: Topology,
    /// Everything the limiter may spend on one request.
    pub budget: Duration,
    /// The first part of every key.
    pub prefix: String,
}

/// Counters in Redis. One for each worker thread: its connection is multiplexed, and no request crosses threads.
#[derive(Debug)]
pub struct RedisStore {
    connection: Rc<Connection>,
    leases: Rc<Leases>,
    scripts: Deciding,
    prefix: Box<str>,
}

impl RedisStore {
    /// A store as `settings` say. Connecting begins with [`connect`](Self::connect) or the first request, and goes on in
    /// the background: a Redis that is away does not keep a gateway from starting.
    ///
    /// # Errors
    /// When an address cannot be understood.
    pub fn new(settings: &RedisSettings) -> Result<Self, OpenError> {
        let connection = Rc::new(Connection::new(&settings.topology, settings.budget)?);
        let leases = Leases::new(Rc::clone(&connection));
        Ok(Self { connection, leases, scripts: Deciding::new(), prefix: settings.prefix.as_str().into() })
    }

    /// Begins to connect, so that the first request need not wait for it. Only inside of a worker's runtime.
    pub fn connect(&self) {
        self.connection.open();
    }

    /// The slots that an admitted request holds from now on, if any limit lends them.
    #[must_use]
    pub fn slots(&self, charge: Charge<'_>) -> Option<RedisSlot> {
        let lending = charge.rules.iter().filter(|rule| rule.lends_slots());
        let keys: Vec<String> = lending.map(|rule| self.key(charge.caller, rule)).collect();
        (!keys.is_empty()).then(|| self.leases.hold(charge.lease, keys))
    }

    /// Whether Redis answers at all.
    ///
    /// # Errors
    /// When it does not.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let mut link = self.connection.link().await?;
        link.ask(&::redis::cmd("PING")).await.map(drop).map_err(|error| store_error(&error))
    }

    /// Lets go of the connection, so that nothing more is buffered for a Redis that does not answer.
    pub fn disconnect(&self) {
        self.connection.drop_link();
    }

    /// `{prefix}:{<caller>}:<scope>:<limit>`. The braces are the hash tag: all counters of a caller share a slot.
    fn key(&self, caller: &str, rule: &Rule) -> String {
        let mut key = String::with_capacity(self.prefix.len() + caller.len() + rule.key.len() + 4);
        for part in [&self.prefix, ":{", caller, "}:", &rule.key] {
            key.push_str(part);
        }
        key
    }

    /// The command behind `EVALSHA <sha>` or `EVAL <source>`.
    fn call(&self, mut command: Cmd, charge: Charge<'_>, wall: Micros) -> Cmd {
        command.arg(charge.rules.len());
        for rule in charge.rules {
            command.arg(self.key(charge.caller, rule));
        }
        command.arg(charge.cost.get());
        for rule in charge.rules {
            arguments(rule, wall, charge.lease, &mut command);
        }
        command
    }

    async fn run(&self, link: &mut Link, charge: Charge<'_>) -> Result<Value, RedisError> {
        let wall = clock::wall_micros();
        let script = self.scripts.script_for(charge.rules);
        let by_hash = self.call(script.by_hash(), charge, wall);
        match link.ask(&by_hash).await {
            // The script cache is volatile: a restart, a failover or SCRIPT FLUSH empties it. The source heals it in the
            // same request, on the node that lacks it.
            Err(error) if script::is_missing(&error) => {
                let by_source = self.call(script.by_source(), charge, wall);
                link.ask(&by_source).await
            }
            answer => answer,
        }
    }
}

impl Store for RedisStore {
    async fn decide(&self, charge: Charge<'_>) -> Result<Decision, StoreError> {
        let mut link = self.connection.link().await?;
        match self.run(&mut link, charge).await {
            Ok(value) => decision(&value, charge.rules),
            Err(error) => {
                if connection::is_beyond_repair(&error) {
                    self.connection.drop_link();
                }
                Err(store_error(&error))
            }
        }
    }
}

/// The fields of a limit; `lua/README.md` names them.
fn arguments(rule: &Rule, wall: Micros, lease: &str, command: &mut Cmd) {
    // Behind the form, a question mark: judged and charged like any other, but it refuses nobody.
    let shadow = usize::from(rule.shadow);
    match &rule.algorithm {
        Algorithm::SlidingWindow(window) => {
            let form = if window.is_exact() { ["w", "w?"] } else { ["b", "b?"] };
            command.arg(form[shadow]).arg(&[window.limit().get(), window.grain(), window.per()])
        }
        Algorithm::TokenBucket(bucket) => {
            command.arg(["t", "t?"][shadow]).arg(&[bucket.burst().get(), bucket.unit(), bucket.rate()])
        }
        Algorithm::Concurrency(concurrency) => command
            .arg(["c", "c?"][shadow])
            .arg(concurrency.limit().get())
            .arg(clock::micros(LEASE))
            .arg(lease),
        // The gateway's clock only says which periods are near; Redis's says which of them it is.
        Algorithm::Quota(quota) => {
            command.arg(["q", "q?"][shadow]).arg(quota.limit().get()).arg(&rule.boundaries_around(wall).0)
        }
    };
}

/// Reads `{ now, wait, remaining, next, ... }`.
fn decision(value: &Value, rules: &[Rule]) -> Result<Decision, StoreError> {
    let Value::Array(items) = value else {
        return Err(StoreError::Nonsense("not a list"));
    };
    if items.len() != 1 + 3 * rules.len() {
        return Err(StoreError::Nonsense("a list of the wrong length"));
    }
    let numbers: SmallVec<[i64; 16]> = items[1..]
        .iter()
        .map(|item| match item {
            Value::Int(number) => Ok(*number),
            _ => Err(StoreError::Nonsense("not a whole number")),
        })
        .collect::<Result<_, _>>()?;
    let states: Option<States> =
        numbers.chunks_exact(3).map(|state| standing(state[0], state[1], state[2])).collect();
    states.map(|states| Decision::new(states, rules)).ok_or(StoreError::Nonsense("a negative number"))
}

fn standing(wait: i64, remaining: i64, next: i64) -> Option<Standing> {
    let wait = if wait == -1 { None } else { Some(u64::try_from(wait).ok()?) };
    Some(Standing { wait, remaining: u64::try_from(remaining).ok()?, next: u64::try_from(next).ok()? })
}

/// The error without the server's words behind the code: they may hold a key, and so a caller.
fn store_error(error: &RedisError) -> StoreError {
    if error.is_timeout() {
        StoreError::Timeout
    } else if error.is_io_error() || error.is_connection_dropped() {
        StoreError::Disconnected
    } else {
        StoreError::Refused(error.code().unwrap_or("no code").to_owned())
    }
}

#[cfg(test)]
mod tests;
