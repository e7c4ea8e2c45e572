//! Bodies flow as they come, and whoever does not read makes the other side wait.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::time::Duration;

use super::support::{Backend, Gateway, PATIENCE, read_head};

/// More than all socket buffers between client and backend hold together.
const LARGE: usize = 96 << 20;
/// What may at most be under way when the receiver does not read: the kernel's buffers of two connections, mostly.
const UNDER_WAY_MAX: usize = 48 << 20;
/// When a write takes this long, the pipe is full.
const FULL: Duration = Duration::from_millis(500);

/// Writes until nobody takes more. Returns how many bytes were taken.
fn fill(stream: &mut TcpStream) -> usize {
    stream.set_write_timeout(Some(FULL)).unwrap();
    let block = [b'.'; 65_536];
    let mut sent = 0;
    while sent < LARGE {
        let length = block.len().min(LARGE - sent);
        match stream.write(&block[..length]) {
            Ok(written) => sent += written,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return sent,
            Err(error) => panic!("writing failed after {sent} bytes: {error}"),
        }
    }
    sent
}

/// Writes the rest of `LARGE` bytes.
fn finish(stream: &mut TcpStream, sent: usize) {
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let block = [b'.'; 65_536];
    let mut left = LARGE - sent;
    while left > 0 {
        let length = left.min(block.len());
        stream.write_all(&block[..length]).unwrap();
        left -= length;
    }
}

fn count(stream: &mut TcpStream, already: usize) -> usize {
    let mut total = already;
    let mut block = vec![0; 65_536];
    while total < LARGE {
        match stream.read(&mut block).unwrap() {
            0 => return total,
            length => total += length,
        }
    }
    total
}

#[test]
fn the_first_byte_of_an_upload_arrives_before_the_last_is_sent() {
    // STR-1
    let (arrived, arrival) = channel();
    let arrived = Mutex::new(arrived);
    let backend = Backend::with_connections(move |mut stream| {
        let mut unread = Vec::new();
        if read_head(&mut stream, &mut unread).is_none() {
            return;
        }
        let mut byte = [0];
        for expected in b"abc" {
            if unread.is_empty() {
                stream.read_exact(&mut byte).unwrap();
            } else {
                byte[0] = unread.remove(0);
            }
            assert_eq!(byte[0], *expected);
            arrived.lock().unwrap().send(byte[0]).unwrap();
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
    });
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\n\r\n");
    for byte in b"abc" {
        client.send([*byte]);
        assert_eq!(arrival.recv_timeout(PATIENCE).unwrap(), *byte);
    }
    assert!(client.read_head().starts_with("HTTP/1.1 200 "));
}

#[test]
fn each_part_of_a_download_arrives_before_the_next_is_sent() {
    // STR-2
    let (go_on, turns) = sync_channel::<()>(0);
    let turns = Mutex::new(turns);
    let backend = Backend::with_connections(move |mut stream| {
        if read_head(&mut stream, &mut Vec::new()).is_none() {
            return;
        }
        stream
            .write_all(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
            )
            .unwrap();
        for part in ["3\r\none\r\n", "3\r\ntwo\r\n", "0\r\n\r\n"] {
            turns.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            stream.write_all(part.as_bytes()).unwrap();
        }
    });
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send("GET / HTTP/1.1\r\nHost: a.test\r\nAccept-Encoding: gzip\r\n\r\n");
    client.read_head();
    for part in ["3\r\none\r\n", "3\r\ntwo\r\n", "0\r\n\r\n"] {
        go_on.send(()).unwrap();
        assert_eq!(client.read_exact(part.len()), part.as_bytes());
    }
}

#[test]
fn an_upload_waits_for_the_backend() {
    let (read_on, may_read) = channel::<()>();
    let (counted, count_of) = channel();
    let shared = Mutex::new((may_read, counted));
    let backend = Backend::with_connections(move |mut stream| {
        let mut unread = Vec::new();
        if read_head(&mut stream, &mut unread).is_none() {
            return;
        }
        let shared = shared.lock().unwrap();
        shared.0.recv_timeout(PATIENCE).unwrap();
        let total = count(&mut stream, unread.len());
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        shared.1.send(total).unwrap();
    });
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: {LARGE}\r\n\r\n"));
    let sent = fill(&mut client.stream);
    assert!(sent < UNDER_WAY_MAX, "{sent} bytes were taken and nobody read one");

    read_on.send(()).unwrap();
    finish(&mut client.stream, sent);
    assert!(client.read_head().starts_with("HTTP/1.1 200 "));
    assert_eq!(count_of.recv_timeout(PATIENCE).unwrap(), LARGE);
}

#[test]
fn a_download_waits_for_the_client() {
    let (filled, under_way) = channel();
    let filled = Mutex::new(filled);
    let backend = Backend::with_connections(move |mut stream| {
        if read_head(&mut stream, &mut Vec::new()).is_none() {
            return;
        }
        stream.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n").as_bytes()).unwrap();
        let sent = fill(&mut stream);
        filled.lock().unwrap().send(sent).unwrap();
        finish(&mut stream, sent);
    });
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send("GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    let sent = under_way.recv_timeout(PATIENCE).unwrap();
    assert!(sent < UNDER_WAY_MAX, "{sent} bytes were taken and nobody read one");

    client.read_head();
    assert_eq!(client.count_rest(LARGE), LARGE);
}

/// Waits until `stream` ends, and says whether it did within the patience of a test.
fn ends(mut stream: TcpStream) -> bool {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    loop {
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

/// A backend that never answers, says when a request has come and whether its connection ended.
fn waiting_backend() -> (Backend, Receiver<()>, Receiver<bool>) {
    let (ended, end) = channel();
    let (asked, asking) = channel();
    let shared = Mutex::new((asked, ended));
    let backend = Backend::with_connections(move |mut stream| {
        if read_head(&mut stream, &mut Vec::new()).is_some() {
            let (asked, ended) = shared.lock().unwrap().clone();
            asked.send(()).unwrap();
            ended.send(ends(stream)).unwrap();
        }
    });
    (backend, asking, end)
}

#[test]
fn a_client_that_leaves_in_its_upload_ends_the_request_to_the_backend() {
    // F24
    let (backend, asking, end) = waiting_backend();
    for how in [Shutdown::Both, Shutdown::Write] {
        let gateway = Gateway::before(&backend);
        let mut client = gateway.connect();
        client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 5\r\n\r\nhe");
        asking.recv_timeout(PATIENCE).unwrap();
        client.stream.shutdown(how).unwrap();
        assert!(end.recv_timeout(PATIENCE).unwrap(), "{how:?}");
    }
}

#[test]
fn a_client_that_resets_before_the_head_ends_the_request() {
    // STR-3
    let (backend, asking, end) = waiting_backend();
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send("GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    asking.recv_timeout(PATIENCE).unwrap();
    socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    assert!(end.recv_timeout(PATIENCE).unwrap());
}

#[test]
fn a_client_that_resets_its_download_ends_the_answer_of_the_backend() {
    // STR-3: the backend keeps producing for nobody.
    let (ended, end) = channel();
    let ended = Mutex::new(ended);
    let backend = Backend::with_connections(move |mut stream| {
        if read_head(&mut stream, &mut Vec::new()).is_none() {
            return;
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
        while stream.write_all(b"4\r\nmore\r\n").is_ok() {}
        ended.lock().unwrap().send(()).unwrap();
    });
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send("GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    client.read_head();
    drop(client);
    end.recv_timeout(PATIENCE).expect("the backend is cut off");
}

#[test]
fn an_early_answer_to_an_upload_is_delivered() {
    // A backend may say no before it has read everything.
    let backend = Backend::with_connections(|mut stream| {
        if read_head(&mut stream, &mut Vec::new()).is_some() {
            stream.write_all(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno").unwrap();
            ends(stream);
        }
    });
    let gateway = Gateway::before(&backend);
    let mut client = gateway.connect();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000\r\n\r\nhello");
    assert!(client.read_head().starts_with("HTTP/1.1 401 "));
    assert_eq!(client.read_exact(2), b"no");
}

#[test]
fn connections_to_the_backend_are_kept() {
    let (opened, connections) = channel();
    let opened = Mutex::new(opened);
    let backend = Backend::with_connections(move |mut stream| {
        opened.lock().unwrap().send(()).unwrap();
        let mut unread = Vec::new();
        while read_head(&mut stream, &mut unread).is_some() {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
        }
    });
    let gateway = Gateway::before(&backend);
    for _ in 0..20 {
        assert!(gateway.get("/").ends_with("ok"));
    }
    connections.recv_timeout(PATIENCE).unwrap();
    assert!(connections.try_recv().is_err(), "a second connection was opened");
}

#[test]
fn a_backend_that_closes_its_idle_connections_costs_no_request() {
    // TMO-2, the common part: the gateway has seen the close before the next request comes.
    let (closed, closing) = channel();
    let closed = Mutex::new(closed);
    let backend = Backend::with_connections(move |mut stream| {
        if read_head(&mut stream, &mut Vec::new()).is_some() {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            closed.lock().unwrap().send(ends(stream)).unwrap();
        }
    });
    let gateway = Gateway::before(&backend);
    for _ in 0..20 {
        assert!(gateway.get("/").ends_with("ok"));
        assert!(closing.recv_timeout(PATIENCE).unwrap(), "the gateway keeps a connection that is closed");
    }
}
