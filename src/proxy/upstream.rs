//! A named backend and its targets. STUB.

use std::sync::Arc;
use std::time::Duration;

/// One `[upstreams.NAME]` table, resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// Its targets, at least one: `http://` or `https://`, an authority, and nothing behind it.
    pub targets: Vec<reqwest::Url>,
    /// Send the client's `Host` on instead of the target's authority.
    pub preserve_host: bool,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// How long the response head may take, counted from the last byte of the request that was sent.
    pub head_timeout: Duration,
    /// How long a body may stand still, in either direction.
    pub idle_timeout: Duration,
    /// How long an unused connection is kept. Below the idle time of common servers, which is 5 s.
    pub pool_idle_timeout: Duration,
}
