//! What happened: metrics and the access log. Knows nothing of the other rooms; they hand it an [`Exchange`].

mod access_log;
mod metrics;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use access_log::{AccessLog, AccessLogWriter};
use metrics::Counter;
pub use metrics::{Metrics, Totals};

/// One request and its answer, in words that metrics and logs share.
#[derive(Debug, Clone, Copy)]
pub struct Exchange<'a> {
    /// The id that the client was told.
    pub request_id: &'a str,
    /// The method: one of those the gateway serves, or `other`.
    pub method: &'static str,
    /// The canonical path, without the query; empty when it was refused.
    pub path: &'a str,
    /// The route's name, or `unmatched`.
    pub route: &'a str,
    /// The plan's name, or `none`.
    pub plan: &'a str,
    /// The account, if one is known.
    pub account: Option<&'a str>,
    /// The name of the API key's table, if one was shown.
    pub key: Option<&'a str>,
    /// What became of the request.
    pub outcome: Outcome,
    /// The limit that refused or, in shadow, would have; or nothing.
    pub limit: &'a str,
    /// Units that the request took from each limit; `None` when nobody counted.
    pub cost: Option<u64>,
    /// What there was too much of, where the request was refused for that.
    pub shed: Option<&'static str>,
    /// How the charge was put right behind the answer.
    pub settlement: Option<SettlementKind>,
    /// When it was decided, by the store's clock, in microseconds since 1970.
    pub decided_at: Option<u64>,
    /// Who decided.
    pub source: &'static str,
    /// The status that was answered; 499 when the client left before there was one.
    pub status: u16,
    /// From the request's head to the end of the answer.
    pub took: Duration,
    /// The part of it until the answer's head that was spent in the gateway itself.
    pub overhead: Option<Duration>,
    /// Which backend answered, and how long its head took.
    pub upstream: Option<(&'a str, Duration)>,
    /// Which store was asked, how long that took, and how it ended.
    pub store: Option<(&'static str, Duration, StoreResult)>,
    /// Bytes of the answer's body that were handed over.
    pub bytes: u64,
    /// Whether the answer's body was handed over whole.
    pub complete: bool,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Refused before anything was known of it: malformed, unsupported.
    Refused,
    /// No route, or not this method on it.
    Unmatched,
    /// No usable credential.
    Unidentified,
    /// The plan does not include the route.
    Excluded,
    /// The gateway had too much to do.
    Shed,
    /// All limits agreed.
    Allowed,
    /// All limits that are enforced agreed, and one in shadow would have refused.
    WouldDeny,
    /// A limit refused.
    Denied,
    /// The store could not answer, and the operator had chosen to refuse then.
    Undecided,
    /// It ended before anything was decided: its client left, or there was a bug.
    Unfinished,
}

impl Outcome {
    /// The word in the access log.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Unmatched => "unmatched",
            Self::Unidentified => "unidentified",
            Self::Excluded => "excluded",
            Self::Shed => "shed",
            Self::Allowed => "allowed",
            Self::WouldDeny => "would_deny",
            Self::Denied => "denied",
            Self::Undecided => "undecided",
            Self::Unfinished => "unfinished",
        }
    }

    /// The `outcome` label, for requests that came to a decision. A refusal because the store is away is a denial.
    fn label(self) -> Option<&'static str> {
        match self {
            Self::Allowed => Some("allowed"),
            Self::WouldDeny => Some("would_deny"),
            Self::Denied | Self::Undecided => Some("denied"),
            Self::Refused
            | Self::Unmatched
            | Self::Unidentified
            | Self::Excluded
            | Self::Shed
            | Self::Unfinished => None,
        }
    }
}

/// How a charge was put right behind the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettlementKind {
    /// The request did cost so many units, less than it took.
    Refund(u64),
    /// It did cost so many, more than it took.
    Surcharge(u64),
    /// The backend named a cost that nobody understands, and what it took stays taken.
    Unclear,
}

impl SettlementKind {
    /// The `kind` label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Refund(_) => "refund",
            Self::Surcharge(_) => "surcharge",
            Self::Unclear => "unclear",
        }
    }

    /// What the request did cost, if that is known.
    #[must_use]
    pub fn spent(self) -> Option<u64> {
        match self {
            Self::Refund(spent) | Self::Surcharge(spent) => Some(spent),
            Self::Unclear => None,
        }
    }
}

/// How a question to the store ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreResult {
    /// It answered.
    Ok,
    /// The budget ran out.
    Timeout,
    /// What it holds is damaged, or was written by another version.
    Unreadable,
    /// It could not be reached, or answered with an error.
    Error,
}

impl StoreResult {
    /// The `result` label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Timeout => "timeout",
            Self::Unreadable => "unreadable",
            Self::Error => "error",
        }
    }
}

/// One worker's notebook: counts and logs every exchange. Cloning it gives another hand on the same notebook.
#[derive(Debug, Clone)]
pub struct Observer {
    metrics: Arc<Metrics>,
    counter: Rc<RefCell<Counter>>,
    access_log: Option<AccessLog>,
}

impl Observer {
    /// A notebook that counts in `metrics` and writes to `access_log`, if there is one.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>, access_log: Option<AccessLog>) -> Self {
        let counter = Rc::new(RefCell::new(Counter::new(Arc::clone(&metrics))));
        Self { metrics, counter, access_log }
    }

    /// Another hand on this notebook, for one request: with its line in the access log, or without.
    #[must_use]
    pub fn writing(&self, access_log: bool) -> Self {
        Self {
            metrics: Arc::clone(&self.metrics),
            counter: Rc::clone(&self.counter),
            access_log: self.access_log.as_ref().filter(|_| access_log).cloned(),
        }
    }

    /// Whether a line is written for every request.
    #[must_use]
    pub fn writes_access_log(&self) -> bool {
        self.access_log.is_some()
    }

    /// A request has begun.
    pub fn begun(&self) {
        self.metrics.in_flight.inc();
    }

    /// Working on a request has panicked.
    pub fn panicked(&self) {
        self.metrics.panics.inc();
    }

    /// It has ended, in whatever way; `at` is the wall clock, for the log line.
    pub fn ended(&self, exchange: &Exchange<'_>, at: impl FnOnce() -> SystemTime) {
        self.metrics.in_flight.dec();
        self.counter.borrow_mut().count(exchange);
        if let Some(log) = &self.access_log {
            log.note(exchange, at());
        }
    }
}
