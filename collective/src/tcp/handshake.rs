//! The handshake of a connection: both ends prove that they know the secret without sending it, and one sends its rank.
//!
//! Invariant: a peer that does not know the secret is refused, after [`PATIENCE`] at the latest. The frames that follow are neither
//! encrypted nor authenticated: the network between ranks has to be trusted.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

/// Deadline of the handshake, on the side that waits for processes.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// TCP keepalive, which notices a host that is lost: idle time before the first probe, time between probes, number of probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// First bytes of a connection: the version of the protocol.
const MAGIC: [u8; 8] = *b"rlruncl1";
/// In place of a rank: any that is free.
const ANY: u32 = u32::MAX;
/// Length of a random number that is used once, bytes.
const NONCE: usize = 32;
/// Length of the first message, bytes.
const HELLO: usize = MAGIC.len() + NONCE + 8;
/// Length of a proof, bytes.
const PROOF: usize = blake3::OUT_LEN;

/// The secret that all ranks share.
#[derive(Clone)]
pub(super) struct Secret([u8; blake3::KEY_LEN]);

/// First message of a process that connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The rank that it asks for; `None` for any that is free.
    pub rank: Option<usize>,
    /// The port that it listens on; 0 if it does not listen.
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

    /// Message authentication code of `words` under the secret.
    fn proof(&self, words: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        words.iter().for_each(|word| {
            hasher.update(word);
        });
        hasher.finalize()
    }
}

impl Hello {
    /// Sends this message; an error of kind `PermissionDenied` if the other end does not know the secret.
    pub(super) fn send(self, stream: &mut TcpStream, secret: &Secret) -> io::Result<()> {
        prepare(stream)?;
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

    /// Receives the message of a process; an error of kind `PermissionDenied` if it does not know the secret.
    pub(super) fn receive(stream: &mut TcpStream, secret: &Secret) -> io::Result<Self> {
        prepare(stream)?;
        let until = Instant::now() + PATIENCE;
        let mut hello = [0; HELLO];
        read_by(until, stream, &mut hello)?;
        if hello[..8] != MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no rank of this rlrun"));
        }
        let nonce = nonce()?;
        stream.write_all(&nonce)?;
        stream.write_all(secret.proof(&[b"accepts", &hello, &nonce]).as_bytes())?;
        let mut proof = [0; PROOF];
        read_by(until, stream, &mut proof)?;
        if secret.proof(&[b"joins", &hello, &nonce]) != proof {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the secret"));
        }
        let rank: [u8; 4] = hello[8 + NONCE..][..4].try_into().unwrap_or_default();
        let port: [u8; 2] = hello[8 + NONCE + 4..][..2].try_into().unwrap_or_default();
        let rank = Some(u32::from_le_bytes(rank)).filter(|rank| *rank != ANY).map(|rank| rank as usize);
        Ok(Self { rank, port: u16::from_le_bytes(port) })
    }
}

/// Fills `buffer` before `until`, however few bytes arrive at a time.
fn read_by(until: Instant, stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    stream.set_read_timeout(Some(PATIENCE))
}

/// Sets the deadline of the handshake, and keepalive: a process may wait for the others for a long time after it.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    let (idle, interval, count) = KEEPALIVE;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, interval)?;
    sockopt::set_tcp_keepcnt(stream, count)?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// A number of the random source of the system, which cannot be predicted.
fn nonce() -> io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    getrandom::fill(&mut nonce).map_err(|error| {
        let message = format!("the system gives no random bytes: {error}");
        io::Error::other(message)
    })?;
    Ok(nonce)
}
