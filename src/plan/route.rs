//! Routes: path patterns, methods, and finding the one route of a request.
//!
//! The most specific pattern wins, compared segment by segment from the left: a literal before a `{name}`, a `{name}`
//! before a trailing `/*`. Only then the method is looked at: when no route of that pattern serves it the answer is 405,
//! never a less specific route. Otherwise a limit on `GET /v1/search` would be passed by around `POST /v1/search` on `/*`.
//!
//! A trailing slash makes no difference, and `/v1/*` covers `/v1` itself. Literals are compared by the bytes they stand
//! for, so `/v1/%40me` cannot slip past a route for `/v1/@me`.

use std::collections::BTreeMap;
use std::sync::Arc;

use actix_web::http::Method;

use super::cost::Cost;
use crate::inbound::METHODS;
use crate::inbound::path::{self, CanonicalPath, PathError, PathRules};
use crate::limit::{OnFailure, Rule};

/// One route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// What it matches.
    pub pattern: Pattern,
    /// Methods it serves.
    pub methods: Methods,
    /// What a request costs.
    pub cost: Cost,
    /// Upstream name; `None` only when Tollgate runs as a middleware.
    pub upstream: Option<Arc<str>>,
    /// Plans that include the route; `None`: all of them.
    pub plans: Option<Vec<Arc<str>>>,
    /// Limits of everybody on the route together, all of them of [`Scope::Pool`](crate::limit::Scope).
    pub pool: Vec<Rule>,
    /// What to do when the store cannot answer; `None`: as the plan or the store says.
    pub on_failure: Option<OnFailure>,
}

impl Route {
    /// What stands in the caller's place in the keys of its pool.
    #[must_use]
    pub fn pool_id(&self) -> String {
        format!("pool.{}", self.name)
    }
}

/// A set of methods, never empty. A method's position in [`METHODS`] is its bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Methods(u8);

/// Why a list of methods is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MethodsError {
    /// Not one of the methods that can be routed.
    #[error("`{0}` is not a method that can be routed; use GET, HEAD, POST, PUT, PATCH, DELETE or OPTIONS")]
    Unknown(String),
    /// No method at all.
    #[error("a route without methods serves nothing; leave `methods` out to serve all of them")]
    Empty,
}

impl Methods {
    /// The methods in `names`. `GET` brings `HEAD` along.
    ///
    /// # Errors
    /// When there is none, or one is not a method that can be routed (they are upper-case).
    pub fn parse(names: &[String]) -> Result<Self, MethodsError> {
        let mut set = Self(0);
        for name in names {
            let bit = Method::from_bytes(name.as_bytes())
                .ok()
                .and_then(|method| Self::bit(&method))
                .ok_or_else(|| MethodsError::Unknown(name.clone()))?;
            set = set.with(Self(bit));
        }
        if set.0 == 0 {
            return Err(MethodsError::Empty);
        }
        if set.serves(&Method::GET) {
            set.0 |= Self::bit(&Method::HEAD).unwrap_or_default();
        }
        Ok(set)
    }

    /// Every method that can be routed.
    #[must_use]
    pub fn all() -> Self {
        Self((1 << METHODS.len()) - 1)
    }

    /// Whether `method` is one of them.
    #[must_use]
    pub fn serves(self, method: &Method) -> bool {
        Self::bit(method).is_some_and(|bit| self.0 & bit != 0)
    }

    /// Whether some method is in both.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The value of an `Allow` field: `GET, HEAD`.
    #[must_use]
    pub fn allow_header(self) -> String {
        let served: Vec<&str> =
            METHODS.iter().filter(|method| self.serves(method)).map(Method::as_str).collect();
        served.join(", ")
    }

    fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn bit(method: &Method) -> Option<u8> {
        let position = METHODS.iter().position(|served| served == method)?;
        Some(1 << position)
    }
}

/// A parsed path pattern: exact, with `{name}` segments, with a trailing `/*`, or with both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    segments: Vec<PatternSegment>,
    /// Whether it ends in `/*`.
    open_end: bool,
    text: Box<str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PatternSegment {
    /// The bytes it stands for.
    Literal(Box<[u8]>),
    /// Any one segment.
    Any,
}

/// Segments of a pattern at most. Far above any real one; keeps the route tree shallow.
const MAX_SEGMENTS: usize = 64;

/// Why a pattern is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Does not start with a slash.
    #[error("a path starts with \"/\"")]
    NotAbsolute,
    /// A `*` that is not the whole last segment.
    #[error("\"*\" may only stand at the end, as \"/*\"; a literal one is written %2A")]
    Star,
    /// Braces that do not enclose a whole segment and a name.
    #[error("braces enclose one whole segment and a name of letters, digits and \"_\", as in \"/{{id}}\"")]
    Braces,
    /// The same name twice.
    #[error("the name `{0}` stands for two segments")]
    NameRepeated(String),
    /// More than 64 segments.
    #[error("a path pattern has at most {MAX_SEGMENTS} segments")]
    TooManySegments,
    /// No path that a client may send could match.
    #[error("no request could match: {0}")]
    Path(#[from] PathError),
}

impl Pattern {
    /// Reads a pattern as the operator wrote it.
    ///
    /// # Errors
    /// When it is not one of the forms above, or could never match a path that the gateway accepts.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        let Some(from_root) = text.strip_prefix('/') else {
            return Err(PatternError::NotAbsolute);
        };
        let mut reader = PatternReader::default();
        // A trailing slash makes no difference, except that nothing may follow a star.
        let without_slash = match from_root.strip_suffix('/') {
            Some(rest) if !rest.ends_with('*') => rest,
            _ => from_root,
        };
        if !from_root.is_empty() {
            without_slash.split('/').try_for_each(|segment| reader.push(segment))?;
        }
        Ok(reader.finish())
    }

    /// Whether the two match the same paths; the names in braces do not matter.
    #[must_use]
    pub fn same_paths(&self, other: &Self) -> bool {
        (&self.segments, self.open_end) == (&other.segments, other.open_end)
    }

    /// The pattern in its normal form: canonical escapes, no trailing slash.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// A pattern while it is being read.
#[derive(Default)]
struct PatternReader<'a> {
    segments: Vec<PatternSegment>,
    names: Vec<&'a str>,
    open_end: bool,
    text: String,
}

impl<'a> PatternReader<'a> {
    fn push(&mut self, segment: &'a str) -> Result<(), PatternError> {
        if self.open_end {
            return Err(PatternError::Star);
        }
        if self.segments.len() == MAX_SEGMENTS {
            return Err(PatternError::TooManySegments);
        }
        self.text.push('/');
        if segment == "*" {
            self.open_end = true;
            self.text.push('*');
        } else if segment.contains(['{', '}']) {
            self.names.push(read_name(segment, &self.names)?);
            self.segments.push(PatternSegment::Any);
            self.text.push_str(segment);
        } else {
            let literal = canonical_segment(segment)?;
            self.segments.push(PatternSegment::Literal(path::decode(&literal).into()));
            self.text.push_str(&literal);
        }
        Ok(())
    }

    fn finish(mut self) -> Pattern {
        if self.text.is_empty() {
            self.text.push('/');
        }
        Pattern { segments: self.segments, open_end: self.open_end, text: self.text.into() }
    }
}

/// The name inside `{name}`.
fn read_name<'a>(segment: &'a str, taken: &[&str]) -> Result<&'a str, PatternError> {
    let name = segment
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'))
        .filter(|name| !name.is_empty())
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'))
        .ok_or(PatternError::Braces)?;
    if taken.contains(&name) {
        return Err(PatternError::NameRepeated(name.to_owned()));
    }
    Ok(name)
}

/// A literal segment in the form that paths have.
fn canonical_segment(segment: &str) -> Result<String, PatternError> {
    if segment.is_empty() {
        return Err(PathError::EmptySegment.into());
    }
    if segment.contains('*') {
        return Err(PatternError::Star);
    }
    // Whether `%2F` may come in is decided when a request comes; a pattern may name it.
    let rules = PathRules { encoded_slashes: true };
    let rooted = format!("/{segment}");
    let canonical = CanonicalPath::parse(&rooted, rules)?;
    Ok(canonical.as_str()[1..].to_owned())
}

/// All routes, ready to be searched.
#[derive(Debug)]
pub struct RouteTable {
    routes: Vec<Arc<Route>>,
    root: Node,
}

/// Two routes that match the same requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("routes `{first}` and `{second}` match the same paths and methods")]
pub struct Conflict {
    /// The name of the one that came first.
    pub first: Arc<str>,
    /// The name of the other.
    pub second: Arc<str>,
}

/// Why a request has no route.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// No pattern matches its path.
    #[error("no route matches the path")]
    NoRoute,
    /// The routes of the most specific pattern do not serve its method.
    #[error("the path does not serve this method")]
    Method {
        /// What they do serve, as the value of an `Allow` field.
        allow: String,
    },
}

impl RouteTable {
    /// A table of `routes`, in which each keeps its position.
    ///
    /// # Errors
    /// When two routes have patterns of the same shape (names do not matter) and a method in common.
    pub fn new(routes: Vec<Route>) -> Result<Self, Conflict> {
        let mut table = Self { routes: Vec::with_capacity(routes.len()), root: Node::default() };
        for route in routes {
            table.insert(route)?;
        }
        Ok(table)
    }

    /// All routes, by position.
    #[must_use]
    pub fn routes(&self) -> &[Arc<Route>] {
        &self.routes
    }

    /// The position in [`routes`](Self::routes) of the route of a request, for tables that run in parallel.
    ///
    /// Allocates nothing for a path without escapes.
    ///
    /// # Errors
    /// When there is none: 404 or 405.
    pub fn position(&self, method: &Method, path: &CanonicalPath<'_>) -> Result<usize, Missing> {
        let from_root = path.as_str().strip_prefix('/').unwrap_or_default();
        let same_pattern = self.root.find(from_root).ok_or(Missing::NoRoute)?;
        same_pattern
            .iter()
            .copied()
            .find(|&position| self.routes[position].methods.serves(method))
            .ok_or_else(|| Missing::Method { allow: self.allow(same_pattern) })
    }

    fn insert(&mut self, route: Route) -> Result<(), Conflict> {
        let same_pattern = self.root.slot(&route.pattern);
        let rival = same_pattern
            .iter()
            .map(|&position| &self.routes[position])
            .find(|other| other.methods.overlaps(route.methods));
        if let Some(rival) = rival {
            return Err(Conflict { first: Arc::clone(&rival.name), second: route.name });
        }
        same_pattern.push(self.routes.len());
        self.routes.push(Arc::new(route));
        Ok(())
    }

    fn allow(&self, positions: &[usize]) -> String {
        positions
            .iter()
            .map(|&position| self.routes[position].methods)
            .fold(Methods(0), Methods::with)
            .allow_header()
    }
}

/// All patterns that begin with the same segments. Routes are held by position.
#[derive(Debug, Default)]
struct Node {
    /// Patterns that go on with these bytes.
    literals: BTreeMap<Box<[u8]>, Self>,
    /// Patterns that go on with a `{name}`.
    any: Option<Box<Self>>,
    /// Routes whose pattern ends here.
    exact: Vec<usize>,
    /// Routes whose pattern ends here with `/*`.
    open_end: Vec<usize>,
}

impl Node {
    /// Where the routes of `pattern` are kept.
    fn slot(&mut self, pattern: &Pattern) -> &mut Vec<usize> {
        let node = pattern.segments.iter().fold(self, |node, segment| match segment {
            PatternSegment::Literal(bytes) => node.literals.entry(bytes.clone()).or_default(),
            PatternSegment::Any => node.any.get_or_insert_default(),
        });
        if pattern.open_end { &mut node.open_end } else { &mut node.exact }
    }

    /// The routes of the most specific pattern below this node that matches `path`, which has no leading slash.
    ///
    /// A dead end under a literal is left for the next choice. No node is visited twice, so the whole search is bounded
    /// by the number of nodes, whatever the client sends.
    fn find(&self, path: &str) -> Option<&[usize]> {
        if path.is_empty() {
            return filled(&self.exact).or_else(|| filled(&self.open_end));
        }
        let (segment, rest) = path.split_once('/').unwrap_or((path, ""));
        let literal = || self.literals.get(path::decode(segment).as_ref())?.find(rest);
        let any = || self.any.as_ref()?.find(rest);
        literal().or_else(any).or_else(|| filled(&self.open_end))
    }
}

fn filled(positions: &[usize]) -> Option<&[usize]> {
    (!positions.is_empty()).then_some(positions)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use proptest::prelude::*;

    use super::*;

    fn methods(names: &str) -> Methods {
        let names: Vec<String> = names.split_whitespace().map(str::to_owned).collect();
        Methods::parse(&names).unwrap()
    }

    /// A route written as `GET POST /path`, named so too; without methods it serves all of them.
    fn route(text: &str) -> Route {
        let (served, path) = text.split_at(text.find('/').unwrap());
        Route {
            name: text.into(),
            pattern: Pattern::parse(path).unwrap(),
            methods: if served.is_empty() { Methods::all() } else { methods(served) },
            cost: Cost::fixed(NonZeroU64::MIN),
            pool: Vec::new(),
            upstream: None,
            plans: None,
            on_failure: None,
        }
    }

    fn table(routes: &[&str]) -> RouteTable {
        RouteTable::new(routes.iter().map(|text| route(text)).collect()).unwrap()
    }

    /// What a request, written as `GET /path`, finds: a route's name, `404`, or `405` and the `Allow` field.
    fn answer(table: &RouteTable, request: &str) -> String {
        let (method, raw) = request.split_once(' ').unwrap();
        let path = CanonicalPath::parse(raw, PathRules { encoded_slashes: true }).unwrap();
        match table.position(&method.parse().unwrap(), &path) {
            Ok(position) => table.routes()[position].name.to_string(),
            Err(Missing::NoRoute) => "404".to_owned(),
            Err(Missing::Method { allow }) => format!("405 {allow}"),
        }
    }

    #[track_caller]
    fn check(routes: &[&str], requests: &[(&str, &str)]) {
        let table = table(routes);
        for &(request, expected) in requests {
            assert_eq!(answer(&table, request), expected, "{request}");
        }
    }

    #[test]
    fn the_most_specific_path_wins() {
        check(
            &["/*", "/v1/*", "/v1/search", "/v1/{id}", "/v1/{id}/items", "/v1/search/{page}"],
            &[
                ("GET /", "/*"),
                ("GET /other/deep", "/*"),
                ("GET /v1", "/v1/*"),
                ("GET /v1x", "/*"),
                ("GET /v1/search", "/v1/search"),
                ("GET /v1/searches", "/v1/{id}"),
                ("GET /v1/SEARCH", "/v1/{id}"),
                ("GET /v1/7/items", "/v1/{id}/items"),
                ("GET /v1/7/others", "/v1/*"),
                ("GET /v1/search/2", "/v1/search/{page}"),
                ("GET /v1/search/2/3", "/v1/*"),
            ],
        );
    }

    #[test]
    fn a_dead_end_is_left_for_the_next_choice() {
        check(
            &["/a/b/c", "/a/{x}/d", "/{x}/b/e"],
            &[
                ("GET /a/b/c", "/a/b/c"),
                ("GET /a/b/d", "/a/{x}/d"),
                ("GET /a/b/e", "/{x}/b/e"),
                ("GET /a/b", "404"),
                ("GET /a/b/f", "404"),
            ],
        );
        // From the left: the literal `b` decides before what stands behind it.
        check(&["/a/b/*", "/a/{x}/c"], &[("GET /a/b/c", "/a/b/*"), ("GET /a/z/c", "/a/{x}/c")]);
    }

    #[test]
    fn a_method_that_the_best_pattern_lacks_is_405_and_not_the_next_pattern() {
        check(
            &["/*", "GET/v1/search", "POST DELETE/v1/search", "PUT/v1/{id}"],
            &[
                ("GET /v1/search", "GET/v1/search"),
                ("HEAD /v1/search", "GET/v1/search"),
                ("DELETE /v1/search", "POST DELETE/v1/search"),
                ("PUT /v1/search", "405 GET, HEAD, POST, DELETE"),
                ("GET /v1/other", "405 PUT"),
                ("TRACE /", "405 GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
                ("get /", "405 GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
            ],
        );
    }

    #[test]
    fn a_trailing_slash_makes_no_difference() {
        check(
            &["/v1/search/", "/v1/{id}/", "/files/*"],
            &[
                ("GET /v1/search", "/v1/search/"),
                ("GET /v1/search/", "/v1/search/"),
                ("GET /v1/7/", "/v1/{id}/"),
                ("GET /files", "/files/*"),
                ("GET /files/", "/files/*"),
                ("GET /files/a/", "/files/*"),
                ("GET /", "404"),
            ],
        );
    }

    /// A backend decodes before it looks, so the spelling must not choose the limit.
    #[test]
    fn literals_are_compared_by_what_they_stand_for() {
        check(
            &["/v1/@me", "/caf%c3%a9", "/a%2Fb", "/v1/{id}", "/50%25"],
            &[
                ("GET /v1/@me", "/v1/@me"),
                ("GET /v1/%40me", "/v1/@me"),
                ("GET /v1/%40%6d%65", "/v1/@me"),
                ("GET /v1/%2540me", "/v1/{id}"),
                ("GET /caf%C3%A9", "/caf%c3%a9"),
                ("GET /a%2fb", "/a%2Fb"),
                ("GET /a/b", "404"),
                ("GET /50%25", "/50%25"),
            ],
        );
    }

    #[test]
    fn routes_keep_their_position() {
        let table = table(&["/b", "/a", "/{x}"]);
        let path = CanonicalPath::parse("/a", PathRules::default()).unwrap();
        assert_eq!(table.position(&Method::GET, &path), Ok(1));
        assert_eq!(&*table.routes()[1].name, "/a");
        assert_eq!(table.routes().len(), 3);
    }

    #[test]
    fn the_same_shape_with_a_method_in_common_is_a_conflict() {
        let conflict = |first: &str, second: &str| RouteTable::new(vec![route(first), route(second)]).err();
        for (first, second) in [
            ("/a", "/a/"),
            ("/{x}/b", "/{y}/b"),
            ("/a/*", "GET/a/*"),
            ("GET/a", "HEAD/a"),
            ("/%40", "/@"),
            ("/*", "/*"),
        ] {
            let named = Conflict { first: first.into(), second: second.into() };
            assert_eq!(conflict(first, second), Some(named));
        }
        for (first, second) in
            [("GET/a", "POST/a"), ("/a", "/a/*"), ("/{x}", "/a"), ("/{x}", "/*"), ("/a%2Fb", "/a/b")]
        {
            assert_eq!(conflict(first, second), None, "{first} {second}");
        }
        assert_eq!(
            conflict("/a", "GET/a/").unwrap().to_string(),
            "routes `/a` and `GET/a/` match the same paths and methods"
        );
    }

    #[test]
    fn patterns_have_one_normal_form() {
        for (text, normal) in [
            ("/", "/"),
            ("/*", "/*"),
            ("/v1/search/", "/v1/search"),
            ("/v1/{user_id}/x/*", "/v1/{user_id}/x/*"),
            ("/%41/caf%c3%a9", "/A/caf%C3%A9"),
            ("/a;b=c/@:!$", "/a;b=c/@:!$"),
        ] {
            assert_eq!(Pattern::parse(text).unwrap().as_str(), normal);
        }
    }

    #[test]
    fn other_patterns_are_refused_with_the_reason() {
        use PatternError::{Braces, NameRepeated, NotAbsolute, Path, Star, TooManySegments};
        for (text, error) in [
            ("", NotAbsolute),
            ("v1", NotAbsolute),
            ("*", NotAbsolute),
            ("//", Path(PathError::EmptySegment)),
            ("/v1//x", Path(PathError::EmptySegment)),
            ("/v1//*", Path(PathError::EmptySegment)),
            ("/v1//", Path(PathError::EmptySegment)),
            ("/v1/../x", Path(PathError::DotSegment)),
            ("/v1/%2e", Path(PathError::DotSegment)),
            ("/a b", Path(PathError::IllegalByte)),
            ("/a?b", Path(PathError::IllegalByte)),
            ("/café", Path(PathError::IllegalByte)),
            ("/%zz", Path(PathError::BadEscape)),
            ("/a%00", Path(PathError::ControlByte)),
            ("/*/x", Star),
            ("/*/", Star),
            ("/v1/*/", Star),
            ("/*/*", Star),
            ("/v1*", Star),
            ("/v1/a*b", Star),
            ("/**", Star),
            ("/{", Braces),
            ("/}", Braces),
            ("/{}", Braces),
            ("/{a", Braces),
            ("/a}", Braces),
            ("/{a}b", Braces),
            ("/x{a}", Braces),
            ("/{a}{b}", Braces),
            ("/{a-b}", Braces),
            ("/{*rest}", Braces),
            ("/{a:[0-9]+}", Braces),
            ("/{a}/{a}", NameRepeated("a".to_owned())),
        ] {
            assert_eq!(Pattern::parse(text), Err(error), "{text:?}");
        }
        assert!(Pattern::parse(&"/a".repeat(MAX_SEGMENTS)).is_ok());
        assert_eq!(Pattern::parse(&"/a".repeat(MAX_SEGMENTS + 1)), Err(TooManySegments));
        assert_eq!(
            Braces.to_string(),
            "braces enclose one whole segment and a name of letters, digits and \"_\", as in \"/{id}\""
        );
    }

    #[test]
    fn methods_are_upper_case_and_known() {
        let parse =
            |names: &[&str]| Methods::parse(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(parse(&[]), Err(MethodsError::Empty));
        for name in ["get", "TRACE", "CONNECT", "PROPFIND", "", "GET ", "*"] {
            assert_eq!(parse(&["GET", name]), Err(MethodsError::Unknown(name.to_owned())));
        }
        assert_eq!(parse(&["GET"]).unwrap().allow_header(), "GET, HEAD");
        assert_eq!(parse(&["HEAD"]).unwrap().allow_header(), "HEAD");
        assert_eq!(parse(&["PATCH", "POST", "POST"]).unwrap().allow_header(), "POST, PATCH");
        assert_eq!(Methods::all().allow_header(), "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
        assert!(parse(&["GET"]).unwrap().overlaps(parse(&["HEAD"]).unwrap()));
        assert!(!parse(&["GET"]).unwrap().overlaps(parse(&["PUT"]).unwrap()));
    }

    /// How specific a pattern is at each segment of a path that it matches, smaller being better; `None`: no match.
    fn rank(pattern: &str, path: &str) -> Option<Vec<u8>> {
        let mut segments = path.split('/').filter(|segment| !segment.is_empty());
        let mut ranks = Vec::new();
        for part in pattern.split('/').filter(|part| !part.is_empty()) {
            if part == "*" {
                ranks.push(3);
                return Some(ranks);
            }
            let segment = segments.next()?;
            let named = part.starts_with('{');
            if !named && part != segment {
                return None;
            }
            ranks.push(if named { 2 } else { 1 });
        }
        segments.next().is_none().then_some(ranks)
    }

    proptest! {
        /// The tree against the plainest reading of the rule: try every pattern, keep the most specific.
        #[test]
        fn finds_what_trying_every_pattern_finds(
            patterns in prop::collection::btree_set("(/[abc]|/\\{x\\}){0,3}(/\\*)?", 0..12),
            path in "(/[abcd]){1,4}/?",
        ) {
            let patterns: Vec<&str> = patterns
                .iter()
                .map(String::as_str)
                .filter(|pattern| Pattern::parse(pattern).is_ok())
                .collect();
            let expected = patterns
                .iter()
                .filter_map(|pattern| Some((rank(pattern, &path)?, *pattern)))
                .min()
                .map_or("404", |(_, pattern)| pattern);
            prop_assert_eq!(answer(&table(&patterns), &format!("GET {path}")), expected);
        }

        #[test]
        fn reading_a_pattern_never_panics(text: String) {
            drop(Pattern::parse(&text));
            drop(Pattern::parse(&format!("/{text}")));
        }

        #[test]
        fn the_normal_form_reads_as_the_same_pattern(text in "(/[a-c%4{}*]{1,4}){0,4}/?") {
            if let Ok(pattern) = Pattern::parse(&text) {
                prop_assert_eq!(Pattern::parse(pattern.as_str()), Ok(pattern));
            }
        }
    }
}
