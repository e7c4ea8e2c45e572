//! A worker's connection to one server, opened in the background and let go of when it is of no use.
//!
//! The client library's own reconnecting is not used: it makes every caller wait for it, for seconds. Here a request waits
//! for a connection only while an attempt is younger than its budget; while the server stays away, it is told so at once.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use ::redis::aio::{ConnectionLike as _, MultiplexedConnection};
use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::opener::{CONNECT_TIMEOUT, Opener};
use super::{StoreError, eviction};
use crate::clock;

/// The pause after the first failed attempt; doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause between attempts: how late a returned server is noticed at most, if nobody asks for it.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// An open connection. Cloning it gives another handle on the same one.
#[derive(Clone)]
pub(super) struct Link(MultiplexedConnection);

impl From<MultiplexedConnection> for Link {
    fn from(connection: MultiplexedConnection) -> Self {
        Self(connection)
    }
}

impl Link {
    /// Sends one command and waits for its answer, for ever if need be: the deadline is the caller's.
    pub(super) async fn ask(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        self.0.send_packed_command(command).await.and_then(Value::extract_error)
    }

    /// The same, about a slot that is on its way to this node. The permission and the command are sent as one: on a connection
    /// that others use, too, nothing may come between the two.
    pub(super) async fn ask_in_passing(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let mut both = ::redis::pipe();
        both.cmd("ASKING").ignore().add_command(command.clone());
        let mut answers = self.0.req_packed_commands(&both, 1, 1).await?;
        answers.pop().unwrap_or(Value::Nil).extract_error()
    }
}

/// Whether the connection behind an error is of no further use: broken, or to a server that no longer takes writes.
pub(super) fn is_beyond_repair(error: &RedisError) -> bool {
    error.is_connection_dropped()
        || error.is_unrecoverable_error()
        || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
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
    opener: Rc<Opener>,
    status: watch::Sender<Status>,
    /// The task that opens; ended with the connection. `None` before the first request.
    opening: RefCell<Option<JoinHandle<()>>>,
    /// When an attempt last began because somebody asked.
    asked: Cell<Option<Instant>>,
    /// How long a request waits for an attempt to connect, counted from the attempt's beginning.
    budget: Duration,
}

impl Connection {
    pub(super) fn new(opener: Opener, budget: Duration) -> Self {
        let status = watch::Sender::new(Status::Away);
        Self { opener: Rc::new(opener), status, opening: RefCell::new(None), asked: Cell::new(None), budget }
    }

    /// Sees to it that the connection is open or being opened. Only inside of a worker's runtime.
    pub(super) fn open(&self) {
        let is_at_work = self.opening.borrow().as_ref().is_some_and(|task| !task.is_finished());
        if !is_at_work && !matches!(&*self.status.borrow(), Status::Ready(_)) {
            self.start_opening();
        }
    }

    /// A handle on the open connection.
    pub(super) async fn link(&self) -> Result<Link, StoreError> {
        let mut watcher = self.status.subscribe();
        loop {
            let status = watcher.borrow_and_update().clone();
            match status {
                Status::Ready(link) => return Ok(link),
                Status::Opening(since) if since.elapsed() <= self.budget => {}
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
        if matches!(&*self.status.borrow(), Status::Ready(_)) {
            self.start_opening();
        }
    }

    /// Lets go of the connection, and opens none until somebody asks for one.
    pub(super) fn rest(&self) {
        if let Some(task) = self.opening.take() {
            task.abort();
        }
        self.status.send_replace(Status::Away);
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
        self.status.send_replace(Status::Opening(clock::instant()));
        let task =
            tokio::task::spawn_local(open_until_it_works(Rc::clone(&self.opener), self.status.clone()));
        if let Some(previous) = self.opening.replace(Some(task)) {
            previous.abort();
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(task) = self.opening.take() {
            task.abort();
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("opener", &self.opener).finish_non_exhaustive()
    }
}

async fn open_until_it_works(opener: Rc<Opener>, status: watch::Sender<Status>) {
    let mut pause = PAUSE_MIN;
    loop {
        let attempt = tokio::time::timeout(CONNECT_TIMEOUT * 2, opener.open()).await;
        match attempt {
            Ok(Ok(link)) => {
                tracing::info!(server = %opener.address(), "connected to Redis");
                let link = Link::from(link);
                status.send_replace(Status::Ready(link.clone()));
                warn_of_eviction(link).await;
                return;
            }
            Ok(Err(error)) => report(&opener, &status, error.category()),
            Err(_) => report(&opener, &status, "no answer"),
        }
        status.send_replace(Status::Away);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Says that the server is away once, not at every attempt.
fn report(opener: &Opener, status: &watch::Sender<Status>, reason: &str) {
    if matches!(&*status.borrow(), Status::Opening(_)) {
        tracing::warn!(server = %opener.address(), reason, "cannot connect to Redis; trying on in the background");
    }
}

/// Looks whether the server may throw counters away.
async fn warn_of_eviction(mut link: Link) {
    if let Ok(Ok(answer)) = tokio::time::timeout(CONNECT_TIMEOUT, link.ask(&eviction::question())).await {
        eviction::warn(&answer);
    }
}
