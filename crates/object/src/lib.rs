//! The object tier: one prefix of one bucket, where a volume's segments are durable. Alone here is the store's SDK
//! known; all calls are plain blocking ones, safe from any thread.
//!
//! | module | what it owns |
//! |---|---|
//! | `location` | where a tier is: bucket, prefix, endpoint, region |
//! | `credentials` | who we are: the standard AWS chain, renewed |
//! | `tier` | put, get, list, delete; limits on connections and on memory in flight |
//! | `probe` | what we rely on, asked of the store itself before anything is trusted to it |
//! | `failure` | what a store's answer means for the caller |
//!
//! Retries: a request is repeated by the SDK on 5xx, 429 and broken connections, a body that breaks off is resumed
//! where it ended and only if the object is still the same (If-Match). All within a budget of time; then the error
//! names bucket, key and cause. Who must not give up (uploads) tries again above.

mod credentials;
mod failure;
mod location;
mod probe;
mod tier;

pub use location::Location;
pub use tier::{Fetched, Listed, ObjectFacts, ObjectTier, PartsUpload, Sink, Stored, Urgency};
