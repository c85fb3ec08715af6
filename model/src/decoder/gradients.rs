//! Where the backward puts gradients, and where layers come from that are not all in memory.
//!
//! Invariant: a backward asks for units in the order tail, last layer to first layer, embedding, and says once of each
//! that it is done; nothing is added to a unit after that. A sink can hand on what is done while the next layer is being
//! reversed. The embedding can be asked for earlier, where it is the head as well.

use std::sync::Arc;

use candle_core::Result;

use crate::{Layout, ThreadPool, Unit};

/// Gradients that one thread sets to zero, or adds, at a time.
const BLOCK: usize = 1 << 18;

/// Where the gradients of a backward go.
pub trait GradientSink {
    /// The gradients of a unit, to add to: as many values as the unit has, laid out as they are in it.
    fn unit(&mut self, unit: Unit) -> &mut [f32];

    /// Says that this backward adds nothing more to a unit.
    fn done(&mut self, unit: Unit);
}

/// Where the weights of layers come from that are not all in memory.
pub trait LayerSource {
    /// The values of layer `index`, laid out as in [`Layout`]. A forward asks for one layer after the other, a backward
    /// in the opposite order; nobody keeps them after the next layer is asked for.
    ///
    /// # Errors
    /// If they cannot be had.
    fn layer(&mut self, index: usize) -> Result<Arc<Vec<f32>>>;
}

/// Gradients of all weights as one flat buffer, laid out as the parameters are.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    layout: Arc<Layout>,
    values: Vec<f32>,
}

impl Gradients {
    /// No gradient yet.
    #[must_use]
    pub fn zeros(layout: &Arc<Layout>) -> Self {
        Self { layout: Arc::clone(layout), values: vec![0.0; layout.len()] }
    }

    /// All values in canonical order.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The same, to scale or clip.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Gradient of the tensor of this Hugging Face name, if the model has it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.layout.spec(name).map(|spec| &self.values[spec.range()])
    }

    /// Adds other gradients of the same model.
    ///
    /// # Panics
    /// If they are of another model.
    pub fn add(&mut self, other: &Self, pool: &ThreadPool) {
        assert_eq!(self.values.len(), other.values.len(), "gradients of one model are added");
        let blocks = self.values.chunks_mut(BLOCK).zip(other.values.chunks(BLOCK));
        pool.map(blocks.collect(), |(own, other): (&mut [f32], &[f32])| {
            own.iter_mut().zip(other).for_each(|(a, b)| *a += b);
        });
    }

    /// Sets all to zero.
    pub fn clear(&mut self, pool: &ThreadPool) {
        pool.map(self.values.chunks_mut(BLOCK).collect(), |block| block.fill(0.0));
    }
}

impl GradientSink for Gradients {
    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        &mut self.values[self.layout.unit(unit)]
    }

    fn done(&mut self, _: Unit) {}
}
