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
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

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
/// Between two looks at whether rank 0 still forms the group.
const LOOK: Duration = Duration::from_millis(200);
/// What the system reports of a connection that the other end has closed.
#[cfg(target_os = "linux")]
const CLOSED: PollFlags = PollFlags::HUP.union(PollFlags::ERR).union(PollFlags::RDHUP);
/// What the system reports of a connection that the other end has closed.
#[cfg(not(target_os = "linux"))]
const CLOSED: PollFlags = PollFlags::HUP.union(PollFlags::ERR);
/// Longest wait of one call: macOS refuses more than 24 days.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);
/// Most bytes that one call sends or receives: macOS refuses 2 GiB.
const MAX_CALL: usize = 1 << 30;
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
        loop {
            joined.retain(|(_, stream)| is_open(stream));
            if joined.len() + 1 >= world {
                break;
            }
            let next = handshakes.next(until)?;
            // One that has ended meanwhile may have been started again.
            joined.retain(|(_, stream)| is_open(stream));
            let Some((hello, mut stream)) = next else {
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

/// Joins the ranks whose rank 0 listens at one of the addresses of `place`, as `rank` or as any that is free. From then on ranks
/// wait for each other for `deadline` at most, as this does.
///
/// # Errors
/// If rank 0 cannot be reached, does not know `secret` or refuses the rank. [`CollectiveError::NotFormed`] if the others do not
/// join in time, or rank 0 gives up while they connect to each other.
pub fn join(
    place: impl ToSocketAddrs,
    secret: &[u8],
    rank: Option<usize>,
    deadline: Duration,
) -> Result<Tcp, CollectiveError> {
    let addrs: Vec<_> = place.to_socket_addrs().map_err(|error| unresolved(&error.to_string()))?.collect();
    join_with(&addrs, &Secret::new(secret), rank, deadline).map(Mesh::new)
}

fn join_with(
    addrs: &[SocketAddr],
    secret: &Secret,
    rank: Option<usize>,
    deadline: Duration,
) -> Result<Sockets, CollectiveError> {
    let until = Instant::now() + deadline;
    let (mut first, addr) = reach(addrs, until, || Ok(()))?;
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
        let reason = format!("rank 0 has not said that all are there: {error}; look into its log");
        match error.kind() {
            io::ErrorKind::InvalidData => joining(addr, reason),
            _ => CollectiveError::NotFormed { address: addr.to_string(), reason },
        }
    })?;
    match welcome {
        Welcome::Joined { rank, addresses } => connect(rank, &addresses, first, &listener, secret, deadline),
        Welcome::Refused(reason) => Err(joining(addr, reason)),
    }
}

/// Connects `rank` to the others of the group that rank 0, at the other end of `first`, forms of the ranks at `addresses`.
fn connect(
    rank: usize,
    addresses: &[SocketAddr],
    first: TcpStream,
    listener: &TcpListener,
    secret: &Secret,
    deadline: Duration,
) -> Result<Sockets, CollectiveError> {
    let until = Instant::now() + deadline;
    let still_forms = || {
        if is_open(&first) {
            return Ok(());
        }
        let address = first.peer_addr().map_or_else(|_| "rank 0".to_owned(), |address| address.to_string());
        let reason = "rank 0 has given up this group of ranks; its log says why".to_owned();
        Err(CollectiveError::NotFormed { address, reason })
    };
    let mut streams: Vec<Option<TcpStream>> = addresses.iter().map(|_| None).collect();
    for (peer, address) in addresses.iter().enumerate().take(rank).skip(1) {
        let (mut stream, _) = reach(&[*address], until, still_forms)?;
        let hello = Hello { rank: Some(rank), port: 0 };
        hello.send(&mut stream, secret).map_err(|source| broken(rank, peer, source))?;
        streams[peer] = Some(stream);
    }
    let mut handshakes = Handshakes::new(listener, secret);
    while let Some(waits_for) = (rank + 1..addresses.len()).find(|peer| streams[*peer].is_none()) {
        let now = Instant::now();
        let Some((hello, stream)) = handshakes.next(until.min(now + LOOK))? else {
            still_forms()?;
            if now >= until {
                return Err(late(rank, waits_for, deadline));
            }
            continue;
        };
        if let Some(address) = hello.rank.filter(|peer| *peer > rank).and_then(|peer| streams.get_mut(peer)) {
            *address = Some(stream);
        }
    }
    streams[0] = Some(first);
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
        let timeout = Timespec::try_from(left.min(MAX_WAIT) + Duration::from_millis(1)).ok();
        let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], timeout.as_ref());
    }
}

/// Whether the other end has not closed the connection; what it has sent may still be unread.
fn is_open(stream: &TcpStream) -> bool {
    let mut polled = [PollFd::new(stream, CLOSED.union(PollFlags::IN))];
    // Does not wait. An error of the call says nothing about the connection.
    let _ = poll(&mut polled, Some(&Timespec::default()));
    !polled[0].revents().intersects(CLOSED)
}

/// A connection to one of `addrs`, which are tried in turns until a process listens there, or `goes_on` fails; and its address.
fn reach(
    addrs: &[SocketAddr],
    until: Instant,
    goes_on: impl Fn() -> Result<(), CollectiveError>,
) -> Result<(TcpStream, SocketAddr), CollectiveError> {
    for addr in addrs.iter().copied().cycle() {
        goes_on()?;
        let left = until.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(&addr, left.clamp(AGAIN, PATIENCE)) {
            Ok(stream) => return Ok((stream, addr)),
            Err(error) if left.is_zero() => {
                let reason = format!("cannot be reached: {error}; does the rank that listens there run?");
                return Err(joining(addr, reason));
            }
            Err(_) => thread::sleep(AGAIN.min(left)),
        }
    }
    Err(unresolved("it has none"))
}

/// The connections, made ready for frames.
fn ready(
    rank: usize,
    streams: Vec<Option<TcpStream>>,
    deadline: Duration,
    secret: Secret,
) -> Result<Sockets, CollectiveError> {
    for (peer, stream) in
        streams.iter().enumerate().filter_map(|(peer, stream)| Some((peer, stream.as_ref()?)))
    {
        let set = || -> io::Result<()> {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)
        };
        set().map_err(|source| broken(rank, peer, source))?;
    }
    Ok(Sockets::new(rank, streams, deadline, secret))
}

/// A host without an address.
fn unresolved(evidence: &str) -> CollectiveError {
    let reason = format!("{evidence}; look whether the name of the host is right and can be resolved here");
    CollectiveError::Join { address: "an address of their host".to_owned(), reason }
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::HostCollective;

    /// Against hangs only.
    const LONG: Duration = Duration::from_secs(60);
    const SECRET: &[u8] = b"of the tests";

    fn listener() -> (Listener, SocketAddr) {
        let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listener = Listener::bind(anywhere, SECRET).expect("a port is free");
        let addr = listener.local_addr().expect("it listens");
        (listener, addr)
    }

    /// The connection of a process that joins as `rank`, and then does nothing.
    fn waiting(addr: SocketAddr, rank: usize) -> TcpStream {
        let mut stream = TcpStream::connect(addr).expect("it listens");
        let hello = Hello { rank: Some(rank), port: 1 };
        hello.send(&mut stream, &Secret::new(SECRET)).expect("it knows the secret");
        stream
    }

    #[test]
    fn a_rank_that_is_killed_while_it_waits_can_join_again() {
        let (listener, addr) = listener();
        thread::scope(|scope| {
            let leader = scope.spawn(|| listener.accept(3, LONG).expect("all join"));
            drop(waiting(addr, 1));
            let others = [1, 2].map(|rank| scope.spawn(move || join(addr, SECRET, Some(rank), LONG)));
            let leader = leader.join().expect("no panic");
            let others = others.map(|other| other.join().expect("no panic").expect("joins"));
            drop((leader, others));
        });
    }

    #[test]
    fn all_addresses_of_a_host_are_tried() {
        let (listener, addr) = listener();
        let closed = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        thread::scope(|scope| {
            let leader = scope.spawn(|| listener.accept(2, LONG).expect("it joins"));
            join(&[closed, addr][..], SECRET, None, LONG).expect("the second address is right");
            leader.join().expect("no panic");
        });
        let error = join(&[][..], SECRET, None, LONG).expect_err("there is no address");
        assert!(error.to_string().contains("it has none"), "{error}");
    }

    #[test]
    fn a_rank_that_dies_while_the_group_forms_ends_the_wait_of_the_others() {
        let (listener, addr) = listener();
        thread::scope(|scope| {
            let leader = scope.spawn(|| listener.accept(3, LONG).expect("all join"));
            // It is to connect to rank 1.
            let mut dying = waiting(addr, 2);
            let other = scope.spawn(move || join(addr, SECRET, Some(1), LONG));
            let welcome = Welcome::receive(&mut dying).expect("the group forms");
            assert!(matches!(welcome, Welcome::Joined { rank: 2, .. }), "{welcome:?}");
            let leader = leader.join().expect("no panic");
            // Rank 1 reads it only once it has all connections.
            leader.broadcast_bytes(0, vec![1]).expect("both receive it");
            drop((dying, leader));
            let error = other.join().expect("no panic").expect_err("rank 2 is gone");
            assert!(matches!(error, CollectiveError::NotFormed { .. }), "{error}");
        });
    }
}
