//! Layers that are gathered from their owners one ahead of the pass.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use candle_core::bail;
use model::{LayerSource, Layout, Unit};

use super::{BufferPool, Request, RequestSender, Requests, number};

/// Layers of a model of which every rank has its shards.
pub(crate) struct ParameterGathering<'a> {
    requests: RequestSender,
    gathered: Receiver<Vec<f32>>,
    layout: &'a Layout,
    /// Where the memory of layers goes; `None` to free it.
    buffers: Option<&'a BufferPool>,
    /// The last layer that the pass has requested.
    current: Option<GatheredLayer>,
    /// The layer that is prefetched.
    ahead: Option<usize>,
    /// Whether this is a backward pass.
    pub(crate) backward: bool,
}

/// The values of a layer.
struct GatheredLayer {
    index: usize,
    values: Arc<Vec<f32>>,
}

impl<'a> ParameterGathering<'a> {
    pub(super) fn new(requests: Requests, layout: &'a Layout, buffers: Option<&'a BufferPool>) -> Self {
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
        match self.requests.receive(&self.gathered) {
            Some(values) => Ok(values),
            None => bail!("weights do not come any more"),
        }
    }

    /// The values of a layer that is not the current one, which becomes the current one.
    fn next(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        let before = self.current.take().and_then(|layer| Arc::try_unwrap(layer.values).ok());
        before.into_iter().zip(self.buffers).for_each(|(values, buffers)| buffers.put(values));
        match self.ahead.take() {
            Some(ahead) if ahead == index => {}
            Some(ahead) => bail!("layer {ahead} was gathered, but the pass needs layer {index}"),
            None => self.request(number(self.layout, Unit::Layer(index)))?,
        }
        let values = Arc::new(self.receive()?);
        self.current = Some(GatheredLayer { index, values: Arc::clone(&values) });
        Ok(values)
    }
}

impl LayerSource for ParameterGathering<'_> {
    fn begin(&mut self) {
        self.backward = false;
    }

    fn reverse(&mut self) {
        self.backward = true;
    }

    fn layer(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        let values = match self.current.as_ref().filter(|layer| layer.index == index) {
            Some(layer) => Arc::clone(&layer.values),
            None => self.next(index)?,
        };
        let layers = self.layout.layers().len();
        let next = if self.backward { index.checked_sub(1) } else { Some(index + 1) };
        if let Some(next) = next.filter(|next| *next < layers && self.ahead.is_none()) {
            self.request(number(self.layout, Unit::Layer(next)))?;
            self.ahead = Some(next);
        }
        Ok(values)
    }
}
