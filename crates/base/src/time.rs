//! The only door to time: the wall clock for what people read, the monotonic clock for what is decided.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970, as file times hold them. Negative before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub i64);

impl Timestamp {
    pub fn millis(self) -> u64 {
        u64::try_from(self.0 / 1_000_000).unwrap_or(0)
    }
}

#[allow(clippy::disallowed_methods, reason = "this is the door")]
pub fn wall_now() -> Timestamp {
    let nanos = match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_nanos()).unwrap_or(i64::MAX),
    };
    Timestamp(nanos)
}

#[allow(clippy::disallowed_methods, reason = "this is the door")]
pub fn monotonic_now() -> Instant {
    Instant::now()
}

#[allow(clippy::disallowed_methods, reason = "this is the door")]
pub fn sleep(duration: Duration) {
    std::thread::sleep(duration);
}
