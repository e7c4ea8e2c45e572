//! What goes on to the upstream and comes back: byte for byte, as a stream, and never more than was sent.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::backend::{After, head, response};
use crate::support::{Backend, Config, Ending, Gateway, Request, eventually};

/// A plan that never refuses in these tests, for the key `k`.
fn gateway(backend: &Backend) -> Gateway {
    Gateway::start(&wide(Config::open(backend)))
}

fn wide(config: Config) -> Config {
    config.plan("wide", r#"{ name = "window", limit = 10000, per = "60s" }"#).key("k", "one", "wide")
}

/// One upstream with these further lines in its table.
fn with_upstream(backend: &Backend, lines: &str) -> Config {
    let table = format!(
        "[upstreams.api]\ntargets = [\"http://{}\"]\n{lines}\n\n[routes.rest]\npath = \"/*\"\nupstream = \"api\"",
        backend.address()
    );
    wide(Config::default().table(&table))
}

/// "hello" as gzip.
const GZIP: &[u8] = &[
    0x1f, 0x8b, 0x08, 0, 0, 0, 0, 0, 0x02, 0x03, 0xcb, 0x48, 0xcd, 0xc9, 0xc9, 0x07, 0, 0x86, 0xa6, 0x10,
    0x36, 0x05, 0, 0, 0,
];

#[test]
fn an_encoded_body_stays_encoded() {
    // FWD-1: the HTTP client unpacked gzip by itself and took two header fields away with it.
    for coding in ["gzip", "br", "zstd", "deflate"] {
        let backend = Backend::answering(move |_| {
            response("200 OK", &[("Content-Encoding", coding), ("ETag", "\"v1\"")], GZIP)
        });
        let gateway = gateway(&backend);
        let asked = "br;q=0.5, gzip , x-odd";
        let answer = gateway.get("/x").key("k").header("Accept-Encoding", asked).send().expect(200);
        assert_eq!(answer.body, GZIP);
        assert_eq!(answer.header("content-encoding"), Some(coding));
        assert_eq!(answer.header("content-length"), Some(GZIP.len().to_string().as_str()));
        assert_eq!(answer.header("etag"), Some("\"v1\""));
        assert_eq!(backend.last().head.lines("accept-encoding"), [asked]);

        let plain = gateway.get("/x").key("k").send().expect(200);
        assert_eq!(plain.body, GZIP);
        // Absent stays absent.
        assert_eq!(backend.last().head.lines("accept-encoding"), [""; 0]);
    }
}

#[test]
fn repeated_fields_stay_apart_and_in_order() {
    // FWD-2: fields went through a map, so one Set-Cookie won, or all were joined by commas.
    let sent: &[(&str, &str)] = &[
        ("Set-Cookie", "a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT"),
        ("Link", "</1>; rel=next"),
        ("Set-Cookie", "b=2"),
        ("Vary", "Origin"),
        ("Warning", "199 - \"one\""),
        ("Set-Cookie", "a=3"),
        ("Link", "</2>; rel=prev"),
        ("Vary", "Accept"),
        ("Warning", "199 - \"two\""),
    ];
    let backend = Backend::answering(move |_| response("200 OK", sent, b"ok"));
    let gateway = gateway(&backend);
    let answer = gateway
        .get("/x")
        .key("k")
        .header("Cookie", "c=1")
        .header("X-A", "one")
        .header("Cookie", "d=2")
        .header("X-A", "two, three")
        .send()
        .expect(200);
    for name in ["Set-Cookie", "Link", "Vary", "Warning"] {
        let wanted: Vec<&str> =
            sent.iter().filter(|(field, _)| *field == name).map(|(_, value)| *value).collect();
        assert_eq!(answer.head.lines(name), wanted);
    }
    let received = backend.last().head;
    assert_eq!(received.lines("cookie"), ["c=1", "d=2"]);
    assert_eq!(received.lines("x-a"), ["one", "two, three"]);
}

#[test]
fn redirects_are_the_clients_business() {
    // FWD-3: the HTTP client followed redirects itself, replayed the body elsewhere, and a POST became a GET.
    let elsewhere = Backend::ok();
    let location = format!("http://{}/moved?a=1", elsewhere.address());
    let backend = Backend::answering({
        let location = location.clone();
        move |request| {
            let status = request.target().trim_start_matches('/');
            let target = if status.starts_with("302") { "/302%20Loop" } else { &location };
            response(&status.replace("%20", " "), &[("Location", target)], b"")
        }
    });
    let gateway = gateway(&backend);
    for status in [301, 303, 307, 308, 302] {
        for method in ["GET", "POST"] {
            let mut call =
                gateway.call(method, &format!("/{status}%20Moved")).key("k").header("X-Secret", "s");
            if method == "POST" {
                call = call.body("payload");
            }
            let answer = call.send().expect(status);
            let wanted = if status == 302 { "/302%20Loop" } else { &location };
            assert_eq!(answer.header("location"), Some(wanted), "{method} {status}");
        }
    }
    assert_eq!(backend.count(), 10);
    assert_eq!(elsewhere.count(), 0);
}

#[test]
fn the_query_is_not_rewritten() {
    // FWD-4: parsed and written again, a query loses its order, its blanks and its signature.
    let backend = Backend::ok();
    let gateway = gateway(&backend);
    let mut refused = 0;
    for query in [
        "?b=2&a=1&b=3&bare&sig=%E9%FF&s=1;2&q=a%20b+c&u=%7e&&=&p=??",
        "?",
        "??",
        "?a=%2f%2F/../x",
        "?@:!$()*,-._~",
        "?x[0:1]=2",
    ] {
        let status = gateway.get(&format!("/e{query}")).key("k").send().status;
        // Brackets are not legal there (RFC 3986 3.4): refused or untouched, never escaped.
        if status == 400 && query.contains('[') {
            refused += 1;
            continue;
        }
        assert_eq!(status, 200, "{query}");
        assert_eq!(backend.last().target(), format!("/e{query}"));
    }
    assert_eq!(backend.count() + refused, 6);
    // The one legal byte that changes on the way: the URL type behind reqwest escapes the apostrophe.
    gateway.get("/e?n=o'k").key("k").send().expect(200);
    assert_eq!(backend.last().target(), "/e?n=o%27k");
}

#[test]
fn percent_escapes_stay_escaped() {
    // FWD-6: %3F became "?", and the rest of the path a query.
    let backend = Backend::ok();
    let gateway = gateway(&backend);
    // The normal form of RFC 3986 6.2.2 spells an escaped letter, digit or "-._~" plainly. Nothing else changes.
    let normal = |path: &str| path.replace("%7E", "~");
    for path in [
        "/v1/a%3Fc%2Cd%40e%25f/%7Eu/x%20y/@:!$",
        "/v1/%23/%3A/%26/%3D/%2B/+",
        "/v1/(a)/*/a,b;c=d/'",
        "/v1/%E2%82%AC/%FF",
    ] {
        gateway.get(path).key("k").send().expect(200);
        assert_eq!(normal(backend.last().target()), normal(path));
    }
    let seen = backend.count();
    for path in
        ["/v1/a|b", "/v1/a\"b", "/v1/<b>", "/v1/^", "/v1/a%", "/v1/a%zz", "/v1/{a}", "/v1/`", "/v1/a%2Fb"]
    {
        gateway.get(path).key("k").send().expect(400);
    }
    assert_eq!(backend.count(), seen);
}

#[test]
fn an_answer_to_head_keeps_its_length() {
    // FWD-9: the server library puts the length of the empty body in place of the one that was set.
    let backend = Backend::answering(|request| match (request.method(), request.target()) {
        ("HEAD", "/long") => head("200 OK", &[("Content-Length", "9513784")]),
        ("HEAD", _) => head("200 OK", &[("X-Empty", "1")]),
        _ => response("200 OK", &[], b"next"),
    });
    let gateway = gateway(&backend);
    let mut connection = gateway.connect();
    let long = Request::new("HEAD", "/long").key("k").on(&mut connection).expect(200);
    assert_eq!(long.head.lines("content-length"), ["9513784"]);
    assert_eq!(Request::get("/x").key("k").on(&mut connection).expect(200).text(), "next");
    let none = Request::new("HEAD", "/none").key("k").on(&mut connection).expect(200);
    assert_eq!(none.head.lines("content-length"), [""; 0]);
    assert_eq!(Request::get("/x").key("k").on(&mut connection).expect(200).text(), "next");
}

#[test]
fn nothing_follows_an_answer_without_a_body() {
    // FWD-10: "0 CRLF CRLF" behind a 204 is the beginning of the next answer on that connection.
    let backend = Backend::answering(|request| match (request.method(), request.target()) {
        ("DELETE", _) => head("204 No Content", &[("X-Kind", "deleted")]),
        (_, "/unchanged") => head("304 Not Modified", &[("ETag", "\"v1\"")]),
        (_, "/unchanged-with-length") => head("304 Not Modified", &[("Content-Length", "1234")]),
        ("HEAD", _) => head("200 OK", &[("Transfer-Encoding", "chunked")]),
        _ => response("200 OK", &[], b"next"),
    });
    let gateway = gateway(&backend);
    let mut connection = gateway.connect();
    for (method, target, status) in [
        ("DELETE", "/x", 204),
        ("GET", "/unchanged", 304),
        ("GET", "/unchanged-with-length", 304),
        ("HEAD", "/x", 200),
    ] {
        let request = Request::new(method, target).key("k").header("If-None-Match", "\"v1\"");
        let answer = request.on(&mut connection).expect(status);
        if status == 204 {
            assert_eq!(answer.head.lines("content-length"), [""; 0]);
            assert_eq!(answer.head.lines("transfer-encoding"), [""; 0]);
        }
        // The reader takes the next byte for the status line, so a stray one fails here.
        assert_eq!(Request::get("/x").key("k").on(&mut connection).expect(200).text(), "next");
    }
    connection.finish_sending();
    assert_eq!(connection.rest_until_closed(Duration::from_secs(10)), b"");
}

#[test]
fn no_body_in_no_body_out() {
    // FWD-13: a call without a body was sent on as chunked, and strict backends answered 415.
    let backend = Backend::ok();
    let gateway = gateway(&backend);
    let framing = || {
        let head = backend.last().head;
        let lines = |name| head.lines(name).join("|");
        (lines("content-length"), lines("transfer-encoding"))
    };
    for method in ["GET", "DELETE", "HEAD", "OPTIONS"] {
        gateway.call(method, "/x").key("k").send().expect(200);
        assert_eq!(framing(), (String::new(), String::new()), "{method}");
        assert_eq!(backend.last().method(), method);
    }
    gateway.call("POST", "/x").key("k").body("").send().expect(200);
    assert_eq!(framing(), ("0".to_owned(), String::new()));
    gateway.call("POST", "/x").key("k").body("hello").send().expect(200);
    assert_eq!(framing(), ("5".to_owned(), String::new()));
    assert_eq!(backend.last().body, b"hello");
    let chunked = b"POST /x HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n";
    gateway.raw(chunked).answer("POST").expect(200);
    let (length, coding) = framing();
    assert!(
        (length.as_str(), coding.as_str()) == ("", "chunked")
            || (length.as_str(), coding.as_str()) == ("5", "")
    );
    assert_eq!(backend.last().body, b"hello");
}

#[test]
fn an_upload_flows_while_it_is_sent() {
    // STR-1: a body taken as one buffer is all in memory, and the upstream waits for its last byte.
    let backend = Backend::ok();
    let gateway = gateway(&backend);
    let piece = vec![b'u'; 256 << 10];
    let mut declared = gateway.raw(
        format!(
            "POST /x HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\nContent-Length: {}\r\n\r\n",
            2 * piece.len()
        )
        .as_bytes(),
    );
    declared.send(&piece);
    // Every byte sent so far must arrive while the last ones have not been sent.
    eventually("the first half at the upstream", Duration::from_secs(10), || {
        (backend.body_bytes() == piece.len() as u64).then_some(())
    });
    declared.send(&piece);
    declared.answer("POST").expect(200);
    assert_eq!(backend.last().body_length, 2 * piece.len() as u64);

    let before = backend.body_bytes();
    let mut chunked =
        gateway.raw(b"POST /x HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n");
    eventually("the first chunk at the upstream", Duration::from_secs(10), || {
        (backend.body_bytes() == before + 5).then_some(())
    });
    chunked.send(b"0\r\n\r\n");
    chunked.answer("POST").expect(200);
    assert_eq!(backend.last().body, b"first");
}

#[test]
fn a_download_flows_while_it_is_made() {
    // STR-1, the other way: the first event of a stream must not wait for the last.
    let backend = Backend::with(|_, stream| {
        stream.write_all(&head("200 OK", &[("Transfer-Encoding", "chunked")]))?;
        stream.write_all(b"5\r\nfirst\r\n")?;
        thread::sleep(Duration::from_secs(2));
        stream.write_all(b"4\r\nlast\r\n0\r\n\r\n")?;
        Ok(After::Keep)
    });
    let gateway = gateway(&backend);
    let mut connection = gateway.raw(&Request::get("/x").key("k").to_bytes());
    let began = Instant::now();
    let mut arrivals = Vec::new();
    connection
        .stream_answer("GET", &mut |piece| {
            arrivals.push((began.elapsed(), piece.to_vec()));
        })
        .unwrap()
        .expect("an answer");
    let text: Vec<u8> = arrivals.iter().flat_map(|(_, piece)| piece.clone()).collect();
    assert_eq!(text, b"firstlast");
    assert!(arrivals[0].0 < Duration::from_millis(1_500), "{arrivals:?}");
}

#[test]
fn a_body_over_the_limit_is_refused() {
    // STR-1: a limit that only looks at the declared length is none for a chunked body.
    let backend = Backend::ok();
    let config = wide(Config::open(&backend).server("max_body = \"64KiB\""));
    let gateway = Gateway::start(&config);
    gateway.call("POST", "/x").key("k").body(vec![b'a'; 64 << 10]).send().expect(200);
    assert_eq!(backend.last().body_length, 64 << 10);
    gateway.call("POST", "/x").key("k").body(vec![b'a'; (64 << 10) + 1]).send().expect(413);
    assert_eq!(backend.count(), 1);

    let mut request =
        b"POST /x HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n10001\r\n"
            .to_vec();
    request.extend_from_slice(&vec![b'a'; 0x10001]);
    request.extend_from_slice(b"\r\n0\r\n\r\n");
    gateway.raw(&request).answer("POST").expect(413);
    for received in backend.received().iter().skip(1) {
        assert_eq!(received.ending, Ending::Cut, "the upstream took a cut body for a whole one");
    }
}

#[test]
fn a_cut_answer_is_not_delivered_as_a_whole_one() {
    // STR-8: the read error was swallowed and the chunked answer ended properly: half a document, status 200.
    let backend = Backend::with(|request, stream| {
        let (fields, body): (&[(&str, &str)], &[u8]) = match request.target() {
            "/chunked" | "/chunked-reset" => (&[("Transfer-Encoding", "chunked")], b"5\r\nhello\r\n"),
            "/in-chunk" => (&[("Transfer-Encoding", "chunked")], b"ff\r\nhello"),
            "/length" | "/length-reset" => (&[("Content-Length", "1000")], b"hello"),
            _ => (&[("Content-Length", "1000")], b""),
        };
        stream.write_all(&head("200 OK", fields))?;
        stream.write_all(body)?;
        // What was written must be on its way before a reset overtakes it.
        thread::sleep(Duration::from_millis(100));
        Ok(if request.target().ends_with("reset") { After::Reset } else { After::Close })
    });
    let gateway = gateway(&backend);
    for target in ["/chunked", "/chunked-reset", "/in-chunk", "/length", "/length-reset"] {
        let answer = gateway.get(target).key("k").send().expect(200);
        assert_eq!(answer.ending, Ending::Cut, "{target}: {answer:?}");
        assert_eq!(answer.text(), "hello", "{target}");
    }
    let headers_only = gateway.get("/head-only").key("k").send();
    assert!(headers_only.status == 502 || headers_only.ending == Ending::Cut, "{headers_only:?}");
}

#[test]
fn an_upstream_that_fails_is_told_apart_from_one_that_is_slow() {
    // TMO-1: one status for every failure of the upstream takes from operators and clients what they must know.
    let backend = Backend::with(|request, stream| {
        match request.target() {
            "/silent" => thread::sleep(Duration::from_secs(3)),
            "/rubbish" => stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")?,
            "/two-lengths" => {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab")?;
            }
            "/own-error" => stream.write_all(&response("503 Busy", &[("Retry-After", "7")], b"mine"))?,
            _ => return Ok(After::Reset),
        }
        Ok(After::Close)
    });
    let gateway = Gateway::start(&with_upstream(&backend, "head_timeout = \"300ms\""));
    for (target, status) in [("/silent", 504), ("/rubbish", 502), ("/two-lengths", 502), ("/reset", 502)] {
        let answer = gateway.get(target).key("k").send().expect(status);
        let port = backend.address().port().to_string();
        assert!(!answer.text().contains(&port), "an inner address in {}", answer.text());
    }
    // What the upstream says itself passes untouched.
    let own = gateway.get("/own-error").key("k").send().expect(503);
    assert_eq!((own.text().as_str(), own.retry_after()), ("mine", Some(7)));

    let nobody = wide(Config::bare("127.0.0.1:9".parse().unwrap()).route("rest", "/*", ""));
    Gateway::start(&nobody).get("/x").key("k").send().expect(502);
}

#[test]
fn a_post_is_never_sent_twice() {
    // TMO-2: a retry on a broken connection is safe for what changes nothing, and for nothing else.
    let backend = Backend::with(|_, _| Ok(After::Reset));
    let gateway = gateway(&backend);
    gateway.call("POST", "/x").key("k").body("pay").send().expect(502);
    assert_eq!(backend.count(), 1);
}

#[test]
fn a_connection_the_upstream_closed_meanwhile_does_no_harm() {
    // TMO-2: the pool kept connections that the backend had closed, and a few per cent of calls failed.
    let backend = Backend::with(|_, stream| {
        // Closes after each answer without saying so, as a backend at the end of its patience does.
        stream.write_all(&response("200 OK", &[], b"ok"))?;
        Ok(After::Close)
    });
    let gateway = gateway(&backend);
    let mut connection = gateway.connect();
    for _ in 0..20 {
        Request::get("/x").key("k").on(&mut connection).expect(200);
        // The end of the connection must have arrived: a call that crosses it on the way may fail, and is not retried.
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_host_is_the_upstreams_or_the_clients_as_configured() {
    // FWD-7: the port got lost, or the choice was missing.
    let backend = Backend::ok();
    for (line, wanted) in [
        ("preserve_host = false", backend.address().to_string()),
        ("preserve_host = true", "api.example.test:8080".to_owned()),
    ] {
        let gateway = Gateway::start(&with_upstream(&backend, line));
        gateway.get("/x").key("k").header("Host", "api.example.test:8080").send().expect(200);
        let head = backend.last().head;
        assert_eq!(head.lines("host"), [wanted.as_str()]);
        assert_eq!(head.lines("x-forwarded-host"), ["api.example.test:8080"]);
    }
}

#[test]
fn targets_take_turns() {
    // A list of targets of which only the first is used is found on the day it fails.
    let (one, two) = (Backend::ok(), Backend::ok());
    let table = format!(
        "[upstreams.api]\ntargets = [\"http://{}\", \"http://{}\"]\n\n[routes.rest]\npath = \"/*\"\nupstream = \"api\"",
        one.address(),
        two.address()
    );
    let gateway = Gateway::start(&wide(Config::default().table(&table).server("workers = 1")));
    for _ in 0..10 {
        gateway.get("/x").key("k").send().expect(200);
    }
    assert_eq!((one.count(), two.count()), (5, 5));
}

#[test]
fn proxies_of_the_environment_are_not_used() {
    // The HTTP client reads HTTP_PROXY by default, and every request takes a way nobody configured.
    let (backend, wrong) = (Backend::ok(), Backend::ok());
    let proxy = format!("http://{}", wrong.address());
    let environment =
        ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"].map(|name| (name, proxy.as_str()));
    let gateway = Gateway::start_with(&wide(Config::open(&backend)).text(), &environment);
    gateway.get("/x").key("k").send().expect(200);
    assert_eq!((backend.count(), wrong.count()), (1, 0));
}
