//! `tollgate serve`

use actix_rt::System;
use tollgate::gateway::Gateway;
use tollgate::identify::KeyTable;

use super::{ConfigArgs, Signals, hangup, reload_at_hangup, run_until_stopped, start_logging};

pub(super) fn run(config: &ConfigArgs) -> anyhow::Result<()> {
    let loaded = config.load()?;
    let (_logging, change_of_level) = start_logging(&loaded.settings.log.level)?;
    let files: Vec<_> = loaded.files.iter().map(|file| file.display().to_string()).collect();
    let (files, version, program) = (files.join(","), loaded.provenance.version, env!("CARGO_PKG_VERSION"));
    tracing::info!(files, %version, program, "configuration read");
    warn_of_example_keys(&loaded.policy.keys);
    let mut gateway = Gateway::bind(loaded)?;
    gateway.on_log_level(change_of_level);
    let reloads = gateway.reloads();
    let (public, admin) = (gateway.public_address()?, gateway.admin_address()?);
    let handed_over = gateway.is_handed_over();
    System::new().block_on(async {
        // Whoever reads that it listens may send it a signal.
        let (signals, hangup) = (Signals::new(), hangup());
        tracing::info!(%public, %admin, handed_over, "listening");
        tokio::select! {
            served = run_until_stopped(gateway, signals) => served,
            never = reload_at_hangup(reloads, hangup) => match never {},
        }
    })?;
    tracing::info!("stopped");
    Ok(())
}

/// Keys that stand in the manual open the gateway to everybody who has read it.
fn warn_of_example_keys(keys: &KeyTable) {
    for key in ["tg_demo_free_key", "tg_demo_pro_key"] {
        if let Some(entry) = keys.find(key.as_bytes()) {
            tracing::warn!(id = %entry.id, "this key is a public example: anybody may use it; remove it from the configuration");
        }
    }
}
