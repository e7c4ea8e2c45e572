//! Assembles the rooms into a running gateway: sockets, public server, admin side, stores, reloads.
//!
//! [`Gateway::bind`] reserves the addresses, or takes the sockets that were handed over, so that they are known before anything
//! runs; [`Gateway::run`] serves until it is told to stop, and then ends in steps: not ready, clients told to go, nobody let in
//! any more, what is in flight finished.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::admin::{self, Admin};
use crate::clock::SystemClock;
use crate::config::{Loaded, ServerSettings, Settings};
use crate::gate::Gate;
use crate::limit::Limiter;
use crate::limit::store::{MemoryStore, OpenError};
use crate::listen::drain::Drain;
use crate::listen::overload::{Overload, resident_memory};
use crate::listen::socket::{Door, HandedOver, Listener, allow_descriptors};
use crate::observe::{AccessLogWriter, Metrics};
use crate::plan::Unbuildable;
use crate::proxy::{self, Backends};
use crate::public::{self, Life, Size};
use crate::reload::{self, LogLevel, Reloader, Reloads};

/// How often a part of the memory store is searched for what has expired.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// How long the workers may take to end when nothing is left for them to do.
const WORKERS_END: Duration = Duration::from_millis(500);

/// Descriptors for everything but clients and backends: listeners, workers, Redis, files.
const DESCRIPTORS_OF_ITS_OWN: u64 = 256;

/// How often the process looks how much memory it uses.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How a gateway is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// As whoever runs it does: others still send clients here, and need `server.drain_delay` to notice.
    AfterDelay,
    /// As a person at a terminal does: nobody has to notice anything.
    Soon,
}

/// Why a gateway cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is taken, or not one of this machine.
    #[error("cannot listen on {address} ({})", question(source, *reuse_port))]
    Bind {
        /// The address from the configuration.
        address: SocketAddr,
        /// Whether the address is to be shared with another gateway.
        reuse_port: bool,
        /// What the system says.
        source: io::Error,
    },
    /// A socket was handed over that cannot be used.
    #[error("the socket that was handed over as {name:?} cannot be used")]
    HandedOver {
        /// Its name, `public` or `admin`.
        name: &'static str,
        /// What is wrong with it.
        source: io::Error,
    },
    /// Sockets were handed over that are neither the public nor the admin one.
    #[error(
        "more sockets were handed over than are used: one is \"public\", and one may be \"admin\" (FileDescriptorName=). For IPv4 and \
         IPv6, let one socket take both: ListenStream=8080 with BindIPv6Only=both"
    )]
    Unused,
    /// The socket for the admin side is open to the network.
    #[error(
        "the socket that was handed over as \"admin\" listens on {0}, which other machines can reach, and there is no token: \
         set admin.token or admin.token_file"
    )]
    AdminIsOpen(SocketAddr),
    /// The routes contradict each other.
    #[error(transparent)]
    Policy(#[from] Unbuildable),
    /// The clients of the backends cannot be made.
    #[error(transparent)]
    Upstreams(#[from] proxy::BuildError),
    /// The address of Redis cannot be used.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// A metric is declared wrongly.
    #[error("cannot set up the metrics")]
    Metrics(#[from] prometheus::Error),
    /// A server cannot run.
    #[error("cannot serve")]
    Serve(#[from] io::Error),
}

/// A gateway whose addresses are reserved.
#[derive(Debug)]
pub struct Gateway {
    settings: Settings,
    gate: Gate,
    overload: Overload,
    memory: Arc<MemoryStore>,
    admin: Admin,
    reloader: Reloader,
    reloads: Reloads,
    public: Listener,
    private: Listener,
}

impl Gateway {
    /// Binds the listeners and builds everything that can fail.
    ///
    /// # Errors
    /// When an address is taken, or a part cannot be built from the configuration.
    pub fn bind(loaded: Loaded) -> Result<Self, StartError> {
        let Loaded { settings, policy, provenance, .. } = loaded;
        let on_failure = policy.on_failure;
        let backends = Backends::new(&settings.upstreams, settings.server.workers)?;
        let snapshot = reload::snapshot(policy, &settings, backends)?;
        let memory = Arc::new(MemoryStore::new(settings.store.max_callers, Arc::new(SystemClock::new())));
        // The workers build their own; this only proves that they will be able to.
        drop(Limiter::new(&settings.store.kind, Arc::clone(&memory), Arc::default())?);
        let (public, private) = listeners(&settings)?;
        look_at_descriptors(&settings.server);
        let metrics = Arc::new(Metrics::new()?);
        let kind = settings.store.kind.clone();
        let overload = Overload::new(settings.server.most_in_flight());
        let gate = Gate::new(snapshot, kind, Arc::clone(&memory), Arc::clone(&metrics))
            .access_log(AccessLogWriter::new(io::stdout()))
            .overload(overload.clone());
        let parts = reload::Parts {
            in_force: gate.in_force(),
            memory: Arc::clone(&memory),
            metrics: Arc::clone(&metrics),
            admin_is_exposed: !private.socket.local_addr()?.ip().is_loopback(),
        };
        let (reloader, reloads) = Reloader::new(&settings, provenance, on_failure, parts);
        let kind = settings.store.kind.clone();
        let admin = Admin::new(kind, metrics, Arc::clone(&memory), gate.common(), reloads.clone());
        Ok(Self { settings, gate, overload, memory, admin, reloader, reloads, public, private })
    }

    /// The address that clients call.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn public_address(&self) -> io::Result<SocketAddr> {
        self.public.socket.local_addr()
    }

    /// The address of metrics, probes and the admin API.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.private.socket.local_addr()
    }

    /// The way to have the configuration read again.
    #[must_use]
    pub fn reloads(&self) -> Reloads {
        self.reloads.clone()
    }

    /// Tells `change` when a reload brings another filter for the gateway's own messages (`log.level`).
    pub fn on_log_level(&mut self, change: LogLevel) {
        self.reloader.on_log_level(change);
    }

    /// Whether clients come in through a socket that was handed over.
    #[must_use]
    pub fn is_handed_over(&self) -> bool {
        self.public.is_handed_over()
    }

    /// Serves until `stop` is ready. Then: not ready at once; after `server.drain_delay` nobody is let in any more; what is in
    /// flight has `server.drain` to finish. The admin side answers until the end.
    ///
    /// # Errors
    /// When a listener breaks.
    pub async fn run(self, stop: impl Future<Output = Stop>) -> Result<(), StartError> {
        let Self { settings, gate, overload, memory, admin, reloader, reloads: _, public, private } = self;
        let (draining, drain) = (admin.draining(), Drain::default());
        let life = Life { drain: drain.clone(), overload: overload.clone() };
        let door = public.door()?;
        let ServerSettings { workers, max_connections, .. } = settings.server;
        let size = Size { workers, max_connections };
        let (ended, mut alive) = mpsc::channel(1);
        // The gate is kept here to the end: with its last clone goes the thread that writes the access log.
        let public = public::server(public.socket, gate.clone(), size, life, ended)?;
        let private = admin::server(private.socket, admin)?;
        let public_handle = public.handle();
        let sweeping = sweep(memory);
        let watching = watch_memory(overload, settings.server.max_memory);
        let stopping = async {
            let stop = stop.await;
            draining.begin();
            drain.leave();
            if stop == Stop::AfterDelay {
                tracing::info!(connections = drain.connections(), "stopping: telling clients to go");
                sleep(settings.server.drain_delay).await;
            }
            empty(&drain, door, public_handle.pause(), settings.server.drain).await;
        };
        tokio::select! {
            served = async { tokio::try_join!(public, private) } => {
                served?;
            }
            () = sweeping => {}
            () = watching => {}
            never = reloader.run() => match never {},
            () = stopping => {}
        }
        // Both servers are gone with the block above, and have told their workers to end. What those hold, such as lines of
        // the access log, is let go as they do.
        if timeout(WORKERS_END, alive.recv()).await.is_err() {
            tracing::warn!("the workers take long to end: the last lines of the access log may be missing");
        }
        drop(gate);
        Ok(())
    }
}

/// Lets nobody in any more, and waits until everybody has left, or until `patience` is over.
async fn empty(drain: &Drain, door: Door, pause: impl Future<Output = ()>, patience: Duration) {
    tracing::info!(connections = drain.connections(), "stopping: finishing what is in flight");
    drain.close();
    door.close(pause).await;
    if timeout(patience, drain.empty()).await.is_err() {
        tracing::warn!(
            connections = drain.connections(),
            "stopping: server.drain is over, and cuts these short"
        );
    }
}

/// Forgets expired callers, a part of the table at a time, for as long as the gateway runs.
async fn sweep(memory: Arc<MemoryStore>) {
    let mut ticks = tokio::time::interval(SWEEP_EVERY);
    for turn in 0.. {
        ticks.tick().await;
        memory.sweep(turn);
    }
}

/// Looks how much memory the process uses, for as long as the gateway runs. Behind the requests' backs: asking takes longer than
/// a small request.
async fn watch_memory(overload: Overload, most: Option<u64>) {
    let Some(most) = most else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval(LOOK_EVERY);
    loop {
        ticks.tick().await;
        if let Some(used) = resident_memory() {
            overload.note_memory(used, most);
        }
    }
}

/// A connection needs a descriptor, and another one for its backend. Without them connections wait in the kernel, and requests
/// find no backend: somebody should know before that.
fn look_at_descriptors(server: &ServerSettings) {
    let connections = (server.workers * server.max_connections) as u64;
    let wanted = connections.saturating_mul(2).saturating_add(DESCRIPTORS_OF_ITS_OWN);
    match allow_descriptors(wanted) {
        Ok(allowed) if allowed < wanted => tracing::warn!(
            allowed,
            wanted,
            "the system allows fewer descriptors than server.max_connections may need: raise the limit (ulimit -n, LimitNOFILE) or \
             lower the setting"
        ),
        Ok(_) => {}
        Err(error) => tracing::warn!(%error, "cannot see how many descriptors the system allows"),
    }
}

/// Where to look first when an address cannot be bound.
fn question(error: &io::Error, reuse_port: bool) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => "is it an address of this machine?",
        io::ErrorKind::PermissionDenied => "may this user listen on a port below 1024?",
        _ if reuse_port => {
            "is another program using the port, or a gateway without server.reuse_port, or of another user?"
        }
        _ => "is another program using the port?",
    }
}

/// The listeners for clients and for the operator: handed over, or bound.
fn listeners(settings: &Settings) -> Result<(Listener, Listener), StartError> {
    let ServerSettings { listen, reuse_port, ref handed_over, .. } = settings.server;
    let mut handed_over = handed_over.clone().map(HandedOver::take);
    let mut listener = |name, address| {
        let taken = handed_over.as_mut().map_or(Ok(None), |sockets| sockets.listener(name));
        match taken.map_err(|source| StartError::HandedOver { name, source })? {
            Some(listener) => Ok(listener),
            None => {
                let failed = |source| StartError::Bind { address, reuse_port, source };
                Listener::bind(address, reuse_port).map_err(failed)
            }
        }
    };
    let (public, private) = (listener("public", listen)?, listener("admin", settings.admin.listen)?);
    if handed_over.is_some_and(|mut sockets| sockets.has_unused()) {
        return Err(StartError::Unused);
    }
    let address = private.socket.local_addr()?;
    if !address.ip().is_loopback() && settings.admin.token.is_none() {
        return Err(StartError::AdminIsOpen(address));
    }
    Ok((public, private))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Sources, load};
    use crate::limit::store::{RedisSettings, StoreKind, Topology};

    /// The workers found out, could not start, and the gateway went on without anybody behind its public port.
    #[test]
    fn an_address_of_redis_that_cannot_be_used_is_an_error_before_anything_runs() {
        let environment =
            [("TOLLGATE__SERVER__LISTEN", "127.0.0.1:0"), ("TOLLGATE__ADMIN__LISTEN", "127.0.0.1:0")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let mut loaded = load(&Sources { environment, ..Sources::built_in() }).unwrap();
        loaded.settings.store.kind = StoreKind::Redis(Box::new(RedisSettings {
            // The password is not UTF-8.
            topology: Topology::Standalone("redis://:%ff@127.0.0.1".into()),
            budget: Duration::from_millis(20),
            prefix: "test".to_owned(),
            local_share: None,
        }));
        let bound = Gateway::bind(loaded);
        assert!(matches!(bound, Err(StartError::Store(_))), "{bound:?}");
    }
}
