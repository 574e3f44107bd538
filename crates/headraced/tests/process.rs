//! The engine as a process: what it says at its start, and how it ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use headrace_base::time;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_headraced");

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

fn json_line(bytes: &[u8]) -> Value {
    let text = String::from_utf8_lossy(bytes);
    serde_json::from_str(text.trim()).unwrap_or_else(|error| panic!("{error}: {text}"))
}

struct Volume {
    folder: PathBuf,
    temporary: tempfile::TempDir,
}

impl Volume {
    fn new() -> Volume {
        let temporary = tempfile::tempdir().unwrap();
        let folder = temporary.path().join("volume");
        let made = run(&["create", "--volume", folder.to_str().unwrap()]);
        assert!(made.status.success());
        assert_eq!(json_line(&made.stdout)["volume"].as_str().unwrap().len(), 26);
        Volume { folder, temporary }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.temporary.path().join("log")).unwrap_or_default()
    }

    fn serve(&self, more: &[&str]) -> Engine {
        let log = File::options().append(true).create(true).open(self.temporary.path().join("log")).unwrap();
        let mut child = Command::new(PROGRAM)
            .args(["serve", "--volume", self.folder.to_str().unwrap()])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Engine { child, said: json_line(line.as_bytes()), folder: self.folder.clone() }
    }
}

struct Engine {
    child: Child,
    said: Value,
    folder: PathBuf,
}

impl Engine {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Exit code, None after a signal. At most twenty seconds.
    fn ended(&mut self) -> Option<i32> {
        let deadline = time::monotonic_now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            if time::monotonic_now() > deadline {
                self.child.kill().unwrap();
                panic!("the engine does not end");
            }
            time::sleep(Duration::from_millis(10));
        }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.folder.join("engine.sock")).unwrap()
    }

    fn get(&self, route: &str) -> Value {
        let mut socket = self.connect();
        write!(socket, "GET {route} HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        json_line(answer.split_once("\r\n\r\n").unwrap().1.as_bytes())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // It has ended already in a test that went well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn logged(log: &str, what: &str) -> Vec<Value> {
    log.lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .filter(|line| line["message"].as_str().is_some_and(|message| message.contains(what)))
        .collect()
}

#[test]
fn it_says_that_it_serves_and_ends_cleanly_at_sigterm() {
    let volume = Volume::new();
    for signal in [Signal::TERM, Signal::INT] {
        let mut engine = volume.serve(&[]);
        let ready = engine.said["ready"].clone();
        assert_eq!(ready["pid"], engine.child.id());
        assert_eq!(ready["socket"], volume.folder.join("engine.sock").to_str().unwrap());
        assert_eq!(ready["recovery"], serde_json::json!([]), "the one before had ended cleanly");
        assert_eq!(engine.get("/v1/status")["volume"], ready["volume"]);
        let idle = engine.connect();
        engine.signal(signal);
        assert_eq!(engine.ended(), Some(0));
        assert!(!volume.folder.join("engine.sock").exists());
        drop(idle);
    }
    assert_eq!(logged(&volume.log(), "stopped").len(), 2, "{}", volume.log());
}

#[test]
fn a_second_engine_is_refused_with_the_owners_pid() {
    let volume = Volume::new();
    let engine = volume.serve(&[]);
    let second = run(&["serve", "--volume", volume.folder.to_str().unwrap()]);
    assert_eq!(second.status.code(), Some(1));
    let error = &json_line(&second.stdout)["error"];
    assert_eq!(error["kind"], "conflict");
    assert!(error["message"].as_str().unwrap().contains(&engine.child.id().to_string()), "{error}");
    assert_eq!(engine.get("/v1/status")["pid"], engine.child.id(), "the first one goes on");
}

#[test]
fn after_a_kill_it_starts_over_the_old_socket_and_says_what_it_mended() {
    let volume = Volume::new();
    let mut engine = volume.serve(&[]);
    engine.signal(Signal::KILL);
    assert_eq!(engine.ended(), None);
    assert!(volume.folder.join("engine.sock").exists());
    let mut engine = volume.serve(&[]);
    let recovery = engine.said["ready"]["recovery"].as_array().unwrap().clone();
    assert!(!recovery.is_empty());
    assert_eq!(engine.get("/v1/status")["recovery"].as_array().unwrap(), &recovery);
    engine.signal(Signal::TERM);
    assert_eq!(engine.ended(), Some(0));
}

#[test]
fn it_leaves_when_nobody_uses_it() {
    let volume = Volume::new();
    let mut engine = volume.serve(&["--idle-exit-seconds", "1"]);
    let used = engine.connect();
    let began = time::monotonic_now();
    time::sleep(Duration::from_millis(2500));
    assert!(engine.child.try_wait().unwrap().is_none(), "a client is there");
    drop(used);
    assert_eq!(engine.ended(), Some(0));
    let lived = time::monotonic_now() - began;
    assert!(lived > Duration::from_millis(3400), "{lived:?}: not a second after the client");
}

#[test]
fn it_ends_when_the_volumes_folder_is_deleted() {
    let volume = Volume::new();
    let mut engine = volume.serve(&["--idle-exit-seconds", "4"]);
    let client = engine.connect();
    std::fs::remove_dir_all(&volume.folder).unwrap();
    engine.ended();
    assert_eq!(logged(&volume.log(), "folder was deleted").len(), 1, "{}", volume.log());
    drop(client);
}

#[test]
fn the_line_goes_to_the_ready_descriptor_and_it_is_closed() {
    let volume = Volume::new();
    let ready = volume.temporary.path().join("ready");
    // The shell opens descriptor 9 for the engine.
    let script = "exec \"$0\" serve --volume \"$1\" --ready-fd 9 9>\"$2\"";
    let mut child = Command::new("sh")
        .args(["-c", script, PROGRAM])
        .args([&volume.folder, &ready])
        .stderr(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let said = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let deadline = time::monotonic_now() + Duration::from_secs(20);
    while !said(&ready).ends_with('\n') {
        assert!(time::monotonic_now() < deadline, "no line");
        time::sleep(Duration::from_millis(10));
    }
    assert_eq!(json_line(said(&ready).as_bytes())["ready"]["pid"], pid);
    let closed = (0..100).any(|_| {
        time::sleep(Duration::from_millis(10));
        !Path::new(&format!("/proc/{pid}/fd/9")).exists()
    });
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut output = String::new();
    child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(closed && output.is_empty(), "{output}");
}

#[test]
fn what_cannot_be_served_is_an_error_on_one_line() {
    let temporary = tempfile::tempdir().unwrap();
    let at = |name: &str| temporary.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("file"), "x").unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    std::fs::write(at("folder/x"), "x").unwrap();
    let volume = Volume::new();
    let own = volume.folder.to_str().unwrap().to_owned();
    for (arguments, kind) in [
        (vec!["serve", "--volume", &at("none")], "not_found"),
        (vec!["serve", "--volume", &at("folder")], "invalid"),
        (vec!["serve", "--volume", &at("file")], "invalid"),
        (vec!["serve", "--volume", &own, "--memory-bytes", "1000"], "invalid"),
        (vec!["serve", "--volume", &own, "--ready-fd", "900"], "invalid"),
        (vec!["create", "--volume", &own], "conflict"),
        (vec!["create", "--volume", &at("folder")], "conflict"),
        (vec!["create", "--volume", &at("file")], "invalid"),
    ] {
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let error = &json_line(&output.stdout)["error"];
        assert_eq!(error["kind"], kind, "{arguments:?}: {error}");
        assert!(error["message"].as_str().unwrap().len() > 20, "{error}");
    }
    let wrong = run(&["serve", "--volume"]);
    assert_eq!((wrong.status.code(), wrong.stdout.len()), (Some(2), 0));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("usage: headraced"));
    assert!(String::from_utf8_lossy(&run(&["version"]).stdout).contains(env!("CARGO_PKG_VERSION")));
}
