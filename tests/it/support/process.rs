//! Running the real binary, and what it wrote.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;

use super::eventually;

/// Longest time any command but `serve` and `demo` may run, and any server may take to start.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(30);

/// Lines of a process, collected while it runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    /// All lines so far.
    pub(crate) fn all(&self) -> Vec<String> {
        self.0.lock().clone()
    }

    fn follow(source: impl Read + Send + 'static) -> (Self, JoinHandle<()>) {
        let lines = Self::default();
        let filled = lines.clone();
        let thread = thread::spawn(move || {
            let mut source = BufReader::new(source);
            let mut line = Vec::new();
            // Bytes and not text: a log line that is not UTF-8 is a bug to see, not one to stop reading at.
            while source.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                filled.0.lock().push(text);
                line.clear();
            }
        });
        (lines, thread)
    }
}

/// A child process that never outlives the test.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// What it wrote to standard output.
    pub(crate) stdout: Lines,
    /// What it wrote to standard error.
    pub(crate) stderr: Lines,
    readers: Vec<JoinHandle<()>>,
}

impl Process {
    /// Starts it with both outputs collected.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
        let (stdout, read_stdout) = Lines::follow(child.stdout.take().unwrap());
        let (stderr, read_stderr) = Lines::follow(child.stderr.take().unwrap());
        Self { child, stdout, stderr, readers: vec![read_stdout, read_stderr] }
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its exit code once it has ended, and -1 when a signal ended it.
    pub(crate) fn exit_code(&mut self) -> Option<i32> {
        let status = self.child.try_wait().expect("the child is ours to wait for")?;
        Some(status.code().unwrap_or(-1))
    }

    /// Waits until it ends by itself, and until all it wrote has been read.
    #[track_caller]
    pub(crate) fn wait(&mut self, limit: Duration) -> i32 {
        let code = eventually("the process to end", limit, || self.exit_code());
        for reader in self.readers.drain(..) {
            reader.join().unwrap();
        }
        code
    }

    /// Sends it a signal by name, for example `STOP`.
    pub(crate) fn signal(&self, name: &str) {
        // The shell's own `kill`, since this project has no unsafe code and so no libc call.
        let status =
            Command::new("sh").args(["-c", &format!("kill -s {name} {}", self.id())]).status().unwrap();
        assert!(status.success(), "cannot send {name} to {}", self.id());
    }

    /// Kills it (`SIGKILL`) and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        // It may be gone already, which is just as well.
        self.child.kill().ok();
        self.child.wait().ok();
    }

    /// The last lines of both outputs, for a failing test.
    pub(crate) fn excerpt(&self) -> String {
        let tail = |lines: &Lines| {
            let lines = lines.all();
            lines[lines.len().saturating_sub(40)..].join("\n")
        };
        format!("--- stdout (end)\n{}\n--- stderr (end)\n{}", tail(&self.stdout), tail(&self.stderr))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
