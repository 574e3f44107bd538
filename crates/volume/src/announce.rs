//! The life of a segment's announcement. It is made before the segment's first byte, is a precondition of every commit
//! that names the segment, and goes when the segment is closed; with an object tier, when it is stored there. So what
//! is announced is what is unfinished, and the next start knows what to go on with.

use std::sync::Arc;

use headrace_base::{Error, Result, SegmentId, SessionId, crash};
use headrace_format::key;
use headrace_format::record::{Pending, SegmentKind};
use headrace_meta::{Commit, MetaStore, Precondition, Write};

use crate::packs::must_commit;
use crate::uploads::Uploads;

#[derive(Debug)]
pub struct Announcements {
    pub store: Arc<dyn MetaStore>,
    session: SessionId,
    /// Some: the volume has an object tier.
    pub uploads: Option<Arc<Uploads>>,
}

impl Announcements {
    pub fn new(store: Arc<dyn MetaStore>, uploads: Option<Arc<Uploads>>) -> Announcements {
        let session = store.session();
        Announcements { store, session, uploads }
    }

    /// Says that this session is about to write a new segment.
    pub fn announce(&self, kind: SegmentKind) -> Result<SegmentId> {
        let segment = SegmentId::generate();
        let pending = Pending { session: self.session, kind };
        let commit = Commit {
            preconditions: vec![Precondition::Absent(key::pending(segment))],
            writes: vec![Write::Put(key::pending(segment), pending.encode())],
        };
        must_commit(&*self.store, commit)?;
        if let Some(uploads) = &self.uploads {
            uploads.opened(segment, kind);
        }
        crash::point("after-announce");
        Ok(segment)
    }

    /// The segment has this many bytes by now.
    pub fn grown(&self, segment: SegmentId, bytes: u64) {
        if let Some(uploads) = &self.uploads {
            uploads.grown(segment, bytes);
        }
    }

    /// The segment was closed with this many bytes, or could not be: then the next start recovers it.
    pub fn closed(&self, segment: SegmentId, kind: SegmentKind, bytes: u64, closed: Result<()>) {
        let done = match (&self.uploads, closed) {
            (None, closed) => closed.and_then(|()| withdraw(&*self.store, segment)),
            (Some(uploads), Ok(())) => {
                uploads.closed(segment, kind, bytes);
                Ok(())
            }
            (Some(uploads), Err(error)) => {
                uploads.stuck(segment, &error);
                Err(error)
            }
        };
        if let Err(error) = done {
            tracing::error!(%segment, %error, "a segment could not be closed; the next start recovers it");
        }
    }

    /// Nothing came of it. If even that cannot be said, recovery finds the announcement.
    pub fn dropped(&self, segment: SegmentId, error: &Error) {
        tracing::debug!(%segment, %error, "an announced segment was not made");
        let _ = withdraw(&*self.store, segment);
        if let Some(uploads) = &self.uploads {
            uploads.dropped(segment);
        }
    }
}

/// The segment is finished, or was abandoned: from now on only what names it keeps it.
pub fn withdraw(store: &dyn MetaStore, segment: SegmentId) -> Result<()> {
    must_commit(store, Commit { preconditions: vec![], writes: vec![Write::Delete(key::pending(segment))] })
}
