//! The `tollgate` command: everything it does is in [`cli`].

mod cli;

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// A forwarded request makes about 60 small, short-lived allocations, nearly all of them in the libraries around us. The
/// system's allocator takes an eighth of the whole CPU time for them; `docs/concepts/speed.md` has the measurement.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    cli::run()
}
