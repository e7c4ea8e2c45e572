//! The calls: who makes them, what the answers and the logs say of them, and the traces that come out of that.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::check::{Call, Decision, Left, Trace};
use super::oracle::{Limit, Micros, Promise};
use super::random::Random;
use super::servers::History;
use crate::support::{Answer, Backend, Config, Connection, Gateway, Request};

/// Connections to each gateway.
pub(super) const CONNECTIONS: usize = 64;

/// How long a gateway may wait for the store. Long enough for a busy machine, short enough to be over in a pause.
pub(super) const BUDGET: Duration = Duration::from_millis(500);

/// What a connection waits between two calls: up to twice as long.
const PAUSE: Duration = Duration::from_millis(60);

/// What the paths cost, each a route.
const COSTS: [u64; 5] = [1, 3, 7, 100, 333];

/// A caller: the name of its plan and account, its limits, and what its calls may cost.
struct Caller {
    name: &'static str,
    limits: &'static [Limit],
    costs: &'static [u64],
}

const fn window(name: &'static str, limit: u64, milliseconds: u64) -> Limit {
    Limit { name, promise: Promise::Window { limit, per: milliseconds * 1_000 } }
}

const fn bucket(name: &'static str, limit: u64, burst: u64) -> Limit {
    Limit { name, promise: Promise::Bucket { limit, per: 1_000_000, burst } }
}

const fn month(name: &'static str, limit: u64) -> Limit {
    Limit { name, promise: Promise::Month { limit } }
}

/// Each asks for several times what it may have.
const CALLERS: [Caller; 8] = [
    Caller { name: "one", limits: &[window("one", 1, 50)], costs: &[1] },
    Caller { name: "ten", limits: &[window("ten", 10, 200)], costs: &[1, 3] },
    Caller { name: "hundred", limits: &[window("hundred", 100, 1_000)], costs: &[1, 3] },
    Caller { name: "thousand", limits: &[window("thousand", 1_000, 2_500)], costs: &[3, 7] },
    Caller {
        name: "wide",
        limits: &[Limit { name: "wide", promise: Promise::Bucketed { limit: 20_000, per: 1_500_000 } }],
        costs: &[100, 333],
    },
    Caller { name: "bucket", limits: &[bucket("bucket", 70, 40)], costs: &[1, 3] },
    Caller { name: "month", limits: &[month("month", 700)], costs: &[1, 3, 7] },
    Caller {
        name: "several",
        limits: &[
            window("burst", 20, 300),
            window("window", 150, 2_000),
            bucket("bucket", 60, 50),
            month("month", 1_000_000),
        ],
        costs: &[1, 3],
    },
];

/// The accounts that call.
pub(super) fn account_names() -> impl Iterator<Item = &'static str> {
    CALLERS.iter().map(|caller| caller.name)
}

/// The configuration of every gateway.
pub(super) fn config(backend: &Backend) -> Config {
    let mut config = Config::bare(backend.address());
    for cost in COSTS {
        let callers = CALLERS.iter().filter(|caller| caller.costs.contains(&cost));
        let plans: Vec<&str> = callers.map(|caller| caller.name).collect();
        let lines = format!("cost = {cost}\nplans = {plans:?}");
        config = config.route(&format!("cost_{cost}"), &format!("/{cost}"), &lines);
    }
    for Caller { name, limits, .. } in &CALLERS {
        let limits: Vec<String> = limits.iter().map(as_toml).collect();
        config = config.plan(name, &limits.join(", ")).key(&format!("k-{name}"), name, name);
    }
    config
}

fn as_toml(limit: &Limit) -> String {
    let name = limit.name;
    let ms = |per: Micros| per / 1_000;
    match limit.promise {
        Promise::Window { limit, per } | Promise::Bucketed { limit, per } => {
            format!(r#"{{ name = "{name}", limit = {limit}, per = "{}ms" }}"#, ms(per))
        }
        Promise::Bucket { limit, per, burst } => format!(
            r#"{{ name = "{name}", limit = {limit}, per = "{}ms", algorithm = "token_bucket", burst = {burst} }}"#,
            ms(per)
        ),
        Promise::Month { limit } => {
            format!(
                r#"{{ name = "{name}", limit = {limit}, per = "month", algorithm = "quota", zone = "UTC" }}"#
            )
        }
    }
}

/// The wall clock, which is also that of every Redis on this machine.
pub(super) fn wall() -> Micros {
    let since = SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970");
    u64::try_from(since.as_micros()).expect("it is before the year 586,000")
}

/// One call as its client saw it.
struct Seen {
    caller: usize,
    cost: u64,
    sent: Micros,
    received: Micros,
    status: u16,
    /// What it says of each limit of the plan; not all, where the store did not decide.
    left: Vec<Left>,
    retry_after: Option<u64>,
}

impl Seen {
    fn new(caller: usize, cost: u64, sent: Micros, answer: &Answer) -> Self {
        let left = |limit: &Limit| {
            let remaining = answer.rate_limit(limit.name, "r")?;
            Some(Left { remaining, more_in: answer.rate_limit(limit.name, "t") })
        };
        Self {
            caller,
            cost,
            sent,
            received: wall(),
            status: answer.status,
            left: CALLERS[caller].limits.iter().filter_map(left).collect(),
            retry_after: answer.retry_after(),
        }
    }
}

/// All calls to some gateways, by their id.
#[derive(Default)]
pub(super) struct Calls(HashMap<String, Seen>);

/// Calls all gateways on [`CONNECTIONS`] connections each for as long as `during` runs, and adds these calls to `calls`.
pub(super) fn call_all<T>(
    gateways: &[Gateway],
    calls: &mut Calls,
    random: &mut Random,
    during: impl FnOnce() -> T,
) -> T {
    let over = AtomicBool::new(false);
    // Two rounds of calls to the same gateways must not share their ids.
    let round = random.below(usize::MAX);
    let outcome = thread::scope(|scope| {
        let mut clients = Vec::new();
        for (gateway, number) in
            gateways.iter().flat_map(|gateway| (0..CONNECTIONS).map(move |n| (gateway, n)))
        {
            let name = format!("{}-{round:x}-{number}", gateway.address().port());
            let (random, over) = (random.fork(), &over);
            clients.push(scope.spawn(move || client(&name, gateway.connect(), random, over)));
        }
        // The clients must end also when `during` fails, or the scope would wait for ever.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(during));
        over.store(true, Ordering::Relaxed);
        calls.0.extend(clients.into_iter().flat_map(|client| client.join().unwrap()));
        outcome
    });
    match outcome {
        Ok(value) => value,
        Err(failure) => std::panic::resume_unwind(failure),
    }
}

fn client(
    name: &str,
    mut connection: Connection,
    mut random: Random,
    over: &AtomicBool,
) -> Vec<(String, Seen)> {
    let mut calls = Vec::new();
    while !over.load(Ordering::Relaxed) {
        thread::sleep(random.span(Duration::ZERO, 2 * PAUSE));
        let caller = random.below(CALLERS.len());
        let costs = CALLERS[caller].costs;
        let cost = costs[random.below(costs.len())];
        let id = format!("{name}-{}", calls.len());
        let request = Request::get(&format!("/{cost}"))
            .key(&format!("k-{}", CALLERS[caller].name))
            .header("X-Request-Id", &id);
        let sent = wall();
        let answer = request.on(&mut connection);
        calls.push((id, Seen::new(caller, cost, sent, &answer)));
    }
    calls
}

/// Joins what the clients saw with what the gateways logged, and sorts it by account.
#[track_caller]
pub(super) fn traces<'a>(
    gateways: &[Gateway],
    calls: &Calls,
    history_of: impl Fn(&str) -> &'a History,
) -> Vec<Trace> {
    let histories: Vec<&History> = CALLERS.iter().map(|caller| history_of(caller.name)).collect();
    let mut traces: Vec<Trace> = CALLERS
        .iter()
        .map(|caller| Trace {
            account: caller.name.to_owned(),
            limits: caller.limits.to_vec(),
            calls: Vec::new(),
        })
        .collect();
    let mut joined = 0;
    for gateway in gateways {
        let prefix = format!("{}-", gateway.address().port());
        let count = calls.0.keys().filter(|id| id.starts_with(&prefix)).count();
        for line in gateway.access_log(count) {
            let id = line["request_id"].as_str().expect("every line names its request");
            let seen = calls.0.get(id).unwrap_or_else(|| panic!("nobody made this call: {line}"));
            joined += 1;
            traces[seen.caller].calls.extend(read(&line, seen, histories[seen.caller]));
        }
    }
    // Each call has its line: else a decision would be missing in the trace, and the oracle would be blamed for it.
    assert_eq!(joined, calls.0.len(), "calls with a line in the log");
    traces
}

/// What one call adds to the trace of its account.
#[track_caller]
fn read(line: &Value, seen: &Seen, history: &History) -> Vec<Call> {
    assert_eq!(line["account"], CALLERS[seen.caller].name, "{line}");
    assert!(line.get("spent").is_none(), "nothing is settled here: {line}");
    if line["source"] == "store" {
        let decision = decision(line, seen);
        let at = decision.at;
        let stood = |(begin, end): &(Micros, Micros)| (*begin..*end).contains(&at);
        assert!(!history.standstills.iter().any(stood), "decided while no server ran: {line}");
        let mut calls = executed_before(seen, at, history);
        calls.push(Call::Decided(decision));
        return calls;
    }
    // The breaker had tripped, and nobody was asked.
    let Some(asked) = line["store_ms"].as_f64() else { return Vec::new() };
    let asked = micros(Duration::from_secs_f64(asked / 1e3)).min(seen.received - seen.sent);
    // The question carries an end: the budget after it was asked, by a clock that is wrong by what one reply took, at
    // most, and that is the budget again.
    let end = seen.received - asked + 2 * micros(BUDGET);
    perhaps(seen, end, history).into_iter().collect()
}

/// What the log and the client say of a decision.
#[track_caller]
fn decision(line: &Value, seen: &Seen) -> Decision {
    let allowed = line["decision"] == "allowed";
    assert!(allowed || line["decision"] == "denied", "{line}");
    assert_eq!(line["cost"], seen.cost, "{line}");
    assert_eq!(seen.status, if allowed { 200 } else { 429 }, "{line}");
    let at = line["decided_at"].as_u64().expect("the store says when");
    assert!((seen.sent..=seen.received).contains(&at), "decided in between: {line}");
    assert_eq!(seen.left.len(), CALLERS[seen.caller].limits.len(), "limits that the answer tells of: {line}");
    Decision {
        at,
        cost: seen.cost,
        allowed,
        refused_by: line["limit"].as_str().unwrap_or_default().to_owned(),
        left: seen.left.clone(),
        retry_after: seen.retry_after,
    }
}

/// A call that was decided at this moment, and may have been executed before by a server that was killed meanwhile.
fn executed_before(seen: &Seen, at: Micros, history: &History) -> Vec<Call> {
    let killed = history.losses.iter().map(|loss| loss.killed());
    let meanwhile = killed.filter(|killed| history.sends_again && (seen.sent..at).contains(killed));
    meanwhile.filter_map(|killed| perhaps(seen, killed, history)).collect()
}

/// A call of which nobody knows whether it was executed, and if, then up to `to`; nothing if no server can have done it.
fn perhaps(seen: &Seen, mut to: Micros, history: &History) -> Option<Call> {
    let mut from = seen.sent;
    for &(begin, end) in &history.standstills {
        if (begin..end).contains(&from) {
            from = end;
        }
    }
    for &(begin, end) in history.standstills.iter().rev() {
        if (begin..end).contains(&to) {
            to = begin;
        }
    }
    (from <= to).then_some(Call::Unanswered { from, to, cost: seen.cost })
}

fn micros(span: Duration) -> Micros {
    u64::try_from(span.as_micros()).expect("spans are short")
}

/// For a failing run: how the calls of each account were answered.
pub(super) fn summary(traces: &[Trace]) -> String {
    traces.iter().fold(String::new(), |mut text, trace| {
        let decided = |wanted: Option<bool>| {
            let same = |call: &&Call| match call {
                Call::Decided(decision) => wanted == Some(decision.allowed),
                Call::Unanswered { .. } => wanted.is_none(),
            };
            trace.calls.iter().filter(same).count()
        };
        let (allowed, refused, unanswered) = (decided(Some(true)), decided(Some(false)), decided(None));
        write!(text, " {}: {allowed}+{refused}+{unanswered};", trace.account).unwrap();
        text
    })
}
