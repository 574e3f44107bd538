//! Errors, few in kind, told apart by what the caller must do. Each carries the errno that the mount
//! answers, so that one mistake reads the same through mount, command line and API.
//!
//! Messages name the thing, the value and the way out. The cause is kept, always.

use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What the caller must do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Fix the call.
    Invalid,
    /// The thing named is not there.
    NotFound,
    /// The state changed or forbids it: re-read and decide again.
    Conflict,
    /// Try again later.
    Unavailable,
    /// Space, a quota or the memory budget is used up.
    Full,
    /// Stored bytes are not what was written: stop and look.
    Corrupt,
    /// The caller may not do this.
    Permission,
    /// A fault of ours: report it.
    Internal,
}

impl Kind {
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Invalid => "invalid",
            Kind::NotFound => "not_found",
            Kind::Conflict => "conflict",
            Kind::Unavailable => "unavailable",
            Kind::Full => "full",
            Kind::Corrupt => "corrupt",
            Kind::Permission => "permission",
            Kind::Internal => "internal",
        }
    }

    const fn errno(self) -> i32 {
        match self {
            Kind::Invalid => errno::EINVAL,
            Kind::NotFound => errno::ENOENT,
            Kind::Conflict => errno::EBUSY,
            Kind::Unavailable => errno::EAGAIN,
            Kind::Full => errno::ENOSPC,
            Kind::Corrupt | Kind::Internal => errno::EIO,
            Kind::Permission => errno::EACCES,
        }
    }

    fn of_errno(code: i32) -> Kind {
        match code {
            errno::ENOENT | errno::ESTALE | errno::ENODATA => Kind::NotFound,
            errno::EPERM | errno::EACCES | errno::EROFS => Kind::Permission,
            errno::ENOSPC | errno::EDQUOT | errno::EMFILE | errno::ENFILE | errno::ENOMEM => Kind::Full,
            errno::EAGAIN | errno::EINTR | errno::ETIMEDOUT | errno::ENOTCONN => Kind::Unavailable,
            errno::EEXIST | errno::ENOTEMPTY | errno::EBUSY => Kind::Conflict,
            errno::EIO => Kind::Internal,
            _ => Kind::Invalid,
        }
    }
}

/// The errno values in use, as Linux numbers them (asm-generic/errno-base.h and errno.h).
pub mod errno {
    pub const EPERM: i32 = 1;
    pub const ENOENT: i32 = 2;
    pub const EINTR: i32 = 4;
    pub const EIO: i32 = 5;
    pub const EBADF: i32 = 9;
    pub const EAGAIN: i32 = 11;
    pub const ENOMEM: i32 = 12;
    pub const EACCES: i32 = 13;
    pub const EBUSY: i32 = 16;
    pub const EEXIST: i32 = 17;
    pub const EXDEV: i32 = 18;
    pub const ENOTDIR: i32 = 20;
    pub const EISDIR: i32 = 21;
    pub const EINVAL: i32 = 22;
    pub const ENFILE: i32 = 23;
    pub const EMFILE: i32 = 24;
    pub const EFBIG: i32 = 27;
    pub const ENOSPC: i32 = 28;
    pub const EROFS: i32 = 30;
    pub const EMLINK: i32 = 31;
    pub const ERANGE: i32 = 34;
    pub const ENAMETOOLONG: i32 = 36;
    pub const ENOSYS: i32 = 38;
    pub const ENOTEMPTY: i32 = 39;
    pub const ELOOP: i32 = 40;
    pub const ENODATA: i32 = 61;
    pub const EOPNOTSUPP: i32 = 95;
    pub const ENOTCONN: i32 = 107;
    pub const ETIMEDOUT: i32 = 110;
    pub const ESTALE: i32 = 116;
    pub const EDQUOT: i32 = 122;
}

type Cause = Box<dyn std::error::Error + Send + Sync + 'static>;

pub struct Error {
    kind: Kind,
    errno: i32,
    message: String,
    cause: Option<Cause>,
}

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Error {
        Error { kind, errno: kind.errno(), message: message.into(), cause: None }
    }

    /// An error that POSIX names exactly; the kind follows from the number.
    pub fn errno(code: i32, message: impl Into<String>) -> Error {
        Error { kind: Kind::of_errno(code), errno: code, message: message.into(), cause: None }
    }

    pub fn invalid(message: impl Into<String>) -> Error {
        Error::new(Kind::Invalid, message)
    }

    pub fn not_found(message: impl Into<String>) -> Error {
        Error::new(Kind::NotFound, message)
    }

    pub fn corrupt(message: impl Into<String>) -> Error {
        Error::new(Kind::Corrupt, message)
    }

    pub fn internal(message: impl Into<String>) -> Error {
        Error::new(Kind::Internal, message)
    }

    /// `doing` says what was being done to what: "write segment /v/segments/..".
    pub fn io(doing: impl fmt::Display, cause: std::io::Error) -> Error {
        let code = cause.raw_os_error().unwrap_or(errno::EIO);
        Error {
            kind: Kind::of_errno(code),
            errno: code,
            message: format!("{doing}: {cause}"),
            cause: Some(Box::new(cause)),
        }
    }

    pub fn with_cause(mut self, cause: impl Into<Cause>) -> Error {
        self.cause = Some(cause.into());
        self
    }

    /// The same error, told from further up: "import /a/b: " + what it said.
    pub fn context(mut self, doing: impl fmt::Display) -> Error {
        self.message = format!("{doing}: {}", self.message);
        self
    }

    /// The same kind of error, for which system calls answer another number.
    pub fn answered_as(mut self, code: i32) -> Error {
        self.errno = code;
        self
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The number that a system call answers for this error.
    pub fn raw_errno(&self) -> i32 {
        self.errno
    }

    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (errno {}): {}", self.kind.name(), self.errno, self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}
