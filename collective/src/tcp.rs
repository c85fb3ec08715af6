//! Ranks that are processes on one host or several, connected in pairs.
//!
//! Rank 0 listens at the address that the others join. Every other rank also listens, on a port that the system chooses, on
//! the interface over which it has reached rank 0. When all ranks have joined, rank 0 sends each its rank and the addresses of
//! the others.
//!
//! Invariant: a connection is used for frames only after both of its ends have shown that they know the secret, which
//! is never sent.

mod handshake;
mod handshakes;
mod meeting;
mod sockets;

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use self::handshake::{Hello, PATIENCE, Secret};
use self::handshakes::Handshakes;
pub use self::meeting::Meeting;
pub use self::sockets::Sockets;
use crate::CollectiveError;
use crate::mesh::Mesh;

/// A rank that exchanges frames with the others over TCP.
pub type Tcp = Mesh<Sockets>;

/// The operation of joining, in errors.
const JOIN: &str = "join";
/// Time between attempts to reach a rank that does not listen yet.
const AGAIN: Duration = Duration::from_millis(50);
/// TCP keepalive, which notices a host that is lost: idle time before the first probe, time between probes, number of probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// Most ranks.
const MAX_WORLD: usize = 1 << 16;

/// Rank 0 before the others have joined.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    secret: Secret,
}

impl Listener {
    /// Listens at `addr` for ranks that know `secret`.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub fn bind(addr: SocketAddr, secret: &[u8]) -> Result<Self, CollectiveError> {
        Self::new(addr, Secret::new(secret))
    }

    fn new(addr: SocketAddr, secret: Secret) -> Result<Self, CollectiveError> {
        let listener = TcpListener::bind(addr).map_err(|error| {
            joining(
                addr,
                format!("cannot listen there: {error}; choose an address of this host and a free port"),
            )
        })?;
        Ok(Self { listener, secret })
    }

    /// The address that it listens at.
    ///
    /// # Errors
    /// If the system call fails.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Rank 0 of `world`, when the others have joined. From then on ranks wait for each other for `deadline` at most, as
    /// this does.
    ///
    /// # Errors
    /// If not all ranks have joined at the deadline. A refused connection receives the reason, and is no error here.
    pub fn accept(self, world: usize, deadline: Duration) -> Result<Tcp, CollectiveError> {
        self.accept_all(world, deadline).map(Mesh::new)
    }

    fn accept_all(self, world: usize, deadline: Duration) -> Result<Sockets, CollectiveError> {
        let until = Instant::now() + deadline;
        let mut handshakes = Handshakes::new(&self.listener, &self.secret);
        let mut joined: Vec<(Hello, TcpStream)> = Vec::new();
        while joined.len() + 1 < world {
            let Some((hello, mut stream)) = handshakes.next(until)? else {
                let taken = |rank| joined.iter().any(|(hello, _)| hello.rank == Some(rank));
                let waits_for = (1..world).find(|rank| !taken(*rank)).unwrap_or_default();
                return Err(late(0, waits_for, deadline));
            };
            let Some(rank) = hello.rank else {
                joined.push((hello, stream));
                continue;
            };
            let taken = joined.iter().any(|(other, _)| other.rank == Some(rank));
            if rank == 0 || rank >= world || taken {
                let is = if taken { "is there already" } else { "does not exist" };
                let reason = format!("rank {rank} of {world} {is}");
                // The peer may have closed the connection.
                let _ = Welcome::Refused(reason).send(&mut stream);
                continue;
            }
            joined.push((hello, stream));
        }
        form(joined, deadline, self.secret.clone())
    }
}

/// Rank 0 of `joined` and itself: sends each its rank and the addresses of the others.
fn form(
    mut joined: Vec<(Hello, TcpStream)>,
    deadline: Duration,
    secret: Secret,
) -> Result<Sockets, CollectiveError> {
    let world = joined.len() + 1;
    let mut streams: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
    let mut addresses = vec![SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)); world];
    // Connections that ask for a certain rank come first.
    joined.sort_by_key(|(hello, _)| hello.rank.is_none());
    for (hello, stream) in joined {
        let free = || (1..world).find(|rank| streams[*rank].is_none()).unwrap_or_default();
        let rank = hello.rank.unwrap_or_else(free);
        let from = stream.peer_addr().map_err(|source| broken(0, rank, source))?;
        addresses[rank] = SocketAddr::new(from.ip(), hello.port);
        streams[rank] = Some(stream);
    }
    for (rank, stream) in streams.iter_mut().enumerate() {
        if let Some(stream) = stream {
            let welcome = Welcome::Joined { rank, addresses: addresses.clone() };
            welcome.send(stream).map_err(|source| broken(0, rank, source))?;
        }
    }
    ready(0, streams, deadline, secret)
}

/// Joins the ranks whose rank 0 listens at `addr`, as `rank` or as any that is free. From then on ranks wait for each
/// other for `deadline` at most, as this does.
///
/// # Errors
/// If rank 0 cannot be reached, does not know `secret`, refuses the rank, or the others do not join in time.
pub fn join(
    addr: SocketAddr,
    secret: &[u8],
    rank: Option<usize>,
    deadline: Duration,
) -> Result<Tcp, CollectiveError> {
    join_with(addr, &Secret::new(secret), rank, deadline).map(Mesh::new)
}

fn join_with(
    addr: SocketAddr,
    secret: &Secret,
    rank: Option<usize>,
    deadline: Duration,
) -> Result<Sockets, CollectiveError> {
    let until = Instant::now() + deadline;
    let mut first = reach(addr, until)?;
    let own = first.local_addr().map_err(|error| joining(addr, error.to_string()))?;
    let nowhere =
        |error: io::Error| joining(addr, format!("cannot listen at {} for other ranks: {error}", own.ip()));
    let listener = TcpListener::bind((own.ip(), 0)).map_err(nowhere)?;
    let port = listener.local_addr().map_err(nowhere)?.port();
    let refused = |error: io::Error| {
        let reason = match error.kind() {
            io::ErrorKind::PermissionDenied => format!("was refused: {error}; is the token file the same?"),
            _ => format!("got no answer: {error}; look into the log of rank 0, and whether it listens there"),
        };
        joining(addr, reason)
    };
    Hello { rank, port }.send(&mut first, secret).map_err(refused)?;

    let left = until.saturating_duration_since(Instant::now()).max(AGAIN);
    first.set_read_timeout(Some(left)).map_err(refused)?;
    let welcome = Welcome::receive(&mut first).map_err(|error| {
        joining(addr, format!("rank 0 has not said that all are there: {error}; look into its log"))
    })?;
    let (rank, addresses) = match welcome {
        Welcome::Joined { rank, addresses } => (rank, addresses),
        Welcome::Refused(reason) => return Err(joining(addr, reason)),
    };
    let mut streams: Vec<Option<TcpStream>> = addresses.iter().map(|_| None).collect();
    streams[0] = Some(first);
    for (peer, address) in addresses.iter().enumerate().take(rank).skip(1) {
        let mut stream = reach(*address, until)?;
        let hello = Hello { rank: Some(rank), port: 0 };
        hello.send(&mut stream, secret).map_err(|source| broken(rank, peer, source))?;
        streams[peer] = Some(stream);
    }
    let mut handshakes = Handshakes::new(&listener, secret);
    while let Some(waits_for) = (rank + 1..addresses.len()).find(|peer| streams[*peer].is_none()) {
        let Some((hello, stream)) = handshakes.next(until)? else {
            return Err(late(rank, waits_for, deadline));
        };
        if let Some(address) = hello.rank.filter(|peer| *peer > rank).and_then(|peer| streams.get_mut(peer)) {
            *address = Some(stream);
        }
    }
    ready(rank, streams, deadline, secret.clone())
}

/// Answer of rank 0 to a process that joins.
#[derive(Debug, PartialEq, Eq)]
enum Welcome {
    Refused(String),
    Joined {
        rank: usize,
        /// Address of every rank; that of rank 0 is not used.
        addresses: Vec<SocketAddr>,
    },
}

/// Length of an address, bytes: an IPv6 address and a port.
const ADDRESS: usize = 18;

impl Welcome {
    fn send(&self, stream: &mut TcpStream) -> io::Result<()> {
        let (first, second, bytes) = match self {
            Self::Refused(reason) => (u32::MAX, reason.len(), reason.clone().into_bytes()),
            Self::Joined { rank, addresses } => {
                let address = |address: &SocketAddr| {
                    let ip = match address.ip() {
                        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                        IpAddr::V6(ip) => ip,
                    };
                    [&ip.octets()[..], &address.port().to_le_bytes()].concat()
                };
                (
                    u32::try_from(*rank).unwrap_or(u32::MAX),
                    addresses.len(),
                    addresses.iter().flat_map(address).collect(),
                )
            }
        };
        let second = u32::try_from(second).unwrap_or(u32::MAX);
        stream.write_all(&[&first.to_le_bytes()[..], &second.to_le_bytes(), &bytes].concat())
    }

    fn receive(stream: &mut TcpStream) -> io::Result<Self> {
        let mut next = || -> io::Result<usize> {
            let mut bytes = [0; 4];
            stream.read_exact(&mut bytes)?;
            Ok(u32::from_le_bytes(bytes) as usize)
        };
        let (rank, count) = (next()?, next()?);
        let strange =
            || io::Error::new(io::ErrorKind::InvalidData, format!("rank {rank} of {count} makes no sense"));
        if rank == u32::MAX as usize {
            let mut reason = vec![0; count.min(MAX_WORLD)];
            stream.read_exact(&mut reason)?;
            return Ok(Self::Refused(String::from_utf8_lossy(&reason).into_owned()));
        }
        if rank == 0 || rank >= count || count > MAX_WORLD {
            return Err(strange());
        }
        let mut bytes = vec![0; count * ADDRESS];
        stream.read_exact(&mut bytes)?;
        let address = |bytes: &[u8]| {
            let ip: [u8; 16] = bytes[..16].try_into().unwrap_or_default();
            let port = u16::from_le_bytes([bytes[16], bytes[17]]);
            SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), port)
        };
        Ok(Self::Joined { rank, addresses: bytes.chunks_exact(ADDRESS).map(address).collect() })
    }
}

/// The next connection; `None` at the deadline.
fn accept(listener: &TcpListener, until: Instant) -> Result<Option<TcpStream>, CollectiveError> {
    let failed = |error: io::Error| {
        let reason = format!("cannot wait for other ranks: {error}");
        CollectiveError::Join { address: "here".to_owned(), reason }
    };
    listener.set_nonblocking(true).map_err(failed)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Ok(Some(stream)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The connection was closed before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed(error)),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let timeout = Timespec::try_from(left + Duration::from_millis(1)).ok();
        let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], timeout.as_ref());
    }
}

/// A connection to `addr`, tried again until a process listens there.
fn reach(addr: SocketAddr, until: Instant) -> Result<TcpStream, CollectiveError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(&addr, left.clamp(AGAIN, PATIENCE)) {
            Ok(stream) => return Ok(stream),
            Err(error) if left.is_zero() => {
                let reason = format!("cannot be reached: {error}; does the rank that listens there run?");
                return Err(joining(addr, reason));
            }
            Err(_) => thread::sleep(AGAIN.min(left)),
        }
    }
}

/// The connections, made ready for frames.
fn ready(
    rank: usize,
    streams: Vec<Option<TcpStream>>,
    deadline: Duration,
    secret: Secret,
) -> Result<Sockets, CollectiveError> {
    let (idle, interval, count) = KEEPALIVE;
    for (peer, stream) in
        streams.iter().enumerate().filter_map(|(peer, stream)| Some((peer, stream.as_ref()?)))
    {
        let set = || -> io::Result<()> {
            stream.set_nodelay(true)?;
            sockopt::set_socket_keepalive(stream, true)?;
            sockopt::set_tcp_keepidle(stream, idle)?;
            sockopt::set_tcp_keepintvl(stream, interval)?;
            sockopt::set_tcp_keepcnt(stream, count)?;
            stream.set_nonblocking(true)
        };
        set().map_err(|source| broken(rank, peer, source))?;
    }
    Ok(Sockets::new(rank, streams, deadline, secret))
}

fn joining(address: SocketAddr, reason: String) -> CollectiveError {
    CollectiveError::Join { address: address.to_string(), reason }
}

fn late(rank: usize, waits_for: usize, deadline: Duration) -> CollectiveError {
    CollectiveError::Deadline { rank, waits_for, operation: JOIN, seconds: deadline.as_secs_f64() }
}

fn broken(rank: usize, peer: usize, source: io::Error) -> CollectiveError {
    CollectiveError::Connection { rank, peer, operation: JOIN, source }
}
