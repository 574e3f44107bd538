//! One client's connection, in a thread of its own: a request in, its answer out, until one side leaves.
//!
//! Bounds: a message's parts are limited by the protocol; whatever is larger than a little is reserved in the
//! engine's memory budget before it is read. A message that cannot be taken is read past and answered with the
//! error, so that the client's next request is understood; if it is not known where the next one begins, the
//! connection ends after the answer.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use headrace_base::{Error, Reservation, Result};
use headrace_format::message::{Answer, ErrorBody, Header, Request, decode_meta, encode_meta};

use crate::channel::{Broken, Channel};
use crate::identity::Peer;
use crate::node::Node;
use crate::requests::{Next, Reply, Session};
use crate::streams;

/// Not worth a reservation; with all connections open at once this comes to 64 MiB.
pub const UNRESERVED_BYTES: u64 = 64 << 10;
/// How long a request waits for memory that others hold.
pub const MEMORY_PATIENCE: Duration = Duration::from_secs(10);
/// A decoded message is at most this many times as large as its bytes (an entry of `Put`: 40 bytes as a map,
/// 200 in memory).
const DECODED_RATIO: u64 = 5;

/// Serves until the client leaves. `refusal`: the answer to its first request, and the end.
pub fn serve(node: &Arc<Node>, socket: Arc<UnixStream>, peer: Peer, refusal: Option<Error>) {
    let mut channel = Channel::new(socket, peer.process);
    let outcome = match refusal {
        Some(error) => refuse(&mut channel, &error),
        None => answer_all(node, &mut channel, Session::new(Arc::clone(node), peer.identity)),
    };
    if let Err(Broken::Protocol(error)) = outcome {
        tracing::warn!(pid = peer.pid, %error, "a connection was ended for what came over it");
        metrics::counter!("headrace_errors_total", "kind" => error.kind().name()).increment(1);
        // If that cannot be sent either, there is nobody to tell.
        let _ = send_error(&mut channel, &error);
    }
}

fn refuse(channel: &mut Channel, error: &Error) -> Result<(), Broken> {
    channel.hello()?;
    let header = channel.header()?;
    channel.skip(u64::from(header.meta_bytes) + header.payload_bytes)?;
    send_error(channel, error)
}

fn send_error(channel: &mut Channel, error: &Error) -> Result<(), Broken> {
    let meta = encode_meta(&Answer::<()>::Error(ErrorBody::from(error))).map_err(Broken::Protocol)?;
    channel.send(&meta, &[], &[])
}

fn answer_all(node: &Arc<Node>, channel: &mut Channel, mut session: Session) -> Result<(), Broken> {
    channel.hello()?;
    loop {
        let header = channel.header()?;
        let next = match read_request(node, channel, header)? {
            Ok((request, payload, _reservation)) => handle(&mut session, request, &payload),
            Err(error) => Err(error),
        };
        match next {
            Ok(Next::Answer(reply)) => send(channel, &reply)?,
            Ok(Next::Stop(reply)) => {
                send(channel, &reply)?;
                node.request_stop("a client asked for it");
            }
            // What it held by handles is given back when the stream ends, with the connection.
            Ok(Next::Stream(stream)) => return streams::run(node, channel, *stream),
            Err(error) => {
                metrics::counter!("headrace_errors_total", "kind" => error.kind().name()).increment(1);
                send_error(channel, &error)?;
            }
        }
    }
}

fn send(channel: &mut Channel, reply: &Reply) -> Result<(), Broken> {
    let fds: Vec<_> = reply.fds.iter().map(AsFd::as_fd).collect();
    channel.send(&reply.meta, &reply.payload, &fds)
}

fn handle(session: &mut Session, request: Request, payload: &[u8]) -> Result<Next> {
    let op = request.name();
    metrics::counter!("headrace_requests_total", "op" => op).increment(1);
    // A bug in one request must not leave its client without an answer. Locks below are never left broken:
    // everybody takes them whether poisoned or not.
    catch_unwind(AssertUnwindSafe(|| session.handle(request, payload)))
        .unwrap_or_else(|_| Err(Error::internal(format!("{op} failed in the engine: see its log"))))
}

type Message = (Request, Vec<u8>, Option<Reservation>);

/// The outer error ends the connection, the inner one is the answer.
fn read_request(node: &Arc<Node>, channel: &mut Channel, header: Header) -> Result<Result<Message>, Broken> {
    let meta_bytes = u64::from(header.meta_bytes);
    let wanted = if meta_bytes > UNRESERVED_BYTES { meta_bytes * DECODED_RATIO } else { 0 }
        + if header.payload_bytes > UNRESERVED_BYTES { header.payload_bytes } else { 0 };
    let reservation = match reserve(node, wanted) {
        Ok(reservation) => reservation,
        Err(error) => {
            channel.skip(meta_bytes + header.payload_bytes)?;
            return Ok(Err(error));
        }
    };
    let mut meta = vec![0; header.meta_bytes as usize];
    channel.read(&mut meta)?;
    let request: Request = match decode_meta(&meta) {
        Ok(request) => request,
        Err(error) => {
            channel.skip(header.payload_bytes)?;
            return Ok(Err(error));
        }
    };
    drop(meta);
    let mut payload = vec![0; header.payload_bytes as usize];
    channel.read(&mut payload)?;
    Ok(Ok((request, payload, reservation)))
}

/// Room for `bytes` in the budget; None when they are not worth it.
pub fn reserve(node: &Node, bytes: u64) -> Result<Option<Reservation>> {
    if bytes <= UNRESERVED_BYTES {
        return Ok(None);
    }
    node.volume.budget().reserve(bytes, MEMORY_PATIENCE).map(Some)
}
