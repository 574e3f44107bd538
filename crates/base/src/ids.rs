//! Names of things, each its own type, so that one cannot be passed for another.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use ulid::Ulid;

use crate::error::{Error, Result};
use crate::{random, time};

/// An inode number. 1 is the root. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ino(pub u64);

impl Ino {
    pub const ROOT: Ino = Ino(1);
}

impl fmt::Display for Ino {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)
    }
}

/// A version of a whole volume. It grows by one at each snapshot or seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version(pub u64);

/// Numbers the commits of one session, in the order in which they were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OpId(pub u64);

macro_rules! ulid_id {
    ($name:ident, $what:literal) => {
        #[doc = $what]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u128);

        impl $name {
            /// A new id: 48 bits of wall clock in milliseconds, 80 random bits (the ULID layout).
            pub fn generate() -> Self {
                let random = (u128::from(random::u64()) << 64) | u128::from(random::u64());
                $name(Ulid::from_parts(time::wall_now().millis(), random).0)
            }

            pub fn to_bytes(self) -> [u8; 16] {
                self.0.to_be_bytes()
            }

            pub fn from_bytes(bytes: [u8; 16]) -> Self {
                $name(u128::from_be_bytes(bytes))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "{}", Ulid(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "{}", Ulid(self.0))
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                Ulid::from_string(text)
                    .map(|id| $name(id.0))
                    .map_err(|_| Error::invalid(format!("{text:?} is not an id of 26 characters (ULID)")))
            }
        }
    };
}

ulid_id!(SegmentId, "Names a segment; also its file name.");
ulid_id!(SessionId, "Names one engine's membership in a volume, from its start to its end.");
ulid_id!(VolumeId, "Names a volume, wherever its folder is moved.");
ulid_id!(SealId, "Names a sealed view; also its manifest's file name.");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_text_and_bytes() {
        let id = SegmentId::generate();
        assert_eq!(id.to_string().parse::<SegmentId>().unwrap(), id);
        assert_eq!(SegmentId::from_bytes(id.to_bytes()), id);
        assert!("not an id".parse::<SegmentId>().is_err());
    }
}
