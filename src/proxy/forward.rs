//! One request to one backend and its answer back.

use std::fmt;
use std::net::IpAddr;
use std::pin::pin;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::body::{BoxBody, None as NoBody};
use actix_web::http::header::{self as inbound, HeaderMap, HeaderName, HeaderValue};
use actix_web::http::{Method, StatusCode};
use actix_web::web::Payload;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use tokio::time::{Instant, sleep_until};

use super::Upstreams;
use super::body::{Download, SizeOnly, Upload, UploadFault};
use super::headers::{self, Framing};
use super::upstream::{Target, Upstream};
use crate::clock;
use crate::limit::Pass;

/// A decided request, as it shall leave.
#[derive(Clone, Copy)]
pub struct Outgoing<'a> {
    /// The method.
    pub method: &'a Method,
    /// The canonical path: the bytes that were routed are the bytes that are sent.
    pub path: &'a str,
    /// The query as received, without its `?`.
    pub query: Option<&'a str>,
    /// The header fields as received.
    pub headers: &'a HeaderMap,
    /// The address at the other end of the client's socket.
    pub peer: IpAddr,
    /// Whether that peer is a proxy that may say for whom it speaks.
    pub peer_is_trusted: bool,
    /// `http` or `https`: how the client reached the gateway.
    pub scheme: &'a str,
    /// The `Host` field as received, already checked.
    pub host: &'a str,
    /// The id that names this request in logs.
    pub request_id: &'a HeaderValue,
    /// The fields that held the caller's credential. They stay here.
    pub credentials: &'a [HeaderName],
    /// Sent as `X-Tollgate-Account`.
    pub account: Option<&'a str>,
    /// Sent as `X-Tollgate-Plan`.
    pub plan: &'a str,
    /// The largest body, in bytes.
    pub max_body: u64,
}

/// Without the query and the header fields: they hold credentials.
impl fmt::Debug for Outgoing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing")
            .field("method", self.method)
            .field("path", &self.path)
            .field("request_id", self.request_id)
            .finish_non_exhaustive()
    }
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// The answer for the client. Its body flows while it is read; if it breaks off, reading it gives an
    /// [`AnswerFault`](super::AnswerFault).
    pub response: HttpResponse,
    /// From the moment the request was ready to leave until the head of the answer was there: connecting, sending the
    /// request body and the backend's own time.
    pub upstream_time: Duration,
}

/// Why there is no answer. The texts hold nothing about the network behind the gateway; the sources do, for logs only.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// No target accepts a connection. Nothing was sent.
    #[error("the backend cannot be reached")]
    Connect(#[source] reqwest::Error),
    /// Connecting took too long. Nothing was sent.
    #[error("the backend could not be reached in time")]
    ConnectTimeout(#[source] reqwest::Error),
    /// The request was sent and no answer began in time.
    #[error("the backend did not answer in time")]
    HeadTimeout,
    /// The backend closed or reset the connection instead of answering, or its answer is not HTTP.
    #[error("the backend gave no proper answer")]
    BadAnswer(#[source] Option<reqwest::Error>),
    /// The client closed its connection while it was sending.
    #[error("the client went away")]
    ClientGone,
    /// The client stopped sending its body.
    #[error("the client stopped sending")]
    ClientStalled,
    /// The client's body is not well formed.
    #[error("the request body is malformed")]
    ClientMalformed,
    /// The client's body is larger than allowed.
    #[error("the request body is larger than allowed")]
    BodyTooLarge,
    /// The gateway contradicts itself. Nothing was sent.
    #[error("the gateway cannot forward this request")]
    Internal(&'static str),
}

impl Failure {
    /// Whether the client broke off or broke the rules, so that nothing is said about the backend.
    #[must_use]
    pub fn is_the_clients(&self) -> bool {
        match self {
            Self::ClientGone | Self::ClientStalled | Self::ClientMalformed | Self::BodyTooLarge => true,
            Self::Connect(_)
            | Self::ConnectTimeout(_)
            | Self::HeadTimeout
            | Self::BadAnswer(_)
            | Self::Internal(_) => false,
        }
    }

    /// Whether it is certain that the backend saw nothing of the request.
    fn sent_nothing(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::ConnectTimeout(_))
    }
}

impl From<UploadFault> for Failure {
    fn from(fault: UploadFault) -> Self {
        match fault {
            UploadFault::TooLarge => Self::BodyTooLarge,
            UploadFault::Stalled => Self::ClientStalled,
            UploadFault::Gone => Self::ClientGone,
            UploadFault::Malformed => Self::ClientMalformed,
        }
    }
}

impl Upstreams {
    /// Sends a request to the upstream of this name and returns its answer, whatever its status.
    ///
    /// A target that does not accept the connection is passed over, once each. Dropping the future, as actix does when
    /// the client goes away, ends the request to the backend too.
    ///
    /// # Errors
    ///
    /// A [`Failure`] when there is no answer to pass on.
    pub async fn forward(
        &self,
        upstream: &str,
        outgoing: Outgoing<'_>,
        payload: Payload,
        _pass: &Pass,
    ) -> Result<Answer, Failure> {
        let upstream = self.get(upstream).ok_or(Failure::Internal("the upstream does not exist"))?;
        let framing = Framing::of(outgoing.headers)?;
        if matches!(framing, Framing::Length(length) if length > outgoing.max_body) {
            return Err(Failure::BodyTooLarge);
        }
        let upload = framing
            .has_body()
            .then(|| Upload::new(payload, outgoing.max_body, upstream.settings.idle_timeout));

        let begun = clock::instant();
        let response = send_to_a_target(upstream, &outgoing, framing, upload.as_ref()).await?;
        let upstream_time = begun.elapsed();
        let response = answer(response, outgoing.method, upstream.settings.idle_timeout)?;
        Ok(Answer { response, upstream_time })
    }
}

/// Tries one target after the other until one accepts the connection.
async fn send_to_a_target(
    upstream: &Upstream,
    outgoing: &Outgoing<'_>,
    framing: Framing,
    upload: Option<&Upload>,
) -> Result<reqwest::Response, Failure> {
    let mut last = Failure::Internal("the upstream has no target");
    for target in upstream.targets_in_turn() {
        let request = request_to(target, upstream, outgoing, framing, upload)?;
        match send(upstream, request, upload).await {
            Err(failure) if failure.sent_nothing() && !upload.is_some_and(Upload::is_touched) => {
                last = failure;
            }
            result => return result,
        }
    }
    Err(last)
}

fn request_to(
    target: &Target,
    upstream: &Upstream,
    outgoing: &Outgoing<'_>,
    framing: Framing,
    upload: Option<&Upload>,
) -> Result<reqwest::Request, Failure> {
    let method = http::Method::from_bytes(outgoing.method.as_str().as_bytes())
        .map_err(|_| Failure::Internal("the method cannot be sent on"))?;
    let url = target.url_for(outgoing.path, outgoing.query)?;
    let mut request = reqwest::Request::new(method, url);
    *request.headers_mut() =
        headers::to_upstream(outgoing, framing, &target.authority, upstream.settings.preserve_host)?;
    *request.body_mut() = upload.map(Upload::body);
    Ok(request)
}

/// Sends `request` and waits for the head of the answer.
async fn send(
    upstream: &Upstream,
    request: reqwest::Request,
    upload: Option<&Upload>,
) -> Result<reqwest::Response, Failure> {
    let limit = upstream.settings.head_timeout;
    let mut answer = pin!(upstream.client.execute(request));
    let mut timer = pin!(sleep_until(Instant::now() + limit));
    loop {
        tokio::select! {
            biased;
            result = &mut answer => return result.map_err(|error| failure_of(error, upload)),
            () = &mut timer => {}
        }
        // Without a body the whole request was sent at the beginning, and the time is up.
        let deadline = upload.map(|upload| upload.head_deadline(limit));
        match deadline {
            Some(later) if later > timer.deadline() => timer.as_mut().reset(later),
            _ => return Err(Failure::HeadTimeout),
        }
    }
}

/// What a failed exchange means. A fault on the client's side comes first: it is the cause of the other.
fn failure_of(error: reqwest::Error, upload: Option<&Upload>) -> Failure {
    if let Some(fault) = upload.and_then(Upload::fault) {
        return fault.into();
    }
    // The URL may hold a credential in its query, and errors end up in logs.
    let error = error.without_url();
    match (error.is_connect(), error.is_timeout()) {
        (true, true) => Failure::ConnectTimeout(error),
        (true, false) => Failure::Connect(error),
        (false, _) => Failure::BadAnswer(Some(error)),
    }
}

/// The backend's answer as actix sends it.
fn answer(
    upstream: reqwest::Response,
    method: &Method,
    idle_limit: Duration,
) -> Result<HttpResponse, Failure> {
    let status = StatusCode::from_u16(upstream.status().as_u16()).map_err(|_| Failure::BadAnswer(None))?;
    let has_two_lengths =
        upstream.headers().contains_key(TRANSFER_ENCODING) && upstream.headers().contains_key(CONTENT_LENGTH);
    if status.is_informational() || has_two_lengths {
        return Err(Failure::BadAnswer(None));
    }

    let mut response = HttpResponse::with_body(status, BoxBody::new(NoBody::new()));
    if status.canonical_reason().is_none() {
        // actix would write a text of its own.
        response.head_mut().reason = Some("");
    }
    headers::to_client(upstream.headers(), response.headers_mut())?;
    let declared = upstream.headers().get(CONTENT_LENGTH).cloned();

    if status == StatusCode::NO_CONTENT {
        return Ok(response);
    }
    if status == StatusCode::NOT_MODIFIED {
        // It tells the length of the body that is not sent; actix keeps it for this status.
        if let Some(length) = declared.and_then(|length| HeaderValue::from_bytes(length.as_bytes()).ok()) {
            response.headers_mut().insert(inbound::CONTENT_LENGTH, length);
        }
        return Ok(response);
    }
    if method == Method::HEAD {
        let length = declared.and_then(|length| length.to_str().ok()?.parse().ok());
        return Ok(match length {
            Some(length) => response.set_body(BoxBody::new(SizeOnly(length))),
            None => response,
        });
    }
    let size = upstream.content_length();
    let body = Download::new(Box::pin(upstream.bytes_stream()), size, idle_limit);
    Ok(response.set_body(BoxBody::new(body)))
}
