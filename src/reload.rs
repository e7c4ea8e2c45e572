//! Changes of the configuration while the gateway runs: read all of it again, check all of it, and put it in force at once, or
//! leave everything as it is.
//!
//! A reload is asked for by a changed file, by a signal, or by the operator through the admin listener. One runs at a time, and
//! reading happens on a thread that serves nobody. Counters are not touched: what was used is used.
//!
//! Host names of backends are looked up here, too: one that has moved is a change that nobody has written down.
//!
//! Deliberately not here: what a file says (`config`), and who may ask for a reload (`admin`).

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use secrecy::SecretString;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

use crate::clock;
use crate::config::{self, Fingerprint, Loaded, Mistake, Provenance, Settings, Sources, Version};
use crate::limit::OnFailure;
use crate::limit::store::MemoryStore;
use crate::observe::Metrics;
use crate::plan::{Policy, PolicyParts, Unbuildable};
use crate::proxy::{Backends, BuildError, Moves, Names, UpstreamSettings};
use crate::snapshot::{InForce, Snapshot};

/// How often files are looked at. A change is read when two looks in a row have seen the same, so that no file is read in the
/// middle of being written.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Requests for a reload that may wait for the one that is running. Whoever comes later waits to be heard.
const WAITING_MAX: usize = 16;

/// Mistakes that are logged. All of them are in the answer of the admin listener, and in what `tollgate check` prints.
const LOGGED_MAX: usize = 5;

/// The labels of how a reload ended.
const RESULTS: [&str; 3] = ["applied", "unchanged", "refused"];

/// Who asked for a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// A file has changed.
    File,
    /// SIGHUP.
    Signal,
    /// The admin listener.
    Admin,
}

impl Trigger {
    fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Signal => "signal",
            Self::Admin => "admin",
        }
    }
}

/// How a reload ended.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// `applied`, `unchanged` or `refused`.
    pub result: &'static str,
    /// The version of the configuration that is in force now.
    pub version: String,
    /// The keys whose values in the files wait for a restart.
    pub needs_restart: Vec<&'static str>,
    /// Why nothing was applied; all that is wrong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mistakes: Vec<Complaint>,
}

impl Report {
    /// Whether the files hold mistakes, and what was in force before still is.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !self.mistakes.is_empty()
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, Serialize)]
pub struct Complaint {
    /// The file or variable; empty where it is none of one file.
    pub file: String,
    /// The line, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The key; empty for a file as a whole.
    pub key: String,
    /// What is wrong, and what to do about it.
    pub message: String,
}

impl From<&Mistake> for Complaint {
    fn from(mistake: &Mistake) -> Self {
        Self {
            file: mistake.origin().to_string(),
            line: mistake.line(),
            key: mistake.key().to_owned(),
            message: mistake.message(),
        }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = self.line.map(|line| line.to_string());
        let parts = [Some(&self.file), line.as_ref(), Some(&self.key), Some(&self.message)];
        let parts = parts.into_iter().flatten().filter(|part| !part.is_empty());
        f.write_str(&parts.map(String::as_str).collect::<Vec<_>>().join(": "))
    }
}

/// What the admin listener needs of the configuration in force.
#[derive(Debug)]
pub struct Operator {
    /// What everything but the probes asks for.
    pub token: Option<SecretString>,
    /// Whether a gateway without its store refuses everything, and so is not ready.
    pub needs_store: bool,
}

impl Operator {
    fn of(settings: &Settings, on_failure: OnFailure) -> Self {
        Self { token: settings.admin.token.clone(), needs_store: on_failure == OnFailure::Deny }
    }
}

/// The way to ask for a reload. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Reloads {
    requests: mpsc::Sender<Request>,
    operator: Arc<ArcSwap<Operator>>,
}

#[derive(Debug)]
struct Request {
    trigger: Trigger,
    answer: oneshot::Sender<Report>,
}

impl Reloads {
    /// Reads the configuration again, now, and says how that ended; `None` when the gateway is about to end.
    pub async fn now(&self, trigger: Trigger) -> Option<Report> {
        let (answer, report) = oneshot::channel();
        self.requests.send(Request { trigger, answer }).await.ok()?;
        report.await.ok()
    }

    /// What the admin listener needs of the configuration in force.
    #[must_use]
    pub fn operator(&self) -> Arc<Operator> {
        self.operator.load_full()
    }
}

/// What a reload reaches.
#[derive(Debug)]
pub struct Parts {
    /// What requests are handled by.
    pub in_force: InForce,
    /// The counters, whose size may change.
    pub memory: Arc<MemoryStore>,
    /// Where reloads are counted.
    pub metrics: Arc<Metrics>,
    /// Whether other machines can reach the admin listener. Its address does not change before a restart, whatever the files
    /// say of it.
    pub admin_is_exposed: bool,
}

/// Is told a new filter for the gateway's own messages.
pub type LogLevel = Box<dyn Fn(&str) + Send>;

/// Reads the configuration again, whenever somebody asks for it or a file has changed.
pub struct Reloader {
    parts: Parts,
    sources: Sources,
    /// What the process was started with: what needs a restart is held against it.
    started: Settings,
    version: Version,
    needs_restart: Vec<&'static str>,
    watch: bool,
    /// The upstreams in force, and the host names of their targets.
    upstreams: Vec<UpstreamSettings>,
    names: Names,
    /// What the files were like when they were last read.
    read: Arc<Fingerprint>,
    /// What they were like when they were last looked at.
    seen: Arc<Fingerprint>,
    /// Snapshots that requests may still hold. They are freed here, where nobody waits.
    retired: Vec<Arc<Snapshot>>,
    requests: mpsc::Receiver<Request>,
    operator: Arc<ArcSwap<Operator>>,
    log_level: Option<LogLevel>,
}

/// A configuration that was read, and what it was made of.
struct Reading {
    fingerprint: Fingerprint,
    outcome: Outcome,
}

enum Outcome {
    Unchanged,
    Ready(Box<Ready>),
    Refused(Vec<Complaint>),
}

struct Ready {
    version: Version,
    settings: Settings,
    operator: Operator,
    snapshot: Snapshot,
    holds: Holds,
}

/// How much a configuration has of what customers depend on: a file that is gone is no mistake, and locks them out.
#[derive(Debug, Clone, Copy)]
struct Holds {
    plans: usize,
    routes: usize,
    keys: usize,
}

impl Reloader {
    /// What will reload a gateway that is about to start with this configuration, and the way to ask it to.
    #[must_use]
    pub fn new(
        settings: &Settings,
        provenance: Provenance,
        on_failure: OnFailure,
        parts: Parts,
    ) -> (Self, Reloads) {
        let Provenance { sources, version, fingerprint } = provenance;
        let (ask, requests) = mpsc::channel(WAITING_MAX);
        let operator = Arc::new(ArcSwap::from_pointee(Operator::of(settings, on_failure)));
        let reloads = Reloads { requests: ask, operator: Arc::clone(&operator) };
        for result in RESULTS {
            parts.metrics.config_reloads.with_label_values(&[result]).inc_by(0);
        }
        parts.metrics.config_good.set(1);
        say_in_force(&parts.metrics, version, None);
        let read = Arc::new(fingerprint);
        let mut names = Names::default();
        names.follow(&settings.upstreams);
        let reloader = Self {
            parts,
            sources,
            started: settings.clone(),
            version,
            needs_restart: Vec::new(),
            watch: settings.server.watch,
            upstreams: settings.upstreams.clone(),
            names,
            seen: Arc::clone(&read),
            read,
            retired: Vec::new(),
            requests,
            operator,
            log_level: None,
        };
        (reloader, reloads)
    }

    /// Tells `change` when the configuration names another filter for the gateway's own messages.
    pub fn on_log_level(&mut self, change: LogLevel) {
        self.log_level = Some(change);
    }

    /// Reloads whenever that is asked for. Never ends by itself.
    pub async fn run(mut self) -> Infallible {
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(request) = self.requests.recv() => {
                    let report = self.reload(request.trigger).await;
                    // Who has asked may be gone; the reload is done all the same.
                    drop(request.answer.send(report));
                }
                () = self.names.moved() => self.renew_backends().await,
                _ = looks.tick() => {
                    self.names.look_up(clock::instant());
                    self.retired.retain(|snapshot| Arc::strong_count(snapshot) > 1);
                    if self.watch && self.has_settled_on_a_change().await {
                        drop(self.reload(Trigger::File).await);
                    }
                }
            }
        }
    }

    /// Whether the files are not as they were read, and nobody is writing them.
    async fn has_settled_on_a_change(&mut self) -> bool {
        let read = Arc::clone(&self.read);
        let Ok(now) = tokio::task::spawn_blocking(move || read.again()).await else { return false };
        let settled = now == *self.seen;
        if !settled {
            self.seen = Arc::new(now);
        }
        settled && self.seen != self.read
    }

    async fn reload(&mut self, trigger: Trigger) -> Report {
        let (sources, version) = (self.sources.clone(), self.version);
        let before = self.parts.in_force.latest();
        let moves = self.names.moves();
        let reading =
            tokio::task::spawn_blocking(move || Reading::of(&sources, version, &before, &moves)).await;
        let outcome = match reading {
            Ok(Reading { fingerprint, outcome }) => {
                self.read = Arc::new(fingerprint);
                self.seen = Arc::clone(&self.read);
                outcome
            }
            // A panic in there is a mistake of ours, and no reason to stop what runs, or to try again without end.
            Err(error) => {
                self.read = Arc::clone(&self.seen);
                Outcome::Refused(vec![Complaint::of_no_file(&error)])
            }
        };
        let (result, holds, mistakes) = match outcome {
            Outcome::Ready(ready) => {
                let holds = ready.holds;
                self.apply(*ready);
                ("applied", Some(holds), Vec::new())
            }
            Outcome::Unchanged => ("unchanged", None, Vec::new()),
            Outcome::Refused(mistakes) => ("refused", None, mistakes),
        };
        let (version, needs_restart) = (self.version.to_string(), self.needs_restart.clone());
        let report = Report { result, version, needs_restart, mistakes };
        let metrics = &self.parts.metrics;
        metrics.config_reloads.with_label_values(&[result]).inc();
        metrics.config_good.set((!report.is_refusal()).into());
        metrics.config_waiting.set(i64::try_from(report.needs_restart.len()).unwrap_or(i64::MAX));
        tell(&report, holds, trigger);
        report
    }

    /// Puts backends in force that have no connections to where names stood for before. Everything else stays.
    async fn renew_backends(&mut self) {
        let (upstreams, moves) = (self.upstreams.clone(), self.names.moves());
        let before = self.parts.in_force.latest();
        let renewed = tokio::task::spawn_blocking(move || {
            let backends = before.backends.renewed(&upstreams, &moves)?;
            Ok::<_, BuildError>(Snapshot { backends: Arc::new(backends), ..(*before).clone() })
        });
        match renewed.await {
            Ok(Ok(snapshot)) => self.retired.push(self.parts.in_force.replace(snapshot)),
            Ok(Err(error)) => tracing::error!(%error, "connections cannot be made anew"),
            Err(error) => tracing::error!(%error, "connections cannot be made anew"),
        }
    }

    /// Puts a configuration in force. Nothing in here can fail.
    fn apply(&mut self, ready: Ready) {
        let Ready { version, settings, operator, snapshot, holds: _ } = ready;
        self.retired.push(self.parts.in_force.replace(snapshot));
        let keeps_token = self.parts.admin_is_exposed && operator.token.is_none();
        let token = if keeps_token { self.operator.load().token.clone() } else { operator.token };
        self.operator.store(Arc::new(Operator { token, ..operator }));
        self.parts.memory.hold_at_most(settings.store.max_callers);
        self.watch = settings.server.watch;
        self.names.follow(&settings.upstreams);
        self.upstreams.clone_from(&settings.upstreams);
        if let Some(change) = &self.log_level {
            change(&settings.log.level);
        }
        self.needs_restart = config::needs_restart(&self.started, &settings);
        if keeps_token {
            self.needs_restart.push("admin.token");
        }
        say_in_force(&self.parts.metrics, version, Some(self.version));
        self.version = version;
    }
}

impl fmt::Debug for Reloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader")
            .field("sources", &self.sources)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Reading {
    /// Reads everything again, and makes of it what could take the place of `before`.
    fn of(sources: &Sources, version: Version, before: &Snapshot, moves: &Moves) -> Self {
        let (loaded, fingerprint) = config::read(sources);
        let outcome = match loaded {
            Ok(loaded) if loaded.provenance.version == version => Outcome::Unchanged,
            Ok(loaded) => Ready::of(loaded, before, moves).map_or_else(
                |complaint| Outcome::Refused(vec![complaint]),
                |ready| Outcome::Ready(Box::new(ready)),
            ),
            Err(mistakes) => Outcome::Refused(mistakes.iter().map(Complaint::from).collect()),
        };
        Self { fingerprint, outcome }
    }
}

impl Ready {
    fn of(loaded: Loaded, before: &Snapshot, moves: &Moves) -> Result<Self, Complaint> {
        let Loaded { settings, policy, files: _, provenance } = loaded;
        let holds = Holds { plans: policy.plans.len(), routes: policy.routes.len(), keys: policy.keys.len() };
        let operator = Operator::of(&settings, policy.on_failure);
        let backends = before.backends.renewed(&settings.upstreams, moves);
        let backends = backends.map_err(|error| Complaint::of_no_file(&error))?;
        let snapshot =
            snapshot(policy, &settings, backends).map_err(|error| Complaint::of_no_file(&error))?;
        Ok(Self { version: provenance.version, settings, operator, snapshot, holds })
    }
}

impl Complaint {
    /// About what is wrong with the configuration as a whole.
    fn of_no_file(error: &dyn std::error::Error) -> Self {
        let causes = std::iter::successors(Some(error), |error| error.source());
        let message = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        Self { file: String::new(), line: None, key: String::new(), message }
    }
}

/// What requests are handled by under this configuration.
///
/// # Errors
/// When two routes would claim the same request.
pub fn snapshot(
    policy: PolicyParts,
    settings: &Settings,
    backends: Backends,
) -> Result<Snapshot, Unbuildable> {
    Ok(Snapshot {
        policy: Arc::new(Policy::new(policy)?),
        style: settings.headers,
        access_log: settings.log.access,
        backends: Arc::new(backends),
        max_body: settings.server.max_body,
    })
}

/// Shows which configuration is in force, and since when.
fn say_in_force(metrics: &Metrics, version: Version, before: Option<Version>) {
    metrics.config_info.with_label_values(&[&version.to_string()]).set(1);
    if let Some(before) = before.filter(|before| *before != version) {
        // It was there; and if it were not, that would be as good.
        drop(metrics.config_info.remove_label_values(&[&before.to_string()]));
    }
    let now = clock::wall().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    metrics.config_timestamp.set(now.as_secs_f64());
}

/// One line for each outcome. `holds` is what was put in force.
fn tell(report: &Report, holds: Option<Holds>, trigger: Trigger) {
    let Report { result, version, needs_restart, mistakes } = report;
    let (plans, routes, keys) =
        (holds.map(|holds| holds.plans), holds.map(|holds| holds.routes), holds.map(|holds| holds.keys));
    let (trigger, needs_restart) = (trigger.as_str(), needs_restart.join(", "));
    if report.is_refusal() {
        let first: Vec<String> = mistakes.iter().take(LOGGED_MAX).map(ToString::to_string).collect();
        let (count, first) = (mistakes.len(), first.join("; "));
        tracing::error!(
            result,
            trigger,
            version,
            count,
            first,
            "the changed configuration has mistakes and is not used; the one before stays in force"
        );
    } else if needs_restart.is_empty() {
        tracing::info!(result, trigger, version, plans, routes, keys, "configuration read again");
    } else {
        tracing::warn!(
            result,
            trigger,
            version,
            plans,
            routes,
            keys,
            needs_restart,
            "configuration read again; a part of it waits for a restart"
        );
    }
}
