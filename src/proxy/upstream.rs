//! The backends of each worker: their targets, whose turn it is, and the connections to them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::HeaderValue;
use reqwest::redirect::Policy;
use reqwest::{Client, Url};

use super::Failure;
use super::names::{Moves, names_of};

/// Unused connections that one worker keeps to one target. More than that many at once are opened and closed as needed.
const IDLE_CONNECTIONS_MAX: usize = 128;

/// One `[upstreams.NAME]` table, resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// Its targets, at least one: `http://` or `https://`, an authority, and nothing behind it.
    pub targets: Vec<Url>,
    /// Send the client's `Host` on instead of the target's authority.
    pub preserve_host: bool,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// How long the response head may take, counted from the last byte of the request that was sent.
    pub head_timeout: Duration,
    /// How long a body may stand still, in either direction.
    pub idle_timeout: Duration,
    /// How long an unused connection is kept. Below the idle time of common servers, which is 5 s.
    pub pool_idle_timeout: Duration,
    /// How often the host names of its targets are looked up again.
    pub resolve_every: Duration,
}

#[cfg(test)]
impl UpstreamSettings {
    /// The upstream `api` with these targets, patient.
    pub(super) fn for_tests<'a>(targets: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            name: Arc::from("api"),
            targets: targets.into_iter().map(|url| Url::parse(url).unwrap()).collect(),
            preserve_host: false,
            connect_timeout: Duration::from_secs(5),
            head_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(5),
            pool_idle_timeout: Duration::from_secs(4),
            resolve_every: Duration::from_secs(30),
        }
    }
}

/// Why [`Upstreams::new`] failed.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// An upstream has no target.
    #[error("upstream \"{0}\" has no target")]
    NoTarget(Arc<str>),
    /// A target is more or less than a scheme and an authority.
    #[error("target \"{target}\" of upstream \"{upstream}\" is not http:// or https:// and an authority")]
    Target {
        /// The upstream's name.
        upstream: Arc<str>,
        /// What was written.
        target: String,
    },
    /// The HTTP client cannot be made, for example because this machine has no root certificates.
    #[error("cannot make the HTTP client of upstream \"{upstream}\"")]
    Client {
        /// The upstream's name.
        upstream: Arc<str>,
        /// What the client says.
        source: reqwest::Error,
    },
}

/// The backends of all workers: made in one place, before they come into force, so that no worker has to wait for it.
#[derive(Debug, Default)]
pub struct Backends(Box<[Upstreams]>);

impl Backends {
    /// The same backends once for each of `workers` workers.
    ///
    /// # Errors
    ///
    /// As [`Upstreams::new`].
    pub fn new(settings: &[UpstreamSettings], workers: usize) -> Result<Self, BuildError> {
        (0..workers).map(|_| Upstreams::new(settings)).collect::<Result<_, _>>().map(Self)
    }

    /// As `settings` say from now on, where names have moved so often. What did not change keeps its connections.
    ///
    /// # Errors
    ///
    /// As [`Upstreams::new`].
    pub fn renewed(&self, settings: &[UpstreamSettings], moves: &Moves) -> Result<Self, BuildError> {
        self.0.iter().map(|upstreams| upstreams.renewed(settings, moves)).collect::<Result<_, _>>().map(Self)
    }

    /// Those of one worker, counted from 0.
    #[must_use]
    pub fn of_worker(&self, worker: usize) -> Option<&Upstreams> {
        self.0.get(worker)
    }
}

/// All backends, as one worker thread sees them. Each worker has its own, so no connection moves between threads.
#[derive(Debug, Default)]
pub struct Upstreams {
    by_name: HashMap<Arc<str>, Arc<Upstream>>,
    clients: Clients,
}

impl Upstreams {
    /// Builds the clients. No connection is opened before the first request.
    ///
    /// # Errors
    ///
    /// When an upstream has no target, a target is not a plain origin, or TLS cannot be set up.
    pub fn new(settings: &[UpstreamSettings]) -> Result<Self, BuildError> {
        install_crypto_provider();
        Self::default().renewed(settings, &Moves::new())
    }

    /// As `settings` say from now on. An upstream whose settings are the same stays what it is, with its connections; one
    /// whose connections are treated as before keeps those; one with a name that has moved begins with none. Requests in
    /// flight end on what they began with.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn renewed(&self, settings: &[UpstreamSettings], moves: &Moves) -> Result<Self, BuildError> {
        let mut clients = Clients::default();
        let mut by_name = HashMap::with_capacity(settings.len());
        for one in settings {
            let kind = ClientKind::of(one, moves);
            let client = clients.client_for(one, &kind, &self.clients)?;
            let upstream = match self.by_name.get(&one.name) {
                Some(same) if same.settings == *one && same.kind == kind => Arc::clone(same),
                _ => Arc::new(Upstream::new(one, kind, client)?),
            };
            by_name.insert(Arc::clone(&one.name), upstream);
        }
        Ok(Self { by_name, clients })
    }

    /// The upstream of this name.
    pub(super) fn get(&self, name: &str) -> Option<&Upstream> {
        self.by_name.get(name).map(|upstream| &**upstream)
    }
}

/// One backend.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) client: Client,
    pub(super) settings: UpstreamSettings,
    kind: ClientKind,
    targets: Vec<Target>,
    turn: AtomicUsize,
}

impl Upstream {
    fn new(settings: &UpstreamSettings, kind: ClientKind, client: Client) -> Result<Self, BuildError> {
        if settings.targets.is_empty() {
            return Err(BuildError::NoTarget(Arc::clone(&settings.name)));
        }
        let targets = settings.targets.iter().map(|url| {
            Target::new(url).ok_or_else(|| BuildError::Target {
                upstream: Arc::clone(&settings.name),
                target: url.to_string(),
            })
        });
        Ok(Self {
            client,
            settings: settings.clone(),
            kind,
            targets: targets.collect::<Result<_, _>>()?,
            turn: AtomicUsize::new(0),
        })
    }

    /// Every target once, beginning with the one whose turn it is.
    pub(super) fn targets_in_turn(&self) -> impl Iterator<Item = &Target> {
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % self.targets.len();
        let (before, from_first) = self.targets.split_at(first);
        from_first.iter().chain(before)
    }
}

/// One address of a backend, parsed once.
#[derive(Debug)]
pub(super) struct Target {
    origin: Url,
    /// What stands in `Host`: the authority, with the port unless it is the scheme's own.
    pub(super) authority: HeaderValue,
}

impl Target {
    /// `None` when `url` is more or less than an origin.
    fn new(url: &Url) -> Option<Self> {
        let plain = matches!(url.scheme(), "http" | "https")
            && url.username().is_empty()
            && url.password().is_none()
            && url.path() == "/"
            && url.query().is_none()
            && url.fragment().is_none();
        if !plain {
            return None;
        }
        let host = url.host_str()?;
        let authority = match url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_owned(),
        };
        let authority = HeaderValue::try_from(authority).ok()?;
        Some(Self { origin: url.clone(), authority })
    }

    /// The URL of `path` and `query` at this target.
    ///
    /// # Errors
    ///
    /// When the URL that would be sent is not the one that was decided on. The URL library folds dot segments,
    /// backslashes and more; none of them is in a canonical path, and if one ever were, the request must not leave.
    pub(super) fn url_for(&self, path: &str, query: Option<&str>) -> Result<Url, Failure> {
        let mut url = self.origin.clone();
        url.set_path(path);
        url.set_query(query);

        if url.path() != path {
            return Err(Failure::Internal("the path is not canonical"));
        }
        let same_origin = url.scheme() == self.origin.scheme()
            && url.host_str() == self.origin.host_str()
            && url.port() == self.origin.port();
        if !same_origin {
            return Err(Failure::Internal("the URL left its target"));
        }
        Ok(url)
    }
}

/// The HTTP clients made so far. Upstreams whose connections are treated alike share one, and so its setup.
#[derive(Debug, Default)]
struct Clients {
    made: Vec<(ClientKind, Client)>,
}

#[derive(Debug, PartialEq, Eq, Clone)]
struct ClientKind {
    connect_timeout: Duration,
    pool_idle_timeout: Duration,
    tls: bool,
    /// The names that have moved, and how often: connections from before belong to another client.
    moves: Moves,
}

impl ClientKind {
    fn of(settings: &UpstreamSettings, moves: &Moves) -> Self {
        let moved = names_of(settings).filter_map(|name| moves.get_key_value(name));
        Self {
            connect_timeout: settings.connect_timeout,
            pool_idle_timeout: settings.pool_idle_timeout,
            tls: settings.targets.iter().any(|target| target.scheme() == "https"),
            moves: moved.map(|(name, count)| (Arc::clone(name), *count)).collect(),
        }
    }
}

impl Clients {
    /// The client of an upstream: one that is here already, else one of `before`, else a new one.
    fn client_for(
        &mut self,
        settings: &UpstreamSettings,
        kind: &ClientKind,
        before: &Self,
    ) -> Result<Client, BuildError> {
        if let Some(client) = self.of(kind) {
            return Ok(client.clone());
        }
        let client = match before.of(kind) {
            Some(client) => client.clone(),
            None => build_client(kind)
                .map_err(|source| BuildError::Client { upstream: Arc::clone(&settings.name), source })?,
        };
        self.made.push((kind.clone(), client.clone()));
        Ok(client)
    }

    fn of(&self, kind: &ClientKind) -> Option<&Client> {
        self.made.iter().find(|(made, _)| made == kind).map(|(_, client)| client)
    }
}

/// A client that sends what it is given and returns what comes back.
///
/// There is no total timeout: a download may take hours. `forward` limits the wait for the head, `body` the pauses.
fn build_client(kind: &ClientKind) -> reqwest::Result<Client> {
    let builder = Client::builder()
        .no_proxy()
        .redirect(Policy::none())
        .referer(false)
        // Not at all: a policy that might would keep a copy of every request.
        .retry(reqwest::retry::never().max_retries_per_request(0))
        .http1_only()
        .tcp_nodelay(true)
        .connect_timeout(kind.connect_timeout)
        .pool_idle_timeout(kind.pool_idle_timeout)
        .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX);
    if kind.tls {
        return builder.build();
    }
    // Without TLS targets the root certificates are not read: a small container may have none.
    builder.tls_certs_only([]).build()
}

/// reqwest is compiled without a TLS provider, so the process needs one. The first one that is installed stays.
fn install_crypto_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another worker may have been faster; then its provider is as good.
        drop(rustls::crypto::ring::default_provider().install_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Option<Target> {
        Target::new(&Url::parse(url).unwrap())
    }

    #[test]
    fn a_target_is_an_origin_and_nothing_more() {
        for plain in ["http://127.0.0.1:9000", "https://api.example.test/", "http://[2001:db8::1]:80"] {
            assert!(target(plain).is_some(), "{plain}");
        }
        for more in [
            "ftp://api.example.test",
            "http://api.example.test/base",
            "http://api.example.test/?q",
            "http://api.example.test/#f",
            "http://user@api.example.test",
            "http://:secret@api.example.test",
        ] {
            assert!(target(more).is_none(), "{more}");
        }
    }

    #[test]
    fn the_authority_has_the_port_unless_it_is_the_schemes_own() {
        for (url, authority) in [
            ("http://api.example.test", "api.example.test"),
            ("http://api.example.test:80", "api.example.test"),
            ("https://api.example.test:80", "api.example.test:80"),
            ("http://[2001:db8::1]:9000", "[2001:db8::1]:9000"),
        ] {
            assert_eq!(target(url).unwrap().authority, authority, "{url}");
        }
    }

    #[test]
    fn canonical_paths_and_queries_keep_their_bytes() {
        let target = target("http://127.0.0.1:9000").unwrap();
        for (path, query) in [
            ("/", None),
            ("/", Some("")),
            ("/v1/a%2Fb%3Fc%2Cd%40e%25f/%7Eu/x%20y/@:!$&'()*+,;=-._~", None),
            ("/v1//x/", Some("b=2&a=1&b=3&bare&sig=%E9%FF&s=1;2&q=a%20b+c&x[0:1]&u=%7e&=&p=??")),
        ] {
            let url = target.url_for(path, query).unwrap();
            let mut expected = format!("http://127.0.0.1:9000{path}");
            if let Some(query) = query {
                expected.push('?');
                expected.push_str(query);
            }
            assert_eq!(url.as_str(), expected);
        }
    }

    #[test]
    fn an_apostrophe_in_a_query_is_the_one_legal_byte_that_changes() {
        let target = target("http://127.0.0.1:9000").unwrap();
        for byte in 0x21..0x7f_u8 {
            let legal = byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/?%[]".contains(&byte);
            if !legal {
                continue;
            }
            let query = format!("n=o{}k", char::from(byte));
            let url = target.url_for("/", Some(&query)).unwrap();
            let expected = query.replace('\'', "%27");
            assert_eq!(url.query(), Some(expected.as_str()));
        }
    }

    #[test]
    fn a_path_that_the_url_library_would_change_does_not_leave() {
        let target = target("http://127.0.0.1:9000").unwrap();
        for path in
            ["/a/../b", "/a/%2e%2e/b", "/a/./b", "/a\\..\\b", "/a b", "/a\tb", "/\"<>", "relative", "", "/é"]
        {
            let refused = target.url_for(path, None);
            assert!(matches!(refused, Err(Failure::Internal(_))), "{path:?} gave {refused:?}");
        }
        assert_eq!(target.url_for("//evil.test/x", None).unwrap().host_str(), Some("127.0.0.1"));
    }

    #[test]
    fn targets_take_turns_and_each_is_offered_once() {
        let targets = ["http://a.test", "http://b.test", "http://c.test"];
        let settings = UpstreamSettings::for_tests(targets);
        let upstreams = Upstreams::new(&[settings]).unwrap();
        let upstream = upstreams.get("api").unwrap();
        let offered = || {
            let names = upstream.targets_in_turn().map(|target| target.authority.to_str().unwrap());
            names.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(offered(), "a.test b.test c.test");
        assert_eq!(offered(), "b.test c.test a.test");
        assert_eq!(offered(), "c.test a.test b.test");
        assert_eq!(offered(), "a.test b.test c.test");
    }
}
