//! More than the gateway can take: requests, memory, descriptors, and a reader of metrics who does not read.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::backend::{After, response};
use crate::support::load::{Calls, under_load, while_they_come_and_go};
use crate::support::{Backend, Config, Connection, Gateway, Request, eventually};

const SECOND: Duration = Duration::from_secs(1);

/// Callers `k-low`, `k-normal` and `k-high`, each on the plan of its priority, with 100,000 calls an hour.
fn with_priorities(backend: &Backend, server: &str) -> Config {
    let config = Config::open(backend).server(server);
    ["low", "normal", "high"].into_iter().fold(config, |config, priority| {
        config
            .table(&format!(
                "[plans.{priority}]\npriority = \"{priority}\"\nlimits = [{{ name = \"hour\", limit = 100000, per = \"1h\" }}]"
            ))
            .key(&format!("k-{priority}"), priority, priority)
    })
}

fn get(target: &str, priority: &str) -> Request {
    Request::get(target).key(&format!("k-{priority}"))
}

/// A backend that answers `/held` only when it is let go, and everything else after `delay`.
fn holding(delay: Duration) -> (Backend, Arc<AtomicBool>) {
    let let_go = Arc::new(AtomicBool::new(false));
    let waits_for = Arc::clone(&let_go);
    let backend = Backend::with(move |request, stream| {
        while request.target() == "/held" && !waits_for.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(delay);
        stream.write_all(&response("200 OK", &[], b"ok"))?;
        Ok(After::Keep)
    });
    (backend, let_go)
}

#[test]
fn cheap_plans_are_refused_first_and_nobody_is_charged_for_it() {
    // Must show: with one queue for all, those who pay nothing take every place from those who pay.
    let (backend, let_go) = holding(Duration::ZERO);
    let gateway = Gateway::start(&with_priorities(&backend, "max_in_flight = 10"));
    let mut held = Vec::new();
    let mut hold = |priority: &str, count: usize| {
        for _ in 0..count {
            let before = backend.count();
            held.push(gateway.raw(&get("/held", priority).to_bytes()));
            eventually("the backend to hold one more", 10 * SECOND, || {
                (backend.count() > before).then_some(())
            });
        }
    };
    let refused = |priority: &str| {
        let answer = gateway.get("/x").key(&format!("k-{priority}")).send();
        if answer.status == 200 {
            return false;
        }
        let answer = answer.expect(503);
        assert_eq!(answer.retry_after(), Some(1));
        let problem = answer.json();
        assert_eq!(
            problem["type"],
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
        );
        assert_eq!(answer.header("ratelimit"), None);
        let line = gateway.logged(&answer);
        assert_eq!((&line["decision"], &line["plan"]), (&"shed".into(), &priority.into()), "{line}");
        true
    };
    hold("low", 8);
    assert_eq!([refused("low"), refused("normal"), refused("high")], [true, false, false]);
    hold("normal", 1);
    assert_eq!([refused("low"), refused("normal"), refused("high")], [true, true, false]);
    hold("high", 1);
    assert_eq!([refused("low"), refused("normal"), refused("high")], [true, true, true]);
    let shed = |plan| gateway.metric("tollgate_shed_total", &[("plan", plan), ("reason", "in_flight")]);
    let counted = ["low", "normal", "high"].map(|plan| shed(plan).round());
    assert!(
        counted.iter().zip([3.0, 2.0, 1.0]).all(|(got, wanted)| (got - wanted).abs() < 0.5),
        "{counted:?}"
    );

    let_go.store(true, Ordering::Relaxed);
    for mut connection in held {
        connection.answer("GET").expect(200);
    }
    // Eight held ones and this one; the refusals took nothing.
    let answer = gateway.get("/x").key("k-low").send().expect(200);
    assert_eq!(answer.remaining("hour"), 100_000 - 9);
}

#[test]
fn at_three_times_the_cap_those_who_pay_most_get_through() {
    // Goodput under overload: 150 clients on 50 places; the ten of the plan that pays most hardly notice.
    let (backend, _) = holding(Duration::from_millis(100));
    let gateway =
        Gateway::start(&with_priorities(&backend, "max_in_flight = 50").table("[log]\naccess = false"));
    let address = [gateway.address()];
    let pause = Duration::from_millis(150);
    let calls = |priority: &'static str, clients: usize| {
        move || {
            while_they_come_and_go(&address, clients, pause, &get("/x", priority), || {
                thread::sleep(5 * SECOND);
            })
            .0
        }
    };
    let [low, normal, high] = thread::scope(|scope| {
        [("low", 70), ("normal", 70), ("high", 10)]
            .map(|(priority, clients)| scope.spawn(calls(priority, clients)))
            .map(|thread| thread.join().unwrap())
    });
    let success = |calls: &Calls| {
        assert_eq!(calls.failed, Vec::<String>::new());
        let of = |status| calls.answered.get(&status).copied().unwrap_or(0);
        assert_eq!(of(200) + of(503), calls.answered.values().sum::<usize>(), "{calls:?}");
        100 * of(200) / (of(200) + of(503)).max(1)
    };
    let (low, normal, high) = (success(&low), success(&normal), success(&high));
    let figures = format!("{low} %, {normal} % and {high} % got through");
    // The cap must have been reached, or this shows nothing.
    assert!(low < 90 && high >= 95 && low <= normal, "{figures}");
}

/// A backend that takes nothing of any request but `GET`, with which it lets go of all others.
fn that_does_not_read() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The system, too, takes little, here and at the clients: what is sent is to be in the gateway, not in its surroundings.
    socket2::SockRef::from(&listener).set_recv_buffer_size(64 << 10).unwrap();
    thread::spawn(move || {
        let mut held = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut first = [0; 3];
            stream.read_exact(&mut first).unwrap();
            if &first == b"GET" {
                held.clear();
                stream.write_all(&response("200 OK", &[("Connection", "close")], b"ok")).ok();
            } else {
                held.push(stream);
            }
        }
    });
    address
}

/// Sends this head and a body for as long as the gateway takes it: until it answers, has taken nothing for 50 ms, or half a second
/// is over.
fn upload(gateway: SocketAddr, head: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(gateway).unwrap();
    socket2::SockRef::from(&stream).set_send_buffer_size(256 << 10).unwrap();
    stream.write_all(head).unwrap();
    stream.set_nonblocking(true).unwrap();
    let (begun, mut stalled) = (Instant::now(), 0);
    while stalled < 50 && begun.elapsed() < SECOND / 2 && stream.peek(&mut [0]).is_err() {
        if stream.write(&[b'm'; 64 << 10]).is_ok() {
            stalled = 0;
        } else {
            stalled += 1;
            thread::sleep(Duration::from_millis(1));
        }
    }
    stream
}

#[test]
fn uploads_to_a_backend_that_does_not_read_end_at_the_watermark() {
    // F26: each upload holds what was read and not sent; enough of them, and the kernel ends the process and all that it does.
    const MOST_KIB: u64 = 64 << 10;
    const UPLOADS: usize = 100;
    let backend = that_does_not_read();
    let config = Config::bare(backend)
        .route("rest", "/*", "")
        .server("max_memory = \"64MiB\"\nworkers = 1")
        .plan("free", "")
        .anonymous("free");
    // No upload ends by itself while this test runs.
    let patience = ["HEAD_TIMEOUT", "IDLE_TIMEOUT"].map(|name| format!("TOLLGATE__UPSTREAMS__API__{name}"));
    let gateway =
        Gateway::start_with(&config.text(), &[(patience[0].as_str(), "5m"), (patience[1].as_str(), "5m")]);
    assert!(!Request::get("/x").on(&mut gateway.connect()).expect(200).closes());
    let head = Request::new("POST", "/x").header("Content-Length", "100000000").to_bytes();
    let uploads: Vec<TcpStream> = (0..UPLOADS).map(|_| upload(gateway.address(), &head)).collect();
    let shed = gateway.metric("tollgate_shed_total", &[("plan", "free"), ("reason", "memory")]);
    let used = gateway.memory_kib("VmHWM");
    assert!(shed > 20.0, "{shed} of {UPLOADS} uploads were refused, at {used} KiB");
    assert!(used < MOST_KIB * 3 / 2, "{used} KiB");
    let answer = Request::get("/x").on(&mut gateway.connect()).expect(503);
    assert!(answer.closes() && answer.retry_after() == Some(1), "{answer:?}");

    // What the system does not get back at once must not keep the gateway closed.
    drop(uploads);
    TcpStream::connect(backend).unwrap().write_all(b"GET").unwrap();
    eventually("the gateway to serve again", 10 * SECOND, || {
        (Request::get("/x").on(&mut gateway.connect()).status == 200).then_some(())
    });
}

#[test]
fn without_descriptors_it_waits_and_does_not_spin() {
    // F25: a listener that cannot accept stays readable, and a loop around it takes a whole processor.
    let backend = Backend::ok();
    let config = with_priorities(&backend, "workers = 2").table("[log]\naccess = false");
    let gateway = Gateway::start_behind("ulimit -n 128", &config, &[]);
    assert!(gateway.log_lines().iter().any(|line| line.contains("fewer descriptors")), "nobody was warned");
    get("/x", "high").on(&mut gateway.connect()).expect(200);
    // More than there are descriptors; the kernel takes them all.
    let mut crowd: Vec<Connection> = (0..300).map(|_| gateway.connect()).collect();
    eventually("the descriptors to be used up", 10 * SECOND, || (gateway.descriptors() >= 127).then_some(()));
    let (before, begun) = (gateway.cpu_time(), Instant::now());
    thread::sleep(3 * SECOND);
    let busy = (gateway.cpu_time() - before).as_secs_f64() / begun.elapsed().as_secs_f64();
    assert!(busy < 0.2, "{busy:.2} of a processor");
    crowd.clear();
    let answer = eventually("the gateway to take clients again", 10 * SECOND, || {
        let mut connection = gateway.connect();
        get("/x", "high").try_on(&mut connection).ok().filter(|answer| answer.status == 200)
    });
    assert_eq!(answer.status, 200);
}

#[test]
fn a_reader_of_metrics_who_does_not_read_is_alone_with_that() {
    // F29: metrics written on the threads of the data path would stand in the way of the callers.
    let backend = Backend::ok();
    let gateway = Gateway::start(&with_priorities(&backend, "").table("[log]\naccess = false"));
    let measure = || {
        let during = || thread::sleep(2 * SECOND);
        let mut samples =
            under_load(gateway.address(), 4, Duration::from_millis(5), &get("/x", "high"), during).0;
        assert!(samples.iter().all(|sample| sample.status == 200));
        samples.sort_by_key(|sample| sample.duration());
        samples[samples.len() * 99 / 100].duration()
    };
    let alone = measure();
    // They ask over and over, and read nothing: what is written to them stays in the gateway.
    let mut readers: Vec<Connection> = (0..20).map(|_| Connection::open(gateway.admin_address())).collect();
    for reader in &mut readers {
        for _ in 0..50 {
            reader.try_send(&Request::get("/metrics").to_bytes()).unwrap();
        }
    }
    let beside = measure();
    assert!(beside < alone * 2 + Duration::from_millis(20), "p99 was {alone:?} and is {beside:?}");
    // And another one who reads gets an answer.
    gateway.admin("/metrics").expect(200);
}
