//! Requests over the real socket to a real volume.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use common::{Client, Running, path, read_layout, sample};
use headrace_base::Kind;
use headrace_base::error::errno;
use headrace_format::message::{
    Attr, BatchLayout, Listing, Names, OpenFlags, Opened, Request, Sealed, Seals, SetAttr, Statfs, Welcome,
    Written,
};

fn flags(text: &str) -> OpenFlags {
    OpenFlags {
        read: text.contains('r'),
        write: text.contains('w'),
        create: text.contains('c'),
        exclusive: text.contains('x'),
        truncate: text.contains('t'),
    }
}

fn open(client: &mut Client, name: &str, how: &str) -> headrace_base::Result<Opened> {
    client.call(Request::Open { path: path(name), flags: flags(how), mode: 0o640 })
}

fn pread(client: &mut Client, handle: u64, offset: u64, length: u64) -> Vec<u8> {
    client.exchange::<()>(&Request::Pread { handle, offset, length }, &[]).unwrap().1.payload
}

#[test]
fn a_file_is_written_and_read_through_a_handle() {
    let engine = Running::start();
    let mut client = engine.client();
    let opened = open(&mut client, "/f", "rwc").unwrap();
    assert_eq!((opened.attr.mode, opened.attr.size), (0o640, 0));
    let handle = opened.handle;
    let body: Vec<u8> = (0..3_000_000_u32).map(|k| (k / 3) as u8).collect();
    let request = Request::Pwrite { handle, offset: Some(5) };
    let (written, _) = client.exchange::<Written>(&request, &body).unwrap();
    assert_eq!(written, Written { offset: 5, bytes: 3_000_000 });
    let request = Request::Pwrite { handle, offset: None };
    let (written, _) = client.exchange::<Written>(&request, b"end").unwrap();
    assert_eq!(written.offset, 3_000_005);
    assert_eq!(pread(&mut client, handle, 0, 10)[..5], [0; 5]);
    assert!(pread(&mut client, handle, 5, 3_000_000) == body);
    assert_eq!(pread(&mut client, handle, 3_000_000, u64::MAX)[5..], *b"end");
    assert_eq!(pread(&mut client, handle, u64::MAX, 1), b"");
    client.ok(Request::Ftruncate { handle, size: 7 });
    assert_eq!(client.call::<Attr>(Request::Fstat { handle }).unwrap().size, 7);
    client.ok(Request::Fsync { handle });
    client.ok(Request::Close { handle });
    assert_eq!(client.errno(Request::Close { handle }), errno::EBADF);
    let whole = client.exchange::<()>(&Request::ReadFile { path: path("/f") }, &[]).unwrap().1.payload;
    assert_eq!(whole, [&[0; 5], &body[..2]].concat());
    client.ok(Request::Sync {});
}

#[test]
fn handles_are_of_one_connection_and_end_with_it() {
    let engine = Running::start();
    let mut client = engine.client();
    let handle = open(&mut client, "/f", "rwc").unwrap().handle;
    assert_eq!(engine.client().errno(Request::Fstat { handle }), errno::EBADF);
    let reading = open(&mut client, "/f", "r").unwrap().handle;
    client.send(&Request::Pwrite { handle: reading, offset: None }, b"x");
    let frame = client.receive().unwrap();
    let refused: headrace_format::message::Answer<Written> =
        headrace_format::message::decode_meta(&frame.meta).unwrap();
    assert_eq!(refused.into_result().unwrap_err().raw_errno(), errno::EBADF);
}

#[test]
fn opening_says_what_is_wrong() {
    let engine = Running::start();
    let mut client = engine.client();
    client.ok(Request::Mkdir { path: path("/d"), mode: 0o755, parents: false, exist_ok: false });
    open(&mut client, "/f", "wc").unwrap();
    client.ok(Request::Symlink { target: path("f"), path: path("/l") });
    client.ok(Request::Symlink { target: path("nowhere"), path: path("/dangling") });
    for (name, how, code) in [
        ("/d", "r", errno::EISDIR),
        ("/new/", "wc", errno::EISDIR),
        ("/none", "r", errno::ENOENT),
        ("/none/x", "rwc", errno::ENOENT),
        ("/f/x", "rwc", errno::ENOTDIR),
        ("/f", "rwcx", errno::EEXIST),
        ("/l", "rwcx", errno::EEXIST),
        ("/dangling", "rwc", errno::ENOENT),
        ("/f", "", errno::EINVAL),
        ("/f", "rt", errno::EINVAL),
        ("/f", "r", 0),
        ("/l", "rwc", 0),
    ] {
        let request = Request::Open { path: path(name), flags: flags(how), mode: 0o644 };
        assert_eq!(client.errno(request), code, "{name} {how}");
    }
}

#[test]
fn names_are_made_listed_moved_and_removed() {
    let engine = Running::start();
    let mut client = engine.client();
    let mkdir =
        |name: &str, parents, exist_ok| Request::Mkdir { path: path(name), mode: 0o750, parents, exist_ok };
    client.ok(mkdir("/a/b/c", true, false));
    client.ok(mkdir("/a/b/c", false, true));
    assert_eq!(client.errno(mkdir("/a/b", false, false)), errno::EEXIST);
    assert_eq!(client.errno(mkdir("/x/y", false, false)), errno::ENOENT);
    let attr: Attr = client.call(Request::Stat { path: path("/a/b/c"), follow: true }).unwrap();
    assert_eq!((attr.mode, attr.kind), (0o750, headrace_format::message::Kind::Directory));
    client.put_samples("/a/b", 25);
    client.ok(Request::Link { from: path("/a/b/000003"), to: path("/a/again") });
    client.ok(Request::Symlink { target: path("b/000003"), path: path("/a/soft") });
    let target = client.exchange::<()>(&Request::Readlink { path: path("/a/soft") }, &[]).unwrap().1.payload;
    assert_eq!(target, b"b/000003");
    assert_eq!(client.errno(Request::Readlink { path: path("/a/again") }), errno::EINVAL);
    let mut names = Vec::new();
    let mut after = None;
    loop {
        let list = Request::List { path: path("/a/b"), after: after.clone(), limit: 7, attrs: true };
        let listing: Listing = client.call(list).unwrap();
        assert!(listing.entries.len() <= 7);
        assert!(listing.entries.iter().all(|entry| entry.attr.as_ref().unwrap().ino == entry.ino));
        names.extend(listing.entries.into_iter().map(|entry| entry.name.into_vec()));
        after = listing.next;
        if after.is_none() {
            break;
        }
    }
    let mut expected: Vec<_> = (0..25).map(|number| format!("{number:06}").into_bytes()).collect();
    expected.push(b"c".to_vec());
    assert_eq!(names, expected);
    let rename = |from: &str, to: &str, noreplace, exchange| Request::Rename {
        from: path(from),
        to: path(to),
        noreplace,
        exchange,
    };
    assert_eq!(client.errno(rename("/a/again", "/a/soft", true, false)), errno::EEXIST);
    assert_eq!(client.errno(rename("/a/again", "/a/soft", true, true)), errno::EINVAL);
    client.ok(rename("/a/again", "/a/b/c/moved", false, false));
    client.ok(rename("/a/b/c/moved", "/a/soft", false, true));
    let attr: Attr = client.call(Request::Stat { path: path("/a/soft"), follow: false }).unwrap();
    assert_eq!((attr.kind, attr.nlink), (headrace_format::message::Kind::File, 2));
    assert_eq!(client.errno(Request::Rmdir { path: path("/a/b") }), errno::ENOTEMPTY);
    client.ok(Request::Unlink { path: path("/a/b/c/moved") });
    client.ok(Request::Rmdir { path: path("/a/b/c") });
    assert_eq!(client.errno(Request::Unlink { path: path("/a/b/c") }), errno::ENOENT);
    let welcome: Welcome = client.call(Request::Hello { client: "test".into() }).unwrap();
    assert_eq!(welcome.pid, std::process::id());
    let space: Statfs = client.call(Request::Statfs {}).unwrap();
    assert!(space.bytes_total >= space.bytes_free && space.inodes_used >= 28);
}

#[test]
fn attributes_and_extended_ones_are_set() {
    let engine = Running::start();
    let mut client = engine.client();
    client.put_samples("/d", 1);
    let name = || path("/d/000000");
    let set = SetAttr { mode: Some(0o600), mtime_ns: Some(-5), size: Some(4), ..SetAttr::default() };
    let attr: Attr = client.call(Request::Setattr { path: name(), set }).unwrap();
    assert_eq!((attr.mode, attr.mtime_ns, attr.size), (0o600, -5, 4));
    let set = SetAttr { size: Some(4), ..SetAttr::default() };
    assert_eq!(client.errno(Request::Setattr { path: path("/d"), set }), errno::EISDIR);
    let setxattr =
        |name: &str| Request::Setxattr { path: path("/d/000000"), name: path(name), value: path("value") };
    client.ok(setxattr("user.a"));
    assert_eq!(client.errno(setxattr("system.posix_acl_access")), errno::EOPNOTSUPP);
    let names: Names = client.call(Request::Listxattr { path: name() }).unwrap();
    assert_eq!(names.names, vec![path("user.a")]);
    let get = || Request::Getxattr { path: name(), name: path("user.a") };
    assert_eq!(client.exchange::<()>(&get(), &[]).unwrap().1.payload, b"value");
    client.ok(Request::Removexattr { path: name(), name: path("user.a") });
    assert_eq!(client.errno(get()), errno::ENODATA);
}

#[test]
fn a_seal_comes_with_its_manifest_and_batches_of_it_are_exact() {
    let engine = Running::start();
    let mut client = engine.client();
    client.put_samples("/train", 200);
    let (sealed, manifest) = client.seal("/train");
    assert_eq!(
        (sealed.samples, sealed.manifest_bytes),
        (200, rustix::fs::fstat(&manifest).unwrap().st_size as u64)
    );
    assert!(rustix::io::write(&manifest, b"x").is_err(), "the descriptor is for reading");
    let again = client.exchange::<Sealed>(&Request::OpenSeal { seal: sealed.seal.clone() }, &[]).unwrap();
    assert_eq!((again.0, again.1.fds.len()), (sealed.clone(), 1));
    let seals: Seals = client.call(Request::Seals {}).unwrap();
    assert_eq!(seals.seals, vec![sealed.clone()]);
    let wanted: Vec<u64> = (0..200).rev().chain([7, 7, 0]).collect();
    for count in [0, 1, 5, wanted.len()] {
        let payload: Vec<u8> = wanted[..count].iter().flat_map(|index| index.to_le_bytes()).collect();
        let request = Request::ReadBatch { seal: sealed.seal.clone() };
        let (layout, frame) = client.exchange::<BatchLayout>(&request, &payload).unwrap();
        let batch = read_layout(&frame.fds[0], &layout);
        assert_eq!(batch.len(), count);
        for ((index, bytes), expected) in batch.into_iter().zip(&wanted) {
            assert!(index == *expected && bytes == sample(index));
        }
        assert!(rustix::fs::ftruncate(frame.fds[0].as_fd(), 0).is_err());
    }
    let request = Request::ReadBatch { seal: sealed.seal.clone() };
    for (payload, why) in [
        (&200_u64.to_le_bytes()[..], "200 is out of range"),
        (&[1, 2, 3], "8 bytes each"),
        (&[0; 8 * 8000], "ask for fewer"),
    ] {
        let error = client.exchange::<BatchLayout>(&request, payload).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.message().contains(why), "{error}");
    }
    let error = client.call::<Sealed>(Request::OpenSeal { seal: "x".into() }).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    let none = "01K6QZ4V8Y0000000000000042".to_owned();
    assert_eq!(client.call::<Sealed>(Request::OpenSeal { seal: none }).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn what_cannot_be_understood_is_answered_and_the_next_request_too() {
    let engine = Running::start();
    let mut client = engine.client();
    for (meta, payload) in [
        (&b"\x81\xA2op\xA4melt"[..], &b"payload"[..]),
        (b"", b""),
        (b"\xC1\xC1\xC1", &[9; 200_000]),
        (&[0x91; 100_000], b""),
        (b"\x81\xA2op\xA6status", b"a payload where none is due"),
    ] {
        client.send_raw(meta, payload);
        let frame = client.receive().expect("an answer");
        let answer: headrace_format::message::Answer<()> =
            headrace_format::message::decode_meta(&frame.meta).unwrap();
        assert_eq!(answer.into_result().unwrap_err().kind(), Kind::Invalid);
        client.status();
    }
}

#[test]
fn a_connection_that_makes_no_sense_is_ended_and_the_engine_goes_on() {
    let engine = Running::start();
    for bytes in [
        &b"\0HRWIRE\x02"[..],
        b"\0\0\0\0\0\0\0\0",
        b"\0HRWIRE\x01\xFF\xFF\xFF\xFF\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
        b"\0HRWIRE\x01\x01\x00\x00\x00\x00\x00\x00\x00\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF",
        b"\0HRWIRE\x01\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
    ] {
        let mut socket = UnixStream::connect(engine.folder.join("engine.sock")).unwrap();
        socket.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).unwrap();
        assert!(answer.windows(7).any(|part| part == b"invalid"), "{bytes:?}");
    }
    // Cut off in the middle of everything.
    for bytes in
        [&b"\0HRW"[..], b"\0HRWIRE\x01\x10\x00", b"\0HRWIRE\x01\x10\x00\x00\x00\0\0\0\0\0\0\0\0\0\0\0\0abc"]
    {
        let mut socket = UnixStream::connect(engine.folder.join("engine.sock")).unwrap();
        socket.write_all(bytes).unwrap();
    }
    let mut client = engine.client();
    common::until("those connections are gone", || client.status().clients == 1);
}

/// Every request of the golden file with bytes changed, cut and added: an answer comes, or the connection ends,
/// and nothing fails inside.
#[test]
fn damaged_requests_never_break_the_engine() {
    let engine = Running::start();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/wire.json");
    let golden: HashMap<String, String> = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = move || {
        // xorshift64 (Marsaglia): the same damage in every run.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    let mut answered = 0;
    for (name, hex) in golden.iter().filter(|(name, _)| name.starts_with("request.")) {
        if ["request.shutdown", "request.mount", "request.unmount"].contains(&name.as_str()) {
            continue;
        }
        let whole: Vec<u8> =
            (0..hex.len() / 2).map(|k| u8::from_str_radix(&hex[2 * k..2 * k + 2], 16).unwrap()).collect();
        for _ in 0..40 {
            let mut meta = whole.clone();
            for _ in 0..random() % 4 {
                let at = random() % meta.len();
                meta[at] = random() as u8;
            }
            if random() % 5 == 0 {
                meta.truncate(random() % meta.len());
            }
            let payload = vec![random() as u8; random() % 40];
            let mut client = engine.client();
            client.socket.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
            client.send_raw(&meta, &payload);
            if let Some(frame) = client.receive() {
                answered += 1;
                let text = String::from_utf8_lossy(&frame.meta);
                assert!(!text.contains("failed in the engine"), "{name} {meta:?}: {text}");
            }
        }
    }
    assert!(answered > 1000, "{answered}");
    engine.client().status();
}

#[test]
fn messages_are_bounded_by_the_memory_budget() {
    let engine = Running::with(|options| options.memory_bytes_max = 32 << 20);
    let mut client = engine.client();
    let handle = open(&mut client, "/f", "rwc").unwrap().handle;
    // A third of 32 MiB is for messages and batches.
    let large = vec![1; 12 << 20];
    let request = Request::Pwrite { handle, offset: Some(0) };
    let error = client.exchange::<Written>(&request, &large).unwrap_err();
    assert!(error.message().contains("more than the whole budget"), "{error}");
    client.exchange::<Written>(&request, &large[..8 << 20]).unwrap();
    client.exchange::<Written>(&Request::Pwrite { handle, offset: None }, &large[..8 << 20]).unwrap();
    let error = client.call::<()>(Request::ReadFile { path: path("/f") }).unwrap_err();
    assert!(error.message().contains("more than the whole budget"), "{error}");
    assert_eq!(pread(&mut client, handle, 0, 8 << 20).len(), 8 << 20);
    // The answer may be here before its memory is given back.
    common::until("the memory is given back", || engine.volume().budget().used() == 0);
}

#[test]
fn http_is_served_on_the_same_socket() {
    let engine = Running::start();
    let mut client = engine.client();
    client.put_samples("/train", 3);
    assert_ne!(client.errno(Request::Stat { path: path("/none"), follow: true }), 0);
    let get = |route: &str| {
        let mut socket = UnixStream::connect(engine.folder.join("engine.sock")).unwrap();
        write!(socket, "GET {route} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    };
    let (head, body) = get("/metrics");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    for line in [
        "headrace_requests_total{op=\"put\"}",
        "headrace_errors_total{kind=\"not_found\"}",
        // Whose numbers these are is open: the engines of all tests share the recorder.
        "headrace_clients ",
        "headrace_streams ",
        "headrace_buffers_bytes ",
        "headrace_dirty_bytes",
        "headrace_resident_bytes",
        "headrace_read_bytes_total",
        "headrace_written_bytes_total",
    ] {
        assert!(body.contains(line), "{line} is missing in {body}");
    }
    let json = |route: &str| -> serde_json::Value { serde_json::from_str(&get(route).1).unwrap() };
    let document = json("/openapi.json");
    for (route, schema, value) in [
        ("/v1/status", "Status", json("/v1/status")),
        ("/v1/volumes", "Volume", json("/v1/volumes")[0].clone()),
        ("/v1/sessions", "Session", json("/v1/sessions")[0].clone()),
    ] {
        let mut described: Vec<_> =
            document["components"]["schemas"][schema]["properties"].as_object().unwrap().keys().collect();
        let mut there: Vec<_> = value.as_object().unwrap().keys().collect();
        described.sort();
        there.sort();
        assert_eq!(there, described, "{route}");
    }
    assert_eq!(json("/v1/status")["path"], engine.folder.to_str().unwrap());
    assert_eq!(json("/v1/sessions")[0]["session"], json("/v1/status")["session"]);
    let (head, body) = get("/v2/none");
    assert!(head.starts_with("HTTP/1.1 404") && body.contains("/v1/status"), "{head} {body}");
    // Two requests on one connection.
    let mut socket = UnixStream::connect(engine.folder.join("engine.sock")).unwrap();
    for last in [false, true] {
        let connection = if last { "close" } else { "keep-alive" };
        write!(socket, "GET /v1/volumes HTTP/1.1\r\nHost: e\r\nConnection: {connection}\r\n\r\n").unwrap();
        if !last {
            let mut part = [0; 4096];
            assert!(socket.read(&mut part).unwrap() > 0);
        }
    }
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn a_stopped_engine_gives_everything_back_and_starts_again() {
    let mut engine = Running::start();
    let mut client = engine.client();
    open(&mut client, "/f", "rwc").unwrap();
    client.put_samples("/d", 5);
    engine.stop();
    assert!(client.receive().is_none(), "the connection is closed");
    assert!(!engine.folder.join("engine.sock").exists());
    engine.start_again(|_| {});
    let mut client = engine.client();
    let status = client.status();
    assert_eq!((status.recovery.len(), status.inodes >= 8), (0, true), "{:?}", status.recovery);
    assert_eq!(
        client.exchange::<()>(&Request::ReadFile { path: path("/d/000004") }, &[]).unwrap().1.payload,
        sample(4)
    );
    // A second engine is refused, with the owner's number.
    let second = headrace_node::Engine::start(headrace_node::EngineOptions {
        folder: engine.folder.clone(),
        system: false,
        memory_bytes_max: headrace_node::MEMORY_BYTES_DEFAULT,
        idle_exit: None,
    })
    .unwrap_err();
    assert_eq!(second.kind(), Kind::Conflict);
    assert!(second.message().contains(&std::process::id().to_string()), "{second}");
    client.ok(Request::Shutdown {});
    engine.engine.as_ref().unwrap().wait();
}
