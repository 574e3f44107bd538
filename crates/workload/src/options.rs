//! The command line of `headraced workload`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;

use headrace_base::{Error, Result};
use lexopt::Arg;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    Create,
    Read,
    Stat,
    List,
    WriteLarge,
    ReadLarge,
    #[serde(rename = "random-4k")]
    Random4k,
    Sync,
    StorePut,
    StoreGet,
    StoreGetRanges,
}

impl Phase {
    /// Works on an object store and not on a folder.
    pub fn is_of_store(self) -> bool {
        matches!(self, Phase::StorePut | Phase::StoreGet | Phase::StoreGetRanges)
    }
}

pub const USAGE: &str = "\
usage: headraced workload PHASE --target DIR [options]
       headraced workload STORE-PHASE --to ADDRESS:PORT --requests FILE [options]
       headraced workload proxy --help

phases
  create       --files N files of --size-bytes N; --fsync: each is synced before it is closed
  read         open, read to the end and close each file, in an order shuffled by --seed; --limit N: some of them
  stat         lstat each file, in an order shuffled by --seed
  list         read each directory; operations are entries
  write-large  one file of --bytes N in requests of 1 MiB
  read-large   the same file
  random-4k    4 KiB reads at random places of it: --operations N, or for --seconds N
  sync         make durable what was written

phases on an object store, one connection a thread; FILE has a line for each object: /bucket/key?signature
  store-put         --files N objects of --size-bytes N, with what create would write
  store-get         each of them once, in an order shuffled by --seed
  store-get-ranges  objects in ranges of --range-bytes N; lines begin with the object's length and a space

options
  --target DIR      where the files are (made by create and write-large if missing)
  --to ADDRESS:PORT the store; also what Host says
  --requests FILE   the objects
  --threads N       1
  --seed N          0
  --files N         20000
  --size-bytes N    10240
  --bytes N         2147483648
  --operations N    20000
  --limit N         read: only so many files, the first of the order
  --range-bytes N   8388608
  --seconds N       stop random-4k after this time instead
  --fsync           create: sync each file
  --verify          compare what is read with what was written";

#[derive(Clone, Debug)]
pub struct Options {
    pub phase: Phase,
    /// Empty in phases on a store.
    pub target: PathBuf,
    /// Of phases on a store.
    pub to: SocketAddr,
    /// Empty in phases on a folder.
    pub requests: PathBuf,
    pub range_bytes: u64,
    pub files: u64,
    pub size_bytes: u64,
    pub bytes: u64,
    pub threads: usize,
    pub seed: u64,
    pub operations: u64,
    pub limit: Option<u64>,
    pub seconds: Option<f64>,
    pub fsync: bool,
    pub verify: bool,
}

impl Options {
    /// None: help is wanted.
    pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Option<Options>> {
        let mut parser = lexopt::Parser::from_args(arguments);
        let (mut phase, mut target, mut to, mut requests) = (None, None, None, None);
        let mut options = Options {
            phase: Phase::Sync,
            target: PathBuf::new(),
            to: SocketAddr::from(([127, 0, 0, 1], 0)),
            requests: PathBuf::new(),
            range_bytes: 8 << 20,
            files: 20_000,
            size_bytes: 10 * 1024,
            bytes: 2 << 30,
            threads: 1,
            seed: 0,
            operations: 20_000,
            limit: None,
            seconds: None,
            fsync: false,
            verify: false,
        };
        while let Some(argument) = parser.next().map_err(wrong)? {
            match argument {
                Arg::Value(name) if phase.is_none() => phase = Some(phase_of(&name)?),
                Arg::Long("target") => target = Some(PathBuf::from(parser.value().map_err(wrong)?)),
                Arg::Long("to") => to = Some(number(&mut parser)?),
                Arg::Long("requests") => requests = Some(PathBuf::from(parser.value().map_err(wrong)?)),
                Arg::Long("range-bytes") => options.range_bytes = number(&mut parser)?,
                Arg::Long("files") => options.files = number(&mut parser)?,
                Arg::Long("size-bytes") => options.size_bytes = number(&mut parser)?,
                Arg::Long("bytes") => options.bytes = number(&mut parser)?,
                Arg::Long("threads") => options.threads = number(&mut parser)?,
                Arg::Long("seed") => options.seed = number(&mut parser)?,
                Arg::Long("operations") => options.operations = number(&mut parser)?,
                Arg::Long("limit") => options.limit = Some(number(&mut parser)?),
                Arg::Long("seconds") => options.seconds = Some(number(&mut parser)?),
                Arg::Long("fsync") => options.fsync = true,
                Arg::Long("verify") => options.verify = true,
                Arg::Long("help") | Arg::Short('h') => return Ok(None),
                other => return Err(wrong(other.unexpected())),
            }
        }
        options.phase = phase.ok_or_else(|| Error::invalid(format!("which phase?\n{USAGE}")))?;
        if options.phase.is_of_store() {
            options.to = to.ok_or_else(|| Error::invalid("say where the store is: --to ADDRESS:PORT"))?;
            options.requests = requests.ok_or_else(|| Error::invalid("say what to ask: --requests FILE"))?;
        } else {
            options.target = target.ok_or_else(|| Error::invalid("say where the files are: --target DIR"))?;
        }
        options.check()?;
        Ok(Some(options))
    }

    fn check(&self) -> Result<()> {
        if self.threads == 0 || self.threads > 1024 {
            return Err(Error::invalid(format!("--threads {} is not from 1 to 1024", self.threads)));
        }
        if self.size_bytes > SIZE_BYTES_MAX {
            return Err(Error::invalid(format!(
                "--size-bytes {} is more than {SIZE_BYTES_MAX}: use write-large",
                self.size_bytes
            )));
        }
        if self.files == 0
            || self.bytes == 0
            || self.operations == 0
            || self.range_bytes == 0
            || self.limit == Some(0)
        {
            return Err(Error::invalid(
                "--files, --bytes, --operations, --range-bytes and --limit are at least 1",
            ));
        }
        if self.seconds.is_some_and(|seconds| !(seconds > 0.0 && seconds <= 86_400.0)) {
            return Err(Error::invalid("--seconds is more than 0 and at most 86400"));
        }
        Ok(())
    }
}

/// Contents are cut from one block in memory.
const SIZE_BYTES_MAX: u64 = 256 << 20;

/// A number, or whatever else is read from text.
fn number<T: std::str::FromStr>(parser: &mut lexopt::Parser) -> Result<T>
where
    T::Err: Into<Box<dyn std::error::Error + Send + Sync + 'static>>,
{
    use lexopt::ValueExt;
    parser.value().and_then(|value| value.parse()).map_err(wrong)
}

fn wrong(error: lexopt::Error) -> Error {
    Error::invalid(format!("headraced workload: {error}; --help lists what there is")).with_cause(error)
}

fn phase_of(name: &OsString) -> Result<Phase> {
    Ok(match name.to_str() {
        Some("create") => Phase::Create,
        Some("read") => Phase::Read,
        Some("stat") => Phase::Stat,
        Some("list") => Phase::List,
        Some("write-large") => Phase::WriteLarge,
        Some("read-large") => Phase::ReadLarge,
        Some("random-4k") => Phase::Random4k,
        Some("sync") => Phase::Sync,
        Some("store-put") => Phase::StorePut,
        Some("store-get") => Phase::StoreGet,
        Some("store-get-ranges") => Phase::StoreGetRanges,
        _ => return Err(Error::invalid(format!("there is no phase {name:?}\n{USAGE}"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<Options>> {
        Options::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_command_line_is_read_and_checked() {
        let options =
            parse("create --target /t --files 5 --size-bytes=7 --threads 8 --fsync").unwrap().unwrap();
        assert_eq!(options.phase, Phase::Create);
        assert_eq!((options.files, options.size_bytes, options.threads), (5, 7, 8));
        assert!(options.fsync && !options.verify);
        let random = parse("random-4k --target /t --seconds 2.5").unwrap().unwrap();
        assert_eq!(random.seconds, Some(2.5));
        assert!(parse("read --help").unwrap().is_none());
        for bad in [
            "",
            "create",
            "dance --target /t",
            "read --target /t --threads 0",
            "read --target /t --files x",
            "read --target /t extra",
            "read --target /t --colour red",
            "random-4k --target /t --seconds -1",
            "create --target /t --size-bytes 999999999999",
            "store-put --target /t",
            "store-get --to 127.0.0.1:1",
            "store-get --to nowhere --requests /r",
            "store-get-ranges --to 127.0.0.1:1 --requests /r --range-bytes 0",
        ] {
            assert_eq!(parse(bad).unwrap_err().kind(), headrace_base::Kind::Invalid, "{bad}");
        }
    }

    #[test]
    fn phases_are_named_in_reports_as_on_the_command_line() {
        for name in [
            "create",
            "read",
            "stat",
            "list",
            "write-large",
            "read-large",
            "random-4k",
            "sync",
            "store-put",
            "store-get",
            "store-get-ranges",
        ] {
            let phase = phase_of(&OsString::from(name)).unwrap();
            assert_eq!(serde_json::to_string(&phase).unwrap(), format!("{name:?}"));
        }
    }
}
