//! The real `tollgate`, started on free ports.

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::client::{Answer, Connection, Request};
use super::config::Config;
use super::eventually;
use super::process::{Process, START_LIMIT};

/// A running gateway. Killed when dropped; a failing test prints what it wrote.
#[derive(Debug)]
pub(crate) struct Gateway {
    process: Process,
    public: SocketAddr,
    admin: SocketAddr,
    _directory: TempDir,
}

/// A request to one gateway.
#[derive(Debug)]
pub(crate) struct Call<'gateway> {
    gateway: &'gateway Gateway,
    request: Request,
}

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The exit code.
    pub(crate) code: i32,
    /// Both outputs.
    pub(crate) output: String,
}

/// The built binary, ready for arguments.
pub(crate) fn tollgate() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.env("RUST_BACKTRACE", "0");
    command
}

/// Runs a command of the binary on this configuration to its end.
#[track_caller]
pub(crate) fn run(verb: &str, config: &str, environment: &[(&str, &str)]) -> Finished {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.toml");
    std::fs::write(&file, config).unwrap();
    let mut process =
        Process::start(tollgate().args([verb, "-c"]).arg(&file).envs(environment.iter().copied()));
    let code = process.wait(START_LIMIT);
    let output = [process.stdout.all(), process.stderr.all()].concat().join("\n");
    Finished { code, output }
}

impl Gateway {
    /// Starts it with this configuration and waits until it listens.
    #[track_caller]
    pub(crate) fn start(config: &Config) -> Self {
        Self::start_with(&config.text(), &[])
    }

    /// As [`Self::start`], with further environment variables.
    #[track_caller]
    pub(crate) fn start_with(config: &str, environment: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tollgate.toml");
        std::fs::write(&file, config).unwrap();
        let mut command = tollgate();
        command.args(["serve", "-c"]).arg(&file).envs(environment.iter().copied());
        Self::launch(&mut command, directory, |process| {
            process.stderr.all().iter().find_map(|line| listening(line))
        })
    }

    /// Starts it with these files and directories, which belong to the test: it may change them.
    #[track_caller]
    pub(crate) fn start_on(sources: &[&Path]) -> Self {
        let mut command = tollgate();
        command.arg("serve");
        for source in sources {
            command.arg("-c").arg(source);
        }
        Self::start_by(&mut command)
    }

    /// Starts it by a command of the test's own, which becomes the gateway.
    #[track_caller]
    pub(crate) fn start_by(command: &mut Command) -> Self {
        Self::launch(command, tempfile::tempdir().unwrap(), |process| {
            process.stderr.all().iter().find_map(|line| listening(line))
        })
    }

    /// Starts it from a shell, which first runs `preparation`, with these environment variables.
    #[track_caller]
    pub(crate) fn start_behind(preparation: &str, config: &Config, environment: &[(&str, String)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tollgate.toml");
        std::fs::write(&file, config.text()).unwrap();
        let mut command = Command::new("bash");
        command.arg("-c").arg(format!("{preparation}\nexec \"$0\" serve -c \"$1\""));
        command.arg(tollgate().get_program()).arg(&file).env("RUST_BACKTRACE", "0");
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        Self::launch(&mut command, directory, |process| {
            process.stderr.all().iter().find_map(|line| listening(line))
        })
    }

    /// As [`Self::start`], with these listening sockets handed over as systemd does.
    #[track_caller]
    pub(crate) fn start_on_sockets(sockets: &[&TcpListener], names: &str, config: &Config) -> Self {
        let inherited: Vec<socket2::Socket> = sockets
            .iter()
            .map(|socket| {
                let socket = socket2::Socket::from(socket.try_clone().unwrap());
                socket.set_cloexec(false).unwrap();
                socket
            })
            .collect();
        // The protocol counts from 3. The descriptors here are larger than that, and in order.
        let moves: String =
            (3..).zip(&inherited).map(|(to, from)| format!("{to}<&{} ", from.as_raw_fd())).collect();
        let count = inherited.len().to_string();
        let environment = [("LISTEN_FDS", count), ("LISTEN_FDNAMES", names.to_owned())];
        Self::start_behind(&format!("exec {moves}\nexport LISTEN_PID=$$"), config, &environment)
    }

    /// `tollgate demo` on free ports.
    #[track_caller]
    pub(crate) fn demo() -> Self {
        let mut command = tollgate();
        command.args(["demo", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        Self::launch(&mut command, tempfile::tempdir().unwrap(), |process| introduced(&process.stdout.all()))
    }

    #[track_caller]
    fn launch(
        command: &mut Command,
        directory: TempDir,
        addresses: impl Fn(&Process) -> Option<(SocketAddr, SocketAddr)>,
    ) -> Self {
        command.current_dir(directory.path());
        let mut process = Process::start(command);
        let (public, admin) = eventually("the gateway to listen", START_LIMIT, || {
            let ended = process.exit_code();
            let found = addresses(&process);
            assert!(
                found.is_some() || ended.is_none(),
                "the gateway ended with {ended:?} before it listened\n{}",
                process.excerpt()
            );
            found
        });
        Self { process, public, admin, _directory: directory }
    }

    /// The address of the public listener.
    pub(crate) fn address(&self) -> SocketAddr {
        self.public
    }

    /// The address of the admin listener.
    pub(crate) fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// A new connection to the public listener.
    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.public)
    }

    /// A request to build on; nothing is sent yet.
    pub(crate) fn call(&self, method: &str, target: &str) -> Call<'_> {
        Call { gateway: self, request: Request::new(method, target) }
    }

    /// A GET request to build on.
    pub(crate) fn get(&self, target: &str) -> Call<'_> {
        self.call("GET", target)
    }

    /// Sends these bytes on a new connection, which stays open for what comes back.
    pub(crate) fn raw(&self, bytes: &[u8]) -> Connection {
        let mut connection = self.connect();
        connection.send(bytes);
        connection
    }

    /// Calls with this key until it is refused; how many passed, and the refusal.
    #[track_caller]
    pub(crate) fn exhaust(&self, target: &str, key: &str) -> (u64, Answer) {
        let mut connection = self.connect();
        let request = Request::get(target).key(key);
        for passed in 0..10_000 {
            let answer = request.on(&mut connection);
            if answer.status == 429 {
                return (passed, answer);
            }
            answer.expect(200);
        }
        panic!("10,000 calls and no refusal");
    }

    /// A GET on the admin listener.
    #[track_caller]
    pub(crate) fn admin(&self, target: &str) -> Answer {
        Request::get(target).on(&mut Connection::open(self.admin))
    }

    /// Has the configuration read again through the admin listener.
    #[track_caller]
    pub(crate) fn reload(&self) -> Answer {
        Request::new("POST", "/v1/reload").on(&mut Connection::open(self.admin))
    }

    /// Sends the process a signal by name, for example `HUP`.
    pub(crate) fn signal(&self, name: &str) {
        self.process.signal(name);
    }

    /// The sum of all samples of this metric that carry these labels.
    #[track_caller]
    pub(crate) fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted: Vec<String> =
            labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let exposition = self.admin("/metrics").expect(200).text();
        exposition
            .lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
            .filter(|line| wanted.iter().all(|label| line.contains(label.as_str())))
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum()
    }

    /// How many decisions were made without the store.
    #[track_caller]
    pub(crate) fn decided_without_store(&self) -> f64 {
        ["local", "none"]
            .iter()
            .map(|source| self.metric("tollgate_decisions_total", &[("source", source)]))
            .sum()
    }

    /// The access log, once it has at least `count` lines. Every line must be one JSON object.
    #[track_caller]
    pub(crate) fn access_log(&self, count: usize) -> Vec<Value> {
        let lines = eventually("the access log", Duration::from_secs(10), || {
            let lines = self.process.stdout.all();
            (lines.len() >= count).then_some(lines)
        });
        lines
            .iter()
            .map(|line| {
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in log line {line:?}"))
            })
            .collect()
    }

    /// The line of the access log about this answer. Lines of several workers come in any order.
    #[track_caller]
    pub(crate) fn logged(&self, answer: &Answer) -> Value {
        let id = answer.header("x-request-id").expect("every answer carries an id");
        eventually("the line of a request", Duration::from_secs(10), || {
            self.access_log(1).into_iter().find(|line| line["request_id"] == id)
        })
    }

    /// All lines the process wrote so far, to both outputs.
    pub(crate) fn log_lines(&self) -> Vec<String> {
        [self.process.stdout.all(), self.process.stderr.all()].concat()
    }

    /// Lines on standard output alone.
    pub(crate) fn stdout(&self) -> Vec<String> {
        self.process.stdout.all()
    }

    /// A line of `/proc/PID/status` in KiB, for example `VmHWM`.
    pub(crate) fn memory_kib(&self, field: &str) -> u64 {
        let text = self.status(field);
        text.strip_suffix("kB").and_then(|number| number.trim().parse().ok()).expect("a size in KiB")
    }

    /// How many threads it has.
    pub(crate) fn threads(&self) -> u64 {
        self.status("Threads").parse().unwrap()
    }

    /// How many descriptors it holds open.
    pub(crate) fn descriptors(&self) -> u64 {
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.process.id()));
        open.expect("the gateway is alive").count() as u64
    }

    fn status(&self, field: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))
            .expect("the gateway is alive");
        let mut lines = status.lines();
        let value = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("no {field} in {status}")).trim().to_owned()
    }

    /// Asks it to end (`SIGTERM`) and gives back its exit code.
    #[track_caller]
    pub(crate) fn stop(mut self) -> i32 {
        self.signal("TERM");
        self.wait(START_LIMIT)
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// How long it has kept a processor busy.
    pub(crate) fn cpu_time(&self) -> Duration {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.id())).expect("the gateway is alive");
        // Behind the name, which is in brackets, user and system time are the 12th and 13th field, in hundredths.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        Duration::from_millis(10 * ticks)
    }

    /// Waits until it ends and gives back its exit code.
    #[track_caller]
    pub(crate) fn wait(&mut self, limit: Duration) -> i32 {
        self.process.wait(limit)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        if std::thread::panicking() {
            super::say(&format!("gateway on {}:\n{}", self.public, self.process.excerpt()));
        }
    }
}

/// A gateway whose standard error nobody reads once it listens. Ended with the test.
#[derive(Debug)]
pub(crate) struct Unread {
    child: Child,
    public: SocketAddr,
    /// The end that is not read; `None` when it is closed.
    _messages: Option<BufReader<ChildStderr>>,
    _directory: TempDir,
}

impl Unread {
    /// Starts it, reads until it listens, and then stops reading: the pipe fills up, or, when `closed`, breaks.
    #[track_caller]
    pub(crate) fn start(config: &Config, closed: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tollgate.toml");
        std::fs::write(&file, config.text()).unwrap();
        let mut command = tollgate();
        command.args(["serve", "-c"]).arg(&file).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut messages = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let public = loop {
            line.clear();
            assert!(messages.read_line(&mut line).unwrap() > 0, "the gateway ended before it listened");
            if let Some((public, _)) = listening(&line) {
                break public;
            }
        };
        Self { child, public, _messages: (!closed).then_some(messages), _directory: directory }
    }

    /// A new connection to the public listener.
    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.public)
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Both addresses, when this is the line that says them.
fn listening(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let line: Value = serde_json::from_str(line).ok()?;
    if line.get("message")? != "listening" {
        return None;
    }
    let address = |field: &str| line.get(field)?.as_str()?.parse().ok();
    Some((address("public")?, address("admin")?))
}

/// Both addresses, as the demo tells them to a reader: the one with the metrics is the admin listener.
fn introduced(lines: &[String]) -> Option<(SocketAddr, SocketAddr)> {
    let urls: Vec<(SocketAddr, &str)> = lines
        .iter()
        .flat_map(|line| line.split("http://").skip(1))
        .filter_map(|rest| {
            let end = rest.find(|letter: char| !letter.is_ascii_digit() && !".:".contains(letter));
            let (address, path) = rest.split_at(end.unwrap_or(rest.len()));
            Some((address.parse().ok()?, path))
        })
        .collect();
    let (admin, _) = urls.iter().find(|(_, path)| path.starts_with("/metrics"))?;
    let (public, _) = urls.iter().find(|(address, _)| address != admin)?;
    Some((*public, *admin))
}

impl Call<'_> {
    /// Adds a field line.
    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    /// Shows this API key.
    pub(crate) fn key(mut self, key: &str) -> Self {
        self.request = self.request.key(key);
        self
    }

    /// Adds a body with its length.
    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.request = self.request.body(body);
        self
    }

    /// Sends it on a connection of its own.
    #[track_caller]
    pub(crate) fn send(self) -> Answer {
        self.request.on(&mut self.gateway.connect())
    }

    /// Sends it from another loopback address.
    #[track_caller]
    pub(crate) fn send_from(self, source: &str) -> Answer {
        let mut connection = Connection::open_from(source.parse().unwrap(), self.gateway.public);
        self.request.on(&mut connection)
    }
}
