//! What is timed of an object store without a file system between: plain PUT and GET over TCP, one connection a
//! thread, blocking, so that the client costs as little as a client can. It says what a store itself can give.
//!
//! Requests come ready-made from the caller, who knows credentials and signs: a text file with a line for each
//! object, `/bucket/key?signature` (of ranged reads: length, space, target). Host is `--to`.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headrace_base::{Error, Result};

use crate::clock::{Done, together};
use crate::framing::{Body, Framer, Seen};
use crate::layout::{Contents, part, shuffled};
use crate::options::Options;

/// A store that says nothing for so long has hung.
const SILENCE_MAX: Duration = Duration::from_secs(120);
const BUFFER_BYTES: usize = 256 * 1024;

type Timed = (Done, Duration, Option<Duration>);

/// One object for each file of the layout, each stored when its response is there.
pub fn put(options: &Options) -> Result<Timed> {
    let targets = targets(options)?;
    let contents = Contents::new(options.size_bytes);
    let (size, workers, to) = (options.size_bytes, options.threads, options.to);
    let (done, time) = together(workers, move |worker| {
        let mut connection = Connection::open(to)?;
        let mut done = Done::default();
        for file in part(targets.len() as u64, worker, workers) {
            connection.request("PUT", &targets[file as usize], "", contents.of(file, size), |_, _| Ok(()))?;
            done.operations += 1;
            done.bytes += size;
        }
        Ok(done)
    })?;
    Ok((done, time, Some(time)))
}

/// Each object once, in an order shuffled by the seed.
pub fn get(options: &Options) -> Result<Timed> {
    let targets = targets(options)?;
    let order = shuffled(targets.len() as u64, options.seed);
    let contents = Contents::new(options.size_bytes);
    let (size, workers, to, verify) = (options.size_bytes, options.threads, options.to, options.verify);
    let (done, time) = together(workers, move |worker| {
        let mut connection = Connection::open(to)?;
        let mut done = Done::default();
        for place in part(order.len() as u64, worker, workers) {
            let file = order[place as usize];
            let target = &targets[file as usize];
            let expected = contents.of(file, size);
            let length = connection.request("GET", target, "", b"", |offset, bytes| {
                let end = offset as usize + bytes.len();
                match expected.get(offset as usize..end) {
                    Some(same) if !verify || same == bytes => Ok(()),
                    _ => Err(Error::corrupt(format!("{} does not hold what was put", bare(target)))),
                }
            })?;
            if length != size {
                return Err(Error::corrupt(format!("{}: {length} bytes, not {size}", bare(target))));
            }
            done.operations += 1;
            done.bytes += size;
        }
        Ok(done)
    })?;
    Ok((done, time, None))
}

/// All bytes of the objects, in ranges; operations are ranges.
pub fn get_ranges(options: &Options) -> Result<Timed> {
    let mut ranges = Vec::new();
    for (number, line) in lines(options)?.into_iter().enumerate() {
        let wrong =
            || Error::invalid(format!("line {} of --requests is not a length and a target", number + 1));
        let (length, target) = line.split_once(' ').ok_or_else(wrong)?;
        let length: u64 = length.parse().map_err(|_| wrong())?;
        let target: Arc<str> = Arc::from(target);
        let mut start = 0;
        while start < length {
            let end = length.min(start + options.range_bytes);
            ranges.push((start, end, Arc::clone(&target)));
            start = end;
        }
    }
    let (workers, to) = (options.threads, options.to);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let (done, time) = together(workers, move |_| {
        let mut connection = Connection::open(to)?;
        let mut done = Done::default();
        // Whoever is free takes the next: at the end nobody waits for the slowest.
        while let Some((start, end, target)) =
            ranges.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
        {
            let range = format!("Range: bytes={start}-{}\r\n", end - 1);
            let length = connection.request("GET", target, &range, b"", |_, _| Ok(()))?;
            if length != end - start {
                return Err(Error::corrupt(format!(
                    "{}: {length} bytes of the range {start} to {end}",
                    bare(target)
                )));
            }
            done.operations += 1;
            done.bytes += length;
        }
        Ok(done)
    })?;
    Ok((done, time, None))
}

fn lines(options: &Options) -> Result<Vec<String>> {
    let path: &Path = &options.requests;
    let text = fs::read_to_string(path)
        .map_err(|error| Error::io(format_args!("read {}", path.display()), error))?;
    Ok(text.lines().map(str::to_owned).collect())
}

fn targets(options: &Options) -> Result<Vec<String>> {
    let lines = lines(options)?;
    if lines.len() as u64 != options.files {
        return Err(Error::invalid(format!(
            "--requests has {} lines for {} files",
            lines.len(),
            options.files
        )));
    }
    Ok(lines)
}

/// Without the query, which is a signature.
fn bare(target: &str) -> &str {
    target.split('?').next().unwrap_or_default()
}

struct Connection {
    to: SocketAddr,
    stream: TcpStream,
    buffer: Vec<u8>,
    head: Vec<u8>,
}

impl Connection {
    fn open(to: SocketAddr) -> Result<Connection> {
        Ok(Connection { to, stream: connect(to)?, buffer: vec![0; BUFFER_BYTES], head: Vec::new() })
    }

    /// Sends a request, and gives the body of its response to `body` piece by piece, each with its offset. Returns
    /// the body's length. Any status but 2xx is an error.
    fn request(
        &mut self,
        method: &str,
        target: &str,
        fields: &str,
        content: &[u8],
        mut body: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<u64> {
        let failed = |error| Error::io(format_args!("{method} {} at {}", bare(target), self.to), error);
        self.head.clear();
        write!(
            self.head,
            "{method} {target} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n{fields}\r\n",
            self.to,
            content.len()
        )
        .map_err(failed)?;
        // Small ones in one packet.
        self.head.extend_from_slice(content);
        self.stream.write_all(&self.head).map_err(failed)?;
        let mut framer = Framer::default();
        let (mut length, mut status, mut closes, mut plain) = (0, 0, false, true);
        let mut refusal = Vec::new();
        loop {
            let read = match self.stream.read(&mut self.buffer) {
                Ok(0) if status >= 200 && framer.may_end() => break,
                Ok(0) => return Err(failed(ErrorKind::UnexpectedEof.into())),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(error)),
            };
            let mut at = 0;
            while at < read {
                let (taken, seen) = framer.take(&self.buffer[at..read])?;
                match seen {
                    Seen::HeadPart => {}
                    Seen::Head(head) => {
                        status = head.status()?;
                        closes = head.values("connection").any(|value| value.eq_ignore_ascii_case("close"));
                        let kind = head.response_body(Some(method))?;
                        plain = kind != Body::Chunked;
                        framer.body(kind);
                    }
                    Seen::Body if !(200..300).contains(&status) => {
                        refusal.extend_from_slice(&self.buffer[at..at + taken]);
                    }
                    Seen::Body if plain => {
                        body(length, &self.buffer[at..at + taken])?;
                        length += taken as u64;
                    }
                    Seen::Body if method == "GET" => {
                        return Err(Error::invalid(format!(
                            "{}: GET of a store is answered in chunks",
                            bare(target)
                        )));
                    }
                    Seen::Body => {}
                }
                at += taken;
            }
            if status >= 200 && framer.between_messages() {
                break;
            }
        }
        if !(200..300).contains(&status) {
            refusal.truncate(500);
            return Err(Error::invalid(format!(
                "{method} {} at {} is answered with status {status}: {}",
                bare(target),
                self.to,
                String::from_utf8_lossy(&refusal)
            )));
        }
        if closes {
            self.stream = connect(self.to)?;
        }
        Ok(length)
    }
}

fn connect(to: SocketAddr) -> Result<TcpStream> {
    let failed = |error| Error::io(format_args!("connect to {to}"), error);
    let stream = TcpStream::connect(to).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    stream.set_read_timeout(Some(SILENCE_MAX)).map_err(failed)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::ffi::OsString;
    use std::sync::Mutex;

    use headrace_base::{Kind, thread};

    use super::*;
    use crate::framing::Head;

    type Objects = Arc<Mutex<HashMap<String, Vec<u8>>>>;

    /// A store without signatures that closes each third connection after its answer.
    fn store() -> (SocketAddr, Objects) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let objects = Objects::default();
        let shared = Arc::clone(&objects);
        thread::spawn("store", move || {
            for stream in listener.incoming() {
                let objects = Arc::clone(&shared);
                thread::spawn("store", move || serve(stream.unwrap(), &objects)).unwrap();
            }
        })
        .unwrap();
        (address, objects)
    }

    fn serve(mut stream: TcpStream, objects: &Mutex<HashMap<String, Vec<u8>>>) {
        for answered in 1.. {
            let Some((head, body)) = request(&mut stream) else {
                return;
            };
            let (method, target) = head.request_line().unwrap();
            let (status, body) = answer(method, bare(target), &head, body, &mut objects.lock().unwrap());
            let close = if answered % 3 == 0 { "Connection: close\r\n" } else { "" };
            write!(stream, "HTTP/1.1 {status} Said\r\nContent-Length: {}\r\n{close}\r\n", body.len())
                .unwrap();
            stream.write_all(&body).unwrap();
            if answered % 3 == 0 {
                return;
            }
        }
    }

    fn request(stream: &mut TcpStream) -> Option<(Head, Vec<u8>)> {
        let (mut framer, mut head, mut body, mut buffer) =
            (Framer::default(), None, Vec::new(), vec![0; 9000]);
        loop {
            let length = stream.read(&mut buffer).unwrap_or(0);
            let mut at = 0;
            if length == 0 {
                return None;
            }
            while at < length {
                let (taken, seen) = framer.take(&buffer[at..length]).unwrap();
                match seen {
                    Seen::Head(seen) => {
                        framer.body(seen.request_body().unwrap());
                        head = Some(seen);
                    }
                    Seen::Body => body.extend_from_slice(&buffer[at..at + taken]),
                    Seen::HeadPart => {}
                }
                at += taken;
            }
            if framer.between_messages() {
                return head.map(|head| (head, body));
            }
        }
    }

    fn answer(
        method: &str,
        key: &str,
        head: &Head,
        body: Vec<u8>,
        objects: &mut HashMap<String, Vec<u8>>,
    ) -> (u16, Vec<u8>) {
        match (method, objects.get(key)) {
            ("PUT", _) => {
                objects.insert(key.to_owned(), body);
                (200, Vec::new())
            }
            (_, None) => (404, b"no such key".to_vec()),
            (_, Some(object)) => match head.values("range").next() {
                None => (200, object.clone()),
                Some(range) => {
                    let (start, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                    let range = start.parse::<usize>().unwrap()..=end.parse::<usize>().unwrap();
                    (206, object[range].to_vec())
                }
            },
        }
    }

    fn phase(to: SocketAddr, requests: &str, line: &str) -> Result<crate::Report> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests");
        fs::write(&path, requests).unwrap();
        let mut words: Vec<OsString> = format!("{line} --to {to}").split(' ').map(OsString::from).collect();
        words.extend([OsString::from("--requests"), path.into()]);
        crate::execute(&Options::parse(words.into_iter()).unwrap().unwrap())
    }

    #[test]
    fn what_is_put_is_got_and_each_byte_is_counted() {
        let (to, objects) = store();
        let requests: String = (0..50).map(|file| format!("/b/f{file}?signature={file}\n")).collect();
        let files = "--files 50 --size-bytes 30000";
        let done = phase(to, &requests, &format!("store-put {files} --threads 4")).unwrap();
        assert_eq!((done.operations, done.bytes), (50, 1_500_000));
        assert_eq!(done.seconds_with_sync, Some(done.seconds));
        assert_eq!(objects.lock().unwrap()["/b/f7"], Contents::new(30_000).of(7, 30_000));
        let done = phase(to, &requests, &format!("store-get {files} --threads 3 --verify")).unwrap();
        assert_eq!((done.operations, done.bytes), (50, 1_500_000));
        let ranges: String = (0..50).map(|file| format!("30000 /b/f{file}\n")).collect();
        let done = phase(to, &ranges, "store-get-ranges --range-bytes 8000 --threads 3").unwrap();
        assert_eq!((done.operations, done.bytes), (200, 1_500_000));
    }

    #[test]
    fn other_bytes_other_lengths_and_refusals_are_errors() {
        let (to, objects) = store();
        objects.lock().unwrap().insert("/b/f0".into(), vec![0; 100]);
        for (requests, line, part) in [
            ("/b/f0?s\n", "store-get --files 1 --size-bytes 100 --verify", "/b/f0 does not hold"),
            ("/b/f0\n", "store-get --files 1 --size-bytes 101", "100 bytes, not 101"),
            ("/b/f0\n", "store-get --files 1 --size-bytes 99", "does not hold"),
            ("/b/f1?secret\n", "store-get --files 1", "status 404: no such key"),
            ("/b/f1\n", "store-get --files 2", "1 lines for 2 files"),
            ("/b/f0\n", "store-get-ranges", "line 1"),
            ("150 /b/f1\n", "store-get-ranges", "status 404"),
        ] {
            let error = phase(to, requests, line).unwrap_err();
            assert!(matches!(error.kind(), Kind::Corrupt | Kind::Invalid), "{error:?}");
            assert!(error.message().contains(part) && !error.message().contains("secret"), "{error:?}");
        }
        assert!(phase(to, "/b/f0\n", "store-get --files 1 --size-bytes 100").is_ok());
    }
}
