//! Bounded memory: bodies that are larger than it, and more callers than it holds.

use std::io::Write;
use std::net::SocketAddr;
use std::thread;

use crate::support::backend::{After, head};
use crate::support::{Backend, Config, Connection, Ending, Gateway, Request};

const GIB: u64 = 1 << 30;

/// By how much a gateway may grow while it passes bodies on.
const GROWTH_KIB: u64 = 6 << 10;

static PIECE: [u8; 64 << 10] = [b'm'; 64 << 10];

fn gateway(backend: &Backend) -> Gateway {
    let gateway = Gateway::start(
        &Config::open(backend)
            .server("max_body = \"2GiB\"")
            .plan("wide", r#"{ name = "window", limit = 10000, per = "60s" }"#)
            .key("k", "one", "wide"),
    );
    // What every first request allocates once is not growth.
    for _ in 0..10 {
        gateway.call("POST", "/warm").key("k").body(PIECE).send();
    }
    gateway
}

/// Runs `transfer`; fails when the gateway's highest memory use has moved by [`GROWTH_KIB`] or more.
#[track_caller]
fn moves_little(gateway: &Gateway, transfer: impl FnOnce()) {
    let before = gateway.memory_kib("VmRSS");
    transfer();
    let grown = gateway.memory_kib("VmHWM").saturating_sub(before);
    assert!(grown < GROWTH_KIB, "the gateway grew from {before} KiB by {grown} KiB");
}

#[test]
fn a_gibibyte_up_is_not_kept() {
    // Must show: a body taken as one buffer is all in memory.
    let backend = Backend::ok();
    let gateway = gateway(&backend);
    moves_little(&gateway, || {
        let request = Request::new("POST", "/x").key("k").header("Content-Length", GIB.to_string());
        let mut connection = gateway.raw(&request.to_bytes());
        for _ in 0..GIB / PIECE.len() as u64 {
            connection.send(&PIECE);
        }
        connection.answer("POST").expect(200);
    });
    assert_eq!(backend.last().body_length, GIB);
    assert_eq!(backend.last().ending, Ending::Complete);
}

/// An upstream that answers `/x` with a gibibyte, as fast as it is taken.
fn gibibyte_at_x() -> Backend {
    Backend::with(|request, stream| {
        let length = if request.target() == "/x" { GIB } else { 0 };
        stream.write_all(&head("200 OK", &[("Content-Length", &length.to_string())]))?;
        for _ in 0..length / PIECE.len() as u64 {
            stream.write_all(&PIECE)?;
        }
        Ok(After::Keep)
    })
}

#[test]
fn a_gibibyte_down_is_not_kept() {
    // Must show: an answer read faster than the client takes it piles up in between.
    let backend = gibibyte_at_x();
    let gateway = gateway(&backend);
    moves_little(&gateway, || {
        let mut connection = gateway.raw(&Request::get("/x").key("k").to_bytes());
        let mut received = 0;
        let answer = connection
            .stream_answer("GET", &mut |piece| received += piece.len() as u64)
            .unwrap()
            .expect("an answer");
        assert_eq!((answer.status, answer.ending, received), (200, Ending::Complete, GIB));
    });
}

#[test]
fn a_client_that_reads_nothing_fills_no_memory() {
    // Must show: back-pressure; without it a stalled client costs as much memory as the upstream has to send.
    let backend = gibibyte_at_x();
    let gateway = gateway(&backend);
    moves_little(&gateway, || {
        let stalled = gateway.raw(&Request::get("/x").key("k").to_bytes());
        // Long enough for some hundred MiB, if nobody held them back.
        thread::sleep(std::time::Duration::from_secs(2));
        drop(stalled);
    });
}

#[test]
fn callers_beyond_the_bound_do_not_grow_it() {
    // F18, OPS-3: a keyed limiter kept an entry per address for ever; an IPv6 block is enough to fill memory.
    many_addresses(200_000, 50_000);
}

#[test]
#[ignore = "one million addresses take minutes: ./test long"]
fn a_million_callers_do_not_grow_it() {
    // OPS-3 at its full size.
    many_addresses(1_000_000, 50_000);
}

/// By how much a gateway may be larger with a full memory of 50,000 callers that have one small limit each.
const FULL_KIB: u64 = 64 << 10;

/// Calls from so many addresses; once the store is full, more of them must not cost memory.
#[track_caller]
fn many_addresses(addresses: u32, bound: u32) {
    let backend = Backend::ok();
    let gateway = Gateway::start(
        &Config::open(&backend)
            .plan("anonymous", r#"{ name = "window", limit = 3, per = "10m" }"#)
            .plan("free", r#"{ name = "window", limit = 3, per = "10m" }"#)
            .key("k", "one", "free")
            .anonymous("anonymous")
            .behind_loopback_proxy()
            .table(&format!("[store.memory]\nmax_callers = {bound}"))
            .table("[log]\naccess = false"),
    );
    let first = |target: &str| Request::get(target).header("X-Forwarded-For", "203.0.113.9");
    let mut connection = gateway.connect();
    let spent = [(); 4].map(|()| first("/x").on(&mut connection).status);
    assert_eq!(spent, [200, 200, 200, 429]);

    let base = gateway.memory_kib("VmRSS");
    call_from(gateway.address(), 0..bound * 6 / 5);
    let full = gateway.memory_kib("VmHWM");
    call_from(gateway.address(), bound * 6 / 5..addresses);
    // The kernel counts to within some pages.
    let grown = gateway.memory_kib("VmHWM").saturating_sub(full);
    assert!(grown < GROWTH_KIB, "{grown} KiB more after the store was full at {full} KiB");
    let taken = full.saturating_sub(base);
    assert!(taken < FULL_KIB, "{bound} callers take {taken} KiB");

    // F18: and whoever watches sees it.
    assert!(gateway.metric("tollgate_memory_callers", &[]) <= f64::from(bound));
    let shared = gateway.metric("tollgate_memory_overflowed_total", &[]);
    assert!(shared >= f64::from(addresses - bound), "{shared} of {addresses} shared an allowance");

    // The flood bought nobody a fresh budget, and took nothing from callers who pay.
    assert_eq!(first("/x").on(&mut gateway.connect()).status, 429);
    gateway.get("/x").key("k").send().expect(200);
}

/// One call for each address of the range, pipelined over a few connections.
fn call_from(gateway: SocketAddr, addresses: std::ops::Range<u32>) {
    const LANES: u32 = 8;
    /// As many as actix-http reads ahead; more would only wait in the socket.
    const AHEAD: usize = 16;
    let numbers: Vec<u32> = addresses.collect();
    thread::scope(|scope| {
        for lane in numbers.chunks(numbers.len().div_ceil(LANES as usize)) {
            scope.spawn(move || {
                let mut connection = Connection::open(gateway);
                for batch in lane.chunks(AHEAD) {
                    let bytes: Vec<u8> = batch.iter().flat_map(|&number| call(number)).collect();
                    connection.send(&bytes);
                    for _ in batch {
                        let status = connection.answer("GET").status;
                        // Where a full store does not know a new caller, it may refuse it; it may not fail.
                        assert!([200, 429].contains(&status), "status {status}");
                    }
                }
            });
        }
    });
}

fn call(number: u32) -> Vec<u8> {
    let address = std::net::Ipv4Addr::from(0x0b00_0000 + number);
    Request::get("/x").header("X-Forwarded-For", address.to_string()).to_bytes()
}
