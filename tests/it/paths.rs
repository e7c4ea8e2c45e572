//! One canonical path serves route matching, counters and the upstream.

use proptest::prelude::{Strategy, prop};
use proptest::test_runner::{Config as Runs, TestRunner};

use crate::support::{Backend, Config, Connection, Gateway, Request};

/// `/public/*` for everybody, `/admin/*` for `pro` alone.
fn public_and_admin(backend: &Backend) -> Config {
    Config::bare(backend.address())
        .route("public", "/public/*", "")
        .route("admin", "/admin/*", "plans = [\"pro\"]")
        .with_shared_callers()
        .plan("wide", r#"{ name = "window", limit = 100000, per = "60s" }"#)
        .key("k-wide", "wide", "wide")
}

#[test]
fn another_spelling_is_no_fresh_budget() {
    // PATH-1: the router folded "//", the limiter keyed on the raw path, and each spelling had its own counter.
    let backend = Backend::ok();
    let gateway = Gateway::start(
        &Config::bare(backend.address())
            .route("search", "/v1/search", "")
            .plan("free", "")
            .plan_on_route("free", "search", r#"{ name = "window", limit = 2, per = "60s" }"#)
            .key("k", "one", "free"),
    );
    for target in [
        "/v1/search",
        "/v1//search",
        "//v1/search",
        "/v1/search/",
        "/v1/./search",
        "/v1/search?x",
        "/v1/search?",
        "/v1/%73earch",
        "/v1/search;a=1",
        "/v1/search/.",
        "/V1/SEARCH",
        "/v1/search%2F",
        "/v1/search",
    ] {
        let status = gateway.get(target).key("k").send().status;
        assert!([200, 400, 404, 429].contains(&status), "{target} gave {status}");
    }
    let served: Vec<String> = backend.received().iter().map(|request| request.target().to_owned()).collect();
    assert_eq!(served.len(), 2, "{served:?}");
    gateway.get("/v1/search").key("k").send().expect(429);
}

#[test]
fn dot_segments_lead_nowhere() {
    // PATH-2: judged as /public, and resolved to /admin by the upstream or by the URL type on the way.
    let backend = Backend::ok();
    let gateway = Gateway::start(&public_and_admin(&backend));
    for target in [
        "/public/../admin/x",
        "/public/%2e%2e/admin/x",
        "/public/.%2E/admin/x",
        "/public/%2E./admin/x",
        "/public/x/../../admin/x",
        "/../admin/x",
        "/public/..\\admin\\x",
        "/public\\..\\admin/x",
        "/public/..%2fadmin/x",
        "/public/..%5cadmin/x",
        "/public/%00/../admin/x",
        "/public/..;/admin/x",
        "/public/.\t./admin/x",
    ] {
        let bytes = Request::get(target).key("k-free-1").to_bytes();
        let status = gateway.raw(&bytes).answer("GET").status;
        assert!([400, 403, 404].contains(&status) || target.contains(';'), "{target} gave {status}");
    }
    for request in backend.received() {
        // A semicolon is an ordinary character here; the segment "..;" goes on as it was judged.
        assert_eq!(request.target(), "/public/..;/admin/x");
    }
}

#[test]
fn no_path_at_all_reaches_a_route_it_was_not_judged_for() {
    // PATH-2 for spellings nobody thought of: whatever arrives upstream must begin with the route that was judged.
    let backend = Backend::ok();
    let gateway = Gateway::start(&public_and_admin(&backend));
    let pieces = prop::sample::select(vec![
        "/", "//", ".", "..", "%2e", "%2E", "%2f", "%5c", "\\", ";", "admin", "public", "%61dmin", "%",
        "%00", "?", "a", "%25", "~", "@",
    ]);
    let tails = prop::collection::vec(pieces, 0..8).prop_map(|pieces| pieces.concat());
    let mut runner = TestRunner::new(Runs { cases: 400, failure_persistence: None, ..Runs::default() });
    runner
        .run(&tails, |tail| {
            let target = format!("/public/{tail}");
            let seen = backend.count();
            let mut connection = Connection::open(gateway.address());
            let answer = Request::get(&target).key("k-wide").on(&mut connection);
            assert!([200, 400, 403, 404].contains(&answer.status), "{target}: {}", answer.status);
            if answer.status == 200 {
                let sent_on = backend.last().target().to_owned();
                let path = sent_on.split('?').next().unwrap();
                assert!(path.starts_with("/public/"), "{target} was sent on as {sent_on}");
                let decoded = path.replace("%2e", ".").replace("%2E", ".");
                assert!(decoded.split('/').all(|part| part != ".."), "{target} was sent on as {sent_on}");
            } else {
                assert_eq!(backend.count(), seen, "{target} was refused and sent on");
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn the_most_specific_route_wins() {
    // A catch-all that wins by its place in the file takes the calls of the route with the limit.
    let backend = Backend::ok();
    let gateway = Gateway::start(
        &Config::open(&backend)
            .route("user", "/v1/users/{id}", "")
            .route("me", "/v1/users/me", "")
            .route("v1", "/v1/*", "")
            .plan("free", "")
            .key("k", "one", "free"),
    );
    let expected = [
        ("/v1/users/me", "me"),
        ("/v1/users/7", "user"),
        ("/v1/users/7/posts", "v1"),
        ("/v1/other", "v1"),
        ("/else", "rest"),
        ("/", "rest"),
    ];
    for (target, route) in expected {
        let answer = gateway.get(target).key("k").send().expect(200);
        assert_eq!(gateway.logged(&answer)["route"], route, "{target}");
    }
}
