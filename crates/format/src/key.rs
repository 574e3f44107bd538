//! Metadata keys. One letter a kind, then fields of fixed width, big-endian, so that byte order is the order
//! of the fields; a name comes last and ends with the key.
//!
//! ```text
//! versioned   i ino8                 Inode            e parent8 name       Dentry
//!             x ino8 region4         [Extent]         a ino8 name          xattr value
//!             l dir8                 () directory is alive: the guard of its range of names
//!             d dir8 node4           DirDelta         b ino8 slot8         inline bytes
//! global      V                      VolumeRecord     N                    next free inode (encode_number)
//!             S session16            Session          P segment16          Pending
//!             O ino8 session16       () unlinked, perhaps open there
//!             Z seal16               Seal               C                    u64 current version, the store's own
//!             B                      Backup             the last one that is complete
//!             T name                 Snapshot           H version8           () kept readable, without a name
//!             G version8             cleaning cursor: this version was given up, its rows are being removed
//! ```
//! Lower case is versioned, upper case is not: it has one value, whatever snapshot is read.

use headrace_base::ids::SealId;
use headrace_base::{Ino, SegmentId, SessionId, Version};

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

pub fn backup() -> Key {
    b"B".to_vec()
}

pub fn snapshot(name: &[u8]) -> Key {
    [b"T", name].concat()
}

/// The name in a snapshot's key.
pub fn snapshot_name_of(key: &[u8]) -> &[u8] {
    key.get(1..).unwrap_or_default()
}

pub fn held(version: Version) -> Key {
    with_number(b'H', version.0, 0)
}

pub fn given_up(version: Version) -> Key {
    with_number(b'G', version.0, 0)
}

/// The version in a key of the kinds H and G.
pub fn version_of(key: &[u8]) -> Option<Version> {
    Some(Version(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?)))
}

/// The inode number in a key of the kinds i, e, x, a, l, d, b and O.
pub fn ino_of(key: &[u8]) -> Option<Ino> {
    Some(Ino(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?)))
}

/// The 16-byte id in a key of the kinds S, P and Z.
pub fn id_of(key: &[u8]) -> Option<[u8; 16]> {
    key.get(1..17)?.try_into().ok()
}

/// The first key after all that begin with `prefix`. Empty if there is none: only for a prefix of nothing but
/// 0xFF, which no key of ours is.
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    /// Every kind of key, from the same numbers and name.
    fn all(number: u64, second: u64, id: u128, name: &[u8]) -> Vec<Key> {
        let (ino, region) = (Ino(number), second as u32);
        vec![
            inode(ino),
            dentry(ino, name),
            extents(ino, region),
            xattr(ino, name),
            alive(ino),
            delta(ino, region),
            inline(ino, second),
            volume(),
            next_inode(),
            session(SessionId(id)),
            pending(SegmentId(id)),
            orphan(ino, SessionId(id)),
            seal(SealId(id)),
            backup(),
            snapshot(name),
            held(Version(number)),
            given_up(Version(number)),
        ]
    }

    fn name() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(prop_oneof![Just(0), Just(b'a'), Just(0xFF), any::<u8>()], 0..6)
    }

    /// Near each other as often as far apart.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0..4_u64, 254..258_u64, any::<u64>(), Just(u64::MAX)]
    }

    proptest! {
        #[test]
        fn order_of_bytes_is_order_of_fields(
            a in (number(), number(), any::<u128>(), name()),
            b in (number(), number(), any::<u128>(), name()),
        ) {
            prop_assert_eq!(inode(Ino(a.0)).cmp(&inode(Ino(b.0))), a.0.cmp(&b.0));
            prop_assert_eq!(
                dentry(Ino(a.0), &a.3).cmp(&dentry(Ino(b.0), &b.3)),
                (a.0, &a.3).cmp(&(b.0, &b.3))
            );
            prop_assert_eq!(
                xattr(Ino(a.0), &a.3).cmp(&xattr(Ino(b.0), &b.3)),
                (a.0, &a.3).cmp(&(b.0, &b.3))
            );
            prop_assert_eq!(
                extents(Ino(a.0), a.1 as u32).cmp(&extents(Ino(b.0), b.1 as u32)),
                (a.0, a.1 as u32).cmp(&(b.0, b.1 as u32))
            );
            prop_assert_eq!(
                delta(Ino(a.0), a.1 as u32).cmp(&delta(Ino(b.0), b.1 as u32)),
                (a.0, a.1 as u32).cmp(&(b.0, b.1 as u32))
            );
            prop_assert_eq!(
                inline(Ino(a.0), a.1).cmp(&inline(Ino(b.0), b.1)),
                (a.0, a.1).cmp(&(b.0, b.1))
            );
            prop_assert_eq!(
                orphan(Ino(a.0), SessionId(a.2)).cmp(&orphan(Ino(b.0), SessionId(b.2))),
                (a.0, a.2).cmp(&(b.0, b.2))
            );
            prop_assert_eq!(seal(SealId(a.2)).cmp(&seal(SealId(b.2))), a.2.cmp(&b.2));
            prop_assert_eq!(session(SessionId(a.2)).cmp(&session(SessionId(b.2))), a.2.cmp(&b.2));
            prop_assert_eq!(pending(SegmentId(a.2)).cmp(&pending(SegmentId(b.2))), a.2.cmp(&b.2));
        }

        /// Exactly the keys of one inode lie in [prefix, end_of(prefix)).
        #[test]
        fn a_prefix_holds_its_inode_and_no_other(
            a in number(), b in number(), second in number(), name in name(),
        ) {
            let (one, other) = (Ino(a), Ino(b));
            for (prefix, key) in [
                (dentries(one), dentry(other, &name)),
                (all_extents(one), extents(other, second as u32)),
                (all_xattrs(one), xattr(other, &name)),
                (all_deltas(one), delta(other, second as u32)),
                (all_inline(one), inline(other, second)),
            ] {
                let inside = prefix <= key && key < end_of(&prefix);
                prop_assert_eq!(inside, one == other, "{:?} in {:?}", key, prefix);
            }
        }

        #[test]
        fn end_is_the_first_key_after_a_prefix(prefix in name(), key in name()) {
            let end = end_of(&prefix);
            if end.is_empty() {
                // All 0xFF, or nothing: no key lies after, which an empty end says.
                prop_assert!(prefix.iter().all(|&byte| byte == u8::MAX));
            } else {
                let inside = prefix <= key && key < end;
                prop_assert_eq!(inside, key.starts_with(&prefix));
            }
        }

        #[test]
        fn fields_come_back_and_kinds_do_not_mix(
            a in number(), b in number(), id in any::<u128>(), name in name(),
        ) {
            let keys = all(a, b, id, &name);
            let letters: HashSet<u8> = keys.iter().map(|key| key[0]).collect();
            prop_assert_eq!(letters.len(), keys.len());
            for key in &keys {
                prop_assert_eq!(is_versioned(key), b"iexaldb".contains(&key[0]));
                if b"iexaldbO".contains(&key[0]) {
                    prop_assert_eq!(ino_of(key), Some(Ino(a)));
                }
                if b"SPZ".contains(&key[0]) {
                    prop_assert_eq!(id_of(key), Some(id.to_be_bytes()));
                }
                if b"ea".contains(&key[0]) {
                    prop_assert_eq!(name_of(key), &name[..]);
                }
                if b"HG".contains(&key[0]) {
                    prop_assert_eq!(version_of(key), Some(Version(a)));
                }
                if key[0] == b'T' {
                    prop_assert_eq!(snapshot_name_of(key), &name[..]);
                }
            }
        }

        #[test]
        fn short_keys_have_no_fields(key in prop::collection::vec(any::<u8>(), 0..9)) {
            prop_assert_eq!(ino_of(&key), None);
            prop_assert_eq!(id_of(&key), None);
            prop_assert_eq!(version_of(&key), None);
            prop_assert!(name_of(&key).is_empty());
        }
    }

    #[test]
    fn ends_carry_over() {
        assert_eq!(end_of(b"b"), b"c");
        assert_eq!(end_of(b"a\xFF\xFF"), b"b");
        assert_eq!(end_of(b"e\0\xFF"), b"e\x01");
        assert_eq!(end_of(b"\xFF\xFF"), b"");
        assert_eq!(end_of(b""), b"");
    }
}
