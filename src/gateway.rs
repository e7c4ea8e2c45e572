//! Assembles the rooms into a running gateway: sockets, gate, proxy, admin.
//!
//! [`Gateway::bind`] reserves the addresses, so that they are known before anything runs; [`Gateway::run`] serves until it
//! is told to stop, and then lets requests in flight finish.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_http::{HttpService, Protocol};
use actix_rt::net::TcpStream;
use actix_service::{IntoServiceFactory as _, ServiceFactoryExt as _, fn_service, map_config};
use actix_web::body::{BodySize, MessageBody as _};
use actix_web::dev::{AppConfig, Server};
use actix_web::http::{ConnectionType, Version, header};
use actix_web::web::{self, Data, Payload};
use actix_web::{App, HttpRequest, HttpResponse};
use parking_lot::Mutex;

use crate::admin::{self, Admin};
use crate::clock::{self, SystemClock};
use crate::config::{Loaded, ServerSettings, Settings};
use crate::gate::{Admitted, Gate, UpstreamTime};
use crate::limit::Limiter;
use crate::limit::store::{MemoryStore, OpenError};
use crate::listen::reply::Rejection;
use crate::listen::socket;
use crate::listen::turns::Turns;
use crate::observe::{AccessLogWriter, Metrics};
use crate::plan::Unbuildable;
use crate::proxy::{self, Answer, Backends, Failure, Outgoing};
use crate::reload::{self, LogLevel, Reloader, Reloads};

/// How long a client may take for the head of a request, from its first byte (of the first one: from connecting).
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a refused upload is still read after the refusal, so that the client gets to see it.
const LINGER: Duration = Duration::from_secs(2);

/// How long a connection without a request is kept.
const KEEP_ALIVE: Duration = Duration::from_secs(75);

/// How often a part of the memory store is searched for what has expired.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Why a gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is taken, or not one of this machine.
    #[error("cannot listen on {address} (is another program using the port?)")]
    Bind {
        /// The address from the configuration.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// The routes contradict each other.
    #[error(transparent)]
    Policy(#[from] Unbuildable),
    /// The clients of the backends cannot be made.
    #[error(transparent)]
    Upstreams(#[from] proxy::BuildError),
    /// The address of Redis cannot be used.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// A metric is declared wrongly.
    #[error("cannot set up the metrics")]
    Metrics(#[from] prometheus::Error),
    /// A server cannot run.
    #[error("cannot serve")]
    Serve(#[from] io::Error),
}

/// A gateway whose addresses are reserved.
#[derive(Debug)]
pub struct Gateway {
    settings: Settings,
    gate: Gate,
    memory: Arc<MemoryStore>,
    admin: Admin,
    reloader: Reloader,
    reloads: Reloads,
    public: TcpListener,
    private: TcpListener,
}

impl Gateway {
    /// Binds the listeners and builds everything that can fail.
    ///
    /// # Errors
    /// When an address is taken, or a part cannot be built from the configuration.
    pub fn bind(loaded: Loaded) -> Result<Self, StartError> {
        let Loaded { settings, policy, provenance, .. } = loaded;
        let on_failure = policy.on_failure;
        let backends = Backends::new(&settings.upstreams, settings.server.workers)?;
        let snapshot = reload::snapshot(policy, &settings, backends)?;
        let memory = Arc::new(MemoryStore::new(settings.store.max_callers, Arc::new(SystemClock::new())));
        // The workers build their own; this only proves that they will be able to.
        drop(Limiter::new(&settings.store.kind, Arc::clone(&memory), Arc::default())?);
        let public = bind(settings.server.listen)?;
        let private = bind(settings.admin.listen)?;
        let metrics = Arc::new(Metrics::new()?);
        let kind = settings.store.kind.clone();
        let gate = Gate::new(snapshot, kind, Arc::clone(&memory), Arc::clone(&metrics))
            .access_log(AccessLogWriter::new(io::stdout()));
        let parts = reload::Parts {
            in_force: gate.in_force(),
            memory: Arc::clone(&memory),
            metrics: Arc::clone(&metrics),
        };
        let (reloader, reloads) = Reloader::new(&settings, provenance, on_failure, parts);
        let kind = settings.store.kind.clone();
        let admin = Admin::new(kind, metrics, Arc::clone(&memory), gate.common(), reloads.clone());
        Ok(Self { settings, gate, memory, admin, reloader, reloads, public, private })
    }

    /// The address that clients call.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn public_address(&self) -> io::Result<SocketAddr> {
        self.public.local_addr()
    }

    /// The address of metrics, probes and the admin API.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.private.local_addr()
    }

    /// The way to have the configuration read again.
    #[must_use]
    pub fn reloads(&self) -> Reloads {
        self.reloads.clone()
    }

    /// Tells `change` when a reload brings another filter for the gateway's own messages (`log.level`).
    pub fn on_log_level(&mut self, change: LogLevel) {
        self.reloader.on_log_level(change);
    }

    /// Serves until `stop` is ready, then lets requests in flight finish, for as long as `server.drain` says.
    ///
    /// # Errors
    /// When a listener breaks.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), StartError> {
        let Self { settings, gate, memory, admin, reloader, reloads: _, public, private } = self;
        let draining = admin.draining();
        let public = public_server(public, gate, &settings)?;
        let private = admin::server(private, admin)?;
        let (public_handle, private_handle) = (public.handle(), private.handle());
        let sweeping = sweep(memory);
        let stopping = async {
            stop.await;
            tracing::info!("stopping: finishing what is in flight");
            draining.begin();
            public_handle.stop(true).await;
            private_handle.stop(false).await;
        };
        tokio::select! {
            served = async { tokio::try_join!(public, private) } => {
                served?;
            }
            () = sweeping => {}
            never = reloader.run() => match never {},
            () = stopping => {}
        }
        Ok(())
    }
}

fn public_server(listener: TcpListener, gate: Gate, settings: &Settings) -> io::Result<Server> {
    let ServerSettings { workers, drain, max_connections, .. } = settings.server;
    let seats = Arc::new(Seats::new(workers));
    let server = Server::build();
    let stopping = server.graceful_shutdown_signal();
    // What `HttpServer` would do, with `Turns` between the socket and the library.
    let service = move || {
        let app = App::new()
            .wrap(gate.clone())
            .app_data(Data::new(Seats::take(&seats)))
            .default_service(web::to(forward));
        let app = app.into_factory().map_err(|error: actix_web::Error| error.error_response());
        let stopping = stopping.clone();
        let http = HttpService::build()
            .graceful_shutdown_signal(move || {
                let stopping = stopping.clone();
                async move { stopping.notified().await }
            })
            // Its first timer answers with 408 before ours closes.
            .client_request_timeout(HEAD_TIMEOUT)
            .client_disconnect_timeout(LINGER)
            // A client that closes its side is gone: the backend need not go on for it.
            .h1_allow_half_closed(false)
            .keep_alive(KEEP_ALIVE)
            .on_connect_ext(|connection: &Turns<TcpStream>, extensions| {
                extensions.insert(connection.turns());
            })
            .finish(map_config(app, |()| AppConfig::default()));
        fn_service(|socket: TcpStream| async {
            let peer = socket.peer_addr().ok();
            // A socket on which this fails is broken, and its first read will say so.
            drop(socket.set_nodelay(true));
            Ok((Turns::new(socket, HEAD_TIMEOUT), Protocol::Http1, peer))
        })
        .and_then(http)
    };
    let server = server
        .workers(workers)
        .max_concurrent_connections(max_connections)
        .shutdown_timeout(whole_seconds(drain))
        .disable_signals()
        .listen("public", listener, service)?;
    Ok(server.run())
}

/// Rounded up, and at least one: actix counts in seconds.
fn whole_seconds(span: Duration) -> u64 {
    (span.as_secs() + u64::from(span.subsec_nanos() > 0)).max(1)
}

/// Which workers' backends are taken.
#[derive(Debug)]
struct Seats(Mutex<Vec<usize>>);

impl Seats {
    fn new(workers: usize) -> Self {
        Self(Mutex::new((0..workers).rev().collect()))
    }

    /// A seat for a worker. There are as many as workers; should one more come while another is still ending, it shares.
    fn take(seats: &Arc<Self>) -> Seat {
        let free = seats.0.lock().pop();
        Seat { worker: free.unwrap_or(0), free, seats: Arc::clone(seats) }
    }
}

/// Which of all backends are a worker's own.
#[derive(Debug)]
struct Seat {
    worker: usize,
    free: Option<usize>,
    seats: Arc<Seats>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.0.lock().extend(self.free);
    }
}

/// The handler behind the gate: on to the backend with what was admitted, and with nothing else.
async fn forward(
    admitted: Admitted,
    seat: Data<Seat>,
    request: HttpRequest,
    payload: Payload,
) -> HttpResponse {
    let begun = clock::instant();
    let (mut response, time) = match send(&seat, &request, &admitted, payload).await {
        Ok(answer) => (answer.response, answer.upstream_time),
        Err(failure) => {
            if !failure.is_the_clients() {
                report(&failure, &admitted);
            }
            (Rejection::Upstream(failure).reply(&admitted.request_id), begun.elapsed())
        }
    };
    if request.version() < Version::HTTP_11 && response.body().size() == BodySize::Stream {
        // HTTP/1.0 knows no chunks (RFC 9112, 6.1): there, the end of the connection is the end of the body.
        let head = response.head_mut();
        head.no_chunking(true);
        head.set_connection_type(ConnectionType::Close);
    }
    response.extensions_mut().insert(UpstreamTime(time));
    response
}

async fn send(
    seat: &Seat,
    request: &HttpRequest,
    admitted: &Admitted,
    payload: Payload,
) -> Result<Answer, Failure> {
    let route = &admitted.offer.route;
    let upstream = route.upstream.as_deref().ok_or(Failure::Internal("the route has no upstream"))?;
    let upstreams = admitted.snapshot.backends.of_worker(seat.worker);
    let upstreams = upstreams.ok_or(Failure::Internal("the worker has no backends"))?;
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    let outgoing = Outgoing {
        method: request.method(),
        path: &admitted.path,
        query: request.uri().query(),
        headers: request.headers(),
        peer: admitted.peer,
        peer_is_trusted: admitted.peer_is_trusted,
        scheme: "http",
        host,
        request_id: &admitted.request_id,
        credentials: &admitted.credentials,
        account: admitted.caller.account.as_deref(),
        plan: &admitted.caller.plan,
        max_body: admitted.snapshot.max_body,
    };
    upstreams.forward(upstream, outgoing, payload, &admitted.pass).await
}

/// The operator learns what the client is not told: which backend, and what the network says. What clients do wrong is in
/// the access log, and must not fill this one.
fn report(failure: &Failure, admitted: &Admitted) {
    let upstream = admitted.offer.route.upstream.as_deref().unwrap_or_default();
    let request_id = admitted.request_id.to_str().unwrap_or_default();
    let cause = std::iter::successors(std::error::Error::source(failure), |cause| cause.source()).last();
    let cause = cause.map(ToString::to_string).unwrap_or_default();
    tracing::warn!(upstream, request_id, %failure, cause, "no answer from the backend");
}

/// Forgets expired callers, a part of the table at a time, for as long as the gateway runs.
async fn sweep(memory: Arc<MemoryStore>) {
    let mut ticks = tokio::time::interval(SWEEP_EVERY);
    for turn in 0.. {
        ticks.tick().await;
        memory.sweep(turn);
    }
}

fn bind(address: SocketAddr) -> Result<TcpListener, StartError> {
    socket::bind(address).map_err(|source| StartError::Bind { address, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Sources, load};
    use crate::limit::store::{RedisSettings, StoreKind, Topology};

    /// The workers found out, could not start, and the gateway went on without anybody behind its public port.
    #[test]
    fn an_address_of_redis_that_cannot_be_used_is_an_error_before_anything_runs() {
        let environment =
            [("TOLLGATE__SERVER__LISTEN", "127.0.0.1:0"), ("TOLLGATE__ADMIN__LISTEN", "127.0.0.1:0")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let mut loaded = load(&Sources { environment, ..Sources::built_in() }).unwrap();
        loaded.settings.store.kind = StoreKind::Redis(RedisSettings {
            // The password is not UTF-8.
            topology: Topology::Standalone("redis://:%ff@127.0.0.1".into()),
            budget: Duration::from_millis(20),
            prefix: "test".to_owned(),
            local_share: None,
        });
        let bound = Gateway::bind(loaded);
        assert!(matches!(bound, Err(StartError::Store(_))), "{bound:?}");
    }
}
