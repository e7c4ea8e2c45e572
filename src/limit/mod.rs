//! Whether they may pass: limits, what they answer, and where their counters live.
//!
//! [`Limiter::admit`] is the one verb. It turns a [`Charge`](store::Charge) into a [`Pass`], or into the reason why not.
//! The arithmetic is in [`algorithm`], pure; [`store`] holds state and time and does no policy.

pub mod algorithm;
mod calendar;
mod common;
mod decision;
pub mod headers;
mod limiter;
mod local;
#[cfg(test)]
pub(crate) mod oracle;
mod random;
mod remote;
mod rule;
pub mod store;
mod stripes;

pub use calendar::{Anchor, Boundaries, Calendar, Unit, UnknownZone};
pub use common::Common;
pub use decision::{Decision, Source, States};
pub use limiter::{Asked, Limiter, Pass, Receipts, Ruling, Slots};
pub use rule::{Enforcement, OnFailure, Rule, Scope, draw};
