//! The client's address, read from behind trusted proxies.
//!
//! Each proxy appends the address it saw to the right end of `X-Forwarded-For`; the left end is whatever the client wrote.
//! So the list is read from the right, past the proxies that the operator trusts, and the first other address is the client.
//! An entry that cannot be read ends the walk at the peer's address: looking further left would let the client choose.
//!
//! Deliberately not here: `Forwarded` (RFC 7239), `X-Real-IP` and their like are never read.

use std::net::{IpAddr, SocketAddr};

use actix_web::http::header::{HeaderMap, HeaderName};
use ipnet::{IpNet, Ipv6Net};

/// Entries of `X-Forwarded-For` at most, over all its lines. Beyond, the whole list is not believed.
const MAX_HOPS: usize = 64;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Which peers may say who they speak for, and how much of an IPv6 address is one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientAddresses {
    /// `X-Forwarded-For` is read only when the peer is one of these.
    ///
    /// IPv4 networks are written as IPv4: addresses like `::ffff:192.0.2.1` are folded before they are compared.
    pub trusted_proxies: Vec<IpNet>,
    /// Leading bits of an IPv6 address that make one client, 1 to 128.
    pub ipv6_prefix: u8,
}

impl ClientAddresses {
    /// The address of the client behind `peer`, IPv4 wherever it can be.
    ///
    /// When every hop is trusted it is the leftmost one: the proxy network's own traffic.
    #[must_use]
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let peer = peer.to_canonical();
        if !self.trusts(peer) {
            return peer;
        }
        let lines = headers.get_all(X_FORWARDED_FOR);
        let hops = || lines.clone().rev().flat_map(|line| line.as_bytes().rsplit(|&byte| byte == b','));
        if hops().nth(MAX_HOPS).is_some() {
            return peer;
        }
        let mut client = peer;
        for hop in hops() {
            let Some(address) = parse_hop(hop) else {
                return peer;
            };
            client = address;
            if !self.trusts(address) {
                break;
            }
        }
        client
    }

    /// The network that counts as one client: an IPv4 address whole, an IPv6 address by its prefix.
    ///
    /// `203.0.113.9`, `2001:db8:0:1::/64`. Equal texts mean equal clients.
    #[must_use]
    pub fn network(&self, address: IpAddr) -> String {
        match address.to_canonical() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => {
                let prefix = self.ipv6_prefix.min(128);
                Ipv6Net::new_assert(address, prefix).trunc().to_string()
            }
        }
    }

    /// Whether a peer is a proxy that may say for whom it speaks.
    #[must_use]
    pub fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.trusted_proxies.iter().any(|network| network.contains(&address))
    }
}

/// One entry: `192.0.2.1`, `2001:db8::1` or `[2001:db8::1]`, the first and the last also with a port, which some load
/// balancers append and which says nothing about the client.
fn parse_hop(hop: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(hop).ok()?.trim_matches([' ', '\t']);
    let without_brackets = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let address = match without_brackets {
        Some(bracketed) => IpAddr::V6(bracketed.parse().ok()?),
        None => text.parse().or_else(|_| text.parse().map(|with_port: SocketAddr| with_port.ip())).ok()?,
    };
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const PROXY: &str = "10.0.0.1";

    fn addresses() -> ClientAddresses {
        ClientAddresses {
            trusted_proxies: ["10.0.0.0/8", "127.0.0.1/32", "2001:db8:ffff::/48"]
                .map(|network| network.parse().unwrap())
                .to_vec(),
            ipv6_prefix: 64,
        }
    }

    fn headers<'a>(lines: impl IntoIterator<Item = &'a [u8]>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(X_FORWARDED_FOR, HeaderValue::from_bytes(line).unwrap());
        }
        headers
    }

    #[track_caller]
    fn check(peer: &str, lines: &[&str], expected: &str) {
        let headers = headers(lines.iter().map(|line| line.as_bytes()));
        let client = addresses().client(peer.parse().unwrap(), &headers);
        assert_eq!(client.to_string(), expected, "{peer} {lines:?}");
    }

    /// IP-1: the left end is what the client wrote; a new value per call would be a new budget per call.
    #[test]
    fn the_list_is_read_from_the_right() {
        check(PROXY, &["198.51.100.7, 203.0.113.9"], "203.0.113.9");
        check(PROXY, &["198.51.100.7, 203.0.113.9, 10.1.2.3"], "203.0.113.9");
        check(PROXY, &["198.51.100.7,203.0.113.9,\t10.1.2.3 , 127.0.0.1"], "203.0.113.9");
        check(PROXY, &["10.9.9.9, 203.0.113.9, 10.1.2.3"], "203.0.113.9");
        check("2001:db8:ffff::1", &["198.51.100.7, 2001:db8::5"], "2001:db8::5");
    }

    #[test]
    fn several_lines_are_one_list() {
        check(PROXY, &["198.51.100.7", "203.0.113.9"], "203.0.113.9");
        check(PROXY, &["203.0.113.9, 10.0.0.3", "10.0.0.2"], "203.0.113.9");
        check(PROXY, &["203.0.113.9", ""], PROXY);
    }

    #[test]
    fn without_a_list_or_with_trusted_hops_only_it_stays_inside() {
        check(PROXY, &[], PROXY);
        check(PROXY, &["10.0.0.3, 10.0.0.2"], "10.0.0.3");
    }

    /// IP-2: nobody has been declared a proxy, or the peer is not one of them.
    #[test]
    fn an_untrusted_peer_speaks_for_itself() {
        check("203.0.113.1", &["198.51.100.7"], "203.0.113.1");
        check("203.0.113.1", &["198.51.100.7, 10.0.0.1"], "203.0.113.1");
        check("2001:db8::1", &["198.51.100.7"], "2001:db8::1");
        let nobody = ClientAddresses { trusted_proxies: Vec::new(), ipv6_prefix: 64 };
        let peer: IpAddr = "127.0.0.1".parse().unwrap();
        assert_eq!(nobody.client(peer, &headers([b"198.51.100.7".as_slice()])), peer);
    }

    /// IP-4: some balancers append the source port; each connection would be a client of its own.
    #[test]
    fn ports_and_brackets_are_no_part_of_the_address() {
        for hop in [
            "203.0.113.9",
            "203.0.113.9:5001",
            "203.0.113.9:5002",
            "::ffff:203.0.113.9",
            "[::ffff:cb00:7109]:80",
        ] {
            check(PROXY, &[hop], "203.0.113.9");
        }
        for hop in ["2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:443", "2001:DB8:0::1"] {
            check(PROXY, &[hop], "2001:db8::1");
        }
    }

    #[test]
    fn ipv4_in_ipv6_is_ipv4() {
        check("::ffff:10.0.0.1", &["::ffff:203.0.113.9, ::ffff:10.0.0.2"], "203.0.113.9");
        check("::ffff:203.0.113.9", &[], "203.0.113.9");
    }

    /// IP-7: falling back further left re-opens the hole.
    #[test]
    fn rubbish_in_the_place_of_an_address_leaves_the_peer() {
        for rubbish in [
            "",
            "unknown",
            "999.1.1.1",
            "_hidden",
            "203.0.113.9:",
            "203.0.113.9:99999",
            "203.0.113.9:http",
            "203.0.113",
            "0203.0.113.9",
            "203.0.113.9/32",
            "[203.0.113.9]",
            "[2001:db8::1",
            "2001:db8::1]",
            "[]",
            "[]:80",
            "fe80::1%eth0",
            "\"203.0.113.9\"",
            "for=203.0.113.9",
            "203.0.113.9 198.51.100.7",
        ] {
            check(PROXY, &[&format!("198.51.100.7,{rubbish}")], PROXY);
            check(PROXY, &[&format!("198.51.100.7, {rubbish}, 10.0.0.2")], PROXY);
            check(PROXY, &["198.51.100.7", rubbish], PROXY);
            // Further left than the client it does not matter.
            check(PROXY, &[&format!("{rubbish}, 203.0.113.9")], "203.0.113.9");
        }
        let not_text = headers([b"198.51.100.7, \xff\xfe".as_slice()]);
        let peer: IpAddr = PROXY.parse().unwrap();
        assert_eq!(addresses().client(peer, &not_text), peer);
    }

    #[test]
    fn an_endless_list_is_not_believed() {
        let hops = |count: usize| vec!["10.0.0.2"; count].join(",");
        check(PROXY, &[&format!("203.0.113.9,{}", hops(MAX_HOPS - 1))], "203.0.113.9");
        check(PROXY, &[&format!("203.0.113.9,{}", hops(MAX_HOPS))], PROXY);
        check(PROXY, &[&hops(MAX_HOPS), "203.0.113.9"], PROXY);
        check(PROXY, &[&",".repeat(5_000)], PROXY);
    }

    /// IP-5: one IPv6 customer owns 2^64 addresses.
    #[test]
    fn an_ipv6_client_is_a_network() {
        let network = |prefix, address: &str| {
            ClientAddresses { trusted_proxies: Vec::new(), ipv6_prefix: prefix }
                .network(address.parse().unwrap())
        };
        assert_eq!(network(64, "2001:db8:0:1::1"), "2001:db8:0:1::/64");
        assert_eq!(network(64, "2001:db8:0:1:ffff::14"), "2001:db8:0:1::/64");
        assert_eq!(network(64, "2001:db8:0:2::1"), "2001:db8:0:2::/64");
        assert_eq!(network(48, "2001:db8:0:2::1"), "2001:db8::/48");
        assert_eq!(network(128, "2001:db8::1"), "2001:db8::1/128");
        assert_eq!(network(1, "ffff::1"), "8000::/1");
        assert_eq!(network(64, "203.0.113.9"), "203.0.113.9");
        assert_eq!(network(64, "::ffff:203.0.113.9"), "203.0.113.9");
    }

    proptest! {
        /// Whatever a client writes, the proxy's own last word decides.
        #[test]
        fn what_the_client_wrote_never_counts(forged in "[ -~&&[^,]]{0,40}(,[ -~&&[^,]]{0,20}){0,5}", client: u32) {
            let client = IpAddr::V4(client.into());
            prop_assume!(!addresses().trusts(client));
            let line = format!("{forged}, {client}");
            let headers = headers([line.as_bytes()]);
            prop_assert_eq!(addresses().client(PROXY.parse().unwrap(), &headers), client);
        }

        #[test]
        fn any_bytes_give_an_address(line in prop::collection::vec(prop_oneof![Just(b'\t'), 0x20..=0x7e_u8, 0x80_u8..], 0..200)) {
            let peer: IpAddr = PROXY.parse().unwrap();
            let client = addresses().client(peer, &headers([line.as_slice()]));
            prop_assert_eq!(client, client.to_canonical());
        }
    }
}
