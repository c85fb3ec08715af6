//! A rank whose calls are recorded.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use collective::{Collective, CollectiveError, HostCollective, Position};

/// A call of a rank: its name, the number of values, and the thread.
pub(crate) type CollectiveArguments = (&'static str, usize, String);

/// Records the calls of a rank, and those of the ranks that it splits off.
#[derive(Debug)]
pub(crate) struct Recording {
    inner: Box<dyn HostCollective>,
    log: Arc<Mutex<Vec<CollectiveArguments>>>,
}

impl Recording {
    pub(crate) fn new(
        inner: impl HostCollective + 'static,
        log: &Arc<Mutex<Vec<CollectiveArguments>>>,
    ) -> Self {
        Self { inner: Box::new(inner), log: Arc::clone(log) }
    }

    fn note(&self, call: &'static str, len: usize) {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        self.log.lock().unwrap().push((call, len, thread));
    }
}

impl Collective for Recording {
    fn position(&self) -> Position {
        self.inner.position()
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<(), CollectiveError> {
        self.inner.all_reduce(values)
    }

    fn reduce_scatter(
        &self,
        values: &[f32],
        shards: &[Range<usize>],
        own: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.note("reduce", values.len());
        self.inner.reduce_scatter(values, shards, own)
    }

    fn all_gather(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        all: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.note("gather", all.len());
        self.inner.all_gather(own, shards, all)
    }

    fn broadcast(&self, root: usize, values: &mut [f32]) -> Result<(), CollectiveError> {
        self.note("broadcast", values.len());
        self.inner.broadcast(root, values)
    }

    fn all_to_all(
        &self,
        values: &[f32],
        sends: &[Range<usize>],
        received: &mut [f32],
        receives: &[Range<usize>],
    ) -> Result<(), CollectiveError> {
        self.inner.all_to_all(values, sends, received, receives)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.inner.barrier()
    }
}

impl HostCollective for Recording {
    fn gather(
        &self,
        root: usize,
        own: &[f32],
        shards: &[Range<usize>],
        all: Option<&mut [f32]>,
    ) -> Result<(), CollectiveError> {
        self.inner.gather(root, own, shards, all)
    }

    fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        self.inner.broadcast_bytes(root, bytes)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.inner.all_gather_bytes(bytes)
    }

    fn split(&self, color: usize) -> Result<Box<dyn HostCollective>, CollectiveError> {
        Ok(Box::new(Self { inner: self.inner.split(color)?, log: Arc::clone(&self.log) }))
    }
}
