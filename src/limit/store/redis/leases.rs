//! Slots of concurrency limits that requests of this worker hold: renewed while they are held, given back when they end.
//!
//! `Drop` cannot wait, so a slot that ends leaves a [message](super::messages). Should that be lost, or the gateway die, the
//! lease ends by itself after [`LEASE`].

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ::redis::Cmd;

use super::messages::{Message, Messages};
use super::node::Call;
use super::script::Scripts;
use crate::clock;

/// How long a slot stays taken when nobody renews it: what a killed gateway costs its callers.
pub(super) const LEASE: Duration = Duration::from_secs(10);

/// How often leases are renewed: twice may fail.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// How often it is looked whether leases are due.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// All slots that requests of one worker hold.
#[derive(Debug)]
pub(super) struct Leases {
    messages: Rc<Messages>,
    /// By a number of their own: a request has one id, and may hold slots of its caller and of a pool under it.
    held: RefCell<HashMap<u64, Held>>,
    count: Cell<u64>,
}

#[derive(Debug)]
struct Held {
    /// The hash slot that the keys are in.
    hash_slot: u16,
    id: Box<str>,
    keys: Vec<String>,
    renewed: Instant,
}

/// A slot that one request holds. Dropping it gives it back.
#[derive(Debug)]
pub struct RedisSlot {
    leases: Rc<Leases>,
    number: u64,
}

impl Drop for RedisSlot {
    fn drop(&mut self) {
        self.leases.end(self.number);
    }
}

/// Slots that Redis has been asked for. Dropped before there is an answer, because the client has left or the budget has
/// run out, it gives back what may have been lent to nobody.
#[derive(Debug)]
pub(super) struct Asking {
    leases: Rc<Leases>,
    hash_slot: u16,
    id: Box<str>,
    keys: Vec<String>,
}

impl Asking {
    /// Redis has answered: from now on what was lent is [held](Leases::hold), and nothing else was.
    pub(super) fn answered(mut self) {
        self.keys.clear();
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.leases.give_back(self.hash_slot, &self.keys, &self.id);
    }
}

impl Leases {
    pub(super) fn new(messages: Rc<Messages>) -> Rc<Self> {
        Rc::new(Self { messages, held: RefCell::default(), count: Cell::new(0) })
    }

    /// A lease that Redis is about to be asked for, in the sets under `keys`.
    pub(super) fn ask(self: &Rc<Self>, hash_slot: u16, id: &str, keys: Vec<String>) -> Asking {
        Asking { leases: Rc::clone(self), hash_slot, id: id.into(), keys }
    }

    /// A lease that Redis has just given, in the sets under `keys`.
    pub(super) fn hold(self: &Rc<Self>, hash_slot: u16, id: &str, keys: Vec<String>) -> RedisSlot {
        let number = self.count.get().wrapping_add(1);
        self.count.set(number);
        self.held
            .borrow_mut()
            .insert(number, Held { hash_slot, id: id.into(), keys, renewed: clock::instant() });
        RedisSlot { leases: Rc::clone(self), number }
    }

    fn end(&self, number: u64) {
        let Some(held) = self.held.borrow_mut().remove(&number) else { return };
        self.give_back(held.hash_slot, &held.keys, &held.id);
    }

    fn give_back(&self, hash_slot: u16, keys: &[String], id: &str) {
        for key in keys {
            self.messages.leave(Message { hash_slot, call: Call::Plain(remove(key, id)) });
        }
    }

    /// Renews what is due.
    pub(super) async fn renew(&self, scripts: &Scripts) {
        let now = clock::instant();
        let due: Vec<Message> = {
            let mut held = self.held.borrow_mut();
            let old = held.values_mut().filter(|held| now.duration_since(held.renewed) >= RENEW_EVERY);
            old.map(|held| {
                held.renewed = now;
                renewal(scripts, held)
            })
            .collect()
        };
        // The next time makes up for what does not arrive.
        self.messages.send_all(&due).await;
    }
}

fn renewal(scripts: &Scripts, held: &Held) -> Message {
    let Held { hash_slot, id, keys, .. } = held;
    let script = scripts.renewing();
    let mut call = script.by_hash();
    call.arg(keys.len()).arg(keys).arg(&**id).arg(clock::micros(LEASE));
    Message { hash_slot: *hash_slot, call: Call::Script(Rc::clone(script), call) }
}

fn remove(key: &str, id: &str) -> Cmd {
    let mut command = ::redis::cmd("ZREM");
    command.arg(key).arg(id);
    command
}
