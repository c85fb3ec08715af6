//! A trainable token stream: ids with, per token, loss mask, behavior log-probability and policy version.
//!
//! Invariant: all streams of a [`Sample`] describe the same tokens. The only way to make one checks it.

use serde::{Deserialize, Serialize};

use crate::PolicyVersion;

/// Consecutive tokens sampled by one policy version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRun {
    /// The version that sampled (or, for prompt tokens, first read) the tokens.
    pub version: PolicyVersion,
    /// Number of tokens, at least 1.
    pub len: u32,
}

/// The tokens kept by truncation (top-k, top-p, min-p), for every token of the loss mask in order.
///
/// The trainer renormalises over exactly these, so that its log-probabilities are of the distribution sampled from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptTokens {
    /// `[masked + 1]` start of each set in `ids`; the first is 0, the last `ids.len()`.
    pub offsets: Vec<u32>,
    /// Token ids, ascending within a set.
    pub ids: Vec<u32>,
}

impl KeptTokens {
    /// `[kept]` ids kept at the `n`-th token of the loss mask.
    #[must_use]
    pub fn set(&self, n: usize) -> &[u32] {
        &self.ids[self.offsets[n] as usize..self.offsets[n + 1] as usize]
    }
}

/// The experts that the network of the sampler chose (mixture of experts), for every token but the last, which it did not
/// read. A trainer that uses them computes with the sampler's routes (routing replay, Ma et al. 2025, arXiv 2510.11370).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenExperts {
    /// Experts of a token in each layer that has some, at least 1.
    pub per_token: u32,
    /// `[tokens - 1, layers with experts, per_token]` numbers of experts, ascending in each layer.
    pub ids: Vec<u16>,
}

impl TokenExperts {
    /// Experts of a token in all layers, in a sample of `tokens` tokens.
    #[must_use]
    pub fn slots(&self, tokens: usize) -> usize {
        self.ids.len().checked_div(tokens.saturating_sub(1)).unwrap_or(0)
    }

    /// Adds the experts of the tokens that a later call read first, of `all` tokens up to its end. Those of tokens before stay as they
    /// were when they were read first.
    pub fn extend(&mut self, all: &Self) {
        self.ids.extend_from_slice(all.ids.get(self.ids.len()..).unwrap_or_default());
    }

    /// Keeps the experts of the first `kept` of `tokens` tokens.
    pub fn truncate(&mut self, kept: usize, tokens: usize) {
        self.ids.truncate(kept.saturating_sub(1) * self.slots(tokens));
    }
}

/// The streams of a [`Sample`] before they are checked; `T` tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleStreams {
    /// `[tokens]` prompt, completions, and the messages of the environment between them.
    pub token_ids: Vec<u32>,
    /// `[tokens]` true where the policy sampled the token and is trained on it. The first token is never trained on.
    pub loss_mask: Vec<bool>,
    /// `[tokens]` behavior log-probabilities, nats, under the distribution that sampled the token; 0.0 without mask.
    pub behavior_logprobs: Vec<f32>,
    /// Runs that cover all `T` tokens in order.
    pub versions: Vec<VersionRun>,
    /// What truncation kept; `None` if nothing was cut off.
    pub kept: Option<KeptTokens>,
    /// The experts of the tokens; `None` if they were not recorded.
    pub experts: Option<TokenExperts>,
    /// The temperature that the tokens were sampled at, above 0.
    pub temperature: f32,
}

/// A trainable token stream cut from a trajectory. Its streams agree in length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "SampleStreams", into = "SampleStreams")]
pub struct Sample {
    streams: SampleStreams,
}

/// Why streams do not make a sample.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A stream is not as long as the token ids.
    #[error("stream `{stream}` has {actual} entries for {tokens} tokens")]
    Length {
        /// Name of the stream.
        stream: &'static str,
        /// Its length.
        actual: usize,
        /// Number of token ids.
        tokens: usize,
    },
    /// There is no token.
    #[error("a sample needs at least one token")]
    Empty,
    /// The first token has nothing before it that could predict it.
    #[error("token 0 is in the loss mask, but nothing precedes it that could predict it")]
    FirstTokenTrained,
    /// A log-probability is not a finite number at most 0.
    #[error("behavior log-probability of token {index} is {value}; it must be finite and at most 0")]
    Logprob {
        /// Position of the token.
        index: usize,
        /// What it was.
        value: f32,
    },
    /// The temperature cannot have sampled anything.
    #[error("temperature {0} cannot have sampled a trainable token; it must be finite and above 0")]
    Temperature(f32),
    /// The kept sets do not fit the loss mask, or one does not contain the token it was made for.
    #[error("kept tokens are broken at trained token {index}: {reason}")]
    Kept {
        /// Index among the tokens of the loss mask.
        index: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// The experts are not those of the tokens.
    #[error("{ids} experts, {per_token} of each layer, do not fit {tokens} tokens: {reason}")]
    Experts {
        /// Number of experts.
        ids: usize,
        /// Experts of a token in a layer.
        per_token: u32,
        /// Tokens of the sample.
        tokens: usize,
        /// What is wrong.
        reason: &'static str,
    },
}

impl Sample {
    /// Checks the streams against each other.
    ///
    /// # Errors
    /// Streams of different lengths, an empty stream, a trained first token, log-probabilities that are not finite
    /// and non-positive, kept sets that do not fit the mask or miss the token that was sampled, experts that do not fit the
    /// tokens.
    pub fn new(streams: SampleStreams) -> Result<Self, SampleError> {
        let tokens = streams.token_ids.len();
        if tokens == 0 {
            return Err(SampleError::Empty);
        }
        let covered = streams.versions.iter().map(|run| run.len as usize).sum();
        for (stream, actual) in [
            ("loss_mask", streams.loss_mask.len()),
            ("behavior_logprobs", streams.behavior_logprobs.len()),
            ("versions", covered),
        ] {
            if actual != tokens {
                return Err(SampleError::Length { stream, actual, tokens });
            }
        }
        if streams.loss_mask[0] {
            return Err(SampleError::FirstTokenTrained);
        }
        if let Some((index, &value)) =
            streams.behavior_logprobs.iter().enumerate().find(|(_, p)| !(p.is_finite() && **p <= 0.0))
        {
            return Err(SampleError::Logprob { index, value });
        }
        if !(streams.temperature.is_finite() && streams.temperature > 0.0) {
            return Err(SampleError::Temperature(streams.temperature));
        }
        check_kept(&streams)?;
        check_experts(&streams)?;
        Ok(Self { streams })
    }

    /// `[tokens]` prompt, completions, and the messages of the environment between them.
    #[must_use]
    pub fn token_ids(&self) -> &[u32] {
        &self.streams.token_ids
    }

    /// `[tokens]` true where the token is trained on.
    #[must_use]
    pub fn loss_mask(&self) -> &[bool] {
        &self.streams.loss_mask
    }

    /// `[tokens]` behavior log-probabilities, nats; 0.0 where the mask is false.
    #[must_use]
    pub fn behavior_logprobs(&self) -> &[f32] {
        &self.streams.behavior_logprobs
    }

    /// Runs of policy versions over all tokens.
    #[must_use]
    pub fn versions(&self) -> &[VersionRun] {
        &self.streams.versions
    }

    /// What truncation kept, if anything was cut off.
    #[must_use]
    pub fn kept(&self) -> Option<&KeptTokens> {
        self.streams.kept.as_ref()
    }

    /// The experts of the tokens, if they were recorded.
    #[must_use]
    pub fn experts(&self) -> Option<&TokenExperts> {
        self.streams.experts.as_ref()
    }

    /// The temperature that the tokens were sampled at.
    #[must_use]
    pub fn temperature(&self) -> f32 {
        self.streams.temperature
    }

    /// Number of tokens that are trained on.
    #[must_use]
    pub fn trained_tokens(&self) -> usize {
        self.streams.loss_mask.iter().filter(|m| **m).count()
    }

    /// The oldest version in the sample: staleness is measured against it.
    #[must_use]
    pub fn oldest_version(&self) -> PolicyVersion {
        self.streams.versions.iter().map(|run| run.version).min().expect("a sample has at least one token")
    }
}

fn check_kept(streams: &SampleStreams) -> Result<(), SampleError> {
    let Some(kept) = &streams.kept else { return Ok(()) };
    let trained = streams.token_ids.iter().zip(&streams.loss_mask).filter(|(_, m)| **m);
    let count = trained.clone().count();
    let broken = |index, reason| Err(SampleError::Kept { index, reason });
    if kept.offsets.len() != count + 1
        || kept.offsets[0] != 0
        || kept.offsets[count] as usize != kept.ids.len()
    {
        return broken(count, "the offsets do not cover the trained tokens");
    }
    if let Some(index) = kept.offsets.windows(2).position(|w| w[0] > w[1]) {
        return broken(index, "the offsets go back");
    }
    for (index, (token, _)) in trained.enumerate() {
        let set = kept.set(index);
        if !set.is_sorted_by(|a, b| a < b) {
            return broken(index, "the ids are not ascending");
        }
        if set.binary_search(token).is_err() {
            return broken(index, "the sampled token is not among the kept");
        }
    }
    Ok(())
}

fn check_experts(streams: &SampleStreams) -> Result<(), SampleError> {
    let Some(TokenExperts { per_token, ids }) = &streams.experts else { return Ok(()) };
    let tokens = streams.token_ids.len();
    let broken = |reason| Err(SampleError::Experts { ids: ids.len(), per_token: *per_token, tokens, reason });
    let per_layer = *per_token as usize;
    // Of one token the sampler reads none.
    let rows = tokens - 1;
    if per_layer == 0 || ids.is_empty() != (rows == 0) || !ids.len().is_multiple_of(rows.max(1) * per_layer) {
        return broken("every token but the last has as many in each layer");
    }
    if !ids.chunks_exact(per_layer).all(|layer| layer.is_sorted_by(|a, b| a < b)) {
        return broken("those of a token in a layer are ascending");
    }
    Ok(())
}

impl TryFrom<SampleStreams> for Sample {
    type Error = SampleError;

    fn try_from(streams: SampleStreams) -> Result<Self, SampleError> {
        Self::new(streams)
    }
}

impl From<Sample> for SampleStreams {
    fn from(sample: Sample) -> Self {
        sample.streams
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn streams(tokens: usize, mask: usize, logprobs: usize, covered: u32) -> SampleStreams {
        let mut loss_mask = vec![true; mask];
        loss_mask.iter_mut().take(1).for_each(|m| *m = false);
        SampleStreams {
            token_ids: vec![1; tokens],
            loss_mask,
            behavior_logprobs: vec![-1.0; logprobs],
            versions: (0..covered)
                .map(|v| VersionRun { version: PolicyVersion(9 - u64::from(v)), len: 1 })
                .collect(),
            kept: None,
            experts: None,
            temperature: 1.0,
        }
    }

    proptest! {
        #[test]
        fn only_equal_lengths_make_a_sample(t in 1..5usize, m in 1..5usize, l in 1..5usize, c in 1..5u32) {
            let equal = t == m && t == l && t == c as usize;
            prop_assert_eq!(Sample::new(streams(t, m, l, c)).is_ok(), equal);
        }
    }

    #[test]
    fn the_oldest_version_counts() {
        assert_eq!(Sample::new(streams(4, 4, 4, 4)).unwrap().oldest_version(), PolicyVersion(6));
    }

    #[test]
    fn a_broken_sample_cannot_be_deserialised() {
        let json = serde_json::to_string(&streams(4, 4, 3, 4)).unwrap();
        let error = serde_json::from_str::<Sample>(&json).unwrap_err().to_string();
        assert!(error.contains("`behavior_logprobs` has 3 entries for 4 tokens"), "{error}");
    }

    #[test]
    fn a_kept_set_holds_the_sampled_token() {
        let with = |ids: Vec<u32>| {
            let kept = Some(KeptTokens { offsets: vec![0, ids.len() as u32], ids });
            Sample::new(SampleStreams { kept, ..streams(2, 2, 2, 2) })
        };
        assert_eq!(with(vec![0, 1]).unwrap().kept().unwrap().set(0), [0, 1]);
        assert!(with(vec![0, 2]).is_err());
        assert!(with(vec![1, 0]).is_err());
    }

    #[test]
    fn impossible_numbers_are_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.5] {
            let mut wrong = streams(3, 3, 3, 3);
            wrong.behavior_logprobs[1] = bad;
            assert!(matches!(Sample::new(wrong), Err(SampleError::Logprob { index: 1, .. })));
        }
        assert!(Sample::new(SampleStreams { temperature: 0.0, ..streams(2, 2, 2, 2) }).is_err());
    }

    #[test]
    fn experts_belong_to_every_token_but_the_last() {
        let with = |tokens, per_token, ids: &[u16]| {
            let experts = Some(TokenExperts { per_token, ids: ids.to_vec() });
            Sample::new(SampleStreams { experts, ..streams(tokens, tokens, tokens, tokens as u32) })
        };
        let sample = with(3, 2, &[0, 1, 2, 7, 1, 3, 0, 2]).unwrap();
        assert_eq!(sample.experts().map(|experts| experts.slots(3)), Some(4));
        assert!(with(1, 2, &[]).is_ok());
        let mut experts = TokenExperts { per_token: 1, ids: vec![0, 1, 2, 3] };
        experts.truncate(2, 3);
        assert_eq!(experts.ids, [0, 1]);
        experts.extend(&TokenExperts { per_token: 1, ids: vec![9, 9, 4, 5] });
        assert_eq!(experts.ids, [0, 1, 4, 5]);
        for (tokens, per_token, ids) in [
            (3, 2, &[0, 1, 2, 7, 1, 3][..]),
            (3, 0, &[0, 1]),
            (3, 2, &[]),
            (1, 1, &[0]),
            (2, 2, &[1, 0]),
            (2, 2, &[1, 1]),
        ] {
            let error = with(tokens, per_token, ids).unwrap_err();
            assert!(matches!(error, SampleError::Experts { .. }), "{error}");
        }
    }
}
