//! Requests and answers arrive as they were sent.

use actix_web::http::header::HeaderName;

use super::support::{Backend, Gateway, Reply, Setup, values};

fn head_of(answer: &[u8]) -> &str {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
    std::str::from_utf8(&answer[..end + 4]).unwrap()
}

fn body_of(answer: &[u8]) -> &[u8] {
    &answer[head_of(answer).len()..]
}

/// The whole answer to a request of its own connection.
fn exchange(reply: &'static [u8], request: &str) -> Vec<u8> {
    let backend = Backend::answering(move |_| Reply::keep(reply));
    Gateway::before(&backend).ask(request)
}

#[test]
fn compressed_bodies_keep_their_bytes_and_fields() {
    // FWD-1: clients that unpack on their own drop two fields, or deliver a cut body.
    let coded = b"\x1f\x8b\x08\x00not really gzip, and nobody should care\x00\xff";
    for coding in ["gzip", "br", "zstd", "made-up"] {
        let mut reply = format!(
            "HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nETag: W/\"5\"\r\nContent-Length: {}\r\n\r\n",
            coded.len()
        )
        .into_bytes();
        reply.extend_from_slice(coded);
        let backend = Backend::answering(move |_| Reply::keep(&reply));
        let gateway = Gateway::before(&backend);

        for accepted in ["", "Accept-Encoding: br;q=0.5, gzip\r\n"] {
            let answer =
                gateway.ask(format!("GET / HTTP/1.1\r\nHost: a.test\r\n{accepted}Connection: close\r\n\r\n"));
            assert_eq!(body_of(&answer), coded);
            let head = head_of(&answer);
            assert_eq!(values(head, "content-encoding"), [coding]);
            assert_eq!(values(head, "content-length"), [coded.len().to_string()]);
            assert_eq!(values(head, "etag"), ["W/\"5\""]);

            let seen = backend.next();
            let expected: &[&str] = if accepted.is_empty() { &[] } else { &["br;q=0.5, gzip"] };
            assert_eq!(seen.values("accept-encoding"), expected);
        }
    }
}

#[test]
fn repeated_lines_arrive_separate_and_in_order() {
    // FWD-2: a map of one value per name keeps one cookie of three; a joined line breaks all of them.
    let backend = Backend::answering(|_| {
        Reply::keep(
            "HTTP/1.1 200 OK\r\n\
             Set-Cookie: a=1; Path=/\r\nLink: </1>; rel=next\r\nVary: Origin\r\nWarning: 199 - \"x\"\r\n\
             Set-Cookie: b=2; Expires=Wed, 21 Oct 2026 07:28:00 GMT\r\nSet-Cookie: a=3\r\n\
             Link: </2>; rel=prev\r\nVary: Accept\r\nWarning: 299 - \"y\"\r\nContent-Length: 0\r\n\r\n",
        )
    });
    let gateway = Gateway::before(&backend);
    let answer = gateway.ask(
        "GET / HTTP/1.1\r\nHost: a.test\r\nCookie: x=1\r\nX-A: one\r\nCookie: y=2\r\nX-A: two, three\r\n\
         Connection: close\r\n\r\n",
    );

    let head = head_of(&answer);
    assert_eq!(
        values(head, "set-cookie"),
        ["a=1; Path=/", "b=2; Expires=Wed, 21 Oct 2026 07:28:00 GMT", "a=3"]
    );
    assert_eq!(values(head, "link"), ["</1>; rel=next", "</2>; rel=prev"]);
    assert_eq!(values(head, "vary"), ["Origin", "Accept"]);
    assert_eq!(values(head, "warning"), ["199 - \"x\"", "299 - \"y\""]);

    let seen = backend.next();
    assert_eq!(seen.values("cookie"), ["x=1", "y=2"]);
    assert_eq!(seen.values("x-a"), ["one", "two, three"]);
}

#[test]
fn header_bytes_outside_ascii_pass_both_ways() {
    let answer = exchange(
        b"HTTP/1.1 200 OK\r\nX-Name: caf\xe9\r\nContent-Length: 0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.test\r\nX-Name: caf\u{e9}\r\nConnection: close\r\n\r\n",
    );
    let line = b"x-name: caf\xe9\r\n";
    assert!(answer.windows(line.len()).any(|window| window == line), "{answer:?}");
}

#[test]
fn redirects_are_the_clients_to_follow() {
    // FWD-3: a client library that follows turns POST into GET, or carries a body and a key to another host.
    let elsewhere = Backend::answering(|_| Reply::ok());
    let location = format!("http://{}/taken", elsewhere.address);
    let redirect_to = location.clone();
    let backend = Backend::answering(move |seen| {
        let status = seen.request_line().split(['/', ' ']).nth(2).unwrap().to_owned();
        Reply::keep(format!(
            "HTTP/1.1 {status} Moved\r\nLocation: {redirect_to}\r\nContent-Length: 0\r\n\r\n"
        ))
    });
    let gateway = Gateway::before(&backend);

    for status in ["301", "302", "303", "307", "308"] {
        for (method, fields, body) in
            [("GET", "", ""), ("POST", "X-Api-Key: k\r\nContent-Length: 4\r\n", "data")]
        {
            let answer = gateway.ask(format!(
                "{method} /{status} HTTP/1.1\r\nHost: a.test\r\n{fields}Connection: close\r\n\r\n{body}"
            ));
            let head = head_of(&answer);
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
            assert_eq!(values(head, "location"), [location.as_str()]);
            backend.next();
        }
    }
    assert!(backend.saw_nothing_else());
    assert!(elsewhere.saw_nothing_else());
}

#[test]
fn the_query_keeps_its_bytes() {
    // FWD-4: parsing and writing again regroups keys and breaks signatures. The apostrophe is the documented exception.
    let backend = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::before(&backend);
    for (sent, arrives) in [
        (
            "/e?b=2&a=1&b=3&bare&sig=%E9%FF&s=1;2&q=a%20b+c&x[0:1]&u=%7e&n=ok&&=&p=??",
            "/e?b=2&a=1&b=3&bare&sig=%E9%FF&s=1;2&q=a%20b+c&x[0:1]&u=%7e&n=ok&&=&p=??",
        ),
        ("/e?n=o'k", "/e?n=o%27k"),
        ("/e?", "/e?"),
        ("/e", "/e"),
        ("/e??", "/e??"),
    ] {
        gateway.get(sent);
        assert_eq!(backend.next().request_line(), format!("GET {arrives} HTTP/1.1"));
    }
}

#[test]
fn the_path_keeps_its_bytes() {
    // FWD-6: decoded or re-encoded escapes name another resource.
    let backend = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::before(&backend);
    for path in ["/v1/a%2Fb%3Fc%2Cd%40e%25f/%7Eu/x%20y/@:!$", "/", "//double//", "/%61/%C3%A9", "/a;b=c/,"] {
        gateway.get(path);
        assert_eq!(backend.next().request_line(), format!("GET {path} HTTP/1.1"));
    }
}

#[test]
fn a_path_that_would_be_rewritten_is_not_sent() {
    let backend = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::before(&backend);
    for path in ["/public/../admin", "/public/%2e%2e/admin", "/a/./b"] {
        assert!(gateway.get(path).starts_with("HTTP/1.1 500 "), "{path}");
    }
    assert!(backend.saw_nothing_else());
}

#[test]
fn host_is_the_targets_or_the_clients_as_configured() {
    // FWD-7
    let backend = Backend::answering(|_| Reply::ok());
    for preserve_host in [false, true] {
        let mut setup = Setup::to(&[backend.address]);
        setup.upstream.preserve_host = preserve_host;
        Gateway::start(setup)
            .ask("GET / HTTP/1.1\r\nHost: api.example.test:8080\r\nConnection: close\r\n\r\n");

        let seen = backend.next();
        let expected =
            if preserve_host { "api.example.test:8080".to_owned() } else { backend.address.to_string() };
        assert_eq!(seen.values("host"), [expected]);
        assert_eq!(seen.values("x-forwarded-host"), ["api.example.test:8080"]);
    }
}

#[test]
fn head_keeps_the_length_and_invents_none() {
    // FWD-9: actix replaces a length that was set by hand with the size of the empty body.
    let backend = Backend::answering(|seen| match seen.request_line() {
        "HEAD /long HTTP/1.1" => Reply::keep("HTTP/1.1 200 OK\r\nContent-Length: 9513784\r\n\r\n"),
        "HEAD /empty HTTP/1.1" => Reply::keep("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        "HEAD /chunked HTTP/1.1" => Reply::keep("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        "HEAD /unknown HTTP/1.1" => Reply::keep("HTTP/1.1 200 OK\r\nETag: \"1\"\r\n\r\n"),
        _ => Reply::ok(),
    });
    let gateway = Gateway::before(&backend);
    for (path, lengths) in
        [("/long", &["9513784"][..]), ("/empty", &["0"]), ("/chunked", &[]), ("/unknown", &[])]
    {
        let mut client = gateway.connect();
        client.send(format!("HEAD {path} HTTP/1.1\r\nHost: a.test\r\n\r\n"));
        let head = client.read_head();
        assert_eq!(values(&head, "content-length"), lengths, "{path}");
        assert_eq!(values(&head, "transfer-encoding"), [""; 0], "{path}");

        // The next answer on the connection begins right behind.
        client.send("GET /next HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n");
        let next = client.read_to_end();
        assert!(next.starts_with(b"HTTP/1.1 200 OK\r\n") && next.ends_with(b"\r\n\r\nok"), "{path}");
    }
}

#[test]
fn nothing_follows_the_head_of_204_and_304() {
    // FWD-10: a streamed body leaves a stray "0 CRLF CRLF", which becomes the start of the next answer.
    let backend = Backend::answering(|seen| match seen.request_line() {
        "DELETE /204 HTTP/1.1" => Reply::keep("HTTP/1.1 204 No Content\r\nETag: \"1\"\r\n\r\n"),
        "GET /304 HTTP/1.1" => Reply::keep("HTTP/1.1 304 Not Modified\r\nETag: \"1\"\r\n\r\n"),
        "GET /304-with-length HTTP/1.1" => {
            Reply::keep("HTTP/1.1 304 Not Modified\r\nETag: \"1\"\r\nContent-Length: 512\r\n\r\n")
        }
        _ => Reply::ok(),
    });
    let gateway = Gateway::before(&backend);
    for (request, lengths) in
        [("DELETE /204", &[][..]), ("GET /304", &[]), ("GET /304-with-length", &["512"])]
    {
        let mut client = gateway.connect();
        client.send(format!("{request} HTTP/1.1\r\nHost: a.test\r\nIf-None-Match: \"1\"\r\n\r\n"));
        let head = client.read_head();
        assert_eq!(values(&head, "content-length"), lengths, "{request}");
        assert_eq!(values(&head, "transfer-encoding"), [""; 0], "{request}");
        assert_eq!(values(&head, "etag"), ["\"1\""], "{request}");

        client.send("GET /next HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n");
        let next = client.read_to_end();
        assert!(next.starts_with(b"HTTP/1.1 200 OK\r\n"), "{request}: {}", String::from_utf8_lossy(&next));
    }
}

#[test]
fn requests_are_framed_as_the_client_framed_them() {
    // FWD-13: an empty stream sent as chunked makes strict backends answer 415.
    let backend = Backend::answering(|_| Reply::keep("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
    let gateway = Gateway::before(&backend);
    let chunks = "2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n";
    for (method, field, body, length, coding) in [
        ("GET", "", "", None, None),
        ("DELETE", "", "", None, None),
        ("HEAD", "", "", None, None),
        ("OPTIONS", "", "", None, None),
        ("POST", "", "", None, None),
        ("POST", "Content-Length: 0\r\n", "", Some("0"), None),
        ("GET", "Content-Length: 0\r\n", "", Some("0"), None),
        ("POST", "Content-Length: 5\r\n", "hello", Some("5"), None),
        ("GET", "Content-Length: 5\r\n", "hello", Some("5"), None),
        ("DELETE", "Content-Length: 5\r\n", "hello", Some("5"), None),
        ("POST", "Transfer-Encoding: chunked\r\n", chunks, None, Some("chunked")),
        ("GET", "Transfer-Encoding: chunked\r\n", chunks, None, Some("chunked")),
        ("POST", "Transfer-Encoding: chunked\r\n", "0\r\n\r\n", None, Some("chunked")),
    ] {
        let case = format!("{method} {field}{body}");
        gateway.ask(format!("{method} / HTTP/1.1\r\nHost: a.test\r\n{field}Connection: close\r\n\r\n{body}"));
        let seen = backend.next();
        assert_eq!(seen.values("content-length"), Vec::from_iter(length), "{case}");
        assert_eq!(seen.values("transfer-encoding"), Vec::from_iter(coding), "{case}");
        assert_eq!(unchunked(&seen.body), unchunked(body.as_bytes()), "{case}");
        assert_eq!(seen.request_line(), format!("{method} / HTTP/1.1"));
    }
}

/// The letters of a body: chunk sizes and line ends are the hop's own.
fn unchunked(body: &[u8]) -> Vec<u8> {
    body.iter().copied().filter(u8::is_ascii_alphabetic).collect()
}

#[test]
fn connection_cannot_name_away_what_the_gateway_says() {
    // FRM-5: fields listed in Connection are dropped; listing the gateway's own made them vanish.
    let backend = Backend::answering(|_| Reply::ok());
    let mut setup = Setup::to(&[backend.address]);
    setup.credentials = vec![HeaderName::from_static("x-api-key")];
    let answer = Gateway::start(setup).ask(
        "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nX-Api-Key: secret\r\nX-User-Id: 7\r\nX-Other: 8\r\n\
         X-Forwarded-For: 198.51.100.7\r\n\
         Connection: close, X-Api-Key, X-Forwarded-For, X-User-Id, Host, Content-Length, X-Request-Id\r\n\
         Connection: X-Tollgate-Plan, X-Tollgate-Account, Forwarded, X-Forwarded-Host, X-Forwarded-Proto\r\n\r\nhello",
    );
    assert!(answer.starts_with(b"HTTP/1.1 200 "));

    let seen = backend.next();
    assert_eq!(seen.body, b"hello");
    for (name, value) in [
        ("content-length", "5"),
        ("host", backend.address.to_string().as_str()),
        ("x-forwarded-for", "127.0.0.1"),
        ("x-forwarded-host", "a.test"),
        ("x-forwarded-proto", "http"),
        ("forwarded", "for=127.0.0.1;host=\"a.test\";proto=http"),
        ("x-request-id", "request-7"),
        ("x-tollgate-plan", "free"),
        ("x-tollgate-account", "acme"),
        ("x-other", "8"),
    ] {
        assert_eq!(seen.values(name), [value], "{name}");
    }
    for name in ["connection", "x-api-key", "x-user-id"] {
        assert_eq!(seen.values(name), [""; 0], "{name}");
    }
}

#[test]
fn hop_by_hop_fields_of_the_answer_stay_behind() {
    // FRM-6: only requests were cleaned, and what the backend named in Connection went through.
    let backend = Backend::answering(|_| {
        Reply::keep(
            "HTTP/1.1 200 OK\r\nConnection: X-Internal, keep-alive\r\nX-Internal: secret\r\nKeep-Alive: timeout=1\r\n\
             Proxy-Authenticate: Basic\r\nProxy-Connection: keep-alive\r\nUpgrade: h2c\r\nTE: trailers\r\n\
             Trailer: X-T\r\nX-Public: yes\r\nContent-Length: 2\r\n\r\nok",
        )
    });
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    for _ in 0..2 {
        client.send("GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
        let head = client.read_head();
        for name in [
            "connection",
            "x-internal",
            "keep-alive",
            "proxy-authenticate",
            "proxy-connection",
            "upgrade",
            "te",
            "trailer",
        ] {
            assert_eq!(values(&head, name), [""; 0], "{name}");
        }
        assert_eq!(values(&head, "x-public"), ["yes"]);
        assert_eq!(client.read_exact(2), b"ok");
    }
}

#[test]
fn a_status_without_a_name_passes() {
    let answer = exchange(
        b"HTTP/1.1 599 Odd\r\nContent-Length: 0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n",
    );
    assert!(answer.starts_with(b"HTTP/1.1 599 \r\n"), "{}", String::from_utf8_lossy(&answer));
}

#[test]
fn interim_answers_are_not_the_answer() {
    let answer = exchange(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n",
    );
    assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n") && answer.ends_with(b"\r\n\r\nok"));
}

#[test]
fn every_method_is_sent_as_it_is() {
    let backend = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::before(&backend);
    for method in ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "QUERY"] {
        gateway.ask(format!("{method} /m HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n"));
        assert_eq!(backend.next().request_line(), format!("{method} /m HTTP/1.1"));
    }
}

#[test]
fn expect_ends_at_the_gateway() {
    // The gateway has answered it; asking the backend again would make both wait.
    let backend = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
    assert!(client.read_head().starts_with("HTTP/1.1 100 "));
    client.send("hello");
    assert!(client.read_head().starts_with("HTTP/1.1 200 "));
    let seen = backend.next();
    assert_eq!(seen.values("expect"), [""; 0]);
    assert_eq!(seen.body, b"hello");
}
