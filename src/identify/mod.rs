//! Who is calling: from credentials and addresses to a [`Caller`].
//!
//! The choices, which the tests below pin:
//!
//! * A credential that is there must be good. A blank, unknown, over-long or repeated one is refused, and never counts as
//!   "no credential": otherwise a mistyped key would quietly get the anonymous plan.
//! * All of these look the same to the client, so nobody learns which keys exist.
//! * Two different credentials are a contradiction, whichever of them is good, and also when one is blank. The same key
//!   in two places is one credential.
//! * `Authorization` of another scheme than `Bearer` belongs to the upstream and says nothing about the caller here.

mod api_key;
mod caller;
mod client_address;

use std::net::IpAddr;
use std::sync::Arc;

use actix_web::http::header::{HeaderMap, HeaderName};
use smallvec::SmallVec;

pub use api_key::{CredentialSource, KeyEntry, KeyTable};
pub use caller::{Caller, account_id, network_id};
pub use client_address::ClientAddresses;

use crate::inbound::Inbound;
use api_key::Presented;

/// The longest credential that is looked up, in bytes.
pub const MAX_CREDENTIAL: usize = 4 * 1024;

/// Header fields that carried the caller's credential: the upstream must not see them. Empty for anonymous callers.
pub type CredentialHeaders = SmallVec<[HeaderName; 2]>;

/// Everything needed to say who calls.
#[derive(Debug, Clone)]
pub struct Identity {
    keys: KeyTable,
    credentials: Vec<CredentialSource>,
    anonymous: Option<Arc<str>>,
    addresses: ClientAddresses,
}

/// Why nobody can be named as the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdentifyError {
    /// No credential, and no plan for callers without one.
    #[error("a credential is needed")]
    Missing,
    /// A credential that is blank, unknown, repeated or longer than [`MAX_CREDENTIAL`]. Which of them is not said.
    #[error("the credential is not valid")]
    Unusable,
    /// Two different credentials.
    #[error("the request carries more than one credential")]
    Conflict,
}

impl Identity {
    /// Callers are known by `keys` that stand in one of `credentials`; all others are on the plan `anonymous`, each client
    /// network by itself, or refused when there is no such plan.
    #[must_use]
    pub fn new(
        keys: KeyTable,
        credentials: Vec<CredentialSource>,
        anonymous: Option<Arc<str>>,
        addresses: ClientAddresses,
    ) -> Self {
        Self { keys, credentials, anonymous, addresses }
    }

    /// Who calls, and the header fields that said so.
    ///
    /// # Errors
    /// When the request names nobody, nobody known, or two.
    pub fn caller(&self, inbound: &Inbound<'_>) -> Result<(Caller, CredentialHeaders), IdentifyError> {
        let (presented, carried_by) = self.read(inbound.headers)?;
        match presented {
            Some(presented) => Ok((self.known(presented)?, carried_by)),
            None => Ok((self.unknown(inbound)?, carried_by)),
        }
    }

    /// The address that a request counts by when it has no credential.
    #[must_use]
    pub fn client_address(&self, inbound: &Inbound<'_>) -> IpAddr {
        self.addresses.client(inbound.peer, inbound.headers)
    }

    /// Whether a peer is a proxy that may say for whom it speaks.
    #[must_use]
    pub fn trusts(&self, peer: IpAddr) -> bool {
        self.addresses.trusts(peer)
    }

    /// The one credential of a request, from wherever it may stand.
    fn read<'a>(
        &self,
        headers: &'a HeaderMap,
    ) -> Result<(Option<Presented<'a>>, CredentialHeaders), IdentifyError> {
        let mut only: Option<Presented<'a>> = None;
        let mut carried_by = CredentialHeaders::new();
        for source in &self.credentials {
            for presented in source.read(headers) {
                let first = *only.get_or_insert(presented);
                if first.value != presented.value {
                    return Err(IdentifyError::Conflict);
                }
                only = Some(Presented { repeated: first.repeated || presented.repeated, ..first });
                if !carried_by.contains(source.header()) {
                    carried_by.push(source.header().clone());
                }
            }
        }
        Ok((only, carried_by))
    }

    fn known(&self, presented: Presented<'_>) -> Result<Caller, IdentifyError> {
        let Presented { value, repeated } = presented;
        if repeated || value.is_empty() || value.len() > MAX_CREDENTIAL {
            return Err(IdentifyError::Unusable);
        }
        let key = self.keys.find(value).ok_or(IdentifyError::Unusable)?;
        Ok(key.caller())
    }

    fn unknown(&self, inbound: &Inbound<'_>) -> Result<Caller, IdentifyError> {
        let plan = self.anonymous.as_ref().ok_or(IdentifyError::Missing)?;
        let network = self.addresses.network(self.client_address(inbound));
        Ok(Caller {
            id: network_id(&network),
            account: None,
            plan: Arc::clone(plan),
            key: None,
            anchor_day: 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::Method;
    use actix_web::http::header::HeaderValue;
    use proptest::prelude::*;
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::inbound::{CanonicalPath, PathRules};

    const LONGEST: &str = "k-longest";

    fn identity(anonymous: Option<&str>) -> Identity {
        let mut keys = KeyTable::new();
        let longest = LONGEST.repeat(MAX_CREDENTIAL).into_bytes();
        for (text, account, plan) in [
            (b"k-free-1".as_slice(), "acme", "free"),
            (b"k-pro-1", "globex", "pro"),
            (b"\xff\xfe", "bytes", "free"),
            // Nobody should configure these two; they must not work all the same.
            (b"", "blank", "pro"),
            (&longest[..=MAX_CREDENTIAL], "too-long", "pro"),
            (&longest[..MAX_CREDENTIAL], "long", "pro"),
        ] {
            keys.insert(
                Sha256::digest(text).into(),
                KeyEntry::new(account.into(), account.into(), plan.into()),
            );
        }
        Identity::new(
            keys,
            vec![
                CredentialSource::KeyHeader(HeaderName::from_static("x-api-key")),
                CredentialSource::KeyBearer,
            ],
            anonymous.map(Arc::from),
            ClientAddresses { trusted_proxies: vec!["127.0.0.1/32".parse().unwrap()], ipv6_prefix: 64 },
        )
    }

    type Line<'a> = (&'a str, &'a [u8]);

    /// The caller's id and plan and the names of the fields that said so.
    fn identify(identity: &Identity, peer: &str, lines: &[Line<'_>]) -> Result<String, IdentifyError> {
        let mut headers = HeaderMap::new();
        for &(name, value) in lines {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let inbound = Inbound {
            method: &Method::GET,
            path: CanonicalPath::parse("/", PathRules::default()).unwrap(),
            headers: &headers,
            peer: peer.parse().unwrap(),
        };
        let (caller, carried_by) = identity.caller(&inbound)?;
        let mut answer = format!("{} {}", caller.id, caller.plan);
        for name in carried_by {
            answer.push_str(" -");
            answer.push_str(name.as_str());
        }
        Ok(answer)
    }

    /// The same with and without an anonymous plan.
    #[track_caller]
    fn check(lines: &[Line<'_>], expected: Result<&str, IdentifyError>) {
        for anonymous in [None, Some("anonymous")] {
            let answer = identify(&identity(anonymous), "203.0.113.1", lines);
            assert_eq!(answer.as_deref().map_err(|&error| error), expected, "{lines:?} {anonymous:?}");
        }
    }

    const FREE: Result<&str, IdentifyError> = Ok("acct.acme free -x-api-key");
    const FREE_BEARER: Result<&str, IdentifyError> = Ok("acct.acme free -authorization");
    const UNUSABLE: Result<&str, IdentifyError> = Err(IdentifyError::Unusable);
    const CONFLICT: Result<&str, IdentifyError> = Err(IdentifyError::Conflict);

    /// ID-1: everybody without a key shared one bucket, or nobody was limited.
    #[test]
    fn callers_without_a_credential_are_told_apart_by_network() {
        let open = identity(Some("anonymous"));
        for (peer, forwarded, expected) in [
            ("203.0.113.1", "198.51.100.7", "net.203.0.113.1 anonymous"),
            ("203.0.113.2", "198.51.100.7", "net.203.0.113.2 anonymous"),
            ("127.0.0.1", "198.51.100.7", "net.198.51.100.7 anonymous"),
            ("::ffff:127.0.0.1", "2001:db8::7", "net.2001%3Adb8%3A%3A%2F64 anonymous"),
            ("2001:db8:0:1::5", "", "net.2001%3Adb8%3A0%3A1%3A%3A%2F64 anonymous"),
        ] {
            let answer = identify(&open, peer, &[("x-forwarded-for", forwarded.as_bytes())]);
            assert_eq!(answer.as_deref(), Ok(expected));
        }
        assert_eq!(identify(&identity(None), "203.0.113.1", &[]), Err(IdentifyError::Missing));
    }

    #[test]
    fn a_known_key_names_its_account() {
        check(&[("x-api-key", b"k-free-1")], FREE);
        check(&[("x-api-key", b"k-pro-1")], Ok("acct.globex pro -x-api-key"));
        check(&[("authorization", b"Bearer k-free-1")], FREE_BEARER);
    }

    /// ID-2: a blank key became an identity of its own, or switched the limit off.
    #[test]
    fn a_blank_credential_is_not_the_same_as_none() {
        for blank in [
            ("x-api-key", b"".as_slice()),
            ("x-api-key", b"  \t"),
            ("authorization", b"Bearer"),
            ("authorization", b"Bearer  "),
        ] {
            check(&[blank], UNUSABLE);
        }
        check(&[("x-api-key", b""), ("authorization", b"Bearer")], UNUSABLE);
        check(&[("x-api-key", b""), ("authorization", b"Bearer k-free-1")], CONFLICT);
        check(&[("x-api-key", b"k-free-1"), ("authorization", b"Bearer ")], CONFLICT);
    }

    /// ID-5: bytes outside ASCII hit an unwrap.
    #[test]
    fn credentials_are_opaque_bytes() {
        check(&[("x-api-key", b"\xff\xfe")], Ok("acct.bytes free -x-api-key"));
        for unknown in [b"\xfe\xff".as_slice(), b"*", b"?", b"[", b"%0d%0a", b"a\tb", b"k-free-1,k-free-1"] {
            check(&[("x-api-key", unknown)], UNUSABLE);
            check(&[("authorization", &[b"Bearer ".as_slice(), unknown].concat())], UNUSABLE);
        }
    }

    /// ID-7: scheme and field names are case-insensitive, keys are not.
    #[test]
    fn letter_case_matters_in_the_key_only() {
        check(&[("authorization", b"bearer k-free-1")], FREE_BEARER);
        check(&[("AUTHORIZATION", b"BEARER  k-free-1")], FREE_BEARER);
        check(&[("x-API-key", b"k-free-1")], FREE);
        check(&[("authorization", b"Bearer K-FREE-1")], UNUSABLE);
    }

    #[test]
    fn a_credential_has_an_end() {
        let longest = LONGEST.repeat(MAX_CREDENTIAL).into_bytes();
        check(&[("x-api-key", &longest[..MAX_CREDENTIAL])], Ok("acct.long pro -x-api-key"));
        check(&[("x-api-key", &longest[..=MAX_CREDENTIAL])], UNUSABLE);
    }

    #[test]
    fn two_credentials_must_be_the_same() {
        let (free, pro) = (b"k-free-1".as_slice(), b"k-pro-1".as_slice());
        check(&[("x-api-key", free), ("x-api-key", pro)], CONFLICT);
        check(&[("x-api-key", free), ("authorization", b"Bearer k-pro-1")], CONFLICT);
        check(&[("authorization", b"Bearer k-free-1"), ("authorization", b"Bearer k-pro-1")], CONFLICT);
        check(&[("x-api-key", b"wrong"), ("authorization", b"Bearer k-pro-1")], CONFLICT);
        // Some clients send one key in both places: both are kept from the upstream.
        check(
            &[("authorization", b"Bearer k-free-1"), ("x-api-key", free)],
            Ok("acct.acme free -x-api-key -authorization"),
        );
        // One field twice is malformed, even with one value.
        check(&[("x-api-key", free), ("x-api-key", free)], UNUSABLE);
        check(&[("authorization", b"Basic dTpw"), ("authorization", b"Bearer k-free-1")], UNUSABLE);
    }

    #[test]
    fn another_scheme_is_left_for_the_upstream() {
        let open = identity(Some("anonymous"));
        let basic: Line<'_> = ("authorization", b"Basic dTpw");
        assert_eq!(identify(&open, "203.0.113.1", &[basic]).as_deref(), Ok("net.203.0.113.1 anonymous"));
        assert_eq!(identify(&identity(None), "203.0.113.1", &[basic]), Err(IdentifyError::Missing));
        check(&[("x-api-key", b"k-free-1"), basic], FREE);
    }

    #[test]
    fn places_that_are_not_configured_are_not_read() {
        let mut closed = identity(Some("anonymous"));
        closed.credentials.clear();
        let lines: [Line<'_>; 2] = [("x-api-key", b"k-free-1"), ("authorization", b"Bearer k-free-1")];
        assert_eq!(identify(&closed, "203.0.113.1", &lines).as_deref(), Ok("net.203.0.113.1 anonymous"));
    }

    proptest! {
        /// Nobody but the holders of keys is on a plan with keys, whatever is sent.
        #[test]
        fn made_up_credentials_name_nobody(value in prop::collection::vec(prop_oneof![0x20..=0x7e_u8, 0x80_u8..], 0..64)) {
            prop_assume!(!matches!(value.trim_ascii(), b"k-free-1" | b"k-pro-1" | b"\xff\xfe"));
            for name in ["x-api-key", "authorization"] {
                match identify(&identity(Some("anonymous")), "203.0.113.1", &[(name, &value)]) {
                    Ok(answer) => {
                        prop_assert_eq!(name, "authorization");
                        prop_assert_eq!(answer, "net.203.0.113.1 anonymous");
                    }
                    Err(error) => prop_assert_eq!(error, IdentifyError::Unusable),
                }
            }
        }
    }
}
