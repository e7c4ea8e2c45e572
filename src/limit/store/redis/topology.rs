//! Where Redis is and how one is let in, as the operator wrote it: plain values, and nothing that connects.

use std::path::PathBuf;

use secrecy::SecretString;

/// How Redis nodes form one store.
#[derive(Debug, Clone)]
pub enum Topology {
    /// One server.
    Standalone(Server),
    /// A cluster, by some of its nodes.
    Cluster(Vec<Server>),
    /// One primary with replicas, of which Sentinels say which one is the primary.
    Sentinel(Box<SentinelSettings>),
}

/// Sentinels, and the servers that they watch.
#[derive(Debug, Clone)]
pub struct SentinelSettings {
    /// The Sentinels themselves.
    pub sentinels: Vec<Server>,
    /// What they call the primary.
    pub master_name: String,
    /// Who we are to the primary. Whether it is reached by TLS, the URLs of the Sentinels say.
    pub login: Login,
}

/// One server, and how one is let in there.
#[derive(Debug, Clone)]
pub struct Server {
    /// Its URL, which may hold a user and a password.
    pub url: SecretString,
    /// The file that the URL came from, to be read anew for every attempt to connect.
    pub url_file: Option<PathBuf>,
    /// Who we are, unless the URL says it.
    pub login: Login,
    /// Certificates, for a URL that begins with `rediss`.
    pub tls: Tls,
}

/// Who we are to a server.
#[derive(Debug, Clone, Default)]
pub struct Login {
    /// The user; none is the server's default user.
    pub username: Option<String>,
    /// The password; none is no login.
    pub password: Option<Password>,
}

/// A password, or where it is.
#[derive(Debug, Clone)]
pub enum Password {
    /// This one.
    Given(SecretString),
    /// The one in this file, read anew for every attempt to connect: so it can be rotated.
    File(PathBuf),
}

/// Certificates, in PEM files that are read anew for every attempt to connect.
#[derive(Debug, Clone, Default)]
pub struct Tls {
    /// Who may have signed the server's certificate; none: the public authorities.
    pub ca_file: Option<PathBuf>,
    /// The certificate and the key that we show; none: we show none.
    pub own: Option<Identity>,
}

/// A certificate and its key.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The certificate, with those between it and the authority.
    pub cert_file: PathBuf,
    /// Its key.
    pub key_file: PathBuf,
}

impl Tls {
    /// Whether nothing is asked for beyond the URL.
    pub(super) fn is_plain(&self) -> bool {
        self.ca_file.is_none() && self.own.is_none()
    }
}

impl From<SecretString> for Server {
    fn from(url: SecretString) -> Self {
        Self { url, url_file: None, login: Login::default(), tls: Tls::default() }
    }
}

impl From<&str> for Server {
    fn from(url: &str) -> Self {
        SecretString::from(url).into()
    }
}

impl From<String> for Server {
    fn from(url: String) -> Self {
        SecretString::from(url).into()
    }
}
