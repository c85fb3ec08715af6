//! Requests to a server that speaks the routes of the Hugging Face Hub.
//!
//! Invariant: every request has a deadline, and every answer that is kept in memory a limit. The token goes to the hub alone,
//! never to the server that it redirects a download to, whose addresses are secrets too: messages show their origin.

use std::io::Read;
use std::time::Duration;

use connect::{Body, HttpAgent, Request, Response, SendError};
use serde::Deserialize;
use serde_json::Value;

use super::error::RepositoryError;
use super::listing::{RepositoryFile, RepositoryListing};
use super::name::{RepositoryKind, RepositoryName};

/// Longest answer that lists the files of a repository, bytes.
const MAX_LISTING_BYTES: u64 = 64 << 20;
/// Longest message of an error that is read, bytes.
const MAX_MESSAGE_BYTES: u64 = 1 << 16;
/// Most redirects of one request.
const MOST_REDIRECTS: usize = 5;
/// Files that a message suggests.
const MOST_NEAR: usize = 12;

/// A hub, and the identity of the client.
pub(super) struct RepositoryClient {
    agent: HttpAgent,
    /// Without a slash at the end.
    endpoint: String,
    token: Option<String>,
    /// How long a request may take, and a download be without a byte.
    wait: Duration,
}

/// What is asked for, for messages.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) kind: RepositoryKind,
    pub(super) name: &'a RepositoryName,
}

/// A file as the hub describes it.
pub(super) struct RemoteFile {
    /// Its content, by a digest.
    pub(super) etag: String,
    /// Its length, bytes.
    pub(super) size: u64,
    /// Where it is downloaded from.
    url: String,
}

/// The answer that describes a repository at a revision.
#[derive(Deserialize)]
struct RepositoryAnswer {
    sha: String,
    #[serde(default)]
    siblings: Vec<SiblingAnswer>,
    #[serde(rename = "cardData", default)]
    card: Value,
}

#[derive(Deserialize)]
struct SiblingAnswer {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
}

impl RepositoryClient {
    pub(super) fn new(endpoint: &str, token: Option<String>, wait: Duration) -> Result<Self, String> {
        let agent = HttpAgent::new(None, 1, None)?;
        Ok(Self { agent, endpoint: endpoint.trim_end_matches('/').to_owned(), token, wait })
    }

    /// How long a download may be without a byte.
    pub(super) fn wait(&self) -> Duration {
        self.wait
    }

    /// What the repository has at its revision.
    pub(super) fn listing(&self, asked: Asked<'_>) -> Result<RepositoryListing, RepositoryError> {
        let Asked { kind, name } = asked;
        let revision = encoded(name.revision(), false);
        let url = format!(
            "{}/api/{}/{}/revision/{revision}?blobs=true",
            self.endpoint,
            kind.plural(),
            name.repository
        );
        let answer = self.follow(asked, "GET", &url)?;
        let wrong =
            |reason: String| RepositoryError::Answer { name: name.to_string(), url: url.clone(), reason };
        let mut bytes = Vec::new();
        let read = answer.into_body().into_reader().take(MAX_LISTING_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(|error| self.unreachable(asked, &url, error.to_string()))?;
        if bytes.len() as u64 > MAX_LISTING_BYTES {
            return Err(wrong(format!("the list of files is longer than {} MiB", MAX_LISTING_BYTES >> 20)));
        }
        let answer: RepositoryAnswer =
            serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        let files = answer.siblings.into_iter();
        let files = files.map(|file| RepositoryFile { name: file.rfilename, size: file.size }).collect();
        let configs = answer.card.get("configs").cloned().unwrap_or_default();
        let listing = RepositoryListing { commit: answer.sha, files, configs, whole: true };
        if listing.is_plain() {
            Ok(listing)
        } else {
            Err(wrong("it names no commit, or a file outside".to_owned()))
        }
    }

    /// Length, content and place of a file of `listing`.
    pub(super) fn file(
        &self,
        asked: Asked<'_>,
        listing: &RepositoryListing,
        file: &str,
    ) -> Result<RemoteFile, RepositoryError> {
        let folder = match asked.kind {
            RepositoryKind::Model => "",
            RepositoryKind::Dataset => "datasets/",
        };
        let (commit, name) = (&listing.commit, asked.name);
        let url =
            format!("{}/{folder}{}/resolve/{commit}/{}", self.endpoint, name.repository, encoded(file, true));
        let answer = self.follow(asked, "HEAD", &url).map_err(|error| match error {
            RepositoryError::NotFound { name, .. } => {
                let existing = listing.files.iter().take(MOST_NEAR).map(|file| file.name.clone()).collect();
                RepositoryError::File { name, file: file.to_owned(), existing }
            }
            error => error,
        })?;
        let header = |names: [&str; 2]| {
            names.into_iter().find_map(|name| answer.headers().get(name)?.to_str().ok()).map(str::to_owned)
        };
        let wrong = |reason: &str| RepositoryError::Answer {
            name: name.to_string(),
            url: url.clone(),
            reason: reason.to_owned(),
        };
        if header(["x-repo-commit"; 2]).is_some_and(|found| found != *commit) {
            return Err(wrong("it sends the file of another commit"));
        }
        let etag = header(["x-linked-etag", "etag"]).map(|etag| plain_etag(&etag));
        let etag = etag.ok_or_else(|| wrong("it sends no ETag, or one that is no name of a file"))?;
        let size = header(["x-linked-size", "content-length"]).and_then(|size| size.parse().ok());
        let size = size.ok_or_else(|| wrong("it does not say how long the file is"))?;
        let etag = etag.ok_or_else(|| wrong("its ETag is no name of a file"))?;
        let location = header(["location"; 2]);
        let url = match location.filter(|_| answer.status().is_redirection()) {
            Some(location) => location,
            None => url,
        };
        Ok(RemoteFile { etag, size, url })
    }

    /// The same file at an address that is valid now: those of other servers expire.
    pub(super) fn file_again(
        &self,
        asked: Asked<'_>,
        listing: &RepositoryListing,
        file: &str,
        known: &RemoteFile,
    ) -> Result<RemoteFile, RepositoryError> {
        let found = self.file(asked, listing, file)?;
        if (&found.etag, found.size) == (&known.etag, known.size) {
            return Ok(found);
        }
        let (name, url) = (asked.name.to_string(), self.endpoint.clone());
        let reason = format!("{file} has changed within the commit {}", listing.commit);
        Err(RepositoryError::Answer { name, url, reason })
    }

    /// The answer with the bytes of a file from `from` on. What arrives within `limit` counts.
    pub(super) fn download(
        &self,
        asked: Asked<'_>,
        file: &RemoteFile,
        from: u64,
        limit: Duration,
    ) -> Result<Response<Body>, RepositoryError> {
        let mut url = file.url.clone();
        for _ in 0..MOST_REDIRECTS {
            let answer = self.send(asked, "GET", &url, from, limit)?;
            if !answer.status().is_redirection() {
                return self.accepted(asked, &url, answer);
            }
            url = self.next(asked, &url, &answer)?;
        }
        Err(self.too_many(asked, &url))
    }

    /// Sends a request and follows redirects within the hub; one to another server is the answer.
    fn follow(&self, asked: Asked<'_>, method: &str, url: &str) -> Result<Response<Body>, RepositoryError> {
        let mut url = url.to_owned();
        for _ in 0..MOST_REDIRECTS {
            let answer = self.send(asked, method, &url, 0, self.wait)?;
            if !answer.status().is_redirection() {
                return self.accepted(asked, &url, answer);
            }
            let next = self.next(asked, &url, &answer)?;
            if !self.is_own(&next) {
                return Ok(answer);
            }
            url = next;
        }
        Err(self.too_many(asked, &url))
    }

    fn send(
        &self,
        asked: Asked<'_>,
        method: &str,
        url: &str,
        from: u64,
        limit: Duration,
    ) -> Result<Response<Body>, RepositoryError> {
        let mut request = Request::builder().method(method).uri(url);
        request = request.header("user-agent", concat!("rlrun/", env!("CARGO_PKG_VERSION")));
        // A compressed answer would have another length than the file.
        request = request.header("accept-encoding", "identity");
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        if let Some(token) = self.token.as_ref().filter(|_| self.is_own(url)) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(()).map_err(|error| self.unreachable(asked, url, error.to_string()))?;
        self.agent.send(request, limit).map_err(|error| match error {
            SendError::NotSent(reason) | SendError::Unclear(reason) | SendError::Permanent(reason) => {
                self.unreachable(asked, url, reason)
            }
        })
    }

    /// Whether an address is of the hub itself.
    fn is_own(&self, url: &str) -> bool {
        origin(url) == origin(&self.endpoint)
    }

    /// An address as messages show it: of another server the origin alone, since the rest gives access to the file.
    fn shown(&self, url: &str) -> String {
        if self.is_own(url) { url.to_owned() } else { origin(url).to_owned() }
    }

    /// Where a redirect leads.
    fn next(&self, asked: Asked<'_>, url: &str, answer: &Response<Body>) -> Result<String, RepositoryError> {
        let location = answer.headers().get("location").and_then(|location| location.to_str().ok());
        let location = location.map(|location| match location.starts_with('/') {
            true => format!("{}{location}", origin(url)),
            false => location.to_owned(),
        });
        let secure = |next: &String| next.starts_with("https://") || !self.endpoint.starts_with("https://");
        location.filter(secure).ok_or_else(|| RepositoryError::Answer {
            name: asked.name.to_string(),
            url: self.shown(url),
            reason: "it redirects to nowhere, or to an address without TLS".to_owned(),
        })
    }

    /// The answer, unless it is an error. What another server than the hub refuses says nothing about the repository.
    fn accepted(
        &self,
        asked: Asked<'_>,
        url: &str,
        answer: Response<Body>,
    ) -> Result<Response<Body>, RepositoryError> {
        let status = answer.status().as_u16();
        if answer.status().is_success() {
            return Ok(answer);
        }
        let Asked { kind, name } = asked;
        let text = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        let (code, said) = (text("x-error-code").unwrap_or_default().to_owned(), text("x-error-message"));
        let said = said.map(str::to_owned);
        let (token, own) = (self.token.is_some(), self.is_own(url));
        Err(match (status, &code[..]) {
            (_, "GatedRepo") | (403, _) if own => {
                let folder = if kind == RepositoryKind::Dataset { "datasets/" } else { "" };
                let page = format!("{}/{folder}{}", self.endpoint, name.repository);
                RepositoryError::Gated { name: name.to_string(), page, token }
            }
            (_, "RevisionNotFound") if own => {
                RepositoryError::Revision { name: name.to_string(), revision: name.revision().to_owned() }
            }
            (401 | 404, _) if own => RepositoryError::NotFound {
                name: name.to_string(),
                kind: kind.to_string(),
                endpoint: self.endpoint.clone(),
                token,
            },
            _ => {
                let mut message = said.unwrap_or_default();
                if message.is_empty() {
                    // What cannot be read says nothing.
                    let _ =
                        answer.into_body().into_reader().take(MAX_MESSAGE_BYTES).read_to_string(&mut message);
                }
                let plain = message.chars().filter(|c| !c.is_control()).take(200).collect();
                let (name, url) = (name.to_string(), self.shown(url));
                RepositoryError::Refused { name, url, status, message: plain }
            }
        })
    }

    fn unreachable(&self, asked: Asked<'_>, url: &str, reason: String) -> RepositoryError {
        RepositoryError::Unreachable { name: asked.name.to_string(), url: origin(url).to_owned(), reason }
    }

    fn too_many(&self, asked: Asked<'_>, url: &str) -> RepositoryError {
        let reason = format!("more than {MOST_REDIRECTS} redirects");
        RepositoryError::Answer { name: asked.name.to_string(), url: self.shown(url), reason }
    }
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    url[host..].find(['/', '?', '#']).map_or(url, |end| &url[..host + end])
}

/// A text as a part of an address; `folders` keeps slashes.
fn encoded(text: &str, folders: bool) -> String {
    let mut address = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                address.push(char::from(byte))
            }
            b'/' if folders => address.push('/'),
            other => address.push_str(&format!("%{other:02X}")),
        }
    }
    address
}

/// The name of a blob, without quotes; `None` if it is none.
fn plain_etag(etag: &str) -> Option<String> {
    let plain = etag.trim_start_matches("W/").trim_matches('"');
    let usual = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let fits = !plain.is_empty() && plain.len() <= 128 && plain.chars().all(usual) && !plain.starts_with('.');
    fits.then(|| plain.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_encoded_and_compared_by_their_origin() {
        assert_eq!(encoded("refs/pr/5", false), "refs%2Fpr%2F5");
        assert_eq!(encoded("data/a b+c.json", true), "data/a%20b%2Bc.json");
        for (url, expected) in [
            ("https://huggingface.co/a/b", "https://huggingface.co"),
            ("http://127.0.0.1:80?x", "http://127.0.0.1:80"),
            ("https://huggingface.co.evil/a", "https://huggingface.co.evil"),
            ("https://huggingface.co", "https://huggingface.co"),
        ] {
            assert_eq!(origin(url), expected);
        }
        let client = RepositoryClient::new("https://huggingface.co/", None, Duration::from_secs(1)).unwrap();
        assert!(client.is_own("https://huggingface.co/x") && !client.is_own("https://huggingface.co@evil/x"));
    }

    #[test]
    fn an_etag_is_the_name_of_a_blob_or_nothing() {
        assert_eq!(plain_etag("\"abc\"").as_deref(), Some("abc"));
        assert_eq!(plain_etag("W/\"abc-1\"").as_deref(), Some("abc-1"));
        for wrong in ["", "\"\"", "\"../x\"", "\"a/b\"", "\".x\""] {
            assert_eq!(plain_etag(wrong), None, "{wrong}");
        }
    }
}
