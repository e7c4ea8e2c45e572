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

use super::connection::Connection;
use super::script::{self, Script};
use crate::limit::Tally;

/// How long one message may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// Messages that may wait. Further ones are lost.
const WAITING_MAX: usize = 65_536;

/// Messages that are under way at a time.
const BATCH: usize = 256;

/// One message.
#[derive(Debug)]
pub(super) enum Message {
    /// A command.
    Plain(Cmd),
    /// A call of a script, by its hash.
    Call(Rc<Script>, Cmd),
}

/// What waits to be sent by one worker.
#[derive(Debug)]
pub(super) struct Messages {
    connection: Rc<Connection>,
    waiting: RefCell<VecDeque<Message>>,
    something_waits: Notify,
    tally: Arc<Tally>,
}

impl Messages {
    pub(super) fn new(connection: Rc<Connection>, tally: Arc<Tally>) -> Self {
        Self { connection, waiting: RefCell::default(), something_waits: Notify::new(), tally }
    }

    /// Leaves a message to be sent soon.
    pub(super) fn leave(&self, message: Message) {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() < WAITING_MAX {
            waiting.push_back(message);
            self.something_waits.notify_one();
        } else {
            self.tally.count_lost();
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
        if tokio::time::timeout(PATIENCE, self.try_to_send(message)).await != Ok(true) {
            self.tally.count_lost();
        }
    }

    /// Whether it has arrived.
    async fn try_to_send(&self, message: &Message) -> bool {
        let Ok(mut link) = self.connection.link().await else { return false };
        match message {
            Message::Plain(command) => link.ask(command).await.is_ok(),
            Message::Call(script, by_hash) => match link.ask(by_hash).await {
                Err(error) if script::is_missing(&error) => link.ask(&script.healed(by_hash)).await.is_ok(),
                answer => answer.is_ok(),
            },
        }
    }
}
