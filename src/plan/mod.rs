//! What they have bought: routes, plans, and the immutable [`Policy`] that one request sees from start to end.

mod cost;
mod policy;
mod route;

pub use cost::{Cost, FreeAnswers, Settled};
pub use policy::{Offer, Plan, Policy, PolicyParts, Priority, Unbuildable};
pub use route::{Conflict, Methods, MethodsError, Missing, Pattern, PatternError, Route, RouteTable};
