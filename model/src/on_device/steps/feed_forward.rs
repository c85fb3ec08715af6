//! The feed-forward half of a layer in a step.

use device::ops::swiglu::swiglu;
use device::{Result, Storage};

use super::{StepLayer, StepMemory};
use crate::layer::Operand;
use crate::on_device::layer::linear;

impl<T: Storage> StepLayer<'_, T> {
    pub(super) fn feed_forward(&self, memory: &mut StepMemory<T>, tokens: usize) -> Result<()> {
        let (decoder, ranges) = (self.decoder, self.decoder.layout().ranges(self.index));
        let (device, config) = (decoder.device(), decoder.config());
        let width = config.intermediate_size;
        self.normalise(memory, tokens, &ranges[Operand::FeedForwardNorm])?;
        let gate_up = self.matrix(Operand::GateUp, config.hidden_size);
        linear(device, memory.normed.of(tokens), gate_up, memory.gate_up.of_mut(tokens), false)?;
        swiglu(device, memory.gate_up.of(tokens), width, memory.activated.of_mut(tokens))?;
        let StepMemory { x, normed, activated, .. } = memory;
        let (down, after) = (self.matrix(Operand::Down, width), &ranges[Operand::FeedForwardAfterNorm]);
        self.add_result(x, normed, activated.of(tokens), down, [&(0..0), after])
    }
}
