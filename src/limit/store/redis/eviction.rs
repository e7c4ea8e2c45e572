//! Whether a Redis may throw counters away when it is full.

use std::sync::atomic::{AtomicBool, Ordering};

use ::redis::{Cmd, Value};

/// Asks for what [`warn`] reads. An ACL may leave the command out.
pub(super) fn question() -> Cmd {
    let mut about_memory = ::redis::cmd("INFO");
    about_memory.arg("memory");
    about_memory
}

/// Says once, however many servers and workers there are, that counters may be evicted.
pub(super) fn warn(answer: &Value) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let text = match answer {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).unwrap_or_default(),
        Value::VerbatimString { text, .. } => text,
        _ => return,
    };
    let Some(policy) = evicting_policy(text) else { return };
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            policy,
            "Redis may evict counters, and each is a limit that starts afresh; set maxmemory-policy to noeviction"
        );
    }
}

/// The policy by which a Redis evicts keys when it is full, if it does either. Every policy but `noeviction` reaches the
/// counters: all of them have an expiry, so they are what the `volatile` ones choose from.
fn evicting_policy(memory: &str) -> Option<&str> {
    let field = |name: &str| memory.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let is_bounded = field("maxmemory")? != "0";
    field("maxmemory_policy").filter(|&policy| is_bounded && policy != "noeviction")
}
