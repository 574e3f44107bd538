//! Each FUSE operation as a call to the volume.
//!
//! What the kernel is told about caching: names, absent names and attributes are good until it hears otherwise,
//! pages are kept across opens. Its own changes it applies itself (size after a write, counts after an unlink:
//! it marks what it cannot know and asks again); changes through other doors reach it through `notify`.
//!
//! What is answered without the volume:
//! - flush: ENOSYS, once, and the kernel asks no more. A write is with the engine when it returns, as with a
//!   local disk; close has nothing to add, and a round trip per close is what small files pay most for.
//! - fallocate, copy_file_range, lseek, poll, ioctl: ENOSYS (fuser's default), upon which the kernel falls back
//!   or answers EOPNOTSUPP or ENOTTY itself. Locks stay in the kernel, for this mount.
//! - forget: nothing; the volume counts no lookups. Open files live in the handle table.
//!
//! Directories are not cached in the kernel (FOPEN_CACHE_DIR): a cached listing mixes the cursors of several
//! open directories, and then `rm -rf` misses names.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};
use headrace_base::error::errno;
use headrace_base::{Error, Ino, Kind, Result};
use headrace_volume::{
    Attr, FileKind, NewInode, OpenDir, OpenFile, OpenMode, Origin, SetAttr, Volume, is_not_here,
};

use crate::convert::{
    attributes, errno_of, file_type, ino, kind_of_mode, mode_without_set_id, no_entry, permissions,
    rename_mode, time_or_now,
};
use crate::handles::Handles;
use crate::lane::Lane;
use crate::notify::Notifying;
use crate::operations::{Counters, Operation};

/// "Until told otherwise". The kernel turns it into jiffies, so not the greatest number there is.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Inode numbers are never reused, so one generation is enough.
const GENERATION: Generation = Generation(1);
/// Of one read or write request: 256 pages of 4 KiB, the most that the kernel sends.
pub const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Requests that nobody waits for (read-ahead, release) in flight at once.
const BACKGROUND_MAX: u16 = 64;
/// Names read at once. With attributes fewer: what does not fit into the kernel's buffer was fetched in vain.
const NAMES_CHUNK: usize = 128;
const NAMES_WITH_ATTRIBUTES_CHUNK: usize = 32;
/// Said to be free: inode numbers do not run out, and 0 would read as "full".
const INODES_FREE: u64 = 1 << 40;
const BLOCK_BYTES: u64 = 4096;
const NAME_BYTES_MAX: u32 = 255;

const O_TRUNC: i32 = 0o1000;
const O_APPEND: i32 = 0o2000;
const O_EXCL: i32 = 0o200;
const XATTR_CREATE: i32 = 1;
const XATTR_REPLACE: i32 = 2;

/// What is asked of the kernel where it has it. Not asked for, on purpose: the write-back cache (it would own
/// sizes), locks (local ones do), AUTO_INVAL_DATA (own writes would empty the cache), DONT_MASK, POSIX_ACL.
/// HANDLE_KILLPRIV_V2 spares a lookup of `security.capability` before each write; for it `write`, `setattr` and
/// `open` drop set-id bits here.
const CAPABILITIES: [InitFlags; 11] = [
    InitFlags::FUSE_ASYNC_READ,
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_ATOMIC_O_TRUNC,
    InitFlags::FUSE_BIG_WRITES,
    InitFlags::FUSE_CACHE_SYMLINKS,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_READDIRPLUS_AUTO,
    InitFlags::FUSE_HANDLE_KILLPRIV_V2,
    InitFlags::FUSE_MAX_PAGES,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
];

thread_local! {
    /// A read's bytes on their way from the volume to the kernel: one per serving thread, as large as the
    /// largest read so far.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Runs operations, on whatever thread.
#[derive(Clone)]
struct Answering {
    counters: Arc<Counters>,
    refusing: Arc<AtomicBool>,
}

impl Answering {
    /// Runs one operation. Whatever happens in it, the kernel gets an answer: a panic is EIO for this request
    /// alone. What is the engine's fault is logged here, once.
    fn run<T>(
        &self,
        operation: Operation,
        number: INodeNo,
        body: impl FnOnce() -> Result<T>,
    ) -> std::result::Result<T, Errno> {
        self.counters.count(operation);
        if self.refusing.load(Ordering::Acquire) {
            return Err(Errno::ENOTCONN);
        }
        caught(operation, number, body)
    }
}

fn caught<T>(
    operation: Operation,
    number: INodeNo,
    body: impl FnOnce() -> Result<T>,
) -> std::result::Result<T, Errno> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            // Of what the object tier refuses, the program hears no more than a number: the rest stands here.
            let refused = matches!(operation, Operation::Read | Operation::Fsync)
                && matches!(error.kind(), Kind::Permission | Kind::Unavailable);
            if matches!(error.kind(), Kind::Internal | Kind::Corrupt)
                || error.raw_errno() == errno::EIO
                || refused
            {
                tracing::error!(
                    operation = operation.name(),
                    ino = number.0,
                    kind = error.kind().name(),
                    %error,
                    "a request failed"
                );
            }
            Err(errno_of(&error))
        }
        Err(panic) => {
            let said = panic
                .downcast_ref::<&str>()
                .map(|said| (*said).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            tracing::error!(operation = operation.name(), ino = number.0, panic = said, "a request panicked");
            Err(Errno::EIO)
        }
    }
}

pub struct Adapter {
    pub volume: Arc<Volume>,
    pub origin: Origin,
    answering: Answering,
    lane: Lane,
    pub notifying: Arc<Notifying>,
    /// Set when the engine stops although the mount is in use: nothing reaches the volume any more.
    pub refusing: Arc<AtomicBool>,
    files: Handles<OpenFile>,
    directories: Handles<OpenDir>,
}

impl Adapter {
    pub fn new(
        volume: Arc<Volume>,
        origin: Origin,
        counters: Arc<Counters>,
        notifying: Arc<Notifying>,
    ) -> Adapter {
        let refusing = Arc::<AtomicBool>::default();
        Adapter {
            volume,
            origin,
            answering: Answering { counters, refusing: Arc::clone(&refusing) },
            lane: Lane::default(),
            notifying,
            refusing,
            files: Handles::default(),
            directories: Handles::default(),
        }
    }

    fn run<T>(
        &self,
        operation: Operation,
        number: INodeNo,
        body: impl FnOnce() -> Result<T>,
    ) -> std::result::Result<T, Errno> {
        self.answering.run(operation, number, body)
    }

    fn make(&self, request: &Request, parent: INodeNo, name: &OsStr, what: Making<'_>) -> Result<Attr> {
        let new = NewInode {
            kind: what.kind,
            mode: permissions(what.mode),
            uid: request.uid(),
            gid: request.gid(),
            rdev: what.rdev,
            target: what.target.to_vec(),
        };
        self.volume.make(self.origin, ino(parent), name.as_bytes(), new)
    }

    fn open_file(&self, request: &Request, number: INodeNo, flags: i32) -> Result<OpenFile> {
        let mode = open_mode(flags);
        if mode.truncate {
            self.drop_set_id(request, ino(number), || self.volume.getattr(ino(number)))?;
        }
        self.volume.open_file(self.origin, ino(number), mode)
    }

    /// Before a change by someone who may not keep set-id bits. The kernel's own copy of the mode is asked for
    /// again with the size, which changes with it.
    fn drop_set_id(&self, request: &Request, file: Ino, attr: impl FnOnce() -> Result<Attr>) -> Result<()> {
        if request.uid() == 0 {
            return Ok(());
        }
        let attr = attr()?;
        if attr.kind == FileKind::File
            && let Some(mode) = mode_without_set_id(attr.mode)
        {
            self.volume.setattr(self.origin, file, &SetAttr { mode: Some(mode), ..SetAttr::default() })?;
        }
        Ok(())
    }

    fn set_attributes(&self, request: &Request, file: Ino, change: Setting) -> Result<Attr> {
        let Setting { mut set, handle } = change;
        if set.size.is_some() {
            self.drop_set_id(request, file, || self.volume.getattr(file))?;
        }
        if (set.uid.is_some() || set.gid.is_some()) && set.mode.is_none() {
            // A new owner does not inherit set-id bits, whoever gives the file away.
            let attr = self.volume.getattr(file)?;
            if attr.kind == FileKind::File {
                set.mode = mode_without_set_id(attr.mode);
            }
        }
        // Through the handle, a file can be cut that was opened for writing and then made read-only.
        if let Some(handle) = handle
            && let Some(size) = set.size
        {
            set.size = None;
            let attr = self.files.get(handle.0)?.truncate(size)?;
            if set == SetAttr::default() {
                return Ok(attr);
            }
        }
        self.volume.setattr(self.origin, file, &set)
    }

    fn fill(&self, handle: FileHandle, mut cursor: u64, reply: &mut ReplyDirectory) -> Result<()> {
        let directory = self.directories.get(handle.0)?;
        loop {
            let items = directory.read(cursor, NAMES_CHUNK)?;
            for item in &items {
                let name = OsStr::from_bytes(&item.name);
                if reply.add(INodeNo(item.ino.0), item.cursor, file_type(item.kind), name) {
                    return Ok(());
                }
                cursor = item.cursor;
            }
            if items.len() < NAMES_CHUNK {
                return Ok(());
            }
        }
    }

    fn fill_plus(&self, handle: FileHandle, mut cursor: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        let directory = self.directories.get(handle.0)?;
        loop {
            let items = directory.read(cursor, NAMES_WITH_ATTRIBUTES_CHUNK)?;
            let inos: Vec<Ino> = items.iter().map(|item| item.ino).collect();
            let attrs = self.volume.getattrs(&inos)?;
            for (item, attr) in items.iter().zip(&attrs) {
                // Gone since the name was read: not in the directory any more either.
                if let Some(attr) = attr {
                    let name = OsStr::from_bytes(&item.name);
                    let attr = attributes(attr);
                    if reply.add(attr.ino, item.cursor, name, &FOREVER, &attr, GENERATION) {
                        return Ok(());
                    }
                }
                cursor = item.cursor;
            }
            if items.len() < NAMES_WITH_ATTRIBUTES_CHUNK {
                return Ok(());
            }
        }
    }
}

/// What is to be made, beside its name and owner.
struct Making<'a> {
    kind: FileKind,
    mode: u32,
    rdev: u32,
    target: &'a [u8],
}

struct Setting {
    set: SetAttr,
    handle: Option<FileHandle>,
}

fn write(file: &OpenFile, offset: u64, data: &[u8], appends: bool, notifying: &Notifying) -> Result<()> {
    if !appends {
        return file.write(offset, data);
    }
    if file.append(data)? != offset {
        // Another door appended first: what the kernel put into its page cache at its own idea of the end belongs
        // elsewhere.
        notifying.forget_own(file.ino());
    }
    Ok(())
}

fn open_mode(flags: i32) -> OpenMode {
    let access = OpenFlags(flags).acc_mode();
    let truncate = flags & O_TRUNC != 0;
    OpenMode {
        read: access != OpenAccMode::O_WRONLY,
        // open(O_RDONLY | O_TRUNC) cuts the file; the kernel has checked that the caller may.
        write: access != OpenAccMode::O_RDONLY || truncate,
        truncate,
    }
}

/// NOFLUSH for readers: their close then needs not even the kernel's own look at dirty pages.
fn open_flags(mode: OpenMode) -> FopenFlags {
    if mode.write {
        FopenFlags::FOPEN_KEEP_CACHE
    } else {
        FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH
    }
}

/// ACLs would be stored and not obeyed.
fn check_attribute_name(name: &OsStr) -> Result<()> {
    if name.as_bytes().starts_with(b"system.") {
        let name = name.to_string_lossy();
        return Err(Error::errno(errno::EOPNOTSUPP, format!("attributes like {name} are not supported")));
    }
    Ok(())
}

/// The protocol of getxattr and listxattr: 0 asks for the length; what does not fit is ERANGE.
fn answer_attribute(reply: ReplyXattr, bytes_max: u32, outcome: std::result::Result<Vec<u8>, Errno>) {
    match outcome {
        Err(errno) => reply.error(errno),
        Ok(value) if bytes_max == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > bytes_max as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
    }
}

fn answer_empty(reply: ReplyEmpty, outcome: std::result::Result<(), Errno>) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn answer_entry(reply: ReplyEntry, outcome: std::result::Result<Attr, Errno>) {
    match outcome {
        Ok(attr) => reply.entry(&FOREVER, &attributes(&attr), GENERATION),
        Err(errno) => reply.error(errno),
    }
}

fn answer_attr(reply: ReplyAttr, outcome: std::result::Result<Attr, Errno>) {
    match outcome {
        Ok(attr) => reply.attr(&FOREVER, &attributes(&attr)),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        for capability in CAPABILITIES {
            if config.add_capabilities(capability).is_err() {
                tracing::debug!(?capability, "this kernel's FUSE lacks it");
            }
        }
        // Each setter answers with the nearest value it takes.
        if let Err(nearest) = config.set_max_write(REQUEST_BYTES_MAX) {
            let _ = config.set_max_write(nearest);
        }
        if let Err(nearest) = config.set_max_readahead(REQUEST_BYTES_MAX) {
            let _ = config.set_max_readahead(nearest);
        }
        let _ = config.set_max_background(BACKGROUND_MAX);
        let _ = config.set_congestion_threshold(BACKGROUND_MAX / 4 * 3);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let outcome =
            self.run(Operation::Lookup, parent, || self.volume.lookup(ino(parent), name.as_bytes()));
        match outcome {
            Err(Errno::ENOENT) => reply.entry(&FOREVER, &no_entry(), Generation(0)),
            outcome => answer_entry(reply, outcome),
        }
    }

    fn forget(&self, _request: &Request, _ino: INodeNo, _lookups: u64) {
        self.answering.counters.count(Operation::Forget);
    }

    fn getattr(&self, _request: &Request, number: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        answer_attr(reply, self.run(Operation::Getattr, number, || self.volume.getattr(ino(number))));
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        // The volume sets it: a change of attributes happens when it happens.
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = SetAttr {
            mode: mode.map(permissions),
            uid,
            gid,
            size,
            atime: atime.map(time_or_now),
            mtime: mtime.map(time_or_now),
            ctime: None,
        };
        let outcome = self.run(Operation::Setattr, number, || {
            self.set_attributes(request, ino(number), Setting { set, handle })
        });
        answer_attr(reply, outcome);
    }

    fn readlink(&self, _request: &Request, number: INodeNo, reply: ReplyData) {
        match self.run(Operation::Readlink, number, || self.volume.readlink(ino(number))) {
            Ok(target) => reply.data(&target),
            Err(errno) => reply.error(errno),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let outcome = self.run(Operation::Mknod, parent, || {
            let what = Making { kind: kind_of_mode(mode)?, mode, rdev, target: &[] };
            self.make(request, parent, name, what)
        });
        answer_entry(reply, outcome);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let what = Making { kind: FileKind::Directory, mode, rdev: 0, target: &[] };
        answer_entry(reply, self.run(Operation::Mkdir, parent, || self.make(request, parent, name, what)));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = target.as_os_str().as_bytes();
        let what = Making { kind: FileKind::Symlink, mode: 0o777, rdev: 0, target };
        answer_entry(reply, self.run(Operation::Symlink, parent, || self.make(request, parent, name, what)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self
            .run(Operation::Unlink, parent, || self.volume.unlink(self.origin, ino(parent), name.as_bytes()));
        answer_empty(reply, outcome);
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self
            .run(Operation::Rmdir, parent, || self.volume.rmdir(self.origin, ino(parent), name.as_bytes()));
        answer_empty(reply, outcome);
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let outcome = self.run(Operation::Rename, parent, || {
            let from = (ino(parent), name.as_bytes());
            let to = (ino(new_parent), new_name.as_bytes());
            self.volume.rename(self.origin, from, to, rename_mode(flags)?)
        });
        answer_empty(reply, outcome);
    }

    fn link(
        &self,
        _request: &Request,
        number: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let outcome = self.run(Operation::Link, number, || {
            self.volume.link(self.origin, ino(number), ino(new_parent), new_name.as_bytes())
        });
        answer_entry(reply, outcome);
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.run(Operation::Open, number, || self.open_file(request, number, flags.0)) {
            Ok(file) => {
                let flags = open_flags(file.mode());
                reply.opened(FileHandle(self.files.add(file)), flags);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let outcome = self.run(Operation::Create, parent, || {
            let new = NewInode {
                kind: FileKind::File,
                mode: permissions(mode),
                uid: request.uid(),
                gid: request.gid(),
                rdev: 0,
                target: Vec::new(),
            };
            let open = OpenMode { truncate: false, ..open_mode(flags) };
            match self.volume.create_file(self.origin, ino(parent), name.as_bytes(), new, open) {
                // Made through another door since the kernel looked: without O_EXCL that is as good.
                Err(error) if error.raw_errno() == errno::EEXIST && flags & O_EXCL == 0 => {
                    let attr = self.volume.lookup(ino(parent), name.as_bytes())?;
                    let file = self.open_file(request, INodeNo(attr.ino.0), flags)?;
                    Ok((file.attr()?, file))
                }
                outcome => outcome,
            }
        });
        match outcome {
            Ok((attr, file)) => {
                let flags = open_flags(file.mode());
                let handle = FileHandle(self.files.add(file));
                reply.created(&FOREVER, &attributes(&attr), GENERATION, handle, flags);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let length = length as usize;
        let outcome = self.run(Operation::Read, number, || {
            let file = self.files.get(handle.0)?;
            READ_BUFFER.with_borrow_mut(|buffer| {
                if buffer.len() < length {
                    buffer.resize(length, 0);
                }
                match file.read_at_hand(offset, &mut buffer[..length]) {
                    Err(error) if is_not_here(&error) => Ok(None),
                    outcome => outcome.map(Some),
                }
            })
        });
        match outcome {
            Ok(Some(length)) => READ_BUFFER.with_borrow(|buffer| reply.data(&buffer[..length])),
            Ok(None) => match self.files.get(handle.0) {
                Ok(file) => self.lane.run(move || {
                    let mut buffer = vec![0; length];
                    match caught(Operation::Read, number, || file.read(offset, &mut buffer)) {
                        Ok(length) => reply.data(&buffer[..length]),
                        Err(errno) => reply.error(errno),
                    }
                }),
                Err(error) => reply.error(errno_of(&error)),
            },
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        request: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let outcome = self.run(Operation::Write, number, || {
            let file = self.files.get(handle.0)?;
            if write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
                self.drop_set_id(request, file.ino(), || file.attr())?;
            }
            // Pages written through a mapping have their place, and their handle is any that can write.
            let appends = flags.0 & O_APPEND != 0 && !write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
            if self.volume.writes_may_wait(data.len() as u64) {
                return Ok(Some((file, appends)));
            }
            write(&file, offset, data, appends, &self.notifying).map(|()| None)
        });
        let bytes = data.len() as u32;
        match outcome {
            Ok(None) => reply.written(bytes),
            Ok(Some((file, appends))) => {
                let (data, notifying) = (data.to_vec(), Arc::clone(&self.notifying));
                self.lane.run(move || {
                    let body = || write(&file, offset, &data, appends, &notifying);
                    match caught(Operation::Write, number, body) {
                        Ok(()) => reply.written(bytes),
                        Err(errno) => reply.error(errno),
                    }
                });
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _number: INodeNo,
        _handle: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        answer_empty(reply, self.run(Operation::Release, number, || self.files.remove(handle.0).map(drop)));
    }

    fn fsync(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        match self.run(Operation::Fsync, number, || self.files.get(handle.0)) {
            // It may wait for the object tier, and is answered from the thread that hears from it.
            Ok(file) => file.start_fsync(move |outcome| {
                answer_empty(reply, caught(Operation::Fsync, number, || outcome));
            }),
            Err(errno) => reply.error(errno),
        }
    }

    fn opendir(&self, _request: &Request, number: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.run(Operation::Opendir, number, || self.volume.open_dir(ino(number))) {
            Ok(directory) => {
                reply.opened(FileHandle(self.directories.add(directory)), FopenFlags::empty());
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        match self.run(Operation::Readdir, number, || self.fill(handle, offset, &mut reply)) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        match self.run(Operation::Readdirplus, number, || self.fill_plus(handle, offset, &mut reply)) {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        number: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let outcome = self.run(Operation::Releasedir, number, || self.directories.remove(handle.0).map(drop));
        answer_empty(reply, outcome);
    }

    /// syncfs(2) never reaches a FUSE file system, so an fsync of the mount's root stands for it.
    fn fsyncdir(
        &self,
        _request: &Request,
        number: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        if ino(number) != Ino::ROOT {
            return answer_empty(
                reply,
                self.run(Operation::Fsyncdir, number, || self.volume.sync_metadata()),
            );
        }
        match self.run(Operation::Fsyncdir, number, || Ok(())) {
            Ok(()) => self.volume.start_sync(move |outcome| {
                answer_empty(reply, caught(Operation::Fsyncdir, number, || outcome));
            }),
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _request: &Request, number: INodeNo, reply: ReplyStatfs) {
        match self.run(Operation::Statfs, number, || self.volume.statfs()) {
            Ok(space) => reply.statfs(
                space.bytes_total / BLOCK_BYTES,
                space.bytes_free / BLOCK_BYTES,
                space.bytes_available / BLOCK_BYTES,
                space.inodes_used.saturating_add(INODES_FREE),
                INODES_FREE,
                BLOCK_BYTES as u32,
                NAME_BYTES_MAX,
                BLOCK_BYTES as u32,
            ),
            Err(errno) => reply.error(errno),
        }
    }

    fn setxattr(
        &self,
        _request: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let outcome = self.run(Operation::Setxattr, number, || {
            check_attribute_name(name)?;
            let (create, replace) = (flags & XATTR_CREATE != 0, flags & XATTR_REPLACE != 0);
            self.volume.setxattr(self.origin, ino(number), name.as_bytes(), value, create, replace)
        });
        answer_empty(reply, outcome);
    }

    fn getxattr(&self, _request: &Request, number: INodeNo, name: &OsStr, bytes_max: u32, reply: ReplyXattr) {
        let outcome = self.run(Operation::Getxattr, number, || {
            check_attribute_name(name)?;
            self.volume.getxattr(ino(number), name.as_bytes())
        });
        answer_attribute(reply, bytes_max, outcome);
    }

    fn listxattr(&self, _request: &Request, number: INodeNo, bytes_max: u32, reply: ReplyXattr) {
        let outcome = self.run(Operation::Listxattr, number, || {
            let mut list = Vec::new();
            for name in self.volume.listxattr(ino(number))? {
                list.extend_from_slice(&name);
                list.push(0);
            }
            Ok(list)
        });
        answer_attribute(reply, bytes_max, outcome);
    }

    fn removexattr(&self, _request: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let outcome = self.run(Operation::Removexattr, number, || {
            check_attribute_name(name)?;
            self.volume.removexattr(self.origin, ino(number), name.as_bytes())
        });
        answer_empty(reply, outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_answered_also_when_its_handler_panics() {
        let folder = tempfile::tempdir().unwrap();
        Volume::create(folder.path()).unwrap();
        let options = headrace_volume::VolumeOptions { memory_bytes_max: 64 << 20, open_files_max: 16 };
        let volume = Volume::open(folder.path(), options).unwrap();
        let origin = volume.new_origin();
        let adapter = Adapter::new(volume, origin, Arc::default(), Arc::default());
        let root = INodeNo(1);
        assert_eq!(
            adapter.run(Operation::Read, root, || -> Result<()> { panic!("by a test") }),
            Err(Errno::EIO)
        );
        assert_eq!(adapter.run(Operation::Read, root, || Ok(7)), Ok(7));
        let missing = adapter.run(Operation::Getattr, root, || adapter.volume.getattr(Ino(1 << 40)));
        assert_eq!(missing.map(drop), Err(Errno::ENOENT));
        assert_eq!(adapter.answering.counters.all(), 3);
        adapter.refusing.store(true, Ordering::Release);
        assert_eq!(adapter.run(Operation::Read, root, || Ok(7)), Err(Errno::ENOTCONN));
        adapter.volume.close().unwrap();
    }

    #[test]
    fn open_modes_follow_the_flags() {
        assert_eq!(open_mode(0), OpenMode::READ);
        assert_eq!(open_mode(1), OpenMode { read: false, write: true, truncate: false });
        assert_eq!(open_mode(2), OpenMode::WRITE);
        assert_eq!(open_mode(2 | O_APPEND), OpenMode::WRITE);
        assert_eq!(open_mode(1 | O_TRUNC), OpenMode { read: false, write: true, truncate: true });
        assert_eq!(open_mode(O_TRUNC), OpenMode { read: true, write: true, truncate: true });
    }

    #[test]
    fn only_writers_are_flushed_and_everyone_keeps_the_cache() {
        assert_eq!(open_flags(OpenMode::READ), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
        assert_eq!(open_flags(OpenMode::WRITE), FopenFlags::FOPEN_KEEP_CACHE);
    }

    #[test]
    fn acls_are_refused_and_other_attributes_are_not() {
        let refused = check_attribute_name(OsStr::new("system.posix_acl_access")).unwrap_err();
        assert_eq!(refused.raw_errno(), errno::EOPNOTSUPP);
        for name in ["user.a", "security.capability", "trusted.x"] {
            check_attribute_name(OsStr::new(name)).unwrap();
        }
    }

    #[test]
    fn what_would_break_the_promises_is_not_asked_of_the_kernel() {
        for forbidden in [
            InitFlags::FUSE_WRITEBACK_CACHE,
            InitFlags::FUSE_POSIX_LOCKS,
            InitFlags::FUSE_FLOCK_LOCKS,
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_NO_OPEN_SUPPORT,
        ] {
            assert!(!CAPABILITIES.contains(&forbidden));
        }
    }
}
