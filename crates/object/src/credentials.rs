//! Who we are, in the order of the AWS tools: environment variables, web identity, the shared credentials file,
//! container, instance metadata. The SDK knows and renews all but the file; that one is read here, again whenever
//! it changes.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use headrace_base::{Error, Kind, Result};
use object_store::CredentialProvider;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};

/// Adds the shared credentials file to the builder if that is where the chain leads.
pub fn apply(builder: AmazonS3Builder) -> Result<AmazonS3Builder> {
    let given = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if given("AWS_ACCESS_KEY_ID") || given("AWS_WEB_IDENTITY_TOKEN_FILE") {
        return Ok(builder);
    }
    // An endpoint on the machine itself often wants no token; the client looks for the endpoint only with a file of one.
    let builder =
        if given("AWS_CONTAINER_CREDENTIALS_FULL_URI") && !given("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE") {
            builder.with_config(AmazonS3ConfigKey::ContainerAuthorizationTokenFile, "/dev/null")
        } else {
            builder
        };
    let path = match std::env::var_os("AWS_SHARED_CREDENTIALS_FILE") {
        Some(path) => PathBuf::from(path),
        None => match std::env::var_os("HOME") {
            Some(home) => PathBuf::from(home).join(".aws/credentials"),
            None => return Ok(builder),
        },
    };
    let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
    if !path.exists() {
        return Ok(builder);
    }
    let provider = SharedFile { path, profile, known: Mutex::new(None) };
    match provider.read() {
        Ok(_) => Ok(builder.with_credentials(Arc::new(provider))),
        // A file for other profiles: the chain goes on, unless this one was asked for by name.
        Err(error) if error.kind() == Kind::NotFound && !given("AWS_PROFILE") => Ok(builder),
        Err(error) => Err(error),
    }
}

/// What was read, and the file's change time by which that is known to be the latest.
type Known = Option<((i64, i64), Arc<AwsCredential>)>;

#[derive(Debug)]
struct SharedFile {
    path: PathBuf,
    profile: String,
    known: Mutex<Known>,
}

impl SharedFile {
    fn read(&self) -> Result<Arc<AwsCredential>> {
        use std::os::unix::fs::MetadataExt;
        let io = |cause| Error::io(format_args!("read credentials file {}", self.path.display()), cause);
        let metadata = fs::metadata(&self.path).map_err(io)?;
        let changed = (metadata.mtime(), metadata.mtime_nsec());
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, credential)) = &*known
            && *at == changed
        {
            return Ok(Arc::clone(credential));
        }
        let text = fs::read_to_string(&self.path).map_err(io)?;
        let credential = parse(&text, &self.profile).ok_or_else(|| {
            Error::not_found(format!(
                "credentials file {} has no key for profile {:?}: aws_access_key_id and aws_secret_access_key",
                self.path.display(),
                self.profile
            ))
        })?;
        let credential = Arc::new(credential);
        *known = Some((changed, Arc::clone(&credential)));
        Ok(credential)
    }
}

#[async_trait::async_trait]
impl CredentialProvider for SharedFile {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        self.read().map_err(|error| object_store::Error::Generic { store: "S3", source: Box::new(error) })
    }
}

/// The keys of one profile of an INI file.
fn parse(text: &str, profile: &str) -> Option<AwsCredential> {
    let mut inside = false;
    let (mut key_id, mut secret_key, mut token) = (None, None, None);
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            inside = name.trim() == profile;
        } else if inside
            && !line.starts_with(['#', ';'])
            && let Some((name, value)) = line.split_once('=')
        {
            let value = Some(value.trim().to_owned());
            match name.trim() {
                "aws_access_key_id" => key_id = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Some(AwsCredential { key_id: key_id?, secret_key: secret_key?, token })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "[other]\naws_access_key_id = o\naws_secret_access_key=p\n; [default]\n[default]\n\
                        aws_access_key_id = id\n# aws_secret_access_key = no\naws_secret_access_key = a=b/c\n";

    #[test]
    fn a_profile_is_read_and_no_other() {
        let credential = parse(TEXT, "default").unwrap();
        assert_eq!((credential.key_id.as_str(), credential.secret_key.as_str()), ("id", "a=b/c"));
        assert_eq!(credential.token, None);
        assert_eq!(parse(TEXT, "other").unwrap().secret_key, "p");
        assert!(parse(TEXT, "missing").is_none());
        assert!(parse("[default]\naws_access_key_id = x\n", "default").is_none());
    }

    #[test]
    fn a_changed_file_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials");
        fs::write(&path, TEXT).unwrap();
        let file = SharedFile { path: path.clone(), profile: "default".into(), known: Mutex::new(None) };
        assert_eq!(file.read().unwrap().key_id, "id");
        fs::write(&path, "[default]\naws_access_key_id=new\naws_secret_access_key=s\naws_session_token=t\n")
            .unwrap();
        let renewed = file.read().unwrap();
        assert_eq!((renewed.key_id.as_str(), renewed.token.as_deref()), ("new", Some("t")));
        fs::remove_file(&path).unwrap();
        assert_eq!(file.read().unwrap_err().kind(), Kind::NotFound);
    }
}
