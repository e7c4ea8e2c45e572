//! Configuration texts, so that a test shows only what it is about.

use std::fmt::Write as _;
use std::net::SocketAddr;

use sha2::{Digest, Sha256};

use super::backend::Backend;
use super::store::Store;

/// A configuration under construction. Both listeners are on free loopback ports.
#[derive(Debug, Clone, Default)]
pub(crate) struct Config {
    server: String,
    identity: String,
    tables: String,
    keys: usize,
}

impl Config {
    /// One upstream, and every path routed to it. No plans, no keys.
    pub(crate) fn open(backend: &Backend) -> Self {
        Self::bare(backend.address()).route("rest", "/*", "")
    }

    /// One upstream and no routes yet.
    pub(crate) fn bare(upstream: SocketAddr) -> Self {
        Self::default().upstream(upstream)
    }

    /// The one upstream, where the configuration was begun without it.
    pub(crate) fn upstream(self, address: SocketAddr) -> Self {
        self.table(&format!("[upstreams.api]\ntargets = [\"http://{address}\"]"))
    }

    /// The fixture of the cases: `free` is 5 calls in 10 s, `pro` 100, `anonymous` 3.
    ///
    /// Keys are `k-free-1`, `k-free-2` and `k-pro-1`, each of an account of its own: `one`, `two`, `rich`.
    pub(crate) fn shared(backend: &Backend) -> Self {
        Self::open(backend).with_shared_callers()
    }

    /// For what is not about limits: one key `k`, of the account `one`, whose limit is far away.
    pub(crate) fn wide(backend: &Backend) -> Self {
        Self::open(backend)
            .plan("wide", r#"{ name = "window", limit = 1000000, per = "60s" }"#)
            .key("k", "one", "wide")
    }

    /// The plans and keys of [`Self::shared`].
    pub(crate) fn with_shared_callers(self) -> Self {
        self.plan("free", r#"{ name = "window", limit = 5, per = "10s" }"#)
            .plan("pro", r#"{ name = "window", limit = 100, per = "10s" }"#)
            .plan("anonymous", r#"{ name = "window", limit = 3, per = "10s" }"#)
            .key("k-free-1", "one", "free")
            .key("k-free-2", "two", "free")
            .key("k-pro-1", "rich", "pro")
    }

    /// Lets callers without a credential in, on this plan.
    pub(crate) fn anonymous(mut self, plan: &str) -> Self {
        writeln!(self.identity, "anonymous = \"{plan}\"").unwrap();
        self
    }

    /// Believes `X-Forwarded-For` from loopback.
    pub(crate) fn behind_loopback_proxy(self) -> Self {
        self.table("[identity.client_address]\ntrusted_proxies = [\"127.0.0.1\"]")
    }

    /// Further lines of `[server]`.
    pub(crate) fn server(mut self, lines: &str) -> Self {
        writeln!(self.server, "{lines}").unwrap();
        self
    }

    /// A plan with these limits, written as TOML inline tables with commas between them.
    pub(crate) fn plan(self, name: &str, limits: &str) -> Self {
        self.table(&format!("[plans.{name}]\nlimits = [{limits}]"))
    }

    /// Further limits of a plan on one route.
    pub(crate) fn plan_on_route(self, plan: &str, route: &str, limits: &str) -> Self {
        self.table(&format!("[plans.{plan}.routes.{route}]\nlimits = [{limits}]"))
    }

    /// A route to the one upstream, with further lines.
    pub(crate) fn route(self, name: &str, path: &str, lines: &str) -> Self {
        self.table(&format!("[routes.{name}]\npath = \"{path}\"\nupstream = \"api\"\n{lines}"))
    }

    /// An API key of this account. The account may hold any character.
    pub(crate) fn key(mut self, key: &str, account: &str, plan: &str) -> Self {
        self.keys += 1;
        let (id, hash) = (self.keys, sha256_hex(key));
        self.table(&format!(
            "[keys.key_{id}]\nhash = \"sha256:{hash}\"\naccount = {account:?}\nplan = \"{plan}\""
        ))
    }

    /// So many keys `NAME-0`, `NAME-1`, ... on this plan, each with an account of its own.
    pub(crate) fn key_series(self, name: &str, count: usize, plan: &str) -> Self {
        (0..count).fold(self, |config, number| {
            config.key(&format!("{name}-{number}"), &format!("{name}_{number}"), plan)
        })
    }

    /// Counts in this store.
    pub(crate) fn store(self, store: &Store) -> Self {
        self.table(&store.tables())
    }

    /// Any further table.
    pub(crate) fn table(mut self, text: &str) -> Self {
        writeln!(self.tables, "{text}\n").unwrap();
        self
    }

    /// The whole text.
    pub(crate) fn text(&self) -> String {
        format!(
            "[server]\nlisten = \"127.0.0.1:0\"\n{}\n[admin]\nlisten = \"127.0.0.1:0\"\n\n[identity]\n{}\n{}",
            self.server, self.identity, self.tables
        )
    }
}

/// The hash of a key as the configuration wants it.
pub(crate) fn sha256_hex(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}
