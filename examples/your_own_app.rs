//! The gate around handlers of your own, without the proxy: `cargo run --example your_own_app`, then
//!
//! ```text
//! curl -i http://127.0.0.1:8081/hello          three times: the third is a 429
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use actix_web::{App, HttpServer, Responder, web};
use tollgate::clock::SystemClock;
use tollgate::config::{self, Purpose, Sources};
use tollgate::gate::{Admitted, Gate};
use tollgate::limit::store::{MemoryStore, StoreKind};
use tollgate::observe::Metrics;
use tollgate::plan::Policy;

async fn hello(admitted: Admitted) -> impl Responder {
    format!("hello, {} on plan {}\n", admitted.caller.id, admitted.caller.plan)
}

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/your_own_app.toml"));
    let sources = Sources {
        files: vec![file],
        environment: Sources::environment_of_process(),
        purpose: Purpose::Middleware,
    };
    let policy = Policy::new(config::load(&sources)?.policy)?;
    // Made once, out here: all workers share the counters.
    let memory = Arc::new(MemoryStore::new(100_000, Arc::new(SystemClock::new())));
    let gate = Gate::new(policy, StoreKind::Memory, memory, Arc::new(Metrics::new()?));
    // Later, from anywhere: `gate.put_in_force(policy)` swaps the policy of all workers, and leaves the counters.
    let app = move || App::new().wrap(gate.clone()).route("/hello", web::get().to(hello));
    HttpServer::new(app).bind(("127.0.0.1", 8081))?.run().await?;
    Ok(())
}
