//! `[store]`: where Redis is, how one is let in there, and what of that does not go together.

use std::path::PathBuf;
use std::sync::Arc;

use secrecy::ExposeSecret as _;

use super::Context;
use super::settings::{path_of, secret_of};
use crate::config::mistakes::{Fault, Origin, Place};
use crate::config::raw::{LocalShare, LoginKeys, ModeWord, RedisSection, StoreSection, StoreWord};
use crate::config::reader::{Scalar, Written};
use crate::config::settings::{RedisSettings, StoreKind, StoreSettings};
use crate::config::words::{self, RedisUrl};
use crate::limit::algorithm::Share;
use crate::limit::store::{Identity, Login, Password, RedisStore, SentinelSettings, Server, Tls, Topology};

pub(super) fn resolve(section: &StoreSection, context: &Context<'_>) -> Option<StoreSettings> {
    let redis = redis(section, context);
    let kind = match section.kind.as_ref()?.value {
        StoreWord::Memory => StoreKind::Memory,
        StoreWord::Redis => StoreKind::Redis(Box::new(redis?)),
    };
    Some(StoreSettings { kind, max_callers: usize::try_from(section.max_callers.as_ref()?.value).ok()? })
}

fn redis(store: &StoreSection, context: &Context<'_>) -> Option<RedisSettings> {
    let section = &store.redis;
    let servers = servers(section, context);
    let own_login = login(&section.login, context);
    // The Sentinels are servers of their own: no password of Redis is shown to them.
    let sentinel_login = login(&section.sentinel_login, context);
    let tls = tls(section, context);
    let mode = section.mode.as_ref()?;
    let (servers, login, sentinel_login, tls) = (servers?, own_login?, sentinel_login?, tls?);
    if contradicts(section, mode, &servers, context) {
        return None;
    }
    let with = |login: &Login| {
        let servers = servers.value.iter().cloned();
        servers.map(|server| Server { login: login.clone(), tls: tls.clone(), ..server }).collect::<Vec<_>>()
    };
    let topology = match mode.value {
        ModeWord::Standalone => Topology::Standalone(with(&login).pop()?),
        ModeWord::Cluster => Topology::Cluster(with(&login)),
        ModeWord::Sentinel => Topology::Sentinel(Box::new(SentinelSettings {
            sentinels: with(&sentinel_login),
            master_name: section.master_name.as_ref()?.value.clone(),
            login,
        })),
    };
    let settings = RedisSettings {
        topology,
        budget: section.budget.as_ref()?.value,
        prefix: section.prefix.as_ref()?.value.clone(),
        local_share: match store.local_share.as_ref()?.value {
            LocalShare::Equal => None,
            LocalShare::Percent(percent) => Some(Share::percent(percent)),
        },
    };
    // What the client library asks of its addresses, only the library knows. Nothing connects here.
    if let Err(error) = RedisStore::new(&settings, Arc::default()) {
        let fault = Fault::new(error.to_string())
            .hint("a user and a password are UTF-8, percent-encoded, and the same for all nodes");
        context.note(fault, &servers);
    }
    Some(settings)
}

/// The servers, which may be written in three ways. The built-in `url` gives way to any of them.
fn servers(section: &RedisSection, context: &Context<'_>) -> Option<Written<Vec<Server>>> {
    let url = section.url.as_ref();
    let places = [
        url.filter(|url| is_given(&url.place)).map(|url| &url.place),
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
        let servers = nodes.value.iter().map(|node| node.value.clone().into()).collect();
        return Some(Written { value: servers, place: nodes.place.clone() });
    }
    if let Some(file) = &section.url_file {
        let url = secret_of(file, words::redis_url, context)?;
        let server = Server { url_file: Some(path_of(file)), ..url.into() };
        return Some(Written { value: vec![server], place: file.place.clone() });
    }
    let url = url?;
    Some(Written { value: vec![url.value.clone().into()], place: url.place.clone() })
}

fn is_given(place: &Place) -> bool {
    !matches!(place.origin, Origin::BuiltIn(_))
}

/// A user and a password. Whether the file can be read is seen here; it is read anew for every connection.
fn login(keys: &LoginKeys, context: &Context<'_>) -> Option<Login> {
    let password = match (&keys.password, &keys.password_file) {
        (Some(password), None) => Some(Password::Given(password.value.clone())),
        (None, Some(file)) => {
            secret_of(file, words::secret, context)?;
            Some(Password::File(path_of(file)))
        }
        (None, None) => None,
        (Some(_), Some(file)) => {
            context.note(Fault::new("stands beside a password").hint("keep one of them"), file);
            return None;
        }
    };
    if let (Some(username), None) = (&keys.username, &password) {
        context.note(Fault::new("needs a password").hint("add password or password_file"), username);
        return None;
    }
    Some(Login { username: keys.username.as_ref().map(|username| username.value.clone()), password })
}

fn tls(section: &RedisSection, context: &Context<'_>) -> Option<Tls> {
    let ca_file = section.tls_ca_file.as_ref().map(|file| pem(file, "CERTIFICATE", context));
    let cert_file = section.tls_cert_file.as_ref().map(|file| pem(file, "CERTIFICATE", context));
    let key_file = section.tls_key_file.as_ref().map(|file| pem(file, "PRIVATE KEY", context));
    let own = match (&section.tls_cert_file, &section.tls_key_file) {
        (Some(cert), None) => {
            context.note(Fault::new("needs its key").hint("add tls_key_file"), cert);
            return None;
        }
        (None, Some(key)) => {
            context.note(Fault::new("needs its certificate").hint("add tls_cert_file"), key);
            return None;
        }
        (Some(_), Some(_)) => Some(Identity { cert_file: cert_file??, key_file: key_file?? }),
        (None, None) => None,
    };
    let ca_file = match ca_file {
        Some(file) => Some(file?),
        None => None,
    };
    Some(Tls { ca_file, own })
}

/// The path of a PEM file.
fn pem(file: &Written<String>, what: &str, context: &Context<'_>) -> Option<PathBuf> {
    let parse = |value: Scalar<'_>| {
        let text = words::secret(value)?;
        // A key has the name of its kind before the words.
        let has = text.expose_secret().lines().any(|line| {
            line.starts_with("-----BEGIN ") && line.trim_end().ends_with(&format!("{what}-----"))
        });
        if has { Ok(text) } else { Err(Fault::new(format!("names a file without a {what} in PEM form"))) }
    };
    secret_of(file, parse, context)?;
    Some(path_of(file))
}

/// Notes what does not go together. Whether anything did not.
fn contradicts(
    section: &RedisSection,
    mode: &Written<ModeWord>,
    servers: &Written<Vec<Server>>,
    context: &Context<'_>,
) -> bool {
    let urls: Vec<RedisUrl> = servers.value.iter().map(|server| RedisUrl::of(&server.url)).collect();
    let any = |has: fn(&RedisUrl) -> bool| urls.iter().any(has);
    let mut faults: Vec<(Fault, &Place)> = Vec::new();
    match mode.value {
        ModeWord::Standalone if urls.len() > 1 => {
            let hint = "write mode = \"cluster\" or \"sentinel\", or one url";
            faults.push((Fault::new("\"standalone\" is one node").hint(hint), &mode.place));
        }
        ModeWord::Cluster if any(|url| url.chooses_database) => {
            let hint = "end the URLs after the port";
            faults.push((Fault::new("a cluster has database 0 only").hint(hint), &mode.place));
        }
        ModeWord::Sentinel if section.nodes.is_none() => {
            let hint = "write nodes = [\"redis://10.0.0.1:26379\", ...]";
            faults.push((Fault::new("must be told where the Sentinels are").hint(hint), &mode.place));
        }
        ModeWord::Sentinel if section.master_name.is_none() => {
            let hint = "write master_name = \"mymaster\", as in the Sentinels' own configuration";
            faults.push((
                Fault::new("must be told what the Sentinels call the primary").hint(hint),
                &mode.place,
            ));
        }
        ModeWord::Sentinel if any(|url| url.chooses_database || url.has_login) => {
            let hint = "end the URLs after the port; logins are username, password and sentinel_password";
            faults.push((Fault::new("the URL of a Sentinel is an address only").hint(hint), &servers.place));
        }
        ModeWord::Standalone | ModeWord::Cluster | ModeWord::Sentinel => {}
    }
    if mode.value != ModeWord::Standalone && any(|url| url.is_socket) {
        let fault = Fault::new("a socket in the file system is one server")
            .hint("write mode = \"standalone\", or addresses");
        faults.push((fault, &servers.place));
    }
    if any(|url| url.is_tls) && !urls.iter().all(|url| url.is_tls) {
        let fault = Fault::new("names some nodes with TLS and some without").hint("write rediss:// for all");
        faults.push((fault, &servers.place));
    }
    if mode.value != ModeWord::Sentinel {
        let keys = [section.master_name.as_ref().map(|name| &name.place), place_of(&section.sentinel_login)];
        let fault = || Fault::new("is about Sentinels").hint("write mode = \"sentinel\", or remove it");
        faults.extend(keys.into_iter().flatten().map(|place| (fault(), place)));
        if any(|url| url.has_login)
            && let Some(place) = place_of(&section.login)
        {
            let fault = Fault::new("stands beside a URL that holds a login").hint("keep one of them");
            faults.push((fault, place));
        }
    }
    let files = [&section.tls_ca_file, &section.tls_cert_file, &section.tls_key_file];
    if !any(|url| url.is_tls)
        && let Some(file) = files.into_iter().flatten().next()
    {
        let fault = Fault::new("is about TLS, and Redis is asked without").hint("write rediss:// in the URL");
        faults.push((fault, &file.place));
    }
    let is_wrong = !faults.is_empty();
    faults.into_iter().for_each(|(fault, place)| context.notes.add(fault.at(place)));
    is_wrong
}

/// Where a login is written, if one is.
fn place_of(keys: &LoginKeys) -> Option<&Place> {
    let LoginKeys { username, password, password_file } = keys;
    let username = username.as_ref().map(|username| &username.place);
    let password = password.as_ref().map(|password| &password.place);
    username.or(password).or(password_file.as_ref().map(|file| &file.place))
}
