//! The built-in backend of `tollgate demo`: it answers with what it saw. It is no part of the proxy.
//!
//! `GET /bytes/{n}` gives n bytes. Everything else, with any method, gives JSON: method, path with query, header lines
//! and the number of body bytes.

use std::net::TcpListener;

use actix_web::body::SizedStream;
use actix_web::dev::Server;
use actix_web::web::Payload;
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, guard, web};
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
            .service(web::resource("/bytes/{n}").guard(guard::Get()).to(bytes))
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

#[cfg(test)]
mod tests {
    use actix_web::rt::System;
    use futures_util::TryStreamExt as _;

    use super::*;

    /// Sends one request to an echo server and returns the body of its answer.
    fn ask(method: reqwest::Method, path: &str, body: &'static str) -> Vec<u8> {
        System::new().block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let server = serve(listener).unwrap();
            let handle = server.handle();
            let asking = async {
                let url = reqwest::Url::parse(&format!("http://{address}{path}")).unwrap();
                let mut request = reqwest::Request::new(method, url);
                request.headers_mut().insert("x-a", reqwest::header::HeaderValue::from_static("1"));
                *request.body_mut() = Some(body.into());
                let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build().unwrap();
                let answer = client.execute(request).await.unwrap();
                let bytes: Vec<Bytes> = answer.bytes_stream().try_collect().await.unwrap();
                handle.stop(false).await;
                bytes.concat()
            };
            let (served, bytes) = tokio::join!(server, asking);
            served.unwrap();
            bytes
        })
    }

    #[test]
    fn it_says_what_it_saw() {
        // The provider that reqwest needs.
        drop(crate::proxy::Upstreams::new(&[]));
        let answer = ask(reqwest::Method::PUT, "/a/b?c=d", "hello");
        let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(answer["method"], "PUT");
        assert_eq!(answer["path"], "/a/b?c=d");
        assert_eq!(answer["body_bytes"], 5);
        let headers = answer["headers"].as_array().unwrap();
        assert!(headers.contains(&serde_json::json!(["x-a", "1"])), "{headers:?}");

        let answer = ask(reqwest::Method::POST, "/bytes/5", "hello");
        assert!(answer.starts_with(b"{"), "{}", String::from_utf8_lossy(&answer));
    }

    #[test]
    fn it_gives_as_many_bytes_as_asked_for() {
        drop(crate::proxy::Upstreams::new(&[]));
        for n in [0, 1, 65_536, 200_000] {
            assert_eq!(ask(reqwest::Method::GET, &format!("/bytes/{n}"), "").len(), n);
        }
    }
}
