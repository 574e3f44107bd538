//! What differs between two snapshots, or a snapshot and the present, as paths. Costs what changed, not what there
//! is: the store says which rows were written in between. Given out in pages, without a memory in between: a
//! cursor is the next key to look at.
//!
//! 1. Names: every entry of a directory that was written. Gone here and there anew, with the same inode, is a
//!    rename; a file with several names is taken as removed and added.
//! 2. Inodes that are in both: contents, owner, mode, times, attributes. Bytes that only moved (into a pack, out of
//!    fragments) are no change. An inode knows the directory of its name; the name is looked for there.
//!
//! A path is the one of the later state, of what was removed the one of the earlier.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use headrace_base::{Error, Ino, Result, Version};
use headrace_format::key::{self, Key};
use headrace_format::record::{Content, Dentry, FileKind, Inode};
use headrace_meta::At;

use crate::live::load_inode;
use crate::volume::Volume;

/// Keys looked at for one page at most. What they take is bounded, whatever they are.
const PAGE_KEYS_MAX: usize = 10_000;
/// Names read at once.
const CHUNK: usize = 4096;
/// In a directory of which more names changed, a rename shows as removed and added.
const MOVES_MAX: usize = 200_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Added,
    Removed,
    Changed,
    Renamed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub change: ChangeKind,
    pub kind: FileKind,
    /// Absolute in the volume.
    pub path: Vec<u8>,
    /// Where it was before, if it was renamed.
    pub from: Option<Vec<u8>>,
}

/// The two states, and what was learned of them for one page.
struct Page<'a> {
    volume: &'a Volume,
    after: Version,
    from: At,
    to: At,
    old_paths: HashMap<Ino, Option<Vec<u8>>>,
    new_paths: HashMap<Ino, Option<Vec<u8>>>,
    gone: HashMap<Ino, HashMap<Ino, Vec<u8>>>,
    come: HashMap<Ino, HashMap<Ino, Vec<u8>>>,
}

impl Volume {
    /// What changed from snapshot `from` to snapshot `to`, which is later, or to the present (None). At most
    /// `limit` names and inodes are looked at. `after`: what the call before gave; None at the end. Names of files
    /// are told to whoever may ask at all: rights are the caller's to check.
    pub fn snapshot_diff(
        &self,
        from: &[u8],
        to: Option<&[u8]>,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<(Vec<Difference>, Option<Vec<u8>>)> {
        let older = self.snapshot_record(from)?.version;
        let _older = self.cleaner.pinned.pin(older);
        let newer = to.map(|to| Ok::<_, Error>(self.snapshot_record(to)?.version)).transpose()?;
        let _newer = newer.map(|newer| self.cleaner.pinned.pin(newer));
        // Pinned too late if one was deleted between.
        self.snapshot_record(from)?;
        to.map(|to| self.snapshot_record(to)).transpose()?;
        if newer.is_some_and(|newer| newer < older) {
            return Err(Error::invalid("the second snapshot is older than the first: exchange them"));
        }
        if newer.is_none() && after.is_none() {
            self.flusher.flush_all()?;
        }
        let mut page = Page {
            volume: self,
            after: older,
            from: At::Version(older),
            to: newer.map_or(At::Latest, At::Version),
            old_paths: HashMap::from([(Ino::ROOT, Some(Vec::new()))]),
            new_paths: HashMap::from([(Ino::ROOT, Some(Vec::new()))]),
            gone: HashMap::new(),
            come: HashMap::new(),
        };
        let limit = limit.clamp(1, PAGE_KEYS_MAX);
        let start = after.unwrap_or(b"e");
        if start < b"f".as_slice() {
            let keys = self.store.written(older, page.to, start.max(b"e"), b"f", limit)?;
            let differences = page.names(&keys)?;
            let next = match keys.last() {
                Some(last) if keys.len() == limit => [&last[..], &[0]].concat(),
                _ => b"i".to_vec(),
            };
            return Ok((differences, Some(next)));
        }
        let keys = self.store.written(older, page.to, start.max(b"i"), b"j", limit)?;
        let differences = page.inodes(&keys)?;
        let next = match keys.last() {
            Some(last) if keys.len() == limit => Some([&last[..], &[0]].concat()),
            _ => None,
        };
        Ok((differences, next))
    }
}

impl Page<'_> {
    fn names(&mut self, keys: &[Key]) -> Result<Vec<Difference>> {
        let store = &self.volume.store;
        let dentries = |values: Vec<Option<Vec<u8>>>| -> Result<Vec<Option<Dentry>>> {
            values.into_iter().map(|value| value.map(|value| Dentry::decode(&value)).transpose()).collect()
        };
        let was = dentries(store.get_many(keys, self.from)?)?;
        let is = dentries(store.get_many(keys, self.to)?)?;
        let mut found = Vec::new();
        for ((key, was), is) in keys.iter().zip(was).zip(is) {
            let Some(directory) = key::ino_of(key) else { continue };
            let name = key::name_of(key);
            match (was, is) {
                (Some(was), Some(is)) if was.ino == is.ino => {}
                (None, None) => {}
                (was, Some(is)) => {
                    let Some(path) = self.path(directory, name, false)? else { continue };
                    let renamed = self.old_name(is)?.filter(|old| *old != path);
                    let change = match (&renamed, was) {
                        (Some(_), _) => ChangeKind::Renamed,
                        (None, Some(was)) if was.kind == is.kind => ChangeKind::Changed,
                        (None, Some(was)) => {
                            let path = path.clone();
                            found.push(Difference {
                                change: ChangeKind::Removed,
                                kind: was.kind,
                                path,
                                from: None,
                            });
                            ChangeKind::Added
                        }
                        (None, None) => ChangeKind::Added,
                    };
                    found.push(Difference { change, kind: is.kind, path, from: renamed });
                }
                (Some(was), None) => {
                    if self.new_name(was)?.is_none()
                        && let Some(path) = self.path(directory, name, true)?
                    {
                        found.push(Difference {
                            change: ChangeKind::Removed,
                            kind: was.kind,
                            path,
                            from: None,
                        });
                    }
                }
            }
        }
        Ok(found)
    }

    /// The inode in both states, if it is in both and has one name in each.
    fn both(&self, dentry: Dentry) -> Result<Option<(Inode, Inode)>> {
        let store = &*self.volume.store;
        let was = load_inode(store, dentry.ino, self.from)?;
        let is = load_inode(store, dentry.ino, self.to)?;
        Ok(was
            .zip(is)
            .filter(|(was, is)| dentry.kind == FileKind::Directory || (was.nlink == 1 && is.nlink == 1)))
    }

    /// The path that an inode had, if its name of now is another's.
    fn old_name(&mut self, is: Dentry) -> Result<Option<Vec<u8>>> {
        let Some((was, _)) = self.both(is)? else { return Ok(None) };
        let Some(name) = self.moved(was.parent, is.ino, true)? else { return Ok(None) };
        self.path(was.parent, &name, true)
    }

    fn new_name(&mut self, was: Dentry) -> Result<Option<Vec<u8>>> {
        let Some((_, is)) = self.both(was)? else { return Ok(None) };
        let Some(name) = self.moved(is.parent, was.ino, false)? else { return Ok(None) };
        self.path(is.parent, &name, false)
    }

    /// The name of an inode among those of a directory that are gone (`old`), or that have come.
    fn moved(&mut self, directory: Ino, ino: Ino, old: bool) -> Result<Option<Vec<u8>>> {
        let known = if old { &mut self.gone } else { &mut self.come };
        if let Some(names) = known.get(&directory) {
            return Ok(names.get(&ino).cloned());
        }
        let (here, there) = if old { (self.from, self.to) } else { (self.to, self.from) };
        let store = &self.volume.store;
        let prefix = key::dentries(directory);
        let mut names = HashMap::new();
        self.volume.each_written(self.after, self.to, (&prefix, &key::end_of(&prefix)), |keys| {
            for ((key, here), there) in
                keys.iter().zip(store.get_many(keys, here)?).zip(store.get_many(keys, there)?)
            {
                if let Some(here) = here.filter(|_| names.len() < MOVES_MAX) {
                    let here = Dentry::decode(&here)?.ino;
                    let there = there.map(|there| Dentry::decode(&there)).transpose()?;
                    if there.is_none_or(|there| there.ino != here) {
                        names.insert(here, key::name_of(key).to_vec());
                    }
                }
            }
            Ok(())
        })?;
        let name = names.get(&ino).cloned();
        known.insert(directory, names);
        Ok(name)
    }

    fn inodes(&mut self, keys: &[Key]) -> Result<Vec<Difference>> {
        let store = &self.volume.store;
        let decode = |values: Vec<Option<Vec<u8>>>| -> Result<Vec<Option<Inode>>> {
            values.into_iter().map(|value| value.map(|value| Inode::decode(&value)).transpose()).collect()
        };
        let was = decode(store.get_many(keys, self.from)?)?;
        let is = decode(store.get_many(keys, self.to)?)?;
        // Those that differ, by the directory that they say they are in.
        let mut wanted: HashMap<Ino, HashMap<Ino, (Inode, Inode)>> = HashMap::new();
        for ((key, was), is) in keys.iter().zip(was).zip(is) {
            if let (Some(ino), Some(was), Some(is)) = (key::ino_of(key), was, is)
                && was.nlink > 0
                && is.nlink > 0
                && (was.ctime != is.ctime || differs(&was, &is))
            {
                wanted.entry(is.parent).or_default().insert(ino, (was, is));
            }
        }
        let mut found = Vec::new();
        let root = wanted.get_mut(&Ino::ROOT).and_then(|inodes| inodes.remove(&Ino::ROOT));
        if let Some((was, is)) = root
            && (differs(&was, &is) || was.ctime != is.ctime)
        {
            let path = b"/".to_vec();
            found.push(Difference {
                change: ChangeKind::Changed,
                kind: FileKind::Directory,
                path,
                from: None,
            });
        }
        let mut lost: HashMap<Ino, (Inode, Inode)> = HashMap::new();
        for (directory, mut inodes) in wanted {
            let inos: HashSet<Ino> = inodes.keys().copied().collect();
            for (ino, name) in self.names_of(directory, &inos, self.to)? {
                if let Some(states) = inodes.remove(&ino) {
                    self.note_changed(directory, &name, ino, &states, &mut found)?;
                }
            }
            lost.extend(inodes);
        }
        if !lost.is_empty() {
            // Files with several names, that are elsewhere than they were last moved to: all names are looked at.
            let inos: HashSet<Ino> = lost.keys().copied().collect();
            for (directory, name, ino) in self.search(&inos)? {
                if let Some(states) = lost.remove(&ino) {
                    self.note_changed(directory, &name, ino, &states, &mut found)?;
                }
            }
        }
        found.sort_by(|left, right| left.path.cmp(&right.path));
        Ok(found)
    }

    fn note_changed(
        &mut self,
        directory: Ino,
        name: &[u8],
        ino: Ino,
        (was, is): &(Inode, Inode),
        found: &mut Vec<Difference>,
    ) -> Result<()> {
        // A change of the ctime alone is one of attributes, unless the names were what changed.
        let old = self.volume.store.get(&key::dentry(directory, name), self.from)?;
        let same_name = match old {
            Some(old) => Dentry::decode(&old)?.ino == ino,
            None => false,
        };
        if (differs(was, is) || (same_name && was.nlink == is.nlink))
            && let Some(path) = self.path(directory, name, false)?
        {
            found.push(Difference { change: ChangeKind::Changed, kind: is.kind, path, from: None });
        }
        Ok(())
    }

    /// The names of these inodes in a directory.
    fn names_of(&self, directory: Ino, wanted: &HashSet<Ino>, at: At) -> Result<Vec<(Ino, Vec<u8>)>> {
        let mut found: HashMap<Ino, Vec<u8>> = HashMap::new();
        let mut after: Option<Vec<u8>> = None;
        while found.len() < wanted.len() {
            let names = self.volume.names_after(directory, after.as_deref(), CHUNK, at)?;
            for item in &names {
                if wanted.contains(&item.ino)
                    && let Entry::Vacant(entry) = found.entry(item.ino)
                {
                    entry.insert(item.name.clone());
                }
            }
            if names.len() < CHUNK {
                break;
            }
            after = names.last().map(|item| item.name.clone());
        }
        Ok(found.into_iter().collect())
    }

    /// One name of each of these inodes, by a look at all there are.
    fn search(&self, wanted: &HashSet<Ino>) -> Result<Vec<(Ino, Vec<u8>, Ino)>> {
        let mut found = HashMap::new();
        let mut start = b"e".to_vec();
        while found.len() < wanted.len() {
            let rows = self.volume.store.scan(&start, b"f", CHUNK, self.to)?;
            for (key, value) in &rows {
                let ino = Dentry::decode(value)?.ino;
                if wanted.contains(&ino)
                    && let Some(directory) = key::ino_of(key)
                {
                    found.entry(ino).or_insert_with(|| (directory, key::name_of(key).to_vec()));
                }
            }
            match rows.last() {
                Some((last, _)) if rows.len() == CHUNK => start = [&last[..], &[0]].concat(),
                _ => break,
            }
        }
        Ok(found.into_iter().map(|(ino, (directory, name))| (directory, name, ino)).collect())
    }

    /// The path of a name in a directory, in the earlier or in the later state. None: it cannot be reached.
    fn path(&mut self, directory: Ino, name: &[u8], old: bool) -> Result<Option<Vec<u8>>> {
        let path = self.directory_path(directory, old)?;
        Ok(path.map(|path| [&path[..], b"/", name].concat()))
    }

    /// Without a slash at the end.
    fn directory_path(&mut self, directory: Ino, old: bool) -> Result<Option<Vec<u8>>> {
        let at = if old { self.from } else { self.to };
        let mut unknown = Vec::new();
        let mut current = directory;
        let mut path = loop {
            let known = if old { &self.old_paths } else { &self.new_paths };
            if let Some(path) = known.get(&current) {
                break path.clone();
            }
            let Some(inode) = load_inode(&*self.volume.store, current, at)? else { break None };
            let wanted = HashSet::from([current]);
            let Some((_, name)) = self.name_in(inode.parent, current, &wanted, at)? else { break None };
            unknown.push((current, name));
            current = inode.parent;
        };
        for (ino, name) in unknown.into_iter().rev() {
            path = path.map(|path| [&path[..], b"/", &name].concat());
            let known = if old { &mut self.old_paths } else { &mut self.new_paths };
            known.insert(ino, path.clone());
        }
        Ok(path)
    }

    /// The name of a directory in its parent: the one that was seen last, if it still is right.
    fn name_in(
        &self,
        parent: Ino,
        ino: Ino,
        wanted: &HashSet<Ino>,
        at: At,
    ) -> Result<Option<(Ino, Vec<u8>)>> {
        if let Some((seen_in, name)) = self.volume.names.last(ino)
            && seen_in == parent
            && let Some(value) = self.volume.store.get(&key::dentry(parent, &name), at)?
            && Dentry::decode(&value)?.ino == ino
        {
            return Ok(Some((ino, name)));
        }
        Ok(self.names_of(parent, wanted, at)?.pop())
    }
}

/// Whether an inode differs in what a person sees of it, times of metadata and places of bytes left out.
fn differs(was: &Inode, is: &Inode) -> bool {
    let target = |inode: &Inode| match &inode.content {
        Content::Target(target) => Some(target.clone()),
        _ => None,
    };
    (was.kind, was.mode, was.uid, was.gid, was.rdev, was.size, was.mtime)
        != (is.kind, is.mode, is.uid, is.gid, is.rdev, is.size, is.mtime)
        || target(was) != target(is)
}
