//! Passes in sections: among any number of context ranks the bits are those of one rank, and without sections the same up to rounding.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use collective::threads::{Threads, group};
use collective::{Collective, CollectiveError};
use model::{
    Config, ContextExchange, Decoder, GradientSink, Gradients, LayerSource, Layout, Pack, Parameters,
    PassRanks, Prediction, PredictionGradient, Recompute, RoutedTokens, SharedCores, Sizes, Target,
    ThreadPool, TrainedTargets, Unit, failed_call,
};

use crate::common::counting::CountingRank;
use crate::common::{Golden, bits, samples};

const DEADLINE: Duration = Duration::from_secs(60);
const SECTIONS: usize = 4;

/// The gradients of each section of a rank.
struct SectionGradients {
    current: usize,
    all: Vec<Gradients>,
    routed: Vec<RoutedTokens>,
    done: usize,
}

impl SectionGradients {
    fn new(layout: &Arc<Layout>, sections: usize) -> Self {
        let all = (0..sections).map(|_| Gradients::zeros(layout)).collect();
        Self { current: 0, all, routed: Vec::new(), done: 0 }
    }
}

impl GradientSink for SectionGradients {
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

/// The layers of `parameters`.
struct Layers<'a>(&'a Parameters);

impl LayerSource for Layers<'_> {
    fn layer(&mut self, index: usize) -> candle_core::Result<Arc<Vec<f32>>> {
        Ok(Arc::new(self.0.values()[self.0.layout().unit(Unit::Layer(index))].to_vec()))
    }
}

/// What passes over a pack give.
#[derive(Debug, PartialEq)]
struct Passed {
    /// Bits of the predictions of training and of scoring.
    predictions: [Vec<[u32; 3]>; 2],
    /// Bits of the gradients of each section.
    gradients: Vec<Vec<u32>>,
    routed: Vec<RoutedTokens>,
}

/// A pack with a long sequence, short ones, and a prompt with completions.
fn pack() -> Pack {
    let tokens = |n: usize, seed: usize| -> Vec<u32> {
        (0..n).map(|i| (4 + (i * i * 31 + i * 17 + seed * 29) % 60) as u32).collect()
    };
    let mut pack = Pack::new();
    pack.push(&tokens(9, 1)).unwrap();
    let prompt = pack.push(&tokens(21, 2)).unwrap();
    for (n, seed) in [(13, 3), (70, 4), (2, 5)] {
        pack.push_continuation(prompt, &tokens(n, seed)).unwrap();
    }
    pack.push(&tokens(7, 6)).unwrap();
    pack.push(&tokens(90, 7)).unwrap();
    pack
}

/// The passes of one rank.
fn passes(
    (config, parameters): (&Config, &Arc<Parameters>),
    recompute: Recompute,
    ranks: PassRanks,
    pack: &Pack,
    threads: usize,
) -> candle_core::Result<Passed> {
    let own = ranks.sections / ranks.context_degree();
    let decoder = Decoder::trainable(config, parameters, recompute).among(ranks);
    let rows: Vec<usize> = (0..pack.token_ids().len()).filter(|row| row % 3 > 0).collect();
    let target = |row: &usize| Target { token: (row % 50) as u32, temperature: 1.0, kept: None };
    let targets: Vec<_> = rows.iter().map(target).collect();
    let slope =
        |i: usize| PredictionGradient { logprob: 0.1 * (i % 9) as f32 - 0.3, entropy: 0.02, value: 0.1 };
    let slopes: Vec<_> = (0..rows.len()).map(slope).collect();
    let mut sink = SectionGradients::new(parameters.layout(), own);
    let pool = ThreadPool::new(&SharedCores::new(threads), threads);
    let samples = samples(rows.len());
    let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &samples };
    let mut predicted = Vec::new();
    let mut slopes_of = |range: Range<usize>, predictions: &[Prediction]| {
        let start: usize = samples[..range.start].iter().sum();
        predicted.extend_from_slice(predictions);
        slopes[start..start + predictions.len()].to_vec()
    };
    decoder.train(pack, trained, &mut slopes_of, &mut sink, &pool)?;
    assert_eq!(sink.done, own * (config.num_layers() + 2));
    let scored = decoder.score(pack, &rows, &targets, &pool)?;
    let of = |all: Vec<Prediction>| {
        all.iter().map(|p| [p.logprob, p.entropy, p.value].map(f32::to_bits)).collect()
    };
    Ok(Passed {
        predictions: [of(predicted), of(scored)],
        gradients: sink.all.iter().map(|gradients| bits(gradients.values())).collect(),
        routed: sink.routed,
    })
}

/// The passes among `degree` ranks: the predictions of each, which are the same, and the gradients of all sections.
fn among(
    network: (&Config, &Arc<Parameters>),
    recompute: Recompute,
    (degree, exchange): (usize, ContextExchange),
    pack: &Pack,
    threads: usize,
) -> Passed {
    let ranks = |rank: Threads| PassRanks {
        context: Some(Arc::new(rank)),
        sections: SECTIONS,
        exchange,
        ..PassRanks::default()
    };
    let run = |rank| passes(network, recompute, ranks(rank), pack, threads).unwrap();
    let run = &run;
    let all: Vec<Passed> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            group(degree, DEADLINE).into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut whole = Passed { predictions: Default::default(), gradients: Vec::new(), routed: Vec::new() };
    for (rank, passed) in all.into_iter().enumerate() {
        if rank == 0 {
            whole.predictions = passed.predictions;
        } else {
            assert_eq!(whole.predictions, passed.predictions);
        }
        whole.gradients.extend(passed.gradients);
        whole.routed.resize(passed.routed.len(), RoutedTokens::default());
        whole.routed.iter_mut().zip(&passed.routed).for_each(|(all, tokens)| all.merge(tokens));
    }
    whole
}

fn models() -> Vec<(String, Config)> {
    let fresh = Config::fresh(&Sizes {
        vocab_size: 64,
        hidden_size: 24,
        intermediate_size: 40,
        num_layers: 2,
        num_heads: 8,
        num_kv_heads: 4,
        max_position_embeddings: 256,
    });
    let untied = Config { tie_word_embeddings: !fresh.tie_word_embeddings, ..fresh.clone() };
    let mut all = vec![("fresh".to_owned(), fresh), ("other ends".to_owned(), untied)];
    for name in ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma3"] {
        let config = Golden::open(name).config;
        // With one key-value head the exchange of heads is refused.
        let shared = Config { num_kv_heads: config.num_heads, ..config.clone() };
        all.extend([(name.to_owned(), config), (format!("{name} with more heads"), shared)]);
    }
    all
}

#[test]
fn every_degree_and_exchange_has_the_bits_of_one_rank() {
    let pack = pack();
    for (name, config) in models() {
        let parameters = Arc::new(Parameters::random(&config, 7));
        let network = (&config, &parameters);
        let one = PassRanks { sections: SECTIONS, ..PassRanks::default() };
        let expected = passes(network, Recompute::None, one.clone(), &pack, 1).unwrap();
        assert_eq!(expected.predictions[0], expected.predictions[1], "{name}");
        for recompute in [Recompute::None, Recompute::Block, Recompute::Sequence] {
            let threads: &[usize] = if recompute == Recompute::None { &[1, 3] } else { &[1] };
            for &threads in threads {
                let found = passes(network, recompute, one.clone(), &pack, threads).unwrap();
                assert!(found == expected, "{name} {recompute:?} on {threads} threads");
            }
            for degree in [1, 2, 4] {
                for exchange in [ContextExchange::Heads, ContextExchange::Keys] {
                    // One rank exchanges nothing.
                    let again =
                        degree == 1 && (recompute, exchange) != (Recompute::None, ContextExchange::Keys);
                    if again || PassRanks::obstacle(&config, degree, SECTIONS, exchange).is_some() {
                        continue;
                    }
                    let found = among(network, recompute, (degree, exchange), &pack, 1);
                    assert!(found == expected, "{name} {recompute:?} {degree} {exchange:?}");
                }
            }
        }
        let found = among(network, Recompute::Sequence, (2, ContextExchange::Keys), &pack, 2);
        assert!(found == expected, "{name} on two threads per rank");
    }
}

/// Sections, and ranks, without a token take part in the exchange.
#[test]
fn a_pack_may_have_fewer_tokens_than_sections() {
    let mut pack = Pack::new();
    pack.push(&[7, 8, 9]).unwrap();
    for (name, config) in models() {
        let parameters = Arc::new(Parameters::random(&config, 7));
        let network = (&config, &parameters);
        let one = PassRanks { sections: SECTIONS, ..PassRanks::default() };
        let expected = passes(network, Recompute::None, one, &pack, 1).unwrap();
        for exchange in [ContextExchange::Heads, ContextExchange::Keys] {
            if PassRanks::obstacle(&config, SECTIONS, SECTIONS, exchange).is_none() {
                let found = among(network, Recompute::Sequence, (SECTIONS, exchange), &pack, 1);
                assert!(found == expected, "{name} {exchange:?}");
            }
        }
    }
}

#[test]
fn sections_change_no_prediction_and_gradients_by_rounding_alone() {
    let pack = pack();
    for (name, config) in models() {
        let parameters = Arc::new(Parameters::random(&config, 7));
        let network = (&config, &parameters);
        let whole = passes(network, Recompute::None, PassRanks::default(), &pack, 2).unwrap();
        let ranks = PassRanks { sections: SECTIONS, ..PassRanks::default() };
        let found = passes(network, Recompute::None, ranks, &pack, 2).unwrap();
        assert!(whole.predictions == found.predictions && whole.routed == found.routed, "{name}");
        let sum = |at: usize| found.gradients.iter().map(|of| f64::from(f32::from_bits(of[at]))).sum::<f64>();
        let (mut difference, mut square) = (0.0_f64, 0.0_f64);
        for (at, whole) in whole.gradients[0].iter().enumerate() {
            let whole = f64::from(f32::from_bits(*whole));
            difference = difference.max((whole - sum(at)).abs());
            square = square.max(whole.abs());
        }
        assert!(difference < 2e-5 * square, "{name}: {difference} of {square}");
    }
}

/// Layers that come from a source are the same layers.
#[test]
fn layers_of_a_source_give_the_same_bits() {
    let (_, config) = &models()[1];
    let (parameters, pack) = (Arc::new(Parameters::random(config, 7)), pack());
    let expected = among((config, &parameters), Recompute::Block, (2, ContextExchange::Keys), &pack, 1);
    let layout = parameters.layout();
    let of = |unit: Unit| Arc::new(parameters.values()[layout.unit(unit)].to_vec());
    let (embedding, tail) = (of(Unit::Embedding), of(Unit::Tail));
    let run = |ranks: PassRanks| {
        let own = ranks.sections / ranks.context_degree();
        let decoder =
            Decoder::without_layers(config, layout, &embedding, &tail, Recompute::Block).among(ranks);
        let rows: Vec<usize> = (0..pack.token_ids().len()).filter(|row| row % 3 > 0).collect();
        let target = |row: &usize| Target { token: (row % 50) as u32, temperature: 1.0, kept: None };
        let targets: Vec<_> = rows.iter().map(target).collect();
        let slope =
            |i: usize| PredictionGradient { logprob: 0.1 * (i % 9) as f32 - 0.3, entropy: 0.02, value: 0.1 };
        let samples = [rows.len()];
        let trained = TrainedTargets { rows: &rows, targets: &targets, samples: &samples };
        let mut slopes =
            |_: Range<usize>, predictions: &[Prediction]| (0..predictions.len()).map(slope).collect();
        let mut sink = SectionGradients::new(layout, own);
        let (mut source, alone) = (Layers(&parameters), ThreadPool::single());
        decoder.train_through(&mut source, &pack, trained, &mut slopes, &mut sink, &alone).unwrap();
        let scored = decoder.score_through(&mut source, &pack, &rows, &targets, &alone).unwrap();
        let scored: Vec<_> =
            scored.iter().map(|p| [p.logprob, p.entropy, p.value].map(f32::to_bits)).collect();
        (sink.all.iter().map(|gradients| bits(gradients.values())).collect::<Vec<_>>(), scored)
    };
    let run = &run;
    let found: Vec<_> = std::thread::scope(|scope| {
        let start = |rank: Threads| {
            let context = Some(Arc::new(rank) as Arc<dyn Collective>);
            let ranks = PassRanks {
                context,
                sections: SECTIONS,
                exchange: ContextExchange::Keys,
                ..PassRanks::default()
            };
            scope.spawn(move || run(ranks))
        };
        let threads: Vec<_> = group(2, DEADLINE).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let gradients: Vec<_> = found.iter().flat_map(|(gradients, _)| gradients.clone()).collect();
    assert!(gradients == expected.gradients);
    assert!(found.iter().all(|(_, scored)| *scored == expected.predictions[1]));
}

/// Values that each of `degree` ranks sends to others in the forward of one long sequence, or of short ones; and the rows of each.
fn sent(config: &Config, pack: &Pack, degree: usize, exchange: ContextExchange) -> Vec<usize> {
    let parameters = Arc::new(Parameters::random(config, 7));
    let run = |ranks: Threads| {
        let ranks = CountingRank::new(ranks);
        let exchanged = Arc::clone(&ranks.exchanged);
        let context = Some(Arc::new(ranks) as Arc<dyn Collective>);
        let ranks = PassRanks { context, sections: degree, exchange, ..PassRanks::default() };
        let decoder = Decoder::trainable(config, &parameters, Recompute::None).among(ranks);
        let target = Target { token: 5, temperature: 1.0, kept: None };
        decoder.score(pack, &[3], &[target], &ThreadPool::single()).unwrap();
        exchanged.load(Ordering::Relaxed)
    };
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            group(degree, DEADLINE).into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Each of `c` ranks sends `(c - 1) / c` of the queries, keys, values and results of its tokens, or its keys and values to every
/// rank with later tokens, which is half of the ranks on average. Short sequences are not sent.
#[test]
fn only_what_attention_needs_is_sent() {
    let (_, config) = &models()[0];
    let (layers, heads) = (config.num_layers(), config.num_heads * config.head_dim);
    let keys = config.num_kv_heads * config.head_dim;
    let one: Vec<u32> = (0..160).map(|i| 4 + i % 50).collect();
    let mut long = Pack::new();
    long.push(&one).unwrap();
    let mut short = Pack::new();
    one.chunks(40).for_each(|sequence| assert!(short.push(sequence).is_ok()));
    for degree in [2, 4] {
        let found: usize = sent(config, &long, degree, ContextExchange::Heads).iter().sum();
        assert_eq!(found, layers * one.len() * (2 * heads + 2 * keys) * (degree - 1) / degree);
        let by_rank = sent(config, &long, degree, ContextExchange::Keys);
        assert_eq!(by_rank[degree - 1], 0, "no token follows those of the last rank");
        // A rank needs all rows before its own: the rows of rank r go to those after it.
        let rows: Vec<usize> = by_rank
            .iter()
            .enumerate()
            .map(|(rank, sent)| sent / (degree - 1 - rank).max(1) / (layers * 2 * keys))
            .collect();
        let last = one.len() - rows.iter().sum::<usize>();
        assert!(
            rows[..degree - 1].iter().chain([&last]).all(|rows| *rows > one.len() / degree / 2),
            "{rows:?}"
        );
        assert!(by_rank.iter().sum::<usize>() <= layers * one.len() * 2 * keys * (degree - 1));
        assert_eq!(sent(config, &short, degree, ContextExchange::Keys), vec![0; degree]);
    }
}

#[test]
fn the_cheaper_exchange_is_chosen_and_what_cannot_be_shared_is_named() {
    let (_, config) = &models()[0];
    assert_eq!(ContextExchange::cheaper(config, 4), ContextExchange::Keys);
    let all = Config { num_heads: 8, num_kv_heads: 8, ..config.clone() };
    assert_eq!(ContextExchange::cheaper(&all, 8), ContextExchange::Heads);
    let obstacle = |config: &Config, degree, sections, exchange| {
        PassRanks::obstacle(config, degree, sections, exchange).unwrap_or_default()
    };
    assert!(obstacle(config, 8, 8, ContextExchange::Heads).contains("4 key-value heads"));
    assert_eq!(obstacle(config, 8, 8, ContextExchange::Keys), "");
    assert!(obstacle(config, 3, 4, ContextExchange::Keys).contains("powers of two"));
    let recurrent = Golden::open("qwen3_next").config;
    assert!(obstacle(&recurrent, 2, 2, ContextExchange::Heads).contains("DeltaNet"));
    assert_eq!(obstacle(&recurrent, 1, 1, ContextExchange::Heads), "");
}

#[test]
fn a_rank_that_is_gone_ends_the_pass_of_the_others_with_its_number() {
    let (_, config) = &models()[0];
    let (parameters, pack) = (Arc::new(Parameters::random(config, 7)), pack());
    let mut ranks = group(2, DEADLINE).into_iter();
    let own = ranks.next().unwrap();
    drop(ranks);
    let ranks = PassRanks {
        context: Some(Arc::new(own)),
        sections: 2,
        exchange: ContextExchange::Keys,
        ..PassRanks::default()
    };
    let error = passes((config, &parameters), Recompute::None, ranks, &pack, 1).unwrap_err();
    let error = failed_call(error).expect("the error is that of a call");
    assert!(matches!(error, CollectiveError::Gone { rank: 0, peer: 1, .. }), "{error}");
}
