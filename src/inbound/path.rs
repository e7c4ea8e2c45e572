//! One canonical path for route, counter and upstream.
//!
//! Gateways are bypassed where two parts of them read one path in two ways: the rule sees `/public/%2e%2e/admin`, the
//! backend serves `/admin`. So a path is brought into its one normal form here, once, and everything behind uses that
//! string. What could be read in two ways is refused, not repaired: dot segments, empty segments, backslashes, encoded
//! slashes, control bytes, bytes that RFC 3986 does not allow in a path.
//!
//! The normal form is that of RFC 3986 section 6.2.2: escapes of unreserved characters are decoded, the hexadecimal digits
//! of all others are upper-case. The URL library behind the proxy leaves such a path byte for byte as it is; a test here
//! proves it with random paths.
//!
//! Deliberately not here: letter case is kept, and path parameters (`;x=1`) are bytes of their segment like any other. A
//! backend that strips them needs a route pattern that covers both spellings.

use std::borrow::Cow;

/// The longest path, in bytes.
pub const MAX_PATH: usize = 8 * 1024;

/// What the operator allows in a path.
#[derive(Debug, Clone, Copy, Default)]
pub struct PathRules {
    /// Let `%2F` and `%5C` through, as bytes of a segment. Off by default: backends disagree on what they mean.
    pub encoded_slashes: bool,
}

/// A path in its one normal form. Starts with `/`, is ASCII, and at most [`MAX_PATH`] bytes long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CanonicalPath<'a>(Cow<'a, str>);

/// Why a path or a query is refused. The sentences never repeat what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// Does not start with a slash.
    #[error("the path must start with \"/\"")]
    NotAbsolute,
    /// Longer than [`MAX_PATH`].
    #[error("the path is longer than {MAX_PATH} bytes")]
    TooLong,
    /// `//` somewhere.
    #[error("the path has an empty segment, as in \"//\"")]
    EmptySegment,
    /// A segment that is `.` or `..`, in any spelling, with or without path parameters behind it.
    #[error("the path has a dot segment, as in \"/./\" or \"/../\"")]
    DotSegment,
    /// A raw backslash, which some servers take for a slash.
    #[error("the path has a backslash")]
    Backslash,
    /// `%2F` or `%5C`, and the rules do not let them through.
    #[error("the path has an encoded slash or backslash (%2F or %5C)")]
    EncodedSlash,
    /// A control byte, raw or encoded.
    #[error("the request target has a control byte")]
    ControlByte,
    /// A byte that may only stand there percent-encoded.
    #[error("the request target has a byte that must be percent-encoded there")]
    IllegalByte,
    /// A `%` without two hexadecimal digits.
    #[error("the path has a \"%\" that is not followed by two hexadecimal digits")]
    BadEscape,
}

impl<'a> CanonicalPath<'a> {
    /// The normal form of `raw`, a request target's path without query. Borrows unless something has to change.
    ///
    /// # Errors
    /// When the path could mean different things to different servers; see [`PathError`].
    pub fn parse(raw: &'a str, rules: PathRules) -> Result<Self, PathError> {
        if !raw.starts_with('/') {
            return Err(PathError::NotAbsolute);
        }
        if raw.len() > MAX_PATH {
            return Err(PathError::TooLong);
        }
        let bytes = raw.as_bytes();
        let mut normal = Rewriter::new(raw);
        let mut segment = Segment::Empty;
        let mut at = 1;
        while let Some(&byte) = bytes.get(at) {
            if byte == b'%' {
                let escape = Escape::read(bytes, at)?;
                segment = segment.after_escape(escape.byte, rules)?;
                normal.rewrite(at, escape);
                at += Escape::LENGTH;
            } else {
                segment = segment.after_raw(byte)?;
                at += 1;
            }
        }
        segment.end()?;
        Ok(Self(normal.finish()))
    }

    /// The canonical bytes: what is matched and what is sent upstream.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether a query can be sent on byte for byte: everything behind the first `?` of a request target.
///
/// A query is opaque: order, repetition, `%E9`, `;`, `[`, `??`, `&&=` and malformed escapes all stay as they are. Only
/// what RFC 3986 forbids *and* the URL library would rewrite is refused. One legal byte does change on the way: the
/// library writes `'` as `%27`, which every server decodes to the same text.
///
/// # Errors
/// [`PathError::ControlByte`] or [`PathError::IllegalByte`].
pub fn check_query(query: &str) -> Result<(), PathError> {
    query.bytes().try_for_each(|byte| match byte {
        _ if byte.is_ascii_control() => Err(PathError::ControlByte),
        b' ' | b'"' | b'<' | b'>' | b'#' | 0x80.. => Err(PathError::IllegalByte),
        _ => Ok(()),
    })
}

/// The bytes that a canonical segment stands for.
///
/// Two segments that a backend would read alike compare equal in this form: `%40me` and `@me`. Allocates only when there
/// is an escape.
pub(crate) fn decode(segment: &str) -> Cow<'_, [u8]> {
    let bytes = segment.as_bytes();
    let Some(first) = bytes.iter().position(|&byte| byte == b'%') else {
        return Cow::Borrowed(bytes);
    };
    let mut decoded = bytes[..first].to_vec();
    let mut at = first;
    while let Some(&byte) = bytes.get(at) {
        match Escape::read(bytes, at) {
            Ok(escape) => {
                decoded.push(escape.byte);
                at += Escape::LENGTH;
            }
            Err(_) => {
                decoded.push(byte);
                at += 1;
            }
        }
    }
    Cow::Owned(decoded)
}

/// What is known of the segment being read: enough to see a dot segment at its end without looking back.
#[derive(Debug, Clone, Copy)]
enum Segment {
    /// Nothing of it yet.
    Empty,
    /// Only this many dots, behind a slash (0: that slash was an encoded one, so the segment is not empty).
    Dots(u8),
    /// Something that cannot be a dot segment any more.
    Name,
}

impl Segment {
    fn after_raw(self, byte: u8) -> Result<Self, PathError> {
        match byte {
            b'/' => self.after_slash(),
            b'.' => Ok(self.after_dot()),
            // Servers that know path parameters cut them off first: `..;x` is `..` to them.
            b';' => self.end().map(|()| Self::Name),
            b'\\' => Err(PathError::Backslash),
            _ if byte.is_ascii_control() => Err(PathError::ControlByte),
            _ if is_unreserved(byte) || is_reserved_in_path(byte) => Ok(Self::Name),
            _ => Err(PathError::IllegalByte),
        }
    }

    fn after_escape(self, byte: u8, rules: PathRules) -> Result<Self, PathError> {
        match byte {
            b'/' | b'\\' if !rules.encoded_slashes => Err(PathError::EncodedSlash),
            // A backend that decodes before it resolves must not find `..` between two of them.
            b'/' | b'\\' => self.end().map(|()| Self::Dots(0)),
            b'.' => Ok(self.after_dot()),
            b';' => self.end().map(|()| Self::Name),
            _ if byte.is_ascii_control() => Err(PathError::ControlByte),
            _ => Ok(Self::Name),
        }
    }

    fn after_slash(self) -> Result<Self, PathError> {
        if matches!(self, Self::Empty) {
            return Err(PathError::EmptySegment);
        }
        self.end().map(|()| Self::Empty)
    }

    fn after_dot(self) -> Self {
        match self {
            Self::Empty | Self::Dots(0) => Self::Dots(1),
            Self::Dots(1) => Self::Dots(2),
            // Three dots and more are a name like any other.
            Self::Dots(_) | Self::Name => Self::Name,
        }
    }

    fn end(self) -> Result<(), PathError> {
        match self {
            Self::Dots(1 | 2) => Err(PathError::DotSegment),
            Self::Empty | Self::Dots(_) | Self::Name => Ok(()),
        }
    }
}

/// One `%XX`.
#[derive(Debug, Clone, Copy)]
struct Escape {
    /// The byte it stands for.
    byte: u8,
    /// Its two digits, as written.
    digits: [u8; 2],
}

impl Escape {
    /// Bytes of `%XX`.
    const LENGTH: usize = 3;

    /// The escape that begins at `at`.
    fn read(bytes: &[u8], at: usize) -> Result<Self, PathError> {
        let Some(&[b'%', high, low]) = bytes.get(at..at + Self::LENGTH) else {
            return Err(PathError::BadEscape);
        };
        let (Some(first), Some(second)) = (digit(high), digit(low)) else {
            return Err(PathError::BadEscape);
        };
        Ok(Self { byte: first << 4 | second, digits: [high, low] })
    }
}

fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

/// Copies the path only from the first change on, and not at all when there is none.
struct Rewriter<'a> {
    raw: &'a str,
    /// How much of `raw` is in `changed` already.
    copied: usize,
    changed: String,
}

impl<'a> Rewriter<'a> {
    fn new(raw: &'a str) -> Self {
        Self { raw, copied: 0, changed: String::new() }
    }

    /// Puts the escape at `at` into its normal form. Everything in front of it is known to be ASCII.
    fn rewrite(&mut self, at: usize, escape: Escape) {
        let upper = escape.digits.map(|digit| digit.to_ascii_uppercase());
        if is_unreserved(escape.byte) {
            self.copy_up_to(at);
            self.changed.push(char::from(escape.byte));
        } else if upper != escape.digits {
            self.copy_up_to(at);
            self.changed.push('%');
            self.changed.extend(upper.map(char::from));
        } else {
            return;
        }
        self.copied = at + Escape::LENGTH;
    }

    fn copy_up_to(&mut self, at: usize) {
        self.changed.push_str(&self.raw[self.copied..at]);
    }

    fn finish(mut self) -> Cow<'a, str> {
        if self.copied == 0 {
            return Cow::Borrowed(self.raw);
        }
        self.copy_up_to(self.raw.len());
        Cow::Owned(self.changed)
    }
}

/// RFC 3986 section 2.3: the same with and without escape.
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// What else RFC 3986 section 3.3 allows raw in a segment: sub-delims, `:` and `@`.
fn is_reserved_in_path(byte: u8) -> bool {
    matches!(byte, b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b';' | b'=' | b':' | b'@')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STRICT: PathRules = PathRules { encoded_slashes: false };
    const SLASHES: PathRules = PathRules { encoded_slashes: true };

    #[track_caller]
    fn check(raw: &str, expected: Result<&str, PathError>) {
        check_with(STRICT, raw, expected);
    }

    #[track_caller]
    fn check_with(rules: PathRules, raw: &str, expected: Result<&str, PathError>) {
        let parsed = CanonicalPath::parse(raw, rules);
        assert_eq!(parsed.as_ref().map(CanonicalPath::as_str).map_err(|&error| error), expected, "{raw:?}");
        if let Ok(CanonicalPath(text)) = parsed {
            let borrowed = matches!(text, Cow::Borrowed(_));
            assert_eq!(borrowed, text == raw, "{raw:?} is copied if and only if it changes");
        }
    }

    #[test]
    fn ordinary_paths_pass_untouched() {
        for path in [
            "/",
            "/v1/search",
            "/v1/search/",
            "/V1/Search",
            "/-._~!$&'()*+,;=:@",
            "/a;x=1/b;y",
            "/...",
            "/.well-known/..name/name../a.b/.../...;x",
            "/x%20y/%E9%FF%25f",
        ] {
            check(path, Ok(path));
        }
    }

    #[test]
    fn escapes_take_their_normal_form() {
        check("/%41%7a%30%2D%5f%7E", Ok("/Az0-_~"));
        check("/caf%c3%a9", Ok("/caf%C3%A9"));
        check("/a%2eb", Ok("/a.b"));
        // Decoded once: what comes out is never read again.
        check("/%2541/%252e%252e/x", Ok("/%2541/%252e%252e/x"));
        check("/%c3%41%c3/tail", Ok("/%C3A%C3/tail"));
        // FWD-6, with the slash left out.
        check("/v1/ab%3Fc%2Cd%40e%25f/%7Eu/x%20y/@:!$", Ok("/v1/ab%3Fc%2Cd%40e%25f/~u/x%20y/@:!$"));
    }

    /// PATH-1: each spelling of a path would have had a budget of its own.
    #[test]
    fn empty_segments_are_refused() {
        for path in ["//", "//v1/search", "/v1//search", "/v1/search//", "/a///b"] {
            check(path, Err(PathError::EmptySegment));
        }
    }

    /// PATH-2: judged as `/public`, served as `/admin`.
    #[test]
    fn dot_segments_are_refused_in_every_spelling() {
        for path in [
            "/.",
            "/..",
            "/./",
            "/../admin/x",
            "/v1/./search",
            "/public/../admin/x",
            "/public/%2e%2e/admin/x",
            "/public/.%2E/admin/x",
            "/public/%2E./admin/x",
            "/public/%2e/x",
            "/public/..;/admin",
            "/public/..;x=1/admin",
            "/public/%2e%2e%3B/admin",
            "/public/.;x",
            "/public/..",
            "/public/%2E%2E",
        ] {
            check(path, Err(PathError::DotSegment));
        }
    }

    #[test]
    fn slashes_in_disguise_are_refused_unless_allowed() {
        for path in ["/a%2Fb", "/a%2fb", "/a%5Cb", "/a%5cb", "/%2f", "/..%2Fadmin"] {
            check(path, Err(PathError::EncodedSlash));
        }
        check("/a\\b", Err(PathError::Backslash));
        check_with(SLASHES, "/a\\b", Err(PathError::Backslash));
        check_with(SLASHES, "/a%2fb%5c", Ok("/a%2Fb%5C"));
        check_with(SLASHES, "/fetch/http:%2F%2Fhost%2F", Ok("/fetch/http:%2F%2Fhost%2F"));
        check_with(SLASHES, "/%2F/x", Ok("/%2F/x"));
        for path in
            ["/public/..%2Fadmin", "/public%2F..%2Fadmin", "/public%2f%2e%2e/x", "/a%5c..", "/a%2F./b"]
        {
            check_with(SLASHES, path, Err(PathError::DotSegment));
        }
    }

    #[test]
    fn control_bytes_are_refused_raw_and_encoded() {
        for byte in (0..0x20).chain([0x7f]) {
            check(&format!("/a{}b", char::from(byte)), Err(PathError::ControlByte));
            check(&format!("/a%{byte:02x}b"), Err(PathError::ControlByte));
            check(&format!("/a%{byte:02X}b"), Err(PathError::ControlByte));
        }
    }

    #[test]
    fn bytes_that_must_be_encoded_are_refused_raw() {
        for byte in " \"<>^`{|}#?[]".chars() {
            check(&format!("/v1/{byte}x"), Err(PathError::IllegalByte));
        }
        check("/café", Err(PathError::IllegalByte));
    }

    #[test]
    fn malformed_escapes_are_refused() {
        for path in ["/%", "/%4", "/%zz", "/%4g", "/%g4", "/a%/b", "/%%41", "/%é", "/%+1"] {
            check(path, Err(PathError::BadEscape));
        }
    }

    #[test]
    fn other_forms_and_endless_paths_are_refused() {
        for path in ["", "*", "v1", "http://host/", "?x", "%2Fv1"] {
            check(path, Err(PathError::NotAbsolute));
        }
        check(&format!("/{}", "a".repeat(MAX_PATH - 1)), Ok(&format!("/{}", "a".repeat(MAX_PATH - 1))));
        check(&format!("/{}", "a".repeat(MAX_PATH)), Err(PathError::TooLong));
    }

    /// FWD-4: signed URLs break when a proxy writes the query anew.
    #[test]
    fn queries_are_opaque_but_must_be_legal() {
        for query in [
            "",
            "b=2&a=1&b=3&bare&sig=%E9%FF&s=1;2&q=a%20b+c&x[0:1]&u=%7e&n=o'k&&=&p=??",
            "%zz&%",
            "a=../..//\\",
            "{|}^`",
        ] {
            assert_eq!(check_query(query), Ok(()), "{query}");
        }
        for query in ["a b", "a\"", "<", ">", "#", "é"] {
            assert_eq!(check_query(query), Err(PathError::IllegalByte), "{query}");
        }
        for query in ["\t", "a\r\nb", "\0", "\x7f"] {
            assert_eq!(check_query(query), Err(PathError::ControlByte), "{query:?}");
        }
    }

    /// Paths made of the pieces that matter, so that most cases are near a border.
    fn tricky() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => "[a-zA-Z0-9]{1,3}",
            4 => Just("/".to_owned()),
            2 => prop::sample::select(vec![".", "..", "%2e", "%2E", ";", "%2f", "%5C", "%3b"]).prop_map(str::to_owned),
            2 => any::<u8>().prop_map(|byte| format!("%{byte:02x}")),
            1 => any::<u8>().prop_map(|byte| format!("%{byte:02X}")),
            2 => "[ -~]",
            1 => any::<char>().prop_map(String::from),
        ];
        prop::collection::vec(piece, 0..12).prop_map(|pieces| format!("/{}", pieces.concat()))
    }

    fn base() -> reqwest::Url {
        "http://127.0.0.1:9000".parse().unwrap()
    }

    proptest! {
        #[test]
        fn the_url_library_leaves_accepted_paths_alone(raw in tricky(), encoded_slashes: bool) {
            if let Ok(path) = CanonicalPath::parse(&raw, PathRules { encoded_slashes }) {
                let mut url = base();
                url.set_path(path.as_str());
                prop_assert_eq!(url.path(), path.as_str());
                prop_assert_eq!(url.query(), None);
                let parsed: reqwest::Url = format!("http://127.0.0.1:9000{}", path.as_str()).parse().unwrap();
                prop_assert_eq!(parsed, url);
            }
        }

        #[test]
        fn the_normal_form_is_normal_and_means_the_same(raw in tricky(), encoded_slashes: bool) {
            let rules = PathRules { encoded_slashes };
            if let Ok(path) = CanonicalPath::parse(&raw, rules) {
                let again = CanonicalPath::parse(path.as_str(), rules).unwrap();
                prop_assert!(matches!(again.0, Cow::Borrowed(_)));
                prop_assert_eq!(&again, &path);
                prop_assert_eq!(decode(&raw), decode(path.as_str()));
            }
        }

        /// The decoded path, split where any server might split it, has nothing to resolve.
        #[test]
        fn no_accepted_path_hides_a_dot_segment(raw in tricky(), encoded_slashes: bool) {
            if let Ok(path) = CanonicalPath::parse(&raw, PathRules { encoded_slashes }) {
                let decoded = decode(path.as_str());
                for segment in decoded.split(|byte| matches!(byte, b'/' | b'\\')) {
                    let name = segment.split(|&byte| byte == b';').next().unwrap_or_default();
                    prop_assert!(name != b"." && name != b"..");
                }
            }
        }

        #[test]
        fn the_url_library_leaves_accepted_queries_alone(query in "([ -~]|\\PC|[&=?%;'\\[\\]]){0,16}") {
            if check_query(&query).is_ok() {
                let mut url = base();
                url.set_query(Some(&query));
                let expected = query.replace('\'', "%27");
                prop_assert_eq!(url.query(), Some(expected.as_str()));
            }
        }

        #[test]
        fn nothing_makes_it_panic(raw: String) {
            drop(CanonicalPath::parse(&raw, STRICT));
            drop(CanonicalPath::parse(&format!("/{raw}"), SLASHES));
            let _: Result<(), PathError> = check_query(&raw);
            drop(decode(&raw));
        }
    }
}
