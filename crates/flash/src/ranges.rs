//! Sets of byte ranges: which bytes of a segment are here.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges that do not touch each other, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range; what it overlaps or touches becomes one with it.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&before, &until)) =
            self.0.range(..=end).next_back().filter(|(_, until)| **until >= start)
        {
            start = start.min(before);
            end = end.max(until);
            self.0.remove(&before);
        }
        self.0.insert(start, end);
    }

    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        while let Some((&before, &until)) =
            self.0.range(..range.end).next_back().filter(|(_, until)| **until > range.start)
        {
            self.0.remove(&before);
            if until > range.end {
                self.0.insert(range.end, until);
            }
            if before < range.start {
                self.0.insert(before, range.start);
            }
        }
    }

    pub fn contains(&self, range: &Range<u64>) -> bool {
        range.is_empty()
            || self.0.range(..=range.start).next_back().is_some_and(|(_, until)| *until >= range.end)
    }

    pub fn overlaps(&self, range: &Range<u64>) -> bool {
        !range.is_empty()
            && self.0.range(..range.end).next_back().is_some_and(|(_, until)| *until > range.start)
    }

    /// What of `range` is not in the set, in order.
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        let first = self.0.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        for (&start, &end) in self.0.range(first..range.end.max(first)) {
            if start > at {
                gaps.push(at..start.min(range.end));
            }
            at = at.max(end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// How many bytes are in the set.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|(start, end)| *start..*end)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The same operations on a set of single bytes.
        #[test]
        fn is_a_set_of_bytes(steps in prop::collection::vec((any::<bool>(), 0..40_u64, 0..12_u64), 0..40)) {
            let (mut ranges, mut model) = (Ranges::default(), BTreeSet::new());
            for (insert, start, length) in steps {
                let range = start..start + length;
                if insert {
                    ranges.insert(range.clone());
                    model.extend(range);
                } else {
                    ranges.remove(range.clone());
                    model.retain(|byte| !range.contains(byte));
                }
                let bytes: BTreeSet<u64> = ranges.iter().flatten().collect();
                prop_assert_eq!(&bytes, &model);
                prop_assert_eq!(ranges.bytes(), model.len() as u64);
                let whole: Vec<_> = ranges.iter().collect();
                prop_assert!(whole.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", whole);
                for range in [0..60, 3..9, 10..10, 17..40] {
                    prop_assert_eq!(ranges.contains(&range), range.clone().all(|byte| model.contains(&byte)));
                    prop_assert_eq!(ranges.overlaps(&range), range.clone().any(|byte| model.contains(&byte)));
                    let gaps: Vec<u64> = ranges.gaps(range.clone()).into_iter().flatten().collect();
                    prop_assert_eq!(gaps, range.filter(|byte| !model.contains(byte)).collect::<Vec<_>>());
                }
            }
        }
    }
}
