//! Where requests come in, and how a refusal looks on the wire.
//!
//! [`socket`] has the listeners, bound or handed over. [`turns`] lets the requests of a connection in one by one, and [`drain`] ends
//! connections. [`check`] says what a request's
//! head may not contain, and [`overload`] how many there may be at once. [`reply`] is the only place that chooses a status code for a refusal.

pub mod check;
pub mod drain;
pub mod overload;
pub mod reply;
pub mod request_id;
pub mod socket;
pub mod turns;
