//! Names of the FUSE operations and how often each was asked for.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! operations {
    ($($variant:ident $name:literal),+ $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation { $($variant),+ }

        impl Operation {
            const ALL: &[Operation] = &[$(Operation::$variant),+];

            pub fn name(self) -> &'static str {
                match self { $(Operation::$variant => $name),+ }
            }
        }
    };
}

operations! {
    Lookup "lookup", Getattr "getattr", Setattr "setattr", Readlink "readlink", Mknod "mknod", Mkdir "mkdir",
    Unlink "unlink", Rmdir "rmdir", Symlink "symlink", Rename "rename", Link "link", Open "open", Read "read",
    Write "write", Release "release", Fsync "fsync", Opendir "opendir", Readdir "readdir",
    Readdirplus "readdirplus", Releasedir "releasedir", Fsyncdir "fsyncdir", Statfs "statfs",
    Setxattr "setxattr", Getxattr "getxattr", Listxattr "listxattr", Removexattr "removexattr", Create "create",
    Forget "forget",
}

/// One counter per operation, looked up once: a request costs two additions.
pub struct Counters {
    all: AtomicU64,
    each: Vec<metrics::Counter>,
}

impl Default for Counters {
    fn default() -> Self {
        let each = Operation::ALL
            .iter()
            .map(|operation| metrics::counter!("headrace_fuse_requests_total", "op" => operation.name()))
            .collect();
        Counters { all: AtomicU64::new(0), each }
    }
}

impl Counters {
    pub fn count(&self, operation: Operation) {
        self.all.fetch_add(1, Ordering::Relaxed);
        self.each[operation as usize].increment(1);
    }

    pub fn all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_its_own_counter_and_name() {
        let counters = Counters::default();
        assert_eq!(counters.each.len(), Operation::ALL.len());
        for (index, operation) in Operation::ALL.iter().enumerate() {
            assert_eq!(*operation as usize, index);
            counters.count(*operation);
        }
        assert_eq!(counters.all(), Operation::ALL.len() as u64);
        let names: std::collections::HashSet<_> = Operation::ALL.iter().map(|one| one.name()).collect();
        assert_eq!(names.len(), Operation::ALL.len());
    }
}
