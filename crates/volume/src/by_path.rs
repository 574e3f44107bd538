//! The same by path and identity: what the kernel checks for a mount is checked here for everyone else.

use headrace_base::error::errno;
use headrace_base::{Error, Ino, Result};
use headrace_format::record::FileKind;

use crate::namespace::{check_name, no_name, not_a_directory, shown};
use crate::types::{Attr, DirItem, Identity, SetAttr};
use crate::volume::Volume;

/// As Linux: more symbolic links than this in one path are a loop.
const LINKS_MAX: u32 = 40;
const STICKY: u16 = 0o1000;

/// r, w and x as in access(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    pub read: bool,
    pub write: bool,
    pub execute: bool,
}

impl Access {
    pub const READ: Access = Access { read: true, write: false, execute: false };
    pub const WRITE: Access = Access { read: false, write: true, execute: false };
    pub const SEARCH: Access = Access { read: false, write: false, execute: true };
    /// To add or remove names in a directory.
    pub const CHANGE: Access = Access { read: false, write: true, execute: true };

    /// Whether mode bits and owner give it.
    pub fn is_given(self, who: &Identity, mode: u16, uid: u32, gid: u32, is_directory: bool) -> bool {
        if who.is_root() {
            return !self.execute || is_directory || mode & 0o111 != 0;
        }
        let bits = if who.uid == uid {
            mode >> 6
        } else if who.in_group(gid) {
            mode >> 3
        } else {
            mode
        };
        (!self.read || bits & 4 != 0) && (!self.write || bits & 2 != 0) && (!self.execute || bits & 1 != 0)
    }
}

impl Volume {
    /// What `path` leads to. `follow`: also through a symbolic link in the last place.
    pub fn resolve(&self, who: &Identity, path: &[u8], follow: bool) -> Result<Attr> {
        let mut links = 0;
        self.walk(who, Ino::ROOT, path, follow, &mut links)
            .map_err(|error| error.context(format_args!("{:?}", shown(path))))
    }

    fn walk(&self, who: &Identity, start: Ino, path: &[u8], follow: bool, links: &mut u32) -> Result<Attr> {
        let mut current = self.getattr(if path.first() == Some(&b'/') { Ino::ROOT } else { start })?;
        let mut parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).peekable();
        while let Some(part) = parts.next() {
            if current.kind != FileKind::Directory {
                return Err(not_a_directory(part));
            }
            self.check_access(who, &current, Access::SEARCH)?;
            if part == b"." {
                continue;
            }
            let next = self.lookup(current.ino, part)?;
            if next.kind == FileKind::Symlink && (follow || parts.peek().is_some()) {
                *links += 1;
                if *links > LINKS_MAX {
                    return Err(Error::errno(errno::ELOOP, "too many symbolic links: they lead in a circle"));
                }
                let target = self.readlink(next.ino)?;
                current = self.walk(who, current.ino, &target, true, links)?;
            } else {
                current = next;
            }
        }
        if path.last() == Some(&b'/') && current.kind != FileKind::Directory {
            return Err(not_a_directory(path));
        }
        Ok(current)
    }

    /// The directory that holds the last part of `path`, and that part. The caller may change names there.
    pub fn resolve_parent(&self, who: &Identity, path: &[u8]) -> Result<(Ino, Vec<u8>)> {
        let (directory, name) = split(path)?;
        let attr = self.resolve(who, directory, true)?;
        if attr.kind != FileKind::Directory {
            return Err(not_a_directory(directory));
        }
        self.check_access(who, &attr, Access::CHANGE)
            .map_err(|error| error.context(format_args!("{:?}", shown(path))))?;
        Ok((attr.ino, name.to_vec()))
    }

    /// EACCES if a right is missing.
    pub fn check_access(&self, who: &Identity, attr: &Attr, access: Access) -> Result<()> {
        if access.is_given(who, attr.mode, attr.uid, attr.gid, attr.kind == FileKind::Directory) {
            return Ok(());
        }
        let path = self.names.path(attr.ino);
        Err(Error::errno(
            errno::EACCES,
            format!(
                "user {} may not {} /{} (mode {:03o}, owner {}:{})",
                who.uid,
                if access.write {
                    "change"
                } else if access.read {
                    "read"
                } else {
                    "search"
                },
                shown(&path),
                attr.mode,
                attr.uid,
                attr.gid
            ),
        ))
    }

    /// Names of a directory greater than `after`, in byte order.
    pub fn list(
        &self,
        who: &Identity,
        directory: Ino,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<Vec<DirItem>> {
        let attr = self.getattr(directory)?;
        if attr.kind != FileKind::Directory {
            return Err(Error::errno(errno::ENOTDIR, format!("inode {directory} is not a directory")));
        }
        self.check_access(who, &attr, Access::READ)?;
        self.names_in(directory, after, limit)
    }

    /// Whether `who` may remove or rename this name: in a sticky directory only its owner, the directory's
    /// owner, or root. The right to change the directory is checked by `resolve_parent`.
    pub fn check_remove(&self, who: &Identity, parent: Ino, name: &[u8]) -> Result<()> {
        if who.is_root() {
            return Ok(());
        }
        let directory = self.getattr(parent)?;
        if directory.mode & STICKY == 0 || directory.uid == who.uid {
            return Ok(());
        }
        let (dentry, _) = self.dentry(parent, name)?.ok_or_else(|| no_name(name))?;
        if self.getattr(dentry.ino)?.uid == who.uid {
            return Ok(());
        }
        Err(Error::errno(
            errno::EPERM,
            format!("{:?} is another user's, in a directory with the sticky bit", shown(name)),
        ))
    }

    /// As Linux with fs.protected_hardlinks: nobody gets to keep another's file that its owner removes, unless he
    /// may read and write it anyway.
    pub fn check_link(&self, who: &Identity, attr: &Attr) -> Result<()> {
        let both = Access { read: true, write: true, execute: false };
        let may = who.is_root()
            || attr.uid == who.uid
            || (attr.kind == FileKind::File && self.check_access(who, attr, both).is_ok());
        if may {
            return Ok(());
        }
        Err(Error::errno(
            errno::EPERM,
            format!("user {} may not link it: it is user {}'s", who.uid, attr.uid),
        ))
    }

    /// Ownership for mode, owner and explicit times; the right to write for the size and for times of now.
    pub fn check_setattr(&self, who: &Identity, attr: &Attr, set: &SetAttr) -> Result<()> {
        if who.is_root() {
            return Ok(());
        }
        let owns = who.uid == attr.uid;
        let gives_away = set.uid.is_some_and(|uid| uid != attr.uid)
            || set.gid.is_some_and(|gid| gid != attr.gid && !(owns && who.in_group(gid)));
        let needs_ownership = set.mode.is_some() || set.atime.is_some() || set.mtime.is_some();
        if gives_away || (needs_ownership && !owns) {
            return Err(Error::errno(
                errno::EPERM,
                format!("user {} does not own it (owner {}:{})", who.uid, attr.uid, attr.gid),
            ));
        }
        if set.size.is_some() {
            self.check_access(who, attr, Access::WRITE)?;
        }
        Ok(())
    }
}

/// A path's directory and last name. "a" is in "/".
pub fn split(path: &[u8]) -> Result<(&[u8], &[u8])> {
    let mut end = path.len();
    while end > 0 && path[end - 1] == b'/' {
        end -= 1;
    }
    let start = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let name = &path[start..end];
    check_name(name).map_err(|error| error.context(format_args!("{:?}", shown(path))))?;
    Ok((&path[..start], name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_split_at_their_last_name() {
        assert_eq!(split(b"/a/b").unwrap(), (&b"/a/"[..], &b"b"[..]));
        assert_eq!(split(b"a").unwrap(), (&b""[..], &b"a"[..]));
        assert_eq!(split(b"/a/").unwrap(), (&b"/"[..], &b"a"[..]));
        for bad in [&b"/"[..], b"", b"/a/..", b"."] {
            assert!(split(bad).is_err());
        }
    }

    #[test]
    fn rights_follow_the_first_class_that_fits() {
        let who = Identity { uid: 5, gid: 6, groups: vec![7] };
        assert!(Access::READ.is_given(&who, 0o400, 5, 0, false));
        // The owner's class decides even where others have more.
        assert!(!Access::READ.is_given(&who, 0o044, 5, 0, false));
        assert!(Access::WRITE.is_given(&who, 0o020, 1, 7, false));
        assert!(!Access::CHANGE.is_given(&who, 0o002, 1, 1, true));
        let root = Identity { uid: 0, gid: 0, groups: vec![] };
        assert!(Access::CHANGE.is_given(&root, 0, 1, 1, true));
        assert!(!Access::SEARCH.is_given(&root, 0o600, 1, 1, false));
    }
}
