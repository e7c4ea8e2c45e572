//! The end of a gateway: who is told, who is served, who is cut short, and when the process is gone.

use std::io::Write as _;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::backend::{After, response};
use crate::support::load::while_they_come_and_go;
use crate::support::{Backend, Config, Connection, Gateway, Request, eventually};

/// How much later than it should a busy machine may do something.
const SLACK: Duration = Duration::from_secs(3);

const SECOND: Duration = Duration::from_secs(1);

/// A backend that takes three seconds for `/slow`, and longer than anybody waits for `/never`.
fn backend() -> Backend {
    Backend::with(|request, stream| {
        match request.target() {
            "/slow" => thread::sleep(3 * SECOND),
            "/never" => thread::sleep(60 * SECOND),
            _ => {}
        }
        stream.write_all(&response("200 OK", &[], b"ok"))?;
        Ok(After::Keep)
    })
}

fn get(target: &str) -> Request {
    Request::get(target).key("k")
}

/// Sends the request and does not wait; the gateway has taken it when this returns.
fn in_flight(gateway: &Gateway, backend: &Backend, target: &str) -> Connection {
    let before = backend.count();
    let connection = gateway.raw(&get(target).to_bytes());
    eventually("the call to reach the backend", 10 * SECOND, || (backend.count() > before).then_some(()));
    connection
}

fn readiness(gateway: &Gateway) -> u16 {
    gateway.admin("/readyz").status
}

#[test]
fn a_stop_finishes_what_is_in_flight_and_tells_the_others_to_go() {
    // OPS-1: kept connections were served until the time limit and then cut in the middle of an answer.
    let backend = backend();
    let mut gateway =
        Gateway::start(&Config::wide(&backend).server("drain_delay = \"500ms\"\ndrain = \"20s\""));
    let mut slow = in_flight(&gateway, &backend, "/slow");
    let mut idle: Vec<Connection> = (0..20)
        .map(|_| {
            let mut connection = gateway.connect();
            assert!(!get("/x").on(&mut connection).closes());
            connection
        })
        .collect();
    let mut busy = gateway.connect();
    get("/x").on(&mut busy).expect(200);

    let stopped = Instant::now();
    gateway.signal("TERM");
    eventually("the gateway to be not ready", SECOND, || (readiness(&gateway) == 503).then_some(()));
    // New clients are still served while others take notice, and told.
    let newcomer = get("/x").on(&mut gateway.connect()).expect(200);
    assert!(newcomer.closes() && stopped.elapsed() < Duration::from_millis(500), "{newcomer:?}");
    let mut called = 0;
    let told = loop {
        called += 1;
        let answer = get("/x").on(&mut busy).expect(200);
        if answer.closes() {
            break answer;
        }
        thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(busy.rest_until_closed(SLACK), b"", "behind {told:?}, the call number {called}");
    for connection in &mut idle {
        assert_eq!(connection.rest_until_closed(SECOND + SLACK), b"");
    }
    // Metrics of the stop itself can be scraped.
    let in_flight = gateway.metric("tollgate_requests_in_flight", &[]);
    assert!((0.5..1.5).contains(&in_flight), "{in_flight}");
    slow.answer("GET").expect(200);
    assert_eq!(gateway.wait(SLACK), 0);
    let took = stopped.elapsed();
    assert!(took > 2 * SECOND && took < 4 * SECOND + SLACK, "{took:?}");
    // And every one of them is in the log, also the last one.
    assert_eq!(gateway.access_log(1).len(), 1 + 20 + 2 + called);
}

#[test]
fn nothing_in_flight_is_nothing_to_wait_for() {
    // The HTTP library looks once a second whether its connections are gone.
    let backend = backend();
    let mut gateway = Gateway::start(&Config::wide(&backend).server("drain = \"30s\""));
    let mut kept = gateway.connect();
    get("/x").on(&mut kept).expect(200);
    let stopped = Instant::now();
    gateway.signal("TERM");
    assert_eq!(gateway.wait(SLACK + SECOND), 0);
    assert!(stopped.elapsed() < SECOND + SLACK, "{:?}", stopped.elapsed());
    assert_eq!(kept.rest_until_closed(SECOND), b"");
}

#[test]
fn a_client_that_called_a_moment_ago_is_told_with_its_next_answer() {
    // Closing at once under a client that calls every 50 ms meets a call that is on its way: it is reset, or gets no answer.
    let backend = backend();
    let mut gateway = Gateway::start(&Config::wide(&backend).server("drain = \"10s\""));
    let mut busy = gateway.connect();
    for _ in 0..3 {
        get("/x").on(&mut busy).expect(200);
    }
    gateway.signal("TERM");
    thread::sleep(Duration::from_millis(50));
    assert!(get("/x").on(&mut busy).expect(200).closes());
    assert_eq!(gateway.wait(SLACK), 0);
}

#[test]
fn a_head_that_has_begun_is_waited_for() {
    // The HTTP library forgets a request that is not whole when the stop comes.
    let backend = backend();
    let mut gateway = Gateway::start(&Config::wide(&backend).server("drain = \"20s\""));
    let bytes = get("/x").to_bytes();
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    let mut connection = gateway.raw(first);
    // A call behind it on another connection of each worker: then these bytes have been read.
    for _ in 0..20 {
        get("/x").on(&mut gateway.connect()).expect(200);
    }
    gateway.signal("TERM");
    thread::sleep(2 * SECOND);
    connection.send(rest);
    assert!(connection.answer("GET").expect(200).closes());
    assert_eq!(gateway.wait(SLACK), 0);
}

#[test]
fn what_takes_longer_than_the_drain_is_cut_short() {
    // Must show: a drain has an end, or one client that never reads keeps the old process for ever.
    let backend = backend();
    let mut gateway = Gateway::start(&Config::wide(&backend).server("drain = \"1s\""));
    let mut never = in_flight(&gateway, &backend, "/never");
    let stopped = Instant::now();
    gateway.signal("TERM");
    assert_eq!(gateway.wait(2 * SECOND + SLACK), 0);
    assert!((SECOND..2 * SECOND + SLACK).contains(&stopped.elapsed()), "{:?}", stopped.elapsed());
    assert_eq!(never.rest_until_closed(SECOND), b"");
    let said = gateway.log_lines();
    assert!(said.iter().any(|line| line.contains("server.drain is over")), "{said:?}");
}

#[test]
fn a_person_at_a_terminal_waits_for_no_load_balancer() {
    let backend = backend();
    let mut gateway = Gateway::start(&Config::wide(&backend).server("drain_delay = \"30s\""));
    gateway.signal("INT");
    assert_eq!(gateway.wait(SECOND + SLACK), 0);
}

#[test]
fn a_second_signal_ends_it_at_once() {
    // A gateway that cannot be stopped while it stops is ended with SIGKILL, and then nothing is in the log.
    for (first, second) in [("TERM", "TERM"), ("TERM", "INT"), ("INT", "INT")] {
        let backend = backend();
        let mut gateway =
            Gateway::start(&Config::wide(&backend).server("drain_delay = \"0s\"\ndrain = \"50s\""));
        let _never = in_flight(&gateway, &backend, "/never");
        gateway.signal(first);
        eventually("the gateway to be not ready", SLACK, || (readiness(&gateway) == 503).then_some(()));
        gateway.signal(second);
        assert_eq!(gateway.wait(SLACK), 1, "{first}, {second}");
    }
}

#[test]
fn no_call_fails_when_one_of_two_gateways_stops_under_load() {
    // F19: 500 calls a second, and a client that does as it is told.
    const CLIENTS: usize = 10;
    let backend = backend();
    let staying = Gateway::start(&Config::wide(&backend));
    let mut leaving = Gateway::start(&Config::wide(&backend).server("drain_delay = \"1s\"\ndrain = \"5s\""));
    let addresses = [staying.address(), leaving.address()];
    let pause = Duration::from_millis(20);
    let (calls, took) = while_they_come_and_go(&addresses, CLIENTS, pause, &get("/x"), || {
        thread::sleep(SECOND);
        let stopped = Instant::now();
        leaving.signal("TERM");
        assert_eq!(leaving.wait(2 * SECOND + SLACK), 0);
        let took = stopped.elapsed();
        thread::sleep(SECOND);
        took
    });
    assert_eq!(calls.failed, Vec::<String>::new());
    assert_eq!(calls.answered.keys().collect::<Vec<_>>(), [&200]);
    assert!(calls.told_to_go >= CLIENTS / 2, "{calls:?}");
    assert!(took < 2 * SECOND + SLACK, "{took:?}");
    // What the one that left has answered is in its log, to the last call.
    let answered: usize = calls.answered.values().sum();
    let logged = || staying.access_log(1).len() + leaving.access_log(1).len();
    eventually("all calls in the access logs", 5 * SECOND, || (logged() >= answered).then_some(()));
}
