//! What of a changed configuration a running process cannot take over. Everything else it does.
//!
//! Every struct is taken apart whole: a new setting does not compile before somebody has said here what a reload makes of
//! it.

use secrecy::ExposeSecret as _;

use super::settings::{
    AdminSettings, LogSettings, RedisSettings, ServerSettings, Settings, StoreKind, StoreSettings,
};
use crate::limit::store::{Server, Topology};

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
    let ServerSettings { listen, workers, drain, max_body: _, max_connections, watch: _ } = wanted;
    note(keys, "server.listen", started.listen == *listen);
    note(keys, "server.workers", started.workers == *workers);
    note(keys, "server.drain", started.drain == *drain);
    note(keys, "server.max_connections", started.max_connections == *max_connections);
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
    let RedisSettings { topology, budget, prefix } = wanted;
    note(keys, "store.redis.mode", same_mode(&started.topology, topology));
    note(keys, nodes_key(topology), same_nodes(&started.topology, topology));
    note(keys, "store.redis.budget", started.budget == *budget);
    note(keys, "store.redis.prefix", started.prefix == *prefix);
}

fn note(keys: &mut Vec<&'static str>, key: &'static str, same: bool) {
    if !same {
        keys.push(key);
    }
}

fn same_mode(one: &Topology, other: &Topology) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

fn nodes_key(topology: &Topology) -> &'static str {
    match topology {
        Topology::Standalone(_) => "store.redis.url",
        Topology::Cluster(_) => "store.redis.nodes",
    }
}

fn same_nodes(one: &Topology, other: &Topology) -> bool {
    nodes(one).len() == nodes(other).len()
        && nodes(one).iter().zip(nodes(other)).all(|(one, other)| same_server(one, other))
}

fn nodes(topology: &Topology) -> &[Server] {
    match topology {
        Topology::Standalone(server) => std::slice::from_ref(server),
        Topology::Cluster(servers) => servers,
    }
}

fn same_server(one: &Server, other: &Server) -> bool {
    let Server { url } = one;
    url.expose_secret() == other.url.expose_secret()
}
