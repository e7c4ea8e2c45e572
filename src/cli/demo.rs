//! `tollgate demo`: everything in one process, nothing to install.

use std::net::{SocketAddr, TcpListener};

use actix_rt::System;
use anyhow::Context;
use clap::Args;
use tollgate::config::{self, Sources};
use tollgate::gateway::Gateway;
use tollgate::proxy::echo;

use super::{Signals, run_until_stopped, say, start_logging};

#[derive(Debug, Args)]
pub(super) struct Demo {
    /// Where the gateway listens; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Where metrics and probes are
    #[arg(long, default_value = "127.0.0.1:9090", value_name = "ADDRESS")]
    admin: SocketAddr,
}

impl Demo {
    pub(super) fn run(&self) -> anyhow::Result<()> {
        let backend = TcpListener::bind(("127.0.0.1", 0))?;
        let loaded = config::load(&self.sources(backend.local_addr()?))?;
        let (_logging, _) = start_logging("warn")?;
        let gateway =
            Gateway::bind(loaded).context("cannot start the demo; other ports: --listen and --admin")?;
        let (public, admin) = (gateway.public_address()?, gateway.admin_address()?);
        System::new().block_on(async {
            let echo = echo::serve(backend)?;
            let signals = Signals::new();
            introduce(public, admin);
            tokio::select! {
                ended = run_until_stopped(gateway, signals) => ended?,
                ended = echo => ended?,
            }
            Ok(())
        })
    }

    /// The built-in example, with its addresses and its backend replaced and the access log off: the terminal belongs to
    /// the person who reads along.
    fn sources(&self, backend: SocketAddr) -> Sources {
        let replaced = [
            ("TOLLGATE__SERVER__LISTEN", self.listen.to_string()),
            ("TOLLGATE__ADMIN__LISTEN", self.admin.to_string()),
            ("TOLLGATE__UPSTREAMS__API__TARGETS", format!("http://{backend}")),
            ("TOLLGATE__LOG__ACCESS", "false".to_owned()),
        ];
        let environment = replaced.map(|(name, value)| (name.to_owned(), value)).into();
        Sources { environment, ..Sources::built_in() }
    }
}

fn introduce(public: SocketAddr, admin: SocketAddr) {
    say(format_args!(
        "\
Tollgate is listening on http://{public}, in front of a backend that echoes what it gets.
Counters are in memory. Metrics: http://{admin}/metrics

Three callers:
  free   x-api-key: tg_demo_free_key   10/s in bursts of 20, 300/min
  pro    x-api-key: tg_demo_pro_key    100/s in bursts of 200, 3000/min
  none   no key                        30/min, counted by address

Try:
  curl -i -H 'x-api-key: tg_demo_free_key' http://{public}/hello

Use up a limit (/v1/search costs 5 units, and the free plan has 20 a minute for it):
  for i in 1 2 3 4 5; do curl -s -o /dev/null -w '%{{http_code}}\\n' -H 'x-api-key: tg_demo_free_key' http://{public}/v1/search; done
  curl -i -H 'x-api-key: tg_demo_free_key' http://{public}/v1/search

The same as pro, who has room left, and without a key:
  curl -i -H 'x-api-key: tg_demo_pro_key' http://{public}/v1/search
  curl -i http://{public}/hello

Stop with Ctrl-C."
    ));
}
