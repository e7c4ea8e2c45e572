//! Long runs: mixed traffic and faults for as long as is wanted, and nothing that grows.
//!
//! `TOLLGATE_SOAK_MINUTES` says for how long; 20 if it says nothing. A run of less than a quarter of an hour shows the numbers
//! and judges no slope: what a process takes in its first minutes says nothing about its hundredth hour.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::support::backend::{After, head};
use crate::support::fault::{Connect, Delay, Garbage, SCRIPTS, Spoil};
use crate::support::{
    Backend, Config, Connection, Ending, Fault, FaultProxy, Gateway, Redis, Request, eventually, sleep_until,
};

const MINUTE: Duration = Duration::from_secs(60);

/// The part of a run that is not judged: tables, pools and the allocator find their size.
const WARM_UP: u32 = 4;

/// A run must be so long for its slopes to be judged.
const JUDGED_FROM: Duration = Duration::from_secs(15 * 60);

/// How often the process is looked at.
const SAMPLE_EVERY: Duration = Duration::from_secs(2);

/// Of the samples of such a span the lowest counts: what a burst takes for a moment is not kept.
const LOW_OF: Duration = Duration::from_secs(60);

/// How much may be added in ten minutes, by a straight line through the lows.
const KIB_IN_TEN_MINUTES: f64 = 1024.0;
const PIECES_IN_TEN_MINUTES: f64 = 4.0;

/// What the process is at one moment.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Duration,
    resident_kib: u64,
    descriptors: u64,
    threads: u64,
}

/// What became of the calls.
#[derive(Debug, Default)]
struct Tally {
    statuses: BTreeMap<u16, u64>,
    /// Connections that ended before their answer did, as a broken upstream makes them.
    broken: u64,
    /// Clients that left in the middle of an answer, or before it.
    left: u64,
}

#[test]
#[ignore = "takes 20 minutes: ./test long"]
fn mixed_traffic_under_faults_makes_nothing_grow() {
    // A buffer, a task or a socket that each fault leaves behind is found by whoever is on call, a week later.
    let minutes = std::env::var("TOLLGATE_SOAK_MINUTES").map_or(20.0, |text| text.parse().unwrap());
    let span = MINUTE.mul_f64(minutes);
    let backend = backend();
    let upstream = FaultProxy::to_any(backend.address().port());
    let mut redis = Redis::start();
    let store = FaultProxy::to_redis(redis.port());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.toml");
    let write = |limit| std::fs::write(&file, config(upstream.address(), &store, limit).text()).unwrap();
    write(5_000);
    let gateway = Gateway::start_on(&[&file]);
    let (over, tally) = (AtomicBool::new(false), Mutex::new(Tally::default()));
    let begun = Instant::now();
    let mut rounds = 0;
    let samples = thread::scope(|scope| {
        traffic(scope, gateway.address(), &over, &tally);
        let sampling = scope.spawn(|| {
            let mut samples = Vec::new();
            while !over.load(Ordering::SeqCst) {
                samples.push(sample(&gateway, begun.elapsed()));
                sleep_until(begun + SAMPLE_EVERY * u32::try_from(samples.len()).unwrap());
            }
            samples
        });
        // A failure in here must not leave the others running for ever.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            while begun.elapsed() < span {
                for fault in FAULTS {
                    fault.strike(&mut redis, &store, &upstream);
                }
                rounds += 1;
                // Another configuration each time; also one with a mistake.
                write(5_000 + u64::from(rounds % 2));
                gateway.reload().expect(200);
                write(0);
                gateway.signal("HUP");
            }
        }));
        over.store(true, Ordering::SeqCst);
        let samples = sampling.join().unwrap();
        outcome.map_or_else(|failure| std::panic::resume_unwind(failure), |()| samples)
    });
    tell(&samples, &tally.lock(), rounds);
    is_as_before(&gateway, &redis);
    let tally = tally.into_inner();
    let known = [200, 401, 404, 429, 502, 503, 504];
    assert!(tally.statuses.keys().all(|status| known.contains(status)), "{tally:?}");
    let passed = tally.statuses.get(&200).copied().unwrap_or(0);
    let answered: u64 = tally.statuses.values().sum();
    assert!(passed * 4 > answered, "most calls did not get through: {tally:?}");
    assert!(tally.broken * 100 < answered, "{tally:?}");
    assert!(tally.left > 0, "no client has left: {tally:?}");
    let judged = judged(&samples);
    let names = ["KiB of memory", "descriptors", "threads"];
    for ((name, line), most) in names.iter().zip(lines(judged)).zip([
        KIB_IN_TEN_MINUTES,
        PIECES_IN_TEN_MINUTES,
        PIECES_IN_TEN_MINUTES,
    ]) {
        assert!(span < JUDGED_FROM || line < most, "{line:.1} {name} more in ten minutes");
    }
}

/// When the traffic has ended, nothing of it is left: no request in flight, a store that decides, and no slot taken.
#[track_caller]
fn is_as_before(gateway: &Gateway, redis: &Redis) {
    eventually("nothing to be in flight", Duration::from_secs(40), || {
        (gateway.metric("tollgate_requests_in_flight", &[]) < 0.5).then_some(())
    });
    // Redis has failed again and again: the breaker takes a minute to believe in it.
    eventually("the store to decide", Duration::from_secs(120), || {
        let answer = gateway.get("/x").key("k-pro").send();
        (answer.status == 200 && gateway.logged(&answer)["source"] == "store").then_some(())
    });
    // The last leases end by themselves, if their end was lost on the way.
    eventually("all slots to come back", Duration::from_secs(20), || {
        let taken: i64 = redis
            .keys()
            .iter()
            .filter(|key| key.ends_with(":leases"))
            .map(|key| redis.number(&["ZCARD", key]))
            .sum();
        (taken == 0).then_some(())
    });
}

/// Some targets are answered with much, or late.
fn backend() -> Backend {
    Backend::with(|request, stream| {
        let length = if request.target().starts_with("/large") { 256 << 10 } else { 2 };
        if request.target().starts_with("/late") {
            thread::sleep(Duration::from_millis(100));
        }
        stream.write_all(&head("200 OK", &[("Content-Length", &length.to_string())]))?;
        stream.write_all(&vec![b's'; length])?;
        Ok(After::Keep)
    })
}

/// The configuration with this limit of the plan `pro`.
fn config(upstream: SocketAddr, store: &FaultProxy, limit: u64) -> Config {
    Config::bare(upstream)
        .route("all", "/*", "plans = [\"pro\", \"free\", \"anonymous\", \"mixed\"]")
        .plan("pro", &format!(r#"{{ name = "window", limit = {limit}, per = "10s" }}"#))
        .plan("free", r#"{ name = "window", limit = 5, per = "10s" }"#)
        .plan("anonymous", r#"{ name = "window", limit = 20, per = "10s" }"#)
        .plan(
            "mixed",
            r#"{ name = "wide", limit = 50000, per = "10s" },
               { name = "bucket", limit = 500, per = "1s", algorithm = "token_bucket", burst = 500 },
               { name = "month", limit = 100000000, per = "month", algorithm = "quota" },
               { name = "inflight", limit = 20, algorithm = "concurrency" }"#,
        )
        .key("k-pro", "pro", "pro")
        .key("k-free", "free", "free")
        .key("k-mixed", "mixed", "mixed")
        .anonymous("anonymous")
        .behind_loopback_proxy()
        .server("workers = 2")
        .table(&store.tables("local", "20ms"))
}

/// What goes wrong, one after the other.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    Killed,
    Frozen,
    Flushed,
    Store(Fault),
    StoreCut,
    Upstream(Fault),
    UpstreamCut,
}

const QUIET: Duration = Duration::from_millis(1_500);
const SPELL: Duration = Duration::from_millis(1_500);

const LATE: Delay = Delay { latency: Duration::from_millis(30), jitter: Duration::from_millis(80) };

const FAULTS: [Trouble; 12] = [
    Trouble::Killed,
    Trouble::Upstream(Fault { connect: Connect::Refuse, ..Fault::NONE }),
    Trouble::Frozen,
    Trouble::Upstream(Fault { to_client: LATE, ..Fault::NONE }),
    Trouble::Flushed,
    Trouble::Store(Fault { to_client: LATE, ..Fault::NONE }),
    Trouble::Upstream(Fault { spoil: Spoil::ResetMidway, ..Fault::NONE }),
    Trouble::Store(Fault { spoil: Spoil::Replace(Garbage::Noise), of: SCRIPTS, ..Fault::NONE }),
    Trouble::UpstreamCut,
    Trouble::StoreCut,
    Trouble::Upstream(Fault { connect: Connect::Reset, ..Fault::NONE }),
    Trouble::Store(Fault { connect: Connect::Refuse, ..Fault::NONE }),
];

impl Trouble {
    /// Lets it happen, ends it, and waits a little.
    fn strike(self, redis: &mut Redis, store: &FaultProxy, upstream: &FaultProxy) {
        let spell = || thread::sleep(SPELL);
        match self {
            Self::Killed => {
                redis.kill();
                spell();
                redis.launch();
            }
            Self::Frozen => {
                redis.stop();
                spell();
                redis.cont();
            }
            Self::Flushed => {
                redis.cmd(&["SCRIPT", "FLUSH"]);
                redis.cmd(&["FLUSHALL"]);
            }
            Self::Store(fault) => under(store, fault, spell),
            Self::Upstream(fault) => under(upstream, fault, spell),
            Self::StoreCut => store.cut(),
            Self::UpstreamCut => upstream.cut(),
        }
        thread::sleep(QUIET);
    }
}

fn under(proxy: &FaultProxy, fault: Fault, spell: impl FnOnce()) {
    proxy.set(fault);
    if fault.connect != Connect::Pass {
        proxy.cut();
    }
    spell();
    proxy.heal();
}

/// A few hundred calls a second, of all kinds.
fn traffic<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    gateway: SocketAddr,
    over: &'scope AtomicBool,
    tally: &'scope Mutex<Tally>,
) {
    let lane = |every: u64, request: fn(u64) -> Request| {
        scope.spawn(move || calls(gateway, over, tally, Duration::from_millis(every), request));
    };
    for _ in 0..2 {
        lane(15, |_| Request::get("/x").key("k-pro"));
        lane(30, |_| Request::get("/x").key("k-free"));
        lane(30, |_| Request::get("/x").key("k-mixed"));
    }
    // Two thousand addresses, over and over.
    lane(15, |number| {
        let address = Ipv4Addr::from(0x0b00_0000 + u32::try_from(number % 2_000).unwrap());
        Request::get("/x").header("X-Forwarded-For", address.to_string())
    });
    lane(40, |_| Request::new("POST", "/up").key("k-mixed").body(vec![b'u'; 64 << 10]));
    lane(40, |_| Request::get("/large").key("k-pro"));
    lane(60, |_| Request::get("/late").key("k-mixed"));
    lane(200, |number| Request::get("/x").key(&format!("unknown-{number}")));
    // Who leaves before the answer, and who leaves in the middle of it.
    for (target, read) in [("/late", 0), ("/large", 1)] {
        scope.spawn(move || {
            let request = Request::get(target).key("k-mixed").to_bytes();
            while !over.load(Ordering::SeqCst) {
                // Nobody is there to care for what breaks here.
                let left = leave(gateway, &request, read).is_ok();
                tally.lock().left += u64::from(left);
                thread::sleep(Duration::from_millis(50));
            }
        });
    }
}

fn leave(gateway: SocketAddr, request: &[u8], read: usize) -> io::Result<()> {
    let mut stream = TcpStream::connect(gateway)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(request)?;
    stream.read_exact(&mut vec![0; read])
}

/// Calls until it is over, on one connection for as long as it lasts.
fn calls(
    gateway: SocketAddr,
    over: &AtomicBool,
    tally: &Mutex<Tally>,
    every: Duration,
    request: fn(u64) -> Request,
) {
    let mut connection = None;
    for number in 0.. {
        if over.load(Ordering::SeqCst) {
            return;
        }
        let open = connection.get_or_insert_with(|| Connection::open(gateway));
        let request = request(number);
        let answer = open.try_send(&request.to_bytes()).and_then(|()| open.try_answer(request.method()));
        match answer {
            Ok(Some(answer)) => {
                *tally.lock().statuses.entry(answer.status).or_default() += 1;
                let closes = |value: &str| value.eq_ignore_ascii_case("close");
                if answer.header("connection").is_some_and(closes) || answer.ending != Ending::Complete {
                    connection = None;
                }
            }
            Ok(None) | Err(_) => {
                tally.lock().broken += 1;
                connection = None;
            }
        }
        thread::sleep(every);
    }
}

fn sample(gateway: &Gateway, at: Duration) -> Sample {
    let resident_kib = gateway.memory_kib("VmRSS");
    Sample { at, resident_kib, descriptors: gateway.descriptors(), threads: gateway.threads() }
}

/// What is left when the beginning is left out.
fn judged(samples: &[Sample]) -> &[Sample] {
    let end = samples.last().expect("there are samples").at;
    let begin = samples.iter().position(|sample| sample.at >= end / WARM_UP).unwrap();
    &samples[begin..]
}

/// How much memory, how many descriptors and how many threads are added in ten minutes, by the line of least squares through the lows.
fn lines(samples: &[Sample]) -> [f64; 3] {
    let values: [fn(&Sample) -> u64; 3] =
        [|sample| sample.resident_kib, |sample| sample.descriptors, |sample| sample.threads];
    values.map(|value| {
        let lows = samples.chunk_by(|one, next| minute(one) == minute(next));
        let lows = lows.filter_map(|together| together.iter().min_by_key(|sample| value(sample)));
        let points = lows.map(|low| (low.at.as_secs_f64() / 600.0, value(low) as f64));
        slope(&points.collect::<Vec<_>>())
    })
}

/// The number of the span that the sample is from.
fn minute(sample: &Sample) -> u64 {
    sample.at.as_secs() / LOW_OF.as_secs()
}

fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let alone: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    together / alone
}

#[expect(clippy::print_stdout, reason = "the numbers, for whoever reads the output of a long test")]
fn tell(samples: &[Sample], tally: &Tally, rounds: u32) {
    println!("{:>8}  {:>10}  {:>11}  {:>7}", "minute", "memory KiB", "descriptors", "threads");
    let step = samples.len().div_ceil(40);
    for sample in samples.iter().step_by(step) {
        let minute = sample.at.as_secs_f64() / 60.0;
        let Sample { resident_kib, descriptors, threads, .. } = sample;
        println!("{minute:>8.1}  {resident_kib:>10}  {descriptors:>11}  {threads:>7}");
    }
    let [memory, descriptors, threads] = lines(judged(samples));
    println!("in ten minutes: {memory:+.0} KiB, {descriptors:+.1} descriptors, {threads:+.1} threads");
    let Tally { statuses, broken, left } = tally;
    println!("{rounds} rounds of faults; answers {statuses:?}; {broken} broken off; {left} clients left");
}

#[test]
fn the_line_through_samples_is_the_one_of_least_squares() {
    // A slope that is always nothing would let every leak pass.
    let points: Vec<(f64, f64)> = [(0.0, 1.0), (1.0, 2.0), (2.0, 6.0)].into();
    assert!((slope(&points) - 2.5).abs() < 1e-9);
    let leak = |second: u64| Sample {
        at: Duration::from_secs(second),
        resident_kib: 10_000 + second * 2 + second % 7 * 300,
        descriptors: 40 + second % 3,
        threads: 9,
    };
    let [memory, descriptors, threads] = lines(&(0..1_200).map(leak).collect::<Vec<_>>());
    assert!((memory - 1_200.0).abs() < 90.0, "{memory}");
    assert!(descriptors.abs() < 0.5 && threads.abs() < 0.5, "{descriptors} {threads}");
}
