//! Assembles the rooms into a running gateway: sockets, gate, proxy, admin.
//!
//! [`Gateway::bind`] reserves the addresses, or takes the sockets that were handed over, so that they are known before anything
//! runs; [`Gateway::run`] serves until it is told to stop, and then ends in steps: not ready, clients told to go, nobody let in
//! any more, what is in flight finished.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix_http::{HttpService, Protocol};
use actix_rt::net::TcpStream;
use actix_service::{IntoServiceFactory as _, ServiceFactoryExt as _, fn_service, map_config};
use actix_web::body::{BodySize, MessageBody as _};
use actix_web::dev::{AppConfig, Server, Service as _};
use actix_web::http::{ConnectionType, Version, header};
use actix_web::web::{self, Data, Payload, ServiceConfig};
use actix_web::{App, HttpRequest, HttpResponse};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::admin::{self, Admin};
use crate::clock::{self, SystemClock};
use crate::config::{Loaded, ServerSettings, Settings};
use crate::gate::{Admitted, Gate, UpstreamTime};
use crate::limit::Limiter;
use crate::limit::store::{MemoryStore, OpenError};
use crate::listen::drain::Drain;
use crate::listen::overload::{Overload, resident_memory};
use crate::listen::reply::Rejection;
use crate::listen::socket::{Door, HandedOver, Listener, allow_descriptors};
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

/// How long the workers may take to end when nothing is left for them to do.
const WORKERS_END: Duration = Duration::from_millis(500);

/// Descriptors for everything but clients and backends: listeners, workers, Redis, files.
const DESCRIPTORS_OF_ITS_OWN: u64 = 256;

/// How often the process looks how much memory it uses.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How a gateway is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// As whoever runs it does: others still send clients here, and need `server.drain_delay` to notice.
    AfterDelay,
    /// As a person at a terminal does: nobody has to notice anything.
    Soon,
}

/// Why a gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is taken, or not one of this machine.
    #[error("cannot listen on {address} ({})", question(source, *reuse_port))]
    Bind {
        /// The address from the configuration.
        address: SocketAddr,
        /// Whether the address is to be shared with another gateway.
        reuse_port: bool,
        /// What the system says.
        source: io::Error,
    },
    /// A socket was handed over that cannot be used.
    #[error("the socket that was handed over as {name:?} cannot be used")]
    HandedOver {
        /// Its name, `public` or `admin`.
        name: &'static str,
        /// What is wrong with it.
        source: io::Error,
    },
    /// The socket for the admin side is open to the network.
    #[error(
        "the socket that was handed over as \"admin\" listens on {0}, which other machines can reach, and there is no token: \
         set admin.token or admin.token_file"
    )]
    AdminIsOpen(SocketAddr),
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
    overload: Overload,
    memory: Arc<MemoryStore>,
    admin: Admin,
    reloader: Reloader,
    reloads: Reloads,
    public: Listener,
    private: Listener,
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
        let (public, private) = listeners(&settings)?;
        look_at_descriptors(&settings.server);
        let metrics = Arc::new(Metrics::new()?);
        let kind = settings.store.kind.clone();
        let overload = Overload::new(settings.server.most_in_flight());
        let gate = Gate::new(snapshot, kind, Arc::clone(&memory), Arc::clone(&metrics))
            .access_log(AccessLogWriter::new(io::stdout()))
            .overload(overload.clone());
        let parts = reload::Parts {
            in_force: gate.in_force(),
            memory: Arc::clone(&memory),
            metrics: Arc::clone(&metrics),
            admin_is_exposed: !private.socket.local_addr()?.ip().is_loopback(),
        };
        let (reloader, reloads) = Reloader::new(&settings, provenance, on_failure, parts);
        let kind = settings.store.kind.clone();
        let admin = Admin::new(kind, metrics, Arc::clone(&memory), gate.common(), reloads.clone());
        Ok(Self { settings, gate, overload, memory, admin, reloader, reloads, public, private })
    }

    /// The address that clients call.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn public_address(&self) -> io::Result<SocketAddr> {
        self.public.socket.local_addr()
    }

    /// The address of metrics, probes and the admin API.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.private.socket.local_addr()
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

    /// Whether clients come in through a socket that was handed over.
    #[must_use]
    pub fn is_handed_over(&self) -> bool {
        self.public.is_handed_over()
    }

    /// Serves until `stop` is ready. Then: not ready at once; after `server.drain_delay` nobody is let in any more; what is in
    /// flight has `server.drain` to finish. The admin side answers until the end.
    ///
    /// # Errors
    /// When a listener breaks.
    pub async fn run(self, stop: impl Future<Output = Stop>) -> Result<(), StartError> {
        let Self { settings, gate, overload, memory, admin, reloader, reloads: _, public, private } = self;
        let (draining, drain) = (admin.draining(), Drain::default());
        let life = Life { drain: drain.clone(), overload: overload.clone() };
        let door = public.door()?;
        let (ended, mut workers) = mpsc::channel(1);
        // The gate is kept here to the end: with its last clone goes the thread that writes the access log.
        let public = public_server(public, gate.clone(), &settings, life, ended, |app| {
            app.default_service(web::to(forward));
        })?;
        let private = admin::server(private.socket, admin)?;
        let public_handle = public.handle();
        let sweeping = sweep(memory);
        let watching = watch_memory(overload, settings.server.max_memory);
        let stopping = async {
            let stop = stop.await;
            draining.begin();
            drain.leave();
            if stop == Stop::AfterDelay {
                tracing::info!(connections = drain.connections(), "stopping: telling clients to go");
                sleep(settings.server.drain_delay).await;
            }
            empty(&drain, door, public_handle.pause(), settings.server.drain).await;
        };
        tokio::select! {
            served = async { tokio::try_join!(public, private) } => {
                served?;
            }
            () = sweeping => {}
            () = watching => {}
            never = reloader.run() => match never {},
            () = stopping => {}
        }
        // Both servers are gone with the block above, and have told their workers to end. What those hold, such as lines of
        // the access log, is let go as they do.
        if timeout(WORKERS_END, workers.recv()).await.is_err() {
            tracing::warn!("the workers take long to end: the last lines of the access log may be missing");
        }
        drop(gate);
        Ok(())
    }
}

/// Lets nobody in any more, and waits until everybody has left, or until `patience` is over.
async fn empty(drain: &Drain, door: Door, pause: impl Future<Output = ()>, patience: Duration) {
    tracing::info!(connections = drain.connections(), "stopping: finishing what is in flight");
    drain.close();
    door.close(pause).await;
    if timeout(patience, drain.empty()).await.is_err() {
        tracing::warn!(
            connections = drain.connections(),
            "stopping: server.drain is over, and cuts these short"
        );
    }
}

/// What the answers of all workers depend on besides the request.
#[derive(Debug, Clone)]
struct Life {
    drain: Drain,
    overload: Overload,
}

impl Life {
    /// Whether connections are kept behind an answer.
    fn keeps_connections(&self) -> bool {
        !self.drain.is_leaving() && !self.overload.is_short_of_memory()
    }
}

/// The server that clients talk to, with these handlers behind the gate. `ended` is closed when the last of its workers is gone.
fn public_server(
    listener: Listener,
    gate: Gate,
    settings: &Settings,
    life: Life,
    ended: mpsc::Sender<()>,
    handlers: fn(&mut ServiceConfig),
) -> io::Result<Server> {
    let ServerSettings { workers, max_connections, .. } = settings.server;
    let seats = Arc::new(Seats::new(workers));
    // What `HttpServer` would do, with `Turns` between the socket and the library.
    let service = move || {
        let (drain, life, ended) = (life.drain.clone(), life.clone(), ended.clone());
        let app = App::new()
            .wrap(gate.clone())
            .wrap_fn(move |request, service| {
                let (answer, life) = (service.call(request), life.clone());
                async move {
                    let mut answer = answer.await?;
                    if !life.keeps_connections() {
                        answer.response_mut().head_mut().set_connection_type(ConnectionType::Close);
                    }
                    Ok(answer)
                }
            })
            .app_data(Data::new(Seats::take(&seats)))
            .configure(handlers);
        let app = app.into_factory().map_err(|error: actix_web::Error| error.error_response());
        let http = HttpService::build()
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
        fn_service(move |socket: TcpStream| {
            let connected = drain.connection();
            // Held by the service, and so by the worker.
            let _ended = &ended;
            async {
                let peer = socket.peer_addr().ok();
                // A socket on which this fails is broken, and its first read will say so.
                drop(socket.set_nodelay(true));
                Ok((Turns::new(socket, HEAD_TIMEOUT, connected), Protocol::Http1, peer))
            }
        })
        .and_then(http)
    };
    let server = Server::build()
        .workers(workers)
        .max_concurrent_connections(max_connections)
        .disable_signals()
        .listen("public", listener.socket, service)?;
    Ok(server.run())
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

/// Looks how much memory the process uses, for as long as the gateway runs. Behind the requests' backs: asking takes longer than
/// a small request.
async fn watch_memory(overload: Overload, most: Option<u64>) {
    let Some(most) = most else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    loop {
        ticks.tick().await;
        if let Some(used) = resident_memory() {
            overload.note_memory(used, most);
        }
    }
}

/// A connection needs a descriptor, and another one for its backend. Without them connections wait in the kernel, and requests
/// find no backend: somebody should know before that.
fn look_at_descriptors(server: &ServerSettings) {
    let connections = (server.workers * server.max_connections) as u64;
    let wanted = connections.saturating_mul(2).saturating_add(DESCRIPTORS_OF_ITS_OWN);
    match allow_descriptors(wanted) {
        Ok(allowed) if allowed < wanted => tracing::warn!(
            allowed,
            wanted,
            "the system allows fewer descriptors than server.max_connections may need: raise the limit (ulimit -n, LimitNOFILE) or \
             lower the setting"
        ),
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "cannot see how many descriptors the system allows"),
    }
}

/// Where to look first when an address cannot be bound.
fn question(error: &io::Error, reuse_port: bool) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => "is it an address of this machine?",
        io::ErrorKind::PermissionDenied => "may this user listen on a port below 1024?",
        _ if reuse_port => {
            "is another program using the port, or a gateway without server.reuse_port, or of another user?"
        }
        _ => "is another program using the port?",
    }
}

/// The listeners for clients and for the operator: handed over, or bound.
fn listeners(settings: &Settings) -> Result<(Listener, Listener), StartError> {
    let ServerSettings { listen, reuse_port, ref handed_over, .. } = settings.server;
    let mut handed_over = handed_over.clone().map(HandedOver::take);
    let mut listener = |name, address| {
        let taken = handed_over.as_mut().map_or(Ok(None), |sockets| sockets.listener(name));
        match taken.map_err(|source| StartError::HandedOver { name, source })? {
            Some(listener) => Ok(listener),
            None => {
                let failed = |source| StartError::Bind { address, reuse_port, source };
                Listener::bind(address, reuse_port).map_err(failed)
            }
        }
    };
    let (public, private) = (listener("public", listen)?, listener("admin", settings.admin.listen)?);
    let address = private.socket.local_addr()?;
    if !address.ip().is_loopback() && settings.admin.token.is_none() {
        return Err(StartError::AdminIsOpen(address));
    }
    Ok((public, private))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use actix_web::web::Bytes;
    use futures_util::{StreamExt as _, stream};

    use super::*;
    use crate::config::{Sources, load};
    use crate::limit::store::{RedisSettings, StoreKind, Topology};
    use crate::plan::{Policy, Priority};

    /// The workers found out, could not start, and the gateway went on without anybody behind its public port.
    #[test]
    fn an_address_of_redis_that_cannot_be_used_is_an_error_before_anything_runs() {
        let environment =
            [("TOLLGATE__SERVER__LISTEN", "127.0.0.1:0"), ("TOLLGATE__ADMIN__LISTEN", "127.0.0.1:0")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let mut loaded = load(&Sources { environment, ..Sources::built_in() }).unwrap();
        loaded.settings.store.kind = StoreKind::Redis(Box::new(RedisSettings {
            // The password is not UTF-8.
            topology: Topology::Standalone("redis://:%ff@127.0.0.1".into()),
            budget: Duration::from_millis(20),
            prefix: "test".to_owned(),
            local_share: None,
        }));
        let bound = Gateway::bind(loaded);
        assert!(matches!(bound, Err(StartError::Store(_))), "{bound:?}");
    }

    /// One caller who may have one request in flight.
    const ONE_AT_A_TIME: &str = r#"
        server.listen = "127.0.0.1:0"
        server.workers = 1
        identity.anonymous = "one"
        plans.one.limits = [{ name = "in_flight", limit = 1, algorithm = "concurrency" }]
        upstreams.api.targets = ["http://127.0.0.1:9"]
        routes.rest = { path = "/*", upstream = "api" }
    "#;

    fn handlers(app: &mut ServiceConfig) {
        async fn head() -> HttpResponse {
            panic!("a bug in front of the answer")
        }
        async fn body() -> HttpResponse {
            let pieces = stream::iter(0..3).then(|piece| async move {
                // What was written before it is sent while the next piece is waited for.
                tokio::task::yield_now().await;
                assert!(piece == 0, "a bug in the middle of the answer");
                Ok::<_, Infallible>(Bytes::from_static(b"x"))
            });
            HttpResponse::Ok().streaming(pieces)
        }
        app.route("/head", web::get().to(head)).route("/body", web::get().to(body));
        app.default_service(web::to(HttpResponse::Ok));
    }

    /// All that comes back for these requests on one connection until it closes, or for half a second.
    fn ask(address: SocketAddr, targets: &[&str]) -> String {
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let requests: String =
            targets.iter().map(|target| format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")).collect();
        client.write_all(requests.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // Where the connection is kept, this ends with the time limit.
        drop(client.read_to_end(&mut answer));
        String::from_utf8(answer).unwrap()
    }

    /// F27: a panic closed the connection without a word; and whatever it had taken was at the mercy of the unwinding.
    #[test]
    fn a_panic_costs_its_own_request_and_no_other() {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        std::fs::write(file.path(), ONE_AT_A_TIME).unwrap();
        let Loaded { settings, policy, .. } =
            load(&Sources { files: vec![file.path().to_owned()], ..Sources::built_in() }).unwrap();
        let memory = Arc::new(MemoryStore::new(10, Arc::new(SystemClock::new())));
        let metrics = Arc::new(Metrics::new().unwrap());
        let life = Life { drain: Drain::default(), overload: Overload::new(1) };
        let gate = Gate::new(Policy::new(policy).unwrap(), StoreKind::Memory, memory, Arc::clone(&metrics))
            .overload(life.overload.clone());
        let listener = Listener::bind(settings.server.listen, false).unwrap();
        let address = listener.socket.local_addr().unwrap();
        let (server, of_server) = (std::sync::mpsc::channel(), life.clone());
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async {
                let (ended, _) = mpsc::channel(1);
                let running = public_server(listener, gate, &settings, of_server, ended, handlers).unwrap();
                server.0.send(running.handle()).unwrap();
                running.await.unwrap();
            });
        });
        let handle = server.1.recv().unwrap();

        for round in 1..=3 {
            // What waits behind it on the connection is not run: nobody knows what the panic has left there.
            let answer = ask(address, &["/head", "/fine"]);
            assert!(answer.starts_with("HTTP/1.1 500 Internal Server Error\r\n"), "{answer}");
            for field in ["content-type: application/problem+json", "connection: close", "x-request-id: "] {
                assert!(answer.contains(field), "{field} in {answer}");
            }
            assert!(
                answer.contains(r#""detail":"The gateway has failed to handle this request.""#),
                "{answer}"
            );
            assert_eq!(answer.matches("HTTP/1.1").count(), 1, "{answer}");

            // The head is gone by then. What a client can see is that the last chunk is missing.
            let answer = ask(address, &["/body"]);
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && !answer.ends_with("0\r\n\r\n"), "{answer}");

            // The worker lives, and the slot, the place and the turn are free.
            let answer = ask(address, &["/fine", "/fine"]);
            assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 2, "{answer}");
            assert_eq!(metrics.panics.get(), 2 * round);
            assert_eq!(metrics.in_flight.get(), 0);
            drop(life.overload.place(Priority::High).unwrap());
        }
        drop(handle.stop(false));
        thread.join().unwrap();
        assert_eq!(life.drain.connections(), 0);
    }
}
