//! A table in stripes, each with a lock of its own, so that callers hardly ever wait for each other.

use std::hash::{BuildHasher, RandomState};

use parking_lot::Mutex;

/// How many there are.
pub(super) const STRIPES: usize = 64;

/// The stripes. A keyed hash spreads callers over them, so nobody can choose whom to meet.
#[derive(Debug)]
pub(super) struct Stripes<T> {
    hasher: RandomState,
    stripes: Box<[Mutex<T>]>,
}

impl<T: Default> Default for Stripes<T> {
    fn default() -> Self {
        Self { hasher: RandomState::new(), stripes: (0..STRIPES).map(|_| Mutex::default()).collect() }
    }
}

impl<T> Stripes<T> {
    /// The stripe of this caller.
    pub(super) fn of(&self, caller: &str) -> &Mutex<T> {
        // The remainder is below 64, whatever `usize` is.
        &self.stripes[usize::try_from(self.hasher.hash_one(caller) % STRIPES as u64).unwrap_or(0)]
    }

    /// The `turn`-th stripe in an endless round.
    pub(super) fn in_turn(&self, turn: usize) -> &Mutex<T> {
        &self.stripes[turn % STRIPES]
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Mutex<T>> {
        self.stripes.iter()
    }
}
