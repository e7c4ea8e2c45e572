//! A Redis with a replica behind one address, a cluster, and all that can happen to them.

use std::thread;
use std::time::Duration;

use super::check::Loss;
use super::oracle::Micros;
use super::random::Random;
use super::traffic::{BUDGET, wall};
use crate::support::{Cluster, FaultProxy, Redis, eventually};

/// A signal has taken effect after this time, surely.
const SIGNAL: Micros = 20_000;

/// How long a replica may take to have a copy of its primary, or to take its place.
const PATIENCE: Duration = Duration::from_secs(15);

/// What happened to the servers that count for some accounts, in the order of time.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) losses: Vec<Loss>,
    /// Spans in which none of them could execute anything.
    pub(super) standstills: Vec<(Micros, Micros)>,
    /// Whether a call may be sent to the next server when the one that had it is gone.
    pub(super) sends_again: bool,
}

impl History {
    fn stood_still(&mut self, from: Micros, to: Micros) {
        if from < to {
            self.standstills.push((from, to));
        }
    }
}

/// What counts for the gateways of a test.
pub(super) trait Store {
    /// The `[store]` tables of a gateway that counts here.
    fn tables(&self, on_failure: &str) -> String;

    /// Lets all that can happen to it happen once, each after this pause or so.
    fn suffer(&mut self, pause: Duration, random: &mut Random);

    /// Which of the [`histories`](Self::histories) is that of this account.
    fn counts(&self, account: &str) -> usize;

    /// What happened.
    fn histories(&self) -> &[History];
}

/// About as long as `pause`.
fn wait(pause: Duration, random: &mut Random) {
    thread::sleep(random.span(pause / 2, pause * 3 / 2));
}

/// What happens to a server and its replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The primary stands still for a while, and goes on where it was.
    Pause,
    /// It is killed and comes back with all it had acknowledged.
    RestartWithData,
    /// It is killed and comes back empty.
    RestartEmpty,
    /// Its replica takes over, a little too early: what it acknowledges from then on is lost when it is killed.
    Failover,
}

impl Fault {
    const ALL: [Self; 4] = [Self::Pause, Self::RestartWithData, Self::RestartEmpty, Self::Failover];
}

/// A primary that writes every command to a file before it answers, and its replica.
#[derive(Debug)]
pub(super) struct Pair {
    primary: Redis,
    replica: Redis,
    address: FaultProxy,
    history: History,
}

impl Pair {
    pub(super) fn start() -> Self {
        let (primary, replica) = (Redis::start_journaled(), Redis::start_journaled());
        let address = FaultProxy::to_any(primary.port());
        follow(&replica, &primary);
        Self { primary, replica, address, history: History::default() }
    }

    /// Lets this happen.
    fn meet(&mut self, fault: Fault, random: &mut Random) {
        match fault {
            Fault::Pause => self.pause(random.span(Duration::from_millis(50), Duration::from_millis(900))),
            Fault::RestartWithData => {
                let _span = self.replace(|_| {});
            }
            Fault::RestartEmpty => {
                let (killed, launched) = self.replace(Redis::forget);
                self.history.losses.push(Loss::Everything { killed, launched });
            }
            Fault::Failover => {
                self.fail_over(random.span(Duration::from_millis(20), Duration::from_millis(150)));
            }
        }
    }

    fn pause(&mut self, span: Duration) {
        self.primary.stop();
        let stopped = wall();
        thread::sleep(span);
        let woken = wall();
        self.primary.cont();
        self.history.stood_still(stopped + SIGNAL, woken);
    }

    /// Kills the primary and starts it again; since when it was gone, and from when on it may have been there again.
    fn replace(&mut self, meanwhile: impl FnOnce(&mut Redis)) -> (Micros, Micros) {
        self.primary.kill();
        let killed = wall();
        meanwhile(&mut self.primary);
        let launched = wall();
        self.primary.launch();
        self.history.stood_still(killed, launched);
        (killed, launched)
    }

    fn fail_over(&mut self, too_early: Duration) {
        let earliest = copied_until(&self.primary, &self.replica);
        self.replica.cmd(&["REPLICAOF", "NO", "ONE"]);
        let latest = wall();
        thread::sleep(too_early);
        self.primary.kill();
        let killed = wall();
        let switched = wall();
        self.address.switch(self.replica.port());
        self.history.losses.push(Loss::Suffix { earliest, latest, killed });
        self.history.stood_still(killed, switched);
        std::mem::swap(&mut self.primary, &mut self.replica);
        self.replica.forget();
        self.replica.launch();
        follow(&self.replica, &self.primary);
    }
}

impl Store for Pair {
    fn tables(&self, on_failure: &str) -> String {
        self.address.tables(on_failure, &format!("{}ms", BUDGET.as_millis()))
    }

    fn suffer(&mut self, pause: Duration, random: &mut Random) {
        let mut faults = Fault::ALL;
        random.shuffle(&mut faults);
        for fault in faults {
            wait(pause, random);
            self.meet(fault, random);
        }
    }

    fn counts(&self, _account: &str) -> usize {
        0
    }

    fn histories(&self) -> &[History] {
        std::slice::from_ref(&self.history)
    }
}

fn follow(replica: &Redis, primary: &Redis) {
    replica.cmd(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]);
}

/// Waits until the replica has all that its primary wrote up to a moment, and says which.
fn copied_until(primary: &Redis, replica: &Redis) -> Micros {
    let offset = |redis: &Redis, name| redis.info("replication", name)?.parse::<u64>().ok();
    eventually("the replica to be in step", PATIENCE, || {
        let online = primary.info("replication", "slave0")?.contains("state=online")
            && replica.info("replication", "master_link_status")? == "up";
        let moment = wall();
        let written = offset(primary, "master_repl_offset")?;
        let copied = offset(replica, "slave_repl_offset")?;
        (online && copied >= written).then_some(moment)
    })
}

/// Shards of a cluster: a primary and a replica each.
const SHARDS: usize = 3;

/// A cluster of three primaries with a replica each, that keep nothing on disk.
#[derive(Debug)]
pub(super) struct Shards {
    cluster: Cluster,
    /// For each shard, which of its two nodes is the primary.
    promoted: [bool; SHARDS],
    histories: [History; SHARDS],
}

impl Shards {
    pub(super) fn start() -> Self {
        let history = || History { sends_again: true, ..History::default() };
        let histories = [history(), history(), history()];
        Self { cluster: Cluster::start(), promoted: [false; SHARDS], histories }
    }

    fn primary(&self, shard: usize) -> &Redis {
        if self.promoted[shard] { &self.cluster.replicas()[shard] } else { &self.cluster.primaries()[shard] }
    }

    fn replica(&self, shard: usize) -> &Redis {
        if self.promoted[shard] { &self.cluster.primaries()[shard] } else { &self.cluster.replicas()[shard] }
    }

    /// Waits until the replica has a copy of its primary; until when it is complete.
    fn copied_until(&self, shard: usize) -> Micros {
        copied_until(self.primary(shard), self.replica(shard))
    }

    /// The primary stands still, too short for the others to replace it.
    fn pause(&mut self, shard: usize, span: Duration) {
        self.primary(shard).stop();
        let stopped = wall();
        thread::sleep(span);
        let woken = wall();
        self.primary(shard).cont();
        self.histories[shard].stood_still(stopped + SIGNAL, woken);
    }

    /// The replica takes over, when the primary has given it all it had: nothing is lost.
    fn hand_over(&mut self, shard: usize) {
        self.copied_until(shard);
        self.replica(shard).cmd(&["CLUSTER", "FAILOVER"]);
        self.wait_for_succession(shard);
        self.promoted[shard] = !self.promoted[shard];
    }

    /// The primary is killed, the others notice, and the replica takes over with what it had. The killed one comes back as
    /// a replica.
    fn lose_primary(&mut self, shard: usize) {
        let at = shard + if self.promoted[shard] { SHARDS } else { 0 };
        let earliest = self.copied_until(shard);
        self.cluster.node(at).kill();
        let killed = wall();
        let last_seen_waiting = self.wait_for_succession(shard);
        self.histories[shard].losses.push(Loss::Suffix { earliest, latest: killed, killed });
        self.histories[shard].stood_still(killed, last_seen_waiting);
        self.promoted[shard] = !self.promoted[shard];
        self.cluster.node(at).launch();
    }

    /// Waits until the replica is the primary; a moment at which it was not yet.
    fn wait_for_succession(&self, shard: usize) -> Micros {
        let mut last_seen_waiting = 0;
        eventually("the replica to take over", PATIENCE, || {
            let asked = wall();
            let role = self.replica(shard).info("replication", "role")?;
            if role != "master" {
                last_seen_waiting = asked;
            }
            (role == "master").then_some(())
        });
        last_seen_waiting
    }
}

impl Store for Shards {
    fn tables(&self, on_failure: &str) -> String {
        self.cluster.tables(on_failure, &format!("{}ms", BUDGET.as_millis()))
    }

    fn suffer(&mut self, pause: Duration, random: &mut Random) {
        let mut shards = [0, 1, 2];
        random.shuffle(&mut shards);
        wait(pause, random);
        self.pause(shards[0], random.span(Duration::from_millis(50), Duration::from_millis(600)));
        wait(pause, random);
        self.hand_over(shards[1]);
        wait(pause, random);
        self.lose_primary(shards[2]);
    }

    fn counts(&self, account: &str) -> usize {
        let key = format!("{{acct.{account}}}");
        let slot = self.primary(0).number(&["CLUSTER", "KEYSLOT", &key]);
        usize::try_from(slot).expect("a slot is a number") * SHARDS / 16_384
    }

    fn histories(&self) -> &[History] {
        &self.histories
    }
}
