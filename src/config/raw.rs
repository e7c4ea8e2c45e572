//! The configuration as written: every key with its type, and nothing about what the keys mean together.
//!
//! A field is `None` when the key is absent or its value is a mistake, which is noted by then. Keys of the built-in
//! defaults are therefore `None` only after a mistake.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::time::Duration;

use actix_web::http::Method;
use actix_web::http::header::HeaderName;
use ipnet::IpNet;
use reqwest::Url;
use secrecy::SecretString;

use super::mistakes::{Fault, Place};
use super::reader::{Scalar, Table, Written};
use super::settings::HeaderStyle;
use super::units::{at_least_one, duration, duration_in, limit, size, size_from, whole_in};
use super::words::{
    account, answer_header, choice, enforce, flag, hash, header, listen, local_share, log_filter, name,
    network, redis_url, secret, target, text, token,
};
use crate::inbound::METHODS;
use crate::limit::{OnFailure, Unit};
use crate::plan::Priority;

type Field<T> = Option<Written<T>>;
type List<T> = Option<Written<Vec<Written<T>>>>;

/// The longest of all timeouts.
const TIMEOUT_MAX: &str = "1d";

/// The shortest time between two questions to a resolver.
const RESOLVE_EVERY_MIN: &str = "500ms";

/// The longest time that stopping may take.
const DRAIN_MAX: &str = "1h";

/// The longest time that the limiter may spend on one request.
const BUDGET_MAX: &str = "10s";

/// The most threads that the HTTP library can have; with more it panics.
const WORKERS_MAX: u64 = 512;

/// The most connections of one worker; a process has not more descriptors.
const CONNECTIONS_MAX: u64 = 1_000_000;

/// The most requests in flight: there is one at most on each connection.
const IN_FLIGHT_MAX: u64 = 1_000_000_000;

/// The least that the process may use: with less it would refuse everything from the start.
const MEMORY_MIN: &str = "64MiB";

/// The most callers in memory: below this, a process has not more memory.
const CALLERS_MAX: u64 = 1_000_000_000;

const ON_FAILURE: &[(&str, OnFailure)] =
    &[("allow", OnFailure::Allow), ("deny", OnFailure::Deny), ("local", OnFailure::Local)];

/// All of it.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) place: Place,
    pub(super) server: ServerSection,
    pub(super) admin: AdminSection,
    pub(super) store: StoreSection,
    pub(super) identity: IdentitySection,
    pub(super) headers: Field<HeaderStyle>,
    pub(super) log: LogSection,
    pub(super) plans: Vec<PlanSection>,
    pub(super) keys: Vec<KeySection>,
    pub(super) accounts: Vec<AccountSection>,
    pub(super) upstreams: Vec<UpstreamSection>,
    pub(super) routes: Vec<RouteSection>,
}

impl Raw {
    pub(super) fn read(mut root: Table<'_>) -> Self {
        let raw = Self {
            place: root.place().clone(),
            server: root.table("server").map(ServerSection::read).unwrap_or_default(),
            admin: root.table("admin").map(AdminSection::read).unwrap_or_default(),
            store: root.table("store").map(StoreSection::read).unwrap_or_default(),
            identity: root.table("identity").map(IdentitySection::read).unwrap_or_default(),
            headers: root.table("answers").and_then(read_answers),
            log: root.table("log").map(LogSection::read).unwrap_or_default(),
            plans: read_named(&mut root, "plans", PlanSection::read),
            keys: read_named(&mut root, "keys", KeySection::read),
            accounts: read_accounts(&mut root),
            upstreams: read_named(&mut root, "upstreams", UpstreamSection::read),
            routes: read_named(&mut root, "routes", RouteSection::read),
        };
        root.finish();
        raw
    }
}

fn read_named<T>(root: &mut Table<'_>, key: &'static str, read: impl Fn(String, Table<'_>) -> T) -> Vec<T> {
    let tables = root.named(key, name).into_iter();
    tables.map(|(name, table)| read(name, table)).collect()
}

fn read_accounts(root: &mut Table<'_>) -> Vec<AccountSection> {
    let tables = root.named("accounts", account).into_iter();
    tables.map(|(name, table)| AccountSection::read(name, table)).collect()
}

/// `[server]`
#[derive(Debug, Default)]
pub(super) struct ServerSection {
    pub(super) listen: Field<SocketAddr>,
    pub(super) workers: Field<u64>,
    pub(super) drain_delay: Field<Duration>,
    pub(super) drain: Field<Duration>,
    pub(super) reuse_port: Field<bool>,
    pub(super) max_body: Field<u64>,
    pub(super) max_connections: Field<u64>,
    pub(super) max_in_flight: Field<u64>,
    pub(super) max_memory: Field<u64>,
    pub(super) encoded_slashes: Field<bool>,
    pub(super) watch: Field<bool>,
}

impl ServerSection {
    fn read(mut table: Table<'_>) -> Self {
        let section = Self {
            listen: table.require("listen", listen),
            workers: table.require("workers", whole_in(0, WORKERS_MAX)),
            drain_delay: table.require("drain_delay", duration_in("0s", DRAIN_MAX)),
            drain: table.require("drain", duration_in("0s", DRAIN_MAX)),
            reuse_port: table.require("reuse_port", flag),
            max_body: table.require("max_body", size),
            max_connections: table.require("max_connections", whole_in(1, CONNECTIONS_MAX)),
            max_in_flight: table.require("max_in_flight", whole_in(0, IN_FLIGHT_MAX)),
            max_memory: table.get("max_memory", size_from(MEMORY_MIN)),
            encoded_slashes: table.require("encoded_slashes", flag),
            watch: table.require("watch", flag),
        };
        table.finish();
        section
    }
}

/// `[admin]`
#[derive(Debug, Default)]
pub(super) struct AdminSection {
    pub(super) listen: Field<SocketAddr>,
    pub(super) token: Field<SecretString>,
    pub(super) token_file: Field<String>,
}

impl AdminSection {
    fn read(mut table: Table<'_>) -> Self {
        let section = Self {
            listen: table.require("listen", listen),
            token: table.get("token", token),
            token_file: table.get("token_file", text),
        };
        table.finish();
        section
    }
}

/// What a gateway counts by itself while the store cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LocalShare {
    /// An equal share for each gateway that lives.
    Equal,
    /// So many hundredths, from 1 to 100.
    Percent(NonZeroU64),
}

/// Which store counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreWord {
    Memory,
    Redis,
}

/// `[store]`
#[derive(Debug, Default)]
pub(super) struct StoreSection {
    pub(super) kind: Field<StoreWord>,
    pub(super) on_failure: Field<OnFailure>,
    pub(super) local_share: Field<LocalShare>,
    pub(super) max_callers: Field<u64>,
    pub(super) redis: RedisSection,
}

impl StoreSection {
    fn read(mut table: Table<'_>) -> Self {
        const KINDS: &[(&str, StoreWord)] = &[("memory", StoreWord::Memory), ("redis", StoreWord::Redis)];
        let section = Self {
            kind: table.require("kind", choice(KINDS, &[])),
            on_failure: table.require("on_failure", choice(ON_FAILURE, &[])),
            local_share: table.require("local_share", local_share),
            max_callers: table.table("memory").and_then(read_memory),
            redis: table.table("redis").map(RedisSection::read).unwrap_or_default(),
        };
        table.finish();
        section
    }
}

fn read_memory(mut table: Table<'_>) -> Field<u64> {
    let max_callers = table.require("max_callers", whole_in(1, CALLERS_MAX));
    table.finish();
    max_callers
}

/// How Redis nodes form one store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModeWord {
    Standalone,
    Cluster,
    Sentinel,
}

/// Who the gateway is to a server of Redis.
#[derive(Debug, Default)]
pub(super) struct LoginKeys {
    pub(super) username: Field<String>,
    pub(super) password: Field<SecretString>,
    pub(super) password_file: Field<String>,
}

/// `[store.redis]`
#[derive(Debug, Default)]
pub(super) struct RedisSection {
    pub(super) url: Field<SecretString>,
    pub(super) url_file: Field<String>,
    pub(super) nodes: List<SecretString>,
    pub(super) mode: Field<ModeWord>,
    pub(super) login: LoginKeys,
    pub(super) tls_ca_file: Field<String>,
    pub(super) tls_cert_file: Field<String>,
    pub(super) tls_key_file: Field<String>,
    pub(super) master_name: Field<String>,
    pub(super) sentinel_login: LoginKeys,
    pub(super) budget: Field<Duration>,
    pub(super) prefix: Field<String>,
}

impl RedisSection {
    fn read(mut table: Table<'_>) -> Self {
        const MODES: &[(&str, ModeWord)] = &[
            ("standalone", ModeWord::Standalone),
            ("cluster", ModeWord::Cluster),
            ("sentinel", ModeWord::Sentinel),
        ];
        let section = Self {
            url: table.get("url", redis_url),
            url_file: table.get("url_file", text),
            nodes: table.list("nodes", redis_url),
            mode: table.require("mode", choice(MODES, &[])),
            login: LoginKeys {
                username: table.get("username", text),
                password: table.get("password", secret),
                password_file: table.get("password_file", text),
            },
            tls_ca_file: table.get("tls_ca_file", text),
            tls_cert_file: table.get("tls_cert_file", text),
            tls_key_file: table.get("tls_key_file", text),
            master_name: table.get("master_name", text),
            sentinel_login: LoginKeys {
                username: table.get("sentinel_username", text),
                password: table.get("sentinel_password", secret),
                password_file: table.get("sentinel_password_file", text),
            },
            budget: table.require("budget", duration_in("1ms", BUDGET_MAX)),
            prefix: table.require("prefix", name),
        };
        table.finish();
        section
    }
}

/// `[identity]`
#[derive(Debug, Default)]
pub(super) struct IdentitySection {
    pub(super) anonymous: Field<String>,
    pub(super) credentials: Option<Written<Vec<CredentialSection>>>,
    pub(super) trusted_proxies: List<IpNet>,
    pub(super) ipv6_prefix: Field<u64>,
}

impl IdentitySection {
    fn read(mut table: Table<'_>) -> Self {
        let mut section = Self {
            anonymous: table.get("anonymous", name),
            credentials: table.tables("credentials").map(|tables| Written {
                value: tables.value.into_iter().map(CredentialSection::read).collect(),
                place: tables.place,
            }),
            ..Self::default()
        };
        if let Some(mut addresses) = table.table("client_address") {
            addresses.require_present("trusted_proxies", "");
            section.trusted_proxies = addresses.list("trusted_proxies", network);
            section.ipv6_prefix = addresses.require("ipv6_prefix", whole_in(1, 128));
            addresses.finish();
        }
        table.finish();
        section
    }
}

/// `[[identity.credentials]]`
#[derive(Debug)]
pub(super) struct CredentialSection {
    pub(super) place: Place,
    pub(super) header: Field<HeaderName>,
    pub(super) bearer: Field<bool>,
    /// Whether one of the keys has a value that is a mistake.
    pub(super) mistaken: bool,
}

impl CredentialSection {
    fn read(mut table: Table<'_>) -> Self {
        const TYPES: &[(&str, ())] = &[("api_key", ())];
        let kind = table.require("type", choice(TYPES, &["jwt", "trusted_header"]));
        let given = (table.has("header"), table.has("bearer"));
        let header = table.get("header", header);
        let bearer = table.get("bearer", flag);
        let section = Self {
            place: table.place().clone(),
            mistaken: kind.is_none() || given != (header.is_some(), bearer.is_some()),
            header,
            bearer,
        };
        // What else a type of a later version may hold is not known here, and its type is a mistake already.
        if kind.is_some() {
            table.finish();
        }
        section
    }
}

fn read_answers(mut table: Table<'_>) -> Field<HeaderStyle> {
    const STYLES: &[(&str, HeaderStyle)] = &[
        ("draft-11", HeaderStyle::Draft11),
        ("x-ratelimit", HeaderStyle::XRateLimit),
        ("both", HeaderStyle::Both),
        ("off", HeaderStyle::Off),
    ];
    let headers = table.require("headers", choice(STYLES, &[]));
    table.finish();
    headers
}

/// `[log]`
#[derive(Debug, Default)]
pub(super) struct LogSection {
    pub(super) access: Field<bool>,
    pub(super) level: Field<String>,
}

impl LogSection {
    fn read(mut table: Table<'_>) -> Self {
        let section =
            Self { access: table.require("access", flag), level: table.require("level", log_filter) };
        table.finish();
        section
    }
}

/// `[plans.NAME]`
#[derive(Debug)]
pub(super) struct PlanSection {
    pub(super) name: String,
    pub(super) on_failure: Field<OnFailure>,
    pub(super) priority: Field<Priority>,
    pub(super) enforce: Field<Enforce>,
    pub(super) limits: Vec<LimitSection>,
    pub(super) per_key: Vec<LimitSection>,
    pub(super) candidate: Vec<LimitSection>,
    pub(super) routes: Vec<PlanRouteSection>,
}

/// `[plans.NAME.routes.NAME]`
#[derive(Debug)]
pub(super) struct PlanRouteSection {
    /// The route, and where the table stands.
    pub(super) route: Written<String>,
    pub(super) limits: Vec<LimitSection>,
    pub(super) candidate: Vec<LimitSection>,
}

impl PlanSection {
    fn read(name: String, mut table: Table<'_>) -> Self {
        const PRIORITIES: &[(&str, Priority)] =
            &[("low", Priority::Low), ("normal", Priority::Normal), ("high", Priority::High)];
        let section = Self {
            name,
            on_failure: table.get("on_failure", choice(ON_FAILURE, &[])),
            priority: table.get("priority", choice(PRIORITIES, &[])),
            enforce: table.get("enforce", enforce),
            limits: read_limits(&mut table),
            per_key: read_further_limits(&mut table, "per_key"),
            candidate: read_further_limits(&mut table, "candidate"),
            routes: read_named(&mut table, "routes", PlanRouteSection::read),
        };
        table.finish();
        section
    }
}

impl PlanRouteSection {
    fn read(name: String, mut table: Table<'_>) -> Self {
        let section = Self {
            route: Written { value: name, place: table.place().clone() },
            limits: read_limits(&mut table),
            candidate: read_further_limits(&mut table, "candidate"),
        };
        table.finish();
        section
    }
}

/// `limits = [..]`. Required: what has no limits must say so.
fn read_limits(table: &mut Table<'_>) -> Vec<LimitSection> {
    table.require_present("limits", "write limits = [] for none");
    read_further_limits(table, "limits")
}

/// A list of limits that need not be there.
fn read_further_limits(table: &mut Table<'_>, key: &'static str) -> Vec<LimitSection> {
    let tables = table.tables(key).map(|tables| tables.value);
    tables.unwrap_or_default().into_iter().map(LimitSection::read).collect()
}

/// Whether a limit refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Enforce {
    On,
    /// It does for so many callers in a hundred, from 1 to 99.
    Percent(u8),
    /// It counts what it would refuse.
    Shadow,
    /// It is not there.
    Off,
}

/// How a limit counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AlgorithmWord {
    SlidingWindow,
    TokenBucket,
    Quota,
    Concurrency,
}

/// One element of `limits`
#[derive(Debug)]
pub(super) struct LimitSection {
    pub(super) place: Place,
    pub(super) name: Field<String>,
    pub(super) algorithm: Field<AlgorithmWord>,
    pub(super) limit: Field<NonZeroU64>,
    pub(super) per: Field<Duration>,
    /// The `per` of a quota.
    pub(super) unit: Field<Unit>,
    pub(super) zone: Field<String>,
    pub(super) burst: Field<NonZeroU64>,
    pub(super) enforce: Field<Enforce>,
}

impl LimitSection {
    fn read(mut table: Table<'_>) -> Self {
        const WORDS: &[(&str, AlgorithmWord)] = &[
            ("sliding_window", AlgorithmWord::SlidingWindow),
            ("token_bucket", AlgorithmWord::TokenBucket),
            ("quota", AlgorithmWord::Quota),
            ("concurrency", AlgorithmWord::Concurrency),
        ];
        const UNITS: &[(&str, Unit)] = &[("day", Unit::Day), ("week", Unit::Week), ("month", Unit::Month)];
        let words = choice(WORDS, &[]);
        let algorithm = table.get_or("algorithm", words, AlgorithmWord::SlidingWindow);
        let mut section = Self {
            place: table.place().clone(),
            name: table.require("name", name),
            algorithm,
            limit: table.require("limit", limit),
            enforce: table.get("enforce", enforce),
            per: None,
            unit: None,
            zone: None,
            burst: None,
        };
        // Which other keys a limit has is up to its algorithm; without one, they are neither read nor refused.
        if let Some(algorithm) = &section.algorithm {
            match algorithm.value {
                AlgorithmWord::Quota => {
                    section.unit = table.require("per", choice(UNITS, &[]));
                    section.zone = table.get("zone", text);
                }
                AlgorithmWord::SlidingWindow | AlgorithmWord::TokenBucket => {
                    section.per = table.require("per", span);
                }
                AlgorithmWord::Concurrency => {}
            }
            section.burst = table.get("burst", at_least_one);
            table.finish();
        }
        section
    }
}

/// The `per` of a limit that is no quota.
fn span(value: Scalar<'_>) -> Result<Duration, Fault> {
    if matches!(value, Scalar::Text("day" | "week" | "month")) {
        return Err(Fault::new("is a period of the calendar").hint("add algorithm = \"quota\""));
    }
    duration(value)
}

/// `[keys.NAME]`
#[derive(Debug)]
pub(super) struct KeySection {
    pub(super) name: String,
    pub(super) hash: Field<[u8; 32]>,
    pub(super) account: Field<String>,
    pub(super) plan: Field<String>,
}

impl KeySection {
    fn read(id: String, mut table: Table<'_>) -> Self {
        let section = Self {
            name: id,
            hash: table.require("hash", hash),
            account: table.require("account", account),
            plan: table.require("plan", name),
        };
        table.finish();
        section
    }
}

/// `[accounts.NAME]`
#[derive(Debug)]
pub(super) struct AccountSection {
    /// The account, and where the table stands.
    pub(super) account: Written<String>,
    pub(super) anchor_day: Field<u64>,
}

impl AccountSection {
    fn read(name: String, mut table: Table<'_>) -> Self {
        let section = Self {
            account: Written { value: name, place: table.place().clone() },
            anchor_day: table.require("anchor_day", whole_in(1, 31)),
        };
        table.finish();
        section
    }
}

/// `[upstreams.NAME]`
#[derive(Debug)]
pub(super) struct UpstreamSection {
    pub(super) name: String,
    pub(super) targets: List<Url>,
    pub(super) preserve_host: Field<bool>,
    pub(super) connect_timeout: Field<Duration>,
    pub(super) head_timeout: Field<Duration>,
    pub(super) idle_timeout: Field<Duration>,
    pub(super) pool_idle_timeout: Field<Duration>,
    pub(super) resolve_every: Field<Duration>,
}

impl UpstreamSection {
    fn read(name: String, mut table: Table<'_>) -> Self {
        let timeout = duration_in("1ms", TIMEOUT_MAX);
        let resolve_every = duration_in(RESOLVE_EVERY_MIN, TIMEOUT_MAX);
        table.require_present("targets", "for example targets = [\"http://127.0.0.1:9000\"]");
        let section = Self {
            name,
            targets: table.list("targets", target),
            preserve_host: table.get_or("preserve_host", flag, false),
            connect_timeout: table.get_or("connect_timeout", &timeout, Duration::from_secs(1)),
            head_timeout: table.get_or("head_timeout", &timeout, Duration::from_secs(15)),
            idle_timeout: table.get_or("idle_timeout", &timeout, Duration::from_secs(30)),
            pool_idle_timeout: table.get_or("pool_idle_timeout", &timeout, Duration::from_secs(4)),
            resolve_every: table.get_or("resolve_every", &resolve_every, Duration::from_secs(30)),
        };
        table.finish();
        section
    }
}

/// `[routes.NAME]`
#[derive(Debug)]
pub(super) struct RouteSection {
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) path: Field<String>,
    pub(super) methods: List<String>,
    pub(super) cost: Field<NonZeroU64>,
    pub(super) method_costs: Vec<(&'static Method, Field<NonZeroU64>)>,
    pub(super) cost_from: Field<HeaderName>,
    pub(super) charge_when: Field<ChargeWhen>,
    pub(super) refund_on: List<u64>,
    pub(super) limits: Vec<LimitSection>,
    pub(super) upstream: Field<String>,
    /// Whether `upstream` is written at all.
    pub(super) has_upstream: bool,
    pub(super) plans: List<String>,
    pub(super) on_failure: Field<OnFailure>,
}

/// Which requests are charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChargeWhen {
    /// All that were admitted.
    Always,
    /// All but those that a server error answers.
    Not5xx,
}

impl RouteSection {
    fn read(route: String, mut table: Table<'_>) -> Self {
        const CHARGE_WHEN: &[(&str, ChargeWhen)] =
            &[("always", ChargeWhen::Always), ("not_5xx", ChargeWhen::Not5xx)];
        let section = Self {
            name: route,
            place: table.place().clone(),
            path: table.require("path", text),
            methods: table.list("methods", text),
            cost: table.get_or("cost", at_least_one, NonZeroU64::MIN),
            method_costs: read_method_costs(&mut table),
            cost_from: table.get("cost_from", answer_header),
            charge_when: table.get("charge_when", choice(CHARGE_WHEN, &[])),
            refund_on: table.list("refund_on", whole_in(200, 599)),
            limits: read_further_limits(&mut table, "limits"),
            has_upstream: table.has("upstream"),
            upstream: table.get("upstream", name),
            plans: table.list("plans", name),
            on_failure: table.get("on_failure", choice(ON_FAILURE, &[])),
        };
        table.finish();
        section
    }
}

/// `method_costs = { POST = 10 }`
fn read_method_costs(table: &mut Table<'_>) -> Vec<(&'static Method, Field<NonZeroU64>)> {
    let Some(mut costs) = table.table("method_costs") else { return Vec::new() };
    let named: Vec<_> = METHODS.iter().filter(|method| costs.has(method.as_str())).collect();
    let read = named.into_iter().map(|method| (method, costs.get(method.as_str(), at_least_one))).collect();
    costs.finish();
    read
}
