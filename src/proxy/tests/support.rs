//! A gateway that only forwards, a backend that records raw bytes, and a client that sees raw bytes.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::http::StatusCode;
use actix_web::http::header::{HOST, HeaderName, HeaderValue};
use actix_web::rt::System;
use actix_web::web::{Data, Payload};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};

use crate::limit::Pass;
use crate::proxy::{Failure, Outgoing, UpstreamSettings, Upstreams};

/// Nothing on loopback takes as long, so a test that waits for it has failed.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// What a test may change about its gateway.
#[derive(Clone)]
pub(super) struct Setup {
    pub(super) upstream: UpstreamSettings,
    pub(super) max_body: u64,
    pub(super) peer_is_trusted: bool,
    pub(super) credentials: Vec<HeaderName>,
}

impl Setup {
    pub(super) fn to(targets: &[SocketAddr]) -> Self {
        let urls: Vec<String> = targets.iter().map(|address| format!("http://{address}")).collect();
        Self {
            upstream: UpstreamSettings::for_tests(urls.iter().map(String::as_str)),
            max_body: u64::MAX,
            peer_is_trusted: false,
            credentials: Vec::new(),
        }
    }
}

/// One worker that forwards everything.
pub(super) struct Gateway {
    address: SocketAddr,
    server: ServerHandle,
    thread: Option<JoinHandle<()>>,
}

struct State {
    setup: Setup,
    upstreams: Upstreams,
}

impl Gateway {
    pub(super) fn before(backend: &Backend) -> Self {
        Self::start(Setup::to(&[backend.address]))
    }

    pub(super) fn start(setup: Setup) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (started, handle) = sync_channel(1);
        let thread = std::thread::spawn(move || {
            System::new().block_on(async move {
                let server = HttpServer::new(move || {
                    let upstreams = Upstreams::new(std::slice::from_ref(&setup.upstream)).unwrap();
                    let state = State { setup: setup.clone(), upstreams };
                    App::new().app_data(Data::new(state)).default_service(web::to(forward))
                });
                let server = server.workers(1).disable_signals().listen(listener).unwrap().run();
                started.send(server.handle()).unwrap();
                server.await.unwrap();
            });
        });
        let server = handle.recv_timeout(PATIENCE).unwrap();
        Self { address, server, thread: Some(thread) }
    }

    pub(super) fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { stream, unread: Vec::new() }
    }

    /// Sends `request` on a connection of its own and returns everything that comes back until it is closed.
    pub(super) fn ask(&self, request: impl AsRef<[u8]>) -> Vec<u8> {
        let mut client = self.connect();
        client.send(request);
        client.read_to_end()
    }

    /// `GET path`, as text.
    pub(super) fn get(&self, path: &str) -> String {
        let answer = self.ask(format!("GET {path} HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n"));
        String::from_utf8(answer).unwrap()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.server.stop(false));
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the gateway panicked");
    }
}

async fn forward(request: HttpRequest, payload: Payload, state: Data<State>) -> HttpResponse {
    let request_id = HeaderValue::from_static("request-7");
    let outgoing = Outgoing {
        method: request.method(),
        path: request.uri().path(),
        query: request.uri().query(),
        headers: request.headers(),
        peer: request.peer_addr().unwrap().ip(),
        peer_is_trusted: state.setup.peer_is_trusted,
        scheme: "http",
        host: request.headers().get(HOST).unwrap().to_str().unwrap(),
        request_id: &request_id,
        credentials: &state.setup.credentials,
        account: Some("acme"),
        plan: "free",
        max_body: state.setup.max_body,
    };
    match state.upstreams.forward("api", outgoing, payload, &Pass::for_tests()).await {
        Ok(answer) => answer.response,
        Err(failure) => HttpResponse::build(status_of(&failure)).body(failure.to_string()),
    }
}

/// Distinct statuses, so that a test sees which failure it was.
fn status_of(failure: &Failure) -> StatusCode {
    match failure {
        Failure::Connect(_) | Failure::BadAnswer(_) => StatusCode::BAD_GATEWAY,
        Failure::ConnectTimeout(_) | Failure::HeadTimeout => StatusCode::GATEWAY_TIMEOUT,
        Failure::ClientGone | Failure::ClientMalformed => StatusCode::BAD_REQUEST,
        Failure::ClientStalled => StatusCode::REQUEST_TIMEOUT,
        Failure::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Failure::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// A client that shows the bytes.
pub(super) struct Client {
    pub(super) stream: TcpStream,
    unread: Vec<u8>,
}

impl Client {
    pub(super) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    /// The next bytes up to the empty line.
    pub(super) fn read_head(&mut self) -> String {
        read_head(&mut self.stream, &mut self.unread).expect("an answer")
    }

    /// Everything until the other side closes, or resets.
    pub(super) fn read_to_end(&mut self) -> Vec<u8> {
        let mut all = std::mem::take(&mut self.unread);
        match self.stream.read_to_end(&mut all) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            Err(error) => panic!("no end after {} bytes: {error}", all.len()),
        }
        all
    }

    /// How many bytes come until the other side closes, or `most` have come.
    pub(super) fn count_rest(&mut self, most: usize) -> usize {
        let mut total = std::mem::take(&mut self.unread).len();
        let mut block = vec![0; 65_536];
        while total < most {
            match self.stream.read(&mut block).unwrap() {
                0 => break,
                length => total += length,
            }
        }
        total
    }

    /// Exactly `length` bytes.
    pub(super) fn read_exact(&mut self, length: usize) -> Vec<u8> {
        while self.unread.len() < length {
            assert!(
                read_more(&mut self.stream, &mut self.unread),
                "closed after {} bytes",
                self.unread.len()
            );
        }
        self.unread.drain(..length).collect()
    }
}

/// A request as it arrived: every byte of head and body.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) head: String,
    pub(super) body: Vec<u8>,
}

impl Seen {
    pub(super) fn request_line(&self) -> &str {
        self.head.lines().next().unwrap()
    }

    /// The values of all lines with this name (any letter case), in order.
    pub(super) fn values(&self, name: &str) -> Vec<&str> {
        values(&self.head, name)
    }
}

/// The values of all lines of `head` with this name (any letter case), in order.
pub(super) fn values<'a>(head: &'a str, name: &str) -> Vec<&'a str> {
    let fields = head.lines().skip(1).take_while(|line| !line.is_empty());
    fields
        .map(|line| line.split_once(':').unwrap())
        .filter(|(field, _)| field.eq_ignore_ascii_case(name))
        .map(|(_, value)| value.trim())
        .collect()
}

/// What a backend does after it has read a request.
pub(super) enum Reply {
    /// Writes these bytes and waits for the next request.
    Keep(Vec<u8>),
    /// Writes these bytes and closes.
    Close(Vec<u8>),
    /// Writes these bytes and resets.
    Reset(Vec<u8>),
    /// Says nothing until the other side closes.
    Silence,
}

impl Reply {
    pub(super) fn keep(bytes: impl AsRef<[u8]>) -> Self {
        Self::Keep(bytes.as_ref().to_vec())
    }

    pub(super) fn close(bytes: impl AsRef<[u8]>) -> Self {
        Self::Close(bytes.as_ref().to_vec())
    }

    pub(super) fn reset(bytes: impl AsRef<[u8]>) -> Self {
        Self::Reset(bytes.as_ref().to_vec())
    }

    pub(super) fn ok() -> Self {
        Self::keep("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    }
}

/// A backend that keeps the raw bytes of each request.
pub(super) struct Backend {
    pub(super) address: SocketAddr,
    seen: Receiver<Seen>,
    accepting: Option<JoinHandle<()>>,
    closing: Arc<Mutex<bool>>,
}

impl Backend {
    /// Answers each request by its head and body.
    pub(super) fn answering(reply: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let (sender, seen) = channel();
        Self::serving(seen, move |mut stream| {
            let mut unread = Vec::new();
            while let Some(request) = read_request(&mut stream, &mut unread) {
                let reply = reply(&request);
                // A test that has seen enough no longer listens.
                drop(sender.send(request));
                match reply {
                    Reply::Keep(bytes) => stream.write_all(&bytes).unwrap(),
                    Reply::Close(bytes) => {
                        stream.write_all(&bytes).unwrap();
                        return;
                    }
                    Reply::Reset(bytes) => {
                        stream.write_all(&bytes).unwrap();
                        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
                        return;
                    }
                    Reply::Silence => {}
                }
            }
        })
    }

    /// Hands each connection to `serve`, in a thread of its own.
    pub(super) fn with_connections(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        Self::serving(channel().1, serve)
    }

    fn serving(seen: Receiver<Seen>, serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let closing = Arc::new(Mutex::new(false));
        let is_closing = Arc::clone(&closing);
        let serve = Arc::new(serve);
        let accepting = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if *is_closing.lock().unwrap() {
                    return;
                }
                let serve = Arc::clone(&serve);
                std::thread::spawn(move || serve(stream.unwrap()));
            }
        });
        Self { address, seen, accepting: Some(accepting), closing }
    }

    /// The next request that arrived.
    pub(super) fn next(&self) -> Seen {
        self.seen.recv_timeout(PATIENCE).expect("a request at the backend")
    }

    /// That nothing arrived which was not taken with [`next`](Self::next).
    pub(super) fn saw_nothing_else(&self) -> bool {
        matches!(self.seen.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        *self.closing.lock().unwrap() = true;
        drop(TcpStream::connect(self.address));
        drop(self.accepting.take().unwrap().join());
    }
}

/// An address where nobody listens.
pub(super) fn nobody() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap()
}

fn read_more(stream: &mut TcpStream, unread: &mut Vec<u8>) -> bool {
    let mut block = [0; 16_384];
    match stream.read(&mut block) {
        Ok(0) => false,
        Ok(length) => {
            unread.extend_from_slice(&block[..length]);
            true
        }
        Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
        Err(error) => panic!("reading failed: {error}"),
    }
}

fn take_through(stream: &mut TcpStream, unread: &mut Vec<u8>, end: &[u8]) -> Option<Vec<u8>> {
    loop {
        if let Some(at) = unread.windows(end.len()).position(|window| window == end) {
            return Some(unread.drain(..at + end.len()).collect());
        }
        if !read_more(stream, unread) {
            return None;
        }
    }
}

pub(super) fn read_head(stream: &mut TcpStream, unread: &mut Vec<u8>) -> Option<String> {
    let head = take_through(stream, unread, b"\r\n\r\n")?;
    Some(String::from_utf8(head).unwrap())
}

fn read_request(stream: &mut TcpStream, unread: &mut Vec<u8>) -> Option<Seen> {
    let head = read_head(stream, unread)?;
    let body = if let [length] = values(&head, "content-length")[..] {
        let length: usize = length.parse().unwrap();
        while unread.len() < length {
            if !read_more(stream, unread) {
                return None;
            }
        }
        unread.drain(..length).collect()
    } else if values(&head, "transfer-encoding").is_empty() {
        Vec::new()
    } else {
        take_through(stream, unread, b"0\r\n\r\n")?
    };
    Some(Seen { head, body })
}
