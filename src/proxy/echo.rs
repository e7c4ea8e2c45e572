//! The built-in backend of `tollgate demo`: it answers with what it saw. It is no part of the proxy.
//!
//! `GET /bytes/{n}` gives n bytes. Everything else, with any method, gives JSON: method, path with query, header lines
//! and the number of body bytes.

use std::net::TcpListener;

use actix_web::body::SizedStream;
use actix_web::dev::Server;
use actix_web::web::Payload;
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};

/// What `/bytes/{n}` is cut from.
static BLOCK: [u8; 65_536] = [b'.'; 65_536];

/// Serves echoes on `listener` until the server is stopped. One worker is enough for a demonstration.
///
/// # Errors
///
/// When the listener cannot be used.
pub fn serve(listener: TcpListener) -> std::io::Result<Server> {
    let server = HttpServer::new(|| {
        App::new()
            .route("/bytes/{n}", web::get().to(bytes))
            .default_service(web::to(echo))
    });
    Ok(server.workers(1).disable_signals().listen(listener)?.run())
}

async fn echo(request: HttpRequest, mut payload: Payload) -> actix_web::Result<HttpResponse> {
    let mut body_bytes = 0_usize;
    while let Some(chunk) = payload.next().await {
        body_bytes += chunk?.len();
    }
    let headers: Vec<_> = request
        .headers()
        .iter()
        .map(|(name, value)| [name.as_str().into(), String::from_utf8_lossy(value.as_bytes())])
        .collect();
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    Ok(HttpResponse::Ok().json(serde_json::json!({
        "method": request.method().as_str(),
        "path": path,
        "headers": headers,
        "body_bytes": body_bytes,
    })))
}

async fn bytes(n: web::Path<u64>) -> HttpResponse {
    let total = n.into_inner();
    let blocks = stream::unfold(total, |left| async move {
        let length = usize::try_from(left).unwrap_or(usize::MAX).min(BLOCK.len());
        let block = Bytes::from_static(&BLOCK).slice(..length);
        (length > 0).then(|| (Ok::<_, std::convert::Infallible>(block), left - length as u64))
    });
    HttpResponse::Ok()
        .content_type("application/octet-stream")
        .body(SizedStream::new(total, Box::pin(blocks)))
}
