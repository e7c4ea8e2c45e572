//! A [`Rejection`] becomes HTTP. The only place that chooses a status code for a refusal.
//!
//! Every refusal is `application/problem+json` (RFC 9457) of one shape, and repeats nothing that the client sent. The
//! reasons of a 401 look alike on purpose: an answer must not tell a wrong key from a revoked one.

use std::num::NonZeroU64;

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::{HttpResponse, HttpResponseBuilder};
use serde::Serialize;

use super::check::Refused;
use crate::identify::IdentifyError;
use crate::inbound::PathError;
use crate::limit::headers::{self, Style};
use crate::limit::{Decision, Rule, Source};
use crate::plan::{Methods, Missing};
use crate::proxy::Failure;

/// Why a request does not get an answer from the backend.
#[derive(Debug)]
pub enum Rejection {
    /// The head of the request is not acceptable.
    Head(Refused),
    /// The path or the query is not acceptable.
    Path(PathError),
    /// No route matches.
    NoRoute,
    /// A route matches, but not with this method; the methods that would do.
    Method(String),
    /// Nobody could be identified.
    Identity(IdentifyError),
    /// The caller's plan does not include the route.
    Excluded,
    /// A limit refuses.
    Limited {
        /// The names of the limits that refuse.
        violated: Vec<Box<str>>,
        /// Whole seconds after which the request would pass; `None`: waiting cannot help.
        retry_after: Option<u64>,
        /// Which limit, what it allows, and what is left of it.
        detail: String,
    },
    /// The store cannot answer, and the operator chose to refuse then.
    StoreAway,
    /// The gateway has too much to do.
    Overloaded,
    /// The backend gave no answer.
    Upstream(Failure),
    /// The request came to the proxy without a pass: the application is put together wrongly.
    Unchecked,
    /// Working on the request has panicked.
    Panicked,
}

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const X_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// How long a client should wait while the store is away or the gateway has too much to do, in seconds: about as long as either
/// needs to come back.
const REDUCED_CAPACITY_RETRY: u64 = 1;

/// The body of a refusal.
#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    instance: &'a str,
    #[serde(rename = "violated-policies", skip_serializing_if = "Option::is_none")]
    violated_policies: Option<&'a [Box<str>]>,
}

impl Rejection {
    /// A refusal by these limits, for a request of `cost`. `source` has decided.
    #[must_use]
    pub fn limited(rules: &[Rule], decision: &Decision, cost: NonZeroU64, source: Source) -> Self {
        let name = |index: usize| rules.get(index).map(|rule| Box::from(&*rule.name));
        let retry_after = decision.wait().map(headers::retry_after);
        let binding = decision.binding().and_then(|index| rules.get(index).zip(decision.states.get(index)));
        let detail = binding.map_or_else(String::new, |(rule, standing)| {
            let (name, promise, left) = (&rule.name, rule.promise(), standing.remaining);
            let takes = if rule.lends_slots() {
                "every request takes one".to_owned()
            } else {
                format!("this request costs {cost}")
            };
            let advice = match retry_after {
                Some(seconds) => format!("Retry in {seconds} s."),
                None => "Waiting cannot help.".to_owned(),
            };
            // Else the numbers do not add up for a client that has counted.
            let alone = match source {
                Source::Local => " At the moment this gateway counts its share of the limit by itself.",
                Source::Store | Source::None => "",
            };
            format!("Limit \"{name}\" allows {promise}; {takes}, and {left} are left. {advice}{alone}")
        });
        Self::Limited { violated: decision.refusing().filter_map(name).collect(), retry_after, detail }
    }

    /// The answer. `request_id` names the occurrence.
    #[must_use]
    pub fn reply(&self, request_id: &HeaderValue) -> HttpResponse {
        let mut response = HttpResponse::build(self.status());
        response.insert_header((header::CONTENT_TYPE, "application/problem+json"));
        response.insert_header((header::CACHE_CONTROL, "no-store"));
        self.add_fields(&mut response);
        if self.ends_the_connection() {
            response.force_close();
        }
        response.body(self.problem(request_id))
    }

    /// What the client needs besides the body: when to come again, what it may do, how to say who it is.
    fn add_fields(&self, response: &mut HttpResponseBuilder) {
        match self {
            Self::Limited { retry_after: Some(seconds), .. } => {
                response.insert_header((header::RETRY_AFTER, *seconds));
            }
            Self::StoreAway | Self::Overloaded => {
                response.insert_header((header::RETRY_AFTER, REDUCED_CAPACITY_RETRY));
            }
            Self::Method(allow) => {
                response.insert_header((header::ALLOW, allow.as_str()));
            }
            Self::Head(Refused::Trace) => {
                response.insert_header((header::ALLOW, Methods::all().allow_header()));
            }
            Self::Identity(IdentifyError::Missing | IdentifyError::Unusable) => {
                response
                    .insert_header((header::WWW_AUTHENTICATE, "Bearer realm=\"api\", ApiKey realm=\"api\""));
            }
            _ => {}
        }
    }

    /// The problem document, as JSON.
    fn problem(&self, request_id: &HeaderValue) -> String {
        let status = self.status();
        let (r#type, title) = match self {
            Self::Limited { .. } => (QUOTA_EXCEEDED, "Quota Exceeded"),
            Self::StoreAway | Self::Overloaded => (REDUCED_CAPACITY, "Temporary Reduced Capacity"),
            _ => ("about:blank", status.canonical_reason().unwrap_or("Error")),
        };
        let violated_policies = match self {
            Self::Limited { violated, .. } => Some(violated.as_slice()),
            _ => None,
        };
        let problem = Problem {
            r#type,
            title,
            status: status.as_u16(),
            detail: &self.detail(),
            instance: request_id.to_str().unwrap_or_default(),
            violated_policies,
        };
        // Text and numbers: writing them as JSON cannot fail.
        serde_json::to_string(&problem).unwrap_or_default()
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::Head(refused) => head_status(*refused),
            Self::Path(PathError::TooLong) => StatusCode::URI_TOO_LONG,
            Self::Path(_) | Self::Identity(IdentifyError::Conflict) => StatusCode::BAD_REQUEST,
            Self::NoRoute => StatusCode::NOT_FOUND,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Identity(IdentifyError::Missing | IdentifyError::Unusable) => StatusCode::UNAUTHORIZED,
            Self::Excluded => StatusCode::FORBIDDEN,
            Self::Limited { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::StoreAway | Self::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
            Self::Upstream(failure) => failure_status(failure),
            Self::Unchecked | Self::Panicked => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::Head(refused) => sentence(refused),
            Self::Path(error) => sentence(error),
            Self::NoRoute => "No route matches this path.".to_owned(),
            Self::Method(allow) => format!("This path takes {allow} only."),
            Self::Identity(IdentifyError::Conflict) => {
                "The request carries more than one credential.".to_owned()
            }
            Self::Identity(IdentifyError::Missing | IdentifyError::Unusable) => {
                "A valid API key is needed.".to_owned()
            }
            Self::Excluded => "Your plan does not include this route.".to_owned(),
            Self::Limited { detail, .. } => detail.clone(),
            Self::StoreAway => "Requests cannot be counted at the moment. Retry in a second.".to_owned(),
            Self::Upstream(failure) => sentence(failure),
            Self::Overloaded => "The gateway has too much to do at the moment. Retry in a second.".to_owned(),
            Self::Panicked => "The gateway has failed to handle this request.".to_owned(),
            Self::Unchecked => "The gateway cannot forward this request.".to_owned(),
        }
    }

    /// Behind a request that was not understood, or not read to its end, nothing on the connection can be trusted.
    fn ends_the_connection(&self) -> bool {
        match self {
            Self::Head(_) | Self::Path(_) | Self::Panicked => true,
            Self::Upstream(failure) => failure.is_the_clients(),
            _ => false,
        }
    }
}

impl From<Missing> for Rejection {
    fn from(missing: Missing) -> Self {
        match missing {
            Missing::NoRoute => Self::NoRoute,
            Missing::Method { allow } => Self::Method(allow),
        }
    }
}

impl From<IdentifyError> for Rejection {
    fn from(error: IdentifyError) -> Self {
        Self::Identity(error)
    }
}

/// Writes the rate-limit fields into an answer, allowed or refused. Fields of these names from the backend are replaced:
/// one answer carries one truth.
pub fn limit_fields(
    answer: &mut HeaderMap,
    style: Style,
    policy_field: impl FnOnce() -> Option<HeaderValue>,
    rules: &[Rule],
    decision: &Decision,
) {
    if matches!(style, Style::Draft11 | Style::Both) {
        let state = HeaderValue::from_str(&headers::state(rules, decision)).ok();
        if let Some((policy, state)) = policy_field().zip(state) {
            answer.insert(RATE_LIMIT_POLICY, policy);
            answer.insert(RATE_LIMIT, state);
        }
    }
    if matches!(style, Style::XRateLimit | Style::Both)
        && let Some(tightest) = headers::tightest(rules, decision)
    {
        answer.insert(X_LIMIT, tightest.limit.into());
        answer.insert(X_REMAINING, tightest.remaining.into());
        answer.insert(X_RESET, tightest.reset.into());
    }
}

fn head_status(refused: Refused) -> StatusCode {
    match refused {
        Refused::Trace => StatusCode::METHOD_NOT_ALLOWED,
        Refused::Connect | Refused::UnknownMethod | Refused::Upgrade => StatusCode::NOT_IMPLEMENTED,
        Refused::TargetTooLong => StatusCode::URI_TOO_LONG,
        Refused::TooManyHeaders | Refused::HeadersTooLong => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        Refused::Expectation => StatusCode::EXPECTATION_FAILED,
        Refused::TargetForm
        | Refused::HostMissing
        | Refused::HostRepeated
        | Refused::HostInvalid
        | Refused::HostDiffers
        | Refused::TooManyConnectionOptions => StatusCode::BAD_REQUEST,
    }
}

fn failure_status(failure: &Failure) -> StatusCode {
    match failure {
        Failure::Connect(_) | Failure::BadAnswer(_) => StatusCode::BAD_GATEWAY,
        Failure::ConnectTimeout(_) | Failure::HeadTimeout => StatusCode::GATEWAY_TIMEOUT,
        Failure::ClientStalled => StatusCode::REQUEST_TIMEOUT,
        Failure::ClientGone | Failure::ClientMalformed => StatusCode::BAD_REQUEST,
        Failure::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Failure::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// An error's text as a sentence.
fn sentence(error: &impl std::fmt::Display) -> String {
    let mut text = error.to_string();
    if let Some(first) = text.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    text.push('.');
    text
}
