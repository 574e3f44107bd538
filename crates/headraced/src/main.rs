//! The Headrace engine.
//!
//! ```text
//! headraced create --volume DIR
//! headraced serve --volume DIR [--system] [--memory-bytes N] [--idle-exit-seconds N] [--ready-fd N]
//! headraced workload PHASE --target DIR [options]
//! headraced version
//! ```
//! `serve` runs in the foreground; who wants it in the background starts it there. When it serves, or cannot, it
//! says so in one line of JSON on the ready descriptor (standard output without one). Logs are lines of JSON on
//! standard error. Exit status: 0 after a clean end, 1 after an error, 2 for wrong arguments.

mod arguments;

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use headrace_base::{Error, Result};
use headrace_node::{Engine, EngineOptions, block_signals, keep_small};
use headrace_volume::{CreateOptions, Location, Volume};
use serde_json::{Value, json};

use crate::arguments::{Command, Create, Serve, USAGE};

fn main() -> ExitCode {
    let command = match arguments::parse(lexopt::Parser::from_env()) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("headraced: {error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match command {
        Command::Help => print_line(USAGE),
        Command::Version => print_line(&format!("headraced {} {BUILD}", env!("CARGO_PKG_VERSION"))),
        Command::Create(options) => create(options),
        Command::Serve(serve_options) => serve(serve_options),
        Command::Workload(arguments) => workload(arguments),
    }
}

/// A benchmark of the other kind means nothing.
const BUILD: &str = if cfg!(debug_assertions) { "dev" } else { "release" };

fn print_line(text: &str) -> ExitCode {
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn error_json(error: &Error) -> Value {
    json!({"error": {
        "kind": error.kind().name(),
        "errno": error.raw_errno(),
        "message": error.message(),
    }})
}

fn create(create: Create) -> ExitCode {
    log_to_stderr();
    let made = absolute(&create.volume).and_then(|folder| {
        let object =
            create.object.map(|url| Location::parse(&url, create.endpoint, create.region)).transpose()?;
        Volume::create_with(
            &folder,
            &CreateOptions { object, flash_bytes_max: create.flash_bytes_max, contents: create.contents },
        )
    });
    match made {
        Ok(made) => {
            let mut line = json!({"volume": made.volume.to_string()});
            if let Some(rescued) = made.rescued {
                line["files"] = rescued.files.into();
                line["bytes"] = rescued.bytes.into();
                line["notes"] = rescued.notes.into();
            }
            print_line(&line.to_string())
        }
        Err(error) => {
            print_line(&error_json(&error).to_string());
            ExitCode::FAILURE
        }
    }
}

fn serve(options: Serve) -> ExitCode {
    log_to_stderr();
    log_panics();
    let mut ready = match options.ready_fd.map(take_descriptor).transpose() {
        Ok(ready) => ready,
        Err(error) => {
            tracing::error!(%error, "cannot start");
            print_line(&error_json(&error).to_string());
            return ExitCode::FAILURE;
        }
    };
    match start(&options) {
        Ok(engine) => {
            let line = json!({"ready": {
                "pid": std::process::id(),
                "volume": engine.volume().id().to_string(),
                "socket": engine.socket().to_string_lossy(),
                "recovery": engine.volume().recovery(),
            }});
            // Who started us may have left; that is no reason to leave too.
            if let Err(error) = say(ready.take(), &line) {
                tracing::warn!(%error, "nobody hears that the engine is ready");
            }
            engine.wait();
            match engine.stop() {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            }
        }
        Err(error) => {
            tracing::error!(kind = error.kind().name(), %error, "cannot start");
            if let Err(error) = say(ready.take(), &error_json(&error)) {
                tracing::warn!(%error, "nobody hears why the engine cannot start");
            }
            ExitCode::FAILURE
        }
    }
}

fn start(options: &Serve) -> Result<Engine> {
    // Before the first thread: they inherit it.
    keep_small();
    let signals = block_signals()?;
    let engine = Engine::start(EngineOptions {
        folder: absolute(&options.volume)?,
        system: options.system,
        memory_bytes_max: options.memory_bytes,
        idle_exit: options.idle_exit,
    })?;
    engine.stop_on(signals)?;
    Ok(engine)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|cause| Error::io(format_args!("find {}", path.display()), cause))
}

/// The descriptor whose number we were given.
fn take_descriptor(number: i32) -> Result<File> {
    let path = format!("/proc/self/fd/{number}");
    if !Path::new(&path).exists() && Path::new("/proc/self/fd").exists() {
        return Err(Error::invalid(format!("--ready-fd {number} is not open")));
    }
    // SAFETY: the caller opened it for us and gave it away with its number; nothing else here knows it. It is
    // above the standard streams, which `parse` has checked.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(number) }))
}

/// One line, and then the descriptor is closed.
fn say(ready: Option<File>, line: &Value) -> std::io::Result<()> {
    let line = format!("{line}\n");
    match ready {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => std::io::stdout().write_all(line.as_bytes()),
    }
}

fn workload(arguments: Vec<OsString>) -> ExitCode {
    match headrace_workload::run(arguments.into_iter()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_line(&error_json(&error).to_string());
            ExitCode::FAILURE
        }
    }
}

fn log_to_stderr() {
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_max_level(tracing::Level::INFO)
        // A log that cannot be written (the disk is full) must cost the line, not the engine.
        .log_internal_errors(false)
        .with_writer(|| Unfailing)
        .init();
}

/// Standard error, for lines that may be lost.
struct Unfailing;

impl Write for Unfailing {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = std::io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic
            .payload()
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.payload().downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current().name().unwrap_or("?").to_owned();
        let backtrace = std::backtrace::Backtrace::capture();
        tracing::error!(thread, place, message, %backtrace, "a bug in the engine: please report it");
    }));
}
