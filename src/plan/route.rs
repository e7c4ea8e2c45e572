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

impl Pattern {
    /// STUB.
    pub fn parse(path: &str) -> Result<Self, PatternError> {
        if !path.starts_with('/') {
            return Err(PatternError::NotAbsolute);
        }
        Ok(Self(path.to_owned()))
    }

    /// STUB. Whether both match exactly the same paths, whatever their segments are called.
    #[must_use]
    pub fn same_paths(&self, other: &Self) -> bool {
        self == other
    }
}

/// Why a list of methods is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MethodsError {
    /// One is not a method.
    #[error("\"{0}\" is not a method")]
    Unknown(String),
}

impl Methods {
    /// STUB.
    pub fn parse(names: &[String]) -> Result<Self, MethodsError> {
        let parse = |name: &String| {
            Method::from_bytes(name.as_bytes()).map_err(|_| MethodsError::Unknown(name.clone()))
        };
        names.iter().map(parse).collect::<Result<_, _>>().map(Self)
    }

    /// STUB.
    #[must_use]
    pub fn all() -> Self {
        Self(vec![Method::GET, Method::POST])
    }

    /// STUB. Whether a method is in both.
    #[must_use]
    pub fn overlap(&self, other: &Self) -> bool {
        self.0.iter().any(|method| other.0.contains(method))
    }
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
