//! One server, as one worker uses it: a connection, what is known of the server's clock, and a guard around both.

use std::cell::{OnceCell, RefCell};
use std::num::NonZeroU64;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::super::guard::{Guard, within};
use super::super::{Charge, Decision, Phase, Settlement, StoreError};
use super::calls::{Calls, Reply, reply};
use super::connection::{Connection, Way};
use super::errors;
use super::hash_slots::split;
use super::script::{self, Script, Scripts};
use super::server_clock::ServerClock;
use super::store_error;
use crate::clock;
use crate::limit::algorithm::{Algorithm, SlidingWindow};
use crate::limit::{Common, Rule, Scope};

/// A call is made at most so often: again for the whole script, and again without an end.
const ATTEMPTS: usize = 3;

/// How long a probe may take on top of connecting and two budgets: nobody else probes meanwhile.
const PROBE_PATIENCE: Duration = Duration::from_millis(100);

/// How often it is looked whether the callers' return is complete.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What all nodes of a worker need to make calls.
#[derive(Debug)]
pub(super) struct Kit {
    pub(super) calls: Calls,
    pub(super) scripts: Rc<Scripts>,
    /// Everything the limiter may spend on one request.
    pub(super) budget: Duration,
    pub(super) common: Arc<Common>,
    /// Says that what is known of a cluster's hash slots is out of date.
    pub(super) stale: Notify,
}

impl Kit {
    /// The call that settles a charge; `None` if there is nothing to settle.
    pub(super) fn settling(&self, settlement: Settlement<'_>) -> Option<Call> {
        let script = self.scripts.settling();
        let by_hash = self.calls.settling(script, settlement, clock::wall_micros())?;
        Some(Call::Script(Rc::clone(script), by_hash))
    }
}

/// One server.
#[derive(Debug)]
pub(super) struct Node {
    kit: Rc<Kit>,
    pub(super) guard: Guard,
    connection: Connection,
    clock: ServerClock,
    /// For whom probes ask: somebody whose counters this server would keep.
    prober: RefCell<Box<str>>,
    /// What reopens, probes and wakes; `None` before the first request.
    tending: OnceCell<JoinHandle<()>>,
}

/// A call that no request waits for, or that nobody decides by.
#[derive(Debug)]
pub(super) enum Call {
    /// A command.
    Plain(Cmd),
    /// A call of a script, by its hash.
    Script(Rc<Script>, Cmd),
}

/// What a server made of a call.
#[derive(Debug)]
pub(super) enum Answer<T> {
    /// What it was asked for.
    Given(T),
    /// The counters are kept elsewhere.
    Elsewhere(Redirect),
}

impl<T> Answer<T> {
    fn of(reply: Result<T, Failure>) -> Result<Self, StoreError> {
        match reply {
            Ok(given) => Ok(Self::Given(given)),
            Err(Failure::Elsewhere(redirect)) => Ok(Self::Elsewhere(redirect)),
            Err(Failure::Store(error)) => Err(error),
            Err(Failure::NoScript) => Err(StoreError::Nonsense("not known, and that of the source")),
        }
    }
}

/// Where else to ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Redirect {
    /// There, from now on.
    Moved { hash_slot: u16, address: Box<str> },
    /// There, for this once: the hash slot is on its way.
    Ask { address: Box<str> },
    /// Here, a little later: some of the caller's counters are on their way.
    Again,
}

/// Why a command has no reply.
#[derive(Debug)]
pub(super) enum Failure {
    /// The server failed.
    Store(StoreError),
    /// It does not keep what the command asks for.
    Elsewhere(Redirect),
    /// It does not know the script.
    NoScript,
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Node {
    /// The server of this name, which is its address if it has one, reached like this. Nothing connects yet.
    pub(super) fn new(name: &str, way: Way, kit: &Rc<Kit>) -> Rc<Self> {
        let shard = kit.common.shard(name);
        Rc::new(Self {
            connection: Connection::new(way, kit.budget, Arc::clone(&shard), Arc::clone(&kit.common)),
            guard: Guard::new(shard),
            clock: ServerClock::new(),
            prober: RefCell::new("probe".into()),
            tending: OnceCell::new(),
            kit: Rc::clone(kit),
        })
    }

    /// Begins to connect, and to look after the server, unless that has begun before. Only inside of a worker's runtime.
    pub(super) fn tend(self: &Rc<Self>) {
        self.tending.get_or_init(|| {
            self.connection.open();
            tokio::task::spawn_local(tend(Rc::downgrade(self)))
        });
    }

    /// Waits until it can be asked: there is a connection, its clock is known, and it knows the scripts. Or until it is found to be
    /// away. The first request would have to do all that within its budget.
    pub(super) async fn prepared(self: &Rc<Self>) -> Result<(), StoreError> {
        self.tend();
        self.connection.opened().await?;
        self.do_as_requests_do(None).await?;
        Answer::of(self.hear_the_time().await).map(drop)
    }

    /// Waits until there is a connection.
    pub(super) async fn connected(&self) -> Result<(), StoreError> {
        self.connection.link().await.map(drop)
    }

    /// From now on probes ask for this caller.
    pub(super) fn probe_as(&self, caller: Box<str>) {
        self.prober.replace(caller);
    }

    /// Decides on a request, if its counters are here. `in_passing`: they are on their way here.
    pub(super) async fn decide(
        &self,
        charge: Charge<'_>,
        in_passing: bool,
    ) -> Result<Answer<Decision>, StoreError> {
        Answer::of(self.try_to_decide(charge, in_passing).await)
    }

    async fn try_to_decide(&self, charge: Charge<'_>, in_passing: bool) -> Result<Decision, Failure> {
        let mut script = self.kit.scripts.deciding(charge.rules);
        if charge.deadline.is_some() && !self.clock.is_known() {
            self.hear_the_time().await?;
        }
        let mut end = charge.deadline.map_or(0, |deadline| self.clock.latest_at(deadline));
        for _ in 0..ATTEMPTS {
            let issued = clock::instant();
            let call = self.kit.calls.deciding(script, charge, end, clock::wall_micros());
            match reply(&self.run(script, &call, in_passing).await?, charge)? {
                Reply::Decided(decision) => {
                    // What takes as long as it likes says little.
                    if charge.deadline.is_some() {
                        self.clock.learn(issued, decision.at);
                    }
                    return Ok(decision);
                }
                Reply::Rare => script = self.kit.scripts.whole(),
                // But we are still waiting: what we know of the server's clock is wrong.
                Reply::TooLate => {
                    self.clock.forget();
                    end = 0;
                }
            }
        }
        Err(StoreError::Nonsense("not a decision, again and again").into())
    }

    /// Sends a call, unless the server has tripped: it is left alone then.
    pub(super) async fn send(&self, call: &Call, in_passing: bool) -> Result<Answer<Value>, StoreError> {
        if self.guard.shard().phase() == Phase::Tripped {
            return Err(StoreError::Tripped);
        }
        Answer::of(self.make(call, in_passing).await)
    }

    async fn make(&self, call: &Call, in_passing: bool) -> Result<Value, Failure> {
        match call {
            Call::Plain(command) => self.ask(command, in_passing).await,
            Call::Script(script, by_hash) => self.run(script, by_hash, in_passing).await,
        }
    }

    /// Runs a script. The script cache is volatile: a restart, a failover or SCRIPT FLUSH empties it. The source heals it at
    /// once, on the node that lacks it.
    pub(super) async fn run(
        &self,
        script: &Script,
        by_hash: &Cmd,
        in_passing: bool,
    ) -> Result<Value, Failure> {
        match self.ask(by_hash, in_passing).await {
            Err(Failure::NoScript) => self.ask(&script.healed(by_hash), in_passing).await,
            answer => answer,
        }
    }

    /// Sends one command and waits for its reply, for ever if need be: the deadline is the caller's.
    pub(super) async fn ask(&self, command: &Cmd, in_passing: bool) -> Result<Value, Failure> {
        let mut link = self.connection.link().await?;
        let answer = if in_passing { link.ask_in_passing(command).await } else { link.ask(command).await };
        answer.map_err(|error| {
            // Broken, or to a node that no longer takes writes: of no further use.
            if errors::is_beyond_repair(&error) {
                self.connection.reopen();
            }
            failure(&error, self.guard.shard().name())
        })
    }

    /// Asks the server for its time, so that a call can say until when it is worth something.
    async fn hear_the_time(&self) -> Result<(), Failure> {
        let issued = clock::instant();
        let time = self.ask(&::redis::cmd("TIME"), false).await?;
        let (seconds, micros): (u64, u64) =
            ::redis::from_redis_value(time).map_err(|_| StoreError::Nonsense("not a time"))?;
        self.clock.learn(issued, seconds.saturating_mul(1_000_000).saturating_add(micros));
        Ok(())
    }

    /// Whether the server can do what requests want of it: scripts that write, each within the budget. To connect may take longer
    /// than that.
    async fn probe(&self) -> Result<(), StoreError> {
        self.connection.opened().await?;
        self.do_as_requests_do(Some(self.kit.budget)).await
    }

    /// Decides and pays, for a caller that nobody is, each within `budget` if there is one.
    async fn do_as_requests_do(&self, budget: Option<Duration>) -> Result<(), StoreError> {
        let until = || budget.map(|budget| clock::instant() + budget);
        let (caller, rules) = (self.prober.borrow().clone(), [probe_rule()]);
        let deadline = until();
        let charge = Charge::new(&caller, "probe", &rules, NonZeroU64::MIN);
        let charge = Charge { deadline, ..charge };
        match within(deadline, self.decide(charge, false)).await? {
            Answer::Given(_) => within(until(), self.pay_as_prober(charge)).await,
            Answer::Elsewhere(_) => {
                self.kit.stale.notify_one();
                Ok(())
            }
        }
    }

    /// Charges one more, by the script that writes back what callers owe. A server that has started anew does not know it, and
    /// were it told by those who return, the question behind a payment would overtake it.
    async fn pay_as_prober(&self, charge: Charge<'_>) -> Result<(), StoreError> {
        let settlement = Settlement { charge, charged: &[true], at: 0, spent: 2 };
        match self.kit.settling(settlement) {
            Some(call) => Answer::of(self.make(&call, false).await).map(drop),
            None => Ok(()),
        }
    }

    /// Whether the server answers at all, until `deadline`. A connection on which it does not is replaced.
    pub(super) async fn ping(&self, deadline: Option<Instant>) -> Result<(), StoreError> {
        let answer = async {
            match self.ask(&::redis::cmd("PING"), false).await {
                Ok(_) => Ok(()),
                Err(Failure::Store(error)) => Err(error),
                Err(_) => Err(StoreError::Nonsense("no answer to a ping")),
            }
        };
        let answer = within(deadline, answer).await;
        if answer == Err(StoreError::Timeout) {
            self.connection.reopen();
        }
        answer
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(task) = self.tending.get() {
            task.abort();
        }
    }
}

/// Looks after a server for as long as it is used: lets go of it when it has tripped, probes it, and connects again when callers
/// return.
async fn tend(node: Weak<Node>) {
    let Some(mut changes) = node.upgrade().map(|node| node.guard.shard().watch()) else { return };
    let mut before = Phase::Healthy;
    loop {
        let Some(this) = node.upgrade() else { return };
        changes.borrow_and_update();
        let shard = Arc::clone(this.guard.shard());
        let phase = shard.phase();
        let next = match phase {
            Phase::Healthy => None,
            Phase::Probing => {
                this.connection.open();
                Some(clock::instant() + LOOK_EVERY)
            }
            Phase::Tripped => {
                if before != Phase::Tripped {
                    this.guard.give_up();
                    this.connection.rest();
                    this.kit.stale.notify_one();
                }
                if shard.is_answering() {
                    // Else those who return wait for it, and longer than they may if the way is long.
                    this.connection.open();
                }
                if shard.claim_probe(this.connection.patience() + 2 * this.kit.budget + PROBE_PATIENCE) {
                    let outcome = this.probe().await;
                    if let Err(error) = &outcome {
                        this.kit.common.count_failure(error.kind());
                        this.connection.rest();
                        this.kit.stale.notify_one();
                    }
                    shard.probed(outcome.is_ok());
                }
                shard.next_probe()
            }
        };
        before = phase;
        drop((shard, this));
        match next {
            Some(next) => {
                // Whichever comes first.
                drop(tokio::time::timeout_at(next.into(), changes.changed()).await);
            }
            None => {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        }
    }
}

/// What probes ask for: the simplest script that writes. It never refuses, as there are never so many probes.
fn probe_rule() -> Rule {
    let thousand = NonZeroU64::MIN.saturating_add(999);
    let window = SlidingWindow::new(thousand, clock::micros(Duration::from_secs(1)));
    let window = window.expect("a thousand a second can be counted");
    Rule::new("probe", Scope::Plan, Algorithm::SlidingWindow(window))
}

/// What an error means.
fn failure(error: &RedisError, asked: &str) -> Failure {
    if script::is_missing(error) {
        return Failure::NoScript;
    }
    match (error.kind(), error.redirect_node()) {
        (ErrorKind::Server(ServerErrorKind::Moved), Some((address, hash_slot))) => {
            Failure::Elsewhere(Redirect::Moved { hash_slot, address: named(address, asked) })
        }
        (ErrorKind::Server(ServerErrorKind::Ask), Some((address, _))) => {
            Failure::Elsewhere(Redirect::Ask { address: named(address, asked) })
        }
        (ErrorKind::Server(ServerErrorKind::TryAgain), _) => Failure::Elsewhere(Redirect::Again),
        _ => Failure::Store(store_error(error)),
    }
}

/// An address in a redirection, which leaves the host out when it is the one that was asked.
fn named(address: &str, asked: &str) -> Box<str> {
    match (address.strip_prefix(':'), split(asked)) {
        (Some(port), Some((host, _))) => format!("{host}:{port}").into(),
        _ => address.into(),
    }
}
