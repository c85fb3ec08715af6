//! All weights of a model as one flat f32 buffer, and where each tensor lies in it.
//!
//! Invariant: the order of [`Layout`] is canonical. Query, key and value weights of a layer are neighbours, so are
//! their biases, and so are gate and up: `[q; k; v]` and `[gate; up]` are each one matrix to the decoder. Every weight
//! keeps the `[out, in]` shape of the Hugging Face files, also where files have several of them in one tensor (`file_tensors`). It
//! does not read files (see `weight_files`) nor compute.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::adapted_matrix::FusedRows;
use crate::file_tensors::{FilePart, FileTensor, FusedTensor, matrix_shape};
use crate::layer::{LayerRanges, LayerTensor, Operand, ROUTER_CORRECTION};
use crate::model_shard::is_of_keys;
use crate::{Config, Head, ModelError, TargetModule};

/// The name of the value head in files: that of transformers' sequence classifiers.
const VALUE_HEAD: &str = "score.weight";

/// All weights of a model, f32, in the order of its [`Layout`].
#[derive(Clone, Debug)]
pub struct Parameters {
    layout: Arc<Layout>,
    values: Vec<f32>,
}

/// Where each tensor of a model lies in a flat buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    specs: Vec<ParameterSpec>,
    by_name: HashMap<String, usize>,
    layers: Vec<Range<usize>>,
    /// Of each layer.
    ranges: Vec<LayerRanges>,
    files: Vec<FileTensor>,
    len: usize,
}

/// A part of the flat buffer that the backward completes, and that ranks reduce and gather, as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// The embedding, which is also the head if the two are tied.
    Embedding,
    /// A layer.
    Layer(usize),
    /// The final norm, an untied head, a value head.
    Tail,
}

/// One tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterSpec {
    /// The name in Hugging Face files.
    pub name: String,
    /// `[out, in]` for projections, `[rows, hidden_size]` for the embedding, `[n]` for norms and biases.
    pub shape: Vec<usize>,
    /// Where it starts in the flat buffer, in values.
    pub offset: usize,
    /// Whether it is no weight of the loss: it has no gradient, and no optimizer updates it.
    pub frozen: bool,
    /// The matrix of files that it is some rows of, where adapters are of that matrix.
    pub(crate) fused: Option<FusedRows>,
}

impl Parameters {
    /// A fresh model: weights normal with standard deviation `initializer_range`, norms that scale by 1, biases 0; decay of a
    /// recurrence as in transformers. The same seed gives the same
    /// bits on every platform, and a tensor's values do not depend on the tensors before it.
    #[must_use]
    pub fn random(config: &Config, seed: u64) -> Self {
        let mut parameters = Self::zeros(Arc::new(Layout::new(config)));
        let layout = Arc::clone(&parameters.layout);
        for (index, spec) in layout.specs.iter().enumerate() {
            let values = &mut parameters.values[spec.range()];
            if spec.name.ends_with("linear_attn.norm.weight") || spec.name.ends_with("dt_bias") {
                values.fill(1.0);
            } else if spec.name.ends_with("A_log") {
                fill_rates(values, seed, index as u64);
            } else if spec.name.ends_with("norm.weight") {
                values.fill(1.0 - config.norm_offset);
            } else if spec.name.ends_with(".weight") {
                fill_normal(values, config.initializer_range, seed, index as u64);
            }
        }
        parameters
    }

    /// All zeros, as gradients and optimizer moments begin.
    #[must_use]
    pub fn zeros(layout: Arc<Layout>) -> Self {
        let values = vec![0.0; layout.len];
        Self { layout, values }
    }

    /// The same weights under another head: common tensors are copied, a new head is zero.
    #[must_use]
    pub fn with_head(&self, config: &Config) -> Self {
        let mut parameters = Self::zeros(Arc::new(Layout::new(config)));
        let layout = Arc::clone(&parameters.layout);
        for spec in layout.specs() {
            if let Some(from) = self.layout.spec(&spec.name) {
                parameters.values[spec.range()].copy_from_slice(&self.values[from.range()]);
            }
        }
        parameters
    }

    /// Parameters of the flat buffer `values [layout.len()]`, in the order of the layout.
    ///
    /// # Errors
    /// [`ModelError::Length`] if it does not have the layout's length.
    pub fn from_values(layout: Arc<Layout>, values: Vec<f32>) -> Result<Self, ModelError> {
        if values.len() != layout.len {
            return Err(ModelError::Length { expected: layout.len, found: values.len() });
        }
        Ok(Self { layout, values })
    }

    /// Where each tensor lies.
    #[must_use]
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The tensor of this Hugging Face name, row-major in the shape of its [`ParameterSpec`], `[out, in]` for a matrix.
    ///
    /// # Panics
    /// If the layout has no tensor of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> &[f32] {
        let Some(spec) = self.layout.spec(name) else { panic!("the model has no parameter {name}") };
        &self.values[spec.range()]
    }

    /// `[layout.len()]` all values, in the order of the layout.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// `[layout.len()]` all values, in the order of the layout, for updates in place.
    #[must_use]
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// The buffer `[layout.len()]` itself, for offloading weights that are not in use. A caller that takes the values out
    /// puts the same values back.
    pub fn buffer_mut(&mut self) -> &mut Vec<f32> {
        &mut self.values
    }

    /// Returns the flat buffer `[layout.len()]`.
    #[must_use]
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }
}

impl Layout {
    /// The layout of a model.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let mut layout = Self {
            specs: Vec::new(),
            by_name: HashMap::new(),
            layers: Vec::new(),
            ranges: Vec::new(),
            files: Vec::new(),
            len: 0,
        };
        let hidden = config.hidden_size;
        layout.push("model.embed_tokens.weight".to_owned(), &[config.vocab_size, hidden]);
        for layer in 0..config.num_layers() {
            layout.push_layer(config, layer);
        }
        if config.head == Head::None {
            return layout;
        }
        layout.push("model.norm.weight".to_owned(), &[hidden]);
        if !config.tie_word_embeddings && config.head != Head::Value {
            layout.push("lm_head.weight".to_owned(), &[config.vocab_size, hidden]);
        }
        if config.head != Head::Language {
            layout.push(VALUE_HEAD.to_owned(), &[1, hidden]);
        }
        layout
    }

    /// All tensors in canonical order.
    #[must_use]
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// The tensor of this Hugging Face name.
    #[must_use]
    pub fn spec(&self, name: &str) -> Option<&ParameterSpec> {
        self.index(name).map(|index| &self.specs[index])
    }

    /// The values of each layer's tensors, which are contiguous; `[num_layers]`. Before the first lies the
    /// embedding, after the last the final norm and, where untied, the head.
    #[must_use]
    pub fn layers(&self) -> &[Range<usize>] {
        &self.layers
    }

    /// Ranges of the operands among the values of layer `index`.
    pub(crate) fn ranges(&self, index: usize) -> &LayerRanges {
        &self.ranges[index]
    }

    /// The values of all experts of layer `index`, expert by expert, in one range for each operand, ascending; none without experts.
    #[must_use]
    pub fn expert_operands(&self, index: usize) -> Vec<Range<usize>> {
        const OPERANDS: [Operand; 4] =
            [Operand::GateUp, Operand::GateUpBias, Operand::Down, Operand::DownBias];
        let (start, ranges) = (self.layers[index].start, &self.ranges[index]);
        if ranges[Operand::Router].is_empty() {
            return Vec::new();
        }
        let of = |operand| start + ranges[operand].start..start + ranges[operand].end;
        OPERANDS.map(of).into_iter().filter(|range| !range.is_empty()).collect()
    }

    /// The projections to keys and values of layer `index`, of which tensor ranks may have copies, ascending; none with latents.
    pub fn key_values(&self, index: usize) -> impl Iterator<Item = Range<usize>> {
        let layer = self.layers[index].clone();
        let is_of_layer = move |spec: &&ParameterSpec| layer.contains(&spec.offset) && is_of_keys(&spec.name);
        self.specs.iter().filter(is_of_layer).map(ParameterSpec::range)
    }

    /// The values `[experts]` that the router of layer `index` adds to the scores that choose experts; empty without them.
    #[must_use]
    pub fn router_correction(&self, index: usize) -> Range<usize> {
        let (start, within) = (self.layers[index].start, &self.ranges[index][Operand::RouterCorrection]);
        start + within.start..start + within.end
    }

    /// The tensors of weight files.
    pub(crate) fn file_tensors(&self) -> &[FileTensor] {
        &self.files
    }

    /// All units in the order of the buffer.
    pub fn units(&self) -> impl DoubleEndedIterator<Item = Unit> {
        let layers = (0..self.layers.len()).map(Unit::Layer);
        std::iter::once(Unit::Embedding).chain(layers).chain(std::iter::once(Unit::Tail))
    }

    /// The values of a unit.
    ///
    /// # Panics
    /// If the model has no such layer.
    #[must_use]
    pub fn unit(&self, unit: Unit) -> Range<usize> {
        let embedding = self.specs[0].range();
        match unit {
            Unit::Embedding => embedding,
            Unit::Layer(index) => self.layers[index].clone(),
            Unit::Tail => self.layers.last().map_or(embedding.end, |last| last.end)..self.len,
        }
    }

    /// The values of the output projection `[vocab_size, hidden_size]`: the embedding's own where they are tied.
    #[must_use]
    pub fn head(&self) -> Range<usize> {
        self.spec("lm_head.weight").unwrap_or(&self.specs[0]).range()
    }

    /// The values of the value head `[1, hidden_size]`, if there is one.
    #[must_use]
    pub fn value_head(&self) -> Option<Range<usize>> {
        self.spec(VALUE_HEAD).map(ParameterSpec::range)
    }

    /// Number of values of the whole model.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a model without weights does not exist")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Position of a tensor among [`Layout::specs`].
    pub(crate) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    fn push_layer(&mut self, config: &Config, layer: usize) {
        let (start, tensors) = (self.len, config.layer_tensors(layer));
        for LayerTensor { name: of_layer, shape, fused, .. } in &tensors {
            let name = |name: &str| format!("model.layers.{layer}.{name}");
            match fused {
                None => self.push(name(of_layer), shape),
                Some(FusedTensor { name: of_file, shape: file_shape, place }) => {
                    let part = FilePart { offset: self.len, shape: matrix_shape(shape), place: *place };
                    let whole = name(of_file);
                    self.push_part(whole.clone(), file_shape, part);
                    let spec = self.push_spec(name(of_layer), shape);
                    if TargetModule::of_weight(&whole).is_some() {
                        spec.fused = Some(FusedRows { name: whole, place: *place });
                    }
                }
            }
        }
        self.layers.push(start..self.len);
        self.ranges.push(LayerRanges::new(&tensors));
    }

    fn push(&mut self, name: String, shape: &[usize]) {
        let parts = vec![FilePart::whole(self.len, shape)];
        self.files.push(FileTensor { name: name.clone(), shape: shape.to_vec(), parts });
        self.push_spec(name, shape);
    }

    /// Appends `part` to the tensor `name` of files, which is the last one or new.
    fn push_part(&mut self, name: String, shape: &[usize], part: FilePart) {
        match self.files.last_mut() {
            Some(last) if last.name == name => last.parts.push(part),
            _ => self.files.push(FileTensor { name, shape: shape.to_vec(), parts: vec![part] }),
        }
    }

    fn push_spec(&mut self, name: String, shape: &[usize]) -> &mut ParameterSpec {
        let frozen = name.ends_with(ROUTER_CORRECTION);
        let spec = ParameterSpec { frozen, ..ParameterSpec::new(name.clone(), shape, self.len) };
        self.len += spec.len();
        let place = self.specs.len();
        self.by_name.insert(name, place);
        self.specs.push(spec);
        &mut self.specs[place]
    }
}

impl ParameterSpec {
    /// A tensor that is trained, at `offset` of a flat buffer.
    #[must_use]
    pub fn new(name: String, shape: &[usize], offset: usize) -> Self {
        Self { name, shape: shape.to_vec(), offset, frozen: false, fused: None }
    }

    /// Number of values.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "sizes of zero are refused with the config")]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Where it lies in the flat buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }
}

/// Fills a tensor with the logarithms of rates of decay between 0.01 and 16, as transformers does.
fn fill_rates(values: &mut [f32], seed: u64, stream: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let unit = 1.0 / (1u64 << 53) as f64;
    for value in values {
        *value = libm::log(0.01 + 15.99 * ((rng.next_u64() >> 11) as f64 * unit)) as f32;
    }
}

/// Fills a tensor by the Box-Muller transform from a counter-based random stream. `libm` gives the same bits on every
/// platform, which `ln` and `cos` of the system do not. `values` are `[n]`, of standard deviation `std`.
pub fn fill_normal(values: &mut [f32], std: f64, seed: u64, stream: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let unit = 1.0 / (1u64 << 53) as f64;
    for pair in values.chunks_mut(2) {
        // (0, 1]: the logarithm of 0 would be infinite.
        let radius = libm::sqrt(-2.0 * libm::log(((rng.next_u64() >> 11) + 1) as f64 * unit)) * std;
        let angle = std::f64::consts::TAU * ((rng.next_u64() >> 11) as f64 * unit);
        pair[0] = (radius * libm::cos(angle)) as f32;
        if let Some(second) = pair.get_mut(1) {
            *second = (radius * libm::sin(angle)) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::tiny;

    #[test]
    fn every_value_belongs_to_exactly_one_tensor() {
        for config in tiny() {
            let layout = Layout::new(&config);
            let mut end = 0;
            for spec in layout.specs() {
                assert_eq!(spec.offset, end, "{}", spec.name);
                end = spec.range().end;
                assert_eq!(layout.spec(&spec.name), Some(spec));
            }
            assert_eq!(end, layout.len());
            assert_eq!(layout.layers().len(), config.num_layers());
            assert_eq!(layout.layers()[0].start, layout.specs()[0].len());
            assert!(layout.layers().windows(2).all(|w| w[0].end == w[1].start));
            let end = layout.units().fold(0, |end, unit| {
                assert_eq!(layout.unit(unit).start, end, "{unit:?}");
                layout.unit(unit).end
            });
            assert_eq!(end, layout.len());
        }
    }

    #[test]
    fn fused_views_are_contiguous() {
        for config in tiny() {
            let layout = Layout::new(&config);
            let range = |name: &str| layout.spec(&format!("model.layers.1.{name}")).map(ParameterSpec::range);
            let neighbours = |names: &[&str]| {
                let ranges: Vec<_> = names.iter().map(|name| range(name).unwrap()).collect();
                assert!(ranges.windows(2).all(|w| w[0].end == w[1].start), "{names:?}");
            };
            neighbours(&["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]);
            neighbours(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]);
            if config.layers[0].qkv_bias {
                neighbours(&["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]);
            }
        }
    }

    #[test]
    fn tied_head_is_the_embedding_and_untied_is_last() {
        for config in tiny() {
            let layout = Layout::new(&config);
            let embedding = layout.specs()[0].range();
            let expected = if config.tie_word_embeddings {
                embedding
            } else {
                layout.len() - embedding.len()..layout.len()
            };
            assert_eq!(layout.head(), expected);
        }
    }

    #[test]
    fn random_is_normal_and_repeats_with_its_seed() {
        let [_, config] = tiny();
        let parameters = Parameters::random(&config, 7);
        assert_eq!(parameters.values(), Parameters::random(&config, 7).values());
        assert_ne!(parameters.values(), Parameters::random(&config, 8).values());
        assert!(parameters.get("model.layers.1.self_attn.q_norm.weight").iter().all(|&x| x == 1.0));
        assert!(parameters.get("model.norm.weight").iter().all(|&x| x == 1.0));
        assert!(parameters.get("model.layers.0.self_attn.k_proj.bias").iter().all(|&x| x == 0.0));
        assert_ne!(
            parameters.get("model.layers.0.mlp.up_proj.weight"),
            parameters.get("model.layers.1.mlp.up_proj.weight")
        );
        let weights = parameters.get("model.embed_tokens.weight");
        let n = weights.len() as f64;
        let mean = weights.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = weights.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        let fourth = weights.iter().map(|&x| f64::from(x).powi(4)).sum::<f64>() / n / variance.powi(2);
        // Six standard errors each; the seed is fixed, so this either always holds or never.
        assert!(mean.abs() < 6.0 * 0.02 / n.sqrt(), "mean {mean}");
        assert!((variance.sqrt() / 0.02 - 1.0).abs() < 6.0 / (2.0 * n).sqrt(), "std {}", variance.sqrt());
        assert!((fourth - 3.0).abs() < 6.0 * (96.0 / n).sqrt(), "kurtosis {fourth}");
    }

    #[test]
    fn random_bits_are_pinned() {
        let [config, _] = tiny();
        let parameters = Parameters::random(&config, 1);
        let bits: Vec<u32> = parameters.values()[..3].iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, [1_019_310_567, 1_012_263_209, 998_191_506]);
    }

    #[test]
    fn a_buffer_of_another_length_is_refused() {
        let [config, _] = tiny();
        let layout = Arc::new(Layout::new(&config));
        let err = Parameters::from_values(layout, vec![0.0; 3]).unwrap_err();
        assert!(matches!(err, ModelError::Length { found: 3, .. }), "{err}");
    }
}
