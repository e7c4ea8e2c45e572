//! Where the configuration is written: files, directories of files, the environment. Read here and layered here, with the
//! origin of every value kept.

use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

use config::{Value, ValueKind};

use super::environment;
use super::files::Files;
use super::format;
use super::mistakes::{Fault, Notes, Origin, Place};

/// Every setting with its default and what it means. Always the lowest layer.
const DEFAULTS: &str = include_str!("../../config/tollgate.toml");

/// The mark of their values: they are the first layer.
const DEFAULTS_MARK: &str = "0";

/// Plans, routes and keys to try things with. Only used when no file is given, so that nobody's gateway knows the keys.
const EXAMPLES: [(&str, &str); 2] = [
    ("plans.toml", include_str!("../../config/plans.toml")),
    ("keys.toml", include_str!("../../config/keys.toml")),
];

/// What the policy is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A gateway: every route leads to an upstream.
    Gateway,
    /// A middleware inside another application, which answers by itself: a route needs no upstream.
    Middleware,
}

/// Where to look for the configuration. Later sources win; the environment wins over all files.
#[derive(Clone)]
pub struct Sources {
    /// Files, and directories, which mean their `*.toml`, `*.yaml`, `*.yml` and `*.json` files by name. When empty, the
    /// example plans, routes and keys that are built in.
    pub files: Vec<PathBuf>,
    /// Environment variables by name and value. Those whose names begin with `TOLLGATE__` are settings; `LISTEN_FDS` says that
    /// there are listeners, and `LISTEN_FDNAMES` how they are called.
    pub environment: Vec<(String, String)>,
    /// What the policy is for.
    pub purpose: Purpose,
}

impl Sources {
    /// The built-in defaults with the example plans and keys, for a gateway.
    #[must_use]
    pub fn built_in() -> Self {
        Self { files: Vec::new(), environment: Vec::new(), purpose: Purpose::Gateway }
    }

    /// The environment of this process. The only place that reads it.
    ///
    /// Bytes that are not UTF-8 become U+FFFD, which [`load`](super::load) refuses in a variable of ours.
    #[must_use]
    pub fn environment_of_process() -> Vec<(String, String)> {
        // `vars` would panic on the first variable that is not UTF-8, whoever it belongs to.
        let variables = std::env::vars_os();
        variables
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .collect()
    }

    /// The names of the listeners that the process was started with (`LISTEN_FDNAMES`); `None` when there are none.
    pub(super) fn handed_over(&self) -> Option<Vec<String>> {
        let value = |wanted| self.environment.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
        value("LISTEN_FDS")?;
        let names = value("LISTEN_FDNAMES").map(|names| names.split(':').map(str::to_owned).collect());
        Some(names.unwrap_or_default())
    }
}

/// Names of variables only: their values may be secret.
impl std::fmt::Debug for Sources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.environment.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Sources")
            .field("files", &self.files)
            .field("environment", &names)
            .field("purpose", &self.purpose)
            .finish()
    }
}

/// All layers as one tree.
pub(super) struct Layers {
    pub(super) root: Value,
    /// A value's own origin is an index into this.
    pub(super) origins: Vec<Origin>,
    /// The files that were found.
    pub(super) files: Vec<PathBuf>,
    /// Whether a layer is missing because it could not be read.
    pub(super) incomplete: bool,
}

impl Layers {
    /// Reads and merges `sources`. What cannot be read is noted, and the rest is merged without it.
    pub(super) fn read(sources: &Sources, files: &Files, notes: &Notes) -> Self {
        let mut layers = Self {
            root: Value::new(Some(&DEFAULTS_MARK.to_owned()), ValueKind::Table(config::Map::new())),
            origins: Vec::new(),
            files: Vec::new(),
            incomplete: false,
        };
        layers.add_text(Origin::BuiltIn("tollgate.toml"), format::Format::Toml, DEFAULTS, notes);
        if sources.files.is_empty() {
            for (name, text) in EXAMPLES {
                files.text(text);
                layers.add_text(Origin::BuiltIn(name), format::Format::Toml, text, notes);
            }
        }
        for path in &sources.files {
            layers.add_path(path, files, notes);
        }
        environment::add(&mut layers, &sources.environment, notes);
        layers
    }

    /// Registers an origin; values are marked with what is returned.
    pub(super) fn mark(&mut self, origin: Origin) -> String {
        self.origins.push(origin);
        (self.origins.len() - 1).to_string()
    }

    fn add_path(&mut self, path: &Path, files: &Files, notes: &Notes) {
        if !path.is_dir() {
            return self.add_file(path, files, notes);
        }
        match files.list(path) {
            Ok(found) if found.is_empty() => {
                self.fail(path, Fault::new("holds no .toml, .yaml, .yml or .json file"), notes);
            }
            Ok(found) => found.iter().for_each(|file| self.add_file(file, files, notes)),
            Err(error) => self.fail(path, Fault::new(format!("cannot be read: {error}")), notes),
        }
    }

    fn add_file(&mut self, path: &Path, files: &Files, notes: &Notes) {
        self.files.push(path.to_owned());
        if let Err(error) = path.metadata() {
            files.pass_over(path);
            return self.fail(path, Fault::new(format!("cannot be read: {error}")), notes);
        }
        let Some(format) = format::Format::of(path) else {
            files.pass_over(path);
            let fault = Fault::new("is of an unknown kind").hint("name it .toml, .yaml, .yml or .json");
            return self.fail(path, fault, notes);
        };
        match files.read(path) {
            Ok(text) => self.add_text(Origin::File(path.to_owned()), format, &text, notes),
            Err(problem) => self.fail(path, Fault::new(format!("cannot be read: {problem}")), notes),
        }
    }

    fn add_text(&mut self, origin: Origin, format: format::Format, text: &str, notes: &Notes) {
        let mark = self.mark(origin.clone());
        match format.parse(&mark, text) {
            Ok(layer) => merge(&mut self.root, layer),
            Err(refused) => {
                self.incomplete = true;
                notes.add(refused.fault.at(&whole(origin)).on_line(refused.line));
            }
        }
    }

    fn fail(&mut self, path: &Path, fault: Fault, notes: &Notes) {
        self.incomplete = true;
        notes.add(fault.at(&whole(Origin::File(path.to_owned()))));
    }
}

fn whole(origin: Origin) -> Place {
    Place { origin, key: String::new() }
}

/// Lays `above` over `below`: tables are joined key by key, anything else is replaced.
///
/// A joined table belongs to the first layer above the defaults that writes it: there, what it lacks is looked for.
///
/// Not the builder of the `config` crate: it forgets where tables come from and reads a dot in a name as a level.
pub(super) fn merge(below: &mut Value, above: Value) {
    let written = below.origin().filter(|mark| *mark != DEFAULTS_MARK);
    let joined = written.or(above.origin()).map(ToOwned::to_owned);
    let replaced = above.origin().map(ToOwned::to_owned);
    let (origin, kind) = match (std::mem::take(&mut below.kind), above.kind) {
        (ValueKind::Table(mut entries), ValueKind::Table(newer)) => {
            for (key, value) in newer {
                match entries.entry(key) {
                    Entry::Occupied(mut entry) => merge(entry.get_mut(), value),
                    Entry::Vacant(entry) => {
                        entry.insert(value);
                    }
                }
            }
            (joined, ValueKind::Table(entries))
        }
        (_, kind) => (replaced, kind),
    };
    *below = Value::new(origin.as_ref(), kind);
}
