//! Whether a Redis may throw counters away when its memory is full: each would be a limit that starts afresh.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use ::redis::Value;

use super::errors;
use super::link::Link;
use crate::limit::Common;

/// How long the question may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// What one connection has seen, as it stands in what all share until the connection is gone.
#[derive(Debug)]
pub(super) struct Eviction {
    common: Arc<Common>,
    seen: Cell<bool>,
    /// Whether the user may ask at all: an ACL may leave the command out, and every vain question is a line in its log.
    may_ask: Cell<bool>,
}

impl Eviction {
    pub(super) fn new(common: Arc<Common>) -> Self {
        Self { common, seen: Cell::new(false), may_ask: Cell::new(true) }
    }

    /// Asks over a link that is new, and notes the answer. Says it in the log when no other connection has.
    pub(super) async fn look_first(&self, link: Link) {
        self.may_ask.set(true);
        self.look(link).await;
    }

    /// Asks again.
    pub(super) async fn look(&self, mut link: Link) {
        if !self.may_ask.get() {
            return;
        }
        let mut about_memory = ::redis::cmd("INFO");
        about_memory.arg("memory");
        let Ok(answer) = tokio::time::timeout(PATIENCE, link.ask(&about_memory)).await else { return };
        match answer {
            Ok(answer) => {
                let policy = text(&answer).and_then(evicting_policy);
                let is_news = self.note(policy.is_some()) && !self.common.is_quiet();
                if let Some(policy) = policy.filter(|_| is_news) {
                    tracing::warn!(
                        policy,
                        "Redis may evict counters, and each is a limit that starts afresh; set maxmemory-policy to noeviction"
                    );
                }
            }
            Err(error) => self.may_ask.set(errors::code(&error) != Some("NOPERM")),
        }
    }

    /// Whether this is the first connection that sees it.
    fn note(&self, seen: bool) -> bool {
        self.seen.replace(seen) != seen && self.common.note_eviction(seen)
    }
}

impl Drop for Eviction {
    fn drop(&mut self) {
        self.note(false);
    }
}

/// The text of an answer.
fn text(answer: &Value) -> Option<&str> {
    match answer {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::VerbatimString { text, .. } => Some(text),
        _ => None,
    }
}

/// The policy by which a Redis evicts keys when it is full, if it does either. Every policy but `noeviction` reaches the
/// counters: all of them have an expiry, so they are what the `volatile` ones choose from.
fn evicting_policy(memory: &str) -> Option<&str> {
    let field = |name: &str| memory.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let is_bounded = field("maxmemory")? != "0";
    field("maxmemory_policy").filter(|&policy| is_bounded && policy != "noeviction")
}
