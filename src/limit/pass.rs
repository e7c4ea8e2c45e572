//! Permission as a value.

/// Says that a request was decided and may pass. [`forward`](crate::proxy::Upstreams::forward) takes one, so nothing
/// reaches a backend unchecked. Only the limiter makes one.
#[derive(Debug)]
#[must_use = "permission that is not used lets nothing through"]
pub struct Pass {
    _only_the_limiter_makes_one: (),
}

impl Pass {
    /// A pass for a request that was decided.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "the limiter that grants it is not here yet")
    )]
    pub(crate) fn granted() -> Self {
        Self {
            _only_the_limiter_makes_one: (),
        }
    }
}
