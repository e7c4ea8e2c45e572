//! What of a changed configuration a running process cannot take over. Everything else it does.
//!
//! Every struct is taken apart whole: a new setting does not compile before somebody has said here what a reload makes of
//! it.

use std::path::Path;

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
    match (started, wanted) {
        (Topology::Standalone(started), Topology::Standalone(wanted)) => {
            of_servers(&[started], &[wanted], "store.redis.url", &OF_REDIS, keys);
        }
        (Topology::Cluster(started), Topology::Cluster(wanted)) => {
            of_servers(&all(started), &all(wanted), NODES, &OF_REDIS, keys);
        }
        (Topology::Sentinel(started), Topology::Sentinel(wanted)) => {
            let SentinelSettings { sentinels, master_name, login } = &**wanted;
            of_servers(&all(&started.sentinels), &all(sentinels), NODES, &OF_SENTINELS, keys);
            note(keys, "store.redis.master_name", started.master_name == *master_name);
            of_logins(&[(&started.login, login)], &OF_REDIS, keys);
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
    place: &'static str,
    login: &LoginKeys,
    keys: &mut Vec<&'static str>,
) {
    let pairs = || started.iter().zip(wanted);
    let same = |same: fn(&Server, &Server) -> bool| pairs().all(|(one, other)| same(one, other));
    note(keys, place, started.len() == wanted.len() && same(same_place));
    of_logins(&pairs().map(|(one, other)| (&one.login, &other.login)).collect::<Vec<_>>(), login, keys);
    for (at, key) in TLS_FILES.into_iter().enumerate() {
        let same = pairs().all(|(one, other)| tls_files(&one.tls)[at] == tls_files(&other.tls)[at]);
        note(keys, key, same);
    }
}

const TLS_FILES: [&str; 3] =
    ["store.redis.tls_ca_file", "store.redis.tls_cert_file", "store.redis.tls_key_file"];

/// In the order of [`TLS_FILES`].
fn tls_files(Tls { ca_file, own }: &Tls) -> [Option<&Path>; 3] {
    let own = own.as_ref().map(|Identity { cert_file, key_file }| (&**cert_file, &**key_file)).unzip();
    [ca_file.as_deref(), own.0, own.1]
}

/// The settings of a login.
struct LoginKeys {
    username: &'static str,
    password: &'static str,
    file: &'static str,
}

const OF_REDIS: LoginKeys = LoginKeys {
    username: "store.redis.username",
    password: "store.redis.password",
    file: "store.redis.password_file",
};

const OF_SENTINELS: LoginKeys = LoginKeys {
    username: "store.redis.sentinel_username",
    password: "store.redis.sentinel_password",
    file: "store.redis.sentinel_password_file",
};

fn of_logins(pairs: &[(&Login, &Login)], login: &LoginKeys, keys: &mut Vec<&'static str>) {
    let same = |same: fn(&Login, &Login) -> bool| pairs.iter().all(|(one, other)| same(one, other));
    note(keys, login.username, same(|one, other| one.username == other.username));
    note(keys, login.password, same(|one, other| given(one) == given(other)));
    note(keys, login.file, same(|one, other| file(one) == file(other)));
}

fn given(Login { username: _, password }: &Login) -> Option<&str> {
    match password.as_ref()? {
        Password::Given(password) => Some(password.expose_secret()),
        Password::File(_) => None,
    }
}

fn file(login: &Login) -> Option<&Path> {
    match login.password.as_ref()? {
        Password::Given(_) => None,
        Password::File(path) => Some(path),
    }
}

/// What is in a file is read anew for every attempt to connect, and waits for nothing.
fn same_place(one: &Server, other: &Server) -> bool {
    let Server { url, url_file, login: _, tls: _ } = one;
    *url_file == other.url_file && (url_file.is_some() || url.expose_secret() == other.url.expose_secret())
}

fn note(keys: &mut Vec<&'static str>, key: &'static str, same: bool) {
    if !same {
        keys.push(key);
    }
}
