//! The client address: socket, trusted proxies, IPv6 prefixes.

use crate::support::{Backend, Config, Gateway, Redis, Store};

/// Callers without a key, 3 per 10 s; `X-Forwarded-For` believed from loopback.
fn behind_proxy(backend: &Backend) -> Config {
    Config::shared(backend).anonymous("anonymous").behind_loopback_proxy()
}

/// The statuses of one call for each value of `X-Forwarded-For`.
fn statuses(gateway: &Gateway, values: &[String]) -> Vec<u16> {
    values.iter().map(|value| gateway.get("/x").header("X-Forwarded-For", value).send().status).collect()
}

#[test]
fn the_rightmost_untrusted_address_is_the_client() {
    // IP-1: proxies append on the right; the left end is whatever the client wrote.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let gateway = Gateway::start(&behind_proxy(&backend).store(&redis));
    let spoofed: Vec<String> = (0..10).map(|number| format!("198.51.100.{number}, 203.0.113.9")).collect();
    assert_eq!(statuses(&gateway, &spoofed), [[200; 3].as_slice(), &[429; 7]].concat());
    assert_eq!(redis.redis().unwrap().keys(), ["tollgate:{net.203.0.113.9}:plan:window"]);
    // A trusted hop in the list is stepped over.
    gateway.get("/x").header("X-Forwarded-For", "198.51.100.77, 203.0.113.9, 127.0.0.1").send().expect(429);
    // Two lines are one list.
    gateway
        .get("/x")
        .header("X-Forwarded-For", "198.51.100.78")
        .header("X-Forwarded-For", "203.0.113.9")
        .send()
        .expect(429);
}

#[test]
fn nobody_is_believed_by_default() {
    // IP-2: the header was honoured although nobody had been declared a proxy.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend).anonymous("anonymous"));
    let mut passed = 0;
    for number in 0..10 {
        let address = format!("198.51.100.{number}");
        let answer = ["X-Forwarded-For", "X-Real-IP", "True-Client-IP", "CF-Connecting-IP"]
            .iter()
            .fold(gateway.get("/x"), |call, name| call.header(name, &address))
            .header("Forwarded", format!("for={address}"))
            .send();
        match answer.status {
            200 => passed += 1,
            status => assert_eq!(status, 429),
        }
    }
    assert_eq!(passed, 3);
}

#[test]
fn a_peer_that_is_no_trusted_proxy_is_not_believed() {
    // IP-2 with a list: the list is of peers, not a switch.
    let backend = Backend::ok();
    let gateway = Gateway::start(&behind_proxy(&backend));
    let passed = (0..10)
        .filter(|number| {
            let call = gateway.get("/x").header("X-Forwarded-For", format!("198.51.100.{number}"));
            call.send_from("127.0.0.2").status == 200
        })
        .count();
    assert_eq!(passed, 3);
}

#[test]
fn ports_and_brackets_are_not_part_of_an_address() {
    // IP-4: balancers append the port; each connection then had a budget of its own, or all shared the proxy's.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let gateway = Gateway::start(&behind_proxy(&backend).store(&redis));
    for spellings in [
        ["203.0.113.9", "203.0.113.9:5001", "203.0.113.9:5002"],
        ["2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:443"],
    ] {
        let left = spellings.map(|spelling| {
            let call = gateway.get("/x").header("X-Forwarded-For", spelling);
            call.send().expect(200).remaining("window")
        });
        assert_eq!(left, [2, 1, 0], "{spellings:?}");
    }
    assert_eq!(redis.redis().unwrap().keys().len(), 2);
}

#[test]
fn a_mapped_ipv4_address_is_the_ipv4_address() {
    // IP-4: a dual-stack balancer writes ::ffff:203.0.113.9, and the same client had two budgets.
    let backend = Backend::ok();
    let gateway = Gateway::start(&behind_proxy(&backend));
    let spellings = ["203.0.113.9", "::ffff:203.0.113.9", "[::ffff:203.0.113.9]:443"];
    let left = spellings.map(|spelling| {
        let call = gateway.get("/x").header("X-Forwarded-For", spelling);
        call.send().expect(200).remaining("window")
    });
    assert_eq!(left, [2, 1, 0]);
}

#[test]
fn an_ipv6_network_is_one_client() {
    // IP-5: one customer owns 2^64 addresses; counting each is no limit and fills memory.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let gateway = Gateway::start(&behind_proxy(&backend).store(&redis));
    let inside: Vec<String> = (1..=20).map(|host| format!("2001:db8:0:1::{host:x}")).collect();
    assert_eq!(statuses(&gateway, &inside), [[200; 3].as_slice(), &[429; 17]].concat());
    assert_eq!(statuses(&gateway, &["2001:db8:0:2::1".to_owned()]), [200]);
    assert_eq!(redis.redis().unwrap().keys().len(), 2);
}

#[test]
fn rubbish_in_the_trusted_position_is_not_stepped_over() {
    // IP-7: falling back further left when the right-hand entry does not parse re-opens the hole of IP-1.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let config = Config::open(&backend)
        .plan("anonymous", r#"{ name = "window", limit = 1000, per = "60s" }"#)
        .anonymous("anonymous")
        .behind_loopback_proxy()
        .store(&redis);
    let gateway = Gateway::start(&config);
    let mut passed = 0;
    for value in [
        "198.51.100.7, unknown",
        "198.51.100.7,",
        "198.51.100.7, ",
        "198.51.100.7, 999.1.1.1",
        "198.51.100.7, 203.0.113.9.1",
        "198.51.100.7, [203.0.113.9",
        "198.51.100.7, 203.0.113.9:99999",
        "198.51.100.7, \u{ff}",
        "198.51.100.7 203.0.113.9",
        "198.51.100.7, _hidden",
        "_hidden",
        "unknown",
        "",
    ] {
        match gateway.get("/x").header("X-Forwarded-For", value).send().status {
            200 => passed += 1,
            status => assert_eq!(status, 400, "{value:?}"),
        }
    }
    let monstrous = vec!["198.51.100.7"; 5_000].join(", ");
    let mut connection = gateway.connect();
    let request = crate::support::Request::get("/x").header("X-Forwarded-For", monstrous);
    connection.try_send(&request.to_bytes()).ok();
    if let Ok(Some(answer)) = connection.try_answer("GET") {
        assert!([400, 431].contains(&answer.status), "status {}", answer.status);
    }
    let keys = redis.redis().unwrap().keys();
    if passed > 0 {
        assert_eq!(keys, ["tollgate:{net.127.0.0.1}:plan:window"]);
    } else {
        assert_eq!(keys, [""; 0]);
    }
}

#[test]
fn the_upstream_is_told_what_the_gateway_knows() {
    // IP-8: the client's own statements about itself travelled on as if the gateway had made them.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    gateway
        .get("/x")
        .key("k-free-1")
        .header("X-Forwarded-For", "198.51.100.7")
        .header("X-Forwarded-Proto", "https")
        .header("Forwarded", "for=198.51.100.7;proto=https")
        .send()
        .expect(200);
    let raw = String::from_utf8(backend.last().raw).unwrap();
    assert!(!raw.contains("198.51.100.7"), "{raw}");
    assert!(!raw.contains("https"), "{raw}");
    let head = backend.last().head;
    assert_eq!(head.lines("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(head.lines("x-forwarded-proto"), ["http"]);
    assert_eq!(head.lines("x-forwarded-host"), ["api.example.test"]);
}
