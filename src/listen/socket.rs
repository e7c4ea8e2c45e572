//! Sockets, bound before anything runs, so that an address that is taken is known at once.

use std::io;
use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Protocol, Socket, Type};

/// Connections that the kernel holds until a worker takes them.
const BACKLOG: i32 = 4_096;

/// A listener on `address`. A gateway that was just stopped does not keep the address from its successor.
///
/// # Errors
/// When the address is taken, or not one of this machine.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
