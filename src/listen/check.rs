//! What the HTTP library lets through and a gateway must not.
//!
//! A request head that two servers could read in two ways, or that asks for something the gateway does not do, is refused
//! before anything else looks at it. Message framing (lengths, chunks, bare CR) is the library's part and is not checked
//! again; the path and the query have their own checks in [`inbound::path`](crate::inbound::path).
//!
//! Stricter than RFC 9112 on purpose: a `Host` field is asked for in HTTP/1.0 too, and it holds a plain name or address
//! with an optional port, so that it can be logged, compared and forwarded without another look.
//!
//! Deliberately not here: status codes. `listen::reply` chooses them.

use std::net::Ipv6Addr;

use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::http::{Method, Uri};

use crate::inbound::METHODS;

/// Header field lines of one request.
pub const MAX_HEADER_LINES: usize = 64;
/// Bytes of all header field lines together, each counted as `name: value` and its line end.
pub const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Bytes of the request target.
pub const MAX_TARGET: usize = 8 * 1024;
/// Names that `Connection` may list. More is nobody's honest request: each makes a proxy take a field away.
pub const MAX_CONNECTION_OPTIONS: usize = 10;

/// `": "` and the line end.
const LINE_OVERHEAD: usize = 4;

/// Why a request head is refused. The sentences never repeat what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// `CONNECT`: known, and never served, since the client must not choose where a connection goes.
    #[error("CONNECT is not served here")]
    Connect,
    /// `TRACE`: known, and never served, since it would echo what proxies in front have added.
    #[error("TRACE is not served here")]
    Trace,
    /// None of the methods that a route can serve. Methods are case-sensitive: `get` is not `GET`.
    #[error("the method is not known; methods are written in upper case")]
    UnknownMethod,
    /// Longer than [`MAX_TARGET`].
    #[error("the request target is longer than {MAX_TARGET} bytes")]
    TargetTooLong,
    /// Neither `/path` nor `http://host/path`: `*`, a bare authority, or another scheme.
    #[error("the request target must be a path, or an http URL")]
    TargetForm,
    /// More than [`MAX_HEADER_LINES`].
    #[error("the request has more than {MAX_HEADER_LINES} header lines")]
    TooManyHeaders,
    /// More than [`MAX_HEADER_BYTES`].
    #[error("the request's header lines are longer than {MAX_HEADER_BYTES} bytes together")]
    HeadersTooLong,
    /// No `Host`.
    #[error("the request has no Host field")]
    HostMissing,
    /// More than one `Host`.
    #[error("the request has more than one Host field")]
    HostRepeated,
    /// A `Host` that is not a name or address with an optional port.
    #[error("the Host field must be a host name or address, with an optional port")]
    HostInvalid,
    /// The target names an authority, and `Host` names another.
    #[error("the request target and the Host field name different hosts")]
    HostDiffers,
    /// `Upgrade` to anything but `h2c`, which some clients offer on every request and never insist on.
    #[error("the connection cannot be upgraded here")]
    Upgrade,
    /// `Expect` of something that is not `100-continue`.
    #[error("the only expectation that can be met is 100-continue")]
    Expectation,
    /// More than [`MAX_CONNECTION_OPTIONS`].
    #[error("the Connection field lists more than {MAX_CONNECTION_OPTIONS} names")]
    TooManyConnectionOptions,
}

/// Whether the gateway serves a request with this head at all.
///
/// # Errors
/// The first reason why not.
pub fn head(method: &Method, target: &Uri, headers: &HeaderMap) -> Result<(), Refused> {
    check_method(method)?;
    check_target(target)?;
    let host = check_fields(headers)?;
    check_host(host, target)
}

fn check_method(method: &Method) -> Result<(), Refused> {
    match *method {
        Method::CONNECT => Err(Refused::Connect),
        Method::TRACE => Err(Refused::Trace),
        _ if METHODS.contains(method) => Ok(()),
        _ => Err(Refused::UnknownMethod),
    }
}

fn check_target(target: &Uri) -> Result<(), Refused> {
    let path_and_query = target.path_and_query().map_or(0, |text| text.as_str().len());
    let authority = target.authority().map_or(0, |text| text.as_str().len());
    if path_and_query + authority > MAX_TARGET {
        return Err(Refused::TargetTooLong);
    }
    let is_http = target.scheme_str().is_none_or(|scheme| matches!(scheme, "http" | "https"));
    if is_http && target.path().starts_with('/') { Ok(()) } else { Err(Refused::TargetForm) }
}

/// Looks at every field line once, and gives back the one `Host`.
fn check_fields(headers: &HeaderMap) -> Result<&HeaderValue, Refused> {
    if headers.len() > MAX_HEADER_LINES {
        return Err(Refused::TooManyHeaders);
    }
    let mut bytes = 0;
    let mut connection_options = 0;
    let mut host = None;
    for (name, value) in headers {
        bytes += line_length(name, value);
        if *name == header::HOST {
            if host.replace(value).is_some() {
                return Err(Refused::HostRepeated);
            }
        } else if *name == header::CONNECTION {
            connection_options += count_options(value);
        } else if *name == header::UPGRADE && !value.as_bytes().eq_ignore_ascii_case(b"h2c") {
            return Err(Refused::Upgrade);
        } else if *name == header::EXPECT && !value.as_bytes().eq_ignore_ascii_case(b"100-continue") {
            return Err(Refused::Expectation);
        }
    }
    if bytes > MAX_HEADER_BYTES {
        return Err(Refused::HeadersTooLong);
    }
    if connection_options > MAX_CONNECTION_OPTIONS {
        return Err(Refused::TooManyConnectionOptions);
    }
    host.ok_or(Refused::HostMissing)
}

fn line_length(name: &HeaderName, value: &HeaderValue) -> usize {
    name.as_str().len() + value.len() + LINE_OVERHEAD
}

fn count_options(connection: &HeaderValue) -> usize {
    connection.as_bytes().split(|&byte| byte == b',').filter(|option| !option.trim_ascii().is_empty()).count()
}

fn check_host(host: &HeaderValue, target: &Uri) -> Result<(), Refused> {
    let host = host.to_str().map_err(|_| Refused::HostInvalid)?;
    if !is_host(host) {
        return Err(Refused::HostInvalid);
    }
    // RFC 9112 section 3.2.2 lets the target win. A client that says two things is refused instead: what stands behind
    // this gateway may know only one of the two rules.
    match target.authority() {
        Some(authority) if !authority.as_str().eq_ignore_ascii_case(host) => Err(Refused::HostDiffers),
        _ => Ok(()),
    }
}

/// `name`, `192.0.2.1` or `[2001:db8::1]`, each with `:port` or without.
fn is_host(text: &str) -> bool {
    if let Some(bracketed) = text.strip_prefix('[') {
        return bracketed
            .split_once(']')
            .is_some_and(|(address, rest)| address.parse::<Ipv6Addr>().is_ok() && is_port_suffix(rest));
    }
    let name_length = text.find(':').unwrap_or(text.len());
    let (name, rest) = text.split_at(name_length);
    !name.is_empty() && name.bytes().all(is_name_byte) && is_port_suffix(rest)
}

/// Host names, and the underscore that names inside clusters have.
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_')
}

/// Nothing, or `:` and a number of 16 bits.
fn is_port_suffix(text: &str) -> bool {
    let Some(port) = text.strip_prefix(':') else {
        return text.is_empty();
    };
    port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok()
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;
    use proptest::prelude::*;

    use super::*;

    /// A request line's method and target, its field lines, and the answer.
    #[track_caller]
    fn check(method: &str, target: &str, fields: &[(&str, &str)], expected: Result<(), Refused>) {
        let mut request =
            TestRequest::with_uri(target).method(Method::from_bytes(method.as_bytes()).unwrap());
        for &field in fields {
            request = request.append_header(field);
        }
        let request = request.to_http_request();
        let actual = head(request.method(), request.uri(), request.headers());
        assert_eq!(actual, expected, "{method} {target} {fields:?}");
    }

    #[track_caller]
    fn check_host_line(host: &str, expected: Result<(), Refused>) {
        check("GET", "/", &[("host", host)], expected);
    }

    const HOST: (&str, &str) = ("host", "api.example.test");

    /// PATH-5: odd methods are a stock way around a limit that is bound to one method.
    #[test]
    fn only_the_methods_of_routes_are_served() {
        for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            check(method, "/v1/x", &[HOST], Ok(()));
        }
        check("CONNECT", "/v1/x", &[HOST], Err(Refused::Connect));
        check("CONNECT", "api.example.test:443", &[HOST], Err(Refused::Connect));
        check("TRACE", "/v1/x", &[HOST], Err(Refused::Trace));
        for method in ["get", "Get", "FOO", "PROPFIND", "GETT", "trace"] {
            check(method, "/v1/x", &[HOST], Err(Refused::UnknownMethod));
        }
    }

    #[test]
    fn the_target_is_a_path_or_an_http_url() {
        for target in ["/", "/v1/x?y", "http://api.example.test/x", "https://API.example.test?y"] {
            check("GET", target, &[HOST], Ok(()));
        }
        for target in ["*", "api.example.test", "api.example.test:80", "ftp://api.example.test/x"] {
            check("GET", target, &[HOST], Err(Refused::TargetForm));
        }
    }

    #[test]
    fn the_target_has_an_end() {
        let longest = format!("/{}", "a".repeat(MAX_TARGET - 1));
        check("GET", &longest, &[HOST], Ok(()));
        check("GET", &format!("{longest}a"), &[HOST], Err(Refused::TargetTooLong));
        let query = format!("/?{}", "a".repeat(MAX_TARGET - 1));
        check("GET", &query, &[HOST], Err(Refused::TargetTooLong));
    }

    #[test]
    fn there_is_exactly_one_host() {
        check("GET", "/", &[], Err(Refused::HostMissing));
        check("GET", "http://api.example.test/", &[], Err(Refused::HostMissing));
        check("GET", "/", &[HOST, ("accept", "*/*")], Ok(()));
        check("GET", "/", &[HOST, HOST], Err(Refused::HostRepeated));
        check("GET", "/", &[HOST, ("Host", "other.test")], Err(Refused::HostRepeated));
    }

    #[test]
    fn the_host_is_a_name_or_an_address() {
        for host in [
            "localhost",
            "api.example.test",
            "API.Example.Test.",
            "my_service-1:8080",
            "203.0.113.9",
            "203.0.113.9:80",
            "[2001:db8::1]",
            "[2001:db8::1]:65535",
        ] {
            check_host_line(host, Ok(()));
        }
        for host in [
            "",
            " ",
            ":80",
            "a:",
            "a:b",
            "a:+1",
            "a:65536",
            "a:1:2",
            "a,b",
            "a, a",
            "a b",
            "user@a",
            "user:pass@a",
            "a/b",
            "http://a",
            "a?b",
            "a#b",
            "a%2fb",
            "a\\b",
            "2001:db8::1",
            "[2001:db8::1",
            "[2001:db8::1]x",
            "[2001:db8::1]:",
            "[fe80::1%25eth0]",
            "[203.0.113.9]",
            "[]",
            "caf\u{e9}",
        ] {
            check_host_line(host, Err(Refused::HostInvalid));
        }
    }

    /// FWD-8: the request line named one host, the Host field another.
    #[test]
    fn an_absolute_target_and_the_host_field_agree() {
        let port = ("host", "api.example.test:8080");
        check("GET", "http://api.example.test:8080/v1/x", &[port], Ok(()));
        check("GET", "http://API.EXAMPLE.TEST/v1/x", &[HOST], Ok(()));
        check("GET", "http://other.test/v1/x", &[HOST], Err(Refused::HostDiffers));
        check("GET", "http://127.0.0.1:22/", &[HOST], Err(Refused::HostDiffers));
        check("GET", "http://api.example.test:80/", &[HOST], Err(Refused::HostDiffers));
        check("GET", "http://user@api.example.test/", &[HOST], Err(Refused::HostDiffers));
        check("GET", "http://api.example.test@other.test/", &[HOST], Err(Refused::HostDiffers));
    }

    #[test]
    fn what_cannot_be_done_is_said_so() {
        check("GET", "/", &[HOST, ("upgrade", "websocket")], Err(Refused::Upgrade));
        check("GET", "/", &[HOST, ("upgrade", "")], Err(Refused::Upgrade));
        check("GET", "/", &[HOST, ("upgrade", "h2c, websocket")], Err(Refused::Upgrade));
        // Common clients offer HTTP/2 with every request. RFC 9110 section 7.8 lets a server pass over it.
        check("GET", "/", &[HOST, ("upgrade", "h2c")], Ok(()));
        check("POST", "/", &[HOST, ("expect", "100-continue")], Ok(()));
        check("POST", "/", &[HOST, ("expect", "100-Continue")], Ok(()));
        for expectation in ["", "200-ok", "100-continue, 100-continue", "100-continue;x"] {
            check("POST", "/", &[HOST, ("expect", expectation)], Err(Refused::Expectation));
        }
    }

    #[test]
    fn header_lines_have_an_end() {
        let lines = |count| {
            let mut fields = vec![("x-a", "1"); count];
            fields.push(HOST);
            fields
        };
        check("GET", "/", &lines(MAX_HEADER_LINES - 1), Ok(()));
        check("GET", "/", &lines(MAX_HEADER_LINES), Err(Refused::TooManyHeaders));

        let host_line = HOST.0.len() + HOST.1.len() + LINE_OVERHEAD;
        let longest = "b".repeat(MAX_HEADER_BYTES - host_line - "x-a".len() - LINE_OVERHEAD);
        check("GET", "/", &[HOST, ("x-a", &longest)], Ok(()));
        check("GET", "/", &[HOST, ("x-a", &format!("{longest}b"))], Err(Refused::HeadersTooLong));
    }

    #[test]
    fn connection_lists_ten_names_at_most() {
        let ten = ["x-a"; MAX_CONNECTION_OPTIONS].join(", ");
        check("GET", "/", &[HOST, ("connection", &ten)], Ok(()));
        check("GET", "/", &[HOST, ("connection", &format!(", ,{ten},"))], Ok(()));
        check(
            "GET",
            "/",
            &[HOST, ("connection", &format!("{ten},x-a"))],
            Err(Refused::TooManyConnectionOptions),
        );
        check(
            "GET",
            "/",
            &[HOST, ("connection", &ten), ("connection", "close")],
            Err(Refused::TooManyConnectionOptions),
        );
    }

    proptest! {
        #[test]
        fn an_accepted_host_has_no_separator_in_it(host in "[a-z0-9.:@/,\\[\\]%_ -]{0,12}") {
            if is_host(&host) {
                prop_assert!(!host.contains(['@', '/', ',', '%', ' ']));
                let target = format!("http://{host}/");
                prop_assert!(target.parse::<Uri>().is_ok());
            }
        }
    }
}
