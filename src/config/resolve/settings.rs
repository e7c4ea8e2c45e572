//! The settings of the process: listeners, upstreams, log.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret as _, SecretString};

use super::{Context, store};
use crate::config::mistakes::{Fault, Origin};
use crate::config::raw::{AdminSection, Raw, ServerSection, UpstreamSection};
use crate::config::reader::{Scalar, Written};
use crate::config::settings::{AdminSettings, LogSettings, ServerSettings, Settings};
use crate::config::words;
use crate::proxy::UpstreamSettings;

pub(super) fn resolve(raw: &Raw, context: &Context<'_>) -> Option<Settings> {
    check_listeners(raw, context);
    let server = server(&raw.server, context);
    let admin = admin(&raw.admin, context);
    let store = store::resolve(&raw.store, context);
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
    let max_in_flight = usize::try_from(section.max_in_flight.as_ref()?.value).ok()?;
    Some(ServerSettings {
        listen: section.listen.as_ref()?.value,
        workers,
        drain_delay: section.drain_delay.as_ref()?.value,
        drain: section.drain.as_ref()?.value,
        reuse_port: section.reuse_port.as_ref()?.value,
        handed_over: context.handed_over.clone(),
        max_body: section.max_body.as_ref()?.value,
        max_connections: usize::try_from(section.max_connections.as_ref()?.value).ok()?,
        max_in_flight: NonZeroUsize::new(max_in_flight),
        max_memory: section.max_memory.as_ref().map(|written| written.value),
        watch: section.watch.as_ref()?.value,
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

/// The secret in a file, without the line ends behind it. A relative path starts where the path is written.
pub(super) fn secret_of(
    file: &Written<String>,
    parse: impl Fn(Scalar<'_>) -> Result<SecretString, Fault>,
    context: &Context<'_>,
) -> Option<SecretString> {
    let read = context.files.read(&path_of(file)).map(SecretString::from);
    let secret = match &read {
        Ok(text) => parse(Scalar::Text(text.expose_secret().trim_end_matches(['\r', '\n']))),
        Err(error) => Err(Fault::new(format!("names a file that cannot be read: {error}"))),
    };
    secret.map_err(|fault| context.note(fault, file)).ok()
}

pub(super) fn path_of(file: &Written<String>) -> PathBuf {
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
        resolve_every: section.resolve_every.as_ref()?.value,
    })
}
