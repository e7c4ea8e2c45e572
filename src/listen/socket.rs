//! Listeners: bound before anything runs, so that an address that is taken is known at once, or handed over by whoever
//! started the process. And how a listener closes without losing who is at the door.

use std::future::Future;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::time::Duration;

use listenfd::ListenFd;
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};
use tokio::time::sleep;

/// Connections that the kernel holds until a worker takes them.
const BACKLOG: i32 = 4_096;

/// How long handshakes that have begun may take to end, before a listener closes on them.
const HANDSHAKES: Duration = Duration::from_millis(200);

/// How long what was accepted may take to reach its worker.
const DISPATCH: Duration = Duration::from_millis(50);

/// Whether Linux gives what waits at a closing listener to another one on the same port.
const MIGRATION: &str = "/proc/sys/net/ipv4/tcp_migrate_req";

/// A listener of this gateway.
#[derive(Debug)]
pub struct Listener {
    /// The socket, for the server.
    pub socket: TcpListener,
    keeper: Keeper,
}

/// Who else has the socket or the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeper {
    /// Nobody.
    Nobody,
    /// Other processes may listen on the same port, each with a socket of its own.
    Port,
    /// Whoever handed the socket over: it stays open when this process has closed it.
    Parent,
}

impl Listener {
    /// A listener on `address`. A gateway that was just stopped does not keep the address from its successor; with `reuse_port`
    /// one that still runs does not either.
    ///
    /// # Errors
    /// When the address is taken, or not one of this machine.
    pub fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(reuse_port)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let keeper = if reuse_port { Keeper::Port } else { Keeper::Nobody };
        Ok(Self { socket: socket.into(), keeper })
    }

    /// Whether the socket was handed over.
    #[must_use]
    pub fn is_handed_over(&self) -> bool {
        self.keeper == Keeper::Parent
    }

    /// A hold on the listener for whoever will close it while a server uses the socket.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn door(&self) -> io::Result<Door> {
        Ok(Door { socket: self.socket.try_clone()?, keeper: self.keeper })
    }
}

/// The end of a listener.
#[derive(Debug)]
pub struct Door {
    socket: TcpListener,
    keeper: Keeper,
}

impl Door {
    /// Lets nobody in any more. `pause` makes the server stop accepting.
    ///
    /// When a listening socket closes, Linux resets every connection that is complete and was not accepted yet, and those
    /// whose handshake has begun. (It gives them to another socket on the port where `net.ipv4.tcp_migrate_req` is 1.) So
    /// newcomers are turned away first, in a way that makes them knock again a second later, and the server goes on accepting
    /// until nobody is on the way. A socket that was handed over needs none of this: what waits there waits for the next
    /// process.
    pub async fn close(self, pause: impl Future<Output = ()>) {
        let own = self.keeper != Keeper::Parent;
        let migrates = self.keeper == Keeper::Port && migrates();
        if own && !migrates && self.ignore_newcomers().is_ok() {
            sleep(HANDSHAKES).await;
        }
        pause.await;
        sleep(DISPATCH).await;
        if own && let Err(error) = SockRef::from(&self.socket).shutdown(Shutdown::Read) {
            tracing::warn!(%error, "cannot close the listener before the process ends");
        }
    }

    /// Drops the first packet of every new connection, as if it had been lost: the client sends it again after a second, and
    /// finds another listener on the port, or none. Packets of handshakes that have begun pass.
    fn ignore_newcomers(&self) -> io::Result<()> {
        // Classic BPF over the TCP header: the flags, at byte 13; SYN without ACK is the beginning of a connection.
        const LOAD_BYTE: u16 = 0x30;
        const AND: u16 = 0x54;
        const JUMP_IF_EQUAL: u16 = 0x15;
        const RETURN: u16 = 0x06;
        const ACK_AND_SYN: u32 = 0x12;
        const SYN: u32 = 0x02;
        SockRef::from(&self.socket).attach_filter(&[
            SockFilter::new(LOAD_BYTE, 0, 0, 13),
            SockFilter::new(AND, 0, 0, ACK_AND_SYN),
            SockFilter::new(JUMP_IF_EQUAL, 0, 1, SYN),
            SockFilter::new(RETURN, 0, 0, 0),
            SockFilter::new(RETURN, 0, 0, u32::MAX),
        ])
    }
}

fn migrates() -> bool {
    std::fs::read(MIGRATION).is_ok_and(|setting| setting.trim_ascii() == b"1")
}

/// Lets the process open so many descriptors, if the system allows it; how many it may open now.
///
/// # Errors
/// When the system does not say.
pub fn allow_descriptors(wanted: u64) -> io::Result<u64> {
    rlimit::increase_nofile_limit(wanted)
}

/// The listeners that a process is started with: `LISTEN_FDS` and `LISTEN_PID`, as systemd passes them.
pub struct HandedOver {
    sockets: ListenFd,
    names: Vec<String>,
}

/// The names that sockets may have, in the order of those that have none.
const NAMES: [&str; 2] = ["public", "admin"];

impl HandedOver {
    /// What this process was started with; `names` are those of `LISTEN_FDNAMES`, in the order of the sockets.
    #[must_use]
    pub fn take(names: Vec<String>) -> Self {
        Self { sockets: ListenFd::from_env(), names }
    }

    /// The socket with this name, `public` or `admin`. When none has such a name, the first one is `public` and the second
    /// one `admin`.
    ///
    /// # Errors
    /// When it is no listening TCP socket.
    pub fn listener(&mut self, name: &str) -> io::Result<Option<Listener>> {
        let Some(position) = position(&self.names, name) else { return Ok(None) };
        if position >= self.sockets.len() {
            return Ok(None);
        }
        let Some(socket) = self.sockets.take_tcp_listener(position)? else { return Ok(None) };
        if !SockRef::from(&socket).is_listener()? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it does not listen"));
        }
        Ok(Some(Listener { socket, keeper: Keeper::Parent }))
    }
}

impl HandedOver {
    /// Whether a socket was handed over that nobody has taken. Its clients would connect, and wait for ever.
    #[must_use]
    pub fn has_unused(&mut self) -> bool {
        (0..self.sockets.len()).any(|position| matches!(self.sockets.take_raw_fd(position), Ok(Some(_))))
    }
}

impl std::fmt::Debug for HandedOver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HandedOver").field("names", &self.names).finish_non_exhaustive()
    }
}

fn position(names: &[String], wanted: &str) -> Option<usize> {
    if names.iter().any(|name| NAMES.contains(&name.as_str())) {
        names.iter().position(|name| name == wanted)
    } else {
        NAMES.iter().position(|name| *name == wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_found_by_name_else_by_order() {
        let at = |names: &[&str], wanted| {
            position(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), wanted)
        };
        assert_eq!(
            (at(&["admin", "public"], "public"), at(&["admin", "public"], "admin")),
            (Some(1), Some(0))
        );
        assert_eq!((at(&["x", "admin"], "public"), at(&["x", "admin"], "admin")), (None, Some(1)));
        // What systemd calls them when nobody did.
        for names in [&["tollgate.socket", "tollgate.socket"][..], &["unknown"], &[]] {
            assert_eq!((at(names, "public"), at(names, "admin")), (Some(0), Some(1)), "{names:?}");
        }
    }
}
