//! The layer of environment variables: `TOLLGATE__STORE__REDIS__BUDGET=50ms` sets `store.redis.budget`.
//!
//! A variable cannot hold the letters that names may: `PLANS__FREE` finds `plans.free` and `plans.Free`, and `MY_API`
//! finds `my-api` and `my.api`. A name that no file has is taken in lower case.

use config::{Map, Value, ValueKind};

use super::mistakes::{Fault, Notes, Origin, Place};
use super::sources::{Layers, merge};

/// What our variables begin with.
const PREFIX: &str = "TOLLGATE__";

/// What stands between levels.
const SEPARATOR: &str = "__";

/// Adds the variables of ours, in the order of their names.
pub(super) fn add(layers: &mut Layers, environment: &[(String, String)], notes: &Notes) {
    let mut variables: Vec<_> = environment.iter().filter(|(name, _)| is_ours(name)).collect();
    variables.sort();
    for (name, text) in variables {
        match read(layers, name, text) {
            Ok(layer) => merge(&mut layers.root, layer),
            Err(fault) => {
                notes.add(fault.at(&Place { origin: Origin::Environment(name.clone()), key: String::new() }));
            }
        }
    }
}

/// Whether a variable is meant for us, well written or not.
///
/// Not everything that begins with `TOLLGATE_`: Kubernetes sets `TOLLGATE_PORT`, `TOLLGATE_SERVICE_HOST` and more for a
/// service of that name, none of which has two underscores in a row.
fn is_ours(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    name.starts_with("TOLLGATE_") && name.contains(SEPARATOR)
}

/// The tree that one variable stands for.
fn read(layers: &mut Layers, name: &str, text: &str) -> Result<Value, Fault> {
    let Some(levels) = name.strip_prefix(PREFIX) else {
        return Err(Fault::new("is not the name of a setting")
            .hint("names begin with TOLLGATE__ and have two underscores between levels"));
    };
    if text.contains(char::REPLACEMENT_CHARACTER) {
        return Err(Fault::new("does not hold UTF-8 text"));
    }
    let mut path = Vec::new();
    let mut table = Some(&layers.root);
    for level in levels.split(SEPARATOR) {
        if level.is_empty() {
            return Err(Fault::new("has an empty level").hint("write two underscores between levels"));
        }
        let key = find(table, level)?;
        table = table.and_then(|table| entries(table)?.get(&key));
        path.push(key);
    }
    let mark = layers.mark(Origin::Environment(name.to_owned()));
    let leaf = Value::new(Some(&mark), text);
    Ok(path
        .into_iter()
        .rev()
        .fold(leaf, |value, key| Value::new(Some(&mark), ValueKind::Table(Map::from([(key, value)])))))
}

/// The key of `table` that `level` stands for.
fn find(table: Option<&Value>, level: &str) -> Result<String, Fault> {
    let keys = table.and_then(entries).into_iter().flat_map(Map::keys);
    let mut alike: Vec<&String> = keys.filter(|key| plain(key) == plain(level)).collect();
    alike.sort();
    match alike.as_slice() {
        [] => Ok(level.to_ascii_lowercase()),
        [only] => Ok((*only).clone()),
        several => {
            several.iter().find(|key| key.as_str() == level).map(|key| (*key).clone()).ok_or_else(|| {
                let names: Vec<&str> = several.iter().map(|key| key.as_str()).collect();
                Fault::new(format!("\"{level}\" may stand for {}", names.join(" or ")))
                    .hint("set this one in a file")
            })
        }
    }
}

fn entries(value: &Value) -> Option<&Map<String, Value>> {
    match &value.kind {
        ValueKind::Table(entries) => Some(entries),
        _ => None,
    }
}

fn plain(name: &str) -> String {
    name.to_ascii_lowercase().replace(['-', '.'], "_")
}
