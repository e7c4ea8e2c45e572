//! Slots of concurrency limits that requests of this worker hold: renewed while they are held, given back when they end.
//!
//! `Drop` cannot wait, so a slot that ends goes into a queue, and a task of the worker's tells Redis. Should that fail, or
//! the gateway die, the lease ends by itself after [`LEASE`].

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use ::redis::Cmd;
use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::connection::Connection;
use super::script::{self, Script};
use crate::clock;

/// How long a slot stays taken when nobody renews it: what a killed gateway costs its callers.
pub(super) const LEASE: Duration = Duration::from_secs(10);

/// How often leases are renewed: twice may fail.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// How long one message about leases may take. Nobody waits for it.
const PATIENCE: Duration = Duration::from_millis(500);

/// Ended slots that may wait to be told. More are left to end by themselves.
const ENDED_MAX: usize = 65_536;

/// Messages that are under way at a time.
const BATCH: usize = 256;

/// All slots that requests of one worker hold.
#[derive(Debug)]
pub(super) struct Leases {
    connection: Rc<Connection>,
    renewing: Script,
    held: RefCell<HashMap<Box<str>, Held>>,
    ended: RefCell<VecDeque<(Box<str>, Vec<String>)>>,
    something_ended: Notify,
    /// The task that tells Redis; ended with the store.
    task: RefCell<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Held {
    keys: Vec<String>,
    renewed: Instant,
}

/// A slot that one request holds. Dropping it gives it back.
#[derive(Debug)]
pub struct RedisSlot {
    leases: Rc<Leases>,
    id: Box<str>,
}

impl Drop for RedisSlot {
    fn drop(&mut self) {
        self.leases.end(&self.id);
    }
}

impl Leases {
    pub(super) fn new(connection: Rc<Connection>) -> Rc<Self> {
        Rc::new(Self {
            connection,
            renewing: Script::renewing(),
            held: RefCell::default(),
            ended: RefCell::default(),
            something_ended: Notify::new(),
            task: RefCell::new(None),
        })
    }

    /// A lease that Redis has just given, in the sets under `keys`.
    pub(super) fn hold(self: &Rc<Self>, id: &str, keys: Vec<String>) -> RedisSlot {
        self.task.borrow_mut().get_or_insert_with(|| tokio::task::spawn_local(tell(Rc::downgrade(self))));
        self.held.borrow_mut().insert(id.into(), Held { keys, renewed: clock::instant() });
        RedisSlot { leases: Rc::clone(self), id: id.into() }
    }

    fn end(&self, id: &str) {
        let Some(held) = self.held.borrow_mut().remove(id) else { return };
        let mut ended = self.ended.borrow_mut();
        if ended.len() < ENDED_MAX {
            ended.push_back((id.into(), held.keys));
            self.something_ended.notify_one();
        }
    }

    async fn give_back(&self) {
        loop {
            let batch: Vec<_> = {
                let mut ended = self.ended.borrow_mut();
                let length = ended.len().min(BATCH);
                ended.drain(..length).collect()
            };
            if batch.is_empty() {
                return;
            }
            let messages = batch.iter().flat_map(|(id, keys)| keys.iter().map(move |key| remove(key, id)));
            join_all(messages.map(|message| self.send(message))).await;
        }
    }

    async fn renew(&self) {
        let now = clock::instant();
        let due: Vec<_> = {
            let mut held = self.held.borrow_mut();
            let old = held.iter_mut().filter(|(_, held)| now.duration_since(held.renewed) >= RENEW_EVERY);
            old.map(|(id, held)| {
                held.renewed = now;
                (id.clone(), held.keys.clone())
            })
            .collect()
        };
        for batch in due.chunks(BATCH) {
            join_all(batch.iter().map(|(id, keys)| self.renew_one(id, keys))).await;
        }
    }

    async fn renew_one(&self, id: &str, keys: &[String]) {
        let call = |mut command: Cmd| {
            command.arg(keys.len()).arg(keys).arg(id).arg(clock::micros(LEASE));
            command
        };
        if self.send(call(self.renewing.by_hash())).await == Sent::ScriptMissing {
            self.send(call(self.renewing.by_source())).await;
        }
    }

    /// Sends a message that may be lost: the lease ends by itself.
    async fn send(&self, message: Cmd) -> Sent {
        let ask = async {
            let mut link = self.connection.link().await.map_err(|_| None)?;
            link.ask(&message).await.map_err(Some)
        };
        match tokio::time::timeout(PATIENCE, ask).await {
            Ok(Err(Some(error))) if script::is_missing(&error) => Sent::ScriptMissing,
            Ok(Ok(_)) => Sent::Well,
            Ok(Err(_)) | Err(_) => Sent::Lost,
        }
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Sent {
    Well,
    ScriptMissing,
    Lost,
}

fn remove(key: &str, id: &str) -> Cmd {
    let mut command = ::redis::cmd("ZREM");
    command.arg(key).arg(id);
    command
}

/// Tells Redis of ended slots at once and of held ones every few seconds, for as long as the store lives.
async fn tell(leases: std::rc::Weak<Leases>) {
    let mut ticks = tokio::time::interval(RENEW_EVERY / 3);
    loop {
        let Some(leases) = leases.upgrade() else { return };
        tokio::select! {
            () = leases.something_ended.notified() => leases.give_back().await,
            _ = ticks.tick() => leases.renew().await,
        }
    }
}
