//! The files of a configuration: reading them, the version that they make, and whether they have changed since.

use std::cell::RefCell;
use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::format::Format;
use crate::file;

/// The largest file that is read, in bytes: some hundred thousand keys.
const FILE_MAX: u64 = 64 << 20;

/// Which text a configuration was made from: a hash over its files and those that they name, in the order in which they
/// were read. Shown by its first twelve digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Version([u8; 32]);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().take(6).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Version({self})")
    }
}

/// What the files of a configuration were like when they were read.
///
/// Enough to see that one was written, replaced, removed or added, in whatever way. Symbolic links are followed, so that a
/// link to another file counts as another file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint(Vec<(PathBuf, Stamp)>);

impl Fingerprint {
    /// What the same files are like now.
    #[must_use]
    pub fn again(&self) -> Self {
        let looked = self.0.iter().map(|(path, before)| {
            let now = match before {
                Stamp::Names(_) => Stamp::of_directory(path),
                Stamp::Absent | Stamp::File { .. } => Stamp::of_file(path),
            };
            (path.clone(), now)
        });
        Self(looked.collect())
    }
}

/// What one file, or one directory of files, was like.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stamp {
    /// It is not there, or nobody may look.
    Absent,
    File {
        device: u64,
        inode: u64,
        size: u64,
        /// Seconds and nanoseconds. The time of the content can be set back by whoever writes it, the other one cannot.
        written: (i64, i64),
        changed: (i64, i64),
    },
    /// The configuration files in a directory.
    Names(Vec<PathBuf>),
}

impl Stamp {
    fn of(file: &std::fs::Metadata) -> Self {
        Self::File {
            device: file.dev(),
            inode: file.ino(),
            size: file.size(),
            written: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }

    fn of_file(path: &Path) -> Self {
        path.metadata().map_or(Self::Absent, |file| Self::of(&file))
    }

    fn of_directory(path: &Path) -> Self {
        names_in(path).map_or(Self::Absent, Self::Names)
    }
}

/// Reads files, and remembers which, what they held and what they were like.
#[derive(Default)]
pub(super) struct Files(RefCell<Seen>);

#[derive(Default)]
struct Seen {
    hash: Sha256,
    stamps: Vec<(PathBuf, Stamp)>,
}

impl Files {
    /// The text of a file that is not larger than any that is meant.
    pub(super) fn read(&self, path: &Path) -> Result<String, String> {
        match read(path) {
            Ok((stamp, text)) => {
                self.see(path, stamp);
                self.text(&text);
                Ok(text)
            }
            Err(problem) => {
                self.see(path, Stamp::of_file(path));
                Err(problem)
            }
        }
    }

    /// The configuration files of a directory, sorted by name.
    pub(super) fn list(&self, directory: &Path) -> std::io::Result<Vec<PathBuf>> {
        let names = names_in(directory);
        self.see(directory, names.as_ref().map_or(Stamp::Absent, |names| Stamp::Names(names.clone())));
        names
    }

    /// A file that is of no use, but might become so when it changes.
    pub(super) fn pass_over(&self, path: &Path) {
        self.see(path, Stamp::of_file(path));
    }

    /// A text that is part of the version.
    pub(super) fn text(&self, text: &str) {
        let hash = &mut self.0.borrow_mut().hash;
        // With its length, so that two files are not one in two parts.
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text.as_bytes());
    }

    fn see(&self, path: &Path, stamp: Stamp) {
        self.0.borrow_mut().stamps.push((path.to_owned(), stamp));
    }

    /// Which version that was, and what the files were like.
    pub(super) fn into_parts(self) -> (Version, Fingerprint) {
        let Seen { hash, stamps } = self.0.into_inner();
        (Version(hash.finalize().into()), Fingerprint(stamps))
    }
}

/// The text of a file, and what the file was like before it was read: what is written later is another file.
fn read(path: &Path) -> Result<(Stamp, String), String> {
    let (metadata, bytes) = file::read(path, FILE_MAX).map_err(|error| error.to_string())?;
    let text = String::from_utf8(bytes).map_err(|_| "stream did not contain valid UTF-8".to_owned())?;
    Ok((Stamp::of(&metadata), text))
}

/// The configuration files of a directory, sorted by name. Not those of its directories, and no hidden ones, which
/// editors leave behind.
fn names_in(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        let path = entry.path();
        if !hidden && Format::of(&path).is_some() && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
