//! Slots of concurrency limits that requests of this worker hold: renewed while they are held, given back when they end.
//!
//! `Drop` cannot wait, so a slot that ends leaves a [message](super::messages). Should that be lost, or the gateway die, the
//! lease ends by itself after [`LEASE`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ::redis::Cmd;

use super::messages::{Message, Messages};
use super::script::Scripts;
use crate::clock;

/// How long a slot stays taken when nobody renews it: what a killed gateway costs its callers.
pub(super) const LEASE: Duration = Duration::from_secs(10);

/// How often leases are renewed: twice may fail.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// All slots that requests of one worker hold.
#[derive(Debug)]
pub(super) struct Leases {
    messages: Rc<Messages>,
    held: RefCell<HashMap<Box<str>, Held>>,
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
    pub(super) fn new(messages: Rc<Messages>) -> Rc<Self> {
        Rc::new(Self { messages, held: RefCell::default() })
    }

    /// A lease that Redis has just given, in the sets under `keys`.
    pub(super) fn hold(self: &Rc<Self>, id: &str, keys: Vec<String>) -> RedisSlot {
        self.held.borrow_mut().insert(id.into(), Held { keys, renewed: clock::instant() });
        RedisSlot { leases: Rc::clone(self), id: id.into() }
    }

    fn end(&self, id: &str) {
        let Some(held) = self.held.borrow_mut().remove(id) else { return };
        for key in &held.keys {
            self.messages.leave(Message::Plain(remove(key, id)));
        }
    }

    /// Renews what is due.
    pub(super) async fn renew(&self, scripts: &Scripts) {
        let now = clock::instant();
        let due: Vec<Message> = {
            let mut held = self.held.borrow_mut();
            let old = held.iter_mut().filter(|(_, held)| now.duration_since(held.renewed) >= RENEW_EVERY);
            old.map(|(id, held)| {
                held.renewed = now;
                renewal(scripts, id, &held.keys)
            })
            .collect()
        };
        self.messages.send_all(&due).await;
    }
}

fn renewal(scripts: &Scripts, id: &str, keys: &[String]) -> Message {
    let script = scripts.renewing();
    let mut call = script.by_hash();
    call.arg(keys.len()).arg(keys).arg(id).arg(clock::micros(LEASE));
    Message::Call(Rc::clone(script), call)
}

fn remove(key: &str, id: &str) -> Cmd {
    let mut command = ::redis::cmd("ZREM");
    command.arg(key).arg(id);
    command
}

/// How often it is looked whether leases are due.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
