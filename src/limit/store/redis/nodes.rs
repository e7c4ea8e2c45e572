//! Which server keeps a caller's counters: the one there is, or a node of a cluster.
//!
//! A cluster is routed to here, and not by the client library: there, a hash slot that moves or a node that hangs stops the calls
//! to all nodes, and a call that was lost is sent again, and so charged twice. Here every node has a connection, a breaker and a
//! budget of its own.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::redis::Value;
use tokio::task::JoinHandle;

use super::super::guard::within;
use super::super::{FailureKind, Phase, StoreError};
use super::connection::Way;
use super::errors::NotOpened;
use super::hash_slots::{HASH_SLOTS, SlotMap, hash_slot_of, split};
use super::node::{Answer, Call, Kit, Node, Redirect};
use super::opener::Opener;
use crate::clock;

/// How long one node may take to tell which hash slots it knows of.
const PATIENCE: Duration = Duration::from_millis(250);

/// How often the map is read when nothing calls for it.
const PERIOD: Duration = Duration::from_secs(15);

/// The pause between two readings of the map, whatever calls for them.
const PAUSE: Duration = Duration::from_millis(50);

/// The same while no node tells it.
const PAUSE_AWAY: Duration = Duration::from_millis(250);

/// So many names are tried for callers whose counters a node keeps. A node with few hash slots may stay without one: it then
/// answers probes with where else to ask, and that is an answer, too.
const NAMES_TRIED: u32 = 4_096;

/// How long a command waits that is to be repeated.
const AGAIN: Duration = Duration::from_millis(1);

/// A call is sent on at most so often. Its deadline ends it, not this number: while a hash slot moves, one call can need many,
/// since it is to be repeated until all of the caller's counters are on one side.
const HOPS_MAX: usize = 1_000;

/// So often without a pause. Two nodes that send us to each other may agree soon, if they are left in peace.
const HOPS_AT_ONCE: usize = 8;

/// Waits a little before a command is repeated.
///
/// # Errors
/// When there is no time left for that.
async fn pause(deadline: Option<Instant>) -> Result<(), StoreError> {
    if deadline.is_some_and(|deadline| clock::instant() + AGAIN >= deadline) {
        return Err(StoreError::Timeout);
    }
    tokio::time::sleep(AGAIN).await;
    Ok(())
}

/// The servers of a store.
#[derive(Debug)]
pub(super) enum Nodes {
    One(Rc<Node>),
    Cluster(Rc<Cluster>),
}

impl Nodes {
    /// One server.
    pub(super) fn one(name: &str, way: Way, kit: &Rc<Kit>) -> Self {
        Self::One(Node::new(name, way, kit))
    }

    /// A cluster that one of `seeds`, with their addresses, tells about.
    pub(super) fn cluster(seeds: Vec<(Box<str>, Opener)>, kit: &Rc<Kit>) -> Self {
        Self::Cluster(Rc::new(Cluster {
            seeds,
            kit: Rc::clone(kit),
            view: RefCell::default(),
            nodes: RefCell::default(),
            reading: OnceCell::new(),
        }))
    }

    /// Begins to connect, unless that has begun before. Only inside of a worker's runtime.
    pub(super) fn start(&self) {
        match self {
            Self::One(node) => node.tend(),
            Self::Cluster(cluster) => cluster.start(),
        }
    }

    /// The hash slot of a caller's counters; without a cluster it does not matter.
    pub(super) fn hash_slot(&self, caller: &str) -> u16 {
        match self {
            Self::One(_) => 0,
            Self::Cluster(_) => hash_slot_of(caller),
        }
    }

    /// The node that keeps a hash slot.
    pub(super) async fn at(&self, hash_slot: u16) -> Result<Rc<Node>, StoreError> {
        self.start();
        match self {
            Self::One(node) => Ok(Rc::clone(node)),
            Self::Cluster(cluster) => cluster.at(hash_slot).await,
        }
    }

    /// Asks the node of this hash slot, and those that it sends us on to, until one gives an answer. `ask` also takes whether the
    /// hash slot is only on its way there.
    pub(super) async fn ask<T>(
        &self,
        hash_slot: u16,
        deadline: Option<Instant>,
        ask: impl AsyncFn(&Node, bool) -> Result<Answer<T>, StoreError>,
    ) -> Result<T, StoreError> {
        let mut node = within(deadline, self.at(hash_slot)).await?;
        let mut in_passing = false;
        for hops in 0..HOPS_MAX {
            match ask(&node, in_passing).await? {
                Answer::Given(answer) => return Ok(answer),
                Answer::Elsewhere(redirect) => {
                    let is_moving = redirect == Redirect::Again;
                    let asked = Rc::clone(&node);
                    match self.follow(redirect, node, hops, deadline).await {
                        Ok(next) => (node, in_passing) = next,
                        Err(error) => {
                            // Each of them answers, so nobody else would notice. A hash slot on its way is no failure.
                            if !is_moving {
                                asked.guard.shard().record(Err(&error));
                            }
                            asked.guard.shard().complain(&error);
                            return Err(error);
                        }
                    }
                }
            }
        }
        Err(StoreError::Nonsense("sent on and on"))
    }

    /// Sends a call about the counters of this hash slot to wherever they are, and waits for ever if need be.
    pub(super) async fn send(&self, hash_slot: u16, call: &Call) -> Result<Value, StoreError> {
        self.ask(hash_slot, None, async |node: &Node, in_passing| node.send(call, in_passing).await).await
    }

    /// Whom to ask when `node` has sent us away, after `hops` others, and whether for this once only.
    async fn follow(
        &self,
        redirect: Redirect,
        node: Rc<Node>,
        hops: usize,
        deadline: Option<Instant>,
    ) -> Result<(Rc<Node>, bool), StoreError> {
        if redirect == Redirect::Again || hops >= HOPS_AT_ONCE {
            pause(deadline).await?;
        }
        match (redirect, self) {
            (Redirect::Again, _) => Ok((node, false)),
            (Redirect::Moved { hash_slot, address }, Self::Cluster(cluster)) => {
                let node = cluster.node(&address)?;
                cluster.kit.common.hash_slots().moved(hash_slot, &address);
                cluster.kit.stale.notify_one();
                Ok((node, false))
            }
            (Redirect::Ask { address }, Self::Cluster(cluster)) => {
                cluster.node(&address).map(|node| (node, true))
            }
            // One server, and it belongs to a cluster.
            (_, Self::One(_)) => Err(StoreError::Refused("MOVED".to_owned())),
        }
    }

    /// Whether the server of this hash slot may be asked for this caller, and there is no doubt that it will answer.
    pub(super) fn admits_beyond_doubt(&self, hash_slot: u16, caller: &str) -> bool {
        self.owner(hash_slot).is_some_and(|node| node.guard.shard().admits_beyond_doubt(caller))
    }

    /// The server of this hash slot, as far as it is known.
    pub(super) fn owner(&self, hash_slot: u16) -> Option<Rc<Node>> {
        match self {
            Self::One(node) => Some(Rc::clone(node)),
            Self::Cluster(cluster) => cluster.view().owner(hash_slot).cloned(),
        }
    }

    /// All servers that are known now.
    pub(super) fn all(&self) -> Vec<Rc<Node>> {
        match self {
            Self::One(node) => vec![Rc::clone(node)],
            Self::Cluster(cluster) => cluster.view().nodes.clone(),
        }
    }
}

/// A cluster, as one worker uses it.
#[derive(Debug)]
pub(super) struct Cluster {
    seeds: Vec<(Box<str>, Opener)>,
    kit: Rc<Kit>,
    view: RefCell<Rc<View>>,
    /// By address: those of the view, and those that keep no hash slots yet or any more.
    nodes: RefCell<HashMap<Box<str>, Rc<Node>>>,
    /// What reads the map; `None` before the first request.
    reading: OnceCell<JoinHandle<()>>,
}

/// The nodes of a map, by its indexes.
#[derive(Debug, Default)]
struct View {
    map: Arc<SlotMap>,
    nodes: Vec<Rc<Node>>,
}

impl View {
    fn owner(&self, hash_slot: u16) -> Option<&Rc<Node>> {
        self.map.owner(hash_slot).and_then(|index| self.nodes.get(index))
    }
}

impl Cluster {
    fn start(self: &Rc<Self>) {
        self.reading.get_or_init(|| tokio::task::spawn_local(keep_reading(Rc::downgrade(self))));
    }

    async fn at(&self, hash_slot: u16) -> Result<Rc<Node>, StoreError> {
        let mut changes = self.kit.common.hash_slots().watch();
        loop {
            let view = self.view();
            if let Some(node) = view.owner(hash_slot) {
                node.tend();
                return Ok(Rc::clone(node));
            }
            self.kit.stale.notify_one();
            let slots = self.kit.common.hash_slots();
            if view.map.is_known() {
                if !self.kit.common.is_quiet() && slots.may_complain(clock::instant()) {
                    tracing::warn!(
                        hash_slot,
                        "no node of the cluster keeps this hash slot: on_failure decides"
                    );
                }
                return Err(StoreError::Disconnected);
            }
            if slots.is_late(clock::instant(), self.kit.budget) {
                return Err(StoreError::Disconnected);
            }
            changes.changed().await.map_err(|_| StoreError::Disconnected)?;
        }
    }

    /// The nodes of the map as it is known now.
    fn view(&self) -> Rc<View> {
        let map = self.kit.common.hash_slots().now();
        let view = Rc::clone(&self.view.borrow());
        if Arc::ptr_eq(&view.map, &map) {
            return view;
        }
        let nodes: Vec<Rc<Node>> =
            map.addresses().iter().filter_map(|address| self.node(address).ok()).collect();
        if nodes.len() < map.addresses().len() {
            return view;
        }
        name_probers(&map, &nodes);
        self.nodes.borrow_mut().retain(|address, _| map.addresses().contains(address));
        self.kit.common.keep_shards(|address| map.addresses().iter().any(|kept| **kept == *address));
        let view = Rc::new(View { map, nodes });
        self.view.replace(Rc::clone(&view));
        view
    }

    /// The node at this address, known or not.
    fn node(&self, address: &str) -> Result<Rc<Node>, StoreError> {
        if let Some(node) = self.nodes.borrow().get(address) {
            return Ok(Rc::clone(node));
        }
        let (seed, (host, port)) =
            self.seeds.first().zip(split(address)).ok_or(StoreError::Nonsense("an address that is none"))?;
        let node = Node::new(address, Way::Node(Box::new(seed.1.at(host, port))), &self.kit);
        node.tend();
        self.nodes.borrow_mut().insert(address.into(), Rc::clone(&node));
        Ok(node)
    }

    /// Asks one after the other until one tells the map: those that decide first, then the others, then the seeds.
    /// If nobody does, what is wrong with each.
    async fn read_map(&self) -> Result<SlotMap, Vec<NotOpened>> {
        let mut nodes = self.view().nodes.clone();
        nodes.sort_by_key(|node| node.guard.shard().phase());
        for node in nodes.iter().filter(|node| node.guard.shard().phase() == Phase::Healthy) {
            let asked = tokio::time::timeout(PATIENCE, node.ask(&cluster_slots(), false)).await;
            let map = asked.ok().and_then(Result::ok);
            if let Some(map) = map.and_then(|answer| SlotMap::read(&answer, node.guard.shard().name())) {
                return Ok(map);
            }
        }
        let others = nodes.iter().filter_map(|node| {
            let address = node.guard.shard().name();
            let (host, port) = split(address)?;
            Some((address.into(), self.seeds.first()?.1.at(host, port)))
        });
        let others: Vec<(Box<str>, Opener)> = others.collect();
        let mut failures = Vec::new();
        for (address, opener) in others.iter().chain(&self.seeds) {
            match map_from(address, opener).await {
                Ok(map) => return Ok(map),
                Err(failure) => failures.push(failure),
            }
        }
        Err(failures)
    }

    /// Counts that nobody tells the map, and says it now and then: before there is one no node is known that could.
    fn complain(&self, failures: &[NotOpened]) {
        let Some(first) = failures.first() else { return };
        for failure in failures {
            self.kit.common.count_failure(failure.kind);
        }
        if !self.kit.common.is_quiet() && self.kit.common.hash_slots().may_complain(clock::instant()) {
            let (kind, reasons) =
                (first.kind.name(), failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "));
            tracing::warn!(
                kind,
                reasons,
                "no node tells who keeps which slots of the cluster: on_failure decides; trying on in the background"
            );
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(task) = self.reading.get() {
            task.abort();
        }
    }
}

/// Asks one server, over a link of its own. `address` is what it is called by others.
async fn map_from(address: &str, opener: &Opener) -> Result<SlotMap, NotOpened> {
    let asked = tokio::time::timeout(PATIENCE, async {
        let mut link = opener.open().await?;
        link.ask(&cluster_slots()).await.map_err(|error| opener.not_opened(&error))
    });
    let answer = asked.await.map_err(|_| opener.late())??;
    SlotMap::read(&answer, address)
        .ok_or_else(|| opener.failure(FailureKind::ClusterDown, "it knows of no slots"))
}

fn cluster_slots() -> ::redis::Cmd {
    let mut command = ::redis::cmd("CLUSTER");
    command.arg("SLOTS");
    command
}

/// Keeps the map up to date: when something calls for it, and now and then.
async fn keep_reading(cluster: Weak<Cluster>) {
    loop {
        let Some(this) = cluster.upgrade() else { return };
        let kit = Rc::clone(&this.kit);
        let slots = kit.common.hash_slots();
        // Each node may take its time, twice.
        let nodes = u32::try_from(this.seeds.len() + this.view().nodes.len()).unwrap_or(u32::MAX);
        if slots.claim(clock::instant(), PATIENCE.saturating_mul(nodes.saturating_mul(2))) {
            let map = this.read_map().await;
            slots.read(clock::instant(), if map.is_ok() { PAUSE } else { PAUSE_AWAY });
            match map {
                Ok(map) => slots.replace(map),
                Err(failures) if !slots.now().is_known() => this.complain(&failures),
                Err(_) => {}
            }
        }
        let wait = if this.view().map.is_known() { PERIOD } else { PAUSE_AWAY };
        drop(this);
        tokio::time::sleep(PAUSE).await;
        tokio::select! {
            () = kit.stale.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// Gives every node a caller whose counters it keeps, for probes.
fn name_probers(map: &SlotMap, nodes: &[Rc<Node>]) {
    let mut unnamed: Vec<bool> = (0..HASH_SLOTS).filter_map(|hash_slot| map.owner(hash_slot)).fold(
        vec![false; nodes.len()],
        |mut unnamed, owner| {
            unnamed[owner] = true;
            unnamed
        },
    );
    for number in 0..NAMES_TRIED {
        if !unnamed.contains(&true) {
            return;
        }
        let caller = format!("probe.{number}");
        let owner = map.owner(hash_slot_of(&caller));
        if let Some(index) = owner.filter(|index| unnamed[*index]) {
            nodes[index].probe_as(caller.into());
            unnamed[index] = false;
        }
    }
}
