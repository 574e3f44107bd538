//! Put, get, list, delete under one prefix. Callers wait on their own thread; the work runs on two threads of a
//! runtime that only this file knows.
//!
//! Two limits hold whatever is asked for: `CONNECTIONS_MAX` requests in flight, and `IN_FLIGHT_BYTES_MAX` of bodies
//! on their way in, so that a burst of cold reads cannot outgrow the engine's memory. What goes out is read from the
//! page cache as it is sent and takes none.

use std::borrow::Cow;
use std::fs::File;
use std::future::Future;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, select};
use futures_util::{StreamExt, TryStreamExt, stream};
use headrace_base::{Error, MIB, Result, time};
use memmap2::Mmap;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, BackoffConfig, ClientOptions, GetOptions, GetRange, GetResult, MultipartId,
    MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, RetryConfig,
    UpdateVersion,
};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use crate::credentials;
use crate::failure::explain;
use crate::location::Location;

/// S3 takes about 55 requests a second for each connection of a client near by; 64 carry more than a 25 Gbit
/// network in ranges of 8 MiB, and are what stores serve without a word.
const CONNECTIONS_MAX: usize = 64;
const IN_FLIGHT_BYTES_MAX: usize = 64 * MIB as usize;
/// Of that, what reads ahead may take.
const AHEAD_BYTES_MAX: usize = 48 * MIB as usize;
/// Large enough that latency is a tenth of its time at 100 MB/s and 10 ms, small enough to go in parallel; S3's least
/// part is 5 MiB. A file may have 10,000 parts: larger ones get larger parts.
const PART_BYTES: u64 = 8 * MIB;
const PARTS_MAX: u64 = 10_000;
/// Parts of one object under way at a time.
const PARTS_AT_ONCE: usize = 8;
/// Below this an object goes in one request: parts need three round trips.
const MULTIPART_BYTES_MIN: u64 = 16 * MIB;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection on which nothing moves for so long is given up, and the request repeated.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// One request with its body; 8 MiB in this time are 70 KB/s.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a request is repeated before its caller is told.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRIES_MAX: usize = 20;
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);
/// An answer that is not what was asked for (another range, a body that ends early) is asked for again, so often at
/// most: the next one comes over another connection, or from another machine of the store.
const ANSWERS_MAX: u32 = 5;
/// How long whoever has failed to upload waits to clean up after it.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(2);

/// A range of an object, and what the answer told of the whole.
#[derive(Clone, Debug)]
pub struct Fetched {
    pub bytes: Bytes,
    pub object_bytes: u64,
    pub etag: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Relative to the tier's prefix.
    pub name: String,
    pub bytes: u64,
}

/// Whether somebody waits for the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    Now,
    /// They will be wanted: they leave room for those that are.
    Ahead,
}

/// Where the bytes of a range go.
pub trait Sink: Send + Sync + 'static {
    /// Bytes at an offset of the object; the same may come again. False: no more of them is wanted.
    fn take(&self, offset: u64, bytes: &[u8]) -> bool;
    /// Whether `take` has answered false.
    fn is_full(&self) -> bool;
    /// The end: how long the object is, or why the rest did not come.
    fn done(self, outcome: Result<u64>);
}

/// What a store says of an object without its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectFacts {
    pub bytes: u64,
    /// As it was given with the bytes.
    pub mtime: Option<String>,
}

/// The key under which other tools, rclone among them, look for a file's time of change.
const MTIME: Attribute = Attribute::Metadata(Cow::Borrowed("mtime"));

fn mtime_attributes(mtime: &str) -> Attributes {
    Attributes::from_iter([(MTIME, mtime.to_owned())])
}

/// An object on its way, part by part, in order. To be ended by `complete` or `give_up`.
#[derive(Debug)]
pub struct PartsUpload<'a> {
    tier: &'a ObjectTier,
    name: String,
    upload: Box<dyn MultipartUpload>,
}

impl PartsUpload<'_> {
    /// The next part, 5 MiB or more unless it is the last. Sent when it returns.
    pub fn put(&mut self, bytes: Vec<u8>) -> Result<()> {
        let tier = self.tier;
        tier.counters.bytes_out.increment(bytes.len() as u64);
        let part = self.upload.put_part(bytes.into());
        tier.wait(while_running(&tier.running, async {
            let _slot = slot(&tier.connections).await;
            tier.counters.puts.increment(1);
            part.await
        }))
        .map_err(|cause| explain(tier.shown("put a part of", &self.name), cause))
    }

    pub fn complete(mut self) -> Result<()> {
        let tier = self.tier;
        let completed = tier.wait(while_running(&tier.running, async {
            let _slot = slot(&tier.connections).await;
            tier.counters.puts.increment(1);
            self.upload.complete().await
        }));
        completed.map(drop).map_err(|cause| {
            let error = explain(tier.shown("complete", &self.name), cause);
            self.give_up();
            error
        })
    }

    /// Removes its parts, which cost money in silence. What a store that is down cannot be told now, the bucket's own
    /// rule for unfinished uploads has to see to.
    pub fn give_up(mut self) {
        let told = self.tier.wait(async { tokio::time::timeout(GIVE_UP_TIMEOUT, self.upload.abort()).await });
        if !matches!(told, Ok(Ok(()))) {
            tracing::warn!(
                object = self.name,
                "the parts of an upload that was given up are still in the store"
            );
        }
    }
}

/// What became of an object that was to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    New,
    /// There was one of this name; it is left as it is.
    Existed,
}

#[derive(Debug)]
struct Counters {
    gets: metrics::Counter,
    puts: metrics::Counter,
    lists: metrics::Counter,
    deletes: metrics::Counter,
    bytes_in: metrics::Counter,
    bytes_out: metrics::Counter,
}

#[derive(Debug)]
pub struct ObjectTier {
    location: Location,
    store: Arc<AmazonS3>,
    runtime: Option<Runtime>,
    connections: Arc<Semaphore>,
    in_flight: Arc<Semaphore>,
    ahead: Arc<Semaphore>,
    counters: Arc<Counters>,
    /// Uploads in parts that came to nothing while the store could not be told: told when an upload succeeds.
    given_up: Mutex<Vec<(Path, MultipartId)>>,
    /// Closed when the engine ends: nobody waits for the store any more.
    running: Arc<Semaphore>,
}

impl ObjectTier {
    /// Asks nothing of the store yet. Invalid or NotFound if the environment's configuration cannot be right.
    pub fn open(location: Location) -> Result<Arc<ObjectTier>> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("object")
            .enable_all()
            .build()
            .map_err(|cause| Error::io("start the object tier's runtime", cause))?;
        let client = ClientOptions::new()
            .with_allow_http(location.endpoint.as_ref().is_some_and(|at| at.starts_with("http://")))
            .with_http1_only()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_read_timeout(STALL_TIMEOUT)
            .with_timeout(REQUEST_TIMEOUT)
            .with_pool_idle_timeout(IDLE_TIMEOUT)
            .with_pool_max_idle_per_host(CONNECTIONS_MAX);
        let retry = RetryConfig {
            backoff: BackoffConfig { init_backoff: BACKOFF_FIRST, max_backoff: BACKOFF_MAX, base: 2.0 },
            max_retries: RETRIES_MAX,
            retry_timeout: RETRY_TIMEOUT,
        };
        // TLS guards what is sent; without it the signature has to (1 s of processor time for 1.5 GB).
        let encrypted = location.endpoint.as_ref().is_none_or(|at| at.starts_with("https://"));
        let mut builder = AmazonS3Builder::from_env()
            .with_unsigned_payload(encrypted)
            .with_client_options(client)
            .with_retry(retry)
            .with_bucket_name(&location.bucket);
        if let Some(endpoint) = &location.endpoint {
            // Whoever names an endpoint has a store in which a bucket is seldom a host name.
            builder = builder.with_endpoint(endpoint).with_virtual_hosted_style_request(false);
        }
        if let Some(region) = &location.region {
            builder = builder.with_region(region);
        }
        builder = credentials::apply(builder)?;
        let store =
            builder.build().map_err(|cause| explain(format_args!("object tier {location}"), cause))?;
        let request = |operation: &'static str| metrics::counter!("headrace_object_requests_total", "operation" => operation);
        let moved = |direction: &'static str| metrics::counter!("headrace_object_bytes_total", "direction" => direction);
        Ok(Arc::new(ObjectTier {
            location,
            store: Arc::new(store),
            runtime: Some(runtime),
            connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT_BYTES_MAX)),
            ahead: Arc::new(Semaphore::new(AHEAD_BYTES_MAX)),
            counters: Arc::new(Counters {
                gets: request("get"),
                puts: request("put"),
                lists: request("list"),
                deletes: request("delete"),
                bytes_in: moved("in"),
                bytes_out: moved("out"),
            }),
            given_up: Mutex::default(),
            running: Arc::new(Semaphore::new(0)),
        }))
    }

    pub fn location(&self) -> &Location {
        &self.location
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the runtime goes when the tier is dropped")
    }

    fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime().block_on(future)
    }

    /// The engine ends: what waits for the store fails at once, and is not tried again.
    pub fn stop(&self) {
        self.running.close();
    }

    fn path(&self, name: &str) -> Result<Path> {
        let key = self.location.key(name);
        Path::parse(&key)
            .map_err(|cause| Error::invalid(format!("object {key:?}: {cause}")).with_cause(cause))
    }

    fn shown(&self, doing: &str, name: &str) -> String {
        format!("{doing} s3://{}/{}", self.location.bucket, self.location.key(name))
    }

    /// Makes or replaces an object. Durable when it returns.
    pub fn put(&self, name: &str, bytes: impl Into<Bytes>) -> Result<()> {
        self.put_as(name, bytes.into(), PutMode::Overwrite.into())
    }

    /// Makes an object unless there is one of this name; of many at the same time one makes it.
    pub fn create(&self, name: &str, bytes: impl Into<Bytes>) -> Result<Stored> {
        match self.put_as(name, bytes.into(), PutMode::Create.into()) {
            Ok(()) => Ok(Stored::New),
            Err(error) if error.raw_errno() == headrace_base::error::errno::EEXIST => Ok(Stored::Existed),
            Err(error) => Err(error),
        }
    }

    /// What `put_with_mtime` or `start_parts` said of an object. None: there is none.
    pub fn facts(&self, name: &str) -> Result<Option<ObjectFacts>> {
        let path = self.path(name)?;
        let asked = self.wait(while_running(&self.running, async {
            let _slot = slot(&self.connections).await;
            self.counters.gets.increment(1);
            self.store.get_opts(&path, GetOptions { head: true, ..GetOptions::default() }).await
        }));
        match asked {
            Ok(answer) => Ok(Some(ObjectFacts {
                bytes: answer.meta.size,
                mtime: answer.attributes.get(&MTIME).map(|mtime| mtime.to_string()),
            })),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(cause) => Err(explain(self.shown("look at", name), cause)),
        }
    }

    /// As `put`, with a time of change beside the bytes.
    pub fn put_with_mtime(&self, name: &str, bytes: Vec<u8>, mtime: &str) -> Result<()> {
        let options = PutOptions { attributes: mtime_attributes(mtime), ..PutOptions::default() };
        self.put_as(name, bytes.into(), options)
    }

    /// Begins an object that comes in parts; until `complete` there is none.
    pub fn start_parts(&self, name: &str, mtime: &str) -> Result<PartsUpload<'_>> {
        let path = self.path(name)?;
        let options =
            PutMultipartOptions { attributes: mtime_attributes(mtime), ..PutMultipartOptions::default() };
        let upload = self.wait(while_running(&self.running, async {
            let _slot = slot(&self.connections).await;
            self.counters.puts.increment(1);
            self.store.put_multipart_opts(&path, options).await
        }));
        let upload = upload.map_err(|cause| explain(self.shown("put in parts", name), cause))?;
        Ok(PartsUpload { tier: self, name: name.to_owned(), upload })
    }

    fn put_as(&self, name: &str, bytes: Bytes, options: PutOptions) -> Result<()> {
        let path = self.path(name)?;
        self.wait(while_running(&self.running, async {
            let _slot = slot(&self.connections).await;
            self.counters.puts.increment(1);
            self.counters.bytes_out.increment(bytes.len() as u64);
            self.store.put_opts(&path, bytes.into(), options).await
        }))
        .map(drop)
        .map_err(|cause| explain(self.shown("put", name), cause))
    }

    /// Makes or replaces an object with the first `bytes` of a file, which must not change or shrink meanwhile.
    /// Large ones go in parts, several at a time; until the last is there the object is not.
    pub fn put_file(&self, name: &str, file: &File, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return self.put(name, Bytes::new());
        }
        let length = usize::try_from(bytes)
            .map_err(|_| Error::invalid(format!("{} is too large to be mapped", self.shown("put", name))))?;
        // SAFETY: what is uploaded is a closed segment: nobody writes to it or shortens it, and its folder belongs to
        // the engine's user alone.
        let map = unsafe { memmap2::MmapOptions::new().len(length).map(file) }
            .map_err(|cause| Error::io(self.shown("map the file for", name), cause))?;
        let body = Bytes::from_owner(OwnedMap(map));
        if bytes < MULTIPART_BYTES_MIN {
            self.put(name, body)?;
        } else {
            let path = self.path(name)?;
            let part_bytes = PART_BYTES.max(bytes.div_ceil(PARTS_MAX)) as usize;
            self.wait(while_running(&self.running, self.put_parts(&path, &body, part_bytes)))
                .map_err(|cause| explain(self.shown("put", name), cause))?;
        }
        self.wait(self.clean_up());
        Ok(())
    }

    /// Parts that nobody completes cost money in silence. What a store that is down cannot be told now waits for an
    /// upload that succeeds; what an engine's end leaves, the bucket's own rule for unfinished uploads has to see to.
    async fn clean_up(&self) {
        let given_up = std::mem::take(&mut *self.given_up.lock().unwrap_or_else(PoisonError::into_inner));
        for (path, upload) in given_up {
            let told =
                tokio::time::timeout(GIVE_UP_TIMEOUT, self.store.abort_multipart(&path, &upload)).await;
            // One that the store does not know is gone, or was completed after all.
            if !matches!(told, Ok(Ok(()) | Err(object_store::Error::NotFound { .. }))) {
                self.given_up.lock().unwrap_or_else(PoisonError::into_inner).push((path, upload));
            }
        }
    }

    async fn put_parts(&self, path: &Path, body: &Bytes, part_bytes: usize) -> object_store::Result<()> {
        self.counters.puts.increment(1);
        let upload = self.store.create_multipart(path).await?;
        let parts = (0..body.len().div_ceil(part_bytes)).map(|index| {
            let begin = index * part_bytes;
            let part = body.slice(begin..(begin + part_bytes).min(body.len()));
            let (store, path, upload) = (Arc::clone(&self.store), path.clone(), upload.clone());
            let (connections, counters) = (Arc::clone(&self.connections), Arc::clone(&self.counters));
            async move {
                let _slot = slot(&connections).await;
                counters.puts.increment(1);
                counters.bytes_out.increment(part.len() as u64);
                store.put_part(&path, &upload, index, part.into()).await
            }
        });
        let sent: object_store::Result<Vec<_>> =
            stream::iter(parts).buffered(PARTS_AT_ONCE).try_collect().await;
        let outcome = match sent {
            Ok(parts) => {
                self.counters.puts.increment(1);
                self.store.complete_multipart(path, &upload, parts).await.map(drop)
            }
            Err(error) => Err(error),
        };
        if outcome.is_err() {
            self.given_up.lock().unwrap_or_else(PoisonError::into_inner).push((path.clone(), upload));
            self.clean_up().await;
        }
        outcome
    }

    /// A range of an object; fewer bytes only where the object ends. NotFound; Conflict if `etag` is given and the
    /// object is another by now.
    pub fn get(&self, name: &str, range: Range<u64>, etag: Option<&str>) -> Result<Fetched> {
        let path = self.path(name)?;
        let doing = self.shown("get", name);
        let running = &self.running;
        self.wait(while_running(running, get_range(self.parts(), path, range, etag.map(str::to_owned))))
            .map_err(|cause| explain(doing, cause))
    }

    /// A whole object, into memory.
    pub fn get_all(&self, name: &str) -> Result<Bytes> {
        self.get_whole(name).map(|fetched| fetched.bytes)
    }

    /// The same, with what identifies this content of it.
    pub fn get_whole(&self, name: &str) -> Result<Fetched> {
        let path = self.path(name)?;
        self.wait(while_running(&self.running, async {
            let _slot = slot(&self.connections).await;
            until_answered(|| async {
                self.counters.gets.increment(1);
                let answer = self.store.get_opts(&path, GetOptions::new()).await?;
                let etag = answer.meta.e_tag.clone();
                let bytes = answer.bytes().await?;
                self.counters.bytes_in.increment(bytes.len() as u64);
                Ok(Fetched { object_bytes: bytes.len() as u64, bytes, etag })
            })
            .await
        }))
        .map_err(|cause| explain(self.shown("get", name), cause))
    }

    /// Replaces an object if it is still the one with this ETag. Conflict if it is another by now.
    pub fn replace(&self, name: &str, bytes: impl Into<Bytes>, etag: String) -> Result<()> {
        let version = UpdateVersion { e_tag: Some(etag), version: None };
        self.put_as(name, bytes.into(), PutMode::Update(version).into())
    }

    /// As `get`, on another thread, which gives the bytes to `sink` as they come and ends with `done`. Neither may block
    /// for long.
    pub fn start_get<S: Sink>(&self, name: &str, range: Range<u64>, urgency: Urgency, sink: S) {
        let path = match self.path(name) {
            Ok(path) => path,
            Err(error) => return sink.done(Err(error)),
        };
        let doing = self.shown("get", name);
        let (parts, running) = (self.parts(), Arc::clone(&self.running));
        self.runtime().spawn(async move {
            let ahead = Arc::clone(&parts.ahead);
            let _turn = match urgency {
                Urgency::Now => None,
                Urgency::Ahead => ahead.acquire_many(permits(&range, AHEAD_BYTES_MAX)).await.ok(),
            };
            let outcome = while_running(&running, stream_range(&parts, &path, &range, &sink)).await;
            sink.done(outcome.map_err(|cause| explain(doing, cause)));
        });
    }

    fn parts(&self) -> Getting {
        Getting {
            store: Arc::clone(&self.store),
            connections: Arc::clone(&self.connections),
            in_flight: Arc::clone(&self.in_flight),
            ahead: Arc::clone(&self.ahead),
            counters: Arc::clone(&self.counters),
        }
    }

    /// How long an object is. NotFound if there is none.
    pub fn bytes_of(&self, name: &str) -> Result<u64> {
        let path = self.path(name)?;
        self.wait(while_running(&self.running, async {
            let _slot = slot(&self.connections).await;
            self.counters.gets.increment(1);
            self.store.head(&path).await
        }))
        .map(|meta| meta.size)
        .map_err(|cause| explain(self.shown("look at", name), cause))
    }

    /// All objects whose names begin with `folder` and a slash, in order of name, to `each` in turn; memory holds one
    /// answer of the store (1,000 names) at a time.
    pub fn list(&self, folder: &str, mut each: impl FnMut(Listed) -> Result<()>) -> Result<()> {
        let path = self.path(folder)?;
        let skip = if self.location.prefix.is_empty() { 0 } else { self.location.prefix.len() + 1 };
        self.wait(async {
            self.counters.lists.increment(1);
            let mut objects = self.store.list(Some(&path));
            while let Some(object) = objects.next().await {
                let object = object.map_err(|cause| explain(self.shown("list", folder), cause))?;
                let name = object.location.as_ref().get(skip..).unwrap_or_default().to_owned();
                each(Listed { name, bytes: object.size })?;
            }
            Ok(())
        })
    }

    /// It is no error if there is none.
    pub fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        let deleted = self.wait(while_running(&self.running, async {
            let _slot = slot(&self.connections).await;
            self.counters.deletes.increment(1);
            self.store.delete(&path).await
        }));
        match deleted {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(cause) => Err(explain(self.shown("delete", name), cause)),
        }
    }
}

impl Drop for ObjectTier {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // The last holder may be one of the runtime's own threads, which must not wait for itself.
            runtime.shutdown_background();
        }
    }
}

#[derive(Debug)]
struct OwnedMap(Mmap);

impl AsRef<[u8]> for OwnedMap {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

struct Getting {
    store: Arc<AmazonS3>,
    connections: Arc<Semaphore>,
    in_flight: Arc<Semaphore>,
    ahead: Arc<Semaphore>,
    counters: Arc<Counters>,
}

fn permits(range: &Range<u64>, bytes_max: usize) -> u32 {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX).clamp(1, bytes_max) as u32
}

async fn get_range(
    getting: Getting,
    path: Path,
    range: Range<u64>,
    etag: Option<String>,
) -> object_store::Result<Fetched> {
    // Memory first: whoever holds a connection must not wait for those that need one to finish.
    let _memory = getting.in_flight.acquire_many(permits(&range, IN_FLIGHT_BYTES_MAX)).await;
    let _slot = slot(&getting.connections).await;
    until_answered(|| get_range_once(&getting, &path, &range, etag.clone())).await
}

/// Gives the pieces of a range to a sink as they come. What comes again after a failure is given again.
async fn stream_range<S: Sink>(
    getting: &Getting,
    path: &Path,
    range: &Range<u64>,
    sink: &S,
) -> object_store::Result<u64> {
    let _memory = getting.in_flight.acquire_many(permits(range, IN_FLIGHT_BYTES_MAX)).await;
    let _slot = slot(&getting.connections).await;
    until_answered(|| async move {
        let (answer, expected) = ask_range(getting, path, range, None).await?;
        let object_bytes = answer.meta.size;
        let mut at = expected.start;
        let mut pieces = answer.into_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece?;
            let end = at + piece.len() as u64;
            // More than was announced is not for us either.
            if end > expected.end {
                return Err(other_bytes(path, &expected, end - expected.start));
            }
            if !sink.take(at, &piece) {
                break;
            }
            getting.counters.bytes_in.increment(piece.len() as u64);
            at = end;
        }
        if at == expected.end || sink.is_full() {
            Ok(object_bytes)
        } else {
            Err(other_bytes(path, &expected, at - expected.start))
        }
    })
    .await
}

fn other_bytes(path: &Path, expected: &Range<u64>, came: u64) -> object_store::Error {
    object_store::Error::Generic {
        store: "S3",
        source: format!("{came} bytes came of {expected:?} of {path}").into(),
    }
}

/// The outcome of `future`, or an error as soon as the engine ends.
async fn while_running<T>(
    running: &Semaphore,
    future: impl Future<Output = object_store::Result<T>>,
) -> object_store::Result<T> {
    match select(pin!(future), pin!(running.acquire())).await {
        Either::Left((outcome, _)) => outcome,
        // It gives no permits: it was closed.
        Either::Right(_) => {
            Err(object_store::Error::Generic { store: "S3", source: "the engine is ending".into() })
        }
    }
}

/// Asks again after an answer that is no refusal and not what was asked for either. Requests that fail are repeated
/// below this already, for `RETRY_TIMEOUT`; that is the budget here too.
async fn until_answered<T, F>(ask: impl Fn() -> F) -> object_store::Result<T>
where
    F: Future<Output = object_store::Result<T>>,
{
    let begun = time::monotonic_now();
    let mut asked = 1;
    loop {
        match ask().await {
            // (Who asked for what lies beyond an object's end was answered.)
            Err(object_store::Error::Generic { store, source })
                if !source.to_string().contains("InvalidRange") =>
            {
                if asked == ANSWERS_MAX || time::monotonic_now().duration_since(begun) > RETRY_TIMEOUT / 2 {
                    let source = format!("asked {asked} times; {source}").into();
                    return Err(object_store::Error::Generic { store, source });
                }
                tracing::info!(error = %source, asked, "the store's answer is not what was asked for");
                tokio::time::sleep(BACKOFF_FIRST * 2_u32.pow(asked)).await;
                asked += 1;
            }
            outcome => return outcome,
        }
    }
}

async fn get_range_once(
    getting: &Getting,
    path: &Path,
    range: &Range<u64>,
    etag: Option<String>,
) -> object_store::Result<Fetched> {
    let (answer, expected) = ask_range(getting, path, range, etag).await?;
    let (object_bytes, etag) = (answer.meta.size, answer.meta.e_tag.clone());
    let bytes = answer.bytes().await?;
    if bytes.len() as u64 != expected.end - expected.start {
        return Err(other_bytes(path, &expected, bytes.len() as u64));
    }
    getting.counters.bytes_in.increment(bytes.len() as u64);
    Ok(Fetched { bytes, object_bytes, etag })
}

/// The answer's head, and the range that its body must be.
async fn ask_range(
    getting: &Getting,
    path: &Path,
    range: &Range<u64>,
    etag: Option<String>,
) -> object_store::Result<(GetResult, Range<u64>)> {
    getting.counters.gets.increment(1);
    let options =
        GetOptions { range: Some(GetRange::Bounded(range.clone())), if_match: etag, ..GetOptions::default() };
    let answer = getting.store.get_opts(path, options).await?;
    let expected = range.start..range.end.min(answer.meta.size);
    if answer.range != expected {
        // A store that answers another range than was asked for must not fill ours.
        return Err(object_store::Error::Generic {
            store: "S3",
            source: format!("asked for bytes {expected:?} of {path}, the store answered {:?}", answer.range)
                .into(),
        });
    }
    Ok((answer, expected))
}

async fn slot(connections: &Semaphore) -> Option<tokio::sync::SemaphorePermit<'_>> {
    // Never closed, so always Some.
    connections.acquire().await.ok()
}

/// Parts of the least size that S3 takes.
const PROBE_PART_BYTES: usize = 5 * MIB as usize;

impl ObjectTier {
    /// Makes an object of two parts, the second one byte long. Corrupt if it is not their bytes.
    pub(crate) fn probe_parts(&self, name: &str) -> Result<()> {
        let path = self.path(name)?;
        let body = Bytes::from([vec![7; PROBE_PART_BYTES], vec![8]].concat());
        self.wait(while_running(&self.running, self.put_parts(&path, &body, PROBE_PART_BYTES)))
            .map_err(|cause| explain(self.shown("put in parts", name), cause))?;
        let end = body.len() as u64;
        let tail = self.get(name, end - 2..end, None)?;
        if tail.object_bytes == end && tail.bytes[..] == [7, 8] {
            Ok(())
        } else {
            Err(Error::corrupt("an object that was made of parts does not hold their bytes"))
        }
    }
}
