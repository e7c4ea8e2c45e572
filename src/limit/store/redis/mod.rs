//! Counters in Redis, shared by all gateways. The only room that names the `redis` crate.
//!
//! One script call decides all limits of a request (`lua/README.md`). [`nodes`] knows which server keeps a caller's counters;
//! a [`node`] is one server, and nothing there waits longer than its caller allows: a [guard](super::guard) stands around the
//! whole step, connecting and healing included.

mod calls;
mod connection;
mod errors;
mod eviction;
mod gateways;
mod hash_slots;
mod leases;
mod link;
mod messages;
mod node;
mod nodes;
mod opener;
mod script;
mod sentinel;
mod server_clock;
mod topology;

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redis::{ErrorKind, RedisError};
use calls::Calls;
use connection::Way;
use futures_util::future::{join_all, select_ok};
pub(in crate::limit) use hash_slots::SharedMap;
pub use leases::RedisSlot;
use leases::{Asking, LOOK_EVERY, Leases};
use messages::{Message, Messages};
use node::{Kit, Node};
use nodes::Nodes;
pub use opener::OpenError;
use opener::Opener;
use script::Scripts;
use sentinel::Sentinels;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
pub use topology::{Identity, Login, Password, SentinelSettings, Server, Tls, Topology};

use super::guard::within;
use super::{Charge, Decision, Settlement, Store, StoreError};
use crate::clock;
use crate::limit::Common;
use crate::limit::algorithm::Share;

/// `[store.redis]`, resolved.
#[derive(Debug, Clone)]
pub struct RedisSettings {
    /// How the nodes form one store.
    pub topology: Topology,
    /// Everything the limiter may spend on one request.
    pub budget: Duration,
    /// The first part of every key.
    pub prefix: String,
    /// What this gateway counts by itself of each limit while Redis cannot; `None`: an equal share for each that lives.
    pub local_share: Option<Share>,
}

/// How long a server may take to say that it is there. Much longer than it may take for a request: one slow answer is no reason to
/// take a gateway out of service.
const PING_PATIENCE: Duration = Duration::from_millis(500);

/// Counters in Redis, shared by all gateways. One for each worker thread: its connections are multiplexed, and no request
/// crosses threads.
#[derive(Debug)]
pub struct RedisStore {
    kit: Rc<Kit>,
    nodes: Rc<Nodes>,
    messages: Rc<Messages>,
    leases: Rc<Leases>,
    /// What sends messages and renews leases; `None` before there is something to do.
    housekeeping: RefCell<Option<JoinHandle<()>>>,
    /// What counts gateways; `None` before the worker is connected.
    counting: OnceCell<JoinHandle<()>>,
}

impl RedisStore {
    /// A store as `settings` say. Connecting begins with [`connect`](Self::connect) or the first request, and goes on in
    /// the background: a Redis that is away does not keep a gateway from starting.
    ///
    /// # Errors
    /// When an address cannot be understood.
    pub fn new(settings: &RedisSettings, common: Arc<Common>) -> Result<Self, OpenError> {
        Self::with(settings, common, Scripts::new())
    }

    fn with(settings: &RedisSettings, common: Arc<Common>, scripts: Scripts) -> Result<Self, OpenError> {
        let kit = Rc::new(Kit {
            calls: Calls::new(&settings.prefix),
            scripts: Rc::new(scripts),
            budget: settings.budget,
            common,
            stale: Notify::new(),
        });
        let nodes = Rc::new(match &settings.topology {
            Topology::Standalone(server) => {
                let opener = Opener::new(server)?;
                let address = opener.address().to_owned();
                Nodes::one(&address, Way::Primary(Box::new(opener)), &kit)
            }
            Topology::Sentinel(settings) => {
                let sentinels = Sentinels::new(settings)?;
                Nodes::one(&settings.master_name, Way::Sentinel(Box::new(sentinels)), &kit)
            }
            Topology::Cluster(servers) => {
                let seeds = servers.iter().map(|server| {
                    let opener = Opener::new(server)?;
                    Ok((opener.address().into(), opener))
                });
                Nodes::cluster(seeds.collect::<Result<_, OpenError>>()?, &kit)
            }
        });
        let messages = Rc::new(Messages::new(Rc::clone(&nodes), Arc::clone(&kit.common)));
        let leases = Leases::new(Rc::clone(&messages));
        let (housekeeping, counting) = Default::default();
        Ok(Self { kit, nodes, messages, leases, housekeeping, counting })
    }

    /// Begins to connect, so that the first request need not wait for it, and to be counted as a gateway. Only inside of a
    /// worker's runtime.
    pub fn connect(&self) {
        self.nodes.start();
        self.counting.get_or_init(|| {
            let counting = gateways::keep_counting(Rc::downgrade(&self.kit), Rc::downgrade(&self.nodes));
            tokio::task::spawn_local(counting)
        });
    }

    /// Whether Redis may be asked for this caller, and there is no doubt that it will answer.
    #[must_use]
    pub fn admits_beyond_doubt(&self, caller: &str) -> bool {
        self.nodes.admits_beyond_doubt(self.nodes.hash_slot(caller), caller)
    }

    /// Waits until all servers that are known can be asked, or have been found away; until `deadline` at most.
    pub async fn prepared(&self, deadline: Instant) {
        let preparing = async {
            // Of a cluster nothing is known before its map is.
            self.nodes.at(0).await?;
            join_all(self.nodes.all().iter().map(|node| node.prepared())).await;
            Ok(())
        };
        drop(within(Some(deadline), preparing).await);
    }

    /// Waits until there is a connection to the server that keeps the caller's counters.
    ///
    /// # Errors
    /// When there is none, or none before `deadline`.
    pub async fn connected(&self, caller: &str, deadline: Option<Instant>) -> Result<(), StoreError> {
        let connecting = async { self.nodes.at(self.nodes.hash_slot(caller)).await?.connected().await };
        within(deadline, connecting).await
    }

    /// When a request that comes now is no longer waited for.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        clock::instant() + self.kit.budget
    }

    /// Whether enough is left until `deadline` for a server to be asked. One that cannot answer in time is not to blame.
    #[must_use]
    pub fn has_time(&self, deadline: Option<Instant>) -> bool {
        deadline.is_none_or(|deadline| clock::instant() + self.kit.budget / 4 <= deadline)
    }

    /// A request has waited in vain for an answer about this caller that another one had asked for.
    pub fn note_late(&self, caller: &str) {
        let error = StoreError::Timeout;
        self.kit.common.count_failure(error.kind());
        if let Some(node) = self.nodes.owner(self.nodes.hash_slot(caller)) {
            node.guard.shard().record(Err(&error));
        }
    }

    /// The slots that a request of this decision holds from now on, if any limit lends them.
    #[must_use]
    pub fn slots(&self, charge: Charge<'_>, decision: &Decision) -> Option<RedisSlot> {
        let lent = charge.rules.iter().zip(decision.charged());
        let lent = lent.filter(|(rule, charged)| *charged && rule.lends_slots());
        let keys: Vec<String> = lent.map(|(rule, _)| self.kit.calls.key(charge, rule)).collect();
        if keys.is_empty() {
            return None;
        }
        self.keep_house();
        Some(self.leases.hold(self.nodes.hash_slot(charge.caller), charge.lease, keys))
    }

    /// The slots that Redis is about to be asked for, if any limit lends them.
    fn asking(&self, charge: Charge<'_>) -> Option<Asking> {
        let lending = charge.rules.iter().filter(|rule| rule.lends_slots());
        let keys: Vec<String> = lending.map(|rule| self.kit.calls.key(charge, rule)).collect();
        if keys.is_empty() {
            return None;
        }
        self.keep_house();
        Some(self.leases.ask(self.nodes.hash_slot(charge.caller), charge.lease, keys))
    }

    /// Settles a charge soon. Nobody waits for it, and it may be lost: then what was reserved stays charged.
    pub fn settle(&self, settlement: Settlement<'_>) {
        let Some(message) = self.settling(settlement) else { return };
        self.keep_house();
        self.messages.leave(message);
    }

    /// Settles a charge now. What is asked behind that, over this store, is decided behind it.
    ///
    /// # Errors
    /// [`Tripped`](StoreError::Tripped) and [`Disconnected`](StoreError::Disconnected) if it was surely not sent, and
    /// [`Refused`](StoreError::Refused) if it was surely not done; else it may be settled or not.
    pub async fn settle_now(&self, settlement: Settlement<'_>) -> Result<(), StoreError> {
        match self.settling(settlement) {
            Some(message) => self.messages.deliver(&message).await,
            None => Ok(()),
        }
    }

    fn settling(&self, settlement: Settlement<'_>) -> Option<Message> {
        let hash_slot = self.nodes.hash_slot(settlement.charge.caller);
        self.kit.settling(settlement).map(|call| Message { hash_slot, call })
    }

    fn keep_house(&self) {
        self.housekeeping.borrow_mut().get_or_insert_with(|| {
            let (messages, leases, scripts) =
                (Rc::clone(&self.messages), Rc::clone(&self.leases), Rc::clone(&self.kit.scripts));
            tokio::task::spawn_local(keep_house(messages, leases, scripts))
        });
    }

    /// Whether a server answers, be it the only one or a node of a cluster: a lost node holds up its own callers only.
    ///
    /// # Errors
    /// When none does within half a second.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let deadline = Some(clock::instant() + PING_PATIENCE);
        // Of a cluster nothing is known before its map is.
        within(deadline, self.nodes.at(0)).await?;
        let nodes = self.nodes.all();
        if nodes.is_empty() {
            return Err(StoreError::Disconnected);
        }
        select_ok(nodes.iter().map(|node| Box::pin(node.ping(deadline)))).await.map(drop)
    }

    /// Decides on the node that keeps the caller's counters, wherever that is.
    async fn decide_somewhere(&self, charge: Charge<'_>) -> Result<Decision, StoreError> {
        let ask = async |node: &Node, in_passing| {
            let entered = node.guard.enter(charge.caller)?;
            // In a box: else every future around this one has room for it, more than once, whether or not Redis decides.
            entered.wait(charge.deadline, Box::pin(node.decide(charge, in_passing))).await
        };
        self.nodes.ask(self.nodes.hash_slot(charge.caller), charge.deadline, ask).await
    }
}

impl Store for RedisStore {
    async fn decide(&self, charge: Charge<'_>) -> Result<Decision, StoreError> {
        let asking = self.asking(charge);
        let decision = self.decide_somewhere(charge).await;
        match &decision {
            // Nobody was asked.
            Ok(_) | Err(StoreError::Tripped) => {}
            Err(error) => self.kit.common.count_failure(error.kind()),
        }
        let is_settled = match &decision {
            // An answer has come, or nobody was asked: nothing can be lent that is not known of.
            Ok(_) | Err(StoreError::Tripped | StoreError::Saturated | StoreError::Disconnected) => true,
            // To a server that has tripped nothing is sent. What it may have lent comes back with its lease.
            Err(StoreError::GivenUp) => true,
            Err(_) => false,
        };
        if is_settled {
            asking.into_iter().for_each(Asking::answered);
        }
        decision
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        self.housekeeping.take().iter().chain(self.counting.get()).for_each(JoinHandle::abort);
    }
}

/// Sends messages soon and renews leases in time, for as long as the store lives.
async fn keep_house(messages: Rc<Messages>, leases: Rc<Leases>, scripts: Rc<Scripts>) {
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    loop {
        tokio::select! {
            // First: messages may come without end.
            biased;
            _ = ticks.tick() => leases.renew(&scripts).await,
            () = messages.wait() => messages.send_some().await,
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
        StoreError::ClocksApart
    } else if error.kind() == ErrorKind::Parse {
        StoreError::Nonsense("not the protocol of Redis")
    } else if error.is_timeout() {
        StoreError::Timeout
    } else if error.is_io_error() || error.is_connection_dropped() {
        StoreError::Lost
    } else {
        StoreError::Refused(code())
    }
}

#[cfg(test)]
mod tests;
