//! Where a message ends, what goes only one hop, and requests that a gateway does not serve.

use std::time::Duration;

use crate::support::backend::response;
use crate::support::{Backend, Config, Gateway, Request};

/// How long the gateway may take to close after it has refused.
const CLOSING: Duration = Duration::from_secs(10);

/// The gateway, and an upstream that must never see more than it should.
fn start() -> (Backend, Gateway) {
    let backend = Backend::ok();
    let config = Config::open(&backend)
        .plan("wide", r#"{ name = "window", limit = 1000, per = "60s" }"#)
        .key("k", "one", "wide");
    let gateway = Gateway::start(&config);
    (backend, gateway)
}

/// Sends these bytes; the answer must be `status`, nothing may follow it, and the connection must close.
#[track_caller]
fn refused_and_closed(gateway: &Gateway, bytes: &[u8], status: u16) {
    let shown = String::from_utf8_lossy(bytes).into_owned();
    let mut connection = gateway.raw(bytes);
    let answer = connection.answer("GET");
    assert_eq!(answer.status, status, "{shown:?}");
    let rest = connection.rest_until_closed(CLOSING);
    assert_eq!(rest, b"", "something follows the refusal of {shown:?}");
}

/// Sends these bytes, whose fault is in the body; the connection must end, with a 400 or with nothing. actix closes at
/// once where a chunk is malformed, before a handler can answer.
#[track_caller]
fn cut_off(gateway: &Gateway, bytes: &[u8]) {
    let shown = String::from_utf8_lossy(bytes).into_owned();
    let rest = gateway.raw(bytes).rest_until_closed(CLOSING);
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 400 "), "{shown:?} got {rest:?}");
    assert!(rest.matches("HTTP/1.1").count() <= 1, "{shown:?} got {rest:?}");
}

/// A POST with these field lines (each with its CRLF) in front of `body`.
fn post(fields: &str, body: &str) -> Vec<u8> {
    format!("POST /first HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\n{fields}\r\n{body}").into_bytes()
}

const HIDDEN: &str = "GET /SMUGGLED HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\n\r\n";

#[test]
fn a_bare_line_feed_after_the_last_chunk_is_refused() {
    // CVE-2026-134342: taken as the start of a trailer, it lets the body of the second request run as a third one.
    let (backend, gateway) = start();
    let second = format!(
        "POST /second HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\nContent-Length: {}\r\n\r\n{HIDDEN}",
        HIDDEN.len()
    );
    let bytes = post("Transfer-Encoding: chunked\r\n", &format!("5\r\nhello\r\n0\r\n\n{second}"));
    cut_off(&gateway, &bytes);
    // The body is streamed, so the upstream may be asked before the fault is seen.
    for request in backend.received() {
        assert_eq!(request.target(), "/first");
        assert_eq!(request.ending, crate::support::Ending::Cut);
    }
}

#[test]
fn length_and_chunks_together_are_refused() {
    // FRM-1: one side believed the length and the other the chunks, and a hidden request was run.
    let (backend, gateway) = start();
    let chunks = format!("0\r\n\r\n{HIDDEN}");
    for fields in [
        "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        "Content-Length: 6\r\nTransfer-Encoding: Chunked\r\n",
    ] {
        refused_and_closed(&gateway, &post(fields, &chunks), 400);
    }
    assert_eq!(backend.count(), 0);
}

#[test]
fn transfer_codings_other_than_chunked_are_refused() {
    // FRM-1 in disguise: a coding that one side reads as chunked and the other does not.
    let (backend, gateway) = start();
    for value in [
        "identity",
        "xchunked",
        "chunked, chunked",
        "chunked, identity",
        "gzip, chunked",
        "\"chunked\"",
        "chunked;q=1",
        "chunk",
        "",
    ] {
        let fields = format!("Transfer-Encoding: {value}\r\n");
        refused_and_closed(&gateway, &post(&fields, &format!("0\r\n\r\n{HIDDEN}")), 400);
    }
    refused_and_closed(
        &gateway,
        &post("Transfer-Encoding : chunked\r\n", &format!("0\r\n\r\n{HIDDEN}")),
        400,
    );
    assert_eq!(backend.count(), 0);
}

#[test]
fn lengths_that_disagree_or_are_none_are_refused() {
    // FRM-2: the first or the last of two lengths won silently; the server library took 0 together with 3.
    let (backend, gateway) = start();
    for fields in [
        "Content-Length: 0\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nContent-Length: 0\r\n",
        "Content-Length: 3, 0\r\n",
        "Content-Length: +3\r\n",
        "Content-Length: 0x3\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 3 4\r\n",
        "Content-Length: 18446744073709551616\r\n",
        "Content-Length: 99999999999999999999999999\r\n",
        "Content-Length: \r\n",
        "Content-Length: three\r\n",
    ] {
        refused_and_closed(&gateway, &post(fields, "abc"), 400);
    }
    assert_eq!(backend.count(), 0);
    // Two equal lengths may be folded into one, or refused.
    for fields in ["Content-Length: 3\r\nContent-Length: 3\r\n", "Content-Length: 3, 3\r\n"] {
        let seen = backend.count();
        match gateway.raw(&post(fields, "abc")).answer("POST").status {
            400 => assert_eq!(backend.count(), seen),
            status => {
                assert_eq!(status, 200);
                assert_eq!(backend.last().head.lines("content-length"), ["3"]);
            }
        }
    }
}

#[test]
fn chunks_that_are_none_are_refused() {
    // FRM-1: a lenient reader of chunk sizes and a strict one disagree on where the body ends.
    let (backend, gateway) = start();
    for body in [
        "0x3\r\nabc\r\n0\r\n\r\n",
        "+3\r\nabc\r\n0\r\n\r\n",
        "-1\r\nabc\r\n0\r\n\r\n",
        "\r\nabc\r\n0\r\n\r\n",
        "3\nabc\r\n0\r\n\r\n",
        "3\r\nabcX\r\n0\r\n\r\n",
        "ffffffffffffffffff\r\nabc\r\n0\r\n\r\n",
        "g\r\nabc\r\n0\r\n\r\n",
    ] {
        cut_off(&gateway, &post("Transfer-Encoding: chunked\r\n", body));
    }
    for request in backend.received() {
        assert_eq!(request.ending, crate::support::Ending::Cut, "the upstream took {request:?} for whole");
    }
}

#[test]
fn malformed_heads_are_refused() {
    // What two parsers read differently is how a request hides in another.
    let (backend, gateway) = start();
    for head in [
        "GET /x HTTP/1.1\r\nHost: a.test\r\nX-Api-Key : k\r\n\r\n",
        "GET /x HTTP/1.1\r\nHost: a.test\r\nX-Note: a\r\n b\r\n\r\n",
        "GET /x HTTP/1.2\r\nHost: a.test\r\n\r\n",
        "GET  /x HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET /x y HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET x HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\n\r\n",
        "GET /\u{e4} HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\n\r\n",
    ] {
        refused_and_closed(&gateway, head.as_bytes(), 400);
    }
    assert_eq!(backend.count(), 0);
}

#[test]
fn a_fragment_stays_with_the_client() {
    // The server library drops a fragment without a word; sent on, it would be a path that nobody judged.
    let (backend, gateway) = start();
    let status = gateway.get("/x#part").key("k").send().status;
    assert!([200, 400].contains(&status), "status {status}");
    for request in backend.received() {
        assert_eq!(request.target(), "/x");
    }
}

#[test]
fn a_request_names_exactly_one_host() {
    // FWD-8: with two or none, the gateway and the upstream each pick their own.
    let (backend, gateway) = start();
    for lines in [
        "",
        "Host: a.test\r\nHost: b.test\r\n",
        "Host: a.test\r\nHost: a.test\r\n",
        "Host: \r\n",
        "Host: a.test, b.test\r\n",
        "Host: user@a.test\r\n",
        "Host: a.test/path\r\n",
        "Host: a test\r\n",
        "Host: a.test:port\r\n",
        "Host: a.test:99999\r\n",
    ] {
        let bytes = format!("GET /x HTTP/1.1\r\n{lines}X-Api-Key: k\r\n\r\n");
        refused_and_closed(&gateway, bytes.as_bytes(), 400);
    }
    assert_eq!(backend.count(), 0);
    for host in ["a.test", "a.test:8080", "127.0.0.1", "[::1]", "[::1]:8080", "A.Test"] {
        gateway.get("/x").key("k").header("Host", host).send().expect(200);
    }
}

#[test]
fn the_target_never_chooses_the_upstream() {
    // FWD-8: an absolute target with another authority than Host went where the client said.
    let backend = Backend::ok();
    let other = Backend::ok();
    let config = Config::shared(&backend).key("k", "three", "pro");
    let gateway = Gateway::start(&config);
    for target in [format!("http://{}/x", other.address()), "http://other.test/v1/x".to_owned()] {
        let status = gateway.get(&target).key("k").send().status;
        assert!([400, 421].contains(&status), "{target} gave {status}");
    }
    assert_eq!((backend.count(), other.count()), (0, 0));
    gateway.get("//other.test/x").key("k").send();
    assert_eq!(other.count(), 0);
    for request in backend.received() {
        assert_eq!(request.head.lines("host"), [backend.address().to_string()]);
    }
}

#[test]
fn fields_of_one_hop_stay_on_their_hop_in_answers() {
    // FRM-6: only requests were cleaned; what the upstream named in Connection went through to the client.
    let backend = Backend::answering(|_| {
        response(
            "200 OK",
            &[
                ("Connection", "X-Internal, keep-alive"),
                ("X-Internal", "secret"),
                ("Keep-Alive", "timeout=1"),
                ("Proxy-Authenticate", "Basic"),
                ("Proxy-Connection", "keep-alive"),
                ("Upgrade", "h2c"),
                ("TE", "trailers"),
                ("X-Plain", "stays"),
            ],
            b"ok",
        )
    });
    let gateway = Gateway::start(&Config::shared(&backend));
    let mut connection = gateway.connect();
    for _ in 0..2 {
        let answer = Request::get("/x").key("k-free-1").on(&mut connection).expect(200);
        for name in ["x-internal", "keep-alive", "proxy-authenticate", "proxy-connection", "upgrade", "te"] {
            assert_eq!(answer.head.lines(name), [""; 0], "{name}");
        }
        assert_eq!(answer.head.lines("x-plain"), ["stays"]);
        for value in answer.head.lines("connection") {
            assert!(!value.to_ascii_lowercase().contains("x-internal"), "Connection: {value}");
        }
    }
}

#[test]
fn fields_of_one_hop_stay_on_their_hop_in_requests() {
    // FRM-5: a client that lists the gateway's own fields in Connection had them removed after they were added.
    let (backend, gateway) = start();
    let answer = gateway
        .get("/x")
        .key("k")
        .header("Connection", "X-Api-Key, X-Forwarded-For, X-Request-Id, Host, Content-Length, X-Mine")
        .header("X-Mine", "one hop")
        .header("Keep-Alive", "timeout=5")
        .header("Proxy-Connection", "keep-alive")
        .header("TE", "trailers")
        .send();
    if answer.status == 400 {
        // Refusing such a list is as good as ignoring it.
        assert_eq!(backend.count(), 0);
        return;
    }
    assert_eq!(answer.status, 200);
    let head = backend.last().head;
    for name in ["x-mine", "keep-alive", "proxy-connection", "te"] {
        assert_eq!(head.lines(name), [""; 0], "{name}");
    }
    assert_eq!(head.lines("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(head.lines("x-request-id").len(), 1);
    assert_eq!(head.lines("host"), [backend.address().to_string()]);
}

#[test]
fn what_is_not_served_is_refused_clearly() {
    // PATH-5: an invented method is a stock way around a limit bound to one method; CONNECT hung for ever.
    let (backend, gateway) = start();
    for line in ["CONNECT a.test:22", "TRACE /x", "FOO /x", "get /x", "Get /x", "PROPFIND /x"] {
        let bytes = format!("{line} HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\n\r\n");
        let status = gateway.raw(bytes.as_bytes()).answer("POST").status;
        assert!([400, 405, 501].contains(&status), "{line} gave {status}");
    }
    let upgrade =
        gateway.get("/x").key("k").header("Connection", "Upgrade").header("Upgrade", "websocket").send();
    assert!([400, 426, 501].contains(&upgrade.status), "an upgrade gave {}", upgrade.status);
    gateway.call("POST", "/x").key("k").header("Expect", "200-ok").body("abc").send().expect(417);
    assert_eq!(backend.count(), 0);
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    // Answers that overtake each other reach the wrong request, and so perhaps the wrong person.
    let backend = Backend::answering(|request| response("200 OK", &[], request.target().as_bytes()));
    let gateway = Gateway::start(&Config::shared(&backend));
    let bytes: Vec<u8> =
        (0..20).flat_map(|number| Request::get(&format!("/{number}")).key("k-pro-1").to_bytes()).collect();
    let mut connection = gateway.raw(&bytes);
    for number in 0..20 {
        assert_eq!(connection.answer("GET").expect(200).text(), format!("/{number}"));
    }
}

/// Requests to these targets, each with its method, behind each other in one write.
fn pipelined(requests: &[(&str, &str, &str)]) -> Vec<u8> {
    let one = |&(method, target, fields): &(&str, &str, &str)| {
        format!("{method} {target} HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\n{fields}\r\n")
    };
    requests.iter().map(one).collect::<String>().into_bytes()
}

#[test]
fn pipelined_requests_are_each_answered_by_their_own_method() {
    // The server library wrote an answer by what it knew of the latest request it had parsed: GET with a HEAD behind it
    // got a length and no body, and the client took the next answer for that body.
    let (_backend, gateway) = start();
    let orders = [["GET", "HEAD", "GET"], ["HEAD", "GET", "GET"], ["GET", "GET", "HEAD"]];
    for order in orders {
        let requests = order.map(|method| (method, "/x", ""));
        let mut connection = gateway.raw(&pipelined(&requests));
        for method in order {
            let answer = connection.answer(method).expect(200);
            assert_eq!(answer.text(), if method == "HEAD" { "" } else { "ok" }, "{order:?}");
        }
        connection.expect_silence(Duration::from_millis(50));
    }
}

#[test]
fn nothing_runs_behind_an_answer_that_closes_the_connection() {
    // What was pipelined behind a refusal, or behind a request with `Connection: close`, was forwarded all the same.
    let (backend, gateway) = start();
    for (first, status) in [(("GET", "/a/../b", ""), 400), (("GET", "/x", "Connection: close\r\n"), 200)] {
        let mut connection = gateway.raw(&pipelined(&[first, ("GET", "/BEHIND", "")]));
        connection.answer("GET").expect(status);
        assert_eq!(connection.rest_until_closed(CLOSING), b"");
    }
    assert!(backend.received().iter().all(|request| request.target() == "/x"));
}

#[test]
fn a_malformed_request_does_not_take_the_answer_before_it_away() {
    let (backend, gateway) = start();
    let mut bytes = pipelined(&[("GET", "/x", "")]);
    bytes.extend_from_slice(b"GET  / HTTP/1.1\r\n\r\n");
    let mut connection = gateway.raw(&bytes);
    connection.answer("GET").expect(200);
    connection.answer("GET").expect(400);
    assert_eq!(connection.rest_until_closed(CLOSING), b"");
    assert_eq!(backend.count(), 1);
}

#[test]
fn a_later_head_has_as_little_time_as_the_first() {
    // TMO-5: the timer for heads ran for the first request of a connection only, so that one answered request bought a
    // slow sender all the time in the world.
    let (_backend, gateway) = start();
    let mut connection = gateway.raw(&pipelined(&[("GET", "/x", "")]));
    connection.answer("GET").expect(200);
    connection.send(b"GET /x HTTP/1.1\r\nHost: a.test\r\n");
    connection.answer("GET").expect(408);
    assert_eq!(connection.rest_until_closed(CLOSING), b"");
}

#[test]
fn an_http_1_0_client_gets_no_chunks() {
    // It would take the sizes of the chunks for a part of the body; RFC 9112, 6.1.
    let backend = Backend::answering(|_| {
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n".to_vec()
    });
    let gateway = Gateway::start(&Config::shared(&backend));
    for keep in ["", "Connection: keep-alive\r\n"] {
        let request = format!("GET / HTTP/1.0\r\nHost: a.test\r\nX-Api-Key: k-pro-1\r\n{keep}\r\n");
        let answer = gateway.raw(request.as_bytes()).rest_until_closed(CLOSING);
        let answer = String::from_utf8(answer).unwrap().to_ascii_lowercase();
        assert!(answer.ends_with("\r\n\r\nhello"), "{answer:?}");
        assert!(!answer.contains("transfer-encoding") && !answer.contains("keep-alive"), "{answer:?}");
    }
}
