//! Everything that decides about a request: immutable, so that one request sees one policy from start to end.

use std::collections::HashMap;
use std::sync::Arc;

use actix_web::http::header::HeaderValue;

use super::route::{Conflict, Missing, Route, RouteTable};
use crate::identify::{ClientAddresses, CredentialSource, Identity, KeyTable};
use crate::inbound::{Inbound, PathRules};
use crate::limit::{OnFailure, Rule, draw, headers};

/// Whose requests are refused first when the gateway has too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Priority {
    /// First.
    Low,
    /// In between.
    #[default]
    Normal,
    /// Last.
    High,
}

/// A row of the tier table: what its callers may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// Limits over all routes, those of single keys and candidates included.
    pub limits: Vec<Rule>,
    /// Further limits of single routes, by route name.
    pub routes: HashMap<Arc<str>, Vec<Rule>>,
    /// What to do when the store cannot answer; `None`: as the store says.
    pub on_failure: Option<OnFailure>,
    /// Whether its callers are refused first when the gateway has too much to do.
    pub priority: Priority,
}

/// What [`Policy::new`] is made of. The configuration has checked that all names exist.
#[derive(Debug)]
pub struct PolicyParts {
    /// All routes.
    pub routes: Vec<Route>,
    /// The tier table.
    pub plans: Vec<Plan>,
    /// All API keys, by hash.
    pub keys: KeyTable,
    /// Where credentials may stand, in the order they are tried.
    pub credentials: Vec<CredentialSource>,
    /// Plan of callers without a credential; `None`: they are refused with 401.
    pub anonymous: Option<Arc<str>>,
    /// How a client's address is found.
    pub client_addresses: ClientAddresses,
    /// What a path may contain.
    pub path_rules: PathRules,
    /// What to do when the store cannot answer and neither plan nor route says.
    pub on_failure: OnFailure,
}

/// One plan on one route: everything that is known about such a request before it comes.
#[derive(Debug)]
pub struct Offer {
    /// The route.
    pub route: Arc<Route>,
    /// All limits that apply: the plan's own first, those of the route's pool last.
    pub rules: Arc<[Rule]>,
    /// What stands in the caller's place in the keys of the pool.
    pub pool: Box<str>,
    /// What to do when the store cannot answer.
    pub on_failure: OnFailure,
    /// Whether such requests are refused first when the gateway has too much to do.
    pub priority: Priority,
    /// The `RateLimit-Policy` field; `None` without limits, or where it depends on the caller.
    policy_field: Option<HeaderValue>,
}

impl Offer {
    /// The `RateLimit-Policy` field for the caller of this id; `None` without limits that are enforced.
    #[must_use]
    pub fn policy_field(&self, caller: &str) -> Option<HeaderValue> {
        if self.rules.iter().any(Rule::draws) {
            policy_field(&self.rules, draw(caller))
        } else {
            self.policy_field.clone()
        }
    }
}

fn policy_field(rules: &[Rule], draw: u8) -> Option<HeaderValue> {
    HeaderValue::from_str(&headers::policy(rules, draw)).ok().filter(|field| !field.is_empty())
}

/// Why a policy cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unbuildable(#[from] Conflict);

/// Everything that decides requests. Never changes.
#[derive(Debug)]
pub struct Policy {
    /// Which route a request takes.
    pub routes: RouteTable,
    /// Who is calling.
    pub identity: Identity,
    /// What a path may contain.
    pub path_rules: PathRules,
    plans: HashMap<Arc<str>, usize>,
    /// By plan, then by route; `None` where the plan does not include the route.
    offers: Vec<Option<Arc<Offer>>>,
}

impl Policy {
    /// The policy of these parts.
    ///
    /// # Errors
    /// When two routes would claim the same request.
    pub fn new(parts: PolicyParts) -> Result<Self, Unbuildable> {
        let routes = RouteTable::new(parts.routes)?;
        let offer = |(plan, route)| offer(plan, route, parts.on_failure);
        let offers = parts
            .plans
            .iter()
            .flat_map(|plan| routes.routes().iter().map(move |route| (plan, route)))
            .map(offer)
            .collect();
        let plans =
            parts.plans.iter().enumerate().map(|(index, plan)| (Arc::clone(&plan.name), index)).collect();
        let identity = Identity::new(parts.keys, parts.credentials, parts.anonymous, parts.client_addresses);
        Ok(Self { routes, identity, path_rules: parts.path_rules, plans, offers })
    }

    /// The route of a request, and its position in the table.
    ///
    /// # Errors
    /// When no route matches, or none with this method.
    pub fn route(&self, inbound: &Inbound<'_>) -> Result<(usize, &Arc<Route>), Missing> {
        let position = self.routes.position(inbound.method, &inbound.path)?;
        Ok((position, &self.routes.routes()[position]))
    }

    /// What `plan` says about the route at `position` of the table; `None` if it does not include the route.
    #[must_use]
    pub fn offer(&self, plan: &str, position: usize) -> Option<&Arc<Offer>> {
        let plan = self.plans.get(plan)?;
        self.offers.get(plan * self.routes.routes().len() + position)?.as_ref()
    }
}

fn offer(plan: &Plan, route: &Arc<Route>, fallback: OnFailure) -> Option<Arc<Offer>> {
    if route.plans.as_ref().is_some_and(|plans| !plans.contains(&plan.name)) {
        return None;
    }
    let own = plan.routes.get(&route.name).into_iter().flatten();
    let rules: Arc<[Rule]> = plan.limits.iter().chain(own).chain(&route.pool).cloned().collect();
    Some(Arc::new(Offer {
        route: Arc::clone(route),
        pool: route.pool_id().into(),
        policy_field: policy_field(&rules, 0),
        on_failure: route.on_failure.or(plan.on_failure).unwrap_or(fallback),
        priority: plan.priority,
        rules,
    }))
}
