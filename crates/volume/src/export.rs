//! Files of the volume as plain objects of any bucket: `headrace export VOLUME:/path s3://BUCKET/PREFIX`.
//!
//! Each file is one object `PREFIX/relative/path` with its bytes as they are and its time of change as metadata
//! `mtime`, in seconds, as rclone writes it. An object that is there with the same size and time is left as it is, which
//! makes an interrupted export go on. Small files go whole, several at a time; large ones in parts, by one thread each.
//! Memory comes from the engine's budget: a buffer of `PART_BYTES` at most for each thread.
//!
//! What is wrong with a file (damaged, not readable, changed meanwhile, a name that cannot be a key) is told and the
//! others go on; what is wrong with the store ends the request.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, MIB, Result, thread};
use headrace_format::message;
use headrace_format::record::FileKind;
use headrace_object::{Location, ObjectTier};
use serde_bytes::ByteBuf;

use crate::by_path::Access;
use crate::file::OpenFile;
use crate::namespace::shown;
use crate::types::{Attr, Identity, OpenMode, Origin};
use crate::volume::Volume;

/// Small files wait for the store most of the time.
const WRITERS: usize = 24;
/// Read and sent at once.
const PART_BYTES: u64 = 8 * MIB;
/// S3 takes no more parts of one object.
const PARTS_MAX: u64 = 10_000;
/// Of S3.
const KEY_BYTES_MAX: usize = 1024;
/// While loaders have the engine's memory.
const MEMORY_PATIENCE: Duration = Duration::from_secs(60);

/// Where files go. Made once for many requests: it holds the connections.
#[derive(Debug)]
pub struct ExportTarget {
    tier: Arc<ObjectTier>,
}

impl ExportTarget {
    pub fn location(&self) -> &Location {
        self.tier.location()
    }
}

/// What became of one file.
enum Outcome {
    Stored(u64),
    Unchanged,
    LeftOut(String),
}

/// A failure of the file, or of the store.
enum Failure {
    File(Error),
    Store(Error),
}

struct Work {
    volume: Arc<Volume>,
    tier: Arc<ObjectTier>,
    who: Identity,
    root: Vec<u8>,
    paths: Vec<ByteBuf>,
    next: AtomicUsize,
    done: Mutex<message::Exported>,
    failed: Mutex<Option<Error>>,
}

impl Volume {
    /// Invalid: the volume's own prefix is there, or beneath it, or above.
    pub fn export_target(&self, location: Location) -> Result<ExportTarget> {
        if let Some(tiers) = &self.tiers {
            let own = tiers.remote.tier.location();
            let inside = |one: &str, other: &str| {
                other.is_empty()
                    || one.strip_prefix(other).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            };
            let overlaps = inside(&own.prefix, &location.prefix) || inside(&location.prefix, &own.prefix);
            // The same bucket can have several endpoints.
            if own.bucket == location.bucket && overlaps {
                return Err(Error::invalid(format!(
                    "{location}: the volume itself is at {own}: export to a prefix beside it"
                )));
            }
        }
        Ok(ExportTarget { tier: ObjectTier::open(location)? })
    }

    /// Puts these files, named from `root` on, into the bucket. Folders, links and special files are told as left out.
    pub fn export(
        self: &Arc<Self>,
        who: &Identity,
        target: &ExportTarget,
        root: &[u8],
        paths: Vec<ByteBuf>,
    ) -> Result<message::Exported> {
        let writers = WRITERS.min(paths.len());
        let work = Arc::new(Work {
            volume: Arc::clone(self),
            tier: Arc::clone(&target.tier),
            who: who.clone(),
            root: root.to_vec(),
            paths,
            next: AtomicUsize::new(0),
            done: Mutex::default(),
            failed: Mutex::default(),
        });
        let mut threads = Vec::with_capacity(writers);
        for _ in 0..writers {
            let work = Arc::clone(&work);
            threads.push(thread::spawn("export", move || work.run())?);
        }
        if threads.into_iter().map(std::thread::JoinHandle::join).any(|ended| ended.is_err()) {
            return Err(Error::internal("a thread of the export ended early"));
        }
        if let Some(error) = work.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        let mut done = work.done.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::take(&mut *done))
    }
}

impl Work {
    fn run(&self) {
        while let Some(path) = self.paths.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = match self.export_one(path) {
                Ok(outcome) => outcome,
                Err(Failure::File(error)) => Outcome::LeftOut(error.message().to_owned()),
                Err(Failure::Store(error)) => {
                    self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    // Nobody needs to go on.
                    self.next.store(self.paths.len(), Ordering::Relaxed);
                    return;
                }
            };
            let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
            match outcome {
                Outcome::Stored(bytes) => {
                    done.files += 1;
                    done.bytes += bytes;
                }
                Outcome::Unchanged => done.unchanged += 1,
                Outcome::LeftOut(why) => done.left_out.push(message::LeftOut { path: path.clone(), why }),
            }
        }
    }

    fn export_one(&self, path: &[u8]) -> std::result::Result<Outcome, Failure> {
        let name = match self.name_of(path) {
            Ok(name) => name,
            Err(why) => return Ok(Outcome::LeftOut(why)),
        };
        let (attr, file) = self.open(path).map_err(Failure::File)?;
        let Some(file) = file else {
            return Ok(Outcome::LeftOut(format!("a {:?} is no object", attr.kind).to_lowercase()));
        };
        let mtime = seconds(attr.mtime.0);
        let there = self.tier.facts(&name).map_err(Failure::Store)?;
        if there.is_some_and(|there| there.bytes == attr.size && there.mtime.as_deref() == Some(&mtime)) {
            return Ok(Outcome::Unchanged);
        }
        if attr.size <= PART_BYTES {
            let _memory = self.reserve(attr.size)?;
            let bytes = read(&file, 0, attr.size).map_err(Failure::File)?;
            self.tier.put_with_mtime(&name, bytes, &mtime).map_err(Failure::Store)?;
        } else {
            self.put_in_parts(&name, &file, attr.size, &mtime)?;
        }
        let now = file.attr().map_err(Failure::File)?;
        if (now.size, now.mtime) != (attr.size, attr.mtime) {
            return Ok(Outcome::LeftOut("it changed while it was exported: export it again".to_owned()));
        }
        Ok(Outcome::Stored(attr.size))
    }

    fn put_in_parts(
        &self,
        name: &str,
        file: &OpenFile,
        size: u64,
        mtime: &str,
    ) -> std::result::Result<(), Failure> {
        let part_bytes = PART_BYTES.max(size.div_ceil(PARTS_MAX));
        let _memory = self.reserve(part_bytes)?;
        let mut upload = self.tier.start_parts(name, mtime).map_err(Failure::Store)?;
        for start in (0..size).step_by(part_bytes as usize) {
            let part = read(file, start, part_bytes.min(size - start)).map_err(Failure::File);
            let put = part.and_then(|part| upload.put(part).map_err(Failure::Store));
            if let Err(failure) = put {
                upload.give_up();
                return Err(failure);
            }
        }
        upload.complete().map_err(Failure::Store)
    }

    fn reserve(&self, bytes: u64) -> std::result::Result<headrace_base::Reservation, Failure> {
        self.volume.budget().reserve(bytes, MEMORY_PATIENCE).map_err(Failure::Store)
    }

    fn open(&self, path: &[u8]) -> Result<(Attr, Option<OpenFile>)> {
        let attr = self.volume.resolve(&self.who, path, false)?;
        if attr.kind != FileKind::File {
            return Ok((attr, None));
        }
        self.volume.check_access(&self.who, &attr, Access::READ)?;
        let file = self.volume.open_file(Origin::SOCKET, attr.ino, OpenMode::READ)?;
        Ok((file.attr()?, Some(file)))
    }

    /// The object's name below the prefix, or why it can have none.
    fn name_of(&self, path: &[u8]) -> std::result::Result<String, String> {
        let root = self.root.strip_suffix(b"/").unwrap_or(&self.root);
        let relative = match path.strip_prefix(root) {
            // A single file.
            Some([]) => root.rsplit(|byte| *byte == b'/').next(),
            Some(rest) => rest.strip_prefix(b"/"),
            None => None,
        };
        let relative = relative.filter(|relative| !relative.is_empty());
        let relative = relative.ok_or_else(|| format!("it is not below {}", shown(&self.root)))?;
        let name = std::str::from_utf8(relative).map_err(|_| "a key is UTF-8, its path is not".to_owned())?;
        if name.chars().any(char::is_control) {
            return Err("its path has control characters, which a listing cannot show".to_owned());
        }
        if name.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
            return Err("its path has an empty name, '.' or '..'".to_owned());
        }
        let key = self.tier.location().key(name);
        if key.len() > KEY_BYTES_MAX {
            return Err(format!("its key would have {} bytes, at most {KEY_BYTES_MAX} fit", key.len()));
        }
        Ok(name.to_owned())
    }
}

fn read(file: &OpenFile, offset: u64, length: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length as usize];
    let mut done = 0;
    while done < bytes.len() {
        match file.read(offset + done as u64, &mut bytes[done..])? {
            0 => {
                return Err(Error::errno(
                    errno::EIO,
                    format!(
                        "it was cut to {} bytes while it was exported: export it again",
                        offset + done as u64
                    ),
                ));
            }
            count => done += count,
        }
    }
    Ok(bytes)
}

/// Nanoseconds since 1970 as seconds with nine decimals.
fn seconds(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    let ns = ns.unsigned_abs();
    format!("{sign}{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_with_a_sign() {
        assert_eq!(seconds(1_500_000_000_000_000_001), "1500000000.000000001");
        assert_eq!(seconds(-1), "-0.000000001");
        assert_eq!(seconds(i64::MIN), "-9223372036.854775808");
    }
}
