//! Rows of the metadata as they lie in a backup: keys with their values, or that a key is gone.
//!
//! ```text
//! header    0    8  magic "HRROWS\0\x01"
//!           8    4  u32 format
//!           12   4  zero
//!           16  16  volume id
//!           32   8  u64 from: the version before the first of these changes; 0: these are all rows
//!           40   8  u64 to: the version whose rows these are
//!           48   4  u32 rows
//!           52   4  u32 bytes of rows
//!           56   4  u32 crc of the rows
//!           60   4  u32 crc of bytes 0..60
//! row             n bytes, key | u8 1 and n bytes, value; or 0: the key is gone
//! ```
//! `n` is a varint as in `record`; fixed widths are little-endian, ids big-endian. Applied in order of their steps
//! (from, to), and within a step in order of the objects, they make up the metadata at the last version.

use headrace_base::ids::VolumeId;
use headrace_base::{Error, Result, Version, crc32c};

use crate::FORMAT;
use crate::key::Key;

const MAGIC: [u8; 8] = *b"HRROWS\0\x01";
const HEADER_BYTES: usize = 64;

/// A key with its value; None: it is gone.
pub type Row = (Key, Option<Vec<u8>>);

/// Which step of a backup some rows belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub volume: VolumeId,
    pub from: Version,
    pub to: Version,
}

/// Gathers rows up to the size of an object.
#[derive(Debug, Default)]
pub struct RowsWriter {
    rows: u32,
    body: Vec<u8>,
}

impl RowsWriter {
    pub fn push(&mut self, key: &[u8], value: Option<&[u8]>) {
        self.rows += 1;
        put_counted(&mut self.body, key);
        match value {
            Some(value) => {
                self.body.push(1);
                put_counted(&mut self.body, value);
            }
            None => self.body.push(0),
        }
    }

    pub fn bytes(&self) -> usize {
        self.body.len()
    }

    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// The object's bytes; the writer is empty again.
    pub fn finish(&mut self, step: Step) -> Vec<u8> {
        let body = std::mem::take(&mut self.body);
        let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&step.volume.to_bytes());
        out.extend_from_slice(&step.from.0.to_le_bytes());
        out.extend_from_slice(&step.to.0.to_le_bytes());
        out.extend_from_slice(&std::mem::take(&mut self.rows).to_le_bytes());
        out.extend_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend_from_slice(&crc32c(&body).to_le_bytes());
        let crc = crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out.extend_from_slice(&body);
        out
    }
}

fn put_counted(out: &mut Vec<u8>, bytes: &[u8]) {
    let mut count = bytes.len() as u64;
    while count >= 0x80 {
        out.push(count as u8 | 0x80);
        count >>= 7;
    }
    out.push(count as u8);
    out.extend_from_slice(bytes);
}

/// The rows of one object. Corrupt if a bit of it is not what was written or it belongs to another step; Invalid if
/// a later release wrote it.
pub fn decode(step: Step, bytes: &[u8]) -> Result<Vec<Row>> {
    let wrong = |why: &str| {
        Error::corrupt(format!("rows of a backup, versions {} to {}: {why}", step.from.0, step.to.0))
    };
    let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(wrong("cut off in the header"));
    };
    let u32_at = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
    if header[..8] != MAGIC || u32_at(60) != crc32c(&header[..60]) {
        return Err(wrong("the header is damaged, or it is something else"));
    }
    if u32_at(8) > FORMAT {
        return Err(Error::invalid(format!(
            "a backup holds format {}; this engine reads 1-{FORMAT}: upgrade headrace",
            u32_at(8)
        )));
    }
    let volume: [u8; 16] = header[16..32].try_into().map_err(|_| wrong("cut off"))?;
    let own =
        Step { volume: VolumeId::from_bytes(volume), from: Version(u64_at(32)), to: Version(u64_at(40)) };
    if own != step {
        return Err(wrong("they are of another volume or step"));
    }
    if body.len() != u32_at(52) as usize || crc32c(body) != u32_at(56) {
        return Err(wrong("they are cut off or damaged"));
    }
    let mut rest = body;
    let mut rows = Vec::new();
    while !rest.is_empty() {
        let row = (|| {
            let key = take_counted(&mut rest)?.to_vec();
            let (flag, after) = rest.split_first()?;
            rest = after;
            match flag {
                0 => Some((key, None)),
                1 => Some((key, Some(take_counted(&mut rest)?.to_vec()))),
                _ => None,
            }
        })();
        rows.push(row.ok_or_else(|| wrong("a row is no row"))?);
    }
    if rows.len() != u32_at(48) as usize {
        return Err(wrong("some rows are missing"));
    }
    Ok(rows)
}

fn take_counted<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let mut count = 0_u64;
    for shift in (0..63).step_by(7) {
        let (byte, after) = from.split_first()?;
        *from = after;
        count |= u64::from(byte & 0x7F) << shift;
        if *byte < 0x80 {
            let (taken, after) = from.split_at_checked(usize::try_from(count).ok()?)?;
            *from = after;
            return Some(taken);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use headrace_base::Kind;
    use proptest::prelude::*;

    use super::*;

    const STEP: Step = Step { volume: VolumeId(7), from: Version(3), to: Version(9) };

    fn object(rows: &[Row]) -> Vec<u8> {
        let mut writer = RowsWriter::default();
        for (key, value) in rows {
            writer.push(key, value.as_deref());
        }
        writer.finish(STEP)
    }

    fn rows() -> impl Strategy<Value = Vec<Row>> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..300);
        prop::collection::vec((bytes(), prop::option::of(bytes())), 0..20)
    }

    proptest! {
        #[test]
        fn rows_come_back(rows in rows()) {
            prop_assert_eq!(decode(STEP, &object(&rows)).unwrap(), rows);
        }

        #[test]
        fn any_changed_or_missing_byte_is_noticed(rows in rows(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
            let whole = object(&rows);
            let at = at.index(whole.len());
            let mut changed = whole.clone();
            changed[at] ^= 1_u8 << bit;
            for bytes in [&changed[..], &whole[..at]] {
                let error = decode(STEP, bytes).unwrap_err();
                prop_assert!(matches!(error.kind(), Kind::Corrupt | Kind::Invalid), "{}", error);
            }
        }

        #[test]
        fn no_bytes_are_a_panic(body in prop::collection::vec(any::<u8>(), 0..200)) {
            // A right header before any body.
            let mut writer = RowsWriter { rows: 1, body };
            let _ = decode(STEP, &writer.finish(STEP));
        }
    }

    #[test]
    fn another_step_is_refused() {
        let bytes = object(&[(b"i".to_vec(), None)]);
        for other in [Step { volume: VolumeId(8), ..STEP }, Step { from: Version(2), ..STEP }] {
            assert_eq!(decode(other, &bytes).unwrap_err().kind(), Kind::Corrupt);
        }
    }
}
