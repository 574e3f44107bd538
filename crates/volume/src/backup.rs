//! The metadata beside the segments: what a fresh machine needs to bring the volume back from the bucket alone.
//!
//! ```text
//! backups/EPOCH-VERSION.json            what a backup consists of, written last and once (16 hex digits each)
//! backups/EPOCH-TO/FROM-NUMBER.rows     changes between two versions (`format::backup`); FROM 0: all rows of TO
//! backups/EPOCH-VERSION/globals.rows    rows without versions: snapshots, seals, the next inode number
//! ```
//! A folder that takes the volume over counts its versions anew, under an epoch of its own (`tiers::Owner`).
//! A backup is a version of the metadata that is held until the next backup is complete; so the collector keeps every
//! segment that the last one names. In order:
//!
//! 1. What is dirty is written, the version ends and is held.
//! 2. Every segment that it names is in the object tier.
//! 3. The changes since the last backup's version are stored, step by step over the snapshots and seals made since;
//!    everything anew when the changes outweigh the rest.
//! 4. The manifest is stored. From here on a restore finds this backup.
//! 5. The store learns of it; the last backup's version is given up, its manifest removed.
//!
//! A crash after 4 and before 5 leaves two held versions; the next backup asks the bucket which one counts.

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use headrace_base::time::{self, Timestamp};
use headrace_base::{Error, Kind, MIB, Result, Version, crash, crc32c};
use headrace_format::backup::{RowsWriter, Step};
use headrace_format::key::{self, Key};
use headrace_format::record::{Backup, Seal, Snapshot};
use headrace_format::{FORMAT, message};
use headrace_meta::{At, Commit, Durability, Write};
use headrace_object::{ObjectTier, Stored};
use serde::{Deserialize, Serialize};

use crate::packs::no_conflict;
use crate::tiers::Tiers;
use crate::volume::Volume;

pub const EVERY: Duration = Duration::from_secs(300);
/// After a failure.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
/// Rows of one object: small enough to build in memory, large enough that a million files are some ten objects.
const OBJECT_BYTES: usize = 16 * MIB as usize;
const PAGE_KEYS: usize = 4096;
/// Everything is stored anew when the changes have become more than this share of it, or the steps too many.
const BASE_BYTES_MIN: u64 = 4 * MIB;
const STEPS_MAX: usize = 64;
/// A backup that is older than this many intervals is something to tell a person.
const LATE_INTERVALS: u32 = 3;

/// One object of a backup.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RowsObject {
    pub name: String,
    pub bytes: u64,
    pub rows: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepObjects {
    pub from: u64,
    pub to: u64,
    pub objects: Vec<RowsObject>,
}

/// `backups/EPOCH-VERSION.json`
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BackupManifest {
    pub headrace: String,
    pub format: u32,
    pub volume: String,
    pub epoch: u64,
    pub version: u64,
    pub created_ns: i64,
    pub steps: Vec<StepObjects>,
    pub globals: RowsObject,
}

#[derive(Debug, Default)]
struct State {
    /// When the metadata was last known to be backed up as it was, and what went wrong since.
    verified: Option<Instant>,
    failing: Option<String>,
    stop: bool,
}

#[derive(Debug, Default)]
pub struct Backups {
    state: Mutex<State>,
    wake: Condvar,
    /// One at a time.
    working: Mutex<()>,
}

/// What `status` tells.
#[derive(Clone, Debug)]
pub struct BackupStatus {
    pub version: u64,
    pub created: Timestamp,
    pub failing: Option<String>,
}

impl Backups {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn stop(&self) {
        self.lock().stop = true;
        self.wake.notify_all();
    }

    /// False: told to stop.
    fn rest(&self, pause: Duration) -> bool {
        let state = self.lock();
        let (state, _) = self
            .wake
            .wait_timeout_while(state, pause, |state| !state.stop)
            .unwrap_or_else(PoisonError::into_inner);
        !state.stop
    }

    pub fn warning(&self) -> Option<String> {
        let state = self.lock();
        let failing = state.failing.as_ref()?;
        let late =
            state.verified.is_none_or(|at| time::monotonic_now().duration_since(at) > EVERY * LATE_INTERVALS);
        late.then(|| format!("the metadata is not backed up: {failing}"))
    }
}

/// Which backup: the later one is the greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BackupId {
    pub epoch: u64,
    pub version: Version,
}

impl BackupId {
    fn parse(text: &str) -> Option<BackupId> {
        let (epoch, version) =
            text.split_once('-').filter(|(epoch, version)| epoch.len() + version.len() == 32)?;
        let number = |digits| u64::from_str_radix(digits, 16).ok();
        Some(BackupId { epoch: number(epoch)?, version: Version(number(version)?) })
    }
}

impl std::fmt::Display for BackupId {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:016x}-{:016x}", self.epoch, self.version.0)
    }
}

fn manifest_name(id: BackupId) -> String {
    format!("backups/{id}.json")
}

/// The last backup that is complete.
pub fn newest_backup(tier: &ObjectTier) -> Result<Option<BackupId>> {
    let mut newest = None;
    tier.list("backups", |listed| {
        let name = listed.name.strip_prefix("backups/").and_then(|name| name.strip_suffix(".json"));
        newest = newest.max(name.and_then(BackupId::parse));
        Ok(())
    })?;
    Ok(newest)
}

pub fn read_manifest(tier: &ObjectTier, id: BackupId) -> Result<BackupManifest> {
    let name = manifest_name(id);
    let bytes = tier.get_all(&name)?;
    let manifest: BackupManifest = serde_json::from_slice(&bytes)
        .map_err(|cause| Error::corrupt(format!("{}/{name} is damaged: {cause}", tier.location())))?;
    if manifest.format > FORMAT {
        return Err(Error::invalid(format!(
            "{}/{name} holds format {}; this engine reads 1-{FORMAT}: upgrade headrace",
            tier.location(),
            manifest.format
        )));
    }
    Ok(manifest)
}

impl Volume {
    /// Backs the metadata up now, unless nothing changed since the last time. Waits for uploads. Invalid without an
    /// object tier.
    pub fn backup(&self) -> Result<message::BackupDone> {
        let Some(tiers) = &self.tiers else {
            return Err(Error::invalid(
                "the volume has no object tier: back up its folder while no engine serves it, or copy it by `headrace \
                 export`",
            ));
        };
        let backups = &self.backups;
        let _one = backups.working.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = self.backup_to(tiers);
        let mut state = backups.lock();
        match &outcome {
            Ok(_) => {
                state.verified = Some(time::monotonic_now());
                state.failing = None;
            }
            Err(error) => state.failing = Some(error.message().to_owned()),
        }
        outcome
    }

    pub fn backup_status(&self) -> Result<Option<BackupStatus>> {
        let failing = self.backups.lock().failing.clone();
        Ok(self.last_backup()?.map(|last| BackupStatus {
            version: last.version.0,
            created: last.created,
            failing,
        }))
    }

    fn last_backup(&self) -> Result<Option<Backup>> {
        self.store.get(&key::backup(), At::Latest)?.map(|value| Backup::decode(&value)).transpose()
    }

    fn backup_to(&self, tiers: &Tiers) -> Result<message::BackupDone> {
        let tier = &tiers.remote.tier;
        tiers.remote.confirm_owner(Duration::ZERO)?;
        let epoch = tiers.remote.owner().epoch;
        let last = self.reconcile(tier, epoch)?;
        self.flusher.flush_all()?;
        if let Some(last) = &last
            && last.globals_crc == globals_crc(&self.globals()?)
            && self.store.written(last.version, At::Latest, b"a", b"{", 1)?.is_empty()
        {
            return Ok(message::BackupDone {
                version: last.version.0,
                created_ns: last.created.0,
                changed: false,
                rows: 0,
                bytes: 0,
            });
        }
        let created = time::wall_now();
        let version = self.hold_version()?;
        crash::point("backup-held");
        let stored = self.store_backup(tiers, last.as_ref(), version, created);
        let (manifest, globals_crc, rows, bytes) = match stored {
            Ok(stored) => stored,
            Err(error) => {
                self.release_version(version)?;
                return Err(error);
            }
        };
        crash::point("backup-stored");
        self.complete(Backup { version, created, globals_crc }, last.map(|last| last.version))?;
        let cleaned =
            tiers.remote.confirm_owner(Duration::ZERO).and_then(|()| clean_backups(tier, &manifest));
        if let Err(error) = cleaned {
            tracing::warn!(%error, "objects of earlier backups are left; the next backup removes them");
        }
        tracing::info!(version = version.0, rows, bytes, "the metadata is backed up");
        Ok(message::BackupDone { version: version.0, created_ns: created.0, changed: true, rows, bytes })
    }

    /// Which backup is the last one that is complete. A crash may have come between the bucket's word and ours.
    fn reconcile(&self, tier: &ObjectTier, epoch: u64) -> Result<Option<Backup>> {
        let known = self.last_backup()?;
        let held = self.held_versions()?;
        let unknown: Vec<Version> =
            held.into_iter().filter(|held| known.is_none_or(|known| *held != known.version)).collect();
        if unknown.is_empty() {
            return Ok(known);
        }
        let newest = newest_backup(tier)?;
        let mut last = known;
        for version in unknown {
            let id = BackupId { epoch, version };
            if newest == Some(id) {
                let manifest = read_manifest(tier, id)?;
                // Its rows without versions are not at hand: the next backup stores them again.
                let backup = Backup { version, created: Timestamp(manifest.created_ns), globals_crc: 0 };
                self.complete(backup, known.map(|known| known.version))?;
                last = Some(backup);
            } else {
                self.release_version(version)?;
            }
        }
        Ok(last)
    }

    fn complete(&self, backup: Backup, before: Option<Version>) -> Result<()> {
        let commit =
            Commit { preconditions: Vec::new(), writes: vec![Write::Put(key::backup(), backup.encode())] };
        no_conflict(self.store.commit(commit, Durability::Durable))?;
        crash::point("backup-recorded");
        match before {
            Some(before) => match self.release_version(before) {
                Err(error) if error.kind() != Kind::NotFound => Err(error),
                _ => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Steps 2 to 4. Gives the manifest, the checksum of the rows without versions, rows and bytes stored.
    fn store_backup(
        &self,
        tiers: &Tiers,
        last: Option<&Backup>,
        version: Version,
        created: Timestamp,
    ) -> Result<(BackupManifest, u32, u64, u64)> {
        let tier = &tiers.remote.tier;
        let epoch = tiers.remote.owner().epoch;
        let id = BackupId { epoch, version };
        let globals = self.globals()?;
        let waits = self.flusher.hurry(tiers.remote.uploads.all_dirty());
        self.flusher.packs.close();
        self.flusher.wait_clean(&waits)?;
        crash::point("backup-clean");
        let mut steps = match last {
            Some(last) => read_manifest(tier, BackupId { epoch, version: last.version })?.steps,
            None => Vec::new(),
        };
        let mut from = last.map_or(Version(0), |last| last.version);
        if outgrown(&steps) {
            steps.clear();
            from = Version(0);
        }
        let (mut rows, mut bytes) = (0, 0);
        for to in self.versions_between(from, version)? {
            // Kept at least until its rows are read; one that goes right before is skipped, its changes are in the
            // next step.
            let _pin = self.cleaner.pinned.pin(to);
            if to != version && !crate::versions::recorded_versions(&*self.store)?.contains(&to) {
                continue;
            }
            let step = Step { volume: self.id(), from, to };
            let objects = self.store_step(tier, epoch, step)?;
            rows += objects.iter().map(|object| object.rows).sum::<u64>();
            bytes += objects.iter().map(|object| object.bytes).sum::<u64>();
            steps.push(StepObjects { from: from.0, to: to.0, objects });
            from = to;
        }
        let mut writer = RowsWriter::default();
        for (key, value) in &globals {
            writer.push(key, Some(value));
        }
        let step = Step { volume: self.id(), from: version, to: version };
        let globals_object = put_rows(tier, &mut writer, step, &format!("backups/{id}/globals.rows"))?;
        let manifest = BackupManifest {
            headrace: "backup".to_owned(),
            format: FORMAT,
            volume: self.id().to_string(),
            epoch,
            version: version.0,
            created_ns: created.0,
            steps,
            globals: globals_object,
        };
        let text = serde_json::to_vec_pretty(&manifest)
            .map_err(|cause| Error::internal("encode a backup's manifest").with_cause(cause))?;
        // Somebody else may have taken the volume over meanwhile.
        tiers.remote.confirm_owner(Duration::ZERO)?;
        match tier.create(&manifest_name(id), text)? {
            Stored::New => Ok((manifest, globals_crc(&globals), rows, bytes)),
            Stored::Existed => {
                Err(Error::new(Kind::Conflict, format!("{} holds backup {id} already", tier.location())))
            }
        }
    }

    /// Versions with a name of their own after `from`, and `to`.
    fn versions_between(&self, from: Version, to: Version) -> Result<Vec<Version>> {
        let mut versions: Vec<Version> = Vec::new();
        for (_, value) in self.store.scan(b"T", b"U", usize::MAX, At::Latest)? {
            versions.push(Snapshot::decode(&value)?.version);
        }
        for (_, value) in self.store.scan(b"Z", b"[", usize::MAX, At::Latest)? {
            versions.push(Seal::decode(&value)?.version);
        }
        versions.retain(|version| *version > from && *version < to);
        versions.push(to);
        versions.sort_unstable();
        versions.dedup();
        Ok(versions)
    }

    fn store_step(&self, tier: &ObjectTier, epoch: u64, step: Step) -> Result<Vec<RowsObject>> {
        let mut objects = Vec::new();
        let mut writer = RowsWriter::default();
        let mut start: Key = b"a".to_vec();
        let at = At::Version(step.to);
        loop {
            let rows: Vec<(Key, Option<Vec<u8>>)> = if step.from.0 == 0 {
                let rows = self.store.scan(&start, b"{", PAGE_KEYS, at)?;
                rows.into_iter().map(|(key, value)| (key, Some(value))).collect()
            } else {
                let keys = self.store.written(step.from, at, &start, b"{", PAGE_KEYS)?;
                let values = self.store.get_many(&keys, at)?;
                keys.into_iter().zip(values).collect()
            };
            let last = rows.last().map(|(key, _)| key.clone());
            let complete = rows.len() < PAGE_KEYS;
            for (key, value) in rows {
                writer.push(&key, value.as_deref());
                if writer.bytes() >= OBJECT_BYTES {
                    objects.push(put_rows(tier, &mut writer, step, &rows_name(epoch, step, objects.len()))?);
                }
            }
            match last {
                Some(last) if !complete => start = [last.as_slice(), &[0]].concat(),
                _ => break,
            }
        }
        if writer.rows() > 0 {
            objects.push(put_rows(tier, &mut writer, step, &rows_name(epoch, step, objects.len()))?);
        }
        Ok(objects)
    }

    /// Rows without versions that belong to the volume and not to this engine's life.
    fn globals(&self) -> Result<Vec<(Key, Vec<u8>)>> {
        let mut rows = Vec::new();
        for letter in *b"NOTVZ" {
            rows.extend(self.store.scan(&[letter], &[letter + 1], usize::MAX, At::Latest)?);
        }
        Ok(rows)
    }
}

fn globals_crc(rows: &[(Key, Vec<u8>)]) -> u32 {
    let mut all = Vec::new();
    for (key, value) in rows.iter().filter(|(key, _)| !key.starts_with(b"O")) {
        for bytes in [key, value] {
            all.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            all.extend_from_slice(bytes);
        }
    }
    crc32c(&all)
}

fn rows_name(epoch: u64, step: Step, number: usize) -> String {
    format!("backups/{}/{:016x}-{number:06}.rows", BackupId { epoch, version: step.to }, step.from.0)
}

fn put_rows(tier: &ObjectTier, writer: &mut RowsWriter, step: Step, name: &str) -> Result<RowsObject> {
    let rows = u64::from(writer.rows());
    let bytes = writer.finish(step);
    let object = RowsObject { name: name.to_owned(), bytes: bytes.len() as u64, rows };
    tier.put(name, bytes)?;
    Ok(object)
}

fn outgrown(steps: &[StepObjects]) -> bool {
    let size = |step: &StepObjects| step.objects.iter().map(|object| object.bytes).sum::<u64>();
    let base: u64 = steps.iter().filter(|step| step.from == 0).map(size).sum();
    let changes: u64 = steps.iter().filter(|step| step.from != 0).map(size).sum();
    steps.len() > STEPS_MAX || changes > base.max(BASE_BYTES_MIN)
}

/// Removes what the newest backup does not need. Manifests first: none may name what is gone.
fn clean_backups(tier: &ObjectTier, newest: &BackupManifest) -> Result<()> {
    let mut needed: HashSet<String> =
        newest.steps.iter().flat_map(|step| &step.objects).map(|object| object.name.clone()).collect();
    needed.insert(newest.globals.name.clone());
    needed.insert(manifest_name(BackupId { epoch: newest.epoch, version: Version(newest.version) }));
    let mut stray = Vec::new();
    tier.list("backups", |listed| {
        // Those of a folder that took the volume over at this moment are none of ours.
        let later =
            listed.name.strip_prefix("backups/").and_then(|name| name.get(..33)).and_then(BackupId::parse);
        if !needed.contains(&listed.name) && later.is_none_or(|id| id.epoch <= newest.epoch) {
            stray.push(listed.name);
        }
        Ok(())
    })?;
    stray.sort_by_key(|name| !name.ends_with(".json"));
    stray.iter().try_for_each(|name| tier.delete(name))
}

/// Starts the thread that backs the volume up. It holds the volume only while it works.
pub fn start(volume: &Arc<Volume>) -> Result<std::thread::JoinHandle<()>> {
    let backups = Arc::clone(&volume.backups);
    let adopted = volume.tiers.as_ref().is_some_and(|tiers| tiers.remote.owner().epoch > 0);
    // A folder that took a volume over has no backup of its own yet, and the collector waits for it.
    let mut pause = if adopted && volume.last_backup()?.is_none() { Duration::ZERO } else { EVERY };
    let volume = Arc::downgrade(volume);
    headrace_base::thread::spawn("backup", move || {
        while backups.rest(pause) {
            let Some(volume) = volume.upgrade() else { return };
            pause = match volume.backup() {
                Ok(_) => EVERY,
                Err(error) => {
                    tracing::warn!(%error, "the metadata could not be backed up; it is tried again");
                    AGAIN_AFTER
                }
            };
        }
    })
}
