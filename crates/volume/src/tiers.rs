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
/// How often it is asked whether the volume is still this folder's.
const CONFIRM_PAUSE: Duration = Duration::from_secs(30);
/// How long the end of an engine waits for uploads: for the next one, and for all. What is left is dirty, on flash, and
/// goes at the next start.
const FINISH_PATIENCE: Duration = Duration::from_secs(10);
const FINISH_PATIENCE_ALL: Duration = Duration::from_secs(30);
/// From here on a person is told of the backlog.
const BACKLOG_AGE_MAX: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize)]
struct Marker {
    headrace: String,
    format: u32,
    volume: String,
    created_ns: i64,
    /// Grows with each folder that takes the volume over: only the one with the greatest may write.
    #[serde(default)]
    epoch: u64,
}

/// Whose prefix it is: which volume, and which of the folders that were made for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub volume: VolumeId,
    pub epoch: u64,
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
        owner: Owner,
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
        let remote = Arc::new(Remote::new(tier, owner, Arc::clone(flash), Arc::clone(&uploads), bytes_max));
        uploads.connect(&remote);
        Ok(Tiers { remote, checked: Arc::default(), opened: time::monotonic_now() })
    }

    /// Checks the store, and starts the uploads when it has passed. Invalid if it has failed.
    pub fn start(&self, store: &Arc<dyn MetaStore>, flusher: &Arc<Flusher>) -> Result<Vec<JoinHandle<()>>> {
        let mut threads = Vec::new();
        let (tier, owner) = (Arc::clone(&self.remote.tier), self.remote.owner());
        let (checked, uploads) = (Arc::clone(&self.checked), Arc::clone(&self.remote.uploads));
        threads.push(thread::spawn("object-check", move || keep_checking(&tier, owner, &checked, &uploads))?);
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

    pub fn stop(&self) {
        *self.checked.0.lock().unwrap_or_else(PoisonError::into_inner) = Check::Stopped;
        self.checked.1.notify_all();
        self.remote.uploads.stop();
        self.remote.tier.stop();
    }

    /// Waits for the uploads, as long as they go on. True if nothing is dirty any more.
    pub fn drain(&self) -> bool {
        let drained = self.remote.uploads.drain(FINISH_PATIENCE, FINISH_PATIENCE_ALL);
        if !drained {
            let left = self.remote.uploads.backlog();
            tracing::warn!(
                segments = left.segments,
                bytes = left.bytes,
                "not everything is in the object tier: it stays on flash and is uploaded at the next start"
            );
        }
        drained
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
        if self.remote.uploads.is_fenced() {
            return warnings;
        }
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

/// Checks until the store has passed, then that the prefix stays ours.
fn keep_checking(tier: &Arc<ObjectTier>, owner: Owner, checked: &(Mutex<Check>, Condvar), uploads: &Uploads) {
    let mut passed = false;
    loop {
        let outcome =
            if passed { confirm(tier, owner) } else { confirm(tier, owner).and_then(|()| tier.probe()) };
        let mut state = checked.0.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, Check::Stopped) {
            return;
        }
        let pause = match outcome {
            Ok(()) if passed => CONFIRM_PAUSE,
            Ok(()) => {
                passed = true;
                *state = Check::Passed;
                uploads.start();
                CONFIRM_PAUSE
            }
            // Later than the start only the owner is of interest: what fails of the rest shows in uploads.
            Err(error) if passed && !is_taken_over(&error) => CONFIRM_PAUSE,
            Err(error) => {
                tracing::warn!(%error, "the object tier has not passed its check");
                if is_taken_over(&error) {
                    uploads.fence(&error);
                }
                *state = Check::Failed(error);
                CHECK_PAUSE
            }
        };
        checked.1.notify_all();
        let running = |state: &mut Check| !matches!(state, Check::Stopped);
        let (state, _) =
            checked.1.wait_timeout_while(state, pause, running).unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, Check::Stopped) {
            return;
        }
    }
}

fn is_taken_over(error: &Error) -> bool {
    error.raw_errno() == errno::ESTALE
}

/// An answer that waiting will not change. No answer at all is no such answer.
fn is_final(error: &Error) -> bool {
    matches!(error.kind(), Kind::Invalid | Kind::Conflict | Kind::Permission | Kind::NotFound | Kind::Corrupt)
        || is_taken_over(error)
}

/// ESTALE if the volume is another folder's by now, Conflict if the prefix is another volume's.
pub fn confirm(tier: &ObjectTier, owner: Owner) -> Result<()> {
    let found = tier.get_all(MARKER).map_err(|error| match error.kind() {
        Kind::NotFound => error.context("the prefix is not this volume's any more"),
        _ => error,
    })?;
    let marker = read_marker(tier, &found)?;
    if marker.volume != owner.volume.to_string() {
        return Err(Error::new(
            // Not Conflict: to whoever starts an engine that means that another one runs already.
            Kind::Invalid,
            format!(
                "{} is the prefix of volume {}, this is volume {}",
                tier.location(),
                marker.volume,
                owner.volume
            ),
        ));
    }
    if marker.epoch != owner.epoch {
        return Err(Error::new(
            Kind::Conflict,
            format!(
                "the volume at {} was taken over by another machine (`headrace create --from`): this folder is the one \
                 from before, and nothing more is uploaded from it",
                tier.location()
            ),
        )
        .answered_as(errno::ESTALE));
    }
    Ok(())
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

/// Makes an existing volume's prefix this folder's: its owner from now on, with the epoch that this gives.
pub fn take_over(tier: &ObjectTier) -> Result<Owner> {
    let found = tier.get_whole(MARKER).map_err(|error| match error.kind() {
        Kind::NotFound => Error::not_found(format!("there is no volume at {}", tier.location())),
        _ => error,
    })?;
    let mut marker = read_marker(tier, &found.bytes)?;
    marker.epoch += 1;
    let owner = Owner { volume: marker.volume.parse()?, epoch: marker.epoch };
    let etag = found
        .etag
        .ok_or_else(|| Error::invalid(format!("the store of {} gives no ETags", tier.location())))?;
    let text = encode_marker(&marker)?;
    tier.replace(MARKER, text, etag).map_err(|error| match error.kind() {
        Kind::Conflict => error.context("another machine takes the volume over at this moment"),
        _ => error,
    })?;
    Ok(owner)
}

/// Whose volume a prefix is. NotFound if it has no marker.
pub fn volume_at(tier: &ObjectTier) -> Result<VolumeId> {
    let found = tier.get_all(MARKER).map_err(|error| match error.kind() {
        Kind::NotFound => Error::not_found(format!("there is no volume at {}", tier.location())),
        _ => error,
    })?;
    read_marker(tier, &found)?.volume.parse()
}

fn encode_marker(marker: &Marker) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(marker).map_err(|cause| Error::internal("encode the marker").with_cause(cause))
}

/// Makes the prefix this owner's. It must have no marker, or that of an earlier attempt of the same volume.
pub fn claim(tier: &ObjectTier, owner: Owner, created: Timestamp) -> Result<()> {
    let marker = Marker {
        headrace: "volume".to_owned(),
        format: FORMAT,
        volume: owner.volume.to_string(),
        created_ns: created.0,
        epoch: owner.epoch,
    };
    let text = encode_marker(&marker)?;
    match tier.create(MARKER, text)? {
        Stored::New => {}
        Stored::Existed => {
            let found = tier.get_all(MARKER)?;
            let marker = read_marker(tier, &found)?;
            if marker.volume != owner.volume.to_string() {
                return Err(Error::errno(
                    errno::EEXIST,
                    format!(
                        "{} is the prefix of volume {} already: name another prefix, or bring that volume here \
                         with --from",
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
