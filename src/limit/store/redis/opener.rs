//! How one link to one server is opened: address, user, password, TLS, socket settings, and how long it may take.

use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::io::tcp::TcpSettings;
use ::redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError,
};
use secrecy::ExposeSecret as _;

use super::topology::Server;

/// How long one attempt to connect may take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// A peer that acknowledges nothing for so long is gone, even if nobody said so.
const USER_TIMEOUT: Duration = Duration::from_secs(2);

/// Why an address cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the address of Redis cannot be used: {0}")]
pub struct OpenError(String);

impl From<RedisError> for OpenError {
    fn from(error: RedisError) -> Self {
        // The category only: the detail may repeat the URL, and so its password.
        Self(error.category().to_owned())
    }
}

/// What opens links to one server.
#[derive(Clone)]
pub(super) struct Opener {
    info: ConnectionInfo,
}

impl Opener {
    pub(super) fn new(server: &Server) -> Result<Self, OpenError> {
        let info = server.url.expose_secret().into_connection_info()?.set_tcp_settings(tcp());
        // The library looks at the whole address only now.
        Client::open(info.clone())?;
        Ok(Self { info })
    }

    /// The same way in, at another address: that of a node which another one has named.
    pub(super) fn at(&self, host: &str, port: u16) -> Self {
        let host = host.to_owned();
        let addr = match self.info.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Self { info: self.info.clone().set_addr(addr) }
    }

    /// Where it leads, without anything secret: `host:port`.
    pub(super) fn address(&self) -> String {
        self.info.addr().to_string()
    }

    /// Opens a link. What is asked over it waits for ever: the deadline is the caller's, one around the whole step.
    pub(super) async fn open(&self) -> Result<MultiplexedConnection, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(None);
        Client::open(self.info.clone())?.get_multiplexed_async_connection_with_config(&config).await
    }
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The address and nothing else: the rest may hold a password.
        f.debug_tuple("Opener").field(&self.info.addr().to_string()).finish()
    }
}

/// The settings of every socket to Redis.
pub(super) fn tcp() -> TcpSettings {
    TcpSettings::default().set_nodelay(true).set_user_timeout(USER_TIMEOUT)
}
