//! The volume as a whole: its folder, its lock, its start and its end.
//!
//! ```text
//! FOLDER/HEADRACE              marker (JSON), named last at creation: without it the folder is no volume
//! FOLDER/lock                  locked by the engine that serves the volume; holds its pid
//! FOLDER/meta/volume.sqlite    metadata
//! FOLDER/segments/XX/          segments
//! FOLDER/manifests/            sample tables of sealed views
//! ```
//! Start: lock, open the store under a new session, declare sessions of dead engines dead, remove files that
//! only they kept open, close the segments they left open. Every step may be repeated after a crash in it.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::ids::VolumeId;
use headrace_base::time::{self, Timestamp};
use headrace_base::{Budget, Error, Ino, Kind, OpId, Result, SegmentId, SessionId, thread};
use headrace_flash::Flash;
use headrace_format::record::{
    Content, DirDelta, Extent, FileKind, Inode, Pending, Place, Session, SessionState, VolumeRecord,
    decode_extents, decode_number, encode_number,
};
use headrace_format::{FORMAT, key};
use headrace_meta::{At, Commit, MetaStore, Precondition, SqliteStore, Write};
use headrace_object::{Location, ObjectTier};
use serde::{Deserialize, Serialize};

use crate::adopt;
use crate::announce::Announcements;
use crate::backup::{self, Backups};
use crate::changes::{Changes, Subscription};
use crate::collect::Collector;
use crate::compact::{self, Compaction};
use crate::flush::Flusher;
use crate::live::{LiveTable, load_inode};
use crate::namespace::{NODE, Names, Stripes, erase};
use crate::packs::must_commit;
use crate::past::{INO_MAX, Pasts};
use crate::rescue;
use crate::room::Room;
use crate::seal::OpenSeals;
use crate::segments::Segments;
use crate::tiers::{self, Owner, TierStatus, Tiers};
use crate::types::{Contents, CreateOptions, Created, Origin, Statfs, VolumeOptions};
use crate::versions::{Cleaner, Pinned, recorded_versions};

const MARKER: &str = "HEADRACE";
/// The marker's name until the creation is complete.
const UNFINISHED: &str = "HEADRACE.unfinished";
const PARTS: [&str; 3] = ["meta", "segments", "manifests"];
/// Rows of one look at all inodes.
const SCAN_ROWS: usize = 10_000;
/// Inode numbers taken from the store at once.
const INO_BLOCK: u64 = 1024;
/// Of the engine's memory, what may hold dirty data, and what batches and messages. The rest is the store's
/// caches, indexes, stacks and code.
const DIRTY_SHARE: u64 = 5;
const BUFFERS_SHARE: u64 = 3;
/// The size of a volume with an object tier, as statfs tells it: 1 PiB.
const OBJECT_TIER_BYTES: u64 = 1 << 50;

#[derive(Serialize, Deserialize)]
struct Marker {
    headrace: String,
    format: u32,
    volume: String,
    created_ns: i64,
    /// None: its segments are durable in the folder itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    object: Option<Location>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    flash_bytes_max: Option<u64>,
    /// Which of the folders that were made for this volume: see `tiers::Owner`.
    #[serde(default)]
    epoch: u64,
}

#[derive(Debug)]
pub(crate) struct Counters {
    pub read_bytes: metrics::Counter,
    pub written_bytes: metrics::Counter,
}

#[derive(Debug)]
pub struct Volume {
    folder: PathBuf,
    id: VolumeId,
    recovery: Vec<String>,
    budget: Arc<Budget>,
    pub(crate) store: Arc<dyn MetaStore>,
    pub(crate) flash: Arc<Flash>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) tiers: Option<Tiers>,
    pub(crate) backups: Arc<Backups>,
    pub(crate) compaction: Arc<Compaction>,
    pub(crate) live: Arc<LiveTable>,
    pub(crate) names: Arc<Names>,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) collector: Arc<Collector>,
    pub(crate) cleaner: Arc<Cleaner>,
    pub(crate) pasts: Pasts,
    pub(crate) stripes: Stripes,
    pub(crate) renames: Mutex<()>,
    pub(crate) changes: Changes,
    pub(crate) seals: OpenSeals,
    pub(crate) counters: Counters,
    /// (next, end) of the block of inode numbers in hand.
    numbers: Mutex<(u64, u64)>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    closed: AtomicBool,
    /// Held for as long as the volume is open.
    _lock: File,
}

impl Volume {
    /// Makes a new volume in `folder` (made when missing, must be empty). The caller owns its root.
    pub fn create(folder: &Path) -> Result<VolumeId> {
        Volume::create_with(folder, &CreateOptions::default()).map(|created| created.volume)
    }

    /// The same with an object tier: the store is probed, and the prefix, which must be no other volume's, is this
    /// volume's from then on.
    pub fn create_with(folder: &Path, options: &CreateOptions) -> Result<Created> {
        let shown = folder.display();
        if folder.join(MARKER).exists() {
            return Err(Error::errno(errno::EEXIST, format!("{shown} is a volume already")));
        }
        match fs::read_dir(folder) {
            // A creation that was cut short, or one that is under way: the lock tells.
            Ok(_) if folder.join(UNFINISHED).exists() => {}
            Ok(mut entries) => {
                if entries.next().is_some() {
                    return Err(Error::errno(
                        errno::ENOTEMPTY,
                        format!("{shown} is not empty: name a new or empty folder for the volume"),
                    ));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                fs::create_dir_all(folder)
                    .map_err(|cause| Error::io(format_args!("make folder {shown}"), cause))?;
            }
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                return Err(Error::errno(errno::ENOTDIR, format!("{shown} is a file: a volume is a folder")));
            }
            Err(cause) => return Err(Error::io(format_args!("look at {shown}"), cause)),
        }
        let mut unfinished = take_unfinished(folder)?;
        // It was no volume yet, so nothing of anybody's can be in it.
        for part in PARTS {
            match fs::remove_dir_all(folder.join(part)) {
                Err(cause) if cause.kind() != ErrorKind::NotFound => {
                    return Err(Error::io(format_args!("remove {shown}/{part}"), cause));
                }
                _ => {}
            }
        }
        let now = time::wall_now();
        let contents = options.contents;
        if options.object.is_none() && (options.flash_bytes_max.is_some() || contents != Contents::Nothing) {
            return Err(Error::invalid("a size of the flash tier needs an object tier: give --object too"));
        }
        let tier = options.object.clone().map(ObjectTier::open).transpose()?;
        let found = match &tier {
            Some(tier) if contents == Contents::Backup => Some(adopt::find(tier)?),
            _ => None,
        };
        // Whose prefix it is; None if the marker is gone too.
        let marked = match &tier {
            Some(tier) if contents == Contents::Segments => match tiers::volume_at(tier) {
                Err(error) if error.kind() == Kind::NotFound => None,
                volume => Some(volume?),
            },
            _ => None,
        };
        // A creation that was cut short may have marked the bucket already: it goes on under the same name.
        let earlier = earlier_marker(&mut unfinished).filter(|marker| marker.object == options.object);
        let id = match (&found, marked, earlier) {
            (Some(found), _, _) => found.volume.volume,
            (None, Some(marked), _) => marked,
            (None, None, Some(marker)) => marker.volume.parse()?,
            (None, None, None) => VolumeId::generate(),
        };
        let mut marker = Marker {
            headrace: "volume".into(),
            format: FORMAT,
            volume: id.to_string(),
            created_ns: found.as_ref().map_or(now, |found| found.volume.created).0,
            object: options.object.clone(),
            flash_bytes_max: options.flash_bytes_max,
            epoch: 0,
        };
        if let Some(tier) = &tier {
            tiers::check_flash_bytes_max(folder, options.flash_bytes_max)?;
            tier.probe()?;
        }
        write_marker(&mut unfinished, folder, &marker)?;
        if let Some(tier) = &tier
            && contents == Contents::Nothing
        {
            tiers::claim(tier, Owner { volume: id, epoch: 0 }, now)?;
        }
        let segments = match &tier {
            Some(tier) if contents == Contents::Segments => Some(rescue::find(tier)?),
            _ => None,
        };
        for part in PARTS {
            fs::create_dir(folder.join(part))
                .map_err(|cause| Error::io(format_args!("make folder {shown}/{part}"), cause))?;
        }
        let database = folder.join("meta/volume.sqlite");
        let created = Timestamp(marker.created_ns);
        SqliteStore::create(&database, VolumeRecord { volume: id, format: FORMAT, created })?;
        let store = SqliteStore::open(&database, SessionId::generate(), session_record(now))?;
        if let (Some(tier), Some(found)) = (&tier, found) {
            let filled = found.id();
            found.fill(tier, &store)?;
            store.close()?;
            // Last: until here the volume is where it was.
            marker.epoch = tiers::take_over(tier)?.epoch;
            // Whoever had it may have backed it up once more meanwhile, and removed what was read here. Now nobody does.
            let found = adopt::find(tier)?;
            if found.id() != filled {
                fs::remove_dir_all(folder.join("meta"))
                    .and_then(|()| fs::create_dir(folder.join("meta")))
                    .map_err(|cause| Error::io(format_args!("empty {shown}/meta"), cause))?;
                SqliteStore::create(&database, VolumeRecord { volume: id, format: FORMAT, created })?;
                let store = SqliteStore::open(&database, SessionId::generate(), session_record(now))?;
                found.fill(tier, &store)?;
                store.close()?;
            }
            write_marker(&mut unfinished, folder, &marker)?;
            finish_marker(folder)?;
            return Ok(Created { volume: id, rescued: None });
        }
        let root = Inode {
            kind: FileKind::Directory,
            mode: 0o755,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            nlink: 2,
            rdev: 0,
            size: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            parent: Ino::ROOT,
            quota_root: Ino::ROOT,
            content: Content::Empty,
        };
        must_commit(
            &store,
            Commit {
                preconditions: vec![Precondition::Absent(key::inode(Ino::ROOT))],
                writes: vec![
                    Write::Put(key::inode(Ino::ROOT), root.encode()),
                    Write::Put(key::alive(Ino::ROOT), Vec::new()),
                    Write::Put(
                        key::delta(Ino::ROOT, NODE),
                        DirDelta { entries: 0, subdirectories: 0, changed: now }.encode(),
                    ),
                    Write::Put(key::next_inode(), encode_number(Ino::ROOT.0 + 1)),
                ],
            },
        )?;
        let rescued = segments.map(|segments| segments.fill(&store, &root)).transpose()?;
        store.close()?;
        if let (Some(tier), true) = (&tier, rescued.is_some()) {
            if marked.is_none() {
                // Above every folder that has left a backup, so that the last one is found by its name.
                let epoch = backup::newest_backup(tier)?.map_or(0, |backup| backup.epoch);
                tiers::claim(tier, Owner { volume: id, epoch }, now)?;
            }
            // Last: until here the volume is where it was.
            marker.epoch = tiers::take_over(tier)?.epoch;
            write_marker(&mut unfinished, folder, &marker)?;
        }
        finish_marker(folder)?;
        Ok(Created { volume: id, rescued })
    }

    /// Takes the volume's lock (`Conflict` naming the owner's pid), recovers what a crash left, starts the
    /// flusher and the collector.
    pub fn open(folder: &Path, options: VolumeOptions) -> Result<Arc<Volume>> {
        let marker = read_marker(folder)?;
        let id: VolumeId = marker.volume.parse()?;
        let lock = take_lock(folder)?;
        let database = folder.join("meta/volume.sqlite");
        let now = time::wall_now();
        let store: Arc<dyn MetaStore> =
            Arc::new(SqliteStore::open(&database, SessionId::generate(), session_record(now))?);
        let flash = Flash::open(&folder.join("segments"), options.open_files_max)?;
        let tiers = marker
            .object
            .map(|location| {
                Tiers::open(
                    location,
                    Owner { volume: id, epoch: marker.epoch },
                    &flash,
                    marker.flash_bytes_max,
                )
            })
            .transpose()?;
        let segments = Arc::new(Segments {
            flash: Arc::clone(&flash),
            remote: tiers.as_ref().map(|tiers| Arc::clone(&tiers.remote)),
        });
        let live = Arc::new(LiveTable::default());
        let names = Arc::new(Names::default());
        let mut recovery = Vec::new();
        let crashed = recover(&*store, &segments, &mut recovery)?;
        if let Some(tiers) = &tiers {
            tiers.remote.adopt()?;
        }
        let pinned = Arc::new(Pinned::default());
        let collector =
            Arc::new(Collector::new(Arc::clone(&store), Arc::clone(&segments), Arc::clone(&pinned)));
        let cleaner = Arc::new(Cleaner::new(Arc::clone(&store), Arc::clone(&collector), pinned)?);
        let room = Arc::new(Room::new(Arc::clone(&flash), segments.remote.clone())?);
        let dirty_on_flash_max = room.segment_bytes_max().saturating_mul(2);
        let uploads = tiers.as_ref().map(|tiers| Arc::clone(&tiers.remote.uploads));
        let flusher = Arc::new(Flusher::new(
            Arc::clone(&segments),
            Arc::new(Announcements::new(Arc::clone(&store), uploads)),
            Arc::clone(&live),
            Arc::clone(&names),
            Arc::clone(&collector),
            room,
            // What is flushed at once must fit on flash beside what is on its way into the object tier.
            (options.memory_bytes_max / DIRTY_SHARE).min(dirty_on_flash_max),
        ));
        for (key, _) in store.scan(b"b", b"c", usize::MAX, At::Latest)? {
            if let Some(ino) = key::ino_of(&key) {
                flusher.note_inline(ino);
            }
        }
        if crashed {
            collector.note_segments(flash.list()?.into_iter().map(|file| (file.segment, file.kind)));
            collector.note_crash();
        }
        for line in &recovery {
            tracing::warn!("{line}");
        }
        let volume = Arc::new(Volume {
            folder: folder.to_owned(),
            id,
            recovery,
            budget: Budget::new("batches and messages", options.memory_bytes_max / BUFFERS_SHARE),
            store,
            flash,
            segments,
            tiers,
            backups: Arc::default(),
            compaction: Arc::default(),
            live,
            names,
            flusher,
            collector,
            cleaner,
            pasts: Pasts::default(),
            stripes: Stripes::default(),
            renames: Mutex::new(()),
            changes: Changes::default(),
            seals: OpenSeals::default(),
            counters: Counters {
                read_bytes: metrics::counter!("headrace_read_bytes_total"),
                written_bytes: metrics::counter!("headrace_written_bytes_total"),
            },
            numbers: Mutex::new((0, 0)),
            threads: Mutex::default(),
            closed: AtomicBool::new(false),
            _lock: lock,
        });
        let flusher = Arc::clone(&volume.flusher);
        let collector = Arc::clone(&volume.collector);
        let live = Arc::clone(&volume.live);
        let mut threads = volume.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.push(thread::spawn("flusher", move || flusher.run())?);
        threads.push(thread::spawn("collector", move || collector.run(&live))?);
        threads.push(compact::start(&volume)?);
        if let Some(tiers) = &volume.tiers {
            threads.extend(tiers.start(&volume.store, &volume.flusher)?);
            threads.push(backup::start(&volume)?);
        }
        let cleaner = Arc::clone(&volume.cleaner);
        threads.push(thread::spawn("cleaner", move || cleaner.run())?);
        drop(threads);
        volume.remove_stray_manifests()?;
        Ok(volume)
    }

    /// Flushes everything, closes segments and metadata. No call may follow. Open files are closed by it:
    /// what was written to them is durable.
    pub fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.backups.stop();
        self.compaction.stop();
        self.flusher.room.end();
        if let Some(tiers) = &self.tiers {
            // What is written goes into the object tier if that takes it; else it stays dirty here, for the next start.
            let stored = self.flusher.sync_all().is_ok() && tiers.drain();
            if stored && let Err(error) = self.backup() {
                tracing::warn!(%error, "the last changes of the metadata are not backed up");
            }
        }
        self.cleaner.stop();
        self.collector.stop();
        self.flusher.stop();
        if let Some(tiers) = &self.tiers {
            tiers.stop();
        }
        let own = std::thread::current().id();
        for thread in self.threads.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // The last holder may be one of them.
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
        headrace_base::crash::point("during-close");
        let flushed = self.flusher.flush_all();
        let moved = self.flusher.move_inline(self.flusher.take_inline());
        for pin in self.live.all() {
            self.flusher.retire_writer(&pin)?;
        }
        self.flusher.packs.close();
        let closed = self.store.close();
        flushed.and(moved).and(closed)
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn id(&self) -> VolumeId {
        self.id
    }

    pub fn session(&self) -> SessionId {
        self.store.session()
    }

    /// What recovery did at this start, one sentence each.
    pub fn recovery(&self) -> &[String] {
        &self.recovery
    }

    /// Conditions that a person should know of.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(tiers) = &self.tiers {
            warnings.extend(tiers.warnings());
            warnings.extend(self.backups.warning());
        }
        if let Some(failing) = self.flusher.gate.failing() {
            warnings.push(format!("written data cannot be stored: {failing}"));
        }
        if let Ok((total, _, available)) = self.flash.space()
            && available < total / 50
        {
            warnings.push(format!(
                "the disk of {} has {} MiB left of {} MiB",
                self.folder.display(),
                available >> 20,
                total >> 20
            ));
        }
        warnings
    }

    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    pub fn dirty_bytes(&self) -> u64 {
        self.flusher.gate.used()
    }

    /// Whether a write of so many bytes may have to wait for the object tier: for threads that others wait for.
    pub fn writes_may_wait(&self, bytes: u64) -> bool {
        self.tiers.is_some() && (self.flusher.gate.is_near(bytes) || self.flusher.room.is_near(bytes))
    }

    /// None: the volume has no object tier.
    pub fn tier_status(&self) -> Option<TierStatus> {
        self.tiers.as_ref().map(Tiers::status)
    }

    /// How many segments there are, and their bytes. Reads the folder.
    pub fn segments(&self) -> Result<(u64, u64)> {
        let files = self.flash.list()?;
        Ok((files.len() as u64, files.iter().map(|file| file.bytes).sum()))
    }

    pub fn statfs(&self) -> Result<Statfs> {
        let (bytes_total, bytes_free, bytes_available) = match &self.tiers {
            // A bucket has no end; what is shown leaves room for sums in programs that add it up.
            Some(_) => (OBJECT_TIER_BYTES, OBJECT_TIER_BYTES, OBJECT_TIER_BYTES),
            None => self.flash.space()?,
        };
        let numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let inodes_used = match *numbers {
            (0, 0) => {
                self.store
                    .get(&key::next_inode(), At::Latest)?
                    .map_or(Ok(1), |value| decode_number(&value))?
                    - 1
            }
            (next, _) => next - 1,
        };
        Ok(Statfs { bytes_total, bytes_free, bytes_available, inodes_used })
    }

    /// fsync of a directory, or of metadata in general.
    pub fn sync_metadata(&self) -> Result<()> {
        self.store.sync()
    }

    /// Everything written before is durable when it returns.
    pub fn sync(&self) -> Result<()> {
        let waits = self.flusher.sync_all()?;
        self.flusher.wait_clean(&waits)
    }

    /// `sync` that does not wait for the object tier: `done` is called when it is over, on this thread or another.
    pub fn start_sync(&self, done: impl FnOnce(Result<()>) + Send + 'static) {
        match self.flusher.sync_all() {
            Ok(waits) => self.flusher.when_clean(&waits, done),
            Err(error) => done(Err(error)),
        }
    }

    pub fn subscribe(&self, origin: Origin) -> Subscription {
        self.changes.subscribe(origin)
    }

    /// A fresh origin for a new mount.
    pub fn new_origin(&self) -> Origin {
        self.changes.new_origin()
    }

    /// Waits until every subscriber has handled the changes made so far, at most `patience`.
    pub fn settle(&self, patience: Duration) {
        self.changes.settle(patience);
    }

    /// A number that no inode ever had.
    pub(crate) fn next_ino(&self) -> Result<Ino> {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        if numbers.0 == numbers.1 {
            let value = self
                .store
                .get(&key::next_inode(), At::Latest)?
                .ok_or_else(|| Error::corrupt("the metadata lacks its next inode number"))?;
            let next = decode_number(&value)?;
            if next + INO_BLOCK > INO_MAX {
                return Err(Error::errno(errno::ENOSPC, "the volume has given out all its inode numbers"));
            }
            self.commit(Commit {
                preconditions: vec![Precondition::Equals(key::next_inode(), value)],
                writes: vec![Write::Put(key::next_inode(), encode_number(next + INO_BLOCK))],
            })?;
            *numbers = (next, next + INO_BLOCK);
        }
        numbers.0 += 1;
        Ok(Ino(numbers.0 - 1))
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "the volume could not be closed cleanly");
        }
    }
}

fn session_record(now: Timestamp) -> Session {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Session {
        state: SessionState::Alive,
        node: NODE,
        pid: std::process::id(),
        host: host.trim().to_owned(),
        started: now,
        last_op: OpId(0),
    }
}

/// The marker under the name that says: this is not a volume yet. Whoever makes the volume holds its lock.
fn take_unfinished(folder: &Path) -> Result<File> {
    let path = folder.join(UNFINISHED);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|cause| Error::io(format_args!("make {}", path.display()), cause))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            return Err(Error::new(
                Kind::Conflict,
                format!("{} is being made a volume by another process at this moment", folder.display()),
            ));
        }
        Err(cause) => return Err(Error::io(format_args!("lock {}", path.display()), cause.into())),
    }
    // Whoever had it may have finished between our look and our lock.
    if folder.join(MARKER).exists() {
        let _ = fs::remove_file(&path);
        return Err(Error::errno(errno::EEXIST, format!("{} is a volume already", folder.display())));
    }
    Ok(file)
}

/// What an earlier attempt, cut short, wrote.
fn earlier_marker(unfinished: &mut File) -> Option<Marker> {
    let mut text = String::new();
    unfinished.rewind().ok()?;
    unfinished.read_to_string(&mut text).ok()?;
    unfinished.rewind().ok()?;
    serde_json::from_str(&text).ok()
}

fn write_marker(file: &mut File, folder: &Path, marker: &Marker) -> Result<()> {
    let text = serde_json::to_string_pretty(marker)
        .map_err(|cause| Error::internal("encode the marker").with_cause(cause))?;
    let written = (|| {
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(text.as_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        File::open(folder)?.sync_all()
    })();
    written.map_err(|cause| Error::io(format_args!("write {}/{UNFINISHED}", folder.display()), cause))
}

fn finish_marker(folder: &Path) -> Result<()> {
    let named = (|| {
        fs::rename(folder.join(UNFINISHED), folder.join(MARKER))?;
        File::open(folder)?.sync_all()
    })();
    named.map_err(|cause| Error::io(format_args!("name {}/{MARKER}", folder.display()), cause))
}

fn read_marker(folder: &Path) -> Result<Marker> {
    let shown = folder.display();
    let text = match fs::read_to_string(folder.join(MARKER)) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(if folder.is_dir() {
                Error::invalid(format!(
                    "{shown} is not a volume (it has no file {MARKER}): headrace create {shown}"
                ))
            } else {
                Error::not_found(format!("{shown} does not exist: headrace create {shown}"))
            });
        }
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            return Err(Error::errno(errno::ENOTDIR, format!("{shown} is a file: a volume is a folder")));
        }
        Err(cause) => return Err(Error::io(format_args!("read {shown}/{MARKER}"), cause)),
    };
    let marker: Marker = serde_json::from_str(&text)
        .map_err(|cause| Error::corrupt(format!("{shown}/{MARKER} is damaged: {cause}")))?;
    if marker.format == 0 || marker.format > FORMAT {
        return Err(Error::invalid(format!(
            "volume {shown} holds format {}; this engine reads 1-{FORMAT}: upgrade headrace",
            marker.format
        )));
    }
    Ok(marker)
}

/// The lock ends with the process, however it ends.
fn take_lock(folder: &Path) -> Result<File> {
    let path = folder.join("lock");
    let shown = path.display();
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(|cause| {
            let hint = match cause.kind() {
                ErrorKind::ReadOnlyFilesystem => ": the volume's disk is mounted read-only",
                ErrorKind::PermissionDenied => ": the volume belongs to another user",
                _ => "",
            };
            Error::io(format_args!("lock volume {}{hint}", folder.display()), cause)
        })?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut owner = String::new();
            let _ = file.read_to_string(&mut owner);
            return Err(Error::new(
                Kind::Conflict,
                format!("volume {} is served by the engine with pid {}", folder.display(), owner.trim()),
            ));
        }
        Err(cause) => return Err(Error::io(format_args!("lock {shown}"), cause.into())),
    }
    let written = (|| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    })();
    written.map_err(|cause| Error::io(format_args!("write {shown}"), cause))?;
    Ok(file)
}

/// Cleans up after engines that died. True if one did, or left a segment unfinished.
fn recover(store: &dyn MetaStore, segments: &Segments, said: &mut Vec<String>) -> Result<bool> {
    let flash = &segments.flash;
    let all = |letter: u8| store.scan(&[letter], &[letter + 1], usize::MAX, At::Latest);
    let mut died = 0;
    for (key, value) in all(b'S')? {
        let mut session = Session::decode(&value)?;
        if key == key::session(store.session()) {
            continue;
        }
        if session.state == SessionState::Alive {
            // We hold the lock, so that engine is gone. The flock is the fence; the record says so to all.
            died += 1;
            said.push(format!(
                "the engine with pid {} on {} ended without closing the volume; what it had made durable is kept",
                session.pid, session.host
            ));
            session.state = SessionState::Dead;
        }
        // Nothing refers to an ended session once its announcements and orphans are gone.
        must_commit(
            store,
            Commit { preconditions: vec![], writes: vec![Write::Put(key, session.encode())] },
        )?;
    }
    let mut orphans = 0;
    for (key, _) in all(b'O')? {
        let Some(ino) = key::ino_of(&key) else { continue };
        let mut writes = vec![Write::Delete(key)];
        if let Some(inode) = load_inode(store, ino, At::Latest)?
            && inode.nlink == 0
        {
            writes.extend(erase(ino, &inode));
        }
        must_commit(store, Commit { preconditions: vec![], writes })?;
        orphans += 1;
    }
    if orphans > 0 {
        said.push(format!("removed {orphans} deleted files that were still open"));
    }
    let pending = all(b'P')?;
    let unfinished = !pending.is_empty();
    let ends = if pending.is_empty() { HashMap::new() } else { named_ends(store)? };
    for (key, value) in pending {
        let pending = Pending::decode(&value)?;
        let Some(segment) = key::id_of(&key).map(SegmentId::from_bytes) else { continue };
        let named = ends.get(&segment).copied().unwrap_or(0);
        match flash.recover(segment, pending.kind, named) {
            // Whole and closed, or made so: it goes on being announced until it is in the object tier.
            Ok(recovered) if recovered.bytes > 0 && segments.remote.is_some() => {
                let again = Pending { session: store.session(), kind: pending.kind };
                must_commit(
                    store,
                    Commit { preconditions: vec![], writes: vec![Write::Put(key, again.encode())] },
                )?;
                if let Some(remote) = &segments.remote {
                    let bytes = flash.whole(segment, pending.kind)?.1;
                    remote.uploads.closed(segment, pending.kind, bytes);
                }
                if recovered.truncated_bytes > 0 {
                    said.push(format!(
                        "segment {segment} was left open: kept {} bytes, cut {} unfinished ones",
                        recovered.bytes, recovered.truncated_bytes
                    ));
                }
                continue;
            }
            // The copy on flash is damaged or gone, the one in the object tier is not: only the withdrawal of its
            // announcement was lost.
            Err(error)
                if error.kind() == Kind::Corrupt && tiers::is_stored(segments, segment, pending.kind) =>
            {
                flash.remove(segment, pending.kind)?;
                said.push(format!("segment {segment} is read from the object tier: {error}"));
            }
            Ok(recovered) if recovered.bytes == 0 => {
                said.push(format!("segment {segment} was announced and holds nothing: removed"));
            }
            Ok(recovered) => said.push(format!(
                "segment {segment} was left open: kept {} bytes, cut {} unfinished ones",
                recovered.bytes, recovered.truncated_bytes
            )),
            // What is whole in it can still be read, by checksums that travel with the extents. It stays
            // announced, so nothing cuts or collects it.
            Err(error) if error.kind() == Kind::Corrupt => {
                said.push(format!("segment {segment} is damaged and is left as it is: {error}"));
                continue;
            }
            Err(error) => return Err(error.context(format_args!("recover segment {segment}"))),
        }
        must_commit(store, Commit { preconditions: vec![], writes: vec![Write::Delete(key)] })?;
    }
    store.sync()?;
    Ok(died > 0 || unfinished)
}

/// How far each segment is named by committed extents, in the present and in every readable version. Reads all
/// inodes: about a second for a million, after a crash only.
pub fn named_ends(store: &dyn MetaStore) -> Result<HashMap<SegmentId, u64>> {
    let mut ends: HashMap<SegmentId, u64> = HashMap::new();
    let versions: Vec<At> =
        recorded_versions(store)?.into_iter().map(At::Version).chain([At::Latest]).collect();
    each_extents(store, &versions, &mut |extents: &[Extent]| {
        for extent in extents {
            if let Place::Pack { segment, offset, .. } | Place::File { segment, offset } = extent.place {
                let end = ends.entry(segment).or_default();
                *end = (*end).max(offset + extent.length);
            }
        }
    })?;
    Ok(ends)
}

/// Calls `note` with the extents of every inode at these versions, ascending: the oldest whole, of each later one what
/// was written since the one before. Those versions must be kept.
pub fn each_extents(store: &dyn MetaStore, versions: &[At], note: &mut dyn FnMut(&[Extent])) -> Result<()> {
    let mut note_row = |key: &[u8], value: &[u8]| -> Result<()> {
        if key.starts_with(b"x") {
            note(&decode_extents(value)?);
        } else if let Content::Extents(extents) = Inode::decode(value)?.content {
            note(&extents);
        }
        Ok(())
    };
    let mut before = None;
    for at in versions.iter().copied() {
        for prefix in [b"i", b"x"] {
            let end = key::end_of(prefix);
            let mut start = prefix.to_vec();
            loop {
                let (last, count) = match before {
                    None => {
                        let rows = store.scan(&start, &end, SCAN_ROWS, at)?;
                        rows.iter().try_for_each(|(key, value)| note_row(key, value))?;
                        (rows.last().map(|(key, _)| key.clone()), rows.len())
                    }
                    Some(before) => {
                        let keys = store.written(before, at, &start, &end, SCAN_ROWS)?;
                        for (key, value) in keys.iter().zip(store.get_many(&keys, at)?) {
                            value.map_or(Ok(()), |value| note_row(key, &value))?;
                        }
                        (keys.last().cloned(), keys.len())
                    }
                };
                match last {
                    Some(last) if count == SCAN_ROWS => start = [last.as_slice(), &[0]].concat(),
                    _ => break,
                }
            }
        }
        if let At::Version(version) = at {
            before = Some(version);
        }
    }
    Ok(())
}
