//! `tollgate keys`

use std::io::Read;

use clap::{Args, Subcommand};
use sha2::{Digest, Sha256};

use super::{Usage, say};

#[derive(Debug, Args)]
pub(super) struct Keys {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Read a key from standard input, up to its end, and print the hash that stands in the configuration
    #[command(after_help = "Example: printf %s \"$KEY\" | tollgate keys hash")]
    Hash,
}

impl Keys {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        match self.action {
            Action::Hash => hash(),
        }
    }
}

/// The key comes from standard input, so that it stands in no process list and no shell history.
fn hash() -> anyhow::Result<()> {
    let mut key = Vec::new();
    std::io::stdin().lock().read_to_end(&mut key)?;
    let key = key.trim_ascii();
    if key.is_empty() {
        anyhow::bail!(Usage(
            "There is no key on standard input. Try: printf %s \"$KEY\" | tollgate keys hash".into()
        ));
    }
    let digest = Sha256::digest(key);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    say(format_args!("sha256:{hex}"));
    Ok(())
}
