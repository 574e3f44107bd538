//! The manifest of a sealed view: its samples (regular files) with sizes, owners and places, in columns, so
//! that it is written once, mapped into memory by engine and clients, and read without a metadata store.
//!
//! ```text
//! 0      8  magic "HRMANIF\x01"
//! 8      4  u32 format = 1
//! 12     4  u32 number of columns
//! 16     8  u64 samples n
//! 24     8  u64 sum of the samples' sizes
//! 32     8  u64 volume version
//! 40    16  seal id (ULID, big-endian)
//! 56     8  i64 created, ns
//! 64     8  u64 bytes of the whole file
//! 72     4  u32 bytes of the sealed root's path (column root_path)
//! 76    52  zero
//! 128       columns, 40 bytes each: name, 16 bytes ASCII, zero-padded | u32 type (1 u8, 2 u32, 3 u64, 4 i64)
//!           | u32 crc32c of the column's bytes | u64 offset in the file | u64 elements
//! 4092   4  u32 crc32c of bytes 0..4092
//! 4096      the columns, each from a multiple of 64 on, little-endian; zeros between
//!
//! samples      path_start u64[n+1]  path_bytes u8  directory u32[n]  size u64[n]  mtime i64[n]  mode u32[n]
//!              uid u32[n]  gid u32[n]  ino u64[n]  extent_start u64[n+1]
//! extents      x_file_offset u64[m]  x_length u64[m]  x_segment u32[m]  x_offset u64[m]  x_check_start u64[m]
//!              x_covered u64[m]  x_crc_start u64[m+1]  crcs u32
//! segments     seg_id u8[16 s]  seg_kind u8[s] (1 pack, 2 file)
//! directories  dir_path_start u64[d+1]  dir_path_bytes u8  dir_parent u32[d]  dir_mode u32[d]  dir_uid u32[d]
//!              dir_gid u32[d]
//!              inline_bytes u8  root_path u8
//! ```
//! Samples come depth first, names in byte order, files and directories interleaved. Paths are relative to the
//! sealed root; row 0 of the directories is the root itself, and every parent comes before its children.
//! `x_segment` is a row of the segments, or `INLINE`: then `x_offset` (and `x_check_start`) count in
//! `inline_bytes`, and the extent has one crc, of its own bytes. An extent of a pack has the crcs of
//! `record::Check`; one of a file segment has none, its `x_check_start` and `x_covered` are 0.
//!
//! Writing: `directory` and `sample` in tree order, then `finish`. Columns spill to a scratch file, so memory
//! does not grow with the samples. Reading: `open` checks everything that the accessors rely on (they cannot
//! panic afterwards) but not the columns' checksums: `verify` does that.

mod read;
mod write;

pub use read::{Check, Directory, Extent, Extents, Manifest, Place};
pub use write::{ManifestWriter, Sample, Seal, Written};

const MAGIC: [u8; 8] = *b"HRMANIF\x01";
const FORMAT: u32 = 1;
const HEADER: usize = 4096;
const HEADER_CRC: usize = HEADER - 4;
const TABLE: usize = 128;
const COLUMN: usize = 40;
const NAME: usize = 16;
const ALIGNMENT: u64 = 64;

/// In `x_segment`: the bytes are in `inline_bytes`.
const INLINE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    U8 = 1,
    U32 = 2,
    U64 = 3,
    I64 = 4,
}

impl Type {
    const fn bytes(self) -> u64 {
        match self {
            Type::U8 => 1,
            Type::U32 => 4,
            Type::U64 | Type::I64 => 8,
        }
    }
}

/// Names every column once; a column is the place of its name in `COLUMNS`.
macro_rules! columns {
    ($($constant:ident $name:literal $kind:ident,)*) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms, reason = "written as the columns are named")]
        #[derive(Clone, Copy)]
        enum ColumnNumber { $($constant,)* }
        $(const $constant: usize = ColumnNumber::$constant as usize;)*
        const COLUMNS: &[(&str, Type)] = &[$(($name, Type::$kind),)*];
    };
}

columns! {
    PATH_START "path_start" U64,
    PATH_BYTES "path_bytes" U8,
    DIRECTORY "directory" U32,
    SIZE "size" U64,
    MTIME "mtime" I64,
    MODE "mode" U32,
    UID "uid" U32,
    GID "gid" U32,
    INO "ino" U64,
    EXTENT_START "extent_start" U64,
    X_FILE_OFFSET "x_file_offset" U64,
    X_LENGTH "x_length" U64,
    X_SEGMENT "x_segment" U32,
    X_OFFSET "x_offset" U64,
    X_CHECK_START "x_check_start" U64,
    X_COVERED "x_covered" U64,
    X_CRC_START "x_crc_start" U64,
    CRCS "crcs" U32,
    SEG_ID "seg_id" U8,
    SEG_KIND "seg_kind" U8,
    DIR_PATH_START "dir_path_start" U64,
    DIR_PATH_BYTES "dir_path_bytes" U8,
    DIR_PARENT "dir_parent" U32,
    DIR_MODE "dir_mode" U32,
    DIR_UID "dir_uid" U32,
    DIR_GID "dir_gid" U32,
    INLINE_BYTES "inline_bytes" U8,
    ROOT_PATH "root_path" U8,
}

const _: () = assert!(TABLE + COLUMNS.len() * COLUMN <= HEADER_CRC, "the column table fits the header");
