//! Frames over one connection to every other rank.
//!
//! Invariant: a call reads exactly the frames that it expects and leaves those of later calls in the socket. All
//! connections are served from one loop, in both directions at once, so that ranks that send each other more than the
//! sockets buffer do not wait for each other. A rank that has waited for half of its deadline sends the others the rank that it
//! waits for, so that they name the rank that hangs and not one that waits for it too.

use std::borrow::Cow;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::handshake::Secret;
use super::{Listener, MAX_CALL, MAX_WAIT, join_with};
use crate::CollectiveError;
use crate::call::CollectiveCall;
use crate::mesh::{FrameTransport, GIVEN_UP, HEADER, MeshFrameHeader, Receive, Stamp, WAITS};

/// Time in which a rank that gives up tries to send the others the reason.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Bytes that a rank that gives up discards at once.
const WASTE: usize = 16 << 10;
/// Longest error of another rank that is read, bytes.
const MAX_REASON: u64 = 4096;

/// The connections of one rank.
#[derive(Debug)]
pub struct Sockets {
    rank: usize,
    /// Connections to every rank but this one; not blocking.
    peers: Vec<Option<TcpStream>>,
    deadline: Duration,
    /// The secret of the ranks, for the connections of a split.
    secret: Secret,
}

/// A frame that is being sent to a peer.
struct Sending<'a> {
    header: [u8; HEADER],
    bytes: Cow<'a, [u8]>,
    sent: usize,
}

/// A frame that is being received from a peer.
struct Receiving {
    header: [u8; HEADER],
    /// Bytes received so far, header included.
    got: usize,
    frame: Option<MeshFrameHeader>,
    /// The error of the peer, if it sends one.
    reason: Vec<u8>,
    /// The rank that the peer waits for, if it has sent that.
    waits_for: Option<usize>,
}

/// One peer in one exchange.
struct Link<'a, 'b> {
    peer: usize,
    stream: &'a TcpStream,
    sending: Option<Sending<'a>>,
    receiving: Option<(Receiving, &'a mut Receive<'b>)>,
    /// Whether the peer no longer accepts bytes.
    closed: bool,
}

/// State of the connection to one peer while this rank gives up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Parting {
    /// The error is not sent yet.
    Open,
    /// The error is sent.
    Sent,
    /// The peer has closed its end.
    Closed,
}

/// Whether a poll of a socket has moved bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    Nothing,
    Some,
}

impl Sockets {
    pub(super) fn new(
        rank: usize,
        peers: Vec<Option<TcpStream>>,
        deadline: Duration,
        secret: Secret,
    ) -> Self {
        Self { rank, peers, deadline, secret }
    }

    /// The address of an end of the connection to `peer`.
    fn address(
        &self,
        peer: usize,
        end: impl FnOnce(&TcpStream) -> std::io::Result<SocketAddr>,
    ) -> Result<IpAddr, CollectiveError> {
        let closed = || std::io::Error::from(ErrorKind::NotConnected);
        let stream = self.peers.get(peer).and_then(Option::as_ref).ok_or_else(closed);
        let address = stream.and_then(end).map_err(|source| CollectiveError::Connection {
            rank: self.rank,
            peer,
            operation: CollectiveCall::SPLIT,
            source,
        })?;
        Ok(address.ip())
    }

    /// Sends and receives on `links` until all are done.
    fn serve(
        &self,
        stamp: &Stamp,
        links: &mut [Link<'_, '_>],
        mut patient: bool,
    ) -> Result<(), CollectiveError> {
        let (mut moved_at, mut notified) = (Instant::now(), false);
        loop {
            for link in &mut *links {
                if link.advance(self.rank, stamp)? == Moved::Some {
                    (moved_at, patient, notified) = (Instant::now(), false, false);
                }
            }
            if links.iter().all(Link::is_done) {
                return Ok(());
            }
            let waited = moved_at.elapsed();
            let left = self.deadline.saturating_sub(waited);
            if left.is_zero() && !patient {
                return Err(CollectiveError::Deadline {
                    rank: self.rank,
                    waits_for: self.waits_for(links),
                    operation: stamp.operation,
                    seconds: self.deadline.as_secs_f64(),
                });
            }
            let until_notice = (self.deadline / 2).saturating_sub(waited);
            if until_notice.is_zero() && !patient && !notified {
                notified = true;
                let header = MeshFrameHeader { number: WAITS, digest: self.waits_for(links) as u64, len: 0 }
                    .to_bytes();
                for link in links.iter_mut().filter(|link| link.sending.is_none()) {
                    link.sending = Some(Sending { header, bytes: Cow::Borrowed(&[]), sent: 0 });
                    link.send();
                }
            }
            let pause = if notified { left } else { until_notice };
            let waiting = links.iter().filter(|link| !link.is_done());
            let waiting = waiting.map(|link| link.waits(link.receiving.is_some())).collect();
            wait(waiting, (!patient).then_some(pause));
        }
    }

    /// The rank that `links` wait for: one that has not sent that it waits too, or else the one that it waits for.
    fn waits_for(&self, links: &[Link<'_, '_>]) -> usize {
        let named = |link: &Link<'_, '_>| Some(link.receiving.as_ref()?.0.waits_for);
        let silent = links.iter().find(|link| named(link) == Some(None)).map(|link| link.peer);
        let named = || links.iter().find_map(|link| named(link)?);
        let takes_nothing = || links.iter().find(|link| !link.is_done()).map(|link| link.peer);
        silent.or_else(named).or_else(takes_nothing).unwrap_or(self.rank)
    }

    /// Completes the frames that are partly sent, sends `error` after them, and discards what is received until the others
    /// close their ends: closing a connection with unread bytes would discard what was sent over it last. This is best
    /// effort: a peer that does not receive the error notices that this rank is gone.
    fn give_up(links: &mut [Link<'_, '_>], error: &CollectiveError) {
        let reason = error.to_string();
        let header = MeshFrameHeader { number: GIVEN_UP, digest: 0, len: reason.len() as u64 }.to_bytes();
        let until = Instant::now() + LAST_WORDS;
        let mut partings = vec![Parting::Open; links.len()];
        for link in &mut *links {
            link.receiving = None;
            // No byte of it was sent, so none has to be.
            if link.sending.as_ref().is_some_and(|sending| sending.sent == 0) {
                link.sending = None;
            }
        }
        loop {
            for (link, parting) in links.iter_mut().zip(&mut partings) {
                link.send();
                if link.sending.is_none() && *parting == Parting::Open {
                    let bytes = Cow::Owned(reason.clone().into_bytes());
                    link.sending = Some(Sending { header, bytes, sent: 0 });
                    *parting = Parting::Sent;
                    link.send();
                }
                if link.sending.is_none() && *parting == Parting::Sent {
                    // If it cannot be shut down, the peer is gone.
                    let _ = link.stream.shutdown(Shutdown::Write);
                }
                if link.closed || link.hangs_up() {
                    *parting = Parting::Closed;
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            let open = links.iter().zip(&partings).filter(|(_, parting)| **parting != Parting::Closed);
            let open: Vec<_> = open.map(|(link, _)| link.waits(true)).collect();
            if left.is_zero() || open.is_empty() {
                return;
            }
            wait(open, Some(left));
        }
    }
}

impl FrameTransport for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn exchange(
        &mut self,
        stamp: &Stamp,
        sends: &[Option<&[u8]>],
        receives: &mut [Receive<'_>],
        patient: bool,
    ) -> Result<(), CollectiveError> {
        let peers = self.peers.iter().zip(sends).zip(receives).enumerate();
        let mut links: Vec<Link<'_, '_>> = peers
            .filter_map(|(peer, ((stream, bytes), receive))| {
                let sending = bytes.map(|bytes| {
                    let header = MeshFrameHeader::of(stamp, bytes.len()).to_bytes();
                    Sending { header, bytes: Cow::Borrowed(bytes), sent: 0 }
                });
                let expects = !matches!(receive, Receive::Nothing);
                let receiving = expects.then(|| (Receiving::default(), receive));
                Some(Link { peer, stream: stream.as_ref()?, sending, receiving, closed: false })
            })
            .collect();
        let done = self.serve(stamp, &mut links, patient);
        if let Err(error) = &done {
            Self::give_up(&mut links, error);
            drop(links);
            // Closes the connections, so that peers that wait notice.
            self.peers.fill_with(|| None);
        }
        done
    }

    type Entrance = Listener;

    fn open(&self, members: &[usize]) -> Result<(Listener, Vec<u8>), CollectiveError> {
        let others = members.iter().filter(|member| **member != self.rank);
        let ends = others.map(|peer| self.address(*peer, TcpStream::local_addr));
        let mut ends = ends.collect::<Result<Vec<_>, _>>()?;
        ends.dedup();
        // Over all interfaces where the others come over several.
        let own = match &ends[..] {
            [one] => *one,
            _ if ends.iter().any(IpAddr::is_ipv6) => Ipv6Addr::UNSPECIFIED.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        };
        let listener = Listener::new(SocketAddr::new(own, 0), self.secret.clone())?;
        let port = listener.local_addr().map_err(|source| CollectiveError::Connection {
            rank: self.rank,
            peer: self.rank,
            operation: CollectiveCall::SPLIT,
            source,
        })?;
        Ok((listener, port.port().to_le_bytes().to_vec()))
    }

    fn connect(
        &self,
        members: &[usize],
        entrance: Option<Listener>,
        first: &[u8],
    ) -> Result<Self, CollectiveError> {
        if let Some(listener) = entrance {
            return listener.accept_all(members.len(), self.deadline);
        }
        let rank = members.iter().position(|member| *member == self.rank);
        let (Some(rank), Some(leader)) = (rank.filter(|rank| *rank > 0), members.first()) else {
            return Ok(Self::new(0, vec![None], self.deadline, self.secret.clone()));
        };
        let Ok(port) = first.try_into().map(u16::from_le_bytes) else {
            let found = format!("{} bytes in place of a port", first.len());
            let operation = CollectiveCall::SPLIT;
            return Err(CollectiveError::OutOfStep { rank: self.rank, peer: *leader, operation, found });
        };
        let address = SocketAddr::new(self.address(*leader, TcpStream::peer_addr)?, port);
        join_with(&[address], &self.secret, Some(rank), self.deadline)
    }
}

impl Default for Receiving {
    fn default() -> Self {
        Self { header: [0; HEADER], got: 0, frame: None, reason: Vec::new(), waits_for: None }
    }
}

impl Link<'_, '_> {
    fn is_done(&self) -> bool {
        (self.closed || self.sending.is_none()) && self.receiving.is_none()
    }

    /// The events to poll for: writable if it has bytes to send, and readable if it `receives`.
    fn waits(&self, receives: bool) -> PollFd<'_> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, receives);
        flags.set(PollFlags::OUT, self.sending.is_some() && !self.closed);
        PollFd::new(self.stream, flags)
    }

    /// Sends and receives as much as it can without blocking.
    fn advance(&mut self, rank: usize, stamp: &Stamp) -> Result<Moved, CollectiveError> {
        let sent = self.send();
        let received = self.receive(rank, stamp)?;
        if self.closed && self.receiving.is_none() {
            // An error that the peer has sent says more than that it is gone.
            let (mut nothing, mut said) = (Receive::Nothing, Receiving::default());
            said.read(self.stream, rank, self.peer, stamp, &mut nothing)?;
            return Err(CollectiveError::Gone { rank, peer: self.peer, operation: stamp.operation });
        }
        Ok(if sent == Moved::Some { sent } else { received })
    }

    fn send(&mut self) -> Moved {
        let mut moved = Moved::Nothing;
        while let Some(sending) = self.sending.as_mut().filter(|_| !self.closed) {
            let header = &sending.header[sending.sent.min(HEADER)..];
            let bytes = &sending.bytes[sending.sent.saturating_sub(HEADER)..];
            let bytes = &bytes[..bytes.len().min(MAX_CALL)];
            match self.stream.write_vectored(&[IoSlice::new(header), IoSlice::new(bytes)]) {
                Ok(0) => self.closed = true,
                Ok(sent) => {
                    sending.sent += sent;
                    moved = Moved::Some;
                    if sending.sent == HEADER + sending.bytes.len() {
                        self.sending = None;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.closed = true,
            }
        }
        moved
    }

    /// Discards received bytes; whether the peer has closed its end.
    fn hangs_up(&self) -> bool {
        let mut stream = self.stream;
        match stream.read(&mut [0; WASTE]) {
            Ok(read) => read == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    fn receive(&mut self, rank: usize, stamp: &Stamp) -> Result<Moved, CollectiveError> {
        let Some((receiving, receive)) = &mut self.receiving else { return Ok(Moved::Nothing) };
        let before = receiving.got;
        let done = receiving.read(self.stream, rank, self.peer, stamp, receive)?;
        let moved = if receiving.got > before { Moved::Some } else { Moved::Nothing };
        if done {
            self.receiving = None;
        }
        Ok(moved)
    }
}

impl Receiving {
    /// Reads the bytes that are available; whether the frame is complete.
    fn read(
        &mut self,
        stream: &TcpStream,
        rank: usize,
        peer: usize,
        stamp: &Stamp,
        receive: &mut Receive<'_>,
    ) -> Result<bool, CollectiveError> {
        let operation = stamp.operation;
        loop {
            let bytes = match self.frame {
                None => &mut self.header[self.got..],
                Some(header) if header.number == GIVEN_UP => &mut self.reason[self.got - HEADER..],
                Some(_) => match receive {
                    Receive::Nothing => &mut [],
                    Receive::Exactly(bytes) => &mut bytes[self.got - HEADER..],
                    Receive::Any(bytes) => &mut bytes[self.got - HEADER..],
                },
            };
            if bytes.is_empty() {
                if self.frame.is_some_and(|header| header.number == GIVEN_UP) {
                    let reason = String::from_utf8_lossy(&self.reason).into_owned();
                    return Err(CollectiveError::GivenUp { rank, peer, operation, reason });
                }
                return Ok(true);
            }
            let most = bytes.len().min(MAX_CALL);
            match (&*stream).read(&mut bytes[..most]) {
                Ok(0) => return Err(CollectiveError::Gone { rank, peer, operation }),
                Ok(count) => self.got += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                    return Err(CollectiveError::Gone { rank, peer, operation });
                }
                Err(source) => return Err(CollectiveError::Connection { rank, peer, operation, source }),
            }
            if self.frame.is_none() && self.got == HEADER {
                self.begin(rank, peer, stamp, receive)?;
            }
        }
    }

    /// Checks the header that was received.
    fn begin(
        &mut self,
        rank: usize,
        peer: usize,
        stamp: &Stamp,
        receive: &mut Receive<'_>,
    ) -> Result<(), CollectiveError> {
        let Some(header) = MeshFrameHeader::from_bytes(&self.header) else {
            let found = "something that is no frame of rlrun".to_owned();
            return Err(CollectiveError::OutOfStep { rank, peer, operation: stamp.operation, found });
        };
        if header.number == WAITS {
            self.waits_for = usize::try_from(header.digest).ok();
            self.got = 0;
            return Ok(());
        }
        self.frame = Some(header);
        if header.number == GIVEN_UP {
            let len = header.len.min(MAX_REASON);
            self.reason.resize(usize::try_from(len).unwrap_or_default(), 0);
        } else {
            header.buffer(stamp, rank, peer, receive)?;
        }
        Ok(())
    }
}

/// Waits until one of `links` is ready, or `left` is over. Errors show in the next read or write.
fn wait(mut links: Vec<PollFd<'_>>, left: Option<Duration>) {
    // A millisecond longer, so that the deadline is over when the wait ends.
    let timeout =
        left.and_then(|left| Timespec::try_from(left.min(MAX_WAIT) + Duration::from_millis(1)).ok());
    let _ = poll(&mut links, timeout.as_ref());
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

    use rustix::net::sockopt;

    use super::*;

    /// Longer than the buffers of a socket.
    const MANY: usize = 8 << 20;

    /// Both ends of a connection; the second has a small receive buffer.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        sockopt::set_socket_recv_buffer_size(&listener, 64 << 10).expect("it can hold less");
        let first = TcpStream::connect(listener.local_addr().expect("it listens")).expect("it connects");
        first.set_nonblocking(true).expect("it can be made so");
        (first, listener.accept().expect("it connects").0)
    }

    #[test]
    fn a_slow_peer_that_still_sends_receives_the_error_of_a_rank_that_gives_up() {
        let ((near, far), (to_gone, gone)) = (connection(), connection());
        drop(gone);
        let stamp = Stamp { operation: "all_gather", number: 0, digest: 0 };
        let said = thread::scope(|scope| {
            scope.spawn(|| {
                let header = MeshFrameHeader::of(&stamp, MANY).to_bytes();
                // Ends early, with what is read of it.
                (&far).write_all(&header).and_then(|()| (&far).write_all(&vec![0; MANY]))
            });
            let peer = scope.spawn(|| {
                let (mut frame, mut last_words) = (vec![0; HEADER + MANY], Vec::new());
                let (first, rest) = frame.split_at_mut(MANY - (256 << 10));
                (&far).read_exact(first).expect("a frame that was begun is finished");
                // Time for the rank to put the rest into its socket, and to hang up if it does not wait.
                thread::sleep(LAST_WORDS / 20);
                (&far).read_exact(rest).expect("a frame that was begun is finished");
                (&far).read_to_end(&mut last_words).expect("it hangs up in good order");
                far.shutdown(Shutdown::Both).expect("it is there");
                last_words
            });
            let mut rank = Sockets::new(
                0,
                vec![None, Some(near), Some(to_gone)],
                Duration::from_secs(60),
                Secret::new(b""),
            );
            let (bytes, mut received) = (vec![0; MANY], vec![0; MANY]);
            let mut receives = [Receive::Nothing, Receive::Exactly(&mut received), Receive::Any(Vec::new())];
            let error = rank.exchange(&stamp, &[None, Some(&bytes), None], &mut receives, false);
            assert!(matches!(error, Err(CollectiveError::Gone { peer: 2, .. })), "{error:?}");
            peer.join().expect("the peer hears all")
        });
        let said = String::from_utf8_lossy(&said[HEADER..]);
        assert!(said.contains("rank 2 is gone"), "{said}");
    }
}
