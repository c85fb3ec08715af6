//! A sampler that says what a test wants it to say.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use endpoint::EndpointLimits;
use model::{SpecialTokens, Tokenizer};
use rollout::{
    AppliedWeights, Completion, EngineCounts, OnUpdate, PartialCompletion, RolloutError, SampleRequest,
    Sampler,
};
use trajectory::{GroupId, PolicyVersion, StopReason, VersionRun};

use crate::{Endpoint, Model};

/// Tokens per poll.
const PACE: usize = 3;

/// Answers every request with the same text, a few tokens per poll.
#[derive(Debug)]
pub(crate) struct Scripted {
    tokenizer: Tokenizer,
    text: String,
    open: Vec<(SampleRequest, usize)>,
    /// Requests that were submitted.
    submitted: Arc<AtomicUsize>,
    logprob: f32,
    /// Whether it samples nothing for now.
    paused: bool,
}

impl Scripted {
    /// The tokens of the text, and the end of text.
    fn tokens(&self) -> Vec<u32> {
        let mut tokens = self.tokenizer.encode(&self.text, SpecialTokens::Omit).unwrap();
        tokens.push(2);
        tokens
    }

    fn completion(&self, request: &SampleRequest, index: u32) -> Completion {
        let tokens = self.tokens();
        let length = tokens.len();
        Completion {
            group: request.group,
            index,
            prompt_length: request.prompt.len(),
            prompt_version: PolicyVersion(4),
            prefill: Vec::new(),
            token_ids: [&request.prompt[..], &tokens].concat(),
            logprobs: vec![self.logprob; length],
            versions: vec![
                VersionRun { version: PolicyVersion(4), len: 1 },
                VersionRun { version: PolicyVersion(5), len: length as u32 - 1 },
            ],
            inserted: None,
            baseline: false,
            kept: None,
            experts: None,
            alternatives: Vec::new(),
            sampling: request.sampling,
            stop: StopReason::StopToken,
            text: self.text.clone(),
        }
    }
}

impl Endpoint {
    /// An endpoint whose policy always says `text`, and the number of requests that it was asked.
    pub(crate) fn saying(text: &str) -> (Self, Arc<AtomicUsize>) {
        Self::saying_with(text, -0.25)
    }

    /// The same with other log-probabilities.
    pub(crate) fn saying_with(text: &str, logprob: f32) -> (Self, Arc<AtomicUsize>) {
        let (model, submitted) = (Model::new(), Arc::new(AtomicUsize::new(0)));
        let scripted = Scripted {
            tokenizer: model.directory.tokenizer().clone(),
            text: text.to_owned(),
            open: Vec::new(),
            submitted: Arc::clone(&submitted),
            logprob,
            paused: false,
        };
        (Self::serving(model, Box::new(scripted), EndpointLimits::default(), None), submitted)
    }

    /// An endpoint whose policy never says anything.
    pub(crate) fn silent(limits: EndpointLimits) -> Self {
        let model = Model::new();
        let scripted = Scripted {
            tokenizer: model.directory.tokenizer().clone(),
            text: String::new(),
            open: Vec::new(),
            submitted: Arc::default(),
            logprob: 0.0,
            paused: true,
        };
        Self::serving(model, Box::new(scripted), limits, None)
    }
}

impl Sampler for Scripted {
    fn version(&self) -> PolicyVersion {
        PolicyVersion(5)
    }

    fn has_capacity(&self, _: usize) -> bool {
        true
    }

    fn in_flight(&self) -> usize {
        self.open.len()
    }

    fn submit(&mut self, request: SampleRequest) -> Result<(), RolloutError> {
        self.submitted.fetch_add(1, Ordering::Relaxed);
        self.open.push((request, 0));
        Ok(())
    }

    fn poll(&mut self, _: Duration) -> Result<Vec<Completion>, RolloutError> {
        if self.paused {
            std::thread::sleep(Duration::from_millis(1));
            return Ok(Vec::new());
        }
        let length = self.tokens().len();
        self.open.iter_mut().for_each(|(_, sampled)| *sampled += PACE);
        let (ended, open) =
            std::mem::take(&mut self.open).into_iter().partition(|(_, sampled)| *sampled >= length);
        self.open = open;
        let ended: Vec<(SampleRequest, usize)> = ended;
        let all =
            ended.iter().flat_map(|(request, _)| (0..request.samples as u32).map(move |n| (request, n)));
        Ok(all.map(|(request, n)| self.completion(request, n)).collect())
    }

    fn partials(&mut self) -> Vec<PartialCompletion> {
        let tokens = self.tokens();
        let mut partials = Vec::new();
        for (request, sampled) in &self.open {
            if !request.options.stream || *sampled == 0 {
                continue;
            }
            for index in 0..request.samples as u32 {
                partials.push(PartialCompletion {
                    group: request.group,
                    index,
                    token_ids: tokens[sampled - PACE..*sampled].to_vec(),
                    logprobs: vec![self.logprob; PACE],
                    alternatives: Vec::new(),
                });
            }
        }
        partials
    }

    fn abort(&mut self, group: GroupId) -> Result<usize, RolloutError> {
        let before = self.open.len();
        self.open.retain(|(request, _)| request.group != group);
        Ok(before - self.open.len())
    }

    fn newer_weights(&mut self, _: Duration) -> Result<Option<PolicyVersion>, RolloutError> {
        Ok(None)
    }

    fn apply_weights(&mut self, _: OnUpdate) -> Result<Option<AppliedWeights>, RolloutError> {
        Ok(None)
    }

    fn sleep(&mut self) -> Result<u64, RolloutError> {
        Ok(0)
    }

    fn is_asleep(&self) -> bool {
        false
    }

    fn counts(&self) -> EngineCounts {
        EngineCounts::default()
    }
}
