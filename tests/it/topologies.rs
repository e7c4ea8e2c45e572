//! How Redis is reached: TLS, certificates, logins, sockets, Sentinel. And every error that it may answer: the request goes
//! on by `on_failure`, and a metric and the log say what it was.

use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{Backend, Certificates, Cluster, Config, Gateway, Redis, Watched, eventually};

/// How long anything may take that is not measured.
const LIMIT: Duration = Duration::from_secs(20);

/// A gateway with one worker that refuses what it cannot count, with these lines in `[store.redis]`.
fn gateway(backend: &Backend, lines: &str) -> Gateway {
    start(backend, &format!("[store]\nkind = \"redis\"\non_failure = \"deny\"\n\n[store.redis]\n{lines}"))
}

fn start(backend: &Backend, tables: &str) -> Gateway {
    let config = Config::open(backend)
        .plan("wide", r#"{ name = "window", limit = 10000, per = "10m" }"#)
        .plan("free", r#"{ name = "window", limit = 5, per = "10m" }"#)
        .key("k", "one", "wide")
        .key("k-free", "two", "free")
        .server("workers = 1")
        .table(tables);
    Gateway::start(&config)
}

fn status(gateway: &Gateway) -> u16 {
    gateway.get("/x").key("k").send().status
}

/// Waits until the store decides.
#[track_caller]
fn decides(gateway: &Gateway) {
    eventually("the store to decide", LIMIT, || (status(gateway) == 200).then_some(()));
}

/// How often the store failed in this way.
#[track_caller]
fn failures(gateway: &Gateway, kind: &str) -> f64 {
    gateway.metric("tollgate_store_errors_total", &[("kind", kind)])
}

/// Waits until the store has failed in this way. All the while the gateway answers, and with nothing but 200 and 503.
#[track_caller]
fn fails_with(gateway: &Gateway, kind: &str) {
    eventually(&format!("a failure of the kind {kind}"), LIMIT, || {
        let status = status(gateway);
        assert!([200, 503].contains(&status), "{kind}: {status}");
        (failures(gateway, kind) >= 1.0).then_some(())
    });
    eventually(&format!("a line of the log about {kind}"), LIMIT, || {
        let field = format!("\"kind\":\"{kind}\"");
        gateway.log_lines().iter().any(|line| line.contains(&field)).then_some(())
    });
}

/// A server with a port for TLS, too; and that port.
fn with_tls(certificates: &Certificates, of_clients: &str) -> (Redis, u16) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (cert, key, ca) =
        (certificates.file("server.pem"), certificates.file("server.key"), certificates.file("ca.pem"));
    let words = ["--tls-port", &port.to_string(), "--tls-auth-clients", of_clients];
    let files = ["--tls-cert-file", &cert, "--tls-key-file", &key, "--tls-ca-cert-file", &ca];
    (Redis::start_saying(&[&words[..], &files].concat()), port)
}

#[test]
fn tls_trusts_the_authority_that_is_named_and_no_other() {
    // One switch turned off every check of certificates; another client trusted any authority beside the one it was given.
    let (backend, certificates) = (Backend::ok(), Certificates::new());
    let (redis, port) = with_tls(&certificates, "no");
    let url = format!("url = \"rediss://127.0.0.1:{port}\"\nbudget = \"100ms\"\n");
    let trusting = gateway(&backend, &format!("{url}tls_ca_file = {:?}", certificates.file("ca.pem")));
    decides(&trusting);
    assert_eq!(trusting.exhaust("/x", "k-free").0, 5);
    assert!(!redis.keys().is_empty());

    // The public authorities have not signed it, and neither has a stranger.
    let stranger = Certificates::new();
    let others = [url.clone(), format!("{url}tls_ca_file = {:?}", stranger.file("ca.pem"))];
    for lines in &others {
        let gateway = gateway(&backend, lines);
        fails_with(&gateway, "tls");
        assert_eq!(status(&gateway), 503);
    }
}

#[test]
fn mutual_tls_shows_a_certificate_and_is_refused_without() {
    // A server that asks for certificates is not met by a client that has none: the calls must not hang, nor be errors.
    let (backend, certificates) = (Backend::ok(), Certificates::new());
    let (_redis, port) = with_tls(&certificates, "yes");
    let ca = certificates.file("ca.pem");
    let lines = format!("url = \"rediss://127.0.0.1:{port}\"\nbudget = \"100ms\"\ntls_ca_file = {ca:?}\n");
    let (cert, key) = (certificates.file("client.pem"), certificates.file("client.key"));
    let known = gateway(&backend, &format!("{lines}tls_cert_file = {cert:?}\ntls_key_file = {key:?}"));
    decides(&known);
    assert_eq!(known.exhaust("/x", "k-free").0, 5);

    let unknown = gateway(&backend, &lines);
    eventually("a failure", LIMIT, || {
        assert_eq!(status(&unknown), 503);
        // Where the server says why, it says it after its side of the handshake.
        (failures(&unknown, "tls") + failures(&unknown, "disconnected") >= 1.0).then_some(())
    });
}

/// Puts another file in its place, as a secret store does.
fn replace(file: &Path, text: &str) {
    let fresh = file.with_extension("fresh");
    std::fs::write(&fresh, text).unwrap();
    std::fs::rename(fresh, file).unwrap();
}

#[test]
fn a_rotated_password_needs_no_restart() {
    // A password was read once, at the start: after a rotation every lost connection stayed lost.
    let backend = Backend::ok();
    let redis = Redis::start();
    let secrets = tempfile::tempdir().unwrap();
    let file = secrets.path().join("password");
    std::fs::write(&file, "canary-one\n").unwrap();
    redis.cmd(&["ACL", "SETUSER", "gateway", "on", ">canary-one", "~*", "+@all"]);
    let gateway = gateway(
        &backend,
        &format!(
            "url = {:?}\nbudget = \"100ms\"\nusername = \"gateway\"\npassword_file = {file:?}",
            redis.url()
        ),
    );
    decides(&gateway);

    // The old connection stays; a new one would not be let in, until the file is replaced.
    redis.cmd(&["ACL", "SETUSER", "gateway", "resetpass", ">canary-two"]);
    assert_eq!(status(&gateway), 200);
    redis.cut();
    fails_with(&gateway, "wrongpass");
    replace(&file, "canary-two\n");
    decides(&gateway);

    // Gone is gone: a failure to connect, and no more than that.
    std::fs::remove_file(&file).unwrap();
    redis.cut();
    fails_with(&gateway, "file");
    gateway.admin("/livez").expect(200);
    replace(&file, "canary-two");
    decides(&gateway);
    let told = gateway.log_lines();
    assert!(!told.iter().any(|line| line.contains("canary")), "{told:#?}");
    let reason = |words: &str| told.iter().any(|line| line.contains(words));
    assert!(reason("it answered WRONGPASS") && reason("password_file cannot be read"), "{told:#?}");
}

#[test]
fn a_url_in_a_file_is_read_anew_too() {
    // The same for those who keep the whole URL a secret.
    let backend = Backend::ok();
    let redis = Redis::start();
    let secrets = tempfile::tempdir().unwrap();
    let file = secrets.path().join("url");
    let url = |password: &str| redis.url().replace("redis://", &format!("redis://gateway:{password}@"));
    std::fs::write(&file, url("canary-one")).unwrap();
    redis.cmd(&["ACL", "SETUSER", "gateway", "on", ">canary-one", "~*", "+@all"]);
    let gateway = gateway(&backend, &format!("url_file = {file:?}\nbudget = \"100ms\""));
    decides(&gateway);
    redis.cmd(&["ACL", "SETUSER", "gateway", "resetpass", ">canary-two"]);
    replace(&file, &url("canary-two"));
    redis.cut();
    decides(&gateway);
}

#[test]
fn a_socket_in_the_file_system_is_an_address() {
    // A URL with an empty host was taken for localhost.
    let backend = Backend::ok();
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("redis.sock");
    let redis = Redis::start_saying(&["--unixsocket", &socket.display().to_string()]);
    let gateway =
        gateway(&backend, &format!("url = \"unix://{}?db=2\"\nbudget = \"100ms\"", socket.display()));
    decides(&gateway);
    assert_eq!(gateway.exhaust("/x", "k-free").0, 5);
    assert!(redis.keys().is_empty(), "the counters are in another database");
    assert!(redis.info("keyspace", "db2").is_some());
}

#[test]
fn an_idle_worker_learns_by_itself_that_its_connection_is_lost() {
    // The first request after a restart of Redis paid for it: with "deny" a 503, although Redis had been back for long.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    decides(&gateway);
    for _ in 0..2 {
        let connections = |gateway: &Gateway| {
            gateway.log_lines().iter().filter(|line| line.contains("connected to Redis")).count()
        };
        let before = connections(&gateway);
        redis.restart();
        eventually("another connection", LIMIT, || (connections(&gateway) > before).then_some(()));
        gateway.get("/x").key("k").send().expect(200);
    }
    assert!(gateway.decided_without_store() < 1.0);
}

#[test]
fn an_idle_worker_notices_a_frozen_server() {
    // The same where nobody closes the connection: a machine that is gone says nothing.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    decides(&gateway);
    redis.stop();
    eventually("the look to fail", LIMIT, || {
        gateway.log_lines().iter().any(|line| line.contains("is of no more use")).then_some(())
    });
    redis.cont();
    decides(&gateway);
}

#[test]
fn a_killed_primary_is_replaced_as_the_sentinels_say() {
    // F13: the client kept to the address it had, and asked the dead server until it was restarted by hand.
    let backend = Backend::ok();
    let mut watched = Watched::start();
    let gateway = start(&backend, &watched.tables("deny", "100ms"));
    decides(&gateway);
    let old = watched.primary().unwrap();
    watched.server(old).kill();
    let new = 1 - old;
    eventually("the replica to be promoted", LIMIT, || (watched.primary() == Some(new)).then_some(()));
    let promoted = Instant::now();
    decides(&gateway);
    let took = promoted.elapsed();
    assert!(took <= Duration::from_secs(2), "back {took:?} after the promotion");
    assert!(!watched.server(new).keys().is_empty());
}

#[test]
fn a_demoted_primary_is_left_as_the_sentinels_say() {
    // F13: after a planned failover the old primary still runs: calls went on to it, and were refused or lost.
    let backend = Backend::ok();
    let mut watched = Watched::start();
    // One Sentinel that hangs must not keep the gateway from the others.
    watched.stop_sentinel(1);
    let gateway = start(&backend, &watched.tables("deny", "100ms"));
    decides(&gateway);
    let old = watched.primary().unwrap();
    watched.fail_over();
    let new = 1 - old;
    eventually("the replica to be promoted", LIMIT, || {
        // Both say that they are, for a while.
        let is_replica = watched.server(new).info("replication", "role").as_deref() == Some("slave");
        (!is_replica).then_some(())
    });
    let promoted = Instant::now();
    watched.server(new).cmd(&["CONFIG", "RESETSTAT"]);
    eventually("the new primary to decide", LIMIT, || {
        let status = status(&gateway);
        assert!([200, 503].contains(&status), "{status}");
        (watched.server(new).spent_on("evalsha").0 >= 1.0).then_some(())
    });
    let took = promoted.elapsed();
    assert!(took <= Duration::from_secs(2), "there {took:?} after the promotion");
    decides(&gateway);
}

#[test]
fn sentinels_get_their_own_password_and_never_that_of_redis() {
    // One password for everything: Sentinels without one refused the login, and those of another team were shown it.
    let backend = Backend::ok();
    let mut watched = Watched::start();
    let primary = watched.primary().unwrap();
    let redis = watched.server(primary);
    redis.cmd(&["ACL", "SETUSER", "gateway", "on", ">of-redis", "~*", "+@all"]);
    let of_redis = "username = \"gateway\"\npassword = \"of-redis\"";
    let tables = format!("{}\n{of_redis}", watched.tables("deny", "100ms"));
    let first = start(&backend, &tables);
    decides(&first);

    watched.lock_sentinels("of-sentinels");
    fails_with(&start(&backend, &tables), "noauth");
    let second = start(&backend, &format!("{tables}\nsentinel_password = \"of-sentinels\""));
    decides(&second);
}

#[test]
fn every_node_of_a_cluster_gets_the_login() {
    // The nodes that others name were asked without the user that the first one was asked with.
    let backend = Backend::ok();
    let cluster = Cluster::start();
    let secrets = tempfile::tempdir().unwrap();
    let file = secrets.path().join("password");
    std::fs::write(&file, "canary").unwrap();
    for node in cluster.primaries() {
        node.cmd(&["ACL", "SETUSER", "gateway", "on", ">canary", "~*", "+@all"]);
        node.lock();
    }
    let login = format!("username = \"gateway\"\npassword_file = {file:?}");
    let config = Config::open(&backend)
        .plan("p", r#"{ name = "window", limit = 5, per = "10m" }"#)
        .key_series("k", 30, "p")
        .table(&format!("{}\n{login}", cluster.tables("deny", "200ms")));
    let gateway = Gateway::start(&config);
    for number in 0..30 {
        eventually("the store to decide", LIMIT, || {
            let answer = gateway.get("/x").key(&format!("k-{number}")).send();
            (answer.status == 200).then_some(())
        });
    }
    for node in cluster.primaries() {
        assert!(!node.keys().is_empty());
    }
}

#[test]
fn a_gateway_stays_ready_while_a_node_of_a_cluster_is_lost() {
    // With `deny`, one lost shard took every gateway out of service at once, and so the other shards' callers, too.
    let backend = Backend::ok();
    let mut cluster = Cluster::start();
    let config = Config::shared(&backend).table(&cluster.tables("deny", "100ms"));
    let gateway = Gateway::start(&config);
    let ready = || (gateway.admin("/readyz").status == 200).then_some(());
    eventually("the gateway to be ready", LIMIT, ready);
    for node in 0..2 {
        cluster.node(node).kill();
        for _ in 0..10 {
            gateway.admin("/readyz").expect(200);
        }
    }
    cluster.node(2).kill();
    eventually("the gateway to be no more ready", LIMIT, || {
        (gateway.admin("/readyz").status == 503).then_some(())
    });
}

/// Whether it is Redis 6.
fn is_6(redis: &Redis) -> bool {
    redis.info("server", "redis_version").expect("every server has one").starts_with("6.")
}

/// One thing that may be wrong with a server: its kind, how it comes and how it goes.
struct Trouble {
    kind: &'static str,
    begin: fn(&Redis),
    end: fn(&Redis),
}

#[test]
fn every_error_of_redis_goes_on_by_policy_and_is_told() {
    // F17: an error that nobody had thought of was a 500, or looked like every other one on the dashboard.
    let troubles = [
        Trouble {
            kind: "readonly",
            begin: |redis| drop(redis.cmd(&["REPLICAOF", "127.0.0.1", "1"])),
            end: |redis| drop(redis.cmd(&["REPLICAOF", "NO", "ONE"])),
        },
        Trouble {
            kind: "masterdown",
            begin: |redis| {
                redis.cmd(&["CONFIG", "SET", "replica-serve-stale-data", "no"]);
                redis.cmd(&["REPLICAOF", "127.0.0.1", "1"]);
            },
            end: |redis| drop(redis.cmd(&["REPLICAOF", "NO", "ONE"])),
        },
        Trouble {
            kind: "oom",
            begin: |redis| drop(redis.cmd(&["CONFIG", "SET", "maxmemory", "1"])),
            end: |redis| drop(redis.cmd(&["CONFIG", "SET", "maxmemory", "0"])),
        },
        Trouble {
            kind: "noreplicas",
            begin: |redis| drop(redis.cmd(&["CONFIG", "SET", "min-replicas-to-write", "1"])),
            end: |redis| drop(redis.cmd(&["CONFIG", "SET", "min-replicas-to-write", "0"])),
        },
        Trouble {
            kind: "noperm",
            begin: |redis| drop(redis.cmd(&["ACL", "SETUSER", "default", "-eval", "-evalsha"])),
            end: |redis| drop(redis.cmd(&["ACL", "SETUSER", "default", "+@all"])),
        },
        Trouble {
            kind: "noauth",
            begin: |redis| {
                redis.lock();
                redis.cut();
            },
            end: Redis::unlock,
        },
        Trouble {
            kind: "misconf",
            begin: |redis| {
                redis.cmd(&["CONFIG", "SET", "save", "3600 1"]);
                // A directory in the place of the file that is to be written.
                std::fs::create_dir_all(redis.directory().join("dump.rdb/full")).unwrap();
                redis.cmd(&["BGSAVE"]);
                eventually("the disk to fail", LIMIT, || {
                    let status = redis.info("persistence", "rdb_last_bgsave_status");
                    (status.as_deref() == Some("err")).then_some(())
                });
            },
            end: |redis| {
                std::fs::remove_dir_all(redis.directory().join("dump.rdb")).unwrap();
                redis.cmd(&["CONFIG", "SET", "save", ""]);
            },
        },
    ];
    let backend = Backend::ok();
    for Trouble { kind, begin, end } in troubles {
        let redis = Redis::start();
        if kind == "noreplicas" && is_6(&redis) {
            // It does not count its replicas for a script.
            continue;
        }
        let gateway = start(&backend, &redis.tables("deny", "100ms"));
        decides(&gateway);
        assert!(failures(&gateway, kind) < 1.0, "{kind}");
        begin(&redis);
        fails_with(&gateway, kind);
        end(&redis);
        decides(&gateway);
    }
}

#[test]
fn a_redis_that_answers_and_does_not_decide_is_away() {
    // It was pinged, and well: with `deny`, every call to a gateway that said it was ready was refused.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    decides(&gateway);
    gateway.admin("/readyz").expect(200);
    redis.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    fails_with(&gateway, "oom");
    eventually("the gateway to be no more ready", LIMIT, || {
        gateway.get("/x").key("k").send();
        (gateway.admin("/readyz").status == 503).then_some(())
    });
    redis.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    eventually("the gateway to be ready, without a call", LIMIT, || {
        (gateway.admin("/readyz").status == 200).then_some(())
    });
}

#[test]
fn a_script_that_does_not_end_is_waited_for_by_nobody() {
    // F12: while another client's script runs, Redis answers BUSY to everything; killing it is not ours to do.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    decides(&gateway);
    redis.cmd(&["CONFIG", "SET", "lua-time-limit", "20"]);
    let mut other = redis.client();
    other.send(&["EVAL", "while true do end", "0"]).unwrap();
    fails_with(&gateway, "busy");
    redis.cmd(&["SCRIPT", "KILL"]);
    decides(&gateway);
}

#[test]
fn a_server_that_is_not_there_is_told_by_its_reason_and_address() {
    // "I/O error": the one line of the log that an operator had left out where, and why.
    let backend = Backend::ok();
    let redis = Redis::absent();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    fails_with(&gateway, "refused");
    let address = format!("\"server\":\"127.0.0.1:{}\"", redis.port());
    let told = gateway.log_lines();
    let line = told.iter().find(|line| line.contains("cannot connect to Redis")).unwrap();
    assert!(line.contains(&address) && line.contains("connection refused"), "{line}");
}

#[test]
fn a_probe_of_the_store_adds_nothing_to_the_log() {
    // /readyz has a connection of its own, and whatever happened to Redis stood in the log twice.
    let backend = Backend::ok();
    let redis = Redis::absent();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    fails_with(&gateway, "refused");
    for _ in 0..5 {
        gateway.admin("/readyz").expect(503);
    }
    let told = gateway.log_lines();
    let lines = told.iter().filter(|line| line.contains("cannot connect to Redis")).count();
    assert_eq!(lines, 1, "{told:?}");
}

#[test]
fn a_cluster_that_nobody_tells_about_is_told_by_its_reasons() {
    // The log was silent, and the metric said "disconnected": for a wrong address, a wrong password, and for a single server.
    let backend = Backend::ok();
    let (absent, locked, single) = (Redis::absent(), Redis::start(), Redis::start());
    locked.lock();
    let lonely = Redis::start_lonely_node();
    let cases = [
        (&absent, "refused", "connection refused"),
        (&locked, "noauth", "it answered NOAUTH"),
        (&single, "other", "it is a single server and no node of a cluster"),
        (&lonely, "clusterdown", "it knows of no slots"),
    ];
    for (redis, kind, reason) in cases {
        let address = format!("127.0.0.1:{}", redis.port());
        let gateway = gateway(&backend, &format!("mode = \"cluster\"\nnodes = [\"redis://{address}\"]"));
        fails_with(&gateway, kind);
        let told = gateway.log_lines();
        let of_cluster = |line: &&String| line.contains("no node tells who keeps which slots");
        let lines: Vec<_> = told.iter().filter(of_cluster).collect();
        assert_eq!(lines.len(), 1, "{told:?}");
        assert!(lines[0].contains(&format!("{address}: {reason}")), "{}", lines[0]);
    }
}

#[test]
fn a_redis_in_the_place_of_a_sentinel_is_told_as_such() {
    // "It answered ERR": the port of Redis among the nodes, and an operator who looked for the mistake in Redis.
    let (backend, redis) = (Backend::ok(), Redis::start());
    let url = format!("redis://127.0.0.1:{}", redis.port());
    let gateway = gateway(&backend, &format!("mode = \"sentinel\"\nmaster_name = \"m\"\nnodes = [{url:?}]"));
    fails_with(&gateway, "no_primary");
    assert!(gateway.log_lines().iter().any(|line| line.contains("it is no Sentinel")));
}

#[test]
fn a_server_that_takes_no_more_connections_is_told_by_its_reason() {
    // F17: "connection reset" sent everybody to look at the network.
    let backend = Backend::ok();
    let redis = Redis::start();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    decides(&gateway);
    let mut other = redis.client();
    other.cmd(&["CONFIG", "SET", "maxclients", "1"]);
    other.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    fails_with(&gateway, "maxclients");
    other.cmd(&["CONFIG", "SET", "maxclients", "1000"]);
    decides(&gateway);
}

#[test]
fn a_server_that_reads_its_data_is_not_asked_to_decide() {
    // F17: a Redis that has just restarted accepts connections, and answers LOADING.
    let backend = Backend::ok();
    let mut redis = Redis::start();
    if is_6(&redis) {
        // It answers nobody in between when its data are so few, and has no setting for that.
        return;
    }
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    decides(&gateway);
    for key in 0..300 {
        redis.cmd(&["SET", &format!("filler:{key}"), &"x".repeat(100)]);
    }
    redis.cmd(&["SAVE"]);
    redis.restart_with(&["--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024"]);
    fails_with(&gateway, "loading");
    decides(&gateway);
}

#[test]
fn a_node_without_slots_is_a_failure_of_the_store() {
    // F14, F17: CLUSTERDOWN is the answer while nobody keeps a caller's slot.
    let backend = Backend::ok();
    let redis = Redis::start_lonely_node();
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    fails_with(&gateway, "clusterdown");
    assert_eq!(status(&gateway), 503);
}

#[test]
fn a_server_that_is_no_redis_is_a_failure_of_the_store() {
    // F8: a port that was given to another program. Its bytes must not be read as a decision.
    let backend = Backend::ok();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").ok();
        }
    });
    let gateway = gateway(&backend, &format!("url = \"redis://127.0.0.1:{port}\"\nbudget = \"100ms\""));
    eventually("a failure", LIMIT, || {
        assert_eq!(status(&gateway), 503);
        (failures(&gateway, "nonsense") + failures(&gateway, "disconnected") >= 1.0).then_some(())
    });
}

#[test]
fn a_metric_says_whether_redis_may_evict_counters() {
    // RSC-9: the warning was a line of the log, at the start, that nobody read.
    let backend = Backend::ok();
    let redis = Redis::start();
    redis.cmd(&["CONFIG", "SET", "maxmemory", "100mb"]);
    redis.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let gateway = start(&backend, &redis.tables("deny", "100ms"));
    let may_evict = |wanted: f64| {
        eventually("the metric to say so", LIMIT, || {
            let said = gateway.metric("tollgate_store_may_evict", &[]);
            ((said - wanted).abs() < 0.5).then_some(())
        });
    };
    may_evict(1.0);
    redis.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    // Every new connection looks; an old one within a minute.
    redis.cut();
    may_evict(0.0);
}
