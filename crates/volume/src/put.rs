//! The bulk road in: many entries with their bytes in one message. All bytes go into packs first, one fdatasync
//! covers them (a few small files ride in the metadata commits instead, as small fsyncs do), then each entry becomes visible by a commit of its own: a file is there whole or not at all, and
//! one that existed is replaced at once.

use std::collections::HashMap;
use std::sync::Arc;

use headrace_base::error::errno;
use headrace_base::time::{self, Timestamp};
use headrace_base::{Error, Ino, MIB, Result};
use headrace_flash::PackRecord;
use headrace_format::key;
use headrace_format::message::{self, PutEntry};
use headrace_format::record::{Content, Dentry, Extent, FileKind, Place};
use headrace_format::segment::Origin as SegmentOrigin;
use headrace_meta::{Commit, CommitError, Durability, Precondition, Write};

use crate::by_path::{Access, split};
use crate::flush::INLINE_BYTES_MAX;
use crate::live::no_inode;
use crate::namespace::{Count, check_target, new_inode, not_a_directory, shown};
use crate::packs::OpenPack;
use crate::types::{Change, Identity, NewInode, Origin, SetAttr};
use crate::volume::Volume;

const FRAME_BYTES: usize = 8 * MIB as usize;

struct Planned<'a> {
    entry: &'a PutEntry,
    bytes: &'a [u8],
    ino: Ino,
    /// Where the bytes are by now, and in which pack; None for a pack: in the metadata commit.
    extent: Option<(Extent, Option<usize>)>,
}

impl Volume {
    /// See `message::Request::Put`. Stops at the first entry that fails, and says which; those before it stay.
    pub fn put(
        &self,
        who: &Identity,
        entries: &[PutEntry],
        payload: &[u8],
        parents: bool,
        durable: bool,
    ) -> Result<message::PutDone> {
        let mut planned = self.plan(entries, payload)?;
        let mut places = Places { volume: self, who, parents, known: HashMap::new() };
        for plan in &planned {
            // Before any byte is written: whoever may not create it gets the error here. A missing parent may be
            // an entry of this very call.
            match places.parent_of(&plan.entry.path) {
                Err(error) if error.raw_errno() != errno::ENOENT => return Err(error),
                _ => {}
            }
            if matches!(plan.entry.kind, message::Kind::CharDevice | message::Kind::BlockDevice)
                && !who.is_root()
            {
                return Err(Error::errno(
                    errno::EPERM,
                    format!("put {:?}: only root makes devices", shown(&plan.entry.path)),
                ));
            }
        }
        self.flusher.room.check_bytes(payload.len() as u64)?;
        let _gate = self.flusher.share_inline();
        let packs = if payload.len() as u64 <= INLINE_BYTES_MAX && self.segments.remote.is_none() {
            place_inline(&mut planned);
            Vec::new()
        } else {
            self.append_all(who, &mut planned)?
        };
        let mut done = message::PutDone { created: 0, replaced: 0, bytes: 0 };
        let outcome: Result<()> = planned.iter().try_for_each(|plan| {
            let replaced = self
                .put_one(who, plan, &packs, &mut places)
                .map_err(|error| error.context(format_args!("put {:?}", shown(&plan.entry.path))))?;
            done.created += u64::from(!replaced);
            done.replaced += u64::from(replaced);
            done.bytes += plan.bytes.len() as u64;
            Ok(())
        });
        let segments: Vec<_> = packs.iter().map(|pack| pack.segment).collect();
        for pack in packs {
            self.flusher.packs.release(pack);
        }
        self.counters.written_bytes.increment(done.bytes);
        outcome?;
        if durable {
            let waits = self.flusher.hurry(segments);
            self.store.sync()?;
            self.flusher.wait_clean(&waits)?;
        }
        Ok(done)
    }

    fn plan<'a>(&self, entries: &'a [PutEntry], payload: &'a [u8]) -> Result<Vec<Planned<'a>>> {
        let mut rest = payload;
        let mut planned = Vec::with_capacity(entries.len());
        for entry in entries {
            let size = usize::try_from(entry.size).unwrap_or(usize::MAX);
            if size > rest.len() || (size > 0 && (entry.hard_link || entry.kind != message::Kind::File)) {
                return Err(Error::invalid(format!(
                    "put {:?}: {size} bytes are announced, {} are left of the payload",
                    shown(&entry.path),
                    rest.len()
                )));
            }
            let (bytes, after) = rest.split_at(size);
            rest = after;
            let ino = if entry.hard_link { Ino::ROOT } else { self.next_ino()? };
            planned.push(Planned { entry, bytes, ino, extent: None });
        }
        if !rest.is_empty() {
            return Err(Error::invalid(format!("{} bytes of the payload belong to no entry", rest.len())));
        }
        Ok(planned)
    }

    fn append_all(&self, who: &Identity, planned: &mut [Planned<'_>]) -> Result<Vec<Arc<OpenPack>>> {
        let mut packs = Vec::new();
        let appended = (|| {
            let with_bytes: Vec<usize> =
                (0..planned.len()).filter(|index| !planned[*index].bytes.is_empty()).collect();
            let mut rest = &with_bytes[..];
            while !rest.is_empty() {
                let mut frame_bytes = 0;
                let count = rest
                    .iter()
                    .take_while(|index| {
                        let fits =
                            frame_bytes == 0 || frame_bytes + planned[**index].bytes.len() <= FRAME_BYTES;
                        frame_bytes += planned[**index].bytes.len();
                        fits
                    })
                    .count();
                let (frame, after) = rest.split_at(count);
                let records: Vec<PackRecord<'_>> = frame
                    .iter()
                    .map(|index| PackRecord {
                        origin: origin_of(who, &planned[*index]),
                        pieces: vec![planned[*index].bytes],
                    })
                    .collect();
                let (pack, placed) = self.flusher.packs.append(&records)?;
                for (index, placed) in frame.iter().zip(placed) {
                    let place =
                        Place::Pack { segment: pack.segment, offset: placed.offset, check: placed.check };
                    let extent = Extent { file_offset: 0, length: placed.length, place };
                    planned[*index].extent = Some((extent, Some(packs.len())));
                }
                packs.push(pack);
                rest = after;
            }
            packs.iter().try_for_each(|pack| pack.sync())
        })();
        if let Err(error) = appended {
            packs.into_iter().for_each(|pack| self.flusher.packs.release(pack));
            return Err(error);
        }
        Ok(packs)
    }

    /// Whether it replaced something.
    fn put_one(
        &self,
        who: &Identity,
        plan: &Planned<'_>,
        packs: &[Arc<OpenPack>],
        places: &mut Places<'_>,
    ) -> Result<bool> {
        let entry = plan.entry;
        let (parent, name) = places.parent_of(&entry.path)?;
        if entry.hard_link {
            return self.put_hard_link(who, entry, parent, name);
        }
        let kind = FileKind::from(entry.kind);
        if kind == FileKind::Symlink {
            check_target(entry.target.as_deref().map_or(&[], |target| target.as_slice()))?;
        }
        let existing = self.dentry(parent, name)?;
        if let Some((dentry, _)) = &existing {
            match (kind, dentry.kind) {
                (FileKind::Directory, FileKind::Directory) => {
                    let set = SetAttr {
                        mode: Some(entry.mode),
                        uid: entry.uid,
                        gid: entry.gid,
                        mtime: entry.mtime_ns.map(Timestamp),
                        ..SetAttr::default()
                    };
                    self.check_setattr(who, &self.getattr(dentry.ino)?, &set)?;
                    self.setattr(Origin::SOCKET, dentry.ino, &set)?;
                    return Ok(true);
                }
                (FileKind::Directory, _) => return Err(not_a_directory(name)),
                (_, FileKind::Directory) => {
                    return Err(Error::errno(errno::EISDIR, format!("{:?} is a directory", shown(name))));
                }
                _ => self.check_remove(who, parent, name)?,
            }
        }
        self.check_new_name(parent, name)?;
        let _stripe = self.stripes.lock(&[parent]);
        let existing = self.dentry(parent, name)?;
        let now = time::wall_now();
        let mut directory = self.directory_inode(parent)?;
        let mut inode = new_inode(
            parent,
            &mut directory,
            NewInode {
                kind,
                mode: entry.mode,
                uid: owner(who, entry.uid, who.uid, "uid")?,
                gid: owner(who, entry.gid, who.gid, "gid")?,
                rdev: entry.rdev,
                target: entry.target.as_ref().map(|target| target.to_vec()).unwrap_or_default(),
            },
        );
        if let Some(gid) = entry.gid {
            inode.gid = gid;
        }
        inode.mtime = entry.mtime_ns.map_or(now, Timestamp);
        inode.atime = inode.mtime;
        if kind == FileKind::File {
            inode.size = plan.bytes.len() as u64;
        }
        let mut preconditions = vec![Precondition::Present(key::alive(parent))];
        let mut writes = Vec::new();
        if let Some((extent, pack)) = &plan.extent {
            inode.content = Content::Extents(vec![extent.clone()]);
            match pack {
                Some(pack) => preconditions.push(Precondition::Present(key::pending(packs[*pack].segment))),
                None => writes.push(Write::Put(key::inline(plan.ino, 0), plan.bytes.to_vec())),
            }
        }
        let mut count = Count::plus(kind);
        writes.push(Write::Put(key::dentry(parent, name), Dentry { ino: plan.ino, kind }.encode()));
        writes.push(Write::Put(key::inode(plan.ino), inode.encode()));
        if kind == FileKind::Directory {
            writes.push(Write::Put(key::alive(plan.ino), Vec::new()));
        }
        let replaced = match existing {
            None => {
                preconditions.push(Precondition::Absent(key::dentry(parent, name)));
                None
            }
            Some((dentry, _)) if dentry.kind == FileKind::Directory => {
                return Err(Error::errno(errno::EISDIR, format!("{:?} is a directory", shown(name))));
            }
            Some((dentry, value)) => {
                preconditions.push(Precondition::Equals(key::dentry(parent, name), value));
                count = Count::default();
                Some(self.live.pin(&*self.store, dentry.ino)?)
            }
        };
        writes.push(self.delta_write(parent, count, now)?);
        let mut replaced_state = replaced.as_ref().map(|pin| pin.lock_idle());
        let dropped = match (&replaced, &mut replaced_state) {
            (Some(pin), Some(state)) => {
                Some(self.drop_link(pin, state, now, &mut preconditions, &mut writes))
            }
            _ => None,
        };
        match self.store.commit(Commit { preconditions, writes }, Durability::Relaxed) {
            Ok(_) => {}
            Err(CommitError::Failed(error)) => return Err(error),
            Err(CommitError::Conflict(_)) => return Err(no_inode(parent)),
        }
        if let (Some(state), Some(after)) = (&mut replaced_state, dropped) {
            self.dropped(state, after);
        }
        drop(replaced_state);
        if matches!(plan.extent, Some((_, None))) {
            self.flusher.note_inline(plan.ino);
        }
        self.names.note(parent, name, plan.ino);
        self.changes.tell(Origin::SOCKET, || {
            let mut changes = vec![Change::Entry(parent, name.to_vec()), Change::Inode(parent)];
            changes.extend(replaced.as_ref().map(|pin| Change::Inode(pin.ino)));
            changes
        });
        Ok(replaced.is_some())
    }

    fn put_hard_link(&self, who: &Identity, entry: &PutEntry, parent: Ino, name: &[u8]) -> Result<bool> {
        let target = entry.target.as_ref().ok_or_else(|| Error::invalid("a hard link needs a target"))?;
        let attr = self.resolve(who, target, false)?;
        self.check_link(who, &attr)?;
        let replaced = match self.dentry(parent, name)? {
            Some((dentry, _)) if dentry.ino == attr.ino => return Ok(true),
            Some(_) => {
                self.check_remove(who, parent, name)?;
                self.unlink(Origin::SOCKET, parent, name)?;
                true
            }
            None => false,
        };
        self.link(Origin::SOCKET, attr.ino, parent, name)?;
        Ok(replaced)
    }
}

/// Each file's bytes go with its own commit.
fn place_inline(planned: &mut [Planned<'_>]) {
    for plan in planned.iter_mut().filter(|plan| !plan.bytes.is_empty()) {
        let place = Place::Inline { slot: 0, offset: 0 };
        plan.extent = Some((Extent { file_offset: 0, length: plan.bytes.len() as u64, place }, None));
    }
}

/// Parents that this call has looked up and may write to.
struct Places<'a> {
    volume: &'a Volume,
    who: &'a Identity,
    parents: bool,
    known: HashMap<Vec<u8>, Ino>,
}

impl Places<'_> {
    fn parent_of<'p>(&mut self, path: &'p [u8]) -> Result<(Ino, &'p [u8])> {
        let (directory, name) = split(path)?;
        if let Some(ino) = self.known.get(directory) {
            return Ok((*ino, name));
        }
        let attr = match self.volume.resolve(self.who, directory, true) {
            Err(error) if error.raw_errno() == errno::ENOENT && self.parents => {
                self.volume.make_directories(self.who, directory)?
            }
            outcome => outcome?,
        };
        if attr.kind != FileKind::Directory {
            return Err(not_a_directory(directory));
        }
        self.volume
            .check_access(self.who, &attr, Access::CHANGE)
            .map_err(|error| error.context(format_args!("{:?}", shown(path))))?;
        self.known.insert(directory.to_vec(), attr.ino);
        Ok((attr.ino, name))
    }
}

impl Volume {
    /// mkdir -p, mode 0755. Gives the last directory.
    pub fn make_directories(&self, who: &Identity, path: &[u8]) -> Result<crate::types::Attr> {
        let mut end = 0;
        loop {
            let part = path[end..].iter().position(|byte| *byte != b'/').map(|skip| end + skip);
            let Some(start) = part else { break };
            end =
                path[start..].iter().position(|byte| *byte == b'/').map_or(path.len(), |slash| start + slash);
            match self.resolve(who, &path[..end], true) {
                Ok(_) => {}
                Err(error) if error.raw_errno() == errno::ENOENT => {
                    let (parent, name) = self.resolve_parent(who, &path[..end])?;
                    let new = NewInode {
                        kind: FileKind::Directory,
                        mode: 0o755,
                        uid: who.uid,
                        gid: who.gid,
                        rdev: 0,
                        target: Vec::new(),
                    };
                    match self.make(Origin::SOCKET, parent, &name, new) {
                        // Somebody else was as quick.
                        Err(error) if error.raw_errno() == errno::EEXIST => {}
                        outcome => {
                            outcome?;
                        }
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.resolve(who, path, true)
    }
}

fn owner(who: &Identity, wanted: Option<u32>, own: u32, what: &str) -> Result<u32> {
    match wanted {
        Some(id) if id != own && !who.is_root() && !(what == "gid" && who.in_group(id)) => Err(Error::errno(
            errno::EPERM,
            format!("user {} may not give a file to {what} {id}: only root may", who.uid),
        )),
        Some(id) => Ok(id),
        None => Ok(own),
    }
}

fn origin_of(who: &Identity, plan: &Planned<'_>) -> SegmentOrigin {
    let path =
        plan.entry.path.iter().position(|byte| *byte != b'/').map_or(&[][..], |at| &plan.entry.path[at..]);
    SegmentOrigin {
        ino: plan.ino,
        path: path.to_vec(),
        mode: plan.entry.mode,
        uid: plan.entry.uid.unwrap_or(who.uid),
        gid: plan.entry.gid.unwrap_or(who.gid),
        mtime: plan.entry.mtime_ns.map_or_else(time::wall_now, Timestamp),
        file_offset: 0,
        file_bytes: plan.bytes.len() as u64,
    }
}
