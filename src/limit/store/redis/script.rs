//! The scripts: the files of `lua/`, joined at build time, run by hash and healed by source.

use std::cell::OnceCell;
use std::rc::Rc;

use ::redis::{Arg, Cmd, ErrorKind, RedisError, ServerErrorKind};

use crate::limit::Rule;
use crate::limit::algorithm::Algorithm;

/// The one clock that production knows: Redis's own.
const CLOCK: &str = include_str!("../../../../lua/clock.lua");

/// What all values share.
const STATE: &str = include_str!("../../../../lua/state.lua");

/// The algorithms, each in a file that needs none of the others; beside `rare`, the exact window reads buckets, too.
const ALGORITHMS: [&str; 5] = [
    include_str!("../../../../lua/sliding_window_exact.lua"),
    include_str!("../../../../lua/sliding_window_bucketed.lua"),
    include_str!("../../../../lua/token_bucket.lua"),
    include_str!("../../../../lua/quota.lua"),
    include_str!("../../../../lua/concurrency.lua"),
];

/// The place of the last of them, `concurrency`.
const SLOTS: usize = ALGORITHMS.len() - 1;

/// What is needed once in a long while, on top of the algorithms.
const RARE: &str = include_str!("../../../../lua/rare.lua");

/// The two rounds.
const DECIDE: &str = include_str!("../../../../lua/decide.lua");

/// What puts a charge right after the answer.
const SETTLE: &str = include_str!("../../../../lua/settle.lua");

/// What renews a lease.
const RENEW: &str = include_str!("../../../../lua/renew.lua");

/// What counts gateways.
const GATEWAYS: &str = include_str!("../../../../lua/gateways.lua");

/// The scripts, made when they are needed first.
///
/// Redis makes every function of a script anew at every call: a call costs what the script defines, used or not. So a
/// request runs a script that defines just the algorithms of its limits, and asks for the whole only when that says so.
#[derive(Debug)]
pub(super) struct Scripts {
    clock: &'static str,
    /// By the set of algorithms.
    deciding: [OnceCell<Rc<Script>>; 1 << ALGORITHMS.len()],
    whole: OnceCell<Rc<Script>>,
    settling: OnceCell<Rc<Script>>,
    renewing: OnceCell<Rc<Script>>,
    counting: OnceCell<Rc<Script>>,
}

impl Scripts {
    /// Scripts on Redis's own clock.
    pub(super) fn new() -> Self {
        Self::on(CLOCK)
    }

    /// Scripts on a clock that a test moves: the last argument is the time.
    #[cfg(test)]
    pub(super) fn for_tests() -> Self {
        Self::on(
            "local now = tonumber(ARGV[#ARGV])
             local function expire() end\n",
        )
    }

    fn on(clock: &'static str) -> Self {
        Self {
            clock,
            deciding: std::array::from_fn(|_| OnceCell::new()),
            whole: OnceCell::new(),
            settling: OnceCell::new(),
            renewing: OnceCell::new(),
            counting: OnceCell::new(),
        }
    }

    /// What decides on these limits.
    pub(super) fn deciding(&self, rules: &[Rule]) -> &Rc<Script> {
        let set = rules.iter().fold(0, |set, rule| set | 1 << place_of(&rule.algorithm));
        self.deciding[set].get_or_init(|| {
            let used = |place: &usize| set & 1 << place != 0;
            let algorithms = (0..ALGORITHMS.len()).filter(used).map(|place| ALGORITHMS[place]);
            self.joined([STATE].into_iter().chain(algorithms).chain([DECIDE]))
        })
    }

    /// What decides on any limits, and can do what is rarely needed.
    pub(super) fn whole(&self) -> &Rc<Script> {
        self.whole.get_or_init(|| self.joined([STATE].into_iter().chain(ALGORITHMS).chain([RARE, DECIDE])))
    }

    /// What settles charges.
    pub(super) fn settling(&self) -> &Rc<Script> {
        // Slots are given back, and not settled.
        let settled = ALGORITHMS.into_iter().take(SLOTS);
        self.settling.get_or_init(|| self.joined([STATE].into_iter().chain(settled).chain([RARE, SETTLE])))
    }

    /// What renews a lease.
    pub(super) fn renewing(&self) -> &Rc<Script> {
        self.renewing.get_or_init(|| self.joined([RENEW].into_iter()))
    }

    /// What counts gateways.
    pub(super) fn counting(&self) -> &Rc<Script> {
        self.counting.get_or_init(|| self.joined([GATEWAYS].into_iter()))
    }

    fn joined(&self, parts: impl Iterator<Item = &'static str>) -> Rc<Script> {
        let source: String = [self.clock].into_iter().chain(parts).collect();
        let hash = sha1_smol::Sha1::from(&source).digest().to_string();
        Rc::new(Script { source, hash })
    }
}

/// The place of an algorithm's file in [`ALGORITHMS`].
fn place_of(algorithm: &Algorithm) -> usize {
    match algorithm {
        Algorithm::SlidingWindow(window) if window.is_exact() => 0,
        Algorithm::SlidingWindow(_) => 1,
        Algorithm::TokenBucket(_) => 2,
        Algorithm::Quota(_) => 3,
        Algorithm::Concurrency(_) => SLOTS,
    }
}

/// A script and its hash.
#[derive(Debug)]
pub(super) struct Script {
    source: String,
    hash: String,
}

impl Script {
    /// A call by the script's hash; keys and arguments follow.
    pub(super) fn by_hash(&self) -> Cmd {
        let mut command = ::redis::cmd("EVALSHA");
        command.arg(&self.hash);
        command
    }

    /// A call with the script's source, which the node then knows; keys and arguments follow.
    pub(super) fn by_source(&self) -> Cmd {
        let mut command = ::redis::cmd("EVAL");
        command.arg(&self.source);
        command
    }

    /// The same call as [`by_hash`](Self::by_hash) made it, but with the source.
    pub(super) fn healed(&self, by_hash: &Cmd) -> Cmd {
        let mut command = self.by_source();
        for argument in by_hash.args_iter().skip(2) {
            if let Arg::Simple(argument) = argument {
                command.arg(argument);
            }
        }
        command
    }
}

/// Whether the node does not know the script (any more).
pub(super) fn is_missing(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}
