//! Where an object tier is. Written into the volume's marker; never holds a secret.

use headrace_base::{Error, Result};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Location {
    pub bucket: String,
    /// Without slashes at its ends; empty: the whole bucket.
    pub prefix: String,
    /// None: Amazon's own, by region.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
}

impl Location {
    /// `s3://bucket/prefix`. Without an endpoint or region those of the environment hold, as the AWS tools read
    /// it, and are kept from then on.
    pub fn parse(url: &str, endpoint: Option<String>, region: Option<String>) -> Result<Location> {
        let wrong =
            |why: &str| Error::invalid(format!("object tier {url:?}: {why}: give s3://BUCKET/PREFIX"));
        let rest = url.strip_prefix("s3://").ok_or_else(|| wrong("only s3:// is supported"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        // The rules of S3 for bucket names; with them a bucket is also safe in a path and in a host name.
        let letters = bucket
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.'));
        if !(3..=63).contains(&bucket.len()) || !letters {
            return Err(wrong("the bucket's name must have 3-63 lower-case letters, digits, '-' and '.'"));
        }
        let plain = |part: &str| {
            !part.is_empty()
                && part != "."
                && part != ".."
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!-_.*'()=+,@".contains(&byte))
        };
        if !prefix.is_empty() && !prefix.split('/').all(plain) {
            return Err(wrong("a prefix is made of letters, digits and !-_.*'()=+,@ between single slashes"));
        }
        let from_environment = |names: &[&str]| {
            names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
        };
        let endpoint = endpoint.or_else(|| from_environment(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]));
        let region = region.or_else(|| from_environment(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
        let endpoint = endpoint.map(|endpoint| endpoint.trim_end_matches('/').to_owned());
        if let Some(endpoint) = &endpoint
            && !endpoint.starts_with("http://")
            && !endpoint.starts_with("https://")
        {
            return Err(Error::invalid(format!(
                "endpoint {endpoint:?} of the object tier: it must begin with http:// or https://"
            )));
        }
        Ok(Location { bucket: bucket.to_owned(), prefix: prefix.to_owned(), endpoint, region })
    }

    pub fn key(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}/{name}", self.prefix) }
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "s3://{}", self.bucket)?;
        if !self.prefix.is_empty() {
            write!(out, "/{}", self.prefix)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Location> {
        Location::parse(url, Some("http://127.0.0.1:8333/".into()), Some("eu-central-1".into()))
    }

    #[test]
    fn a_url_names_bucket_and_prefix() {
        let location = parse("s3://my-bucket/some/prefix/").unwrap();
        assert_eq!((location.bucket.as_str(), location.prefix.as_str()), ("my-bucket", "some/prefix"));
        assert_eq!(location.endpoint.as_deref(), Some("http://127.0.0.1:8333"));
        assert_eq!(location.key("a/b"), "some/prefix/a/b");
        assert_eq!(location.to_string(), "s3://my-bucket/some/prefix");
        let whole = parse("s3://my-bucket").unwrap();
        assert_eq!((whole.key("a"), whole.to_string()), ("a".into(), "s3://my-bucket".into()));
    }

    #[test]
    fn what_no_store_would_take_is_refused_at_once() {
        for url in [
            "",
            "my-bucket",
            "gs://my-bucket",
            "s3://",
            "s3://ab",
            "s3://My-Bucket",
            "s3://a_b_c",
            "s3://abc/a//b",
            "s3://abc/../b",
            "s3://abc/a b",
            "s3://abc/\u{e4}",
        ] {
            let error = parse(url).unwrap_err();
            assert!(error.message().contains("s3://BUCKET/PREFIX"), "{url}: {error}");
        }
        let error = Location::parse("s3://abc", Some("localhost:1".into()), None).unwrap_err();
        assert!(error.message().contains("http://"), "{error}");
    }
}
