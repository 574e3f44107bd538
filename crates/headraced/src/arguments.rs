//! The command line, read whole before anything is done.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use headrace_node::MEMORY_BYTES_DEFAULT;
use headrace_volume::Contents;
use lexopt::Arg::{Long, Short, Value};
use lexopt::{Error, Parser, ValueExt};

pub const USAGE: &str = "\
usage: headraced create --volume DIR [--object URL [--endpoint URL] [--region NAME] [--flash-bytes-max N]
                       [--from | --rescue]]
       headraced serve --volume DIR [--system] [--memory-bytes N] [--idle-exit-seconds N] [--ready-fd N]
       headraced workload PHASE --target DIR [options]
       headraced version

create    makes a new volume in a new or empty folder
            --object s3://BUCKET/PREFIX  where its files are durable; default: in the folder
            --endpoint URL, --region NAME  of a store that is not Amazon's; default: as the AWS tools
            --flash-bytes-max N    what it may take of the folder's disk; default: most of what is free
            --from                 brings the volume back that is there, from its last backup
            --rescue               the files that the segments there know of, when no backup is left
serve     serves a volume until SIGTERM
            --system               to all users (as root); default: to the own user
            --memory-bytes N       for all buffers together; default 268435456
            --idle-exit-seconds N  leaves when unused for so long; default 0: never
            --ready-fd N           where one line of JSON says that it serves; default: standard output
workload  runs one phase of `headrace bench`; workload --help says which";

#[derive(Debug, PartialEq)]
pub enum Command {
    Help,
    Version,
    Create(Create),
    Serve(Serve),
    /// The rest of the line is the driver's own.
    Workload(Vec<OsString>),
}

#[derive(Debug, Default, PartialEq)]
pub struct Create {
    pub volume: PathBuf,
    pub object: Option<String>,
    pub endpoint: Option<String>,
    pub region: Option<String>,
    pub flash_bytes_max: Option<u64>,
    pub contents: Contents,
}

#[derive(Debug, PartialEq)]
pub struct Serve {
    pub volume: PathBuf,
    pub system: bool,
    pub memory_bytes: u64,
    pub idle_exit: Option<Duration>,
    pub ready_fd: Option<i32>,
}

pub fn parse(mut parser: Parser) -> Result<Command, Error> {
    let command = match parser.next()? {
        Some(Value(command)) => command.string()?,
        Some(Short('h') | Long("help")) => return Ok(Command::Help),
        Some(Short('V') | Long("version")) => return Ok(Command::Version),
        Some(other) => return Err(other.unexpected()),
        None => return Err("say what to do".into()),
    };
    match command.as_str() {
        "create" => create(parser),
        "serve" => serve(parser).map(Command::Serve),
        "workload" => Ok(Command::Workload(parser.raw_args()?.collect())),
        "version" => end(parser).map(|()| Command::Version),
        "help" => Ok(Command::Help),
        other => Err(format!("there is no command {other:?}").into()),
    }
}

fn end(mut parser: Parser) -> Result<(), Error> {
    match parser.next()? {
        None => Ok(()),
        Some(other) => Err(other.unexpected()),
    }
}

fn create(mut parser: Parser) -> Result<Command, Error> {
    let mut volume = None;
    let mut create = Create::default();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("volume") => volume = Some(PathBuf::from(parser.value()?)),
            Long("object") => create.object = Some(parser.value()?.string()?),
            Long("endpoint") => create.endpoint = Some(parser.value()?.string()?),
            Long("region") => create.region = Some(parser.value()?.string()?),
            Long("from") => create.contents = Contents::Backup,
            Long("rescue") => create.contents = Contents::Segments,
            Long("flash-bytes-max") => create.flash_bytes_max = Some(parser.value()?.parse()?),
            other => return Err(other.unexpected()),
        }
    }
    create.volume = required(volume, "--volume DIR")?;
    Ok(Command::Create(create))
}

fn serve(mut parser: Parser) -> Result<Serve, Error> {
    let mut volume = None;
    let mut serve = Serve {
        volume: PathBuf::new(),
        system: false,
        memory_bytes: MEMORY_BYTES_DEFAULT,
        idle_exit: None,
        ready_fd: None,
    };
    while let Some(argument) = parser.next()? {
        match argument {
            Long("volume") => volume = Some(PathBuf::from(parser.value()?)),
            Long("system") => serve.system = true,
            Long("memory-bytes") => serve.memory_bytes = parser.value()?.parse()?,
            Long("idle-exit-seconds") => {
                let seconds: u64 = parser.value()?.parse()?;
                serve.idle_exit = (seconds > 0).then(|| Duration::from_secs(seconds));
            }
            Long("ready-fd") => {
                let number: i32 = parser.value()?.parse()?;
                if number < 3 {
                    return Err("--ready-fd is the number of a descriptor above the standard streams".into());
                }
                serve.ready_fd = Some(number);
            }
            other => return Err(other.unexpected()),
        }
    }
    serve.volume = required(volume, "--volume DIR")?;
    Ok(serve)
}

fn required<T>(value: Option<T>, what: &str) -> Result<T, Error> {
    value.ok_or_else(|| format!("{what} is missing").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Command, String> {
        parse(Parser::from_args(arguments)).map_err(|error| error.to_string())
    }

    #[test]
    fn commands_are_understood() {
        assert_eq!(parsed(&["version"]), Ok(Command::Version));
        assert_eq!(
            parsed(&["create", "--volume", "/v"]),
            Ok(Command::Create(Create { volume: "/v".into(), ..Create::default() }))
        );
        let Ok(Command::Create(create)) = parsed(&[
            "create",
            "--volume=/v",
            "--object=s3://bucket/p",
            "--endpoint",
            "http://h:1",
            "--region=r",
            "--flash-bytes-max=5",
        ]) else {
            panic!("not understood")
        };
        assert_eq!(create.object.as_deref(), Some("s3://bucket/p"));
        assert_eq!((create.endpoint.as_deref(), create.region.as_deref()), (Some("http://h:1"), Some("r")));
        assert_eq!(create.flash_bytes_max, Some(5));
        let Ok(Command::Serve(serve)) = parsed(&[
            "serve",
            "--volume=/v",
            "--system",
            "--memory-bytes",
            "1000",
            "--idle-exit-seconds",
            "900",
            "--ready-fd",
            "5",
        ]) else {
            panic!("not understood")
        };
        assert_eq!(
            serve,
            Serve {
                volume: "/v".into(),
                system: true,
                memory_bytes: 1000,
                idle_exit: Some(Duration::from_secs(900)),
                ready_fd: Some(5)
            }
        );
        let Ok(Command::Serve(serve)) = parsed(&["serve", "--volume", "/v", "--idle-exit-seconds", "0"])
        else {
            panic!("not understood")
        };
        assert_eq!((serve.idle_exit, serve.memory_bytes), (None, MEMORY_BYTES_DEFAULT));
        assert!(USAGE.contains(&MEMORY_BYTES_DEFAULT.to_string()));
        assert_eq!(
            parsed(&["workload", "read", "--target", "d"]),
            Ok(Command::Workload(["read", "--target", "d"].map(OsString::from).to_vec()))
        );
    }

    #[test]
    fn mistakes_are_named() {
        for (arguments, why) in [
            (&[][..], "say what to do"),
            (&["melt"], "melt"),
            (&["serve"], "--volume DIR is missing"),
            (&["serve", "--volume", "/v", "--colour"], "--colour"),
            (&["serve", "--volume", "/v", "--memory-bytes", "much"], "much"),
            (&["serve", "--volume", "/v", "--ready-fd", "1"], "standard streams"),
            (&["create", "--volume", "/v", "extra"], "extra"),
        ] {
            let error = parsed(arguments).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
