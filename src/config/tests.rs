//! The configuration as a whole: files in, settings or mistakes out.

use std::path::{Path, PathBuf};
use std::time::Duration;

use insta::assert_snapshot;
use secrecy::ExposeSecret as _;
use tempfile::TempDir;

use super::{HeaderStyle, Loaded, Purpose, RedisSettings, Sources, StoreKind, load, needs_restart, read};
use crate::identify::CredentialSource;
use crate::limit::OnFailure;
use crate::limit::algorithm::Algorithm;
use crate::limit::store::Topology;

const BASE: &str = include_str!("../../tests/mistakes/base.toml");

/// A directory of files to load from.
struct Files(TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        Self(directory)
    }

    fn load(&self) -> Result<Loaded, String> {
        self.load_with(&[])
    }

    /// Loads the directory under `environment`. Mistakes name files relative to the directory.
    fn load_with(&self, environment: &[(&str, &str)]) -> Result<Loaded, String> {
        let directory = self.0.path();
        let prefix = format!("{}/", directory.display());
        load(&sources(&[directory], environment))
            .map_err(|mistakes| mistakes.to_string().replace(&prefix, ""))
    }
}

fn sources(files: &[&Path], environment: &[(&str, &str)]) -> Sources {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Sources {
        files: files.iter().map(|&path| path.to_owned()).collect(),
        environment: environment.iter().map(owned).collect(),
        purpose: Purpose::Gateway,
    }
}

/// `text` over the base of the mistakes, under `environment`.
fn with_base(text: &str, environment: &[(&str, &str)]) -> Result<Loaded, String> {
    Files::new(&[("a.toml", BASE), ("b.toml", text)]).load_with(environment)
}

fn files_in(directory: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Every file of `tests/mistakes` says in its first comment lines what is wrong with it, word by word.
#[test]
fn every_mistake_is_told() {
    let base = Path::new("tests/mistakes/base.toml");
    let mut wrong = Vec::new();
    for file in files_in("tests/mistakes") {
        if file == base || file.extension().is_none_or(|ending| ending != "toml") {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let expected: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("# ")).collect();
        assert!(!expected.is_empty(), "{} does not say what is wrong", file.display());
        let told = match load(&sources(&[base, &file], &[])) {
            Ok(_) => "nothing".to_owned(),
            Err(mistakes) => mistakes.to_string(),
        };
        let name = file.display().to_string();
        let told = told.replace(&format!("{name}: "), "").replace(&name, "");
        assert!(!told.contains("canary"), "{name} gives a secret away");
        let mut sorted: Vec<&str> = told.lines().collect();
        let mut expected_sorted = expected.clone();
        sorted.sort_unstable();
        expected_sorted.sort_unstable();
        if sorted != expected_sorted {
            wrong.push(format!("{name}\n  expected {}\n  told     {told}", expected.join("\n           ")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// CFG-2, and the promise of `tollgate check`: nothing hides behind the first mistake.
#[test]
fn mistakes_of_several_files_come_at_once() {
    let files = Files::new(&[
        (
            "plans.toml",
            r#"
                [plans.free]
                limits = [{ name = "minute", limt = 5, per = 60 }]
                [upstreams.api]
                targets = ["127.0.0.1:9000"]
            "#,
        ),
        (
            "routes.toml",
            r#"
                [routes.rest]
                path = "/*"
                upstream = "apy"
                cots = 5
                [redis]
                falback = "closed"
            "#,
        ),
    ]);
    assert_snapshot!(files.load().unwrap_err(), @r#"
    plans.toml: plans.free.limits.minute.per: a duration needs a unit; write "60s"
    plans.toml: plans.free.limits.minute: unknown key `limt`; did you mean `limit`?
    plans.toml: upstreams.api.targets[0]: must start with "http://" or "https://"; for example "http://127.0.0.1:9000"
    routes.toml: routes.rest: unknown key `cots`; did you mean `cost`?
    routes.toml: unknown key `redis`; known here: server, admin, store, identity, answers, log, plans, keys, accounts, upstreams, routes
    routes.toml: routes.rest.upstream: there is no upstream "apy"; did you mean `api`?
    "#);
}

#[test]
fn a_file_that_cannot_be_parsed_hides_nothing_and_invents_nothing() {
    let files = Files::new(&[
        ("keys.toml", "[keys.main]\nhash = \"sha256:00\"\naccount = \"acme\"\nplan = \"free\"\n"),
        ("plans.toml", "[plans.free]\nlimits = [\n"),
        ("routes.toml", "[server]\nworkerz = 1\n"),
    ]);
    assert_snapshot!(files.load().unwrap_err(), @r#"
    keys.toml: keys.main.hash: is not the hash of a key; write "sha256:" and the 64 hex digits that `printf %s "$KEY" | sha256sum` prints
    plans.toml:2: is not TOML: unclosed array, expected `]`
    routes.toml: server: unknown key `workerz`; did you mean `workers`?
    "#);
}

/// A file of another format says what its parser says, too, and no format lets a later duplicate win.
#[test]
fn keys_written_twice_are_refused_in_every_format() {
    let texts = [
        ("b.toml", "[server]\nworkers = 1\n[server]\n"),
        ("b.yaml", "server:\n  workers: 1\n  workers: 2\n"),
        ("b.json", "{\"server\": {\n\"workers\": 1, \"workers\": 2}}"),
        ("b.json", "{\"server\": {\n\"workers\": 1,}}"),
        ("b.json", "[1]"),
        ("b.yaml", "canary"),
        ("b.yaml", "a: &a [x, x]\nb: [*a, *a]"),
        ("b.yaml", "server: [}"),
    ];
    let told = texts.map(|(name, text)| Files::new(&[("a.toml", BASE), (name, text)]).load().unwrap_err());
    assert_snapshot!(told.join("\n"), @r#"
    b.toml:3: is not TOML: duplicate key
    b.yaml:3: is not YAML: duplicate key "workers"
    b.json:2: is not JSON: duplicate key "workers"
    b.json:2: is not JSON: trailing comma
    b.json: holds no table of settings
    b.yaml: holds no table of settings
    b.yaml:2: is not YAML: aliases (*name) are not read
    b.yaml:1: is not YAML: while parsing a node, did not find expected node content
    "#);
}

#[test]
fn formats_say_the_same() {
    let yaml = "
        server: { workers: 3 }
        plans: { Pro: { limits: [ { name: hour, limit: 18446744073, per: 1h } ] } }
        keys: { main: { hash: 'sha256:HASH', account: 'acme', plan: Pro } }
    ";
    let json = r#"{
        "server": { "workers": 3 },
        "plans": { "Pro": { "limits": [{ "name": "hour", "limit": 18446744073, "per": "1h" }] } },
        "keys": { "main": { "hash": "sha256:HASH", "account": "acme", "plan": "Pro" } }
    }"#;
    let toml = r#"
        server.workers = 3
        plans.Pro.limits = [{ name = "hour", limit = 18446744073, per = "1h" }]
        keys.main = { hash = "sha256:HASH", account = "acme", plan = "Pro" }
    "#;
    for (name, text) in [("b.yaml", yaml), ("b.yml", yaml), ("b.json", json), ("b.toml", toml)] {
        let text = text.replace("HASH", &"0a".repeat(32));
        let loaded = Files::new(&[("a.toml", BASE), (name, &text)]).load().unwrap();
        assert_eq!(loaded.settings.server.workers, 3, "{name}");
        let plan = loaded.policy.plans.iter().find(|plan| &*plan.name == "Pro").unwrap();
        assert_eq!(plan.limits[0].algorithm.capacity().get(), 18_446_744_073, "{name}");
        assert_eq!(only_plan(&loaded.policy.keys), "Pro", "{name}");
    }
}

/// CFG-4: what looks like a number in YAML is a number there, and its digits are lost; so it is refused.
#[test]
fn texts_that_look_like_numbers_ask_for_quotes() {
    for text in ["00123456", "1e5", "0x1F", "true", "null", "12345678901234567890"] {
        let yaml = |text: &str| format!("admin: {{ token: {text} }}");
        let loaded = Files::new(&[("a.toml", BASE), ("b.yaml", &yaml(text))]).load();
        let told = loaded.map(|loaded| loaded.settings).unwrap_err();
        assert!(
            told.contains("admin.token: expected a string; put it in quotes") || text == "null",
            "{told}"
        );
        assert!(told.contains("admin.token: has no value") || text != "null", "{told}");

        let token = |loaded: Loaded| loaded.settings.admin.token.unwrap().expose_secret().to_owned();
        let quoted = Files::new(&[("a.toml", BASE), ("b.yaml", &yaml(&format!("'{text}'")))]).load();
        assert_eq!(token(quoted.unwrap()), text);
        let from_environment = with_base("", &[("TOLLGATE__ADMIN__TOKEN", text)]);
        assert_eq!(token(from_environment.unwrap()), text);
    }
}

/// CFG-1: every key can be reached, those with underscores and lists too.
#[test]
fn the_environment_reaches_every_key() {
    let files = r#"
        [upstreams.My-Api]
        targets = ["http://127.0.0.1:1"]
        [store]
        kind = "redis"
        [store.redis]
        budget = "30ms"
    "#;
    let environment = [
        ("HOME", "/root"),
        // Kubernetes sets such names for a service called tollgate.
        ("TOLLGATE_PORT", "tcp://10.0.0.1:80"),
        ("TOLLGATE_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("TOLLGATE__STORE__REDIS__BUDGET", "50ms"),
        ("TOLLGATE__STORE__REDIS__URL", "redis://:canary@127.0.0.1:6380"),
        ("TOLLGATE__SERVER__MAX_BODY", "1MiB"),
        ("TOLLGATE__SERVER__WORKERS", "7"),
        ("TOLLGATE__SERVER__ENCODED_SLASHES", "true"),
        ("TOLLGATE__UPSTREAMS__MY_API__TARGETS", "http://127.0.0.1:2, http://127.0.0.1:3"),
        ("TOLLGATE__IDENTITY__CLIENT_ADDRESS__TRUSTED_PROXIES", "10.0.0.0/8,::1"),
        ("TOLLGATE__IDENTITY__ANONYMOUS", "free"),
        ("TOLLGATE__LOG__LEVEL", "warn,tollgate=debug"),
    ];
    let loaded = with_base(files, &environment).unwrap();
    let StoreKind::Redis(redis) = &loaded.settings.store.kind else { panic!("the store is not Redis") };
    assert_eq!(redis.budget, Duration::from_millis(50));
    assert_eq!(one_node(redis), "redis://:canary@127.0.0.1:6380");
    assert_eq!(loaded.settings.server.max_body, 1 << 20);
    assert_eq!(loaded.settings.server.workers, 7);
    assert!(loaded.policy.path_rules.encoded_slashes);
    let upstream = loaded.settings.upstreams.iter().find(|upstream| &*upstream.name == "My-Api").unwrap();
    assert_eq!(upstream.targets.len(), 2);
    assert_eq!(loaded.policy.client_addresses.trusted_proxies.len(), 2);
    assert_eq!(loaded.policy.anonymous.as_deref(), Some("free"));
    assert_eq!(loaded.settings.log.level, "warn,tollgate=debug");
    assert!(!format!("{loaded:?}").contains("canary"));
}

/// CFG-1 and NUM-6: a variable that does nothing is a mistake, and its value is checked as strictly as one in a file.
#[test]
fn mistakes_in_the_environment_name_the_variable() {
    let environment = [
        ("TOLLGATE__ADMIN__TOKEN", "ca nary"),
        ("TOLLGATE__IDENTITY__ANONYMOUS", ""),
        ("TOLLGATE__LOG__ACCESS", "yes"),
        ("TOLLGATE__PLANS__FREE__LIMITS", "canary"),
        ("TOLLGATE__SERVER__DRAIN", "-5s"),
        ("TOLLGATE__SERVER__LISTEN__PORT", "80"),
        ("TOLLGATE__SERVER__MAX_BODY", "16"),
        ("TOLLGATE__SERVER__MAX_CONNECTIONS", "inf"),
        ("TOLLGATE__SERVER__WORKERS", "-1"),
        ("TOLLGATE__STORE__MEMORY__MAX_CALLERS", "1e-9"),
        ("TOLLGATE__STORE__REDIS__BUDGETT", "canary"),
        ("TOLLGATE__STORE__REDIS__PREFIX", "\u{fffd}"),
        ("TOLLGATE__UPSTREAMS__API__TARGETS", "http://user:canary@127.0.0.1:2"),
        ("TOLLGATE__UPSTREAMS____TARGETS", "canary"),
        ("TOLLGATE_SERVER__LISTEN", "canary"),
        ("tollgate__server__listen", "canary"),
    ];
    let told = with_base("", &environment).unwrap_err();
    assert!(!told.contains("canary"), "{told}");
    assert_snapshot!(told, @r#"
    environment: TOLLGATE_SERVER__LISTEN: is not the name of a setting; names begin with TOLLGATE__ and have two underscores between levels
    environment: TOLLGATE__ADMIN__TOKEN: may hold visible ASCII characters only, and no space
    environment: TOLLGATE__IDENTITY__ANONYMOUS: must not be empty
    environment: TOLLGATE__LOG__ACCESS: expected true or false
    environment: TOLLGATE__PLANS__FREE__LIMITS: a list of tables cannot be set from the environment; write it in a file
    environment: TOLLGATE__SERVER__DRAIN: must not be negative, and is -5s
    environment: TOLLGATE__SERVER__LISTEN__PORT: expected a single value, found a table
    environment: TOLLGATE__SERVER__MAX_BODY: a size needs a unit; write "16KiB"
    environment: TOLLGATE__SERVER__MAX_CONNECTIONS: expected a whole number
    environment: TOLLGATE__SERVER__WORKERS: must not be negative, and is -1
    environment: TOLLGATE__STORE__MEMORY__MAX_CALLERS: expected a whole number
    environment: TOLLGATE__STORE__REDIS__BUDGETT: unknown key `budgett`; did you mean `budget`?
    environment: TOLLGATE__STORE__REDIS__PREFIX: does not hold UTF-8 text
    environment: TOLLGATE__UPSTREAMS__API__TARGETS: must not hold a user or password; for example "http://127.0.0.1:9000"
    environment: TOLLGATE__UPSTREAMS____TARGETS: has an empty level; write two underscores between levels
    environment: tollgate__server__listen: is not the name of a setting; names begin with TOLLGATE__ and have two underscores between levels
    "#);
}

#[test]
fn a_variable_that_fits_two_names_is_refused() {
    let files = r#"
        plans.a-b.limits = []
        plans.a_b.limits = []
    "#;
    let set = |name| with_base(files, &[(name, "deny")]);
    assert_snapshot!(set("TOLLGATE__PLANS__A_B__ON_FAILURE").unwrap_err(), @r#"
    environment: TOLLGATE__PLANS__A_B__ON_FAILURE: "A_B" may stand for a-b or a_b; set this one in a file
    "#);
    let plans = set("TOLLGATE__PLANS__a_b__ON_FAILURE").unwrap().policy.plans;
    let with_deny: Vec<_> = plans.iter().filter(|plan| plan.on_failure == Some(OnFailure::Deny)).collect();
    assert_eq!((with_deny.len(), &*with_deny[0].name), (1, "a_b"));
}

/// The file that everybody reads, the contract, and what the program does are one.
#[test]
fn the_built_in_defaults_are_those_of_the_documentation() {
    let Loaded { settings, policy, files, .. } = with_base("", &[]).unwrap();
    assert_eq!(files.len(), 2);
    assert_eq!(settings.server.listen.to_string(), "0.0.0.0:8080");
    assert!(settings.server.workers >= 1);
    assert_eq!(settings.server.drain_delay, Duration::ZERO);
    assert_eq!(settings.server.drain, Duration::from_secs(10));
    assert!(!settings.server.reuse_port);
    assert_eq!(settings.server.handed_over, None);
    assert_eq!(settings.server.max_body, 2 << 30);
    assert_eq!(settings.server.max_connections, 4_096);
    assert_eq!(settings.server.most_in_flight(), settings.server.workers * 3_072);
    assert_eq!(settings.server.max_memory, None);
    assert!(settings.server.watch);
    assert_eq!(settings.admin.listen.to_string(), "127.0.0.1:9090");
    assert!(settings.admin.token.is_none());
    assert!(matches!(settings.store.kind, StoreKind::Memory));
    assert_eq!(settings.store.max_callers, 1_000_000);
    assert_eq!(settings.headers, HeaderStyle::Draft11);
    assert!(settings.log.access);
    assert_eq!(settings.log.level, "info,actix_server=warn,actix_http=off");
    let upstream = &settings.upstreams[0];
    assert!(!upstream.preserve_host);
    assert_eq!(upstream.connect_timeout, Duration::from_secs(1));
    assert_eq!(upstream.head_timeout, Duration::from_secs(15));
    assert_eq!(upstream.idle_timeout, Duration::from_secs(30));
    assert_eq!(upstream.pool_idle_timeout, Duration::from_secs(4));
    assert_eq!(upstream.resolve_every, Duration::from_secs(30));

    assert!(policy.keys.is_empty(), "nobody's gateway knows the example keys");
    assert_eq!(policy.plans.len(), 1, "nobody's gateway has the example plans");
    assert_eq!(policy.anonymous, None);
    assert_eq!(policy.on_failure, OnFailure::Local);
    assert!(!policy.path_rules.encoded_slashes);
    assert!(policy.client_addresses.trusted_proxies.is_empty());
    assert_eq!(policy.client_addresses.ipv6_prefix, 64);
    let header = actix_web::http::header::HeaderName::from_static("x-api-key");
    assert_eq!(policy.credentials, [CredentialSource::KeyHeader(header), CredentialSource::KeyBearer]);
}

#[test]
fn the_built_in_redis_defaults_are_those_of_the_documentation() {
    let settings = with_base("store.kind = \"redis\"", &[]).unwrap().settings;
    let StoreKind::Redis(redis) = &settings.store.kind else { panic!("the store is not Redis") };
    assert_eq!(one_node(redis), "redis://127.0.0.1:6379");
    assert_eq!(redis.budget, Duration::from_millis(20));
    assert_eq!(redis.prefix, "tollgate");
}

/// The commented upstream of the example plans writes out defaults that live in the code.
#[test]
fn the_built_in_examples_load_and_hold_the_demo_keys() {
    let loaded = load(&Sources::built_in()).unwrap();
    assert!(loaded.files.is_empty());
    for (key, plan) in [("tg_demo_free_key", "free"), ("tg_demo_pro_key", "pro")] {
        let entry = loaded.policy.keys.find(key.as_bytes()).unwrap();
        assert_eq!(&*entry.plan, plan);
    }
    assert_eq!(loaded.policy.anonymous.as_deref(), Some("anonymous"));
    let with_defaults = with_base("", &[]).unwrap().settings.upstreams;
    assert_eq!(loaded.settings.upstreams, with_defaults);
    let search = loaded.policy.routes.iter().find(|route| &*route.name == "search").unwrap();
    assert_eq!(search.cost.any.get(), 5);
    let free = loaded.policy.plans.iter().find(|plan| &*plan.name == "free").unwrap();
    assert!(matches!(free.limits[0].algorithm, Algorithm::TokenBucket(bucket) if bucket.burst().get() == 20));
    assert!(matches!(free.limits[1].algorithm, Algorithm::SlidingWindow(_)));
    assert_eq!(&**free.routes["search"][0].key(""), "route.search:search");
}

#[test]
fn every_example_loads() {
    let examples = files_in("config/examples");
    assert!(examples.len() >= 4);
    for example in examples {
        // What an example names beside it.
        if example.extension().is_none_or(|ending| ending != "toml") {
            continue;
        }
        let loaded = load(&sources(&[&example], &[]));
        assert!(loaded.is_ok(), "{loaded:?}");
    }
    load(&sources(&[Path::new("config")], &[])).unwrap();
}

#[test]
fn files_are_laid_over_each_other_key_by_key() {
    let files = Files::new(&[
        ("10-base.toml", BASE),
        (
            "20-more.toml",
            "[plans.free]\non_failure = \"deny\"\n[server]\nworkers = 2\nlisten = \"127.0.0.1:1\"",
        ),
        ("30-last.json", "{ \"server\": { \"workers\": 3 } }"),
        (".hidden.toml", "this is not TOML"),
        ("README.md", "neither is this"),
    ]);
    std::fs::create_dir(files.0.path().join("sub.toml")).unwrap();
    let loaded = files.load().unwrap();
    assert_eq!(loaded.settings.server.workers, 3);
    assert_eq!(loaded.settings.server.listen.to_string(), "127.0.0.1:1");
    assert_eq!(loaded.policy.plans[0].on_failure, Some(OnFailure::Deny));
    assert_eq!(loaded.policy.plans[0].limits.len(), 1);
    let names: Vec<_> = loaded.files.iter().map(|file| file.file_name().unwrap()).collect();
    assert_eq!(names, ["10-base.toml", "20-more.toml", "30-last.json"]);
}

#[test]
fn what_cannot_be_read_is_named() {
    let files = Files::new(&[("settings.ini", ""), ("broken.toml", "")]);
    std::fs::write(files.0.path().join("broken.toml"), b"# \xff").unwrap();
    let empty = tempfile::tempdir().unwrap();
    let paths = ["settings.ini", "broken.toml", "absent.toml"].map(|name| files.0.path().join(name));
    let all = [&paths[0], &paths[1], &paths[2], empty.path()];
    let told = load(&sources(&all, &[])).unwrap_err().to_string();
    let told = told.replace(&files.0.path().display().to_string(), "DIR");
    let told = told.replace(&empty.path().display().to_string(), "EMPTY");
    let mut lines: Vec<&str> = told.lines().collect();
    lines.sort_unstable();
    assert_snapshot!(lines.join("\n"), @r#"
    DIR/absent.toml: cannot be read: No such file or directory (os error 2)
    DIR/broken.toml: cannot be read: stream did not contain valid UTF-8
    DIR/settings.ini: is of an unknown kind; name it .toml, .yaml, .yml or .json
    EMPTY: holds no .toml, .yaml, .yml or .json file
    "#);
}

#[test]
fn without_a_route_nothing_is_served() {
    assert_snapshot!(Files::new(&[("a.toml", "")]).load().unwrap_err(), @r#"
    a.toml: there is no route, so nothing could be called; add a [routes.NAME] table
    "#);
}

#[test]
fn a_middleware_needs_no_upstream() {
    let files = Files::new(&[("a.toml", "[plans.free]\nlimits = []\n[routes.all]\npath = \"/*\"\n")]);
    let mut sources = sources(&[files.0.path()], &[]);
    assert!(load(&sources).is_err());
    sources.purpose = Purpose::Middleware;
    assert_eq!(load(&sources).unwrap().policy.routes[0].upstream, None);
}

#[test]
fn secrets_come_from_files_beside_the_configuration() {
    let files = Files::new(&[
        ("a.toml", BASE),
        ("b.toml", "admin.token_file = \"token\"\nstore.kind = \"redis\"\nstore.redis.url_file = \"url\""),
        ("token", "canary\n"),
        ("url", "rediss://user:canary@redis.example:6380/2\r\n"),
    ]);
    let loaded = files.load().unwrap();
    let token = loaded.settings.admin.token.as_ref().unwrap();
    assert_eq!(token.expose_secret(), "canary");
    let StoreKind::Redis(redis) = &loaded.settings.store.kind else { panic!("the store is not Redis") };
    assert_eq!(one_node(redis), "rediss://user:canary@redis.example:6380/2");
    assert!(!format!("{loaded:?}").contains("canary"));
}

#[track_caller]
fn one_node(redis: &RedisSettings) -> &str {
    let Topology::Standalone(server) = &redis.topology else { panic!("{redis:?} is not one node") };
    server.url.expose_secret()
}

#[test]
fn sources_do_not_print_the_environment() {
    let printed = format!("{:?}", sources(&[], &[("TOLLGATE__ADMIN__TOKEN", "canary")]));
    assert!(printed.contains("TOLLGATE__ADMIN__TOKEN") && !printed.contains("canary"));
}

/// NUM-4: nothing is cut to 32 bits on the way.
#[test]
fn limits_above_32_bits_are_kept() {
    let text = "[plans.free]\nlimits = [{ name = \"minute\", limit = 4294967297, per = \"60s\" }]";
    let loaded = with_base(text, &[]).unwrap();
    assert_eq!(loaded.policy.plans[0].limits[0].algorithm.capacity().get(), 4_294_967_297);
}

/// A pool was held apart from the limits of every plan, those that cannot use its route included.
#[test]
fn a_pool_may_have_a_name_of_a_plan_that_has_not_its_route() {
    let with_plans = |plans: &str| {
        let text = format!(
            "[plans.pro]\nlimits = []\n[routes.reports]\npath = \"/reports\"\nupstream = \"api\"\nplans = [{plans}]
             limits = [{{ name = \"minute\", limit = 10, per = \"1m\" }}]"
        );
        with_base(&text, &[])
    };
    assert!(with_plans("\"pro\"").is_ok());
    assert!(with_plans("\"pro\", \"free\"").is_err());
}

/// Whatever stands in a file, the answer is a list of mistakes, and never a panic.
#[test]
fn hostile_files_are_refused() {
    let deep = 20_000;
    let hostile = [
        ("b.toml", format!("a = {}", "[".repeat(deep))),
        ("b.json", "[".repeat(deep)),
        ("b.yaml", "[".repeat(deep)),
        ("b.yaml", format!("a: {}", "{a: ".repeat(deep))),
        ("b.yaml", "- ".repeat(deep)),
        ("b.yaml", "- &a ".repeat(deep)),
        ("b.yaml", (0..deep).map(|level| format!("{}a:\n", " ".repeat(level % 3_000))).collect()),
        ("b.yaml", "a: &a [*a]".to_owned()),
        ("b.yaml", "a: &a [x, x]\nb: &b [*a, *a]\n".to_owned()),
        ("b.yaml", "a: &a x\n{\"b\":*a}\n".to_owned()),
        ("b.yaml", "server: .nan".to_owned()),
        ("b.yaml", "server: +.inf".to_owned()),
        ("b.yaml", "server: 1_0.0".to_owned()),
        ("b.yaml", "? [a]\n: b".to_owned()),
        ("b.yaml", "a: 1\n---\nb: 2".to_owned()),
        ("b.json", "{\"server\": 1e999}".to_owned()),
        ("b.toml", "server = 1979-05-27".to_owned()),
    ];
    for (name, text) in hostile {
        let start: String = text.chars().take(20).collect();
        assert!(Files::new(&[("a.toml", BASE), (name, &text)]).load().is_err(), "{name} {start}");
    }
}

fn only_plan(keys: &crate::identify::KeyTable) -> &str {
    assert_eq!(keys.len(), 1);
    &keys.entries().next().unwrap().plan
}

/// A setting that a reload does not take over and does not name either does nothing, in silence.
#[test]
fn what_a_running_process_cannot_take_over_is_named() {
    let waiting = |started: &str, wanted: &str| {
        let settings = |lines: &str| with_base(lines, &[]).unwrap().settings;
        needs_restart(&settings(started), &settings(wanted))
    };
    let redis = "store.kind = \"redis\"\n";
    for (line, key) in [
        ("server.listen = \"127.0.0.1:8080\"", "server.listen"),
        ("server.workers = 511", "server.workers"),
        ("server.drain = \"11s\"", "server.drain"),
        ("server.drain_delay = \"1s\"", "server.drain_delay"),
        ("server.reuse_port = true", "server.reuse_port"),
        ("server.max_connections = 7", "server.max_connections"),
        ("server.max_in_flight = 7", "server.max_in_flight"),
        ("server.max_memory = \"1GiB\"", "server.max_memory"),
        ("admin.listen = \"127.0.0.1:9091\"", "admin.listen"),
        (redis, "store.kind"),
    ] {
        assert_eq!(waiting("", line), [key]);
        assert_eq!(waiting(line, ""), [key]);
    }
    for (line, keys) in [
        ("store.redis.url = \"redis://:other@127.0.0.1\"", ["store.redis.url"].as_slice()),
        ("store.redis.budget = \"21ms\"", &["store.redis.budget"]),
        ("store.redis.prefix = \"other\"", &["store.redis.prefix"]),
        ("store.local_share = \"50%\"", &["store.local_share"]),
        ("store.redis.password = \"other\"", &["store.redis.password"]),
        // These were told as the password.
        (
            "store.redis.username = \"u\"\nstore.redis.password = \"p\"",
            &["store.redis.username", "store.redis.password"],
        ),
        (
            concat!("store.redis.password_file = \"", env!("CARGO_MANIFEST_DIR"), "/Cargo.toml\""),
            &["store.redis.password_file"],
        ),
        (
            "store.redis.mode = \"cluster\"\nstore.redis.nodes = [\"redis://127.0.0.2\"]",
            &["store.redis.mode", "store.redis.nodes"],
        ),
    ] {
        assert_eq!(waiting(redis, &format!("{redis}{line}")), keys);
        // Where the store is not Redis, nothing uses it.
        assert_eq!(waiting("", line), [""; 0]);
    }
    let taken_over = "
        server.max_body = \"1KiB\"
        server.encoded_slashes = true
        server.watch = false
        admin.token = \"other\"
        store.on_failure = \"deny\"
        store.memory.max_callers = 7
        answers.headers = \"off\"
        log.access = false
        log.level = \"warn\"
        upstreams.api.targets = [\"http://127.0.0.1:9001\"]
        identity.client_address.ipv6_prefix = 56";
    assert_eq!(waiting("", taken_over), [""; 0]);
}

/// What was read is what is looked at: the files of a directory, and what a file names, also where there is nothing yet.
#[test]
fn a_fingerprint_changes_with_every_file_and_with_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let write = |name: &str, text: &str| std::fs::write(root.join(name), text).unwrap();
    write("one.toml", "admin.token_file = \"token\"");
    let found = || read(&sources(&[root], &[]));
    let (refused, fingerprint) = found();
    assert!(refused.is_err());
    write(".hidden.toml", "");
    write("notes.txt", "");
    assert_eq!(fingerprint.again(), fingerprint);
    for (name, text) in [("token", "secret"), ("token", "other"), ("two.yaml", "{}"), ("one.toml", "")] {
        let (_, before) = found();
        assert_eq!(before.again(), before);
        write(name, text);
        assert_ne!(before.again(), before, "{name}");
    }
    let (_, before) = found();
    std::fs::remove_file(root.join("two.yaml")).unwrap();
    assert_ne!(before.again(), before);
}

/// The same files are the same version, wherever they are and whenever they were written.
#[test]
fn a_version_is_what_the_files_hold() {
    let version = |texts: &[&str]| {
        let directory = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> =
            (0..texts.len()).map(|at| directory.path().join(format!("{at}.toml"))).collect();
        for (file, text) in files.iter().zip(texts) {
            std::fs::write(file, text).unwrap();
        }
        let base = Path::new("tests/mistakes/base.toml");
        let all: Vec<&Path> = std::iter::once(base).chain(files.iter().map(PathBuf::as_path)).collect();
        load(&sources(&all, &[])).unwrap().provenance.version
    };
    let (one, other) = ("log.access = true\n", "log.level = \"info\"\n");
    assert_eq!(version(&[one, other]), version(&[one, other]));
    assert_ne!(version(&[one, other]), version(&[other, one]));
    assert_ne!(version(&[one, other]), version(&[&format!("{one}{other}")]));
    assert_ne!(version(&[one, other]), version(&[&format!("{one}{other}"), ""]));
    assert_eq!(version(&[one]).to_string().len(), 12);
}
