//! Where requests come in, and how a refusal looks on the wire.

pub mod check;
