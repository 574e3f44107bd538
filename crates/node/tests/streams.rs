//! Loaders over the real socket: order, memory, and what a client leaves behind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Client, Running, loader, path, read_layout, sample, until};
use headrace_base::time;
use headrace_format::message::{
    Answer, BatchLayout, ErrorBody, LoaderRequest, Request, StreamEvent, decode_meta,
};
use headrace_format::order::Permutation;

/// The slots of one stream, as a client knows them.
#[derive(Default)]
struct Slots(HashMap<u32, OwnedFd>);

impl Slots {
    fn batch(&mut self, client: &mut Client) -> Result<Option<(u64, u32, BatchLayout)>, ErrorBody> {
        let (event, mut fds) = client.event();
        match event {
            StreamEvent::Batch { batch, slot, layout } => {
                if let Some(fd) = fds.pop() {
                    self.0.insert(slot, fd);
                }
                assert!(self.0.contains_key(&slot), "a slot's first use carries its memory");
                Ok(Some((batch, slot, layout)))
            }
            StreamEvent::End {} => Ok(None),
            StreamEvent::Error(error) => Err(error),
        }
    }
}

fn engine_with_samples(count: u64) -> (Running, Client, String) {
    let engine = Running::start();
    let mut client = engine.client();
    client.put_samples("/train", count);
    let seal = client.seal("/train").0.seal;
    (engine, client, seal)
}

fn refused(client: &mut Client, request: LoaderRequest) -> String {
    client.send(&Request::Loader(request), &[]);
    let frame = client.receive().unwrap();
    decode_meta::<Answer<()>>(&frame.meta).unwrap().into_result().unwrap_err().message().to_owned()
}

#[test]
fn an_epoch_comes_in_the_keyed_order_and_byte_for_byte() {
    let (engine, _client, seal) = engine_with_samples(1003);
    let mut seen = Vec::new();
    for rank in 0..3 {
        let mut client = engine.client();
        let request = LoaderRequest {
            shuffle: true,
            seed: 9,
            epoch: 4,
            rank,
            world_size: 3,
            first_batch: 2,
            ..loader(&seal, 16)
        };
        client.send(&Request::Loader(request), &[]);
        let mut slots = Slots::default();
        let mut expected = 2;
        while let Some((batch, slot, layout)) = slots.batch(&mut client).unwrap() {
            assert_eq!(batch, expected);
            expected += 1;
            let samples = read_layout(&slots.0[&slot], &layout);
            for (k, (index, bytes)) in samples.iter().enumerate() {
                let position = u64::from(rank) + 3 * (batch * 16 + k as u64);
                assert_eq!(*index, Permutation::new(1003, 9, 4).index(position));
                assert!(*bytes == sample(*index), "sample {index}");
            }
            seen.extend(samples.into_iter().map(|(index, _)| index));
            client.release(slot);
        }
        assert_eq!(expected, 21);
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 1003 - 3 * 32);
}

#[test]
fn slots_are_used_again_and_kept_ones_stay_as_they_are() {
    let (engine, _client, seal) = engine_with_samples(640);
    let mut client = engine.client();
    client.send(&Request::Loader(loader(&seal, 16)), &[]);
    let mut slots = Slots::default();
    let mut kept = Vec::new();
    while let Some((batch, slot, layout)) = slots.batch(&mut client).unwrap() {
        if batch % 5 == 0 {
            kept.push((batch, slot, layout));
        } else {
            client.release(slot);
        }
    }
    assert_eq!(kept.len(), 8);
    for (batch, slot, layout) in kept {
        let samples = read_layout(&slots.0[&slot], &layout);
        assert!(
            samples
                .iter()
                .enumerate()
                .all(|(k, (index, bytes))| { *index == batch * 16 + k as u64 && *bytes == sample(*index) })
        );
    }
    // 8 are kept; ahead of a client that reads at once are 4 unread and 4 that it may not have taken.
    assert!(slots.0.len() <= 8 + 8 + 2, "{} slots", slots.0.len());
    drop(client);
    until("its memory is given back", || engine.volume().budget().used() == 0);
}

#[test]
fn a_client_that_keeps_everything_gets_an_error_and_not_its_own_batches_overwritten() {
    let engine = Running::with(|options| options.memory_bytes_max = 32 << 20);
    let mut client = engine.client();
    client.put_samples("/train", 1600);
    let seal = client.seal("/train").0.seal;
    // Batches of 0.65 MB: 16 of them fit. Batches of 3.2 MB: 3.
    for (batch_size, at_least) in [(64, 12), (320, 3)] {
        let mut client = engine.client();
        client.send(&Request::Loader(loader(&seal, batch_size)), &[]);
        let mut slots = Slots::default();
        let mut kept = Vec::new();
        let end = loop {
            match slots.batch(&mut client) {
                Ok(Some(batch)) => kept.push(batch),
                other => break other,
            }
        };
        assert!(kept.len() >= at_least, "{} kept", kept.len());
        for (batch, slot, layout) in &kept {
            let samples = read_layout(&slots.0[slot], layout);
            assert!(samples.iter().enumerate().all(|(k, (index, bytes))| {
                *index == batch * u64::from(batch_size) + k as u64 && *bytes == sample(*index)
            }));
        }
        let error = end.unwrap_err();
        assert_eq!(error.kind, "full");
        assert!(error.message.contains(&format!("keeps {} batches", kept.len())), "{}", error.message);
        assert!(error.message.contains(&(32_u64 * 1024 * 1024 / 3).to_string()), "{}", error.message);
        drop(client);
        until("its memory is given back", || engine.volume().budget().used() == 0);
    }
    let error = {
        let mut client = engine.client();
        let mut all = loader(&seal, 10_000);
        all.first_batch = 0;
        client.put_samples("/more", 1200);
        let seal = client.seal("/more").0.seal;
        client.send(&Request::Loader(LoaderRequest { seal, ..all }), &[]);
        Slots::default().batch(&mut client).unwrap_err()
    };
    assert!(error.message.contains("more than the engine's whole budget"), "{}", error.message);
}

#[test]
fn a_slow_client_is_waited_for() {
    let engine = Running::with(|options| options.memory_bytes_max = 32 << 20);
    let mut client = engine.client();
    client.put_samples("/train", 600);
    let seal = client.seal("/train").0.seal;
    let mut client = engine.client();
    client.send(&Request::Loader(loader(&seal, 100)), &[]);
    let mut slots = Slots::default();
    let mut held = None;
    let mut batches = 0;
    // As a training loop does it: the last batch is let go when the next one is there.
    while let Some((_, slot, _)) = slots.batch(&mut client).unwrap() {
        batches += 1;
        if let Some(slot) = held.replace(slot) {
            client.release(slot);
        }
        time::sleep(Duration::from_millis(100));
    }
    assert_eq!(batches, 6);
}

#[test]
fn bad_loaders_are_refused_and_bad_commands_end_the_stream() {
    let (engine, mut client, seal) = engine_with_samples(40);
    assert!(refused(&mut client, loader(&seal, 0)).contains("batch_size"));
    assert!(
        refused(&mut client, LoaderRequest { rank: 2, world_size: 2, ..loader(&seal, 1) }).contains("rank 2")
    );
    assert!(
        refused(&mut client, LoaderRequest { world_size: 0, ..loader(&seal, 1) }).contains("world size 0")
    );
    assert!(refused(&mut client, LoaderRequest { prefetch: 5000, ..loader(&seal, 1) }).contains("prefetch"));
    assert!(refused(&mut client, loader("nothing", 1)).contains("nothing"));
    client.send(&Request::Loader(LoaderRequest { first_batch: 99, ..loader(&seal, 8) }), &[]);
    assert_eq!(client.event().0, StreamEvent::End {});

    let mut client = engine.client();
    client.send(&Request::Loader(LoaderRequest { prefetch: 1, ..loader(&seal, 8) }), &[]);
    let mut slots = Slots::default();
    slots.batch(&mut client).unwrap();
    client.release(77);
    let error = loop {
        match slots.batch(&mut client) {
            Ok(event) => assert!(event.is_some(), "it ended well"),
            Err(error) => break error,
        }
    };
    assert!(error.message.contains("slot 77"), "{}", error.message);
    while client.receive().is_some() {}
    until("both streams have ended", || engine.client().status().streams <= 1);
}

#[test]
fn a_damaged_sample_is_named_and_never_served() {
    let (mut engine, _client, seal) = engine_with_samples(64);
    engine.stop();
    let mut packs = Vec::new();
    for shard in std::fs::read_dir(engine.folder.join("segments")).unwrap() {
        let shard = shard.unwrap().path();
        if shard.is_dir() {
            packs.extend(std::fs::read_dir(shard).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    packs.retain(|path| path.extension().is_some_and(|extension| extension == "pack"));
    let wanted = sample(41);
    let mut damaged = 0;
    for pack in packs {
        let mut bytes = std::fs::read(&pack).unwrap();
        if let Some(at) = bytes.windows(wanted.len()).position(|part| part == wanted) {
            bytes[at + 5000] ^= 1;
            std::fs::write(&pack, bytes).unwrap();
            damaged += 1;
        }
    }
    assert_eq!(damaged, 1);
    engine.start_again(|_| {});
    let mut client = engine.client();
    client.send(&Request::Loader(loader(&seal, 16)), &[]);
    let mut slots = Slots::default();
    for batch in 0..2 {
        assert_eq!(slots.batch(&mut client).unwrap().unwrap().0, batch);
    }
    let error = slots.batch(&mut client).unwrap_err();
    assert_eq!((&error.kind[..], error.errno), ("corrupt", 5));
    for part in ["batch 2", "sample 41", "000041"] {
        assert!(error.message.contains(part), "{}", error.message);
    }
    let request = Request::ReadBatch { seal };
    let error = engine.client().exchange::<BatchLayout>(&request, &41_u64.to_le_bytes()).unwrap_err();
    assert!(error.message().contains("sample 41"), "{error}");
}

/// Not a test by itself: what other processes do, started by the tests below.
#[test]
#[allow(clippy::zombie_processes, reason = "it is killed before its child ends")]
fn child() {
    let Ok(role) = std::env::var("HEADRACE_TEST_CHILD") else { return };
    let folder = std::path::PathBuf::from(std::env::var("HEADRACE_TEST_FOLDER").unwrap());
    match role.as_str() {
        "holds_a_stream" => {
            let mut client = Client::connect(&folder);
            let seal = std::env::var("HEADRACE_TEST_SEAL").unwrap();
            client.send(&Request::Loader(loader(&seal, 8)), &[]);
            client.event();
            // A grandchild that has the socket too, as a forked worker would.
            let inherited = rustix::io::fcntl_dupfd_cloexec(&client.socket, 3).unwrap();
            rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).unwrap();
            let grandchild = Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap();
            println!("child-is-ready {} {}", grandchild.id(), inherited.as_raw_fd());
            time::sleep(Duration::from_secs(600));
        }
        "is_another_user" => {
            let expected: i32 = std::env::var("HEADRACE_TEST_ERRNO").unwrap().parse().unwrap();
            let mut client = Client::connect(&folder);
            assert_eq!(client.errno(Request::Status {}), expected);
            if expected == 0 {
                for (request, code) in [
                    (Request::Stat { path: path("/train/000000"), follow: true }, 0),
                    (Request::ReadFile { path: path("/secret/000000") }, 13),
                    (Request::Seal { path: path("/") }, 13),
                    (Request::Unlink { path: path("/train/000000") }, 13),
                    (
                        Request::Mkdir { path: path("/mine"), mode: 0o755, parents: false, exist_ok: false },
                        13,
                    ),
                    (Request::Shutdown {}, 1),
                    (Request::Unmount { mountpoint: path("/mnt") }, 1),
                ] {
                    let shown = format!("{request:?}");
                    assert_eq!(client.errno(request), code, "{shown}");
                }
                let seal = std::env::var("HEADRACE_TEST_SEAL").unwrap();
                let request = Request::ReadBatch { seal: seal.clone() };
                client.exchange::<BatchLayout>(&request, &0_u64.to_le_bytes()).unwrap();
                let error = client.exchange::<BatchLayout>(&request, &1_u64.to_le_bytes()).unwrap_err();
                assert_eq!(error.raw_errno(), 13, "{error}");
                client.send(&Request::Loader(loader(&seal, 2)), &[]);
                let (StreamEvent::Error(error), fds) = client.event() else { panic!("it was served") };
                assert_eq!((error.errno, fds.len()), (13, 0), "{}", error.message);
            }
            println!("child-is-ready 0 0");
        }
        other => panic!("no role {other}"),
    }
}

fn start_child(engine: &Running, role: &str, seal: &str) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("HEADRACE_TEST_CHILD", role)
        .env("HEADRACE_TEST_FOLDER", &engine.folder)
        .env("HEADRACE_TEST_SEAL", seal)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn ready_line(child: &mut std::process::Child) -> Option<String> {
    use std::io::BufRead;
    let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    lines.map_while(Result::ok).find(|line| line.contains("child-is-ready"))
}

#[test]
fn a_killed_client_frees_what_it_held_although_its_child_has_the_socket() {
    let (engine, mut client, seal) = engine_with_samples(200);
    let mut child = start_child(&engine, "holds_a_stream", &seal);
    let line = ready_line(&mut child).expect("the child has a stream");
    let grandchild: i32 = line.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    assert_eq!(client.status().streams, 1);
    assert!(engine.volume().budget().used() > 0);
    child.kill().unwrap();
    let killed = time::monotonic_now();
    child.wait().unwrap();
    until("the stream has ended", || client.status().streams == 0);
    until("its memory is given back", || engine.volume().budget().used() == 0);
    let took = time::monotonic_now() - killed;
    let grandchild = rustix::process::Pid::from_raw(grandchild).unwrap();
    let fds = std::fs::read_dir(format!("/proc/{}/fd", grandchild.as_raw_nonzero())).unwrap();
    let has_socket = fds
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .any(|target| target.to_string_lossy().starts_with("socket:"));
    rustix::process::kill_process(grandchild, rustix::process::Signal::KILL).unwrap();
    assert!(has_socket, "or this test shows nothing");
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn other_users_are_refused_or_served_with_their_own_rights() {
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var("CI").is_err(), "under CI this test needs root");
        eprintln!("skipped: only root can become another user");
        return;
    }
    const NOBODY: u32 = 65534;
    let as_nobody = |engine: &Running, code: i32, seal: &str| {
        // A copy that another user can run, wherever the build folder is.
        let program = engine.folder.parent().unwrap().join("child");
        std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, open).unwrap();
        std::fs::set_permissions(&engine.folder, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let output = std::os::unix::process::CommandExt::uid(&mut Command::new(program), NOBODY)
            .args(["--exact", "child", "--nocapture"])
            .current_dir("/")
            .env("HEADRACE_TEST_CHILD", "is_another_user")
            .env("HEADRACE_TEST_FOLDER", &engine.folder)
            .env("HEADRACE_TEST_SEAL", seal)
            .env("HEADRACE_TEST_ERRNO", code.to_string())
            .output()
            .unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("child-is-ready"), "{text}");
    };
    let set = |client: &mut Client, name: &str, mode| {
        let set = headrace_format::message::SetAttr { mode: Some(mode), ..Default::default() };
        client.call::<headrace_format::message::Attr>(Request::Setattr { path: path(name), set }).unwrap();
    };
    let engine = Running::with(|options| options.system = true);
    let mut client = engine.client();
    client.put_samples("/train", 4);
    client.put_samples("/secret", 1);
    set(&mut client, "/secret", 0o700);
    set(&mut client, "/train/000001", 0o600);
    let seal = client.seal("/train").0.seal;
    as_nobody(&engine, 0, &seal);

    // Mode bits are not what keeps them out here: the engine looks at who connects.
    let engine = Running::start();
    let socket = engine.folder.join("engine.sock");
    std::fs::set_permissions(&socket, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    as_nobody(&engine, 13, "");
}
