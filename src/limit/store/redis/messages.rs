//! Messages to Redis that no request waits for: slots that came back, charges to be settled.
//!
//! They are sent soon, in the order in which they came, and may be lost: then a slot comes back when its lease ends, and a
//! charge stays what was reserved. What is lost is counted.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Notify;

use super::super::StoreError;
use super::super::guard::within;
use super::node::Call;
use super::nodes::Nodes;
use crate::clock;
use crate::limit::Common;

/// How long one message may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// Messages that may wait. Further ones are lost.
const WAITING_MAX: usize = 65_536;

/// Messages that are under way at a time.
const BATCH: usize = 256;

/// One message, about counters of this hash slot.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) hash_slot: u16,
    pub(super) call: Call,
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

    /// Sends what waits, a batch at most.
    pub(super) async fn send_some(&self) {
        let batch: Vec<Message> = {
            let mut waiting = self.waiting.borrow_mut();
            let length = waiting.len().min(BATCH);
            waiting.drain(..length).collect()
        };
        let lost = self.send_all(&batch).await;
        (0..lost).for_each(|_| self.common.count_lost());
        if !self.waiting.borrow().is_empty() {
            self.something_waits.notify_one();
        }
    }

    /// Sends these messages, a batch at a time. How many did not arrive.
    pub(super) async fn send_all(&self, messages: &[Message]) -> usize {
        let mut lost = 0;
        for batch in messages.chunks(BATCH) {
            let sent = join_all(batch.iter().map(|message| self.deliver(message))).await;
            lost += sent.iter().filter(|sent| sent.is_err()).count();
        }
        lost
    }

    /// Sends a message and waits for the answer.
    pub(super) async fn deliver(&self, message: &Message) -> Result<(), StoreError> {
        let deadline = clock::instant() + PATIENCE;
        within(Some(deadline), self.nodes.send(message.hash_slot, &message.call)).await.map(drop)
    }
}
