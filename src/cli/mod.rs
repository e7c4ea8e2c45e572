//! The commands. The only room that prints.
//!
//! Exit codes: 0 done, 64 bad configuration or usage, 1 anything else, also a second signal. Errors go to standard error as plain sentences
//! with the next step, never as a backtrace.

mod check;
mod demo;
mod echo;
mod explain;
mod keys;
mod serve;

use std::convert::Infallible;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tollgate::config::{self, Loaded, Mistakes, Purpose, Sources};
use tollgate::gateway::{Gateway, Stop};
use tollgate::reload::{LogLevel, Reloads, Trigger};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;

/// `EX_USAGE` of sysexits.h: the configuration or the command line is wrong.
const EXIT_USAGE: u8 = 64;

/// An API gateway that limits exactly and says why.
#[derive(Debug, Parser)]
#[command(
    name = "tollgate",
    version,
    about,
    arg_required_else_help = true,
    after_help = "Start here: tollgate demo"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Gateway, echo backend and example plans in one process, with curl lines to try
    #[command(after_help = "Example: tollgate demo --listen 127.0.0.1:8080")]
    Demo(demo::Demo),
    /// Run the gateway
    #[command(after_help = "Example: tollgate serve -c gateway.toml")]
    Serve(ConfigArgs),
    /// Read and resolve the whole configuration; print every mistake
    #[command(after_help = "Example: tollgate check -c gateway.toml -c keys.toml")]
    Check(ConfigArgs),
    /// Route, caller, plan and every limit that would apply to a request, without charging it
    #[command(after_help = "Example: tollgate explain --path /v1/search --key tg_demo_free_key")]
    Explain(explain::Explain),
    /// Work with API keys
    #[command(after_help = "Example: printf %s \"$KEY\" | tollgate keys hash")]
    Keys(keys::Keys),
    /// A backend that answers with what it saw, to try a configuration against
    #[command(after_help = "Example: tollgate echo --listen 127.0.0.1:9000")]
    Echo(echo::Echo),
}

/// Where the configuration is.
#[derive(Debug, Args)]
struct ConfigArgs {
    /// A file, or a directory with *.toml, *.yaml, *.yml, *.json; may be repeated, later ones win [default: ./config, else the built-in one]
    #[arg(short, long = "config", value_name = "FILE|DIR")]
    config: Vec<PathBuf>,
}

/// The command was used wrongly: a sentence with the next step.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

/// Runs the command that the process was started with.
pub(crate) fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match cli.command {
        Command::Demo(demo) => demo.run(),
        Command::Serve(config) => serve::run(&config),
        Command::Check(config) => check::run(&config),
        Command::Explain(explain) => explain.run(),
        Command::Keys(keys) => keys.run(),
        Command::Echo(echo) => echo.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

/// Help and version are no mistakes; everything else clap complains of is.
fn usage(error: &clap::Error) -> ExitCode {
    // There is nobody to tell when the terminal is gone.
    let _printed = error.print();
    if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS }
}

fn report(error: &anyhow::Error) -> ExitCode {
    complain(format_args!("{error:#}"));
    if error.is::<Mistakes>() || error.is::<Usage>() { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE }
}

impl ConfigArgs {
    /// The named files, else `./config` if it is there, else what is built in.
    fn sources(&self) -> Sources {
        let default = Path::new("config");
        let files = match self.config.as_slice() {
            [] if default.is_dir() => vec![default.to_owned()],
            named => named.to_vec(),
        };
        Sources { files, environment: Sources::environment_of_process(), purpose: Purpose::Gateway }
    }

    fn load(&self) -> anyhow::Result<Loaded> {
        Ok(config::load(&self.sources())?)
    }
}

/// A line for the person who called. One who has gone is no reason to panic, as `println!` would.
fn say(text: impl std::fmt::Display) {
    let _written = writeln!(io::stdout(), "{text}");
}

/// A line about what went wrong.
fn complain(text: impl std::fmt::Display) {
    let _written = writeln!(io::stderr(), "{text}");
}

/// Messages that may wait for whoever reads standard error. Further ones are dropped.
const MESSAGES_MAX: usize = 4_096;

/// Writes the messages that are left when it is dropped, and waits for it about a second at most.
#[must_use = "messages are written while this lives"]
struct Logging(#[expect(dead_code, reason = "held for its end")] WorkerGuard);

/// A panic is a message like others: a line of JSON, and no backtrace.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let panic = panic.payload_as_str().unwrap_or("of an unknown kind");
        tracing::error!(panic, place, "a bug of Tollgate: please report it");
    }));
}

/// Messages as JSON lines on standard error, written by a thread of their own: requests cause messages, and no request
/// may wait for, or fail with, whoever reads them. Also gives what changes the level later.
fn start_logging(level: &str) -> anyhow::Result<(Logging, LogLevel)> {
    let filter = EnvFilter::try_new(level).map_err(|error| Usage(format!("log.level: {error}")))?;
    let (messages, thread) = NonBlockingBuilder::default()
        .buffered_lines_limit(MESSAGES_MAX)
        .lossy(true)
        .thread_name("messages")
        .finish(io::stderr());
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(false)
        .with_env_filter(filter)
        .with_writer(messages)
        .with_filter_reloading();
    let handle = subscriber.reload_handle();
    subscriber.init();
    log_panics();
    let change = move |level: &str| {
        // The configuration has tried it; and messages that go on as before are the least of all troubles.
        if let Ok(filter) = EnvFilter::try_new(level) {
            drop(handle.reload(filter));
        }
    };
    Ok((Logging(thread), Box::new(change)))
}

/// Has the configuration read again at every SIGHUP.
async fn reload_at_hangup(reloads: Reloads, hangup: Option<Signal>) -> Infallible {
    if let Some(mut hangup) = hangup {
        while hangup.recv().await.is_some() {
            drop(reloads.now(Trigger::Signal).await);
        }
    }
    // Without a handler the signal ends the process, as it does by itself.
    std::future::pending().await
}

/// Runs the gateway until a signal stops it. A second signal ends it at once, whatever is in flight.
async fn run_until_stopped(gateway: Gateway, mut signals: Signals) -> anyhow::Result<()> {
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let second_signal = async {
        // The gateway may have ended by itself, and then nobody waits for this.
        let _sent = stop.send(signals.next().await);
        signals.next().await
    };
    let stopped = async {
        match stopped.await {
            Ok(stop) => stop,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        served = gateway.run(stopped) => Ok(served?),
        _ = second_signal => {
            Err(anyhow::anyhow!("ended at once by a second signal: what was in flight is cut short"))
        }
    }
}

/// SIGTERM and SIGINT.
struct Signals(Option<(Signal, Signal)>);

/// SIGHUP, caught from now on; only inside of a runtime.
fn hangup() -> Option<Signal> {
    signal(SignalKind::hangup()).ok()
}

impl Signals {
    /// Caught from now on; only inside of a runtime.
    fn new() -> Self {
        // Without handlers the signals end the process at once, which is the next best thing.
        Self(signal(SignalKind::terminate()).ok().zip(signal(SignalKind::interrupt()).ok()))
    }

    async fn next(&mut self) -> Stop {
        let Some((terminate, interrupt)) = &mut self.0 else {
            return std::future::pending().await;
        };
        tokio::select! {
            _ = terminate.recv() => Stop::AfterDelay,
            _ = interrupt.recv() => Stop::Soon,
        }
    }
}
