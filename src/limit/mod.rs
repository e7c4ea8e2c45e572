//! Whether they may pass: limits, what they answer, and where their counters live.

pub mod algorithm;
mod decision;
mod pass;
mod rule;

pub use decision::{Decision, LimitState, Source, States, Verdict};
pub use pass::Pass;
pub use rule::{Algorithm, OnFailure, Rule, Scope};
