//! One request at a time on a connection, a limit on how long each head may take, and an end when the gateway stops.
//!
//! The HTTP library reads ahead: it parses pipelined requests while an earlier one is being answered, and then writes
//! that answer by what it knows of the *latest* request. A `GET` with a `HEAD` right behind it is answered with a
//! `Content-Length` and no body, so whoever reads takes the next answer for that body; a request after a refusal that
//! closes the connection is still run; an answer that is due is lost when what follows it is malformed. And its timer
//! for slow heads is armed for the first request of a connection only.
//!
//! So the library sits behind [`Turns`], which lets the bytes of one request through and holds back what follows until
//! that request's [`Turn`] has ended. Only where a request ends is found out here. Whether it is well formed stays the
//! library's judgement: it sees every byte, in order, and closes the connection where it refuses one.
//!
//! The library could end connections by itself when a server stops, but not kindly: it throws away a request whose head has
//! begun to arrive, and closes under a client that called a moment ago and is about to call again.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use smallvec::SmallVec;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::drain::Connected;

/// How long a connection must have been without a request before a gateway that stops closes it. A client that calls more
/// often than that is told with its next answer, and never has a request under way to a socket that is gone.
const QUIET: Duration = Duration::from_secs(1);

/// Bytes of later requests that are held back. More stay in the system's buffers, and with the client.
const HELD_MAX: usize = 16 * 1024;

/// What a client gets that takes too long over a head.
const TOO_SLOW: &[u8] = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// A connection whose requests wait for each other.
#[derive(Debug)]
pub struct Turns<T> {
    io: T,
    scanner: Scanner,
    taken: Rc<Taken>,
    /// Read, and not let through yet.
    held: BytesMut,
    head_limit: Duration,
    /// Runs while a head is incomplete.
    head_timer: Option<Pin<Box<Sleep>>>,
    /// Whether an answer is stuck in the library, because the client does not read.
    write_blocked: bool,
    connected: Connected,
    /// Runs while a gateway that stops waits for one more request.
    quiet_timer: Option<Pin<Box<Sleep>>>,
}

/// Whether a request of a connection is being answered.
#[derive(Debug)]
struct Taken {
    taken: Cell<bool>,
    /// When the last turn ended, or the connection began.
    free_since: Cell<Instant>,
    waiting: RefCell<Option<Waker>>,
}

/// A connection's turns, for whoever answers its requests.
#[derive(Debug, Clone)]
pub struct TurnOf(Rc<Taken>);

impl TurnOf {
    /// The turn of the request that is being answered.
    #[must_use]
    pub fn current(&self) -> Turn {
        Turn(Rc::clone(&self.0))
    }
}

/// The turn of one request. When it is dropped, which must be behind the end of the answer, the next request may come.
#[derive(Debug)]
pub struct Turn(Rc<Taken>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.taken.set(false);
        self.0.free_since.set(Instant::now());
        if let Some(waiting) = self.0.waiting.take() {
            waiting.wake();
        }
    }
}

impl<T> Turns<T> {
    /// `io`, whose request heads may take `head_limit` each, as one of the connections of a listener.
    pub fn new(io: T, head_limit: Duration, connected: Connected) -> Self {
        let taken = Taken {
            taken: Cell::new(false),
            free_since: Cell::new(Instant::now()),
            waiting: RefCell::default(),
        };
        Self {
            io,
            scanner: Scanner::default(),
            taken: Rc::new(taken),
            held: BytesMut::new(),
            head_limit,
            head_timer: None,
            write_blocked: false,
            connected,
            quiet_timer: None,
        }
    }

    /// What the answering side needs to end turns.
    pub fn turns(&self) -> TurnOf {
        TurnOf(Rc::clone(&self.taken))
    }

    fn may_pass(&self) -> bool {
        !self.scanner.is_between() || !self.taken.taken.get()
    }

    /// How many of these bytes may go through now.
    fn pass(&mut self, bytes: &[u8]) -> usize {
        let mut passed = 0;
        while passed < bytes.len() && self.may_pass() {
            let (length, head_is_over) = self.scanner.advance(&bytes[passed..]);
            passed += length;
            if head_is_over {
                self.taken.taken.set(true);
            }
        }
        if !self.scanner.is_in_head() {
            self.head_timer = None;
        } else if self.head_timer.is_none() {
            self.head_timer = Some(Box::pin(sleep_until(Instant::now() + self.head_limit)));
        }
        passed
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Turns<T> {
    /// Nothing came: is the head that has begun late by now?
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(timer) = &mut self.head_timer else {
            return Poll::Pending;
        };
        ready!(timer.as_mut().poll(context));
        self.head_timer = None;
        if !self.write_blocked && !self.taken.taken.get() {
            // Whether it arrives or not: the connection ends.
            let _written = Pin::new(&mut self.io).poll_write(context, TOO_SLOW);
        }
        // As if the client had closed: the library then does the same, and has nothing to complain of.
        Poll::Ready(())
    }

    /// Nothing came: is it time to go? Then, too, it looks as if the client had closed.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.connected.poll_closing(context));
        if self.taken.taken.get() || !self.scanner.is_between() {
            // The end of the turn must bring us back here; a head or a body that still comes does so by itself.
            *self.taken.waiting.borrow_mut() = Some(context.waker().clone());
            self.quiet_timer = None;
            return Poll::Pending;
        }
        let over = self.taken.free_since.get() + QUIET;
        let timer = self.quiet_timer.get_or_insert_with(|| Box::pin(sleep_until(over)));
        timer.as_mut().poll(context).map(Ok)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Turns<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.held.is_empty() && this.may_pass() {
                let held = std::mem::take(&mut this.held);
                let passed = this.pass(&held[..held.len().min(buffer.remaining())]);
                buffer.put_slice(&held[..passed]);
                this.held = held;
                this.held.advance(passed);
                return Poll::Ready(Ok(()));
            }
            if !this.held.is_empty() {
                *this.taken.waiting.borrow_mut() = Some(context.waker().clone());
                if this.held.len() >= HELD_MAX {
                    return Poll::Pending;
                }
            }
            let start = buffer.filled().len();
            match Pin::new(&mut this.io).poll_read(context, buffer) {
                Poll::Ready(read) => read?,
                Poll::Pending if this.poll_late(context).is_ready() => return Poll::Ready(Ok(())),
                Poll::Pending => return this.poll_end(context),
            }
            let read = &buffer.filled()[start..];
            if read.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let passed = if this.held.is_empty() { this.pass(read) } else { 0 };
            this.held.extend_from_slice(&buffer.filled()[start + passed..]);
            buffer.set_filled(start + passed);
            if passed > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Turns<T> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(context, bytes);
        this.write_blocked = written.is_pending();
        written
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

/// Finds where requests end.
#[derive(Debug, Default)]
struct Scanner {
    part: Part,
    line: Line,
    framing: Framing,
}

/// Where in a request the next byte stands.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Before its first byte, or in the empty lines that may stand before it.
    #[default]
    Between,
    /// In its head.
    Head,
    /// In a body, or in a chunk and its line end, of which so many bytes are to come.
    Bytes { left: u64, chunked: bool },
    /// In the line that tells the size of a chunk.
    Size,
    /// In the line behind the last chunk.
    End,
    /// Not of a form that is understood here, nor by the library, which closes the connection.
    Broken,
}

/// The beginning of the line being read: more than any name or value that matters here.
#[derive(Debug, Default)]
struct Line(SmallVec<[u8; LINE_START]>);

/// `Transfer-Encoding`, `Content-Length: ` and the digits of any length.
const LINE_START: usize = 128;

/// What a head says of its body.
#[derive(Debug, Default, Clone, Copy)]
struct Framing {
    length: u64,
    chunked: bool,
}

impl Scanner {
    fn is_between(&self) -> bool {
        self.part == Part::Between
    }

    fn is_in_head(&self) -> bool {
        self.part == Part::Head
    }

    /// Takes bytes up to the end of a part at most: how many, and whether they end a head.
    fn advance(&mut self, bytes: &[u8]) -> (usize, bool) {
        match self.part {
            Part::Between => {
                let empty = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
                if empty < bytes.len() {
                    *self = Self { part: Part::Head, ..Self::default() };
                }
                (empty, false)
            }
            Part::Bytes { left, chunked } => {
                let taken = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let left = left - taken as u64;
                self.part = match (left, chunked) {
                    (0, false) => Part::Between,
                    (0, true) => Part::Size,
                    _ => Part::Bytes { left, chunked },
                };
                (taken, false)
            }
            Part::Broken => (bytes.len(), false),
            Part::Head | Part::Size | Part::End => self.advance_line(bytes),
        }
    }

    fn advance_line(&mut self, bytes: &[u8]) -> (usize, bool) {
        let line_end = bytes.iter().position(|&byte| byte == b'\n');
        let taken = line_end.map_or(bytes.len(), |end| end + 1);
        self.line.push(&bytes[..taken]);
        if line_end.is_none() {
            return (taken, false);
        }
        let line = std::mem::take(&mut self.line);
        let text = line.text();
        let was_head = self.part == Part::Head;
        self.part = match self.part {
            Part::Head if text.is_empty() => self.framing.first_part(),
            Part::Head => {
                self.framing.read(text);
                Part::Head
            }
            Part::Size => match chunk_size(text) {
                Some(0) => Part::End,
                Some(size) => Part::Bytes { left: size.saturating_add(2), chunked: true },
                None => Part::Broken,
            },
            Part::End if text.is_empty() => Part::Between,
            _ => Part::Broken,
        };
        (taken, was_head && self.part != Part::Head)
    }
}

impl Line {
    fn push(&mut self, bytes: &[u8]) {
        let room = LINE_START - self.0.len();
        self.0.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// The line, or the beginning of a long one, without its end.
    fn text(&self) -> &[u8] {
        let text = self.0.strip_suffix(b"\n").unwrap_or(&self.0);
        text.strip_suffix(b"\r").unwrap_or(text)
    }
}

impl Framing {
    fn read(&mut self, line: &[u8]) {
        let Some(colon) = line.iter().position(|&byte| byte == b':') else {
            return;
        };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.chunked = true;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let length = std::str::from_utf8(value).ok().and_then(|value| value.parse().ok());
            self.length = length.unwrap_or(0);
        }
    }

    fn first_part(self) -> Part {
        match self {
            Self { chunked: true, .. } => Part::Size,
            Self { length: 0, .. } => Part::Between,
            Self { length, .. } => Part::Bytes { left: length, chunked: false },
        }
    }
}

/// The size in a chunk's first line, whatever extensions follow it.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    u64::from_str_radix(std::str::from_utf8(&line[..digits]).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::listen::drain::Drain;

    const REQUESTS: [&str; 7] = [
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "HEAD / HTTP/1.1\nHost: a\n\n",
        "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        "POST / HTTP/1.1\r\ncontent-length:\t0013 \r\n\r\n\n\nGET / x\r\n\r\n",
        "POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n3;a=b\r\n\r\n\r\r\n0A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n",
        "\r\n\nGET / HTTP/1.0\r\nX-Content-Length: 5\r\nContent-Lengths: 5\r\n\r\n",
        "POST / HTTP/1.1\r\nTRANSFER-ENCODING: chunked\r\n\r\n0;x\r\n\r\n",
    ];

    /// The pieces that get through, one for each turn.
    async fn pieces(sent: &[u8], cut: usize) -> Vec<String> {
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let mut turns = Turns::new(near, Duration::from_secs(60), Drain::default().connection());
        let mut pieces = Vec::new();
        let mut buffer = BytesMut::with_capacity(1 << 20);
        let waits = |turns: &mut Turns<_>, buffer: &mut BytesMut| {
            while futures_util::FutureExt::now_or_never(turns.read_buf(buffer))
                .is_some_and(|read| read.unwrap() > 0)
            {}
        };
        for part in sent.chunks(cut) {
            far.write_all(part).await.unwrap();
            waits(&mut turns, &mut buffer);
            while turns.taken.taken.get() && turns.scanner.is_between() {
                pieces.push(String::from_utf8(buffer.split().to_vec()).unwrap());
                drop(turns.turns().current());
                waits(&mut turns, &mut buffer);
            }
        }
        assert!(buffer.is_empty());
        pieces
    }

    proptest! {
        #[test]
        fn requests_come_one_by_one_however_they_are_cut(
            picks in prop::collection::vec(0..REQUESTS.len(), 1..6),
            cut in 1..200_usize,
        ) {
            let sent: Vec<&str> = picks.iter().map(|&pick| REQUESTS[pick]).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let got = runtime.block_on(pieces(sent.concat().as_bytes(), cut));
            prop_assert_eq!(got, sent);
        }
    }
}
