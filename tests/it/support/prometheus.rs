//! A real Prometheus that scrapes the gateway under test.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::client::{Connection, Request};
use super::process::{Process, START_LIMIT};
use super::{PORT_ATTEMPTS, eventually, free_port, tree};

/// How long two scrapes may take, at one a second, on a busy machine.
const SCRAPE_LIMIT: Duration = Duration::from_secs(10);

/// A Prometheus with a port and a directory of its own. Dies with the test.
#[derive(Debug)]
pub(crate) struct Prometheus {
    address: SocketAddr,
    process: Process,
    _directory: TempDir,
}

/// One element of an instant vector.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Its labels, without the name.
    pub(crate) labels: BTreeMap<String, String>,
    /// Its value, which may be NaN.
    pub(crate) value: f64,
}

impl Prometheus {
    /// Starts one on the repository's own configuration and rules. Only the address of the gateway, the token and the
    /// times differ.
    #[track_caller]
    pub(crate) fn start(gateway: SocketAddr, token: &str) -> Self {
        for _ in 0..PORT_ATTEMPTS {
            if let Some(prometheus) = Self::try_start(gateway, token) {
                return prometheus;
            }
        }
        panic!("prometheus found no free port in {PORT_ATTEMPTS} attempts");
    }

    #[track_caller]
    fn try_start(gateway: SocketAddr, token: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("prometheus.yml", &configuration(gateway));
        write("alerts.yml", &tree::text("prometheus/alerts.yml"));
        write("admin-token", token);
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let mut command = Command::new("prometheus");
        command
            .current_dir(directory.path())
            .arg("--config.file=prometheus.yml")
            .arg("--storage.tsdb.path=data")
            .arg(format!("--web.listen-address={address}"));
        let installed = Command::new("prometheus").arg("--version").output().is_ok();
        assert!(installed, "prometheus is not on the PATH; ./test installs it (apt: prometheus)");
        let mut process = Process::start(&mut command);
        let up = eventually("prometheus to start or to give up", START_LIMIT, || {
            if process.exit_code().is_some() {
                let taken = process.excerpt().contains("address already in use");
                assert!(taken, "prometheus gave up\n{}", process.excerpt());
                return Some(false);
            }
            std::net::TcpStream::connect(address).ok()?;
            (Request::get("/-/ready").on(&mut Connection::open(address)).status == 200).then_some(true)
        });
        up.then_some(Self { address, process, _directory: directory })
    }

    /// Waits until one more scrape of the gateway has begun and ended.
    #[track_caller]
    pub(crate) fn wait_for_scrape(&self) {
        let scrapes =
            || self.query("sum_over_time(up{job=\"tollgate\"}[5m])").first().map_or(0.0, |up| up.value);
        // The one that is under way may have begun before this call, so the one after it counts.
        let before = scrapes();
        eventually("two successful scrapes", SCRAPE_LIMIT, || (scrapes() > before + 1.5).then_some(()));
    }

    /// Evaluates an expression at this moment.
    #[track_caller]
    pub(crate) fn query(&self, expression: &str) -> Vec<Sample> {
        let data = self.api(&format!("/api/v1/query?query={}", percent_encoded(expression)));
        let result = data["result"].as_array().unwrap_or_else(|| panic!("no vector: {data}"));
        result.iter().map(sample).collect()
    }

    /// The `data` of an answer of the HTTP API.
    #[track_caller]
    pub(crate) fn api(&self, target: &str) -> Value {
        let mut answer = Request::get(target).on(&mut Connection::open(self.address)).json();
        assert_eq!(answer["status"], "success", "{target}: {answer}\n{}", self.process.excerpt());
        answer["data"].take()
    }
}

/// The repository's configuration for this gateway.
#[track_caller]
fn configuration(gateway: SocketAddr) -> String {
    let replacements = [
        ("gateway:9090", gateway.to_string()),
        ("scrape_interval: 5s", "scrape_interval: 1s".to_owned()),
        ("scrape_timeout: 4s", "scrape_timeout: 1s".to_owned()),
        ("evaluation_interval: 15s", "evaluation_interval: 1s".to_owned()),
    ];
    replacements.into_iter().fold(tree::text("prometheus/prometheus.yml"), |text, (written, wanted)| {
        assert!(text.contains(written), "{written:?} is not in prometheus/prometheus.yml:\n{text}");
        text.replace(written, &wanted)
    })
}

fn sample(element: &Value) -> Sample {
    let labels = element["metric"].as_object().expect("an element has labels");
    let text = |value: &Value| value.as_str().expect("labels and values are texts").to_owned();
    Sample {
        labels: labels.iter().map(|(name, value)| (name.clone(), text(value))).collect(),
        value: text(&element["value"][1]).parse().expect("a value is a number"),
    }
}

/// The text as a value in a query.
pub(crate) fn percent_encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}
