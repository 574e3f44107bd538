//! Mounts made and ended over the socket.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{Running, path};
use headrace_base::error::errno;
use headrace_format::message::{Mounted, OpenFlags, Opened, Request, Written};

fn fuse_is_here() -> bool {
    let here = std::path::Path::new("/dev/fuse").exists();
    if !here {
        assert!(std::env::var("CI").is_err(), "under CI this test needs /dev/fuse");
        eprintln!("skipped: there is no /dev/fuse");
    }
    here
}

#[test]
fn a_mount_sees_at_once_what_the_socket_wrote() {
    if !fuse_is_here() {
        return;
    }
    let mut engine = Running::start();
    let mut client = engine.client();
    let place = tempfile::tempdir().unwrap();
    let mountpoint = place.path().canonicalize().unwrap();
    let shown = mountpoint.to_str().unwrap();
    let mount = |name: &str| Request::Mount { mountpoint: path(name), read_only: false, allow_other: false };
    let mounted: Mounted = client.call(mount(shown)).unwrap();
    assert_eq!(mounted.mountpoint, path(shown));
    assert_eq!(client.errno(mount(shown)), errno::EBUSY);
    assert_eq!(client.errno(mount("relative")), errno::EINVAL);
    assert_eq!(client.errno(mount("/no/such/place")), errno::ENOENT);
    assert_eq!(client.errno(mount(engine.folder.to_str().unwrap())), errno::EINVAL);
    let flags = OpenFlags { read: true, write: true, create: true, ..OpenFlags::default() };
    let opened: Opened = client.call(Request::Open { path: path("/f"), flags, mode: 0o644 }).unwrap();
    for round in 0..50_u8 {
        let request = Request::Pwrite { handle: opened.handle, offset: Some(0) };
        client.exchange::<Written>(&request, &vec![round; 10 + usize::from(round)]).unwrap();
        let seen = std::fs::read(mountpoint.join("f")).unwrap();
        assert_eq!(seen, vec![round; 10 + usize::from(round)]);
    }
    client.ok(Request::Rename { from: path("/f"), to: path("/g"), noreplace: false, exchange: false });
    assert!(!mountpoint.join("f").exists() && mountpoint.join("g").exists());
    std::fs::write(mountpoint.join("h"), "through the mount").unwrap();
    let read = client.exchange::<()>(&Request::ReadFile { path: path("/h") }, &[]).unwrap().1.payload;
    assert_eq!(read, b"through the mount");
    let status = client.status();
    assert_eq!((status.mounts.len(), status.mounts[0].requests > 0), (1, true));

    let busy = std::fs::File::open(mountpoint.join("g")).unwrap();
    assert_eq!(client.errno(Request::Unmount { mountpoint: path(shown) }), errno::EBUSY);
    assert_eq!(client.status().mounts.len(), 1);
    drop(busy);
    client.ok(Request::Unmount { mountpoint: path(shown) });
    assert_eq!(client.errno(Request::Unmount { mountpoint: path(shown) }), errno::ENOENT);
    assert!(client.status().mounts.is_empty() && !mountpoint.join("g").exists());

    // Ended from outside.
    client.call::<Mounted>(mount(shown)).unwrap();
    assert!(std::process::Command::new("umount").arg(&mountpoint).status().unwrap().success());
    common::until("it is noticed", || client.status().mounts.is_empty());

    // Busy at the engine's end: the engine ends all the same, and nothing stays mounted.
    client.call::<Mounted>(mount(shown)).unwrap();
    let busy = std::fs::File::open(mountpoint.join("g")).unwrap();
    engine.stop();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(shown), "{mounts}");
    drop(busy);
}
