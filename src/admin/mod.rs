//! The operator's side, on a port of its own: metrics, probes, and the way to reload.
//!
//! `/livez` and `/readyz` are open to everybody who reaches the port; everything else asks for the token, if one is set.
//! The port is on loopback by default, and without a token it may be nowhere else.

use std::io;
use std::net::TcpListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use actix_web::dev::Server;
use actix_web::http::header::{self, ContentType};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use secrecy::ExposeSecret as _;
use serde::Serialize;
use subtle::ConstantTimeEq;

use crate::limit::Common;
use crate::limit::store::{MemoryStore, Phase, RedisStore, StoreKind};
use crate::observe::{Metrics, Totals};
use crate::reload::{Reloads, Trigger};

/// What the operator can see.
#[derive(Debug, Clone)]
pub struct Admin {
    metrics: Arc<Metrics>,
    memory: Arc<MemoryStore>,
    common: Arc<Common>,
    store: StoreKind,
    reloads: Reloads,
    draining: Draining,
}

/// Whether the gateway has begun to stop.
#[derive(Debug, Clone, Default)]
pub struct Draining(Arc<AtomicBool>);

impl Draining {
    /// From now on the gateway is not ready.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn has_begun(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Admin {
    /// The operator's view of a gateway that is about to start.
    #[must_use]
    pub fn new(
        store: StoreKind,
        metrics: Arc<Metrics>,
        memory: Arc<MemoryStore>,
        common: Arc<Common>,
        reloads: Reloads,
    ) -> Self {
        metrics.build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Self { metrics, memory, common, store, reloads, draining: Draining::default() }
    }

    /// The switch that says the gateway is stopping.
    #[must_use]
    pub fn draining(&self) -> Draining {
        self.draining.clone()
    }

    fn permits(&self, request: &HttpRequest) -> bool {
        let operator = self.reloads.operator();
        let Some(token) = &operator.token else { return true };
        let shown = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let shown = shown.and_then(|value| value.strip_prefix(b"Bearer "));
        shown.is_some_and(|shown| bool::from(shown.ct_eq(token.expose_secret().as_bytes())))
    }
}

/// Serves the admin listener.
///
/// # Errors
/// When the listener cannot be used.
pub fn server(listener: TcpListener, admin: Admin) -> io::Result<Server> {
    let server = HttpServer::new(move || {
        let probe = Rc::new(StoreProbe::new(&admin.store));
        App::new()
            .app_data(web::Data::new(admin.clone()))
            .app_data(probe)
            .route("/livez", web::get().to(livez))
            .route("/readyz", web::get().to(readyz))
            .route("/metrics", web::get().to(metrics))
            .service(web::resource("/v1/reload").post(reload).default_service(web::to(use_post)))
            .default_service(web::to(HttpResponse::NotFound))
    });
    Ok(server.workers(1).disable_signals().shutdown_timeout(1).listen(listener)?.run())
}

/// The process runs. Says nothing of anything else: a store that is away must not get the gateway restarted.
async fn livez() -> &'static str {
    "ok\n"
}

#[derive(Serialize)]
struct Readiness {
    ready: bool,
    listener: &'static str,
    store: &'static str,
}

/// Whether traffic should come here, and which part says no.
async fn readyz(admin: web::Data<Admin>, request: HttpRequest) -> HttpResponse {
    let store = match request.app_data::<Rc<StoreProbe>>() {
        // It may answer, and not decide: when its memory is full, say.
        Some(_) if admin.common.has_tripped() => "away",
        Some(probe) => probe.state().await,
        None => "unknown",
    };
    let listener = if admin.draining.has_begun() { "draining" } else { "ok" };
    let ready = listener == "ok" && (store != "away" || !admin.reloads.operator().needs_store);
    let mut response = if ready { HttpResponse::Ok() } else { HttpResponse::ServiceUnavailable() };
    response.json(Readiness { ready, listener, store })
}

async fn metrics(admin: web::Data<Admin>, request: HttpRequest) -> HttpResponse {
    if !admin.permits(&request) {
        return unauthorized();
    }
    admin.metrics.memory_callers.set(saturating(admin.memory.callers() as u64));
    admin.metrics.store_debtors.set(saturating(admin.common.debtors() as u64));
    admin.metrics.store_gateways.set(saturating(admin.common.gateways()));
    admin.metrics.store_breaker.set(match admin.common.phase() {
        Phase::Healthy => 0,
        Phase::Probing => 1,
        Phase::Tripped => 2,
    });
    admin.metrics.catch_up(Totals {
        memory_overflowed: admin.memory.overflowed(),
        messages_lost: admin.common.lost(),
        breaker_trips: admin.common.trips(),
    });
    admin.metrics.catch_up_with_store(admin.common.failures(), admin.common.may_evict());
    match admin.metrics.render() {
        Ok(text) => HttpResponse::Ok().content_type(prometheus::TEXT_FORMAT).body(text),
        Err(error) => {
            tracing::error!(%error, "cannot write the metrics");
            HttpResponse::InternalServerError().finish()
        }
    }
}

/// Reads the configuration again and says how that ended, with every mistake.
async fn reload(admin: web::Data<Admin>, request: HttpRequest) -> HttpResponse {
    if !admin.permits(&request) {
        return unauthorized();
    }
    match admin.reloads.now(Trigger::Admin).await {
        Some(report) if report.is_refusal() => HttpResponse::UnprocessableEntity().json(report),
        Some(report) => HttpResponse::Ok().json(report),
        None => HttpResponse::ServiceUnavailable().finish(),
    }
}

/// A reload changes something, so it is asked for with `POST`.
async fn use_post() -> HttpResponse {
    HttpResponse::MethodNotAllowed()
        .insert_header((header::ALLOW, "POST"))
        .content_type(ContentType::plaintext())
        .body("Use POST.\n")
}

fn unauthorized() -> HttpResponse {
    let words = "This needs admin.token of the configuration, as \"Authorization: Bearer TOKEN\".\n";
    HttpResponse::Unauthorized()
        .insert_header((header::WWW_AUTHENTICATE, "Bearer"))
        .content_type(ContentType::plaintext())
        .body(words)
}

fn saturating(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// A connection of the admin side's own, to see whether the store answers.
struct StoreProbe {
    redis: Option<RedisStore>,
}

impl StoreProbe {
    fn new(kind: &StoreKind) -> Self {
        let redis = match kind {
            StoreKind::Memory => None,
            StoreKind::Redis(settings) => {
                let redis = RedisStore::new(settings, Arc::new(Common::quiet()))
                    .expect("the gateway has tried the address when it bound");
                Some(redis)
            }
        };
        Self { redis }
    }

    async fn state(&self) -> &'static str {
        match &self.redis {
            None => "memory",
            Some(redis) if redis.ping().await.is_ok() => "ok",
            Some(_) => "away",
        }
    }
}
