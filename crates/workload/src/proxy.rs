//! `headraced workload proxy`: a slow store out of a fast one. It passes the bytes of HTTP/1.1 connections on
//! unchanged (also Host, so that signatures stay right), holds each *request* back for a latency, and lets each
//! connection carry so many bytes a second in each direction. And it counts.
//!
//! One thread. A connection has two pumps: requests up, responses down, each read -> look where messages begin
//! (`framing`) -> wait -> write. The latency is on the way up: a request is passed on when it has passed since its
//! first byte came; what comes meanwhile waits in the kernel's buffers, as on a long line. Waits have the grain of
//! the timer, 1 ms, and are never short: 20 ms are 20.0 to 21.3 ms.
//!
//! A connection whose first request is for `/.proxy/` is answered here and counts nowhere:
//! `GET /.proxy/counts`, and `POST /.proxy/reset`, which says what was counted and begins anew.
//!
//! Invariant: what cannot be framed is not passed on. Its connection is closed and `broken_connections` counts it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use headrace_base::{Error, Result, time};
use lexopt::{Arg, ValueExt};
use serde::Serialize;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use crate::framing::{Framer, Seen};

pub const USAGE: &str = "\
usage: headraced workload proxy --to ADDRESS:PORT [options]

Passes HTTP/1.1 connections on to a store and makes it a slow one. Says in one line of JSON where it listens.
GET /.proxy/counts answers what was counted, POST /.proxy/reset too and begins anew.

options
  --listen ADDRESS:PORT               127.0.0.1:0, any free port
  --latency-ms N                      0: added to each request
  --connection-bytes-per-second N     0, no limit: of each connection, in each direction";

/// A read of a pump: at 100 MB/s about 1.3 ms, the grain of its waits. 64 connections have 16 MiB of them.
const BUFFER_BYTES: usize = 128 * 1024;
const OWN_TARGETS: &str = "/.proxy/";
/// The longest beginning that tells whether a first request is for the proxy: "DELETE /.proxy/".
const OWN_BEGINNING_BYTES: usize = 15;

#[derive(Clone, Debug, PartialEq)]
pub struct ProxyOptions {
    pub listen: SocketAddr,
    pub to: SocketAddr,
    pub latency: Duration,
    /// None: no limit.
    pub connection_bytes_per_second: Option<u64>,
}

impl ProxyOptions {
    /// None: help is wanted.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Option<ProxyOptions>> {
        let mut parser = lexopt::Parser::from_args(arguments);
        let mut to = None;
        let mut options = ProxyOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            to: SocketAddr::from(([127, 0, 0, 1], 0)),
            latency: Duration::ZERO,
            connection_bytes_per_second: None,
        };
        let wrong = |error: lexopt::Error| {
            Error::invalid(format!("headraced workload proxy: {error}\n{USAGE}")).with_cause(error)
        };
        while let Some(argument) = parser.next().map_err(wrong)? {
            match argument {
                Arg::Long("help") | Arg::Short('h') => return Ok(None),
                Arg::Long("listen") => {
                    options.listen = parser.value().and_then(|value| value.parse()).map_err(wrong)?;
                }
                Arg::Long("to") => to = Some(parser.value().and_then(|value| value.parse()).map_err(wrong)?),
                Arg::Long("latency-ms") => {
                    let latency_ms: u64 = parser.value().and_then(|value| value.parse()).map_err(wrong)?;
                    if latency_ms > 600_000 {
                        return Err(Error::invalid(format!("--latency-ms {latency_ms} is more than 600000")));
                    }
                    options.latency = Duration::from_millis(latency_ms);
                }
                Arg::Long("connection-bytes-per-second") => {
                    let rate: u64 = parser.value().and_then(|value| value.parse()).map_err(wrong)?;
                    options.connection_bytes_per_second = (rate > 0).then_some(rate);
                }
                other => return Err(wrong(other.unexpected())),
            }
        }
        options.to = to.ok_or_else(|| Error::invalid("say which store is behind: --to ADDRESS:PORT"))?;
        Ok(Some(options))
    }
}

/// `headraced workload proxy`: until the process is ended.
pub fn run(options: &ProxyOptions) -> Result<()> {
    runtime()?.block_on(async {
        let (listener, address) = listen(options).await?;
        let mut out = io::stdout();
        writeln!(out, "{}", serde_json::json!({"listening": address.to_string()}))
            .and_then(|()| out.flush())
            .map_err(|error| Error::io("write to stdout", error))?;
        serve(listener, options.clone(), Rc::default()).await
    })
}

fn runtime() -> Result<tokio::runtime::LocalRuntime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build_local(tokio::runtime::LocalOptions::default())
        .map_err(|error| Error::io("start the proxy", error))
}

async fn listen(options: &ProxyOptions) -> Result<(TcpListener, SocketAddr)> {
    let failed = |error| Error::io(format_args!("listen on {}", options.listen), error);
    let listener = TcpListener::bind(options.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// What went through since the start or the last reset.
#[derive(Clone, Debug, Default, Serialize)]
struct Counts {
    /// By method.
    requests: BTreeMap<String, u64>,
    /// Of the GETs, those that list a bucket.
    listings: u64,
    /// By status; those of 100 to 199 as well.
    responses: BTreeMap<u16, u64>,
    bytes_from_clients: u64,
    bytes_to_clients: u64,
    connections: u64,
    /// Those that the proxy closed, for want of a store or of sense.
    broken_connections: u64,
}

impl Counts {
    fn request(&mut self, method: &str, target: &str) {
        match self.requests.get_mut(method) {
            Some(count) => *count += 1,
            None => drop(self.requests.insert(method.to_owned(), 1)),
        }
        let query = target.split_once('?').map_or("", |(_, query)| query);
        let lists = |part: &str| {
            ["list-type=", "prefix=", "delimiter=", "max-keys="].iter().any(|key| part.starts_with(key))
        };
        self.listings += u64::from(method == "GET" && query.split('&').any(lists));
    }
}

type Shared<T> = Rc<RefCell<T>>;

async fn serve(listener: TcpListener, options: ProxyOptions, counts: Shared<Counts>) -> Result<()> {
    let options = Rc::new(options);
    loop {
        let client = match listener.accept().await {
            Ok((client, _)) => client,
            // The other side left before it was accepted, or descriptors are short for a while.
            Err(error) => {
                eprintln!("accept: {error}");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let (options, counts) = (Rc::clone(&options), Rc::clone(&counts));
        tokio::task::spawn_local(async move {
            if let Err(error) = connection(client, &options, &counts).await {
                counts.borrow_mut().broken_connections += 1;
                eprintln!("connection closed: {error}");
            }
        });
    }
}

async fn connection(client: TcpStream, options: &Rc<ProxyOptions>, counts: &Shared<Counts>) -> Result<()> {
    no_delay(&client)?;
    let mut first = vec![0; BUFFER_BYTES];
    let (mut length, mut arrived) = (0, time::monotonic_now());
    // Enough to see whom the first request is for.
    while length < OWN_BEGINNING_BYTES {
        let read = read(&client, &mut first[length..]).await;
        match read {
            Ok(0) => return Ok(()),
            Err(error) if gone(&error) => return Ok(()),
            Err(error) => return Err(Error::io("read the first request", error)),
            Ok(more) => {
                if length == 0 {
                    arrived = time::monotonic_now();
                }
                length += more;
            }
        }
        let begun = String::from_utf8_lossy(&first[..length.min(OWN_BEGINNING_BYTES)]);
        let target = begun.split_once(' ').map_or("/", |(_, target)| target);
        if !OWN_TARGETS.starts_with(target) && !target.starts_with(OWN_TARGETS) {
            break;
        }
        if target.starts_with(OWN_TARGETS) {
            return answer(client, first, length, counts).await;
        }
    }
    counts.borrow_mut().connections += 1;
    let store = TcpStream::connect(options.to)
        .await
        .map_err(|error| Error::io(format_args!("connect to the store at {}", options.to), error))?;
    no_delay(&store)?;
    let (from_client, to_client) = client.into_split();
    let (from_store, to_store) = store.into_split();
    let methods: Shared<VecDeque<String>> = Rc::default();
    let line = || Line::new(options.connection_bytes_per_second);
    let requests = Requests {
        latency: options.latency,
        framer: Framer::default(),
        line: line(),
        methods: Rc::clone(&methods),
        counts: Rc::clone(counts),
    };
    let responses = Responses { framer: Framer::default(), line: line(), methods, counts: Rc::clone(counts) };
    let down = tokio::task::spawn_local(responses.pump(from_store, to_client));
    let up = requests.pump(from_client, to_store, first, length, arrived).await;
    if up.is_err() {
        // Nothing sensible can follow: the client sees its connection end.
        down.abort();
        return up;
    }
    match down.await {
        Ok(outcome) => outcome,
        Err(error) if error.is_cancelled() => Ok(()),
        Err(error) => Err(Error::internal(format!("the pump of responses: {error}"))),
    }
}

struct Requests {
    latency: Duration,
    framer: Framer,
    line: Line,
    /// Of requests whose response has not begun.
    methods: Shared<VecDeque<String>>,
    counts: Shared<Counts>,
}

impl Requests {
    async fn pump(
        mut self,
        client: OwnedReadHalf,
        store: OwnedWriteHalf,
        mut buffer: Vec<u8>,
        mut length: usize,
        mut arrived: Instant,
    ) -> Result<()> {
        while length > 0 {
            let (mut passed, mut at, mut due) = (0, 0, None);
            while at < length {
                if self.framer.between_messages() {
                    // What lies before it belongs to earlier requests and must not wait for this one.
                    if !self.pass(&store, &buffer[passed..at], due.take()).await? {
                        return Ok(());
                    }
                    passed = at;
                    due = Some(arrived + self.latency);
                }
                let (taken, seen) = self.framer.take(&buffer[at..length])?;
                at += taken;
                if let Seen::Head(head) = seen {
                    let (method, target) = head.request_line()?;
                    self.counts.borrow_mut().request(method, target);
                    self.methods.borrow_mut().push_back(method.to_owned());
                    self.framer.body(head.request_body()?);
                }
            }
            if !self.pass(&store, &buffer[passed..length], due).await? {
                return Ok(());
            }
            length = match read(client.as_ref(), &mut buffer).await {
                Ok(read) => read,
                Err(error) if gone(&error) => 0,
                Err(error) => return Err(Error::io("read a request", error)),
            };
            arrived = time::monotonic_now();
        }
        // The store learns that no request follows; it may still answer.
        drop(store);
        Ok(())
    }

    /// False: the store has closed; its last answer, if any, is the other pump's.
    async fn pass(&mut self, store: &OwnedWriteHalf, bytes: &[u8], due: Option<Instant>) -> Result<bool> {
        if bytes.is_empty() {
            return Ok(true);
        }
        if let Some(due) = due {
            tokio::time::sleep_until(due.into()).await;
        }
        self.counts.borrow_mut().bytes_from_clients += bytes.len() as u64;
        self.line.carry(bytes.len()).await;
        written(write_all(store.as_ref(), bytes).await, "write to the store")
    }
}

struct Responses {
    framer: Framer,
    line: Line,
    methods: Shared<VecDeque<String>>,
    counts: Shared<Counts>,
}

impl Responses {
    async fn pump(mut self, store: OwnedReadHalf, client: OwnedWriteHalf) -> Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let length = match read(store.as_ref(), &mut buffer).await {
                Ok(0) => return Ok(()),
                Ok(length) => length,
                Err(error) if gone(&error) => return Ok(()),
                Err(error) => return Err(Error::io("read a response", error)),
            };
            self.look(&buffer[..length])?;
            self.counts.borrow_mut().bytes_to_clients += length as u64;
            self.line.carry(length).await;
            if !written(write_all(client.as_ref(), &buffer[..length]).await, "write to the client")? {
                return Ok(());
            }
        }
    }

    fn look(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (taken, seen) = self.framer.take(bytes)?;
            bytes = &bytes[taken..];
            if let Seen::Head(head) = seen {
                let status = head.status()?;
                *self.counts.borrow_mut().responses.entry(status).or_default() += 1;
                let mut methods = self.methods.borrow_mut();
                // An interim response is followed by the real one.
                let method = if status < 200 { None } else { methods.pop_front() };
                self.framer.body(head.response_body(method.as_deref())?);
            }
        }
        Ok(())
    }
}

/// One direction of a connection, which carries so many bytes a second.
struct Line {
    bytes_per_second: Option<u64>,
    /// When all that was given to it has arrived.
    free_at: Instant,
    slept: bool,
}

/// Shorter waits are put off: the timer cannot do them.
const TIMER_GRAIN: Duration = Duration::from_millis(1);
/// A sleep may be so much too long; what the line missed meanwhile it may catch up.
const OVERSLEEP_MAX: Duration = Duration::from_millis(5);

impl Line {
    fn new(bytes_per_second: Option<u64>) -> Line {
        Line { bytes_per_second, free_at: time::monotonic_now(), slept: false }
    }

    /// Returns when the line has carried `bytes` more.
    async fn carry(&mut self, bytes: usize) {
        let Some(rate) = self.bytes_per_second else {
            return;
        };
        let now = time::monotonic_now();
        if !(self.slept && now < self.free_at + OVERSLEEP_MAX) {
            self.free_at = self.free_at.max(now);
        }
        self.free_at += Duration::from_secs_f64(bytes as f64 / rate as f64);
        self.slept = self.free_at > now + TIMER_GRAIN;
        if self.slept {
            tokio::time::sleep_until(self.free_at.into()).await;
        }
    }
}

/// The proxy's own pages.
async fn answer(
    client: TcpStream,
    mut buffer: Vec<u8>,
    mut length: usize,
    counts: &Shared<Counts>,
) -> Result<()> {
    let mut framer = Framer::default();
    let mut at = 0;
    let head = loop {
        while at == length {
            length = read(&client, &mut buffer).await.map_err(|error| Error::io("read a request", error))?;
            at = 0;
            if length == 0 {
                return Ok(());
            }
        }
        let (taken, seen) = framer.take(&buffer[at..length])?;
        at += taken;
        if let Seen::Head(head) = seen {
            break head;
        }
    };
    let (status, body) = match head.request_line()? {
        ("GET", "/.proxy/counts") => ("200 OK", json(&*counts.borrow())?),
        ("POST", "/.proxy/reset") => ("200 OK", json(&counts.replace(Counts::default()))?),
        (method, target) => {
            let error = format!("{method} {target}: there are GET /.proxy/counts and POST /.proxy/reset");
            ("404 Not Found", json(&serde_json::json!({"error": error}))?)
        }
    };
    let length = body.len();
    let response = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    );
    write_all(&client, response.as_bytes()).await.map_err(|error| Error::io("answer", error))
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map(|text| text + "\n")
        .map_err(|error| Error::internal(format!("write counts as JSON: {error}")))
}

fn no_delay(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true).map_err(|error| Error::io("set TCP_NODELAY", error))
}

async fn read(stream: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.try_read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => stream.readable().await?,
            other => return other,
        }
    }
}

async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.try_write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => stream.writable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The other side has left, which is its right.
fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted)
}

fn written(outcome: io::Result<()>, doing: &str) -> Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if gone(&error) => Ok(false),
        Err(error) => Err(Error::io(doing, error)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::mpsc;

    use headrace_base::thread;
    use serde_json::{Value, json};

    use super::*;

    const GET: &str = "GET /b/key HTTP/1.1\r\nHost: not-the-proxy\r\n\r\n";

    /// Starts `body` with a runtime in a thread of its own, and returns what it says first.
    fn in_a_thread(body: impl AsyncFnOnce(mpsc::Sender<SocketAddr>) + Send + 'static) -> SocketAddr {
        let (sender, receiver) = mpsc::channel();
        thread::spawn("test", move || runtime().unwrap().block_on(body(sender))).unwrap();
        receiver.recv().unwrap()
    }

    fn proxy(to: SocketAddr, latency_ms: u64, rate: u64) -> SocketAddr {
        let line = format!("--to {to} --latency-ms {latency_ms} --connection-bytes-per-second {rate}");
        let options = ProxyOptions::parse(line.split(' ').map(OsString::from)).unwrap().unwrap();
        in_a_thread(async move |sender| {
            let (listener, address) = listen(&options).await.unwrap();
            sender.send(address).unwrap();
            serve(listener, options, Rc::default()).await.unwrap();
        })
    }

    /// A store that answers each request: with what it got, head and body, after `padding` bytes; HEAD with the same
    /// length and nothing.
    fn echo(padding: usize) -> SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn("echo", move || {
            for stream in listener.incoming() {
                thread::spawn("echo", move || echo_connection(stream.unwrap(), padding)).unwrap();
            }
        })
        .unwrap();
        address
    }

    fn echo_connection(mut stream: std::net::TcpStream, padding: usize) {
        let (mut framer, mut buffer, mut request, mut head) =
            (Framer::default(), vec![0; 70_000], Vec::new(), None);
        loop {
            let length = stream.read(&mut buffer).unwrap_or(0);
            if length == 0 {
                return;
            }
            let mut at = 0;
            while at < length {
                let (taken, seen) = framer.take(&buffer[at..length]).unwrap();
                request.extend_from_slice(&buffer[at..at + taken]);
                at += taken;
                if let Seen::Head(seen) = seen {
                    framer.body(seen.request_body().unwrap());
                    head = Some(seen);
                }
                if framer.between_messages() {
                    let head = head.take().unwrap();
                    let mut body = vec![b'.'; padding];
                    body.append(&mut request);
                    let mut answer =
                        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
                    if head.request_line().unwrap().0 != "HEAD" {
                        answer.append(&mut body);
                    }
                    stream.write_all(&answer).unwrap();
                }
            }
        }
    }

    /// Sends all, then reads `responses` responses: their bodies.
    fn ask(stream: &mut std::net::TcpStream, requests: &str, methods: &[&str]) -> Vec<String> {
        stream.write_all(requests.as_bytes()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let (mut framer, mut buffer) = (Framer::default(), vec![0; 70_000]);
        let mut bodies = Vec::new();
        while bodies.len() < methods.len() || !framer.between_messages() {
            let length = stream.read(&mut buffer).unwrap();
            assert!(length > 0, "closed after {bodies:?}");
            let mut at = 0;
            while at < length {
                let (taken, seen) = framer.take(&buffer[at..length]).unwrap();
                match seen {
                    Seen::Head(head) => {
                        framer.body(head.response_body(Some(methods[bodies.len()])).unwrap());
                        bodies.push(String::new());
                    }
                    Seen::Body => {
                        let text = std::str::from_utf8(&buffer[at..at + taken]).unwrap();
                        bodies.last_mut().unwrap().push_str(text);
                    }
                    Seen::HeadPart => {}
                }
                at += taken;
            }
        }
        bodies
    }

    fn own_page(proxy: SocketAddr, request: &str) -> Value {
        let mut stream = std::net::TcpStream::connect(proxy).unwrap();
        // In pieces: whom it is for must not depend on how it comes.
        for piece in format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes().chunks(7) {
            stream.write_all(piece).unwrap();
            time::sleep(Duration::from_millis(1));
        }
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    #[test]
    fn each_request_waits_and_not_each_connection() {
        let proxy = proxy(echo(0), 30, 0);
        let mut stream = std::net::TcpStream::connect(proxy).unwrap();
        let start = time::monotonic_now();
        for _ in 0..5 {
            assert_eq!(ask(&mut stream, GET, &["GET"]), [GET]);
        }
        let one_after_the_other = start.elapsed();
        // Five times 30 ms, each up to 1.3 ms late; and a machine that is busy.
        assert!(one_after_the_other >= Duration::from_millis(150), "{one_after_the_other:?}");
        assert!(one_after_the_other < Duration::from_millis(450), "{one_after_the_other:?}");
        let start = time::monotonic_now();
        assert_eq!(ask(&mut stream, &GET.repeat(5), &["GET"; 5]), [GET; 5]);
        let together = start.elapsed();
        assert!(
            together >= Duration::from_millis(30) && together < Duration::from_millis(140),
            "{together:?}"
        );
        // A body that comes late is not held back a second time.
        let put = format!("PUT /b/key HTTP/1.1\r\nContent-Length: 100000\r\n\r\n{}", "x".repeat(100_000));
        let (first, rest) = put.split_at(50_000);
        stream.write_all(first.as_bytes()).unwrap();
        time::sleep(Duration::from_millis(60));
        let start = time::monotonic_now();
        assert_eq!(ask(&mut stream, rest, &["PUT"]), [put.as_str()]);
        assert!(start.elapsed() < Duration::from_millis(28), "{:?}", start.elapsed());
    }

    #[test]
    fn what_passes_is_unchanged_and_counted() {
        let proxy = proxy(echo(3), 0, 0);
        let mut stream = std::net::TcpStream::connect(proxy).unwrap();
        let chunked = "PUT /b/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nGET /\r\n0\r\n\r\n";
        let list = "GET /b?list-type=2&prefix=a HTTP/1.1\r\n\r\n";
        let head = "HEAD /b/k HTTP/1.1\r\n\r\n";
        let all = [GET, chunked, list, head, GET].concat();
        let bodies = ask(&mut stream, &all, &["GET", "PUT", "GET", "HEAD", "GET"]);
        let with_padding = |request: &str| format!("...{request}");
        assert_eq!(
            bodies,
            [with_padding(GET), with_padding(chunked), with_padding(list), String::new(), with_padding(GET)]
        );
        let answered: usize = bodies
            .iter()
            .zip([GET, chunked, list, head, GET])
            .map(|(body, request)| {
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", request.len() + 3).len() + body.len()
            })
            .sum();
        let expected = json!({
            "requests": {"GET": 3, "HEAD": 1, "PUT": 1},
            "listings": 1,
            "responses": {"200": 5},
            "bytes_from_clients": all.len(),
            "bytes_to_clients": answered,
            "connections": 1,
            "broken_connections": 0,
        });
        assert_eq!(own_page(proxy, "GET /.proxy/counts"), expected);
        assert_eq!(own_page(proxy, "POST /.proxy/reset"), expected);
        assert_eq!(own_page(proxy, "GET /.proxy/counts")["requests"], json!({}));
        assert!(own_page(proxy, "GET /.proxy/else")["error"].as_str().unwrap().contains("/.proxy/counts"));
    }

    #[test]
    fn a_connection_carries_its_rate_in_each_direction() {
        let proxy = proxy(echo(400_000), 0, 2_000_000);
        let mut stream = std::net::TcpStream::connect(proxy).unwrap();
        let start = time::monotonic_now();
        ask(&mut stream, GET, &["GET"]);
        let down = start.elapsed();
        assert!(down >= Duration::from_millis(190) && down < Duration::from_millis(500), "{down:?}");
        let put = format!("PUT /b/key HTTP/1.1\r\nContent-Length: 400000\r\n\r\n{}", "x".repeat(400_000));
        let start = time::monotonic_now();
        ask(&mut stream, &put, &["PUT"]);
        // The echo begins when the request has ended.
        let both = start.elapsed();
        assert!(both >= Duration::from_millis(590) && both < Duration::from_millis(1200), "{both:?}");
        // Others are not slowed by it.
        let mut other = std::net::TcpStream::connect(proxy).unwrap();
        let start = time::monotonic_now();
        let first = thread::spawn("first", move || ask(&mut stream, GET, &["GET"])).unwrap();
        ask(&mut other, GET, &["GET"]);
        first.join().unwrap();
        assert!(start.elapsed() < Duration::from_millis(380), "{:?}", start.elapsed());
    }

    #[test]
    fn nonsense_and_a_store_that_is_gone_end_the_connection() {
        let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for (to, request) in [(echo(0), "\u{16}\u{3}\u{1} hello\r\n\r\n"), (nowhere, GET)] {
            let proxy = proxy(to, 0, 0);
            let mut stream = std::net::TcpStream::connect(proxy).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = Vec::new();
            // A reset is an end as well.
            let _ = stream.read_to_end(&mut answer);
            assert_eq!(answer, b"");
            assert_eq!(own_page(proxy, "GET /.proxy/counts")["broken_connections"], 1);
        }
    }

    #[test]
    fn the_command_line_is_read_and_checked() {
        let parse = |line: &str| ProxyOptions::parse(line.split_whitespace().map(OsString::from));
        let options = parse(
            "--listen 127.0.0.1:8 --to 127.0.0.1:9 --latency-ms 20 --connection-bytes-per-second 100000000",
        );
        let expected = ProxyOptions {
            listen: "127.0.0.1:8".parse().unwrap(),
            to: "127.0.0.1:9".parse().unwrap(),
            latency: Duration::from_millis(20),
            connection_bytes_per_second: Some(100_000_000),
        };
        assert_eq!(options.unwrap().unwrap(), expected);
        let rest = parse("--to 127.0.0.1:9").unwrap().unwrap();
        assert_eq!((rest.latency, rest.connection_bytes_per_second), (Duration::ZERO, None));
        assert!(parse("--help").unwrap().is_none());
        for bad in ["", "--to store:9", "--to 127.0.0.1:9 extra", "--to 127.0.0.1:9 --latency-ms 999999999"] {
            assert_eq!(parse(bad).unwrap_err().kind(), headrace_base::Kind::Invalid, "{bad}");
        }
    }
}
