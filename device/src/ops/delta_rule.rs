//! The recurrence of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): over packs in chunks of tokens (Yang et al. 2024, arXiv
//! 2406.06484), forward and backward, and over the new tokens of sequences that keep a state.
//!
//! A sequence begins with a state of zeros. One that continues another begins with the state after all tokens of that.

use std::ops::Range;

use super::attention::Segment;
use super::convolution::{DeltaShape, InputSource, InputUses, SequenceSlots};
use super::{THREADS, rows_of, size};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{DeviceBuffer, View, ViewMut};

/// Tokens of a chunk, columns of a block, and values of a row of a tile, as in `delta_rule.cu`.
const CHUNK: usize = 16;
const COLUMNS: usize = 32;
const TILE: usize = COLUMNS + 1;

/// Memory of the states of a backward, bytes; heads are passed in groups that need no more, one at a time at least.
pub const STATES_BYTES: usize = 256 << 20;

/// The sequences of a pack, as the recurrence and its convolution read them, on the device.
#[derive(Debug)]
pub struct DeltaRuns {
    rows: usize,
    /// Whether every row is in a sequence.
    whole: bool,
    taps: usize,
    sources: DeviceBuffer<u32>,
    starts: DeviceBuffer<u32>,
    uses: DeviceBuffer<u32>,
    /// `[runs, 4]`: start and end of rows, the run that it continues or -1, and its first chunk.
    runs: DeviceBuffer<i32>,
    /// `[runs, 2]`: the runs that continue it.
    users: DeviceBuffer<i32>,
    /// Runs that others continue, which are first, and all that continue none.
    continued: usize,
    roots: usize,
    chunks: usize,
}

/// Host copy of the work lists.
#[derive(Debug, Default)]
struct RunPlan {
    sources: Vec<u32>,
    starts: Vec<u32>,
    uses: Vec<u32>,
    runs: Vec<[i32; 4]>,
    users: Vec<[i32; 2]>,
    continued: usize,
    roots: usize,
    chunks: usize,
}

impl RunPlan {
    fn new(segments: &[Segment], rows: usize, taps: usize) -> Self {
        let mut plan = Self::default();
        plan.add_runs(segments);
        plan.add_sources(segments, rows, taps);
        plan
    }

    /// Runs that others continue, then those of no other, then those that continue.
    fn add_runs(&mut self, segments: &[Segment]) {
        let mut roots: Vec<(Range<usize>, Vec<Range<usize>>)> = Vec::new();
        for Segment { rows, prefix } in segments.iter().filter(|segment| !segment.rows.is_empty()) {
            if prefix.is_empty() {
                roots.push((rows.clone(), Vec::new()));
                continue;
            }
            let of = roots.iter_mut().rfind(|(root, _)| root == prefix);
            assert!(of.is_some(), "segment {rows:?} continues {prefix:?}, which is no whole sequence");
            if let Some((_, users)) = of {
                users.push(rows.clone());
            }
        }
        roots.sort_by_key(|(_, users)| users.is_empty());
        (self.roots, self.continued) = (roots.len(), roots.partition_point(|(_, users)| !users.is_empty()));
        for (rows, _) in &roots {
            self.push_run(rows, None);
        }
        for (number, (_, users)) in roots.iter().enumerate() {
            self.users[number] = [size(self.runs.len()), size(self.runs.len() + users.len())];
            users.iter().for_each(|rows| self.push_run(rows, Some(number)));
        }
    }

    fn push_run(&mut self, rows: &Range<usize>, continues: Option<usize>) {
        let begins = continues.map_or(-1, size);
        self.runs.push([size(rows.start), size(rows.end), begins, size(self.chunks)]);
        self.users.push([0; 2]);
        self.chunks += rows.len().div_ceil(CHUNK);
    }

    /// Where the inputs before each row are, and which rows see it.
    fn add_sources(&mut self, segments: &[Segment], rows: usize, taps: usize) {
        let before = taps - 1;
        self.sources = vec![InputSource::None.pack(); rows * before];
        let mut seen_by: Vec<Vec<[u32; 2]>> = (0..rows).map(|row| vec![[row as u32, 0]]).collect();
        for Segment { rows, prefix } in segments {
            for row in rows.clone() {
                let known = (rows.start..row).rev().chain(prefix.clone().rev());
                for (back, source) in known.take(before).enumerate() {
                    self.sources[row * before + back] = InputSource::Row(source).pack();
                    seen_by[source].push([row as u32, back as u32 + 1]);
                }
            }
        }
        self.starts.push(0);
        for uses in &seen_by {
            self.uses.extend(uses.as_flattened());
            self.starts.push(self.uses.len() as u32 / 2);
        }
    }
}

impl DeltaRuns {
    /// Work lists for the segments of a pack of `rows`, in row order, and a convolution of `taps`. Rows outside all segments have
    /// results and gradients of 0.
    ///
    /// # Errors
    /// If device memory is full.
    ///
    /// # Panics
    /// If a segment continues rows that are not all of an earlier one without a prefix.
    pub fn new(device: &Device, segments: &[Segment], rows: usize, taps: usize) -> Result<Self> {
        let plan = RunPlan::new(segments, rows, taps);
        Ok(Self {
            rows,
            whole: segments.iter().map(|segment| segment.rows.len()).sum::<usize>() == rows,
            taps,
            sources: device.upload(&plan.sources)?,
            starts: device.upload(&plan.starts)?,
            uses: device.upload(&plan.uses)?,
            runs: device.upload(plan.runs.as_flattened())?,
            users: device.upload(plan.users.as_flattened())?,
            continued: plan.continued,
            roots: plan.roots,
            chunks: plan.chunks,
        })
    }

    /// `[rows, taps - 1]` the packed [`InputSource`]s.
    #[must_use]
    pub fn sources(&self) -> View<'_, u32> {
        self.sources.all()
    }

    /// The rows that see each row.
    #[must_use]
    pub fn uses(&self) -> InputUses<'_> {
        InputUses { starts: self.starts.all(), uses: self.uses.all() }
    }

    fn count(&self) -> usize {
        self.runs.len() / 4
    }

    /// Memory of `len` values that kernels write for rows in sequences.
    fn memory<T: Storage>(&self, device: &Device, len: usize) -> Result<DeviceBuffer<T>> {
        if self.whole { device.uninit(len) } else { device.zeros(len) }
    }

    /// Heads whose states a backward has in memory at a time.
    fn heads_at_a_time(&self, shape: DeltaShape) -> usize {
        let each = (self.chunks + self.count()) * shape.key_dim * shape.value_dim * size_of::<f32>();
        (STATES_BYTES / each.max(1)).clamp(1, shape.value_heads)
    }
}

/// Tokens as the recurrence reads them. `T` rows.
#[derive(Clone, Copy, Debug)]
pub struct DeltaOperands<'a, T: Storage> {
    /// The sizes.
    pub shape: DeltaShape,
    /// `[T, channels]` normalised queries and keys, and values.
    pub heads: View<'a, T>,
    /// `[T, 2, value_heads]` strengths of updates, then factors of decay.
    pub opened: View<'a, f32>,
}

/// Gradients of [`DeltaOperands`]. `T` rows.
#[derive(Debug)]
pub struct DeltaOperandGradients {
    /// `[T, value_heads, 2, key_dim]` of queries and keys, by value head.
    pub pairs: DeviceBuffer<f32>,
    /// `[T, value_heads, value_dim]`
    pub values: DeviceBuffer<f32>,
    /// `[T, 2, value_heads]` of the strengths, then of the logarithms of the decays.
    pub opened: DeviceBuffer<f32>,
}

/// What a launch over some runs writes besides the results, and for which heads.
struct RunOutputs<'a> {
    ends: Option<ViewMut<'a, f32>>,
    /// The first runs, whose states go to `ends`.
    ended: usize,
    kept: Option<ViewMut<'a, f32>>,
    heads: Range<usize>,
}

impl<T: Storage> DeltaOperands<'_, T> {
    fn rows(&self) -> usize {
        let rows = rows_of(self.heads.len(), self.shape.channels());
        assert_eq!(self.opened.len(), rows * 2 * self.shape.value_heads, "gates of every row");
        rows
    }

    fn arguments(&self) -> Vec<Argument> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let mut arguments: Vec<Argument> = vec![self.heads.into(), self.opened.into()];
        arguments.extend([key_heads, value_heads, key_dim, value_dim].map(|n| Argument::from(size(n))));
        arguments
    }

    /// Shared memory of a block, bytes: `states` tiles of a state, a chunk, and `more` values.
    fn shared(&self, states: usize, more: usize) -> usize {
        let chunk = 2 * CHUNK * (self.shape.key_dim + 1) + 3 * CHUNK * (CHUNK + COLUMNS) + 2 * CHUNK;
        (states * self.shape.key_dim * TILE + chunk + more) * size_of::<f32>()
    }

    /// Advances the states of `of` by all tokens of these runs, from `begins`.
    fn advance(
        &self,
        device: &Device,
        (runs, of): (&DeltaRuns, Range<usize>),
        begins: Option<View<'_, f32>>,
        outputs: RunOutputs<'_>,
        out: Option<&ViewMut<'_, T>>,
    ) -> Result<()> {
        let RunOutputs { ends, ended, kept, heads } = outputs;
        let mut arguments = self.arguments();
        arguments.push(runs.runs.view(4 * of.start..4 * of.end).into());
        arguments.push(begins.into());
        arguments.push(ends.map_or_else(Argument::null, Into::into));
        arguments.push(size(ended).into());
        arguments.push(kept.map_or_else(Argument::null, Into::into));
        arguments.push(size(heads.start).into());
        arguments.push(out.map_or_else(Argument::null, Into::into));
        let grid = [of.len(), heads.len(), self.shape.value_dim.div_ceil(COLUMNS)];
        device.launch(&format!("delta_rule_{}", T::SUFFIX), grid, THREADS, self.shared(1, 0), &arguments)
    }

    /// `[runs, value_heads, key_dim, value_dim]` the states after the runs that others continue.
    fn ends(&self, device: &Device, runs: &DeltaRuns) -> Result<DeviceBuffer<f32>> {
        device.uninit(runs.continued * self.shape.states_len())
    }
}

/// The recurrence over the sequences of a pack: `[T, values]`.
///
/// # Errors
/// If a launch fails, or there is no memory.
///
/// # Panics
/// If the shapes do not fit.
pub fn delta_rule<T: Storage>(
    device: &Device,
    operands: DeltaOperands<'_, T>,
    runs: &DeltaRuns,
) -> Result<DeviceBuffer<T>> {
    let (rows, heads) = (operands.rows(), 0..operands.shape.value_heads);
    assert_eq!([rows, operands.shape.taps], [runs.rows, runs.taps], "the rows and taps of the pack");
    let mut out = runs.memory(device, rows * operands.shape.value_width())?;
    let mut ends = operands.ends(device, runs)?;
    let outputs =
        RunOutputs { ends: Some(ends.all_mut()), ended: runs.continued, kept: None, heads: heads.clone() };
    operands.advance(device, (runs, 0..runs.roots), None, outputs, Some(&out.all_mut()))?;
    let outputs = RunOutputs { ends: None, ended: 0, kept: None, heads };
    let users = (runs, runs.roots..runs.count());
    operands.advance(device, users, Some(ends.all()), outputs, Some(&out.all_mut()))?;
    Ok(out)
}

/// Gradients for `g [T, values]`, that of the result of [`delta_rule`].
///
/// # Errors
/// If a launch fails, or there is no memory.
///
/// # Panics
/// If the shapes do not fit.
pub fn delta_rule_backward<T: Storage>(
    device: &Device,
    operands: DeltaOperands<'_, T>,
    runs: &DeltaRuns,
    g: View<'_, T>,
) -> Result<DeltaOperandGradients> {
    let (rows, shape) = (operands.rows(), operands.shape);
    assert_eq!([rows, shape.taps], [runs.rows, runs.taps], "the rows and taps of the pack");
    assert_eq!(g.len(), rows * shape.value_width(), "a gradient has the shape of what it is of");
    let mut gradients = DeltaOperandGradients {
        pairs: runs.memory(device, rows * shape.value_heads * 2 * shape.key_dim)?,
        values: runs.memory(device, rows * shape.value_width())?,
        opened: runs.memory(device, operands.opened.len())?,
    };
    let (count, each) = (runs.count(), shape.key_dim * shape.value_dim);
    let at_a_time = runs.heads_at_a_time(shape);
    let mut kept = device.uninit::<f32>(runs.chunks * at_a_time * each)?;
    let mut d_states = device.uninit::<f32>(count * at_a_time * each)?;
    let mut ends = operands.ends(device, runs)?;
    for first in (0..shape.value_heads).step_by(at_a_time) {
        let heads = first..shape.value_heads.min(first + at_a_time);
        let outputs = RunOutputs {
            ends: Some(ends.all_mut()),
            ended: runs.continued,
            kept: Some(kept.all_mut()),
            heads: heads.clone(),
        };
        operands.advance(device, (runs, 0..runs.roots), None, outputs, None)?;
        let outputs = RunOutputs { ends: None, ended: 0, kept: Some(kept.all_mut()), heads: heads.clone() };
        operands.advance(device, (runs, runs.roots..count), Some(ends.all()), outputs, None)?;
        for of in [runs.roots..count, 0..runs.roots] {
            let mut arguments = operands.arguments();
            arguments.extend::<[Argument; 3]>([
                runs.runs.all().into(),
                runs.users.all().into(),
                size(of.start).into(),
            ]);
            arguments.extend::<[Argument; 3]>([kept.all().into(), g.into(), d_states.all_mut().into()]);
            let DeltaOperandGradients { pairs, values, opened } = &mut gradients;
            arguments.extend::<[Argument; 3]>([
                pairs.all_mut().into(),
                values.all_mut().into(),
                opened.all_mut().into(),
            ]);
            arguments.push(size(first).into());
            let more = 5 * CHUNK * COLUMNS + 3 * CHUNK * CHUNK + 3 * CHUNK + 1;
            let (kernel, shared) = ("delta_rule_backward", operands.shared(2, more));
            device.launch(
                &format!("{kernel}_{}", T::SUFFIX),
                [of.len(), heads.len(), 1],
                THREADS,
                shared,
                &arguments,
            )?;
        }
    }
    Ok(gradients)
}

/// Advances the states of sequences by their rows, token by token, and reads them to `out [T, values]`. `pool` has for each slot
/// `[value_heads, key_dim, value_dim]`. Padding may share a slot that no sequence has.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn delta_rule_decode<T: Storage>(
    device: &Device,
    operands: DeltaOperands<'_, T>,
    of: SequenceSlots<'_>,
    pool: ViewMut<'_, f32>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let shape = operands.shape;
    assert_eq!(out.len(), operands.rows() * shape.value_width(), "the result is [T, values]");
    let mut arguments = operands.arguments();
    arguments.extend::<[Argument; 4]>([
        of.positions.into(),
        of.firsts.into(),
        of.slots.into(),
        (of.stride as i64).into(),
    ]);
    arguments.extend::<[Argument; 2]>([pool.into(), out.into()]);
    let grid = [of.count(), shape.value_heads, shape.value_dim.div_ceil(COLUMNS)];
    device.launch(&format!("delta_rule_decode_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}
