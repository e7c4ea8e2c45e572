//! The request as the rooms see it: method, canonical path, headers, peer.
//!
//! Nothing here knows actix's request type, so a test builds one by hand.

pub mod path;

use std::fmt;
use std::net::IpAddr;

use actix_web::http::Method;
use actix_web::http::header::HeaderMap;

pub use path::{CanonicalPath, PathError, PathRules, check_query};

/// The methods that are served, in the order in which `Allow` lists them. Case matters: `get` is none of them.
pub static METHODS: [Method; 7] =
    [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::OPTIONS];

/// One request, as far as identity, plan and limit need to know it.
pub struct Inbound<'a> {
    /// The method, already known to be one of [`METHODS`].
    pub method: &'a Method,
    /// The one path that serves route matching, counters and the upstream.
    pub path: CanonicalPath<'a>,
    /// The header fields as received.
    pub headers: &'a HeaderMap,
    /// The address at the other end of the socket.
    pub peer: IpAddr,
}

/// Without the header fields: they hold credentials.
impl fmt::Debug for Inbound<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbound")
            .field("method", self.method)
            .field("path", &self.path)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}
