//! API keys: where they stand in a request, and whose they are.
//!
//! A key is opaque bytes. Only its SHA-256 is known here, and the lookup is by that hash: how long it takes says nothing
//! about how many keys there are or how much of one has been guessed, and a copy of the table is no copy of the keys.
//! Keys are long random texts, so a plain hash is enough; a slow one would let strangers spend the gateway's time.

use std::collections::HashMap;
use std::sync::Arc;

use actix_web::http::header::{self, HeaderMap, HeaderName};
use sha2::{Digest, Sha256};

use super::caller::{self, Caller};

/// Where a credential may stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialSource {
    /// An API key in a header field of this (lower-case) name.
    KeyHeader(HeaderName),
    /// An API key as `Authorization: Bearer KEY`.
    KeyBearer,
}

/// One credential of a request, as it was sent. No `Debug`: it would show the key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Presented<'a> {
    /// Without the scheme and the white space around it. May be empty: present, and blank.
    pub(super) value: &'a [u8],
    /// Whether its field was there more than once.
    pub(super) repeated: bool,
}

impl CredentialSource {
    /// The header field that it is read from.
    pub(super) fn header(&self) -> &HeaderName {
        match self {
            Self::KeyHeader(name) => name,
            Self::KeyBearer => &header::AUTHORIZATION,
        }
    }

    /// Every credential that stands here, in the order of the field lines.
    ///
    /// `Authorization` of another scheme is not ours: it is left for the upstream.
    pub(super) fn read<'a>(&self, headers: &'a HeaderMap) -> impl Iterator<Item = Presented<'a>> {
        let lines = headers.get_all(self.header());
        let repeated = lines.len() > 1;
        lines
            .map(|line| trim(line.as_bytes()))
            .filter_map(|line| match self {
                Self::KeyHeader(_) => Some(line),
                Self::KeyBearer => bearer(line),
            })
            .map(move |value| Presented { value, repeated })
    }
}

/// What stands behind `Bearer`, in whatever letter case (RFC 9110 section 11.1).
fn bearer(line: &[u8]) -> Option<&[u8]> {
    let scheme_length = line.iter().position(is_blank).unwrap_or(line.len());
    let (scheme, key) = line.split_at(scheme_length);
    scheme.eq_ignore_ascii_case(b"bearer").then(|| trim(key))
}

/// Without optional white space (RFC 9110 section 5.6.3) at both ends.
fn trim(bytes: &[u8]) -> &[u8] {
    let Some(first) = bytes.iter().position(|byte| !is_blank(byte)) else {
        return &[];
    };
    let last = bytes.iter().rposition(|byte| !is_blank(byte)).unwrap_or(first);
    &bytes[first..=last]
}

fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// An API key as the configuration knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// The id of the key: its name in the `keys` table.
    pub id: Arc<str>,
    /// The account that owns it.
    pub account: Arc<str>,
    /// The plan of the account.
    pub plan: Arc<str>,
    /// The day on which the account's months begin, from 1 to 31.
    pub anchor_day: u8,
    /// The account's caller id, made once so that requests need not.
    caller_id: Arc<str>,
}

impl KeyEntry {
    /// The key `id`, which belongs to `account` on `plan`. The account's months begin on the first.
    #[must_use]
    pub fn new(id: Arc<str>, account: Arc<str>, plan: Arc<str>) -> Self {
        let caller_id = caller::account_id(&account);
        Self { id, account, plan, anchor_day: 1, caller_id }
    }

    /// The same key of an account whose months begin on this day.
    #[must_use]
    pub fn anchored(self, day: u8) -> Self {
        Self { anchor_day: day, ..self }
    }

    /// Who calls with this key: its account, so that all keys of an account share its counters.
    #[must_use]
    pub fn caller(&self) -> Caller {
        Caller {
            id: Arc::clone(&self.caller_id),
            account: Some(Arc::clone(&self.account)),
            plan: Arc::clone(&self.plan),
            key: Some(Arc::clone(&self.id)),
            anchor_day: self.anchor_day,
        }
    }
}

/// All API keys, by the SHA-256 of the whole key text.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct KeyTable {
    entries: HashMap<[u8; 32], KeyEntry>,
}

impl KeyTable {
    /// A table without keys.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the key whose text has this SHA-256. Gives back the entry that stood there before, if the same key was added
    /// already.
    pub fn insert(&mut self, sha256: [u8; 32], entry: KeyEntry) -> Option<KeyEntry> {
        self.entries.insert(sha256, entry)
    }

    /// The entry of a key, by its text as the client sent it.
    #[must_use]
    pub fn find(&self, presented: &[u8]) -> Option<&KeyEntry> {
        let sha256: [u8; 32] = Sha256::digest(presented).into();
        self.entries.get(&sha256)
    }

    /// All entries, in no particular order.
    pub fn entries(&self) -> impl Iterator<Item = &KeyEntry> {
        self.entries.values()
    }

    /// How many keys there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Says how many keys there are, and nothing that could be searched for in a list of leaked ones.
impl std::fmt::Debug for KeyTable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("KeyTable").field("keys", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    #[track_caller]
    fn check(source: &CredentialSource, lines: &[(&str, &[u8])], expected: &[&[u8]]) {
        let mut headers = HeaderMap::new();
        for &(name, value) in lines {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let values: Vec<&[u8]> = source.read(&headers).map(|presented| presented.value).collect();
        assert_eq!(values, expected, "{lines:?}");
    }

    #[test]
    fn a_key_header_is_taken_whole() {
        let source = CredentialSource::KeyHeader(HeaderName::from_static("x-api-key"));
        check(&source, &[], &[]);
        check(&source, &[("authorization", b"Bearer k")], &[]);
        check(&source, &[("X-API-Key", b"k-free-1")], &[b"k-free-1"]);
        check(&source, &[("x-api-key", b" \tk 1, k 2\t ")], &[b"k 1, k 2"]);
        check(&source, &[("x-api-key", b"")], &[b""]);
        check(&source, &[("x-api-key", b"  \t")], &[b""]);
        check(&source, &[("x-api-key", b"\xff\xfe*?[%0d%0a")], &[b"\xff\xfe*?[%0d%0a"]);
        check(&source, &[("x-api-key", b"a"), ("x-api-key", b"b")], &[b"a", b"b"]);
    }

    /// ID-7: the letter case of the scheme does not matter, that of the key does.
    #[test]
    fn a_bearer_key_stands_behind_its_scheme() {
        let source = CredentialSource::KeyBearer;
        for line in ["Bearer k-1", "bearer k-1", "BEARER  k-1", "bEaReR\t k-1 "] {
            check(&source, &[("authorization", line.as_bytes())], &[b"k-1"]);
        }
        check(&source, &[("authorization", b"Bearer K-1")], &[b"K-1"]);
        check(&source, &[("authorization", b"Bearer a b")], &[b"a b"]);
        for blank in ["Bearer", "Bearer ", "  bearer\t"] {
            check(&source, &[("authorization", blank.as_bytes())], &[b""]);
        }
        for other in ["", "Basic dTpw", "BearerX k", "Bearer:k", "k-1", "Basic Bearer k"] {
            check(&source, &[("authorization", other.as_bytes())], &[]);
        }
    }

    #[test]
    fn a_repeated_field_is_marked() {
        let mut headers = HeaderMap::new();
        headers.append(header::AUTHORIZATION, HeaderValue::from_static("Basic dTpw"));
        headers.append(header::AUTHORIZATION, HeaderValue::from_static("Bearer k"));
        let presented: Vec<_> = CredentialSource::KeyBearer.read(&headers).collect();
        assert!(presented == [Presented { value: b"k", repeated: true }]);
    }

    fn entry(id: &str) -> KeyEntry {
        KeyEntry::new(id.into(), "acme".into(), "free".into())
    }

    #[test]
    fn keys_are_found_by_their_whole_text_only() {
        let mut keys = KeyTable::new();
        assert!(keys.is_empty());
        assert_eq!(keys.insert(Sha256::digest("k-free-1").into(), entry("one")), None);
        assert_eq!(keys.insert(Sha256::digest("k-free-2").into(), entry("two")), None);
        assert_eq!(keys.find(b"k-free-1").map(|key| &*key.id), Some("one"));
        assert_eq!(keys.find(b"k-free-2").map(|key| &*key.id), Some("two"));
        for wrong in ["", "k-free-", "K-FREE-1", "k-free-1 ", "k-free-11"] {
            assert_eq!(keys.find(wrong.as_bytes()), None);
        }
        assert_eq!(keys.insert(Sha256::digest("k-free-2").into(), entry("again")), Some(entry("two")));
        assert_eq!(keys.len(), 2);
    }

    /// The hash in the configuration is that of any `sha256sum`.
    #[test]
    fn the_hash_is_plain_sha_256() {
        let mut keys = KeyTable::new();
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let mut sha256 = [0; 32];
        for (byte, digits) in sha256.iter_mut().zip(abc.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
        }
        keys.insert(sha256, entry("abc"));
        assert_eq!(keys.find(b"abc").map(|key| &*key.id), Some("abc"));
    }

    #[test]
    fn keys_of_one_account_are_one_caller() {
        for key in ["one", "two"] {
            let expected = Caller {
                id: "acct.acme".into(),
                account: Some("acme".into()),
                plan: "free".into(),
                key: Some(key.into()),
                anchor_day: 1,
            };
            assert_eq!(entry(key).caller(), expected);
        }
    }

    #[test]
    fn debugging_shows_no_hash() {
        let mut keys = KeyTable::new();
        keys.insert([0xab; 32], entry("one"));
        assert_eq!(format!("{keys:?}"), "KeyTable { keys: 1 }");
    }
}
