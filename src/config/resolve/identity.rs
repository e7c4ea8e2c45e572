//! Who is calling: keys, where credentials stand, whose word about addresses counts.

use std::collections::HashMap;

use super::Context;
use crate::config::mistakes::Fault;
use crate::config::raw::{AccountSection, CredentialSection, IdentitySection, KeySection};
use crate::identify::{ClientAddresses, CredentialSource, KeyEntry, KeyTable};

pub(super) fn client_addresses(identity: &IdentitySection) -> Option<ClientAddresses> {
    let proxies = identity.trusted_proxies.as_ref()?.value.iter();
    Some(ClientAddresses {
        trusted_proxies: proxies.map(|proxy| proxy.value).collect(),
        ipv6_prefix: u8::try_from(identity.ipv6_prefix.as_ref()?.value).ok()?,
    })
}

pub(super) fn keys(
    sections: &[KeySection],
    accounts: &[AccountSection],
    plan_names: &[&str],
    context: &Context<'_>,
) -> KeyTable {
    let anchors = anchors(sections, accounts, context);
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
        let anchor_day = anchors.get(account.value.as_str()).copied().unwrap_or(1);
        let (account, plan) = (account.value.as_str().into(), plan.value.as_str().into());
        let entry = KeyEntry::new(section.name.as_str().into(), account, plan).anchored(anchor_day);
        table.insert(hash.value, entry);
    }
    table
}

/// The days on which the months of accounts begin.
fn anchors<'a>(
    keys: &[KeySection],
    accounts: &'a [AccountSection],
    context: &Context<'_>,
) -> HashMap<&'a str, u8> {
    let mut owners: Vec<&str> =
        keys.iter().filter_map(|key| key.account.as_ref()).map(|account| account.value.as_str()).collect();
    owners.sort_unstable();
    owners.dedup();
    let mut anchors = HashMap::new();
    for section in accounts {
        let known = context.exists("key of an account", &section.account, &owners);
        let day = section.anchor_day.as_ref().and_then(|day| u8::try_from(day.value).ok());
        if let Some(day) = day.filter(|_| known) {
            anchors.insert(section.account.value.as_str(), day);
        }
    }
    anchors
}

pub(super) fn credentials(identity: &IdentitySection, context: &Context<'_>) -> Vec<CredentialSource> {
    let Some(list) = &identity.credentials else {
        return Vec::new();
    };
    if list.value.is_empty() && identity.anonymous.is_none() {
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
