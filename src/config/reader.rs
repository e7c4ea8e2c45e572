//! Reads the merged tree of values, table by table.
//!
//! Not serde: a deserializer stops at its first error, and this must report them all. Every table is asked for the keys it
//! may have; [`Table::finish`] then reports the others. Values of files are strict: a string is not a number and a number
//! is not a string. Values of the environment are text, and are read as what is expected.

use config::{Map, Value, ValueKind};

use super::mistakes::{Fault, Notes, Origin, Place, nearest};
use super::words;

/// What all tables share.
#[derive(Debug)]
pub(super) struct Reading<'a> {
    /// Where values come from; the origin of a [`Value`] is an index into this, in decimal.
    pub(super) origins: &'a [Origin],
    pub(super) notes: &'a Notes,
    /// Whether a file could not be read. What is missing may stand there, so absence is no mistake then.
    pub(super) incomplete: bool,
}

/// A value and where it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Written<T> {
    pub(super) value: T,
    pub(super) place: Place,
}

/// A value that is neither a table nor a list.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scalar<'a> {
    Text(&'a str),
    Whole(i128),
    Fraction(f64),
    Flag(bool),
    /// Text of an environment variable, which may stand for any of the others.
    Bare(&'a str),
}

/// One table, while it is being read.
#[derive(Debug)]
pub(super) struct Table<'a> {
    reading: &'a Reading<'a>,
    place: Place,
    entries: &'a Map<String, Value>,
    asked: Vec<&'static str>,
    /// What is required and absent, and what to do about it.
    missing: Vec<(&'static str, &'static str)>,
}

impl<'a> Reading<'a> {
    /// The root of the tree. Anything but a table is read as an empty one.
    pub(super) fn root(&'a self, root: &'a Value) -> Option<Table<'a>> {
        let place = Place { origin: self.origin(root), key: String::new() };
        self.as_table(root, place)
    }

    fn origin(&self, value: &Value) -> Origin {
        value
            .origin()
            .and_then(|index| self.origins.get(index.parse::<usize>().ok()?))
            .cloned()
            .expect("every layer marks its values with the index of its origin")
    }

    fn place(&self, value: &Value, outer: &Place, name: &str) -> Place {
        Place { origin: self.origin(value), ..outer.inside(name) }
    }

    fn as_table(&'a self, value: &'a Value, place: Place) -> Option<Table<'a>> {
        let ValueKind::Table(entries) = &value.kind else {
            self.notes.add(Fault::new("expected a table").at(&place));
            return None;
        };
        Some(Table { reading: self, place, entries, asked: Vec::new(), missing: Vec::new() })
    }

    fn scalar<T>(
        &self,
        value: &Value,
        place: Place,
        parse: impl Fn(Scalar<'_>) -> Result<T, Fault>,
    ) -> Option<Written<T>> {
        match scalar(value, &place.origin).and_then(parse) {
            Ok(value) => Some(Written { value, place }),
            Err(fault) => {
                self.notes.add(fault.at(&place));
                None
            }
        }
    }
}

impl<'a> Table<'a> {
    /// Where the table stands.
    pub(super) fn place(&self) -> &Place {
        &self.place
    }

    /// The value of `key`. `None` when there is none, or when it is a mistake, which is then noted.
    pub(super) fn get<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(Scalar<'_>) -> Result<T, Fault>,
    ) -> Option<Written<T>> {
        let (value, place) = self.find(key)?;
        self.reading.scalar(value, place, parse)
    }

    /// As [`get`](Self::get), with `default` when there is none; `None` only for a mistake.
    pub(super) fn get_or<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(Scalar<'_>) -> Result<T, Fault>,
        default: T,
    ) -> Option<Written<T>> {
        if self.has(key) {
            return self.get(key, parse);
        }
        self.asked.push(key);
        Some(Written { value: default, place: self.place.clone() })
    }

    /// As [`get`](Self::get), and it is a mistake when there is none.
    pub(super) fn require<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(Scalar<'_>) -> Result<T, Fault>,
    ) -> Option<Written<T>> {
        self.require_present(key, "");
        self.get(key, parse)
    }

    /// A list of strings and the like. A variable separates them by commas.
    pub(super) fn list<T>(
        &mut self,
        key: &'static str,
        parse: impl Fn(Scalar<'_>) -> Result<T, Fault>,
    ) -> Option<Written<Vec<Written<T>>>> {
        let (value, place) = self.find(key)?;
        let items = match &value.kind {
            ValueKind::Array(items) => items.clone(),
            ValueKind::String(text) if is_environment(&place) => split(text, value),
            _ => {
                self.reading.notes.add(Fault::new("expected a list").hint("put it in brackets").at(&place));
                return None;
            }
        };
        let read = items.iter().enumerate().map(|(index, item)| {
            let place = Place { origin: place.origin.clone(), key: format!("{}[{index}]", place.key) };
            self.reading.scalar(item, place, &parse)
        });
        // All items are read, and so all mistakes noted, before the first one spoils the list.
        let value = read.collect::<Vec<_>>().into_iter().collect::<Option<_>>()?;
        Some(Written { value, place })
    }

    /// The table `key`.
    pub(super) fn table(&mut self, key: &'static str) -> Option<Self> {
        let (value, place) = self.find(key)?;
        self.reading.as_table(value, place)
    }

    /// The list of tables `key`; each is called by its `name`, if it has one, and by its index, if not.
    pub(super) fn tables(&mut self, key: &'static str) -> Option<Written<Vec<Self>>> {
        let (value, place) = self.find(key)?;
        let ValueKind::Array(items) = &value.kind else {
            let fault = if is_environment(&place) {
                Fault::new("a list of tables cannot be set from the environment").hint("write it in a file")
            } else {
                Fault::new("expected a list of tables")
            };
            self.reading.notes.add(fault.at(&place));
            return None;
        };
        let read = items.iter().enumerate().filter_map(|(index, item)| {
            let place = match name_of(item) {
                Some(name) => place.inside(name),
                None => Place { origin: place.origin.clone(), key: format!("{}[{index}]", place.key) },
            };
            self.reading.as_table(item, place)
        });
        let value = read.collect();
        Some(Written { value, place })
    }

    /// The tables of `key`, by name: `[plans.free]`, `[plans.pro]`. Sorted by name. `check` says what a name may be.
    pub(super) fn named(
        &mut self,
        key: &'static str,
        check: impl Fn(Scalar<'_>) -> Result<String, Fault>,
    ) -> Vec<(String, Self)> {
        let Some(outer) = self.table(key) else {
            return Vec::new();
        };
        let mut names: Vec<&String> = outer.entries.keys().collect();
        names.sort();
        let read = names.into_iter().filter_map(|name| {
            let value = &outer.entries[name];
            let place = self.reading.place(value, &outer.place, name);
            if let Err(fault) = check(Scalar::Text(name)) {
                self.reading.notes.add(fault.at(&place));
            }
            Some((name.clone(), self.reading.as_table(value, place)?))
        });
        read.collect()
    }

    /// It is a mistake when `key` is absent; `hint` says what to do then.
    pub(super) fn require_present(&mut self, key: &'static str, hint: &'static str) {
        if !self.has(key) && !self.reading.incomplete {
            self.missing.push((key, hint));
        }
    }

    /// Reports every key that nobody asked for, and what is missing, unless it is only misspelt.
    pub(super) fn finish(mut self) {
        let mut unknown: Vec<_> =
            self.entries.iter().filter(|(key, _)| !self.asked.contains(&key.as_str())).collect();
        unknown.sort_by_key(|(key, _)| *key);
        for (key, value) in unknown {
            let place = Place { origin: self.reading.origin(value), key: self.place.key.clone() };
            let fault = Fault::new(format!("unknown key `{}`", key.escape_debug()))
                .meant(key, self.asked.iter().copied());
            let meant = nearest(key, &self.asked);
            self.missing.retain(|(missing, _)| meant != Some(*missing));
            self.reading.notes.add(fault.at(&place));
        }
        for (key, hint) in self.missing {
            let fault = Fault::new(format!("\"{key}\" is missing"));
            let fault = if hint.is_empty() { fault } else { fault.hint(hint) };
            self.reading.notes.add(fault.at(&self.place));
        }
    }

    /// Whether `key` is written, whatever its value.
    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    fn find(&mut self, key: &'static str) -> Option<(&'a Value, Place)> {
        self.asked.push(key);
        let value = self.entries.get(key)?;
        Some((value, self.reading.place(value, &self.place, key)))
    }
}

fn is_environment(place: &Place) -> bool {
    matches!(place.origin, Origin::Environment(_))
}

fn scalar<'a>(value: &'a Value, origin: &Origin) -> Result<Scalar<'a>, Fault> {
    Ok(match &value.kind {
        ValueKind::String(text) if matches!(origin, Origin::Environment(_)) => Scalar::Bare(text.trim()),
        ValueKind::String(text) => Scalar::Text(text),
        ValueKind::Boolean(flag) => Scalar::Flag(*flag),
        ValueKind::I64(number) => Scalar::Whole((*number).into()),
        ValueKind::U64(number) => Scalar::Whole((*number).into()),
        ValueKind::I128(number) => Scalar::Whole(*number),
        ValueKind::U128(number) => Scalar::Whole(i128::try_from(*number).unwrap_or(i128::MAX)),
        ValueKind::Float(number) => Scalar::Fraction(*number),
        ValueKind::Nil => return Err(Fault::new("has no value").hint("give it one, or remove the key")),
        ValueKind::Table(_) => return Err(Fault::new("expected a single value, found a table")),
        ValueKind::Array(_) => return Err(Fault::new("expected a single value, found a list")),
    })
}

/// The parts of a variable's text, with the origin of the whole.
fn split(text: &str, whole: &Value) -> Vec<Value> {
    let origin = whole.origin().map(ToOwned::to_owned);
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| Value::new(origin.as_ref(), part)).collect()
}

fn name_of(item: &Value) -> Option<&str> {
    let ValueKind::Table(entries) = &item.kind else {
        return None;
    };
    match &entries.get("name")?.kind {
        ValueKind::String(name) => words::name(Scalar::Text(name)).is_ok().then_some(name),
        _ => None,
    }
}
