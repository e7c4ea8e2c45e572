//! The harness: the real binary, a recording upstream, real Redis servers, and a client that changes nothing.
//!
//! Everything a test starts belongs to it and ends with it. Nothing here waits for a fixed time: [`eventually`] polls
//! against a deadline, and exact claims are made by what the answers themselves say.

pub(crate) mod backend;
mod certificates;
mod client;
mod config;
mod fake_clock;
pub(crate) mod fault;
mod fleet;
mod gateway;
pub(crate) mod load;
mod process;
mod prometheus;
mod redis;
pub(crate) mod source;
mod store;
pub(crate) mod tree;
mod wire;

use std::io::Write;
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

pub(crate) use backend::Backend;
pub(crate) use certificates::Certificates;
pub(crate) use client::{Answer, Connection, Request};
pub(crate) use config::{Config, sha256_hex};
pub(crate) use fake_clock::{SteppedClock, fake_clock, second_of_day};
pub(crate) use fault::{Fault, FaultProxy};
pub(crate) use fleet::{Fleet, Member, for_every_fleet};
pub(crate) use gateway::{Finished, Gateway, Unread, run, tollgate};
pub(crate) use prometheus::{Prometheus, Sample};
pub(crate) use redis::{Cluster, Redis, Watched, program as redis_program};
pub(crate) use store::{Store, for_every_store};
pub(crate) use wire::Ending;

/// Asks `probe` again and again until it has an answer; fails when `limit` has passed.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, limit: Duration, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(answer) = probe() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {limit:?} for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Sleeps until this moment; at once when it has passed.
pub(crate) fn sleep_until(moment: Instant) {
    thread::sleep(moment.saturating_duration_since(Instant::now()));
}

/// A port that was free a moment ago. Whoever takes it retries when it is gone.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// How often another port is tried when one was taken meanwhile.
const PORT_ATTEMPTS: usize = 20;

/// Tells whoever reads the output of a failing test.
fn say(text: &str) {
    // Through the handle and not by `eprintln!`: this also runs while a test unwinds, where a second panic aborts.
    writeln!(std::io::stderr(), "{text}").ok();
}
