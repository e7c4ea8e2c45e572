//! A Redis with a replica behind one address, and all that can happen to it.

use std::thread;
use std::time::Duration;

use super::check::Loss;
use super::oracle::Micros;
use super::random::Random;
use super::traffic::{Standstills, wall};
use crate::support::{Redis, Relay, eventually};

/// A signal has taken effect after this time, surely.
const SIGNAL: Micros = 20_000;

/// A replica is behind by less than this.
const LAG_MAX: Micros = 500_000;

/// What happens to the servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
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
    pub(super) const ALL: [Self; 4] =
        [Self::Pause, Self::RestartWithData, Self::RestartEmpty, Self::Failover];
}

/// A primary that writes every command to disk before it answers, and its replica.
#[derive(Debug)]
pub(super) struct Servers {
    primary: Redis,
    replica: Redis,
    relay: Relay,
    /// What the servers of this address have lost so far.
    pub(super) losses: Vec<Loss>,
    /// When none of them could do anything.
    pub(super) standstills: Standstills,
}

impl Servers {
    pub(super) fn start() -> Self {
        let (primary, replica) = (Redis::start_journaled(), Redis::start_journaled());
        let relay = Relay::to(primary.port());
        follow(&replica, &primary);
        Self { primary, replica, relay, losses: Vec::new(), standstills: Vec::new() }
    }

    /// The `[store]` tables of a gateway that counts here.
    pub(super) fn tables(&self, on_failure: &str, budget: Duration) -> String {
        let (port, budget) = (self.relay.port(), budget.as_millis());
        format!(
            "[store]\nkind = \"redis\"\non_failure = \"{on_failure}\"\n\n[store.redis]\nurl = \"redis://127.0.0.1:{port}\"\nbudget = \"{budget}ms\""
        )
    }

    /// Lets this happen.
    pub(super) fn suffer(&mut self, fault: Fault, random: &mut Random) {
        match fault {
            Fault::Pause => self.pause(random.span(Duration::from_millis(50), Duration::from_millis(900))),
            Fault::RestartWithData => {
                let _span = self.replace(|_| {});
            }
            Fault::RestartEmpty => {
                let (killed, launched) = self.replace(Redis::forget);
                self.losses.push(Loss::Everything { killed, launched });
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
        self.stood_still(stopped + SIGNAL, woken);
    }

    /// Kills the primary and starts it again; since when it was gone, and from when on it may have been there again.
    fn replace(&mut self, meanwhile: impl FnOnce(&mut Redis)) -> (Micros, Micros) {
        self.primary.kill();
        let killed = wall();
        meanwhile(&mut self.primary);
        let launched = wall();
        self.primary.launch();
        self.stood_still(killed, launched);
        (killed, launched)
    }

    fn fail_over(&mut self, too_early: Duration) {
        eventually("the replica to be in step", Duration::from_secs(10), || {
            let state = self.primary.info("replication", "slave0")?;
            state.contains("state=online").then_some(())
        });
        let earliest = wall() - LAG_MAX;
        self.replica.cmd(&["REPLICAOF", "NO", "ONE"]);
        let latest = wall();
        thread::sleep(too_early);
        self.primary.kill();
        let killed = wall();
        let switched = wall();
        self.relay.switch(self.replica.port());
        self.losses.push(Loss::Suffix { earliest, latest, killed });
        self.stood_still(killed, switched);
        std::mem::swap(&mut self.primary, &mut self.replica);
        self.replica.forget();
        self.replica.launch();
        follow(&self.replica, &self.primary);
    }

    fn stood_still(&mut self, from: Micros, to: Micros) {
        if from < to {
            self.standstills.push((from, to));
        }
    }
}

fn follow(replica: &Redis, primary: &Redis) {
    replica.cmd(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]);
}
