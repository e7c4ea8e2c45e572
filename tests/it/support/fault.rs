//! A proxy that makes faults: it stands between a gateway and a server, and what it does to the bytes is switched while both
//! run.
//!
//! It tells one reply of Redis from the next, and knows which command each answers; so a fault may strike scripts and
//! spare `PING`, or every third reply. Nothing is random: two runs of a test meet the same faults. What it holds is bounded,
//! and ends with the test.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::redis::tables;

/// What waits in one direction of a connection at most, in units of up to [`UNIT_MAX`] bytes. A sender then has to wait.
const WAITING_MAX: usize = 64;

/// A reply that is longer is passed on in pieces, and counts as no reply.
const UNIT_MAX: usize = 1 << 20;

/// Commands of one connection that may wait for their replies. One more, and the connection is cut.
const ASKED_MAX: usize = 1 << 16;

/// How long a thread sleeps before it looks whether its connection was cut.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The commands that run a script.
pub(crate) const SCRIPTS: &[&str] = &["EVALSHA", "EVAL"];

/// What is done to the bytes, and to connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    /// What becomes of a new connection.
    pub(crate) connect: Connect,
    /// How long everything takes on its way to the server.
    pub(crate) to_server: Delay,
    /// How long everything takes on its way back.
    pub(crate) to_client: Delay,
    /// How fast bytes come back.
    pub(crate) pace: Option<Pace>,
    /// Takes what comes and answers nothing. A connection that has lost something stays so until it ends.
    pub(crate) swallow: bool,
    /// The commands whose replies are late or spoiled; empty: all of them.
    pub(crate) of: &'static [&'static str],
    /// Of ten such replies so many are late, evenly spread, by this time. What comes behind a late reply waits for it.
    pub(crate) late: (u64, Duration),
    /// What becomes of such a reply.
    pub(crate) spoil: Spoil,
}

/// What becomes of a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Connect {
    /// It is passed on.
    Pass,
    /// It is accepted and reset.
    Reset,
    /// Nobody listens.
    Refuse,
}

/// How long bytes take. The jitter comes on top: between nothing and all of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Delay {
    /// Always.
    pub(crate) latency: Duration,
    /// At most.
    pub(crate) jitter: Duration,
}

impl Delay {
    /// No delay.
    pub(crate) const NONE: Self = Self { latency: Duration::ZERO, jitter: Duration::ZERO };

    /// As long every time.
    pub(crate) const fn of(latency: Duration) -> Self {
        Self { latency, jitter: Duration::ZERO }
    }

    /// What the `number`-th unit takes.
    fn at(self, number: u64) -> Duration {
        let thousandths = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.latency + self.jitter * u32::try_from(thousandths % 1_000).unwrap() / 1_000
    }
}

/// So many bytes, and then a pause.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// At a time.
    pub(crate) bytes: usize,
    /// Between them.
    pub(crate) every: Duration,
}

impl Pace {
    /// One byte in each millisecond.
    pub(crate) const DRIBBLE: Self = Self { bytes: 1, every: Duration::from_millis(1) };
}

/// What becomes of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spoil {
    /// It arrives.
    Nothing,
    /// Half of it, and then a reset.
    ResetMidway,
    /// Half of it, and then the end.
    CutMidway,
    /// The connection ends when it has brought so many bytes.
    CloseAfter(usize),
    /// Something else in its place.
    Replace(Garbage),
}

/// What may come in place of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Garbage {
    /// Bytes that are no reply.
    Noise,
    /// Part of a page of the web.
    Http,
    /// An error that no Redis knows.
    Error,
    /// A text.
    Text,
    /// A list of texts.
    Texts,
    /// Nothing, as of a key that is not there.
    Null,
    /// A list that is too short.
    ShortList,
    /// The true reply, with every number as large as it can be.
    HugeNumbers,
    /// The true reply, with every number negative.
    NegativeNumbers,
    /// The head of a text of half a gibibyte.
    HugeText,
    /// The head of a text longer than any memory.
    EndlessText,
    /// The head of a list of a billion items.
    HugeList,
    /// Lists in lists, a hundred thousand deep.
    DeepList,
}

impl Garbage {
    /// All kinds.
    pub(crate) const ALL: [Self; 13] = [
        Self::Noise,
        Self::Http,
        Self::Error,
        Self::Text,
        Self::Texts,
        Self::Null,
        Self::ShortList,
        Self::HugeNumbers,
        Self::NegativeNumbers,
        Self::HugeText,
        Self::EndlessText,
        Self::HugeList,
        Self::DeepList,
    ];

    fn in_place_of(self, reply: &[u8]) -> Vec<u8> {
        match self {
            Self::Noise => (0..96u8).map(|number| number.wrapping_mul(167).wrapping_add(131)).collect(),
            Self::Http => b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n".to_vec(),
            Self::Error => b"-GARBAGE nobody knows this one\r\n".to_vec(),
            Self::Text => b"$6\r\nrubbed\r\n".to_vec(),
            Self::Texts => b"*4\r\n$1\r\n1\r\n$1\r\n2\r\n$1\r\n3\r\n$1\r\n4\r\n".to_vec(),
            Self::Null => b"*-1\r\n".to_vec(),
            Self::ShortList => b"*2\r\n:5\r\n:7\r\n".to_vec(),
            Self::HugeNumbers => with_numbers(reply, "9223372036854775807"),
            Self::NegativeNumbers => with_numbers(reply, "-9223372036854775808"),
            Self::HugeText => b"$536870912\r\nand so on".to_vec(),
            Self::EndlessText => b"$9223372036854775807\r\nand so on".to_vec(),
            Self::HugeList => b"*1000000000\r\n:1\r\n".to_vec(),
            Self::DeepList => b"*1\r\n".repeat(100_000),
        }
    }
}

/// The reply with another number for each of its own.
fn with_numbers(reply: &[u8], number: &str) -> Vec<u8> {
    let text = String::from_utf8_lossy(reply);
    let lines = text.split_inclusive("\r\n");
    let replaced =
        |line: &str| if line.starts_with(':') { format!(":{number}\r\n") } else { line.to_owned() };
    lines.map(replaced).collect::<String>().into_bytes()
}

impl Fault {
    /// Everything passes.
    pub(crate) const NONE: Self = Self {
        connect: Connect::Pass,
        to_server: Delay::NONE,
        to_client: Delay::NONE,
        pace: None,
        swallow: false,
        of: &[],
        late: (0, Duration::ZERO),
        spoil: Spoil::Nothing,
    };

    /// Scripts answer so much later; everything else at once.
    pub(crate) const fn slow_scripts(by: Duration) -> Self {
        Self { of: SCRIPTS, late: (10, by), ..Self::NONE }
    }

    fn strikes(&self, command: &str) -> bool {
        self.of.is_empty() || self.of.contains(&command)
    }

    /// Whether the `number`-th reply that this strikes is one of those that are late.
    fn is_late(&self, number: u64) -> bool {
        let late_before = |replies: u64| replies * self.late.0 / 10;
        late_before(number + 1) > late_before(number)
    }
}

/// One address in front of a server, and what goes wrong between them.
#[derive(Debug)]
pub(crate) struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    /// The port of the server.
    target: AtomicU16,
    /// Whether replies are told from each other.
    speaks_redis: bool,
    fault: Mutex<Fault>,
    /// Whether anybody listens. Changed by the accepting thread alone.
    listening: Mutex<bool>,
    changed: Condvar,
    stopping: AtomicBool,
    /// Both sockets of each connection.
    sockets: Mutex<Vec<Weak<Socket>>>,
    accepted: AtomicUsize,
    /// Replies that a fault could strike.
    struck: AtomicU64,
}

impl FaultProxy {
    /// On a free port, in front of the Redis on this port. No fault yet.
    pub(crate) fn to_redis(port: u16) -> Self {
        Self::start(port, true)
    }

    /// As [`to_redis`](Self::to_redis), in front of any server. Faults that are about replies strike whatever is read at once.
    pub(crate) fn to_any(port: u16) -> Self {
        Self::start(port, false)
    }

    fn start(port: u16, speaks_redis: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            target: port.into(),
            speaks_redis,
            fault: Mutex::new(Fault::NONE),
            listening: Mutex::new(true),
            changed: Condvar::new(),
            stopping: AtomicBool::new(false),
            sockets: Mutex::default(),
            accepted: AtomicUsize::new(0),
            struck: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || accept(&accepting, listener, address));
        Self { address, shared }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The `[store]` tables of a gateway that counts behind it.
    pub(crate) fn tables(&self, on_failure: &str, budget: &str) -> String {
        tables(&format!("redis://{}", self.address), on_failure, budget)
    }

    /// Sends all later connections to this port.
    pub(crate) fn switch(&self, port: u16) {
        self.shared.target.store(port, Ordering::SeqCst);
    }

    /// From now on this goes wrong, on open connections as well, and nothing else. What was delayed stays so.
    pub(crate) fn set(&self, fault: Fault) {
        *self.shared.fault.lock() = fault;
        let wanted = fault.connect != Connect::Refuse;
        let mut listening = self.shared.listening.lock();
        while *listening != wanted {
            if *listening {
                // Wakes the accepting thread, so that it sees the fault.
                TcpStream::connect(self.address).ok();
            }
            self.shared.changed.notify_all();
            self.shared.changed.wait_for(&mut listening, LOOK_EVERY);
        }
    }

    /// Nothing goes wrong any more.
    pub(crate) fn heal(&self) {
        self.set(Fault::NONE);
    }

    /// Resets all open connections.
    pub(crate) fn cut(&self) {
        self.shared.cut();
    }

    /// How many connections were accepted so far.
    pub(crate) fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
        self.shared.cut();
        // Wakes the accepting thread, so that it sees the flag and frees the port.
        TcpStream::connect(self.address).ok();
    }
}

impl Shared {
    fn fault(&self) -> Fault {
        *self.fault.lock()
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn cut(&self) {
        for socket in self.sockets.lock().drain(..) {
            socket.upgrade().into_iter().for_each(|socket| socket.reset());
        }
    }

    fn register(&self, stream: TcpStream) -> io::Result<Arc<Socket>> {
        stream.set_nodelay(true)?;
        // A peer that reads nothing holds no thread for ever.
        stream.set_write_timeout(Some(LOOK_EVERY))?;
        let socket = Arc::new(Socket { stream, is_cut: AtomicBool::new(false) });
        let mut sockets = self.sockets.lock();
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(&socket));
        Ok(socket)
    }
}

fn accept(shared: &Arc<Shared>, listener: TcpListener, address: SocketAddr) {
    let mut listener = Some(listener);
    while !shared.is_stopping() {
        let refuses = shared.fault().connect == Connect::Refuse;
        match &listener {
            Some(_) if refuses => {
                listener = None;
                *shared.listening.lock() = false;
                shared.changed.notify_all();
            }
            Some(open) => {
                // A server that is away is seen as a connection that ends at once.
                open.accept().and_then(|(client, _)| welcome(shared, client)).ok();
            }
            None if refuses => {
                let mut listening = shared.listening.lock();
                shared.changed.wait_for(&mut listening, LOOK_EVERY);
            }
            None => {
                listener = TcpListener::bind(address).ok();
                *shared.listening.lock() = listener.is_some();
                shared.changed.notify_all();
            }
        }
    }
}

/// Does with a new connection what the fault of the moment says.
fn welcome(shared: &Arc<Shared>, client: TcpStream) -> io::Result<()> {
    let fault = shared.fault();
    if shared.is_stopping() || fault.connect == Connect::Refuse {
        return Ok(());
    }
    shared.accepted.fetch_add(1, Ordering::SeqCst);
    if fault.connect == Connect::Reset {
        return socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO));
    }
    let client = shared.register(client)?;
    if fault.swallow {
        thread::spawn(move || while client.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {});
        return Ok(());
    }
    let server = TcpStream::connect(("127.0.0.1", shared.target.load(Ordering::SeqCst)))?;
    let server = shared.register(server)?;
    let asked = shared.speaks_redis.then(Mutex::default);
    let lane = Arc::new(Lane { client, server, asked, has_lost: AtomicBool::new(false) });
    for direction in [Direction::ToServer, Direction::ToClient] {
        let (sender, receiver) = sync_channel(WAITING_MAX);
        let (reading, writing) = (Arc::clone(&lane), Arc::clone(&lane));
        let (of_reader, of_writer) = (Arc::clone(shared), Arc::clone(shared));
        thread::spawn(move || {
            // Broken or ended: the writer ends the rest.
            read_units(&reading, direction, &of_reader, &sender).ok();
        });
        thread::spawn(move || {
            write_units(&writing, direction, &of_writer, &receiver).ok();
            writing.client.close();
            writing.server.close();
        });
    }
    Ok(())
}

/// One connection through the proxy.
#[derive(Debug)]
struct Lane {
    client: Arc<Socket>,
    server: Arc<Socket>,
    /// The commands whose replies are still to come, where replies are told from each other.
    asked: Option<Mutex<VecDeque<String>>>,
    /// Something of it was swallowed, so nothing that follows would make sense.
    has_lost: AtomicBool,
}

#[derive(Debug)]
struct Socket {
    stream: TcpStream,
    is_cut: AtomicBool,
}

impl Socket {
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.stream).read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) if self.is_cut() => return Ok(0),
                other => return other,
            }
        }
    }

    fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.is_cut() {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            match (&self.stream).write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::SeqCst)
    }

    /// Ends it in order, unless it was reset.
    fn close(&self) {
        if !self.is_cut() {
            self.stream.shutdown(Shutdown::Both).ok();
        }
    }

    /// Resets it, as soon as its threads have let go of it. Only their reading is ended here: more would say goodbye.
    fn reset(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        socket2::SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).ok();
        self.stream.shutdown(Shutdown::Read).ok();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    ToServer,
    ToClient,
}

/// Bytes that belong together, when they are due, and what follows them.
#[derive(Debug)]
struct Unit {
    bytes: Vec<u8>,
    due: Instant,
    then: Then,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    GoOn,
    Close,
    Reset,
}

fn read_units(
    lane: &Lane,
    direction: Direction,
    shared: &Shared,
    sender: &SyncSender<Unit>,
) -> io::Result<()> {
    let source = if direction == Direction::ToServer { &lane.client } else { &lane.server };
    let mut waiting = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    let (mut due, mut number, mut passed) = (Instant::now(), 0, 0);
    loop {
        let read = source.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        waiting.extend_from_slice(&buffer[..read]);
        while let Some(length) = unit_length(&waiting, shared.speaks_redis) {
            let bytes: Vec<u8> = waiting.drain(..length).collect();
            let fault = shared.fault();
            if fault.swallow {
                lane.has_lost.store(true, Ordering::SeqCst);
            }
            if lane.has_lost.load(Ordering::SeqCst) {
                continue;
            }
            let unit = match direction {
                Direction::ToServer => request(lane, bytes, fault.to_server.at(number))?,
                Direction::ToClient => reply(lane, bytes, &fault, number, passed, shared),
            };
            // What comes later cannot arrive sooner.
            due = due.max(unit.due);
            (number, passed) = (number + 1, passed + unit.bytes.len());
            let last = unit.then != Then::GoOn;
            if sender.send(Unit { due, ..unit }).is_err() || last {
                return Ok(());
            }
        }
    }
}

fn request(lane: &Lane, bytes: Vec<u8>, delay: Duration) -> io::Result<Unit> {
    if let Some(asked) = &lane.asked {
        let mut asked = asked.lock();
        if asked.len() >= ASKED_MAX {
            return Err(io::Error::other("nothing is answered"));
        }
        asked.push_back(command_of(&bytes));
    }
    Ok(Unit { bytes, due: Instant::now() + delay, then: Then::GoOn })
}

fn reply(lane: &Lane, bytes: Vec<u8>, fault: &Fault, number: u64, passed: usize, shared: &Shared) -> Unit {
    let command = lane.asked.as_ref().and_then(|asked| asked.lock().pop_front()).unwrap_or_default();
    let mut due = Instant::now() + fault.to_client.at(number);
    if !fault.strikes(&command) {
        return Unit { bytes, due, then: Then::GoOn };
    }
    if fault.is_late(shared.struck.fetch_add(1, Ordering::SeqCst)) {
        due += fault.late.1;
    }
    let half = bytes.len() / 2;
    let (bytes, then) = match fault.spoil {
        Spoil::Nothing => (bytes, Then::GoOn),
        Spoil::ResetMidway => (bytes[..half].to_vec(), Then::Reset),
        Spoil::CutMidway => (bytes[..half].to_vec(), Then::Close),
        Spoil::CloseAfter(length) if passed + bytes.len() >= length => {
            (bytes[..length.saturating_sub(passed)].to_vec(), Then::Close)
        }
        Spoil::CloseAfter(_) => (bytes, Then::GoOn),
        Spoil::Replace(garbage) => (garbage.in_place_of(&bytes), Then::GoOn),
    };
    Unit { bytes, due, then }
}

fn write_units(
    lane: &Lane,
    direction: Direction,
    shared: &Shared,
    receiver: &Receiver<Unit>,
) -> io::Result<()> {
    let target = if direction == Direction::ToServer { &lane.server } else { &lane.client };
    while let Ok(unit) = receiver.recv() {
        while !target.is_cut() {
            let left = unit.due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            thread::sleep(left.min(LOOK_EVERY));
        }
        match shared.fault().pace.filter(|_| direction == Direction::ToClient) {
            None => target.write(&unit.bytes)?,
            Some(pace) => {
                for piece in unit.bytes.chunks(pace.bytes) {
                    target.write(piece)?;
                    thread::sleep(pace.every);
                }
            }
        }
        match unit.then {
            Then::GoOn => {}
            Then::Close => return Ok(()),
            Then::Reset => {
                lane.client.reset();
                lane.server.reset();
                return Ok(());
            }
        }
    }
    Ok(())
}

/// How long the first unit of these bytes is; `None` while it is not complete.
fn unit_length(bytes: &[u8], speaks_redis: bool) -> Option<usize> {
    if bytes.is_empty() {
        return None;
    }
    let whole = Some(bytes.len());
    if !speaks_redis {
        return whole;
    }
    match message_length(bytes) {
        Ok(None) if bytes.len() > UNIT_MAX => whole,
        Ok(length) => length,
        Err(NotRedis) => whole,
    }
}

/// Bytes that are not of Redis's protocol.
struct NotRedis;

/// How long the first message of these bytes is, with all that is in it; `None` while it is not complete.
fn message_length(bytes: &[u8]) -> Result<Option<usize>, NotRedis> {
    let (mut at, mut missing) = (0, 1);
    while missing > 0 {
        let Some(rest) = bytes.get(at..) else { return Ok(None) };
        let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") else { return Ok(None) };
        let (kind, number) = rest[..end].split_first().ok_or(NotRedis)?;
        let count = || {
            let text = std::str::from_utf8(number).map_err(|_| NotRedis)?;
            // -1 is nothing at all.
            Ok(usize::try_from(text.parse::<i64>().map_err(|_| NotRedis)?).ok())
        };
        (at, missing) = (at + end + 2, missing - 1);
        match kind {
            b'+' | b'-' | b':' => {}
            b'$' => at += count()?.map_or(0, |length| length + 2),
            b'*' => missing += count()?.unwrap_or(0),
            _ => return Err(NotRedis),
        }
    }
    Ok((at <= bytes.len()).then_some(at))
}

/// The name of a command: the first text of a list.
fn command_of(request: &[u8]) -> String {
    let text = String::from_utf8_lossy(&request[..request.len().min(64)]);
    text.split("\r\n").nth(2).unwrap_or_default().to_ascii_uppercase()
}
