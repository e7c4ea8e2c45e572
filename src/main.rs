//! The `tollgate` command: everything it does is in [`cli`].

mod cli;

use std::process::ExitCode;

use tikv_jemallocator::Jemalloc;

/// A forwarded request makes about 60 small, short-lived allocations, nearly all of them in the libraries around us. The
/// system's allocator takes an eighth of the whole CPU time for them. This one takes as little as mimalloc, within a few percent,
/// and gives back what a burst has used, by a thread of its own: mimalloc kept it, half of the process was that.
/// `docs/concepts/speed.md` has the measurements.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    cli::run()
}
