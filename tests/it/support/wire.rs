//! HTTP/1.1 bytes off a socket, for the client and for the recording backend.
//!
//! On purpose not a library: a library tidies up targets, field names and broken endings, and those are what the
//! tests look at. No TLS, no HTTP/2.

use std::io::{self, Read};
use std::net::TcpStream;

/// How much of what was read a [`Wire`] keeps as raw bytes.
const TAP_CAP: usize = 1 << 20;

/// How a message says where its body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// There is no body.
    None,
    /// So many bytes.
    Length(u64),
    /// Chunks, until the empty one.
    Chunked,
    /// Until the connection ends.
    UntilClose,
}

/// How a body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// As its framing promised.
    Complete,
    /// With the connection, where the framing promised nothing else.
    Closed,
    /// With the connection, before its framing said so.
    Cut,
}

/// A start line and the field lines behind it, in their order.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    /// The request line or the status line.
    pub(crate) first_line: String,
    /// Name as written, and value without the blanks around it.
    pub(crate) fields: Vec<(String, String)>,
}

impl Head {
    /// Parses the bytes up to and including the empty line.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.trim_end_matches("\r\n").split("\r\n");
        let first_line = lines.next().unwrap_or_default().to_owned();
        let fields = lines
            .map(|line| {
                let (name, value) = line.split_once(':').unwrap_or((line, ""));
                (name.to_owned(), value.trim().to_owned())
            })
            .collect();
        Self { first_line, fields }
    }

    /// The values of all lines with this name, in order.
    pub(crate) fn lines(&self, name: &str) -> Vec<&str> {
        self.fields
            .iter()
            .filter(|(field, _)| field.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.as_str())
            .collect()
    }

    /// The value of the first line with this name.
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        self.lines(name).first().copied()
    }

    /// What the length fields say; `None` when they say nothing.
    pub(crate) fn framing(&self) -> Option<Framing> {
        if let Some(coding) = self.field("transfer-encoding") {
            assert!(coding.eq_ignore_ascii_case("chunked"), "an unknown transfer coding: {coding}");
            return Some(Framing::Chunked);
        }
        let length = self.field("content-length")?;
        Some(Framing::Length(length.parse().expect("a content-length is a number")))
    }
}

/// One direction of a connection, with what was read too far.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
    start: usize,
    tap: Vec<u8>,
}

impl Wire {
    /// Reads from `stream`.
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, buffer: Vec::new(), start: 0, tap: Vec::new() }
    }

    /// The socket, for writing.
    pub(crate) fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// The raw bytes consumed since the last call, up to [`TAP_CAP`].
    pub(crate) fn take_raw(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.tap)
    }

    /// A head with its empty line; `None` when the connection ended before its first byte.
    pub(crate) fn head(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut searched = 0;
        loop {
            let found = self.unread()[searched..]
                .windows(4)
                .position(|bytes| bytes == b"\r\n\r\n")
                .map(|at| searched + at + 4);
            if let Some(length) = found {
                return Ok(Some(self.consume(length)));
            }
            searched = self.unread().len().saturating_sub(3);
            if self.fill()? == 0 {
                return if self.unread().is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    /// Hands the body to `sink` piece by piece and says how it ended.
    pub(crate) fn body(&mut self, framing: Framing, sink: &mut dyn FnMut(&[u8])) -> io::Result<Ending> {
        match framing {
            Framing::None => Ok(Ending::Complete),
            Framing::Length(length) => self.exactly(length, sink),
            Framing::Chunked => self.chunks(sink),
            Framing::UntilClose => {
                self.exactly(u64::MAX, sink)?;
                Ok(Ending::Closed)
            }
        }
    }

    /// Everything that still comes, until the connection ends or a read fails (also by its time limit).
    pub(crate) fn rest(&mut self) -> (Vec<u8>, io::Result<()>) {
        loop {
            match self.fill() {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => return (self.consume(self.unread().len()), Err(error)),
            }
        }
        (self.consume(self.unread().len()), Ok(()))
    }

    fn exactly(&mut self, length: u64, sink: &mut dyn FnMut(&[u8])) -> io::Result<Ending> {
        let mut missing = length;
        while missing > 0 {
            if self.unread().is_empty() && self.fill_or_end()? == 0 {
                return Ok(Ending::Cut);
            }
            let here = usize::try_from(missing).unwrap_or(usize::MAX).min(self.unread().len());
            let piece = self.consume(here);
            sink(&piece);
            missing -= here as u64;
        }
        Ok(Ending::Complete)
    }

    fn chunks(&mut self, sink: &mut dyn FnMut(&[u8])) -> io::Result<Ending> {
        loop {
            let Some(line) = self.line()? else {
                return Ok(Ending::Cut);
            };
            let digits = line.split(';').next().unwrap_or_default().trim();
            let size = u64::from_str_radix(digits, 16)
                .map_err(|_| io::Error::other(format!("not a chunk size: {line:?}")))?;
            if self.exactly(size, sink)? == Ending::Cut {
                return Ok(Ending::Cut);
            }
            // Behind a chunk its line end; behind the last one the (never used) trailer section's.
            match self.line()? {
                None => return Ok(Ending::Cut),
                Some(line) if !line.is_empty() => {
                    return Err(io::Error::other(format!("not a chunk end: {line:?}")));
                }
                Some(_) if size == 0 => return Ok(Ending::Complete),
                Some(_) => {}
            }
        }
    }

    /// A line without its CRLF; `None` when the connection ended first.
    fn line(&mut self) -> io::Result<Option<String>> {
        loop {
            if let Some(at) = self.unread().windows(2).position(|bytes| bytes == b"\r\n") {
                let line = self.consume(at + 2);
                return Ok(Some(String::from_utf8_lossy(&line[..at]).into_owned()));
            }
            if self.fill_or_end()? == 0 {
                return Ok(None);
            }
        }
    }

    fn unread(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    fn consume(&mut self, length: usize) -> Vec<u8> {
        let taken = self.buffer[self.start..self.start + length].to_vec();
        self.start += length;
        let room = TAP_CAP.saturating_sub(self.tap.len()).min(length);
        self.tap.extend_from_slice(&taken[..room]);
        taken
    }

    /// As [`Self::fill`], with a reset taken for what it is to a reader: the end.
    fn fill_or_end(&mut self) -> io::Result<usize> {
        match self.fill() {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(0),
            other => other,
        }
    }

    fn fill(&mut self) -> io::Result<usize> {
        self.buffer.drain(..self.start);
        self.start = 0;
        let old = self.buffer.len();
        self.buffer.resize(old + (64 << 10), 0);
        let outcome = loop {
            match self.stream.read(&mut self.buffer[old..]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        self.buffer.truncate(old + outcome.as_ref().copied().unwrap_or(0));
        outcome
    }
}
