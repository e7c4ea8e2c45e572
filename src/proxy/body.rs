//! Bodies on their way, in both directions, chunk by chunk.
//!
//! Nothing is collected: whoever reads is served one chunk, and whoever does not read makes the other side wait. Each
//! direction has an idle limit, which runs only while the sending side owes bytes: a receiver that is slow is not idle.
//!
//! actix's payload belongs to its thread and reqwest wants bodies that may move. Each worker is one thread with one
//! runtime, so [`SendWrapper`] carries the payload without a copy; it would panic if it were ever polled elsewhere.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::body::{BodySize, MessageBody};
use actix_web::error::PayloadError;
use actix_web::web::Payload;
use bytes::Bytes;
use futures_core::Stream;
use send_wrapper::SendWrapper;
use tokio::time::{Instant, Sleep, sleep_until};

/// Why a client's body did not arrive whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum UploadFault {
    /// More bytes than allowed.
    #[error("the request body is larger than allowed")]
    TooLarge,
    /// No byte for the idle limit.
    #[error("the client stopped sending its request body")]
    Stalled,
    /// The connection ended.
    #[error("the client went away in its request body")]
    Gone,
    /// The chunks are not well formed.
    #[error("the request body is malformed")]
    Malformed,
}

/// A client's body, shared between the stream that the HTTP client reads and the future that waits for the answer.
#[derive(Clone)]
pub(super) struct Upload(Rc<UploadState>);

struct UploadState {
    payload: RefCell<Payload>,
    bytes_max: u64,
    idle_limit: Duration,
    bytes_seen: Cell<u64>,
    touched: Cell<bool>,
    awaiting_client: Cell<bool>,
    last_progress: Cell<Instant>,
    fault: Cell<Option<UploadFault>>,
}

impl Upload {
    pub(super) fn new(payload: Payload, bytes_max: u64, idle_limit: Duration) -> Self {
        Self(Rc::new(UploadState {
            payload: RefCell::new(payload),
            bytes_max,
            idle_limit,
            bytes_seen: Cell::new(0),
            touched: Cell::new(false),
            awaiting_client: Cell::new(false),
            last_progress: Cell::new(Instant::now()),
            fault: Cell::new(None),
        }))
    }

    /// The body as reqwest takes it.
    pub(super) fn body(&self) -> reqwest::Body {
        let reading = Reading { upload: self.clone(), idle: IdleTimer::new(self.0.idle_limit) };
        reqwest::Body::wrap_stream(UploadStream(SendWrapper::new(reading)))
    }

    /// Whether somebody asked for a first byte. Until then the whole body can go to another target.
    pub(super) fn is_touched(&self) -> bool {
        self.0.touched.get()
    }

    /// What went wrong on the client's side, if anything did.
    pub(super) fn fault(&self) -> Option<UploadFault> {
        self.0.fault.get()
    }

    /// When a backend that must answer within `limit` is late: `limit` after it took the last byte. While the client
    /// owes bytes it is not the backend's turn, and the idle limit watches the client.
    pub(super) fn head_deadline(&self, limit: Duration) -> Instant {
        if self.0.awaiting_client.get() {
            return Instant::now() + limit;
        }
        self.0.last_progress.get() + limit
    }

    fn progress(&self) {
        self.0.awaiting_client.set(false);
        self.0.last_progress.set(Instant::now());
    }

    fn count(&self, chunk: &Bytes) -> Result<(), UploadFault> {
        let seen = self.0.bytes_seen.get().saturating_add(chunk.len() as u64);
        self.0.bytes_seen.set(seen);
        if seen > self.0.bytes_max {
            return Err(UploadFault::TooLarge);
        }
        Ok(())
    }

    fn fail<T>(&self, fault: UploadFault) -> Poll<Option<Result<T, UploadFault>>> {
        self.0.fault.set(Some(fault));
        Poll::Ready(Some(Err(fault)))
    }
}

/// The reading end of an [`Upload`], as the HTTP client may hold it.
struct UploadStream(SendWrapper<Reading>);

impl Stream for UploadStream {
    type Item = Result<Bytes, UploadFault>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_chunk(context)
    }
}

struct Reading {
    upload: Upload,
    idle: IdleTimer,
}

impl Reading {
    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, UploadFault>>> {
        let upload = &self.upload;
        upload.0.touched.set(true);

        let polled = Pin::new(&mut *upload.0.payload.borrow_mut()).poll_next(context);
        match polled {
            Poll::Ready(Some(Ok(chunk))) => {
                upload.progress();
                self.idle.rest();
                match upload.count(&chunk) {
                    Ok(()) => Poll::Ready(Some(Ok(chunk))),
                    Err(fault) => upload.fail(fault),
                }
            }
            Poll::Ready(Some(Err(error))) => upload.fail(fault_of(&error)),
            Poll::Ready(None) => {
                upload.progress();
                Poll::Ready(None)
            }
            Poll::Pending => {
                upload.0.awaiting_client.set(true);
                if self.idle.is_over(context) {
                    return upload.fail(UploadFault::Stalled);
                }
                Poll::Pending
            }
        }
    }
}

fn fault_of(error: &PayloadError) -> UploadFault {
    match error {
        PayloadError::EncodingCorrupted | PayloadError::UnknownLength => UploadFault::Malformed,
        PayloadError::Overflow => UploadFault::TooLarge,
        _ => UploadFault::Gone,
    }
}

/// Why an answer's body ended early. The client's connection is closed, so it cannot take the part for the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AnswerFault {
    /// The backend sent no byte for the idle limit.
    #[error("the backend stopped sending its answer")]
    Stalled,
    /// The backend closed or broke the connection, or its chunks are malformed.
    #[error("the backend broke off its answer")]
    Broken,
}

/// A backend's body on its way to the client.
pub(super) struct Download<S> {
    stream: S,
    size: BodySize,
    idle: IdleTimer,
    fault: Option<AnswerFault>,
}

impl<S> Download<S> {
    /// `size` is what the client is told; `None` where the end of the chunks tells it.
    pub(super) fn new(stream: S, size: Option<u64>, idle_limit: Duration) -> Self {
        Self {
            stream,
            size: size.map_or(BodySize::Stream, BodySize::Sized),
            idle: IdleTimer::new(idle_limit),
            fault: None,
        }
    }

    /// Holds the fault back for one turn, in which actix writes out what came before it.
    fn break_off(
        &mut self,
        fault: AnswerFault,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, AnswerFault>>> {
        self.fault = Some(fault);
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<S, E> MessageBody for Download<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
{
    type Error = AnswerFault;

    fn size(&self) -> BodySize {
        self.size
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, AnswerFault>>> {
        let this = &mut *self;
        if let Some(fault) = this.fault {
            return Poll::Ready(Some(Err(fault)));
        }
        match Pin::new(&mut this.stream).poll_next(context) {
            Poll::Ready(Some(Ok(chunk))) => {
                this.idle.rest();
                Poll::Ready(Some(Ok(chunk)))
            }
            Poll::Ready(Some(Err(_))) => this.break_off(AnswerFault::Broken, context),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending if this.idle.is_over(context) => this.break_off(AnswerFault::Stalled, context),
            Poll::Pending => Poll::Pending,
        }
    }
}

/// The body of an answer to HEAD: a size, and not one byte. actix writes `Content-Length` from the size of the body.
pub(super) struct SizeOnly(pub(super) u64);

impl MessageBody for SizeOnly {
    type Error = std::convert::Infallible;

    fn size(&self) -> BodySize {
        BodySize::Sized(self.0)
    }

    fn poll_next(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Poll::Ready(None)
    }
}

/// Measures one wait after the other. While bytes flow it costs one look at the clock per wait: the timer that is armed
/// for an earlier wait runs out on its own and is then set to where it belongs.
struct IdleTimer {
    limit: Duration,
    waiting_since: Option<Instant>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl IdleTimer {
    fn new(limit: Duration) -> Self {
        Self { limit, waiting_since: None, sleep: None }
    }

    /// The wait is over: something came.
    fn rest(&mut self) {
        self.waiting_since = None;
    }

    /// Whether the current wait, which begins now if there was none, has reached the limit. If not, the task is woken
    /// when it may have.
    fn is_over(&mut self, context: &mut Context<'_>) -> bool {
        let deadline = *self.waiting_since.get_or_insert_with(Instant::now) + self.limit;
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        while sleep.as_mut().poll(context).is_ready() {
            if sleep.deadline() >= deadline {
                return true;
            }
            sleep.as_mut().reset(deadline);
        }
        false
    }
}
