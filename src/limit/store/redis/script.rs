//! The scripts: the files of `lua/`, joined at build time, run by hash and healed by source.

use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind};

/// The one clock that production knows: Redis's own.
const CLOCK: &str = include_str!("../../../../lua/clock.lua");

/// Everything behind the clock, in the order in which one file uses another.
const BODY: &str = concat!(
    include_str!("../../../../lua/state.lua"),
    include_str!("../../../../lua/sliding_window.lua"),
    include_str!("../../../../lua/token_bucket.lua"),
    include_str!("../../../../lua/quota.lua"),
    include_str!("../../../../lua/concurrency.lua"),
    include_str!("../../../../lua/decide.lua"),
);

/// A script and its hash.
#[derive(Debug)]
pub(super) struct Script {
    source: String,
    hash: String,
}

impl Script {
    /// The script that decides.
    pub(super) fn deciding() -> Self {
        Self::joined(CLOCK, BODY)
    }

    /// The script that renews a lease.
    pub(super) fn renewing() -> Self {
        Self::joined(CLOCK, include_str!("../../../../lua/renew.lua"))
    }

    fn joined(clock: &str, body: &str) -> Self {
        let source = [clock, body].concat();
        let hash = sha1_smol::Sha1::from(&source).digest().to_string();
        Self { source, hash }
    }

    /// A script on a clock that a test moves: the last argument is the time.
    #[cfg(test)]
    pub(super) fn for_tests() -> Self {
        Self::joined(
            "local now = tonumber(ARGV[#ARGV])
             local function integer(number) return string.format('%.0f', number) end
             local function expire() end\n",
            BODY,
        )
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
