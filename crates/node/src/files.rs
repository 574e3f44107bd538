//! The requests that carry a file's bytes, and the handles of open files. Handles are of one connection: they
//! end with it, and another connection's mean nothing here.

use std::collections::HashMap;

use headrace_base::error::errno;
use headrace_base::{Error, Result};
use headrace_format::message::{OpenFlags, Opened, PAYLOAD_BYTES_MAX, Written};
use headrace_volume::{Access, Attr, FileKind, OpenFile, OpenMode, Origin};

use crate::connection::reserve;
use crate::requests::{Reply, Session, attr_message, shown};

/// Open files of one connection.
const HANDLES_MAX: usize = 16 * 1024;
/// Another client may create or remove the name between two looks at it.
const OPEN_ATTEMPTS: usize = 8;

#[derive(Debug, Default)]
pub struct Handles {
    open: HashMap<u64, OpenFile>,
    last: u64,
}

impl Handles {
    pub fn get(&self, handle: u64) -> Result<&OpenFile> {
        self.open.get(&handle).ok_or_else(|| not_open(handle))
    }

    pub fn remove(&mut self, handle: u64) -> Result<OpenFile> {
        self.open.remove(&handle).ok_or_else(|| not_open(handle))
    }

    fn check_room(&self) -> Result<()> {
        if self.open.len() < HANDLES_MAX {
            return Ok(());
        }
        Err(Error::errno(errno::EMFILE, format!("this connection has {HANDLES_MAX} files open: close some")))
    }

    fn add(&mut self, file: OpenFile) -> u64 {
        self.last += 1;
        self.open.insert(self.last, file);
        self.last
    }
}

fn not_open(handle: u64) -> Error {
    Error::errno(errno::EBADF, format!("handle {handle} is not open on this connection"))
}

impl Session {
    pub fn open(&mut self, path: &[u8], flags: &OpenFlags, mode: u16) -> Result<Opened> {
        if !flags.read && !flags.write {
            return Err(Error::invalid("open: for reading, writing or both"));
        }
        if flags.truncate && !flags.write {
            return Err(Error::invalid("open: only a file that is open for writing can be truncated"));
        }
        self.handles.check_room()?;
        let (attr, file) = self.open_or_create(path, flags, mode)?;
        if flags.create || flags.truncate {
            self.settle();
        }
        Ok(Opened { handle: self.handles.add(file), attr: attr_message(&attr) })
    }

    fn open_or_create(&self, path: &[u8], flags: &OpenFlags, mode: u16) -> Result<(Attr, OpenFile)> {
        let volume = self.volume();
        let open_mode = OpenMode { read: flags.read, write: flags.write, truncate: flags.truncate };
        let exclusive = flags.create && flags.exclusive;
        for _ in 0..OPEN_ATTEMPTS {
            match volume.resolve(&self.who, path, !exclusive) {
                Ok(_) if exclusive => {
                    return Err(Error::errno(errno::EEXIST, format!("{:?} exists already", shown(path))));
                }
                Ok(attr) => {
                    self.check_is_file(&attr, path)?;
                    let access = Access { read: flags.read, write: flags.write, execute: false };
                    volume.check_access(&self.who, &attr, access)?;
                    let file = volume.open_file(Origin::SOCKET, attr.ino, open_mode)?;
                    return Ok((file.attr()?, file));
                }
                Err(error) if error.raw_errno() != errno::ENOENT || !flags.create => return Err(error),
                Err(_) => {}
            }
            if path.ends_with(b"/") {
                return Err(Error::errno(errno::EISDIR, format!("{:?} names a directory", shown(path))));
            }
            let (parent, name) = volume.resolve_parent(&self.who, path)?;
            let new = self.new_inode(FileKind::File, mode);
            match volume.create_file(Origin::SOCKET, parent, &name, new, open_mode) {
                Err(error) if error.raw_errno() == errno::EEXIST && !exclusive => {}
                made => return made,
            }
        }
        Err(Error::not_found(format!("{:?} is a symbolic link that leads nowhere", shown(path))))
    }

    pub fn pread(&self, handle: u64, offset: u64, length: u64) -> Result<Reply> {
        let file = self.handles.get(handle)?;
        let there = file.attr()?.size.saturating_sub(offset);
        self.read_bytes(file, offset, length.min(there))
            .map_err(|error| error.context(format_args!("read {length} bytes at {offset}")))
    }

    pub fn pwrite(&self, handle: u64, offset: Option<u64>, payload: &[u8]) -> Result<Written> {
        let file = self.handles.get(handle)?;
        let offset = match offset {
            Some(offset) => {
                file.write(offset, payload)?;
                offset
            }
            None => file.append(payload)?,
        };
        self.settle();
        Ok(Written { offset, bytes: payload.len() as u64 })
    }

    pub fn read_file(&self, path: &[u8]) -> Result<Reply> {
        let volume = self.volume();
        let attr = volume.resolve(&self.who, path, true)?;
        self.check_is_file(&attr, path)?;
        volume.check_access(&self.who, &attr, Access::READ)?;
        let file = volume.open_file(Origin::SOCKET, attr.ino, OpenMode::READ)?;
        let bytes = file.attr()?.size;
        self.read_bytes(&file, 0, bytes)
            .map_err(|error| error.context(format_args!("read {:?}", shown(path))))
    }

    fn read_bytes(&self, file: &OpenFile, offset: u64, length: u64) -> Result<Reply> {
        if length > PAYLOAD_BYTES_MAX {
            return Err(Error::invalid(format!(
                "{length} bytes are more than one answer carries, {PAYLOAD_BYTES_MAX}: open it and read in parts"
            )));
        }
        let reservation = reserve(&self.node, length)?;
        let mut bytes = vec![0; length as usize];
        let read = file.read(offset, &mut bytes)?;
        bytes.truncate(read);
        Reply::bytes(bytes, reservation)
    }
}
