//! `tollgate demo`, followed as a newcomer follows it.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use crate::support::{Gateway, Request, eventually};

/// The curl lines it printed.
fn curl_lines(gateway: &Gateway) -> Vec<String> {
    eventually("the curl lines", Duration::from_secs(10), || {
        let lines: Vec<String> = gateway
            .stdout()
            .into_iter()
            .map(|line| line.trim().trim_start_matches("$ ").to_owned())
            .filter(|line| line.contains("curl "))
            .collect();
        (!lines.is_empty()).then_some(lines)
    })
}

/// The API keys in these lines, each once.
fn keys(lines: &[String]) -> BTreeSet<String> {
    const FIELD: &str = "x-api-key:";
    lines
        .iter()
        .filter_map(|line| {
            let value = line.to_ascii_lowercase().find(FIELD)? + FIELD.len();
            let key = line[value..].trim_start().split(['\'', '"', ' ']).next()?;
            Some(key.to_owned())
        })
        .collect()
}

#[test]
fn following_the_demo_shows_a_pass_and_then_a_refusal() {
    // The first two minutes: an address that does not answer or a line that does not work, and the reader is gone.
    let gateway = Gateway::demo();
    let lines = curl_lines(&gateway);
    let address = gateway.address().to_string();
    let printed = gateway.stdout().join("\n");
    assert!(printed.contains(&address), "the demo does not print {address}:\n{printed}");

    let keys = keys(&lines);
    assert!(keys.len() >= 2, "keys of two plans in {lines:#?}");
    for key in &keys {
        let answer = gateway.get("/").key(key).send().expect(200);
        assert!(answer.header("ratelimit").is_some(), "{:#?}", answer.head);
    }
    // Without a key: the anonymous plan.
    gateway.get("/").send().expect(200);

    // Some caller is refused soon, and told by which limit and for how long.
    let mut connection = gateway.connect();
    let refusal = (0..1_000)
        .map(|_| Request::get("/").on(&mut connection))
        .find(|answer| answer.status == 429)
        .expect("a refusal within 1,000 calls");
    assert!(refusal.retry_after().is_some_and(|seconds| seconds >= 1), "{:#?}", refusal.head);
    let policies = refusal.json()["violated-policies"].clone();
    assert!(policies.as_array().is_some_and(|names| !names.is_empty()), "{policies}");
}

#[test]
fn the_curl_lines_work_as_printed() {
    // A command in a manual that nobody runs is wrong within a month.
    let gateway = Gateway::demo();
    for line in curl_lines(&gateway) {
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert!(output.status.success(), "{line}\n{}", String::from_utf8_lossy(&output.stderr));
    }
}
