//! `tollgate explain`: what would apply to a request, without sending or charging it.

use std::net::{IpAddr, Ipv4Addr};

use actix_web::http::Method;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use clap::Args;
use tollgate::config::StoreKind;
use tollgate::identify::{Caller, CredentialSource};
use tollgate::inbound::{CanonicalPath, Inbound};
use tollgate::limit::algorithm::Role;
use tollgate::limit::{Enforcement, Rule, Scope, draw};
use tollgate::plan::{Cost, Policy};

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
        say(format_args!("plan     {}", caller.plan));
        let offer = policy.offer(&caller.plan, position);
        // As in the gate: a key might help whoever has shown none.
        let status = if caller.account.is_some() { 403 } else { 401 };
        let excluded =
            || Usage(format!("The plan does not include the route: the answer would be {status}."));
        let offer = offer.ok_or_else(excluded)?;
        for rule in &*offer.rules {
            say(format_args!("limit    {}: {}{}", rule.name, rule.promise(), part(rule, &caller)));
            if let Some(prefix) = &prefix {
                let owner = if rule.scope == Scope::Pool { &*offer.pool } else { &*caller.id };
                let key = rule.key(caller.key.as_deref().unwrap_or_default());
                say(format_args!("         key {prefix}:{{{owner}}}:{key}"));
            }
        }
        if offer.rules.is_empty() {
            say("limit    none: every request passes");
        }
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

/// Whom a limit counts, and whether it refuses this caller.
fn part(rule: &Rule, caller: &Caller) -> String {
    let scope = match &rule.scope {
        Scope::Plan | Scope::Route(_) => "",
        Scope::Key => ", for this key alone",
        Scope::Pool => ", for everybody on the route together",
    };
    let enforced = match (rule.enforcement, rule.role(draw(&caller.id))) {
        (Enforcement::On, _) => "",
        (Enforcement::Percent(percent), Role::Enforced) => {
            return format!("{scope} (enforced for {percent} % of the callers, this one included)");
        }
        (Enforcement::Percent(percent), _) => {
            return format!("{scope} (enforced for {percent} % of the callers, and not for this one)");
        }
        (Enforcement::Shadow, _) => " (only watches)",
        (Enforcement::Candidate, _) => " (a candidate: only watches)",
    };
    format!("{scope}{enforced}")
}

fn refused(reason: &dyn std::fmt::Display) -> Usage {
    Usage(format!("Such a request would be refused: {reason}."))
}
