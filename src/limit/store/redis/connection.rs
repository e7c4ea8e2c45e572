//! One multiplexed connection for each worker, opened in the background and let go of when it is of no use.
//!
//! The client library's own reconnecting is not used: it makes every caller wait for it, for seconds. Here a request waits
//! for a connection only while an attempt is younger than its budget; while Redis stays away, it is told so at once.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redis::aio::{ConnectionLike, MultiplexedConnection};
use ::redis::cluster::{ClusterClient, ClusterClientBuilder};
use ::redis::cluster_async::ClusterConnection;
use ::redis::cluster_routing::{MultipleNodeRoutingInfo, RoutingInfo};
use ::redis::{Cmd, RedisError, Value};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::StoreError;
use super::errors::{self, NotOpened};
use super::eviction::Eviction;
use super::opener::{self, CONNECT_TIMEOUT, OpenError, Opener, tcp};
use super::sentinel::Sentinels;
use super::topology::Topology;
use crate::clock;
use crate::limit::Tally;
use crate::limit::store::FailureKind;

/// How long one node of a cluster may take. Opening asks in two rounds, and both must fit into an attempt, or one node that
/// hangs would keep the gateway from all others.
const NODE_TIMEOUT: Duration = Duration::from_millis(250);

/// The pause after the first failed attempt; doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause between attempts: how late a returned Redis is noticed at most.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How often an open connection is looked at: how late an idle worker notices at most that it is lost.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long an answer to that look may take, unless requests may wait longer.
const LOOK_TIMEOUT: Duration = Duration::from_millis(500);

/// How often a Redis is asked anew whether it may evict, in looks.
const LOOKS_AT_EVICTION: u32 = 60;

/// How often a command may be sent again that a node of a cluster sends elsewhere or asks to repeat.
///
/// The budget ends it, not this number. While a slot moves, one command can need many: `ASKING` holds for the next command
/// on the connection, and on a shared connection that may be somebody else's; and `TRYAGAIN` lasts until all keys of the
/// caller are on one side.
const RETRIES: u32 = 16;

/// What opens a connection.
enum Way {
    Standalone(Box<Opener>),
    Sentinel(Box<Sentinels>),
    Cluster(Box<ClusterClient>),
}

impl Way {
    fn new(topology: &Topology, budget: Duration) -> Result<Self, OpenError> {
        match topology {
            Topology::Standalone(server) => Ok(Self::Standalone(Box::new(Opener::new(server)?))),
            Topology::Sentinel(settings) => Ok(Self::Sentinel(Box::new(Sentinels::new(settings)?))),
            Topology::Cluster(nodes) => {
                let openers = nodes.iter().map(Opener::new).collect::<Result<Vec<_>, _>>()?;
                let nodes = openers.iter().map(Opener::info).collect::<Result<Vec<_>, _>>()?;
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

    async fn open(&self) -> Result<Link, NotOpened> {
        match self {
            Self::Standalone(opener) => opener.open_primary().await.map(Link::Standalone),
            Self::Sentinel(sentinels) => sentinels.open().await.map(Link::Standalone),
            Self::Cluster(client) => match client.get_async_connection().await {
                Ok(link) => Ok(Link::Cluster(Box::new(link))),
                Err(error) => {
                    let (kind, reason) = errors::reason(&error);
                    Err(NotOpened { kind, server: "the cluster".to_owned(), reason })
                }
            },
        }
    }

    /// How long one attempt may take.
    fn patience(&self) -> Duration {
        match self {
            Self::Standalone(_) | Self::Cluster(_) => CONNECT_TIMEOUT * 2,
            Self::Sentinel(sentinels) => sentinels.patience(),
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
    shared: Rc<Shared>,
    /// The task that opens and looks; ended with the connection. `None` before the first request.
    keeping: RefCell<Option<JoinHandle<()>>>,
}

/// What the connection and its task both know.
struct Shared {
    way: Way,
    status: watch::Sender<Status>,
    tally: Arc<Tally>,
    eviction: Eviction,
    /// How long a request waits for an attempt to connect, counted from the attempt's beginning.
    budget: Duration,
}

impl Connection {
    pub(super) fn new(topology: &Topology, budget: Duration, tally: Arc<Tally>) -> Result<Self, OpenError> {
        let way = Way::new(topology, budget)?;
        let status = watch::Sender::new(Status::Away);
        let eviction = Eviction::new(Arc::clone(&tally));
        let shared = Rc::new(Shared { way, status, tally, eviction, budget });
        Ok(Self { shared, keeping: RefCell::new(None) })
    }

    /// Begins to open the connection, unless that has begun before. Only inside of a worker's runtime.
    pub(super) fn open(&self) {
        if self.keeping.borrow().is_none() {
            self.start_opening();
        }
    }

    /// A handle on the open connection.
    pub(super) async fn link(&self) -> Result<Link, StoreError> {
        self.open();
        let mut watcher = self.shared.status.subscribe();
        loop {
            match &*watcher.borrow_and_update() {
                Status::Ready(link) => return Ok(link.clone()),
                Status::Opening(since) if since.elapsed() <= self.shared.budget => {}
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
        let is_cluster = match &*self.shared.status.borrow() {
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
        self.shared.status.send_replace(Status::Opening(clock::instant()));
        self.spawn(keep_open(Rc::clone(&self.shared)));
    }

    fn start_replacing(&self) {
        let is_busy = self.keeping.borrow().as_ref().is_some_and(|task| !task.is_finished());
        if !is_busy {
            self.spawn(replace_when_whole(Rc::clone(&self.shared)));
        }
    }

    fn spawn(&self, work: impl Future<Output = ()> + 'static) {
        let task = tokio::task::spawn_local(work);
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
        // Nothing of the address: it may hold a password.
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

/// Opens the connection, looks after it, and opens another when it is lost.
async fn keep_open(shared: Rc<Shared>) {
    loop {
        let link = open_until_it_works(&shared).await;
        shared.status.send_replace(Status::Ready(link.clone()));
        shared.eviction.look_first(link.clone()).await;
        match link {
            Link::Standalone(link) => look_after(&shared, link).await,
            // The library looks after its own.
            Link::Cluster(_) => return,
        }
        shared.status.send_replace(Status::Opening(clock::instant()));
    }
}

async fn open_until_it_works(shared: &Shared) -> Link {
    let mut pause = PAUSE_MIN;
    let mut said = None;
    loop {
        let attempt = tokio::time::timeout(shared.way.patience(), shared.way.open()).await;
        let error = match attempt {
            Ok(Ok(link)) => {
                tracing::info!("connected to Redis");
                return link;
            }
            Ok(Err(error)) => error,
            Err(_) => NotOpened {
                kind: FailureKind::Timeout,
                server: "Redis".to_owned(),
                reason: "no answer in time".to_owned(),
            },
        };
        shared.tally.count_failure(error.kind);
        // Once, and again when there is another reason; not at every attempt.
        if said.as_ref() != Some(&error) {
            let NotOpened { kind, server, reason } = &error;
            tracing::warn!(
                kind = kind.name(),
                server,
                reason,
                "cannot connect to Redis; trying on in the background"
            );
            said = Some(error);
        }
        shared.status.send_replace(Status::Away);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Looks at an open connection now and then until it is lost. Nobody else would notice while there are no requests, and
/// the first one afterwards would have to pay for it.
async fn look_after(shared: &Shared, mut link: MultiplexedConnection) {
    let mut may_ask_role = true;
    let mut looks = 0;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let patience = LOOK_TIMEOUT.max(shared.budget);
        match tokio::time::timeout(patience, ask_how_it_is(&mut link, &mut may_ask_role)).await {
            Ok(Ok(())) => {}
            Ok(Err(reason)) => {
                tracing::warn!(reason, "the connection to Redis is of no more use; opening another");
                return;
            }
            Err(_) => {
                let reason = "no answer in time";
                tracing::warn!(reason, "the connection to Redis is of no more use; opening another");
                return;
            }
        }
        if let Way::Sentinel(sentinels) = &shared.way
            && let Some(other) = sentinels.look().await
        {
            // What is under way on the old one may still be answered.
            link = other;
            looks = 0;
            shared.status.send_replace(Status::Ready(Link::Standalone(link.clone())));
            shared.eviction.look_first(Link::Standalone(link.clone())).await;
        }
        looks += 1;
        if looks >= LOOKS_AT_EVICTION {
            looks = 0;
            shared.eviction.look(Link::Standalone(link.clone())).await;
        }
    }
}

/// Whether a server still answers and is still a primary; if not, why it is of no use.
async fn ask_how_it_is(
    link: &mut MultiplexedConnection,
    may_ask_role: &mut bool,
) -> Result<(), &'static str> {
    let question = if *may_ask_role { "ROLE" } else { "PING" };
    match opener::ask(link, &::redis::cmd(question)).await {
        Ok(answer) if opener::says_replica(&answer) => Err("it has become a replica"),
        Ok(_) => Ok(()),
        Err(error) if errors::is_beyond_repair(&error) => Err("it is closed"),
        // An ACL may leave the command out, and every vain question is a line in its log.
        Err(error) if errors::code(&error) == Some("NOPERM") => {
            *may_ask_role = false;
            Ok(())
        }
        // It answers. What is wrong with it, the requests will hear.
        Err(_) => Ok(()),
    }
}

/// Opens connections to a cluster until one reaches every primary, which then takes the place of the one in use.
///
/// A new connection to a cluster that has lost a node, and has not replaced it yet, would be worse than the old one: the
/// library tries to reach that node over and over, and lets everybody wait meanwhile.
async fn replace_when_whole(shared: Rc<Shared>) {
    let mut pause = PAUSE_MIN;
    loop {
        let attempt = tokio::time::timeout(CONNECT_TIMEOUT * 2, shared.way.open_whole()).await;
        if let Ok(Some(link)) = attempt {
            tracing::info!("connected to every primary of the cluster");
            shared.status.send_replace(Status::Ready(link));
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
