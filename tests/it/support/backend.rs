//! An upstream that keeps the bytes it was sent and answers as the test says.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

use super::wire::{Ending, Framing, Head, Wire};

/// Requests that are kept; later ones are only counted.
const KEPT_REQUESTS: usize = 20_000;

/// Bytes of a body that are kept; later ones are only counted.
const KEPT_BODY: usize = 1 << 20;

/// What the backend does with a connection after its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Waits for the next request.
    Keep,
    /// Closes it.
    Close,
    /// Resets it.
    Reset,
}

/// A request as the upstream saw it.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    /// The head.
    pub(crate) head: Head,
    /// Head and body as they were on the wire, chunk lines and all; at most 1 MiB.
    pub(crate) raw: Vec<u8>,
    /// The body without its framing; at most 1 MiB.
    pub(crate) body: Vec<u8>,
    /// The whole length of the body.
    pub(crate) body_length: u64,
    /// How the body ended.
    pub(crate) ending: Ending,
}

impl Received {
    /// The method.
    pub(crate) fn method(&self) -> &str {
        self.head.first_line.split(' ').next().unwrap_or_default()
    }

    /// The target, byte for byte.
    pub(crate) fn target(&self) -> &str {
        self.head.first_line.split(' ').nth(1).unwrap_or_default()
    }
}

type Handler = dyn Fn(&Received, &mut TcpStream) -> io::Result<After> + Send + Sync;

#[derive(Default)]
struct Log {
    received: Mutex<Vec<Received>>,
    count: AtomicUsize,
    body_bytes: AtomicU64,
    stopping: AtomicBool,
}

/// A recording upstream on a free port. Its threads end with its connections.
pub(crate) struct Backend {
    address: SocketAddr,
    log: Arc<Log>,
}

impl Backend {
    /// Answers every request with 200 and a two-byte body.
    pub(crate) fn ok() -> Self {
        Self::answering(|_| response("200 OK", &[], b"ok"))
    }

    /// Answers every request with the bytes that `answer` makes.
    pub(crate) fn answering(answer: impl Fn(&Received) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::with(move |request, stream| {
            stream.write_all(&answer(request))?;
            Ok(After::Keep)
        })
    }

    /// Lets `handler` write to the connection itself, once a request has been read.
    pub(crate) fn with(
        handler: impl Fn(&Received, &mut TcpStream) -> io::Result<After> + Send + Sync + 'static,
    ) -> Self {
        Self::listening(TcpListener::bind("127.0.0.1:0").unwrap(), handler)
    }

    /// Answers on this socket with the bytes that `answer` makes.
    pub(crate) fn on(
        listener: TcpListener,
        answer: impl Fn(&Received) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        Self::listening(listener, move |request, stream| {
            stream.write_all(&answer(request))?;
            Ok(After::Keep)
        })
    }

    fn listening(
        listener: TcpListener,
        handler: impl Fn(&Received, &mut TcpStream) -> io::Result<After> + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let log = Arc::new(Log::default());
        let handler: Arc<Handler> = Arc::new(handler);
        let accepting = Arc::clone(&log);
        thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.stopping.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (log, handler) = (Arc::clone(&accepting), Arc::clone(&handler));
                // A connection that breaks is the test's business, not this thread's.
                thread::spawn(move || serve(stream, &log, &*handler).ok());
            }
        });
        Self { address, log }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many requests it has seen.
    pub(crate) fn count(&self) -> usize {
        self.log.count.load(Ordering::Relaxed)
    }

    /// Body bytes seen so far, also of a request that still runs.
    pub(crate) fn body_bytes(&self) -> u64 {
        self.log.body_bytes.load(Ordering::Relaxed)
    }

    /// All requests so far.
    pub(crate) fn received(&self) -> Vec<Received> {
        self.log.received.lock().clone()
    }

    /// The newest request. Fails when there was none.
    #[track_caller]
    pub(crate) fn last(&self) -> Received {
        self.log.received.lock().last().cloned().expect("the upstream has seen a request")
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.log.stopping.store(true, Ordering::Relaxed);
        // Wakes the accepting thread, so that it sees the flag and frees the port.
        TcpStream::connect(self.address).ok();
    }
}

/// A complete answer with a length.
pub(crate) fn response(status: &str, fields: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut bytes = head(status, fields);
    bytes.truncate(bytes.len() - 2);
    bytes.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// A head alone, with its empty line.
pub(crate) fn head(status: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status}\r\n");
    for (name, value) in fields {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    text.into_bytes()
}

fn serve(stream: TcpStream, log: &Log, handler: &Handler) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut wire = Wire::new(stream);
    loop {
        wire.take_raw();
        let Some(bytes) = wire.head()? else {
            return Ok(());
        };
        let head = Head::parse(&bytes);
        let mut body = Vec::new();
        let mut body_length = 0;
        let framing = head.framing().unwrap_or(Framing::None);
        let ending = wire.body(framing, &mut |piece| {
            let room = KEPT_BODY.saturating_sub(body.len()).min(piece.len());
            body.extend_from_slice(&piece[..room]);
            body_length += piece.len() as u64;
            log.body_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
        })?;
        let request = Received { head, raw: wire.take_raw(), body, body_length, ending };
        if log.count.fetch_add(1, Ordering::Relaxed) < KEPT_REQUESTS {
            log.received.lock().push(request.clone());
        }
        if ending == Ending::Cut {
            return Ok(());
        }
        match handler(&request, wire.stream())? {
            After::Keep => {}
            After::Close => return Ok(()),
            After::Reset => {
                return socket2::SockRef::from(&*wire.stream()).set_linger(Some(std::time::Duration::ZERO));
            }
        }
    }
}
