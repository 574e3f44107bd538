//! Each request as calls of the volume, with the rights of the client that asks (`files` has those that carry
//! a file's bytes). What a system call checks in the kernel is checked here: write and search permission on the
//! directory for names, ownership for attributes, the sticky bit.
//!
//! After a change the answer waits until the mounts' kernels have forgotten what was before: a file written
//! through the API is seen by a mount as soon as the call returns.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::time::Timestamp;
use headrace_base::{Error, Reservation, Result};
use headrace_format::FORMAT;
use headrace_format::message::{
    self, Answer, Differences, ListEntry, Listing, LoaderRequest, Names, PAYLOAD_BYTES_MAX, Request, Seals,
    Snapshots, WIRE, Welcome, encode_meta,
};
use headrace_volume::{
    Access, Attr, ChangeKind, Difference, ExportTarget, FileKind, Identity, Location, NewInode, Origin,
    RenameMode, SealedView, SetAttr, Snapshot, Volume,
};
use serde::Serialize;
use serde_bytes::ByteBuf;

use crate::ENGINE_VERSION;
use crate::batch::{Gather, Plan};
use crate::connection::MEMORY_PATIENCE;
use crate::files::Handles;
use crate::node::Node;
use crate::slots::SlotMemory;
use crate::streams::StreamPlan;
use crate::wake::Wake;

/// Mounts forget within milliseconds; one that hangs must not hang the socket too.
const SETTLE_PATIENCE: Duration = Duration::from_secs(2);
/// Entries of one answer. With long names and attributes they come to 5 MiB, well below the limit.
const LIST_ENTRIES_MAX: usize = 10_000;
/// Names and inodes looked at for one answer: two paths each, of a few hundred bytes, or 4 KiB at worst.
const DIFFERENCES_MAX: usize = 1_500;
/// Sealed views that a connection remembers as checked.
const VIEWS_MAX: usize = 16;
const PERMISSION_BITS: u16 = 0o7777;
const SETUID: u16 = 0o4000;
const SETGID: u16 = 0o2000;

/// An answer, ready to be sent.
#[derive(Debug, Default)]
pub struct Reply {
    pub meta: Vec<u8>,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
    /// Room for the payload, given back when it was sent.
    pub _reservation: Option<Reservation>,
}

impl Reply {
    pub fn of<T: Serialize>(value: T) -> Result<Reply> {
        Ok(Reply { meta: encode_meta(&Answer::Ok(value))?, ..Reply::default() })
    }

    pub fn bytes(payload: Vec<u8>, reservation: Option<Reservation>) -> Result<Reply> {
        Ok(Reply { payload, _reservation: reservation, ..Reply::of(())? })
    }
}

#[derive(Debug)]
pub enum Next {
    Answer(Reply),
    /// Answers, then the engine stops.
    Stop(Reply),
    Stream(Box<StreamPlan>),
}

/// What one connection knows: whose it is, and what it has open.
#[derive(Debug)]
pub struct Session {
    pub node: Arc<Node>,
    pub who: Identity,
    pub handles: Handles,
    views: HashMap<String, Arc<SealedView>>,
    export_target: Option<Arc<ExportTarget>>,
}

impl Session {
    pub fn new(node: Arc<Node>, who: Identity) -> Session {
        Session { node, who, handles: Handles::default(), views: HashMap::new(), export_target: None }
    }

    pub fn volume(&self) -> &Arc<Volume> {
        &self.node.volume
    }

    pub fn handle(&mut self, request: Request, payload: &[u8]) -> Result<Next> {
        let takes_payload =
            matches!(request, Request::Pwrite { .. } | Request::Put { .. } | Request::ReadBatch { .. });
        if !payload.is_empty() && !takes_payload {
            return Err(Error::invalid(format!("{} takes no payload", request.name())));
        }
        let reply = match request {
            Request::Hello { client } => {
                tracing::debug!(client, uid = self.who.uid, "a client says hello");
                Reply::of(Welcome {
                    wire: WIRE,
                    engine: ENGINE_VERSION.to_owned(),
                    pid: std::process::id(),
                    volume: self.volume().id().to_string(),
                    format: FORMAT,
                })
            }
            Request::Status {} => Reply::of(self.node.status()?),
            Request::Stat { path, follow } => {
                Reply::of(attr_message(&self.volume().resolve(&self.who, &path, follow)?))
            }
            Request::List { path, after, limit, attrs } => {
                Reply::of(self.list(&path, after.as_deref().map(Vec::as_slice), limit, attrs)?)
            }
            Request::Open { path, flags, mode } => Reply::of(self.open(&path, &flags, mode)?),
            Request::Pread { handle, offset, length } => self.pread(handle, offset, length),
            Request::Pwrite { handle, offset } => Reply::of(self.pwrite(handle, offset, payload)?),
            Request::Fstat { handle } => Reply::of(attr_message(&self.handles.get(handle)?.attr()?)),
            Request::Ftruncate { handle, size } => {
                self.handles.get(handle)?.truncate(size)?;
                self.changed()
            }
            Request::Fsync { handle } => Reply::of(self.handles.get(handle)?.fsync()?),
            Request::Close { handle } => {
                drop(self.handles.remove(handle)?);
                Reply::of(())
            }
            Request::ReadFile { path } => self.read_file(&path),
            Request::Put { entries, parents, durable } => {
                let done = self.volume().put(&self.who, &entries, payload, parents, durable);
                // Also after an error: the entries before it are there.
                self.settle();
                Reply::of(done?)
            }
            Request::Mkdir { path, mode, parents, exist_ok } => self.mkdir(&path, mode, parents, exist_ok),
            Request::Unlink { path } => {
                let (parent, name) = self.volume().resolve_parent(&self.who, &path)?;
                self.volume().check_remove(&self.who, parent, &name)?;
                self.volume().unlink(Origin::SOCKET, parent, &name)?;
                self.changed()
            }
            Request::Rmdir { path } => {
                let (parent, name) = self.volume().resolve_parent(&self.who, &path)?;
                self.volume().check_remove(&self.who, parent, &name)?;
                self.volume().rmdir(Origin::SOCKET, parent, &name)?;
                self.changed()
            }
            Request::Rename { from, to, noreplace, exchange } => {
                let mode = match (noreplace, exchange) {
                    (false, false) => RenameMode::Replace,
                    (true, false) => RenameMode::NoReplace,
                    (false, true) => RenameMode::Exchange,
                    (true, true) => {
                        return Err(Error::invalid("rename: noreplace and exchange exclude each other"));
                    }
                };
                self.rename(&from, &to, mode)
            }
            Request::Symlink { target, path } => {
                let (parent, name) = self.volume().resolve_parent(&self.who, &path)?;
                let new = NewInode { target: target.into_vec(), ..self.new_inode(FileKind::Symlink, 0o777) };
                self.volume().make(Origin::SOCKET, parent, &name, new)?;
                self.changed()
            }
            Request::Link { from, to } => self.link(&from, &to),
            Request::Readlink { path } => {
                let attr = self.volume().resolve(&self.who, &path, false)?;
                if attr.kind != FileKind::Symlink {
                    return Err(Error::invalid(format!("{:?} is not a symbolic link", shown(&path))));
                }
                Reply::bytes(self.volume().readlink(attr.ino)?, None)
            }
            Request::Setattr { path, set } => Reply::of(self.setattr(&path, &set)?),
            Request::Getxattr { path, name } => {
                let attr = self.attribute_of(&path, &name, Access::READ)?;
                Reply::bytes(self.volume().getxattr(attr.ino, &name)?, None)
            }
            Request::Setxattr { path, name, value } => {
                let attr = self.attribute_of(&path, &name, Access::WRITE)?;
                self.volume().setxattr(Origin::SOCKET, attr.ino, &name, &value, false, false)?;
                self.changed()
            }
            Request::Listxattr { path } => {
                let attr = self.volume().resolve(&self.who, &path, true)?;
                let mut names = self.volume().listxattr(attr.ino)?;
                names.retain(|name| self.who.is_root() || !name.starts_with(b"trusted."));
                Reply::of(Names { names: names.into_iter().map(ByteBuf::from).collect() })
            }
            Request::Removexattr { path, name } => {
                let attr = self.attribute_of(&path, &name, Access::WRITE)?;
                self.volume().removexattr(Origin::SOCKET, attr.ino, &name)?;
                self.changed()
            }
            Request::Fsck { deep } => {
                self.check_operator("check the volume")?;
                Reply::of(self.volume().fsck(deep)?)
            }
            Request::Compact {} => {
                self.check_operator("write packs anew")?;
                Reply::of(self.volume().compact()?)
            }
            Request::Backup {} => {
                self.check_operator("back up the metadata")?;
                Reply::of(self.volume().backup()?)
            }
            Request::Tier { paths } => Reply::of(self.volume().tier_report(&self.who, &paths)?),
            Request::Warm { paths } => Reply::of(self.volume().warm(&self.who, &paths)?),
            Request::Evict { paths } => Reply::of(self.volume().evict(&self.who, paths.as_deref())?),
            Request::Export { paths, root, url, endpoint, region } => {
                self.check_operator("export with the engine's credentials")?;
                let target = self.export_target(Location::parse(&url, endpoint, region)?)?;
                Reply::of(self.volume().export(&self.who, &target, &root, paths)?)
            }
            Request::Sync {} => Reply::of(self.volume().sync()?),
            Request::Statfs {} => {
                let space = self.volume().statfs()?;
                Reply::of(message::Statfs {
                    bytes_total: space.bytes_total,
                    bytes_free: space.bytes_free,
                    bytes_available: space.bytes_available,
                    inodes_used: space.inodes_used,
                })
            }
            Request::Seal { path } => {
                let view = self.volume().seal(&self.who, &path)?;
                self.node.keep_view(&view);
                sealed(&view)
            }
            Request::OpenSeal { seal } => sealed(&*self.view(&seal)?),
            Request::Seals {} => Reply::of(Seals { seals: self.volume().seals()? }),
            Request::SealDelete { seal } => {
                self.check_operator("delete a sealed view")?;
                let id = seal.parse()?;
                self.volume().seal_delete(id)?;
                self.views.remove(&seal);
                self.node.forget_view(id);
                Reply::of(())
            }
            Request::SnapshotCreate { name } => {
                self.check_operator("make a snapshot")?;
                let snapshot = self.volume().snapshot_create(&name)?;
                self.settle();
                Reply::of(snapshot_message(name, snapshot))
            }
            Request::Snapshots {} => {
                let snapshots = self.volume().snapshots()?.into_iter();
                let snapshots =
                    snapshots.map(|(name, snapshot)| snapshot_message(ByteBuf::from(name), snapshot));
                Reply::of(Snapshots { snapshots: snapshots.collect() })
            }
            Request::SnapshotDiff { from, to, after, limit } => {
                // Names are shown whatever the modes of their folders.
                self.check_operator("compare snapshots")?;
                let limit = match limit as usize {
                    0 => DIFFERENCES_MAX,
                    limit => limit.min(DIFFERENCES_MAX),
                };
                let bytes = |name: &'_ Option<ByteBuf>| name.as_ref().map(|name| name.to_vec());
                let (to, after) = (bytes(&to), bytes(&after));
                let (found, next) =
                    self.volume().snapshot_diff(&from, to.as_deref(), after.as_deref(), limit)?;
                let differences = found.into_iter().map(difference_message).collect();
                Reply::of(Differences { differences, next: next.map(ByteBuf::from) })
            }
            Request::SnapshotRestore { name } => {
                self.check_operator("restore a snapshot")?;
                let restored = self.volume().snapshot_restore(&name)?;
                Reply::of(message::Restored {
                    before: ByteBuf::from(restored.before),
                    changed: restored.changed,
                })
            }
            Request::SnapshotDelete { name } => {
                self.check_operator("delete a snapshot")?;
                self.volume().snapshot_delete(&name)?;
                self.changed()
            }
            Request::ReadBatch { seal } => self.read_batch(&seal, payload),
            Request::Loader(request) => return self.loader(request),
            Request::Mount { mountpoint, read_only, allow_other } => {
                self.check_operator("mount")?;
                let allow_other = allow_other || self.node.options.system;
                Reply::of(self.node.mounts.mount(self.volume(), &mountpoint, read_only, allow_other)?)
            }
            Request::Unmount { mountpoint } => {
                self.check_operator("unmount")?;
                Reply::of(self.node.mounts.unmount(&mountpoint)?)
            }
            Request::Shutdown {} => {
                self.check_operator("stop the engine")?;
                return Ok(Next::Stop(Reply::of(())?));
            }
        };
        reply.map(Next::Answer)
    }

    /// What only root and the engine's own user may do.
    /// The one of the last request, if it is the same: it holds connections to the store.
    fn export_target(&mut self, location: Location) -> Result<Arc<ExportTarget>> {
        match &self.export_target {
            Some(target) if *target.location() == location => Ok(Arc::clone(target)),
            _ => {
                let target = Arc::new(self.volume().export_target(location)?);
                self.export_target = Some(Arc::clone(&target));
                Ok(target)
            }
        }
    }

    fn check_operator(&self, doing: &str) -> Result<()> {
        if self.who.is_root() || self.who.uid == rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        Err(Error::errno(
            errno::EPERM,
            format!("user {} may not {doing}: only root and the engine's own user may", self.who.uid),
        ))
    }

    pub fn settle(&self) {
        self.volume().settle(SETTLE_PATIENCE);
    }

    fn changed(&self) -> Result<Reply> {
        self.settle();
        Reply::of(())
    }

    pub fn new_inode(&self, kind: FileKind, mode: u16) -> NewInode {
        NewInode {
            kind,
            mode: mode & PERMISSION_BITS,
            uid: self.who.uid,
            gid: self.who.gid,
            rdev: 0,
            target: Vec::new(),
        }
    }

    fn list(&self, path: &[u8], after: Option<&[u8]>, limit: u32, attrs: bool) -> Result<Listing> {
        let limit = match limit as usize {
            0 => LIST_ENTRIES_MAX,
            limit => limit.min(LIST_ENTRIES_MAX),
        };
        let directory = self.volume().resolve(&self.who, path, true)?;
        let mut items = self.volume().list(&self.who, directory.ino, after, limit + 1)?;
        let more = items.len() > limit;
        items.truncate(limit);
        let mut found = Vec::new();
        if attrs {
            self.volume().check_access(&self.who, &directory, Access::SEARCH)?;
            let inos: Vec<_> = items.iter().map(|item| item.ino).collect();
            found = self.volume().getattrs(&inos)?;
        }
        let next = more.then(|| items.last().map(|item| ByteBuf::from(item.name.clone()))).flatten();
        let mut found = found.into_iter();
        let entries = items.into_iter().map(|item| ListEntry {
            name: ByteBuf::from(item.name),
            ino: item.ino.0,
            kind: item.kind.into(),
            attr: found.next().flatten().map(|attr| attr_message(&attr)),
        });
        Ok(Listing { entries: entries.collect(), next })
    }

    fn mkdir(&self, path: &[u8], mode: u16, parents: bool, exist_ok: bool) -> Result<Reply> {
        match self.volume().resolve(&self.who, path, true) {
            Ok(attr) if exist_ok && attr.kind == FileKind::Directory => return Reply::of(()),
            Ok(_) => return Err(exists(path)),
            Err(_) => {}
        }
        if parents {
            self.volume().make_directories(&self.who, parent_of(path))?;
        }
        let (parent, name) = self.volume().resolve_parent(&self.who, path)?;
        let new = self.new_inode(FileKind::Directory, mode);
        match self.volume().make(Origin::SOCKET, parent, &name, new) {
            // Somebody else was as quick.
            Err(error) if exist_ok && error.raw_errno() == errno::EEXIST => {
                if self.volume().resolve(&self.who, path, true)?.kind != FileKind::Directory {
                    return Err(error);
                }
            }
            made => {
                made?;
            }
        }
        self.changed()
    }

    fn rename(&self, from: &[u8], to: &[u8], mode: RenameMode) -> Result<Reply> {
        let volume = self.volume();
        let (from_parent, from_name) = volume.resolve_parent(&self.who, from)?;
        let (to_parent, to_name) = volume.resolve_parent(&self.who, to)?;
        volume.check_remove(&self.who, from_parent, &from_name)?;
        match volume.check_remove(&self.who, to_parent, &to_name) {
            // In a sticky directory, for a name that is free.
            Err(error) if error.raw_errno() == errno::ENOENT && mode != RenameMode::Exchange => {}
            checked => checked?,
        }
        if from_parent != to_parent {
            // A directory that moves gets another "..": that is a change of the directory.
            let mut moved = vec![volume.lookup(from_parent, &from_name)?];
            if mode == RenameMode::Exchange {
                moved.push(volume.lookup(to_parent, &to_name)?);
            }
            for attr in moved.iter().filter(|attr| attr.kind == FileKind::Directory) {
                volume.check_access(&self.who, attr, Access::WRITE)?;
            }
        }
        volume.rename(Origin::SOCKET, (from_parent, &from_name), (to_parent, &to_name), mode)?;
        self.changed()
    }

    fn link(&self, from: &[u8], to: &[u8]) -> Result<Reply> {
        let volume = self.volume();
        let attr = volume.resolve(&self.who, from, false)?;
        volume.check_link(&self.who, &attr)?;
        let (parent, name) = volume.resolve_parent(&self.who, to)?;
        volume.link(Origin::SOCKET, attr.ino, parent, &name)?;
        self.changed()
    }

    fn setattr(&self, path: &[u8], set: &message::SetAttr) -> Result<message::Attr> {
        let volume = self.volume();
        let attr = volume.resolve(&self.who, path, false)?;
        let mut set = SetAttr {
            mode: set.mode.map(|mode| mode & PERMISSION_BITS),
            uid: set.uid,
            gid: set.gid,
            size: set.size,
            atime: set.atime_ns.map(Timestamp),
            mtime: set.mtime_ns.map(Timestamp),
            ctime: None,
        };
        volume.check_setattr(&self.who, &attr, &set)?;
        if set.size.is_some() && attr.kind != FileKind::File {
            let code = if attr.kind == FileKind::Directory { errno::EISDIR } else { errno::EINVAL };
            return Err(Error::errno(
                code,
                format!("{:?} is not a file: it has no size to set", shown(path)),
            ));
        }
        if !self.who.is_root() {
            let group = set.gid.unwrap_or(attr.gid);
            let mut mode = set.mode.unwrap_or(attr.mode);
            if set.uid.is_some() || set.gid.is_some() {
                if attr.kind != FileKind::Directory {
                    mode &= !SETUID & if mode & 0o010 != 0 { !SETGID } else { PERMISSION_BITS };
                }
            } else if set.mode.is_some() && !self.who.in_group(group) {
                mode &= !SETGID;
            }
            if mode != attr.mode {
                set.mode = Some(mode);
            }
        }
        let changed = volume.setattr(Origin::SOCKET, attr.ino, &set)?;
        self.settle();
        Ok(attr_message(&changed))
    }

    /// The file at `path`, if the client may use its attribute `name` in this way.
    fn attribute_of(&self, path: &[u8], name: &[u8], access: Access) -> Result<Attr> {
        let attr = self.volume().resolve(&self.who, path, true)?;
        if name.starts_with(b"user.") {
            if !matches!(attr.kind, FileKind::File | FileKind::Directory) {
                return Err(Error::errno(
                    errno::EPERM,
                    format!("{:?}: only files and directories have user attributes", shown(path)),
                ));
            }
            self.volume().check_access(&self.who, &attr, access)?;
        } else if name.starts_with(b"trusted.") || name.starts_with(b"security.") {
            let only_reads_label = name.starts_with(b"security.") && access == Access::READ;
            if !self.who.is_root() && !only_reads_label {
                return Err(Error::errno(
                    errno::EPERM,
                    format!("only root may use the attribute {:?}", shown(name)),
                ));
            }
        } else {
            return Err(Error::errno(
                errno::EOPNOTSUPP,
                format!("attribute {:?}: names begin with user., trusted. or security.", shown(name)),
            ));
        }
        Ok(attr)
    }

    /// The sealed view, checked for this client once.
    fn view(&mut self, seal: &str) -> Result<Arc<SealedView>> {
        if let Some(view) = self.views.get(seal) {
            return Ok(Arc::clone(view));
        }
        let view = self.node.view(&self.who, seal)?;
        if self.views.len() >= VIEWS_MAX {
            self.views.clear();
        }
        self.views.insert(seal.to_owned(), Arc::clone(&view));
        Ok(view)
    }

    /// None: every sample may be read without asking.
    fn asking(&self, view: &SealedView) -> Option<Identity> {
        (!view.all_readable(&self.who)).then(|| self.who.clone())
    }

    fn read_batch(&mut self, seal: &str, payload: &[u8]) -> Result<Reply> {
        let (numbers, rest) = payload.as_chunks::<8>();
        if !rest.is_empty() {
            return Err(Error::invalid(format!(
                "a batch's indices are 8 bytes each; {} bytes are no whole number of them",
                payload.len()
            )));
        }
        let view = self.view(seal)?;
        let plan = Plan::new(&view, numbers.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())?;
        if plan.data_bytes() > PAYLOAD_BYTES_MAX {
            return Err(Error::invalid(format!(
                "these {} samples have {} bytes; one answer carries {PAYLOAD_BYTES_MAX}: ask for fewer at once",
                plan.count(),
                plan.data_bytes()
            )));
        }
        let bytes = plan.bytes().next_multiple_of(4096);
        let reservation = self.volume().budget().reserve(bytes, MEMORY_PATIENCE).map_err(|error| {
            error.context(format_args!("{} samples of {bytes} bytes (ask for fewer at once)", plan.count()))
        })?;
        let memory = Arc::new(SlotMemory::new(reservation)?);
        let done = Arc::new(Wake::new()?);
        let (samples, data_bytes) = (plan.count(), plan.data_bytes());
        let gather =
            Arc::new(Gather::new(plan, Arc::clone(&view), self.asking(&view), Arc::clone(&memory), done));
        // A few samples are read sooner by this thread than another is woken.
        if samples > 16 || data_bytes > 1 << 20 {
            self.node.pool.submit(Arc::clone(&gather));
        }
        while gather.work().is_some() {}
        gather.wait();
        let layout = gather.outcome()?;
        self.node.numbers.gather_seconds.record(layout.gather_ns as f64 / 1e9);
        let fd =
            memory.fd().try_clone_to_owned().map_err(|cause| Error::io("pass a batch's memory", cause))?;
        Ok(Reply { fds: vec![fd], ..Reply::of(layout)? })
    }

    fn loader(&mut self, request: LoaderRequest) -> Result<Next> {
        let view = self.view(&request.seal)?;
        let who = self.asking(&view);
        Ok(Next::Stream(Box::new(StreamPlan::new(view, who, &request)?)))
    }

    /// Whether `attr` is a file whose bytes can be read or written.
    pub fn check_is_file(&self, attr: &Attr, path: &[u8]) -> Result<()> {
        match attr.kind {
            FileKind::File => Ok(()),
            FileKind::Directory => {
                Err(Error::errno(errno::EISDIR, format!("{:?} is a directory", shown(path))))
            }
            other => Err(Error::invalid(format!("{:?} is a {other:?}: only files have bytes", shown(path)))),
        }
    }
}

fn sealed(view: &SealedView) -> Result<Reply> {
    let fd = view
        .manifest_file()
        .try_clone()
        .map_err(|cause| Error::io(format_args!("pass the manifest of sealed view {}", view.id()), cause))?;
    Ok(Reply { fds: vec![fd.into()], ..Reply::of(view.describe())? })
}

fn snapshot_message(name: ByteBuf, snapshot: Snapshot) -> message::Snapshot {
    message::Snapshot { name, version: snapshot.version.0, created_ns: snapshot.created.0 }
}

fn difference_message(difference: Difference) -> message::Difference {
    message::Difference {
        change: match difference.change {
            ChangeKind::Added => message::Change::Added,
            ChangeKind::Removed => message::Change::Removed,
            ChangeKind::Changed => message::Change::Changed,
            ChangeKind::Renamed => message::Change::Renamed,
        },
        kind: difference.kind.into(),
        path: ByteBuf::from(difference.path),
        from: difference.from.map(ByteBuf::from),
    }
}

pub fn shown(path: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(path)
}

fn exists(path: &[u8]) -> Error {
    Error::errno(errno::EEXIST, format!("{:?} exists already", shown(path)))
}

/// Everything before the last name.
fn parent_of(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let start = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    &path[..start]
}

pub fn attr_message(attr: &Attr) -> message::Attr {
    message::Attr {
        ino: attr.ino.0,
        kind: attr.kind.into(),
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        size: attr.size,
        blocks: attr.blocks,
        atime_ns: attr.atime.0,
        mtime_ns: attr.mtime.0,
        ctime_ns: attr.ctime.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_of_paths() {
        for (path, parent) in
            [("/a/b", "/a/"), ("/a/b//", "/a/"), ("/a", "/"), ("a", ""), ("/", ""), ("", "")]
        {
            assert_eq!(parent_of(path.as_bytes()), parent.as_bytes(), "{path}");
        }
    }
}
