//! Route patterns and matching. STUB.
use std::num::NonZeroU64;
use std::sync::Arc;

use actix_web::http::Method;

use crate::limit::OnFailure;

/// Which methods a route serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Methods(pub Vec<Method>);

/// A parsed path pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(String);

/// Why a pattern is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Does not start with a slash.
    #[error("a path starts with \"/\"")]
    NotAbsolute,
}

/// One route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// What it matches.
    pub pattern: Pattern,
    /// Methods it serves.
    pub methods: Methods,
    /// Units a request takes.
    pub cost: NonZeroU64,
    /// Upstream name; `None` only when Tollgate runs as a middleware.
    pub upstream: Option<Arc<str>>,
    /// Plans that include the route; `None`: all of them.
    pub plans: Option<Vec<Arc<str>>>,
    /// What to do when the store cannot answer; `None`: as the plan or the store says.
    pub on_failure: Option<OnFailure>,
}

/// All routes.
#[derive(Debug)]
pub struct RouteTable;
