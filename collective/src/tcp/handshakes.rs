//! Handshakes with the processes that connect to a listener, each on a thread of its own.
//!
//! Invariant: a connection that says nothing delays no other; there are at most [`MAX_HANDSHAKES`] at a time.

use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::accept;
use super::handshake::{Hello, Secret};
use super::meeting::MAX_HANDSHAKES;
use crate::CollectiveError;

/// Between two looks at the handshakes in progress.
const LOOK: Duration = Duration::from_millis(5);

/// The connections to a listener whose processes know the secret.
pub(super) struct Handshakes<'a> {
    listener: &'a TcpListener,
    secret: &'a Secret,
    /// Threads of handshakes send their results: `None` for a process that does not know the secret.
    sender: SyncSender<Option<(Hello, TcpStream)>>,
    results: Receiver<Option<(Hello, TcpStream)>>,
    /// Handshakes in progress.
    pending: usize,
}

impl<'a> Handshakes<'a> {
    pub(super) fn new(listener: &'a TcpListener, secret: &'a Secret) -> Self {
        let (sender, results) = sync_channel(MAX_HANDSHAKES);
        Self { listener, secret, sender, results, pending: 0 }
    }

    /// The next connection whose process knows the secret; `None` at the deadline.
    pub(super) fn next(&mut self, until: Instant) -> Result<Option<(Hello, TcpStream)>, CollectiveError> {
        loop {
            while let Ok(result) = self.results.try_recv() {
                self.pending -= 1;
                if result.is_some() {
                    return Ok(result);
                }
            }
            let now = Instant::now();
            if now >= until {
                return Ok(None);
            }
            if self.pending == MAX_HANDSHAKES {
                thread::sleep(LOOK);
                continue;
            }
            let look = if self.pending == 0 { until } else { until.min(now + LOOK) };
            if let Some(stream) = accept(self.listener, look)? {
                self.begin(stream);
            }
        }
    }

    /// Starts the handshake of a connection. Without a thread for it the connection is closed.
    fn begin(&mut self, mut stream: TcpStream) {
        let (sender, secret) = (self.sender.clone(), self.secret.clone());
        let handshake = move || {
            let hello = Hello::receive(&mut stream, &secret);
            // When all ranks are there, further connections are closed.
            let _ = sender.send(hello.ok().map(|hello| (hello, stream)));
        };
        let thread = thread::Builder::new().name("rank-handshake".to_owned()).spawn(handshake);
        self.pending += usize::from(thread.is_ok());
    }
}
