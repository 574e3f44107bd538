//! Freezing a subtree. The store ends its version: from then on that version never changes, so the sample table
//! can be written at leisure, and again if a crash came between.
//!
//! 1. All dirty bytes, and those that ride in the metadata store, go to segments and are committed.
//! 2. The seal's record and the new version are one durable commit.
//! 3. The manifest is written from the frozen version under a temporary name, made durable, renamed.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use headrace_base::error::errno;
use headrace_base::ids::SealId;
use headrace_base::{Error, Ino, Result, Version, crash, time};
use headrace_format::key;
use headrace_format::manifest;
use headrace_format::message;
use headrace_format::record::{FileKind, Inode, Place, Seal};
use headrace_meta::{At, Commit, CommitError, Durability, Precondition, Write};
use serde_bytes::ByteBuf;

use crate::by_path::Access;
use crate::live::{load_extents, no_inode};
use crate::namespace::not_a_directory;
use crate::past::is_live;
use crate::sealed::SealedView;
use crate::types::{Attr, Identity};
use crate::versions::give_up;
use crate::volume::Volume;

/// Names fetched from the store at once.
const CHUNK: usize = 4096;

/// Sealed views in use: one mapping of a manifest serves all.
#[derive(Debug, Default)]
pub struct OpenSeals(Mutex<HashMap<SealId, Weak<SealedView>>>);

impl Volume {
    /// Freezes the tree under `path` and writes its manifest. `who` must be able to read and search every
    /// directory in it (else Permission, naming the first that it may not). The freezing itself takes a few
    /// milliseconds; the manifest about a second for a million files.
    pub fn seal(&self, who: &Identity, path: &[u8]) -> Result<Arc<SealedView>> {
        let root = self.resolve(who, path, true)?;
        if !is_live(root.ino) {
            return Err(Error::invalid("a snapshot's folder cannot be sealed: restore it, or copy it out"));
        }
        if root.kind != FileKind::Directory {
            return Err(not_a_directory(path).context("only a directory can be sealed"));
        }
        self.check_tree(who, root.clone())?;
        // A manifest is passed to whoever may list the tree: no file's bytes may stand in it. So nothing may ride
        // in the metadata store when the version ends, and nothing new until then.
        let no_inline = self.flusher.hold_inline();
        // The flusher may be about to move some: it ends first.
        let no_moves = self.flusher.hold_background();
        self.flusher.flush_all()?;
        self.flusher.move_inline(self.flusher.take_inline())?;
        let id = SealId::generate();
        let seal = Seal {
            version: Version(0),
            path: path.to_vec(),
            root: root.ino,
            created: time::wall_now(),
            samples: 0,
            bytes: 0,
        };
        let cut = self.cleaner.cut(Vec::new(), |version| {
            vec![Write::Put(key::seal(id), Seal { version, ..seal.clone() }.encode())]
        });
        let version = match cut {
            Ok(version) => version,
            Err(CommitError::Failed(error)) => return Err(error),
            Err(CommitError::Conflict(_)) => return Err(Error::internal("two seals have one id")),
        };
        drop((no_moves, no_inline));
        let _pin = self.cleaner.pinned.pin(version);
        let seal = Seal { version, ..seal };
        crash::point("after-seal");
        self.write_manifest(id, &seal)?;
        let view = self.open_manifest(id, &seal)?;
        // For listings of seals, which should not have to open every manifest.
        let counted = Seal { samples: view.samples(), bytes: view.bytes(), ..seal.clone() };
        let commit = Commit {
            preconditions: vec![Precondition::Equals(key::seal(id), seal.encode())],
            writes: vec![Write::Put(key::seal(id), counted.encode())],
        };
        match self.store.commit(commit, Durability::Relaxed) {
            Ok(_) => Ok(view),
            Err(CommitError::Failed(error)) => Err(error),
            // Somebody was quick to delete it.
            Err(CommitError::Conflict(_)) => Err(no_seal(id)),
        }
    }

    /// NotFound if there is no such seal; Permission if `who` may not search the way to it or into it.
    pub fn open_seal(&self, who: &Identity, id: SealId) -> Result<Arc<SealedView>> {
        let seal = self.seal_record(id)?;
        let view = self.open_manifest(id, &seal)?;
        view.check_listable(who)?;
        Ok(view)
    }

    /// All seals, oldest first. One whose making a crash cut short has no counts (0) here.
    pub fn seals(&self) -> Result<Vec<message::Sealed>> {
        self.store
            .scan(b"Z", b"[", usize::MAX, At::Latest)?
            .into_iter()
            .map(|(key, value)| {
                let id = key::id_of(&key).map(SealId::from_bytes);
                let id = id.ok_or_else(|| Error::corrupt("a seal's key is too short"))?;
                let seal = Seal::decode(&value)?;
                let manifest_bytes =
                    fs::metadata(self.manifest_path(id)).map_or(0, |metadata| metadata.len());
                Ok(message::Sealed {
                    seal: id.to_string(),
                    version: seal.version.0,
                    path: ByteBuf::from(seal.path),
                    samples: seal.samples,
                    bytes: seal.bytes,
                    manifest_bytes,
                    created_ns: seal.created.0,
                })
            })
            .collect()
    }

    /// No new reader gets the view; those that have it open read on. The version and the bytes that only it held
    /// are given back when the last has closed it. Rights are the caller's to check.
    pub fn seal_delete(&self, id: SealId) -> Result<()> {
        let record = self.seal_record(id)?;
        let key = key::seal(id);
        let commit = Commit {
            preconditions: vec![Precondition::Present(key.clone())],
            writes: vec![Write::Delete(key), give_up(record.version)],
        };
        match self.store.commit(commit, Durability::Durable) {
            Ok(_) => {}
            Err(CommitError::Failed(error)) => return Err(error),
            Err(CommitError::Conflict(_)) => return Err(no_seal(id)),
        }
        crash::point("after-seal-delete");
        self.seals.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        self.cleaner.wake();
        remove_manifest(&self.manifest_path(id))
    }

    /// Removes manifests whose seals are gone, and what a crash left of one that was being written.
    pub(crate) fn remove_stray_manifests(&self) -> Result<()> {
        let folder = self.folder().join("manifests");
        let io = |cause| Error::io(format_args!("look at {}", folder.display()), cause);
        for entry in fs::read_dir(&folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some((id, ending)) = name.split_once('.') else { continue };
            let Ok(id) = id.parse::<SealId>() else { continue };
            let stray = match ending {
                "manifest" => self.store.get(&key::seal(id), At::Latest)?.is_none(),
                "new" | "scratch" => true,
                _ => false,
            };
            if stray {
                tracing::info!(manifest = name, "a manifest without a sealed view is removed");
                remove_manifest(&path)?;
            }
        }
        Ok(())
    }

    fn seal_record(&self, id: SealId) -> Result<Seal> {
        let value = self.store.get(&key::seal(id), At::Latest)?;
        Seal::decode(&value.ok_or_else(|| no_seal(id))?)
    }

    fn manifest_path(&self, id: SealId) -> PathBuf {
        self.folder().join("manifests").join(format!("{id}.manifest"))
    }

    fn open_manifest(&self, id: SealId, seal: &Seal) -> Result<Arc<SealedView>> {
        let mut views = self.seals.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(view) = views.get(&id).and_then(Weak::upgrade) {
            return Ok(view);
        }
        let pin = self.cleaner.pinned.pin(seal.version);
        // Pinned too late if the seal was deleted since it was looked up.
        self.seal_record(id)?;
        let path = self.manifest_path(id);
        if !path.exists() {
            // A crash came between the seal and its manifest, or somebody removed the file: the version is
            // still there to write it from.
            self.write_manifest(id, seal)?;
        }
        let file =
            File::open(&path).map_err(|cause| Error::io(format_args!("open {}", path.display()), cause))?;
        let view = Arc::new(SealedView::open(id, file, Arc::clone(&self.segments), pin)?);
        views.retain(|_, view| view.strong_count() > 0);
        views.insert(id, Arc::downgrade(&view));
        Ok(view)
    }

    /// Every directory of the tree can be read and searched by `who`.
    fn check_tree(&self, who: &Identity, root: Attr) -> Result<()> {
        if who.is_root() {
            return Ok(());
        }
        let mut directories = vec![root];
        while let Some(directory) = directories.pop() {
            self.check_access(who, &directory, Access { read: true, write: false, execute: true })?;
            let mut after: Option<Vec<u8>> = None;
            loop {
                let names = self.names_after(directory.ino, after.as_deref(), CHUNK, At::Latest)?;
                for item in names.iter().filter(|item| item.kind == FileKind::Directory) {
                    self.names.note(directory.ino, &item.name, item.ino);
                    directories.push(self.getattr(item.ino)?);
                }
                if names.len() < CHUNK {
                    break;
                }
                after = names.last().map(|item| item.name.clone());
            }
        }
        Ok(())
    }

    fn write_manifest(&self, id: SealId, seal: &Seal) -> Result<()> {
        let path = self.manifest_path(id);
        let temporary = path.with_extension("new");
        let io = |what: &str, cause| Error::io(format_args!("{what} {}", temporary.display()), cause);
        let scratch_path = path.with_extension("scratch");
        let scratch = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&scratch_path)
            .map_err(|cause| Error::io(format_args!("make {}", scratch_path.display()), cause))?;
        // It has no name from here on, so nothing is left of it whatever happens.
        fs::remove_file(&scratch_path)
            .map_err(|cause| Error::io(format_args!("unlink {}", scratch_path.display()), cause))?;
        let mut writer = manifest::ManifestWriter::new(&seal.path, scratch)?;
        self.add_tree(&mut writer, seal)?;
        // Names and sizes are nobody's business but the engine's; clients get a descriptor.
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(|cause| io("make", cause))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        writer.finish(manifest::Seal { seal: id, version: seal.version, created: seal.created }, &mut out)?;
        out.flush().map_err(|cause| io("write", cause))?;
        out.get_ref().sync_all().map_err(|cause| io("sync", cause))?;
        fs::rename(&temporary, &path).map_err(|cause| io("rename", cause))?;
        File::open(self.folder().join("manifests"))
            .and_then(|folder| folder.sync_all())
            .map_err(|cause| io("sync the folder of", cause))
    }

    /// Depth first, names in byte order within each directory.
    fn add_tree(&self, writer: &mut manifest::ManifestWriter<File>, seal: &Seal) -> Result<()> {
        let at = At::Version(seal.version);
        let root = self.inode_at(seal.root, seal.version)?;
        let root_row = writer.directory(b"", 0, root.mode, root.uid, root.gid)?;
        let mut stack = vec![Walk::new(seal.root, root_row, Vec::new())];
        while let Some(walk) = stack.last_mut() {
            if walk.waiting.is_empty() && !walk.complete {
                let names = self.names_after(walk.directory, walk.after.as_deref(), CHUNK, at)?;
                walk.complete = names.len() < CHUNK;
                walk.after = names.last().map(|item| item.name.clone());
                let wanted: Vec<_> = names
                    .into_iter()
                    .filter(|item| matches!(item.kind, FileKind::File | FileKind::Directory))
                    .collect();
                let keys: Vec<_> = wanted.iter().map(|item| key::inode(item.ino)).collect();
                let inodes = self.store.get_many(&keys, at)?;
                for (item, value) in wanted.into_iter().zip(inodes).rev() {
                    let value = value.ok_or_else(|| no_inode(item.ino))?;
                    walk.waiting.push((item.name, item.ino, Inode::decode(&value)?));
                }
            }
            let Some((name, ino, inode)) = walk.waiting.pop() else {
                stack.pop();
                continue;
            };
            let mut path = walk.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            let row = walk.row;
            if inode.kind == FileKind::Directory {
                let row = writer.directory(&path, row, inode.mode, inode.uid, inode.gid)?;
                stack.push(Walk::new(ino, row, path));
                continue;
            }
            let extents = load_extents(&*self.store, ino, &inode, at)?;
            if extents.iter().any(|extent| matches!(extent.place, Place::Inline { .. })) {
                return Err(Error::internal(format!("inode {ino}: a sealed version holds inline bytes")));
            }
            writer.sample(manifest::Sample {
                directory: row,
                path: &path,
                size: inode.size,
                mtime: inode.mtime,
                mode: inode.mode,
                uid: inode.uid,
                gid: inode.gid,
                ino,
                extents: &extents,
                inline: &[],
            })?;
        }
        Ok(())
    }

    fn inode_at(&self, ino: Ino, version: Version) -> Result<Inode> {
        let value = self.store.get(&key::inode(ino), At::Version(version))?;
        Inode::decode(&value.ok_or_else(|| no_inode(ino))?)
    }
}

/// A directory half-way through.
struct Walk {
    directory: Ino,
    row: u32,
    path: Vec<u8>,
    /// What is read and not yet visited, last first.
    waiting: Vec<(Vec<u8>, Ino, Inode)>,
    after: Option<Vec<u8>>,
    complete: bool,
}

impl Walk {
    fn new(directory: Ino, row: u32, path: Vec<u8>) -> Walk {
        Walk { directory, row, path, waiting: Vec::new(), after: None, complete: false }
    }
}

fn no_seal(id: SealId) -> Error {
    Error::not_found(format!("there is no sealed view {id}"))
}

fn remove_manifest(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(cause) if cause.kind() != ErrorKind::NotFound => {
            Err(Error::io(format_args!("remove {}", path.display()), cause))
        }
        _ => Ok(()),
    }
}

pub fn no_sample(index: u64, samples: u64) -> Error {
    Error::errno(
        errno::EINVAL,
        format!("sample {index} is out of range: the view has {samples}, numbered from 0"),
    )
}
