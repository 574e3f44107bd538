//! Bytes that were written and are not in a segment yet: ranges of one file, newest on top. Pure.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

/// Small writes are appended to the range before them up to this size; larger ones stay as they came, since
/// copying them again costs more than a map entry.
const JOIN_BYTES_MAX: usize = 1 << 20;
const JOIN_WRITE_BYTES_MAX: usize = 128 << 10;

/// Non-overlapping ranges by file offset.
#[derive(Clone, Debug, Default)]
pub struct DirtyRanges {
    ranges: BTreeMap<u64, Vec<u8>>,
    bytes: u64,
}

impl DirtyRanges {
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Bytes held; overwritten ones count once.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.ranges.iter().map(|(offset, bytes)| (*offset, bytes.as_slice()))
    }

    /// [0, length) if the ranges cover that without a gap, from 0 on.
    pub fn contiguous_from(&self, start: u64) -> Option<u64> {
        let mut end = start;
        for (offset, bytes) in self.iter() {
            if offset != end {
                return None;
            }
            end += bytes.len() as u64;
        }
        (end > start).then_some(end)
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let end = offset + bytes.len() as u64;
        if let Some((start, range)) = self.ranges.range_mut(..=offset).next_back() {
            let inside = (offset - start) as usize;
            if inside + bytes.len() <= range.len() {
                range[inside..inside + bytes.len()].copy_from_slice(bytes);
                return;
            }
        }
        self.remove(offset, end);
        self.bytes += bytes.len() as u64;
        if let Some((start, range)) = self.ranges.range_mut(..offset).next_back()
            && start + range.len() as u64 == offset
            && range.len() < JOIN_BYTES_MAX
            && bytes.len() <= JOIN_WRITE_BYTES_MAX
        {
            range.extend_from_slice(bytes);
        } else {
            self.ranges.insert(offset, bytes.to_vec());
        }
    }

    /// Forgets [start, end).
    pub fn remove(&mut self, start: u64, end: u64) {
        if let Some((&offset, range)) = self.ranges.range_mut(..start).next_back() {
            let range_end = offset + range.len() as u64;
            if range_end > start {
                let tail = range.split_off((start - offset) as usize);
                self.bytes -= tail.len() as u64;
                if range_end > end {
                    let kept = tail[(end - start) as usize..].to_vec();
                    self.bytes += kept.len() as u64;
                    self.ranges.insert(end, kept);
                }
            }
        }
        while let Some((&offset, range)) = self.ranges.range(start..end).next() {
            let range_end = offset + range.len() as u64;
            let mut range = self.ranges.remove(&offset).expect("just found");
            self.bytes -= range.len() as u64;
            if range_end > end {
                let kept = range.split_off((end - offset) as usize);
                self.bytes += kept.len() as u64;
                self.ranges.insert(end, kept);
            }
        }
    }

    pub fn truncate(&mut self, size: u64) {
        self.remove(size, u64::MAX);
    }

    /// Puts `older` back beneath what is here.
    pub fn put_beneath(&mut self, older: DirtyRanges) {
        let newer = std::mem::replace(self, older);
        for (offset, bytes) in newer.iter() {
            self.write(offset, bytes);
        }
    }

    /// Copies what is dirty in [offset, offset + out.len()) over `out`. True if that was all of it.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        let end = offset + out.len() as u64;
        let mut copied = 0;
        let first = self.ranges.range(..=offset).next_back();
        let rest = self.ranges.range((Excluded(offset), Unbounded)).take_while(|(start, _)| **start < end);
        for (&start, range) in first.into_iter().chain(rest) {
            let from = start.max(offset);
            let to = end.min(start + range.len() as u64);
            if from < to {
                out[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&range[(from - start) as usize..(to - start) as usize]);
                copied += to - from;
            }
        }
        copied == out.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_byte_map(
            steps in prop::collection::vec((0u64..200, 1usize..80, 0u8..4), 1..60)
        ) {
            let mut dirty = DirtyRanges::default();
            let mut model: Vec<Option<u8>> = vec![None; 300];
            for (step, (offset, length, what)) in steps.into_iter().enumerate() {
                let span = offset as usize..offset as usize + length;
                match what {
                    0 => {
                        dirty.truncate(offset);
                        model[offset as usize..].fill(None);
                    }
                    1 => {
                        dirty.remove(span.start as u64, span.end as u64);
                        model[span].fill(None);
                    }
                    _ => {
                        dirty.write(offset, &vec![step as u8; length]);
                        model[span].fill(Some(step as u8));
                    }
                }
                let mut out = vec![0xEE; 300];
                let all = dirty.read(0, &mut out);
                let expected: Vec<u8> = model.iter().map(|byte| byte.unwrap_or(0xEE)).collect();
                prop_assert_eq!(&out, &expected);
                prop_assert_eq!(all, model.iter().all(Option::is_some));
                prop_assert_eq!(dirty.bytes(), model.iter().flatten().count() as u64);
                let mut part = vec![0xEE; 50];
                dirty.read(100, &mut part);
                prop_assert_eq!(&part[..], &expected[100..150]);
            }
        }
    }

    #[test]
    fn older_ranges_go_beneath() {
        let mut dirty = DirtyRanges::default();
        dirty.write(5, b"new");
        let mut older = DirtyRanges::default();
        older.write(0, b"0123456789");
        dirty.put_beneath(older);
        let mut out = [0; 10];
        assert!(dirty.read(0, &mut out));
        assert_eq!(&out, b"01234new89");
        assert_eq!(dirty.contiguous_from(0), Some(10));
    }
}
