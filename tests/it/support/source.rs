//! Rust source as the house rules see it: no comments, no texts, no test code; and the paths that it names.
//!
//! Not a parser. It knows as much of the language as the rules need, and `tidy` tests it on samples.

use std::collections::BTreeSet;

use super::tree;

/// A file of `src/`.
#[derive(Debug)]
pub(crate) struct Source {
    /// Its path from the root of the repository.
    pub(crate) file: String,
    tokens: Vec<String>,
}

/// The files of `src/` that are in the product: without `#[cfg(test)]` parts and the files that belong to them.
pub(crate) fn sources() -> Vec<Source> {
    let mut test_files = BTreeSet::new();
    let mut sources: Vec<Source> = tree::files("src", ".rs")
        .into_iter()
        .map(|file| {
            let (tokens, modules) = without_tests(tokens(&tree::text(&file)));
            let room = directory_of_children(&file);
            test_files.extend(modules.into_iter().map(|module| format!("{room}/{module}")));
            Source { file, tokens }
        })
        .collect();
    let is_test = |file: &str| {
        test_files
            .iter()
            .filter_map(|test| file.strip_prefix(test.as_str()))
            .any(|rest| rest == ".rs" || rest.starts_with('/'))
    };
    sources.retain(|source| !is_test(&source.file));
    sources
}

impl Source {
    /// A source that is not a file, to test the rules on.
    pub(crate) fn sample(file: &str, text: &str) -> Self {
        Self { file: file.to_owned(), tokens: without_tests(tokens(text)).0 }
    }

    /// The room: the first name below `src/`.
    pub(crate) fn room(&self) -> &str {
        let below = self.file.strip_prefix("src/").unwrap_or(&self.file);
        below.split('/').next().unwrap_or(below).trim_end_matches(".rs")
    }

    /// Whether the file is in this directory of `src/`, or is this file of it.
    pub(crate) fn is_in(&self, place: &str) -> bool {
        let below = self.file.strip_prefix("src/").unwrap_or(&self.file);
        below.strip_prefix(place).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '.']))
    }

    /// Whether this name stands anywhere in the code.
    pub(crate) fn mentions(&self, name: &str) -> bool {
        self.tokens.iter().any(|token| token == name)
    }

    /// Whether this macro is called.
    pub(crate) fn calls_macro(&self, name: &str) -> bool {
        self.tokens.windows(2).any(|pair| pair[0] == name && pair[1] == "!")
    }

    /// Whether the file declares this module.
    pub(crate) fn declares_module(&self, name: &str) -> bool {
        self.tokens.windows(2).any(|pair| pair[0] == "mod" && pair[1] == name)
    }

    /// Modules that are written in this file instead of in one of their own.
    pub(crate) fn inline_modules(&self) -> Vec<&str> {
        self.tokens
            .windows(3)
            .filter(|three| three[0] == "mod" && three[2] == "{")
            .map(|three| three[1].as_str())
            .collect()
    }

    /// Every path of two or more names, and every path that is imported, with groups written out: `use a::{b, c::d}`
    /// gives `a::b` and `a::c::d`. `super` and `self` at the start are replaced: such a path then begins with `crate`.
    pub(crate) fn paths(&self) -> BTreeSet<Vec<String>> {
        let mut found = BTreeSet::new();
        let mut at = 0;
        while at < self.tokens.len() {
            let begins = is_name(&self.tokens[at])
                || (self.tokens[at] == "::" && self.tokens.get(at + 1).is_some_and(|token| is_name(token)));
            if !begins {
                at += 1;
                continue;
            }
            let imported = at > 0 && self.tokens[at - 1] == "use";
            let mut paths = Vec::new();
            at = self.path(at, &[], &mut paths);
            paths.retain(|path| imported || path.len() > 1);
            found.extend(paths.into_iter().map(|path| self.absolute(path)));
        }
        found
    }

    /// Reads one path from `at`; what follows a prefix in braces is several. Gives the position behind it.
    fn path(&self, mut at: usize, prefix: &[String], found: &mut Vec<Vec<String>>) -> usize {
        let mut path = prefix.to_vec();
        while let Some(token) = self.tokens.get(at) {
            match token.as_str() {
                // A path that starts outside keeps its mark: `::redis` is the crate, whatever is in scope.
                "::" if path.is_empty() => path.push(String::new()),
                "::" => {}
                "{" if self.tokens[at - 1] == "::" => {
                    at += 1;
                    while self.tokens.get(at).is_some_and(|token| token != "}") {
                        let next = self.path(at, &path, found);
                        // Commas, stars and names after `as` are behind the path.
                        at = next.max(at + 1);
                    }
                    return at + 1;
                }
                name if is_name(name) && (path.len() == prefix.len() || self.tokens[at - 1] == "::") => {
                    path.push(name.to_owned());
                }
                _ => break,
            }
            at += 1;
        }
        if path.len() > prefix.len() {
            found.push(path);
        }
        at
    }

    fn absolute(&self, path: Vec<String>) -> Vec<String> {
        if path[0] != "super" && path[0] != "self" {
            return path;
        }
        let mut module = self.module();
        let mut rest = path.as_slice();
        while let Some((first, others)) = rest.split_first() {
            match first.as_str() {
                "self" => {}
                "super" => {
                    module.pop();
                }
                _ => break,
            }
            rest = others;
        }
        module.extend_from_slice(rest);
        module
    }

    /// The module that the file is, from `crate` on.
    fn module(&self) -> Vec<String> {
        let below = self.file.trim_start_matches("src/").trim_end_matches(".rs");
        let names = below.split('/').filter(|name| !["mod", "lib", "main"].contains(name));
        std::iter::once("crate").chain(names).map(str::to_owned).collect()
    }
}

/// Where the modules that this file declares have their files.
fn directory_of_children(file: &str) -> String {
    let stem = file.trim_end_matches(".rs");
    let parent = ["/mod", "/lib", "/main"].iter().find_map(|name| stem.strip_suffix(name));
    parent.unwrap_or(stem).to_owned()
}

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
        && !["use", "pub", "as", "mod", "in", "fn", "impl", "for", "let", "mut", "dyn", "where", "return"]
            .contains(&token)
}

/// Names, `::`, and single characters. Comments are gone, a text is `""`, a character `''`.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (token, length) = match first {
            _ if rest.starts_with("//") => (None, rest.find('\n').unwrap_or(rest.len())),
            _ if rest.starts_with("/*") => (None, comment(rest)),
            _ if raw_text(rest).is_some() => (Some("\"\""), raw_text(rest).unwrap_or(1)),
            'b' if rest[1..].starts_with('"') => (Some("\"\""), 1 + quoted(&rest[1..], '"')),
            'b' if rest[1..].starts_with('\'') => (Some("''"), 1 + quoted(&rest[1..], '\'')),
            '"' => (Some("\"\""), quoted(rest, '"')),
            '\'' if is_character(rest) => (Some("''"), quoted(rest, '\'')),
            _ if first.is_alphanumeric() || first == '_' => {
                let length = rest.find(|next: char| !next.is_alphanumeric() && next != '_');
                (Some(""), length.unwrap_or(rest.len()))
            }
            _ if rest.starts_with("::") => (Some(""), 2),
            _ if first.is_whitespace() => (None, first.len_utf8()),
            _ => (Some(""), first.len_utf8()),
        };
        match token {
            Some("") => tokens.push(rest[..length].to_owned()),
            Some(token) => tokens.push(token.to_owned()),
            None => {}
        }
        rest = &rest[length..];
    }
    tokens
}

/// The length of a block comment, which may hold others.
fn comment(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
        } else {
            at += 1;
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// The length of a text such as `r#"..."#`, if there is one at the start.
fn raw_text(text: &str) -> Option<usize> {
    let marks = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let hashes = marks.len() - marks.trim_start_matches('#').len();
    let body = marks[hashes..].strip_prefix('"')?;
    let ending = format!("\"{}", "#".repeat(hashes));
    Some(text.len() - body.len() + body.find(&ending)? + ending.len())
}

/// The length of a text or a character with its quotes.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if letter == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Whether a quote begins a character and not a lifetime.
fn is_character(text: &str) -> bool {
    let mut letters = text.chars().skip(1);
    match (letters.next(), letters.next()) {
        (Some('\\'), _) => true,
        (Some(_), Some(end)) => end == '\'',
        _ => false,
    }
}

/// The tokens without what is only for tests, and the names of test modules in files of their own.
fn without_tests(tokens: Vec<String>) -> (Vec<String>, Vec<String>) {
    let mark = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut kept, mut modules) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < tokens.len() {
        if !tokens[at..].iter().take(mark.len()).eq(mark) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        let begin = at + mark.len();
        at = end_of_item(&tokens, begin);
        if let Some(module) = tokens[begin..at].windows(3).find(|three| three[0] == "mod" && three[2] == ";")
        {
            modules.push(module[1].clone());
        }
    }
    (kept, modules)
}

/// The position behind the item that begins here: behind its block, or its semicolon or comma.
fn end_of_item(tokens: &[String], begin: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(begin) {
        match token.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => {
                depth = depth.saturating_sub(1);
                if depth == 0 && token == "}" {
                    return at + 1;
                }
            }
            ";" | "," if depth == 0 => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}
