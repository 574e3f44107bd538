//! A frozen subtree, read through its manifest: no store, no locks. Everything it names is in segments that the
//! seal keeps alive, or in the manifest itself.

use std::fs::File;
use std::sync::Arc;

use headrace_base::error::errno;
use headrace_base::ids::SealId;
use headrace_base::{Error, Result, Version, crc32c};
use headrace_format::manifest::{Manifest, Place};
use headrace_format::message;
use headrace_format::record::SegmentKind;
use memmap2::Mmap;
use serde_bytes::ByteBuf;

use crate::by_path::Access;
use crate::namespace::shown;
use crate::seal::no_sample;
use crate::segments::{Fetch, Segments, lost};
use crate::types::Identity;
use crate::versions::VersionPin;

#[derive(Debug)]
pub struct SealedView {
    id: SealId,
    file: File,
    manifest: Manifest<Mmap>,
    segments: Arc<Segments>,
    /// Keeps what the view names, also when its seal is deleted.
    _version: VersionPin,
    read_bytes: metrics::Counter,
}

impl SealedView {
    pub(crate) fn open(
        id: SealId,
        file: File,
        segments: Arc<Segments>,
        version: VersionPin,
    ) -> Result<SealedView> {
        // SAFETY: the engine writes a manifest once, under another name, and never changes or shortens it; the
        // volume's folder belongs to the engine's user alone.
        let map = unsafe { Mmap::map(&file) }
            .map_err(|cause| Error::io(format_args!("map the manifest of sealed view {id}"), cause))?;
        // Once, for all who will read it: 15 ms for a million samples.
        let manifest = Manifest::open(map)
            .and_then(|manifest| manifest.verify().map(|()| manifest))
            .map_err(|error| error.context(format_args!("the manifest of sealed view {id}")))?;
        Ok(SealedView {
            id,
            file,
            manifest,
            segments,
            _version: version,
            read_bytes: metrics::counter!("headrace_read_bytes_total"),
        })
    }

    pub fn id(&self) -> SealId {
        self.id
    }

    pub fn version(&self) -> Version {
        self.manifest.version()
    }

    pub fn describe(&self) -> message::Sealed {
        message::Sealed {
            seal: self.id.to_string(),
            version: self.manifest.version().0,
            path: ByteBuf::from(self.manifest.root_path().to_vec()),
            samples: self.manifest.samples(),
            bytes: self.manifest.bytes(),
            manifest_bytes: self.manifest.as_bytes().len() as u64,
            created_ns: self.manifest.created().0,
        }
    }

    /// For passing its descriptor; open for reading only.
    pub fn manifest_file(&self) -> &File {
        &self.file
    }

    pub fn samples(&self) -> u64 {
        self.manifest.samples()
    }

    /// The sum of the samples' sizes.
    pub fn bytes(&self) -> u64 {
        self.manifest.bytes()
    }

    fn check(&self, index: u64) -> Result<()> {
        if index < self.samples() { Ok(()) } else { Err(no_sample(index, self.samples())) }
    }

    /// Invalid if out of range.
    pub fn sample_bytes(&self, index: u64) -> Result<u64> {
        self.check(index)?;
        Ok(self.manifest.size(index))
    }

    /// Neighbours on disk sort together by it. An unknown sample sorts last.
    pub fn sample_place(&self, index: u64) -> (u128, u64) {
        if index >= self.samples() {
            return (u128::MAX, 0);
        }
        match self.manifest.extents(index).next().map(|extent| extent.place) {
            Some(Place::Pack { segment, offset, .. } | Place::File { segment, offset }) => {
                (segment.0, offset)
            }
            _ => (0, 0),
        }
    }

    /// In how many pieces the sample lies.
    pub fn sample_extents(&self, index: u64) -> usize {
        if index < self.samples() { self.manifest.extents(index).len() } else { 0 }
    }

    /// Relative to the sealed root.
    pub fn sample_path(&self, index: u64) -> Vec<u8> {
        if index < self.samples() { self.manifest.path(index).to_vec() } else { Vec::new() }
    }

    /// Whether `who` may read the sample's bytes: the file's mode, and search permission within the view.
    pub fn check_readable(&self, who: &Identity, index: u64) -> Result<()> {
        self.check(index)?;
        let file = &self.manifest;
        let mut given = Access::READ.is_given(who, file.mode(index), file.uid(index), file.gid(index), false);
        let mut row = file.directory(index);
        while given {
            let directory = file.dir(row);
            given = Access::SEARCH.is_given(who, directory.mode, directory.uid, directory.gid, true);
            if row == 0 {
                break;
            }
            row = directory.parent;
        }
        if given {
            return Ok(());
        }
        Err(Error::errno(
            errno::EACCES,
            format!("user {} may not read sample {index}, {:?}", who.uid, shown(file.path(index))),
        ))
    }

    /// Every directory in the view can be read and searched: `who` may see the names.
    pub fn check_listable(&self, who: &Identity) -> Result<()> {
        let list = Access { read: true, write: false, execute: true };
        for row in 0..self.manifest.directories() {
            let directory = self.manifest.dir(row);
            if !list.is_given(who, directory.mode, directory.uid, directory.gid, true) {
                return Err(Error::errno(
                    errno::EACCES,
                    format!(
                        "user {} may not list {:?} of sealed view {}",
                        who.uid,
                        shown(directory.path),
                        self.id
                    ),
                ));
            }
        }
        Ok(())
    }

    /// True if `who` may read every sample without asking.
    pub fn all_readable(&self, who: &Identity) -> bool {
        who.is_root()
    }

    /// Starts fetching what of a sample is not on flash, and waits for nothing.
    pub fn prefetch(&self, index: u64) {
        if self.segments.remote.is_none() || index >= self.samples() {
            return;
        }
        for extent in self.manifest.extents(index) {
            match extent.place {
                Place::Pack { segment, offset, .. } => {
                    self.segments.prefetch(segment, SegmentKind::Pack, offset, extent.length);
                }
                Place::File { segment, offset } => {
                    self.segments.prefetch(segment, SegmentKind::File, offset, extent.length);
                }
                Place::Inline { .. } => {}
            }
        }
    }

    /// Fills `out`, exactly `sample_bytes(index)` long, verified.
    pub fn read_sample(&self, index: u64, out: &mut [u8]) -> Result<()> {
        self.check(index)?;
        if out.len() as u64 != self.manifest.size(index) {
            return Err(Error::internal(format!("sample {index} needs {} bytes", self.manifest.size(index))));
        }
        let mut filled = 0;
        for extent in self.manifest.extents(index) {
            let (start, end) = (extent.file_offset as usize, (extent.file_offset + extent.length) as usize);
            out[filled..start].fill(0);
            let part = &mut out[start..end];
            match extent.place {
                Place::Pack { segment, offset, check } => {
                    self.segments.read_pack(segment, offset, &check.to_record(), part, Fetch::Wait)
                }
                Place::File { segment, offset } => self.segments.read_file(segment, offset, part, Fetch::Wait),
                Place::Inline { bytes, crc } if crc32c(bytes) == crc => {
                    part.copy_from_slice(bytes);
                    Ok(())
                }
                Place::Inline { bytes, crc } => Err(Error::corrupt(format!(
                    "the manifest of sealed view {} holds {} bytes whose CRC32C is {:08x}, expected {crc:08x}",
                    self.id,
                    bytes.len(),
                    crc32c(bytes)
                ))),
            }
            .map_err(|error| {
                lost(error).context(format_args!("sample {index}, {:?}", shown(self.manifest.path(index))))
            })?;
            filled = end;
        }
        out[filled..].fill(0);
        self.read_bytes.increment(out.len() as u64);
        Ok(())
    }
}
