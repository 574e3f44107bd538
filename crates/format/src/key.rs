//! Metadata keys. One letter a kind, then fields of fixed width, big-endian, so that byte order is the order
//! of the fields; a name comes last and ends with the key.
//!
//! ```text
//! versioned   i ino8                 Inode            e parent8 name       Dentry
//!             x ino8 region4         [Extent]         a ino8 name          xattr value
//!             l dir8                 () directory is alive: the guard of its range of names
//!             d dir8 node4           DirDelta         b ino8 slot8         inline bytes
//! global      V                      VolumeRecord     N                    u64 next free inode number
//!             S session16            Session          P segment16          Pending
//!             O ino8 session16       () unlinked, perhaps open there
//!             Z seal16               Seal
//! ```
//! Lower case is versioned, upper case is not: it has one value, whatever snapshot is read.

use headrace_base::ids::SealId;
use headrace_base::{Ino, SegmentId, SessionId};

pub type Key = Vec<u8>;

/// Whether a key's values are kept per version of the volume.
pub fn is_versioned(key: &[u8]) -> bool {
    key.first().is_some_and(u8::is_ascii_lowercase)
}

fn with_number(letter: u8, number: u64, more: usize) -> Key {
    let mut key = Vec::with_capacity(9 + more);
    key.push(letter);
    key.extend_from_slice(&number.to_be_bytes());
    key
}

pub fn inode(ino: Ino) -> Key {
    with_number(b'i', ino.0, 0)
}

pub fn dentry(parent: Ino, name: &[u8]) -> Key {
    let mut key = with_number(b'e', parent.0, name.len());
    key.extend_from_slice(name);
    key
}

/// The name in a dentry's or xattr's key.
pub fn name_of(key: &[u8]) -> &[u8] {
    key.get(9..).unwrap_or_default()
}

/// All names of a directory.
pub fn dentries(parent: Ino) -> Key {
    with_number(b'e', parent.0, 0)
}

pub fn extents(ino: Ino, region: u32) -> Key {
    let mut key = with_number(b'x', ino.0, 4);
    key.extend_from_slice(&region.to_be_bytes());
    key
}

pub fn all_extents(ino: Ino) -> Key {
    with_number(b'x', ino.0, 0)
}

pub fn xattr(ino: Ino, name: &[u8]) -> Key {
    let mut key = with_number(b'a', ino.0, name.len());
    key.extend_from_slice(name);
    key
}

pub fn all_xattrs(ino: Ino) -> Key {
    with_number(b'a', ino.0, 0)
}

pub fn alive(directory: Ino) -> Key {
    with_number(b'l', directory.0, 0)
}

pub fn delta(directory: Ino, node: u32) -> Key {
    let mut key = with_number(b'd', directory.0, 4);
    key.extend_from_slice(&node.to_be_bytes());
    key
}

pub fn all_deltas(directory: Ino) -> Key {
    with_number(b'd', directory.0, 0)
}

pub fn inline(ino: Ino, slot: u64) -> Key {
    let mut key = with_number(b'b', ino.0, 8);
    key.extend_from_slice(&slot.to_be_bytes());
    key
}

/// All inline bytes of an inode; of the whole volume: the prefix `b`.
pub fn all_inline(ino: Ino) -> Key {
    with_number(b'b', ino.0, 0)
}

pub fn volume() -> Key {
    b"V".to_vec()
}

pub fn next_inode() -> Key {
    b"N".to_vec()
}

fn with_id(letter: u8, id: [u8; 16]) -> Key {
    let mut key = Vec::with_capacity(17);
    key.push(letter);
    key.extend_from_slice(&id);
    key
}

pub fn session(session: SessionId) -> Key {
    with_id(b'S', session.to_bytes())
}

pub fn pending(segment: SegmentId) -> Key {
    with_id(b'P', segment.to_bytes())
}

pub fn orphan(ino: Ino, session: SessionId) -> Key {
    let mut key = with_number(b'O', ino.0, 16);
    key.extend_from_slice(&session.to_bytes());
    key
}

pub fn seal(seal: SealId) -> Key {
    with_id(b'Z', seal.to_bytes())
}

/// The inode number in a key of the kinds i, e, x, a, l, d, b and O.
pub fn ino_of(key: &[u8]) -> Option<Ino> {
    Some(Ino(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?)))
}

/// The 16-byte id in a key of the kinds S, P and Z.
pub fn id_of(key: &[u8]) -> Option<[u8; 16]> {
    key.get(1..17)?.try_into().ok()
}

/// The first key after all that begin with `prefix`.
pub fn end_of(prefix: &[u8]) -> Key {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            break;
        }
    }
    end
}
