//! Messages to Redis that no request waits for: slots that came back, charges to be settled.
//!
//! They are sent soon, in the order in which they came, and may be lost: then a slot comes back when its lease ends, and a
//! charge stays what was reserved. What is lost is counted.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ::redis::Cmd;
use futures_util::future::join_all;
use tokio::sync::Notify;

use super::super::{Phase, StoreError};
use super::node::{Failure, Node};
use super::nodes::Nodes;
use super::script::Script;
use crate::limit::Common;

/// How long one message may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// Messages that may wait. Further ones are lost.
const WAITING_MAX: usize = 65_536;

/// Messages that are under way at a time.
const BATCH: usize = 256;

/// A message is sent on at most so often, when it is sent elsewhere.
const HOPS_MAX: usize = 16;

/// One message, about counters of this slot.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) slot: u16,
    pub(super) call: Call,
}

/// What it says.
#[derive(Debug)]
pub(super) enum Call {
    /// A command.
    Plain(Cmd),
    /// A call of a script, by its hash.
    Script(Rc<Script>, Cmd),
}

/// What waits to be sent by one worker.
#[derive(Debug)]
pub(super) struct Messages {
    nodes: Rc<Nodes>,
    waiting: RefCell<VecDeque<Message>>,
    something_waits: Notify,
    common: Arc<Common>,
}

impl Messages {
    pub(super) fn new(nodes: Rc<Nodes>, common: Arc<Common>) -> Self {
        Self { nodes, waiting: RefCell::default(), something_waits: Notify::new(), common }
    }

    /// Leaves a message to be sent soon.
    pub(super) fn leave(&self, message: Message) {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() < WAITING_MAX {
            waiting.push_back(message);
            self.something_waits.notify_one();
        } else {
            self.common.count_lost();
        }
    }

    /// Waits until there is something to send.
    pub(super) async fn wait(&self) {
        self.something_waits.notified().await;
    }

    /// Sends all that waits.
    pub(super) async fn send_waiting(&self) {
        loop {
            let batch: Vec<Message> = {
                let mut waiting = self.waiting.borrow_mut();
                let length = waiting.len().min(BATCH);
                waiting.drain(..length).collect()
            };
            if batch.is_empty() {
                return;
            }
            self.send_all(&batch).await;
        }
    }

    /// Sends these messages, a batch at a time.
    pub(super) async fn send_all(&self, messages: &[Message]) {
        for batch in messages.chunks(BATCH) {
            join_all(batch.iter().map(|message| self.send(message))).await;
        }
    }

    async fn send(&self, message: &Message) {
        if !self.has_arrived(message).await {
            self.common.count_lost();
        }
    }

    /// Sends a message; whether it has arrived.
    pub(super) async fn has_arrived(&self, message: &Message) -> bool {
        tokio::time::timeout(PATIENCE, self.try_to_send(message)).await == Ok(true)
    }

    async fn try_to_send(&self, message: &Message) -> bool {
        let Ok(mut node) = self.nodes.at(message.slot).await else { return false };
        let mut is_passing = false;
        for _ in 0..HOPS_MAX {
            let redirect = match send_to(&node, &message.call, is_passing).await {
                Ok(()) => return true,
                Err(Failure::Elsewhere(redirect)) => redirect,
                Err(Failure::Store(_) | Failure::NoScript) => return false,
            };
            match self.nodes.follow(redirect, node, None).await {
                Ok(followed) => (node, is_passing) = followed,
                Err(_) => return false,
            }
        }
        false
    }
}

/// A server that has tripped is left alone.
async fn send_to(node: &Node, call: &Call, is_passing: bool) -> Result<(), Failure> {
    if node.guard.shard().phase() == Phase::Tripped {
        return Err(StoreError::Tripped.into());
    }
    match call {
        Call::Plain(command) => node.ask(command, is_passing).await.map(drop),
        Call::Script(script, by_hash) => node.run(script, by_hash, is_passing).await.map(drop),
    }
}
