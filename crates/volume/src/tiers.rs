//! A volume's object tier as a whole: its claim on the prefix, its check at every start, its threads, its state in a few
//! numbers.
//!
//! ```text
//! PREFIX/HEADRACE     marker (JSON): whose prefix this is; made once, by whoever comes first
//! PREFIX/segments/    as in the volume's folder
//! ```
//! A start does not wait for a store that is down: what is on flash is served, and uploads begin when the store has
//! passed the check. A store that fails it (it lies, or the prefix is another volume's) is an error at the start, and
//! uploads never begin.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use headrace_base::error::errno;
use headrace_base::ids::VolumeId;
use headrace_base::time::{self, Timestamp};
use headrace_base::{Error, Kind, MIB, Result, SegmentId, thread};
use headrace_flash::Flash;
use headrace_format::FORMAT;
use headrace_format::record::SegmentKind;
use headrace_meta::MetaStore;
use headrace_object::{Location, ObjectTier, Stored};
use serde::{Deserialize, Serialize};

use crate::flush::Flusher;
use crate::remote::{Remote, data_name};
use crate::segments::Segments;
use crate::uploads::{Backlog, UPLOADS_MAX, Uploads};

const MARKER: &str = "HEADRACE";
/// Eight segments of the least size that is still worth a request (2 MiB).
const FLASH_BYTES_MIN: u64 = 16 * MIB;
/// Of a disk, what a flash tier without a size takes of what is free.
const FLASH_SHARE: (u64, u64) = (4, 5);
/// How long a start waits for the check; and how often it is repeated while the store is down.
const CHECK_PATIENCE: Duration = Duration::from_secs(5);
const CHECK_PAUSE: Duration = Duration::from_secs(5);
/// How long the end of an engine waits for uploads. What is left is dirty, on flash, and goes at the next start.
const FINISH_PATIENCE: Duration = Duration::from_secs(30);
/// From here on a person is told of the backlog.
const BACKLOG_AGE_MAX: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize)]
struct Marker {
    headrace: String,
    format: u32,
    volume: String,
    created_ns: i64,
}

/// What `status` tells of the tiers.
#[derive(Clone, Debug)]
pub struct TierStatus {
    pub location: String,
    pub flash_bytes_max: u64,
    pub clean_bytes: u64,
    pub backlog: Backlog,
}

#[derive(Debug)]
pub struct Tiers {
    pub remote: Arc<Remote>,
    volume: VolumeId,
    /// The outcome of the last check.
    checked: Arc<(Mutex<Check>, Condvar)>,
    opened: Instant,
}

#[derive(Debug, Default)]
enum Check {
    #[default]
    Running,
    Passed,
    Failed(Error),
    Stopped,
}

impl Tiers {
    pub fn open(
        location: Location,
        volume: VolumeId,
        flash: &Arc<Flash>,
        bytes_max: Option<u64>,
    ) -> Result<Tiers> {
        let bytes_max = match bytes_max {
            Some(bytes_max) => bytes_max,
            None => {
                let held: u64 = flash.list()?.iter().map(|file| file.bytes).sum();
                let (_, _, available) = flash.space()?;
                ((available + held) / FLASH_SHARE.1 * FLASH_SHARE.0).max(FLASH_BYTES_MIN)
            }
        };
        let tier = ObjectTier::open(location)?;
        let uploads = Arc::new(Uploads::new());
        let remote = Arc::new(Remote::new(tier, Arc::clone(flash), Arc::clone(&uploads), bytes_max));
        uploads.connect(&remote);
        Ok(Tiers { remote, volume, checked: Arc::default(), opened: time::monotonic_now() })
    }

    /// Checks the store, and starts the uploads when it has passed. Invalid if it has failed.
    pub fn start(&self, store: &Arc<dyn MetaStore>, flusher: &Arc<Flusher>) -> Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        let (tier, volume) = (Arc::clone(&self.remote.tier), self.volume);
        let (checked, uploads) = (Arc::clone(&self.checked), Arc::clone(&self.remote.uploads));
        threads.push(thread::spawn("object-check", move || {
            check_until_passed(&tier, volume, &checked, &uploads)
        })?);
        for _ in 0..UPLOADS_MAX {
            let (remote, store, flusher) = (Arc::clone(&self.remote), Arc::clone(store), Arc::clone(flusher));
            threads.push(thread::spawn("upload", move || {
                remote.run_uploads(&*store, &|segment| flusher.upload_finished(segment));
            })?);
        }
        let guard = self.checked.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (outcome, _) = self
            .checked
            .1
            .wait_timeout_while(guard, CHECK_PATIENCE, |check| matches!(check, Check::Running))
            .unwrap_or_else(PoisonError::into_inner);
        let refused = match &*outcome {
            Check::Failed(error) if is_final(error) => Some(Error::errno(error.raw_errno(), error.message())),
            _ => None,
        };
        drop(outcome);
        if let Some(error) = refused {
            self.stop();
            threads.into_iter().for_each(|thread| drop(thread.join()));
            return Err(error);
        }
        Ok(threads)
    }

    fn stop(&self) {
        *self.checked.0.lock().unwrap_or_else(PoisonError::into_inner) = Check::Stopped;
        self.checked.1.notify_all();
        self.remote.uploads.stop();
    }

    /// Waits for the uploads, and ends them.
    pub fn finish(&self, flushed: bool) {
        if flushed && !self.remote.uploads.drain(FINISH_PATIENCE) {
            let left = self.remote.uploads.backlog();
            tracing::warn!(
                segments = left.segments,
                bytes = left.bytes,
                "not everything is in the object tier: it stays on flash and is uploaded at the next start"
            );
        }
        self.stop();
    }

    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        match &*self.checked.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Check::Failed(error) => {
                warnings
                    .push(format!("the object tier has not passed its check, nothing is uploaded: {error}"));
            }
            Check::Running if time::monotonic_now().duration_since(self.opened) >= CHECK_PATIENCE => {
                warnings.push("the object tier does not answer yet, nothing is uploaded".to_owned());
            }
            _ => {}
        }
        let backlog = self.remote.uploads.backlog();
        if let Some(failing) = &backlog.failing {
            warnings
                .push(format!("uploads fail, {} bytes are on this machine alone: {failing}", backlog.bytes));
        } else if backlog.age > BACKLOG_AGE_MAX {
            warnings.push(format!(
                "the object tier is {} s behind: {} bytes are on this machine alone",
                backlog.age.as_secs(),
                backlog.bytes
            ));
        }
        warnings
    }

    pub fn status(&self) -> TierStatus {
        TierStatus {
            location: self.remote.tier.location().to_string(),
            flash_bytes_max: self.remote.bytes_max(),
            clean_bytes: self.remote.clean_bytes(),
            backlog: self.remote.uploads.backlog(),
        }
    }
}

fn check_until_passed(
    tier: &Arc<ObjectTier>,
    volume: VolumeId,
    checked: &(Mutex<Check>, Condvar),
    uploads: &Uploads,
) {
    loop {
        let outcome = check(tier, volume);
        let mut state = checked.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, Check::Stopped) {
            return;
        }
        match outcome {
            Ok(()) => {
                *state = Check::Passed;
                checked.1.notify_all();
                drop(state);
                uploads.start();
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "the object tier has not passed its check");
                *state = Check::Failed(error);
                checked.1.notify_all();
                let stopped = |state: &mut Check| !matches!(state, Check::Stopped);
                let _ = checked.1.wait_timeout_while(state, CHECK_PAUSE, stopped);
            }
        }
    }
}

/// An answer that waiting will not change. No answer at all is no such answer.
fn is_final(error: &Error) -> bool {
    matches!(error.kind(), Kind::Invalid | Kind::Conflict | Kind::Permission | Kind::NotFound | Kind::Corrupt)
}

fn check(tier: &Arc<ObjectTier>, volume: VolumeId) -> Result<()> {
    let found = tier.get_all(MARKER).map_err(|error| match error.kind() {
        Kind::NotFound => error.context("the prefix is not this volume's any more"),
        _ => error,
    })?;
    let marker = read_marker(tier, &found)?;
    if marker.volume != volume.to_string() {
        return Err(Error::new(
            Kind::Conflict,
            format!("{} is the prefix of volume {}, this is volume {volume}", tier.location(), marker.volume),
        ));
    }
    tier.probe()
}

fn read_marker(tier: &ObjectTier, bytes: &[u8]) -> Result<Marker> {
    let marker: Marker = serde_json::from_slice(bytes).map_err(|cause| {
        Error::corrupt(format!("{}/{MARKER} is not the marker of a volume: {cause}", tier.location()))
    })?;
    if marker.format > FORMAT {
        return Err(Error::invalid(format!(
            "{} holds format {}; this engine reads 1-{FORMAT}: upgrade headrace",
            tier.location(),
            marker.format
        )));
    }
    Ok(marker)
}

/// Makes the prefix this volume's. It must be empty, or claimed by an earlier attempt of the same volume.
pub fn claim(tier: &Arc<ObjectTier>, volume: &VolumeId, format: u32, created: Timestamp) -> Result<()> {
    let marker =
        Marker { headrace: "volume".to_owned(), format, volume: volume.to_string(), created_ns: created.0 };
    let text = serde_json::to_vec_pretty(&marker)
        .map_err(|cause| Error::internal("encode the marker").with_cause(cause))?;
    match tier.create(MARKER, text)? {
        Stored::New => {}
        Stored::Existed => {
            let found = tier.get_all(MARKER)?;
            let marker = read_marker(tier, &found)?;
            if marker.volume != volume.to_string() {
                return Err(Error::errno(
                    errno::EEXIST,
                    format!(
                        "{} is the prefix of volume {} already: name another prefix",
                        tier.location(),
                        marker.volume
                    ),
                ));
            }
        }
    }
    Ok(())
}

pub fn check_flash_bytes_max(folder: &Path, bytes_max: Option<u64>) -> Result<()> {
    match bytes_max {
        Some(bytes_max) if bytes_max < FLASH_BYTES_MIN => Err(Error::invalid(format!(
            "volume {}: a flash tier of {bytes_max} bytes is too small: several segments must fit beside each other, \
             at least {FLASH_BYTES_MIN} bytes",
            folder.display()
        ))),
        _ => Ok(()),
    }
}

/// Whether the object tier holds the segment. False too if it cannot be asked.
pub fn is_stored(segments: &Segments, segment: SegmentId, kind: SegmentKind) -> bool {
    let Some(remote) = &segments.remote else { return false };
    let started = time::monotonic_now();
    let stored = remote.tier.bytes_of(&data_name(segment, kind));
    tracing::info!(%segment, stored = stored.is_ok(), waited = ?time::monotonic_now().duration_since(started), "asked the object tier for a segment");
    stored.is_ok()
}
