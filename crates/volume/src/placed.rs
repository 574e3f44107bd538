//! Reads the bytes that extents name, wherever they lie: packs, file segments, the metadata store.

use headrace_base::{Error, Ino, Result};
use headrace_format::key;
use headrace_format::record::{Extent, Place};
use headrace_meta::{At, MetaStore};

use crate::segments::{Fetch, Segments};

/// A file whose bytes are read: of which version, and whether the read may wait.
pub struct Placed<'a> {
    pub store: &'a dyn MetaStore,
    pub segments: &'a Segments,
    pub ino: Ino,
    pub at: At,
    pub fetch: Fetch,
}

impl Placed<'_> {
    /// Fills `out` from `offset` of the file, whose extents there are `needed`; zeros where there is none.
    pub fn read(&self, needed: &[Extent], offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset + out.len() as u64;
        let mut filled = offset;
        for extent in needed {
            let from = extent.file_offset.max(offset);
            let to = (extent.file_offset + extent.length).min(end);
            out[(filled - offset) as usize..(from - offset) as usize].fill(0);
            let part = &mut out[(from - offset) as usize..(to - offset) as usize];
            let skip = from - extent.file_offset;
            match &extent.place {
                Place::Pack { segment, offset, check } => {
                    self.segments.read_pack(*segment, offset + skip, check, part, self.fetch)?
                }
                Place::File { segment, offset } => {
                    self.segments.read_file(*segment, offset + skip, part, self.fetch)?
                }
                Place::Inline { .. } => {
                    let bytes = read_inline(self.store, self.ino, extent, self.at)?;
                    part.copy_from_slice(&bytes[skip as usize..skip as usize + part.len()]);
                }
            }
            filled = to;
        }
        out[(filled - offset) as usize..].fill(0);
        Ok(())
    }
}

/// The bytes of an inline extent.
pub fn read_inline(store: &dyn MetaStore, ino: Ino, extent: &Extent, at: At) -> Result<Vec<u8>> {
    let Place::Inline { slot, offset } = extent.place else {
        return Err(Error::internal("read_inline of an extent that is in a segment"));
    };
    let key = key::inline(ino, slot);
    let value = store.get(&key, at)?.ok_or_else(|| {
        Error::corrupt(format!("inode {ino}: inline bytes {slot} are missing from the metadata"))
    })?;
    let range = offset as usize..(offset + extent.length) as usize;
    value.get(range).map(<[u8]>::to_vec).ok_or_else(|| {
        Error::corrupt(format!("inode {ino}: inline bytes {slot} are {} long, too short", value.len()))
    })
}
