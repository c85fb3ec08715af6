//! Ranks that divide experts: predictions and gradients have the bits of ranks with all experts, whose weights are not even read.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use collective::threads::{Threads, group};
use collective::{Collective, CollectiveError, HostCollective};
use model::{
    Architecture, Config, Decoder, GradientSink, Gradients, LayerSource, Layout, Pack, Parameters, PassRanks,
    Prediction, PredictionGradient, Recompute, RoutedTokens, SharedCores, Sizes, Target, ThreadPool,
    TrainedTargets, Unit, failed_call,
};

use crate::common::bits;
use crate::common::counting::CountingRank;

/// Against hangs only.
const DEADLINE: Duration = Duration::from_secs(60);
const EXPERTS: usize = 4;

/// A model whose layers have experts.
fn config(architecture: Architecture) -> Config {
    let sizes = Sizes {
        vocab_size: 64,
        hidden_size: 24,
        intermediate_size: 40,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        max_position_embeddings: 128,
    };
    Config::fresh(&sizes).of_family(architecture).with_experts(EXPERTS, 2)
}

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| (4 + (i * i * 31 + i * 17 + seed * 29) % 60) as u32).collect()
}

/// The pack of data rank `rank`: the third has none.
fn pack(rank: usize) -> Pack {
    let mut pack = Pack::new();
    if rank != 2 {
        let prompt = pack.push(&tokens(9 + rank, rank)).unwrap();
        pack.push_continuation(prompt, &tokens(5, rank + 1)).unwrap();
        pack.push_continuation(prompt, &tokens(7, rank + 2)).unwrap();
        pack.push(&tokens(2 + 3 * rank, rank + 3)).unwrap();
    }
    pack
}

/// The gradients of each section of a rank.
struct Sections {
    current: usize,
    all: Vec<Gradients>,
    routed: Vec<RoutedTokens>,
    done: usize,
}

impl GradientSink for Sections {
    fn section(&mut self, index: usize) {
        self.current = index;
    }

    fn unit(&mut self, unit: Unit) -> &mut [f32] {
        self.all[self.current].unit(unit)
    }

    fn done(&mut self, _: Unit) {
        self.done += 1;
    }

    fn routed(&mut self, index: usize, tokens: &RoutedTokens) {
        self.routed.resize(self.routed.len().max(index + 1), RoutedTokens::default());
        self.routed[index].merge(tokens);
    }
}

/// The layers of some parameters.
struct Layers<'a>(&'a Parameters);

impl LayerSource for Layers<'_> {
    fn layer(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        Ok(Arc::new(self.0.values()[self.0.layout().layers()[index].clone()].to_vec()))
    }
}

/// What passes over a pack give.
struct Passed {
    /// Bits of the predictions of training and of scoring.
    predictions: [Vec<[u32; 3]>; 2],
    /// Of each section.
    gradients: Vec<Gradients>,
    routed: Vec<RoutedTokens>,
}

/// How a rank computes.
#[derive(Clone, Copy, Debug)]
struct Way {
    recompute: Recompute,
    /// Whether layers come from a source.
    through: bool,
    threads: usize,
}

fn decoder(config: &Config, parameters: &Arc<Parameters>, way: Way) -> Decoder {
    if !way.through {
        return Decoder::trainable(config, parameters, way.recompute);
    }
    let layout = parameters.layout();
    let of = |unit: Unit| Arc::new(parameters.values()[layout.unit(unit)].to_vec());
    Decoder::without_layers(config, layout, &of(Unit::Embedding), &of(Unit::Tail), way.recompute)
}

/// The passes of one rank.
fn passes(
    config: &Config,
    parameters: &Arc<Parameters>,
    way: Way,
    ranks: PassRanks,
    pack: &Pack,
) -> candle_core::Result<Passed> {
    let own = ranks.sections / ranks.context_degree();
    let decoder = decoder(config, parameters, way).among(ranks);
    let rows: Vec<usize> = (0..pack.token_ids().len()).filter(|row| row % 3 > 0).collect();
    let target = |row: &usize| Target { token: (row % 50) as u32, temperature: 1.0, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    let slope =
        |i: usize| PredictionGradient { logprob: 0.1 * (i % 9) as f32 - 0.3, entropy: 0.02, value: 0.0 };
    let all = (0..own).map(|_| Gradients::zeros(parameters.layout())).collect();
    let mut sink = Sections { current: 0, all, routed: Vec::new(), done: 0 };
    let pool = ThreadPool::new(&SharedCores::new(way.threads), way.threads);
    let samples = [rows.len()];
    let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &samples };
    let mut predicted = Vec::new();
    let mut slopes = |_: Range<usize>, predictions: &[Prediction]| {
        predicted.extend_from_slice(predictions);
        (0..predictions.len()).map(slope).collect()
    };
    let mut source = Layers(parameters);
    let scored = if way.through {
        decoder.train_through(&mut source, pack, trained, &mut slopes, &mut sink, &pool)?;
        decoder.score_through(&mut source, pack, &rows, &targets, &pool)?
    } else {
        decoder.train(pack, trained, &mut slopes, &mut sink, &pool)?;
        decoder.score(pack, &rows, &targets, &pool)?
    };
    assert_eq!(sink.done, own * (config.num_layers() + 2));
    let of = |all: Vec<Prediction>| {
        all.iter().map(|p| [p.logprob, p.entropy, p.value].map(f32::to_bits)).collect()
    };
    Ok(Passed { predictions: [of(predicted), of(scored)], gradients: sink.all, routed: sink.routed })
}

/// The values of experts `range` of `count` parts of each operand.
fn experts(layout: &Layout, world: usize, rank: usize) -> Vec<Range<usize>> {
    let all = (0..layout.layers().len()).flat_map(|index| layout.expert_operands(index));
    let own = |Range { start, end }: Range<usize>| {
        let each = (end - start) / world;
        start + rank * each..start + (rank + 1) * each
    };
    all.map(own).collect()
}

/// The sum of `values` as a balanced binary tree.
fn tree(values: &[f32]) -> f32 {
    match values {
        [one] => *one,
        _ => tree(&values[..values.len() / 2]) + tree(&values[values.len() / 2..]),
    }
}

/// `ranks` threads, each with its part of `run`.
fn on_threads<R: Send>(ranks: usize, run: impl Fn(Threads) -> R + Sync) -> Vec<R> {
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            group(ranks, DEADLINE).into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Compares `data` times `context` ranks that divide experts with ranks that have all of them.
fn compare(config: &Config, [data, context, sections]: [usize; 3], way: Way) {
    let parameters = Arc::new(Parameters::random(config, 7));
    let (layout, world) = (parameters.layout(), data * context);
    let all: Vec<Range<usize>> = (0..world).flat_map(|rank| experts(layout, world, rank)).collect();
    let case = format!("{:?}: {data} x {context} in {sections} sections, {way:?}", config.architecture);
    let alone = Way { recompute: Recompute::None, through: false, threads: 1 };
    let expected: Vec<Passed> = (0..data)
        .map(|rank| match pack(rank) {
            empty if empty.token_ids().is_empty() => Passed {
                predictions: Default::default(),
                gradients: (0..sections).map(|_| Gradients::zeros(layout)).collect(),
                routed: Vec::new(),
            },
            pack => {
                let ranks = PassRanks { sections, ..PassRanks::default() };
                passes(config, &parameters, alone, ranks, &pack).unwrap()
            }
        })
        .collect();
    let found = on_threads(world, |ranks| {
        let rank = ranks.rank();
        // Experts of other ranks are not read.
        let mut own = Parameters::clone(&parameters);
        all.iter().for_each(|range| own.values_mut()[range.clone()].fill(f32::NAN));
        for range in experts(layout, world, rank) {
            own.values_mut()[range.clone()].copy_from_slice(&parameters.values()[range]);
        }
        let of_context = (context > 1).then(|| Arc::from(ranks.split(rank / context).unwrap()));
        let of_pass = PassRanks {
            context: of_context.map(|ranks: Arc<dyn HostCollective>| ranks as Arc<dyn Collective>),
            expert: Some(Arc::new(ranks)),
            sections,
            ..PassRanks::default()
        };
        passes(config, &Arc::new(own), way, of_pass, &pack(rank / context)).unwrap()
    });
    for (rank, passed) in found.iter().enumerate() {
        let of_data = &expected[rank / context];
        assert_eq!(passed.predictions, of_data.predictions, "{case}: predictions of rank {rank}");
        let each = sections / context;
        let first = rank % context * each;
        for (section, gradients) in passed.gradients.iter().enumerate() {
            let (mut dense, mut of_one) = (gradients.clone(), of_data.gradients[first + section].clone());
            for range in &all {
                dense.values_mut()[range.clone()].fill(0.0);
                of_one.values_mut()[range.clone()].fill(0.0);
            }
            assert!(bits(dense.values()) == bits(of_one.values()), "{case}: rank {rank}, section {section}");
        }
        let own = experts(layout, world, rank);
        let others = all.iter().filter(|range| !own.contains(range));
        let last = passed.gradients.last().unwrap();
        assert!(others.flat_map(|range| &last.values()[range.clone()]).all(|value| *value == 0.0), "{case}");
        let mut moved = 0;
        for at in own.into_iter().flatten() {
            let leaves: Vec<f32> = expected
                .iter()
                .flat_map(|passed| passed.gradients.iter().map(|gradients| gradients.values()[at]))
                .collect();
            assert_eq!(last.values()[at].to_bits(), tree(&leaves).to_bits(), "{case}: {at} of rank {rank}");
            moved += usize::from(last.values()[at] != 0.0);
        }
        assert!(moved > 1000, "{case}: {moved} gradients of experts");
    }
    let total = |passed: &[Passed]| {
        let mut all = vec![RoutedTokens::default(); config.num_layers()];
        for of in passed {
            all.iter_mut().zip(&of.routed).for_each(|(all, tokens)| all.merge(tokens));
        }
        all
    };
    assert_eq!(total(&found), total(&expected), "{case}: every token is counted once");
}

#[test]
fn every_degree_has_the_bits_of_ranks_with_all_experts() {
    for architecture in [Architecture::Qwen3Moe, Architecture::Glm4Moe, Architecture::GptOss] {
        let config = config(architecture);
        for (world, recompute, through, threads) in [
            (1, Recompute::None, false, 1),
            (2, Recompute::None, false, 2),
            (2, Recompute::Block, true, 1),
            (4, Recompute::Block, false, 1),
            (4, Recompute::None, true, 2),
        ] {
            compare(&config, [world, 1, 1], Way { recompute, through, threads });
        }
    }
}

#[test]
fn sections_and_context_ranks_are_leaves_of_the_sum() {
    for architecture in [Architecture::Qwen3Moe, Architecture::Glm4Moe, Architecture::GptOss] {
        let config = config(architecture);
        for shape in [[2, 1, 2], [4, 1, 4], [1, 2, 2], [1, 4, 4], [2, 2, 4]] {
            let recomputes: &[Recompute] = match architecture {
                Architecture::GptOss => &[Recompute::None, Recompute::Block],
                _ => &[Recompute::Block],
            };
            for &recompute in recomputes {
                compare(&config, shape, Way { recompute, through: shape[1] > 1, threads: 2 });
            }
        }
    }
}

/// Forward and backward send `s k h (e - 1) / e` values twice each, the backward one more with each row, and each forward the numbers of
/// rows.
#[test]
fn only_rows_of_other_ranks_experts_are_sent() {
    let config = config(Architecture::Qwen3Moe);
    let parameters = Arc::new(Parameters::random(&config, 7));
    let (layers, hidden, per_token) = (config.num_layers(), config.hidden_size, 2);
    // Every pair of experts as often: they are loaded evenly.
    let pairs: Vec<[u16; 2]> = (0..4).flat_map(|a| (a + 1..4).map(move |b| [a, b])).collect();
    let given = |tokens: usize| (0..tokens).flat_map(|token| pairs[token % 6].repeat(layers)).collect();
    for world in [2, 4] {
        let tokens_each = 24;
        let sent = on_threads(world, |ranks| {
            let rank = ranks.rank();
            let ranks = CountingRank::new(ranks);
            let exchanged = Arc::clone(&ranks.exchanged);
            let expert = Arc::new(ranks) as Arc<dyn Collective>;
            let ranks = PassRanks { expert: Some(expert), ..PassRanks::default() };
            let mut pack = Pack::new();
            pack.push(&tokens(tokens_each, rank)).unwrap();
            let pack = pack.routed(given(tokens_each));
            let way = Way { recompute: Recompute::None, through: false, threads: 1 };
            let passed = passes(&config, &parameters, way, ranks, &pack).unwrap();
            for tokens in &passed.routed {
                assert_eq!(tokens.given, tokens_each as u64);
                assert_eq!(tokens.of_expert, [12; EXPERTS]);
            }
            exchanged.load(Ordering::Relaxed)
        });
        let rows = tokens_each * per_token * (world - 1) / world;
        let counts = EXPERTS / world * (world - 1);
        // A training pass and a scoring pass.
        let expected = layers * ((2 * rows * hidden + counts) * 2 + 2 * rows * (hidden + 1));
        assert_eq!(sent, vec![expected; world]);
    }
}

#[test]
fn a_rank_that_is_gone_ends_the_pass_of_the_others_with_its_number() {
    let config = config(Architecture::Qwen3Moe);
    let parameters = Arc::new(Parameters::random(&config, 7));
    let mut ranks = group(2, DEADLINE).into_iter();
    let expert = ranks.next().map(|own| Arc::new(own) as Arc<dyn Collective>);
    drop(ranks);
    let ranks = PassRanks { expert, ..PassRanks::default() };
    let way = Way { recompute: Recompute::None, through: false, threads: 1 };
    let Err(error) = passes(&config, &parameters, way, ranks, &pack(0)) else { panic!("the other is gone") };
    let error = failed_call(error).expect("the error is that of a call");
    assert!(matches!(error, CollectiveError::Gone { rank: 0, peer: 1, .. }), "{error}");
}

#[test]
fn what_ranks_cannot_divide_is_named_with_the_nearest_number() {
    let obstacle = |config: &Config, degree| PassRanks::expert_obstacle(config, degree).unwrap_or_default();
    let config = config(Architecture::Qwen3Moe);
    assert_eq!((obstacle(&config, 1), obstacle(&config, 4)), (String::new(), String::new()));
    assert_eq!(obstacle(&config, 3), "4 experts are not divisible by 3; 2 divides them");
    let dense = Config { architecture: Architecture::Qwen3, ..config }.of_family(Architecture::Qwen3);
    assert_eq!(obstacle(&dense, 2), "the model has no experts");
}
