//! Brings a volume back from the bucket alone: `create --from`.
//!
//! The last backup's rows are put into a new store, step by step; where a step ends at a version that a snapshot or a
//! sealed view names, that version ends here too and the record gets its new number. Then the prefix becomes this
//! folder's (`tiers::take_over`). Files are read as they are needed. What was written after the last backup is not
//! there: its segments are, and nothing names them; they are removed by the first look through the bucket.

use headrace_base::{Error, Result, Version};
use headrace_format::backup::{self, Step};
use headrace_format::key;
use headrace_format::record::{Seal, Snapshot, VolumeRecord};
use headrace_meta::{Commit, Durability, MetaStore, Write};
use headrace_object::ObjectTier;

use crate::backup::{BackupId, BackupManifest, RowsObject, newest_backup, read_manifest};
use crate::packs::{must_commit, no_conflict};
use crate::tiers::volume_at;

/// Rows of one commit.
const COMMIT_ROWS: usize = 2000;

/// What the bucket holds of a volume's metadata.
#[derive(Debug)]
pub struct Found {
    pub volume: VolumeRecord,
    id: BackupId,
    manifest: BackupManifest,
    globals: Vec<backup::Row>,
}

/// Finds the last backup. NotFound if there is no volume, or none of its metadata was backed up.
pub fn find(tier: &ObjectTier) -> Result<Found> {
    let volume = volume_at(tier)?;
    let Some(id) = newest_backup(tier)? else {
        return Err(Error::not_found(format!(
            "the volume at {} has no backup of its metadata yet: `headrace rescue` finds the files in its segments",
            tier.location()
        )));
    };
    let manifest = read_manifest(tier, id)?;
    if manifest.volume != volume.to_string() {
        return Err(Error::corrupt(format!(
            "{} holds volume {volume}, its backup is of volume {}",
            tier.location(),
            manifest.volume
        )));
    }
    let step = Step { volume, from: id.version, to: id.version };
    let globals = fetch(tier, step, &manifest.globals)?;
    let record = globals.iter().find(|(key, _)| *key == key::volume()).and_then(|(_, value)| value.as_ref());
    let record = record.ok_or_else(|| Error::corrupt("a backup lacks the volume's record"))?;
    Ok(Found { volume: VolumeRecord::decode(record)?, id, manifest, globals })
}

fn fetch(tier: &ObjectTier, step: Step, object: &RowsObject) -> Result<Vec<backup::Row>> {
    let bytes = tier.get_all(&object.name)?;
    let rows = backup::decode(step, &bytes)
        .map_err(|error| error.context(format_args!("{}/{}", tier.location(), object.name)))?;
    if rows.len() as u64 != object.rows || bytes.len() as u64 != object.bytes {
        return Err(Error::corrupt(format!(
            "{}/{} holds {} rows, {} were stored",
            tier.location(),
            object.name,
            rows.len(),
            object.rows
        )));
    }
    Ok(rows)
}

impl Found {
    /// Which backup it is.
    pub fn id(&self) -> BackupId {
        self.id
    }

    /// Fills a new store, which holds nothing but the volume's record.
    pub fn fill(self, tier: &ObjectTier, store: &dyn MetaStore) -> Result<()> {
        for objects in &self.manifest.steps {
            let step =
                Step { volume: self.volume.volume, from: Version(objects.from), to: Version(objects.to) };
            for object in &objects.objects {
                let rows = fetch(tier, step, object)?;
                let mut rows = rows.into_iter().peekable();
                while rows.peek().is_some() {
                    let writes = rows.by_ref().take(COMMIT_ROWS).map(|(key, value)| match value {
                        Some(value) => Write::Put(key, value),
                        None => Write::Delete(key),
                    });
                    must_commit(store, Commit { preconditions: Vec::new(), writes: writes.collect() })?;
                }
            }
            self.end_versions(store, step.to)?;
        }
        let kept = self.globals.into_iter().filter(|(key, _)| matches!(key.first(), Some(b'N' | b'O')));
        let writes = kept.filter_map(|(key, value)| Some(Write::Put(key, value?))).collect();
        no_conflict(store.commit(Commit { preconditions: Vec::new(), writes }, Durability::Durable)).map(drop)
    }

    /// Ends the store's version if records name the one that was filled in.
    fn end_versions(&self, store: &dyn MetaStore, filled: Version) -> Result<()> {
        let now = store.version();
        let mut writes = Vec::new();
        for (key, value) in &self.globals {
            let Some(value) = value else { continue };
            match key.first() {
                Some(b'T') => {
                    let snapshot = Snapshot::decode(value)?;
                    if snapshot.version == filled {
                        let moved = Snapshot { version: now, ..snapshot };
                        writes.push(Write::Put(key.clone(), moved.encode()));
                    }
                }
                Some(b'Z') => {
                    let seal = Seal::decode(value)?;
                    if seal.version == filled {
                        writes.push(Write::Put(key.clone(), Seal { version: now, ..seal }.encode()));
                    }
                }
                _ => {}
            }
        }
        if writes.is_empty() {
            return Ok(());
        }
        let sealed = no_conflict(store.seal(Commit { preconditions: Vec::new(), writes }))?;
        if sealed != now {
            return Err(Error::internal(format!("version {} ended, not {}", sealed.0, now.0)));
        }
        Ok(())
    }
}
