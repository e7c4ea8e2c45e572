//! The settings of the process: everything that is not policy. Resolved and valid.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::time::Duration;

use secrecy::SecretString;

pub use crate::limit::headers::Style as HeaderStyle;
pub use crate::limit::store::{RedisSettings, StoreKind};
use crate::proxy::UpstreamSettings;

/// All of them.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The public listener.
    pub server: ServerSettings,
    /// The admin listener.
    pub admin: AdminSettings,
    /// Where counters live.
    pub store: StoreSettings,
    /// The backends, by name.
    pub upstreams: Vec<UpstreamSettings>,
    /// Which rate-limit header fields answers carry (`[answers] headers`).
    pub headers: HeaderStyle,
    /// What is logged.
    pub log: LogSettings,
}

/// `[server]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerSettings {
    /// Address of the public listener.
    pub listen: SocketAddr,
    /// Worker threads, at least 1 (a written 0 has become the number of processors).
    pub workers: usize,
    /// After SIGTERM: how long connections are still accepted and served.
    pub drain_delay: Duration,
    /// Behind that: how long requests in flight may take to finish.
    pub drain: Duration,
    /// Whether other processes may listen on the same addresses.
    pub reuse_port: bool,
    /// The names of the listeners that the process was started with; `None`: it was started without any.
    pub handed_over: Option<Vec<String>>,
    /// The largest request body, in bytes.
    pub max_body: u64,
    /// Connections one worker holds open at most.
    pub max_connections: usize,
    /// Requests that all workers together work on at once; `None`: see [`Self::most_in_flight`].
    pub max_in_flight: Option<NonZeroUsize>,
    /// Memory that the process may use, in bytes, before it refuses requests; `None`: as much as it gets.
    pub max_memory: Option<u64>,
    /// Whether changed files are read by themselves.
    pub watch: bool,
}

impl ServerSettings {
    /// Requests that all workers together work on at once: as written, or three quarters of their connections, so that there
    /// is always a connection left on which to be refused.
    #[must_use]
    pub fn most_in_flight(&self) -> usize {
        let connections = self.workers.saturating_mul(self.max_connections);
        self.max_in_flight.map_or_else(|| (connections - connections / 4).max(1), NonZeroUsize::get)
    }
}

/// `[admin]`
#[derive(Debug, Clone)]
pub struct AdminSettings {
    /// Address of the admin listener.
    pub listen: SocketAddr,
    /// The bearer token that everything but the probes asks for. Present whenever `listen` is not loopback.
    pub token: Option<SecretString>,
}

/// `[store]`
#[derive(Debug, Clone)]
pub struct StoreSettings {
    /// Which store.
    pub kind: StoreKind,
    /// How many callers the memory store (also as the fallback of Redis) holds at most.
    pub max_callers: usize,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// Whether every request writes a line to standard output.
    pub access: bool,
    /// The `tracing` filter of the gateway's own messages, for example `info`.
    pub level: String,
}
