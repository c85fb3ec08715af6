//! Layers that are gathered from their owners one ahead of the pass.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use candle_core::bail;
use model::{LayerSource, Layout, Unit};

use super::{BufferPool, Request, Requests, number};

/// Layers of a model of which every rank has its shards.
pub(crate) struct ParameterGathering<'a> {
    requests: SyncSender<Request>,
    gathered: Receiver<Vec<f32>>,
    layout: &'a Layout,
    buffers: &'a BufferPool,
    /// The last layer that the pass has asked for.
    current: Option<(usize, Arc<Vec<f32>>)>,
    /// The layer that is prefetched.
    ahead: Option<usize>,
    /// Whether this is a backward pass.
    pub(crate) backward: bool,
}

impl<'a> ParameterGathering<'a> {
    pub(super) fn new(requests: Requests, layout: &'a Layout, buffers: &'a BufferPool) -> Self {
        let Requests { requests, gathered } = requests;
        Self { requests, gathered, layout, buffers, current: None, ahead: None, backward: false }
    }
}

impl ParameterGathering<'_> {
    /// Gathers embedding and tail.
    ///
    /// # Errors
    /// If the communication failed.
    pub(crate) fn ends(&mut self) -> candle_core::Result<[Arc<Vec<f32>>; 2]> {
        let units = [Unit::Embedding, Unit::Tail].map(|unit| number(self.layout, unit));
        units.iter().try_for_each(|unit| self.request(*unit))?;
        Ok([Arc::new(self.receive()?), Arc::new(self.receive()?)])
    }

    fn request(&self, unit: usize) -> candle_core::Result<()> {
        match self.requests.send(Request::Gather { unit }) {
            Ok(()) => Ok(()),
            Err(_) => bail!("weights cannot be gathered any more"),
        }
    }

    fn receive(&self) -> candle_core::Result<Vec<f32>> {
        // The collective that the communication thread waits in has the deadline.
        match self.gathered.recv() {
            Ok(values) => Ok(values),
            Err(_) => bail!("weights do not come any more"),
        }
    }

    fn release(&mut self) {
        let values = self.current.take().and_then(|(_, values)| Arc::try_unwrap(values).ok());
        values.into_iter().for_each(|values| self.buffers.put(values));
    }
}

impl LayerSource for ParameterGathering<'_> {
    fn layer(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        if self.current.as_ref().is_none_or(|(current, _)| *current != index) {
            self.release();
            if let Some(other) = self.ahead.filter(|ahead| *ahead != index) {
                unreachable!("layer {other} was gathered, layer {index} is asked for");
            }
            if self.ahead.take().is_none() {
                self.request(number(self.layout, Unit::Layer(index)))?;
            }
            self.current = Some((index, Arc::new(self.receive()?)));
        }
        let layers = self.layout.layers().len();
        let next = if self.backward { index.checked_sub(1) } else { Some(index + 1) };
        if let Some(next) = next.filter(|next| *next < layers && self.ahead.is_none()) {
            self.request(number(self.layout, Unit::Layer(next)))?;
            self.ahead = Some(next);
        }
        match &self.current {
            Some((_, values)) => Ok(Arc::clone(values)),
            None => unreachable!("it was put there above"),
        }
    }
}
