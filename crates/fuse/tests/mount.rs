//! Promises of the mount, kept through the kernel: a real volume, a real mount, real system calls.
//!
//! Without FUSE these tests say why and pass; under CI=true that is a failure.
#![allow(clippy::unwrap_used, reason = "clippy takes helpers of tests for shipped code")]

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::time::{monotonic_now, sleep};
use headrace_base::{Ino, Kind, thread};
use headrace_fuse::{Mount, MountOptions, mount};
use headrace_volume::{FileKind, NewInode, OpenMode, Origin, Volume, VolumeOptions};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};

struct Setup {
    mount: Mount,
    volume: Arc<Volume>,
    folder: tempfile::TempDir,
}

impl Setup {
    fn at(&self, name: &str) -> PathBuf {
        self.mount.mountpoint().join(name)
    }

    /// Ends the engine; the volume can be opened again.
    fn end(self) -> tempfile::TempDir {
        self.mount.unmount().unwrap();
        self.volume.close().unwrap();
        self.folder
    }
}

fn options() -> MountOptions {
    MountOptions { read_only: false, allow_other: false, fs_name: "headrace:test".to_owned(), threads: 0 }
}

fn open_volume(folder: &Path) -> Arc<Volume> {
    Volume::open(folder, VolumeOptions { memory_bytes_max: 64 << 20, open_files_max: 64 }).unwrap()
}

fn setup_with(options: MountOptions) -> Option<Setup> {
    let folder = tempfile::tempdir().unwrap();
    let (at, source) = (folder.path().join("mnt"), folder.path().join("volume"));
    fs::create_dir(&at).unwrap();
    Volume::create(&source).unwrap();
    let volume = open_volume(&source);
    match mount(Arc::clone(&volume), &at, options) {
        Ok(mount) => Some(Setup { mount, volume, folder }),
        Err(error) if matches!(error.kind(), Kind::Unavailable | Kind::Permission) => {
            assert!(std::env::var_os("CI").is_none(), "FUSE must work under CI: {error}");
            eprintln!("skipped, FUSE cannot be used here: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

macro_rules! setup {
    () => {
        match setup_with(options()) {
            Some(setup) => setup,
            None => return,
        }
    };
}

fn code(error: std::io::Error) -> i32 {
    error.raw_os_error().unwrap()
}

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

#[test]
fn files_hold_what_was_written_to_them() {
    let setup = setup!();
    for bytes in [0, 1, 2047, 2048, 4096, 10 * 1024, 100_000, 3 << 20] {
        let path = setup.at(&format!("file-{bytes}"));
        let content = pattern(bytes, bytes as u64);
        fs::write(&path, &content).unwrap();
        assert_eq!(fs::read(&path).unwrap(), content);
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.nlink()), (bytes as u64, 1));
    }
    let path = setup.at("sparse");
    let file = File::create(&path).unwrap();
    file.write_all_at(b"end", 5_000_000).unwrap();
    let content = fs::read(&path).unwrap();
    assert_eq!(content.len(), 5_000_003);
    assert!(content[..5_000_000].iter().all(|byte| *byte == 0) && content.ends_with(b"end"));
    file.set_len(10).unwrap();
    file.set_len(20).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [0; 20]);
    // Without a handle: truncate(2).
    let script = "import os, sys; os.truncate(sys.argv[1], 7)";
    assert!(Command::new("python3").args(["-c", script]).arg(&path).status().unwrap().success());
    assert_eq!(fs::metadata(&path).unwrap().len(), 7);
    // O_TRUNC, and overwriting in place.
    fs::write(&path, b"hello world").unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().write_all_at(b"W", 6).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"hello World");
    assert!(setup.mount.requests() > 0);
}

#[test]
fn what_was_synced_is_there_after_the_volume_was_opened_again() {
    let setup = setup!();
    let mut file = File::create(setup.at("synced")).unwrap();
    file.write_all(&pattern(30_000, 9)).unwrap();
    file.sync_all().unwrap();
    File::open(setup.mount.mountpoint()).unwrap().sync_all().unwrap();
    drop(file);
    let folder = setup.end();
    let volume = open_volume(&folder.path().join("volume"));
    let again = mount(Arc::clone(&volume), &folder.path().join("mnt"), options()).unwrap();
    assert_eq!(fs::read(again.mountpoint().join("synced")).unwrap(), pattern(30_000, 9));
    again.unmount().unwrap();
    volume.close().unwrap();
}

#[test]
fn names_are_made_moved_and_removed_as_posix_says() {
    let setup = setup!();
    let directory = setup.at("directory");
    fs::create_dir(&directory).unwrap();
    assert_eq!(code(fs::create_dir(&directory).unwrap_err()), errno::EEXIST);
    fs::write(directory.join("a"), b"a").unwrap();
    assert_eq!(code(fs::remove_dir(&directory).unwrap_err()), errno::ENOTEMPTY);
    assert_eq!(code(fs::metadata(setup.at("missing")).unwrap_err()), errno::ENOENT);
    // The absent name is remembered by the kernel; making it must be seen.
    fs::write(setup.at("missing"), b"now").unwrap();
    assert_eq!(fs::read(setup.at("missing")).unwrap(), b"now");

    fs::rename(directory.join("a"), setup.at("b")).unwrap();
    assert_eq!(fs::read(setup.at("b")).unwrap(), b"a");
    let cwd = rustix::fs::CWD;
    let (b, missing, new) = (setup.at("b"), setup.at("missing"), setup.at("new"));
    let refused = rustix::fs::renameat_with(cwd, &b, cwd, &missing, RenameFlags::NOREPLACE).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::EXIST);
    rustix::fs::renameat_with(cwd, &b, cwd, &missing, RenameFlags::EXCHANGE).unwrap();
    assert_eq!((fs::read(&b).unwrap(), fs::read(&missing).unwrap()), (b"now".to_vec(), b"a".to_vec()));
    rustix::fs::renameat_with(cwd, &b, cwd, &new, RenameFlags::NOREPLACE).unwrap();
    assert_eq!(fs::read(&new).unwrap(), b"now");
    assert_eq!(
        rustix::fs::renameat_with(cwd, &new, cwd, &b, RenameFlags::WHITEOUT).unwrap_err(),
        rustix::io::Errno::INVAL
    );
    assert_eq!(code(fs::rename(&directory, directory.join("inside")).unwrap_err()), errno::EINVAL);

    fs::hard_link(&new, directory.join("second")).unwrap();
    assert_eq!(fs::metadata(&new).unwrap().nlink(), 2);
    fs::remove_file(&new).unwrap();
    assert_eq!(fs::metadata(directory.join("second")).unwrap().nlink(), 1);
    symlink("second", directory.join("link")).unwrap();
    assert_eq!(fs::read(directory.join("link")).unwrap(), b"now");
    assert_eq!(fs::read_link(directory.join("link")).unwrap(), Path::new("second"));
    assert_eq!(fs::metadata(setup.mount.mountpoint()).unwrap().nlink(), 3);

    let odd = directory.join(std::ffi::OsStr::from_bytes(b"caf\xe9\n -\t"));
    fs::write(&odd, b"odd").unwrap();
    let long = "n".repeat(255);
    fs::write(directory.join(&long), b"long").unwrap();
    assert_eq!(code(fs::write(directory.join("n".repeat(256)), b"").unwrap_err()), errno::ENAMETOOLONG);
    let mut names: Vec<_> =
        fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [odd.file_name().unwrap(), "link".as_ref(), long.as_ref(), "second".as_ref()]);
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!(fs::read_dir(setup.mount.mountpoint()).unwrap().count(), 1);
}

#[test]
fn attributes_are_kept_to_the_nanosecond_also_before_1970() {
    let setup = setup!();
    let path = setup.at("file");
    fs::write(&path, b"x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode(), 0o100_640);
    for (seconds, nanos) in [(1_760_000_000, 123_456_789), (0, 1), (-1, 500_000_000), (-5, 0)] {
        let times = Timestamps {
            last_access: Timespec { tv_sec: seconds, tv_nsec: nanos },
            last_modification: Timespec { tv_sec: seconds - 1, tv_nsec: nanos },
        };
        rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty()).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.atime(), metadata.atime_nsec()), (seconds, nanos));
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (seconds - 1, nanos));
    }
    // "Now", through a handle; and a write moves the time.
    let file = OpenOptions::new().append(true).open(&path).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mtime(), 0);
    (&file).write_all(b"y").unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert!(metadata.mtime() > 1_600_000_000);
    assert_eq!(metadata.len(), 2);

    rustix::fs::mknodat(
        rustix::fs::CWD,
        setup.at("pipe"),
        rustix::fs::FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    assert!(fs::metadata(setup.at("pipe")).unwrap().file_type().is_fifo());
    let space = rustix::fs::statvfs(&path).unwrap();
    assert!(space.f_blocks > 0 && space.f_bavail > 0 && space.f_favail > 0);
    assert_eq!(space.f_namemax, 255);
}

#[test]
fn set_id_bits_and_groups_follow_the_rules() {
    let setup = setup!();
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can give files away");
        return;
    }
    let path = setup.at("tool");
    fs::write(&path, b"x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    std::os::unix::fs::chown(&path, Some(1234), Some(1234)).unwrap();
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode()), (1234, 1234, 0o100_755));
    // Root may change a file and keep its bits.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"y").unwrap();
    assert_eq!(fs::metadata(&path).unwrap().mode(), 0o104_755);

    let shared = setup.at("shared");
    fs::create_dir(&shared).unwrap();
    std::os::unix::fs::chown(&shared, None, Some(4321)).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o2775)).unwrap();
    fs::write(shared.join("file"), b"").unwrap();
    fs::create_dir(shared.join("below")).unwrap();
    assert_eq!(fs::metadata(shared.join("file")).unwrap().gid(), 4321);
    let below = fs::metadata(shared.join("below")).unwrap();
    assert_eq!((below.gid(), below.mode() & 0o2000), (4321, 0o2000));
}

#[test]
fn appends_of_many_threads_all_arrive() {
    let setup = setup!();
    let path = setup.at("log");
    const LINES: usize = 200;
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let path = path.clone();
            thread::spawn("appender", move || {
                let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
                for line in 0..LINES {
                    file.write_all(format!("{writer}:{line:04}\n").as_bytes()).unwrap();
                }
            })
            .unwrap()
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
    let text = fs::read_to_string(&path).unwrap();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    let mut expected: Vec<_> =
        (0..4).flat_map(|writer| (0..LINES).map(move |line| format!("{writer}:{line:04}"))).collect();
    expected.sort_unstable();
    assert_eq!(lines, expected);
}

#[test]
fn a_file_without_a_name_lives_until_it_is_closed() {
    let setup = setup!();
    let path = setup.at("temporary");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(&pattern(50_000, 3)).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(code(fs::metadata(&path).unwrap_err()), errno::ENOENT);
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    file.write_all(b"more").unwrap();
    file.sync_all().unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let mut content = Vec::new();
    file.read_to_end(&mut content).unwrap();
    assert_eq!(content, [pattern(50_000, 3), b"more".to_vec()].concat());
    // And a file that is renamed over.
    fs::write(setup.at("new"), b"new").unwrap();
    fs::write(&path, b"old").unwrap();
    let old = File::open(&path).unwrap();
    fs::rename(setup.at("new"), &path).unwrap();
    let mut text = String::new();
    (&old).read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), fs::read(&path).unwrap()), ("old", b"new".to_vec()));
}

#[test]
fn mappings_and_direct_io_see_the_same_bytes() {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
    let setup = setup!();
    let path = setup.at("mapped");
    let content = pattern(3 * 4096 + 100, 5);
    fs::write(&path, &content).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let length = content.len();
    // SAFETY: a fresh mapping of a file that only this test uses; unmapped below.
    let map = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &file,
            0,
        )
    }
    .unwrap();
    // SAFETY: the mapping is `length` bytes, and nothing else touches it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(map.cast::<u8>(), length) };
    assert_eq!(bytes, content);
    bytes[4000..4200].fill(b'm');
    // SAFETY: within the mapping.
    unsafe { rustix::mm::msync(map, length, MsyncFlags::SYNC) }.unwrap();
    // SAFETY: `bytes` is not used after this.
    unsafe { rustix::mm::munmap(map, length) }.unwrap();
    let mut expected = content;
    expected[4000..4200].fill(b'm');
    assert_eq!(fs::read(&path).unwrap(), expected);

    let direct = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits() as i32)
        .open(&path)
        .unwrap();
    let mut out = vec![0; length];
    direct.read_exact_at(&mut out, 0).unwrap();
    assert_eq!(out, expected);
    let block = vec![b'd'; 4096];
    direct.write_all_at(&block, 4096).unwrap();
    expected[4096..8192].fill(b'd');
    assert_eq!(fs::read(&path).unwrap(), expected);
}

#[test]
fn extended_attributes_follow_the_size_protocol() {
    let setup = setup!();
    let path = setup.at("file");
    fs::write(&path, b"x").unwrap();
    assert_eq!(rustix::fs::listxattr_query(&path).unwrap(), 0);
    rustix::fs::setxattr(&path, "user.a", b"value", XattrFlags::empty()).unwrap();
    rustix::fs::setxattr(&path, "user.empty", b"", XattrFlags::CREATE).unwrap();
    assert_eq!(rustix::fs::getxattr_query(&path, "user.a").unwrap(), 5);
    let mut small = [0; 4];
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut small[..]).unwrap_err(), rustix::io::Errno::RANGE);
    let mut right = [0; 64];
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut right[..]).unwrap(), 5);
    assert_eq!(&right[..5], b"value");
    assert_eq!(rustix::fs::getxattr(&path, "user.empty", &mut right[..]).unwrap(), 0);
    let length = rustix::fs::listxattr(&path, &mut right[..]).unwrap();
    assert_eq!(&right[..length], b"user.a\0user.empty\0");
    assert_eq!(
        rustix::fs::setxattr(&path, "user.a", b"", XattrFlags::CREATE).unwrap_err(),
        rustix::io::Errno::EXIST
    );
    assert_eq!(
        rustix::fs::setxattr(&path, "user.b", b"", XattrFlags::REPLACE).unwrap_err(),
        rustix::io::Errno::NODATA
    );
    rustix::fs::removexattr(&path, "user.a").unwrap();
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut right[..]).unwrap_err(), rustix::io::Errno::NODATA);
    assert_eq!(
        rustix::fs::setxattr(&path, "system.posix_acl_access", b"\x02\0\0\0", XattrFlags::empty())
            .unwrap_err(),
        rustix::io::Errno::OPNOTSUPP
    );
}

#[test]
fn a_large_directory_is_listed_whole_while_it_is_emptied() {
    let setup = setup!();
    let directory = setup.at("many");
    fs::create_dir(&directory).unwrap();
    const FILES: usize = 3_000;
    for index in 0..FILES {
        File::create(directory.join(format!("file-{index:05}"))).unwrap();
    }
    // Twice: the second time from whatever the kernel kept.
    for _ in 0..2 {
        let mut names: Vec<_> =
            fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), FILES);
    }
    let mut seen = 0;
    for entry in fs::read_dir(&directory).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().len(), 0);
        fs::remove_file(entry.path()).unwrap();
        seen += 1;
    }
    assert_eq!(seen, FILES);
    fs::remove_dir(&directory).unwrap();
}

#[test]
fn what_is_not_there_falls_back_or_says_so() {
    let setup = setup!();
    let path = setup.at("file");
    fs::write(&path, pattern(100_000, 1)).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert_eq!(
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 200_000).unwrap_err(),
        rustix::io::Errno::OPNOTSUPP
    );
    // copy_file_range, inside std.
    fs::copy(&path, setup.at("copy")).unwrap();
    assert_eq!(fs::read(setup.at("copy")).unwrap(), pattern(100_000, 1));
    assert_eq!(rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap(), 100_000);
    // Locks are the kernel's, for this mount.
    let other = File::open(&path).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(
        rustix::fs::flock(&other, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap_err(),
        rustix::io::Errno::AGAIN
    );
}

/// Writes through the volume's own door, as a client of the socket does.
fn write_elsewhere(volume: &Arc<Volume>, name: &[u8], bytes: &[u8]) -> Ino {
    let new = NewInode { kind: FileKind::File, mode: 0o644, uid: 0, gid: 0, rdev: 0, target: Vec::new() };
    let file = match volume.lookup(Ino::ROOT, name) {
        Ok(attr) => {
            let mode = OpenMode { truncate: true, ..OpenMode::WRITE };
            volume.open_file(Origin::SOCKET, attr.ino, mode).unwrap()
        }
        Err(_) => volume.create_file(Origin::SOCKET, Ino::ROOT, name, new, OpenMode::WRITE).unwrap().1,
    };
    file.write(0, bytes).unwrap();
    let ino = file.ino();
    drop(file);
    volume.settle(Duration::from_secs(5));
    ino
}

#[test]
fn changes_through_other_doors_are_seen_although_the_kernel_caches_without_limit() {
    let setup = setup!();
    let path = setup.at("shared");
    assert_eq!(code(fs::metadata(&path).unwrap_err()), errno::ENOENT);
    write_elsewhere(&setup.volume, b"shared", b"first");
    assert_eq!(fs::read(&path).unwrap(), b"first");
    // Same length: nothing but the notification can tell.
    write_elsewhere(&setup.volume, b"shared", b"again");
    assert_eq!(fs::read(&path).unwrap(), b"again");
    write_elsewhere(&setup.volume, b"shared", &pattern(20_000, 2));
    assert_eq!(fs::metadata(&path).unwrap().len(), 20_000);
    assert_eq!(fs::read(&path).unwrap(), pattern(20_000, 2));
    assert_eq!(fs::read_dir(setup.mount.mountpoint()).unwrap().count(), 1);

    let to = (Ino::ROOT, &b"moved"[..]);
    let mode = headrace_volume::RenameMode::Replace;
    setup.volume.rename(Origin::SOCKET, (Ino::ROOT, b"shared"), to, mode).unwrap();
    setup.volume.settle(Duration::from_secs(5));
    assert_eq!(code(fs::metadata(&path).unwrap_err()), errno::ENOENT);
    assert_eq!(fs::metadata(setup.at("moved")).unwrap().len(), 20_000);
    setup.volume.unlink(Origin::SOCKET, Ino::ROOT, b"moved").unwrap();
    setup.volume.settle(Duration::from_secs(5));
    assert_eq!(code(fs::metadata(setup.at("moved")).unwrap_err()), errno::ENOENT);
}

#[test]
fn an_append_behind_another_doors_append_loses_neither() {
    let setup = setup!();
    let path = setup.at("log");
    let mut file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
    file.write_all(b"mount 1\n").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"mount 1\n");
    let ino = setup.volume.lookup(Ino::ROOT, b"log").unwrap().ino;
    let other = setup.volume.open_file(Origin::SOCKET, ino, OpenMode::WRITE).unwrap();
    other.append(b"socket 1\n").unwrap();
    // Perhaps before the kernel has heard of it: it still believes in its own end of the file.
    file.write_all(b"mount 2\n").unwrap();
    let deadline = monotonic_now() + Duration::from_secs(5);
    let expected = b"mount 1\nsocket 1\nmount 2\n";
    while fs::read(&path).unwrap() != expected {
        assert!(monotonic_now() < deadline, "{:?}", String::from_utf8_lossy(&fs::read(&path).unwrap()));
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn changes_from_elsewhere_under_load_block_nobody() {
    let setup = setup!();
    let path = setup.at("busy");
    write_elsewhere(&setup.volume, b"busy", &pattern(300_000, 1));
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let path = path.clone();
            thread::spawn("reader", move || {
                for _ in 0..50 {
                    // Never a mix of lengths; contents may be of any moment.
                    assert!(fs::read(&path).unwrap().len() <= 300_000);
                    let _ = fs::metadata(path.with_file_name("absent"));
                }
            })
            .unwrap()
        })
        .collect();
    for round in 0..50 {
        write_elsewhere(&setup.volume, b"busy", &pattern(300_000, round));
    }
    for reader in readers {
        reader.join().unwrap();
    }
    assert_eq!(fs::read(&path).unwrap(), pattern(300_000, 49));
}

#[test]
fn a_read_only_mount_changes_nothing() {
    let Some(setup) = setup_with(MountOptions { read_only: true, ..options() }) else { return };
    assert!(setup.mount.read_only());
    assert_eq!(code(fs::write(setup.at("file"), b"x").unwrap_err()), errno::EROFS);
    write_elsewhere(&setup.volume, b"file", b"content");
    assert_eq!(fs::read(setup.at("file")).unwrap(), b"content");
    assert_eq!(code(fs::remove_file(setup.at("file")).unwrap_err()), errno::EROFS);
}

#[test]
fn a_mount_in_use_is_not_taken_away_but_stops_with_the_engine() {
    let setup = setup!();
    fs::write(setup.at("file"), b"content").unwrap();
    let open = File::open(setup.at("file")).unwrap();
    let busy = setup.mount.unmount().unwrap_err();
    assert_eq!(busy.kind(), Kind::Conflict);
    assert!(busy.message().contains(&format!("({})", std::process::id())), "{busy}");
    // It goes on as if nothing had been asked, notifications included.
    assert!(setup.mount.is_alive());
    write_elsewhere(&setup.volume, b"file", b"changed");
    assert_eq!(fs::read(setup.at("file")).unwrap(), b"changed");

    setup.mount.stop(Duration::from_millis(100)).unwrap();
    assert!(!setup.mount.is_alive());
    assert_eq!(code(open.sync_all().unwrap_err()), errno::ENOTCONN);
    assert!(!setup.at("file").exists());
    setup.mount.unmount().unwrap();
}

#[test]
fn a_mount_that_the_user_ends_is_over() {
    let setup = setup!();
    fs::write(setup.at("file"), b"content").unwrap();
    let ended = Command::new("umount").arg(setup.mount.mountpoint()).status().unwrap();
    if !ended.success() {
        let ended = Command::new("fusermount3").arg("-u").arg(setup.mount.mountpoint()).status().unwrap();
        assert!(ended.success());
    }
    let deadline = monotonic_now() + Duration::from_secs(5);
    while setup.mount.is_alive() {
        assert!(monotonic_now() < deadline);
        sleep(Duration::from_millis(5));
    }
    setup.mount.unmount().unwrap();
    // The place is free again.
    let again = mount(Arc::clone(&setup.volume), setup.mount.mountpoint(), options()).unwrap();
    assert_eq!(fs::read(again.mountpoint().join("file")).unwrap(), b"content");
    again.unmount().unwrap();
}

#[test]
fn a_place_that_is_taken_is_refused_by_name() {
    let setup = setup!();
    let taken = mount(Arc::clone(&setup.volume), setup.mount.mountpoint(), options()).unwrap_err();
    assert_eq!(taken.kind(), Kind::Conflict);
    assert!(taken.message().contains("headrace:test"), "{taken}");
    assert!(taken.message().contains("fuse.headrace"), "{taken}");
    fs::write(setup.at("still"), b"works").unwrap();
}

const DYING: &str = "HEADRACE_TEST_DYING_MOUNT";

#[test]
fn a_mount_left_by_a_dead_engine_is_replaced() {
    if let Some(folder) = std::env::var_os(DYING) {
        // The engine that dies: this test, run again below.
        let folder = PathBuf::from(folder);
        let volume = open_volume(&folder.join("volume"));
        let mount = mount(volume, &folder.join("mnt"), options()).unwrap();
        fs::write(mount.mountpoint().join("file"), b"content").unwrap();
        File::open(mount.mountpoint()).unwrap().sync_all().unwrap();
        std::process::abort();
    }
    let setup = setup!();
    let folder = setup.end();
    let at = folder.path().join("mnt");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_mount_left_by_a_dead_engine_is_replaced", "--nocapture"])
        .env(DYING, folder.path())
        .output()
        .unwrap();
    assert!(!child.status.success());
    let dead = fs::metadata(&at).unwrap_err();
    assert_eq!(code(dead), errno::ENOTCONN, "{}", String::from_utf8_lossy(&child.stderr));

    let volume = open_volume(&folder.path().join("volume"));
    let again = mount(Arc::clone(&volume), &at, options()).unwrap();
    assert_eq!(again.notes().len(), 1, "{:?}", again.notes());
    assert!(again.notes()[0].contains("engine had died"), "{:?}", again.notes());
    assert_eq!(fs::read(again.mountpoint().join("file")).unwrap(), b"content");
    again.unmount().unwrap();
    volume.close().unwrap();
}
