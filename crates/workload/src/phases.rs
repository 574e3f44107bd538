//! What is timed. System calls by descriptor of the target, no allocation in the loops.
//!
//! Durable means: fsync of the root directory of the target's file system, then syncfs. syncfs(2) does not reach a
//! FUSE file system, whose server can only be told by an fsync; on a local disk the first is a trifle and the
//! second does the work.

use std::ffi::CString;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, Result, time};
use rustix::fs::{AtFlags, Mode, OFlags, RawDir};

use crate::Report;
use crate::clock::{Done, together};
use crate::layout::{
    Contents, LARGE_NAME, REQUEST_BYTES, directories, directory_name, file_name, mix, part, shuffled,
};
use crate::options::{Options, Phase};
use crate::{Latencies, store};

const SMALL_READ_BYTES: u64 = 4096;
/// As glibc's readdir.
const LISTING_BYTES: usize = 32 * 1024;

pub fn run(options: &Options) -> Result<Report> {
    let mut fsync = None;
    let (done, time, time_with_sync) = match options.phase {
        Phase::StorePut => store::put(options)?,
        Phase::StoreGet => store::get(options)?,
        Phase::StoreGetRanges => store::get_ranges(options)?,
        _ => on_folder(options, &mut fsync)?,
    };
    let seconds = time.as_secs_f64();
    Ok(Report {
        workload: options.phase,
        threads: options.threads,
        operations: done.operations,
        bytes: done.bytes,
        seconds,
        seconds_with_sync: time_with_sync.map(|time| time.as_secs_f64()),
        operations_per_second: done.operations as f64 / seconds.max(f64::MIN_POSITIVE),
        fsync,
        verified: options.verify,
    })
}

fn on_folder(options: &Options, fsync: &mut Option<Latencies>) -> Result<Timed> {
    let target = Arc::new(Target::open(options)?);
    Ok(match options.phase {
        Phase::Create => create(options, &target, fsync)?,
        Phase::Read => read(options, target)?,
        Phase::Stat => stat(options, target)?,
        Phase::List => list(options, target)?,
        Phase::WriteLarge => write_large(options, &target)?,
        Phase::ReadLarge => read_large(options, &target)?,
        Phase::Random4k => random_4k(options, &target)?,
        Phase::Sync => {
            let start = time::monotonic_now();
            target.sync()?;
            let time = start.elapsed();
            (Done { operations: 1, bytes: 0 }, time, Some(time))
        }
        Phase::StorePut | Phase::StoreGet | Phase::StoreGetRanges => {
            return Err(Error::internal("a phase on a store has no folder"));
        }
    })
}

impl Latencies {
    /// Nearest rank; none of nothing.
    fn of(times: &mut [Duration]) -> Option<Latencies> {
        times.sort_unstable();
        let at = |share: f64| {
            let rank = (times.len() as f64 * share).ceil() as usize;
            times.get(rank.saturating_sub(1)).map(|time| time.as_secs_f64() * 1e3)
        };
        Some(Latencies { p50_ms: at(0.5)?, p99_ms: at(0.99)?, max_ms: at(1.0)? })
    }
}

type Timed = (Done, Duration, Option<Duration>);

struct Target {
    path: PathBuf,
    directory: OwnedFd,
}

impl Target {
    fn open(options: &Options) -> Result<Target> {
        let path = options.target.clone();
        if matches!(options.phase, Phase::Create | Phase::WriteLarge) {
            fs::create_dir_all(&path)
                .map_err(|error| Error::io(format_args!("make {}", path.display()), error))?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(&path, flags, Mode::empty())
            .map_err(|error| Error::io(format_args!("open {}", path.display()), error.into()))?;
        Ok(Target { path, directory })
    }

    fn open_file(&self, name: &CString, flags: OFlags) -> Result<OwnedFd> {
        rustix::fs::openat(&self.directory, name, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o644))
            .map_err(|error| self.failed("open", name, error))
    }

    fn failed(&self, doing: &str, name: &CString, error: rustix::io::Errno) -> Error {
        let name = name.to_string_lossy();
        Error::io(format_args!("{doing} {}/{name}", self.path.display()), error.into())
    }

    /// See the head of this file.
    fn sync(&self) -> Result<()> {
        let failed = |error| Error::io(format_args!("sync {}", self.path.display()), error);
        let root = File::open(root_of(&self.path)?).map_err(failed)?;
        root.sync_all().map_err(failed)?;
        rustix::fs::syncfs(&self.directory).map_err(|error| failed(error.into()))
    }
}

/// The highest folder above `path` that is on the same file system.
fn root_of(path: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let look = |path: &Path| {
        let device = fs::metadata(path).map(|metadata| metadata.dev());
        device.map_err(|error| Error::io(format_args!("look at {}", path.display()), error))
    };
    let path =
        path.canonicalize().map_err(|error| Error::io(format_args!("look at {}", path.display()), error))?;
    let device = look(&path)?;
    let mut root = path.as_path();
    while let Some(parent) = root.parent() {
        if look(parent)? != device {
            break;
        }
        root = parent;
    }
    Ok(root.to_path_buf())
}

fn wrong_content(target: &Target, name: &CString, what: &str) -> Error {
    Error::corrupt(format!(
        "{}/{} does not hold what create wrote: {what} (same --size-bytes and --bytes?)",
        target.path.display(),
        name.to_string_lossy()
    ))
}

fn names(files: u64) -> Result<Vec<CString>> {
    (0..files).map(file_name).collect()
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills `out` as far as the file goes.
fn read_at(file: &OwnedFd, out: &mut [u8], offset: u64) -> rustix::io::Result<usize> {
    let mut filled = 0;
    while filled < out.len() {
        match rustix::io::pread(file, &mut out[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(length) => filled += length,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// As `read_at`, from the beginning and as programs read a whole file: until a read gives nothing.
fn read_to_end(file: &OwnedFd, out: &mut [u8]) -> rustix::io::Result<usize> {
    let mut filled = 0;
    while filled < out.len() {
        match rustix::io::read(file, &mut out[filled..]) {
            Ok(0) => break,
            Ok(length) => filled += length,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn create(options: &Options, target: &Arc<Target>, latencies: &mut Option<Latencies>) -> Result<Timed> {
    for directory in 0..directories(options.files) {
        let path = target.path.join(directory_name(directory));
        match fs::create_dir(&path) {
            Err(error) if error.raw_os_error() != Some(errno::EEXIST) => {
                return Err(Error::io(format_args!("make {}", path.display()), error));
            }
            _ => {}
        }
    }
    let names = names(options.files)?;
    let contents = Contents::new(options.size_bytes);
    let (size, fsync, workers) = (options.size_bytes, options.fsync, options.threads);
    let own = Arc::clone(target);
    let all_fsyncs: Arc<Mutex<Vec<Duration>>> = Arc::default();
    let collected = Arc::clone(&all_fsyncs);
    let start = time::monotonic_now();
    let (done, time) = together(workers, move |worker| {
        let mut done = Done::default();
        let part_of_worker = part(names.len() as u64, worker, workers);
        let count = if fsync { part_of_worker.end - part_of_worker.start } else { 0 };
        let mut fsyncs = Vec::with_capacity(count as usize);
        for file in part_of_worker {
            let name = &names[file as usize];
            let open = own.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
            write_all(&open, contents.of(file, size)).map_err(|error| own.failed("write", name, error))?;
            if fsync {
                let start = time::monotonic_now();
                rustix::fs::fsync(&open).map_err(|error| own.failed("fsync", name, error))?;
                fsyncs.push(start.elapsed());
            }
            drop(open);
            done.operations += 1;
            done.bytes += size;
        }
        collected.lock().unwrap_or_else(|poison| poison.into_inner()).append(&mut fsyncs);
        Ok(done)
    })?;
    *latencies = Latencies::of(&mut all_fsyncs.lock().unwrap_or_else(|poison| poison.into_inner()));
    let time_with_sync = if fsync {
        time
    } else {
        target.sync()?;
        start.elapsed()
    };
    Ok((done, time, Some(time_with_sync)))
}

fn read(options: &Options, target: Arc<Target>) -> Result<Timed> {
    let names = names(options.files)?;
    let mut order = shuffled(options.files, options.seed);
    order.truncate(options.limit.map_or(order.len(), |limit| usize::try_from(limit).unwrap_or(usize::MAX)));
    let contents = Contents::new(options.size_bytes);
    let (size, verify, workers) = (options.size_bytes, options.verify, options.threads);
    let (done, time) = together(workers, move |worker| {
        // One byte more: a file that has grown is noticed.
        let mut buffer = vec![0; size as usize + 1];
        let mut done = Done::default();
        for place in part(order.len() as u64, worker, workers) {
            let file = order[place as usize];
            let name = &names[file as usize];
            let open = target.open_file(name, OFlags::RDONLY)?;
            let length =
                read_to_end(&open, &mut buffer).map_err(|error| target.failed("read", name, error))?;
            if length as u64 != size {
                return Err(wrong_content(&target, name, &format!("{length} bytes, not {size}")));
            }
            if verify && buffer[..length] != *contents.of(file, size) {
                return Err(wrong_content(&target, name, "other bytes"));
            }
            done.operations += 1;
            done.bytes += size;
        }
        Ok(done)
    })?;
    Ok((done, time, None))
}

fn stat(options: &Options, target: Arc<Target>) -> Result<Timed> {
    let names = names(options.files)?;
    let order = shuffled(options.files, options.seed);
    let (size, workers) = (options.size_bytes, options.threads);
    let (done, time) = together(workers, move |worker| {
        let mut done = Done::default();
        for place in part(order.len() as u64, worker, workers) {
            let name = &names[order[place as usize] as usize];
            let stat = rustix::fs::statat(&target.directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|error| target.failed("stat", name, error))?;
            if stat.st_size as u64 != size {
                return Err(wrong_content(&target, name, &format!("{} bytes, not {size}", stat.st_size)));
            }
            done.operations += 1;
        }
        Ok(done)
    })?;
    Ok((done, time, None))
}

fn list(options: &Options, target: Arc<Target>) -> Result<Timed> {
    let directories = directories(options.files);
    let names: Vec<CString> = (0..directories)
        .map(|directory| {
            CString::new(directory_name(directory)).map_err(|error| Error::internal(error.to_string()))
        })
        .collect::<Result<_>>()?;
    let (files, workers) = (options.files, options.threads);
    let (done, time) = together(workers, move |worker| {
        let mut buffer = vec![MaybeUninit::uninit(); LISTING_BYTES];
        let mut done = Done::default();
        for directory in part(directories, worker, workers) {
            let name = &names[directory as usize];
            let open = target.open_file(name, OFlags::RDONLY | OFlags::DIRECTORY)?;
            let mut listing = RawDir::new(&open, &mut buffer);
            while let Some(entry) = listing.next() {
                let entry = entry.map_err(|error| target.failed("list", name, error))?;
                let entry = entry.file_name().to_bytes();
                done.operations += u64::from(entry != b"." && entry != b"..");
            }
        }
        Ok(done)
    })?;
    if done.operations != files {
        return Err(Error::corrupt(format!("{} files are listed, not {files}", done.operations)));
    }
    Ok((done, time, None))
}

fn large_name() -> Result<CString> {
    CString::new(LARGE_NAME).map_err(|error| Error::internal(error.to_string()))
}

/// Requests of the large file: number and length of each.
fn requests(bytes: u64) -> u64 {
    bytes.div_ceil(REQUEST_BYTES)
}

fn request_bytes(bytes: u64, request: u64) -> u64 {
    REQUEST_BYTES.min(bytes - request * REQUEST_BYTES)
}

fn write_large(options: &Options, target: &Arc<Target>) -> Result<Timed> {
    let name = large_name()?;
    let contents = Contents::new(REQUEST_BYTES);
    let file = target.open_file(&name, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
    let file = Arc::new(file);
    let (own, own_file, own_name) = (Arc::clone(target), Arc::clone(&file), name.clone());
    let (bytes, workers) = (options.bytes, options.threads);
    let start = time::monotonic_now();
    let (done, time) = together(workers, move |worker| {
        let mut done = Done::default();
        for request in part(requests(bytes), worker, workers) {
            let mut left = contents.of(request, request_bytes(bytes, request));
            let mut offset = request * REQUEST_BYTES;
            while !left.is_empty() {
                let written = rustix::io::pwrite(&*own_file, left, offset)
                    .map_err(|error| own.failed("write", &own_name, error))?;
                left = &left[written..];
                offset += written as u64;
                done.bytes += written as u64;
            }
            done.operations += 1;
        }
        Ok(done)
    })?;
    rustix::fs::fsync(&*file).map_err(|error| target.failed("fsync", &name, error))?;
    Ok((done, time, Some(start.elapsed())))
}

fn read_large(options: &Options, target: &Arc<Target>) -> Result<Timed> {
    let name = large_name()?;
    let file = target.open_file(&name, OFlags::RDONLY)?;
    let contents = Contents::new(REQUEST_BYTES);
    let (own, bytes, workers, verify) = (Arc::clone(target), options.bytes, options.threads, options.verify);
    let (done, time) = together(workers, move |worker| {
        let mut buffer = vec![0; REQUEST_BYTES as usize];
        let mut done = Done::default();
        for request in part(requests(bytes), worker, workers) {
            let expected = request_bytes(bytes, request);
            let length = read_at(&file, &mut buffer, request * REQUEST_BYTES)
                .map_err(|error| own.failed("read", &name, error))?;
            if length as u64 != expected {
                return Err(wrong_content(&own, &name, &format!("request {request} gave {length} bytes")));
            }
            if verify && buffer[..length] != *contents.of(request, expected) {
                return Err(wrong_content(&own, &name, &format!("other bytes in MiB {request}")));
            }
            done.operations += 1;
            done.bytes += expected;
        }
        Ok(done)
    })?;
    Ok((done, time, None))
}

fn random_4k(options: &Options, target: &Arc<Target>) -> Result<Timed> {
    let name = large_name()?;
    let blocks = options.bytes / SMALL_READ_BYTES;
    if blocks == 0 {
        return Err(Error::invalid(format!("--bytes {} has no block of 4 KiB", options.bytes)));
    }
    let file = target.open_file(&name, OFlags::RDONLY)?;
    let contents = Contents::new(REQUEST_BYTES);
    let (own, options, workers) = (Arc::clone(target), options.clone(), options.threads);
    let (done, time) = together(workers, move |worker| {
        let deadline =
            options.seconds.map(|seconds| time::monotonic_now() + Duration::from_secs_f64(seconds));
        let operations = match deadline {
            Some(_) => u64::MAX,
            None => {
                let part = part(options.operations, worker, workers);
                part.end - part.start
            }
        };
        let mut state = mix(options.seed ^ mix(worker as u64 + 1));
        let mut buffer = vec![0; SMALL_READ_BYTES as usize];
        let mut done = Done::default();
        while done.operations < operations && deadline.is_none_or(|end| time::monotonic_now() < end) {
            state = mix(state);
            let offset = state % blocks * SMALL_READ_BYTES;
            let length =
                read_at(&file, &mut buffer, offset).map_err(|error| own.failed("read", &name, error))?;
            if length as u64 != SMALL_READ_BYTES {
                return Err(wrong_content(&own, &name, &format!("offset {offset} gave {length} bytes")));
            }
            if options.verify {
                let request = offset / REQUEST_BYTES;
                let whole = contents.of(request, request_bytes(options.bytes, request));
                let skip = (offset % REQUEST_BYTES) as usize;
                if buffer[..] != whole[skip..skip + length] {
                    return Err(wrong_content(&own, &name, &format!("other bytes at {offset}")));
                }
            }
            done.operations += 1;
            done.bytes += SMALL_READ_BYTES;
        }
        Ok(done)
    })?;
    Ok((done, time, None))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::fs::FileExt;

    use headrace_base::Kind;

    use super::*;

    fn phase(folder: &Path, line: &str) -> Result<Report> {
        let mut words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        words.extend([OsString::from("--target"), folder.into()]);
        run(&Options::parse(words.into_iter()).unwrap().unwrap())
    }

    #[test]
    fn what_create_writes_the_other_phases_find() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("new");
        const FILES: &str = "--files 2500 --size-bytes 3000";
        let made = phase(&target, &format!("create {FILES} --threads 3")).unwrap();
        assert_eq!((made.operations, made.bytes), (2500, 7_500_000));
        assert!(made.seconds > 0.0 && made.seconds_with_sync.unwrap() >= made.seconds);
        assert_eq!(fs::read_dir(&target).unwrap().count(), 3);
        for line in [
            format!("read {FILES} --threads 4 --seed 5 --verify"),
            format!("stat {FILES} --threads 2"),
            format!("list {FILES} --threads 2"),
        ] {
            let report = phase(&target, &line).unwrap();
            assert_eq!(report.operations, 2500, "{line}");
            assert!(report.seconds > 0.0 && report.seconds_with_sync.is_none());
        }
        let some = phase(&target, &format!("read {FILES} --threads 3 --limit 100 --verify")).unwrap();
        assert_eq!((some.operations, some.bytes), (100, 300_000));
        assert_eq!(phase(&target, "sync").unwrap().operations, 1);
        // A second create would measure something else.
        let again = phase(&target, &format!("create {FILES}")).unwrap_err();
        assert_eq!(again.raw_errno(), errno::EEXIST);
        let fsynced = phase(&folder.path().join("f"), "create --files 20 --size-bytes 100 --fsync").unwrap();
        assert_eq!(fsynced.seconds_with_sync, Some(fsynced.seconds));
        let fsync = fsynced.fsync.unwrap();
        assert!(fsync.p50_ms > 0.0 && fsync.p50_ms <= fsync.p99_ms && fsync.p99_ms <= fsync.max_ms);
        assert!(fsync.max_ms <= fsynced.seconds * 1e3);
        assert_eq!(made.fsync, None);
    }

    #[test]
    fn other_bytes_and_lengths_are_found() {
        let folder = tempfile::tempdir().unwrap();
        phase(folder.path(), "create --files 10 --size-bytes 3000").unwrap();
        let path = folder.path().join("d00000/f0000003");
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[!Contents::new(3000).of(3, 3000)[7]], 7).unwrap();
        phase(folder.path(), "read --files 10 --size-bytes 3000").unwrap();
        let changed = phase(folder.path(), "read --files 10 --size-bytes 3000 --verify").unwrap_err();
        assert_eq!(changed.kind(), Kind::Corrupt);
        assert!(changed.message().contains("f0000003"), "{changed}");
        for bytes in [2999, 3001] {
            file.set_len(bytes).unwrap();
            for line in ["read", "stat"] {
                let error =
                    phase(folder.path(), &format!("{line} --files 10 --size-bytes 3000")).unwrap_err();
                assert_eq!(error.kind(), Kind::Corrupt);
            }
        }
        fs::remove_file(path).unwrap();
        assert_eq!(phase(folder.path(), "list --files 10").unwrap_err().kind(), Kind::Corrupt);
        assert_eq!(phase(folder.path(), "read --files 10").unwrap_err().kind(), Kind::Corrupt);
    }

    #[test]
    fn the_large_file_is_written_and_read_whole_and_in_pieces() {
        let folder = tempfile::tempdir().unwrap();
        const BYTES: &str = "--bytes 5000000";
        for threads in [1, 3] {
            let written = phase(folder.path(), &format!("write-large {BYTES} --threads {threads}")).unwrap();
            assert_eq!((written.operations, written.bytes), (5, 5_000_000));
            assert_eq!(fs::metadata(folder.path().join(LARGE_NAME)).unwrap().len(), 5_000_000);
            let read =
                phase(folder.path(), &format!("read-large {BYTES} --threads {threads} --verify")).unwrap();
            assert_eq!((read.operations, read.bytes), (5, 5_000_000));
            let random = format!("random-4k {BYTES} --threads {threads} --operations 1001 --verify");
            let random = phase(folder.path(), &random).unwrap();
            assert_eq!((random.operations, random.bytes), (1001, 1001 * 4096));
        }
        let timed = phase(folder.path(), &format!("random-4k {BYTES} --seconds 0.1 --verify")).unwrap();
        assert!(timed.operations > 0 && timed.seconds >= 0.1 && timed.seconds < 5.0);
        let file = File::options().write(true).open(folder.path().join(LARGE_NAME)).unwrap();
        file.write_all_at(&[0; 64], 2_000_000).unwrap();
        let changed = phase(folder.path(), &format!("read-large {BYTES} --verify")).unwrap_err();
        assert!(changed.message().contains("MiB 1"), "{changed}");
        assert!(phase(folder.path(), "read-large --bytes 5000001").is_err());
    }

    #[test]
    fn latencies_are_nearest_ranks() {
        let mut times: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        let expected = Latencies { p50_ms: 100.0, p99_ms: 198.0, max_ms: 200.0 };
        assert_eq!(Latencies::of(&mut times), Some(expected));
        let one = Latencies { p50_ms: 7.0, p99_ms: 7.0, max_ms: 7.0 };
        assert_eq!(Latencies::of(&mut [Duration::from_millis(7)]), Some(one));
        assert_eq!(Latencies::of(&mut []), None);
    }

    #[test]
    fn what_is_missing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = phase(&folder.path().join("nowhere"), "read").unwrap_err();
        assert_eq!(missing.kind(), Kind::NotFound);
        assert!(missing.message().contains("nowhere"), "{missing}");
        let empty = phase(folder.path(), "read-large").unwrap_err();
        assert!(empty.message().contains(LARGE_NAME), "{empty}");
        assert!(folder.path().starts_with(root_of(folder.path()).unwrap()));
    }
}
