//! `tollgate serve`

use actix_web::rt::System;
use tollgate::gateway::Gateway;

use super::{ConfigArgs, start_logging, stop_signal};

pub(super) fn run(config: &ConfigArgs) -> anyhow::Result<()> {
    let loaded = config.load()?;
    let _logging = start_logging(&loaded.settings.log.level)?;
    let files: Vec<_> = loaded.files.iter().map(|file| file.display().to_string()).collect();
    tracing::info!(files = files.join(","), version = env!("CARGO_PKG_VERSION"), "configuration read");
    let gateway = Gateway::bind(loaded)?;
    let (public, admin) = (gateway.public_address()?, gateway.admin_address()?);
    tracing::info!(%public, %admin, "listening");
    System::new().block_on(gateway.run(stop_signal()))?;
    tracing::info!("stopped");
    Ok(())
}
