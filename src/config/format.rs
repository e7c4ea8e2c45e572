//! From the text of a file to a tree of values. Every format refuses a key that is written twice.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use config::{FileFormat, Format as _, Value, ValueKind};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::mistakes::Fault;

/// The most levels of YAML blocks.
const YAML_LEVELS_MAX: usize = 128;

/// How a file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Toml,
    Yaml,
    Json,
}

/// Why a text is refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) fault: Fault,
    /// Where the parser stopped, counted from 1, when it says so.
    pub(super) line: Option<usize>,
}

impl Format {
    /// The format that the ending of `path` names.
    pub(super) fn of(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "toml" => Some(Self::Toml),
            "yaml" | "yml" => Some(Self::Yaml),
            "json" => Some(Self::Json),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Toml => "TOML",
            Self::Yaml => "YAML",
            Self::Json => "JSON",
        }
    }

    /// The tree of `text`, each value marked with `mark`.
    pub(super) fn parse(self, mark: &String, text: &str) -> Result<Value, Refused> {
        let entries = match self {
            Self::Toml => FileFormat::Toml.parse(Some(mark), text),
            Self::Yaml => {
                tame_yaml(text).map_err(Into::into).and_then(|()| FileFormat::Yaml.parse(Some(mark), text))
            }
            Self::Json => serde_json::from_str::<KeysOnce>(text)
                .map_err(Into::into)
                .and_then(|KeysOnce| FileFormat::Json.parse(Some(mark), text)),
        };
        match entries {
            Ok(entries) => Ok(Value::new(Some(mark), ValueKind::Table(entries))),
            Err(error) => Err(self.refused(error.as_ref(), text)),
        }
    }

    fn refused(self, error: &(dyn std::error::Error + 'static), text: &str) -> Refused {
        if error.is::<Box<config::ConfigError>>() || error.is::<config::ConfigError>() {
            // The parser was content, but what it found is a single value, which may be a secret.
            return Refused { fault: Fault::new("holds no table of settings"), line: None };
        }
        if error.is::<std::num::ParseIntError>() {
            return Refused {
                fault: Fault::new("holds a whole number that is too large"),
                line: line_of_large_number(text),
            };
        }
        let said = error.to_string();
        Refused {
            fault: Fault::new(format!("is not {}: {}", self.name(), reason(&said))),
            line: line_number(&said),
        }
    }
}

/// Refuses what would exhaust memory or the stack: aliases, of which a few lines make a tree without end, and levels upon
/// levels of blocks. The parser itself only bounds brackets. A line that looks like either is refused as well; quotes
/// are not looked at.
fn tame_yaml(text: &str) -> Result<(), String> {
    let lines = text.lines().enumerate();
    for (index, line) in lines.filter(|(_, line)| !line.trim_start().starts_with('#')) {
        if holds_alias(line) {
            return Err(format!("line {}\naliases (*name) are not read", index + 1));
        }
        if levels(line) > YAML_LEVELS_MAX {
            return Err(format!("line {}\nis nested too deeply", index + 1));
        }
    }
    Ok(())
}

/// Whether a `*` stands where an alias may begin.
fn holds_alias(line: &str) -> bool {
    let mut before = ' ';
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        let begins = letter == '*' && (before.is_whitespace() || "[{,:-?".contains(before));
        if begins && letters.peek().is_some_and(|next| !next.is_whitespace()) {
            return true;
        }
        before = letter;
    }
    false
}

/// At least as many as the blocks that are open behind a line: its indentation, and every `- ` and `? `.
fn levels(line: &str) -> usize {
    let indentation = line.len() - line.trim_start().len();
    let opens = |pair: &[u8]| matches!(pair, [b'-' | b'?', b' ' | b'\t']);
    indentation + line.as_bytes().windows(2).filter(|pair| opens(pair)).count()
}

/// The last line of what a parser says, without the place: what it says before may quote the text, and with it a secret.
fn reason(said: &str) -> String {
    if said.starts_with("Parsing ") {
        return "a number cannot be read".to_owned();
    }
    let last = said.lines().last().unwrap_or_default();
    let plain = [" at byte ", " at line "]
        .iter()
        .find_map(|place| last.split_once(place))
        .map_or(last, |(before, _)| before);
    let yaml_duplicate =
        plain.strip_prefix("String(").and_then(|rest| rest.strip_suffix("): duplicated key in mapping"));
    yaml_duplicate.map_or_else(|| plain.to_owned(), |key| format!("duplicate key {key}"))
}

/// The number behind the first "line " of what a parser says.
fn line_number(said: &str) -> Option<usize> {
    let (_, behind) = said.split_once("line ")?;
    let digits = behind.split(|letter: char| !letter.is_ascii_digit()).next()?;
    digits.parse().ok()
}

/// The first line with more digits in a row, outside quotes, than a TOML integer can hold.
fn line_of_large_number(text: &str) -> Option<usize> {
    let too_large = |word: &str| word.len() >= 19 && word.replace('_', "").parse::<i64>().is_err();
    let holds_one = |line: &str| {
        let unquoted = line.split('"').step_by(2);
        let mut words = unquoted
            .flat_map(|part| part.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_'));
        words.any(|word| word.starts_with(|letter: char| letter.is_ascii_digit()) && too_large(word))
    };
    text.lines().position(holds_one).map(|index| index + 1)
}

/// Reads any JSON, keeps nothing, and fails at the first key that is written twice: the parser itself would take the last.
struct KeysOnce;

impl<'de> Deserialize<'de> for KeysOnce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for KeysOnce {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format!("duplicate key \"{key}\"")));
            }
            keys.insert(key);
            map.next_value::<Self>()?;
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        while list.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }
}
