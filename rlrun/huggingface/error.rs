//! Why a model or a dataset cannot be had from the Hugging Face Hub.
//!
//! Invariant: each message names what was asked for, shows what was found, and says what to do.

use std::path::PathBuf;

/// Why a repository cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepositoryError {
    /// A text that is no name.
    #[error("`{text}`: {reason}")]
    Name {
        /// What was written.
        text: String,
        /// What is wrong, and the form of a name.
        reason: String,
    },
    /// No repository of this name, or a private one.
    #[error(
        "{name}: {endpoint} has no such {kind}, or it is private; check the name{}",
        if *.token { " and whether the token (HF_TOKEN) may read it" } else { ", and set HF_TOKEN if it is private" }
    )]
    NotFound {
        /// The name.
        name: String,
        /// `model` or `dataset`.
        kind: String,
        /// Address of the hub.
        endpoint: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// No such branch, tag or commit.
    #[error(
        "{name}: the repository has no revision `{revision}`; name a branch, a tag or a commit behind `@`"
    )]
    Revision {
        /// The name.
        name: String,
        /// The revision.
        revision: String,
    },
    /// No such file.
    #[error("{name}: the repository has no file `{file}`{}", near(.existing))]
    File {
        /// The name.
        name: String,
        /// The file.
        file: String,
        /// Files that it might have been.
        existing: Vec<String>,
    },
    /// A repository whose conditions have to be accepted.
    #[error(
        "{name}: access is restricted; accept the conditions at {page}, then {}",
        if *.token { "check that the token (HF_TOKEN) is of that account and may read such repositories" }
        else { "set HF_TOKEN to a token of that account" }
    )]
    Gated {
        /// The name.
        name: String,
        /// Where the conditions are.
        page: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// Not in the cache, and no request may be sent.
    #[error(
        "{name}: HF_HUB_OFFLINE is set, and {missing} is not in the cache {}; fetch it once without HF_HUB_OFFLINE",
        .cache.display()
    )]
    Offline {
        /// The name.
        name: String,
        /// What is missing.
        missing: String,
        /// The cache.
        cache: PathBuf,
    },
    /// No answer from the hub.
    #[error("{name}: {url} cannot be reached: {reason}; check the network and HF_ENDPOINT, then start again")]
    Unreachable {
        /// The name.
        name: String,
        /// The address.
        url: String,
        /// Why.
        reason: String,
    },
    /// A download that makes no progress.
    #[error(
        "{name}: the download of {file} {reason}, {attempts} times in a row, at {have} of {size} bytes; start again later: what \
         has arrived is kept"
    )]
    BrokenOff {
        /// The name.
        name: String,
        /// The file.
        file: String,
        /// What happened the last time.
        reason: String,
        /// Attempts without a byte.
        attempts: u32,
        /// Bytes that have arrived.
        have: u64,
        /// Bytes of the file.
        size: u64,
    },
    /// A file with other bytes than the hub says.
    #[error("{name}: {file} arrived damaged: {reason}; it was removed, start again")]
    Damaged {
        /// The name.
        name: String,
        /// The file.
        file: String,
        /// What differs.
        reason: String,
    },
    /// An answer that is an error.
    #[error("{name}: {url} answers {status}{}; {}", said(.message), advice(*.status))]
    Refused {
        /// The name.
        name: String,
        /// The address.
        url: String,
        /// HTTP status.
        status: u16,
        /// What the server says.
        message: String,
    },
    /// An answer that is not what a hub sends.
    #[error("{name}: {url} does not answer as a hub: {reason}; check HF_ENDPOINT")]
    Answer {
        /// The name.
        name: String,
        /// The address.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The cache cannot be written.
    #[error(
        "{name}: cannot write {}: {source}; make space there, or set HF_HOME to a directory on another disk. What has arrived is \
         kept", .path.display()
    )]
    Write {
        /// The name.
        name: String,
        /// The file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Another process has a file for itself and does not get on with it.
    #[error(
        "{name}: another process fetches {file} and has not received a byte for {seconds} s; end it, or remove {}",
        .lock.display()
    )]
    Locked {
        /// The name.
        name: String,
        /// The file.
        file: String,
        /// How long, seconds.
        seconds: u64,
        /// The lock.
        lock: PathBuf,
    },
    /// No directory for the cache.
    #[error("{name}: there is no place for downloads: set HF_HOME or HOME to a directory")]
    NoCache {
        /// The name.
        name: String,
    },
    /// A repository without a model or dataset that can be read.
    #[error("{name}: {reason}")]
    Contents {
        /// The name.
        name: String,
        /// What is missing, what is there, and what to do.
        reason: String,
    },
}

impl RepositoryError {
    /// Whether another input helps, rather than another moment.
    #[must_use]
    pub fn is_input(&self) -> bool {
        !matches!(
            self,
            Self::Unreachable { .. }
                | Self::BrokenOff { .. }
                | Self::Damaged { .. }
                | Self::Refused { .. }
                | Self::Write { .. }
                | Self::Locked { .. }
        )
    }
}

fn near(existing: &[String]) -> String {
    if existing.is_empty() { String::new() } else { format!("; there are {}", existing.join(", ")) }
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}

fn advice(status: u16) -> &'static str {
    match status {
        429 => "too many requests: wait a few minutes, or set HF_TOKEN",
        500.. => "the server has a problem: start again later",
        _ => "check the name and HF_TOKEN",
    }
}
