//! Tollgate: the limit engine, the actix-web middleware around it, and the gateway built from both.
//!
//! The rooms, in the order a request walks through them:
//!
//! | room | question |
//! |---|---|
//! | [`listen`] | where do requests come in, and how does a refusal look on the wire? |
//! | [`identify`] | who is calling? |
//! | [`plan`] | what have they bought? |
//! | [`limit`] | may they pass? |
//! | [`proxy`] | where does the request go? |
//! | [`observe`] | what happened? |
//!
//! [`gate`] is the front page: one request from caller to [`Pass`](limit::Pass) in about twenty lines.
//! [`gateway`] assembles the rooms into a running server; `public` is its side for clients. [`config`], [`reload`] and [`admin`] are side rooms.
//! [`inbound`], [`record`], [`snapshot`] and [`clock`] are what the rooms hand to each other; `file` reads what an operator names.

pub mod admin;
pub mod clock;
pub mod config;
mod file;
pub mod gate;
pub mod gateway;
pub mod identify;
pub mod inbound;
pub mod limit;
pub mod listen;
pub mod observe;
pub mod plan;
pub mod proxy;
mod public;
pub mod record;
pub mod reload;
pub mod snapshot;
