//! The host names of targets, and whether they have come to stand for other addresses.
//!
//! A connection is resolved when it is opened, and under steady traffic a pooled one is never closed: a backend that has moved
//! is called at its old address for as long as anybody answers there. So names are looked up again from time to time, and
//! when one has moved, the connections to it are made anew.
//!
//! Deliberately not here: choosing among several addresses, which the HTTP client does whenever it connects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::UpstreamSettings;

/// How often each name has moved so far. Names that have not are left out.
pub type Moves = BTreeMap<Arc<str>, u64>;

/// The names of all targets in use.
#[derive(Debug, Default)]
pub struct Names {
    known: HashMap<Arc<str>, Name>,
    lookups: JoinSet<(Arc<str>, io::Result<BTreeSet<IpAddr>>)>,
}

#[derive(Debug)]
struct Name {
    every: Duration,
    /// When it was last asked for.
    asked: Option<Instant>,
    /// What it stood for; `None` before the first answer.
    addresses: Option<BTreeSet<IpAddr>>,
    moved: u64,
}

impl Names {
    /// From now on follows the names of these upstreams, and no others.
    pub fn follow(&mut self, upstreams: &[UpstreamSettings]) {
        let mut wanted: HashMap<&str, Duration> = HashMap::new();
        for upstream in upstreams {
            for name in names_of(upstream) {
                let every = wanted.entry(name).or_insert(upstream.resolve_every);
                *every = upstream.resolve_every.min(*every);
            }
        }
        self.known.retain(|name, _| wanted.contains_key(&**name));
        for (name, every) in wanted {
            let new = || Name { every, asked: None, addresses: None, moved: 0 };
            self.known.entry(name.into()).or_insert_with(new).every = every;
        }
    }

    /// Begins to look up what is due. Only inside of a runtime; the system is asked on threads that serve nobody.
    pub fn look_up(&mut self, now: Instant) {
        if !self.lookups.is_empty() {
            // A resolver that does not answer is not asked ever more.
            return;
        }
        for (name, known) in &mut self.known {
            if known.asked.is_none_or(|asked| now.saturating_duration_since(asked) >= known.every) {
                known.asked = Some(now);
                let name = Arc::clone(name);
                self.lookups.spawn(async move {
                    let found = tokio::net::lookup_host((&*name, 0)).await;
                    let found = found.map(|found| found.map(|address| address.ip()).collect());
                    (name, found)
                });
            }
        }
    }

    /// Waits until a name has moved. Never ready while nothing is looked up.
    pub async fn moved(&mut self) {
        loop {
            match self.lookups.join_next().await {
                Some(Ok((name, Ok(addresses)))) => {
                    if self.answered(&name, addresses) {
                        return;
                    }
                }
                Some(Ok((name, Err(error)))) => {
                    tracing::debug!(%name, %error, "the name of a target cannot be looked up; its connections stay");
                }
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }

    /// How often each name has moved so far.
    #[must_use]
    pub fn moves(&self) -> Moves {
        let moved = self.known.iter().filter(|(_, known)| known.moved > 0);
        moved.map(|(name, known)| (Arc::clone(name), known.moved)).collect()
    }

    /// Whether the name stands for none of the addresses that it stood for before. One address more or less is no move: some name
    /// servers give a part of the addresses, and another part each time. Where a server is gone, its connections end by themselves.
    fn answered(&mut self, name: &str, addresses: BTreeSet<IpAddr>) -> bool {
        let Some(known) = self.known.get_mut(name) else { return false };
        if addresses.is_empty() {
            return false;
        }
        let moved = known.addresses.as_ref().is_some_and(|before| before.is_disjoint(&addresses));
        if moved {
            known.moved += 1;
            tracing::info!(name, ?addresses, "the name of a target has moved; its connections are made anew");
        }
        known.addresses = Some(addresses);
        moved
    }
}

/// The host names among the targets of an upstream. An address needs no looking up.
pub(super) fn names_of(upstream: &UpstreamSettings) -> impl Iterator<Item = &str> {
    upstream.targets.iter().filter_map(|target| target.domain())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> BTreeSet<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn only_names_are_followed() {
        let targets =
            ["http://a.example.test", "http://10.0.0.1:80", "http://[::1]:80", "http://A.example.test:81"];
        let upstream = UpstreamSettings::for_tests(targets);
        let mut names = Names::default();
        names.follow(std::slice::from_ref(&upstream));
        assert_eq!(names.known.keys().map(|name| &**name).collect::<Vec<_>>(), ["a.example.test"]);
        names.follow(&[]);
        assert!(names.known.is_empty());
    }

    #[test]
    fn a_name_has_moved_when_it_stands_for_nothing_that_it_stood_for_before() {
        let mut names = Names::default();
        names.follow(&[UpstreamSettings::for_tests(["http://a.example.test"])]);
        let mut answer = |texts: &[&str]| names.answered("a.example.test", addresses(texts));
        // The first answer is what connections were opened to already.
        assert!(!answer(&["10.0.0.1", "10.0.0.2"]));
        assert!(!answer(&["10.0.0.2", "10.0.0.1"]), "the order means nothing");
        assert!(!answer(&[]), "no address is no place to go");
        // A name server that gives a part of the addresses each time: every connection was made anew twice a minute.
        assert!(!answer(&["10.0.0.2"]));
        assert!(!answer(&["10.0.0.2", "10.0.0.3"]));
        assert!(!answer(&["10.0.0.3", "10.0.0.4"]));
        assert!(answer(&["10.0.0.1", "10.0.0.2"]));
        assert!(!answer(&["10.0.0.1", "10.0.0.2"]));
        assert!(answer(&["10.0.0.5"]));
        assert_eq!(names.moves(), Moves::from([("a.example.test".into(), 2)]));
        assert!(!names.answered("b.example.test", addresses(&["10.0.0.9"])));
    }
}
