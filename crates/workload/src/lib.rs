//! The native driver of `headrace bench`: file workloads timed without an interpreter.
//!
//! Each run is one phase on one directory of any file system, so that the caller can restart engines and drop
//! caches in between, and prints one JSON object. What a phase needs (names, order, contents) is computed before
//! its clock starts; all threads start at once; the time is from the first start to the last end.
//!
//! | module | what it owns |
//! |---|---|
//! | `options` | the command line |
//! | `layout` | which files there are: names, contents, orders; the same in every phase |
//! | `phases` | what is timed |
//! | `store` | what is timed of an object store without a file system between |
//! | `clock` | threads that start together, and their time |
//! | `proxy` | a slow store out of a fast one |
//! | `framing` | where HTTP messages begin and end |

mod clock;
mod framing;
mod layout;
mod options;
mod phases;
mod proxy;
mod store;

use std::ffi::OsString;
use std::io::Write;

use headrace_base::{Error, Result};
use serde::Serialize;

pub use options::{Options, Phase};
pub use proxy::ProxyOptions;

/// What a phase did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub workload: Phase,
    pub threads: usize,
    /// Files, entries or requests, by the phase.
    pub operations: u64,
    pub bytes: u64,
    pub seconds: f64,
    /// Until everything was durable; null for phases that write nothing.
    pub seconds_with_sync: Option<f64>,
    pub operations_per_second: f64,
    /// Of create with --fsync: how long the fsyncs took.
    pub fsync: Option<Latencies>,
    pub verified: bool,
}

/// How long calls took, each by itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Latencies {
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

/// `headraced workload`: runs one phase and prints its report as one line of JSON. `proxy` runs until it is ended.
pub fn run(arguments: impl Iterator<Item = OsString>) -> Result<()> {
    let mut arguments = arguments.peekable();
    if arguments.next_if(|first| first == "proxy").is_some() {
        return match ProxyOptions::parse(arguments)? {
            Some(options) => proxy::run(&options),
            None => print(proxy::USAGE),
        };
    }
    let options = match Options::parse(arguments)? {
        Some(options) => options,
        None => return print(options::USAGE),
    };
    let report = execute(&options)?;
    let line = serde_json::to_string(&report)
        .map_err(|error| Error::internal(format!("write the report as JSON: {error}")))?;
    print(&line)
}

/// Runs one phase.
pub fn execute(options: &Options) -> Result<Report> {
    phases::run(options)
}

fn print(text: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{text}").map_err(|error| Error::io("write to stdout", error))
}
