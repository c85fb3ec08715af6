//! Keys of clients.
//!
//! Invariant: a key is compared in constant time and is kept nowhere; what tells keys apart later is a digest.

use axum::http::{HeaderMap, header};

use crate::ApiError;

/// Digest of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyDigest([u8; 16]);

impl KeyDigest {
    /// The digest of `key`.
    #[must_use]
    pub fn of(key: &str) -> Self {
        let mut digest = [0; 16];
        digest.copy_from_slice(&blake3::hash(key.as_bytes()).as_bytes()[..16]);
        Self(digest)
    }
}

/// The key of a request: that of `Authorization: Bearer`, `x-api-key` or `x-goog-api-key`, whichever comes first.
#[must_use]
pub fn api_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| value.strip_prefix("Bearer "));
    bearer.or_else(|| text("x-api-key")).or_else(|| text("x-goog-api-key")).map(str::trim)
}

/// Which keys an endpoint accepts.
#[derive(Clone)]
pub struct AccessKeys {
    /// `None`: every key, and none.
    token: Option<String>,
}

impl AccessKeys {
    /// The key `token`; without one every request is accepted.
    #[must_use]
    pub fn new(token: Option<String>) -> Self {
        Self { token }
    }

    /// Whether `key` is the key of this endpoint.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn check(&self, key: Option<&str>) -> Result<(), ApiError> {
        let Some(token) = &self.token else { return Ok(()) };
        let key = key.unwrap_or_default();
        let differs = token.bytes().zip(key.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
        if differs == 0 && token.len() == key.len() { Ok(()) } else { Err(ApiError::unauthorized()) }
    }

    /// Whether a key is required.
    #[must_use]
    pub fn is_required(&self) -> bool {
        self.token.is_some()
    }
}

impl std::fmt::Debug for AccessKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AccessKeys").field("required", &self.is_required()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_in_three_places() {
        for (name, value) in
            [("authorization", "Bearer secret"), ("x-api-key", "secret"), ("x-goog-api-key", "secret")]
        {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            assert_eq!(api_key(&headers), Some("secret"), "{name}");
        }
        assert_eq!(api_key(&HeaderMap::new()), None);
    }

    #[test]
    fn only_the_key_is_accepted() {
        let keys = AccessKeys::new(Some("secret".to_owned()));
        keys.check(Some("secret")).unwrap();
        for wrong in [None, Some(""), Some("secre"), Some("secrets"), Some("Secret")] {
            assert_eq!(keys.check(wrong).unwrap_err().status.as_u16(), 401, "{wrong:?}");
        }
        assert!(!format!("{keys:?}").contains("secret"));
        AccessKeys::new(None).check(None).unwrap();
    }
}
