//! What a store's answer means for the caller, in our kinds and with a way out.

use std::error::Error as StdError;

use headrace_base::error::errno;
use headrace_base::{Error, Kind};
use object_store::Error as StoreError;

/// `doing` names the act, the bucket and the key.
pub fn explain(doing: impl std::fmt::Display, cause: StoreError) -> Error {
    let whole = chain(&cause);
    // Some answers come as a failed request with the body in its text.
    let says = |words: &[&str]| words.iter().any(|word| whole.contains(word));
    let error = if says(&["NoSuchBucket"]) {
        Error::not_found(format!("{doing}: the bucket does not exist: make it first ({whole})"))
    } else if says(&["ExpiredToken", "RequestExpired", "TokenRefreshRequired"]) {
        // Renewed credentials may come at any moment.
        Error::new(Kind::Unavailable, format!("{doing}: the credentials have expired: renew them ({whole})"))
    } else if says(&[
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "IllegalLocationConstraint",
        "configured region",
    ]) {
        Error::new(
            Kind::Invalid,
            format!("{doing}: the bucket is in another region: give it with --region ({whole})"),
        )
    } else if says(&["InvalidRange"]) {
        Error::corrupt(format!("{doing}: the object ends before what is to be read of it ({whole})"))
    } else {
        match &cause {
            StoreError::NotFound { .. } => {
                Error::not_found(format!("{doing}: there is no such object ({whole})"))
            }
            StoreError::AlreadyExists { .. } => {
                Error::errno(errno::EEXIST, format!("{doing}: there is an object of this name already"))
            }
            StoreError::Precondition { .. } | StoreError::NotModified { .. } => {
                Error::new(Kind::Conflict, format!("{doing}: the object has changed"))
            }
            StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => Error::new(
                Kind::Permission,
                format!(
                    "{doing}: the store refuses: check the credentials and the bucket's policy ({whole})"
                ),
            ),
            StoreError::NotSupported { .. } | StoreError::NotImplemented { .. } => {
                Error::errno(errno::EOPNOTSUPP, format!("{doing}: {whole}"))
            }
            _ => Error::new(Kind::Unavailable, format!("{doing}: {whole}")),
        }
    };
    error.with_cause(cause)
}

/// The error and all its causes, each said once.
fn chain(error: &dyn StdError) -> String {
    let mut said = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !said.contains(&text) {
            said.push_str(": ");
            said.push_str(&text);
        }
        next = cause.source();
    }
    said
}
