//! Extended attributes: a row each, so that setting one touches nothing else.

use headrace_base::error::errno;
use headrace_base::{Error, Ino, Result, time};
use headrace_format::key;
use headrace_meta::{At, Commit, Precondition, Write};

use crate::live::no_inode;
use crate::namespace::{inode_exists, shown};
use crate::past::is_live;
use crate::types::{Change, Origin, XATTR_NAME_BYTES_MAX, XATTR_VALUE_BYTES_MAX};
use crate::volume::Volume;

impl Volume {
    pub fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let value = match is_live(ino) {
            true => self.store.get(&key::xattr(ino, name), At::Latest)?,
            false => self.getxattr_past(&self.place(ino)?, name)?,
        };
        value.ok_or_else(|| no_attribute(name))
    }

    /// `create` fails with EEXIST if the attribute is there, `replace` with ENODATA if it is not.
    pub fn setxattr(
        &self,
        origin: Origin,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        create: bool,
        replace: bool,
    ) -> Result<()> {
        if name.is_empty() || name.len() > XATTR_NAME_BYTES_MAX {
            return Err(Error::errno(
                errno::ERANGE,
                format!("an attribute's name has 1 to {XATTR_NAME_BYTES_MAX} bytes"),
            ));
        }
        if value.len() > XATTR_VALUE_BYTES_MAX {
            return Err(Error::errno(
                errno::ENOSPC,
                format!("an attribute's value has at most {XATTR_VALUE_BYTES_MAX} bytes"),
            ));
        }
        self.check_live(ino)?;
        let key = key::xattr(ino, name);
        let there = self.store.get(&key, At::Latest)?.is_some();
        if create && there {
            return Err(Error::errno(errno::EEXIST, format!("attribute {:?} exists already", shown(name))));
        }
        if replace && !there {
            return Err(no_attribute(name));
        }
        self.change_attribute(origin, ino, Write::Put(key, value.to_vec()))
    }

    pub fn listxattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        if !is_live(ino) {
            return self.listxattr_past(&self.place(ino)?);
        }
        if !inode_exists(&*self.store, ino)? {
            return Err(no_inode(ino));
        }
        let prefix = key::all_xattrs(ino);
        let rows = self.store.scan(&prefix, &key::end_of(&prefix), usize::MAX, At::Latest)?;
        Ok(rows.into_iter().map(|(key, _)| key::name_of(&key).to_vec()).collect())
    }

    pub fn removexattr(&self, origin: Origin, ino: Ino, name: &[u8]) -> Result<()> {
        self.check_live(ino)?;
        let key = key::xattr(ino, name);
        if self.store.get(&key, At::Latest)?.is_none() {
            return Err(no_attribute(name));
        }
        self.change_attribute(origin, ino, Write::Delete(key))
    }

    fn change_attribute(&self, origin: Origin, ino: Ino, write: Write) -> Result<()> {
        let _tree = self.stripes.share();
        let pin = self.live.pin(&*self.store, ino)?;
        let mut state = pin.lock();
        if state.removed {
            return Err(no_inode(ino));
        }
        state.inode.ctime = time::wall_now();
        let commit = Commit {
            preconditions: vec![Precondition::Present(key::inode(ino))],
            writes: vec![write, Write::Put(key::inode(ino), state.committed_record().encode())],
        };
        self.commit(commit)?;
        drop(state);
        self.changes.tell(origin, || vec![Change::Inode(ino)]);
        Ok(())
    }
}

fn no_attribute(name: &[u8]) -> Error {
    Error::errno(errno::ENODATA, format!("there is no attribute {:?}", shown(name)))
}
