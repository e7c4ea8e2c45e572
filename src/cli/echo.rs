//! `tollgate echo`

use std::net::{SocketAddr, TcpListener};

use actix_rt::System;
use anyhow::Context;
use clap::Args;
use tollgate::proxy::echo;

use super::say;

#[derive(Debug, Args)]
pub(super) struct Echo {
    /// Where to listen
    #[arg(long, default_value = "127.0.0.1:9000", value_name = "ADDRESS")]
    listen: SocketAddr,
}

impl Echo {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let listener = TcpListener::bind(self.listen).with_context(|| {
            format!("cannot listen on {} (is another program using the port?)", self.listen)
        })?;
        say(format_args!("echoing on http://{}", listener.local_addr()?));
        System::new().block_on(async {
            let server = echo::serve(listener)?;
            let handle = server.handle();
            let mut signals = super::Signals::new();
            tokio::select! {
                ended = server => ended,
                _ = signals.next() => {
                    handle.stop(true).await;
                    Ok(())
                }
            }
        })?;
        Ok(())
    }
}
