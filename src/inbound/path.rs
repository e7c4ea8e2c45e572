//! One canonical path for route, counter and upstream.
//!
//! STUB: see the helper's brief.

use std::borrow::Cow;

/// What the operator allows in a path.
#[derive(Debug, Clone, Copy, Default)]
pub struct PathRules {
    /// Let `%2F` and `%5C` through, as bytes of a segment. Off by default: backends disagree on what they mean.
    pub encoded_slashes: bool,
}

/// A path in its one normal form. Starts with `/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CanonicalPath<'a>(Cow<'a, str>);

/// Why a path is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Does not start with a slash.
    #[error("the path must start with a slash")]
    NotAbsolute,
}

impl<'a> CanonicalPath<'a> {
    /// The normal form of `raw`, a request target's path without query.
    pub fn parse(raw: &'a str, rules: PathRules) -> Result<Self, PathError> {
        let _ = rules;
        Ok(Self(Cow::Borrowed(raw)))
    }

    /// The canonical bytes: what is matched and what is sent upstream.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
