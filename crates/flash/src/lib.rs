//! Segments on local disks: append, close, read, verify, recover. For a `file://` volume the flash tier and
//! the object tier are this one copy.

pub mod flash;
