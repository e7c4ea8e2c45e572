//! What the errors of the library and of the server mean. The server's words stay here: they may hold a key, and so a caller,
//! or a password.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use ::redis::{ErrorKind, RedisError};

use crate::limit::store::FailureKind;

/// Why no link could be opened. It says nothing of what may be secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NotOpened {
    pub(super) kind: FailureKind,
    /// Host and port, or the path of a socket.
    pub(super) server: String,
    pub(super) reason: String,
}

impl fmt::Display for NotOpened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.server, self.reason)
    }
}

/// Whether the connection behind an error is of no further use: broken, or to a node that no longer takes writes.
pub(super) fn is_beyond_repair(error: &RedisError) -> bool {
    error.is_connection_dropped() || error.is_unrecoverable_error() || code(error) == Some("READONLY")
}

/// Whether the server knows no such command.
pub(super) fn is_unknown_command(error: &RedisError) -> bool {
    code(error) == Some("ERR") && error.detail().is_some_and(|detail| detail.contains("unknown command"))
}

/// The code that the server began its error with.
///
/// Redis 6.2 has no code for an error inside of a script: there it stands somewhere in the words.
pub(super) fn code(error: &RedisError) -> Option<&str> {
    const OF_WRITES: [&str; 6] = ["READONLY", "OOM", "MISCONF", "NOREPLICAS", "WRONGTYPE", "CLUSTERDOWN"];
    let code = error.code()?;
    let words = error.detail().filter(|_| code == "ERR").unwrap_or_default();
    let inside = |code: &&&str| words.contains(&format!("-{code} ")) || words.contains(&format!(" {code} "));
    OF_WRITES.iter().find(inside).copied().or(Some(code))
}

/// The kind of an error, and what may be said of it, when a link was being opened.
pub(super) fn reason(error: &RedisError) -> (FailureKind, String) {
    let says = |words| error.detail().is_some_and(|detail: &str| detail.contains(words));
    if says("max number of clients") {
        return (FailureKind::MaxClients, "it has as many connections as it takes (maxclients)".to_owned());
    }
    if says("cluster support disabled") {
        return (FailureKind::Other, "it is a single server and no node of a cluster".to_owned());
    }
    if let Some(code) = code(error) {
        return (FailureKind::of_code(code), format!("it answered {code}"));
    }
    if error.is_timeout() {
        return (FailureKind::Timeout, "no answer in time".to_owned());
    }
    // The library hands its source out in the box that it keeps it in.
    let source = error.source().and_then(|source| source.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    if let Some(source) = source {
        if let Some(error) = source.downcast_ref::<io::Error>() {
            return of_io(error);
        }
        if source.is::<rustls::Error>() {
            return (FailureKind::Tls, format!("TLS: {source}"));
        }
    }
    match error.kind() {
        ErrorKind::Parse => (FailureKind::Nonsense, "it does not speak the protocol of Redis".to_owned()),
        // The library's own words, and never its details.
        _ if error.is_connection_dropped() => {
            (FailureKind::Disconnected, "it closed the connection".to_owned())
        }
        _ => (FailureKind::Other, error.category().to_owned()),
    }
}

fn of_io(error: &io::Error) -> (FailureKind, String) {
    let inner = error.get_ref();
    if let Some(error) = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return (FailureKind::Tls, format!("TLS: {error}"));
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused => (FailureKind::Refused, "connection refused".to_owned()),
        io::ErrorKind::NotFound => (FailureKind::Refused, "there is no such socket".to_owned()),
        io::ErrorKind::TimedOut => (FailureKind::Timeout, "no answer in time".to_owned()),
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted => {
            (FailureKind::Disconnected, "it closed the connection".to_owned())
        }
        _ => (FailureKind::Unreachable, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_to_connect_has_its_reason_and_no_words_of_the_server() {
        let of = |kind| reason(&io::Error::from(kind).into());
        assert_eq!(of(io::ErrorKind::ConnectionRefused).0, FailureKind::Refused);
        assert_eq!(of(io::ErrorKind::NotFound).0, FailureKind::Refused);
        assert_eq!(of(io::ErrorKind::TimedOut).0, FailureKind::Timeout);
        assert_eq!(of(io::ErrorKind::UnexpectedEof).0, FailureKind::Disconnected);
        assert_eq!(of(io::ErrorKind::HostUnreachable).0, FailureKind::Unreachable);
        let tls = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let tls = reason(&io::Error::new(io::ErrorKind::InvalidData, tls).into());
        assert_eq!(tls, (FailureKind::Tls, "TLS: invalid peer certificate: UnknownIssuer".to_owned()));
        let parse = (ErrorKind::Parse, "canary", "canary".to_owned());
        assert!(!reason(&parse.into()).1.contains("canary"));
    }
}
