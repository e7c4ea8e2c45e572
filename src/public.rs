//! The server that clients talk to: connections with their turns, the gate, and behind it the way to the backends.

use std::io;
use std::net;
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

use crate::clock;
use crate::gate::{Admitted, Gate, UpstreamTime};
use crate::listen::drain::Drain;
use crate::listen::overload::Overload;
use crate::listen::reply::Rejection;
use crate::listen::turns::Turns;
use crate::proxy::{Answer, Failure, Outgoing};

/// How long a client may take for the head of a request, from its first byte (of the first one: from connecting).
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a refused upload is still read after the refusal, so that the client gets to see it.
const LINGER: Duration = Duration::from_secs(2);

/// How long a connection without a request is kept.
const KEEP_ALIVE: Duration = Duration::from_secs(75);

/// What the answers of all workers depend on besides the request.
#[derive(Debug, Clone)]
pub(crate) struct Life {
    pub(crate) drain: Drain,
    pub(crate) overload: Overload,
}

impl Life {
    /// Whether connections are kept behind an answer.
    fn keeps_connections(&self) -> bool {
        !self.drain.is_leaving() && !self.overload.is_short_of_memory()
    }
}

/// How much is taken on at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    /// Threads that serve.
    pub(crate) workers: usize,
    /// Connections of one of them.
    pub(crate) max_connections: usize,
}

/// The server on this socket, on to the backends behind the gate. `ended` is closed when the last of its workers is gone.
///
/// # Errors
/// When the socket cannot be used.
pub(crate) fn server(
    socket: net::TcpListener,
    gate: Gate,
    size: Size,
    life: Life,
    ended: mpsc::Sender<()>,
) -> io::Result<Server> {
    server_with(socket, gate, size, life, ended, |app| {
        app.default_service(web::to(forward));
    })
}

/// The same with other handlers behind the gate.
fn server_with(
    socket: net::TcpListener,
    gate: Gate,
    size: Size,
    life: Life,
    ended: mpsc::Sender<()>,
    handlers: fn(&mut ServiceConfig),
) -> io::Result<Server> {
    let Size { workers, max_connections } = size;
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
        .listen("public", socket, service)?;
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::io::{Read as _, Write as _};
    use std::net::{SocketAddr, TcpStream};

    use actix_web::web::Bytes;
    use futures_util::{StreamExt as _, stream};

    use super::*;
    use crate::clock::SystemClock;
    use crate::config::{Loaded, Sources, load};
    use crate::limit::store::{MemoryStore, StoreKind};
    use crate::observe::Metrics;
    use crate::plan::{Policy, Priority};

    /// One caller who may have one request in flight.
    const ONE_AT_A_TIME: &str = r#"
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
        let Loaded { policy, .. } =
            load(&Sources { files: vec![file.path().to_owned()], ..Sources::built_in() }).unwrap();
        let memory = Arc::new(MemoryStore::new(10, Arc::new(SystemClock::new())));
        let metrics = Arc::new(Metrics::new().unwrap());
        let life = Life { drain: Drain::default(), overload: Overload::new(1) };
        let gate = Gate::new(Policy::new(policy).unwrap(), StoreKind::Memory, memory, Arc::clone(&metrics))
            .overload(life.overload.clone());
        let socket = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let (server, of_server) = (std::sync::mpsc::channel(), life.clone());
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async {
                let (ended, _) = mpsc::channel(1);
                let size = Size { workers: 1, max_connections: 100 };
                let running = server_with(socket, gate, size, of_server, ended, handlers).unwrap();
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
