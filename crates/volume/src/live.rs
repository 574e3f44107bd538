//! Inodes in use. While a file is open or has bytes that the store does not know, its `State` here is the
//! truth and the store lags behind; for every other inode the store is.
//!
//! A `Pin` keeps an inode in the table. Open files hold one, and so does the flush queue for whatever is newer
//! than the store: when the last pin goes, nothing is lost. What goes into the store is always
//! `State::committed_record`: attributes as they are, but size and extents only as far as their bytes are
//! durable. A committed extent never names bytes that are not there.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use headrace_base::{Error, Ino, Result};
use headrace_flash::FileSegmentWriter;
use headrace_format::key;
use headrace_format::record::{
    Content, EXTENTS_INLINE_MAX, Extent, FileKind, Inode, decode_extents, encode_extents,
};
use headrace_meta::{At, MetaStore, Write};

use crate::dirty::DirtyRanges;
use crate::extents;
use crate::types::Attr;

const SHARDS: usize = 16;

#[derive(Debug)]
pub struct State {
    /// Attributes as every caller sees them. `content` is kept in `extents` for files.
    pub inode: Inode,
    /// Where the bytes are, appended ones included; `dirty` lies above.
    pub extents: Arc<Vec<Extent>>,
    /// What the store holds.
    pub committed_extents: Arc<Vec<Extent>>,
    pub committed_size: u64,
    pub dirty: DirtyRanges,
    /// Bytes on their way into a segment: beneath `dirty`, above `extents`.
    pub flushing: Option<Arc<DirtyRanges>>,
    /// One flush of an inode at a time; whoever cuts its bytes waits for it too.
    pub busy: bool,
    /// Extents or size are ahead of the store.
    pub uncommitted: bool,
    /// In the flush queue.
    pub queued: bool,
    /// The file segment that grows with this file, while it is written from its start to its end.
    pub writer: Option<FileSegmentWriter>,
    pub opens: u32,
    pub writers: u32,
    /// Deleted from the store: no name, and no longer open.
    pub removed: bool,
    /// A flush failed after bytes had left memory; told once, by the next fsync.
    pub lost: Option<String>,
}

impl State {
    pub fn attr(&self, ino: Ino) -> Attr {
        let mut attr = Attr::of(ino, &self.inode);
        if self.inode.kind == FileKind::File {
            let placed: u64 = self.extents.iter().map(|extent| extent.length).sum();
            let flushing = self.flushing.as_ref().map_or(0, |ranges| ranges.bytes());
            // An upper bound while overwritten bytes wait for their flush; exact once they are placed.
            attr.blocks =
                (placed + flushing + self.dirty.bytes()).min(attr.size.next_multiple_of(4096)).div_ceil(512);
        }
        attr
    }

    /// The inode as it may stand in the store now.
    pub fn committed_record(&self) -> Inode {
        let mut inode = self.inode.clone();
        if inode.kind == FileKind::File {
            inode.size = self.committed_size;
            inode.content = content_of(&self.committed_extents);
        }
        inode
    }

    /// Whether anything of this inode is newer than the store.
    pub fn is_ahead(&self) -> bool {
        self.uncommitted || !self.dirty.is_empty() || self.flushing.is_some()
    }
}

pub fn content_of(extents: &[Extent]) -> Content {
    match extents.len() {
        0 => Content::Empty,
        1..=EXTENTS_INLINE_MAX => Content::Extents(extents.to_vec()),
        _ => Content::Regions,
    }
}

/// The writes that take the store from one list of extents to another: rows of regions that differ. The
/// extents of short lists travel in the inode itself.
pub fn region_writes(ino: Ino, old: &[Extent], new: &[Extent]) -> Vec<Write> {
    let rows = |list| match content_of(list) {
        Content::Regions => extents::regions(list).collect::<HashMap<_, _>>(),
        _ => HashMap::new(),
    };
    let (old, new) = (rows(old), rows(new));
    let mut writes = Vec::new();
    for (region, group) in &new {
        if old.get(region) != Some(group) {
            writes.push(Write::Put(key::extents(ino, *region), encode_extents(group)));
        }
    }
    for region in old.keys().filter(|region| !new.contains_key(region)) {
        writes.push(Write::Delete(key::extents(ino, *region)));
    }
    writes
}

/// The extents of a file as they stand in the store.
pub fn load_extents(store: &dyn MetaStore, ino: Ino, inode: &Inode, at: At) -> Result<Vec<Extent>> {
    match &inode.content {
        Content::Empty | Content::Target(_) => Ok(Vec::new()),
        Content::Extents(extents) => Ok(extents.clone()),
        Content::Regions => {
            let prefix = key::all_extents(ino);
            let mut extents = Vec::new();
            for (_, value) in store.scan(&prefix, &key::end_of(&prefix), usize::MAX, at)? {
                extents.extend(decode_extents(&value)?);
            }
            Ok(extents)
        }
    }
}

pub fn load_inode(store: &dyn MetaStore, ino: Ino, at: At) -> Result<Option<Inode>> {
    store.get(&key::inode(ino), at)?.map(|value| Inode::decode(&value)).transpose()
}

pub fn no_inode(ino: Ino) -> Error {
    Error::not_found(format!("inode {ino} does not exist (any more)"))
}

#[derive(Debug)]
pub struct Live {
    pub ino: Ino,
    state: Mutex<State>,
    /// `busy` ended.
    idle: Condvar,
}

impl Live {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks when no flush of this inode is under way.
    pub fn lock_idle(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while state.busy {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// Ends `busy`.
    pub fn finish(&self, state: &mut State) {
        state.busy = false;
        self.idle.notify_all();
    }
}

#[derive(Debug)]
struct Entry {
    live: Arc<Live>,
    pins: u32,
}

type Shard = Mutex<HashMap<Ino, Entry>>;

#[derive(Debug)]
pub struct LiveTable {
    shards: [Shard; SHARDS],
}

impl Default for LiveTable {
    fn default() -> Self {
        LiveTable { shards: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl LiveTable {
    fn shard(&self, ino: Ino) -> MutexGuard<'_, HashMap<Ino, Entry>> {
        self.shards[ino.0 as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The live inode, loaded from the store if it is not in use yet. NotFound if there is none.
    pub fn pin(self: &Arc<Self>, store: &dyn MetaStore, ino: Ino) -> Result<Pin> {
        let mut shard = self.shard(ino);
        if let Some(entry) = shard.get_mut(&ino) {
            entry.pins += 1;
            return Ok(Pin { table: Arc::clone(self), live: Arc::clone(&entry.live) });
        }
        let inode = load_inode(store, ino, At::Latest)?.ok_or_else(|| no_inode(ino))?;
        let extents = load_extents(store, ino, &inode, At::Latest)?;
        Ok(self.insert(&mut shard, ino, inode, extents))
    }

    /// A new inode that the caller has just put into the store.
    pub fn pin_new(self: &Arc<Self>, ino: Ino, inode: Inode) -> Pin {
        let mut shard = self.shard(ino);
        debug_assert!(!shard.contains_key(&ino), "inode numbers are never reused");
        self.insert(&mut shard, ino, inode, Vec::new())
    }

    fn insert(
        self: &Arc<Self>,
        shard: &mut HashMap<Ino, Entry>,
        ino: Ino,
        inode: Inode,
        extents: Vec<Extent>,
    ) -> Pin {
        let extents = Arc::new(extents);
        let state = State {
            committed_size: inode.size,
            inode,
            committed_extents: Arc::clone(&extents),
            extents,
            dirty: DirtyRanges::default(),
            flushing: None,
            busy: false,
            uncommitted: false,
            queued: false,
            writer: None,
            opens: 0,
            writers: 0,
            removed: false,
            lost: None,
        };
        let live = Arc::new(Live { ino, state: Mutex::new(state), idle: Condvar::new() });
        shard.insert(ino, Entry { live: Arc::clone(&live), pins: 1 });
        Pin { table: Arc::clone(self), live }
    }

    /// The inode if it is in use.
    pub fn find(self: &Arc<Self>, ino: Ino) -> Option<Pin> {
        let mut shard = self.shard(ino);
        let entry = shard.get_mut(&ino)?;
        entry.pins += 1;
        Some(Pin { table: Arc::clone(self), live: Arc::clone(&entry.live) })
    }

    /// Reads anew what the store holds of every inode in use. Nothing may be ahead of the store, and nothing may
    /// change meanwhile.
    pub fn reload(self: &Arc<Self>, store: &dyn MetaStore) -> Result<()> {
        for pin in self.all() {
            let mut state = pin.lock_idle();
            match load_inode(store, pin.ino, At::Latest)? {
                Some(inode) => {
                    let extents = Arc::new(load_extents(store, pin.ino, &inode, At::Latest)?);
                    state.committed_size = inode.size;
                    state.inode = inode;
                    state.committed_extents = Arc::clone(&extents);
                    state.extents = extents;
                    state.removed = false;
                }
                None => {
                    state.removed = true;
                    state.inode.nlink = 0;
                }
            }
        }
        Ok(())
    }

    pub fn all(self: &Arc<Self>) -> Vec<Pin> {
        let mut pins = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for entry in shard.values_mut() {
                entry.pins += 1;
                pins.push(Pin { table: Arc::clone(self), live: Arc::clone(&entry.live) });
            }
        }
        pins
    }
}

/// Keeps an inode in the table.
#[derive(Debug)]
pub struct Pin {
    table: Arc<LiveTable>,
    live: Arc<Live>,
}

impl std::ops::Deref for Pin {
    type Target = Live;

    fn deref(&self) -> &Live {
        &self.live
    }
}

impl Clone for Pin {
    fn clone(&self) -> Pin {
        let mut shard = self.table.shard(self.live.ino);
        shard.get_mut(&self.live.ino).expect("a pinned inode is in the table").pins += 1;
        Pin { table: Arc::clone(&self.table), live: Arc::clone(&self.live) }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut shard = self.table.shard(self.live.ino);
        if let Some(entry) = shard.get_mut(&self.live.ino) {
            entry.pins -= 1;
            if entry.pins == 0 {
                shard.remove(&self.live.ino);
            }
        }
    }
}
