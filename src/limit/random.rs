//! Numbers that nobody can guess and no two processes share. Not for secrets.

use std::hash::{BuildHasher, RandomState};

/// Sixty-four random bits.
pub(super) fn bits() -> u64 {
    RandomState::new().hash_one(())
}
