//! On to the backend: one decided request goes out, one answer comes back, and both bodies flow as they come.
//!
//! * [`Upstreams`] holds the backends and one pool of connections per worker; [`Upstreams::forward`] sends a request.
//!   [`Backends`] are those of all workers, which are renewed together when the configuration changes, or when [`Names`]
//!   sees that a host name has moved.
//! * `headers` says which fields go on, in both directions. It is pure.
//! * `body` carries bytes with back-pressure, idle limits and a size limit.
//! * [`echo`] is the built-in backend of `tollgate demo`. It is no part of the proxy.
//!
//! What the backend answers is passed on as it is: status, every header line, every body byte. What the way itself
//! changes, because reqwest sits on it:
//!
//! * `'` in a query leaves as `%27`. The two are equivalent in a URL.
//! * A request without `Accept` leaves with `Accept: */*`, which means the same.
//!
//! Deliberately not here:
//!
//! * Status codes of failures. A [`Failure`] says what went wrong; `listen/reply.rs` chooses how that looks.
//! * Retries of requests. A target that refuses the *connection* is skipped, because nothing was sent yet. A request
//!   that was sent is never sent again: the backend may have acted on it.
//! * Redirects, decompression, caching, cookies, proxies from the environment: the answer is the client's to handle.
//! * `Via`: some backends stop compressing when they see it.
//! * Upgrades, trailers and HTTP/2.

mod body;
pub mod echo;
mod forward;
mod headers;
mod names;
mod upstream;

#[cfg(test)]
mod tests;

pub use body::AnswerFault;
pub use forward::{Answer, Failure, Outgoing};
pub use names::{Moves, Names};
pub use upstream::{Backends, BuildError, UpstreamSettings, Upstreams};
