//! A small blocking HTTP/1.1 client: the bytes go out as written, the answer comes back as it was.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use super::wire::{Ending, Framing, Head, Wire};

/// How long an answer may take before the test gives up. Far above anything that is right.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection to a gateway.
#[derive(Debug)]
pub(crate) struct Connection {
    wire: Wire,
}

impl Connection {
    /// Connects from wherever the system likes.
    pub(crate) fn open(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).expect("the gateway accepts connections"))
    }

    /// As [`Self::open`], where there may be nobody.
    pub(crate) fn try_open(address: SocketAddr) -> io::Result<Self> {
        TcpStream::connect(address).map(Self::over)
    }

    /// Connects from another loopback address, so the gateway sees another peer.
    pub(crate) fn open_from(source: IpAddr, address: SocketAddr) -> Self {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::new(source, 0).into()).unwrap();
        socket.connect(&address.into()).expect("the gateway accepts connections");
        Self::over(socket.into())
    }

    fn over(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self { wire: Wire::new(stream) }
    }

    /// Writes these bytes.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.try_send(bytes).expect("the gateway takes the bytes");
    }

    /// Writes these bytes, where the gateway may have hung up already.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.wire.stream().write_all(bytes)
    }

    /// Whether the gateway has closed the connection, as a client looks before it sends a request on one that was kept.
    pub(crate) fn has_ended(&mut self) -> bool {
        let stream = self.wire.stream();
        stream.set_nonblocking(true).unwrap();
        let looked = stream.peek(&mut [0]);
        stream.set_nonblocking(false).unwrap();
        !matches!(looked, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// The next answer, to a request of this method.
    #[track_caller]
    pub(crate) fn answer(&mut self, method: &str) -> Answer {
        match self.try_answer(method) {
            Ok(Some(answer)) => answer,
            Ok(None) => panic!("the connection ended where an answer to {method} was due"),
            Err(error) => panic!("no readable answer to {method}: {error}"),
        }
    }

    /// The next answer; `None` when the connection ended before its first byte.
    pub(crate) fn try_answer(&mut self, method: &str) -> io::Result<Option<Answer>> {
        let mut body = Vec::new();
        let answer = self.stream_answer(method, &mut |piece| body.extend_from_slice(piece))?;
        Ok(answer.map(|answer| Answer { body, ..answer }))
    }

    /// As [`Self::try_answer`], with the body handed to `sink` instead of kept.
    pub(crate) fn stream_answer(
        &mut self,
        method: &str,
        sink: &mut dyn FnMut(&[u8]),
    ) -> io::Result<Option<Answer>> {
        loop {
            self.wire.take_raw();
            let Some(bytes) = self.wire.head()? else {
                return Ok(None);
            };
            let head = Head::parse(&bytes);
            let status = status_of(&head.first_line)?;
            if (100..200).contains(&status) {
                continue;
            }
            let framing = match status {
                204 | 304 => Framing::None,
                _ if method == "HEAD" => Framing::None,
                _ => head.framing().unwrap_or(Framing::UntilClose),
            };
            let ending = self.wire.body(framing, sink)?;
            return Ok(Some(Answer { status, head, body: Vec::new(), ending }));
        }
    }

    /// The next so many bytes, whatever they are.
    #[track_caller]
    pub(crate) fn bytes(&mut self, count: u64, limit: Duration) -> Vec<u8> {
        self.wire.stream().set_read_timeout(Some(limit)).unwrap();
        let mut bytes = Vec::new();
        let ending = self.wire.body(Framing::Length(count), &mut |piece| bytes.extend_from_slice(piece));
        assert_eq!(ending.unwrap(), Ending::Complete, "after {:?}", String::from_utf8_lossy(&bytes));
        bytes
    }

    /// Whatever still comes until the gateway closes, which it must do within `limit`.
    #[track_caller]
    pub(crate) fn rest_until_closed(&mut self, limit: Duration) -> Vec<u8> {
        self.wire.stream().set_read_timeout(Some(limit)).unwrap();
        let (bytes, outcome) = self.wire.rest();
        match outcome {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => panic!(
                "the connection was still open after {limit:?} ({error}); it had sent {:?}",
                String::from_utf8_lossy(&bytes)
            ),
            _ => bytes,
        }
    }

    /// Fails when anything comes within `span`.
    #[track_caller]
    pub(crate) fn expect_silence(&mut self, span: Duration) {
        self.wire.stream().set_read_timeout(Some(span)).unwrap();
        let (bytes, outcome) = self.wire.rest();
        assert!(
            bytes.is_empty() && outcome.is_err(),
            "{outcome:?} after {:?}",
            String::from_utf8_lossy(&bytes)
        );
    }

    /// Ends our direction, as a client does that has nothing more to say.
    pub(crate) fn finish_sending(&mut self) {
        self.wire.stream().shutdown(std::net::Shutdown::Write).unwrap();
    }
}

fn status_of(line: &str) -> io::Result<u16> {
    line.strip_prefix("HTTP/1.1 ")
        .and_then(|rest| rest.get(..3))
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| io::Error::other(format!("not a status line: {line:?}")))
}

/// An answer as it came.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// The status code.
    pub(crate) status: u16,
    /// The status line and all field lines, in order.
    pub(crate) head: Head,
    /// The body, with chunks put together and nothing else done to it.
    pub(crate) body: Vec<u8>,
    /// How the body ended.
    pub(crate) ending: Ending,
}

impl Answer {
    /// The value of the first line with this name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.field(name)
    }

    /// Whether the gateway will close the connection behind this answer.
    pub(crate) fn closes(&self) -> bool {
        self.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"))
    }

    /// The body as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }

    /// Fails unless the status is `status`; hands the answer on.
    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{:#?}\n{}", self.head, String::from_utf8_lossy(&self.body));
        self
    }

    /// `Retry-After` in whole seconds. Fails when it is there and not a whole number.
    #[track_caller]
    pub(crate) fn retry_after(&self) -> Option<u64> {
        let lines = self.head.lines("retry-after");
        assert!(lines.len() <= 1, "several Retry-After lines: {lines:?}");
        lines.first().map(|text| text.parse().expect("Retry-After is a whole number"))
    }

    /// A parameter of this limit's item in `RateLimit`, such as `r` or `t`.
    #[track_caller]
    pub(crate) fn rate_limit(&self, limit: &str, parameter: &str) -> Option<u64> {
        parameter_of(&self.head.lines("ratelimit").join(", "), limit, parameter)
    }

    /// A parameter of this limit's item in `RateLimit-Policy`, such as `q` or `w`.
    #[track_caller]
    pub(crate) fn policy(&self, limit: &str, parameter: &str) -> Option<u64> {
        parameter_of(&self.head.lines("ratelimit-policy").join(", "), limit, parameter)
    }

    /// What is left of this limit (`r`). Fails when the answer does not say.
    #[track_caller]
    pub(crate) fn remaining(&self, limit: &str) -> u64 {
        self.rate_limit(limit, "r").unwrap_or_else(|| panic!("no remaining for {limit}: {:#?}", self.head))
    }
}

/// A parameter of the item `name` in an RFC 9651 list of strings. Names in tests hold no comma and no semicolon.
#[track_caller]
fn parameter_of(list: &str, name: &str, parameter: &str) -> Option<u64> {
    let item =
        list.split(',').map(str::trim).find(|item| item.split(';').next() == Some(&format!("\"{name}\"")))?;
    item.split(';')
        .skip(1)
        .find_map(|pair| pair.strip_prefix(parameter)?.strip_prefix('='))
        .map(|number| number.parse().expect("a parameter is a whole number, never negative"))
}

/// A request that is put together by a test.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    method: String,
    target: String,
    fields: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

impl Request {
    /// A request for `target`, written into the request line as it is.
    pub(crate) fn new(method: &str, target: &str) -> Self {
        Self { method: method.to_owned(), target: target.to_owned(), fields: Vec::new(), body: Vec::new() }
    }

    /// A GET request.
    pub(crate) fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// Adds a field line.
    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.fields.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Shows this API key.
    pub(crate) fn key(self, key: &str) -> Self {
        self.header("X-Api-Key", key)
    }

    /// Adds a body with its length.
    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        let length = self.body.len().to_string();
        self.header("Content-Length", length)
    }

    /// Its method.
    pub(crate) fn method(&self) -> &str {
        &self.method
    }

    /// The bytes on the wire, with a `Host` unless the test wrote one.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = format!("{} {} HTTP/1.1\r\n", self.method, self.target).into_bytes();
        if !self.fields.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            bytes.extend_from_slice(b"Host: api.example.test\r\n");
        }
        for (name, value) in &self.fields {
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(b": ");
            bytes.extend_from_slice(value);
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// As [`Self::on`], where the connection may break.
    pub(crate) fn try_on(&self, connection: &mut Connection) -> io::Result<Answer> {
        connection.try_send(&self.to_bytes())?;
        let answer = connection.try_answer(&self.method)?;
        answer.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "closed without an answer"))
    }

    /// Sends it on this connection and waits for the answer.
    #[track_caller]
    pub(crate) fn on(&self, connection: &mut Connection) -> Answer {
        connection.send(&self.to_bytes());
        connection.answer(&self.method)
    }
}
