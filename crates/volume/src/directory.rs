//! Listings. An open directory remembers the names it has given out, so that a cursor into it means the same
//! name however many are unlinked in between (`rm -rf` reads and unlinks by turns). What was created after the
//! listing passed its place may be missing; what was there throughout is there once.

use std::sync::{Arc, Mutex, PoisonError};

use headrace_base::{Ino, Result};
use headrace_format::key::{self, name_of};
use headrace_format::record::{Dentry, FileKind};
use headrace_meta::At;

use crate::live::Pin;
use crate::past::Place;
use crate::types::DirItem;
use crate::volume::Volume;

/// Names fetched from the store at once.
const CHUNK: usize = 1024;

impl Volume {
    pub fn open_dir(self: &Arc<Self>, ino: Ino) -> Result<OpenDir> {
        let (parent, pin) = match self.place(ino)? {
            Place::Live => {
                let parent = self.directory_inode(ino)?.parent;
                let pin = self.live.pin(&*self.store, ino)?;
                pin.lock().opens += 1;
                (parent, Some(pin))
            }
            past => (self.open_dir_past(&past)?, None),
        };
        Ok(OpenDir { volume: Arc::clone(self), ino, pin, parent, listing: Mutex::default() })
    }

    /// Names of a directory greater than `after`, in byte order. Cursors are of no use here and are 0.
    pub fn names_after(
        &self,
        directory: Ino,
        after: Option<&[u8]>,
        limit: usize,
        at: At,
    ) -> Result<Vec<DirItem>> {
        let start = match after {
            // The smallest name that is greater.
            Some(name) => key::dentry(directory, &[name, &[0]].concat()),
            None => key::dentries(directory),
        };
        let end = key::end_of(&key::dentries(directory));
        self.store
            .scan(&start, &end, limit, at)?
            .into_iter()
            .map(|(key, value)| {
                let dentry = Dentry::decode(&value)?;
                Ok(DirItem { name: name_of(&key).to_vec(), ino: dentry.ino, kind: dentry.kind, cursor: 0 })
            })
            .collect()
    }
}

#[derive(Debug, Default)]
struct Listing {
    items: Vec<DirItem>,
    complete: bool,
}

#[derive(Debug)]
pub struct OpenDir {
    volume: Arc<Volume>,
    ino: Ino,
    /// None: of a snapshot.
    pin: Option<Pin>,
    parent: Ino,
    listing: Mutex<Listing>,
}

impl OpenDir {
    pub fn ino(&self) -> Ino {
        self.ino
    }

    /// "." and ".." first, then names in byte order. `cursor` 0 starts anew; at most `limit` items.
    pub fn read(&self, cursor: u64, limit: usize) -> Result<Vec<DirItem>> {
        let mut listing = self.listing.lock().unwrap_or_else(PoisonError::into_inner);
        if cursor == 0 {
            *listing = Listing::default();
            for (name, ino) in [(b".".to_vec(), self.ino), (b"..".to_vec(), self.parent)] {
                let cursor = listing.items.len() as u64 + 1;
                listing.items.push(DirItem { name, ino, kind: FileKind::Directory, cursor });
            }
        }
        let start = usize::try_from(cursor).unwrap_or(usize::MAX);
        while !listing.complete && listing.items.len() < start.saturating_add(limit) {
            let after = match &listing.items[..] {
                [_, _, .., last] => Some(last.name.clone()),
                _ => None,
            };
            let more = self.volume.names_in(self.ino, after.as_deref(), CHUNK)?;
            listing.complete = more.len() < CHUNK;
            for mut item in more {
                item.cursor = listing.items.len() as u64 + 1;
                listing.items.push(item);
            }
        }
        let items = listing.items.get(start..).unwrap_or_default();
        Ok(items[..items.len().min(limit)].to_vec())
    }
}

impl Drop for OpenDir {
    fn drop(&mut self) {
        if let Some(pin) = &self.pin {
            pin.lock().opens -= 1;
        }
    }
}
