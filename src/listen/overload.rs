//! How much the gateway takes on at once. A request that would be too much is refused before anything is spent on it, the cheapest
//! plan first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use crate::plan::Priority;

/// Where Linux says how much memory a process uses.
const STATUS: &str = "/proc/self/status";

/// So many requests are worked on however little memory there is. What the process has got from the system once it may keep for a
/// while, or for good, when nobody uses it any more: with none at all, a gateway could refuse everything for ever.
const TRICKLE: usize = 16;

/// The limits of what is worked on, for the whole process. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Overload(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    most: usize,
    in_flight: AtomicUsize,
    pressure: AtomicU8,
}

/// How much of the memory that the gateway may use it does use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pressure {
    None,
    /// Connections are not kept: they hold buffers.
    High,
    /// Hardly anything new is taken on.
    Full,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shed {
    /// There are too many others, for its plan.
    InFlight,
    /// There is no memory left.
    Memory,
}

impl Shed {
    /// The `reason` label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InFlight => "in_flight",
            Self::Memory => "memory",
        }
    }
}

/// One request that is worked on, until it is dropped.
#[derive(Debug)]
pub struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// There is no limit.
impl Default for Overload {
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

impl Overload {
    /// At most so many requests at once.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let (in_flight, pressure) = (AtomicUsize::new(0), AtomicU8::new(Pressure::None as u8));
        Self(Arc::new(Shared { most, in_flight, pressure }))
    }

    /// A place for a request of a plan with this priority.
    ///
    /// # Errors
    /// When it would be one too many.
    pub fn place(&self, priority: Priority) -> Result<Place, Shed> {
        let others = self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        let place = Place(Arc::clone(&self.0));
        match () {
            () if others >= share(self.0.most, priority) => Err(Shed::InFlight),
            () if others >= TRICKLE && self.is_under(Pressure::Full) => Err(Shed::Memory),
            () => Ok(place),
        }
    }

    /// Whether connections should not be kept.
    #[must_use]
    pub fn is_short_of_memory(&self) -> bool {
        self.is_under(Pressure::High)
    }

    /// The process uses `used` bytes of the `most` that it may use.
    pub fn note_memory(&self, used: u64, most: u64) {
        let is_over = |percent: u128| u128::from(used) * 100 > u128::from(most) * percent;
        let pressure = match () {
            () if is_over(95) => Pressure::Full,
            () if is_over(80) => Pressure::High,
            () => Pressure::None,
        };
        let before = self.0.pressure.swap(pressure as u8, Ordering::Relaxed);
        if pressure == Pressure::Full && before != Pressure::Full as u8 {
            tracing::warn!(
                used,
                most,
                "server.max_memory is nearly used up: requests are refused until there is room"
            );
        }
    }

    fn is_under(&self, pressure: Pressure) -> bool {
        self.0.pressure.load(Ordering::Relaxed) >= pressure as u8
    }
}

/// How many of `most` places a plan may help to fill: what is above is for those that matter more.
fn share(most: usize, priority: Priority) -> usize {
    let tenths = match priority {
        Priority::Low => 8,
        Priority::Normal => 9,
        Priority::High => 10,
    };
    // In this order nothing overflows; at least one, so that no plan is shut out by a small number.
    (most / 10 * tenths + most % 10 * tenths / 10).max(1)
}

/// Resident memory of this process in bytes; `None` where the system does not say.
#[must_use]
pub fn resident_memory() -> Option<u64> {
    let status = std::fs::read_to_string(STATUS).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cheap_plans_are_shed_first() {
        let overload = Overload::new(10);
        let fill = |priority| std::iter::from_fn(|| overload.place(priority).ok()).collect::<Vec<_>>();
        let low = fill(Priority::Low);
        assert_eq!(low.len(), 8);
        let normal = fill(Priority::Normal);
        assert_eq!(normal.len(), 1);
        let high = fill(Priority::High);
        assert_eq!(high.len(), 1);
        assert_eq!(overload.place(Priority::High).unwrap_err(), Shed::InFlight);
        drop(high);
        assert!(overload.place(Priority::Normal).is_err());
        drop(overload.place(Priority::High).unwrap());
        drop((low, normal));
        assert_eq!(fill(Priority::Low).len(), 8);
    }

    #[test]
    fn shares_never_overflow_and_are_never_nothing() {
        for most in [1, 2, 9, 10, 11, 99, usize::MAX] {
            let shares =
                [Priority::Low, Priority::Normal, Priority::High].map(|priority| share(most, priority));
            assert!(shares.is_sorted() && shares[0] >= 1 && shares[2] == most, "{most}: {shares:?}");
        }
    }

    #[test]
    fn memory_closes_connections_and_then_sheds_everybody() {
        let overload = Overload::default();
        // These are not too many, whatever happens.
        let _trickle = [(); TRICKLE].map(|()| overload.place(Priority::Low).unwrap());
        let state = |used| {
            overload.note_memory(used, 1000);
            (overload.is_short_of_memory(), overload.place(Priority::High).err())
        };
        assert_eq!(state(800), (false, None));
        assert_eq!(state(801), (true, None));
        assert_eq!(state(951), (true, Some(Shed::Memory)));
        assert!(Overload::default().place(Priority::Low).is_ok());
        assert_eq!(state(700), (false, None));
    }

    #[test]
    fn this_process_uses_memory() {
        assert!(resident_memory().unwrap() > 1 << 20);
    }
}
