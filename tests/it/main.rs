//! The black-box tests: one binary, the real `tollgate`, real sockets, real Redis.
//!
//! | module | what it shows |
//! |---|---|
//! | `limits` | exact counts, windows, several limits at once, amounts at the edge |
//! | `identity` | keys, blank and hostile credentials, accounts that must not mix |
//! | `addresses` | the client address behind trusted proxies, IPv6 prefixes |
//! | `paths` | one canonical path for route, counter and upstream |
//! | `proxying` | what goes on to the upstream and comes back, byte for byte |
//! | `framing` | message boundaries, hop-by-hop fields, `Host`, methods that are not served |
//! | `answers` | rate-limit fields, `Retry-After`, problem documents, request ids |
//! | `mistakes` | configurations that must be refused |
//! | `changes` | what a changed plan keeps of what was used; one test for each row of docs/concepts/plan-changes.md |
//! | `clocks` | the wall clock of the machine: set back, near the end of a month |
//! | `scopes` | pools, single keys of an account, percentages, candidates |
//! | `settling` | costs that are known behind the answer, answers that cost nothing, costs of methods |
//! | `slots` | requests in flight, calendar quotas |
//! | `redis` | keys, expiry, scripts, restart, memory that is full |
//! | `cluster` | Redis Cluster: exact counts, slots that move, a failover, nodes that are lost |
//! | `alone` | Redis away: shares of limits, what is gone on from, what is written back |
//! | `stopping` | the end of a gateway: what is in flight, what clients are told, signals and exit codes |
//! | `restarting` | sockets that are handed over or shared: nobody is refused or reset |
//! | `overload` | more requests, bodies or connections than there is room for |
//! | `outage` | Redis absent, refusing, frozen |
//! | `reload` | a configuration that changes while the gateway runs |
//! | `faults` | each fault of Redis and of the way to it, with the figure that is promised under it |
//! | `topologies` | how Redis is reached: TLS, logins, sockets, Sentinel; and each error that it may answer |
//! | `replay` | every decision under faults, held against a brute-force oracle |
//! | `observing` | metrics, access log, no credential anywhere |
//! | `dashboards` | every panel and alert has data, in a real Prometheus |
//! | `memory` | bounded memory under big bodies and many callers |
//! | `soak` | mixed traffic and faults for 20 minutes, and nothing that grows |
//! | `demo` | the first command a newcomer runs |
//! | `tidy` | the house rules: which room may name what, over the source text |
//! | `docs` | the manual says what the program does: settings, examples, links, commands, the first curl |
//! | `harness` | that the harness itself sees what it is meant to see |
//!
//! A test begins with the id of its case and the bug it guards against, in a sentence. Longer runs are `#[ignore]`d
//! and belong to `./test long`.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers fail a test by panicking, as its assertions do"
)]
#![expect(clippy::disallowed_methods, reason = "these tests measure the real time of a real process")]

mod addresses;
mod alone;
mod answers;
mod changes;
mod clocks;
mod cluster;
mod dashboards;
mod demo;
mod docs;
mod faults;
mod framing;
mod harness;
mod identity;
mod limits;
mod memory;
mod mistakes;
mod observing;
mod outage;
mod overload;
mod paths;
mod proxying;
mod redis;
mod reload;
mod replay;
mod restarting;
mod scopes;
mod settling;
mod slots;
mod soak;
mod stopping;
mod support;
mod tidy;
mod topologies;
