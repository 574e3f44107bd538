//! HTTP on the engine's socket: status and numbers, for people, scripts and Prometheus. Read only.
//!
//! One thread with a runtime of its own serves all HTTP connections. They come from the listener through a
//! channel, since the socket is shared with the binary protocol. `openapi.json` describes the routes; a test
//! holds the two together.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use headrace_base::{Error, Kind, Result, thread};
use headrace_format::FORMAT;
use headrace_format::message::{ErrorBody, Status};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::metrics::resident_bytes;
use crate::node::Node;

const OPENAPI: &str = include_str!("openapi.json");
/// HTTP connections that wait for the thread.
const WAITING_MAX: usize = 64;
/// What an answer under way gets when the engine stops.
const STOP_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone)]
struct App {
    node: Arc<Node>,
    metrics: PrometheusHandle,
}

const ROUTES: [&str; 5] = ["/metrics", "/v1/status", "/v1/volumes", "/v1/sessions", "/openapi.json"];

fn router(app: App) -> Router {
    let handler = |route: &str| -> MethodRouter<App> {
        match route {
            "/metrics" => get(metrics),
            "/v1/status" => get(status),
            "/v1/volumes" => get(volumes),
            "/v1/sessions" => get(sessions),
            _ => get(openapi),
        }
    };
    ROUTES
        .into_iter()
        .fold(Router::new(), |router, route| router.route(route, handler(route)))
        .fallback(no_route)
        .with_state(app)
}

/// Where the listener hands over HTTP connections.
#[derive(Clone, Debug)]
pub struct HttpConnections(mpsc::Sender<Arc<UnixStream>>);

impl HttpConnections {
    pub fn serve(&self, socket: Arc<UnixStream>) {
        if self.0.try_send(socket).is_err() {
            tracing::warn!("an HTTP connection was closed: too many are waiting, or the engine stops");
        }
    }
}

#[derive(Debug)]
pub struct Rest {
    thread: JoinHandle<()>,
    stop: tokio::sync::oneshot::Sender<()>,
}

impl Rest {
    pub fn start(node: Arc<Node>, metrics: PrometheusHandle) -> Result<(Rest, HttpConnections)> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|cause| Error::io("start the HTTP runtime", cause))?;
        let (sender, sockets) = mpsc::channel(WAITING_MAX);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = thread::spawn("http", move || {
            let served = async move {
                let router = router(App { node, metrics });
                let serve = axum::serve(Sockets(sockets), router);
                tokio::select! {
                    _ = serve => {}
                    // Also when the sender is dropped.
                    _ = stopped => {}
                }
            };
            runtime.block_on(served);
            runtime.shutdown_timeout(STOP_PATIENCE);
        })?;
        Ok((Rest { thread, stop }, HttpConnections(sender)))
    }

    pub fn stop(self) {
        // It fails when the thread has ended already.
        let _ = self.stop.send(());
        if self.thread.join().is_err() {
            tracing::error!("the HTTP thread had panicked");
        }
    }
}

struct Sockets(mpsc::Receiver<Arc<UnixStream>>);

impl axum::serve::Listener for Sockets {
    type Io = tokio::net::UnixStream;
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, ()) {
        loop {
            let Some(socket) = self.0.recv().await else {
                // The listener is gone: there will be no more.
                std::future::pending::<()>().await;
                continue;
            };
            let converted = socket
                .try_clone()
                .and_then(|socket| socket.set_nonblocking(true).map(|()| socket))
                .and_then(tokio::net::UnixStream::from_std);
            match converted {
                Ok(socket) => return (socket, ()),
                Err(error) => tracing::warn!(%error, "an HTTP connection could not be taken over"),
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn metrics(State(app): State<App>) -> Response {
    let node = &app.node;
    let budget = node.volume.budget();
    let mounts = node.mounts.status();
    let requests: u64 = mounts.iter().map(|mount| mount.requests).sum();
    for (name, value) in [
        ("headrace_buffers_bytes", budget.used()),
        ("headrace_buffers_bytes_max", budget.bytes_max()),
        ("headrace_dirty_bytes", node.volume.dirty_bytes()),
        ("headrace_resident_bytes", resident_bytes()),
        ("headrace_clients", node.clients_count() as u64),
        ("headrace_streams", u64::from(node.streams_count())),
        ("headrace_mounts", mounts.len() as u64),
        ("headrace_mount_requests", requests),
    ] {
        metrics::gauge!(name).set(value as f64);
    }
    if let Some(tiers) = node.volume.tier_status() {
        let backup = node.volume.backup_status().ok().flatten();
        for (name, value) in [
            ("headrace_object_dirty_bytes", tiers.backlog.bytes as f64),
            ("headrace_object_dirty_seconds", tiers.backlog.age.as_secs_f64()),
            ("headrace_object_failing", f64::from(u8::from(tiers.backlog.failing.is_some()))),
            ("headrace_flash_clean_bytes", tiers.clean_bytes as f64),
            ("headrace_flash_bytes_max", tiers.flash_bytes_max as f64),
            ("headrace_backup_timestamp_seconds", backup.map_or(0.0, |backup| backup.created.0 as f64 / 1e9)),
        ] {
            metrics::gauge!(name).set(value);
        }
    }
    app.metrics.run_upkeep();
    ([(CONTENT_TYPE, "text/plain; version=0.0.4")], app.metrics.render()).into_response()
}

async fn status(State(app): State<App>) -> Response {
    answer(app.node.status().and_then(|status| status_json(&status)))
}

/// Paths are bytes on the wire; people and scripts want to read them.
fn status_json(status: &Status) -> Result<Value> {
    let mut value = serde_json::to_value(status)
        .map_err(|cause| Error::internal("write the status as JSON").with_cause(cause))?;
    value["path"] = String::from_utf8_lossy(&status.path).into();
    for (shown, mount) in value["mounts"].as_array_mut().into_iter().flatten().zip(&status.mounts) {
        shown["mountpoint"] = String::from_utf8_lossy(&mount.mountpoint).into();
    }
    Ok(value)
}

async fn volumes(State(app): State<App>) -> Response {
    let volume = &app.node.volume;
    answer(Ok(json!([{
        "volume": volume.id().to_string(),
        "path": volume.folder().to_string_lossy(),
        "format": FORMAT,
        "session": volume.session().to_string(),
    }])))
}

async fn sessions(State(app): State<App>) -> Response {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    answer(Ok(json!([{
        "session": app.node.volume.session().to_string(),
        "volume": app.node.volume.id().to_string(),
        "state": "alive",
        "pid": std::process::id(),
        "host": host.trim(),
        "started_ns": app.node.started.0,
    }])))
}

async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

async fn no_route() -> Response {
    answer(Err(Error::not_found(format!("there is no such route; there are {}", ROUTES.join(", ")))))
}

fn answer(value: Result<Value>) -> Response {
    match value {
        Ok(value) => axum::Json(value).into_response(),
        Err(error) => {
            let code = match error.kind() {
                Kind::NotFound => StatusCode::NOT_FOUND,
                Kind::Permission => StatusCode::FORBIDDEN,
                Kind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            };
            (code, axum::Json(json!({ "error": ErrorBody::from(&error) }))).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_describes_exactly_the_routes() {
        let document: Value = serde_json::from_str(OPENAPI).unwrap();
        let mut described: Vec<&str> =
            document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
        let mut routes = ROUTES.to_vec();
        described.sort_unstable();
        routes.sort_unstable();
        assert_eq!(described, routes);
        assert_eq!(document["info"]["version"], crate::ENGINE_VERSION);
        for path in document["paths"].as_object().unwrap().values() {
            assert_eq!(path.as_object().unwrap().keys().collect::<Vec<_>>(), ["get"]);
        }
    }
}
