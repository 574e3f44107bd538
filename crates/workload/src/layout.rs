//! Which files there are: `d00000/f0000000`, 1,000 to a directory, and `large`. Names, contents and orders follow
//! from numbers alone, so that every phase, in its own process, knows them.
//!
//! Contents are cut from one block of random bytes, at a place that depends on the file: incompressible, free to
//! make and free to compare.

use std::ffi::CString;

use headrace_base::{Error, Result};

pub const FILES_PER_DIRECTORY: u64 = 1000;
/// Of one request of the large-file phases.
pub const REQUEST_BYTES: u64 = 1 << 20;
pub const LARGE_NAME: &str = "large";

/// splitmix64: the next state's finaliser.
pub fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

pub fn directories(files: u64) -> u64 {
    files.div_ceil(FILES_PER_DIRECTORY)
}

pub fn directory_name(directory: u64) -> String {
    format!("d{directory:05}")
}

/// Relative to the target, ready for system calls.
pub fn file_name(file: u64) -> Result<CString> {
    CString::new(format!("{}/f{file:07}", directory_name(file / FILES_PER_DIRECTORY)))
        .map_err(|error| Error::internal(error.to_string()))
}

/// Where the contents of files come from.
pub struct Contents {
    block: Vec<u8>,
    places: u64,
}

impl Contents {
    /// For pieces of up to `bytes`.
    pub fn new(bytes: u64) -> Contents {
        const PLACES: u64 = 1 << 20;
        let words = (PLACES + bytes).div_ceil(8);
        let mut block = Vec::with_capacity(words as usize * 8);
        for word in 0..words {
            block.extend_from_slice(&mix(word).to_le_bytes());
        }
        Contents { block, places: PLACES }
    }

    /// What file (or 1 MiB piece of the large file) `number` holds.
    pub fn of(&self, number: u64, bytes: u64) -> &[u8] {
        let start = (mix(!number) % self.places) as usize;
        &self.block[start..start + bytes as usize]
    }
}

/// 0..count, shuffled by `seed` (Fisher-Yates).
pub fn shuffled(count: u64, seed: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    let mut state = mix(seed);
    for last in (1..order.len()).rev() {
        state = mix(state);
        order.swap(last, (state % (last as u64 + 1)) as usize);
    }
    order
}

/// The part of 0..count that is worker `worker`'s, in one piece; parts differ by at most one.
pub fn part(count: u64, worker: usize, workers: usize) -> std::ops::Range<u64> {
    let at = |worker: usize| (u128::from(count) * worker as u128 / workers as u128) as u64;
    at(worker)..at(worker + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once() {
        for (count, workers) in [(0, 1), (1, 8), (20_000, 7), (u64::MAX, 3)] {
            let mut end = 0;
            for worker in 0..workers {
                let part = part(count, worker, workers);
                assert_eq!(part.start, end);
                assert!(part.end - part.start <= count / workers as u64 + 1);
                end = part.end;
            }
            assert_eq!(end, count);
        }
    }

    #[test]
    fn orders_are_permutations_that_depend_on_the_seed() {
        let one = shuffled(1000, 1);
        assert_eq!(one, shuffled(1000, 1));
        assert_ne!(one, shuffled(1000, 2));
        let mut sorted = one.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        // Not left nearly in order: the mean distance of neighbours is near a third of the length.
        let distance: u64 = one.windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum();
        assert!((280..390).contains(&(distance / 999)), "{distance}");
        assert!(shuffled(0, 1).is_empty());
    }

    #[test]
    fn contents_are_repeatable_and_different() {
        let contents = Contents::new(10_240);
        assert_eq!(contents.of(7, 10_240), Contents::new(10_240).of(7, 10_240));
        assert_ne!(contents.of(7, 100), contents.of(8, 100));
        assert_eq!(contents.of(3, 0), b"");
        // A longer block has the same beginnings.
        assert_eq!(contents.of(7, 500), Contents::new(1 << 20).of(7, 500));
    }

    #[test]
    fn names_are_in_directories_of_a_thousand() {
        assert_eq!(file_name(0).unwrap().as_bytes(), b"d00000/f0000000");
        assert_eq!(file_name(20_999).unwrap().as_bytes(), b"d00020/f0020999");
        assert_eq!((directories(1000), directories(1001)), (1, 2));
    }
}
