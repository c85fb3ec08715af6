//! A sampler whose weights tensor-parallel ranks share (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053): threads of one process.
//!
//! A rank has its shard of the weights ([`ModelShard`]), and the keys and values of its heads; where ranks are more than key-value
//! heads, several have one each. The first is the calling thread: it
//! schedules, and its cache has the page tables. The others repeat its copies of pages and make the same steps. Every layer sums
//! partial results twice, and the logits of all tokens come together on the first rank.
//!
//! Invariant: a step gives the bits of one rank, because sums are balanced binary trees ([`Reduction::Tree`](crate::Reduction)). It
//! ends: a rank that fails or panics leaves the calls of the others, whose waits have a deadline.

use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use collective::{CollectiveError, Position, threads};

use crate::{
    Config, Decoder, KvCache, ModelError, ModelShard, PassRanks, Quantization, StepSequence, TensorRanks,
    ThreadPool, failed_call,
};

/// The ranks that share the weights of a sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerRanks {
    /// Number of ranks.
    pub degree: usize,
    /// Longest wait of one rank for another.
    pub wait: Duration,
}

/// A sampler on several ranks.
#[derive(Debug)]
pub struct SharedSampler {
    config: Config,
    ranks: SamplerRanks,
    members: Vec<SamplerRank>,
    /// Bytes that the ranks took from the version that is served.
    taken: u64,
}

/// One rank.
#[derive(Debug)]
struct SamplerRank {
    shard: ModelShard,
    /// `None` before the first weights, and after a failure.
    decoder: Option<Decoder>,
    /// The keys and values of its heads, from its first step on; those of the first rank are in the cache of the caller.
    cache: Option<KvCache>,
}

/// A rank in a step. It leaves the calls of its weights unless the step ends well.
struct SteppingRank<'a> {
    rank: &'a mut SamplerRank,
    ended: bool,
}

/// What ranks compute together.
#[derive(Clone, Copy)]
struct SharedStep<'a> {
    sequences: &'a [StepSequence<'a>],
    /// Copies of pages since the last step, from and to.
    copies: &'a [[u32; 2]],
    /// Positions of the cache.
    positions: usize,
    pool: &'a ThreadPool,
}

/// Why a rank has no result.
enum RankFailure {
    /// Another rank left, or did not come in time.
    Call(CollectiveError),
    /// Its own.
    Own(String),
}

impl SamplerRanks {
    /// Checks that the ranks can share a model of this `config`.
    ///
    /// # Errors
    /// [`ModelError::Shard`], with the nearest degree that can.
    pub fn check(self, config: &Config) -> Result<(), ModelError> {
        self.shard(config, 0).map(drop)
    }

    /// Bytes of f32 weights that the ranks take from a version of a model of this `config`: the shards of all, with the copies of
    /// what every rank has.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn weight_bytes(self, config: &Config) -> Result<u64, ModelError> {
        let of_rank = |rank| Ok((size_of::<f32>() * self.shard(config, rank)?.layout().len()) as u64);
        (0..self.degree).map(of_rank).sum()
    }

    fn shard(self, config: &Config, rank: usize) -> Result<ModelShard, ModelError> {
        ModelShard::check_sums(config, self.degree)?;
        ModelShard::new(config, Position { rank, world: self.degree })
    }
}

impl SharedSampler {
    /// The ranks of a model of this `config`, before their first weights ([`Self::serve`]).
    ///
    /// # Errors
    /// [`ModelError::Shard`] if the model cannot be divided among so many.
    pub fn new(config: &Config, ranks: SamplerRanks) -> Result<Self, ModelError> {
        let of_rank =
            |rank| Ok(SamplerRank { shard: ranks.shard(config, rank)?, decoder: None, cache: None });
        let members = (0..ranks.degree).map(of_rank).collect::<Result<_, ModelError>>()?;
        Ok(Self { config: config.clone(), ranks, members, taken: 0 })
    }

    /// The whole model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The cache of the first rank for at least `positions` positions, with the page tables of all.
    #[must_use]
    pub fn cache(&self, positions: usize) -> KvCache {
        KvCache::new(self.members[0].shard.config(), positions).repeated()
    }

    /// Memory of the weights of all ranks, and of the keys and values of all but the first, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let of_rank = |rank: &SamplerRank| {
            rank.decoder.as_ref().map_or(0, Decoder::bytes) + rank.cache.as_ref().map_or(0, KvCache::bytes)
        };
        self.members.iter().map(of_rank).sum()
    }

    /// Bytes that the ranks took from the version that is served: [`SamplerRanks::weight_bytes`].
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Serves new weights from the next step on; caches stay. The weights before are freed first. `of_whole` has the values of a range
    /// of the whole model: every rank takes those of its shard, each once, layer by layer, and packs them.
    pub fn serve<'a>(&mut self, of_whole: impl Fn(Range<usize>) -> Cow<'a, [f32]> + Sync, pool: &ThreadPool) {
        self.members.iter_mut().for_each(|rank| rank.decoder = None);
        let taken = AtomicU64::new(0);
        let group = threads::group(self.ranks.degree, self.ranks.wait);
        for (rank, calls) in self.members.iter_mut().zip(group) {
            let SamplerRank { shard, decoder, .. } = rank;
            let counted = |range: Range<usize>| {
                let values = of_whole(range);
                taken.fetch_add(size_of_val(&*values) as u64, Ordering::Relaxed);
                values
            };
            let unit = |unit| Cow::Owned(shard.cut_unit(unit, counted));
            let own = Decoder::of_units(shard.config(), shard.layout(), unit, Quantization::None, pool);
            let tensor = TensorRanks::new(Arc::new(calls), self.config.vocab_size);
            *decoder = Some(own.among(PassRanks { tensor: Some(tensor), ..PassRanks::default() }));
        }
        self.taken = taken.into_inner();
    }

    /// One step of continuous batching ([`Decoder::step`]) over a `cache` of [`Self::cache`]: the logits `[wanted, vocab_size]`.
    ///
    /// # Errors
    /// [`ModelError::SamplerRank`] with the rank that failed, after which weights have to be served again.
    pub fn step(
        &mut self,
        cache: &mut KvCache,
        sequences: &[StepSequence<'_>],
        pool: &ThreadPool,
    ) -> Result<Vec<f32>, ModelError> {
        let copies = cache.take_copies();
        let positions = cache.total_pages() * KvCache::PAGE;
        let step = SharedStep { sequences, copies: &copies, positions, pool };
        let mut members = self.members.iter_mut().map(|rank| SteppingRank { rank, ended: false });
        let Some(first) = members.next() else { return Ok(Vec::new()) };
        let results = thread::scope(|scope| {
            let mut others = Vec::with_capacity(self.ranks.degree);
            for (index, rank) in members.enumerate() {
                let thread = thread::Builder::new().name(format!("sampler-rank-{}", index + 1));
                others.push(thread.spawn_scoped(scope, move || rank.run(None, step)));
            }
            let own = catch_unwind(AssertUnwindSafe(|| first.run(Some(cache), step)));
            let own = own.unwrap_or_else(|panic| Err(panicked(&*panic)));
            let join = |thread: std::io::Result<thread::ScopedJoinHandle<'_, _>>| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| Err(panicked(&*panic))),
                Err(error) => Err(RankFailure::Own(format!("its thread cannot be started: {error}"))),
            };
            std::iter::once(own).chain(others.into_iter().map(join)).collect::<Vec<_>>()
        });
        let wanted = sequences.iter().map(|sequence| sequence.wanted).sum();
        Ok(side_by_side(&all_logits(results)?, wanted))
    }
}

impl SteppingRank<'_> {
    /// The logits `[wanted, own tokens]` of this rank; the `cache` is that of the caller on the first rank.
    fn run(mut self, cache: Option<&mut KvCache>, step: SharedStep<'_>) -> Result<Vec<f32>, RankFailure> {
        let SamplerRank { shard, decoder, cache: own } = &mut *self.rank;
        let Some(decoder) = decoder else {
            return Err(RankFailure::Own("it has no weights since an earlier failure".to_owned()));
        };
        let cache = match cache {
            Some(cache) => cache,
            None => {
                let own = own.get_or_insert_with(|| KvCache::new(shard.config(), step.positions));
                own.repeat(step.copies);
                own
            }
        };
        let logits = decoder.step(cache, step.sequences, step.pool);
        self.ended = logits.is_ok();
        logits.map_err(|error| match failed_call(error) {
            Ok(error) => RankFailure::Call(error),
            Err(error) => RankFailure::Own(error.to_string()),
        })
    }
}

impl Drop for SteppingRank<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // The calls of the other ranks end now, and not at the deadline.
            self.rank.decoder = None;
        }
    }
}

fn panicked(panic: &(dyn Any + Send)) -> RankFailure {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    RankFailure::Own(format!("it panicked: {}", text.unwrap_or_else(|| "no message".to_owned())))
}

/// The logits of all ranks, or the failure that caused those of the others.
fn all_logits(results: Vec<Result<Vec<f32>, RankFailure>>) -> Result<Vec<Vec<f32>>, ModelError> {
    let degree = results.len();
    let (mut all, mut failures) = (Vec::with_capacity(degree), Vec::new());
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(logits) => all.push(logits),
            Err(RankFailure::Own(reason)) => failures.push((0, rank, reason)),
            Err(RankFailure::Call(error)) => {
                let late = matches!(error, CollectiveError::Deadline { .. });
                failures.push((if late { 1 } else { 2 }, rank, error.to_string()));
            }
        }
    }
    match failures.into_iter().min() {
        None => Ok(all),
        Some((_, rank, reason)) => Err(ModelError::SamplerRank { rank, degree, reason }),
    }
}

/// `[rows, V]` of the columns `[rows, own tokens]` of each rank.
fn side_by_side(parts: &[Vec<f32>], rows: usize) -> Vec<f32> {
    let mut all = Vec::with_capacity(parts.iter().map(Vec::len).sum());
    let widths: Vec<usize> = parts.iter().map(|part| part.len().checked_div(rows).unwrap_or(0)).collect();
    for row in 0..rows {
        for (part, width) in parts.iter().zip(&widths) {
            all.extend_from_slice(&part[row * width..][..*width]);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Parameters, Reduction, Sizes};

    fn sampler(wait: Duration) -> (SharedSampler, KvCache) {
        let sizes = Sizes {
            vocab_size: 30,
            hidden_size: 16,
            intermediate_size: 32,
            num_layers: 2,
            num_heads: 4,
            num_kv_heads: 4,
            max_position_embeddings: 32,
        };
        let config = Config { reduction: Reduction::Tree, ..Config::fresh(&sizes) };
        let mut sampler = SharedSampler::new(&config, SamplerRanks { degree: 4, wait }).unwrap();
        let parameters = Parameters::random(&config, 3);
        sampler.serve(|range| Cow::Borrowed(&parameters.values()[range]), &ThreadPool::single());
        let cache = sampler.cache(32);
        (sampler, cache)
    }

    fn step(sampler: &mut SharedSampler, cache: &mut KvCache, token: u32) -> Result<Vec<f32>, ModelError> {
        let pages = [0];
        let sequence =
            StepSequence { tokens: &[1, token], position: 0, pages: &pages, wanted: 1, adapter: None };
        sampler.step(cache, &[sequence], &ThreadPool::single())
    }

    /// The deadline is long: a failure ends the step without it.
    #[test]
    fn a_rank_that_panics_ends_the_step_and_is_named() {
        let (mut sampler, mut cache) = sampler(Duration::from_secs(3600));
        assert_eq!(step(&mut sampler, &mut cache, 2).unwrap().len(), 30);
        // Without pages the rank panics in its first layer.
        sampler.members[2].cache = Some(KvCache::new(sampler.members[2].shard.config(), 0));
        let error = step(&mut sampler, &mut cache, 2).unwrap_err().to_string();
        assert!(error.contains("rank 2 of the 4") && error.contains("it panicked"), "{error}");
        let again = step(&mut sampler, &mut cache, 2).unwrap_err().to_string();
        assert!(again.contains("no weights since an earlier failure"), "{again}");
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_at_the_deadline() {
        let (mut sampler, mut cache) = sampler(Duration::from_millis(50));
        // Rank 1 waits in a group of its own.
        let mut others = threads::group(4, Duration::from_millis(50));
        let tensor = TensorRanks::new(Arc::new(others.remove(1)), 30);
        let elsewhere = PassRanks { tensor: Some(tensor), ..PassRanks::default() };
        let before = sampler.members[1].decoder.clone();
        sampler.members[1].decoder = before.clone().map(|decoder| decoder.among(elsewhere));
        let error = step(&mut sampler, &mut cache, 2).unwrap_err().to_string();
        assert!(error.contains("of the 4") && error.contains("0.05"), "{error}");
        drop((others, before));
    }

    #[test]
    fn a_token_beyond_the_vocabulary_is_an_error_of_the_step() {
        let (mut sampler, mut cache) = sampler(Duration::from_secs(3600));
        let error = step(&mut sampler, &mut cache, 30).unwrap_err().to_string();
        assert!(error.contains("rank 0 of the 4") && error.contains("30"), "{error}");
    }
}
