//! Who is calling: keys, blank and hostile credentials, and accounts that must not mix.

use std::time::Duration;

use crate::support::{Backend, Config, Gateway, Redis, Request, Store, for_every_store};

/// The shared fixture with an anonymous plan, and a route that only `pro` includes.
fn with_anonymous(backend: &Backend) -> Config {
    Config::shared(backend).route("private", "/private", "plans = [\"pro\"]").anonymous("anonymous")
}

#[test]
fn callers_without_a_key_are_counted_by_address() {
    // ID-1: a missing header became the empty string, and one caller exhausted it for everybody.
    let backend = Backend::ok();
    let gateway = Gateway::start(&with_anonymous(&backend));
    for source in ["127.0.0.1", "127.0.0.2"] {
        for _ in 0..3 {
            gateway.get("/x").send_from(source).expect(200);
        }
    }
    gateway.get("/x").send_from("127.0.0.1").expect(429);
    assert_eq!(backend.count(), 6);
}

#[test]
fn a_route_that_needs_a_plan_is_closed_to_callers_without_a_key() {
    // ID-1: the cure for the empty bucket was to skip the check altogether.
    let backend = Backend::ok();
    let gateway = Gateway::start(&with_anonymous(&backend));
    // A key might help whoever has shown none; who has shown one has a plan that does not include the route.
    let unidentified = gateway.get("/private").send().expect(401);
    assert!(unidentified.header("www-authenticate").is_some());
    gateway.get("/private").key("k-free-1").send().expect(403);
    gateway.get("/private").key("k-pro-1").send().expect(200);
    assert_eq!(backend.count(), 1);
    // A refusal of this kind is charged to nobody.
    let (passed, _) = gateway.exhaust("/x", "k-free-1");
    assert_eq!(passed, 5);
}

#[test]
fn without_an_anonymous_plan_a_key_is_needed() {
    // ID-1: no key must not mean no limit.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    for _ in 0..10 {
        let answer = gateway.get("/x").send().expect(401);
        assert!(answer.header("www-authenticate").is_some(), "{:#?}", answer.head);
    }
    assert_eq!(backend.count(), 0);
}

#[test]
fn a_blank_credential_is_nobody() {
    // ID-2: an empty identity switched the limit off, or got a bucket named "" that everybody shared.
    let blanks: [(&str, &str); 6] = [
        ("X-Api-Key", ""),
        ("X-Api-Key", "   "),
        ("X-Api-Key", "\t"),
        ("Authorization", "Bearer"),
        ("Authorization", "Bearer "),
        ("Authorization", ""),
    ];
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let strict = Gateway::start(&Config::shared(&backend).store(&redis));
    for (name, value) in blanks {
        strict.get("/x").header(name, value).send().expect(401);
    }
    assert_eq!(redis.redis().unwrap().keys(), [""; 0]);

    // With an anonymous plan a blank credential is 401 as well, or counts against the address. Never unlimited.
    let lenient = Gateway::start(&with_anonymous(&backend).store(&redis));
    let mut passed = 0;
    for (name, value) in blanks {
        for _ in 0..4 {
            match lenient.get("/x").header(name, value).send().status {
                200 => passed += 1,
                status => assert!([401, 429].contains(&status), "{name}: {value:?} gave {status}"),
            }
        }
    }
    assert!(passed <= 3, "{passed} calls with a blank credential passed");
    for key in redis.redis().unwrap().keys() {
        assert_eq!(key, "tollgate:{net.127.0.0.1}:plan:window");
    }
}

#[test]
fn an_unknown_key_is_refused_and_counts_nowhere() {
    // ID-9: every wrong key got a bucket of its own, so guessing was free and filled the store.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let gateway = Gateway::start(&with_anonymous(&backend).store(&redis));
    for number in 0..50 {
        let answer = gateway.get("/x").key(&format!("guess-{number}")).send().expect(401);
        assert!(answer.header("www-authenticate").is_some(), "{:#?}", answer.head);
    }
    assert_eq!(redis.redis().unwrap().keys(), [""; 0]);
    assert_eq!(backend.count(), 0);
}

#[test]
fn letter_case_matters_in_the_key_alone() {
    // ID-7: "bearer x" was refused, or the scheme was taken for a part of the key.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    let left = |name: &str, value: &str| {
        gateway.get("/x").header(name, value).send().expect(200).remaining("window")
    };
    assert_eq!(left("authorization", "bearer k-free-1"), 4);
    assert_eq!(left("Authorization", "BEARER  k-free-1"), 3);
    assert_eq!(left("x-API-key", "k-free-1"), 2);
    gateway.get("/x").header("Authorization", "Bearer K-FREE-1").send().expect(401);
    gateway.get("/x").header("Authorization", "Basic k-free-1").send().expect(401);
}

for_every_store! {
    fn accounts_and_routes_never_run_together(store) {
        // ID-3: account and route joined without care, so "a" on "b.c" and "a.b" on "c" shared one counter.
        let accounts = [
            "a", "a:b", "a.b", "a:route.c", "a}:route.c:window{", "a b", "a|b", "a{b}", "{a}", "A", "a%3Ab", "ä",
        ];
        let backend = Backend::ok();
        let routes = Config::bare(backend.address())
            .route("c", "/c", "")
            .route("\"b.c\"", "/bc", "")
            .plan("free", "")
            .plan_on_route("free", "c", r#"{ name = "window", limit = 2, per = "60s" }"#)
            .plan_on_route("free", "\"b.c\"", r#"{ name = "window", limit = 2, per = "60s" }"#);
        let config = accounts
            .iter()
            .enumerate()
            .fold(routes, |config, (number, account)| config.key(&format!("k-{number}"), account, "free"));
        let gateway = Gateway::start(&config.store(store));
        for (number, account) in accounts.iter().enumerate() {
            for path in ["/c", "/bc"] {
                let (passed, _) = gateway.exhaust(path, &format!("k-{number}"));
                assert_eq!(passed, 2, "{account:?} on {path}");
            }
        }
        let Some(redis) = store.redis() else { return };
        let keys = redis.keys();
        assert_eq!(keys.len(), accounts.len() * 2, "{keys:#?}");
        for key in keys {
            // Exactly one hash tag, no blank, and the parts in their places.
            assert_eq!((key.matches('{').count(), key.matches('}').count()), (1, 1), "{key}");
            assert_eq!(key.matches(':').count(), 3, "{key}");
            assert!(key.is_ascii() && !key.contains(' '), "{key}");
        }
    }
}

#[test]
fn a_very_long_credential_costs_nothing() {
    // ID-4: a value chosen by the caller went unbounded into the name of a key.
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let gateway = Gateway::start(&with_anonymous(&backend).store(&redis));
    for number in 0..100 {
        let key = format!("{number:0>7000}");
        let status = gateway.get("/x").key(&key).send().status;
        assert!([400, 401, 431].contains(&status), "status {status}");
    }
    let oversized = Request::get("/x").header("X-Filler", "a".repeat(200_000));
    let mut connection = gateway.connect();
    // The gateway may hang up while we still write; what it said before that is what counts.
    connection.try_send(&oversized.to_bytes()).ok();
    if let Ok(Some(answer)) = connection.try_answer("GET") {
        assert_eq!(answer.status, 431);
    }
    assert_eq!(redis.redis().unwrap().keys(), [""; 0]);
    gateway.get("/x").key("k-free-1").send().expect(200);
}

#[test]
fn a_head_over_the_limit_is_refused_and_the_connection_closed() {
    // ID-4: without a limit of its own the gateway takes what the server library takes, 128 KiB per connection.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    let request = Request::get("/x").key("k-free-1").header("X-Filler", "a".repeat(20 << 10));
    let mut connection = gateway.raw(&request.to_bytes());
    connection.answer("GET").expect(431);
    connection.rest_until_closed(Duration::from_secs(10));
    let many = (0..80).fold(Request::get("/x").key("k-free-1"), |request, number| {
        request.header(&format!("X-Field-{number}"), "1")
    });
    gateway.raw(&many.to_bytes()).answer("GET").expect(431);
    assert_eq!(backend.count(), 0);
}

#[test]
fn bytes_that_are_no_text_do_no_harm() {
    // ID-5: a header byte outside ASCII hit an unwrap and took the worker down.
    let values: [&[u8]; 9] =
        [b"\xff\xfe", b"*", b"?", b"[", b"%0d%0aSET x 1", b"a\tb", b"k-free-1\xff", b"{}", b"\"quoted\\\""];
    let backend = Backend::ok();
    let redis = Store::Redis(Redis::start());
    let gateway = Gateway::start(&Config::shared(&backend).server("workers = 1").store(&redis));
    let mut sent = 0;
    for value in values {
        let status = gateway.get("/x").header("X-Api-Key", value).send().status;
        assert!([400, 401].contains(&status), "{value:?} gave {status}");
        let mut bearer = b"Bearer ".to_vec();
        bearer.extend_from_slice(value);
        let status = gateway.get("/x").header("Authorization", bearer).send().status;
        assert!([400, 401].contains(&status), "bearer {value:?} gave {status}");
        let answer = gateway.get("/x").key("k-pro-1").header("X-Request-Id", value).send();
        assert!([200, 400].contains(&answer.status), "id {value:?} gave {}", answer.status);
        let id = answer.header("x-request-id").expect("every answer carries an id");
        assert!(id.is_ascii() && !id.contains(['\t', '\r', '\n', '"']), "{id:?}");
        sent += 3;
    }
    // The one worker lives, each call left one line, and nothing of it became a Redis command.
    gateway.get("/x").key("k-free-1").send().expect(200);
    let log = gateway.access_log(sent + 1);
    assert_eq!(log.len(), sent + 1, "{log:#?}");
    assert_eq!(
        redis.redis().unwrap().keys(),
        ["tollgate:{acct.one}:plan:window", "tollgate:{acct.rich}:plan:window"]
    );
}

#[test]
fn line_breaks_and_nul_in_a_value_are_refused() {
    // ID-5: CR, LF and NUL are not data; let through, they start a new line somewhere behind us.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    for value in ["a\rb", "a\0b", "a\r\n b"] {
        let request = Request::get("/x").key("k-free-1").header("X-Note", value);
        gateway.raw(&request.to_bytes()).answer("GET").expect(400);
    }
    assert_eq!(backend.count(), 0);
}
