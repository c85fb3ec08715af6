//! Gradient sinks of the backward, and sources of layers that are not all in memory.
//!
//! Invariant: a backward asks for units in the order tail, last layer to first layer, embedding, and marks each as done
//! once; nothing is added to a unit after that. A sink can start a reduce-scatter of a finished unit while the backward
//! continues. The embedding is asked for earlier if it is also the head. With several sections of tokens a unit is complete after
//! the last of them.

use std::sync::Arc;

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::ops::experts::ExpertRoutes;
use crate::{Layout, ThreadPool, Unit};

/// Values that one thread clears or adds at a time.
const BLOCK: usize = 1 << 18;

/// Receives the gradients of a backward.
pub trait GradientSink {
    /// `[layout.unit(unit).len()]` gradients of a unit, in the order of the layout, to add to; with a decoder of low-rank factors,
    /// those of the factors of the unit.
    fn unit(&mut self, unit: Unit) -> &mut [f32];

    /// Marks a unit as complete: this backward adds nothing more to it.
    fn done(&mut self, unit: Unit);

    /// What follows is of section `index` of the tokens, among those of this rank. A backward of one section does not say so; of
    /// several each asks for every unit, and marks it as done in the order of the sections.
    fn section(&mut self, _index: usize) {}

    /// The tokens of this backward went to the experts of layer `index` as `tokens` says.
    fn routed(&mut self, _index: usize, _tokens: &RoutedTokens) {}
}

/// Tokens of a layer with experts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutedTokens {
    /// `[experts]` tokens that each expert computed.
    pub of_expert: Vec<u64>,
    /// Tokens.
    pub tokens: u64,
    /// Tokens whose experts were given ([`Pack::routed`](super::Pack::routed)).
    pub given: u64,
    /// Those of them for which the router prefers another expert.
    pub changed: u64,
}

impl RoutedTokens {
    /// Adds the tokens of `routes`.
    pub(super) fn count(&mut self, routes: &ExpertRoutes) {
        let [given, changed] = routes.replayed();
        self.merge(&Self { of_expert: routes.load(), tokens: routes.tokens() as u64, given, changed });
    }

    /// Adds those of another pass or rank.
    pub fn merge(&mut self, other: &Self) {
        self.of_expert.resize(self.of_expert.len().max(other.of_expert.len()), 0);
        self.of_expert.iter_mut().zip(&other.of_expert).for_each(|(tokens, more)| *tokens += more);
        self.tokens += other.tokens;
        self.given += other.given;
        self.changed += other.changed;
    }
}

/// Supplies the weights of layers that are not all in memory, as ZeRO stage 3 gathers them.
pub trait LayerSource {
    /// `[layout.layers()[index].len()]` values of layer `index`, in the order of the [`Layout`]. A forward asks for the
    /// layers in ascending order, a backward in descending order; the decoder drops a layer before it asks for the next.
    ///
    /// # Errors
    /// If the values are not available.
    fn layer(&mut self, index: usize) -> Result<Arc<Vec<f32>>>;

    /// The layers are asked for in ascending order from now on: a forward begins.
    fn begin(&mut self) {}

    /// The layers are asked for in descending order from now on: a backward begins.
    fn reverse(&mut self) {}
}

/// Gradients of all weights as one flat buffer, laid out as the parameters are.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    layout: Arc<Layout>,
    values: Vec<f32>,
}

impl Gradients {
    /// Gradients of zero.
    #[must_use]
    pub fn zeros(layout: &Arc<Layout>) -> Self {
        Self { layout: Arc::clone(layout), values: vec![0.0; layout.len()] }
    }

    /// `[layout.len()]` all values, in the order of the layout.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// `[layout.len()]` all values, to scale or clip.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Gradient of the tensor of this Hugging Face name, row-major in its shape, `[out, in]` for a matrix, if the model has
    /// the tensor.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.layout.spec(name).map(|spec| &self.values[spec.range()])
    }

    /// Adds other gradients of the same model: gradient accumulation.
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
