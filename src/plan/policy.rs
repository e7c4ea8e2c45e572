//! The immutable snapshot that one request sees from start to end, and that a reload swaps.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use super::route::{Route, RouteTable};
use crate::identify::{ClientAddresses, CredentialSource, KeyTable};
use crate::inbound::PathRules;
use crate::limit::{OnFailure, Rule};

/// A row of the tier table: what its callers may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// Limits over all routes.
    pub limits: Vec<Rule>,
    /// Further limits of single routes, by route name.
    pub routes: HashMap<Arc<str>, Vec<Rule>>,
    /// What to do when the store cannot answer; `None`: as the store says.
    pub on_failure: Option<OnFailure>,
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
    /// The plan's name.
    pub plan: Arc<str>,
    /// The route.
    pub route: Arc<Route>,
    /// All limits that apply, the plan's own first.
    pub rules: Arc<[Rule]>,
    /// Units one request takes from each.
    pub cost: NonZeroU64,
    /// What to do when the store cannot answer.
    pub on_failure: OnFailure,
}
