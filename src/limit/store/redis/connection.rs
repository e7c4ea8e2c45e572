//! One multiplexed connection for each worker, opened in the background and let go of when it is of no use.
//!
//! The client library's own reconnecting is not used: it makes every caller wait for it, for seconds. Here a request waits
//! for a connection only while an attempt is younger than its budget; while Redis stays away, it is told so at once.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::redis::aio::{ConnectionLike, MultiplexedConnection};
use ::redis::cluster::{ClusterClient, ClusterClientBuilder};
use ::redis::cluster_async::ClusterConnection;
use ::redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo};
use ::redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::StoreError;
use super::opener::{CONNECT_TIMEOUT, OpenError, Opener, tcp};
use super::topology::Topology;
use crate::clock;

/// How long one node of a cluster may take. Opening asks in two rounds, and both must fit into an attempt, or one node that
/// hangs would keep the gateway from all others.
const NODE_TIMEOUT: Duration = Duration::from_millis(250);

/// The pause after the first failed attempt; doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause between attempts: how late a returned Redis is noticed at most.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How often a command may be sent again that a node of a cluster sends elsewhere or asks to repeat.
///
/// The budget ends it, not this number. While a slot moves, one command can need many: `ASKING` holds for the next command
/// on the connection, and on a shared connection that may be somebody else's; and `TRYAGAIN` lasts until all keys of the
/// caller are on one side.
const RETRIES: u32 = 16;

/// What opens a connection.
enum Way {
    Standalone(Box<Opener>),
    Cluster(Box<ClusterClient>),
}

impl Way {
    fn new(topology: &Topology, budget: Duration) -> Result<Self, OpenError> {
        match topology {
            Topology::Standalone(server) => Ok(Self::Standalone(Box::new(Opener::new(server)?))),
            Topology::Cluster(nodes) => {
                let openers = nodes.iter().map(Opener::new).collect::<Result<Vec<_>, _>>()?;
                let nodes = openers.iter().map(|opener| opener.info().clone());
                // The library's defaults wait 1.3 s before a retry and for ever for an answer.
                let client = ClusterClientBuilder::new(nodes)
                    .retries(RETRIES)
                    .min_retry_wait(1)
                    .max_retry_wait(5)
                    .connection_timeout(NODE_TIMEOUT)
                    .response_timeout(budget)
                    .overall_response_timeout(Some(budget))
                    .tcp_settings(tcp())
                    .build()?;
                Ok(Self::Cluster(Box::new(client)))
            }
        }
    }

    async fn open(&self) -> Result<Link, RedisError> {
        match self {
            Self::Standalone(opener) => opener.open().await.map(Link::Standalone),
            Self::Cluster(client) => {
                client.get_async_connection().await.map(|link| Link::Cluster(Box::new(link)))
            }
        }
    }

    /// A connection that reaches all that it should.
    async fn open_whole(&self) -> Option<Link> {
        let mut link = self.open().await.ok()?;
        let is_whole = match &mut link {
            Link::Standalone(_) => true,
            Link::Cluster(cluster) => reaches_every_primary(cluster).await,
        };
        is_whole.then_some(link)
    }
}

/// An open connection. Cloning it gives another handle on the same one.
#[derive(Clone)]
pub(super) enum Link {
    Standalone(MultiplexedConnection),
    Cluster(Box<ClusterConnection>),
}

impl Link {
    /// Sends one command and waits for its answer, for ever if need be: the deadline is the caller's.
    pub(super) async fn ask(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        let answer = match self {
            Self::Standalone(link) => link.req_packed_command(command).await,
            Self::Cluster(link) => link.req_packed_command(command).await,
        };
        answer.and_then(Value::extract_error)
    }
}

/// Whether the connection behind an error is of no further use: broken, or to a node that no longer takes writes.
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
    /// The last attempt failed, and the next one will come by itself.
    Away,
}

/// A worker's connection.
pub(super) struct Connection {
    way: Rc<Way>,
    status: watch::Sender<Status>,
    /// The task that opens; ended with the connection. `None` before the first request.
    opening: RefCell<Option<JoinHandle<()>>>,
    /// How long a request waits for an attempt to connect, counted from the attempt's beginning.
    budget: Duration,
}

impl Connection {
    pub(super) fn new(topology: &Topology, budget: Duration) -> Result<Self, OpenError> {
        let way = Rc::new(Way::new(topology, budget)?);
        let status = watch::Sender::new(Status::Away);
        Ok(Self { way, status, opening: RefCell::new(None), budget })
    }

    /// Begins to open the connection, unless that has begun before. Only inside of a worker's runtime.
    pub(super) fn open(&self) {
        if self.opening.borrow().is_none() {
            self.start_opening();
        }
    }

    /// A handle on the open connection.
    pub(super) async fn link(&self) -> Result<Link, StoreError> {
        self.open();
        let mut watcher = self.status.subscribe();
        loop {
            match &*watcher.borrow_and_update() {
                Status::Ready(link) => return Ok(link.clone()),
                Status::Opening(since) if since.elapsed() <= self.budget => {}
                Status::Opening(_) | Status::Away => return Err(StoreError::Disconnected),
            }
            watcher.changed().await.map_err(|_| StoreError::Disconnected)?;
        }
    }

    /// Lets go of the open connection and begins to open another, unless that is under way already.
    ///
    /// One to a cluster stays in use until another is whole: most often it is one node that does not answer, and the
    /// callers of the others must not pay for it.
    pub(super) fn drop_link(&self) {
        let is_cluster = match &*self.status.borrow() {
            Status::Ready(link) => matches!(link, Link::Cluster(_)),
            Status::Opening(_) | Status::Away => return,
        };
        if is_cluster {
            self.start_replacing();
        } else {
            self.start_opening();
        }
    }

    fn start_opening(&self) {
        self.status.send_replace(Status::Opening(clock::instant()));
        self.spawn(open_until_it_works(Rc::clone(&self.way), self.status.clone()));
    }

    fn start_replacing(&self) {
        let is_busy = self.opening.borrow().as_ref().is_some_and(|task| !task.is_finished());
        if !is_busy {
            self.spawn(replace_when_whole(Rc::clone(&self.way), self.status.clone()));
        }
    }

    fn spawn(&self, work: impl Future<Output = ()> + 'static) {
        let task = tokio::task::spawn_local(work);
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
        // Nothing of the address: it may hold a password.
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

async fn open_until_it_works(way: Rc<Way>, status: watch::Sender<Status>) {
    let mut pause = PAUSE_MIN;
    loop {
        let attempt = tokio::time::timeout(CONNECT_TIMEOUT * 2, way.open()).await;
        match attempt {
            Ok(Ok(link)) => {
                tracing::info!("connected to Redis");
                status.send_replace(Status::Ready(link.clone()));
                warn_of_eviction(link).await;
                return;
            }
            Ok(Err(error)) => report(&status, error.category()),
            Err(_) => report(&status, "no answer"),
        }
        status.send_replace(Status::Away);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Opens connections to a cluster until one reaches every primary, which then takes the place of the one in use.
///
/// A new connection to a cluster that has lost a node, and has not replaced it yet, would be worse than the old one: the
/// library tries to reach that node over and over, and lets everybody wait meanwhile.
async fn replace_when_whole(way: Rc<Way>, status: watch::Sender<Status>) {
    let mut pause = PAUSE_MIN;
    loop {
        let attempt = tokio::time::timeout(CONNECT_TIMEOUT * 2, way.open_whole()).await;
        if let Ok(Some(link)) = attempt {
            tracing::info!("connected to every primary of the cluster");
            status.send_replace(Status::Ready(link));
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Whether every primary that owns slots answers. The library passes over those that it could not connect to.
async fn reaches_every_primary(cluster: &mut ClusterConnection) -> bool {
    let mut slots = ::redis::cmd("CLUSTER");
    slots.arg("SLOTS");
    let everywhere = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
    let Ok(Value::Array(ranges)) = cluster.req_packed_command(&slots).await else { return false };
    let Ok(Value::Map(answers)) = cluster.route_command(::redis::cmd("PING"), everywhere).await else {
        return false;
    };
    let answered = answers.iter().filter(|(_, answer)| !matches!(answer, Value::ServerError(_))).count();
    let mut primaries: Vec<&Value> = Vec::new();
    for range in &ranges {
        // From slot, to slot, the primary, its replicas.
        let Value::Array(fields) = range else { return false };
        let Some(primary) = fields.get(2) else { return false };
        if !primaries.contains(&primary) {
            primaries.push(primary);
        }
    }
    answered == primaries.len()
}

/// Says that Redis is away once, not at every attempt.
fn report(status: &watch::Sender<Status>, reason: &str) {
    if matches!(&*status.borrow(), Status::Opening(_)) {
        tracing::warn!(reason, "cannot connect to Redis; trying on in the background");
    }
}

/// Says once, however many connections there are, that this Redis may throw counters away. Silent when it must not be
/// asked, since an ACL may leave the command out.
async fn warn_of_eviction(mut link: Link) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    let mut about_memory = ::redis::cmd("INFO");
    about_memory.arg("memory");
    let Ok(Ok(answer)) = tokio::time::timeout(CONNECT_TIMEOUT, link.ask(&about_memory)).await else { return };
    let Some(policy) = texts(&answer).find_map(evicting_policy) else { return };
    if !WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            policy,
            "Redis may evict counters, and each is a limit that starts afresh; set maxmemory-policy to noeviction"
        );
    }
}

/// The texts of an answer: one, or with a cluster one of each node.
fn texts(answer: &Value) -> Box<dyn Iterator<Item = &str> + '_> {
    match answer {
        Value::BulkString(bytes) => Box::new(std::str::from_utf8(bytes).into_iter()),
        Value::VerbatimString { text, .. } => Box::new(std::iter::once(text.as_str())),
        Value::Map(nodes) => Box::new(nodes.iter().flat_map(|(_, answer)| texts(answer))),
        _ => Box::new(std::iter::empty()),
    }
}

/// The policy by which a Redis evicts keys when it is full, if it does either. Every policy but `noeviction` reaches the
/// counters: all of them have an expiry, so they are what the `volatile` ones choose from.
fn evicting_policy(memory: &str) -> Option<&str> {
    let field = |name: &str| memory.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let is_bounded = field("maxmemory")? != "0";
    field("maxmemory_policy").filter(|&policy| is_bounded && policy != "noeviction")
}
