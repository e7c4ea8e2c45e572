//! The settings of the process: listeners, store, upstreams, log.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use secrecy::{ExposeSecret as _, SecretString};

use super::Context;
use crate::config::mistakes::{Fault, Origin};
use crate::config::raw::{
    AdminSection, ModeWord, Raw, RedisSection, ServerSection, StoreSection, StoreWord, UpstreamSection,
};
use crate::config::reader::{Scalar, Written};
use crate::config::settings::{
    AdminSettings, LogSettings, RedisSettings, ServerSettings, Settings, StoreKind, StoreSettings,
};
use crate::config::sources::read_file;
use crate::config::words;
use crate::limit::store::{RedisStore, Topology};
use crate::proxy::UpstreamSettings;

pub(super) fn resolve(raw: &Raw, context: &Context<'_>) -> Option<Settings> {
    check_listeners(raw, context);
    let server = server(&raw.server, context);
    let admin = admin(&raw.admin, context);
    let store = store(&raw.store, context);
    let upstreams = raw.upstreams.iter().map(|section| upstream(section, context));
    let upstreams = upstreams.collect::<Vec<_>>().into_iter().collect::<Option<_>>();
    Some(Settings {
        server: server?,
        admin: admin?,
        store: store?,
        upstreams: upstreams?,
        headers: raw.headers.as_ref()?.value,
        log: LogSettings {
            access: raw.log.access.as_ref()?.value,
            level: raw.log.level.as_ref()?.value.clone(),
        },
    })
}

/// Two listeners cannot share an address, except port 0, which gives each its own.
fn check_listeners(raw: &Raw, context: &Context<'_>) {
    let (Some(public), Some(admin)) = (&raw.server.listen, &raw.admin.listen) else {
        return;
    };
    if public.value == admin.value && public.value.port() != 0 {
        context.note(Fault::new("is the address of server.listen too"), admin);
    }
}

fn server(section: &ServerSection, context: &Context<'_>) -> Option<ServerSettings> {
    let workers = usize::try_from(section.workers.as_ref()?.value).ok()?;
    let workers = NonZeroUsize::new(workers).map_or_else(processors, NonZeroUsize::get);
    let max_connections = usize::try_from(section.max_connections.as_ref()?.value).ok()?;
    let max_in_flight = usize::try_from(section.max_in_flight.as_ref()?.value).ok()?;
    Some(ServerSettings {
        listen: section.listen.as_ref()?.value,
        workers,
        drain_delay: section.drain_delay.as_ref()?.value,
        drain: section.drain.as_ref()?.value,
        reuse_port: section.reuse_port.as_ref()?.value,
        handed_over: context.handed_over.clone(),
        max_body: section.max_body.as_ref()?.value,
        max_connections,
        max_in_flight: NonZeroUsize::new(max_in_flight)
            .map_or_else(|| (workers * max_connections * 3 / 4).max(1), NonZeroUsize::get),
        max_memory: section.max_memory.as_ref().map(|written| written.value),
    })
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

fn admin(section: &AdminSection, context: &Context<'_>) -> Option<AdminSettings> {
    let token = match (&section.token, &section.token_file) {
        (Some(token), None) => Some(token.value.clone()),
        (None, Some(file)) => Some(secret_of(file, words::token, context)?),
        (None, None) => None,
        (Some(_), Some(file)) => {
            context.note(Fault::new("stands beside admin.token").hint("keep one of them"), file);
            return None;
        }
    };
    let listen = section.listen.as_ref()?;
    if token.is_none() && !listen.value.ip().is_loopback() {
        let fault = Fault::new("can be reached from other machines, and there is no token")
            .hint("set admin.token or admin.token_file, or listen on \"127.0.0.1:9090\"");
        context.note(fault, listen);
    }
    Some(AdminSettings { listen: listen.value, token })
}

fn store(section: &StoreSection, context: &Context<'_>) -> Option<StoreSettings> {
    let redis = redis(&section.redis, context);
    let kind = match section.kind.as_ref()?.value {
        StoreWord::Memory => StoreKind::Memory,
        StoreWord::Redis => StoreKind::Redis(redis?),
    };
    Some(StoreSettings { kind, max_callers: usize::try_from(section.max_callers.as_ref()?.value).ok()? })
}

fn redis(section: &RedisSection, context: &Context<'_>) -> Option<RedisSettings> {
    let nodes = redis_nodes(section, context);
    let mode = section.mode.as_ref()?;
    let nodes = nodes?;
    if let Some(fault) = contradiction(mode.value, &nodes.value) {
        context.note(fault, mode);
        return None;
    }
    let topology = match mode.value {
        ModeWord::Standalone => Topology::Standalone(nodes.value.first()?.clone().into()),
        ModeWord::Cluster => Topology::Cluster(nodes.value.iter().cloned().map(Into::into).collect()),
    };
    let settings = RedisSettings {
        topology,
        budget: section.budget.as_ref()?.value,
        prefix: section.prefix.as_ref()?.value.clone(),
    };
    // What the client library asks of its addresses, only the library knows. Nothing connects here.
    if let Err(error) = RedisStore::new(&settings, Arc::default()) {
        let fault = Fault::new(error.to_string())
            .hint("a user and a password are UTF-8, percent-encoded, and the same for all nodes");
        context.note(fault, &nodes);
    }
    Some(settings)
}

/// What the mode says against the nodes.
fn contradiction(mode: ModeWord, nodes: &[SecretString]) -> Option<Fault> {
    match mode {
        ModeWord::Standalone if nodes.len() > 1 => {
            Some(Fault::new("\"standalone\" is one node").hint("write mode = \"cluster\", or one url"))
        }
        ModeWord::Cluster if nodes.iter().any(words::chooses_database) => {
            Some(Fault::new("a cluster has database 0 only").hint("end the URLs after the port"))
        }
        ModeWord::Standalone | ModeWord::Cluster => None,
    }
}

/// The nodes, which may be written in three ways. The built-in `url` gives way to any of them.
fn redis_nodes(section: &RedisSection, context: &Context<'_>) -> Option<Written<Vec<SecretString>>> {
    let given = |written: &&Written<SecretString>| !matches!(written.place.origin, Origin::BuiltIn(_));
    let url = section.url.as_ref();
    let places = [
        url.filter(given).map(|url| &url.place),
        section.url_file.as_ref().map(|file| &file.place),
        section.nodes.as_ref().map(|nodes| &nodes.place),
    ];
    if let [_, second, ..] = places.into_iter().flatten().collect::<Vec<_>>().as_slice() {
        let fault = Fault::new("says again where Redis is").hint("keep one of url, url_file and nodes");
        context.notes.add(fault.at(second));
    }
    if let Some(nodes) = &section.nodes {
        if nodes.value.is_empty() {
            context.note(Fault::new("must name at least one node"), nodes);
            return None;
        }
        let urls = nodes.value.iter().map(|node| node.value.clone()).collect();
        return Some(Written { value: urls, place: nodes.place.clone() });
    }
    if let Some(file) = &section.url_file {
        let url = secret_of(file, words::redis_url, context)?;
        return Some(Written { value: vec![url], place: file.place.clone() });
    }
    let url = url?;
    Some(Written { value: vec![url.value.clone()], place: url.place.clone() })
}

/// The secret in a file, without the line ends behind it. A relative path starts where the path is written.
fn secret_of(
    file: &Written<String>,
    parse: impl Fn(Scalar<'_>) -> Result<SecretString, Fault>,
    context: &Context<'_>,
) -> Option<SecretString> {
    let read = read_file(&path_of(file)).map(SecretString::from);
    let secret = match &read {
        Ok(text) => parse(Scalar::Text(text.expose_secret().trim_end_matches(['\r', '\n']))),
        Err(error) => Err(Fault::new(format!("names a file that cannot be read: {error}"))),
    };
    secret.map_err(|fault| context.note(fault, file)).ok()
}

fn path_of(file: &Written<String>) -> PathBuf {
    let path = Path::new(&file.value);
    match &file.place.origin {
        Origin::File(beside) => beside.parent().unwrap_or(Path::new("")).join(path),
        Origin::BuiltIn(_) | Origin::Environment(_) => path.to_owned(),
    }
}

fn upstream(section: &UpstreamSection, context: &Context<'_>) -> Option<UpstreamSettings> {
    let written = section.targets.as_ref()?;
    if written.value.is_empty() {
        context.note(Fault::new("must name at least one target"), written);
    }
    let mut targets = Vec::with_capacity(written.value.len());
    for target in &written.value {
        if targets.contains(&target.value) {
            context.note(Fault::new("is in the list twice"), target);
        }
        targets.push(target.value.clone());
    }
    Some(UpstreamSettings {
        name: section.name.as_str().into(),
        targets,
        preserve_host: section.preserve_host.as_ref()?.value,
        connect_timeout: section.connect_timeout.as_ref()?.value,
        head_timeout: section.head_timeout.as_ref()?.value,
        idle_timeout: section.idle_timeout.as_ref()?.value,
        pool_idle_timeout: section.pool_idle_timeout.as_ref()?.value,
    })
}
