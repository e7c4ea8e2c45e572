//! One JSON line for each request, on standard output. Never a credential, never the query (which may hold one).
//!
//! Lines are gathered per worker and written by a thread of their own, so that a slow reader of the log never holds up
//! a request: when its queue is full, lines are dropped.

use std::cell::RefCell;
use std::io::Write;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

use super::{Exchange, SettlementKind};

/// A worker hands its lines over once it holds so many bytes,
const BATCH_BYTES: usize = 16 * 1024;

/// or after this time.
const BATCH_TIME: Duration = Duration::from_millis(100);

/// Batches that may wait for the writing thread: 16 MiB at most.
const BATCHES_MAX: usize = 1_024;

/// The thread that writes. Dropping it writes what is left.
#[derive(Debug)]
pub struct AccessLogWriter {
    writer: NonBlocking,
    _thread: WorkerGuard,
}

impl AccessLogWriter {
    /// A thread that writes to `output`.
    pub fn new(output: impl Write + Send + 'static) -> Self {
        let (writer, thread) =
            NonBlockingBuilder::default().buffered_lines_limit(BATCHES_MAX).lossy(true).finish(output);
        Self { writer, _thread: thread }
    }

    /// One worker's end of the log.
    #[must_use]
    pub fn handle(&self) -> AccessLog {
        AccessLog(Rc::new(RefCell::new(Batch {
            lines: Vec::new(),
            writer: self.writer.clone(),
            flushing: None,
        })))
    }
}

/// One worker's end of the log.
#[derive(Debug, Clone)]
pub struct AccessLog(Rc<RefCell<Batch>>);

#[derive(Debug)]
struct Batch {
    lines: Vec<u8>,
    writer: NonBlocking,
    /// The task that will hand these lines over.
    flushing: Option<tokio::task::JoinHandle<()>>,
}

#[derive(Serialize)]
struct Line<'a> {
    /// Seconds since 1970, to the microsecond.
    ts: f64,
    request_id: &'a str,
    method: &'static str,
    path: &'a str,
    route: &'a str,
    plan: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    account: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    decision: &'static str,
    /// The limit that refused; empty when none did.
    limit: &'a str,
    /// Units taken from each limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<u64>,
    /// Units that the request did cost in the end, where that is something else.
    #[serde(skip_serializing_if = "Option::is_none")]
    spent: Option<u64>,
    /// Microseconds since 1970, by the store's clock: the order of all decisions of a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_at: Option<u64>,
    source: &'static str,
    status: u16,
    duration_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    overhead_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    store_ms: Option<f64>,
    bytes: u64,
    complete: bool,
}

impl AccessLog {
    /// Notes one finished exchange.
    pub(super) fn note(&self, exchange: &Exchange<'_>, at: SystemTime) {
        let mut batch = self.0.borrow_mut();
        // Serializing these types into memory cannot fail; a line that did would be left out, not cut.
        let start = batch.lines.len();
        match serde_json::to_writer(&mut batch.lines, &Line::new(exchange, at)) {
            Ok(()) => batch.lines.push(b'\n'),
            Err(_) => batch.lines.truncate(start),
        }
        if batch.lines.len() >= BATCH_BYTES {
            batch.hand_over();
        } else if batch.flushing.is_none() {
            let log = Rc::downgrade(&self.0);
            batch.flushing = Some(tokio::task::spawn_local(async move {
                tokio::time::sleep(BATCH_TIME).await;
                if let Some(batch) = log.upgrade() {
                    let mut batch = batch.borrow_mut();
                    batch.flushing = None;
                    batch.hand_over();
                }
            }));
        }
    }
}

impl Batch {
    fn hand_over(&mut self) {
        if self.lines.is_empty() {
            return;
        }
        // A full queue drops the batch; it never waits. There is nobody to tell of an error.
        let _written = self.writer.write(&self.lines);
        self.lines.clear();
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.hand_over();
        if let Some(task) = self.flushing.take() {
            task.abort();
        }
    }
}

impl<'a> Line<'a> {
    fn new(exchange: &Exchange<'a>, at: SystemTime) -> Self {
        let ts = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            ts: (ts.as_secs_f64() * 1e6).round() / 1e6,
            request_id: exchange.request_id,
            method: exchange.method,
            path: exchange.path,
            route: exchange.route,
            plan: exchange.plan,
            account: exchange.account,
            key: exchange.key,
            decision: exchange.outcome.as_str(),
            limit: exchange.limit,
            cost: exchange.cost,
            spent: exchange.settlement.and_then(SettlementKind::spent),
            decided_at: exchange.decided_at,
            source: exchange.source,
            status: exchange.status,
            duration_ms: milliseconds(exchange.took),
            overhead_ms: exchange.overhead.map(milliseconds),
            upstream_ms: exchange.upstream.map(|(_, took)| milliseconds(took)),
            store_ms: exchange.store.map(|(_, took, _)| milliseconds(took)),
            bytes: exchange.bytes,
            complete: exchange.complete,
        }
    }
}

/// To the microsecond: more digits would be noise.
fn milliseconds(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e6).round() / 1e3
}
