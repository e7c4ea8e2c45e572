//! What the operator wrote: read, layered, checked, and made into values that work.
//!
//! Three steps: `sources` finds the files and lays them over each other and over the built-in defaults (`config/`);
//! `raw` is what is written, with types; `resolve` is the only validation. What comes out cannot be wrong, and nobody
//! checks it again. What goes wrong is collected, never thrown at the first sight: [`Mistakes`] lists all of it.
//!
//! [`read`] also says what the files were like, so that a change of them can be seen; [`needs_restart`] says which changes a
//! running process cannot take over.
//!
//! Deliberately not here: what the values do, and when files are read again. Only this room reads the environment.

mod changes;
mod environment;
mod files;
mod format;
mod mistakes;
mod raw;
mod reader;
mod resolve;
mod settings;
mod sources;
#[cfg(test)]
mod tests;
mod units;
mod words;

use std::path::PathBuf;

pub use changes::needs_restart;
pub use files::{Fingerprint, Version};
pub use mistakes::{Mistake, Mistakes, Origin};
pub use settings::{
    AdminSettings, HeaderStyle, LogSettings, RedisSettings, ServerSettings, Settings, StoreKind,
    StoreSettings,
};
pub use sources::{Purpose, Sources};

use crate::plan::PolicyParts;

/// A configuration without mistakes.
#[derive(Debug)]
pub struct Loaded {
    /// The settings of the process.
    pub settings: Settings,
    /// What the policy is made of.
    pub policy: PolicyParts,
    /// The files that were read, in the order in which they were laid over each other.
    pub files: Vec<PathBuf>,
    /// What it was made of.
    pub provenance: Provenance,
}

/// What a configuration was made of.
#[derive(Debug)]
pub struct Provenance {
    /// Where it was looked for.
    pub sources: Sources,
    /// What was found there, in a word.
    pub version: Version,
    /// What the files were like.
    pub fingerprint: Fingerprint,
}

/// Reads `sources`, checks everything, and gives values that need no further check.
///
/// # Errors
/// All mistakes at once, each with its file or variable, its key, and what to do about it.
pub fn load(sources: &Sources) -> Result<Loaded, Mistakes> {
    read(sources).0
}

/// As [`load`], and says what the files were like, also where they hold mistakes.
pub fn read(sources: &Sources) -> (Result<Loaded, Mistakes>, Fingerprint) {
    let notes = mistakes::Notes::default();
    let files = files::Files::default();
    let layers = sources::Layers::read(sources, &files, &notes);
    let reading = reader::Reading { origins: &layers.origins, notes: &notes, incomplete: layers.incomplete };
    let context = resolve::Context {
        notes: &notes,
        files: &files,
        purpose: sources.purpose,
        incomplete: layers.incomplete,
        handed_over: sources.handed_over(),
    };
    let raw = reading.root(&layers.root).map(raw::Raw::read);
    let resolved = raw.and_then(|raw| resolve::resolve(&raw, &context));
    let (version, fingerprint) = files.into_parts();
    let loaded = match resolved {
        Some((settings, policy)) if notes.is_empty() => {
            let provenance =
                Provenance { sources: sources.clone(), version, fingerprint: fingerprint.clone() };
            Ok(Loaded { settings, policy, files: layers.files, provenance })
        }
        _ => Err(notes.into_mistakes()),
    };
    (loaded, fingerprint)
}
