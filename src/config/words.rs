//! Values that are words: names, choices, secrets, addresses.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;

use actix_web::http::header::{AUTHORIZATION, HeaderName};
use ipnet::IpNet;
use reqwest::Url;
use secrecy::{ExposeSecret, SecretString};

use super::mistakes::Fault;
use super::raw::{Enforce, LocalShare};
use super::reader::Scalar;

/// The longest name of a plan, limit, route, upstream or key, in bytes.
const NAME_MAX: usize = 64;

/// The longest account, in bytes.
const ACCOUNT_MAX: usize = 128;

/// Any text but none.
pub(super) fn text(value: Scalar<'_>) -> Result<String, Fault> {
    match value {
        Scalar::Text("") | Scalar::Bare("") => Err(Fault::new("must not be empty")),
        Scalar::Text(text) | Scalar::Bare(text) => Ok(text.to_owned()),
        Scalar::Whole(_) | Scalar::Fraction(_) | Scalar::Flag(_) => {
            Err(Fault::new("expected a string").hint("put it in quotes"))
        }
    }
}

/// `true` or `false`.
pub(super) fn flag(value: Scalar<'_>) -> Result<bool, Fault> {
    match value {
        Scalar::Flag(flag) => Ok(flag),
        Scalar::Bare("true") => Ok(true),
        Scalar::Bare("false") => Ok(false),
        Scalar::Text("true" | "false") => Err(Fault::new("expected true or false").hint("remove the quotes")),
        Scalar::Text(_) | Scalar::Bare(_) | Scalar::Whole(_) | Scalar::Fraction(_) => {
            Err(Fault::new("expected true or false"))
        }
    }
}

/// One word out of `choices`; `later` are words that a later version will know.
pub(super) fn choice<T: Copy + 'static>(
    choices: &'static [(&'static str, T)],
    later: &'static [&'static str],
) -> impl Fn(Scalar<'_>) -> Result<T, Fault> {
    move |value| {
        let word = text(value)?;
        if let Some((_, choice)) = choices.iter().find(|(name, _)| *name == word) {
            return Ok(*choice);
        }
        if later.contains(&word.as_str()) {
            return Err(Fault::new(format!("\"{word}\" is not in this version yet")));
        }
        let names = choices.iter().map(|(name, _)| *name);
        // Something that stands in the wrong place, and may be a secret.
        if word.contains(['/', '@', ':']) {
            return Err(Fault::new("this is not a choice").meant("", names));
        }
        Err(Fault::new(format!("{word:?} is not a choice")).meant(&word, names))
    }
}

/// Whether a limit refuses: a word, or a percentage of the callers.
pub(super) fn enforce(value: Scalar<'_>) -> Result<Enforce, Fault> {
    const WORDS: &[(&str, Enforce)] =
        &[("on", Enforce::On), ("shadow", Enforce::Shadow), ("off", Enforce::Off)];
    let word = text(value)?;
    let Some(number) = word.strip_suffix('%') else {
        return choice(WORDS, &[])(value);
    };
    match number.parse() {
        Ok(percent @ 1..=99) => Ok(Enforce::Percent(percent)),
        _ => Err(Fault::new("a percentage lies between \"1%\" and \"99%\"")
            .hint("\"on\" for all callers, \"shadow\" for none")),
    }
}

/// What a gateway counts by itself while the store cannot.
pub(super) fn local_share(value: Scalar<'_>) -> Result<LocalShare, Fault> {
    let word = text(value)?;
    let Some(number) = word.strip_suffix('%') else {
        return choice(&[("equal", LocalShare::Equal)], &[])(value)
            .map_err(|fault| fault.hint("\"equal\", or a percentage such as \"25%\""));
    };
    match number.parse::<NonZeroU64>() {
        Ok(percent) if percent.get() <= 100 => Ok(LocalShare::Percent(percent)),
        _ => Err(Fault::new("a percentage lies between \"1%\" and \"100%\"")),
    }
}

/// A header field of the backend's answer.
pub(super) fn answer_header(value: Scalar<'_>) -> Result<HeaderName, Fault> {
    let name = HeaderName::from_bytes(text(value)?.as_bytes()).map_err(|_| {
        Fault::new("is not the name of a header field").hint("for example \"x-request-cost\"")
    })?;
    if TAKEN.contains(&name.as_str()) {
        return Err(Fault::new("already says something else").hint("for example \"x-request-cost\""));
    }
    Ok(name)
}

/// The name of a plan, limit, route, upstream or key. It becomes part of store keys and labels, so no letter of it may
/// have a meaning there.
pub(super) fn name(value: Scalar<'_>) -> Result<String, Fault> {
    let name = text(value)?;
    let fits = |letter: u8| letter.is_ascii_alphanumeric() || b"_-.".contains(&letter);
    if name.len() > NAME_MAX || !name.bytes().all(fits) {
        return Err(Fault::new(format!(
            "a name is 1 to {NAME_MAX} letters (a to z), digits, \"_\", \"-\" or \".\""
        )));
    }
    Ok(name)
}

/// An account: any printable text, since callers' ids are encoded before they become part of a store key.
pub(super) fn account(value: Scalar<'_>) -> Result<String, Fault> {
    let account = text(value)?;
    if account.len() > ACCOUNT_MAX || account.chars().any(char::is_control) {
        return Err(Fault::new(format!(
            "an account is at most {ACCOUNT_MAX} bytes, without control characters"
        )));
    }
    Ok(account)
}

/// A token as it stands behind `Bearer`: visible ASCII, so that a client can send exactly this text.
pub(super) fn token(value: Scalar<'_>) -> Result<SecretString, Fault> {
    let token = SecretString::from(text(value)?);
    if token.expose_secret().bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(token);
    }
    Err(Fault::new("may hold visible ASCII characters only, and no space"))
}

/// `sha256:` and 64 hex digits.
pub(super) fn hash(value: Scalar<'_>) -> Result<[u8; 32], Fault> {
    let written = SecretString::from(text(value)?);
    let digits = written.expose_secret().strip_prefix("sha256:");
    digits.and_then(decode_hex).ok_or_else(|| {
        Fault::new("is not the hash of a key")
            .hint("write \"sha256:\" and the 64 hex digits that `printf %s \"$KEY\" | sha256sum` prints")
    })
}

fn decode_hex(digits: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if digits.len() != 2 * bytes.len() || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(bytes)
}

/// A header field that may carry an API key.
pub(super) fn header(value: Scalar<'_>) -> Result<HeaderName, Fault> {
    let written = text(value)?;
    let name = HeaderName::from_bytes(written.as_bytes())
        .map_err(|_| Fault::new("is not the name of a header field").hint("for example \"x-api-key\""))?;
    if name == AUTHORIZATION {
        return Err(Fault::new("carries a scheme before the key").hint("write bearer = true instead"));
    }
    if TAKEN.contains(&name.as_str()) || name.as_str().starts_with("x-forwarded-") {
        return Err(
            Fault::new("already says something else in every request").hint("for example \"x-api-key\"")
        );
    }
    Ok(name)
}

/// Header fields that HTTP or the proxies in front write; a key cannot stand in one of them.
const TAKEN: &[&str] = &[
    "connection",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
];

/// An address to listen on.
pub(super) fn listen(value: Scalar<'_>) -> Result<SocketAddr, Fault> {
    let written = text(value)?;
    written.parse().map_err(|_| {
        let fault = Fault::new("is not an IP address and a port");
        match written.rsplit_once(':') {
            Some(("", port)) => fault.hint(format!("write \"0.0.0.0:{port}\" for all interfaces")),
            Some(("localhost", port)) => fault.hint(format!("write \"127.0.0.1:{port}\"")),
            _ => fault.hint("for example \"127.0.0.1:8080\" or \"[::1]:8080\""),
        }
    })
}

/// A network such as `10.0.0.0/8`, or one address.
pub(super) fn network(value: Scalar<'_>) -> Result<IpNet, Fault> {
    let written = text(value)?;
    if let Ok(address) = written.parse::<IpAddr>() {
        return Ok(address.into());
    }
    let Ok(network) = written.parse::<IpNet>() else {
        return Err(Fault::new("is not an address or a network").hint("for example \"10.0.0.0/8\""));
    };
    if network.prefix_len() == 0 {
        return Err(Fault::new("would trust everybody").hint("name the networks of your proxies"));
    }
    if network != network.trunc() {
        let meant = network.trunc();
        return Err(Fault::new("has bits set behind its prefix").hint(format!("did you mean `{meant}`?")));
    }
    Ok(network)
}

/// A target of an upstream: scheme, host, port and nothing else.
pub(super) fn target(value: Scalar<'_>) -> Result<Url, Fault> {
    let written = text(value)?;
    // `Url` repairs a missing slash, a backslash, blanks and more; what was written is what is meant, or it is refused.
    let plain = written.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if !plain || !(written.starts_with("http://") || written.starts_with("https://")) {
        return Err(not_a_target("must start with \"http://\" or \"https://\""));
    }
    let url = Url::parse(&written).map_err(|_| not_a_target("is not a URL"))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(not_a_target("must not hold a user or password"));
    }
    if url.path() != "/" || url.query().is_some() || url.fragment().is_some() {
        return Err(not_a_target("must end after the host and port: the path is that of the request"));
    }
    if url.port() == Some(0) {
        return Err(not_a_target("has no port that can be called"));
    }
    Ok(url)
}

fn not_a_target(problem: &str) -> Fault {
    Fault::new(problem).hint("for example \"http://127.0.0.1:9000\"")
}

/// Any text but none, never repeated.
pub(super) fn secret(value: Scalar<'_>) -> Result<SecretString, Fault> {
    text(value).map(SecretString::from)
}

/// The URL of a Redis node. It may hold a password, so nothing of it is ever repeated.
pub(super) fn redis_url(value: Scalar<'_>) -> Result<SecretString, Fault> {
    let written = SecretString::from(text(value)?);
    let plain = written.expose_secret().bytes().all(|byte| byte.is_ascii_graphic());
    let fits = Url::parse(written.expose_secret()).is_ok_and(|url| match url.scheme() {
        "redis" | "rediss" => {
            url.host_str().is_some_and(|host| !host.is_empty())
                && url.port() != Some(0)
                && is_database(url.path())
                && url.query().is_none()
                && url.fragment().is_none()
        }
        scheme if SOCKETS.contains(&scheme) => is_socket(&url),
        _ => false,
    });
    if plain && fits {
        return Ok(written);
    }
    Err(Fault::new("is not the URL of a Redis node").hint(
        "for example \"redis://127.0.0.1:6379\", or \"rediss://\" for TLS, or \"unix:///run/redis.sock\"",
    ))
}

/// Schemes of a socket in the file system.
const SOCKETS: [&str; 2] = ["unix", "redis+unix"];

/// Whether `url` is that of a socket: a path, and behind it at most a database and a login.
fn is_socket(url: &Url) -> bool {
    let known = url.query_pairs().all(|(name, value)| match &*name {
        "db" => value.parse::<u16>().is_ok(),
        "user" | "pass" => true,
        _ => false,
    });
    url.host_str().is_none_or(str::is_empty) && url.path().len() > 1 && url.fragment().is_none() && known
}

/// What the URL of a Redis node says beyond the address. It was checked before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RedisUrl {
    /// Whether it is a socket in the file system.
    pub(super) is_socket: bool,
    /// Whether it asks for TLS.
    pub(super) is_tls: bool,
    /// Whether it holds a user or a password.
    pub(super) has_login: bool,
    /// Whether it chooses another database than 0.
    pub(super) chooses_database: bool,
}

impl RedisUrl {
    pub(super) fn of(url: &SecretString) -> Self {
        let Ok(url) = Url::parse(url.expose_secret()) else { return Self::default() };
        let is_socket = SOCKETS.contains(&url.scheme());
        let in_query = |wanted: &str| url.query_pairs().find(|(name, _)| name == wanted);
        let other_database = |number: &str| number.parse::<u16>().is_ok_and(|number| number != 0);
        Self {
            is_socket,
            is_tls: url.scheme() == "rediss",
            has_login: !url.username().is_empty()
                || url.password().is_some()
                || in_query("user").or(in_query("pass")).is_some(),
            chooses_database: match in_query("db") {
                Some((_, number)) => other_database(&number),
                None => !is_socket && other_database(url.path().trim_start_matches('/')),
            },
        }
    }
}

/// Whether `path` is empty or the number of a database.
fn is_database(path: &str) -> bool {
    let number = path.strip_prefix('/').unwrap_or(path);
    number.is_empty() || number.parse::<u16>().is_ok()
}

/// A filter of `tracing`: a level, or `target=level` pairs separated by commas.
pub(super) fn log_filter(value: Scalar<'_>) -> Result<String, Fault> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let filter = text(value)?;
    for part in filter.split(',') {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level).trim();
        if !LEVELS.contains(&level) {
            return Err(Fault::new(format!("{level:?} is not a level")).meant(level, LEVELS));
        }
    }
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T>(read: impl Fn(Scalar<'_>) -> Result<T, Fault>, texts: &[&str]) {
        for text in texts {
            assert!(read(Scalar::Text(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn names_cannot_forge_a_separator() {
        for good in ["free", "Free_2", "v1.2-beta", &"x".repeat(64)] {
            assert_eq!(name(Scalar::Text(good)), Ok(good.to_owned()));
        }
        refused(name, &["", "a:b", "a{b}", "a b", "ä", "a/b", "a\n", &"x".repeat(65)]);
    }

    #[test]
    fn strings_and_flags_are_strict_in_files() {
        let quotes = || Fault::new("expected a string").hint("put it in quotes");
        assert_eq!(text(Scalar::Whole(123_456)), Err(quotes()));
        assert_eq!(text(Scalar::Flag(true)), Err(quotes()));
        assert_eq!(text(Scalar::Fraction(0.5)), Err(quotes()));
        assert_eq!(text(Scalar::Bare("00123456")), Ok("00123456".to_owned()));
        assert!(flag(Scalar::Text("true")).is_err());
        assert!(flag(Scalar::Bare("yes")).is_err());
        assert_eq!(flag(Scalar::Bare("true")), Ok(true));
    }

    #[test]
    fn targets_end_after_the_port() {
        for good in ["http://127.0.0.1:9000", "https://api.example/", "http://[::1]:80"] {
            assert!(target(Scalar::Text(good)).is_ok(), "{good}");
        }
        refused(
            target,
            &[
                "",
                "127.0.0.1:9000",
                "localhost:9000",
                "ftp://host",
                "http:/host",
                "http://",
                "http:\\\\host",
                "http://ho st",
                "http://host/path",
                "http://host/?",
                "http://host#",
                "http://user@host",
                "http://user:pass@host",
                "http://host:0",
                "http://host:99999",
                "http://host\n",
            ],
        );
    }

    #[test]
    fn redis_urls_are_checked_and_never_repeated() {
        for good in [
            "redis://127.0.0.1",
            "redis://127.0.0.1:6379/0",
            "rediss://user:secret@redis.example:6380",
            "redis://[::1]:6379",
            "unix:///run/redis.sock",
            "redis+unix:///run/redis.sock?db=2&user=me&pass=secret",
        ] {
            assert!(redis_url(Scalar::Text(good)).is_ok(), "{good}");
        }
        refused(
            redis_url,
            &[
                "",
                "127.0.0.1:6379",
                "http://host",
                "redis://",
                "redis:host",
                "redis://host/abc",
                "redis://h:0",
                "redis://h?protocol=resp3",
                "rediss://h#insecure",
                "unix://",
                "unix:///",
                "unix://host/path",
                "unix:///path?timeout=1",
                "unix:///path?db=x",
            ],
        );
        let fault = redis_url(Scalar::Text("redsi://user:canary@host")).unwrap_err();
        assert!(!format!("{fault:?}").contains("canary"));
    }

    #[test]
    fn a_redis_url_says_what_it_holds() {
        let of = |url: &str| RedisUrl::of(&url.into());
        assert_eq!(of("redis://h:1/0"), RedisUrl::default());
        assert_eq!(of("redis://h:1/2"), RedisUrl { chooses_database: true, ..RedisUrl::default() });
        assert_eq!(of("redis://:p@h:1"), RedisUrl { has_login: true, ..RedisUrl::default() });
        assert_eq!(of("redis://u@h:1"), RedisUrl { has_login: true, ..RedisUrl::default() });
        assert_eq!(of("rediss://h"), RedisUrl { is_tls: true, ..RedisUrl::default() });
        let socket = RedisUrl { is_socket: true, ..RedisUrl::default() };
        assert_eq!(of("unix:///7"), socket);
        assert_eq!(of("unix:///s?pass=p"), RedisUrl { has_login: true, ..socket });
        assert_eq!(of("unix:///s?db=2"), RedisUrl { chooses_database: true, ..socket });
    }

    #[test]
    fn networks_are_exact() {
        for good in ["10.0.0.0/8", "192.0.2.1", "2001:db8::/32", "::1"] {
            assert!(network(Scalar::Text(good)).is_ok(), "{good}");
        }
        refused(network, &["", "10.0.0.1/8", "0.0.0.0/0", "::/0", "10.0.0.0/33", "proxy.example"]);
    }

    #[test]
    fn hashes_are_64_hex_digits() {
        let digits = "0aF".repeat(21) + "1";
        let bytes = hash(Scalar::Text(&format!("sha256:{digits}"))).unwrap();
        assert_eq!(bytes[..3], [0x0a, 0xf0, 0xaf]);
        refused(hash, &["", &digits, "sha256:", "md5:00", &format!("sha256:+{}", &digits[1..])]);
        let fault = hash(Scalar::Text("a_key_that_was_pasted")).unwrap_err();
        assert!(!format!("{fault:?}").contains("pasted"));
    }

    #[test]
    fn filters_name_levels() {
        for good in ["info", "warn,tollgate=debug", "off"] {
            assert!(log_filter(Scalar::Text(good)).is_ok(), "{good}");
        }
        refused(log_filter, &["", "infoo", "tollgate", "tollgate=loud", "info,"]);
    }
}
