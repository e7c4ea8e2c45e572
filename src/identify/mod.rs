//! Who is calling: from credentials and addresses to a [`Caller`].

mod client_address;

use std::collections::HashMap;
use std::sync::Arc;

pub use client_address::ClientAddresses;

/// Who a request counts against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The caller's part of a store key, already encoded: `acct.acme`, `net.203.0.113.9`.
    pub id: Arc<str>,
    /// The account, when a key said which; for logs.
    pub account: Option<Arc<str>>,
    /// The name of the plan that applies.
    pub plan: Arc<str>,
}

/// Where a credential may stand. Tried in the order of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialSource {
    /// An API key in a header field of this (lower-case) name.
    KeyHeader(actix_web::http::header::HeaderName),
    /// An API key as `Authorization: Bearer KEY`.
    KeyBearer,
}

/// An API key as the configuration knows it: by its hash only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// The id of the key: its name in the `keys` table.
    pub id: Arc<str>,
    /// The account that owns it.
    pub account: Arc<str>,
    /// The plan of the account.
    pub plan: Arc<str>,
}

/// All keys, by the SHA-256 of the whole key text.
pub type KeyTable = HashMap<[u8; 32], KeyEntry>;
