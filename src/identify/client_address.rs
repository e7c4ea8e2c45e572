//! The client's address, read from behind trusted proxies. STUB.

use ipnet::IpNet;

/// Which peers may say who they speak for, and how much of an IPv6 address is one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientAddresses {
    /// `X-Forwarded-For` is read only when the peer is one of these.
    pub trusted_proxies: Vec<IpNet>,
    /// Leading bits of an IPv6 address that make one client, 1 to 128.
    pub ipv6_prefix: u8,
}
