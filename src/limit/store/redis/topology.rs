//! Where Redis is, as the operator wrote it: plain values, and nothing that connects.

use secrecy::SecretString;

/// How Redis nodes form one store.
#[derive(Debug, Clone)]
pub enum Topology {
    /// One server.
    Standalone(Server),
    /// A cluster, by some of its nodes.
    Cluster(Vec<Server>),
}

/// One server, and how one is let in there.
#[derive(Debug, Clone)]
pub struct Server {
    /// Its URL, which may hold a user and a password.
    pub url: SecretString,
}

impl From<SecretString> for Server {
    fn from(url: SecretString) -> Self {
        Self { url }
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
