//! Downloads of what is saved, as a tar archive.
//!
//! The SDK asks for the address of an archive and then loads it without a key, so the address is signed and expires.
//!
//! Invariant: an archive is sent only for an address that this process has signed for its user. It is read while it is sent, by
//! one thread that ends with the download.

use std::path::PathBuf;

use axum::body::{Body, Bytes};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE, EXPIRES, HOST, LOCATION};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::body::{ApiState, blocking};
use super::dates::http_date;
use super::refusal::HttpRefusal;
use super::saved::saved_path;
use super::tar::TarListing;
use crate::clock::now_s;
use crate::training::UserId;

/// How long an address is valid, seconds.
const VALID_S: u64 = 15 * 60;
/// Pieces of an archive that wait for the client.
const WAITING_PIECES: usize = 4;

/// Parts of an address: when it expires, the user, the signature, and those of the path.
type LinkParts = (u64, String, String, String, String, String);

/// What an address of an archive stands for.
struct ArchiveLink {
    /// Seconds since 1970.
    expires: u64,
    user: UserId,
    path: String,
}

impl ArchiveLink {
    /// Hexadecimal. The parts have fixed lengths but for the last one.
    fn signature(&self, secret: &[u8; 32]) -> String {
        let mut hasher = blake3::Hasher::new_keyed(secret);
        hasher.update(&self.expires.to_le_bytes()).update(&self.user.0).update(self.path.as_bytes());
        hasher.finalize().to_hex().to_string()
    }
}

/// Redirects to the address of an archive.
pub(super) async fn link(
    State(api): State<ApiState>,
    Path((run, kind, name)): Path<(String, String, String)>,
    request: Request,
) -> Result<Response, HttpRefusal> {
    let user = api.access.user(request.headers())?;
    let path = saved_path(&run, &kind, &name)?;
    let secret = api.secret.ok_or_else(unsigned)?;
    let origin = origin(request.headers(), api.access.encrypted)?;
    let link = ArchiveLink { expires: now_s() + VALID_S, user, path: path.clone() };
    blocking(move || api.service.saved_at(user, &path)).await??;
    let signature = link.signature(&secret);
    let (expires, user) = (link.expires, hexadecimal(user));
    let address = format!("{origin}/api/v1/archives/{expires}/{user}/{signature}/{run}/{kind}/{name}");
    let no_address = |_| HttpRefusal::new(400, "the archive has no address: its name is not plain ASCII");
    let location = HeaderValue::try_from(address).map_err(no_address)?;
    let until = HeaderValue::try_from(http_date(expires)).map_err(no_address)?;
    Ok((StatusCode::FOUND, [(LOCATION, location), (EXPIRES, until)]).into_response())
}

/// Sends an archive to a client that has its address.
pub(super) async fn download(
    State(api): State<ApiState>,
    parts: Result<Path<LinkParts>, PathRejection>,
) -> Result<Response, HttpRefusal> {
    let Path((expires, user, signature, run, kind, name)) = parts?;
    let secret = api.secret.ok_or_else(unsigned)?;
    let path = saved_path(&run, &kind, &name)?;
    let refused =
        || HttpRefusal::new(403, "this address of an archive has expired; ask for the archive again");
    let user = from_hexadecimal(&user).ok_or_else(refused)?;
    let link = ArchiveLink { expires, user, path: path.clone() };
    let expected = link.signature(&secret);
    let differs = expected.bytes().zip(signature.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
    if differs != 0 || expected.len() != signature.len() || now_s() > expires {
        return Err(refused());
    }
    let permit = api.archives.clone().try_acquire_owned();
    let permit =
        permit.map_err(|_| HttpRefusal::new(503, "too many archives are being sent; try again later"))?;
    let (_, _, directory) = blocking(move || api.service.saved_at(user, &path)).await??;
    send_directory(directory, &name, permit).await
}

/// A response with the archive of a directory, which keeps `permit` until it is sent.
async fn send_directory(
    directory: PathBuf,
    name: &str,
    permit: OwnedSemaphorePermit,
) -> Result<Response, HttpRefusal> {
    let listing = blocking(move || TarListing::of(&directory)).await?;
    let listing = listing
        .map_err(|error| HttpRefusal::new(500, format!("the saved weights cannot be read: {error}")))?;
    let bytes = listing.bytes();
    let (pieces, received) = mpsc::channel::<Result<Bytes, std::io::Error>>(WAITING_PIECES);
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let written = listing.write(|piece| pieces.blocking_send(Ok(piece.into())).is_ok());
        if let Err(error) = written {
            // Without a client nothing is left to be said.
            let _ = pieces.blocking_send(Err(error));
        }
    });
    let pieces = stream::unfold(received, async |mut received| {
        let piece = received.recv().await?;
        Some((piece, received))
    });
    let file: String = name.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).collect();
    let disposition = HeaderValue::try_from(format!("attachment; filename=\"{file}.tar\""));
    let disposition = disposition.unwrap_or_else(|_| HeaderValue::from_static("attachment"));
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/x-tar")),
        (CONTENT_LENGTH, HeaderValue::from(bytes)),
        (CONTENT_DISPOSITION, disposition),
    ];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

fn unsigned() -> HttpRefusal {
    HttpRefusal::new(503, "the system had no random numbers to sign addresses with; restart the server")
}

/// How the client reaches this server, such as `http://127.0.0.1:8000`.
fn origin(headers: &HeaderMap, encrypted: bool) -> Result<String, HttpRefusal> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let Some(host) = text(HOST.as_str()) else {
        return Err(HttpRefusal::new(
            400,
            "the request has no `Host`, which the address of the archive needs",
        ));
    };
    // A proxy that ends TLS says so.
    let encrypted = encrypted || text("x-forwarded-proto") == Some("https");
    Ok(format!("{}://{host}", if encrypted { "https" } else { "http" }))
}

fn hexadecimal(user: UserId) -> String {
    user.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hexadecimal(text: &str) -> Option<UserId> {
    let mut user = UserId([0; 16]);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !digits || pairs.len() != user.0.len() || !rest.is_empty() {
        return None;
    }
    for (byte, pair) in user.0.iter_mut().zip(pairs) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(user)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use super::*;

    #[test]
    fn a_signature_is_of_its_user_path_and_time() {
        let secret = [7; 32];
        let link = |expires, user: u8, path: &str| ArchiveLink {
            expires,
            user: UserId([user; 16]),
            path: path.to_owned(),
        };
        let signed = link(1, 2, "tinker://s1/weights/a").signature(&secret);
        for other in [
            link(2, 2, "tinker://s1/weights/a"),
            link(1, 3, "tinker://s1/weights/a"),
            link(1, 2, "tinker://s1/weights/b"),
        ] {
            assert_ne!(other.signature(&secret), signed);
        }
        assert_ne!(link(1, 2, "tinker://s1/weights/a").signature(&[8; 32]), signed);
    }

    #[test]
    fn a_user_is_read_back_from_an_address() {
        let user = UserId([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0xff, 0x80, 13, 14, 15]);
        assert_eq!(from_hexadecimal(&hexadecimal(user)), Some(user));
        for wrong in ["", "00", "zz0102030405060708090a0b0c0d0e0f", "+00102030405060708090a0b0c0d0e0f"] {
            assert_eq!(from_hexadecimal(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_address_is_at_the_host_that_the_client_asked() {
        let mut headers = HeaderMap::new();
        assert_eq!(origin(&headers, false).unwrap_err().status(), 400);
        headers.insert(HOST, "gpu:8000".parse().unwrap());
        assert_eq!(origin(&headers, false).unwrap(), "http://gpu:8000");
        assert_eq!(origin(&headers, true).unwrap(), "https://gpu:8000");
        headers.insert("x-forwarded-proto", "https".parse().unwrap());
        assert_eq!(origin(&headers, false).unwrap(), "https://gpu:8000");
    }

    #[tokio::test]
    async fn a_directory_is_sent_whole_and_frees_its_permit() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("adapter_model.safetensors"), vec![1; 3 << 20]).unwrap();
        let permits = Arc::new(Semaphore::new(1));
        let permit = Arc::clone(&permits).try_acquire_owned().unwrap();
        let response = send_directory(directory.path().to_owned(), "w1", permit).await.unwrap();
        let announced: usize = response.headers()[CONTENT_LENGTH].to_str().unwrap().parse().unwrap();
        let sent = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!(sent.len(), announced);
        permits.acquire().await.unwrap().forget();
    }
}
