//! A worker's connection to one server, opened in the background and let go of when it is of no use.
//!
//! The client library's own reconnecting is not used: it makes every caller wait for it, for seconds. Here a request waits
//! for a connection only while an attempt is younger than its budget; while the server stays away, it is told so at once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::super::{FailureKind, Shard, StoreError};
use super::errors::{self, NotOpened};
use super::eviction::Eviction;
use super::link::{Link, says_replica};
use super::opener::{CONNECT_TIMEOUT, Opener};
use super::sentinel::Sentinels;
use crate::clock;
use crate::limit::Common;

/// The pause after the first failed attempt; doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause between attempts: how late a returned server is noticed at most, if nobody asks for it.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How often an open connection is looked at: how late an idle worker notices at most that it is lost.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long an answer to that look may take, unless requests may wait longer.
const LOOK_TIMEOUT: Duration = Duration::from_millis(500);

/// How many looks later a server is asked anew whether it may evict.
const LOOKS_UNTIL_EVICTION: u32 = 60;

/// How the server that keeps counters is reached.
pub(super) enum Way {
    /// At its address, which must be that of a primary.
    Primary(Box<Opener>),
    /// At its address; that it has become a replica, a node of a cluster says by itself.
    Node(Box<Opener>),
    /// As the Sentinels say at the moment.
    Sentinel(Box<Sentinels>),
}

impl Way {
    async fn open(&self) -> Result<Link, NotOpened> {
        match self {
            Self::Primary(opener) => opener.open_primary().await,
            Self::Node(opener) => opener.open().await,
            Self::Sentinel(sentinels) => sentinels.open().await,
        }
    }

    /// How long one attempt may take.
    fn patience(&self) -> Duration {
        match self {
            Self::Primary(_) | Self::Node(_) => CONNECT_TIMEOUT * 2,
            Self::Sentinel(sentinels) => sentinels.patience(),
        }
    }

    /// The address of the server in use, where its name does not tell.
    fn primary(&self) -> Option<String> {
        match self {
            Self::Primary(_) | Self::Node(_) => None,
            Self::Sentinel(sentinels) => sentinels.primary(),
        }
    }
}

/// Where a worker's connection stands.
#[derive(Clone)]
enum Status {
    /// An attempt is under way, since then.
    Opening(Instant),
    Ready(Link),
    /// The last attempt failed or nobody asked for one. The next one comes by itself, or when somebody asks.
    Away,
}

/// A worker's connection.
pub(super) struct Connection {
    shared: Rc<Shared>,
    /// The task that opens and looks; ended with the connection. `None` before the first request.
    keeping: RefCell<Option<JoinHandle<()>>>,
    /// When an attempt last began because somebody asked.
    asked: Cell<Option<Instant>>,
}

/// What the connection and its task both know.
struct Shared {
    way: Way,
    status: watch::Sender<Status>,
    /// How long a request waits for an attempt to connect, counted from the attempt's beginning.
    budget: Duration,
    shard: Arc<Shard>,
    common: Arc<Common>,
    eviction: Eviction,
}

impl Connection {
    pub(super) fn new(way: Way, budget: Duration, shard: Arc<Shard>, common: Arc<Common>) -> Self {
        let status = watch::Sender::new(Status::Away);
        let eviction = Eviction::new(Arc::clone(&common));
        let shared = Rc::new(Shared { way, status, budget, shard, common, eviction });
        Self { shared, keeping: RefCell::new(None), asked: Cell::new(None) }
    }

    /// How long one attempt to connect may take.
    pub(super) fn patience(&self) -> Duration {
        self.shared.way.patience()
    }

    /// Waits until the connection is open, however long an attempt may take.
    pub(super) async fn opened(&self) -> Result<(), StoreError> {
        self.open();
        let mut watcher = self.shared.status.subscribe();
        loop {
            match &*watcher.borrow_and_update() {
                Status::Ready(_) => return Ok(()),
                Status::Opening(_) => {}
                Status::Away => return Err(StoreError::Disconnected),
            }
            watcher.changed().await.map_err(|_| StoreError::Disconnected)?;
        }
    }

    /// Sees to it that the connection is open or being opened. Only inside of a worker's runtime.
    pub(super) fn open(&self) {
        let is_at_work = self.keeping.borrow().as_ref().is_some_and(|task| !task.is_finished());
        if !is_at_work && !matches!(&*self.shared.status.borrow(), Status::Ready(_)) {
            self.start_opening();
        }
    }

    /// A handle on the open connection.
    pub(super) async fn link(&self) -> Result<Link, StoreError> {
        let mut watcher = self.shared.status.subscribe();
        loop {
            let status = watcher.borrow_and_update().clone();
            match status {
                Status::Ready(link) => return Ok(link),
                Status::Opening(since) if since.elapsed() <= self.shared.budget => {}
                Status::Away if self.may_try_again() => {
                    self.start_opening();
                    continue;
                }
                Status::Opening(_) | Status::Away => return Err(StoreError::Disconnected),
            }
            watcher.changed().await.map_err(|_| StoreError::Disconnected)?;
        }
    }

    /// Lets go of the open connection and begins to open another, unless that is under way already.
    pub(super) fn reopen(&self) {
        if matches!(&*self.shared.status.borrow(), Status::Ready(_)) {
            self.start_opening();
        }
    }

    /// Lets go of the connection, and opens none until somebody asks for one.
    pub(super) fn rest(&self) {
        if let Some(task) = self.keeping.take() {
            task.abort();
        }
        self.shared.status.send_replace(Status::Away);
    }

    /// While attempts fail, those who ask do not make more of them than the pauses allow.
    fn may_try_again(&self) -> bool {
        let now = clock::instant();
        let due = self.asked.get().is_none_or(|asked| now.duration_since(asked) >= PAUSE_MIN);
        if due {
            self.asked.set(Some(now));
        }
        due
    }

    fn start_opening(&self) {
        self.shared.status.send_replace(Status::Opening(clock::instant()));
        let task = tokio::task::spawn_local(keep_open(Rc::clone(&self.shared)));
        if let Some(previous) = self.keeping.replace(Some(task)) {
            previous.abort();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(task) = self.keeping.take() {
            task.abort();
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("server", &self.shared.shard.name()).finish_non_exhaustive()
    }
}

/// Opens the connection, looks after it, and opens another when it is lost.
async fn keep_open(shared: Rc<Shared>) {
    loop {
        let link = open_until_it_works(&shared).await;
        shared.status.send_replace(Status::Ready(link.clone()));
        shared.eviction.look_first(link.clone()).await;
        let reason = look_after(&shared, link).await;
        if !shared.common.is_quiet() {
            let server = shared.shard.name();
            tracing::warn!(server, reason, "the connection to Redis is of no more use; opening another");
        }
        shared.status.send_replace(Status::Opening(clock::instant()));
    }
}

async fn open_until_it_works(shared: &Shared) -> Link {
    let mut pause = PAUSE_MIN;
    loop {
        let attempt = tokio::time::timeout(shared.way.patience(), shared.way.open()).await;
        let (kind, server, reason) = match attempt {
            Ok(Ok(link)) => {
                if !shared.common.is_quiet() {
                    let primary = shared.way.primary();
                    tracing::info!(server = shared.shard.name(), primary, "connected to Redis");
                }
                return link;
            }
            Ok(Err(NotOpened { kind, server, reason })) => (kind, server, reason),
            Err(_) => (FailureKind::Timeout, shared.shard.name().to_owned(), "no answer in time".to_owned()),
        };
        shared.common.count_failure(kind);
        if !shared.common.is_quiet() && shared.shard.may_complain(kind) {
            let kind = kind.name();
            tracing::warn!(
                server,
                kind,
                reason,
                "cannot connect to Redis: on_failure decides; trying on in the background"
            );
        }
        shared.status.send_replace(Status::Away);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Looks at an open connection now and then until it is of no more use, and says why. Nobody else would notice while there
/// are no requests, and the first one afterwards would have to pay for it.
async fn look_after(shared: &Shared, mut link: Link) -> &'static str {
    let mut question = match shared.way {
        Way::Primary(_) | Way::Sentinel(_) => "ROLE",
        Way::Node(_) => "PING",
    };
    let mut looks = 0;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let patience = LOOK_TIMEOUT.max(shared.budget);
        match tokio::time::timeout(patience, link.ask(&::redis::cmd(question))).await {
            Err(_) => return "no answer in time",
            Ok(Ok(answer)) if says_replica(&answer) => return "it has become a replica",
            Ok(Err(error)) if errors::is_beyond_repair(&error) => return "it is closed",
            // An ACL may leave the command out, and every vain question is a line in its log.
            Ok(Err(error)) if errors::code(&error) == Some("NOPERM") => question = "PING",
            // It answers. What is wrong with it, the requests will hear.
            Ok(_) => {}
        }
        if let Way::Sentinel(sentinels) = &shared.way
            && let Some(other) = sentinels.look().await
        {
            if !shared.common.is_quiet() {
                let server = sentinels.primary();
                tracing::info!(server, "the Sentinels name another primary of Redis");
            }
            // What is under way on the old one may still be answered.
            link = other;
            looks = 0;
            shared.status.send_replace(Status::Ready(link.clone()));
            shared.eviction.look_first(link.clone()).await;
        }
        looks += 1;
        if looks >= LOOKS_UNTIL_EVICTION {
            looks = 0;
            shared.eviction.look(link.clone()).await;
        }
    }
}
