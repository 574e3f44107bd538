//! The order of an epoch: a keyed permutation of 0..n in O(1) memory, so that any position of any epoch is
//! known at once, by Rust and by Python alike (tests/golden/order.json holds the two together).
//!
//! A balanced Feistel network of eight rounds permutes the numbers of 2 x `half` bits, the smallest even number
//! of bits that holds n - 1; a result of n or more is fed in again until it falls below n (cycle walking).
//! The domain is smaller than 4 n, so that takes fewer than four passes on average.
//!
//! ```text
//! mix(x)     x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
//! key(r)     mix(mix(seed + 0x9E3779B97F4A7C15) ^ mix(epoch * 0xD1B54A32D192ED03 + r + 1))     all mod 2^64
//! half       max(1, ceil(binary digits of (n - 1) / 2)),  mask = 2^half - 1
//! one pass   L = v >> half, R = v & mask;  8 times: (L, R) = (R, L ^ (mix(R ^ key(r)) & mask));  v = L << half | R
//! ```
//! `mix` is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).

const ROUNDS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    count: u64,
    half: u32,
    mask: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The order of `epoch` over `count` samples. Cheap: it computes eight keys.
    pub fn new(count: u64, seed: u64, epoch: u64) -> Permutation {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let half = bits.div_ceil(2).max(1);
        let seeded = mix(seed.wrapping_add(0x9E37_79B9_7F4A_7C15));
        let keys = std::array::from_fn(|round| {
            let turn = epoch.wrapping_mul(0xD1B5_4A32_D192_ED03).wrapping_add(round as u64 + 1);
            mix(seeded ^ mix(turn))
        });
        Permutation { count, half, mask: (1 << half) - 1, keys }
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// The sample at `position` of the order.
    ///
    /// # Panics
    /// If `position` is not below `count`, as an index into a slice does.
    #[inline]
    pub fn index(&self, position: u64) -> u64 {
        assert!(position < self.count, "position {position} of an order of {} samples", self.count);
        if self.count == 1 {
            return 0;
        }
        // Ends: a permutation's cycle through `position` returns to `position`, which is below `count`.
        let mut value = position;
        loop {
            value = self.pass(value);
            if value < self.count {
                return value;
            }
        }
    }

    #[inline]
    fn pass(&self, value: u64) -> u64 {
        let (mut left, mut right) = (value >> self.half, value & self.mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & self.mask));
        }
        left << self.half | right
    }
}

#[inline]
fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_comes_exactly_once() {
        for count in 0..=2000 {
            let order = Permutation::new(count, 7, count % 5);
            let mut seen = vec![false; count as usize];
            for position in 0..count {
                let index = order.index(position) as usize;
                assert!(!seen[index], "sample {index} of {count} comes twice");
                seen[index] = true;
            }
        }
    }

    #[test]
    fn large_orders_stay_in_range_and_do_not_repeat() {
        for count in [(1 << 20) + 1, 999_999_999_999, 1 << 40, (1 << 62) - 1, 1 << 62, u64::MAX] {
            let order = Permutation::new(count, 3, 9);
            let step = count / 20_011;
            let mut indices: Vec<u64> = (0..20_011).map(|k| order.index(k * step)).collect();
            indices.push(order.index(count - 1));
            assert!(indices.iter().all(|&index| index < count));
            indices.sort_unstable();
            indices.dedup();
            assert_eq!(indices.len(), 20_012, "repeats among {count}");
        }
    }

    #[test]
    fn seeds_and_epochs_differ() {
        let order = |seed, epoch| -> Vec<u64> {
            let permutation = Permutation::new(1000, seed, epoch);
            (0..1000).map(|position| permutation.index(position)).collect()
        };
        let orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), order(u64::MAX, u64::MAX)];
        for (k, one) in orders.iter().enumerate() {
            for other in &orders[k + 1..] {
                // Two independent orders agree in one position on average.
                let same = one.iter().zip(other).filter(|(a, b)| a == b).count();
                assert!(same < 10, "{same} of 1000 positions are equal");
            }
        }
        assert_eq!(order(5, 2), order(5, 2));
    }

    /// Samples that lie sorted by label on disk must come out mixed.
    #[test]
    fn positions_say_nothing_about_indices() {
        for (count, seed) in [(10_000_u64, 1), (65_536, 2), (65_537, 3), (100_000, 4)] {
            for epoch in 0..3 {
                let order = Permutation::new(count, seed, epoch);
                let mut distance = 0.0;
                let mut table = [[0_u64; 10]; 10];
                for position in 0..count {
                    let index = order.index(position);
                    distance += position.abs_diff(index) as f64;
                    table[(position * 10 / count) as usize][(index * 10 / count) as usize] += 1;
                }
                // |i - j| of two uniform numbers below n has mean n/3 and deviation n/sqrt(18).
                let mean = distance / count as f64 / (count as f64 / 3.0);
                assert!((mean - 1.0).abs() < 0.03, "mean distance {mean} of n/3 at {count}");
                let expected = count as f64 / 100.0;
                let chi_square: f64 =
                    table.iter().flatten().map(|&n| (n as f64 - expected).powi(2) / expected).sum();
                // 81 degrees of freedom: 150 is exceeded by chance once in about 200,000 orders.
                assert!(chi_square < 150.0, "chi-square {chi_square} at {count}, epoch {epoch}");
            }
        }
    }

    /// Neighbours in the order are not neighbours on disk.
    #[test]
    fn neighbours_are_scattered() {
        let count = 50_000;
        let order = Permutation::new(count, 11, 0);
        let near = (1..count).filter(|&p| order.index(p).abs_diff(order.index(p - 1)) <= 16).count();
        // Chance gives 2 x 16 / n of the pairs: 32.
        assert!(near < 80, "{near} neighbours stayed near");
    }

    #[test]
    #[should_panic(expected = "position 3 of an order of 3")]
    fn positions_beyond_the_order_are_refused() {
        Permutation::new(3, 0, 0).index(3);
    }
}
