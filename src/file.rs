//! Files that the operator names: read whole, and never for ever.

use std::fs::{File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

/// What is in a file of at most `most` bytes, and what the file was like before it was read.
///
/// # Errors
/// When it cannot be read, is larger, or is a pipe.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<(Metadata, Vec<u8>)> {
    // To open one waits until somebody writes into it: whoever reads would never end, nor the process.
    if path.metadata()?.file_type().is_fifo() {
        return Err(io::Error::other("it is a pipe, and not a file"));
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    // What it says of its length need not be so: that of a device is 0.
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("it is larger than {most} bytes")));
    }
    Ok((metadata, bytes))
}
