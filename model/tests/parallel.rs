//! Ranks that share the weights of a pass give the bits of one rank: predictions, and every gradient.
//!
//! Invariant: models have weights far from any symmetry, and targets of several distributions, so that no order of a sum and no
//! part of a row is left out.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use collective::{Collective, HostCollective, Position, threads};
use model::{
    Architecture, Config, Decoder, Gradients, LayerSource, ModelShard, Pack, Parameters, PassRanks,
    Prediction, PredictionGradient, Recompute, Reduction, Sizes, Target, TensorRanks, ThreadPool,
    TrainedTargets, failed_call,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::common::counting::CountingRank;

const SIZES: Sizes = Sizes {
    // Four ranks have shares of different sizes.
    vocab_size: 53,
    hidden_size: 24,
    intermediate_size: 72,
    num_layers: 3,
    num_heads: 8,
    num_kv_heads: 4,
    max_position_embeddings: 64,
};

/// Against hangs only.
const DEADLINE: Duration = Duration::from_secs(60);

/// `[n]` values in [-1, 1).
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| (rng.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn config(architecture: Architecture) -> Config {
    of_sizes(architecture, &SIZES)
}

fn of_sizes(architecture: Architecture, sizes: &Sizes) -> Config {
    let config = Config::fresh(sizes).of_family(architecture).with_experts(4, 2);
    Config {
        reduction: Reduction::Tree,
        tie_word_embeddings: architecture != Architecture::Qwen3Moe,
        ..config
    }
}

fn parameters(config: &Config) -> Parameters {
    let mut parameters = Parameters::random(config, 7);
    let noise = noise(parameters.values().len(), 3);
    for (value, noise) in parameters.values_mut().iter_mut().zip(noise) {
        *value = if *value == 1.0 { 1.0 + 0.3 * noise } else { 0.4 * noise };
    }
    parameters
}

/// Sequences with targets of every kind of distribution.
struct Rows {
    pack: Pack,
    rows: Vec<usize>,
    targets: Vec<Target<'static>>,
    slopes: Vec<PredictionGradient>,
}

impl Rows {
    fn new() -> Self {
        const KEPT: [u32; 5] = [0, 5, 11, 28, 51];
        let mut pack = Pack::new();
        for (index, len) in [9, 1, 17, 6].into_iter().enumerate() {
            let token = |at: usize| (at * 7 + index * 11 + 3) as u32 % 52;
            pack.push(&(0..len).map(token).collect::<Vec<_>>()).expect("a sequence");
        }
        let rows: Vec<usize> = (0..33).collect();
        let target = |row: &usize| match row % 3 {
            0 => Target { token: (row * 5 % 52) as u32, temperature: 1.0, kept: None },
            1 => Target { token: (row * 7 % 52) as u32, temperature: 0.7, kept: None },
            _ => Target { token: KEPT[row % 5], temperature: 1.3, kept: Some(&KEPT) },
        };
        let targets = rows.iter().map(target).collect();
        let slope = |c: &[f32]| PredictionGradient { logprob: c[0], entropy: c[1], value: 0.0 };
        Self { pack, targets, slopes: noise(66, 1).chunks(2).map(slope).collect(), rows }
    }

    /// Predictions of a training pass and of a scoring pass, and the gradients.
    fn pass(
        &self,
        decoder: &Decoder,
        parameters: &Arc<Parameters>,
        through: bool,
    ) -> (Vec<Prediction>, Vec<f32>) {
        let pool = ThreadPool::single();
        let mut gradients = Gradients::zeros(parameters.layout());
        let mut source = Layers(Arc::clone(parameters));
        let mut found = Vec::new();
        let mut slopes = |samples: std::ops::Range<usize>, predictions: &[Prediction]| {
            found.extend_from_slice(predictions);
            let lens = [11, 0, 22];
            let start: usize = lens[..samples.start].iter().sum();
            self.slopes[start..start + predictions.len()].to_vec()
        };
        let trained = TrainedTargets { rows: &self.rows, targets: &self.targets, samples: &[11, 0, 22] };
        let scored = if through {
            decoder
                .train_through(&mut source, &self.pack, trained, &mut slopes, &mut gradients, &pool)
                .expect("trains");
            decoder.score_through(&mut source, &self.pack, &self.rows, &self.targets, &pool)
        } else {
            decoder.train(&self.pack, trained, &mut slopes, &mut gradients, &pool).expect("trains");
            decoder.score(&self.pack, &self.rows, &self.targets, &pool)
        };
        assert_eq!(scored.expect("scores"), found, "a scoring pass predicts what a training pass does");
        (found, gradients.values().to_vec())
    }
}

/// The layers of some parameters, given one at a time.
struct Layers(Arc<Parameters>);

impl LayerSource for Layers {
    fn layer(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        Ok(Arc::new(self.0.values()[self.0.layout().layers()[index].clone()].to_vec()))
    }
}

fn decoder(config: &Config, parameters: &Arc<Parameters>, recompute: Recompute, through: bool) -> Decoder {
    if !through {
        return Decoder::trainable(config, parameters, recompute);
    }
    let unit = |unit| Arc::new(parameters.values()[parameters.layout().unit(unit)].to_vec());
    let [embedding, tail] = [model::Unit::Embedding, model::Unit::Tail].map(unit);
    Decoder::without_layers(config, parameters.layout(), &embedding, &tail, recompute)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn tensor_ranks_have_the_bits_of_one() {
    use Architecture::{Qwen2, Qwen3, Qwen3Moe};
    let rows = Rows::new();
    // Four and eight ranks have copies of one or two key-value heads.
    for (architecture, num_kv_heads) in [(Qwen2, 4), (Qwen3, 4), (Qwen3Moe, 4), (Qwen2, 1), (Qwen3, 2)] {
        let config = of_sizes(architecture, &Sizes { num_kv_heads, ..SIZES });
        let whole = Arc::new(parameters(&config));
        let alone = decoder(&config, &whole, Recompute::None, false);
        let (predictions, gradients) = rows.pass(&alone, &whole, false);
        assert!(
            gradients.iter().all(|g| g.is_finite()) && gradients.iter().filter(|g| **g != 0.0).count() > 1000
        );
        for (world, recompute, through) in [
            (1, Recompute::Block, true),
            (2, Recompute::None, false),
            (2, Recompute::Sequence, true),
            (4, Recompute::Block, false),
            (4, Recompute::None, true),
            (8, Recompute::None, false),
        ] {
            if ModelShard::new(&config, Position { rank: 0, world }).is_err() {
                assert_eq!((architecture, world), (Qwen3Moe, 8), "experts are narrow");
                continue;
            }
            let case = format!(
                "{architecture:?}, {num_kv_heads} keys x {world}, {recompute:?}, by layer: {through}"
            );
            let ranks = threads::group(world, DEADLINE).into_iter();
            let of_rank = |ranks: threads::Threads| {
                let shard = ModelShard::new(&config, ranks.position()).expect("can be shared");
                let own = Parameters::from_values(Arc::clone(shard.layout()), shard.cut(whole.values()));
                let own = Arc::new(own.expect("of the layout"));
                let (copies, rank) = (ModelShard::key_copies(&config, world), ranks.rank());
                let same_keys = (copies > 1).then(|| -> Arc<dyn Collective> {
                    Arc::<dyn HostCollective>::from(ranks.split(rank / copies).expect("neighbours"))
                });
                let tensor = TensorRanks { ranks: Arc::new(ranks), same_keys, vocabulary: SIZES.vocab_size };
                let ranks = PassRanks { tensor: Some(tensor), ..PassRanks::default() };
                let decoder = decoder(shard.config(), &own, recompute, through).among(ranks);
                let (found, own) = rows.pass(&decoder, &own, through);
                (found, own, shard)
            };
            let found: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = ranks.map(|rank| scope.spawn(|| of_rank(rank))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            for (rank, (found, own, shard)) in found.iter().enumerate() {
                assert_eq!(found, &predictions, "{case}: predictions of rank {rank}");
                // Copies too, not only what it owns.
                for piece in shard.pieces() {
                    for (of_shard, of_whole) in piece.runs() {
                        let name = &shard.whole().specs()[piece.tensor].name;
                        let expected = bits(&gradients[of_whole]);
                        assert_eq!(bits(&own[of_shard]), expected, "{case}: {name} of rank {rank}");
                    }
                }
            }
        }
    }
}

/// Some ranks normalise no row.
#[test]
fn ranks_predict_fewer_tokens_than_there_are_ranks() {
    let rows = Rows::new();
    let config = config(Architecture::Qwen2);
    let whole = Arc::new(parameters(&config));
    let pass = |decoder: &Decoder, own: &Arc<Parameters>| {
        let trained = TrainedTargets { rows: &rows.rows[4..5], targets: &rows.targets[4..5], samples: &[1] };
        let slopes = &mut |_: std::ops::Range<usize>, _: &[Prediction]| rows.slopes[..1].to_vec();
        let mut gradients = Gradients::zeros(own.layout());
        decoder.train(&rows.pack, trained, slopes, &mut gradients, &ThreadPool::single()).expect("trains");
        gradients.values().to_vec()
    };
    let expected = pass(&Decoder::trainable(&config, &whole, Recompute::None), &whole);
    let of_rank = |ranks: threads::Threads| {
        let shard = ModelShard::new(&config, ranks.position()).expect("can be shared");
        let own = Parameters::from_values(Arc::clone(shard.layout()), shard.cut(whole.values()));
        let own = Arc::new(own.expect("of the layout"));
        let tensor = TensorRanks::new(Arc::new(ranks), SIZES.vocab_size);
        let ranks = PassRanks { tensor: Some(tensor), ..PassRanks::default() };
        let decoder = Decoder::trainable(shard.config(), &own, Recompute::None).among(ranks);
        assert_eq!(bits(&pass(&decoder, &own)), bits(&shard.cut(&expected)));
    };
    thread::scope(|scope| {
        threads::group(4, DEADLINE).into_iter().for_each(|ranks| {
            scope.spawn(|| of_rank(ranks));
        });
    });
}

#[test]
fn a_rank_that_is_gone_ends_the_pass_of_the_others() {
    let rows = Rows::new();
    let config = config(Architecture::Qwen3);
    let whole = parameters(&config);
    let mut ranks = threads::group(2, DEADLINE);
    drop(ranks.pop());
    let ranks = ranks.pop().map(|rank| TensorRanks::new(Arc::new(rank), SIZES.vocab_size));
    let shard = ModelShard::new(&config, Position { rank: 0, world: 2 }).expect("can be shared");
    let own = Parameters::from_values(Arc::clone(shard.layout()), shard.cut(whole.values()));
    let decoder = Decoder::trainable(shard.config(), &Arc::new(own.expect("of the layout")), Recompute::None)
        .among(PassRanks { tensor: ranks, ..PassRanks::default() });
    let error = decoder.score(&rows.pack, &rows.rows, &rows.targets, &ThreadPool::single());
    let error = failed_call(error.expect_err("the other rank is gone")).expect("a call of ranks").to_string();
    assert!(error.contains("rank 1 is gone"), "{error}");
}

/// What a rank sends for a layer: twice forward and twice backward a sum of the hidden states of all tokens, in two halves of
/// `(t - 1) / t` of them (Shoeybi et al. 2019, arXiv 1909.08053); and in the backward half as much for each of the two residual streams of
/// which it keeps a part.
#[test]
fn a_layer_sends_four_sums_and_two_gathers_of_hidden_states() {
    let rows = Rows::new();
    for world in [2, 4] {
        let sent = [2, 3].map(|layers| {
            let mut config = config(Architecture::Qwen2);
            config.layers.truncate(layers);
            let whole = parameters(&config);
            let of_rank = |ranks: threads::Threads| {
                let shard = ModelShard::new(&config, ranks.position()).expect("can be shared");
                let own = Parameters::from_values(Arc::clone(shard.layout()), shard.cut(whole.values()));
                let own = Arc::new(own.expect("of the layout"));
                let ranks = Arc::new(CountingRank::new(ranks));
                let sent = Arc::clone(&ranks.sent);
                let ranks = PassRanks { tensor: Some(TensorRanks::new(ranks, 53)), ..PassRanks::default() };
                let decoder = Decoder::trainable(shard.config(), &own, Recompute::None).among(ranks);
                let slopes =
                    &mut |_: std::ops::Range<usize>, of: &[Prediction]| rows.slopes[..of.len()].to_vec();
                let trained = TrainedTargets { rows: &rows.rows, targets: &rows.targets, samples: &[33] };
                let mut gradients = Gradients::zeros(own.layout());
                decoder
                    .train(&rows.pack, trained, slopes, &mut gradients, &ThreadPool::single())
                    .expect("trains");
                sent.load(Ordering::Relaxed)
            };
            let ranks = threads::group(world, DEADLINE).into_iter();
            let sent: Vec<usize> = thread::scope(|scope| {
                let threads: Vec<_> = ranks.map(|rank| scope.spawn(|| of_rank(rank))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            sent.iter().sum::<usize>()
        });
        let hidden = 33 * SIZES.hidden_size;
        assert_eq!(sent[1] - sent[0], (4 * 2 + 2) * (world - 1) * hidden, "{world} ranks together");
    }
}
