//! Who a request counts against, and how that is written in a store key.
//!
//! Accounts are named by operators and networks by clients, and both end up in Redis keys in which `{`, `}` and `:` have a
//! meaning. The encoding lets none of them through, never gives two callers one id, and has an end.

use std::fmt::Write as _;
use std::sync::Arc;

use sha2::{Digest, Sha256};

/// Who a request counts against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The caller's part of a store key, already encoded: `acct.acme`, `net.203.0.113.9`.
    pub id: Arc<str>,
    /// The account, when a key said which; for logs.
    pub account: Option<Arc<str>>,
    /// The name of the plan that applies.
    pub plan: Arc<str>,
    /// The name of the API key, when one was shown: some limits count each key on its own.
    pub key: Option<Arc<str>>,
    /// The day on which the account's months begin, from 1 to 31.
    pub anchor_day: u8,
}

/// Bytes of an encoded name at most; a longer one is replaced by its hash.
const MAX_ENCODED: usize = 64;
/// Bytes of SHA-256 that stand for a long name: 128 bits, so nobody finds two names with the same.
const HASH_BYTES: usize = 16;

/// The caller id of an account: `acct.` and its encoded name.
#[must_use]
pub fn account_id(account: &str) -> Arc<str> {
    encode("acct.", account)
}

/// The caller id of a client network, as [`ClientAddresses::network`](super::ClientAddresses::network) writes it.
#[must_use]
pub fn network_id(network: &str) -> Arc<str> {
    encode("net.", network)
}

/// `prefix` and the encoded `name`: letters, digits, `_`, `-` and `.` as they are, every other byte as `%XX`.
///
/// When that is longer than 64 bytes: `~` and 32 hexadecimal digits of the name's SHA-256. A literal `~` is always
/// written `%7E`, so the two forms cannot meet.
fn encode(prefix: &str, name: &str) -> Arc<str> {
    let mut id = String::with_capacity(prefix.len() + MAX_ENCODED);
    id.push_str(prefix);
    for byte in name.bytes() {
        if is_literal(byte) {
            id.push(char::from(byte));
        } else {
            write!(id, "%{byte:02X}").expect("writing to a String cannot fail");
        }
        if id.len() > prefix.len() + MAX_ENCODED {
            return hashed(prefix, name);
        }
    }
    id.into()
}

fn hashed(prefix: &str, name: &str) -> Arc<str> {
    let hash = Sha256::digest(name);
    let mut id = format!("{prefix}~");
    for byte in &hash[..HASH_BYTES] {
        write!(id, "{byte:02x}").expect("writing to a String cannot fail");
    }
    id.into()
}

fn is_literal(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_stay_readable() {
        for (account, id) in [
            ("acme", "acct.acme"),
            ("Acme_2-b.c", "acct.Acme_2-b.c"),
            ("", "acct."),
            ("a:b", "acct.a%3Ab"),
            ("{x}", "acct.%7Bx%7D"),
            ("a b|c", "acct.a%20b%7Cc"),
            ("~", "acct.%7E"),
            ("100%", "acct.100%25"),
            ("é", "acct.%C3%A9"),
            ("a\r\nb\0", "acct.a%0D%0Ab%00"),
        ] {
            assert_eq!(&*account_id(account), id);
        }
        assert_eq!(&*network_id("203.0.113.9"), "net.203.0.113.9");
        assert_eq!(&*network_id("2001:db8:0:1::/64"), "net.2001%3Adb8%3A0%3A1%3A%3A%2F64");
    }

    /// ID-3: joined with a separator that may also be in a name, different pairs gave one key.
    #[test]
    fn names_cannot_run_into_what_follows_them() {
        let keys = [("a", "b:c"), ("a:b", "c"), ("a:b", "b:c"), ("a", "c")]
            .map(|(account, limit)| format!("t:{{{}}}:{limit}", account_id(account)));
        let different: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(different.len(), keys.len());
        assert_ne!(account_id("203.0.113.9"), network_id("203.0.113.9"));
    }

    /// ID-4: a long name became a long store key.
    #[test]
    fn long_names_are_hashed() {
        assert_eq!(account_id(&"a".repeat(64)).len(), "acct.".len() + 64);
        let sha_256_of_65_a = "acct.~635361c48bb9eab14198e76ea8ab7f1a";
        assert_eq!(&*account_id(&"a".repeat(65)), sha_256_of_65_a);
        assert_eq!(account_id(&":".repeat(22)).len(), sha_256_of_65_a.len());
        assert_eq!(account_id(&"a".repeat(7_000)).len(), sha_256_of_65_a.len());
        assert_ne!(account_id(&"a".repeat(7_000)), account_id(&"a".repeat(7_001)));
        // A short name that looks like a hash is not one.
        let forged = account_id(sha_256_of_65_a.trim_start_matches("acct."));
        assert_ne!(&*forged, sha_256_of_65_a);
    }

    #[test]
    fn every_network_fits_without_a_hash() {
        let longest = "2001:1db8:1111:1222:1333:1444:1555:1666/128";
        assert!(!network_id(longest).contains('~'));
    }

    fn name() -> impl Strategy<Value = String> {
        prop_oneof![".{0,8}", "[%~:{}0-9A-F.]{0,24}", "[a-z:]{60,70}", "[a%]{0,3}"]
    }

    proptest! {
        #[test]
        fn different_names_have_different_ids(one in name(), other in name()) {
            prop_assert_eq!(account_id(&one) == account_id(&other), one == other);
        }

        /// Injective because it can be undone, as far as it is not hashed.
        #[test]
        fn an_id_can_be_read_back(name in name()) {
            let id = account_id(&name);
            let encoded = id.strip_prefix("acct.").unwrap();
            if !encoded.starts_with('~') {
                let decoded = crate::inbound::path::decode(encoded);
                prop_assert_eq!(decoded.as_ref(), name.as_bytes());
            }
        }

        #[test]
        fn no_id_has_a_byte_with_a_meaning_in_keys_or_is_long(name in name()) {
            let id = account_id(&name);
            prop_assert!(id.bytes().all(|byte| is_literal(byte) || byte == b'%' || byte == b'~'));
            prop_assert!(id.len() <= "acct.".len() + MAX_ENCODED);
        }
    }
}
