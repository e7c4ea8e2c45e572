//! The id that every answer carries: the client's own, if it is sane, else a new one.
//!
//! It is a name for logs, not a secret.

use std::cell::Cell;
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};

/// The header field, in requests and in answers.
pub const FIELD: HeaderName = HeaderName::from_static("x-request-id");

/// The longest id that is taken from a client, in bytes.
const LENGTH_MAX: usize = 128;

/// Makes the ids of one worker: a random beginning and a count, so no two of a fleet are alike and none costs a system
/// call.
#[derive(Debug)]
pub struct RequestIds {
    beginning: Box<str>,
    count: Cell<u64>,
}

impl RequestIds {
    /// With a beginning of its own.
    #[must_use]
    pub fn new() -> Self {
        // The hasher's keys are random and need no system call that could fail.
        Self { beginning: format!("{:016x}-", RandomState::new().hash_one(())).into(), count: Cell::new(0) }
    }

    /// The id of a request with these fields.
    #[must_use]
    pub fn of(&self, headers: &HeaderMap) -> HeaderValue {
        headers.get(FIELD).filter(|value| is_sane(value)).cloned().unwrap_or_else(|| self.fresh())
    }

    fn fresh(&self) -> HeaderValue {
        self.count.set(self.count.get().wrapping_add(1));
        let mut id = String::with_capacity(self.beginning.len() + 16);
        id.push_str(&self.beginning);
        write!(id, "{:x}", self.count.get()).expect("writing to a string cannot fail");
        HeaderValue::from_str(&id).expect("hexadecimal digits are a valid field value")
    }
}

impl Default for RequestIds {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a client's id may stand in logs and headers as it is: letters, digits and `-_.:=+/@`.
fn is_sane(value: &HeaderValue) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:=+/@".contains(byte);
    (1..=LENGTH_MAX).contains(&value.len()) && value.as_bytes().iter().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_of(value: &[u8]) -> HeaderValue {
        let mut headers = HeaderMap::new();
        headers.insert(FIELD, HeaderValue::from_bytes(value).unwrap());
        RequestIds::new().of(&headers)
    }

    #[test]
    fn a_sane_id_is_kept_and_any_other_replaced() {
        assert_eq!(id_of(b"01J-abc_9.x:1"), "01J-abc_9.x:1");
        for insane in [&b""[..], b"a b", b"\xff\xfe", b"a\tb", b"{x}", &[b'a'; 129]] {
            let id = id_of(insane);
            assert!(id.len() > 17 && id.as_bytes() != insane, "{id:?}");
        }
    }

    #[test]
    fn new_ids_differ() {
        let ids = RequestIds::new();
        assert_ne!(ids.of(&HeaderMap::new()), ids.of(&HeaderMap::new()));
    }
}
