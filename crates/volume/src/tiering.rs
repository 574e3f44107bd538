//! Where files are, by path: how much is on flash, bringing it there, taking it away.

use std::collections::HashSet;
use std::ops::Range;

use headrace_base::error::errno;
use headrace_base::{Error, Result, SegmentId};
use headrace_format::message;
use headrace_format::record::{FileKind, Place, SegmentKind};
use serde_bytes::ByteBuf;

use crate::by_path::Access;
use crate::types::Identity;
use crate::volume::Volume;

/// A stretch of a segment.
type Stretch = (SegmentId, SegmentKind, Range<u64>);

impl Volume {
    /// How much of these files is where.
    pub fn tier_report(&self, who: &Identity, paths: &[ByteBuf]) -> Result<message::TierReport> {
        let mut report = message::TierReport::default();
        for path in paths {
            let Some((size, stretches)) = self.stretches(who, path)? else { continue };
            report.files += 1;
            report.bytes += size;
            for (segment, kind, range) in stretches {
                let bytes = range.end - range.start;
                match &self.segments.remote {
                    None => report.flash_bytes += bytes,
                    Some(remote) => {
                        report.flash_bytes += remote.bytes_here(segment, kind, range);
                        if remote.uploads.is_dirty(segment) {
                            report.dirty_bytes += bytes;
                        }
                    }
                }
            }
        }
        Ok(report)
    }

    /// Brings all of these files to flash, many at a time, and waits until they are there. As far as there is room:
    /// with a flash tier that is smaller than the files, the last ones are there.
    pub fn warm(&self, who: &Identity, paths: &[ByteBuf]) -> Result<message::TierReport> {
        if let Some(remote) = &self.segments.remote {
            let mut wanted = Vec::new();
            for path in paths {
                if let Some((_, stretches)) = self.stretches(who, path)? {
                    wanted.extend(stretches);
                }
            }
            for (segment, kind, range) in &wanted {
                remote.prefetch(*segment, *kind, range.clone());
            }
            for (segment, kind, range) in wanted {
                remote.bring(segment, kind, range)?;
            }
        }
        self.tier_report(who, paths)
    }

    /// Removes what is in the object tier too from flash: the segments that hold these files, or all. Gives the bytes
    /// that this freed. All: root and the engine's user only.
    pub fn evict(&self, who: &Identity, paths: Option<&[ByteBuf]>) -> Result<message::Evicted> {
        let only = match paths {
            Some(paths) => {
                let mut segments = HashSet::new();
                for path in paths {
                    if let Some((_, stretches)) = self.stretches(who, path)? {
                        segments.extend(stretches.into_iter().map(|(segment, _, _)| segment));
                    }
                }
                Some(segments)
            }
            None if who.is_root() || who.uid == rustix::process::geteuid().as_raw() => None,
            None => {
                return Err(Error::errno(
                    errno::EPERM,
                    "only root and the engine's user may evict everything",
                ));
            }
        };
        let Some(remote) = &self.segments.remote else {
            return Err(Error::invalid(
                "the volume has no object tier: what is on its disk is the only copy, nothing can be evicted",
            ));
        };
        Ok(message::Evicted { bytes: remote.evict(only.as_ref())? })
    }

    /// A file's size, and where its bytes are in segments; None: not a file.
    fn stretches(&self, who: &Identity, path: &[u8]) -> Result<Option<(u64, Vec<Stretch>)>> {
        let attr = self.resolve(who, path, false)?;
        if attr.kind != FileKind::File {
            return Ok(None);
        }
        self.check_access(who, &attr, Access::READ)?;
        let pin = self.live.pin(&*self.store, attr.ino)?;
        let extents = pin.lock().extents.clone();
        let stretches = extents.iter().filter_map(|extent| match extent.place {
            Place::Pack { segment, offset, .. } => {
                Some((segment, SegmentKind::Pack, offset..offset + extent.length))
            }
            Place::File { segment, offset } => {
                Some((segment, SegmentKind::File, offset..offset + extent.length))
            }
            Place::Inline { .. } => None,
        });
        Ok(Some((attr.size, stretches.collect())))
    }
}
