//! A configuration that changes while the gateway runs: what is seen, what is applied, and what stays.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use actix_web::rt::System;
use actix_web::test as calls;
use actix_web::{App, web};
use serde_json::{Value, json};
use tempfile::TempDir;
use tollgate::clock::SystemClock;
use tollgate::config::{self, Purpose, Sources};
use tollgate::gate::Gate;
use tollgate::limit::store::{MemoryStore, StoreKind};
use tollgate::observe::Metrics;
use tollgate::plan::Policy;

use crate::support::backend::{After, response};
use crate::support::load::{only, under_load};
use crate::support::{
    Answer, Backend, Config, Connection, Gateway, Request, eventually, for_every_store, sleep_until,
};

/// How soon a changed file must be in force.
const SOON: Duration = Duration::from_secs(2);

/// How long what nobody claims a time for may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A gateway, and the file that it was started with.
struct Changing {
    gateway: Gateway,
    file: PathBuf,
    _directory: TempDir,
}

impl Changing {
    #[track_caller]
    fn start(config: &Config) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tollgate.toml");
        fs::write(&file, config.text()).unwrap();
        Self { gateway: Gateway::start_on(&[&file]), file, _directory: directory }
    }

    /// Writes another configuration and has it applied now; what the admin listener says of it.
    #[track_caller]
    fn apply(&self, config: &Config) -> Value {
        fs::write(&self.file, config.text()).unwrap();
        let report = self.gateway.reload().expect(200).json();
        assert_eq!(report["result"], "applied", "{report}");
        report
    }
}

/// All paths for the key `k` of the account `one`, on a plan with one limit of so many calls in ten minutes.
fn limited(backend: &Backend, limit: u64) -> Config {
    Config::open(backend).plan("free", &window(limit)).key("k", "one", "free")
}

fn window(limit: u64) -> String {
    format!("{{ name = \"window\", limit = {limit}, per = \"10m\" }}")
}

/// A configuration whose files are not looked at by themselves.
fn unwatched(config: Config) -> Config {
    config.server("watch = false")
}

fn call(gateway: &Gateway) -> Answer {
    gateway.get("/x").key("k").send()
}

/// The limit that is in force.
#[track_caller]
fn limit_in_force(gateway: &Gateway) -> u64 {
    call(gateway).policy("window", "q").expect("the answer names the limit")
}

#[track_caller]
fn comes_into_force(gateway: &Gateway, limit: u64, how: &str) {
    eventually(&format!("a limit of {limit}, {how}"), SOON, || {
        (limit_in_force(gateway) == limit).then_some(())
    });
}

/// How many reloads ended so.
#[track_caller]
fn reloads(gateway: &Gateway, result: &str) -> u64 {
    let text = gateway.admin("/metrics").expect(200).text();
    let series = format!("tollgate_config_reloads_total{{result=\"{result}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&series)).expect("every result has its series");
    line.parse().unwrap()
}

/// The versions that the metric shows; one, but while it is replaced.
#[track_caller]
fn versions(gateway: &Gateway) -> Vec<String> {
    let text = gateway.admin("/metrics").expect(200).text();
    let shown = text.lines().filter_map(|line| line.strip_prefix("tollgate_config_info{version=\""));
    shown.map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
}

/// The lines of the log that tell of reloads that ended so; there must come to be `count` of them.
#[track_caller]
fn told(gateway: &Gateway, result: &str, count: usize) -> Vec<Value> {
    let told = || {
        let lines = gateway.log_lines().into_iter();
        let lines = lines.filter_map(|line| serde_json::from_str::<Value>(&line).ok());
        lines.filter(|line| line["result"] == result).collect::<Vec<_>>()
    };
    eventually("the messages", PATIENCE, || (told().len() >= count).then_some(()));
    let lines = told();
    assert_eq!(lines.len(), count, "{lines:#?}");
    lines
}

/// Puts a file in the place of another one, whole, as `mv` does.
fn move_over(file: &Path, text: &str) {
    let beside = file.with_extension("new");
    fs::write(&beside, text).unwrap();
    fs::rename(beside, file).unwrap();
}

// What is seen.

#[test]
fn a_file_that_is_written_in_any_way_is_seen() {
    // CFG-5: writing in place worked; a file moved over, deleted and created, or saved by an editor was never noticed.
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 1_000));
    let (gateway, file) = (&changing.gateway, &changing.file);
    let text = |limit| limited(&backend, limit).text();
    assert_eq!(limit_in_force(gateway), 1_000);
    let mut seen = versions(gateway);
    assert_eq!(seen.len(), 1);
    let began = gateway.metric("tollgate_config_last_good_timestamp_seconds", &[]);

    let mut is_in_force = |limit: u64, how: &str| {
        comes_into_force(gateway, limit, how);
        let now = versions(gateway);
        assert!(
            now.len() == 1 && now[0].len() == 12 && !seen.contains(&now[0]),
            "{how}: {now:?} after {seen:?}"
        );
        seen.extend(now);
    };
    fs::write(file, text(1_001)).unwrap();
    is_in_force(1_001, "written in place");

    move_over(file, &text(1_002));
    is_in_force(1_002, "moved over");

    fs::remove_file(file).unwrap();
    thread::sleep(Duration::from_millis(500));
    fs::write(file, text(1_003)).unwrap();
    is_in_force(1_003, "deleted and created");

    fs::rename(file, file.with_extension("toml~")).unwrap();
    fs::write(file, text(1_004)).unwrap();
    is_in_force(1_004, "saved by an editor that keeps a backup");

    // The same length, and the time of the content as it was: what `cp -p` or a checkout can leave behind.
    let written = fs::metadata(file).unwrap().modified().unwrap();
    fs::write(file, text(1_005)).unwrap();
    fs::File::options().write(true).open(file).unwrap().set_modified(written).unwrap();
    is_in_force(1_005, "written with an old time");

    assert!(gateway.metric("tollgate_config_last_good_timestamp_seconds", &[]) > began);
}

#[test]
fn a_directory_swapped_by_a_symbolic_link_is_seen() {
    // CFG-5: Kubernetes writes a ConfigMap beside the old one and swaps `..data`; no file in the directory is ever written.
    let backend = Backend::ok();
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let write = |version: &str, limit: u64| {
        fs::create_dir(root.join(version)).unwrap();
        fs::write(root.join(version).join("tollgate.toml"), limited(&backend, limit).text()).unwrap();
    };
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, root.join(name)).unwrap();
    write("..2026_01", 1_001);
    link("..2026_01", "..data");
    link("..data/tollgate.toml", "tollgate.toml");
    let gateway = Gateway::start_on(&[root]);
    assert_eq!(limit_in_force(&gateway), 1_001);
    for (old, new, limit) in [("..2026_01", "..2026_02", 1_002), ("..2026_02", "..2026_03", 1_003)] {
        write(new, limit);
        link(new, "..data_tmp");
        fs::rename(root.join("..data_tmp"), root.join("..data")).unwrap();
        fs::remove_dir_all(root.join(old)).unwrap();
        comes_into_force(&gateway, limit, "swapped by a link");
    }
    assert_eq!(reloads(&gateway, "refused"), 0);
}

#[test]
fn files_that_are_written_beside_others_are_seen() {
    // One file of several changes, a new one comes, one goes, and one that is only named holds another secret.
    let backend = Backend::ok();
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let file = |name: &str, text: &str| fs::write(root.join(name), text).unwrap();
    let base = limited(&backend, 1_000).text().replacen("[admin]", "[admin]\ntoken_file = \"token\"", 1);
    file("10-base.toml", &base);
    file("token", "first");
    file("20-more.toml", "");
    let gateway = Gateway::start_on(&[root]);
    let limit = |limit: u64| format!("[plans.free]\nlimits = [{}]", window(limit));

    file("20-more.toml", &limit(1_001));
    comes_into_force(&gateway, 1_001, "in the second file");
    file("30-last.toml", &limit(1_002));
    comes_into_force(&gateway, 1_002, "in a new file");
    fs::remove_file(root.join("30-last.toml")).unwrap();
    comes_into_force(&gateway, 1_001, "when the file is gone");

    let status = |token: &str| {
        let request = Request::get("/metrics").header("Authorization", format!("Bearer {token}"));
        request.on(&mut Connection::open(gateway.admin_address())).status
    };
    assert_eq!((status("first"), status("second")), (200, 401));
    file("token", "second\n");
    eventually("the new token", SOON, || (status("second") == 200).then_some(()));
    assert_eq!(status("first"), 401);
}

#[test]
fn a_file_that_is_being_written_is_left_alone() {
    // F21: half a file is read in the middle of being written. It may be without mistakes, and without the keys.
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 1_000));
    let text = limited(&backend, 1_001).text();
    let (first, second) = text.split_at(text.find("[plans").unwrap());
    let counts = || ["applied", "refused"].map(|result| reloads(&changing.gateway, result));
    // A machine that stands still between the two halves makes them two changes, which says nothing.
    let mut quick = 0;
    for _ in 0..20 {
        // What was in force before came by a look at the files, and there is one every half second: the next one is to fall
        // between the two halves.
        thread::sleep(Duration::from_millis(250));
        let [applied, refused] = counts();
        let began = Instant::now();
        let mut file = fs::File::create(&changing.file).unwrap();
        file.write_all(first.as_bytes()).unwrap();
        thread::sleep(Duration::from_millis(350));
        file.write_all(second.as_bytes()).unwrap();
        let in_time = began.elapsed() < Duration::from_millis(450);
        comes_into_force(&changing.gateway, 1_001, "in two halves");
        if in_time {
            // Half a file may be without mistakes: then it would have been applied.
            assert_eq!(counts(), [applied + 1, refused], "half a file was read");
            quick += 1;
        }
        if quick == 3 {
            return;
        }
        move_over(&changing.file, &limited(&backend, 1_000).text());
        comes_into_force(&changing.gateway, 1_000, "as it was");
    }
    panic!("only {quick} attempts were quick enough to say anything");
}

#[test]
fn without_watching_a_file_waits_for_a_signal() {
    // SIGHUP ended the process: the one signal that every operator sends to have a configuration read again.
    let backend = Backend::ok();
    let changing = Changing::start(&unwatched(limited(&backend, 1_000)));
    let gateway = &changing.gateway;
    move_over(&changing.file, &unwatched(limited(&backend, 1_001)).text());
    thread::sleep(SOON);
    assert_eq!((limit_in_force(gateway), reloads(gateway, "applied")), (1_000, 0));
    gateway.signal("HUP");
    comes_into_force(gateway, 1_001, "after SIGHUP");
    assert_eq!(told(gateway, "applied", 1)[0]["trigger"], "signal");

    gateway.signal("HUP");
    eventually("a reload without a change", PATIENCE, || (reloads(gateway, "unchanged") == 1).then_some(()));
    assert_eq!(reloads(gateway, "applied"), 1);

    // The setting itself comes into force like any other.
    let report = changing.apply(&limited(&backend, 1_002));
    assert_eq!(report["needs_restart"], json!([]));
    move_over(&changing.file, &limited(&backend, 1_003).text());
    comes_into_force(gateway, 1_003, "now that files are watched");
}

// What is refused.

#[test]
fn a_mistake_leaves_everything_as_it_was() {
    // F21, CFG-2: with a typo in the limits the gateway went on without limits, or not at all, and nobody was told.
    let backend = Backend::ok();
    let good = limited(&backend, 5);
    let changing = Changing::start(&good);
    let gateway = &changing.gateway;
    let version = versions(gateway);
    let since = gateway.metric("tollgate_config_last_good_timestamp_seconds", &[]);
    let text = good.text();
    let half = &text[..text.find("hash = \"sha256:").unwrap() + 20];
    let bad = [
        ("no TOML", "[plans.free\nlimits = 5".to_owned(), "tollgate.toml"),
        ("a typo", text.replace("limit = 5", "limt = 5"), "plans.free.limits"),
        ("an unknown table", format!("{text}\n[quotas]\nfree = 5"), "quotas"),
        ("a plan that is not there", text.replace("plan = \"free\"", "plan = \"fre\""), "keys.key_1.plan"),
        ("half of it", half.to_owned(), "tollgate.toml"),
        (
            "routes that claim the same",
            format!("{text}\n[routes.other]\npath = \"/*\"\nupstream = \"api\""),
            "",
        ),
    ];
    for (number, (what, text, place)) in bad.iter().enumerate() {
        move_over(&changing.file, text);
        let refused = 2 * number as u64;
        // By itself, and once more when it is asked to.
        eventually(&format!("a refusal of {what}"), SOON, || {
            (reloads(gateway, "refused") == refused + 1).then_some(())
        });
        let answer = gateway.reload().expect(422).json();
        assert_eq!(answer["result"], "refused", "{answer}");
        assert_eq!(answer["version"], json!(version[0]), "{what}: {answer}");
        let mistakes = answer["mistakes"].as_array().unwrap();
        let named = |mistake: &Value| {
            let place_of = |field: &str| mistake[field].as_str().unwrap().contains(place);
            ["file", "key", "message"].into_iter().any(place_of)
        };
        assert!(mistakes.iter().any(named), "{what}: {answer}");
        assert!(mistakes.iter().all(|mistake| !mistake["message"].as_str().unwrap().is_empty()), "{answer}");
        told(gateway, "refused", 2 * number + 2);
    }
    // Nothing else was ever in force, and nothing was counted anew: five calls in all.
    assert_eq!(versions(gateway), version);
    assert!((gateway.metric("tollgate_config_last_good_timestamp_seconds", &[]) - since).abs() < 1e-9);
    assert!(gateway.metric("tollgate_config_last_reload_successful", &[]) < 0.5);
    assert_eq!(reloads(gateway, "applied"), 0);
    assert_eq!(gateway.exhaust("/x", "k").0, 5);

    move_over(&changing.file, &limited(&backend, 8).text());
    comes_into_force(gateway, 8, "after the mistakes");
    assert_eq!(gateway.exhaust("/x", "k").0, 2);
}

#[test]
fn all_mistakes_are_in_the_answer_and_the_first_in_the_log() {
    // One mistake at a time is one reload for each.
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 5));
    let typos: String = (0..9).map(|number| format!("\n[plans.p{number}]\nlimts = []")).collect();
    fs::write(&changing.file, unwatched(limited(&backend, 5)).text() + &typos).unwrap();
    let answer = changing.gateway.reload().expect(422).json();
    let keys: Vec<&str> = answer["mistakes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mistake| mistake["key"].as_str().unwrap())
        .collect();
    for number in 0..9 {
        assert!(keys.iter().any(|key| key.starts_with(&format!("plans.p{number}"))), "{keys:?}");
    }
    let line = &told(&changing.gateway, "refused", 1)[0];
    assert_eq!(line["count"], keys.len());
    let first = line["first"].as_str().unwrap();
    assert!(first.contains("plans.p0") && !first.contains("plans.p8"), "{first}");
}

#[test]
fn a_secret_that_is_missing_is_seen_when_it_comes() {
    // What the files of the configuration in force name is watched; what a refused one names must be, too.
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 5));
    let gateway = &changing.gateway;
    let text = limited(&backend, 5).text().replacen("[admin]", "[admin]\ntoken_file = \"token\"", 1);
    move_over(&changing.file, &text);
    eventually("a refusal", SOON, || (reloads(gateway, "refused") == 1).then_some(()));
    fs::write(changing.file.with_file_name("token"), "secret").unwrap();
    eventually("a token", SOON, || (gateway.admin("/metrics").status == 401).then_some(()));
}

// What is applied.

#[test]
fn everything_that_may_change_does_at_once() {
    let backend = Backend::ok();
    let other = Backend::answering(|_| response("200 OK", &[], b"other"));
    let changing = Changing::start(&limited(&backend, 50));
    let gateway = &changing.gateway;
    let post = |body: &str| gateway.call("POST", "/x").key("k").body(body).send();
    assert_eq!(call(gateway).expect(200).text(), "ok");
    gateway.get("/a%2Fb").key("k").send().expect(400);
    gateway.get("/x").key("k-new").send().expect(401);
    gateway.get("/x").send().expect(401);
    gateway.get("/x").key("k").header("X-Forwarded-For", "192.0.2.1").send().expect(200);
    post("12345678").expect(200);

    let report = changing.apply(
        &Config::bare(other.address())
            .server("max_body = \"4B\"\nencoded_slashes = true")
            .route("only", "/a%2Fb", "")
            .route("x", "/x", "cost = 3")
            .plan("pro", &window(60))
            .plan("anonymous", &window(7))
            .anonymous("anonymous")
            .key("k", "one", "pro")
            .key("k-new", "new", "pro")
            .behind_loopback_proxy()
            .table("[accounts.one]\nanchor_day = 3")
            .table("[answers]\nheaders = \"x-ratelimit\"")
            .table("[store]\nmemory.max_callers = 1_000")
            .table("[log]\nlevel = \"error\"\naccess = false"),
    );
    assert_eq!(report["needs_restart"], json!([]));
    let answer = call(gateway).expect(200);
    assert_eq!(answer.text(), "other");
    // Three calls of one unit, one of three: what was used is used.
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("54"), "{:#?}", answer.head);
    assert!(answer.header("ratelimit").is_none());
    gateway.get("/a%2Fb").key("k").send().expect(200);
    gateway.get("/y").key("k").send().expect(404);
    gateway.get("/x").key("k-new").send().expect(200);
    let anonymous = gateway.get("/x").header("X-Forwarded-For", "192.0.2.1").send().expect(200);
    assert_eq!(anonymous.header("x-ratelimit-remaining"), Some("4"));
    gateway.get("/x").header("X-Forwarded-For", "192.0.2.2").send().expect(200);
    post("12345678").expect(413);
}

#[test]
fn the_logs_follow_the_configuration() {
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 50));
    let gateway = &changing.gateway;
    gateway.logged(&call(gateway));
    changing.apply(&limited(&backend, 50).table("[log]\naccess = false\nlevel = \"off\""));
    let silent = call(gateway).expect(200);
    // Nothing tells of this reload: the level was off when it ended.
    changing.apply(&limited(&backend, 51).table("[log]\nlevel = \"info\""));
    let logged = call(gateway).expect(200);
    gateway.logged(&logged);
    let id = silent.header("x-request-id").unwrap();
    assert!(!gateway.stdout().iter().any(|line| line.contains(id)));
    told(gateway, "applied", 1);
}

#[test]
fn what_needs_a_restart_is_named_and_the_rest_is_applied() {
    // A setting that is read and does nothing is worse than one that is refused.
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 1_000).server("workers = 1"));
    let gateway = &changing.gateway;
    let lines = "workers = 2\nmax_connections = 99\ndrain = \"3s\"";
    let changed = limited(&backend, 1_001)
        .server(lines)
        .table("[store]\nkind = \"redis\"\nredis.url = \"redis://127.0.0.1:1\"");
    let waiting = json!(["server.workers", "server.drain", "server.max_connections", "store.kind"]);
    assert_eq!(changing.apply(&changed)["needs_restart"], waiting);
    assert_eq!(limit_in_force(gateway), 1_001);
    call(gateway).expect(200);
    let line = &told(gateway, "applied", 1)[0];
    assert_eq!(
        (line["level"].as_str(), line["needs_restart"].as_str()),
        (Some("WARN"), Some("server.workers, server.drain, server.max_connections, store.kind"))
    );
    // Asked again, it still waits; and it does not when the file is as the process is.
    assert_eq!(gateway.reload().expect(200).json()["needs_restart"], waiting);
    assert_eq!(changing.apply(&limited(&backend, 1_002).server("workers = 1"))["needs_restart"], json!([]));
    let listen = limited(&backend, 1_003).server("workers = 1").text().replace("127.0.0.1:0", "127.0.0.2:0");
    fs::write(&changing.file, listen).unwrap();
    let report = gateway.reload().expect(200).json();
    assert_eq!(report["needs_restart"], json!(["server.listen", "admin.listen"]));
    assert_eq!(limit_in_force(gateway), 1_003);
}

#[test]
fn without_a_file_nothing_changes() {
    // The demo has no file to read again; asking must not end it, or put something else in its place.
    let gateway = Gateway::demo();
    let report = gateway.reload().expect(200).json();
    assert_eq!(
        (report["result"].as_str(), report["needs_restart"].as_array().unwrap().len()),
        (Some("unchanged"), 0)
    );
    gateway.get("/hello").key("tg_demo_free_key").send().expect(200);
}

#[test]
fn only_the_operator_may_ask() {
    // A reload through the admin listener is as open as the metrics: to whoever has the token.
    let backend = Backend::ok();
    let config = limited(&backend, 5).text().replacen("[admin]", "[admin]\ntoken = \"secret\"", 1);
    let gateway = Gateway::start_with(&config, &[]);
    let ask = |method: &str, token: &str| {
        let request = Request::new(method, "/v1/reload").header("Authorization", format!("Bearer {token}"));
        request.on(&mut Connection::open(gateway.admin_address()))
    };
    gateway.reload().expect(401);
    ask("POST", "wrong").expect(401);
    assert_eq!(ask("POST", "secret").expect(200).json()["result"], "unchanged");
    // A 404, or a 401 without a word, told an operator nothing.
    assert_eq!(ask("GET", "secret").expect(405).header("allow"), Some("POST"));
    assert!(ask("POST", "wrong").expect(401).text().contains("Authorization: Bearer"));
    // And nowhere else: on the public listener it is a path like any other.
    gateway.call("POST", "/v1/reload").key("k").send().expect(200);
    assert_eq!(backend.count(), 1);
}

#[test]
fn a_reload_opens_the_admin_side_to_nobody() {
    // Its address waits for a restart and its token did not: a file that had it listen on loopback, where none is needed,
    // took the token from the listener that everybody can reach.
    let backend = Backend::ok();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.toml");
    let (loopback, everywhere) =
        ("[admin]\nlisten = \"127.0.0.1:0\"", "[admin]\ntoken = \"secret\"\nlisten = \"0.0.0.0:0\"");
    fs::write(&file, limited(&backend, 1_000).text().replacen(loopback, everywhere, 1)).unwrap();
    let gateway = Gateway::start_on(&[&file]);
    move_over(&file, &limited(&backend, 1_001).text());
    comes_into_force(&gateway, 1_001, "without a token");
    gateway.admin("/metrics").expect(401);
    let ask = Request::new("POST", "/v1/reload").header("Authorization", "Bearer secret");
    let report = ask.on(&mut Connection::open(gateway.admin_address())).expect(200).json();
    assert_eq!(report["needs_restart"], serde_json::json!(["admin.listen", "admin.token"]));
}

#[test]
fn a_pipe_in_the_place_of_a_file_stops_neither_reloads_nor_the_end() {
    // To open a pipe waits for somebody to write into it: no reload came through any more, and SIGTERM ended nothing.
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 1_000));
    let gateway = &changing.gateway;
    let pipe = changing.file.with_extension("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    fs::rename(&pipe, &changing.file).unwrap();
    let report = gateway.reload().expect(422).json();
    assert_eq!(report["mistakes"][0]["message"], "cannot be read: it is a pipe, and not a file");
    move_over(&changing.file, &limited(&backend, 1_001).text());
    comes_into_force(gateway, 1_001, "behind a pipe");
}

#[test]
fn reloads_at_the_same_time_are_one_after_the_other() {
    // Two that read at the same time could end in the wrong order, the older one in force.
    let backend = Backend::ok();
    let changing = Changing::start(&limited(&backend, 1_000));
    let gateway = &changing.gateway;
    for limit in 1_001..1_006 {
        // Whole: a signal of the round before may come late, and be followed at once.
        move_over(&changing.file, &limited(&backend, limit).text());
        let results: Vec<String> = thread::scope(|scope| {
            let asking: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| gateway.reload().expect(200).json()["result"].as_str().unwrap().to_owned())
                })
                .collect();
            gateway.signal("HUP");
            asking.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(results.iter().filter(|result| *result == "applied").count() <= 1, "{results:?}");
        assert_eq!(limit_in_force(gateway), limit);
    }
    assert_eq!((reloads(gateway, "applied"), reloads(gateway, "refused")), (5, 0));
}

// What was used is used.

for_every_store! {
    fn a_changed_limit_is_in_force_at_once(store) {
        // F22, CHG-1: the limit was stored with the counter at its first use, and a reload did nothing until that ended.
        let backend = Backend::ok();
        let config = |limit| limited(&backend, limit).store(store);
        let changing = Changing::start(&config(100));
        for _ in 0..10 {
            call(&changing.gateway).expect(200);
        }
        changing.apply(&config(5));
        let refusal = call(&changing.gateway).expect(429);
        assert_eq!((refusal.remaining("window"), refusal.policy("window", "q")), (0, Some(5)));
        changing.apply(&config(20));
        let answer = call(&changing.gateway).expect(200);
        assert_eq!((answer.remaining("window"), answer.policy("window", "q")), (9, Some(20)));
        assert_eq!(changing.gateway.exhaust("/x", "k").0, 9);
    }

    fn reloads_hand_out_nothing(store) {
        // CHG-4: limiters were built anew at every reload, and whoever can cause reloads has no limit.
        let backend = Backend::ok();
        let config = || limited(&backend, 5).store(store);
        let changing = Changing::start(&config());
        assert_eq!(changing.gateway.exhaust("/x", "k").0, 5);
        for edit in 1..=20 {
            let name = format!("extra-{edit}");
            changing.apply(&config().plan(&name, &window(edit)).key(&name, &name, &name));
            assert_eq!(call(&changing.gateway).expect(429).remaining("window"), 0, "edit {edit}");
        }
    }

    fn a_key_that_moves_to_another_plan_takes_its_usage_along(store) {
        // CHG-5: which limit applied was frozen at first use; or each move was a fresh budget.
        let backend = Backend::ok();
        let on = |plan: &str| {
            let plans = Config::open(&backend).plan("free", &window(5)).plan("pro", &window(100));
            plans.key("k", "one", plan).store(store)
        };
        let changing = Changing::start(&on("free"));
        assert_eq!(changing.gateway.exhaust("/x", "k").0, 5);
        changing.apply(&on("pro"));
        assert_eq!(changing.gateway.exhaust("/x", "k").0, 95);
        for plan in ["free", "pro", "free"] {
            changing.apply(&on(plan));
            call(&changing.gateway).expect(429);
        }
    }

    fn a_limit_that_is_removed_is_not_asked(store) {
        // And is what it was when it comes back.
        let backend = Backend::ok();
        let changing = Changing::start(&limited(&backend, 5).store(store));
        assert_eq!(changing.gateway.exhaust("/x", "k").0, 5);
        changing.apply(&Config::open(&backend).plan("free", "").key("k", "one", "free").store(store));
        for _ in 0..20 {
            call(&changing.gateway).expect(200);
        }
        changing.apply(&limited(&backend, 5).store(store));
        call(&changing.gateway).expect(429);
    }

    fn a_request_in_flight_keeps_its_slot(store) {
        // A slot that belongs to the limiter of before is given back twice, or never.
        let backend = Backend::with(|request, stream| {
            if request.target() == "/slow" {
                thread::sleep(Duration::from_millis(1_500));
            }
            stream.write_all(&response("200 OK", &[], b"ok"))?;
            Ok(After::Keep)
        });
        let config = |limit: u64| {
            let slots = format!("{{ name = \"slots\", limit = {limit}, algorithm = \"concurrency\" }}");
            Config::open(&backend).plan("free", &slots).key("k", "one", "free").store(store)
        };
        let changing = Changing::start(&config(2));
        let gateway = &changing.gateway;
        thread::scope(|scope| {
            let slow = scope.spawn(|| gateway.get("/slow").key("k").send());
            eventually("the slow request", PATIENCE, || (backend.count() == 1).then_some(()));
            changing.apply(&config(1));
            call(gateway).expect(429);
            slow.join().unwrap().expect(200);
        });
        // Redis is told of it behind the answer, so the next call may come too early; but not for good.
        for _ in 0..3 {
            eventually("the slot to be back", PATIENCE, || (call(gateway).status == 200).then_some(()));
        }
    }
}

// Requests in flight, and connections.

/// A backend that answers with the port that the gateway called from: it names the connection.
fn naming_connections() -> Backend {
    Backend::with(|_, stream| {
        let port = stream.peer_addr()?.port().to_string();
        stream.write_all(&response("200 OK", &[], port.as_bytes()))?;
        Ok(After::Keep)
    })
}

#[test]
fn an_upstream_that_did_not_change_keeps_its_connections() {
    // Pools that are built anew at every reload meet the backend with a storm of connections.
    let backend = naming_connections();
    let upstream = |lines: &str| {
        let address = backend.address();
        let api =
            format!("[upstreams.api]\npool_idle_timeout = \"1m\"\ntargets = [\"http://{address}\"]\n{lines}");
        Config::default().server("workers = 1").table(&api).route("rest", "/*", "").anonymous("open")
    };
    let changing = Changing::start(&upstream("").plan("open", ""));
    let connection = || changing.gateway.get("/x").send().expect(200).text();
    let first = connection();
    for limit in 1..4 {
        changing.apply(&upstream("").plan("open", &window(1_000 + limit)));
        assert_eq!(connection(), first);
    }
    // Neither is it by what has nothing to do with connections,
    changing.apply(&upstream("head_timeout = \"3s\"").plan("open", ""));
    assert_eq!(connection(), first);
    // and here the counterpart.
    changing.apply(&upstream("connect_timeout = \"3s\"").plan("open", ""));
    assert_ne!(connection(), first);
}

#[test]
fn an_answer_under_way_is_finished_by_what_it_began_with() {
    // The upstream goes while half of its answer is on its way.
    let backend = Backend::with(|request, stream| {
        if request.target() == "/slow" {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nfour")?;
            thread::sleep(Duration::from_millis(1_500));
            stream.write_all(b"more")?;
        } else {
            stream.write_all(&response("200 OK", &[], b"ok"))?;
        }
        Ok(After::Keep)
    });
    let other = Backend::answering(|_| response("200 OK", &[], b"other"));
    let changing = Changing::start(&limited(&backend, 100));
    let gateway = &changing.gateway;
    let slow = thread::scope(|scope| {
        let slow = scope.spawn(|| gateway.get("/slow").key("k").send());
        eventually("the slow request", PATIENCE, || (backend.count() == 1).then_some(()));
        let renamed = limited(&other, 100).text().replace("upstreams.api", "upstreams.new");
        fs::write(&changing.file, renamed.replace("upstream = \"api\"", "upstream = \"new\"")).unwrap();
        assert_eq!(gateway.reload().expect(200).json()["result"], "applied");
        assert_eq!(call(gateway).expect(200).text(), "other");
        slow.join().unwrap()
    });
    assert_eq!(slow.expect(200).text(), "fourmore");
}

/// A gateway with an `/etc/hosts` of its own, which the test writes.
fn with_hosts(config: &Config, hosts: &Path) -> Gateway {
    let file = hosts.with_file_name("tollgate.toml");
    fs::write(&file, config.text()).unwrap();
    // In a mount namespace of its own, so that the machine keeps its file.
    Gateway::start_by(Command::new("unshare").args(["--mount", "sh", "-c"]).arg(format!(
        "mount --bind {} /etc/hosts && exec {} serve -c {}",
        hosts.display(),
        env!("CARGO_BIN_EXE_tollgate"),
        file.display()
    )))
}

#[test]
fn a_backend_that_has_moved_is_followed() {
    // F28: a pooled connection is never closed under steady traffic, and so the old address is called for ever.
    let listener = |address: &str, port: u16| TcpListener::bind((address, port)).unwrap();
    let old = listener("127.0.0.2", 0);
    let port = old.local_addr().unwrap().port();
    let old = Backend::on(old, |_| response("200 OK", &[], b"old"));
    let new = Backend::on(listener("127.0.0.3", port), |_| response("200 OK", &[], b"new"));
    let directory = tempfile::tempdir().unwrap();
    let hosts = directory.path().join("hosts");
    fs::write(&hosts, "127.0.0.2 api.moving.test\n").unwrap();
    let upstream = format!(
        "[upstreams.api]\nresolve_every = \"500ms\"\npool_idle_timeout = \"1m\"\ntargets = [\"http://api.moving.test:{port}\"]"
    );
    let config = Config::default().server("workers = 1").table(&upstream).route("rest", "/*", "");
    let gateway = with_hosts(&config.plan("open", "").anonymous("open"), &hosts);
    let request = Request::get("/x");
    let (samples, ()) = under_load(gateway.address(), 4, Duration::from_millis(20), &request, || {
        eventually("the first calls", PATIENCE, || (old.count() > 100).then_some(()));
        assert_eq!(new.count(), 0);
        fs::write(&hosts, "127.0.0.3 api.moving.test\n").unwrap();
        eventually("calls at the new address", PATIENCE, || (new.count() > 0).then_some(()));
        let left = old.count();
        eventually("more calls", PATIENCE, || (new.count() > 100).then_some(()));
        // Those that were on their way when it moved.
        assert!(old.count() - left <= 4, "{} calls at the old address", old.count() - left);
    });
    only(&samples, &[200]);
}

#[test]
fn twenty_reloads_at_500_requests_a_second_fail_none() {
    // Must show: an upstream that is renamed and a plan that is changed under load, and not one request notices.
    let backend = Backend::ok();
    let config = |turn: u64| {
        let name = if turn.is_multiple_of(2) { "even" } else { "odd" };
        let (address, limits) = (backend.address(), window(1_000_000 + turn));
        Config::default()
            .table(&format!("[upstreams.{name}]\ntargets = [\"http://{address}\"]"))
            .table(&format!("[routes.rest-{name}]\npath = \"/*\"\nupstream = \"{name}\""))
            .plan(name, &limits)
            .key("k", "one", name)
    };
    let changing = Changing::start(&config(0));
    let request = Request::get("/x").key("k");
    let began = Instant::now();
    let (samples, ()) =
        under_load(changing.gateway.address(), 16, Duration::from_millis(25), &request, || {
            for turn in 1..=20_u64 {
                let next = Instant::now() + Duration::from_millis(250);
                if turn.is_multiple_of(4) {
                    // As most people do it: only the file.
                    move_over(&changing.file, &config(turn).text());
                    let wanted = 1_000_000 + turn;
                    eventually("the change", PATIENCE, || {
                        (limit_in_force(&changing.gateway) == wanted).then_some(())
                    });
                } else {
                    changing.apply(&config(turn));
                }
                sleep_until(next);
            }
        });
    only(&samples, &[200]);
    #[expect(clippy::cast_precision_loss, reason = "some thousands")]
    let rate = samples.len() as f64 / began.elapsed().as_secs_f64();
    assert!(rate > 400.0, "only {rate} requests a second");
    assert_eq!((reloads(&changing.gateway, "applied"), reloads(&changing.gateway, "refused")), (20, 0));
    // And all of them were counted by the one limit.
    let used = 1_000_020 - call(&changing.gateway).expect(200).remaining("window");
    assert!(used >= samples.len() as u64, "{used} of {}", samples.len());
}

#[test]
fn a_gate_in_another_application_is_told_of_a_policy() {
    // A middleware has no files of its own: whoever has read them puts what came of it in force.
    let policy = |limit: u64| {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("tollgate.toml");
        let config = Config::default().plan("free", &window(limit)).key("k", "one", "free");
        fs::write(&file, config.table("[routes.rest]\npath = \"/*\"").text()).unwrap();
        let sources = Sources { files: vec![file], environment: Vec::new(), purpose: Purpose::Middleware };
        Policy::new(config::load(&sources).unwrap().policy).unwrap()
    };
    let memory = Arc::new(MemoryStore::new(100, Arc::new(SystemClock::new())));
    let gate = Gate::new(policy(2), StoreKind::Memory, memory, Arc::new(Metrics::new().unwrap()));
    System::new().block_on(async {
        let app = App::new().wrap(gate.clone()).default_service(web::to(async || "ok"));
        let service = calls::init_service(app).await;
        let call = async || {
            let request = calls::TestRequest::get().uri("/").insert_header(("host", "api.example.test"));
            let request = request.insert_header(("x-api-key", "k"));
            calls::call_service(&service, request.to_request()).await.status().as_u16()
        };
        assert_eq!([call().await, call().await, call().await], [200, 200, 429]);
        gate.put_in_force(policy(3));
        assert_eq!([call().await, call().await], [200, 429]);
    });
}
