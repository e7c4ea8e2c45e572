//! The proxy on real sockets.
