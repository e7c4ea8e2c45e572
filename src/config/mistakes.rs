//! What is wrong with a configuration, said so that it can be put right: where, which key, what, and what to write.
//!
//! No mistake repeats the value of a secret. Whoever adds a check must keep it so.

use std::cell::RefCell;
use std::fmt;
use std::path::PathBuf;

/// So many words are listed when none of them is near.
const LISTED_MAX: usize = 12;

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A file embedded in the program.
    BuiltIn(&'static str),
    /// A file of the operator.
    File(PathBuf),
    /// An environment variable, by name.
    Environment(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn(name) => write!(f, "built-in {name}"),
            Self::File(path) => path.display().fmt(f),
            Self::Environment(name) => write!(f, "environment: {}", name.escape_debug()),
        }
    }
}

/// A key and the file or variable that holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) origin: Origin,
    /// The path of the key, for example `plans.free.limits`. Empty for the file as a whole.
    pub(super) key: String,
}

impl Place {
    /// The key `name` inside this one. What could break a line or move a cursor is escaped.
    pub(super) fn inside(&self, name: &str) -> Self {
        let name = name.escape_debug();
        let key = match self.key.as_str() {
            "" => name.to_string(),
            outer => format!("{outer}.{name}"),
        };
        Self { origin: self.origin.clone(), key }
    }
}

/// What is wrong with one value, before it is known where the value stands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    problem: String,
    hint: Option<String>,
}

impl Fault {
    pub(super) fn new(problem: impl Into<String>) -> Self {
        Self { problem: problem.into(), hint: None }
    }

    /// Adds what to do about it.
    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the nearest of `words` as a suggestion or, when none is near, all of them.
    pub(super) fn meant<'a>(self, written: &str, words: impl IntoIterator<Item = &'a str>) -> Self {
        let words: Vec<&str> = words.into_iter().collect();
        match nearest(written, &words) {
            Some(word) => self.hint(format!("did you mean `{word}`?")),
            None if words.is_empty() => self,
            None if words.len() > LISTED_MAX => {
                self.hint(format!("known here: {} and more", words[..LISTED_MAX].join(", ")))
            }
            None => self.hint(format!("known here: {}", words.join(", "))),
        }
    }

    /// This fault at `place`.
    pub(super) fn at(self, place: &Place) -> Mistake {
        Mistake { place: place.clone(), line: None, fault: self }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.problem)?;
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

/// The word that `written` probably stands for: at most one slip in every three letters of the longer one.
pub(super) fn nearest<'a>(written: &str, words: &[&'a str]) -> Option<&'a str> {
    let slips = |word: &str| strsim::osa_distance(&written.to_lowercase(), &word.to_lowercase());
    let near = words.iter().map(|word| (slips(word), *word)).min()?;
    (near.0 * 3 <= written.len().max(near.1.len())).then_some(near.1)
}

/// One thing that is wrong.
#[derive(Debug, PartialEq, Eq)]
pub struct Mistake {
    place: Place,
    line: Option<usize>,
    fault: Fault,
}

impl Mistake {
    /// Adds the line, which is known only while a file is parsed.
    pub(super) fn on_line(mut self, line: Option<usize>) -> Self {
        self.line = line;
        self
    }

    /// The file or variable that holds it.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.place.origin
    }

    /// The line, where it is known.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.line
    }

    /// What is wrong and what to do about it, without the place.
    #[must_use]
    pub fn message(&self) -> String {
        self.fault.to_string()
    }

    /// The path of the key, for example `plans.free.limits.minute.per`; empty for a file as a whole.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.place.key
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.place.origin)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        // The name of a variable already says the key.
        if !self.place.key.is_empty() && !matches!(self.place.origin, Origin::Environment(_)) {
            write!(f, ": {}", self.place.key)?;
        }
        write!(f, ": {}", self.fault)
    }
}

/// Everything that is wrong with a configuration, at least one thing. Printed one a line, file by file.
#[derive(Debug, PartialEq, Eq)]
pub struct Mistakes(Vec<Mistake>);

impl Mistakes {
    /// All of them, in the order of the files.
    pub fn iter(&self) -> impl Iterator<Item = &Mistake> {
        self.0.iter()
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, mistake) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}{mistake}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Mistakes {}

/// Collects mistakes while reading goes on. Shared by all who read, so that nobody has to stop at the first one.
#[derive(Debug, Default)]
pub(super) struct Notes(RefCell<Vec<Mistake>>);

impl Notes {
    pub(super) fn add(&self, mistake: Mistake) {
        self.0.borrow_mut().push(mistake);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// The mistakes, sorted by origin; those of one origin stay in the order in which they were found.
    pub(super) fn into_mistakes(self) -> Mistakes {
        let mut mistakes = self.0.into_inner();
        mistakes.sort_by(|one, other| one.place.origin.cmp(&other.place.origin));
        Mistakes(mistakes)
    }
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn a_suggestion_is_near_or_absent() {
        let words = ["limit", "limits", "per", "burst", "on_failure"];
        assert_eq!(nearest("limt", &words), Some("limit"));
        assert_eq!(nearest("Limits", &words), Some("limits"));
        assert_eq!(nearest("on_falure", &words), Some("on_failure"));
        assert_eq!(nearest("pre", &words), Some("per"));
        assert_eq!(nearest("limt", &["limits", "routes"]), Some("limits"));
        assert_eq!(nearest("window", &words), None);
        assert_eq!(nearest("", &words), None);
        assert_eq!(nearest("limit", &[]), None);
    }
}
