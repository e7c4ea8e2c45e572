//! Backends and clients that break the rules, the connection, or the patience of the other side.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use super::support::{Backend, Gateway, Reply, Setup, nobody};

/// Short enough for a test, long enough for a busy machine to do what it has to do on loopback.
const SHORT: Duration = Duration::from_millis(400);

fn impatient(targets: &[SocketAddr]) -> Setup {
    let mut setup = Setup::to(targets);
    setup.upstream.connect_timeout = SHORT;
    setup.upstream.head_timeout = SHORT;
    setup
}

#[track_caller]
fn check_refusal(answer: &str, status: &str, backend: SocketAddr) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    for secret in [backend.ip().to_string(), backend.port().to_string()] {
        assert!(!answer.contains(&secret), "the client learns {secret}: {answer}");
    }
}

#[test]
fn a_silent_backend_is_504() {
    // TMO-1 (a)
    let backend = Backend::answering(|_| Reply::Silence);
    let answer = Gateway::start(impatient(&[backend.address])).get("/");
    check_refusal(&answer, "504", backend.address);
}

#[test]
fn a_refused_connection_is_502() {
    // TMO-1 (b)
    let nobody = nobody();
    let answer = Gateway::start(impatient(&[nobody])).get("/");
    check_refusal(&answer, "502", nobody);
}

#[test]
fn a_broken_answer_is_502() {
    // TMO-1 (c, d), and answers whose end nobody can be sure of.
    for broken in [
        "",
        "HTTP/1.1 200",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
        "rubbish\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nbad name: x\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\na",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ] {
        let backend = Backend::answering(move |_| Reply::close(broken));
        let answer = Gateway::before(&backend).get("/");
        assert!(answer.starts_with("HTTP/1.1 502 "), "{broken:?} gave {answer}");
        check_refusal(&answer, "502", backend.address);
        backend.next();
        assert!(backend.saw_nothing_else(), "{broken:?} was asked for twice");
    }
}

#[test]
fn a_reset_is_502() {
    // TMO-1 (c)
    let backend = Backend::answering(|_| Reply::reset(""));
    check_refusal(&Gateway::before(&backend).get("/"), "502", backend.address);
}

#[test]
fn a_backend_with_a_full_backlog_is_504() {
    // TMO-1 (e)
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, SHORT) {
        waiting.push(stream);
        assert!(waiting.len() < 100, "the backlog never fills");
    }
    let answer = Gateway::start(impatient(&[address])).get("/");
    check_refusal(&answer, "504", address);
}

#[test]
fn a_target_that_refuses_is_passed_over() {
    let backend = Backend::answering(|seen| {
        Reply::keep(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}",
            seen.body.len(),
            String::from_utf8_lossy(&seen.body)
        ))
    });
    let gateway = Gateway::start(Setup::to(&[nobody(), nobody(), backend.address]));
    for _ in 0..4 {
        // The body was not touched, so it goes whole to the target that accepts.
        let answer = gateway
            .ask("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello");
        assert!(answer.ends_with(b"\r\n\r\nhello"), "{}", String::from_utf8_lossy(&answer));
        assert_eq!(backend.next().values("host"), [backend.address.to_string()]);
    }
    assert!(backend.saw_nothing_else());
}

#[test]
fn all_targets_refuse() {
    let gateway = Gateway::start(Setup::to(&[nobody(), nobody()]));
    assert!(gateway.get("/").starts_with("HTTP/1.1 502 "));
}

#[test]
fn a_request_that_was_sent_is_not_sent_again() {
    let broken = Backend::answering(|_| Reply::close(""));
    let other = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::start(Setup::to(&[broken.address, other.address]));
    assert!(gateway.get("/").starts_with("HTTP/1.1 502 "));
    broken.next();
    assert!(broken.saw_nothing_else() && other.saw_nothing_else());
}

#[test]
fn a_cut_answer_reaches_the_client_as_a_cut_answer() {
    // STR-8: the read error was swallowed, and half a document ended properly.
    for (reply, arrives) in [
        (Reply::Close as fn(_) -> _, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"),
        (Reply::Close, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nff\r\nnot all"),
        (Reply::Close, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\nrubbish\r\n"),
        (Reply::Close, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf"),
        (Reply::Close, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
        (Reply::Close, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
        (Reply::Reset, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf"),
        (Reply::Reset, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"),
    ] {
        let backend = Backend::answering(move |_| reply(arrives.as_bytes().to_vec()));
        let answer = Gateway::before(&backend).get("/");
        if answer.starts_with("HTTP/1.1 502 ") {
            // A reset may overtake the head. The client is told the truth then, too.
            continue;
        }
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{arrives:?} gave {answer:?}");
        assert!(!answer.ends_with("0\r\n\r\n"), "{arrives:?} ended properly: {answer:?}");
        if arrives.contains("1000") {
            assert!(answer.contains("content-length: 1000\r\n"), "{answer:?}");
        }
    }
}

#[test]
fn what_came_before_the_cut_is_delivered() {
    let backend = Backend::answering(|_| Reply::close("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf"));
    let answer = Gateway::before(&backend).get("/");
    assert!(answer.ends_with("\r\n\r\nhalf"), "{answer:?}");
}

#[test]
fn an_answer_that_stands_still_is_cut() {
    let backend = Backend::answering(|_| Reply::keep("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf"));
    let mut setup = Setup::to(&[backend.address]);
    setup.upstream.idle_timeout = SHORT;
    let answer = Gateway::start(setup).get("/");
    assert!(answer.ends_with("\r\n\r\nhalf"), "{answer:?}");
}

#[test]
fn a_stalled_upload_is_408_and_not_the_backends_fault() {
    let backend = Backend::answering(|_| Reply::ok());
    let mut setup = impatient(&[backend.address]);
    setup.upstream.idle_timeout = 2 * SHORT;
    let gateway = Gateway::start(setup);
    let mut client = gateway.connect();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhe");
    assert!(client.read_head().starts_with("HTTP/1.1 408 "));
}

#[test]
fn a_slow_upload_is_not_a_slow_backend() {
    // The time for the head counts from the last byte of the request. Each pause is longer than that time.
    let backend = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::start(impatient(&[backend.address]));
    let mut client = gateway.connect();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\n");
    for byte in ["a", "b", "c"] {
        std::thread::sleep(2 * SHORT);
        client.send(byte);
    }
    assert!(client.read_head().starts_with("HTTP/1.1 200 "));
    assert_eq!(backend.next().body, b"abc");
}

#[test]
fn a_backend_is_late_also_after_an_upload() {
    let backend = Backend::answering(|_| Reply::Silence);
    let gateway = Gateway::start(impatient(&[backend.address]));
    let mut client = gateway.connect();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhello");
    assert!(client.read_head().starts_with("HTTP/1.1 504 "));
    assert_eq!(backend.next().body, b"hello");
}

#[test]
fn a_malformed_upload_never_counts_as_a_whole_one() {
    let backend = Backend::answering(|_| Reply::ok());
    let gateway = Gateway::before(&backend);
    // This actix closes the connection without an answer; 400 would be as good.
    let answer = gateway
        .ask("POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\nnonsense\r\n");
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 400 "),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    assert!(backend.saw_nothing_else());
}

#[test]
fn a_body_over_the_limit_is_413() {
    let backend = Backend::answering(|_| Reply::ok());
    let mut setup = Setup::to(&[backend.address]);
    setup.max_body = 5;
    let gateway = Gateway::start(setup);
    for (framing, status) in [
        ("Content-Length: 5\r\n\r\nhello", "200"),
        ("Content-Length: 6\r\n\r\nhello!", "413"),
        ("Content-Length: 18446744073709551615\r\n\r\n", "413"),
        ("Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "200"),
        ("Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n", "413"),
    ] {
        let mut client = gateway.connect();
        client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\n{framing}"));
        let head = client.read_head();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{framing:?} gave {head}");
    }
    backend.next();
    backend.next();
    assert!(backend.saw_nothing_else(), "a body over the limit arrived whole");
}
