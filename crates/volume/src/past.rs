//! Snapshots as folders: `.snapshots/NAME` at the root, read-only, each with the tree as it was.
//!
//! ```text
//! inode number    bits 62-48: which snapshot     bits 47-0: the inode's own number
//!                 0: the present   1 .. 7FFE: a snapshot   7FFF: the folder `.snapshots` itself
//! ```
//! A snapshot gets its number when it is first looked at, and no other gets that number while the engine lives:
//! what a kernel has cached under it can never be taken for something else. The number goes with the snapshot;
//! what is open then stays readable until it is closed.
//!
//! Methods by inode of the other modules ask `place` first: what is not of the present is answered here, and
//! changes are refused (`check_live`, `check_new_name`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use headrace_base::error::errno;
use headrace_base::time::Timestamp;
use headrace_base::{Error, Ino, Result, Version};
use headrace_format::key;
use headrace_format::record::{Content, Dentry, Extent, FileKind, Inode, Snapshot};
use headrace_meta::At;

use crate::extents;
use crate::live::{load_extents, load_inode, no_inode};
use crate::namespace::{exists, no_name, not_a_directory, shown};
use crate::segments::{Fetch, lost};
use crate::types::{Attr, DirItem};
use crate::versions::VersionPin;
use crate::volume::Volume;

/// Reserved in the root.
pub const FOLDER_NAME: &[u8] = b".snapshots";
const OWN_BITS: u32 = 48;
/// Inode numbers of the present are below this.
pub const INO_MAX: u64 = 1 << OWN_BITS;
const FOLDER_SLOT: u64 = 0x7FFF;
pub const FOLDER: Ino = Ino(FOLDER_SLOT << OWN_BITS | 1);
const FOLDER_MODE: u16 = 0o555;

/// A snapshot in use.
#[derive(Debug)]
pub struct Past {
    slot: u64,
    name: Vec<u8>,
    pin: VersionPin,
}

impl Past {
    fn at(&self) -> At {
        At::Version(self.pin.version())
    }

    /// An inode's number as seen from outside.
    fn shown(&self, ino: Ino) -> Ino {
        Ino(self.slot << OWN_BITS | ino.0)
    }
}

#[derive(Debug, Default)]
struct Table {
    by_name: HashMap<Vec<u8>, Arc<Past>>,
    by_slot: HashMap<u64, Arc<Past>>,
    last_slot: u64,
}

#[derive(Debug, Default)]
pub struct Pasts(Mutex<Table>);

impl Pasts {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The snapshot has no name any more.
    pub fn forget(&self, name: &[u8], version: Version) {
        let mut table = self.lock();
        if table.by_name.get(name).is_some_and(|past| past.pin.version() == version)
            && let Some(past) = table.by_name.remove(name)
        {
            table.by_slot.remove(&past.slot);
        }
    }
}

/// Where an inode number leads.
#[derive(Debug)]
pub enum Place {
    Live,
    /// `.snapshots`
    Folder,
    /// Into a snapshot, with the inode's own number.
    Past(Arc<Past>, Ino),
}

pub fn is_live(ino: Ino) -> bool {
    ino.0 < INO_MAX
}

/// An open file of a snapshot: nothing of it ever changes.
#[derive(Debug)]
pub struct PastFile {
    past: Arc<Past>,
    ino: Ino,
    inode: Inode,
    extents: Vec<Extent>,
}

impl PastFile {
    pub fn ino(&self) -> Ino {
        self.past.shown(self.ino)
    }

    pub fn attr(&self) -> Attr {
        let mut attr = Attr::of(self.ino(), &self.inode);
        attr.blocks = self.extents.iter().map(|extent| extent.length).sum::<u64>().div_ceil(512);
        attr
    }
}

impl Volume {
    pub(crate) fn place(&self, ino: Ino) -> Result<Place> {
        if is_live(ino) {
            return Ok(Place::Live);
        }
        if ino == FOLDER {
            return Ok(Place::Folder);
        }
        let own = Ino(ino.0 & (INO_MAX - 1));
        match self.pasts.lock().by_slot.get(&(ino.0 >> OWN_BITS)) {
            Some(past) => Ok(Place::Past(Arc::clone(past), own)),
            None => Err(Error::errno(errno::ESTALE, format!("inode {ino}: its snapshot was deleted"))),
        }
    }

    /// EROFS unless the inode is of the present.
    pub(crate) fn check_live(&self, ino: Ino) -> Result<()> {
        if is_live(ino) {
            return Ok(());
        }
        Err(Error::errno(errno::EROFS, "a snapshot does not change: copy the file out of .snapshots first"))
    }

    /// A name may be made, replaced or removed in this directory.
    pub(crate) fn check_new_name(&self, directory: Ino, name: &[u8]) -> Result<()> {
        self.check_live(directory)?;
        if directory == Ino::ROOT && name == FOLDER_NAME {
            return Err(exists(name).context("it is where snapshots are"));
        }
        Ok(())
    }

    /// As `check_new_name`, for a name that is to go.
    pub(crate) fn check_old_name(&self, directory: Ino, name: &[u8]) -> Result<()> {
        self.check_live(directory)?;
        if directory == Ino::ROOT && name == FOLDER_NAME {
            return Err(Error::errno(
                errno::EPERM,
                format!("{:?} is where snapshots are: it stays", shown(name)),
            ));
        }
        Ok(())
    }

    /// The snapshot with this name, with a number of its own.
    fn past(&self, name: &[u8]) -> Result<Arc<Past>> {
        let mut table = self.pasts.lock();
        if let Some(past) = table.by_name.get(name) {
            return Ok(Arc::clone(past));
        }
        let version = self.snapshot_record(name)?.version;
        let pin = self.cleaner.pinned.pin(version);
        // Pinned too late if the record went between.
        if self.snapshot_record(name)?.version != version {
            return Err(no_name(name));
        }
        let slot = table.last_slot + 1;
        if slot >= FOLDER_SLOT {
            return Err(Error::errno(
                errno::ENFILE,
                format!("{} snapshots were looked at since the engine started: restart it", slot - 1),
            ));
        }
        table.last_slot = slot;
        let past = Arc::new(Past { slot, name: name.to_vec(), pin });
        table.by_name.insert(name.to_vec(), Arc::clone(&past));
        table.by_slot.insert(slot, Arc::clone(&past));
        Ok(past)
    }

    /// `lookup` of what is not of the present; also of `.snapshots` itself.
    pub(crate) fn lookup_past(&self, place: &Place, parent: Ino, name: &[u8]) -> Result<Attr> {
        match place {
            Place::Live => {
                self.names.note(Ino::ROOT, FOLDER_NAME, FOLDER);
                self.folder_attr()
            }
            Place::Folder => match name {
                b"." => self.folder_attr(),
                b".." => self.getattr(Ino::ROOT),
                _ => {
                    let past = self.past(name)?;
                    let root = past.shown(Ino::ROOT);
                    self.names.note(FOLDER, name, root);
                    self.past_attr(&past, Ino::ROOT)
                }
            },
            Place::Past(past, own) => {
                if name == b"." {
                    return self.past_attr(past, *own);
                }
                if name == b".." {
                    return self.getattr(self.parent_in_past(past, *own)?);
                }
                let value = self.store.get(&key::dentry(*own, name), past.at())?;
                let dentry = Dentry::decode(&value.ok_or_else(|| no_name(name))?)?;
                self.names.note(parent, name, past.shown(dentry.ino));
                self.past_attr(past, dentry.ino)
            }
        }
    }

    fn past_inode(&self, past: &Past, own: Ino) -> Result<Inode> {
        load_inode(&*self.store, own, past.at())?.ok_or_else(|| no_inode(past.shown(own)))
    }

    fn past_attr(&self, past: &Past, own: Ino) -> Result<Attr> {
        let inode = self.past_inode(past, own)?;
        Ok(Attr { ino: past.shown(own), ..self.attr_at(own, &inode, past.at())? })
    }

    fn folder_attr(&self) -> Result<Attr> {
        let root = self.getattr(Ino::ROOT)?;
        let snapshots = self.snapshots()?;
        let count = snapshots.len() as u64;
        let changed = snapshots.iter().map(|(_, snapshot)| snapshot.created).max().unwrap_or(root.btime);
        Ok(Attr {
            ino: FOLDER,
            kind: FileKind::Directory,
            mode: FOLDER_MODE,
            nlink: 2 + u32::try_from(count).unwrap_or(0),
            size: count,
            blocks: 0,
            atime: changed,
            mtime: changed,
            ctime: changed,
            ..root
        })
    }

    /// As seen from outside. Of a snapshot's root it is `.snapshots`.
    fn parent_in_past(&self, past: &Past, own: Ino) -> Result<Ino> {
        if own == Ino::ROOT {
            return Ok(FOLDER);
        }
        let inode = self.past_inode(past, own)?;
        if inode.kind != FileKind::Directory {
            return Err(not_a_directory(b".."));
        }
        Ok(past.shown(inode.parent))
    }

    pub(crate) fn getattr_past(&self, place: &Place) -> Result<Attr> {
        match place {
            Place::Past(past, own) => self.past_attr(past, *own),
            _ => self.folder_attr(),
        }
    }

    /// `getattrs` where some are not of the present: those of one snapshot are read together.
    pub(crate) fn getattrs_past(&self, inos: &[Ino]) -> Result<Vec<Option<Attr>>> {
        let first = inos.iter().find_map(|ino| match self.place(*ino) {
            Ok(Place::Past(past, _)) => Some(past),
            _ => None,
        });
        let mut found = HashMap::new();
        if let Some(past) = first {
            let own: Vec<Ino> = inos
                .iter()
                .filter(|ino| ino.0 >> OWN_BITS == past.slot)
                .map(|ino| Ino(ino.0 & (INO_MAX - 1)))
                .collect();
            let keys: Vec<_> = own.iter().map(|ino| key::inode(*ino)).collect();
            for (own, value) in own.into_iter().zip(self.store.get_many(&keys, past.at())?) {
                if let Some(value) = value {
                    let attr = self.attr_at(own, &Inode::decode(&value)?, past.at())?;
                    let ino = past.shown(own);
                    found.insert(ino, Attr { ino, ..attr });
                }
            }
        }
        inos.iter()
            .map(|ino| match found.remove(ino) {
                Some(attr) => Ok(Some(attr)),
                None => match self.getattr(*ino) {
                    Ok(attr) => Ok(Some(attr)),
                    Err(error) if matches!(error.raw_errno(), errno::ENOENT | errno::ESTALE) => Ok(None),
                    Err(error) => Err(error),
                },
            })
            .collect()
    }

    pub(crate) fn readlink_past(&self, place: &Place) -> Result<Vec<u8>> {
        if let Place::Past(past, own) = place
            && let Content::Target(target) = self.past_inode(past, *own)?.content
        {
            return Ok(target);
        }
        Err(Error::invalid("it is not a symbolic link"))
    }

    pub(crate) fn getxattr_past(&self, place: &Place, name: &[u8]) -> Result<Option<Vec<u8>>> {
        match place {
            Place::Past(past, own) => self.store.get(&key::xattr(*own, name), past.at()),
            _ => Ok(None),
        }
    }

    pub(crate) fn listxattr_past(&self, place: &Place) -> Result<Vec<Vec<u8>>> {
        let Place::Past(past, own) = place else { return Ok(Vec::new()) };
        self.past_inode(past, *own)?;
        let prefix = key::all_xattrs(*own);
        let rows = self.store.scan(&prefix, &key::end_of(&prefix), usize::MAX, past.at())?;
        Ok(rows.into_iter().map(|(key, _)| key::name_of(&key).to_vec()).collect())
    }

    /// The directory's parent, if it is one.
    pub(crate) fn open_dir_past(&self, place: &Place) -> Result<Ino> {
        match place {
            Place::Past(past, own) => {
                let inode = self.past_inode(past, *own)?;
                if inode.kind != FileKind::Directory {
                    return Err(Error::errno(errno::ENOTDIR, format!("inode {own} is not a directory")));
                }
                self.parent_in_past(past, *own)
            }
            _ => Ok(Ino::ROOT),
        }
    }

    /// Names of a directory, wherever it is, greater than `after`, in byte order. Cursors are 0.
    pub(crate) fn names_in(
        &self,
        directory: Ino,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<DirItem>> {
        match self.place(directory)? {
            Place::Live => self.names_after(directory, after, limit, At::Latest),
            Place::Past(past, own) => {
                let mut items = self.names_after(own, after, limit, past.at())?;
                items.iter_mut().for_each(|item| item.ino = past.shown(item.ino));
                Ok(items)
            }
            Place::Folder => {
                let mut items = Vec::new();
                for (name, _) in self.snapshots()? {
                    if items.len() == limit {
                        break;
                    }
                    if after.is_some_and(|after| name.as_slice() <= after) {
                        continue;
                    }
                    match self.past(&name) {
                        Ok(past) => {
                            let ino = past.shown(Ino::ROOT);
                            items.push(DirItem { name, ino, kind: FileKind::Directory, cursor: 0 });
                        }
                        // Deleted since it was listed.
                        Err(error) if error.raw_errno() == errno::ENOENT => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(items)
            }
        }
    }

    pub(crate) fn open_past(&self, place: Place) -> Result<PastFile> {
        let Place::Past(past, ino) = place else {
            return Err(Error::errno(errno::EISDIR, format!("{:?} is a directory", shown(FOLDER_NAME))));
        };
        let inode = self.past_inode(&past, ino)?;
        match inode.kind {
            FileKind::File => {}
            FileKind::Directory => {
                return Err(Error::errno(errno::EISDIR, format!("inode {ino} is a directory")));
            }
            _ => return Err(Error::invalid(format!("inode {ino} is not a file"))),
        }
        let extents = load_extents(&*self.store, ino, &inode, past.at())?;
        Ok(PastFile { past, ino, inode, extents })
    }

    pub(crate) fn read_past(
        &self,
        file: &PastFile,
        offset: u64,
        out: &mut [u8],
        fetch: Fetch,
    ) -> Result<usize> {
        let length = file.inode.size.saturating_sub(offset).min(out.len() as u64) as usize;
        if length == 0 {
            return Ok(0);
        }
        let out = &mut out[..length];
        let needed = extents::touching(&file.extents, offset, offset + length as u64);
        self.placed(file.ino, file.past.at(), fetch).read(needed, offset, out).map_err(|error| {
            lost(error).context(format_args!(
                "file {:?} (inode {}) of snapshot {:?}",
                shown(&self.names.path(file.ino())),
                file.ino,
                shown(&file.past.name)
            ))
        })?;
        self.counters.read_bytes.increment(length as u64);
        Ok(length)
    }

    pub(crate) fn snapshot_record(&self, name: &[u8]) -> Result<Snapshot> {
        let value = self.store.get(&key::snapshot(name), At::Latest)?;
        let value =
            value.ok_or_else(|| Error::not_found(format!("there is no snapshot {:?}", shown(name))))?;
        Snapshot::decode(&value)
    }
}

/// Timestamps of the same moment as names: `20261201-164307` in UTC.
pub fn moment(time: Timestamp) -> String {
    let seconds = time.0.div_euclid(1_000_000_000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Howard Hinnant's civil_from_days: years begin in March, eras have 400 of them.
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}-{:02}{:02}{:02}", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_the_calendars() {
        for (seconds, expected) in [
            (0, "19700101-000000"),
            (951_782_399, "20000228-235959"),
            (951_782_400, "20000229-000000"),
            (1_796_143_387, "20261201-164307"),
            (-1, "19691231-235959"),
        ] {
            assert_eq!(moment(Timestamp(seconds * 1_000_000_000)), expected);
        }
    }
}
