//! How one link to one server is opened: address, user, password, TLS, socket settings, and how long it may take.
//!
//! Files with passwords and certificates are read anew for every attempt, so a rotated one is used without a restart. The
//! library would log in by itself, but it keeps silent about why it was not let in; so we do.

use std::path::Path;
use std::time::Duration;

use ::redis::io::tcp::TcpSettings;
use ::redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo,
    ProtocolVersion, RedisConnectionInfo, RedisError, TlsCertificates,
};
use secrecy::{ExposeSecret as _, SecretSlice, SecretString};

use super::errors::{self, NotOpened};
use super::link::{Link, says_replica};
use super::topology::{Password, Server};
use crate::file;
use crate::limit::store::FailureKind;

/// How long one attempt to connect may take, login included.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// A peer that acknowledges nothing for so long is gone, even if nobody said so.
const USER_TIMEOUT: Duration = Duration::from_secs(2);

/// The largest file with a password or a certificate.
const FILE_MAX: u64 = 1 << 20;

/// Why an address cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("the address of Redis cannot be used: {0}")]
pub struct OpenError(String);

impl OpenError {
    pub(super) fn new(reason: &str) -> Self {
        Self(reason.to_owned())
    }
}

impl From<RedisError> for OpenError {
    fn from(error: RedisError) -> Self {
        // The category only: the detail may repeat the URL, and so its password.
        Self(error.category().to_owned())
    }
}

/// What opens links to one server.
#[derive(Clone)]
pub(super) struct Opener {
    server: Server,
    /// The address, when it is not the one of the URL.
    elsewhere: Option<(String, u16)>,
    /// The address in words.
    address: String,
}

impl Opener {
    /// What opens links to this server. No file is read yet.
    pub(super) fn new(server: &Server) -> Result<Self, OpenError> {
        let info = server.url.expose_secret().into_connection_info()?;
        Ok(Self { server: server.clone(), elsewhere: None, address: info.addr().to_string() })
    }

    /// The same way in, at another address: that of a node which another one has named.
    pub(super) fn at(&self, host: &str, port: u16) -> Self {
        // An address of IPv6 has colons of its own.
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        Self { server: self.server.clone(), elsewhere: Some((host.to_owned(), port)), address }
    }

    /// Host and port, or the path of a socket: no secret.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Opens a link, and asks over it whether anybody is there. What is asked later waits for ever: the deadline is the
    /// caller's, one around the whole step.
    pub(super) async fn open(&self) -> Result<Link, NotOpened> {
        let attempt = tokio::time::timeout(CONNECT_TIMEOUT, self.try_to_open());
        attempt.await.unwrap_or_else(|_| Err(self.late()))
    }

    /// Opens a link to a server that must not be a replica: that one would take no writes.
    pub(super) async fn open_primary(&self) -> Result<Link, NotOpened> {
        let mut link = self.open().await?;
        let role = ::redis::cmd("ROLE");
        match tokio::time::timeout(CONNECT_TIMEOUT, link.ask(&role)).await {
            Ok(Ok(answer)) if says_replica(&answer) => {
                Err(self.failure(FailureKind::ReadOnly, "it is a replica"))
            }
            Ok(Err(error)) if errors::is_beyond_repair(&error) => Err(self.not_opened(&error)),
            // One that does not say, since the user may not ask, is taken for a primary.
            Ok(_) => Ok(link),
            Err(_) => Err(self.late()),
        }
    }

    async fn try_to_open(&self) -> Result<Link, NotOpened> {
        let attempt = if self.needs_files() {
            // On another thread: a disk may be slow, and requests share this one.
            let opener = self.clone();
            let read = tokio::task::spawn_blocking(move || opener.read()).await;
            read.unwrap_or_else(|_| Err(self.failure(FailureKind::File, "its files could not be read")))?
        } else {
            self.read()?
        };
        self.log_in(attempt).await.map_err(|error| self.not_opened(&error))
    }

    async fn log_in(&self, attempt: Attempt) -> Result<Link, RedisError> {
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let client = Client::open(attempt.info)?;
        let mut link = Link::from(client.get_multiplexed_async_connection_with_config(&config).await?);
        if let Some(password) = &attempt.password {
            let mut auth = ::redis::cmd("AUTH");
            if let Some(username) = &attempt.username {
                auth.arg(username);
            }
            auth.arg(password.expose_secret());
            link.ask(&auth).await?;
        }
        if attempt.database != 0 {
            let mut select = ::redis::cmd("SELECT");
            select.arg(attempt.database);
            link.ask(&select).await?;
        }
        match link.ask(&::redis::cmd("PING")).await {
            // Somebody is there, and says that we may not ask.
            Err(error) if errors::code(&error) == Some("NOPERM") => Ok(link),
            answer => answer.map(|_| link),
        }
    }

    fn needs_files(&self) -> bool {
        let of_login = matches!(self.server.login.password, Some(Password::File(_)));
        of_login || self.server.url_file.is_some() || !self.server.tls.is_plain()
    }

    /// Puts together what is known, files included.
    fn read(&self) -> Result<Attempt, NotOpened> {
        let Server { url, url_file, login, tls } = &self.server;
        let in_file = url_file.as_deref().map(|file| self.secret_in(file, "url_file")).transpose()?;
        let url = in_file.as_ref().unwrap_or(url);
        let unusable = |error: RedisError| {
            // The category only: the detail may repeat the URL, and so its password.
            self.failure(FailureKind::File, format!("its address cannot be used: {}", error.category()))
        };
        let written = url.expose_secret().into_connection_info().map_err(unusable)?;
        let of_url = written.redis_settings();
        let username = of_url.username().map(str::to_owned).or_else(|| login.username.clone());
        let password = match (of_url.password(), &login.password) {
            (Some(password), _) => Some(SecretString::from(password)),
            (None, Some(Password::Given(password))) => Some(password.clone()),
            (None, Some(Password::File(file))) => Some(self.secret_in(file, "password_file")?),
            (None, None) => None,
        };
        let database = of_url.db();
        // Without a login: that is ours. RESP2, since its answers are what the calls read.
        let bare =
            RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP2).set_skip_set_lib_name();
        let addr = self.addr(written.addr());
        let mut info = written.set_redis_settings(bare).set_tcp_settings(tcp()).set_addr(addr);
        if matches!(info.addr(), ConnectionAddr::TcpTls { .. }) && !tls.is_plain() {
            info = self.with_certificates(info)?;
        }
        Ok(Attempt { info, username, password, database })
    }

    fn addr(&self, written: &ConnectionAddr) -> ConnectionAddr {
        let Some((host, port)) = &self.elsewhere else { return written.clone() };
        let (host, port) = (host.clone(), *port);
        match written {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        }
    }

    fn with_certificates(&self, info: ConnectionInfo) -> Result<ConnectionInfo, NotOpened> {
        let tls = &self.server.tls;
        let root_cert = tls.ca_file.as_deref().map(|file| self.bytes_of(file, "tls_ca_file")).transpose()?;
        let own = tls.own.as_ref().map(|own| {
            let cert = self.bytes_of(&own.cert_file, "tls_cert_file")?;
            Ok((cert, self.bytes_of(&own.key_file, "tls_key_file")?))
        });
        let own = own.transpose()?;
        let certificates = TlsCertificates {
            root_cert: root_cert.map(|bytes| bytes.expose_secret().to_vec()),
            client_tls: own.map(|(cert, key)| ClientTlsConfig {
                client_cert: cert.expose_secret().to_vec(),
                client_key: key.expose_secret().to_vec(),
            }),
        };
        let client = Client::build_with_tls(info, certificates).map_err(|_| {
            self.failure(FailureKind::File, "a file of tls_ca_file, tls_cert_file, tls_key_file is not PEM")
        })?;
        Ok(client.get_connection_info().clone())
    }

    fn secret_in(&self, file: &Path, setting: &str) -> Result<SecretString, NotOpened> {
        let bytes = self.bytes_of(file, setting)?;
        let text = std::str::from_utf8(bytes.expose_secret())
            .map_err(|_| self.failure(FailureKind::File, format!("{setting} is not text")))?;
        Ok(SecretString::from(text.trim_end_matches(['\r', '\n'])))
    }

    fn bytes_of(&self, path: &Path, setting: &str) -> Result<SecretSlice<u8>, NotOpened> {
        match file::read(path, FILE_MAX) {
            Ok((_, bytes)) => Ok(bytes.into()),
            Err(error) => Err(self.failure(FailureKind::File, format!("{setting} cannot be read: {error}"))),
        }
    }

    /// What an error says of this server.
    pub(super) fn not_opened(&self, error: &RedisError) -> NotOpened {
        let (kind, reason) = errors::reason(error);
        self.failure(kind, reason)
    }

    /// That nothing has come in time.
    pub(super) fn late(&self) -> NotOpened {
        self.failure(FailureKind::Timeout, "no answer in time")
    }

    /// Why this server is of no use.
    pub(super) fn failure(&self, kind: FailureKind, reason: impl Into<String>) -> NotOpened {
        NotOpened { kind, server: self.address.clone(), reason: reason.into() }
    }
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The address and nothing else: the rest may hold a password.
        f.debug_tuple("Opener").field(&self.address).finish()
    }
}

/// All that one attempt needs.
struct Attempt {
    /// Where, without a login.
    info: ConnectionInfo,
    username: Option<String>,
    password: Option<SecretString>,
    database: i64,
}

/// The settings of every socket to Redis.
fn tcp() -> TcpSettings {
    TcpSettings::default().set_nodelay(true).set_user_timeout(USER_TIMEOUT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The length of a device is 0, and it was read without end; to open a pipe waits for ever.
    #[test]
    fn a_password_file_that_never_ends_is_refused() {
        let opener = Opener::new(&"redis://redis.example".into()).unwrap();
        let endless = opener.bytes_of(Path::new("/dev/zero"), "password_file").unwrap_err();
        assert!(endless.reason.contains("larger than"), "{endless:?}");
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let pipe = opener.bytes_of(&pipe, "password_file").unwrap_err();
        assert!(pipe.reason.contains("a pipe"), "{pipe:?}");
    }

    /// The address is in log lines; the rest of a URL may be a secret.
    #[test]
    fn an_opener_shows_its_address_and_no_password() {
        let opener = Opener::new(&"redis://user:canary@redis.example:6380/2".into()).unwrap();
        assert_eq!(format!("{opener:?}"), "Opener(\"redis.example:6380\")");
        assert_eq!(opener.at("::1", 7).address(), "[::1]:7");
    }
}
