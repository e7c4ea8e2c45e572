//! Real Redis servers, alone and as a cluster.

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::fake_clock::SteppedClock;
use super::process::{Process, START_LIMIT};
use super::{PORT_ATTEMPTS, eventually, free_port};

/// A reply of Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// `+OK`.
    Simple(String),
    /// `-ERR ...`.
    Error(String),
    /// A number.
    Number(i64),
    /// Bytes, or nothing.
    Bytes(Option<Vec<u8>>),
    /// Several replies.
    Many(Vec<Self>),
}

impl Reply {
    /// The text of a reply that is one.
    fn text(&self) -> String {
        match self {
            Self::Bytes(Some(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
            other => panic!("not a text: {other:?}"),
        }
    }
}

/// Names another server program than the `redis-server` on the PATH: `./test` runs the tests of the store once more with
/// each server that is supported.
pub(crate) const PROGRAM_VARIABLE: &str = "TOLLGATE_TEST_REDIS";

/// The server that the tests start.
pub(crate) fn program() -> String {
    std::env::var(PROGRAM_VARIABLE).unwrap_or_else(|_| "redis-server".to_owned())
}

/// How long a node of a cluster may be silent before the others take it for lost.
const NODE_TIMEOUT_MS: &str = "1000";

/// The slots of a cluster.
const SLOTS: usize = 16_384;

/// A Redis server with a port and a directory of its own. Dies with the test.
#[derive(Debug)]
pub(crate) struct Redis {
    process: Option<Process>,
    host: Ipv4Addr,
    port: u16,
    directory: TempDir,
    kind: Kind,
    environment: Vec<(&'static str, String)>,
    /// Further words of its command line.
    further: Vec<String>,
    /// Whether the default user has a password, and the test another user.
    locked: Cell<bool>,
}

/// How a server is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Alone, keeping what `SAVE` is told to.
    Plain,
    /// With every write in a file before it is answered.
    Journaled,
    /// A node of a cluster.
    Node,
    /// In a network of its own.
    Apart,
}

impl Redis {
    /// Starts an empty server.
    pub(crate) fn start() -> Self {
        Self::start_as(Kind::Plain)
    }

    /// Starts an empty server that has every write in a file before it answers: killed, it comes back with all of them.
    pub(crate) fn start_journaled() -> Self {
        Self::start_as(Kind::Journaled)
    }

    /// Starts an empty server whose clock is this one.
    pub(crate) fn start_by(clock: &SteppedClock) -> Self {
        // The C library once more, so that its malloc is found first: the one that Redis brings asks for the time before
        // the false clock is ready to tell it.
        let environment = clock.environment().map(|(name, value)| {
            (name, if name == "LD_PRELOAD" { format!("{value} libc.so.6") } else { value.to_owned() })
        });
        Self::start_like(Kind::Plain, &[], &environment)
    }

    /// Starts an empty server on the far end of a wire that can be cut; see [`Wire`].
    pub(crate) fn start_apart() -> (Self, Wire) {
        let redis = Self::start_as(Kind::Apart);
        let wire = Wire { of: redis.running().id() };
        (redis, wire)
    }

    /// Starts an empty server with further words on its command line.
    pub(crate) fn start_saying(further: &[&str]) -> Self {
        Self::start_like(Kind::Plain, further, &[])
    }

    /// Starts a node that belongs to a cluster and keeps no slots.
    pub(crate) fn start_lonely_node() -> Self {
        Self::start_as(Kind::Node)
    }

    /// A port and a directory, and no server yet.
    pub(crate) fn absent() -> Self {
        Self {
            process: None,
            host: Ipv4Addr::LOCALHOST,
            port: free_port(),
            directory: tempfile::tempdir().unwrap(),
            kind: Kind::Plain,
            environment: Vec::new(),
            further: Vec::new(),
            locked: Cell::new(false),
        }
    }

    fn start_as(kind: Kind) -> Self {
        Self::start_like(kind, &[], &[])
    }

    fn start_like(kind: Kind, further: &[&str], environment: &[(&'static str, String)]) -> Self {
        let host = if kind == Kind::Apart { Wire::addresses()[1] } else { Ipv4Addr::LOCALHOST };
        for _ in 0..PORT_ATTEMPTS {
            let further = further.iter().map(|word| (*word).to_owned()).collect();
            let mut redis = Self { kind, host, further, environment: environment.to_vec(), ..Self::absent() };
            // Nodes talk to each other on a port 10,000 higher.
            if kind == Kind::Node && redis.port > u16::MAX - 10_000 {
                continue;
            }
            if redis.try_launch() {
                return redis;
            }
        }
        panic!("{} found no free port in {PORT_ATTEMPTS} attempts", program());
    }

    /// Starts the server on the port it has, with the data that was saved.
    #[track_caller]
    pub(crate) fn launch(&mut self) {
        assert!(self.try_launch(), "{} does not come up on port {}", program(), self.port);
    }

    fn try_launch(&mut self) -> bool {
        let mut command = if self.kind == Kind::Apart {
            let mut command = Command::new("unshare");
            command.arg("--net").arg(program()).args(["--bind", "0.0.0.0", "--protected-mode", "no"]);
            command
        } else {
            let mut command = Command::new(program());
            command.args(["--bind", "127.0.0.1"]);
            command
        };
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
            .args(["--port", &self.port.to_string()])
            .args(["--save", "", "--daemonize", "no"])
            .args(["--appendonly", if self.kind == Kind::Journaled { "yes" } else { "no" }])
            // Written before it is answered, and so safe from a kill. Waiting for the disk would only protect from a power
            // cut, and stalls everything now and then.
            .args(["--appendfsync", "no"])
            // A replica that comes is given its copy at once, and not after 5 s in which others might come.
            .args(["--repl-diskless-sync-delay", "0"])
            .arg("--dir")
            .arg(self.directory.path());
        if self.kind == Kind::Node {
            command.args(["--cluster-enabled", "yes", "--cluster-node-timeout", NODE_TIMEOUT_MS]);
            // As the manual wants it: the callers of one lost primary are no reason to refuse all others.
            command.args(["--cluster-require-full-coverage", "no"]);
        }
        command.args(&self.further);
        let installed = Command::new(program()).arg("--version").output().is_ok();
        assert!(installed, "there is no {}; ./test installs redis-server (apt: redis-server)", program());
        let mut process = Process::start(&mut command);
        if self.kind == Kind::Apart {
            Wire { of: process.id() }.plug();
        }
        let up = eventually("the server to start or to give up", START_LIMIT, || {
            if process.exit_code().is_some() {
                return Some(false);
            }
            // By its process id: another server may have been faster on this port.
            let own = format!("process_id:{}\r\n", process.id());
            self.try_cmd(&["INFO", "server"]).ok()?.text().contains(&own).then_some(true)
        });
        self.process = Some(process);
        up
    }

    /// Its port.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Its URL.
    pub(crate) fn url(&self) -> String {
        format!("redis://{}:{}", self.host, self.port)
    }

    /// The `[store]` tables of a gateway that counts here. While it cannot, it counts whole limits: how many other gateways a
    /// test has, and whether they were heard of, does not matter.
    pub(crate) fn tables(&self, on_failure: &str, budget: &str) -> String {
        tables(&self.url(), on_failure, budget)
    }

    /// Runs one command. Fails on an error reply.
    #[track_caller]
    pub(crate) fn cmd(&self, words: &[&str]) -> Reply {
        match self.try_cmd(words) {
            Ok(Reply::Error(error)) => panic!("{words:?}: {error}"),
            Ok(reply) => reply,
            Err(error) => panic!("{words:?}: {error}"),
        }
    }

    /// Whether the server takes this command.
    #[track_caller]
    pub(crate) fn accepts(&self, words: &[&str]) -> bool {
        !matches!(self.try_cmd(words).unwrap(), Reply::Error(_))
    }

    /// Sends a command whose answer nobody will read for now. The connection lives as long as what is given back.
    #[track_caller]
    pub(crate) fn begin(&self, words: &[&str]) -> TcpStream {
        let mut stream = TcpStream::connect((self.host, self.port)).unwrap();
        stream.write_all(&command(words)).unwrap();
        stream
    }

    fn try_cmd(&self, words: &[&str]) -> std::io::Result<Reply> {
        let mut client = Client::open(self.host, self.port)?;
        if self.locked.get() {
            client.try_cmd(&["AUTH", "test", "test"])?;
        }
        client.try_cmd(words)
    }

    /// A connection that stays.
    pub(crate) fn client(&self) -> Client {
        Client::open(self.host, self.port).unwrap()
    }

    /// From now on everybody needs a password.
    pub(crate) fn lock(&self) {
        self.cmd(&["ACL", "SETUSER", "test", "on", ">test", "~*", "&*", "+@all"]);
        self.cmd(&["ACL", "SETUSER", "default", "resetpass", ">secret"]);
        self.locked.set(true);
    }

    /// From now on nobody does.
    pub(crate) fn unlock(&self) {
        self.cmd(&["ACL", "SETUSER", "default", "nopass"]);
        self.locked.set(false);
    }

    /// Ends the connections of all others.
    pub(crate) fn cut(&self) {
        self.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    }

    /// Its directory.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Kills it and starts it again with further words on its command line.
    #[track_caller]
    pub(crate) fn restart_with(&mut self, further: &[&str]) {
        self.further = further.iter().map(|word| (*word).to_owned()).collect();
        self.restart();
    }

    /// The number that a command answers.
    #[track_caller]
    pub(crate) fn number(&self, words: &[&str]) -> i64 {
        match self.cmd(words) {
            Reply::Number(number) => number,
            other => panic!("{words:?} answered {other:?}"),
        }
    }

    /// How often a command was called, and how many microseconds the server spent on it in all.
    #[track_caller]
    pub(crate) fn spent_on(&self, command: &str) -> (f64, f64) {
        let stats = self.info("commandstats", &format!("cmdstat_{command}"));
        let number = |name: &str| {
            let mut pairs = stats.as_deref()?.split(',');
            pairs.find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?.parse().ok()
        };
        (number("calls").unwrap_or(0.0), number("usec").unwrap_or(0.0))
    }

    /// The bytes of a string key.
    #[track_caller]
    pub(crate) fn value(&self, key: &str) -> Option<Vec<u8>> {
        match self.cmd(&["GET", key]) {
            Reply::Bytes(bytes) => bytes,
            other => panic!("GET {key} answered {other:?}"),
        }
    }

    /// A field of a section of `INFO`.
    #[track_caller]
    pub(crate) fn info(&self, section: &str, field: &str) -> Option<String> {
        let info = self.cmd(&["INFO", section]).text();
        info.lines().find_map(|line| Some(line.strip_prefix(field)?.strip_prefix(':')?.to_owned()))
    }

    /// Its name in a cluster.
    #[track_caller]
    pub(crate) fn id(&self) -> String {
        self.cmd(&["CLUSTER", "MYID"]).text()
    }

    /// All keys of counters, sorted: without those by which gateways are counted and the server is probed.
    #[track_caller]
    pub(crate) fn keys(&self) -> Vec<String> {
        let Reply::Many(replies) = self.cmd(&["KEYS", "*"]) else {
            panic!("KEYS answers a list");
        };
        let mut keys: Vec<String> = replies
            .into_iter()
            .map(|reply| match reply {
                Reply::Bytes(Some(bytes)) => String::from_utf8(bytes).expect("a key is text"),
                other => panic!("KEYS listed {other:?}"),
            })
            .filter(|key| !key.contains(":{gateways}:") && !key.contains(":{probe"))
            .collect();
        keys.sort();
        keys
    }

    /// Freezes it: connections are accepted by the kernel, nothing is answered.
    pub(crate) fn stop(&self) {
        self.running().signal("STOP");
    }

    /// Lets it run again.
    pub(crate) fn cont(&self) {
        self.running().signal("CONT");
    }

    /// Kills it without a chance to save.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
    }

    /// Throws away what it has saved, while it does not run.
    pub(crate) fn forget(&mut self) {
        assert!(self.process.is_none(), "a running server would save again");
        self.directory = tempfile::tempdir().unwrap();
    }

    /// Kills it and starts it again on the same port, with the data of the last `SAVE`.
    #[track_caller]
    pub(crate) fn restart(&mut self) {
        self.kill();
        self.launch();
    }

    fn running(&self) -> &Process {
        self.process.as_ref().expect("the server runs")
    }
}

/// The wire to a Redis in a network of its own: a network namespace that ends with the server, and takes the wire with it.
///
/// Where a proxy closes a connection or keeps it open, here packets are gone, and nobody is told.
#[derive(Debug)]
pub(crate) struct Wire {
    /// The process on the far end.
    of: u32,
}

impl Wire {
    /// Of this end and of the far one. One wire for each process of tests.
    fn addresses() -> [Ipv4Addr; 2] {
        // Four addresses for each process id, from 10.192.0.0 on.
        let base = 0x0ac0_0000 | (std::process::id() % 0x10_0000) << 2;
        [base + 1, base + 2].map(Ipv4Addr::from)
    }

    #[track_caller]
    fn plug(&self) {
        let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        eventually("a network of its own (which root alone can make)", START_LIMIT, || {
            (network(&self.of.to_string())? != network("self")?).then_some(())
        });
        let ([near, far], of) = (Self::addresses(), self.of);
        shell(&format!("ip link add tollgate{of} type veth peer name far netns {of}"));
        shell(&format!("ip address add {near}/30 dev tollgate{of} && ip link set tollgate{of} up"));
        self.at_the_far_end(&format!("ip address add {far}/30 dev far && ip link set far up"));
    }

    /// From now on all packets are lost, in both directions.
    #[track_caller]
    pub(crate) fn lose_packets(&self) {
        let chain = |hook| {
            format!("add chain inet cut {hook} {{ type filter hook {hook} priority 0; policy drop; }}")
        };
        self.at_the_far_end(&format!("nft 'add table inet cut; {}; {}'", chain("input"), chain("output")));
    }

    /// Packets arrive again.
    #[track_caller]
    pub(crate) fn lose_nothing(&self) {
        self.at_the_far_end("nft delete table inet cut");
    }

    /// Pulls the plug out of the far end.
    #[track_caller]
    pub(crate) fn pull(&self) {
        self.at_the_far_end("ip link set far down");
    }

    /// Puts it back.
    #[track_caller]
    pub(crate) fn put_back(&self) {
        self.at_the_far_end("ip link set far up");
    }

    #[track_caller]
    fn at_the_far_end(&self, line: &str) {
        shell(&format!("nsenter --net --target {} sh -c \"{line}\"", self.of));
    }
}

#[track_caller]
fn shell(line: &str) {
    let output = Command::new("sh").args(["-c", line]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A command as Redis reads it.
fn command(words: &[&str]) -> Vec<u8> {
    let texts = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len()));
    format!("*{}\r\n{}", words.len(), texts.collect::<String>()).into_bytes()
}

/// The `[store]` tables of a gateway that counts in the Redis with this URL.
pub(super) fn tables(url: &str, on_failure: &str, budget: &str) -> String {
    format!(
        "[store]\nkind = \"redis\"\non_failure = \"{on_failure}\"\nlocal_share = \"100%\"\n\n[store.redis]\nurl = \"{url}\"\nbudget = \"{budget}\""
    )
}

/// How many primaries a cluster has at first, and how many replicas: one each.
const PRIMARIES: usize = 3;

/// A Redis Cluster of three primaries with a replica each.
#[derive(Debug)]
pub(crate) struct Cluster {
    nodes: Vec<Redis>,
}

impl Cluster {
    /// Starts the nodes, joins them, and waits until each sees the whole cluster.
    pub(crate) fn start() -> Self {
        let cluster = Self { nodes: (0..2 * PRIMARIES).map(|_| Redis::start_as(Kind::Node)).collect() };
        cluster.share_slots();
        cluster.meet();
        cluster.replicate();
        cluster
    }

    fn share_slots(&self) {
        for (at, node) in self.nodes.iter().enumerate() {
            node.cmd(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]);
        }
        for (at, node) in self.primaries().iter().enumerate() {
            let slots = SLOTS * at / PRIMARIES..SLOTS * (at + 1) / PRIMARIES;
            let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
            let words: Vec<&str> =
                ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
            node.cmd(&words);
        }
    }

    fn meet(&self) {
        for node in &self.nodes {
            for other in &self.nodes {
                node.cmd(&["CLUSTER", "MEET", "127.0.0.1", &other.port.to_string()]);
            }
        }
        let everybody = format!("cluster_known_nodes:{}\r\n", self.nodes.len());
        self.each("to know all nodes", |node| {
            let handshakes = node.cmd(&["CLUSTER", "NODES"]).text().contains("handshake");
            !handshakes && node.cmd(&["CLUSTER", "INFO"]).text().contains(&everybody)
        });
    }

    fn replicate(&self) {
        for (primary, replica) in self.primaries().iter().zip(self.replicas()) {
            replica.cmd(&["CLUSTER", "REPLICATE", &primary.id()]);
        }
        for replica in self.replicas() {
            eventually("a replica to be in step", START_LIMIT, || {
                replica
                    .info("replication", "master_link_status")
                    .is_some_and(|status| status == "up")
                    .then_some(())
            });
        }
        self.each("to see the whole cluster", |node| {
            let replicas = node.cmd(&["CLUSTER", "NODES"]).text().matches("slave").count();
            replicas == PRIMARIES && node.cmd(&["CLUSTER", "INFO"]).text().contains("cluster_state:ok")
        });
    }

    #[track_caller]
    fn each(&self, what: &str, holds: impl Fn(&Redis) -> bool) {
        for node in &self.nodes {
            eventually(&format!("node {} {what}", node.port), START_LIMIT, || holds(node).then_some(()));
        }
    }

    /// The primaries it began with.
    pub(crate) fn primaries(&self) -> &[Redis] {
        &self.nodes[..PRIMARIES]
    }

    /// The replicas it began with, in the order of their primaries.
    pub(crate) fn replicas(&self) -> &[Redis] {
        &self.nodes[PRIMARIES..]
    }

    /// The node that takes commands on this key. All nodes must be running.
    #[track_caller]
    pub(crate) fn owner(&self, key: &str) -> &Redis {
        let mut nodes = self.nodes.iter();
        nodes.find(|node| node.accepts(&["PTTL", key])).expect("a healthy cluster owns every slot")
    }

    /// One of the nodes, to kill it or to start it again: the primaries it began with, then their replicas in that order.
    pub(crate) fn node(&mut self, at: usize) -> &mut Redis {
        &mut self.nodes[at]
    }

    /// Begins to move the slot of `key` to another primary. From now on its owner sends those who ask for a key that it
    /// does not hold (any more) there.
    #[track_caller]
    pub(crate) fn begin_move(&self, key: &str) -> SlotMove<'_> {
        let from = self.owner(key);
        let to = self.primaries().iter().find(|node| node.port != from.port).expect("there are three");
        let slot = from.number(&["CLUSTER", "KEYSLOT", key]).to_string();
        to.cmd(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from.id()]);
        from.cmd(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to.id()]);
        SlotMove { cluster: self, slot, from, to }
    }

    /// The `[store]` tables of a gateway that counts here. While it cannot, it counts whole limits: how many other gateways a
    /// test has, and whether they were heard of, does not matter.
    pub(crate) fn tables(&self, on_failure: &str, budget: &str) -> String {
        let urls: Vec<String> = self.primaries().iter().map(|node| format!("\"{}\"", node.url())).collect();
        format!(
            "[store]\nkind = \"redis\"\non_failure = \"{on_failure}\"\nlocal_share = \"100%\"\n\n[store.redis]\nmode = \"cluster\"\nnodes = [{}]\nbudget = \"{budget}\"",
            urls.join(", ")
        )
    }
}

/// A slot on its way from one primary to another, by the commands that `redis-cli --cluster reshard` uses.
#[derive(Debug)]
pub(crate) struct SlotMove<'cluster> {
    cluster: &'cluster Cluster,
    slot: String,
    from: &'cluster Redis,
    to: &'cluster Redis,
}

impl SlotMove<'_> {
    /// Moves some of its keys, together.
    #[track_caller]
    pub(crate) fn carry(&self, keys: &[&str]) {
        let port = self.to.port.to_string();
        let words = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        let reply = self.from.cmd(&[&words[..], keys].concat());
        assert_eq!(reply, Reply::Simple("OK".to_owned()), "none of {keys:?} was there to carry");
    }

    /// Makes the other primary the owner.
    #[track_caller]
    pub(crate) fn finish(self) {
        let id = self.to.id();
        let others = self.cluster.primaries().iter().filter(|node| node.port != self.to.port);
        for node in [self.to].into_iter().chain(others) {
            node.cmd(&["CLUSTER", "SETSLOT", &self.slot, "NODE", &id]);
        }
    }
}

/// A connection of the test's own.
#[derive(Debug)]
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    fn open(host: Ipv4Addr, port: u16) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&SocketAddr::from((host, port)), Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn try_cmd(&mut self, words: &[&str]) -> std::io::Result<Reply> {
        self.send(words)?;
        read_reply(&mut self.0)
    }

    /// Sends one command and waits for no reply.
    pub(crate) fn send(&mut self, words: &[&str]) -> std::io::Result<()> {
        self.0.get_mut().write_all(&command(words))
    }

    /// Runs one command. Fails on an error reply.
    #[track_caller]
    pub(crate) fn cmd(&mut self, words: &[&str]) -> Reply {
        match self.try_cmd(words).unwrap() {
            Reply::Error(error) => panic!("{words:?}: {error}"),
            reply => reply,
        }
    }
}

/// What the Sentinels call their primary.
const MASTER_NAME: &str = "mymaster";

/// Three Sentinels, a primary and a replica.
#[derive(Debug)]
pub(crate) struct Watched {
    sentinels: Vec<Sentinel>,
    servers: [Redis; 2],
}

#[derive(Debug)]
struct Sentinel {
    process: Process,
    port: u16,
    _directory: TempDir,
}

impl Watched {
    /// Starts them, and waits until every Sentinel knows all others.
    pub(crate) fn start() -> Self {
        let servers = [Redis::start(), Redis::start()];
        let [primary, replica] = &servers;
        replica.cmd(&["REPLICAOF", "127.0.0.1", &primary.port.to_string()]);
        eventually("the replica to be in step", START_LIMIT, || {
            let status = replica.info("replication", "master_link_status");
            (status.as_deref() == Some("up")).then_some(())
        });
        let sentinels: Vec<Sentinel> = (0..3).map(|_| Sentinel::start(primary.port)).collect();
        let watched = Self { sentinels, servers };
        for sentinel in &watched.sentinels {
            eventually("the Sentinels to know each other", START_LIMIT, || {
                let Reply::Many(fields) = ask(sentinel.port, &["SENTINEL", "MASTER", MASTER_NAME]).ok()?
                else {
                    return None;
                };
                let texts: Vec<String> = fields.iter().map(Reply::text).collect();
                let field =
                    |name: &str| texts.chunks(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
                (field("num-other-sentinels")? == "2" && field("num-slaves")? == "1").then_some(())
            });
        }
        watched
    }

    /// The server that is the primary now, by its own word.
    pub(crate) fn primary(&self) -> Option<usize> {
        let is_primary = |redis: &Redis| {
            redis.process.is_some()
                && matches!(redis.try_cmd(&["ROLE"]), Ok(Reply::Many(parts)) if parts[0].text() == "master")
        };
        self.servers.iter().position(is_primary)
    }

    /// One of the two servers.
    pub(crate) fn server(&mut self, at: usize) -> &mut Redis {
        &mut self.servers[at]
    }

    /// Has the Sentinels make the replica the primary.
    #[track_caller]
    pub(crate) fn fail_over(&self) {
        eventually("a Sentinel to begin", START_LIMIT, || {
            let reply = ask(self.sentinels[0].port, &["SENTINEL", "FAILOVER", MASTER_NAME]).unwrap();
            (reply == Reply::Simple("OK".to_owned())).then_some(())
        });
    }

    /// Has every Sentinel ask for this password.
    #[track_caller]
    pub(crate) fn lock_sentinels(&self, password: &str) {
        for sentinel in &self.sentinels {
            let words = ["ACL", "SETUSER", "default", "resetpass", &format!(">{password}")];
            assert_eq!(ask(sentinel.port, &words).unwrap(), Reply::Simple("OK".to_owned()));
        }
    }

    /// Freezes one of the Sentinels.
    pub(crate) fn stop_sentinel(&self, at: usize) {
        self.sentinels[at].process.signal("STOP");
    }

    /// The `[store]` tables of a gateway that counts here.
    pub(crate) fn tables(&self, on_failure: &str, budget: &str) -> String {
        let urls: Vec<String> = self
            .sentinels
            .iter()
            .map(|sentinel| format!("\"redis://127.0.0.1:{}\"", sentinel.port))
            .collect();
        format!(
            "[store]\nkind = \"redis\"\non_failure = \"{on_failure}\"\n\n[store.redis]\nmode = \"sentinel\"\nmaster_name = \"{MASTER_NAME}\"\nnodes = [{}]\nbudget = \"{budget}\"",
            urls.join(", ")
        )
    }
}

impl Sentinel {
    fn start(primary: u16) -> Self {
        for _ in 0..PORT_ATTEMPTS {
            let (port, directory) = (free_port(), tempfile::tempdir().unwrap());
            let file = directory.path().join("sentinel.conf");
            let config = format!(
                "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor {MASTER_NAME} 127.0.0.1 {primary} 2\nsentinel down-after-milliseconds {MASTER_NAME} 1000\nsentinel failover-timeout {MASTER_NAME} 6000\n",
                directory.path().display()
            );
            std::fs::write(&file, config).unwrap();
            let mut process = Process::start(Command::new(program()).arg(&file).arg("--sentinel"));
            let up = eventually("a Sentinel to start or to give up", START_LIMIT, || {
                if process.exit_code().is_some() {
                    return Some(false);
                }
                ask(port, &["PING"]).is_ok().then_some(true)
            });
            if up {
                return Self { process, port, _directory: directory };
            }
        }
        panic!("no Sentinel found a free port in {PORT_ATTEMPTS} attempts");
    }
}

fn ask(port: u16, words: &[&str]) -> std::io::Result<Reply> {
    Client::open(Ipv4Addr::LOCALHOST, port)?.try_cmd(words)
}

fn read_reply(source: &mut impl BufRead) -> std::io::Result<Reply> {
    let mut line = String::new();
    source.read_line(&mut line)?;
    let Some((kind, rest)) = line.trim_end().split_at_checked(1) else {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    };
    let number = || rest.parse::<i64>().expect("RESP numbers are numbers");
    Ok(match kind {
        "+" => Reply::Simple(rest.to_owned()),
        "-" => Reply::Error(rest.to_owned()),
        ":" => Reply::Number(number()),
        "$" => {
            let Ok(length) = usize::try_from(number()) else {
                return Ok(Reply::Bytes(None));
            };
            let mut bytes = vec![0; length + 2];
            source.read_exact(&mut bytes)?;
            bytes.truncate(length);
            Reply::Bytes(Some(bytes))
        }
        "*" => {
            let count = number().max(0);
            let replies: std::io::Result<Vec<Reply>> = (0..count).map(|_| read_reply(source)).collect();
            Reply::Many(replies?)
        }
        other => return Err(std::io::Error::other(format!("not RESP: {other:?}"))),
    })
}
