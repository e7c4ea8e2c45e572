//! Redis Sentinel: which server is the primary is asked at every attempt to connect, and looked at while connected.
//!
//! The client library can do that too, but it waits for its own timeouts, and it never looks again while a connection works:
//! a primary that was replaced and still runs would be charged for seconds.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use ::redis::Value;

use super::errors::{self, NotOpened};
use super::link::Link;
use super::opener::{CONNECT_TIMEOUT, OpenError, Opener};
use super::topology::{SentinelSettings, Server};
use crate::limit::store::FailureKind;

/// How long one Sentinel may take to answer. A dead one is passed over after that, and asked last the next time.
const SENTINEL_TIMEOUT: Duration = Duration::from_millis(200);

/// Where the primary is.
type Address = (String, u16);

/// The Sentinels of one primary, and the way into it.
pub(super) struct Sentinels {
    sentinels: Vec<Opener>,
    master_name: String,
    /// The way into any server that the Sentinels name.
    primary: Opener,
    /// The one to ask first: that which answered last.
    first: Cell<usize>,
    /// A link to the one that was asked last.
    link: RefCell<Option<(usize, Link)>>,
    /// The primary in use.
    current: RefCell<Option<Address>>,
}

impl Sentinels {
    pub(super) fn new(settings: &SentinelSettings) -> Result<Self, OpenError> {
        let sentinels = settings.sentinels.iter().map(Opener::new).collect::<Result<Vec<_>, _>>()?;
        // Any of them shows whether there is TLS, and by which certificates.
        let like = settings.sentinels.first();
        let primary = like.map(|like| Server { login: settings.login.clone(), ..like.clone() });
        let primary = primary.as_ref().map(Opener::new).transpose()?;
        let Some(primary) = primary else { return Err(OpenError::new("there is no Sentinel")) };
        Ok(Self {
            sentinels,
            master_name: settings.master_name.clone(),
            primary,
            first: Cell::new(0),
            link: RefCell::new(None),
            current: RefCell::new(None),
        })
    }

    /// How long an attempt may take when all but the last Sentinel are dead.
    pub(super) fn patience(&self) -> Duration {
        let sentinels = u32::try_from(self.sentinels.len()).unwrap_or(u32::MAX);
        SENTINEL_TIMEOUT.saturating_mul(sentinels).saturating_add(CONNECT_TIMEOUT * 2)
    }

    /// Opens a link to the primary.
    pub(super) async fn open(&self) -> Result<Link, NotOpened> {
        let mut tried: Vec<Address> = Vec::new();
        let mut failure = None;
        let first = self.first.get();
        for turn in 0..self.sentinels.len() {
            let at = (first + turn) % self.sentinels.len();
            match self.address_from(at).await {
                Ok(address) if tried.contains(&address) => {}
                Ok(address) => match self.primary.at(&address.0, address.1).open_primary().await {
                    Ok(link) => {
                        self.current.replace(Some(address));
                        return Ok(link);
                    }
                    Err(error) => {
                        tried.push(address);
                        // What the primary says counts for more than that a Sentinel is away.
                        failure = Some(error);
                    }
                },
                Err(error) => {
                    failure.get_or_insert(error);
                }
            }
        }
        Err(failure.unwrap_or_else(|| no_primary("the Sentinels", "none was asked")))
    }

    /// The address of the primary in use.
    pub(super) fn primary(&self) -> Option<String> {
        self.current.borrow().as_ref().map(|(host, port)| format!("{host}:{port}"))
    }

    /// A link to another primary than the one in use, if the Sentinels name another one and it is one.
    pub(super) async fn look(&self) -> Option<Link> {
        let at = self.first.get();
        let Ok(address) = self.address_from(at).await else {
            self.first.set((at + 1) % self.sentinels.len());
            return None;
        };
        let is_current = self.current.borrow().as_ref() == Some(&address);
        if is_current {
            return None;
        }
        let opener = self.primary.at(&address.0, address.1);
        // A Sentinel may be behind; the server itself knows.
        let link = opener.open_primary().await.ok()?;
        self.current.replace(Some(address));
        Some(link)
    }

    async fn address_from(&self, at: usize) -> Result<Address, NotOpened> {
        let sentinel = &self.sentinels[at];
        let answer = tokio::time::timeout(SENTINEL_TIMEOUT, self.ask_for_address(at)).await;
        let failure = match answer {
            Ok(Ok(Some(address))) => {
                self.first.set(at);
                return Ok(address);
            }
            Ok(Ok(None)) => no_primary(sentinel.address(), "it knows of no such master name"),
            Ok(Err(failure)) => failure,
            Err(_) => sentinel.late(),
        };
        self.link.replace(None);
        Err(failure)
    }

    async fn ask_for_address(&self, at: usize) -> Result<Option<Address>, NotOpened> {
        let sentinel = &self.sentinels[at];
        let open = self.link.borrow().clone();
        let mut link = match open {
            Some((whose, link)) if whose == at => link,
            _ => sentinel.open().await?,
        };
        let mut question = ::redis::cmd("SENTINEL");
        question.arg("get-master-addr-by-name").arg(&self.master_name);
        let answer = link.ask(&question).await.map_err(|error| {
            if errors::is_unknown_command(&error) {
                return no_primary(sentinel.address(), "it is no Sentinel");
            }
            sentinel.not_opened(&error)
        })?;
        self.link.replace(Some((at, link)));
        Ok(address(&answer))
    }
}

fn no_primary(server: &str, reason: &str) -> NotOpened {
    NotOpened { kind: FailureKind::NoPrimary, server: server.to_owned(), reason: reason.to_owned() }
}

/// A host and a port, or nothing.
fn address(answer: &Value) -> Option<Address> {
    let Value::Array(parts) = answer else { return None };
    let [Value::BulkString(host), Value::BulkString(port)] = parts.as_slice() else { return None };
    let port = std::str::from_utf8(port).ok()?.parse().ok()?;
    Some((String::from_utf8(host.clone()).ok()?, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(words: &[&str]) -> Value {
        Value::Array(words.iter().map(|word| Value::BulkString(word.as_bytes().to_vec())).collect())
    }

    #[test]
    fn only_a_host_and_a_port_is_an_address() {
        assert_eq!(address(&texts(&["10.0.0.1", "6379"])), Some(("10.0.0.1".to_owned(), 6379)));
        let nonsense = [Value::Nil, Value::Int(1), texts(&["host"]), texts(&["host", "99999"]), texts(&[])];
        for answer in nonsense {
            assert_eq!(address(&answer), None, "{answer:?}");
        }
    }
}
