//! From what is written to what works. The only validation: everything behind it may rely on what it lets through.
//!
//! Each part resolves to `None` when something in it is a mistake; the mistake is noted, and the other parts go on.

mod plans;
mod routes;
mod settings;

use std::collections::HashMap;
use std::sync::Arc;

use super::mistakes::{Fault, Notes};
use super::raw::{CredentialSection, IdentitySection, KeySection, Raw};
use super::reader::Written;
use super::settings::Settings;
use super::sources::Purpose;
use crate::identify::{ClientAddresses, CredentialSource, KeyEntry, KeyTable};
use crate::inbound::PathRules;
use crate::plan::PolicyParts;

/// What the checks of all parts need.
pub(super) struct Context<'a> {
    pub(super) notes: &'a Notes,
    pub(super) purpose: Purpose,
    /// Whether a file could not be read: names it may hold are not missed then.
    pub(super) incomplete: bool,
}

impl Context<'_> {
    fn note(&self, fault: Fault, written: &Written<impl Sized>) {
        self.notes.add(fault.at(&written.place));
    }

    /// Whether `written` is one of `names`; if not, notes that there is no such `what`.
    fn exists(&self, what: &str, written: &Written<String>, names: &[&str]) -> bool {
        let name = written.value.as_str();
        if names.contains(&name) || self.incomplete {
            return names.contains(&name);
        }
        let fault = Fault::new(format!("there is no {what} {name:?}")).meant(name, names.iter().copied());
        self.note(fault, written);
        false
    }
}

/// Everything, or `None` and at least one mistake in the notes.
pub(super) fn resolve(raw: &Raw, context: &Context<'_>) -> Option<(Settings, PolicyParts)> {
    let plan_names: Vec<&str> = raw.plans.iter().map(|plan| plan.name.as_str()).collect();
    let upstream_names: Vec<&str> = raw.upstreams.iter().map(|upstream| upstream.name.as_str()).collect();

    let settings = settings::resolve(raw, context);
    let plans = plans::resolve(raw, context);
    let routes = routes::resolve(raw, &plan_names, &upstream_names, context);
    routes::check_costs(raw, &plans, &routes, context);
    let keys = keys(&raw.keys, &plan_names, context);
    let credentials = credentials(raw, context);
    let anonymous = raw.identity.anonymous.as_ref();
    if let Some(plan) = anonymous {
        context.exists("plan", plan, &plan_names);
    }

    let policy = PolicyParts {
        routes,
        plans,
        keys,
        credentials,
        anonymous: anonymous.map(|plan| plan.value.as_str().into()),
        client_addresses: client_addresses(&raw.identity)?,
        path_rules: PathRules { encoded_slashes: raw.server.encoded_slashes.as_ref()?.value },
        on_failure: raw.store.on_failure.as_ref()?.value,
    };
    Some((settings?, policy))
}

fn client_addresses(identity: &IdentitySection) -> Option<ClientAddresses> {
    let proxies = identity.trusted_proxies.as_ref()?.value.iter();
    Some(ClientAddresses {
        trusted_proxies: proxies.map(|proxy| proxy.value).collect(),
        ipv6_prefix: u8::try_from(identity.ipv6_prefix.as_ref()?.value).ok()?,
    })
}

fn keys(sections: &[KeySection], plan_names: &[&str], context: &Context<'_>) -> KeyTable {
    let mut table = KeyTable::new();
    let mut owners: HashMap<[u8; 32], &str> = HashMap::new();
    for section in sections {
        if let Some(plan) = &section.plan {
            context.exists("plan", plan, plan_names);
        }
        let Some(hash) = &section.hash else { continue };
        if let Some(owner) = owners.insert(hash.value, &section.name) {
            context.note(Fault::new(format!("is the hash of keys.{owner} too")), hash);
        }
        let (Some(account), Some(plan)) = (&section.account, &section.plan) else {
            continue;
        };
        let (account, plan) = (account.value.as_str().into(), plan.value.as_str().into());
        let entry = KeyEntry::new(section.name.as_str().into(), account, plan);
        table.insert(hash.value, entry);
    }
    table
}

fn credentials(raw: &Raw, context: &Context<'_>) -> Vec<CredentialSource> {
    let Some(list) = &raw.identity.credentials else {
        return Vec::new();
    };
    if list.value.is_empty() && raw.identity.anonymous.is_none() {
        let fault =
            Fault::new("no credential is read and identity.anonymous names no plan: nobody could call");
        context.notes.add(fault.at(&list.place));
    }
    let mut sources = Vec::new();
    for section in &list.value {
        let Some(source) = credential(section, context) else {
            continue;
        };
        if sources.contains(&source) {
            context.notes.add(Fault::new("is in the list twice").at(&section.place));
        }
        sources.push(source);
    }
    sources
}

fn credential(section: &CredentialSection, context: &Context<'_>) -> Option<CredentialSource> {
    let bearer = section.bearer.as_ref().is_some_and(|bearer| bearer.value);
    match (&section.header, bearer) {
        _ if section.mistaken => None,
        (Some(header), false) => Some(CredentialSource::KeyHeader(header.value.clone())),
        (None, true) => Some(CredentialSource::KeyBearer),
        (Some(_), true) => {
            let fault = Fault::new("has both a header and bearer = true").hint("write two entries");
            context.notes.add(fault.at(&section.place));
            None
        }
        (None, false) => {
            let fault = Fault::new("says no place").hint("write header = \"x-api-key\" or bearer = true");
            context.notes.add(fault.at(&section.place));
            None
        }
    }
}

fn shared(names: &[Written<String>]) -> Vec<Arc<str>> {
    names.iter().map(|name| name.value.as_str().into()).collect()
}
