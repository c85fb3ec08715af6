//! What a forward keeps of a layer for its backward.
//!
//! Tensor ranks have the same residual streams. Each keeps the rows of some tokens, and the backward gathers them, as ZeRO-R partitions
//! activations (Rajbhandari et al. 2019, arXiv 1910.02054, section 6.1) and sequence parallelism does (Korthikanti et al. 2022, arXiv
//! 2205.05198).
//!
//! Invariant: rows are moved unchanged, so that no bit of a result depends on the number of ranks.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use collective::{Collective, even_shards};

use super::super::mixer::MixerTrace;
use super::{AttentionTrace, TransformerBlock};
use crate::ops::{matrix, unwritten, values};
use crate::pass_ranks::failed;

/// A residual stream `[T, d]`: all of it, or the rows of one of the ranks that have the same.
#[derive(Debug)]
pub(in crate::decoder) struct KeptStream {
    /// `[own rows, d]`
    own: Tensor,
    shared: Option<SharedStream>,
}

/// The ranks that have the other rows, and the values of each.
#[derive(Debug)]
struct SharedStream {
    ranks: Arc<dyn Collective>,
    shards: Vec<Range<usize>>,
}

/// An [`AttentionTrace`] whose residual stream is kept.
#[derive(Debug)]
pub(in crate::decoder) struct KeptAttention {
    mixer: MixerTrace,
    middle: KeptStream,
}

impl KeptStream {
    /// All of `stream [T, d]`, or the rows that this rank keeps.
    fn new(stream: &Tensor, ranks: Option<&Arc<dyn Collective>>) -> Result<Self> {
        let Some(ranks) = ranks else { return Ok(Self { own: stream.clone(), shared: None }) };
        let (rows, width) = stream.dims2()?;
        let of_rows = |rows: Range<usize>| rows.start * width..rows.end * width;
        let shards: Vec<_> = even_shards(rows, ranks.world()).into_iter().map(of_rows).collect();
        let own = matrix(values(stream)?[shards[ranks.rank()].clone()].to_vec(), width)?;
        Ok(Self { own, shared: Some(SharedStream { ranks: Arc::clone(ranks), shards }) })
    }

    /// All of the stream, `[T, d]`. All ranks that keep it make the call.
    pub(in crate::decoder) fn whole(self) -> Result<Tensor> {
        let Self { own, shared } = self;
        let Some(SharedStream { ranks, shards }) = shared else { return Ok(own) };
        let mut all = unwritten(shards.last().map_or(0, |last| last.end));
        ranks.all_gather(&values(&own)?, &shards, &mut all).map_err(failed)?;
        matrix(all, own.dim(1)?)
    }
}

impl KeptAttention {
    /// The activations. All ranks that keep their stream make the call.
    pub(in crate::decoder) fn whole(self) -> Result<AttentionTrace> {
        Ok(AttentionTrace { mixer: self.mixer, middle: self.middle.whole()? })
    }
}

impl TransformerBlock {
    /// Keeps the residual stream `x [T, d]`.
    pub(in crate::decoder) fn kept(&self, x: &Tensor) -> Result<KeptStream> {
        KeptStream::new(x, self.ranks.as_ref().map(|tensor| &tensor.ranks))
    }

    /// Keeps the activations of the attention half.
    pub(in crate::decoder) fn kept_attention(&self, trace: AttentionTrace) -> Result<KeptAttention> {
        Ok(KeptAttention { mixer: trace.mixer, middle: self.kept(&trace.middle)? })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_rank_keeps_some_rows_and_gets_all_back() {
        for (rows, world) in [(7, 2), (1, 4), (8, 4), (0, 2)] {
            let stream: Vec<f32> = (0..rows * 3).map(|at| at as f32).collect();
            let ranks = collective::threads::group(world, Duration::from_secs(60));
            let kept = std::thread::scope(|scope| {
                let each = ranks.into_iter().map(|rank| {
                    scope.spawn(|| {
                        let rank: Arc<dyn Collective> = Arc::new(rank);
                        let kept = KeptStream::new(&matrix(stream.clone(), 3).unwrap(), Some(&rank)).unwrap();
                        let own = kept.own.dim(0).unwrap();
                        assert_eq!(*values(&kept.whole().unwrap()).unwrap(), stream);
                        own
                    })
                });
                let each: Vec<_> = each.collect();
                each.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
            });
            assert_eq!(kept.iter().sum::<usize>(), rows);
            assert!(kept.iter().all(|own| *own <= rows.div_ceil(world)), "{kept:?}");
        }
    }
}
