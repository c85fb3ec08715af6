//! Keys of users, and limits of requests.
//!
//! Invariant: keys are compared as digests, all of them and in constant time, and are not kept. What tells users apart is the
//! digest of their key.

use std::time::Duration;

use axum::http::{HeaderMap, header};

use super::refusal::HttpRefusal;
use crate::training::UserId;

/// Header of tinker's SDK with the key.
const KEY_HEADER: &str = "x-api-key";

/// Limits of requests over HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Longest body, also after decompression, bytes.
    pub max_body_bytes: usize,
    /// All bodies in memory, bytes; more wait.
    pub max_bodies_bytes: usize,
    /// Longest time to receive a body.
    pub body_time: Duration,
    /// A result above this is announced with its size before it is sent, bytes.
    pub inline_result_bytes: usize,
    /// Longest time that a request for a result waits for it, and other requests for their turn.
    pub retrieve_time: Duration,
    /// Most archives that are downloaded at the same time.
    pub max_archives: usize,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            max_body_bytes: 64 << 20,
            max_bodies_bytes: 512 << 20,
            body_time: Duration::from_secs(60),
            inline_result_bytes: 1 << 20,
            // The SDK gives up on a connection after 45 s.
            retrieve_time: Duration::from_secs(30),
            max_archives: 8,
        }
    }
}

/// Who may use the service, and how much of it over HTTP.
#[derive(Clone)]
pub struct ServiceAccess {
    /// Digests of the accepted keys; none: every key is accepted.
    digests: Vec<[u8; 32]>,
    pub(super) limits: HttpLimits,
    /// Whether clients reach the service through TLS.
    pub(crate) encrypted: bool,
    /// Whether clients may be on other machines, which do not have its files.
    pub(crate) remote: bool,
}

impl ServiceAccess {
    /// Accepts these keys; without any, every key, each of which is a user of its own, and the empty one that of requests
    /// without a key.
    #[must_use]
    pub fn new(keys: &[String]) -> Self {
        let digests = keys.iter().map(|key| *blake3::hash(key.as_bytes()).as_bytes()).collect();
        Self { digests, limits: HttpLimits::default(), encrypted: false, remote: false }
    }

    /// The same with other limits.
    #[must_use]
    pub fn with_limits(self, limits: HttpLimits) -> Self {
        Self { limits, ..self }
    }

    /// Whether only some keys are accepted.
    #[must_use]
    pub fn requires_key(&self) -> bool {
        !self.digests.is_empty()
    }

    /// The user of a request.
    pub(super) fn user(&self, headers: &HeaderMap) -> Result<UserId, HttpRefusal> {
        let digest = *blake3::hash(key_of(headers).as_bytes()).as_bytes();
        let matches = |known: &[u8; 32]| {
            let differs = known.iter().zip(&digest).fold(0, |differs, (a, b)| differs | (a ^ b));
            u8::from(differs == 0)
        };
        let accepted = self.digests.iter().fold(0, |any, known| any | matches(known));
        if self.requires_key() && accepted == 0 {
            return Err(HttpRefusal::new(
                401,
                "send a key of this service as `X-API-Key` or `Authorization: Bearer KEY`; the SDK takes it from TINKER_API_KEY",
            ));
        }
        let mut user = UserId([0; 16]);
        user.0.copy_from_slice(&digest[..16]);
        Ok(user)
    }
}

/// The key of a request; empty without one.
fn key_of(headers: &HeaderMap) -> &str {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = || text(header::AUTHORIZATION.as_str()).and_then(|value| value.strip_prefix("Bearer "));
    text(KEY_HEADER).filter(|key| !key.is_empty()).or_else(bearer).unwrap_or_default().trim()
}

impl std::fmt::Debug for ServiceAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceAccess")
            .field("keys", &self.digests.len())
            .field("limits", &self.limits)
            .field("encrypted", &self.encrypted)
            .field("remote", &self.remote)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(access: &ServiceAccess, name: &'static str, value: &str) -> Result<UserId, HttpRefusal> {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        access.user(&headers)
    }

    #[test]
    fn only_the_keys_of_the_service_are_accepted_in_two_places() {
        let access = ServiceAccess::new(&["tml-one".to_owned(), "tml-two".to_owned()]);
        let one = user(&access, KEY_HEADER, "tml-one").unwrap();
        assert_eq!(user(&access, "authorization", "Bearer tml-one").unwrap(), one);
        assert_ne!(user(&access, KEY_HEADER, "tml-two").unwrap(), one);
        for wrong in ["", "tml-on", "tml-onee", "TML-ONE"] {
            assert_eq!(user(&access, KEY_HEADER, wrong).unwrap_err().status(), 401, "{wrong}");
        }
        assert_eq!(access.user(&HeaderMap::new()).unwrap_err().status(), 401);
        assert!(!format!("{access:?}").contains("tml"));
    }

    #[test]
    fn without_keys_each_key_is_a_user() {
        let access = ServiceAccess::new(&[]);
        let nameless = access.user(&HeaderMap::new()).unwrap();
        assert_eq!(user(&access, KEY_HEADER, "").unwrap(), nameless);
        assert_ne!(user(&access, KEY_HEADER, "tml-one").unwrap(), nameless);
    }
}
