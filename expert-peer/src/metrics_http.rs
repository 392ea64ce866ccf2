//! Metrics for Prometheus at `/metrics`, on a port of their own.
//!
//! Whoever may reach the port may hold connections open, and the peer's descriptors are shared
//! with those that fetch. So there are at most [`MAX_CONNECTIONS`], each for one request and for
//! [`CONNECTION_WAIT`] at most; the next ones wait in the kernel's queue.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::sync::Semaphore;

/// Connections at once: a few scrapers, and some to spare.
const MAX_CONNECTIONS: usize = 16;
/// Longest life of a connection, and longest wait for a request's head.
const CONNECTION_WAIT: Duration = Duration::from_secs(5);
/// How often histograms are folded, and how long accepting rests after it failed.
const REST: Duration = Duration::from_secs(1);

/// Installs the recorder and serves it on a thread of its own; says where, with the real port.
pub(crate) fn serve(listen: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(listen)?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let handle = PrometheusBuilder::new().install_recorder()?;
    let run = move || {
        if let Err(error) = runtime.block_on(accept(listener, handle)) {
            tracing::error!(%error, "metrics are no longer served");
        }
    };
    std::thread::Builder::new().name("metrics".into()).spawn(run)?;
    Ok(address)
}

async fn accept(listener: TcpListener, handle: PrometheusHandle) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let upkeep = handle.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(REST).await;
            upkeep.run_upkeep();
        }
    });
    loop {
        // Never closed, so there is always a place in the end: connections have bounded lives.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return Ok(()) };
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "a connection for metrics could not be accepted");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let handle = handle.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request| answer(request, handle.clone()));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(CONNECTION_WAIT)
                .keep_alive(false)
                .serve_connection(TokioIo::new(socket), service);
            match tokio::time::timeout(CONNECTION_WAIT, connection).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a connection for metrics failed"),
                Err(_) => tracing::debug!("a connection for metrics took too long"),
            }
            drop(place);
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    handle: PrometheusHandle,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let found = request.method() == Method::GET && request.uri().path() == "/metrics";
    let (status, body) = match found {
        true => (StatusCode::OK, handle.render()),
        false => (StatusCode::NOT_FOUND, "metrics are at /metrics\n".into()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}
