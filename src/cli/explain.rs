//! `tollgate explain`: what would apply to a request, without sending or charging it.

use std::net::{IpAddr, Ipv4Addr};

use actix_web::http::Method;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use clap::Args;
use tollgate::config::StoreKind;
use tollgate::identify::CredentialSource;
use tollgate::inbound::{CanonicalPath, Inbound};
use tollgate::plan::Policy;

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
        say(format_args!("route    {} ({}), cost {}", route.name, route.pattern.as_str(), route.cost));
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
            say(format_args!("limit    {}: {}", rule.name, rule.promise()));
            if let Some(prefix) = &prefix {
                say(format_args!("         key {prefix}:{{{}}}:{}", caller.id, rule.key));
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

fn refused(reason: &dyn std::fmt::Display) -> Usage {
    Usage(format!("Such a request would be refused: {reason}."))
}
