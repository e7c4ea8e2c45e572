//! What the gateway itself says: rate-limit fields, `Retry-After`, problem documents, request ids.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use crate::support::{Answer, Backend, Config, Gateway, Redis, Request, for_every_store};

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// Fails unless this is a problem document (RFC 9457) of its own status; gives it back.
#[track_caller]
fn problem(answer: &Answer) -> serde_json::Value {
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{:#?}", answer.head);
    let document = answer.json();
    assert_eq!(document["status"], answer.status, "{document}");
    assert!(document["title"].as_str().is_some_and(|title| !title.is_empty()), "{document}");
    document
}

for_every_store! {
    fn allowed_and_refused_answers_tell_every_limit(store) {
        // SIG-3: fields only on success, or only on refusals, leave the client half blind.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan(
                    "free",
                    r#"{ name = "burst", limit = 10, per = "1s", algorithm = "token_bucket", burst = 20 },
                       { name = "minute", limit = 2, per = "1m" }"#,
                )
                .key("k", "one", "free")
                .store(store),
        );
        let allowed = gateway.get("/x").key("k").send().expect(200);
        gateway.get("/x").key("k").send().expect(200);
        let refused = gateway.get("/x").key("k").send().expect(429);
        for answer in [&allowed, &refused] {
            // One line each, lists in the order of the configuration (draft-11, RFC 9651).
            assert_eq!(answer.head.lines("ratelimit-policy"), [r#""burst";q=10;w=1, "minute";q=2;w=60"#]);
            let state = answer.head.lines("ratelimit");
            assert_eq!(state.len(), 1, "{:#?}", answer.head);
            assert!(state[0].starts_with("\"burst\";r="), "{state:?}");
            assert!(state[0].contains(", \"minute\";r="), "{state:?}");
        }
        assert_eq!(allowed.remaining("minute"), 1);
        assert_eq!(refused.remaining("minute"), 0);
        // The refusal is one of the minute, and takes nothing from the bucket.
        assert!(refused.remaining("burst") + 1 >= allowed.remaining("burst"), "{:#?}", refused.head);
        assert_eq!(allowed.header("retry-after"), None);
    }

    fn a_refusal_explains_itself(store) {
        // SIG-3: a 429 without a reason or a time makes the client guess, and guessing clients hammer.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan("free", r#"{ name = "second", limit = 2, per = "3s" }, { name = "minute", limit = 100, per = "1m" }"#)
                .key("k", "one", "free")
                .store(store),
        );
        let (_, refusal) = gateway.exhaust("/x", "k");
        let document = problem(&refusal);
        assert_eq!(document["type"], QUOTA_EXCEEDED);
        assert_eq!(document["violated-policies"], serde_json::json!(["second"]));
        assert_eq!(refusal.header("cache-control"), Some("no-store"));
        assert!((1..=3).contains(&refusal.retry_after().unwrap()), "{:#?}", refusal.head);
        assert_eq!(backend.count(), 2);
    }

    fn retry_after_is_a_whole_number_within_the_window(store) {
        // SIG-1: clients met -43, 0 and 0.493; a fraction raises, a zero hammers, a negative number ends all waiting.
        let backend = Backend::ok();
        let gateway = Gateway::start(
            &Config::open(&backend)
                .plan("odd", r#"{ name = "window", limit = 5, per = "1500ms" }"#)
                .key("k", "one", "odd")
                .store(store),
        );
        let request = Request::get("/x").key("k");
        let mut connection = gateway.connect();
        let began = Instant::now();
        let mut refusals = 0;
        while began.elapsed() < Duration::from_secs(6) {
            let answer = request.on(&mut connection);
            if answer.status == 429 {
                refusals += 1;
                let wait = answer.retry_after().expect("a refusal says when to come back");
                assert!((1..=2).contains(&wait), "Retry-After: {wait}");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        assert!(refusals > 100, "only {refusals} refusals");
    }

    fn resets_are_seconds_from_now(store) {
        // SIG-6: seconds added to milliseconds, or a moment where a span was meant.
        let backend = Backend::ok();
        let windows = [("1s", 1), ("60s", 60), ("30d", 2_592_000)];
        let config = windows.iter().fold(Config::open(&backend), |config, (per, _)| {
            config
                .plan(per, &format!("{{ name = \"window\", limit = 2, per = \"{per}\" }}"))
                .key(&format!("k-{per}"), &format!("of_{per}"), per)
        });
        let gateway = Gateway::start(&config.store(store));
        for (per, seconds) in windows {
            let mut connection = gateway.connect();
            let request = Request::get("/x").key(&format!("k-{per}"));
            let answers = [(); 3].map(|()| request.on(&mut connection));
            for answer in &answers {
                assert_eq!(answer.policy("window", "w"), Some(seconds));
                let reset = answer.rate_limit("window", "t").expect("something is used");
                assert!((1..=seconds).contains(&reset), "t={reset} of a window of {per}");
            }
            // The third of a second-long window may come late on a busy machine; of the others never.
            if seconds > 1 {
                assert_eq!(answers.each_ref().map(|answer| answer.status), [200, 200, 429]);
                let wait = answers[2].retry_after().unwrap();
                assert!(wait + 5 >= seconds && wait <= seconds, "Retry-After: {wait} of {per}");
            }
        }
    }
}

#[test]
fn a_refusal_for_want_of_a_store_explains_itself() {
    // SIG-3: 503 by policy is a refusal of the gateway as well, and says when to come back.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend).table(&Redis::absent().tables("deny", "20ms")));
    let refusal = gateway.get("/x").key("k-free-1").send().expect(503);
    let document = problem(&refusal);
    assert_eq!(document["type"], REDUCED_CAPACITY);
    assert!(refusal.retry_after().unwrap() >= 1);
    assert_eq!(refusal.header("cache-control"), Some("no-store"));
    assert_eq!(backend.count(), 0);
}

#[test]
fn every_refusal_is_a_problem_document() {
    // SIG-3: bodies of five shapes for five refusals; no client can read them all.
    let backend = Backend::ok();
    let gateway = Gateway::start(
        &Config::bare(backend.address())
            .route("read", "/read", "methods = [\"GET\"]")
            .route("rich", "/rich", "plans = [\"pro\"]")
            .with_shared_callers(),
    );
    let unidentified = gateway.get("/read").send().expect(401);
    assert!(unidentified.header("www-authenticate").is_some(), "{:#?}", unidentified.head);
    problem(&unidentified);
    problem(&gateway.get("/rich").key("k-free-1").send().expect(403));
    problem(&gateway.get("/nowhere").key("k-free-1").send().expect(404));
    let method = gateway.call("POST", "/read").key("k-free-1").body("x").send().expect(405);
    problem(&method);
    let allow = method.header("allow").expect("405 says what is allowed (RFC 9110 15.5.6)");
    assert!(allow.split(',').any(|name| name.trim() == "GET"), "{allow}");
    problem(&gateway.get("/read/../x").key("k-free-1").send().expect(400));
    assert_eq!(backend.count(), 0);
    // None of these was charged.
    assert_eq!(gateway.exhaust("/read", "k-free-1").0, 5);
}

#[test]
fn all_bad_keys_look_alike() {
    // A refusal that tells an unknown key from a missing one tells a guesser how far they are.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    // All but the id of the request, and the order of the fields, which the server library draws by lot.
    let shape = |answer: Answer| {
        let mut document = answer.json();
        document.as_object_mut().unwrap().remove("instance");
        let mut fields = answer.head.fields;
        fields.retain(|(name, _)| !["x-request-id", "date"].contains(&name.to_ascii_lowercase().as_str()));
        fields.sort();
        (answer.status, fields, document)
    };
    let unknown = shape(gateway.get("/x").key("k-nobody").send());
    let near = shape(gateway.get("/x").key("k-free-1x").send());
    let bearer = shape(gateway.get("/x").header("Authorization", "Bearer k-nobody").send());
    assert_eq!(unknown, near);
    assert_eq!(unknown, bearer);
}

#[test]
fn a_refusal_of_head_has_no_body() {
    // A body behind the answer to HEAD is the beginning of the next answer.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    let mut connection = gateway.connect();
    for _ in 0..2 {
        Request::new("HEAD", "/x").on(&mut connection).expect(401);
        problem(&Request::get("/x").on(&mut connection).expect(401));
    }
}

#[test]
fn every_answer_carries_a_request_id() {
    // Without an id in the answer, nobody finds the log line of a call that went wrong.
    let backend = Backend::ok();
    let gateway = Gateway::start(&Config::shared(&backend));
    let mut seen = HashSet::new();
    for call in [
        gateway.get("/x").key("k-free-1"),
        gateway.get("/x"),
        gateway.get("/a/../b").key("k-free-1"),
        gateway.get("/x").key("k-free-1"),
    ] {
        let answer = call.send();
        let ids = answer.head.lines("x-request-id");
        assert_eq!(ids.len(), 1, "{:#?}", answer.head);
        assert!(ids[0].len() >= 8, "{ids:?}");
        assert!(seen.insert(ids[0].to_owned()), "{ids:?} came twice");
    }

    let kept = gateway.get("/x").key("k-free-1").header("X-Request-Id", "client-1.a_B").send().expect(200);
    assert_eq!(kept.head.lines("x-request-id"), ["client-1.a_B"]);
    assert_eq!(backend.last().head.lines("x-request-id"), ["client-1.a_B"]);
    gateway.logged(&kept);

    for insane in ["", " ", "two words", "a".repeat(5_000).as_str(), "<script>", "\u{e4}"] {
        let answer = gateway.get("/x").header("X-Request-Id", insane).send();
        let id = answer.header("x-request-id").expect("every answer carries an id");
        assert!(id != insane && !id.is_empty() && id.len() <= 200, "{id:?}");
    }
}

#[test]
fn an_id_of_the_upstream_does_not_come_in_addition() {
    // SIG-5: two values under one name, and every client picks another.
    let backend = Backend::answering(|_| {
        crate::support::backend::response(
            "200 OK",
            &[
                ("X-Request-Id", "of-the-upstream"),
                ("RateLimit", "\"theirs\";r=999"),
                ("RateLimit-Policy", "\"theirs\";q=999"),
            ],
            b"ok",
        )
    });
    let gateway = Gateway::start(&Config::shared(&backend));
    let answer = gateway.get("/x").key("k-free-1").send().expect(200);
    assert_eq!(answer.head.lines("x-request-id").len(), 1, "{:#?}", answer.head);
    assert_eq!(
        answer.head.lines("ratelimit"),
        [format!("\"window\";r=4;t={}", answer.rate_limit("window", "t").unwrap())]
    );
    assert_eq!(answer.head.lines("ratelimit-policy"), ["\"window\";q=5;w=10"]);
}

#[test]
fn a_429_of_the_upstream_passes_as_its_own() {
    // SIG-5: counted as a refusal of the gateway, or with the gateway's Retry-After in place of its own.
    let backend = Backend::answering(|_| {
        crate::support::backend::response("429 Too Many Requests", &[("Retry-After", "77")], b"theirs")
    });
    let gateway = Gateway::start(&Config::shared(&backend));
    let answer = gateway.get("/x").key("k-free-1").send().expect(429);
    assert_eq!((answer.retry_after(), answer.text().as_str()), (Some(77), "theirs"));
    let decided = |outcome| gateway.metric("tollgate_decisions_total", &[("outcome", outcome)]);
    assert!(decided("allowed") > 0.5);
    assert!(decided("denied") < 0.5);
}
