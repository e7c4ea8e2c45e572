//! The harness itself: a client that repairs a broken answer, or a Redis that does not freeze, makes every other test
//! pass for the wrong reason.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use crate::support::backend::{After, head};
use crate::support::fault::{Connect, Garbage, SCRIPTS, Spoil};
use crate::support::{
    Backend, Cluster, Connection, Ending, Fault, FaultProxy, Redis, Request, redis_program,
};

#[test]
fn the_client_sends_what_it_is_told_and_the_backend_keeps_it() {
    let backend = Backend::ok();
    let mut connection = Connection::open(backend.address());
    let bytes = b"POST /a/../b?x=%zz HTTP/1.1\r\nhOsT: a\r\nX: \xff\r\nTransfer-Encoding: chunked\r\n\r\n3;e=1\r\nabc\r\n0\r\n\r\n";
    connection.send(bytes);
    let answer = connection.answer("POST").expect(200);
    assert_eq!((answer.text().as_str(), answer.ending), ("ok", Ending::Complete));
    let received = backend.last();
    assert_eq!(received.raw, bytes);
    assert_eq!((received.method(), received.target()), ("POST", "/a/../b?x=%zz"));
    assert_eq!((received.body.as_slice(), received.body_length), (b"abc".as_slice(), 3));
}

#[test]
fn the_client_tells_a_cut_body_from_a_whole_one() {
    let backend = Backend::with(|request, stream| {
        match request.target() {
            "/length" => stream.write_all(&head("200 OK", &[("Content-Length", "9")]))?,
            "/chunked" => stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n")?,
            _ => stream.write_all(&head("200 OK", &[]))?,
        }
        stream.write_all(b"half")?;
        Ok(if request.target() == "/length" { After::Reset } else { After::Close })
    });
    for (target, ending) in
        [("/length", Ending::Cut), ("/chunked", Ending::Cut), ("/until-close", Ending::Closed)]
    {
        let mut connection = Connection::open(backend.address());
        let answer = Request::get(target).on(&mut connection).expect(200);
        assert_eq!(answer.ending, ending, "{target}");
    }
}

#[test]
#[should_panic(expected = "no readable answer")]
fn the_client_trips_over_a_stray_byte_between_answers() {
    let backend = Backend::answering(|_| b"HTTP/1.1 204 No Content\r\n\r\n0\r\n\r\n".to_vec());
    let mut connection = Connection::open(backend.address());
    Request::get("/x").on(&mut connection);
    Request::get("/x").on(&mut connection);
}

#[test]
fn redis_freezes_thaws_and_restarts() {
    let mut redis = Redis::start();
    redis.cmd(&["SET", "kept", "1"]);
    redis.cmd(&["SAVE"]);
    redis.cmd(&["SET", "lost", "1"]);
    redis.stop();
    let mut frozen = Connection::open(format!("127.0.0.1:{}", redis.port()).parse().unwrap());
    frozen.send(b"PING\r\n");
    frozen.expect_silence(Duration::from_millis(200));
    redis.cont();
    assert_eq!(redis.keys(), ["kept", "lost"]);
    redis.restart();
    assert_eq!(redis.keys(), ["kept"]);
    redis.kill();
    redis.launch();
    assert_eq!(redis.value("kept"), Some(b"1".to_vec()));
}

#[test]
fn redis_is_the_program_that_was_named() {
    // A matrix of servers that all were the one on the PATH would pass, and say nothing.
    let redis = Redis::start();
    let running = format!("/proc/{}/exe", redis.info("server", "process_id").unwrap());
    let named = Command::new("sh").args(["-c", "command -v \"$0\"", &redis_program()]).output().unwrap();
    let named = String::from_utf8(named.stdout).unwrap();
    assert_eq!(std::fs::read_link(running).unwrap(), std::fs::canonicalize(named.trim()).unwrap());
}

#[test]
fn a_cluster_has_three_primaries_that_share_the_slots() {
    let cluster = Cluster::start();
    assert_eq!((cluster.primaries().len(), cluster.replicas().len()), (3, 3));
    // Replicas send every caller to their primary, and of three primaries one takes a given key.
    let nodes = || cluster.primaries().iter().chain(cluster.replicas());
    assert_eq!(nodes().filter(|node| node.accepts(&["SET", "{somebody}:x", "1"])).count(), 1);
    assert_eq!(cluster.primaries().iter().map(|node| node.keys().len()).sum::<usize>(), 1);
}

/// A connection through a proxy, as a client of Redis that reads what comes.
fn through(proxy: &FaultProxy) -> Connection {
    Connection::open(proxy.address())
}

#[test]
fn the_proxy_makes_each_fault_and_ends_it() {
    // A proxy that passes everything on would let every test of a fault pass.
    let redis = Redis::start();
    let proxy = FaultProxy::to_redis(redis.port());
    let ping = b"*1\r\n$4\r\nPING\r\n";
    let script = b"*3\r\n$4\r\nEVAL\r\n$8\r\nreturn 7\r\n$1\r\n0\r\n";
    let faulty = |fault: Fault, command: &[u8]| {
        proxy.set(fault);
        let mut connection = through(&proxy);
        connection.send(command);
        connection
    };
    let short = Duration::from_millis(100);
    let end = Duration::from_secs(5);
    let spoil = |spoil| Fault { spoil, of: SCRIPTS, ..Fault::NONE };

    faulty(Fault::slow_scripts(end), script).expect_silence(short);
    assert_eq!(faulty(Fault::slow_scripts(end), ping).bytes(7, end), b"+PONG\r\n");
    faulty(Fault { swallow: true, ..Fault::NONE }, ping).expect_silence(short);
    for halved in [Spoil::ResetMidway, Spoil::CutMidway] {
        assert_eq!(faulty(spoil(halved), script).rest_until_closed(end), b":7", "{halved:?}");
    }
    assert_eq!(faulty(spoil(Spoil::CloseAfter(3)), script).rest_until_closed(end), b":7\r");
    let replaced = spoil(Spoil::Replace(Garbage::NegativeNumbers));
    assert_eq!(faulty(replaced, script).bytes(23, end), b":-9223372036854775808\r\n");

    let mut open = faulty(Fault::NONE, ping);
    open.bytes(7, end);
    proxy.cut();
    open.rest_until_closed(end);
    let before = proxy.accepted();
    proxy.set(Fault { connect: Connect::Reset, ..Fault::NONE });
    through(&proxy).rest_until_closed(end);
    assert_eq!(proxy.accepted() - before, 1);
    proxy.set(Fault { connect: Connect::Refuse, ..Fault::NONE });
    for _ in 0..3 {
        let refused = std::net::TcpStream::connect(proxy.address()).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    }
    assert_eq!(faulty(Fault::NONE, ping).bytes(7, end), b"+PONG\r\n");
}

#[test]
fn the_proxy_lets_so_many_replies_be_late() {
    // F6 is about a share; one that depends on luck shows nothing.
    let redis = Redis::start();
    let proxy = FaultProxy::to_redis(redis.port());
    proxy.set(Fault { late: (3, Duration::from_millis(60)), ..Fault::NONE });
    let mut connection = through(&proxy);
    let late = (0..20).filter(|_| {
        let sent = std::time::Instant::now();
        connection.send(b"PING\r\n");
        connection.bytes(7, Duration::from_secs(5));
        sent.elapsed() >= Duration::from_millis(60)
    });
    assert_eq!(late.count(), 6);
}
