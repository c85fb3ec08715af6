//! Requests of one model: they run in the order of their numbers, whatever order they come in.
//!
//! Invariant: a request runs once. One that comes again with the same number gets the answer of the first, if it asks the same.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::{LoadInto, LoraRequest, SamplerSave, SaveRequest};
use crate::data::{AdamParameters, Datum, LossTensor, LossValues, PassRequest};
use crate::outcome::FailedRequest;

/// Answered requests of a model that are remembered.
const REMEMBERED: usize = 8192;

/// What a model is asked for.
#[derive(Clone, Debug)]
pub(super) enum ModelCall {
    /// To be made.
    Create {
        /// Name of the base model.
        base: String,
        /// The adapter that is trained.
        lora: Option<LoraRequest>,
    },
    /// A pass over data.
    Pass(PassRequest),
    /// An update.
    Step(AdamParameters),
    /// To save weights and optimizer.
    Save(SaveRequest),
    /// To publish weights for sampling.
    SaveForSampler(SamplerSave),
    /// Something that cannot be carried out: its future fails in its turn.
    Reject(FailedRequest),
    /// To load a state.
    Load {
        /// As `tinker://`.
        path: String,
        /// Whether the optimizer is loaded too.
        optimizer: bool,
    },
}

impl ModelCall {
    /// Numbers in its data: tokens, and those of the inputs of the loss.
    pub(super) fn numbers(&self) -> usize {
        let of_tensor = |tensor: &LossTensor| match &tensor.values {
            LossValues::Float(values) => values.len(),
            LossValues::Int(values) => values.len(),
        };
        let of_datum =
            |datum: &Datum| datum.tokens.len() + datum.inputs.values().map(of_tensor).sum::<usize>();
        match self {
            Self::Pass(pass) => pass.data.iter().map(of_datum).sum(),
            _ => 0,
        }
    }

    /// What tells it from another request.
    pub(super) fn digest(&self) -> u64 {
        let mut hasher = blake3::Hasher::new();
        if let Self::Pass(pass) = self {
            hash_data(&mut hasher, pass);
        } else {
            hasher.update(format!("{self:?}").as_bytes());
        }
        let hash = hasher.finalize();
        let (words, _) = hash.as_bytes().as_chunks::<8>();
        u64::from_le_bytes(words[0])
    }
}

fn hash_data(hasher: &mut blake3::Hasher, pass: &PassRequest) {
    let PassRequest { loss, settings, data, forward_only } = pass;
    hasher.update(format!("{loss} {settings:?} {forward_only} {}", data.len()).as_bytes());
    for Datum { tokens, inputs, sampled } in data {
        hasher.update(format!("{} {sampled:?}", tokens.len()).as_bytes());
        tokens.iter().for_each(|token| {
            hasher.update(&token.to_le_bytes());
        });
        for (name, LossTensor { values, shape }) in inputs {
            hasher.update(format!("{name} {shape:?}").as_bytes());
            match values {
                LossValues::Float(values) => values.iter().for_each(|value| {
                    hasher.update(&value.to_le_bytes());
                }),
                LossValues::Int(values) => values.iter().for_each(|value| {
                    hasher.update(&value.to_le_bytes());
                }),
            }
        }
    }
}

/// A request that waits for its turn.
#[derive(Debug)]
pub(super) struct NumberedCall {
    pub(super) request_id: String,
    pub(super) call: ModelCall,
}

/// A request that came before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KnownCall {
    pub(super) request_id: String,
    pub(super) digest: u64,
}

/// The requests of a model.
#[derive(Debug)]
pub(super) struct CallQueue {
    /// The number that runs next.
    next: u64,
    waiting: BTreeMap<u64, NumberedCall>,
    known: HashMap<u64, KnownCall>,
    /// Numbers of `known` in the order in which they came.
    order: VecDeque<u64>,
    /// Since when requests wait for one that has not come.
    gap_since: Option<Instant>,
    /// Since when the next one waits.
    ready_since: Option<Instant>,
}

impl CallQueue {
    /// Without requests; `next` is the first number.
    pub(super) fn starting_at(next: u64) -> Self {
        Self {
            next,
            waiting: BTreeMap::new(),
            known: HashMap::new(),
            order: VecDeque::new(),
            gap_since: None,
            ready_since: None,
        }
    }

    /// The number that runs next.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The request that came before with this number.
    pub(super) fn known(&self, number: u64) -> Option<&KnownCall> {
        self.known.get(&number)
    }

    /// Whether the request with this number ran or was given up, and is no longer remembered.
    pub(super) fn is_past(&self, number: u64) -> bool {
        number < self.next && !self.known.contains_key(&number)
    }

    /// Adds a request with a number that is not known.
    pub(super) fn add(&mut self, number: u64, queued: NumberedCall, digest: u64) {
        let known = KnownCall { request_id: queued.request_id.clone(), digest };
        self.known.insert(number, known);
        self.order.push_back(number);
        while self.order.len() > REMEMBERED + self.waiting.len() {
            let Some(oldest) = self.order.pop_front() else { break };
            self.known.remove(&oldest);
        }
        self.waiting.insert(number, queued);
        self.look_for_gap();
    }

    /// Whether the next request is there.
    pub(super) fn is_ready(&self) -> bool {
        self.waiting.contains_key(&self.next)
    }

    /// Since when the next request waits for its turn; `None` if it is not there.
    pub(super) fn ready_since(&self) -> Option<Instant> {
        self.ready_since
    }

    /// Forgets what was asked for: the model is gone.
    pub(super) fn forget(&mut self) {
        *self = Self::starting_at(self.next);
    }

    /// Takes the next request.
    pub(super) fn take(&mut self) -> Option<NumberedCall> {
        let queued = self.waiting.remove(&self.next)?;
        self.next += 1;
        self.ready_since = None;
        self.look_for_gap();
        Some(queued)
    }

    /// Notes that this request was refused for now and will come again. If it is the one that is missing, those behind it continue
    /// to wait.
    pub(super) fn postpone(&mut self, number: u64) {
        if number == self.next {
            self.gap_since = self.gap_since.map(|_| Instant::now());
        }
    }

    /// Takes all requests that wait behind one that has not come for longer than `limit`, and forgets them, so that they may come
    /// again.
    pub(super) fn give_up(&mut self, limit: Duration) -> Vec<NumberedCall> {
        if self.gap_since.is_none_or(|since| since.elapsed() < limit) {
            return Vec::new();
        }
        self.take_all()
    }

    /// Takes all requests that wait.
    pub(super) fn take_all(&mut self) -> Vec<NumberedCall> {
        (self.gap_since, self.ready_since) = (None, None);
        let waiting = std::mem::take(&mut self.waiting);
        waiting.keys().for_each(|number| drop(self.known.remove(number)));
        self.order.retain(|number| self.known.contains_key(number));
        waiting.into_values().collect()
    }

    /// Requests that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a request with this id waits.
    pub(super) fn has(&self, request_id: &str) -> bool {
        self.waiting.values().any(|queued| queued.request_id == request_id)
    }

    fn look_for_gap(&mut self) {
        let gap = !self.waiting.is_empty() && !self.is_ready();
        self.gap_since = gap.then(|| self.gap_since.unwrap_or_else(Instant::now));
        self.ready_since = self.is_ready().then(|| self.ready_since.unwrap_or_else(Instant::now));
    }
}

impl LoadInto {
    /// The number of the request in its model; making one is number 0.
    pub(super) fn number(&self) -> u64 {
        match self {
            Self::Model { seq_id, .. } => *seq_id,
            Self::New { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn step(number: u64) -> NumberedCall {
        NumberedCall { request_id: format!("r{number}"), call: ModelCall::Step(AdamParameters::default()) }
    }

    proptest! {
        /// Requests that come in any order run in the order of their numbers, each once.
        #[test]
        fn requests_run_in_order(order in Just((1..40_u64).collect::<Vec<_>>()).prop_shuffle()) {
            let mut queue = CallQueue::starting_at(1);
            let mut ran = Vec::new();
            for number in order {
                prop_assert!(queue.known(number).is_none());
                queue.add(number, step(number), number);
                prop_assert_eq!(queue.known(number).map(|known| known.digest), Some(number));
                while let Some(queued) = queue.take() {
                    ran.push(queued.request_id);
                }
            }
            let expected: Vec<_> = (1..40).map(|number| format!("r{number}")).collect();
            prop_assert_eq!(ran, expected);
        }
    }

    #[test]
    fn what_waits_for_a_missing_request_is_given_up_and_may_come_again() {
        let mut queue = CallQueue::starting_at(1);
        queue.add(2, step(2), 2);
        queue.add(3, step(3), 3);
        assert!(queue.take().is_none() && queue.give_up(Duration::from_secs(60)).is_empty());
        let given_up = queue.give_up(Duration::ZERO);
        assert_eq!(given_up.len(), 2);
        assert!(queue.known(2).is_none() && queue.waiting() == 0);
        for number in [1, 2] {
            queue.add(number, step(number), number);
        }
        assert!(queue.take().is_some() && queue.take().is_some() && queue.take().is_none());
        assert!(queue.known(1).is_some() && !queue.is_past(1) && queue.is_past(0));
    }

    #[test]
    fn a_request_that_is_refused_behind_the_missing_one_does_not_prolong_the_wait() {
        let mut queue = CallQueue::starting_at(1);
        queue.add(2, step(2), 2);
        let since = queue.gap_since;
        assert!(since.is_some());
        queue.postpone(3);
        assert_eq!(queue.gap_since, since);
    }

    #[test]
    fn requests_that_ask_for_something_else_have_another_digest() {
        let pass = |value: f32| {
            let tensor = crate::data::LossTensor {
                values: crate::data::LossValues::Float(vec![value]),
                shape: vec![1],
            };
            let datum = crate::data::Datum {
                tokens: vec![1],
                inputs: [("weights".to_owned(), tensor)].into(),
                sampled: Vec::new(),
            };
            ModelCall::Pass(PassRequest { data: vec![datum], ..PassRequest::default() })
        };
        assert_eq!(pass(0.1).digest(), pass(0.1).digest());
        assert_ne!(pass(0.1).digest(), pass(0.100_000_01_f32).digest());
        assert_eq!(pass(1.0).numbers(), 2);
    }
}
