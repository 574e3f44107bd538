//! The only door to chance.

/// 64 random bits from the kernel.
///
/// # Panics
/// If the kernel has no randomness to give (before early boot has finished); there is no sane way on.
#[allow(clippy::disallowed_methods, reason = "this is the door")]
pub fn u64() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    u64::from_le_bytes(bytes)
}
