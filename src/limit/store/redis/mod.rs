//! Counters in Redis, shared by all gateways. The only room that names the `redis` crate.
//!
//! One script call decides all limits of a request (`lua/README.md`). Nothing here waits longer than its caller allows:
//! [`Guarded`](super::Guarded) puts one deadline around the whole step, connecting and healing included.

mod calls;
mod connection;
mod errors;
mod eviction;
mod leases;
mod messages;
mod opener;
mod script;
mod sentinel;
mod server_clock;
mod topology;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ::redis::{Cmd, ErrorKind, RedisError, Value};
use calls::{Calls, Reply, reply};
use connection::{Connection, Link};
pub use leases::RedisSlot;
use leases::{Asking, LOOK_EVERY, Leases};
use messages::{Message, Messages};
pub use opener::OpenError;
use script::{Script, Scripts};
use server_clock::ServerClock;
use tokio::task::JoinHandle;
pub use topology::{Identity, Login, Password, SentinelSettings, Server, Tls, Topology};

use super::{Charge, Decision, Settlement, Store, StoreError};
use crate::clock;
use crate::limit::Tally;

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

/// Counters in Redis, shared by all gateways. One for each worker thread: its connection is multiplexed, and no request
/// crosses threads.
#[derive(Debug)]
pub struct RedisStore {
    connection: Rc<Connection>,
    messages: Rc<Messages>,
    leases: Rc<Leases>,
    scripts: Rc<Scripts>,
    clock: ServerClock,
    calls: Calls,
    /// What sends messages and renews leases; `None` before there is something to do.
    housekeeping: RefCell<Option<JoinHandle<()>>>,
}

impl RedisStore {
    /// A store as `settings` say. Connecting begins with [`connect`](Self::connect) or the first request, and goes on in
    /// the background: a Redis that is away does not keep a gateway from starting.
    ///
    /// # Errors
    /// When an address cannot be understood.
    pub fn new(settings: &RedisSettings, tally: Arc<Tally>) -> Result<Self, OpenError> {
        let connection = Rc::new(Connection::new(&settings.topology, settings.budget, Arc::clone(&tally))?);
        let messages = Rc::new(Messages::new(Rc::clone(&connection), tally));
        Ok(Self {
            leases: Leases::new(Rc::clone(&messages)),
            connection,
            messages,
            scripts: Rc::new(Scripts::new()),
            clock: ServerClock::new(),
            calls: Calls::new(&settings.prefix),
            housekeeping: RefCell::new(None),
        })
    }

    /// Begins to connect, so that the first request need not wait for it. Only inside of a worker's runtime.
    pub fn connect(&self) {
        self.connection.open();
    }

    /// The slots that a request of this decision holds from now on, if any limit lends them.
    #[must_use]
    pub fn slots(&self, charge: Charge<'_>, decision: &Decision) -> Option<RedisSlot> {
        let lent = charge.rules.iter().zip(decision.charged());
        let lent = lent.filter(|(rule, charged)| *charged && rule.lends_slots());
        let keys: Vec<String> = lent.map(|(rule, _)| self.calls.key(charge, rule)).collect();
        if keys.is_empty() {
            return None;
        }
        self.keep_house();
        Some(self.leases.hold(charge.lease, keys))
    }

    /// The slots that Redis is about to be asked for, if any limit lends them.
    fn asking(&self, charge: Charge<'_>) -> Option<Asking> {
        let lending = charge.rules.iter().filter(|rule| rule.lends_slots());
        let keys: Vec<String> = lending.map(|rule| self.calls.key(charge, rule)).collect();
        if keys.is_empty() {
            return None;
        }
        self.keep_house();
        Some(self.leases.ask(charge.lease, keys))
    }

    /// Settles a charge soon. Nobody waits for it, and it may be lost: then what was reserved stays charged.
    pub fn settle(&self, settlement: Settlement<'_>) {
        let script = self.scripts.settling();
        let Some(call) = self.calls.settling(script, settlement, clock::wall_micros()) else { return };
        self.keep_house();
        self.messages.leave(Message::Call(Rc::clone(script), call));
    }

    fn keep_house(&self) {
        self.housekeeping.borrow_mut().get_or_insert_with(|| {
            let (messages, leases, scripts) =
                (Rc::clone(&self.messages), Rc::clone(&self.leases), Rc::clone(&self.scripts));
            tokio::task::spawn_local(keep_house(messages, leases, scripts))
        });
    }

    /// Whether Redis answers at all.
    ///
    /// # Errors
    /// When it does not.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let mut link = self.connection.link().await?;
        link.ask(&::redis::cmd("PING")).await.map(drop).map_err(|error| self.failed(&error))
    }

    /// Lets go of the connection, so that nothing more is buffered for a Redis that does not answer.
    pub fn disconnect(&self) {
        self.connection.drop_link();
    }

    async fn run(&self, link: &mut Link, script: &Script, by_hash: Cmd) -> Result<Value, StoreError> {
        let answer = match link.ask(&by_hash).await {
            // The script cache is volatile: a restart, a failover or SCRIPT FLUSH empties it. The source heals it in the
            // same request, on the node that lacks it.
            Err(error) if script::is_missing(&error) => link.ask(&script.healed(&by_hash)).await,
            answer => answer,
        };
        answer.map_err(|error| self.failed(&error))
    }

    /// What an error means; a connection that is of no further use is let go of.
    fn failed(&self, error: &RedisError) -> StoreError {
        if errors::is_beyond_repair(error) {
            self.connection.drop_link();
        }
        store_error(error)
    }

    /// Asks Redis for its time, so that a call can say until when it is worth something.
    async fn hear_the_time(&self, link: &mut Link) -> Result<(), StoreError> {
        let issued = clock::instant();
        let time = link.ask(&::redis::cmd("TIME")).await.map_err(|error| self.failed(&error))?;
        let (seconds, micros): (u64, u64) =
            ::redis::from_redis_value(time).map_err(|_| StoreError::Nonsense("not a time"))?;
        self.clock.learn(issued, seconds.saturating_mul(1_000_000).saturating_add(micros));
        Ok(())
    }
}

/// A call is made at most so often: again for the whole script, and again without an end.
const ATTEMPTS: usize = 3;

impl Store for RedisStore {
    async fn decide(&self, charge: Charge<'_>) -> Result<Decision, StoreError> {
        let mut link = self.connection.link().await?;
        let asking = self.asking(charge);
        let mut script = self.scripts.deciding(charge.rules);
        if charge.deadline.is_some() && !self.clock.is_known() {
            self.hear_the_time(&mut link).await?;
        }
        let mut end = charge.deadline.map_or(0, |deadline| self.clock.latest_at(deadline));
        for _ in 0..ATTEMPTS {
            let issued = clock::instant();
            let call = self.calls.deciding(script, charge, end, clock::wall_micros());
            match reply(&self.run(&mut link, script, call).await?, charge)? {
                Reply::Decided(decision) => {
                    self.clock.learn(issued, decision.at);
                    asking.into_iter().for_each(Asking::answered);
                    return Ok(decision);
                }
                Reply::Rare => script = self.scripts.whole(),
                // But we are still waiting: what we know of Redis's clock is wrong.
                Reply::TooLate => {
                    self.clock.forget();
                    end = 0;
                }
            }
        }
        Err(StoreError::Nonsense("not a decision, again and again"))
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        if let Some(task) = self.housekeeping.take() {
            task.abort();
        }
    }
}

/// Sends messages soon and renews leases in time, for as long as the store lives.
async fn keep_house(messages: Rc<Messages>, leases: Rc<Leases>, scripts: Rc<Scripts>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            () = messages.wait() => messages.send_waiting().await,
            _ = ticks.tick() => leases.renew(&scripts).await,
        }
    }
}

/// The error without the server's words behind the code: they may hold a key, and so a caller.
fn store_error(error: &RedisError) -> StoreError {
    let code = || errors::code(error).unwrap_or("no code").to_owned();
    // A script of ours says so, or a value of another type says it for itself.
    let contains = |words| error.detail().is_some_and(|detail| detail.contains(words));
    let says = |words| contains("TOLLGATE") && contains(words);
    if says("state") || errors::code(error) == Some("WRONGTYPE") {
        StoreError::Unreadable(code())
    } else if says("clocks") {
        StoreError::Refused("its clock and the gateway's are more than a period of a quota apart".to_owned())
    } else if error.kind() == ErrorKind::Parse {
        StoreError::Nonsense("not the protocol of Redis")
    } else if error.is_timeout() {
        StoreError::Timeout
    } else if error.is_io_error() || error.is_connection_dropped() {
        StoreError::Disconnected
    } else {
        StoreError::Refused(code())
    }
}

#[cfg(test)]
mod tests;
