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
use secrecy::ExposeSecret;
use socket2::{Domain, Socket, Type};

use crate::admin::{self, Admin};
use crate::clock::{self, SystemClock};
use crate::config::{Loaded, RedisMode, ServerSettings, Settings, StoreKind};
use crate::gate::{Admitted, Counting, Gate, UpstreamTime};
use crate::limit::store::{MemoryStore, OpenError, Topology};
use crate::listen::reply::Rejection;
use crate::listen::turns::Turns;
use crate::observe::{AccessLogWriter, Metrics};
use crate::plan::{Policy, Unbuildable};
use crate::proxy::{self, Answer, Failure, Outgoing, UpstreamSettings, Upstreams};

/// Connections that the kernel holds until a worker takes them.
const BACKLOG: i32 = 4_096;

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
    #[error("cannot listen on {address}: {source}; is another program using the port?")]
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
    #[error("cannot set up the metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// A server cannot run.
    #[error("cannot serve: {0}")]
    Serve(#[from] io::Error),
}

/// A gateway whose addresses are reserved.
#[derive(Debug)]
pub struct Gateway {
    settings: Settings,
    gate: Gate,
    memory: Arc<MemoryStore>,
    admin: Admin,
    public: TcpListener,
    private: TcpListener,
}

impl Gateway {
    /// Binds the listeners and builds everything that can fail.
    ///
    /// # Errors
    /// When an address is taken, or a part cannot be built from the configuration.
    pub fn bind(loaded: Loaded) -> Result<Self, StartError> {
        let Loaded { settings, policy, .. } = loaded;
        let on_failure = policy.on_failure;
        let policy = Policy::new(policy)?;
        // The workers build their own; this one only proves that they will be able to.
        drop(Upstreams::new(&settings.upstreams)?);
        let public = listener(settings.server.listen)?;
        let private = listener(settings.admin.listen)?;
        let metrics = Arc::new(Metrics::new()?);
        let memory = Arc::new(MemoryStore::new(settings.store.max_callers, Arc::new(SystemClock::new())));
        let counting = counting(&settings);
        let access_log = settings.log.access.then(|| AccessLogWriter::new(io::stdout()));
        let admin =
            Admin::new(&settings, on_failure, Arc::clone(&metrics), Arc::clone(&memory), counting.clone());
        let gate = Gate::new(policy, counting, Arc::clone(&memory), metrics)
            .style(settings.headers)
            .access_log(access_log);
        Ok(Self { settings, gate, memory, admin, public, private })
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

    /// Serves until `stop` is ready, then lets requests in flight finish, for as long as `server.drain` says.
    ///
    /// # Errors
    /// When a listener breaks.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), StartError> {
        let Self { settings, gate, memory, admin, public, private } = self;
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
            (served, administered) = async { tokio::join!(public, private) } => {
                served?;
                administered?;
            }
            () = sweeping => {}
            () = stopping => {}
        }
        Ok(())
    }
}

fn public_server(listener: TcpListener, gate: Gate, settings: &Settings) -> io::Result<Server> {
    let ServerSettings { workers, drain, max_body, max_connections, .. } = settings.server;
    let upstreams = settings.upstreams.clone();
    let server = Server::build();
    let stopping = server.graceful_shutdown_signal();
    // What `HttpServer` would do, with `Turns` between the socket and the library.
    let service = move || {
        let proxy = Proxy::new(&upstreams, max_body);
        let app = App::new().wrap(gate.clone()).app_data(Data::new(proxy)).default_service(web::to(forward));
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
        .shutdown_timeout(drain.as_secs().max(1))
        .disable_signals()
        .listen("public", listener, service)?;
    Ok(server.run())
}

/// What one worker needs to forward.
struct Proxy {
    upstreams: Upstreams,
    max_body: u64,
}

impl Proxy {
    fn new(upstreams: &[UpstreamSettings], max_body: u64) -> Self {
        let upstreams =
            Upstreams::new(upstreams).expect("the same settings were tried before the workers started");
        Self { upstreams, max_body }
    }
}

/// The handler behind the gate: on to the backend with what was admitted, and with nothing else.
async fn forward(
    admitted: Admitted,
    proxy: Data<Proxy>,
    request: HttpRequest,
    payload: Payload,
) -> HttpResponse {
    let begun = clock::instant();
    let (mut response, time) = match send(&proxy, &request, &admitted, payload).await {
        Ok(answer) => (answer.response, answer.upstream_time),
        Err(failure) => {
            report(&failure, &admitted);
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
    proxy: &Proxy,
    request: &HttpRequest,
    admitted: &Admitted,
    payload: Payload,
) -> Result<Answer, Failure> {
    let route = &admitted.offer.route;
    let upstream = route.upstream.as_deref().ok_or(Failure::Internal("the route has no upstream"))?;
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
        max_body: proxy.max_body,
    };
    proxy.upstreams.forward(upstream, outgoing, payload, &admitted.pass).await
}

/// The operator learns what the client is not told: which backend, and what the network says.
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

fn counting(settings: &Settings) -> Counting {
    let StoreKind::Redis(redis) = &settings.store.kind else {
        return Counting::Memory;
    };
    let mut urls = redis.nodes.iter().map(|url| url.expose_secret().to_owned());
    let topology = match redis.mode {
        RedisMode::Standalone => Topology::Standalone(urls.next().unwrap_or_default()),
        RedisMode::Cluster => Topology::Cluster(urls.collect()),
    };
    Counting::Redis { topology, prefix: redis.prefix.clone(), budget: redis.budget }
}

/// A listener on `address`. A gateway that was just stopped does not keep the address from its successor.
fn listener(address: SocketAddr) -> Result<TcpListener, StartError> {
    let bind = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(socket2::Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    };
    bind().map_err(|source| StartError::Bind { address, source })
}
