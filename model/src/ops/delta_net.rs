//! A gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) over the tokens of sequences: convolution, gates and recurrence, over
//! packed segments, forward and backward, and after a state.
//!
//! A token gives `[input_width]`: the channels of the convolution (queries, keys, values), then for each value head the strength of
//! its update and its decay, before their activations. A state is what a sequence keeps of the tokens before the next one: the
//! last inputs of the convolution, and the states of all heads.
//!
//! Invariant: every sequence begins with a state of zeros, and the same tokens after the same state give the same bits, however they
//! are cut into pieces.

use std::ops::Range;

use candle_core::{Result, Tensor};
use device::ops::attention::Segment;

use super::causal_convolution::{
    activate, activate_backward, convolve, convolve_backward, kernel_gradient, transposed,
};
use super::delta_rule::{
    DeltaGradients, DeltaState, DeltaTokens, advance, normalize, normalize_backward, reverse, state_len,
};
use super::simd::exp;
use super::{matrix, unwritten, values};
use crate::layer::DeltaNetSpec;

/// Inputs of `softplus` from which on it is its input.
const LINEAR: f32 = 20.0;

/// What a DeltaNet computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeltaRule<'a> {
    pub(crate) spec: DeltaNetSpec,
    /// `[taps, channels]` of the convolution.
    pub(crate) kernel: &'a [f32],
    /// `[value_heads]` rates of decay, above 0.
    pub(crate) rates: &'a [f32],
    /// `[value_heads]`
    pub(crate) time_bias: &'a [f32],
}

/// Gradients of the operands of a DeltaNet.
#[derive(Debug)]
pub(crate) struct DeltaReverse {
    /// `[T, input_width]` gradient of the inputs.
    pub(crate) d_inputs: Vec<f32>,
    /// `[T, value_heads]` what each token adds to the gradient of the logarithm of the rates.
    pub(crate) d_rates: Vec<f32>,
    /// `[T, channels]` gradient of the sums of the convolution.
    pub(crate) d_sums: Vec<f32>,
    /// The rows of the segments, each with those that it continues.
    pub(crate) runs: Vec<[Range<usize>; 2]>,
}

/// The recurrence over each segment of `inputs [T, input_width]`, `[T, values]`. Rows of the segments begin at `first` in the pack
/// that they are of.
pub(crate) fn packed(
    inputs: &Tensor,
    segments: &[Segment],
    first: usize,
    rule: DeltaRule<'_>,
) -> Result<Tensor> {
    let width = rule.spec.value_width();
    let mut out = unwritten(inputs.dim(0)? * width);
    let inputs = values(inputs)?;
    for group in groups(segments, first) {
        let mut end = Vec::new();
        for [rows, prefix] in &group {
            let mut states = rule.begin(&end);
            let run = TokenRun::new(rule, &inputs, rows, prefix);
            let state = DeltaState::of(rule.spec, &mut states);
            advance(run.tokens(rule), state, &mut out[rows.start * width..rows.end * width]);
            if prefix.is_empty() {
                end = states;
            }
        }
    }
    matrix(out, width)
}

/// Gradients for the gradient `g [T, values]` of the result of [`packed`].
pub(crate) fn packed_backward(
    inputs: &Tensor,
    segments: &[Segment],
    first: usize,
    rule: DeltaRule<'_>,
    g: &Tensor,
) -> Result<DeltaReverse> {
    let (spec, rows) = (rule.spec, inputs.dim(0)?);
    let groups = groups(segments, first);
    let mut reverse = DeltaReverse {
        d_inputs: vec![0.0; inputs.elem_count()],
        d_rates: vec![0.0; rows * spec.value_heads],
        d_sums: vec![0.0; rows * spec.channels()],
        runs: groups.iter().flatten().cloned().collect(),
    };
    let (inputs, g) = (values(inputs)?, values(g)?);
    for group in &groups {
        let mut d_end = vec![0.0; spec.heads_len()];
        let (zeros, mut end) = (vec![0.0; spec.heads_len()], Vec::new());
        if let ([[whole, _]], true) = (&group[..1], group.len() > 1) {
            let mut states = rule.begin(&[]);
            let run = TokenRun::new(rule, &inputs, whole, &(0..0));
            let mut out = unwritten(whole.len() * spec.value_width());
            advance(run.tokens(rule), DeltaState::of(spec, &mut states), &mut out);
            end = DeltaState::of(spec, &mut states).folded(spec);
        }
        for [rows, prefix] in &group[1..] {
            let mut d_states = vec![0.0; spec.heads_len()];
            let run = TokenRun::new(rule, &inputs, rows, prefix);
            run.reverse(rule, &end, &g, &mut d_states, &mut reverse);
            d_end.iter_mut().zip(&d_states).for_each(|(sum, g)| *sum += g);
        }
        for [rows, prefix] in &group[..1] {
            let run = TokenRun::new(rule, &inputs, rows, prefix);
            run.reverse(rule, &zeros, &g, &mut d_end, &mut reverse);
        }
    }
    Ok(reverse)
}

/// Continues after `state [state_len]` with the inputs `inputs [T, input_width]`, to `out [T, values]`. The state becomes that after
/// them.
pub(crate) fn resume(rule: DeltaRule<'_>, inputs: &[f32], state: &mut [f32], out: &mut [f32]) {
    let (tail, states) = state.split_at_mut(rule.spec.tail_len());
    let rows = inputs.len() / rule.spec.input_width();
    let run = TokenRun::after(rule, tail, inputs, 0..rows);
    advance(run.tokens(rule), DeltaState::of(rule.spec, states), out);
    tail.copy_from_slice(&run.seen[run.seen.len() - tail.len()..]);
}

/// Adds the gradient of the convolution's kernel to `gradient [channels, taps]`, token by token.
pub(crate) fn convolution_gradient(
    inputs: &Tensor,
    reverse: (&[[Range<usize>; 2]], &[f32]),
    rule: DeltaRule<'_>,
    gradient: &mut [f32],
) -> Result<()> {
    let (runs, d_sums) = reverse;
    let (taps, channels) = (rule.spec.taps, rule.spec.channels());
    let inputs = values(inputs)?;
    let mut sums = transposed(gradient, taps);
    for [rows, prefix] in runs {
        let seen = seen(rule, &inputs, rows, prefix);
        kernel_gradient(&seen, &d_sums[rows.start * channels..rows.end * channels], channels, &mut sums);
    }
    for (channel, gradient) in gradient.chunks_exact_mut(taps).enumerate() {
        gradient.iter_mut().enumerate().for_each(|(tap, value)| *value = sums[tap * channels + channel]);
    }
    Ok(())
}

/// The rows of sequences, each before those that continue it, with the rows that they continue.
fn groups(segments: &[Segment], first: usize) -> Vec<Vec<[Range<usize>; 2]>> {
    let within = |rows: &Range<usize>| {
        if rows.is_empty() { 0..0 } else { rows.start - first..rows.end - first }
    };
    let mut groups: Vec<Vec<[Range<usize>; 2]>> = Vec::new();
    for segment in segments {
        let run = [within(&segment.rows), within(&segment.prefix)];
        match groups.last_mut() {
            Some(group) if !segment.prefix.is_empty() => group.push(run),
            _ => groups.push(vec![run]),
        }
    }
    groups
}

/// `[taps - 1 + rows, channels]` what the convolution of `rows` sees: the last rows of the prefix, after zeros where it is short.
fn seen(rule: DeltaRule<'_>, inputs: &[f32], rows: &Range<usize>, prefix: &Range<usize>) -> Vec<f32> {
    let (spec, before) = (rule.spec, rule.spec.taps - 1);
    let known = prefix.len().min(before);
    let mut seen = vec![0.0; (before - known) * spec.channels()];
    for row in (prefix.end - known..prefix.end).chain(rows.clone()) {
        seen.extend_from_slice(&inputs[row * spec.input_width()..][..spec.channels()]);
    }
    seen
}

impl DeltaRule<'_> {
    /// The states that a sequence begins with: those of its prefix, or zeros.
    fn begin(&self, prefix: &[f32]) -> Vec<f32> {
        if prefix.is_empty() { vec![0.0; state_len(self.spec)] } else { prefix.to_vec() }
    }

    /// Strength and decay `[2 value_heads]` of a token from the inputs of its gates, in place.
    fn open(&self, gates: &mut [f32]) {
        let (strengths, decays) = gates.split_at_mut(self.spec.value_heads);
        strengths.iter_mut().for_each(|x| *x = sigmoid(*x));
        for ((x, rate), bias) in decays.iter_mut().zip(self.rates).zip(self.time_bias) {
            *x = exp(-rate * softplus(*x + bias));
        }
    }

    /// Turns the gradients `g [2 value_heads]` of the strengths, which are `opened`, and of the logarithms of the decays into those of
    /// their inputs `gates`. Returns what the token adds to the gradient of the logarithm of the rates in `d_rates [value_heads]`.
    fn open_backward(&self, gates: &[f32], opened: &[f32], g: &mut [f32], d_rates: &mut [f32]) {
        let heads = self.spec.value_heads;
        let (strengths, decays) = g.split_at_mut(heads);
        strengths.iter_mut().zip(opened).for_each(|(g, strength)| *g *= strength * (1.0 - strength));
        for (head, (g, d_rate)) in decays.iter_mut().zip(d_rates).enumerate() {
            let x = gates[heads + head] + self.time_bias[head];
            *d_rate = -*g * self.rates[head] * softplus(x);
            *g = -*g * self.rates[head] * if x > LINEAR { 1.0 } else { sigmoid(x) };
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

fn softplus(x: f32) -> f32 {
    if x > LINEAR { x } else { x.max(0.0) + libm::log1pf(exp(-x.abs())) }
}

/// The tokens of one sequence, as the recurrence reads them.
struct TokenRun {
    rows: Range<usize>,
    /// The rows that the sequence continues.
    prefix: Range<usize>,
    /// `[taps - 1 + T, channels]` what the convolution sees.
    seen: Vec<f32>,
    /// `[T, channels]` the sums of the convolution.
    sums: Vec<f32>,
    /// `[T, channels]` normalised queries and keys, and values.
    heads: Vec<f32>,
    /// `[T, 2 value_heads]` before their activations.
    gates: Vec<f32>,
    /// `[T, 2 value_heads]` strengths of updates, then factors of decay.
    opened: Vec<f32>,
}

impl TokenRun {
    fn new(rule: DeltaRule<'_>, inputs: &[f32], rows: &Range<usize>, prefix: &Range<usize>) -> Self {
        Self {
            prefix: prefix.clone(),
            ..Self::of(rule, seen(rule, inputs, rows, prefix), inputs, rows.clone())
        }
    }

    /// The `rows` after those whose last inputs are `tail [taps - 1, channels]`.
    fn after(rule: DeltaRule<'_>, tail: &[f32], inputs: &[f32], rows: Range<usize>) -> Self {
        let own = seen(rule, inputs, &rows, &(0..0));
        let seen = [tail, &own[tail.len()..]].concat();
        Self::of(rule, seen, inputs, rows)
    }

    fn of(rule: DeltaRule<'_>, seen: Vec<f32>, inputs: &[f32], rows: Range<usize>) -> Self {
        let spec = rule.spec;
        let mut sums = unwritten(rows.len() * spec.channels());
        convolve(&seen, rule.kernel, spec.channels(), &mut sums);
        let mut heads = sums.clone();
        activate(&mut heads);
        normalize(&mut heads, spec);
        let mut gates = Vec::with_capacity(rows.len() * 2 * spec.value_heads);
        for row in inputs[rows.start * spec.input_width()..rows.end * spec.input_width()]
            .chunks_exact(spec.input_width())
        {
            gates.extend_from_slice(&row[spec.channels()..]);
        }
        let mut opened = gates.clone();
        opened.chunks_exact_mut(2 * spec.value_heads).for_each(|gates| rule.open(gates));
        Self { rows, prefix: 0..0, seen, sums, heads, gates, opened }
    }

    fn tokens(&self, rule: DeltaRule<'_>) -> DeltaTokens<'_> {
        DeltaTokens { spec: rule.spec, heads: &self.heads, gates: &self.opened }
    }

    /// Backward from `states` for the gradient `g` of all results, which turns that of the states after this run, `d_states`, into
    /// that of the states before.
    fn reverse(
        &self,
        rule: DeltaRule<'_>,
        states: &[f32],
        g: &[f32],
        d_states: &mut [f32],
        into: &mut DeltaReverse,
    ) {
        let (spec, rows) = (rule.spec, self.rows.clone());
        let (channels, of_gates) = (spec.channels(), 2 * spec.value_heads);
        let d_sums = &mut into.d_sums[rows.start * channels..rows.end * channels];
        let mut d_gates = unwritten(self.gates.len());
        let g = &g[rows.start * spec.value_width()..rows.end * spec.value_width()];
        let gradients = DeltaGradients { states: d_states, heads: d_sums, gates: &mut d_gates };
        reverse(self.tokens(rule), states, g, gradients);
        let mut activated = self.sums.clone();
        activate(&mut activated);
        normalize_backward(&activated, spec, d_sums);
        activate_backward(&self.sums, d_sums);
        let mut d_seen = vec![0.0; self.seen.len()];
        convolve_backward(d_sums, rule.kernel, channels, &mut d_seen);
        // What was seen before this run are rows of the prefix, or zeros.
        let before = spec.taps - 1;
        let known = self.prefix.len().min(before);
        let seen = (self.prefix.end - known..self.prefix.end).chain(rows.clone());
        for (row, d_seen) in seen.zip(d_seen[(before - known) * channels..].chunks_exact(channels)) {
            let d_inputs = &mut into.d_inputs[row * spec.input_width()..][..channels];
            d_inputs.iter_mut().zip(d_seen).for_each(|(sum, g)| *sum += g);
        }
        let opened = self.gates.chunks_exact(of_gates).zip(self.opened.chunks_exact(of_gates));
        for ((row, (gates, opened)), g) in rows.zip(opened).zip(d_gates.chunks_exact_mut(of_gates)) {
            let d_rates = &mut into.d_rates[row * spec.value_heads..][..spec.value_heads];
            rule.open_backward(gates, opened, g, d_rates);
            into.d_inputs[row * spec.input_width() + channels..][..of_gates].copy_from_slice(g);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;
    use crate::layer::DeltaNetFiles;

    const SPEC: DeltaNetSpec = DeltaNetSpec {
        key_heads: 1,
        value_heads: 2,
        key_dim: 4,
        value_dim: 3,
        taps: 4,
        files: DeltaNetFiles::Apart,
    };
    const LEN: usize = 11;

    /// A sequence of 2 tokens, one of 4, and two that continue it.
    fn segments() -> Vec<Segment> {
        let of = |rows, prefix| Segment { rows, prefix };
        vec![of(0..2, 0..0), of(2..6, 0..0), of(6..7, 2..6), of(7..LEN, 2..6)]
    }

    /// Kernel, logarithm of rates, bias.
    fn weights() -> [Vec<f32>; 3] {
        [noise(SPEC.taps * SPEC.channels(), 1), noise(2, 2), noise(2, 3)]
    }

    fn run(inputs: &[f32], [kernel, log, bias]: [&[f32]; 3]) -> Vec<f32> {
        let rates: Vec<f32> = log.iter().map(|log| exp(*log)).collect();
        let kernel = transposed(kernel, SPEC.taps);
        let rule = DeltaRule { spec: SPEC, kernel: &kernel, rates: &rates, time_bias: bias };
        let out = packed(&matrix(inputs.to_vec(), SPEC.input_width()).unwrap(), &segments(), 0, rule);
        values(&out.unwrap()).unwrap().to_vec()
    }

    #[test]
    fn backward_is_the_derivative() {
        let [kernel, log, bias] = &weights();
        let (x, c) = (noise(LEN * SPEC.input_width(), 4), noise(LEN * SPEC.value_width(), 5));
        let rates: Vec<f32> = log.iter().map(|log| exp(*log)).collect();
        let turned = transposed(kernel, SPEC.taps);
        let rule = DeltaRule { spec: SPEC, kernel: &turned, rates: &rates, time_bias: bias };
        let inputs = matrix(x.clone(), SPEC.input_width()).unwrap();
        let g = matrix(c.clone(), SPEC.value_width()).unwrap();
        let reverse = packed_backward(&inputs, &segments(), 0, rule, &g).unwrap();
        let loss = |x: &[f32], weights: [&[f32]; 3]| weighted(&run(x, weights), &c);
        gradient(|x| loss(x, [kernel, log, bias]), &x, &reverse.d_inputs, 2e-2);
        let mut d_kernel = vec![0.0; kernel.len()];
        convolution_gradient(&inputs, (&reverse.runs, &reverse.d_sums), rule, &mut d_kernel).unwrap();
        gradient(|kernel| loss(&x, [kernel, log, bias]), kernel, &d_kernel, 2e-2);
        let (mut d_log, mut d_bias) = ([0.0; 2], [0.0; 2]);
        for (rates, row) in reverse.d_rates.chunks(2).zip(reverse.d_inputs.chunks(SPEC.input_width())) {
            for head in 0..2 {
                d_log[head] += rates[head];
                d_bias[head] += row[SPEC.channels() + 2 + head];
            }
        }
        gradient(|log| loss(&x, [kernel, log, bias]), log, &d_log, 2e-2);
        gradient(|bias| loss(&x, [kernel, log, bias]), bias, &d_bias, 2e-2);
    }

    #[test]
    fn a_state_goes_on_with_the_bits_of_the_whole() {
        let [kernel, log, bias] = &weights();
        let x = noise(LEN * SPEC.input_width(), 4);
        let whole = run(&x, [kernel, log, bias]);
        let rates: Vec<f32> = log.iter().map(|log| exp(*log)).collect();
        let turned = transposed(kernel, SPEC.taps);
        let rule = DeltaRule { spec: SPEC, kernel: &turned, rates: &rates, time_bias: bias };
        for pieces in [vec![2..6, 7..LEN], vec![2..3, 3..5, 5..6, 7..8, 8..LEN]] {
            let mut state = vec![0.0; SPEC.state_len()];
            for rows in pieces {
                let mut out = vec![7.0; rows.len() * SPEC.value_width()];
                let inputs = &x[rows.start * SPEC.input_width()..rows.end * SPEC.input_width()];
                resume(rule, inputs, &mut state, &mut out);
                assert_eq!(out, whole[rows.start * SPEC.value_width()..rows.end * SPEC.value_width()]);
            }
        }
    }

    #[test]
    fn softplus_has_no_overflow() {
        assert_eq!([softplus(-200.0), softplus(30.0)], [0.0, 30.0]);
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-6);
    }
}
