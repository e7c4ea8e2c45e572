//! What became known of a request along the way; noted once, at the end, whatever the end is.
//!
//! The record lives in the request's future and then in the answer's body. Whichever of them is dropped last, finished
//! or given up, writes it: so every request is counted once, also one whose client left.

use std::cmp::Ordering;
use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use actix_web::body::{BodySize, MessageBody};
use actix_web::http::header::HeaderValue;
use bytes::Bytes;
use pin_project_lite::pin_project;

use crate::clock;
use crate::identify::Caller;
use crate::inbound::CanonicalPath;
use crate::limit::store::StoreError;
use crate::limit::{Asked, Decision, Receipts, Ruling, Source};
use crate::listen::overload::{Place, Shed};
use crate::listen::turns::Turn;
use crate::observe::{Exchange, Observer, Outcome, SettlementKind, StoreResult};
use crate::plan::{Offer, Route, Settled};

/// The status of a request whose client left before there was an answer; nobody sees it but metrics and logs.
const CLIENT_LEFT: u16 = 499;

/// One request, from its head to the end of its answer.
#[derive(Debug)]
pub struct Record {
    observer: Observer,
    started: Instant,
    request_id: HeaderValue,
    method: &'static str,
    /// Kept only when an access log is written.
    path: Option<Box<str>>,
    route: Option<Arc<Route>>,
    caller: Option<Caller>,
    offer: Option<Arc<Offer>>,
    outcome: Outcome,
    shed: Option<Shed>,
    /// Held until the record ends.
    place: Option<Place>,
    ruling: Option<Ruling>,
    /// Units that the request takes; `None` before that is known.
    cost: Option<NonZeroU64>,
    settled: Settled,
    upstream: Option<Duration>,
    overhead: Option<Duration>,
    status: u16,
    bytes: u64,
    complete: bool,
    /// Ends with the record: the connection's next request may come.
    _turn: Option<Turn>,
}

impl Record {
    /// The record of a request whose head has just been read, and whose `turn` it is on its connection. `method` is one
    /// of those the gateway serves, or `other`. In a box: on its way to the end of the answer it is moved a dozen times.
    #[must_use]
    pub fn begin(
        observer: Observer,
        method: &'static str,
        request_id: HeaderValue,
        turn: Option<Turn>,
    ) -> Box<Self> {
        observer.begun();
        Box::new(Self {
            observer,
            started: clock::instant(),
            request_id,
            method,
            path: None,
            route: None,
            caller: None,
            offer: None,
            outcome: Outcome::Refused,
            shed: None,
            place: None,
            ruling: None,
            cost: None,
            settled: Settled::AsReserved,
            upstream: None,
            overhead: None,
            status: CLIENT_LEFT,
            bytes: 0,
            complete: false,
            _turn: turn,
        })
    }

    /// The id that the client is told.
    #[must_use]
    pub fn request_id(&self) -> &HeaderValue {
        &self.request_id
    }

    /// Who calls, what the plan says about the route and what the limiter decided, once all is known.
    #[must_use]
    pub fn decided(&self) -> Option<(&Caller, &Offer, &Decision)> {
        Some((self.caller.as_ref()?, self.offer.as_deref()?, self.ruling.as_ref()?.decision.as_ref()?))
    }

    /// Units that the request takes; one before that is known.
    #[must_use]
    pub fn cost(&self) -> NonZeroU64 {
        self.cost.unwrap_or(NonZeroU64::MIN)
    }

    /// Who has decided.
    #[must_use]
    pub fn source(&self) -> Source {
        self.ruling.as_ref().map_or(Source::None, |ruling| ruling.source)
    }

    /// What it takes to settle the charge: who calls, on what terms, what was charged and how much. Once.
    pub fn to_settle(&mut self) -> Option<(&Caller, &Offer, Receipts, NonZeroU64)> {
        let receipts = std::mem::take(&mut self.ruling.as_mut()?.receipts);
        Some((self.caller.as_ref()?, self.offer.as_deref()?, receipts, self.cost?))
    }

    // The steps of the path, in their order. Each notes what would have become of the request if the next one fails.

    /// The path is acceptable.
    pub fn accepted(&mut self, path: &CanonicalPath<'_>) {
        if self.observer.writes_access_log() {
            self.path = Some(path.as_str().into());
        }
        self.outcome = Outcome::Unmatched;
    }

    /// A route was found.
    pub fn found(&mut self, route: &Arc<Route>) {
        self.route = Some(Arc::clone(route));
        self.outcome = Outcome::Unidentified;
    }

    /// The caller is known.
    pub fn identified(&mut self, caller: &Caller) {
        self.caller = Some(caller.clone());
        self.outcome = Outcome::Excluded;
    }

    /// The plan includes the route.
    pub fn offered(&mut self, offer: &Arc<Offer>) {
        self.offer = Some(Arc::clone(offer));
        self.outcome = Outcome::Unfinished;
    }

    /// There is a place for one more.
    pub fn placed(&mut self, place: Place) {
        self.place = Some(place);
    }

    /// There is none.
    pub fn shed(&mut self, reason: Shed) {
        self.shed = Some(reason);
        self.outcome = Outcome::Shed;
    }

    /// Working on the request has panicked.
    pub fn panicked(&self) {
        self.observer.panicked();
    }

    /// The limiter has answered for a request that takes `cost` units.
    pub fn ruled(&mut self, ruling: Ruling, passed: bool, cost: NonZeroU64) {
        self.cost = Some(cost);
        self.outcome = match (&ruling.decision, passed) {
            (Some(decision), true) if decision.would_refuse().is_some() => Outcome::WouldDeny,
            (_, true) => Outcome::Allowed,
            (Some(_), false) => Outcome::Denied,
            (None, false) => Outcome::Undecided,
        };
        self.ruling = Some(ruling);
    }

    /// The upstream's answer began after this time.
    pub fn forwarded(&mut self, upstream_time: Duration) {
        self.upstream = Some(upstream_time);
    }

    /// The answer says what the request did cost.
    pub fn settled(&mut self, settled: Settled) {
        self.settled = settled;
    }

    /// The answer's head is ready to be written.
    pub fn answered(&mut self, status: u16) {
        self.status = status;
        self.overhead = Some(self.started.elapsed().saturating_sub(self.upstream.unwrap_or_default()));
    }

    fn exchange(&self) -> Exchange<'_> {
        let ruling = self.ruling.as_ref();
        let decision = ruling.and_then(|ruling| ruling.decision.as_ref());
        let refusing = decision.and_then(|decision| decision.binding().or_else(|| decision.would_refuse()));
        let limit = refusing.and_then(|index| self.offer.as_ref()?.rules.get(index));
        let upstream = self.route.as_ref().and_then(|route| route.upstream.as_deref());
        Exchange {
            request_id: self.request_id.to_str().unwrap_or_default(),
            method: self.method,
            path: self.path.as_deref().unwrap_or(""),
            route: self.route.as_ref().map_or("unmatched", |route| &route.name),
            plan: self.caller.as_ref().map_or("none", |caller| &caller.plan),
            account: self.caller.as_ref().and_then(|caller| caller.account.as_deref()),
            key: self.caller.as_ref().and_then(|caller| caller.key.as_deref()),
            outcome: self.outcome,
            limit: limit.map_or("", |rule| &rule.name),
            cost: self.counted().map(NonZeroU64::get),
            shed: self.shed.map(Shed::as_str),
            settlement: self.settlement(),
            decided_at: decision.map(|decision| decision.at),
            source: self.source().as_str(),
            status: self.status,
            took: self.started.elapsed(),
            overhead: self.overhead,
            upstream: upstream.zip(self.upstream),
            store: ruling
                .and_then(|ruling| ruling.asked.as_ref())
                .map(|asked| (asked.store, asked.took, store_result(asked))),
            bytes: self.bytes,
            complete: self.complete,
        }
    }

    /// What became of the charge behind the answer, if anything did.
    fn settlement(&self) -> Option<SettlementKind> {
        let reserved = self.counted()?.get();
        match self.settled {
            Settled::AsReserved => None,
            Settled::Unclear => Some(SettlementKind::Unclear),
            Settled::At(spent) => match spent.cmp(&reserved) {
                Ordering::Less => Some(SettlementKind::Refund(spent)),
                Ordering::Equal => None,
                Ordering::Greater => Some(SettlementKind::Surcharge(spent)),
            },
        }
    }

    /// Units that the request takes from each limit; `None` where nobody counted them.
    fn counted(&self) -> Option<NonZeroU64> {
        self.cost.filter(|_| self.ruling.as_ref().is_some_and(|ruling| ruling.decision.is_some()))
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.observer.ended(&self.exchange(), clock::wall);
    }
}

fn store_result(asked: &Asked) -> StoreResult {
    match asked.error {
        None => StoreResult::Ok,
        Some(StoreError::Timeout) => StoreResult::Timeout,
        Some(StoreError::Unreadable(_)) => StoreResult::Unreadable,
        Some(_) => StoreResult::Error,
    }
}

/// The body of an answer ends where it must not: working on it has panicked.
#[derive(Debug, thiserror::Error)]
#[error("a panic while the answer was written")]
pub struct Panicked;

pin_project! {
    /// An answer's body on its way out, with the record of its request. The record is noted when the body is dropped, sent
    /// or not.
    #[derive(Debug)]
    pub struct Recorded<B> {
        #[pin]
        body: B,
        record: Box<Record>,
    }
}

impl<B: MessageBody> Recorded<B> {
    /// `body`, which ends the exchange of `record`.
    pub fn new(body: B, mut record: Box<Record>) -> Self {
        // Nobody polls a body that is empty.
        record.complete = matches!(body.size(), BodySize::None | BodySize::Sized(0));
        Self { body, record }
    }
}

impl<B: MessageBody> MessageBody for Recorded<B> {
    type Error = Box<dyn std::error::Error>;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let this = self.project();
        // A panic here would take the connection's task along without a word to anybody.
        let polled = catch_unwind(AssertUnwindSafe(|| this.body.poll_next(context)));
        let next = match polled {
            Ok(next) => ready!(next).map(|piece| piece.map_err(Into::into)),
            Err(_) => {
                this.record.panicked();
                Some(Err(Panicked.into()))
            }
        };
        match &next {
            Some(Ok(bytes)) => this.record.bytes += bytes.len() as u64,
            Some(Err(_)) => {}
            None => this.record.complete = true,
        }
        Poll::Ready(next)
    }
}
