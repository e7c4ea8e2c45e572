//! What of a changed configuration a running process cannot take over. Everything else it does.
//!
//! Every struct is taken apart whole: a new setting does not compile before somebody has said here what a reload makes of
//! it.

use secrecy::ExposeSecret as _;

use super::settings::{
    AdminSettings, LogSettings, RedisSettings, ServerSettings, Settings, StoreKind, StoreSettings,
};
use crate::limit::store::{Identity, Login, Password, SentinelSettings, Server, Tls, Topology};

/// The keys whose values in `wanted` wait for a restart, because the process was `started` with others.
#[must_use]
pub fn needs_restart(started: &Settings, wanted: &Settings) -> Vec<&'static str> {
    // With an underscore: what is taken over.
    let Settings { server, admin, store, upstreams: _, headers: _, log } = wanted;
    let LogSettings { access: _, level: _ } = log;
    let mut keys = Vec::new();
    of_server(&started.server, server, &mut keys);
    of_admin(&started.admin, admin, &mut keys);
    of_store(&started.store, store, &mut keys);
    keys
}

fn of_server(started: &ServerSettings, wanted: &ServerSettings, keys: &mut Vec<&'static str>) {
    // What was handed over at the start cannot be handed over anew.
    let ServerSettings {
        listen,
        workers,
        drain_delay,
        drain,
        reuse_port,
        handed_over: _,
        max_body: _,
        max_connections,
        max_in_flight,
        max_memory,
        watch: _,
    } = wanted;
    note(keys, "server.listen", started.listen == *listen);
    note(keys, "server.workers", started.workers == *workers);
    note(keys, "server.drain_delay", started.drain_delay == *drain_delay);
    note(keys, "server.drain", started.drain == *drain);
    note(keys, "server.reuse_port", started.reuse_port == *reuse_port);
    note(keys, "server.max_connections", started.max_connections == *max_connections);
    note(keys, "server.max_in_flight", started.max_in_flight == *max_in_flight);
    note(keys, "server.max_memory", started.max_memory == *max_memory);
}

fn of_admin(started: &AdminSettings, wanted: &AdminSettings, keys: &mut Vec<&'static str>) {
    let AdminSettings { listen, token: _ } = wanted;
    note(keys, "admin.listen", started.listen == *listen);
}

fn of_store(started: &StoreSettings, wanted: &StoreSettings, keys: &mut Vec<&'static str>) {
    let StoreSettings { kind, max_callers: _ } = wanted;
    match (&started.kind, kind) {
        (StoreKind::Memory, StoreKind::Memory) => {}
        (StoreKind::Redis(started), StoreKind::Redis(wanted)) => of_redis(started, wanted, keys),
        (StoreKind::Memory, StoreKind::Redis(_)) | (StoreKind::Redis(_), StoreKind::Memory) => {
            keys.push("store.kind");
        }
    }
}

fn of_redis(started: &RedisSettings, wanted: &RedisSettings, keys: &mut Vec<&'static str>) {
    let RedisSettings { topology, budget, prefix, local_share } = wanted;
    of_topology(&started.topology, topology, keys);
    note(keys, "store.redis.budget", started.budget == *budget);
    note(keys, "store.redis.prefix", started.prefix == *prefix);
    note(keys, "store.local_share", started.local_share == *local_share);
}

fn of_topology(started: &Topology, wanted: &Topology, keys: &mut Vec<&'static str>) {
    const NODES: &str = "store.redis.nodes";
    const PASSWORD: &str = "store.redis.password";
    match (started, wanted) {
        (Topology::Standalone(started), Topology::Standalone(wanted)) => {
            of_servers(&[started], &[wanted], ["store.redis.url", PASSWORD], keys);
        }
        (Topology::Cluster(started), Topology::Cluster(wanted)) => {
            of_servers(&all(started), &all(wanted), [NODES, PASSWORD], keys);
        }
        (Topology::Sentinel(started), Topology::Sentinel(wanted)) => {
            let SentinelSettings { sentinels, master_name, login } = &**wanted;
            let of_sentinels = [NODES, "store.redis.sentinel_password"];
            of_servers(&all(&started.sentinels), &all(sentinels), of_sentinels, keys);
            note(keys, "store.redis.master_name", started.master_name == *master_name);
            note(keys, PASSWORD, same_login(&started.login, login));
        }
        (Topology::Standalone(_) | Topology::Cluster(_) | Topology::Sentinel(_), _) => {
            let nodes = if matches!(wanted, Topology::Standalone(_)) { "store.redis.url" } else { NODES };
            keys.extend(["store.redis.mode", nodes]);
        }
    }
}

fn all(servers: &[Server]) -> Vec<&Server> {
    servers.iter().collect()
}

fn of_servers(
    started: &[&Server],
    wanted: &[&Server],
    [place, password]: [&'static str; 2],
    keys: &mut Vec<&'static str>,
) {
    let all_same = |same: fn(&Server, &Server) -> bool| {
        started.len() == wanted.len() && started.iter().zip(wanted).all(|(one, other)| same(one, other))
    };
    note(keys, place, all_same(same_place));
    note(keys, password, all_same(|one, other| same_login(&one.login, &other.login)));
    note(keys, "store.redis.tls_ca_file", all_same(|one, other| same_tls(&one.tls, &other.tls)));
}

/// What is in a file is read anew for every attempt to connect, and waits for nothing.
fn same_place(one: &Server, other: &Server) -> bool {
    let Server { url, url_file, login: _, tls: _ } = one;
    *url_file == other.url_file && (url_file.is_some() || url.expose_secret() == other.url.expose_secret())
}

fn same_login(one: &Login, other: &Login) -> bool {
    let Login { username, password } = one;
    let same_password = match (password, &other.password) {
        (None, None) => true,
        (Some(Password::Given(one)), Some(Password::Given(other))) => {
            one.expose_secret() == other.expose_secret()
        }
        (Some(Password::File(one)), Some(Password::File(other))) => one == other,
        (None | Some(Password::Given(_) | Password::File(_)), _) => false,
    };
    *username == other.username && same_password
}

fn same_tls(one: &Tls, other: &Tls) -> bool {
    let Tls { ca_file, own } = one;
    let files = |identity: &Identity| (identity.cert_file.clone(), identity.key_file.clone());
    *ca_file == other.ca_file && own.as_ref().map(files) == other.own.as_ref().map(files)
}

fn note(keys: &mut Vec<&'static str>, key: &'static str, same: bool) {
    if !same {
        keys.push(key);
    }
}
