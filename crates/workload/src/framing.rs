//! Where HTTP/1.1 messages begin and end in a stream of bytes: heads, bodies by Content-Length, chunked bodies and
//! bodies that end with the connection.
//!
//! A `Framer` looks on: whoever owns the bytes shows each piece once, in order, and passes it on unchanged. When a
//! head is complete the caller says what body follows it (`Head::request_body`, `Head::response_body`), since that
//! of a response depends on the request. What cannot be framed is an error, never a guess: a proxy that miscounts
//! would spoil each number that is measured through it.

use headrace_base::{Error, Result};

/// S3 allows 8 KiB of headers; with a long target and room to spare.
const HEAD_BYTES_MAX: usize = 64 * 1024;
const HEAD_END: &[u8] = b"\r\n\r\n";

/// The first line and the header fields of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    bytes: Vec<u8>,
}

/// What follows a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Length(u64),
    Chunked,
    UntilClose,
}

/// What the front of the shown bytes was.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    /// A part of a head; more must come.
    HeadPart,
    /// The end of a head. `Framer::body` is called next.
    Head(Head),
    /// Body, with its framing.
    Body,
}

#[derive(Debug)]
enum State {
    Head(Vec<u8>),
    /// A head was given out, its body is not yet known.
    Asking,
    Length(u64),
    Chunked(Chunk),
    UntilClose,
}

#[derive(Clone, Copy, Debug)]
enum Chunk {
    /// In the line of a chunk's size; what is behind the digits is not looked at.
    Size { bytes: u64, digits: u8, digits_ended: bool },
    /// Data and the line end behind it.
    Data(u64),
    /// Behind the last chunk; so many bytes of the current line were not its end.
    Trailer { line_bytes: usize },
}

const CHUNK_START: Chunk = Chunk::Size { bytes: 0, digits: 0, digits_ended: false };

#[derive(Debug)]
pub struct Framer {
    state: State,
}

impl Default for Framer {
    fn default() -> Framer {
        Framer { state: State::Head(Vec::new()) }
    }
}

impl Framer {
    /// True where the next byte begins a message.
    pub fn between_messages(&self) -> bool {
        matches!(&self.state, State::Head(seen) if seen.is_empty())
    }

    /// Whether the connection may end here without cutting a message.
    pub fn may_end(&self) -> bool {
        self.between_messages() || matches!(self.state, State::UntilClose)
    }

    /// Looks at the front of `input`, which is not empty: how many bytes it took, at least one, and what they are.
    pub fn take(&mut self, input: &[u8]) -> Result<(usize, Seen)> {
        match &mut self.state {
            State::Head(seen) => {
                let before = seen.len();
                let window = &input[..input.len().min(HEAD_BYTES_MAX + 1)];
                // Usually a head comes whole: then only it is copied, not what follows.
                match (before, find(window, HEAD_END)) {
                    (0, Some(place)) => seen.extend_from_slice(&window[..place + HEAD_END.len()]),
                    _ => seen.extend_from_slice(window),
                }
                let search_from = before.saturating_sub(HEAD_END.len() - 1);
                match find(&seen[search_from..], HEAD_END) {
                    Some(place) => {
                        let end = search_from + place + HEAD_END.len();
                        seen.truncate(end);
                        let head = Head { bytes: std::mem::take(seen) };
                        self.state = State::Asking;
                        Ok((end - before, Seen::Head(head)))
                    }
                    None if seen.len() > HEAD_BYTES_MAX => {
                        Err(Error::invalid(format!("a head of more than {HEAD_BYTES_MAX} bytes")))
                    }
                    None => Ok((input.len(), Seen::HeadPart)),
                }
            }
            State::Asking => Err(Error::internal("a body is shown before its kind was told")),
            State::Length(left) => {
                let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                let left = *left - taken as u64;
                self.body(Body::Length(left));
                Ok((taken, Seen::Body))
            }
            State::Chunked(chunk) => {
                let (taken, ended) = chunk.take(input)?;
                if ended {
                    self.state = State::Head(Vec::new());
                }
                Ok((taken, Seen::Body))
            }
            State::UntilClose => Ok((input.len(), Seen::Body)),
        }
    }

    /// What follows the head that `take` gave out last.
    pub fn body(&mut self, body: Body) {
        self.state = match body {
            Body::Length(0) => State::Head(Vec::new()),
            Body::Length(bytes) => State::Length(bytes),
            Body::Chunked => State::Chunked(CHUNK_START),
            Body::UntilClose => State::UntilClose,
        };
    }
}

impl Chunk {
    /// How many bytes belong to the chunked body, and whether it ends with them.
    fn take(&mut self, input: &[u8]) -> Result<(usize, bool)> {
        let mut at = 0;
        while at < input.len() {
            let byte = input[at];
            match self {
                Chunk::Size { bytes, digits, digits_ended } => {
                    at += 1;
                    match (byte as char).to_digit(16) {
                        Some(digit) if !*digits_ended => {
                            if *digits == 15 {
                                return Err(Error::invalid("a chunk's size has more than 15 digits"));
                            }
                            *bytes = *bytes << 4 | u64::from(digit);
                            *digits += 1;
                        }
                        _ if *digits == 0 => {
                            return Err(Error::invalid(format!(
                                "a chunk's size begins with byte {byte:#04x}"
                            )));
                        }
                        _ if byte == b'\n' => {
                            *self = match *bytes {
                                0 => Chunk::Trailer { line_bytes: 0 },
                                bytes => Chunk::Data(bytes + 2),
                            };
                        }
                        _ => *digits_ended = true,
                    }
                }
                Chunk::Data(left) => {
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len() - at);
                    at += taken;
                    *left -= taken as u64;
                    if *left == 0 {
                        *self = CHUNK_START;
                    }
                }
                Chunk::Trailer { line_bytes } => {
                    at += 1;
                    match byte {
                        b'\n' if *line_bytes == 0 => return Ok((at, true)),
                        b'\n' => *line_bytes = 0,
                        b'\r' => {}
                        _ if *line_bytes >= HEAD_BYTES_MAX => {
                            return Err(Error::invalid("a trailer line without end"));
                        }
                        _ => *line_bytes += 1,
                    }
                }
            }
        }
        Ok((at, false))
    }
}

impl Head {
    /// Method and target of a request.
    pub fn request_line(&self) -> Result<(&str, &str)> {
        let line = self.first_line()?;
        let mut words = line.split(' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some(method), Some(target), Some(version), None)
                if version.starts_with("HTTP/1.") && is_token(method) && !target.is_empty() =>
            {
                Ok((method, target))
            }
            _ => Err(Error::invalid(format!("{line:?} is no request line of HTTP/1"))),
        }
    }

    /// Status of a response.
    pub fn status(&self) -> Result<u16> {
        let line = self.first_line()?;
        let mut words = line.split(' ');
        match (words.next(), words.next().map(str::parse)) {
            (Some(version), Some(Ok(status)))
                if version.starts_with("HTTP/1.") && (100..1000).contains(&status) =>
            {
                Ok(status)
            }
            _ => Err(Error::invalid(format!("{line:?} is no status line of HTTP/1"))),
        }
    }

    /// The values of a header field, in order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.lines().skip(1).filter_map(move |line| {
            let (field, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
            field.eq_ignore_ascii_case(name).then(|| value.trim_matches([' ', '\t']))
        })
    }

    pub fn request_body(&self) -> Result<Body> {
        Ok(self.framed_body()?.unwrap_or(Body::Length(0)))
    }

    /// RFC 9112, section 6.3. `method` is that of the request which this answers.
    pub fn response_body(&self, method: Option<&str>) -> Result<Body> {
        let status = self.status()?;
        if status < 200 && status != 101 || status == 204 || status == 304 || method == Some("HEAD") {
            return Ok(Body::Length(0));
        }
        if status == 101 || method == Some("CONNECT") {
            return Ok(Body::UntilClose);
        }
        Ok(self.framed_body()?.unwrap_or(Body::UntilClose))
    }

    fn framed_body(&self) -> Result<Option<Body>> {
        if let Some(coding) = self.values("transfer-encoding").last() {
            let last = coding.rsplit(',').next().unwrap_or_default().trim();
            if !last.eq_ignore_ascii_case("chunked") {
                return Err(Error::invalid(format!("transfer coding {coding:?} does not end in chunked")));
            }
            return Ok(Some(Body::Chunked));
        }
        let mut length = None;
        for value in self.values("content-length") {
            let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
            match value.parse::<u64>() {
                Ok(bytes) if digits && length.is_none_or(|other| other == bytes) => length = Some(bytes),
                _ => return Err(Error::invalid(format!("Content-Length {value:?} (before: {length:?})"))),
            }
        }
        Ok(length.map(Body::Length))
    }

    /// Empty lines before the first are allowed (RFC 9112, section 2.2).
    fn lines(&self) -> impl Iterator<Item = &[u8]> {
        let lines =
            self.bytes.split(|&byte| byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        lines.skip_while(|line| line.is_empty()).take_while(|line| !line.is_empty())
    }

    fn first_line(&self) -> Result<&str> {
        let line = self.lines().next().unwrap_or_default();
        std::str::from_utf8(line).map_err(|error| {
            Error::invalid(format!("first line {:?} is not text", String::from_utf8_lossy(line)))
                .with_cause(error)
        })
    }
}

fn is_token(method: &str) -> bool {
    !method.is_empty() && method.len() <= 20 && method.bytes().all(|byte| byte.is_ascii_uppercase())
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Where messages begin when `stream` is shown in pieces of the given lengths (the last one repeats).
    fn starts(stream: &[u8], pieces: &[usize], methods: Option<&[&str]>) -> Result<(Vec<usize>, Framer)> {
        let mut framer = Framer::default();
        let (mut starts, mut at, mut answered) = (Vec::new(), 0, 0);
        let mut lengths = pieces.iter().copied().chain(std::iter::repeat(*pieces.last().unwrap()));
        while at < stream.len() {
            let end = stream.len().min(at + lengths.next().unwrap().max(1));
            while at < end {
                if framer.between_messages() {
                    starts.push(at);
                }
                let (taken, seen) = framer.take(&stream[at..end])?;
                assert!(taken > 0);
                at += taken;
                if let Seen::Head(head) = seen {
                    let body = match methods {
                        None => head.request_body()?,
                        Some(methods) => {
                            let body = head.response_body(methods.get(answered).copied())?;
                            answered += usize::from(head.status()? >= 200);
                            body
                        }
                    };
                    framer.body(body);
                }
            }
        }
        Ok((starts, framer))
    }

    const REQUESTS: [&str; 6] = [
        "GET /bucket/key HTTP/1.1\r\nHost: a\r\n\r\n",
        "PUT /b/k?x=1 HTTP/1.1\r\nHost: a\r\ncontent-LENGTH: 12\r\n\r\nGET / HTTP\r\n",
        "PUT /b/k HTTP/1.1\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n5;chunk-signature=0\r\nab\r\n\r\r\n\
         1A\r\nabcdefghijklmnopqrstuvwxyz\r\n0\r\nx-checksum: 0\r\nother: 1\r\n\r\n",
        "PUT /b/k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HEAD /b/k HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
        "\r\nDELETE /b/k HTTP/1.0\r\n\r\n",
    ];

    proptest! {
        #[test]
        fn requests_begin_where_they_do_in_whatever_pieces_they_come(
            order in prop::collection::vec(0..REQUESTS.len(), 1..12),
            pieces in prop::collection::vec(1usize..200, 1..20),
        ) {
            let mut stream = Vec::new();
            let mut expected = Vec::new();
            for request in order {
                expected.push(stream.len());
                stream.extend_from_slice(REQUESTS[request].as_bytes());
            }
            let (found, framer) = starts(&stream, &pieces, None).unwrap();
            prop_assert_eq!(found, expected);
            prop_assert!(framer.between_messages() && framer.may_end());
        }

        #[test]
        fn no_bytes_make_it_panic(
            stream in prop::collection::vec(any::<u8>(), 0..300),
            head in prop::sample::select(vec!["", REQUESTS[2], "GET / HTTP/1.1\r\n", REQUESTS[3]]),
        ) {
            let bytes: Vec<u8> = head.bytes().take(head.len().saturating_sub(5)).chain(stream).collect();
            // An error or not: the same, in whatever pieces.
            let one = starts(&bytes, &[1], None).map(|(starts, _)| starts).map_err(|_| ());
            let whole = starts(&bytes, &[1000], None).map(|(starts, _)| starts).map_err(|_| ());
            prop_assert_eq!(one, whole);
        }
    }

    #[test]
    fn responses_are_framed_by_their_request() {
        let stream = [
            "HTTP/1.1 100 Continue\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", // to HEAD
            "HTTP/1.1 204 No Content\r\n\r\n",
            "HTTP/1.1 304 Not Modified\r\nContent-Length: 70\r\n\r\n",
            "HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
            "HTTP/1.1 503 Slow Down\r\n\r\nto the end",
        ];
        let methods = ["PUT", "HEAD", "DELETE", "GET", "GET", "GET"];
        let whole = stream.concat();
        for piece in [1, 7, 100_000] {
            let (found, framer) = starts(whole.as_bytes(), &[piece], Some(&methods)).unwrap();
            let expected = stream.iter().scan(0, |at, message| {
                let start = *at;
                *at += message.len();
                Some(start)
            });
            assert_eq!(found, expected.collect::<Vec<_>>());
            assert!(framer.may_end() && !framer.between_messages());
        }
        assert!(
            !starts(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", &[9], Some(&["GET"]))
                .unwrap()
                .1
                .may_end()
        );
    }

    #[test]
    fn what_cannot_be_framed_is_refused() {
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(HEAD_BYTES_MAX));
        for bad in [
            "PUT / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            "PUT / HTTP/1.1\r\nContent-Length: +5\r\n\r\n",
            "PUT / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "PUT / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
            "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx",
            "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1234567890abcdef0\r\n",
            &long,
        ] {
            assert!(starts(bad.as_bytes(), &[11], None).is_err(), "{bad:.60}");
        }
        let head = |text: &str| Head { bytes: text.as_bytes().to_vec() };
        assert_eq!(head("GET /a?b HTTP/1.1\r\n\r\n").request_line().unwrap(), ("GET", "/a?b"));
        for bad in [
            "GET / HTTP/2\r\n\r\n",
            "get / HTTP/1.1\r\n\r\n",
            "GET  HTTP/1.1\r\n\r\n",
            "\u{16}\u{3}\u{1}\r\n\r\n",
        ] {
            assert!(head(bad).request_line().is_err(), "{bad:?}");
        }
        assert!(head("HTTP/1.1 OK\r\n\r\n").status().is_err());
    }
}
