//! The scripts: the files of `lua/`, joined at build time, run by hash and healed by source.

use std::cell::OnceCell;

use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind};

use crate::limit::Rule;
use crate::limit::algorithm::Algorithm;

/// The one clock that production knows: Redis's own.
const CLOCK: &str = include_str!("../../../../lua/clock.lua");

/// What all values share.
const STATE: &str = include_str!("../../../../lua/state.lua");

/// The algorithms, each in a file that uses nothing of the others.
const ALGORITHMS: [&str; 4] = [
    include_str!("../../../../lua/sliding_window.lua"),
    include_str!("../../../../lua/token_bucket.lua"),
    include_str!("../../../../lua/quota.lua"),
    include_str!("../../../../lua/concurrency.lua"),
];

/// The two rounds.
const DECIDE: &str = include_str!("../../../../lua/decide.lua");

/// The scripts that decide, one for each set of algorithms.
///
/// Redis makes every function of a script anew at every call: a call costs what the script defines, used or not. So a
/// request runs a script that defines just the algorithms of its limits.
#[derive(Debug)]
pub(super) struct Deciding {
    clock: &'static str,
    scripts: [OnceCell<Script>; 1 << ALGORITHMS.len()],
}

impl Deciding {
    /// Scripts on Redis's own clock.
    pub(super) fn new() -> Self {
        Self::on(CLOCK)
    }

    /// Scripts on a clock that a test moves: the last argument is the time.
    #[cfg(test)]
    pub(super) fn for_tests() -> Self {
        Self::on(
            "local now = tonumber(ARGV[#ARGV])
             local function integer(number) return string.format('%.0f', number) end
             local function expire() end\n",
        )
    }

    fn on(clock: &'static str) -> Self {
        Self { clock, scripts: std::array::from_fn(|_| OnceCell::new()) }
    }

    /// The script for these limits.
    pub(super) fn script_for(&self, rules: &[Rule]) -> &Script {
        let set = rules.iter().fold(0, |set, rule| set | 1 << place_of(&rule.algorithm));
        self.scripts[set].get_or_init(|| {
            let used = |place: &usize| set & 1 << place != 0;
            let algorithms = (0..ALGORITHMS.len()).filter(used).map(|place| ALGORITHMS[place]);
            Script::joined([self.clock, STATE].into_iter().chain(algorithms).chain([DECIDE]))
        })
    }
}

/// The place of an algorithm's file in [`ALGORITHMS`].
fn place_of(algorithm: &Algorithm) -> usize {
    match algorithm {
        Algorithm::SlidingWindow(_) => 0,
        Algorithm::TokenBucket(_) => 1,
        Algorithm::Quota(_) => 2,
        Algorithm::Concurrency(_) => 3,
    }
}

/// A script and its hash.
#[derive(Debug)]
pub(super) struct Script {
    source: String,
    hash: String,
}

impl Script {
    /// The script that renews a lease.
    pub(super) fn renewing() -> Self {
        Self::joined([CLOCK, include_str!("../../../../lua/renew.lua")])
    }

    fn joined(parts: impl IntoIterator<Item = &'static str>) -> Self {
        let source = String::from_iter(parts);
        let hash = sha1_smol::Sha1::from(&source).digest().to_string();
        Self { source, hash }
    }

    pub(super) fn by_hash(&self) -> Cmd {
        let mut command = ::redis::cmd("EVALSHA");
        command.arg(&self.hash);
        command
    }

    pub(super) fn by_source(&self) -> Cmd {
        let mut command = ::redis::cmd("EVAL");
        command.arg(&self.source);
        command
    }
}

/// Whether the node does not know the script (any more).
pub(super) fn is_missing(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}
