//! The proxy on real sockets: what reaches the backend, what reaches the client, and what happens when either breaks.
//! The names in brackets are those of the project's collection of bug cases.

mod failing;
mod forwarding;
mod streaming;
mod support;
