//! What we rely on, asked of the store itself. A store that answers wrongly is refused with what it did: better no
//! volume than one whose copies are not there.
//!
//! 1. *Create once*: of many at the same time that make one object with If-None-Match, exactly one succeeds.
//! 2. *Read what was written*: the object, at once, holds what the winner wrote; a range holds that range.
//! 3. *List what was written*: a listing right after the write names it; right after the deletion it does not.
//! 4. *Parts*: an object made of several parts is those parts.

use std::sync::Arc;

use headrace_base::{Error, Kind, Result, SegmentId, thread};

use crate::tier::{ObjectTier, Stored};

/// A store that ignores conditions is caught by two; more make some stores queue for seconds (SeaweedFS 4.48).
const AT_ONCE: u8 = 2;
const BODY_BYTES: usize = 4096;

impl ObjectTier {
    /// Invalid, saying what the store does wrong; or what kept us from asking (Unavailable, Permission, NotFound).
    pub fn probe(self: &Arc<Self>) -> Result<()> {
        let folder = format!("probe/{}", SegmentId::generate());
        let outcome = self.probe_in(&folder);
        let cleaned = self.clean(&folder);
        outcome.and(cleaned)
    }

    fn probe_in(self: &Arc<Self>, folder: &str) -> Result<()> {
        let lies = |what: String| {
            Error::new(
                Kind::Invalid,
                format!("the store of {} cannot be trusted with a volume: {what}", self.location()),
            )
        };
        let once = format!("{folder}/once");
        let racers: Vec<_> = (1..=AT_ONCE)
            .map(|racer| {
                let (tier, once) = (Arc::clone(self), once.clone());
                thread::spawn("probe", move || {
                    tier.create(&once, vec![racer; BODY_BYTES]).map(|stored| (racer, stored))
                })
            })
            .collect::<Result<_>>()?;
        let mut winners = Vec::new();
        for racer in racers {
            let outcome = racer.join().map_err(|_| Error::internal("a thread of the probe has panicked"))?;
            match outcome {
                Ok((racer, Stored::New)) => winners.push(racer),
                Ok((_, Stored::Existed)) => {}
                // What some stores answer to whoever comes second: no, but not the one in the standard.
                Err(error) if error.kind() == Kind::Conflict => {}
                Err(error) => return Err(error),
            }
        }
        let [winner] = winners[..] else {
            return Err(lies(format!(
                "of {AT_ONCE} requests that each made the same object with If-None-Match: *, {} succeeded (it ignores \
                 conditions, or checks them without a lock)",
                winners.len()
            )));
        };
        let (from, to) = (1000, 3000);
        let read = self.get(&once, from..to, None)?;
        if read.bytes.len() as u64 != to - from
            || read.bytes.iter().any(|byte| *byte != winner)
            || read.object_bytes != BODY_BYTES as u64
        {
            return Err(lies(
                "a range that was read right after the write is not what was written".to_owned(),
            ));
        }
        if !self.names(folder)?.contains(&once) {
            return Err(lies("a listing right after the write lacks the object".to_owned()));
        }
        self.probe_parts(&format!("{folder}/parts")).map_err(|error| match error.kind() {
            Kind::Corrupt => lies(error.message().to_owned()),
            _ => error,
        })?;
        self.delete(&once)?;
        if self.names(folder)?.contains(&once) {
            return Err(lies("a listing right after the deletion still has the object".to_owned()));
        }
        Ok(())
    }

    fn names(&self, folder: &str) -> Result<Vec<String>> {
        let mut names = Vec::new();
        self.list(folder, |listed| {
            names.push(listed.name);
            Ok(())
        })?;
        Ok(names)
    }

    fn clean(&self, folder: &str) -> Result<()> {
        self.names(folder)?.iter().try_for_each(|name| self.delete(name))
    }
}
