//! From what is written to what works. The only validation: everything behind it may rely on what it lets through.
//!
//! Each part resolves to `None` when something in it is a mistake; the mistake is noted, and the other parts go on.

mod identity;
mod plans;
mod routes;
mod settings;
mod store;

use super::files::Files;
use super::mistakes::{Fault, Notes};
use super::raw::Raw;
use super::reader::Written;
use super::settings::Settings;
use super::sources::Purpose;
use crate::inbound::PathRules;
use crate::plan::PolicyParts;

/// What the checks of all parts need.
pub(super) struct Context<'a> {
    pub(super) notes: &'a Notes,
    /// Reads what the configuration names.
    pub(super) files: &'a Files,
    pub(super) purpose: Purpose,
    /// Whether a file could not be read: names it may hold are not missed then.
    pub(super) incomplete: bool,
    /// The names of the listeners that the process was started with, if there are any.
    pub(super) handed_over: Option<Vec<String>>,
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
    plans::check_names(raw, context);
    let keys = identity::keys(&raw.keys, &raw.accounts, &plan_names, context);
    let credentials = identity::credentials(&raw.identity, context);
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
        client_addresses: identity::client_addresses(&raw.identity)?,
        path_rules: PathRules { encoded_slashes: raw.server.encoded_slashes.as_ref()?.value },
        on_failure: raw.store.on_failure.as_ref()?.value,
    };
    Some((settings?, policy))
}
