//! The house rules of ARCHITECTURE.md, held to the source text. Each exception stands here with its reason.

use std::collections::{BTreeMap, BTreeSet};

use crate::support::source::{Source, sources};
use crate::support::tree;

/// Which other rooms each room names, in the code or in the document.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// What `main.rs` and `cli` call the library.
const LIBRARY: &str = "tollgate";

/// Fails with every file outside `allowed` in which `breaks` finds something, and what that is. An allowed place that
/// needs no permission (any more) fails too.
#[track_caller]
fn only<T: std::fmt::Debug>(rule: &str, allowed: &[&str], breaks: impl Fn(&Source) -> Vec<T>) {
    let mut unused: BTreeSet<&str> = allowed.iter().copied().collect();
    let mut broken = Vec::new();
    for source in sources() {
        let found = breaks(&source);
        if found.is_empty() {
            continue;
        }
        match allowed.iter().find(|place| source.is_in(place)) {
            Some(place) => {
                unused.remove(place);
            }
            None => broken.push((source.file, found)),
        }
    }
    assert!(broken.is_empty(), "{rule}; but {broken:#?}");
    assert!(unused.is_empty(), "{rule}; and {unused:?} no longer needs its exception");
}

/// The paths of a file that begin with this crate or module of another crate, such as `std::env`.
fn paths_to(source: &Source, start: &str) -> Vec<String> {
    let start: Vec<&str> = start.split("::").collect();
    // `use redis::..` beside `mod redis;` means the module.
    let hidden = source.declares_module(start[0]);
    source
        .paths()
        .into_iter()
        .filter_map(|path| match path.split_first() {
            Some((first, rest)) if first.is_empty() => Some(rest.to_vec()),
            _ => (!hidden).then_some(path),
        })
        .filter(|path| path.iter().take(start.len()).eq(start.iter()))
        .map(|path| path.join("::"))
        .collect()
}

/// The names behind this type, such as `from_u16` of `StatusCode::from_u16`.
fn members(source: &Source, owner: &str) -> Vec<String> {
    let paths = source.paths();
    let pairs = paths.iter().flat_map(|path| path.windows(2));
    pairs.filter(|pair| pair[0] == owner).map(|pair| pair[1].clone()).collect()
}

/// The arrows in the code, between different rooms.
fn drawn() -> Arrows {
    let mut arrows = Arrows::new();
    for source in sources().iter().filter(|source| source.room() != "lib") {
        let named = rooms_named(source);
        arrows.entry(source.room().to_owned()).or_default().extend(named);
    }
    arrows
}

fn rooms_named(source: &Source) -> BTreeSet<String> {
    let from = if ["main", "cli"].contains(&source.room()) { LIBRARY } else { "crate" };
    source
        .paths()
        .into_iter()
        .filter(|path| path[0] == from || (path[0] == "crate" && source.room() == "main"))
        .filter_map(|path| path.get(1).cloned())
        .chain((source.room() == "main" && source.declares_module("cli")).then(|| "cli".to_owned()))
        .filter(|room| room != source.room())
        .collect()
}

/// The arrows that ARCHITECTURE.md shows: lines `room -> room, room (a remark without commas)`.
fn documented() -> Arrows {
    let text = tree::text("ARCHITECTURE.md");
    let (_, section) = text.split_once("## Arrows").expect("ARCHITECTURE.md has its arrows");
    let block = section.split("```").nth(1).expect("the arrows are a block");
    block
        .lines()
        .filter_map(|line| line.split_once(" -> "))
        .filter(|(room, _)| !room.contains('/'))
        .map(|(room, others)| {
            let named = others.split(", ").filter_map(|other| other.split_whitespace().next());
            let rooms = named.filter(|name| *name != "nothing").map(str::to_owned).collect();
            (room.trim().to_owned(), rooms)
        })
        .collect()
}

/// The crates that Cargo.toml names, as code writes them.
fn dependencies() -> Vec<String> {
    let manifest = tree::text("Cargo.toml");
    let (_, rest) = manifest.split_once("\n[dependencies]\n").expect("there are dependencies");
    let section = rest.split("\n[").next().unwrap_or(rest);
    let lines = section.lines().filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()));
    lines.filter_map(|line| line.split([' ', '=', '.']).next()).map(|name| name.replace('-', "_")).collect()
}

#[test]
fn rooms_name_each_other_only_along_the_documented_arrows() {
    // An import is one line and nobody's decision; ten of them later no room can be read alone.
    let (drawn, documented) = (drawn(), documented());
    let rooms = |arrows: &Arrows| arrows.keys().cloned().collect::<Vec<_>>();
    assert_eq!(rooms(&drawn), rooms(&documented), "rooms in src/ and in the arrows of ARCHITECTURE.md");
    for (room, named) in &drawn {
        assert_eq!(named, &documented[room], "what {room} names, in the code and in ARCHITECTURE.md");
    }
}

#[test]
fn there_is_no_cycle_of_rooms() {
    let mut left = drawn();
    while !left.is_empty() {
        let free: Vec<String> = left
            .iter()
            .filter(|(_, named)| !named.iter().any(|room| left.contains_key(room)))
            .map(|(room, _)| room.clone())
            .collect();
        assert!(!free.is_empty(), "a cycle in {left:#?}");
        left.retain(|room, _| !free.contains(room));
    }
}

#[test]
fn the_leaves_name_nothing_of_ours() {
    let drawn = drawn();
    for leaf in ["inbound", "observe", "clock", "file"] {
        assert_eq!(drawn[leaf], BTreeSet::new(), "{leaf}");
    }
}

#[test]
fn no_room_of_the_path_knows_the_configuration() {
    // A room that reads settings itself cannot be used, or tested, without a file.
    let drawn = drawn();
    for room in ["listen", "identify", "plan", "limit", "proxy", "observe", "gate", "record"] {
        assert!(!drawn[room].contains("config"), "{room} names config");
    }
}

#[test]
fn algorithms_are_arithmetic_on_std_alone() {
    // A clock, a store or a runtime in there, and the promises can no longer be shown by a table of numbers.
    let dependencies = dependencies();
    assert!(dependencies.contains(&"tokio".to_owned()), "{dependencies:?}");
    let algorithms: Vec<Source> =
        sources().into_iter().filter(|source| source.is_in("limit/algorithm")).collect();
    assert!(algorithms.len() >= 3, "{algorithms:?}");
    for source in algorithms {
        for path in source.paths() {
            let root = path.iter().find(|name| !name.is_empty()).expect("a path has a name");
            assert!(!dependencies.contains(root), "{} names {path:?}", source.file);
            let ours =
                root == "crate" && !path.starts_with(&["crate", "limit", "algorithm"].map(str::to_owned));
            assert!(!ours, "{} names {path:?}", source.file);
        }
        for clock in ["Instant", "SystemTime", "Clock"] {
            assert!(!source.mentions(clock), "{} mentions {clock}", source.file);
        }
    }
}

#[test]
fn only_the_redis_store_names_the_redis_crate() {
    only("only limit/store/redis names the crate", &["limit/store/redis"], |source| {
        paths_to(source, "redis")
    });
}

#[test]
fn only_the_proxy_sends_requests() {
    // `config` reads upstream addresses into `reqwest::Url`, the type that the proxy sends to: parsed once.
    only("only proxy names reqwest", &["proxy", "config/raw", "config/words"], |source| {
        paths_to(source, "reqwest")
    });
    only("only proxy names more of reqwest than Url", &["proxy"], |source| {
        let mut paths = paths_to(source, "reqwest");
        paths.retain(|path| path != "reqwest::Url");
        paths
    });
}

#[test]
fn only_one_place_chooses_the_status_of_a_refusal() {
    // Two places that map errors to codes come apart, and one of them forgets Retry-After.
    let exceptions = [
        "listen/reply",
        // Its own port, with probes and a token; nothing there refuses a client's request.
        "admin",
        // The demo's backend is an upstream: its answers are not the gateway's.
        "proxy/echo",
    ];
    only("only listen/reply.rs chooses a status", &exceptions, |source| {
        let mut chosen = members(source, "StatusCode");
        chosen.extend(members(source, "HttpResponse"));
        if source.is_in("proxy/forward") {
            // It hands the upstream's code on, and compares it with the two that have no body.
            let handed_on = ["from_u16", "with_body", "NO_CONTENT", "NOT_MODIFIED"];
            chosen.retain(|name| !handed_on.contains(&name.as_str()));
        }
        chosen
    });
    // `actix_web::error::ErrorForbidden(..)` chooses a code as well.
    only("no status hides in an error of actix", &[], |source| {
        let paths = paths_to(source, "actix_web::error");
        paths.into_iter().filter(|path| path.contains("::Error")).collect()
    });
}

#[test]
fn only_config_reads_the_environment() {
    only("only config reads the environment", &["config/sources"], |source| {
        let mut paths = paths_to(source, "std::env");
        paths.extend(paths_to(source, "env"));
        paths
    });
}

#[test]
fn only_the_clock_reads_the_time() {
    // Time that is read in passing cannot be held still by a test.
    let exceptions = [
        "clock",
        // The runtime's own clock, for timers of bodies and heads: tests pause that one.
        "listen/turns",
        "proxy/body",
        "proxy/forward",
    ];
    only("only clock reads the time", &exceptions, |source| {
        let mut reads = members(source, "Instant");
        reads.extend(members(source, "SystemTime"));
        reads.retain(|name| name == "now");
        reads
    });
    only("only clock reads the system's time", &["clock"], |source| {
        let mut paths = paths_to(source, "std::time");
        paths.retain(|path| path.ends_with("::SystemTime") || path.ends_with("::Instant"));
        let reads = members(source, "Instant").into_iter().chain(members(source, "SystemTime"));
        if reads.into_iter().any(|name| name == "now") { paths } else { Vec::new() }
    });
}

#[test]
fn only_observe_makes_metrics() {
    // A metric that is made where it is counted has labels nobody looked at, and is in no dashboard and no manual.
    only("only observe makes metrics", &["observe"], |source| {
        let mut paths = paths_to(source, "prometheus");
        // What handing the text out needs: its media type, and the error to pass on.
        paths.retain(|path| path != "prometheus::TEXT_FORMAT" && path != "prometheus::Error");
        paths
    });
}

#[test]
fn only_the_commands_print() {
    // Not even cli uses the macros: they panic when the reader of a pipe has left.
    only("nobody prints by macro", &[], |source| {
        let macros = ["print", "println", "eprint", "eprintln", "dbg"];
        macros.into_iter().filter(|name| source.calls_macro(name)).collect()
    });
    // The gateway hands standard output to the access log, which writes to any writer.
    only("only cli, and the access log, write to the terminal", &["cli", "gateway"], |source| {
        let mut paths = members(source, "io");
        paths.retain(|name| name == "stdout" || name == "stderr");
        paths
    });
}

#[test]
fn every_room_with_a_folder_begins_with_its_mod_file() {
    // A room in two places (`room.rs` beside `room/`) is read from the wrong end.
    for directory in tree::directories("src") {
        if directory == "src" || directory.ends_with("/snapshots") {
            continue;
        }
        assert!(tree::path(&format!("{directory}/mod.rs")).is_file(), "{directory}/ has no mod.rs");
        assert!(!tree::path(&format!("{directory}.rs")).exists(), "{directory}.rs beside {directory}/");
    }
    for source in sources() {
        assert_eq!(source.inline_modules(), Vec::<&str>::new(), "{}: a module has a file", source.file);
    }
}

#[test]
fn every_lua_file_is_part_of_the_script() {
    // A file that is not joined is a rule that Redis does not know.
    let joined = tree::text("src/limit/store/redis/script.rs");
    let readme = tree::text("lua/README.md");
    for file in tree::files("lua", ".lua") {
        let uses = joined.matches(&format!("include_str!(\"../../../../{file}\")")).count();
        assert_eq!(uses, 1, "{file} in script.rs");
        let name = file.trim_start_matches("lua/");
        assert!(readme.contains(&format!("| `{name}` |")), "{name} is not in lua/README.md");
    }
    let included: Vec<String> = tree::files("src", ".rs")
        .iter()
        .filter(|file| tree::text(file).contains(".lua\")"))
        .cloned()
        .collect();
    assert_eq!(included, ["src/limit/store/redis/script.rs"], "one place joins the script");
}

#[test]
fn an_algorithm_has_one_name_everywhere() {
    // "sliding_window" here and "sliding-log" there are two algorithms to whoever reads an incident.
    let names: BTreeSet<String> = tree::files("src/limit/algorithm", ".rs")
        .iter()
        .filter_map(|file| file.strip_prefix("src/limit/algorithm/")?.strip_suffix(".rs"))
        .filter(|name| !["mod", "share"].contains(name))
        .map(str::to_owned)
        .collect();
    assert_eq!(names, ["concurrency", "quota", "sliding_window", "token_bucket"].map(str::to_owned).into());

    let shared = ["clock", "state", "rare", "decide", "settle", "renew", "gateways"];
    let of_lua: BTreeSet<String> = tree::files("lua", ".lua")
        .iter()
        .filter_map(|file| file.strip_prefix("lua/")?.strip_suffix(".lua"))
        .filter(|name| !shared.contains(name))
        // The two forms of one algorithm, each in a file.
        .map(|name| name.trim_end_matches("_exact").trim_end_matches("_bucketed").to_owned())
        .collect();
    assert_eq!(of_lua, names, "Lua and Rust");

    // As TOML has it, every written algorithm is one of them, and each of them is shown.
    let written: BTreeSet<String> = [tree::files("config", ".toml"), tree::files("docs", ".md")]
        .concat()
        .iter()
        .chain([&"README.md".to_owned()])
        .flat_map(|file| algorithms_written(&tree::text(file)))
        .collect();
    assert!(written.is_subset(&names), "{written:?} in TOML");
    for name in &names {
        let kind: String = name.split('_').map(capitalized).collect();
        let module = tree::text(&format!("src/limit/algorithm/{name}.rs"));
        assert!(module.contains(&format!("pub struct {kind} ")), "{name} has no type {kind}");
        for document in ["docs/reference/configuration.md", "docs/concepts/algorithms.md", "README.md"] {
            assert!(
                tree::text(document).contains(&format!("`{name}`")) || quoted(document, name),
                "{name} in {document}"
            );
        }
    }

    // No other spelling, anywhere that people read.
    let read = ["src", "docs", "config", "lua", "grafana", "prometheus"];
    for file in read.iter().flat_map(|place| tree::files(place, "")).filter(|file| !file.ends_with(".new")) {
        let text = tree::text(&file).to_lowercase();
        for other in ["sliding-window", "slidingwindow_", "token-bucket", "tokenbucket_", "rolling_window"] {
            assert!(!text.contains(other), "{other} in {file}");
        }
    }
}

fn quoted(document: &str, name: &str) -> bool {
    tree::text(document).contains(&format!("\"{name}\""))
}

fn capitalized(word: &str) -> String {
    let (first, rest) = word.split_at(1);
    first.to_uppercase() + rest
}

/// The values of `algorithm = "..."`.
fn algorithms_written(text: &str) -> Vec<String> {
    let values = text.split("algorithm = \"").skip(1);
    values.filter_map(|rest| rest.split('"').next()).map(str::to_owned).collect()
}

#[test]
fn the_rules_see_what_they_should_see() {
    // A rule over text that reads the text wrongly passes for ever.
    let text = r##"
        //! redis::in_a_comment
        use crate::{plan::{Plan, Policy as Shared}, clock};
        use super::headers;
        use std::{env, io};
        /* prometheus /* nested */ ::Counter */
        fn lifetimes<'a>(text: &'a str) -> char {
            let quoted = "reqwest::Client \" println!(";
            let raw = r#"std::env::var("X")"#;
            println!("{quoted}{raw}{}", '"');
            StatusCode::FORBIDDEN;
            ::redis::cmd();
            'x'
        }
        #[cfg(test)]
        fn helper() { tokio::spawn(); }
        #[cfg(test)]
        mod tests { use reqwest::Client; }
        fn after() { observe::note(); }
    "##;
    let source = Source::sample("src/proxy/forward.rs", text);
    let paths: Vec<String> = source.paths().iter().map(|path| path.join("::")).collect();
    for seen in [
        "crate::plan::Plan",
        "crate::plan::Policy",
        "crate::clock",
        "crate::proxy::headers",
        "std::env",
        "std::io",
        "StatusCode::FORBIDDEN",
        "::redis::cmd",
        "observe::note",
    ] {
        assert!(paths.iter().any(|path| path == seen), "{seen} is not in {paths:#?}");
    }
    for hidden in ["reqwest", "prometheus", "tokio", "in_a_comment"] {
        assert!(!source.mentions(hidden), "{hidden} was read: {source:#?}");
    }
    assert!(source.calls_macro("println"));
    assert_eq!(paths_to(&source, "redis"), ["redis::cmd"]);
    assert_eq!(paths_to(&source, "std::env"), ["std::env"]);
    assert_eq!(rooms_named(&source), ["plan", "clock"].map(str::to_owned).into());
    assert!(source.is_in("proxy") && source.is_in("proxy/forward") && !source.is_in("pro"));
}
