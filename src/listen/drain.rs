//! The end of a listener: what its connections are told, and when the last of them is gone.
//!
//! A gateway that stops has two steps. When it *leaves*, every answer says `Connection: close`: clients that still call
//! are told to go elsewhere. When it *closes*, connections without a request are closed as well; whoever is in the middle
//! of one gets the answer first.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::sync::{Notify, watch};

/// The end of one listener, for everybody who has a part in it. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Drain(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    leaving: AtomicBool,
    closing: watch::Sender<bool>,
    open: AtomicUsize,
    last_gone: Notify,
}

impl Drain {
    /// From now on answers tell their clients to go.
    pub fn leave(&self) {
        self.0.leaving.store(true, Ordering::Relaxed);
    }

    /// From now on connections without a request are closed too.
    pub fn close(&self) {
        self.leave();
        self.0.closing.send_replace(true);
    }

    /// Whether answers tell their clients to go.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.0.leaving.load(Ordering::Relaxed)
    }

    /// One more connection, until it is dropped.
    #[must_use]
    pub fn connection(&self) -> Connected {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        let mut closing = self.0.closing.subscribe();
        let closing = Box::pin(async move {
            // Its sender lives as long as the connection does.
            drop(closing.wait_for(|closing| *closing).await);
        });
        Connected { drain: self.clone(), closing: Some(closing) }
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.0.open.load(Ordering::Acquire)
    }

    /// Waits until there is no connection.
    pub async fn empty(&self) {
        loop {
            let mut gone = std::pin::pin!(self.0.last_gone.notified());
            gone.as_mut().enable();
            if self.connections() == 0 {
                return;
            }
            gone.await;
        }
    }
}

/// One connection of a listener.
pub struct Connected {
    drain: Drain,
    /// `None` once it has come about.
    closing: Option<Pin<Box<dyn Future<Output = ()>>>>,
}

impl Connected {
    /// Whether the connection should close when it has no request; if not yet, the task is woken when that changes.
    pub fn poll_closing(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Some(closing) = &mut self.closing {
            std::task::ready!(closing.as_mut().poll(context));
            self.closing = None;
        }
        Poll::Ready(())
    }
}

impl std::fmt::Debug for Connected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connected").field("closing", &self.closing.is_none()).finish_non_exhaustive()
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        if self.drain.0.open.fetch_sub(1, Ordering::Release) == 1 {
            self.drain.0.last_gone.notify_waiters();
        }
    }
}
