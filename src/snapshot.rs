//! What a reload changes, as one value. A request takes one [`Snapshot`] at its start; it is decided, forwarded, answered and
//! settled by that one, whatever comes into force meanwhile.
//!
//! Deliberately not here: counters, which no reload touches, and how a snapshot comes about.

use std::cell::RefCell;
use std::sync::Arc;

use arc_swap::{ArcSwap, Cache};

use crate::limit::headers::Style;
use crate::plan::Policy;
use crate::proxy::Backends;

/// Everything by which a request is handled. Never changes; another one takes its place.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// What decides.
    pub policy: Arc<Policy>,
    /// Which rate-limit header fields answers carry.
    pub style: Style,
    /// Whether requests are written to the access log, where there is one.
    pub access_log: bool,
    /// Where requests go that pass; empty in a middleware, which has handlers behind it.
    pub backends: Arc<Backends>,
    /// The largest request body that is forwarded, in bytes.
    pub max_body: u64,
}

/// A policy alone, as a middleware has it: the fields of draft 11, and nothing to forward to.
impl From<Policy> for Snapshot {
    fn from(policy: Policy) -> Self {
        Self {
            policy: Arc::new(policy),
            style: Style::Draft11,
            access_log: true,
            backends: Arc::default(),
            max_body: u64::MAX,
        }
    }
}

impl Snapshot {
    /// With these rate-limit header fields instead of those of draft 11.
    #[must_use]
    pub fn style(mut self, style: Style) -> Self {
        self.style = style;
        self
    }
}

/// The snapshot that is in force. All clones are one place.
#[derive(Debug, Clone)]
pub struct InForce(Arc<ArcSwap<Snapshot>>);

impl InForce {
    /// A place that begins with this snapshot.
    #[must_use]
    pub fn new(snapshot: Snapshot) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(snapshot)))
    }

    /// What is in force now.
    #[must_use]
    pub fn latest(&self) -> Arc<Snapshot> {
        self.0.load_full()
    }

    /// Puts another snapshot in force, for every request that begins from now on. Gives back the one before it, which
    /// requests in flight may still hold.
    pub fn replace(&self, snapshot: Snapshot) -> Arc<Snapshot> {
        self.0.swap(Arc::new(snapshot))
    }

    /// One worker's view.
    #[must_use]
    pub(crate) fn view(&self) -> View {
        View(RefCell::new(Cache::new(Arc::clone(&self.0))))
    }
}

/// One worker's view of what is in force: as long as nothing is replaced, looking costs the comparison of a pointer.
#[derive(Debug)]
pub(crate) struct View(RefCell<Cache<Arc<ArcSwap<Snapshot>>, Arc<Snapshot>>>);

impl View {
    /// What is in force now.
    pub(crate) fn latest(&self) -> Arc<Snapshot> {
        Arc::clone(self.0.borrow_mut().load())
    }
}
