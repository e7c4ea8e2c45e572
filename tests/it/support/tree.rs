//! The files of this repository, for tests that hold one part of it to another.

use std::path::{Path, PathBuf};

/// A file, by its path from the root of the repository.
pub(crate) fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

/// The text of a file.
#[track_caller]
pub(crate) fn text(relative: &str) -> String {
    std::fs::read_to_string(path(relative)).unwrap_or_else(|error| panic!("{relative}: {error}"))
}

/// All files below a directory whose name ends so, by their paths from the root of the repository, sorted.
#[track_caller]
pub(crate) fn files(below: &str, ending: &str) -> Vec<String> {
    let mut found = Vec::new();
    visit(below, &mut |relative, is_directory| {
        if !is_directory && relative.ends_with(ending) {
            found.push(relative.to_owned());
        }
    });
    assert!(!found.is_empty(), "no *{ending} below {below}/");
    found
}

/// All directories below a directory, itself included.
pub(crate) fn directories(below: &str) -> Vec<String> {
    let mut found = vec![below.to_owned()];
    visit(below, &mut |relative, is_directory| {
        if is_directory {
            found.push(relative.to_owned());
        }
    });
    found
}

fn visit(directory: &str, note: &mut dyn FnMut(&str, bool)) {
    let entries = std::fs::read_dir(path(directory)).unwrap_or_else(|error| panic!("{directory}/: {error}"));
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.file_type().unwrap().is_dir()))
        .collect();
    names.sort();
    for (name, is_directory) in names {
        let relative = format!("{directory}/{name}");
        note(&relative, is_directory);
        if is_directory {
            visit(&relative, note);
        }
    }
}
