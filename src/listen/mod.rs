//! Where requests come in, and how a refusal looks on the wire.
//!
//! [`socket`] binds the listeners. [`check`] says what a request's head may not contain. [`reply`] is the only place that
//! chooses a status code for a refusal.
//!
//! Deliberately not here: connections and their timers, which are the library's; [`gateway`](crate::gateway) sets them.

pub mod check;
pub mod reply;
pub mod request_id;
pub mod socket;
