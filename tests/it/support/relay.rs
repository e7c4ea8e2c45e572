//! One address in front of servers that replace each other, as a load balancer or a moved address would be.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::thread;

/// Passes every connection on to the server of the moment. A connection ends when its server does.
#[derive(Debug)]
pub(crate) struct Relay {
    address: SocketAddr,
    target: Arc<AtomicU16>,
    stopping: Arc<AtomicBool>,
}

impl Relay {
    /// On a free port, to this port.
    pub(crate) fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let relay = Self { address, target: Arc::new(port.into()), stopping: Arc::default() };
        let (target, stopping) = (Arc::clone(&relay.target), Arc::clone(&relay.stopping));
        thread::spawn(move || {
            for client in listener.incoming() {
                if stopping.load(Ordering::Relaxed) {
                    return;
                }
                let port = target.load(Ordering::SeqCst);
                // A server that is away is seen as a connection that ends at once.
                client.and_then(|client| pass_on(&client, port)).ok();
            }
        });
        relay
    }

    /// Where it listens.
    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Sends all later connections to this port.
    pub(crate) fn switch(&self, port: u16) {
        self.target.store(port, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        // Wakes the accepting thread, so that it sees the flag and frees the port.
        TcpStream::connect(self.address).ok();
    }
}

fn pass_on(client: &TcpStream, port: u16) -> io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", port))?;
    for stream in [client, &server] {
        stream.set_nodelay(true)?;
    }
    for (from, to) in [(client.try_clone()?, server.try_clone()?), (server, client.try_clone()?)] {
        thread::spawn(move || copy(from, to));
    }
    Ok(())
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    io::copy(&mut from, &mut to).ok();
    // Either end that closes ends both.
    for stream in [from, to] {
        stream.shutdown(Shutdown::Both).ok();
    }
}
