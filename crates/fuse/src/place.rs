//! Whether a folder can be mounted on, and if not, what to say: each reason has its own error, found before
//! mount(2) is tried, because what that answers ("Invalid argument") helps nobody.
//!
//! A mount of ours whose engine died (ENOTCONN) is taken away, with a note; nobody else's is touched.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use headrace_base::error::errno;
use headrace_base::{Error, Kind, Result};
use rustix::mount::UnmountFlags;

/// Shown as the file system's type, `fuse.headrace`, in /proc/mounts; by it our dead mounts are known.
pub const SUBTYPE: &str = "headrace";
const DEVICE: &str = "/dev/fuse";
const FUSE_CONF: &str = "/etc/fuse.conf";
const PROGRAMS: [&str; 2] = ["fusermount3", "fusermount"];

/// A folder that can be mounted on.
#[derive(Debug)]
pub struct Place {
    /// Absolute, without symbolic links.
    pub path: PathBuf,
    /// What was done on the way, one sentence each.
    pub notes: Vec<String>,
}

/// What is mounted where, as /proc/self/mountinfo says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// major:minor
    pub device: String,
    pub at: PathBuf,
    pub kind: String,
    pub source: OsString,
}

impl Mounted {
    fn is_ours(&self) -> bool {
        self.kind == format!("fuse.{SUBTYPE}")
    }
}

pub fn prepare(mountpoint: &Path, allow_other: bool) -> Result<Place> {
    let path = absolute(mountpoint)?;
    let mut notes = Vec::new();
    match mounted_at(&path)? {
        Some(mounted) if is_dead(&path) => {
            let source = mounted.source.display();
            if !mounted.is_ours() {
                return Err(Error::new(
                    Kind::Conflict,
                    format!(
                        "{} holds a dead mount of {source} ({}): take it away with `fusermount3 -u -z {}`",
                        path.display(),
                        mounted.kind,
                        path.display()
                    ),
                ));
            }
            detach(&path)?;
            notes.push(format!(
                "a mount of {source} whose engine had died was taken away from {}",
                path.display()
            ));
            if let Some(below) = mounted_at(&path)? {
                return Err(busy(&path, &below));
            }
        }
        Some(mounted) => return Err(busy(&path, &mounted)),
        None => {}
    }
    check_empty_folder(&path)?;
    check_device()?;
    if !is_root() {
        check_user(&path, allow_other)?;
    }
    Ok(Place { path, notes })
}

/// Asked by statfs, which no cache answers: the attributes of a dead mount may still be remembered.
fn is_dead(path: &Path) -> bool {
    rustix::fs::statfs(path).is_err_and(|error| error == rustix::io::Errno::NOTCONN)
}

fn busy(path: &Path, mounted: &Mounted) -> Error {
    Error::new(
        Kind::Conflict,
        format!(
            "{} already has {} mounted on it ({}): unmount that first, or choose another folder",
            path.display(),
            mounted.source.display(),
            mounted.kind
        ),
    )
}

/// As the mount table names it. A dead mount cannot be looked into, so only its parent is resolved then.
fn absolute(mountpoint: &Path) -> Result<PathBuf> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => Error::not_found(format!(
            "the mountpoint {} does not exist: make it with `mkdir -p {}`",
            mountpoint.display(),
            mountpoint.display()
        )),
        _ => Error::io(format_args!("look at the mountpoint {}", mountpoint.display()), error),
    };
    match mountpoint.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) if error.raw_os_error() == Some(errno::ENOTCONN) => {
            let name = mountpoint.file_name().ok_or_else(|| failed(error))?;
            let parent = match mountpoint.parent() {
                Some(parent) if parent != Path::new("") => parent,
                _ => Path::new("."),
            };
            Ok(parent.canonicalize().map_err(failed)?.join(name))
        }
        Err(error) => Err(failed(error)),
    }
}

fn check_empty_folder(path: &Path) -> Result<()> {
    let look = |error| Error::io(format_args!("look at the mountpoint {}", path.display()), error);
    if !fs::metadata(path).map_err(look)?.is_dir() {
        return Err(Error::errno(
            errno::ENOTDIR,
            format!("the mountpoint {} is not a folder", path.display()),
        ));
    }
    if let Some(entry) = fs::read_dir(path).map_err(look)?.next() {
        let name = entry.map_err(look)?.file_name();
        return Err(Error::errno(
            errno::ENOTEMPTY,
            format!(
                "the mountpoint {} is not empty (it holds {:?}), and a mount would hide that: choose an empty folder",
                path.display(),
                name.to_string_lossy()
            ),
        ));
    }
    Ok(())
}

/// fuser opens the device itself, also when fusermount3 mounts.
fn check_device() -> Result<()> {
    match fs::OpenOptions::new().read(true).write(true).open(DEVICE) {
        Ok(_) => Ok(()),
        Err(error) if matches!(error.raw_os_error(), Some(errno::EACCES | errno::EPERM)) => Err(Error::new(
            Kind::Permission,
            format!(
                "{DEVICE} may not be opened by this user: `chmod 666 {DEVICE}` as root (in a container: pass the \
                 device to it), or run the engine as root"
            ),
        )
        .with_cause(error)),
        Err(error) => Err(Error::new(
            Kind::Unavailable,
            format!(
                "there is no usable {DEVICE}: load the kernel module (`modprobe fuse`), or in a container pass \
                 `--device {DEVICE} --cap-add SYS_ADMIN`"
            ),
        )
        .with_cause(error)),
    }
}

fn check_user(path: &Path, allow_other: bool) -> Result<()> {
    if program().is_none() {
        return Err(Error::new(
            Kind::Unavailable,
            "a user other than root needs fusermount3 to mount: install the package fuse3 (`apt install fuse3`, \
             `dnf install fuse3`)",
        ));
    }
    if rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_err() {
        return Err(Error::new(
            Kind::Permission,
            format!("only who may write to the folder {} may mount on it", path.display()),
        ));
    }
    if allow_other && !conf_allows_other(&fs::read_to_string(FUSE_CONF).unwrap_or_default()) {
        return Err(Error::new(
            Kind::Permission,
            format!(
                "allow_other is for root only here: add the line `user_allow_other` to {FUSE_CONF}, or mount \
                 without it"
            ),
        ));
    }
    Ok(())
}

fn conf_allows_other(text: &str) -> bool {
    text.lines().any(|line| line.trim() == "user_allow_other")
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders =
        std::env::split_paths(&path).chain(["/bin", "/usr/bin", "/sbin", "/usr/sbin"].map(PathBuf::from));
    let folders: Vec<_> = folders.collect();
    PROGRAMS
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|file| file.is_file())
}

/// Takes a mount away. EBUSY while something is in use there.
pub fn unmount(path: &Path) -> Result<()> {
    take_away(path, UnmountFlags::NOFOLLOW, &["-u"])
}

/// Takes the name away at once; what is open there lives on until it is closed.
pub fn detach(path: &Path) -> Result<()> {
    take_away(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW, &["-u", "-z"])
}

/// Takes the name away and ends the connection: whatever is open there fails with ENOTCONN. Only root may;
/// others get EPERM.
pub fn force(path: &Path) -> Result<()> {
    let flags = UnmountFlags::FORCE | UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    rustix::mount::unmount(path, flags).map_err(|error| {
        Error::io(format_args!("force the end of the mount at {}", path.display()), error.into())
    })
}

fn take_away(path: &Path, flags: UnmountFlags, arguments: &[&str]) -> Result<()> {
    let doing = format!("unmount {}", path.display());
    match rustix::mount::unmount(path, flags) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) if !is_root() => {
            let program = program().ok_or_else(|| {
                Error::new(Kind::Unavailable, format!("{doing}: fusermount3 is not installed"))
            })?;
            let output = Command::new(program)
                .args(arguments)
                .arg("--")
                .arg(path)
                .output()
                .map_err(|error| Error::io(format_args!("{doing}: run fusermount3"), error))?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let code = if said.contains("busy") { errno::EBUSY } else { errno::EPERM };
            Err(Error::errno(code, format!("{doing}: {}", said.trim())))
        }
        Err(error) => Err(Error::io(doing, error.into())),
    }
}

/// The uppermost mount on exactly this folder.
fn mounted_at(path: &Path) -> Result<Option<Mounted>> {
    Ok(mounts_at(path)?.pop())
}

/// Whether the FUSE mount with this connection is (still) at `path`. Conflict if another one covers it.
pub fn holds(path: &Path, connection: u32) -> Result<bool> {
    let mounts = mounts_at(path)?;
    let device = format!("0:{connection}");
    match mounts.iter().position(|mounted| mounted.device == device) {
        None => Ok(false),
        Some(at) if at + 1 == mounts.len() => Ok(true),
        Some(at) => Err(busy(path, &mounts[at + 1])),
    }
}

/// The lowest first.
fn mounts_at(path: &Path) -> Result<Vec<Mounted>> {
    const TABLE: &str = "/proc/self/mountinfo";
    let table = fs::read(TABLE).map_err(|error| Error::io(format_args!("read {TABLE}"), error))?;
    Ok(parse_mounts(&table).filter(|mounted| mounted.at == path).collect())
}

/// `36 35 98:0 /root /at options - kind source options`, octal escapes for what would break the line.
fn parse_mounts(table: &[u8]) -> impl Iterator<Item = Mounted> {
    table.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut words = line.split(|byte| *byte == b' ');
        let device = String::from_utf8_lossy(words.nth(2)?).into_owned();
        let at = PathBuf::from(unescape(words.nth(1)?));
        let mut after = words.skip_while(|word| *word != b"-").skip(1);
        let kind = String::from_utf8_lossy(after.next()?).into_owned();
        Some(Mounted { device, at, kind, source: unescape(after.next()?) })
    })
}

fn unescape(word: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, after)) = rest.split_first() {
        let code = after
            .get(..3)
            .filter(|code| first == b'\\' && code.iter().all(|byte| (b'0'..b'8').contains(byte)));
        match code {
            Some(code) => {
                let value = code.iter().fold(0_u32, |value, byte| value * 8 + u32::from(byte - b'0'));
                bytes.push(value as u8);
                rest = &after[3..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

/// Who keeps a mount busy, for the error: "python3 (4711)", a few of them. Only what this user may see.
pub fn users_of(path: &Path) -> Vec<String> {
    let mut users = Vec::new();
    let Ok(processes) = fs::read_dir("/proc") else { return users };
    for process in processes.flatten() {
        let name = process.file_name();
        if !name.as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let folder = process.path();
        let open = fs::read_dir(folder.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut links = [folder.join("cwd"), folder.join("root")].into_iter().chain(open);
        if links.any(|link| fs::read_link(link).is_ok_and(|target| target.starts_with(path))) {
            let command = fs::read(folder.join("comm")).unwrap_or_default();
            users.push(format!("{} ({})", String::from_utf8_lossy(command.trim_ascii()), name.display()));
        }
        if users.len() == 5 {
            break;
        }
    }
    users
}

/// Commas part options, and backslashes escape: both are fusermount3's.
pub fn escape_option(value: &str) -> String {
    value.replace('\\', "\\\\").replace(',', "\\,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_table_is_read_with_its_escapes() {
        let table = b"22 1 0:5 / /proc rw,nosuid - proc proc rw\n\
            36 35 0:57 / /mnt/with\\040space rw shared:7 master:2 - fuse.headrace headrace:/a\\040b rw,user_id=0\n\
            37 35 0:58 / /mnt/back\\134slash rw - fuse sshfs rw\n\
            short line\n";
        let mounts: Vec<_> = parse_mounts(table).collect();
        assert_eq!(mounts.len(), 3);
        assert_eq!(mounts[1].at, Path::new("/mnt/with space"));
        assert_eq!(mounts[1].source, "headrace:/a b");
        assert_eq!(mounts[1].device, "0:57");
        assert!(mounts[1].is_ours());
        assert_eq!(mounts[2].at, Path::new("/mnt/back\\slash"));
        assert!(!mounts[2].is_ours());
        assert_eq!(unescape(b"\\9990\\1"), "\\9990\\1");
    }

    #[test]
    fn a_mountpoint_that_will_not_do_is_refused_by_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let missing = prepare(&folder.path().join("missing"), false).unwrap_err();
        assert_eq!(missing.kind(), Kind::NotFound);
        assert!(missing.message().contains("mkdir -p"), "{missing}");

        let file = folder.path().join("file");
        fs::write(&file, b"x").unwrap();
        let not_a_folder = prepare(&file, false).unwrap_err();
        assert_eq!(not_a_folder.raw_errno(), errno::ENOTDIR);

        let not_empty = prepare(folder.path(), false).unwrap_err();
        assert_eq!(not_empty.kind(), Kind::Conflict);
        assert!(
            not_empty.message().contains("not empty") && not_empty.message().contains("file"),
            "{not_empty}"
        );

        let busy = prepare(Path::new("/proc"), false).unwrap_err();
        assert_eq!(busy.kind(), Kind::Conflict);
        assert!(busy.message().contains("proc mounted on it"), "{busy}");
    }

    #[test]
    fn allow_other_needs_its_line_in_fuse_conf() {
        assert!(conf_allows_other("# mounts\n  user_allow_other \n"));
        assert!(!conf_allows_other("#user_allow_other\nmount_max = 1000\n"));
        assert!(!conf_allows_other(""));
    }

    #[test]
    fn options_are_escaped_for_fusermount() {
        assert_eq!(escape_option("headrace:/a,b\\c"), "headrace:/a\\,b\\\\c");
    }
}
