//! Which header fields go on, in both directions. Pure: a map goes in, a map comes out.
//!
//! Fields belong to one of three parties:
//!
//! * **This hop.** `Connection` and what it lists, framing, `Expect`: they end here and are made new for the next hop.
//! * **The gateway.** `X-Forwarded-*`, `Forwarded`, `X-Request-Id`, `X-Tollgate-*`: a backend believes them, so a client
//!   must not write them. Neither can it name them in `Connection` to have them removed, nor write `X_Forwarded_For`,
//!   which many backends read as the same name.
//! * **The client and the backend.** All others: line by line, in order, with their bytes untouched.
//!
//! actix and http 1 have their own types for names and values; this is where one becomes the other.

use std::net::IpAddr;

use actix_web::http::header::{self as inbound, HeaderMap as InboundMap, HeaderName as InboundName};
use http::header::{self as outbound, HeaderMap as OutboundMap, HeaderName, HeaderValue};
use smallvec::SmallVec;

use super::{Failure, Outgoing};

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
static X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
static X_TOLLGATE_ACCOUNT: HeaderName = HeaderName::from_static("x-tollgate-account");
static X_TOLLGATE_PLAN: HeaderName = HeaderName::from_static("x-tollgate-plan");

/// Fields that the gateway adds at most, so that the map is allocated once.
const FIELDS_ADDED_MAX: usize = 10;

/// How the body of a request is delimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// No body and no field about one.
    None,
    /// `Content-Length`, which may be 0.
    Length(u64),
    /// `Transfer-Encoding: chunked`.
    Chunked,
}

impl Framing {
    /// How a request with these fields is framed. The parser has already refused what is ambiguous.
    pub(super) fn of(headers: &InboundMap) -> Result<Self, Failure> {
        if headers.contains_key(inbound::TRANSFER_ENCODING) {
            return Ok(Self::Chunked);
        }
        let Some(length) = headers.get(inbound::CONTENT_LENGTH) else {
            return Ok(Self::None);
        };
        let length = length.to_str().ok().and_then(|text| text.parse().ok());
        let length = length.ok_or(Failure::Internal("the parser let a malformed length pass"))?;
        Ok(Self::Length(length))
    }

    /// Whether body bytes may follow.
    pub(super) fn has_body(self) -> bool {
        !matches!(self, Self::None | Self::Length(0))
    }

    fn write(self, headers: &mut OutboundMap) {
        match self {
            Self::None => {}
            Self::Length(length) => {
                headers.insert(outbound::CONTENT_LENGTH, HeaderValue::from(length));
            }
            Self::Chunked => {
                headers.insert(outbound::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
        }
    }
}

/// The header fields of the request to the backend. `authority` is the target's.
pub(super) fn to_upstream(
    outgoing: &Outgoing<'_>,
    framing: Framing,
    authority: &HeaderValue,
    preserve_host: bool,
) -> Result<OutboundMap, Failure> {
    let mut headers = OutboundMap::with_capacity(outgoing.headers.len() + FIELDS_ADDED_MAX);
    let client_host = value(outgoing.host.as_bytes())?;

    headers.insert(outbound::HOST, if preserve_host { client_host.clone() } else { authority.clone() });
    framing.write(&mut headers);
    copy_request_fields(outgoing, &mut headers)?;

    let peer = outgoing.peer.to_canonical();
    let written = peer.to_string();
    headers.insert(&X_FORWARDED_FOR, appended(outgoing, "x-forwarded-for", &written)?);
    headers.insert(outbound::FORWARDED, forwarded(outgoing, peer, &written)?);
    // A trusted peer has said both already, from where it stands. Otherwise the client stands right before us.
    headers.entry(&X_FORWARDED_PROTO).or_insert(value(outgoing.scheme.as_bytes())?);
    headers.entry(&X_FORWARDED_HOST).or_insert(client_host);
    headers.insert(&X_REQUEST_ID, value(outgoing.request_id.as_bytes())?);
    headers.insert(&X_TOLLGATE_PLAN, value(outgoing.plan.as_bytes())?);
    if let Some(account) = outgoing.account {
        headers.insert(&X_TOLLGATE_ACCOUNT, value(account.as_bytes())?);
    }
    Ok(headers)
}

fn copy_request_fields(outgoing: &Outgoing<'_>, headers: &mut OutboundMap) -> Result<(), Failure> {
    let connection_lines = outgoing.headers.get_all(inbound::CONNECTION).map(|line| line.as_bytes());
    let connection = listed(connection_lines, |name| outgoing.headers.contains_key(name));
    let credentials = outgoing.credentials;

    for (name, content) in outgoing.headers {
        let name = name.as_str();
        let goes_on = match owner(name) {
            Owner::Hop | Owner::Gateway => false,
            Owner::Proxies => outgoing.peer_is_trusted,
            Owner::Ends => !is_listed(&connection, name),
        };
        if !goes_on || is_credential(name, credentials) || is_look_alike(name, credentials) {
            continue;
        }
        headers.append(outbound_name(name)?, value(content.as_bytes())?);
    }
    Ok(())
}

/// Copies the header fields of a backend's answer, except those of its own hop.
///
/// `Content-Length` is of the hop too: the body type says it, because actix writes what the body says.
pub(super) fn to_client(answer: &OutboundMap, headers: &mut InboundMap) -> Result<(), Failure> {
    let connection_lines = answer.get_all(outbound::CONNECTION).iter().map(HeaderValue::as_bytes);
    let connection = listed(connection_lines, |name| answer.contains_key(name));
    for (name, content) in answer {
        if is_hop_by_hop(name.as_str())
            || name == outbound::CONTENT_LENGTH
            || is_listed(&connection, name.as_str())
        {
            continue;
        }
        headers.append(inbound_name(name)?, inbound_value(content.as_bytes())?);
    }
    Ok(())
}

/// Who writes a request field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// Ends at this hop.
    Hop,
    /// The gateway writes it; what comes in under the name is dropped (or appended to, where that is its meaning).
    Gateway,
    /// Proxies before us write it; from anybody else it is a claim about the client, made by the client.
    Proxies,
    /// Client and backend, and nobody between them.
    Ends,
}

/// Who writes the request field `name`, which is in lower case.
fn owner(name: &str) -> Owner {
    match name {
        _ if is_hop_by_hop(name) => Owner::Hop,
        "host" | "content-length" | "expect" | "http2-settings" => Owner::Hop,
        "x-forwarded-for" | "forwarded" | "x-request-id" => Owner::Gateway,
        // They ask the backend for another method or path than the one that was decided on.
        "x-http-method-override"
        | "x-http-method"
        | "x-method-override"
        | "x-original-url"
        | "x-rewrite-url" => Owner::Gateway,
        "x-real-ip"
        | "x-client-ip"
        | "client-ip"
        | "x-cluster-client-ip"
        | "x-originating-ip"
        | "x-remote-ip"
        | "x-remote-addr"
        | "x-forwarded"
        | "true-client-ip"
        | "cf-connecting-ip"
        | "cf-connecting-ipv6"
        | "fastly-client-ip"
        | "fly-client-ip"
        | "x-azure-clientip"
        | "x-envoy-external-address" => Owner::Proxies,
        _ if name.starts_with("x-tollgate-") => Owner::Gateway,
        _ if name.starts_with("x-forwarded-") => Owner::Proxies,
        _ => Owner::Ends,
    }
}

/// RFC 9110, 7.6.1, with the older names that still occur.
fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-authentication-info"
            | "proxy-connection"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
    )
}

fn is_credential(name: &str, credentials: &[InboundName]) -> bool {
    credentials.iter().any(|credential| credential == name)
}

/// Whether `name`, written with dashes, is a name that the client must not write. CGI and its many heirs turn both into
/// the same variable.
fn is_look_alike(name: &str, credentials: &[InboundName]) -> bool {
    if !name.contains('_') {
        return false;
    }
    let dashed = name.replace('_', "-");
    owner(&dashed) != Owner::Ends || is_credential(&dashed, credentials)
}

/// The names of present fields that these `Connection` lines list. Names that are not there are left out, so a long list
/// costs no more later than there are fields.
fn listed<'a>(
    lines: impl Iterator<Item = &'a [u8]>,
    is_present: impl Fn(&str) -> bool,
) -> SmallVec<[&'a str; 4]> {
    let mut listed = SmallVec::new();
    for name in lines.flat_map(tokens) {
        if is_present(name) && !is_listed(&listed, name) {
            listed.push(name);
        }
    }
    listed
}

fn is_listed(listed: &[&str], name: &str) -> bool {
    listed.iter().any(|one| one.eq_ignore_ascii_case(name))
}

fn tokens(line: &[u8]) -> impl Iterator<Item = &str> {
    line.split(|byte| *byte == b',')
        .filter_map(|token| std::str::from_utf8(token.trim_ascii()).ok())
        .filter(|token| !token.is_empty())
}

/// `Forwarded` (RFC 7239), by the rule of `X-Forwarded-For`. `written` is the peer as text.
fn forwarded(outgoing: &Outgoing<'_>, peer: IpAddr, written: &str) -> Result<HeaderValue, Failure> {
    let mut element = String::with_capacity(96);
    let (before, after) = if peer.is_ipv6() { ("for=\"[", "]\"") } else { ("for=", "") };
    for part in [before, written, after, ";host=\""] {
        element.push_str(part);
    }
    for character in outgoing.host.chars() {
        if matches!(character, '"' | '\\') {
            element.push('\\');
        }
        element.push(character);
    }
    element.push_str("\";proto=");
    element.push_str(outgoing.scheme);
    appended(outgoing, "forwarded", &element)
}

/// What a trusted peer wrote under this name, then `element`; from anybody else `element` alone.
fn appended(outgoing: &Outgoing<'_>, name: &str, element: &str) -> Result<HeaderValue, Failure> {
    if !outgoing.peer_is_trusted || !outgoing.headers.contains_key(name) {
        return value(element.as_bytes());
    }
    let mut list = Vec::with_capacity(128);
    for line in outgoing.headers.get_all(name) {
        let line = line.as_bytes().trim_ascii();
        if !line.is_empty() {
            list.extend_from_slice(line);
            list.extend_from_slice(b", ");
        }
    }
    list.extend_from_slice(element.as_bytes());
    value(&list)
}

fn value(bytes: &[u8]) -> Result<HeaderValue, Failure> {
    HeaderValue::from_bytes(bytes).map_err(|_| Failure::Internal("a header value cannot be sent on"))
}

fn outbound_name(name: &str) -> Result<HeaderName, Failure> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| Failure::Internal("a header name cannot be sent on"))
}

fn inbound_name(name: &HeaderName) -> Result<inbound::HeaderName, Failure> {
    inbound::HeaderName::from_bytes(name.as_str().as_bytes())
        .map_err(|_| Failure::Internal("a header name cannot be passed back"))
}

fn inbound_value(bytes: &[u8]) -> Result<inbound::HeaderValue, Failure> {
    inbound::HeaderValue::from_bytes(bytes)
        .map_err(|_| Failure::Internal("a header value cannot be passed back"))
}

#[cfg(test)]
mod tests {
    use actix_web::http::Method;

    use super::*;

    /// The lines that the backend gets for the lines of a client, without `Host` and what is the same in every case.
    fn sent(lines: &[(&str, &str)], change: impl FnOnce(&mut Outgoing<'_>)) -> Vec<String> {
        try_sent(lines, change).unwrap()
    }

    fn try_sent(
        lines: &[(&str, &str)],
        change: impl FnOnce(&mut Outgoing<'_>),
    ) -> Result<Vec<String>, Failure> {
        let mut headers = InboundMap::new();
        for (name, content) in lines {
            let name = inbound::HeaderName::try_from(*name).unwrap();
            headers.append(name, inbound::HeaderValue::from_str(content).unwrap());
        }
        let request_id = inbound::HeaderValue::from_static("request-7");
        let mut outgoing = Outgoing {
            method: &Method::GET,
            path: "/",
            query: None,
            headers: &headers,
            peer: IpAddr::from([192, 0, 2, 1]),
            peer_is_trusted: false,
            scheme: "http",
            host: "a.test",
            request_id: &request_id,
            credentials: &[],
            account: None,
            plan: "free",
            max_body: 0,
        };
        change(&mut outgoing);
        let framing = Framing::of(&headers).unwrap();
        let sent = to_upstream(&outgoing, framing, &HeaderValue::from_static("target:1"), false)?;
        let mut lines: Vec<_> = sent
            .iter()
            .map(|(name, content)| format!("{name}: {}", String::from_utf8_lossy(content.as_bytes())))
            .collect();
        lines.sort_by(|a, b| a.split(':').next().cmp(&b.split(':').next()));
        Ok(lines)
    }

    /// What the gateway says of a request when nobody else says anything.
    const USUAL: [&str; 7] = [
        "forwarded: for=192.0.2.1;host=\"a.test\";proto=http",
        "host: target:1",
        "x-forwarded-for: 192.0.2.1",
        "x-forwarded-host: a.test",
        "x-forwarded-proto: http",
        "x-request-id: request-7",
        "x-tollgate-plan: free",
    ];

    /// The lines of `sent` that are not usual.
    fn unusual(sent: Vec<String>) -> Vec<String> {
        let (usual, others): (Vec<_>, Vec<_>) =
            sent.into_iter().partition(|line| USUAL.contains(&line.as_str()));
        assert_eq!(usual, USUAL);
        others
    }

    #[track_caller]
    fn check_from_anybody(lines: &[(&str, &str)], arrive: &[&str]) {
        assert_eq!(unusual(sent(lines, |_| {})), arrive);
    }

    #[test]
    fn fields_of_the_ends_pass_and_fields_of_the_hop_end_here() {
        check_from_anybody(&[], &[]);
        check_from_anybody(
            &[
                ("accept", "a"),
                ("cookie", "x=1"),
                ("cookie", "y=2"),
                ("x-a", ""),
                ("authorization", "Bearer t"),
            ],
            &["accept: a", "authorization: Bearer t", "cookie: x=1", "cookie: y=2", "x-a: "],
        );
        for hop in [
            "connection",
            "keep-alive",
            "proxy-connection",
            "proxy-authorization",
            "te",
            "trailer",
            "upgrade",
            "expect",
            "http2-settings",
        ] {
            check_from_anybody(&[(hop, "anything")], &[]);
        }
    }

    #[test]
    fn framing_is_written_new() {
        check_from_anybody(&[("content-length", "0")], &["content-length: 0"]);
        check_from_anybody(&[("content-length", "007")], &["content-length: 7"]);
        check_from_anybody(&[("transfer-encoding", "chunked")], &["transfer-encoding: chunked"]);
        check_from_anybody(
            &[("transfer-encoding", "chunked"), ("content-length", "7")],
            &["transfer-encoding: chunked"],
        );
    }

    #[test]
    fn connection_lists_fields_of_the_ends_only() {
        // FRM-5
        check_from_anybody(
            &[("connection", "close, X-User-Id"), ("x-user-id", "7"), ("x-b", "8")],
            &["x-b: 8"],
        );
        check_from_anybody(
            &[("connection", "x-a"), ("connection", " X-B ,,"), ("x-a", "1"), ("x-b", "2")],
            &[],
        );
        check_from_anybody(&[("connection", "absent, \u{e9}, x y"), ("x-a", "1")], &["x-a: 1"]);
        check_from_anybody(
            &[
                (
                    "connection",
                    "host, content-length, x-forwarded-for, x-request-id, x-tollgate-plan, forwarded",
                ),
                ("content-length", "5"),
                ("x-forwarded-for", "198.51.100.7"),
            ],
            &["content-length: 5"],
        );
    }

    #[test]
    fn a_client_cannot_say_who_it_is() {
        // IP-8, and the names that other proxies use.
        for name in [
            "forwarded",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
            "x-forwarded-port",
            "x-forwarded-prefix",
            "x-real-ip",
            "x-client-ip",
            "client-ip",
            "x-cluster-client-ip",
            "x-originating-ip",
            "x-remote-ip",
            "x-remote-addr",
            "x-forwarded",
            "true-client-ip",
            "cf-connecting-ip",
            "cf-connecting-ipv6",
            "fastly-client-ip",
            "fly-client-ip",
            "x-azure-clientip",
            "x-envoy-external-address",
            "x_client_ip",
            "x-request-id",
            "x-tollgate-account",
            "x-tollgate-plan",
            "x-tollgate-future",
            "x_forwarded_for",
            "x_forwarded-for",
            "x_forwarded_proto",
            "x_real_ip",
            "x_request_id",
            "x_tollgate_account",
            "x_tollgate-plan",
            "content_length",
            "transfer_encoding",
        ] {
            check_from_anybody(&[(name, "for=198.51.100.7")], &[]);
        }
        check_from_anybody(&[("x_a", "1")], &["x_a: 1"]);
    }

    #[test]
    fn a_client_cannot_ask_the_backend_for_another_request() {
        for name in [
            "x-http-method-override",
            "x-http-method",
            "x-method-override",
            "x-original-url",
            "x-rewrite-url",
        ] {
            check_from_anybody(&[(name, "DELETE")], &[]);
        }
    }

    #[test]
    fn the_credential_stays_here_and_so_do_its_look_alikes() {
        // SEC-6
        static NAME: inbound::HeaderName = inbound::HeaderName::from_static("x-api-key");
        let lines = [("x-api-key", "s1"), ("x-api-key", "s2"), ("x_api_key", "s3"), ("x-api-key-2", "other")];
        assert_eq!(
            unusual(sent(&lines, |outgoing| outgoing.credentials = std::slice::from_ref(&NAME))),
            ["x-api-key-2: other"]
        );
        let mut all = unusual(sent(&lines, |_| {}));
        all.sort();
        assert_eq!(all, ["x-api-key-2: other", "x-api-key: s1", "x-api-key: s2", "x_api_key: s3"]);
    }

    #[test]
    fn a_trusted_peer_speaks_for_its_client() {
        let lines = [
            ("x-forwarded-for", "198.51.100.7"),
            ("x-forwarded-for", "203.0.113.9, 203.0.113.10"),
            ("forwarded", "for=198.51.100.7;proto=https"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "public.test"),
            ("x-forwarded-port", "443"),
            ("x-real-ip", "198.51.100.7"),
            // Never believed, not even from there.
            ("x_real_ip", "198.51.100.8"),
            ("x-tollgate-account", "other"),
            ("x-request-id", "other"),
            // A naive proxy passes the client's own list on.
            ("connection", "x-forwarded-for, forwarded, x-forwarded-proto"),
        ];
        assert_eq!(
            sent(&lines, |outgoing| outgoing.peer_is_trusted = true),
            [
                "forwarded: for=198.51.100.7;proto=https, for=192.0.2.1;host=\"a.test\";proto=http",
                "host: target:1",
                "x-forwarded-for: 198.51.100.7, 203.0.113.9, 203.0.113.10, 192.0.2.1",
                "x-forwarded-host: public.test",
                "x-forwarded-port: 443",
                "x-forwarded-proto: https",
                "x-real-ip: 198.51.100.7",
                "x-request-id: request-7",
                "x-tollgate-plan: free",
            ]
        );
        // A trusted peer that says nothing is the client.
        assert_eq!(unusual(sent(&[], |outgoing| outgoing.peer_is_trusted = true)), [""; 0]);
    }

    #[test]
    fn addresses_and_hosts_are_written_as_their_fields_want_them() {
        for (peer, plain, element) in [
            ("2001:db8::1", "2001:db8::1", "for=\"[2001:db8::1]\""),
            ("::ffff:192.0.2.7", "192.0.2.7", "for=192.0.2.7"),
        ] {
            let lines = sent(&[], |outgoing| outgoing.peer = peer.parse().unwrap());
            assert!(lines.contains(&format!("x-forwarded-for: {plain}")), "{lines:?}");
            assert!(lines[0].starts_with(&format!("forwarded: {element};host=")), "{lines:?}");
        }
        let lines = sent(&[], |outgoing| outgoing.host = "[2001:db8::1]:8080");
        assert_eq!(lines[0], "forwarded: for=192.0.2.1;host=\"[2001:db8::1]:8080\";proto=http");
        let lines = sent(&[], |outgoing| outgoing.host = "a\\\"b");
        assert_eq!(lines[0], "forwarded: for=192.0.2.1;host=\"a\\\\\\\"b\";proto=http");
    }

    #[test]
    fn the_account_is_sent_when_it_is_known() {
        let lines = sent(&[], |outgoing| outgoing.account = Some("acme"));
        assert!(lines.contains(&"x-tollgate-account: acme".to_owned()), "{lines:?}");
    }

    #[test]
    fn an_account_that_is_no_header_value_stops_the_request() {
        let refused = try_sent(&[], |outgoing| outgoing.account = Some("a\r\nX-Admin: yes"));
        assert!(matches!(refused, Err(Failure::Internal(_))), "{refused:?}");
    }

    #[test]
    fn a_long_connection_list_costs_no_more_than_there_are_fields() {
        let list = "x-a, x-b, absent, ".repeat(2_000);
        let present = |name: &str| name.starts_with("x-");
        let found = listed([list.as_bytes()].into_iter(), present);
        assert_eq!(found.as_slice(), ["x-a", "x-b"]);
    }

    #[test]
    fn answers_lose_the_fields_of_their_hop() {
        // FRM-6
        let mut answer = OutboundMap::new();
        for (name, content) in [
            ("connection", "X-Internal, keep-alive"),
            ("x-internal", "secret"),
            ("keep-alive", "timeout=1"),
            ("proxy-authenticate", "Basic"),
            ("upgrade", "h2c"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("server", "backend"),
        ] {
            answer.append(HeaderName::from_static(name), HeaderValue::from_static(content));
        }
        let mut passed = InboundMap::new();
        to_client(&answer, &mut passed).unwrap();
        let mut lines: Vec<_> =
            passed.iter().map(|(name, content)| format!("{name}: {}", content.to_str().unwrap())).collect();
        lines.sort();
        assert_eq!(lines, ["server: backend", "set-cookie: a=1", "set-cookie: b=2"]);
    }
}
