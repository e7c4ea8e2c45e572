//! Many calls at the same moment, and calls for as long as a test wants.

use std::collections::BTreeMap;
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

/// What became of the calls of clients that do as HTTP says.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// Calls that were answered, by status.
    pub(crate) answered: BTreeMap<u16, usize>,
    /// Answers that told the client to go.
    pub(crate) told_to_go: usize,
    /// Calls without an answer, and connections that could not be made: why.
    pub(crate) failed: Vec<String>,
    /// The longest time from the wish to call to the answer, a new connection included.
    pub(crate) longest: Duration,
}

impl Calls {
    fn add(&mut self, other: Self) {
        for (status, count) in other.answered {
            *self.answered.entry(status).or_default() += count;
        }
        self.told_to_go += other.told_to_go;
        self.failed.extend(other.failed);
        self.longest = self.longest.max(other.longest);
    }
}

/// As [`under_load`], for gateways that come and go: each client keeps its connection until it is closed or an answer says that it
/// will be, and then turns to the next of `addresses` that takes it.
pub(crate) fn while_they_come_and_go<T>(
    addresses: &[SocketAddr],
    clients: usize,
    pause: Duration,
    request: &Request,
    during: impl FnOnce() -> T,
) -> (Calls, T) {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..clients)
            .map(|number| {
                let over = &over;
                scope.spawn(move || {
                    let mut client = Client { addresses, next: number, connection: None };
                    let mut calls = Calls::default();
                    while !over.load(Ordering::Relaxed) {
                        client.call(request, &mut calls);
                        thread::sleep(pause);
                    }
                    calls
                })
            })
            .collect();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(during));
        over.store(true, Ordering::Relaxed);
        let mut calls = Calls::default();
        threads.into_iter().for_each(|thread| calls.add(thread.join().unwrap()));
        match outcome {
            Ok(value) => (calls, value),
            Err(failure) => std::panic::resume_unwind(failure),
        }
    })
}

struct Client<'a> {
    addresses: &'a [SocketAddr],
    next: usize,
    connection: Option<Connection>,
}

impl Client<'_> {
    fn call(&mut self, request: &Request, calls: &mut Calls) {
        let begun = Instant::now();
        match self.connect().and_then(|mut connection| Ok((request.try_on(&mut connection)?, connection))) {
            Ok((answer, connection)) => {
                *calls.answered.entry(answer.status).or_default() += 1;
                if answer.closes() {
                    calls.told_to_go += 1;
                } else {
                    self.connection = Some(connection);
                }
            }
            Err(error) => calls.failed.push(error.to_string()),
        }
        calls.longest = calls.longest.max(begun.elapsed());
    }

    /// The connection that was kept, or a new one: to the next address, or the one behind it where that refuses.
    fn connect(&mut self) -> std::io::Result<Connection> {
        if let Some(mut kept) = self.connection.take()
            && !kept.has_ended()
        {
            return Ok(kept);
        }
        let mut outcome = Err(std::io::Error::other("no address"));
        for _ in self.addresses {
            self.next += 1;
            outcome = Connection::try_open(self.addresses[self.next % self.addresses.len()]);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }
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
