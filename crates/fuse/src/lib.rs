//! The mount: FUSE requests to volume calls, nothing else
