//! FUSE's words for what the volume says: attributes, times, errors, modes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{Errno, FileAttr, FileType, INodeNo, RenameFlags, TimeOrNow};
use headrace_base::error::errno;
use headrace_base::time::{self, Timestamp};
use headrace_base::{Error, Ino, Result};
use headrace_volume::{Attr, FileKind, RenameMode};

const S_IFMT: u32 = 0o170_000;
const S_ISUID: u16 = 0o4000;
const S_ISGID: u16 = 0o2000;
const S_IXGRP: u16 = 0o0010;

/// What programs take as the best size of one write (`st_blksize`): each write is a request here, so more than
/// the page of a local disk; less than the 1 MiB of a request, because readers allocate this much per open file.
const BLOCK_BYTES: u32 = 64 * 1024;

/// EAGAIN is for pipes: of a file, programs take it as the end (Python's `read` gives what came before it, or None).
/// Whoever reads bytes that cannot be had now must hear of an error.
pub fn errno_of(error: &Error) -> Errno {
    match error.raw_errno() {
        errno::EAGAIN => Errno::EIO,
        number => Errno::from_i32(number),
    }
}

pub fn ino(number: INodeNo) -> Ino {
    Ino(number.0)
}

pub fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// What mknod(2) is asked to make.
pub fn kind_of_mode(mode: u32) -> Result<FileKind> {
    Ok(match mode & S_IFMT {
        0 | 0o100_000 => FileKind::File,
        0o010_000 => FileKind::Fifo,
        0o140_000 => FileKind::Socket,
        0o020_000 => FileKind::CharDevice,
        0o060_000 => FileKind::BlockDevice,
        other => return Err(Error::invalid(format!("mknod cannot make a file of type {other:#o}"))),
    })
}

pub fn permissions(mode: u32) -> u16 {
    (mode & 0o7777) as u16
}

/// The mode once someone who may not keep set-id bits has changed the file; None if it has none to lose. Set-gid
/// without group execute means mandatory locking, not a group, and stays (as in the kernel).
pub fn mode_without_set_id(mode: u16) -> Option<u16> {
    let mut kept = mode & !S_ISUID;
    if mode & S_IXGRP != 0 {
        kept &= !S_ISGID;
    }
    (kept != mode).then_some(kept)
}

pub fn attributes(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size,
        blocks: attr.blocks,
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: system_time(attr.btime),
        kind: file_type(attr.kind),
        perm: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: BLOCK_BYTES,
        flags: 0,
    }
}

/// Inode 0 says "no such name, and you may remember that".
pub fn no_entry() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

fn system_time(timestamp: Timestamp) -> SystemTime {
    let distance = Duration::from_nanos(timestamp.0.unsigned_abs());
    if timestamp.0 >= 0 { UNIX_EPOCH + distance } else { UNIX_EPOCH - distance }
}

/// Times that do not fit (before 1677, after 2262) become the nearest that do.
pub fn timestamp(time: SystemTime) -> Timestamp {
    const SECOND: i128 = 1_000_000_000;
    let nanos = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => after.as_secs() as i128 * SECOND + i128::from(after.subsec_nanos()),
        // The kernel counts nanoseconds upwards from the second before; fuser 0.18 takes them off instead
        // (-1.2 s arrives as -2.8 s). Here they are put back.
        Err(before) => {
            let before = before.duration();
            i128::from(before.subsec_nanos()) - before.as_secs() as i128 * SECOND
        }
    };
    Timestamp(nanos.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64)
}

pub fn time_or_now(time: TimeOrNow) -> Timestamp {
    match time {
        TimeOrNow::SpecificTime(time) => timestamp(time),
        TimeOrNow::Now => time::wall_now(),
    }
}

pub fn rename_mode(flags: RenameFlags) -> Result<RenameMode> {
    if flags.is_empty() {
        Ok(RenameMode::Replace)
    } else if flags == RenameFlags::RENAME_NOREPLACE {
        Ok(RenameMode::NoReplace)
    } else if flags == RenameFlags::RENAME_EXCHANGE {
        Ok(RenameMode::Exchange)
    } else {
        Err(Error::errno(errno::EINVAL, format!("rename does not know the flags {:#x}", flags.bits())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As fuser 0.18 decodes what the kernel sends.
    fn decoded(seconds: i64, nanos: u32) -> SystemTime {
        if seconds >= 0 {
            UNIX_EPOCH + Duration::new(seconds as u64, nanos)
        } else {
            UNIX_EPOCH - Duration::new(seconds.unsigned_abs(), nanos)
        }
    }

    #[test]
    fn times_before_1970_and_beyond_the_range_survive() {
        assert_eq!(timestamp(decoded(0, 5)).0, 5);
        assert_eq!(timestamp(decoded(-1, 500_000_000)).0, -500_000_000);
        assert_eq!(timestamp(decoded(-2, 800_000_000)).0, -1_200_000_000);
        assert_eq!(timestamp(decoded(-2, 0)).0, -2_000_000_000);
        assert_eq!(timestamp(decoded(99_999_999_999, 0)).0, i64::MAX);
        assert_eq!(timestamp(decoded(-99_999_999_999, 0)).0, i64::MIN);
        for nanos in [0, 1, 1_760_000_000_123_456_789, -1, -1_500_000_000] {
            let time = system_time(Timestamp(nanos));
            let expected = match time.duration_since(UNIX_EPOCH) {
                Ok(after) => after.as_nanos() as i64,
                Err(before) => -(before.duration().as_nanos() as i64),
            };
            assert_eq!(expected, nanos);
        }
        system_time(Timestamp(i64::MIN));
    }

    #[test]
    fn set_id_bits_go_as_the_kernel_drops_them() {
        assert_eq!(mode_without_set_id(0o755), None);
        assert_eq!(mode_without_set_id(0o4755), Some(0o755));
        assert_eq!(mode_without_set_id(0o6755), Some(0o755));
        assert_eq!(mode_without_set_id(0o2644), None);
        assert_eq!(mode_without_set_id(0o6644), Some(0o2644));
    }

    #[test]
    fn rename_flags_that_are_not_known_are_refused() {
        assert_eq!(rename_mode(RenameFlags::empty()).unwrap(), RenameMode::Replace);
        assert_eq!(rename_mode(RenameFlags::RENAME_NOREPLACE).unwrap(), RenameMode::NoReplace);
        assert_eq!(rename_mode(RenameFlags::RENAME_EXCHANGE).unwrap(), RenameMode::Exchange);
        let both = RenameFlags::RENAME_NOREPLACE | RenameFlags::RENAME_EXCHANGE;
        for flags in [both, RenameFlags::RENAME_WHITEOUT, RenameFlags::from_bits_retain(1 << 9)] {
            assert_eq!(rename_mode(flags).unwrap_err().raw_errno(), errno::EINVAL);
        }
    }

    #[test]
    fn errors_keep_their_number_and_bad_ones_become_eio() {
        assert_eq!(errno_of(&Error::errno(errno::ENOTEMPTY, "full of names")).code(), errno::ENOTEMPTY);
        assert_eq!(errno_of(&Error::corrupt("flipped")).code(), errno::EIO);
        assert_eq!(errno_of(&Error::errno(0, "nothing")).code(), errno::EIO);
    }

    #[test]
    fn mknod_modes_are_told_apart() {
        assert_eq!(kind_of_mode(0o644).unwrap(), FileKind::File);
        assert_eq!(kind_of_mode(0o100_644).unwrap(), FileKind::File);
        assert_eq!(kind_of_mode(0o010_600).unwrap(), FileKind::Fifo);
        assert_eq!(kind_of_mode(0o140_600).unwrap(), FileKind::Socket);
        assert_eq!(kind_of_mode(0o020_600).unwrap(), FileKind::CharDevice);
        assert_eq!(kind_of_mode(0o060_600).unwrap(), FileKind::BlockDevice);
        assert_eq!(kind_of_mode(0o040_755).unwrap_err().raw_errno(), errno::EINVAL);
        assert_eq!(permissions(0o104_755), 0o4755);
    }
}
