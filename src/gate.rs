//! The front page: one request, from caller to [`Pass`].
//!
//! [`Gate`] is an actix middleware. [`gateway`](crate::gateway) wraps its proxy in it; any other actix application can
//! wrap its own handlers, see `examples/your_own_app.rs`. Behind the gate a request carries an [`Admitted`] in its
//! extensions; a request without one did not come through a gate.

use std::future::{Ready, ready};
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU64;
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix_web::body::{EitherBody, MessageBody};
use actix_web::dev::{Payload, Service, ServiceRequest, ServiceResponse, Transform, forward_ready};
use actix_web::error::InternalError;
use actix_web::http::header::{HeaderMap, HeaderValue};
use actix_web::http::{Method, StatusCode};
use actix_web::{Error, FromRequest, HttpMessage, HttpRequest};
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;

use crate::identify::{Caller, CredentialHeaders, IdentifyError};
use crate::inbound::path::check_query;
use crate::inbound::{CanonicalPath, Inbound, METHODS};
use crate::limit::headers::Style;
use crate::limit::store::{Charge, MemoryStore, OpenError, StoreKind};
use crate::limit::{Anchor, Common, Limiter, Pass};
use crate::listen::check;
use crate::listen::overload::{Overload, Shed};
use crate::listen::reply::{Rejection, limit_fields};
use crate::listen::request_id::{self, RequestIds};
use crate::listen::turns::TurnOf;
use crate::observe::{AccessLogWriter, Metrics, Observer};
use crate::plan::{Offer, Policy, Settled};
use crate::record::{Record, Recorded};
use crate::snapshot::{InForce, Snapshot, View};

impl Worker {
    /// Decides one request: who calls, on which plan, and whether it may pass.
    async fn admit(
        &self,
        request: &ServiceRequest,
        snapshot: &Arc<Snapshot>,
        record: &mut Record,
    ) -> Result<Admitted, Rejection> {
        let policy = &*snapshot.policy;
        let inbound = inbound(request, policy)?;
        record.accepted(&inbound.path);
        let (position, route) = policy.route(&inbound)?;
        record.found(route);
        let (caller, credentials) = policy.identity.caller(&inbound)?;
        record.identified(&caller);
        let offer = policy.offer(&caller.plan, position).ok_or_else(|| excluded(&caller))?;
        record.offered(offer);
        let place = self.overload.place(offer.priority).map_err(|reason| shed(reason, record))?;
        record.placed(place);
        let charge = charge(&caller, offer, route.cost.of(inbound.method));
        let (ruling, pass) = self.limiter.admit(charge, offer.on_failure).await;
        record.ruled(ruling, pass.is_some(), charge.cost);
        let pass = pass.ok_or_else(|| refusal(record))?;
        let peer_is_trusted = policy.identity.trusts(inbound.peer);
        Ok(Admitted {
            pass,
            offer: Arc::clone(offer),
            credentials,
            path: inbound.path.as_str().into(),
            peer: inbound.peer,
            peer_is_trusted,
            request_id: record.request_id().clone(),
            snapshot: Arc::clone(snapshot),
            caller,
        })
    }
}

/// One request that may pass: who calls, on what terms, and the permission itself.
#[derive(Debug)]
pub struct Admitted {
    /// The permission to forward the request.
    pub pass: Pass,
    /// The caller.
    pub caller: Caller,
    /// The caller's plan on the route.
    pub offer: Arc<Offer>,
    /// The canonical path: what was routed and counted, and what a backend must be sent.
    pub path: Box<str>,
    /// The header fields that held the credential.
    pub credentials: CredentialHeaders,
    /// The address at the other end of the socket.
    pub peer: IpAddr,
    /// Whether that peer is a proxy that may say for whom it speaks.
    pub peer_is_trusted: bool,
    /// The id that the client is told.
    pub request_id: HeaderValue,
    /// What was in force when the request began; it is handled by this to its end.
    pub snapshot: Arc<Snapshot>,
}

impl FromRequest for Admitted {
    type Error = Error;
    type Future = Ready<Result<Self, Error>>;

    /// Takes what the gate has left. A handler that is not behind a gate gets nothing, and the client a 500.
    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let admitted = request.extensions_mut().remove();
        ready(admitted.ok_or_else(|| {
            let reply = Rejection::Unchecked.reply(&HeaderValue::from_static(""));
            InternalError::from_response("the request did not come through a gate", reply).into()
        }))
    }
}

/// How long the backend's part of an answer took; a handler behind the gate leaves it in the answer's extensions, so that
/// the gateway's own time can be told apart.
#[derive(Debug, Clone, Copy)]
pub struct UpstreamTime(pub Duration);

/// The actix middleware that lets a request pass, or answers it.
///
/// Cheap to clone; all clones share the policy, the counters and the metrics. Make it once, outside of the closure that
/// makes the application for every worker. Keep a clone to [put another policy in force](Self::put_in_force).
#[derive(Debug, Clone)]
pub struct Gate(Arc<Shared>);

/// What all workers share.
#[derive(Debug)]
struct Shared {
    in_force: InForce,
    store: StoreKind,
    memory: Arc<MemoryStore>,
    common: Arc<Common>,
    metrics: Arc<Metrics>,
    access_log: Option<AccessLogWriter>,
    overload: Overload,
}

impl Gate {
    /// A gate that enforces a [`Policy`], or a whole [`Snapshot`], and counts in `store`. `memory` is that store, or stands in
    /// while Redis cannot count.
    ///
    /// Call [`MemoryStore::sweep`] about once a second, as the gateway does: else the memory forgets only when it is full.
    #[must_use]
    pub fn new(
        snapshot: impl Into<Snapshot>,
        store: StoreKind,
        memory: Arc<MemoryStore>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let in_force = InForce::new(snapshot.into());
        let (common, overload) = (Arc::default(), Overload::default());
        Self(Arc::new(Shared { in_force, store, memory, common, metrics, access_log: None, overload }))
    }

    /// From now on enforces another [`Policy`] or [`Snapshot`], in all clones. Requests in flight end by the one they began
    /// with. Counters stay as they are: what was used is used.
    pub fn put_in_force(&self, snapshot: impl Into<Snapshot>) {
        drop(self.0.in_force.replace(snapshot.into()));
    }

    /// The place of what is in force.
    #[must_use]
    pub fn in_force(&self) -> InForce {
        self.0.in_force.clone()
    }

    /// What happens to counters behind the requests' backs.
    #[must_use]
    pub fn common(&self) -> Arc<Common> {
        Arc::clone(&self.0.common)
    }

    /// With a line for every request, as long as [`Snapshot::access_log`] says so.
    ///
    /// # Panics
    /// When the gate has been cloned already.
    #[must_use]
    pub fn access_log(self, access_log: AccessLogWriter) -> Self {
        self.with(|shared| shared.access_log = Some(access_log))
    }

    /// With an end to how many requests are worked on at once.
    ///
    /// # Panics
    /// When the gate has been cloned already.
    #[must_use]
    pub fn overload(self, overload: Overload) -> Self {
        self.with(|shared| shared.overload = overload)
    }

    fn with(mut self, change: impl FnOnce(&mut Shared)) -> Self {
        change(Arc::get_mut(&mut self.0).expect("a gate is configured before it is cloned"));
        self
    }
}

/// What one worker has for itself.
#[derive(Debug)]
struct Worker {
    in_force: View,
    overload: Overload,
    limiter: Limiter,
    observer: Observer,
    ids: RequestIds,
}

impl Worker {
    fn new(shared: &Shared) -> Result<Self, OpenError> {
        let limiter = Limiter::new(&shared.store, Arc::clone(&shared.memory), Arc::clone(&shared.common))?;
        limiter.connect();
        let access_log = shared.access_log.as_ref().map(AccessLogWriter::handle);
        let observer = Observer::new(Arc::clone(&shared.metrics), access_log);
        let (in_force, overload) = (shared.in_force.view(), shared.overload.clone());
        Ok(Self { in_force, overload, limiter, observer, ids: RequestIds::new() })
    }

    /// The whole of one request: decide, hand on or refuse, and see to it that the answer tells what was decided.
    async fn serve<S, B>(self: Rc<Self>, service: Rc<S>, request: ServiceRequest) -> Result<Answer<B>, Error>
    where
        S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
        B: MessageBody + 'static,
    {
        let snapshot = self.in_force.latest();
        let request_id = self.ids.of(request.headers());
        let turn = request.conn_data::<TurnOf>().map(TurnOf::current);
        let method = method_label(request.method());
        let observer = self.observer.writing(snapshot.access_log);
        let mut record = Record::begin(observer, method, request_id, turn);
        let handled = self.handle(&*service, request, &snapshot, &mut record);
        let Ok(answer) = AssertUnwindSafe(handled).catch_unwind().await else {
            return Err(self.after_panic(record, snapshot.style));
        };
        let mut answer = answer?;
        tell(answer.headers_mut(), snapshot.style, &record);
        record.answered(answer.status().as_u16());
        Ok(answer.map_body(|_, body| Recorded::new(body, record)))
    }

    async fn handle<S, B>(
        &self,
        service: &S,
        request: ServiceRequest,
        snapshot: &Arc<Snapshot>,
        record: &mut Record,
    ) -> Result<ServiceResponse<EitherBody<B>>, Error>
    where
        S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    {
        match self.admit(&request, snapshot, record).await {
            Ok(admitted) => {
                request.extensions_mut().insert(admitted);
                Ok(self.hand_on(service, request, record).await?.map_into_left_body())
            }
            Err(rejection) => {
                let reply = rejection.reply(record.request_id());
                Ok(request.into_response(reply).map_into_right_body())
            }
        }
    }

    /// What becomes of a request whose handling panicked: a bug, here or behind the gate, of which only this request may take
    /// notice. actix makes an answer of the error, and the record ends with that.
    fn after_panic(&self, mut record: Box<Record>, style: Style) -> Error {
        record.panicked();
        let mut reply = Rejection::Panicked.reply(record.request_id());
        let status = reply.status();
        self.settle(&mut record, status, reply.headers_mut());
        tell(reply.headers_mut(), style, &record);
        record.answered(status.as_u16());
        let reply = reply.map_body(|_, body| Recorded::new(body, record).boxed());
        InternalError::from_response("a panic", reply).into()
    }

    /// Lets a request that was admitted through to what is behind the gate, and settles its charge when that has answered.
    async fn hand_on<S, B>(
        &self,
        service: &S,
        request: ServiceRequest,
        record: &mut Record,
    ) -> Result<ServiceResponse<B>, Error>
    where
        S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
    {
        match service.call(request).await {
            Ok(mut answer) => {
                let status = answer.status();
                self.settle(record, status, answer.headers_mut());
                if let Some(UpstreamTime(time)) = answer.response_mut().extensions_mut().remove() {
                    record.forwarded(time);
                }
                Ok(answer)
            }
            Err(error) => {
                // actix will make an answer of it.
                let status = error.as_response_error().status_code();
                self.settle(record, status, &mut HeaderMap::new());
                record.answered(status.as_u16());
                Err(error)
            }
        }
    }

    /// Puts the charge right, now that the answer tells what the request did cost.
    fn settle(&self, record: &mut Record, status: StatusCode, fields: &mut HeaderMap) {
        let Some((caller, offer, receipts, cost)) = record.to_settle() else { return };
        let settled = offer.route.cost.settled(status, fields);
        if let Settled::At(spent) = settled {
            self.limiter.settle(charge(caller, offer, cost), receipts, spent);
        }
        record.settled(settled);
    }
}

/// Writes what the gate has to say into an answer: the request's id, and how the caller stands with its limits.
fn tell(fields: &mut HeaderMap, style: Style, record: &Record) {
    fields.insert(request_id::FIELD, record.request_id().clone());
    if let Some((caller, offer, decision)) = record.decided() {
        let policy_field = || offer.policy_field(&caller.id);
        limit_fields(fields, style, policy_field, &offer.rules, decision);
    }
}

/// What a request takes from the limits of its offer.
fn charge<'a>(caller: &'a Caller, offer: &'a Offer, cost: NonZeroU64) -> Charge<'a> {
    Charge {
        api_key: caller.key.as_deref().unwrap_or_default(),
        anchor: Anchor::on(caller.anchor_day).unwrap_or(Anchor::FIRST),
        pool: &offer.pool,
        ..Charge::new(&caller.id, &caller.plan, &offer.rules, cost)
    }
}

/// An answer through the gate: from behind it, or a refusal.
type Answer<B> = ServiceResponse<Recorded<EitherBody<B>>>;

impl<S, B> Transform<S, ServiceRequest> for Gate
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = Answer<B>;
    type Error = Error;
    type Transform = GateService<S>;
    type InitError = ();
    type Future = LocalBoxFuture<'static, Result<Self::Transform, Self::InitError>>;

    fn new_transform(&self, service: S) -> Self::Future {
        let worker = Worker::new(&self.0).map_err(|error| tracing::error!(%error, "cannot start a worker"));
        Box::pin(async move {
            let worker = worker?;
            // Who comes before the store can be asked would be counted by this process alone, though nothing is wrong.
            worker.limiter.prepared().await;
            Ok(GateService { service: Rc::new(service), worker: Rc::new(worker) })
        })
    }
}

/// [`Gate`] at work in one worker.
#[derive(Debug)]
pub struct GateService<S> {
    service: Rc<S>,
    worker: Rc<Worker>,
}

impl<S, B> Service<ServiceRequest> for GateService<S>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = Answer<B>;
    type Error = Error;
    type Future = LocalBoxFuture<'static, Result<Self::Response, Self::Error>>;

    forward_ready!(service);

    fn call(&self, request: ServiceRequest) -> Self::Future {
        Box::pin(Rc::clone(&self.worker).serve(Rc::clone(&self.service), request))
    }
}

/// The request as the rooms see it, if its head is acceptable.
fn inbound<'a>(request: &'a ServiceRequest, policy: &Policy) -> Result<Inbound<'a>, Rejection> {
    let target = request.uri();
    check::head(request.method(), target, request.headers()).map_err(Rejection::Head)?;
    let path = CanonicalPath::parse(target.path(), policy.path_rules).map_err(Rejection::Path)?;
    target.query().map_or(Ok(()), check_query).map_err(Rejection::Path)?;
    // Only a connection without an address, such as a Unix socket's, has no peer.
    let peer = request.peer_addr().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
    Ok(Inbound { method: request.method(), path, headers: request.headers(), peer })
}

/// Why a caller may not use a route at all: a key might help whoever has shown none, and nobody else.
fn excluded(caller: &Caller) -> Rejection {
    match caller.account {
        Some(_) => Rejection::Excluded,
        None => Rejection::Identity(IdentifyError::Missing),
    }
}

/// The gateway has too much to do.
fn shed(reason: Shed, record: &mut Record) -> Rejection {
    record.shed(reason);
    Rejection::Overloaded
}

/// Why there is no pass: a limit refuses, or nobody could count.
fn refusal(record: &Record) -> Rejection {
    match record.decided() {
        Some((_, offer, decision)) => {
            Rejection::limited(&offer.rules, decision, record.cost(), record.source())
        }
        None => Rejection::StoreAway,
    }
}

/// The method as a label: a client cannot invent one.
fn method_label(method: &Method) -> &'static str {
    METHODS.iter().find(|served| *served == method).map_or("other", Method::as_str)
}
