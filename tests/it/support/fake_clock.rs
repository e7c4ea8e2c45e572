//! Another time of day for a gateway. The time that its timers run on is the true one.

use std::path::PathBuf;

use tempfile::TempDir;

use super::gateway::Gateway;

/// What `faketime` would set for its child. Set by hand, because its child is a grandchild that nobody could end.
///
/// `time` is an offset in seconds, as in `-10`, or a moment in UTC to begin at, as in `@2026-03-31 23:59:57`.
pub(crate) fn fake_clock(time: &str) -> [(&'static str, &str); 4] {
    let [library, monotonic, zone] = surroundings();
    [library, monotonic, zone, ("FAKETIME", time)]
}

fn surroundings() -> [(&'static str, &'static str); 3] {
    let installed = std::process::Command::new("faketime").arg("--version").output().is_ok();
    assert!(installed, "faketime is not on the PATH; ./test installs it (apt: faketime)");
    [
        ("LD_PRELOAD", "/usr/$LIB/faketime/libfaketime.so.1"),
        // Timers are not the subject; only the time of day is wrong.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ("TZ", "UTC"),
    ]
}

/// A clock that is set while the process runs, as an operator or a time server sets one.
pub(crate) struct SteppedClock {
    file: PathBuf,
    _directory: TempDir,
}

impl SteppedClock {
    /// A clock that shows the true time so far.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let clock = Self { file: directory.path().join("offset"), _directory: directory };
        clock.set("+0");
        clock
    }

    /// The environment of a gateway that looks at this clock.
    pub(crate) fn environment(&self) -> [(&'static str, &str); 5] {
        let [library, monotonic, zone] = surroundings();
        let file = self.file.to_str().unwrap();
        // Looked at for each reading of the clock: a step is seen at once.
        [library, monotonic, zone, ("FAKETIME_TIMESTAMP_FILE", file), ("FAKETIME_NO_CACHE", "1")]
    }

    /// Steps it to this offset from the true time, in seconds with a sign.
    pub(crate) fn set(&self, offset: &str) {
        // In one step: a reader never sees half a file.
        let next = self.file.with_extension("next");
        std::fs::write(&next, offset).unwrap();
        std::fs::rename(&next, &self.file).unwrap();
    }
}

/// The second of the day that a gateway believes in. It asks without a key, which must be refused.
#[track_caller]
pub(crate) fn second_of_day(gateway: &Gateway) -> i64 {
    let answer = gateway.get("/x").send().expect(401);
    let date = answer.header("date").expect("an answer of the gateway is dated").to_owned();
    let time = date.split(' ').nth(4).expect("an HTTP date");
    time.split(':').fold(0, |seconds, part| seconds * 60 + part.parse::<i64>().unwrap())
}
