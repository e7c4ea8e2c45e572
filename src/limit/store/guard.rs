//! A server that may fail, with its failures bounded: one deadline for the whole step, a cap on what waits, no queue, and a
//! breaker that ends both the asking and the waiting.
//!
//! Nobody else knows that Redis can fail. What a failure means for the request is `on_failure`'s to say, in
//! [`Limiter`](crate::limit::Limiter).

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt as _;
use futures_util::future::Either;
use tokio::sync::Notify;

use super::StoreError;
use super::shard::Shard;

/// Requests of one worker that may wait for one server at the same time. One more does not queue: it goes without, at once.
const IN_FLIGHT_MAX: usize = 256;

/// What one worker puts around its calls to one server.
#[derive(Debug)]
pub(super) struct Guard {
    shard: Arc<Shard>,
    in_flight: Cell<usize>,
    /// Wakes those who wait when nobody should wait any more.
    given_up: Notify,
}

impl Guard {
    /// Around calls to this server.
    #[must_use]
    pub(super) fn new(shard: Arc<Shard>) -> Self {
        Self { shard, in_flight: Cell::new(0), given_up: Notify::new() }
    }

    /// The server.
    #[must_use]
    pub(super) fn shard(&self) -> &Arc<Shard> {
        &self.shard
    }

    /// A place among those who wait, for a request of this caller.
    ///
    /// # Errors
    /// When the breaker keeps the caller from the server, or too many wait already.
    pub(super) fn enter(&self, caller: &str) -> Result<Entered<'_>, StoreError> {
        if !self.shard.admits(caller) {
            return Err(StoreError::Tripped);
        }
        let now = self.in_flight.get();
        if now >= IN_FLIGHT_MAX {
            return Err(StoreError::Saturated);
        }
        self.in_flight.set(now + 1);
        Ok(Entered(self))
    }

    /// Wakes all who wait: the server has failed, and they would wait in vain.
    pub(super) fn give_up(&self) {
        self.given_up.notify_waiters();
    }
}

/// A request that may wait; its place is free when this is dropped, in whatever way.
#[derive(Debug)]
pub(super) struct Entered<'a>(&'a Guard);

impl Entered<'_> {
    /// Waits for an answer, until `deadline` and no longer than the server is asked at all, and notes how it ended. A request
    /// whose client leaves says nothing about the server.
    ///
    /// # Errors
    /// Those of the answer, or that there was none in time.
    pub(super) async fn wait<T>(
        self,
        deadline: Option<Instant>,
        answer: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let guard = self.0;
        let answer = tokio::select! {
            biased;
            answer = within(deadline, answer) => answer,
            () = guard.given_up.notified() => return Err(StoreError::GivenUp),
        };
        match &answer {
            // A value that is damaged is one caller's, a quota one plan's: they say nothing about the server.
            Err(error @ (StoreError::Unreadable(_) | StoreError::ClocksApart)) => {
                guard.shard.record(Ok(()));
                guard.shard.complain(error);
            }
            Err(error) => guard.shard.record(Err(error)),
            Ok(_) => guard.shard.record(Ok(())),
        }
        answer
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let waiting = &self.0.in_flight;
        waiting.set(waiting.get() - 1);
    }
}

/// The answer, or a timeout.
///
/// # Errors
/// Those of the answer, or a timeout at `deadline`.
pub(in crate::limit) fn within<T>(
    deadline: Option<Instant>,
    answer: impl Future<Output = Result<T, StoreError>>,
) -> impl Future<Output = Result<T, StoreError>> {
    // Not an `async fn`: that would keep room for what it is given, and again for what it makes of it, and these add up.
    match deadline {
        Some(deadline) => Either::Left(
            tokio::time::timeout_at(deadline.into(), answer)
                .map(|answer| answer.unwrap_or(Err(StoreError::Timeout))),
        ),
        None => Either::Right(answer),
    }
}
