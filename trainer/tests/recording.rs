//! A rank whose calls are recorded.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use collective::{Collective, CollectiveError, HostCollective, Position};

/// A call of a rank: its name, the number of values, and the thread.
pub(crate) type CollectiveArguments = (&'static str, usize, String);

/// Records the calls of a rank, and those of the ranks that it splits off.
#[derive(Debug)]
pub(crate) struct Recording {
    inner: Box<dyn HostCollective>,
    log: Arc<Mutex<Vec<CollectiveArguments>>>,
    /// Calls of all kinds so far, and after how many every one fails.
    calls: Arc<AtomicUsize>,
    most: usize,
    /// Bytes of the messages of all ranks that it has gathered so far.
    gathered: Arc<AtomicUsize>,
}

impl Recording {
    pub(crate) fn new(
        inner: impl HostCollective + 'static,
        log: &Arc<Mutex<Vec<CollectiveArguments>>>,
    ) -> Self {
        let (inner, log) = (Box::new(inner), Arc::clone(log));
        Self { inner, log, calls: Arc::default(), most: usize::MAX, gathered: Arc::default() }
    }

    /// One that is lost after `most` calls.
    pub(crate) fn lost_after(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The number of calls so far, of all kinds.
    pub(crate) fn calls(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.calls)
    }

    /// The number of bytes of the messages of all ranks that it has gathered so far.
    pub(crate) fn gathered(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.gathered)
    }

    fn note(&self, operation: &'static str, len: usize) -> Result<(), CollectiveError> {
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        self.log.lock().unwrap().push((operation, len, thread));
        self.count(operation)
    }

    fn count(&self, operation: &'static str) -> Result<(), CollectiveError> {
        let rank = self.inner.rank();
        let is_lost = self.calls.fetch_add(1, Ordering::Relaxed) >= self.most;
        if is_lost { Err(CollectiveError::Gone { rank, peer: rank, operation }) } else { Ok(()) }
    }
}

impl Collective for Recording {
    fn position(&self) -> Position {
        self.inner.position()
    }

    fn all_reduce(&self, values: &mut [f32]) -> Result<(), CollectiveError> {
        self.count("all-reduce")?;
        self.inner.all_reduce(values)
    }

    fn reduce_scatter(
        &self,
        values: &[f32],
        shards: &[Range<usize>],
        own: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.note("reduce", values.len())?;
        self.inner.reduce_scatter(values, shards, own)
    }

    fn all_gather(
        &self,
        own: &[f32],
        shards: &[Range<usize>],
        all: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.note("gather", all.len())?;
        self.inner.all_gather(own, shards, all)
    }

    fn broadcast(&self, root: usize, values: &mut [f32]) -> Result<(), CollectiveError> {
        self.note("broadcast", values.len())?;
        self.inner.broadcast(root, values)
    }

    fn all_to_all(
        &self,
        values: &[f32],
        sends: &[Range<usize>],
        received: &mut [f32],
        receives: &[Range<usize>],
    ) -> Result<(), CollectiveError> {
        self.count("all-to-all")?;
        self.inner.all_to_all(values, sends, received, receives)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.count("barrier")?;
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
        self.count("gather-to-one")?;
        self.inner.gather(root, own, shards, all)
    }

    fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        self.count("broadcast-bytes")?;
        self.inner.broadcast_bytes(root, bytes)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.count("all-gather-bytes")?;
        let all = self.inner.all_gather_bytes(bytes)?;
        self.gathered.fetch_add(all.iter().map(Vec::len).sum(), Ordering::Relaxed);
        Ok(all)
    }

    fn gather_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, CollectiveError> {
        self.count("gather-bytes-to-one")?;
        let all = self.inner.gather_bytes(root, bytes)?;
        self.gathered.fetch_add(all.iter().flatten().map(Vec::len).sum(), Ordering::Relaxed);
        Ok(all)
    }

    fn split(&self, color: usize) -> Result<Box<dyn HostCollective>, CollectiveError> {
        let (log, calls) = (Arc::clone(&self.log), Arc::clone(&self.calls));
        let (inner, gathered) = (self.inner.split(color)?, Arc::clone(&self.gathered));
        Ok(Box::new(Self { inner, log, calls, most: self.most, gathered }))
    }
}
