//! Real Redis servers, alone and as a cluster.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

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

/// A Redis server with a port and a directory of its own. Dies with the test.
#[derive(Debug)]
pub(crate) struct Redis {
    process: Option<Process>,
    port: u16,
    directory: TempDir,
    cluster: bool,
}

impl Redis {
    /// Starts an empty server.
    pub(crate) fn start() -> Self {
        Self::start_as(false)
    }

    /// A port and a directory, and no server yet.
    pub(crate) fn absent() -> Self {
        Self { process: None, port: free_port(), directory: tempfile::tempdir().unwrap(), cluster: false }
    }

    fn start_as(cluster: bool) -> Self {
        for _ in 0..PORT_ATTEMPTS {
            let mut redis = Self { cluster, ..Self::absent() };
            if cluster && redis.port > u16::MAX - 10_000 {
                continue;
            }
            if redis.try_launch() {
                return redis;
            }
        }
        panic!("redis-server found no free port in {PORT_ATTEMPTS} attempts");
    }

    /// Starts the server on the port it has, with the data that was saved.
    #[track_caller]
    pub(crate) fn launch(&mut self) {
        assert!(self.try_launch(), "redis-server does not come up on port {}", self.port);
    }

    fn try_launch(&mut self) -> bool {
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .arg("--dir")
            .arg(self.directory.path());
        if self.cluster {
            command.args(["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]);
        }
        let installed = Command::new("redis-server").arg("--version").output().is_ok();
        assert!(installed, "redis-server is not on the PATH; ./test installs it (apt: redis-server)");
        let mut process = Process::start(&mut command);
        let up = eventually("redis-server to start or to give up", START_LIMIT, || {
            if process.exit_code().is_some() {
                return Some(false);
            }
            let answer = self.try_cmd(&["PING"]).ok()?;
            (answer == Reply::Simple("PONG".to_owned())).then_some(true)
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
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The `[store]` tables of a gateway that counts here.
    pub(crate) fn tables(&self, on_failure: &str, budget: &str) -> String {
        format!(
            "[store]\nkind = \"redis\"\non_failure = \"{on_failure}\"\n\n[store.redis]\nurl = \"{}\"\nbudget = \"{budget}\"",
            self.url()
        )
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

    fn try_cmd(&self, words: &[&str]) -> std::io::Result<Reply> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        stream.write_all(request.as_bytes())?;
        read_reply(&mut BufReader::new(stream))
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
        let Reply::Bytes(Some(text)) = self.cmd(&["INFO", "commandstats"]) else {
            panic!("INFO answers text");
        };
        let text = String::from_utf8(text).expect("INFO is text");
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:")));
        let number = |name: &str| {
            let value = line?.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
            value.parse().ok()
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

    /// All keys, sorted.
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

/// A Redis Cluster of three nodes without replicas.
#[derive(Debug)]
pub(crate) struct Cluster {
    nodes: Vec<Redis>,
}

impl Cluster {
    /// Starts the nodes, joins them, and waits until each sees the whole cluster.
    pub(crate) fn start() -> Self {
        let nodes: Vec<Redis> = (0..3).map(|_| Redis::start_as(true)).collect();
        let output = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())))
            .args(["--cluster-replicas", "0", "--cluster-yes"])
            .output()
            .expect("redis-cli is on the PATH; ./test installs it (apt: redis-tools)");
        assert!(output.status.success(), "no cluster: {}", String::from_utf8_lossy(&output.stdout));
        for node in &nodes {
            eventually("cluster_state:ok", START_LIMIT, || {
                let Reply::Bytes(Some(info)) = node.cmd(&["CLUSTER", "INFO"]) else {
                    return None;
                };
                String::from_utf8_lossy(&info).contains("cluster_state:ok").then_some(())
            });
        }
        Self { nodes }
    }

    /// Its nodes.
    pub(crate) fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// The `[store]` tables of a gateway that counts here.
    pub(crate) fn tables(&self) -> String {
        let urls: Vec<String> = self.nodes.iter().map(|node| format!("\"{}\"", node.url())).collect();
        format!(
            "[store]\nkind = \"redis\"\non_failure = \"deny\"\n\n[store.redis]\nmode = \"cluster\"\nnodes = [{}]\nbudget = \"2s\"",
            urls.join(", ")
        )
    }
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
