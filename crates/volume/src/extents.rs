//! The map from file offsets to places, as a sorted list of extents that never overlap. Pure.
//!
//! New extents cover old ones: `overlay` cuts what lies beneath. Extents that continue each other in one file
//! segment become one, so a file of any length that was written in one go has a single extent.

use headrace_format::CHUNK;
use headrace_format::record::{Check, Extent, Place, REGION};

/// The parts of `extents` that touch [start, end), in order; at most whole extents, uncut.
pub fn touching(extents: &[Extent], start: u64, end: u64) -> &[Extent] {
    let first = extents.partition_point(|extent| extent.file_offset + extent.length <= start);
    let count = extents[first..].partition_point(|extent| extent.file_offset < end);
    &extents[first..first + count]
}

/// Lays `upper` (sorted, not overlapping) over `lower`.
pub fn overlay(lower: &[Extent], upper: Vec<Extent>) -> Vec<Extent> {
    let mut merged: Vec<Extent> = Vec::with_capacity(lower.len() + upper.len());
    let mut upper = upper.into_iter().peekable();
    for old in lower {
        let mut start = old.file_offset;
        let end = old.file_offset + old.length;
        while let Some(new) = upper.peek() {
            if new.file_offset >= end {
                break;
            }
            let new_end = new.file_offset + new.length;
            if new.file_offset > start {
                push(&mut merged, cut(old, start, new.file_offset));
            }
            start = start.max(new_end);
            if new_end > end {
                // It reaches into what follows: keep it for the next old extent.
                break;
            }
            push(&mut merged, upper.next().expect("peeked"));
        }
        if start < end {
            push(&mut merged, cut(old, start, end));
        }
    }
    for new in upper {
        push(&mut merged, new);
    }
    merged
}

/// What is left below `size`.
pub fn truncate(extents: &[Extent], size: u64) -> Vec<Extent> {
    extents
        .iter()
        .filter(|extent| extent.file_offset < size)
        .map(|extent| cut(extent, extent.file_offset, size.min(extent.file_offset + extent.length)))
        .collect()
}

/// Groups by the 64 MiB of the file that an extent begins in.
pub fn regions(extents: &[Extent]) -> impl Iterator<Item = (u32, &[Extent])> {
    extents
        .chunk_by(|left, right| left.file_offset / REGION == right.file_offset / REGION)
        .map(|group| ((group[0].file_offset / REGION) as u32, group))
}

fn push(list: &mut Vec<Extent>, next: Extent) {
    if let Some(last) = list.last_mut()
        && last.file_offset + last.length == next.file_offset
        && let Place::File { segment, offset } = last.place
        && next.place == (Place::File { segment, offset: offset + last.length })
    {
        last.length += next.length;
        return;
    }
    list.push(next);
}

/// The part of an extent in [start, end) of the file.
pub fn cut(extent: &Extent, start: u64, end: u64) -> Extent {
    let skip = start - extent.file_offset;
    let length = end - start;
    let place = match &extent.place {
        Place::File { segment, offset } => Place::File { segment: *segment, offset: offset + skip },
        Place::Inline { slot, offset } => Place::Inline { slot: *slot, offset: offset + skip },
        Place::Pack { segment, offset, check } => {
            let offset = offset + skip;
            Place::Pack { segment: *segment, offset, check: cut_check(check, offset, length) }
        }
    };
    Extent { file_offset: start, length, place }
}

/// Keeps the chunks that [offset, offset + length) of the segment touches.
fn cut_check(check: &Check, offset: u64, length: u64) -> Check {
    let first = (offset - check.start) / CHUNK;
    let last = (offset + length - 1 - check.start) / CHUNK;
    let start = check.start + first * CHUNK;
    let end = (check.start + (last + 1) * CHUNK).min(check.start + check.covered);
    Check {
        start,
        covered: end - start,
        crcs: check.crcs[first as usize..=last as usize].iter().copied().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headrace_base::SegmentId;
    use proptest::prelude::*;

    fn pack(file_offset: u64, length: u64, tag: u32) -> Extent {
        let offset = u64::from(tag) << 32;
        let crcs = (0..length.div_ceil(CHUNK)).map(|chunk| tag * 1000 + chunk as u32).collect();
        let check = Check { start: offset, covered: length, crcs };
        Extent { file_offset, length, place: Place::Pack { segment: SegmentId(1), offset, check } }
    }

    /// Which record, and which byte of it, stands at a file offset.
    fn at(extents: &[Extent], position: u64) -> Option<u64> {
        let [extent] = touching(extents, position, position + 1) else { return None };
        let Place::Pack { offset, check, .. } = &extent.place else { panic!("packs only") };
        let place = offset + (position - extent.file_offset);
        let chunk = ((place - check.start) / CHUNK) as usize;
        let tag = (place >> 32) as u32;
        let chunk_of_record = ((place & 0xFFFF_FFFF) / CHUNK) as u32;
        assert_eq!(check.crcs[chunk], tag * 1000 + chunk_of_record, "the checksum kept is that of the chunk");
        assert!(place < check.start + check.covered);
        Some(place)
    }

    proptest! {
        #[test]
        fn overlay_and_truncate_agree_with_a_byte_map(
            steps in prop::collection::vec((0u64..400, 1u64..300, any::<bool>()), 1..30)
        ) {
            const UNIT: u64 = 1024;
            let mut extents = Vec::new();
            let mut model = vec![None; 800];
            for (tag, (start, length, cuts)) in steps.into_iter().enumerate() {
                if cuts {
                    extents = truncate(&extents, start * UNIT);
                    model[start as usize..].fill(None);
                } else {
                    let tag = tag as u32 + 1;
                    extents = overlay(&extents, vec![pack(start * UNIT, length * UNIT, tag)]);
                    for unit in start..start + length {
                        model[unit as usize] = Some((u64::from(tag) << 32) + (unit - start) * UNIT);
                    }
                }
                for (unit, expected) in model.iter().enumerate() {
                    prop_assert_eq!(at(&extents, unit as u64 * UNIT), *expected);
                }
            }
        }
    }

    #[test]
    fn a_file_segment_stays_one_extent() {
        let piece = |start: u64| Extent {
            file_offset: start,
            length: 10,
            place: Place::File { segment: SegmentId(7), offset: start },
        };
        let once = overlay(&[], vec![piece(0)]);
        let twice = overlay(&once, vec![piece(10), piece(20)]);
        assert_eq!(twice.len(), 1);
        assert_eq!(twice[0].length, 30);
    }

    #[test]
    fn several_new_extents_over_several_old() {
        let lower = overlay(&[], vec![pack(0, 100, 1), pack(100, 100, 2), pack(200, 100, 3)]);
        let merged = overlay(&lower, vec![pack(50, 100, 4), pack(180, 200, 5)]);
        let ranges: Vec<_> = merged.iter().map(|extent| (extent.file_offset, extent.length)).collect();
        assert_eq!(ranges, [(0, 50), (50, 100), (150, 30), (180, 200)]);
    }
}
