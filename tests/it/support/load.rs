//! Many calls at the same moment, and calls for as long as a test wants.

use std::net::SocketAddr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::client::{Connection, Request};

/// One answered call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// The status of the answer.
    pub(crate) status: u16,
    /// When the call was sent.
    pub(crate) sent: Instant,
    /// When its answer was complete.
    pub(crate) received: Instant,
}

impl Sample {
    /// How long the call took.
    pub(crate) fn duration(&self) -> Duration {
        self.received - self.sent
    }
}

/// Sends `request` `calls` times on each of the connections, all of which start together.
///
/// One list of samples per connection, in the order of `gateways`.
pub(crate) fn at_once(gateways: &[SocketAddr], calls: usize, request: &Request) -> Vec<Vec<Sample>> {
    let start = Barrier::new(gateways.len());
    thread::scope(|scope| {
        let threads: Vec<_> = gateways
            .iter()
            .map(|&address| {
                let start = &start;
                scope.spawn(move || {
                    let mut connection = Connection::open(address);
                    start.wait();
                    (0..calls).map(|_| sample(&mut connection, request)).collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Sends `request` over and over on `connections` connections for as long as `during` runs, with `pause` between calls.
pub(crate) fn under_load<T>(
    address: SocketAddr,
    connections: usize,
    pause: Duration,
    request: &Request,
    during: impl FnOnce() -> T,
) -> (Vec<Sample>, T) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..connections)
            .map(|_| {
                let over = &over;
                scope.spawn(move || {
                    let mut connection = Connection::open(address);
                    let mut samples = Vec::new();
                    while !over.load(Ordering::Relaxed) {
                        samples.push(sample(&mut connection, request));
                        thread::sleep(pause);
                    }
                    samples
                })
            })
            .collect();
        // The threads must end also when `during` fails, or the scope would wait for ever.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(during));
        over.store(true, Ordering::Relaxed);
        let samples = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        match outcome {
            Ok(value) => (samples, value),
            Err(failure) => std::panic::resume_unwind(failure),
        }
    })
}

/// One call on this connection, timed.
#[track_caller]
pub(crate) fn sample(connection: &mut Connection, request: &Request) -> Sample {
    let sent = Instant::now();
    let answer = request.on(connection);
    Sample { status: answer.status, sent, received: Instant::now() }
}

/// How many of these were answered with `status`.
pub(crate) fn count<'a>(samples: impl IntoIterator<Item = &'a Sample>, status: u16) -> usize {
    samples.into_iter().filter(|sample| sample.status == status).count()
}

/// Fails when any status is none of `allowed`.
#[track_caller]
pub(crate) fn only<'a>(samples: impl IntoIterator<Item = &'a Sample>, allowed: &[u16]) {
    for sample in samples {
        assert!(allowed.contains(&sample.status), "status {} after {:?}", sample.status, sample.duration());
    }
}
