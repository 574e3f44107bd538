//! One file of a segment as its writer holds it, and the system calls on it.
//!
//! Calls are repeated until all bytes are done or an error says why not (signals and partial writes are
//! normal). Two rules about errors: a full disk says so with the path and what is free; and after a failed
//! fdatasync the file is given up, since the kernel has marked the lost pages clean and the next fdatasync
//! would report success.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use headrace_base::error::errno;
use headrace_base::{Error, Result};

/// Only the engine reads segments: a pack holds the bytes of many users.
const FILE_MODE: u32 = 0o600;

#[derive(Debug)]
pub(crate) struct DiskFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    entry_durable: AtomicBool,
    given_up: AtomicBool,
}

impl DiskFile {
    /// Makes a new file; `Conflict` if it is there already. Its folder is made when missing.
    pub(crate) fn create(path: PathBuf) -> Result<DiskFile> {
        let create =
            || OpenOptions::new().read(true).write(true).create_new(true).mode(FILE_MODE).open(&path);
        let file = create().or_else(|error| match (error.kind(), path.parent()) {
            (io::ErrorKind::NotFound, Some(folder)) => {
                make_folder(folder)?;
                create()
            }
            _ => Err(error),
        });
        let file = file.map_err(|cause| io_error("create", &path, cause))?;
        Ok(DiskFile::new(file, path))
    }

    /// Opens a file that recovery is about to mend.
    pub(crate) fn open(path: PathBuf) -> io::Result<DiskFile> {
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        Ok(DiskFile::new(file, path))
    }

    fn new(file: File, path: PathBuf) -> DiskFile {
        DiskFile { file, path, entry_durable: AtomicBool::new(false), given_up: AtomicBool::new(false) }
    }

    /// Another file's sync has made the folder durable since this one was made.
    pub(crate) fn entry_is_durable(&self) {
        self.entry_durable.store(true, Ordering::Release);
    }

    pub(crate) fn bytes(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|cause| io_error("look at", &self.path, cause))?.len())
    }

    /// Writes all of `bytes` at `offset`, or fails with part of them written.
    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.write_vectored(&mut [IoSlice::new(bytes)], offset)
    }

    pub(crate) fn write_vectored(&self, mut slices: &mut [IoSlice<'_>], mut offset: u64) -> Result<()> {
        self.check_usable()?;
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match rustix::io::pwritev(&self.file, slices, offset) {
                Ok(0) => return Err(io_error("write", &self.path, io::ErrorKind::WriteZero.into())),
                Ok(written) => {
                    IoSlice::advance_slices(&mut slices, written);
                    offset += written as u64;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(cause) => return Err(io_error("write", &self.path, cause.into())),
            }
        }
        Ok(())
    }

    pub(crate) fn truncate(&self, bytes: u64) -> Result<()> {
        self.file.set_len(bytes).map_err(|cause| io_error("truncate", &self.path, cause))
    }

    /// What was written is durable when it returns, and so is (from the first time on) the file's name.
    pub(crate) fn sync(&self) -> Result<()> {
        self.check_usable()?;
        if let Err(cause) = self.file.sync_data() {
            self.given_up.store(true, Ordering::Release);
            return Err(io_error("sync", &self.path, cause));
        }
        if !self.entry_durable.load(Ordering::Acquire) {
            // The folder's own name may be new too.
            for folder in self.path.ancestors().skip(1).take(2) {
                sync_folder(folder)?;
            }
            self.entry_durable.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn check_usable(&self) -> Result<()> {
        if self.given_up.load(Ordering::Acquire) {
            return Err(Error::errno(
                errno::EIO,
                format!(
                    "{}: an earlier sync failed, what it should have made durable may be lost: write into a new \
                     segment, and check the disk",
                    self.path.display()
                ),
            ));
        }
        Ok(())
    }
}

/// Fills all of `slices` from `offset`; the count is less only if the file ends before.
pub(crate) fn read_vectored(
    file: &File,
    mut slices: &mut [IoSliceMut<'_>],
    mut offset: u64,
) -> io::Result<usize> {
    let mut done = 0;
    IoSliceMut::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match rustix::io::preadv(file, slices, offset) {
            Ok(0) => break,
            Ok(read) => {
                IoSliceMut::advance_slices(&mut slices, read);
                offset += read as u64;
                done += read;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(cause) => return Err(cause.into()),
        }
    }
    Ok(done)
}

/// Fills `out` from `offset`; the count is less only if the file ends before.
pub(crate) fn read(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    read_vectored(file, &mut [IoSliceMut::new(out)], offset)
}

/// Makes one folder, for this user only. It may be there already.
pub(crate) fn make_folder(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        other => other,
    }
}

pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    // An empty parent is how a relative path names the current folder.
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder)
        .and_then(|opened| opened.sync_all())
        .map_err(|cause| io_error("sync folder", folder, cause))
}

pub(crate) fn io_error(doing: &str, path: &Path, cause: io::Error) -> Error {
    match cause.raw_os_error() {
        Some(code @ (errno::ENOSPC | errno::EDQUOT)) => {
            let free = match rustix::fs::statvfs(path.parent().unwrap_or(path)) {
                Ok(disk) => format!("{} bytes free", disk.f_bavail * disk.f_frsize),
                Err(_) => "free bytes unknown".to_owned(),
            };
            let what = if code == errno::ENOSPC { "the disk is full" } else { "the disk quota is used up" };
            let message =
                format!("{doing} {}: {what} ({free}): free some space and try again", path.display());
            Error::errno(code, message).with_cause(cause)
        }
        _ => Error::io(format_args!("{doing} {}", path.display()), cause),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failed_sync_the_file_takes_and_promises_nothing_more() {
        // A device without fdatasync: the nearest thing to a disk that fails it.
        let disk = DiskFile::open(PathBuf::from("/dev/null")).unwrap();
        disk.write(b"accepted", 0).unwrap();
        let first = disk.sync().unwrap_err();
        assert!(first.message().contains("sync /dev/null"), "{first}");
        for later in [disk.sync().unwrap_err(), disk.write(b"x", 8).unwrap_err()] {
            assert_eq!(later.raw_errno(), errno::EIO);
            assert!(later.message().contains("an earlier sync failed"), "{later}");
        }
    }

    #[test]
    fn a_read_says_where_the_file_ends_and_empty_slices_are_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let disk = DiskFile::create(folder.path().join("new/file")).unwrap();
        let mut slices = [b"".as_slice(), b"ab", b"", b"cde", b""].map(IoSlice::new);
        disk.write_vectored(&mut slices, 10).unwrap();
        disk.sync().unwrap();
        let (mut head, mut tail) = ([1; 2], [1; 10]);
        let mut slices = [&mut [][..], &mut head, &mut [], &mut tail].map(IoSliceMut::new);
        assert_eq!(read_vectored(&disk.file, &mut slices, 9).unwrap(), 6);
        assert_eq!((head, &tail[..5]), ([0, b'a'], b"bcde\x01".as_slice()));
    }
}
