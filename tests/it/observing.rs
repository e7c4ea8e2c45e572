//! Metrics, access log, probes: what operators see, and what nobody may see.

use std::time::Duration;

use crate::support::backend::{After, response};
use crate::support::{Answer, Backend, Config, Connection, Gateway, Request, Unread, eventually};

#[test]
fn decisions_and_requests_are_counted() {
    // OBS-4: gauge and counters that disagree with what happened.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend).route("read", "/read", "methods = [\"GET\"]"));
    gateway.exhaust("/x", "k-free-1");
    gateway.get("/x").key("k-pro-1").send().expect(200);
    gateway.get("/x").send().expect(401);
    gateway.call("POST", "/read").key("k-pro-1").body("x").send();
    let decided = |labels: &[(&str, &str)]| gateway.metric("tollgate_decisions_total", labels);
    let near = |value: f64, wanted: f64| (value - wanted).abs() < 0.5;
    let of_free =
        [("plan", "free"), ("route", "rest"), ("outcome", "allowed"), ("limit", ""), ("source", "store")];
    assert!(near(decided(&of_free), 5.0));
    assert!(near(
        decided(&[("plan", "free"), ("outcome", "denied"), ("limit", "window"), ("source", "store")]),
        1.0
    ));
    assert!(near(decided(&[("plan", "pro"), ("outcome", "allowed")]), 1.0));
    let requests = |labels: &[(&str, &str)]| gateway.metric("tollgate_requests_total", labels);
    assert!(near(requests(&[("code", "200"), ("method", "GET")]), 6.0));
    assert!(near(requests(&[("code", "429")]), 1.0));
    assert!(near(requests(&[("code", "401")]), 1.0));
    assert!(near(requests(&[]), 9.0), "{}", requests(&[]));
    assert!(near(gateway.metric("tollgate_request_seconds_count", &[]), 9.0));
    assert!(near(gateway.metric("tollgate_upstream_seconds_count", &[("upstream", "api")]), 6.0));
    assert!(gateway.metric("tollgate_overhead_seconds_count", &[("route", "rest")]) >= 6.0);
    assert!(near(gateway.metric("tollgate_build_info", &[]), 1.0));
    eventually("no request in flight", Duration::from_secs(5), || {
        near(gateway.metric("tollgate_requests_in_flight", &[]), 0.0).then_some(())
    });
}

#[test]
fn labels_come_from_the_configuration_alone() {
    // OBS-1: path, key or method of the request as a label makes one series per scanner hit.
    let backend = Backend::ok();
    let config =
        Config::bare(backend.address()).route("v1", "/v1/*", "").with_shared_callers().anonymous("anonymous");
    let gateway = Gateway::start(&config);
    let series = || gateway.admin("/metrics").expect(200).text().lines().count();
    let mut connection = gateway.connect();
    let visit = |connection: &mut Connection, number: usize| {
        for request in [
            Request::get(&format!("/scan/{number}.php")),
            Request::get(&format!("/v1/{number}")).key("k-pro-1"),
            Request::get("/v1/x").key(&format!("guess-{number}")),
            Request::get("/v1/x").header("Host", format!("h{number}.example.test")),
        ] {
            request.on(connection);
        }
        // An invented method may cost the connection.
        Request::new(&format!("INVENTED{number}"), "/v1/x").on(&mut gateway.connect());
    };
    for number in 0..120 {
        visit(&mut connection, number);
    }
    let before = series();
    for number in 120..800 {
        visit(&mut connection, number);
    }
    let grown = series() - before;
    assert!(grown < 50, "{grown} more lines of metrics");
    let text = gateway.admin("/metrics").text();
    for word in ["scan", "guess-", "example.test", "INVENTED"] {
        assert!(!text.contains(word), "{word} is in the metrics");
    }
}

#[test]
fn the_public_port_tells_nothing_of_the_gateway() {
    // OBS-2: anyone could read plan names, traffic and the state of the breaker.
    let backend = Backend::ok();
    for config in [
        Config::shared(&backend).anonymous("pro"),
        Config::bare(backend.address())
            .route("health", "/health/*", "")
            .with_shared_callers()
            .anonymous("pro"),
    ] {
        let gateway = Gateway::start(&config);
        assert_ne!(gateway.address(), gateway.admin_address());
        for target in [
            "/metrics",
            "//metrics",
            "/%6detrics",
            "/metrics/",
            "/admin",
            "/config",
            "/health/../metrics",
            "/livez",
            "/readyz",
            "/v1/plans",
        ] {
            let answer = gateway.get(target).send();
            assert!([200, 400, 404].contains(&answer.status), "{target} gave {}", answer.status);
            let text = answer.text();
            if answer.status == 200 {
                // Only the upstream says 200 here.
                assert_eq!(text, "ok", "{target}");
            }
            assert!(!text.contains("tollgate_") && !text.contains("\"pro\""), "{target}: {text}");
        }
    }
}

#[test]
fn probes_are_never_limited() {
    // PATH-6: probes every few seconds used up the budget of their address, and machines were recycled.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend).anonymous("anonymous"));
    let mut admin = Connection::open(gateway.admin_address());
    for _ in 0..200 {
        let answer = Request::get("/livez").on(&mut admin).expect(200);
        assert_eq!(answer.header("ratelimit"), None);
    }
    gateway.admin("/readyz").expect(200);
    assert_eq!(gateway.get("/x").send().expect(200).remaining("window"), 2);
}

#[test]
fn each_request_leaves_one_line() {
    // A log that misses refusals, or tells them in another shape, cannot answer "why was I refused?".
    let backend = Backend::ok();
    let gateway = Gateway::start(
        &Config::bare(backend.address()).route("search", "/v1/search", "").with_shared_callers(),
    );
    let allowed = gateway.get("/v1/search?q=1").key("k-free-1").send().expect(200);
    let (_, denied) = gateway.exhaust("/v1/search", "k-free-1");
    let unidentified = gateway.get("/v1/search").send().expect(401);
    let unmatched = gateway.get("/nowhere").key("k-free-1").send().expect(404);
    let refused = gateway.get("/v1/../search").key("k-free-1").send().expect(400);
    let log = gateway.access_log(9);
    assert_eq!(log.len(), 9, "{log:#?}");
    for line in &log {
        for field in ["ts", "request_id", "method", "path", "status", "decision", "duration_ms", "bytes"] {
            assert!(line.get(field).is_some(), "no {field} in {line}");
        }
        assert!(!line.to_string().contains("q=1"), "a query in {line}");
    }
    let told = |answer: &Answer, fields: &[(&str, serde_json::Value)]| {
        let line = gateway.logged(answer);
        for (field, wanted) in fields {
            assert_eq!(&line[*field], wanted, "{field} of {line}");
        }
    };
    told(
        &allowed,
        &[
            ("method", "GET".into()),
            ("path", "/v1/search".into()),
            ("status", 200.into()),
            ("route", "search".into()),
            ("plan", "free".into()),
            ("account", "one".into()),
            ("decision", "allowed".into()),
            ("source", "store".into()),
            ("bytes", 2.into()),
        ],
    );
    let upstream = &gateway.logged(&allowed)["upstream_ms"];
    assert!(upstream.as_f64().is_some_and(|time| time >= 0.0), "{upstream}");
    told(&denied, &[("status", 429.into()), ("decision", "denied".into()), ("limit", "window".into())]);
    told(&unidentified, &[("status", 401.into()), ("decision", "unidentified".into())]);
    told(&unmatched, &[("status", 404.into()), ("decision", "unmatched".into())]);
    told(&refused, &[("status", 400.into()), ("decision", "refused".into())]);
}

#[test]
fn the_access_log_can_be_switched_off() {
    // A switch that is read and not obeyed is found by the bill for log storage.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend).table("[log]\naccess = false"));
    gateway.get("/x").key("k-free-1").send().expect(200);
    let stdout = gateway.stdout();
    assert!(!stdout.iter().any(|line| line.contains("request_id")), "{stdout:?}");
}

#[test]
fn a_key_is_nowhere_to_be_found() {
    // SEC-4: whole keys in access and error logs, above all from the query; masking that left a usable part.
    let backend = Backend::with(|request, stream| {
        use std::io::Write;
        if request.target().starts_with("/broken") {
            return Ok(After::Reset);
        }
        stream.write_all(&response("200 OK", &[], b"ok"))?;
        Ok(After::Keep)
    });
    let config =
        Config::shared(&backend).key("SECRETKEY123", "three", "pro").table("[log]\nlevel = \"trace\"");
    let gateway = Gateway::start(&config);
    let mut bodies = String::new();
    let mut calls = 0;
    for target in ["/x", "/broken", "/a/../b", "/x?api_key=SECRETKEY123", "/x?api_key=%53ECRETKEY123&b=1"] {
        for (name, value) in [
            ("X-Api-Key", "SECRETKEY123"),
            ("Authorization", "Bearer SECRETKEY123"),
            ("Authorization", "Bearer SECRETKEY1234"),
            ("Authorization", "Basic SECRETKEY123"),
            ("X-Api-Key", "xSECRETKEY123"),
            ("X-Api-Key", "SECRETKEY123\u{ff}"),
            ("X-Unrelated", "1"),
        ] {
            let answer = gateway.get(target).header(name, value).send();
            bodies.push_str(&format!("{:?}{}", answer.head, answer.text()));
            calls += 1;
        }
    }
    let malformed =
        b"GET /x HTTP/1.1\r\nHost: a.test\r\nX-Api-Key: SECRETKEY123\r\nContent-Length: x\r\n\r\n";
    gateway.raw(malformed).answer("GET").expect(400);
    let metrics = gateway.admin("/metrics").text();
    eventually("the access log", Duration::from_secs(10), || {
        let lines = gateway.stdout();
        (lines.iter().filter(|line| line.contains("request_id")).count() >= calls).then_some(())
    });
    let everything = [gateway.log_lines().join("\n"), bodies, metrics].join("\n");
    for part in ["SECRETKEY", "ECRETKEY123", "KEY123"] {
        let line = everything.lines().find(|line| line.contains(part));
        assert_eq!(line, None, "{part} was found");
    }
}

#[test]
fn it_ends_when_asked_and_says_so_by_its_exit_code() {
    // OPS-1: a stop that waits for its time limit although nothing is in flight.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    gateway.get("/x").key("k-free-1").send().expect(200);
    let idle = gateway.connect();
    assert_eq!(gateway.stop(), 0);
    drop(idle);
}

#[test]
fn messages_that_nobody_reads_hold_up_no_request() {
    // A log collector that hung stopped the whole gateway after 235 messages, each caused by a request; one that was
    // gone made every such request panic.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = Config::bare(nobody).route("rest", "/*", "").with_shared_callers();
    let config = config.plan("wide", r#"{ name = "w", limit = 9999, per = "60s" }"#).anonymous("wide");
    for closed in [false, true] {
        let gateway = Unread::start(&config, closed);
        let mut connection = gateway.connect();
        for _ in 0..1_000 {
            Request::get("/x").on(&mut connection).expect(502);
        }
    }
}
