//! The first words on a connection: both sides show that they know the secret without saying it, and one says which rank
//! it is.
//!
//! Invariant: nothing that a stranger sends is believed, and none holds up the ranks for longer than [`PATIENCE`]. What
//! follows is neither encrypted nor authenticated: the network between ranks has to be one's own.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// How long one word of a handshake may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// What a connection begins with: the version of what follows.
const MAGIC: [u8; 8] = *b"rlruncl1";
/// Instead of a rank: any that is free.
const ANY: u32 = u32::MAX;
/// Length of a random number that is used once, bytes.
const NONCE: usize = 32;
/// Length of the first word, bytes.
const HELLO: usize = MAGIC.len() + NONCE + 8;
/// Length of a proof, bytes.
const PROOF: usize = blake3::OUT_LEN;

/// What is shared by all ranks and nobody else.
#[derive(Clone)]
pub(super) struct Secret([u8; blake3::KEY_LEN]);

/// Who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The rank, if it is to be a certain one.
    pub rank: Option<usize>,
    /// Where it listens for others; 0 if it does not.
    pub port: u16,
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(super) fn new(secret: &[u8]) -> Self {
        Self(blake3::derive_key("rlrun trainer ranks", secret))
    }

    /// What only one who knows the secret can say to `words`.
    fn proof(&self, words: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        words.iter().for_each(|word| {
            hasher.update(word);
        });
        hasher.finalize()
    }
}

impl Hello {
    /// Connects as this one; an error of kind `PermissionDenied` if the other does not know the secret.
    pub(super) fn say(self, stream: &mut TcpStream, secret: &Secret) -> io::Result<()> {
        be_brief(stream)?;
        let nonce = nonce()?;
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8..8 + NONCE].copy_from_slice(&nonce);
        let rank = self.rank.and_then(|rank| u32::try_from(rank).ok()).unwrap_or(ANY);
        hello[8 + NONCE..][..4].copy_from_slice(&rank.to_le_bytes());
        hello[8 + NONCE + 4..][..2].copy_from_slice(&self.port.to_le_bytes());
        stream.write_all(&hello)?;
        let (mut theirs, mut proof) = ([0; NONCE], [0; PROOF]);
        stream.read_exact(&mut theirs)?;
        stream.read_exact(&mut proof)?;
        // Compared in constant time.
        if secret.proof(&[b"accepts", &hello, &theirs]) != proof {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the secret"));
        }
        stream.write_all(secret.proof(&[b"joins", &hello, &theirs]).as_bytes())
    }

    /// Who connects on `stream`; an error of kind `PermissionDenied` if it does not know the secret.
    pub(super) fn hear(stream: &mut TcpStream, secret: &Secret) -> io::Result<Self> {
        be_brief(stream)?;
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello)?;
        if hello[..8] != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no rank of this rlrun"));
        }
        let nonce = nonce()?;
        stream.write_all(&nonce)?;
        stream.write_all(secret.proof(&[b"accepts", &hello, &nonce]).as_bytes())?;
        let mut proof = [0; PROOF];
        stream.read_exact(&mut proof)?;
        if secret.proof(&[b"joins", &hello, &nonce]) != proof {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the secret"));
        }
        let rank: [u8; 4] = hello[8 + NONCE..][..4].try_into().unwrap_or_default();
        let port: [u8; 2] = hello[8 + NONCE + 4..][..2].try_into().unwrap_or_default();
        let rank = Some(u32::from_le_bytes(rank)).filter(|rank| *rank != ANY).map(|rank| rank as usize);
        Ok(Self { rank, port: u16::from_le_bytes(port) })
    }
}

fn be_brief(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// A number of the system's random source, which nobody can guess from others that it has given.
fn nonce() -> io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(|error| {
        let message = format!("the system gives no random bytes: {error}");
        io::Error::other(message)
    })?;
    Ok(nonce)
}
