//! Segments.
use headrace_base::time::Timestamp;
use headrace_base::Ino;

/// Whose bytes a record holds: enough to rebuild a tree from segments alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub ino: Ino,
    /// Path from the volume's root, as it was when the bytes were written; empty if unknown.
    pub path: Vec<u8>,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: Timestamp,
    /// Where in the file the record's bytes begin.
    pub file_offset: u64,
    /// The file's size when they were written.
    pub file_bytes: u64,
}
