//! `tollgate explain`: what would apply to a request, without sending or charging it.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr};

use actix_web::http::Method;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use clap::Args;
use tollgate::config::StoreKind;
use tollgate::identify::{Caller, CredentialSource};
use tollgate::inbound::{CanonicalPath, Inbound};
use tollgate::limit::algorithm::Role;
use tollgate::limit::{Enforcement, Rule, Scope, draw};
use tollgate::plan::{Cost, Offer, Policy};

use super::{ConfigArgs, Usage, say};

#[derive(Debug, Args)]
pub(super) struct Explain {
    #[command(flatten)]
    config: ConfigArgs,
    /// The path of the request; a query behind it is passed over, as it decides nothing
    #[arg(long)]
    path: String,
    /// The method of the request
    #[arg(long, default_value = "GET")]
    method: Method,
    /// The API key that the caller shows
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// The address that the caller has
    #[arg(long, value_name = "ADDR", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    ip: IpAddr,
}

impl Explain {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let loaded = self.config.load()?;
        let prefix = match &loaded.settings.store.kind {
            StoreKind::Redis(redis) => Some(redis.prefix.clone()),
            StoreKind::Memory => None,
        };
        let headers = self.headers(&loaded.policy.credentials)?;
        let policy = Policy::new(loaded.policy).map_err(|error| Usage(error.to_string()))?;
        let path = CanonicalPath::parse(self.path.split('?').next().unwrap_or_default(), policy.path_rules)
            .map_err(|error| refused(&error))?;
        say(format_args!("path     {}", path.as_str()));
        let inbound = Inbound { method: &self.method, path, headers: &headers, peer: self.ip };
        let (position, route) = policy.route(&inbound).map_err(|error| refused(&error))?;
        let cost = route.cost.of(&self.method);
        say(format_args!("route    {} ({}), cost {cost}", route.name, route.pattern.as_str()));
        for line in settling(&route.cost) {
            say(format_args!("         {line}"));
        }
        let (caller, _) = policy.identity.caller(&inbound).map_err(|error| refused(&error))?;
        say(format_args!("caller   {}", caller.id));
        if caller.anchor_day != 1 {
            say(format_args!("         its months begin on day {}", caller.anchor_day));
        }
        say(format_args!("plan     {}", caller.plan));
        let offer = policy.offer(&caller.plan, position);
        // As in the gate: a key might help whoever has shown none.
        let status = if caller.account.is_some() { 403 } else { 401 };
        let excluded =
            || Usage(format!("The plan does not include the route: the answer would be {status}."));
        let offer = offer.ok_or_else(excluded)?;
        say_limits(offer, &caller, prefix.as_deref());
        Ok(())
    }

    /// The key where the first credential of the configuration is looked for.
    fn headers(&self, credentials: &[CredentialSource]) -> anyhow::Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        let Some(key) = &self.key else { return Ok(headers) };
        let bearer = (HeaderName::from_static("authorization"), format!("Bearer {key}"));
        let (name, value) = match credentials.first() {
            Some(CredentialSource::KeyHeader(name)) => (name.clone(), key.clone()),
            Some(CredentialSource::KeyBearer) | None => bearer,
        };
        let value =
            HeaderValue::from_str(&value).map_err(|_| Usage("This key cannot stand in a header.".into()))?;
        headers.insert(name, value);
        Ok(headers)
    }
}

/// What the answer may change about the cost.
fn settling(cost: &Cost) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(field) = &cost.from {
        lines.push(format!("settled at what {field} of the answer says"));
    }
    if cost.free.server_errors {
        lines.push("given back when a 5xx answers".to_owned());
    }
    if !cost.free.statuses.is_empty() {
        let statuses: Vec<String> = cost.free.statuses.iter().map(ToString::to_string).collect();
        lines.push(format!("given back when {} answers", statuses.join(" or ")));
    }
    lines
}

/// The limits that apply to the caller and, with this prefix, their keys in Redis.
fn say_limits(offer: &Offer, caller: &Caller, prefix: Option<&str>) {
    for rule in &*offer.rules {
        let (scope, enforced) = (scope(rule), enforced(rule, caller));
        say(format_args!("limit    {}: {}{scope}{enforced}", rule.name, rule.promise()));
        if let Some(prefix) = prefix {
            let owner = if rule.scope == Scope::Pool { &*offer.pool } else { &*caller.id };
            let key = rule.key(caller.key.as_deref().unwrap_or_default());
            say(format_args!("         key {prefix}:{{{owner}}}:{key}"));
        }
    }
    if offer.rules.is_empty() {
        say("limit    none: every request passes");
    }
}

/// Whom a limit counts, where that is not the caller.
fn scope(rule: &Rule) -> &'static str {
    match &rule.scope {
        Scope::Plan | Scope::Route(_) => "",
        Scope::Key => ", for this key alone",
        Scope::Pool => ", for everybody on the route together",
    }
}

/// Whether a limit refuses this caller, where that does not go without saying.
fn enforced(rule: &Rule, caller: &Caller) -> Cow<'static, str> {
    match rule.enforcement {
        Enforcement::On => "".into(),
        Enforcement::Shadow => " (only watches)".into(),
        Enforcement::Candidate => " (a candidate: only watches)".into(),
        Enforcement::Percent(percent) => {
            let is_enforced = rule.role(draw(&caller.id)) == Role::Enforced;
            let this_one = if is_enforced { "this one included" } else { "and not for this one" };
            format!(" (enforced for {percent} % of the callers, {this_one})").into()
        }
    }
}

fn refused(reason: &dyn std::fmt::Display) -> Usage {
    Usage(format!("Such a request would be refused: {reason}."))
}
