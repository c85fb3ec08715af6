//! Ranks that wait at the address of rank 0 until it makes a group of them, again and again while a run goes on.
//!
//! Invariant: a connection waits here only after its process has shown that it knows the secret, and is forgotten when the
//! process closes it. Threads take connections, so a process that joins waits for no step of rank 0.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::handshake::{Hello, Secret};
use super::{Listener, MAX_WORLD, Tcp, accept, form, is_open, joining, late};
use crate::CollectiveError;
use crate::mesh::Mesh;

/// Between two looks at whether the meeting is over.
const POLL: Duration = Duration::from_millis(100);
/// Handshakes at a time. More connections wait in the backlog of the listener.
pub(super) const MAX_HANDSHAKES: usize = 32;

/// Where processes join rank 0 at any time.
#[derive(Debug)]
pub struct Meeting {
    address: SocketAddr,
    secret: Secret,
    shared: Arc<WaitingRanks>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct WaitingRanks {
    connections: Mutex<Vec<(Hello, TcpStream)>>,
    /// Notified when there is another connection.
    came: Condvar,
    is_over: AtomicBool,
    /// Handshakes in progress.
    handshakes: AtomicUsize,
}

impl Meeting {
    /// Waits at `addr` for processes that know `secret`, until it is dropped.
    ///
    /// # Errors
    /// If the address cannot be bound, or no thread can be started.
    pub fn open(addr: SocketAddr, secret: &[u8]) -> Result<Self, CollectiveError> {
        let Listener { listener, secret } = Listener::bind(addr, secret)?;
        let address = listener.local_addr().map_err(|error| joining(addr, error.to_string()))?;
        let shared = Arc::new(WaitingRanks::default());
        let (taken, known) = (Arc::clone(&shared), secret.clone());
        let thread = std::thread::Builder::new()
            .name("rank-meeting".to_owned())
            .spawn(move || taken.take_all(&listener, &known))
            .map_err(|error| joining(address, format!("no thread can wait for ranks: {error}")))?;
        Ok(Self { address, secret, shared, thread: Some(thread) })
    }

    /// The address that processes join at.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Number of processes that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.open_connections().len()
    }

    /// Rank 0 of the first of `worlds` (numbers of ranks, the preferred one first) that enough processes wait for. Waits until
    /// `patience` has passed for the first one, and takes the first of the others that is possible then. Every process gets any rank.
    /// Those that are too many wait on. Ranks wait for each other for `deadline` at most from then on.
    ///
    /// # Errors
    /// If too few processes wait at the end of `patience` for any of `worlds`, or one of them fails while it connects to the
    /// others.
    pub fn group(
        &self,
        worlds: &[usize],
        patience: Duration,
        deadline: Duration,
    ) -> Result<Tcp, CollectiveError> {
        let until = Instant::now() + patience;
        let mut connections = self.shared.open_connections();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let possible = |world: &&usize| **world <= connections.len() + 1;
            let world = match worlds.first() {
                Some(first) if possible(&first) => Some(*first),
                _ if left.is_zero() => worlds.iter().find(possible).copied(),
                _ => None,
            };
            if let Some(world) = world.map(|world| world.max(1)) {
                let mut joined: Vec<_> = connections.drain(..world - 1).collect();
                drop(connections);
                joined.iter_mut().for_each(|(hello, _)| hello.rank = None);
                return form(joined, deadline, self.secret.clone()).map(Mesh::new);
            }
            if left.is_zero() {
                return Err(late(0, connections.len() + 1, patience));
            }
            let wait = self.shared.came.wait_timeout(connections, left.min(POLL));
            drop(wait.unwrap_or_else(PoisonError::into_inner));
            connections = self.shared.open_connections();
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        // The thread ends at its next look; an error of it has ended it already.
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl WaitingRanks {
    /// Takes connections, each on a thread of its own, so that one that says nothing delays no other.
    fn take_all(self: &Arc<Self>, listener: &TcpListener, secret: &Secret) {
        while !self.is_over.load(Ordering::Relaxed) {
            let is_full = self.handshakes.load(Ordering::Relaxed) >= MAX_HANDSHAKES;
            let next = if is_full { Ok(None) } else { accept(listener, Instant::now() + POLL) };
            // A connection that cannot be accepted is tried again by its process.
            let Ok(Some(stream)) = next else {
                std::thread::sleep(POLL / 10);
                continue;
            };
            self.handshakes.fetch_add(1, Ordering::Relaxed);
            let (shared, known) = (Arc::clone(self), secret.clone());
            let take = move || {
                shared.take(stream, &known);
                shared.handshakes.fetch_sub(1, Ordering::Relaxed);
            };
            if std::thread::Builder::new().name("rank-handshake".to_owned()).spawn(take).is_err() {
                self.handshakes.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Lets a process wait, once it has shown that it knows the secret.
    fn take(&self, mut stream: TcpStream, secret: &Secret) {
        let Ok(hello) = Hello::receive(&mut stream, secret) else { return };
        let mut connections = self.open_connections();
        if connections.len() < MAX_WORLD {
            connections.push((hello, stream));
        }
        drop(connections);
        self.came.notify_all();
    }

    /// The connections whose processes have not closed them.
    fn open_connections(&self) -> MutexGuard<'_, Vec<(Hello, TcpStream)>> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|(_, stream)| is_open(stream));
        connections
    }
}
