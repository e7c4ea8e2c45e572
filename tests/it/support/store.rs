//! The stores a black-box test runs against.

use super::redis::Redis;

/// Where a gateway under test counts.
#[derive(Debug)]
pub(crate) enum Store {
    /// In itself.
    Memory,
    /// In a Redis that belongs to the test.
    Redis(Redis),
}

impl Store {
    /// The configuration tables that choose it.
    ///
    /// The Redis budget is generous and a failure is loud: these tests are about counting, not about outages, and a
    /// busy machine must not turn one into the other.
    pub(crate) fn tables(&self) -> String {
        match self {
            Self::Memory => "[store]\nkind = \"memory\"".to_owned(),
            Self::Redis(redis) => redis.tables("deny", "2s"),
        }
    }

    /// The Redis, when there is one.
    pub(crate) fn redis(&self) -> Option<&Redis> {
        match self {
            Self::Memory => None,
            Self::Redis(redis) => Some(redis),
        }
    }
}

/// Runs one black-box test against a gateway on every store.
///
/// `fn name(store) { .. }` becomes the tests `name::memory` and `name::redis`; `store` is a `&Store`.
macro_rules! for_every_store {
    ($(fn $name:ident($store:ident) $body:block)+) => {
        $(
            mod $name {
                use crate::support::{Redis, Store};

                #[test]
                fn memory() {
                    super::$name(&Store::Memory);
                }

                #[test]
                fn redis() {
                    super::$name(&Store::Redis(Redis::start()));
                }
            }

            fn $name($store: &crate::support::Store) $body
        )+
    };
}

pub(crate) use for_every_store;
