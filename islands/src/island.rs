//! The side of an island: when it exchanges, what it sends, and how the answer changes its weights.
//!
//! ```text
//! gradient = outer weights - own weights + residual            after the local steps of a round
//! outer weights -= outer update                                when the answer is applied, `overlap` steps later
//! own weights = w own weights + (1 - w) outer weights          Streaming DiLoCo's mixing; w is 0 in DiLoCo
//! ```
//!
//! Each round exchanges one fragment of the trained values, and rounds take the fragments by turns, so that a value is exchanged
//! every [`IslandTerms::local_steps`] steps. An outer gradient that came late has no part in any round: it is added to the residual of
//! its fragment, unless the one before came late too, and the island continues from the newest outer weights. So it does if an
//! outer update leads to other outer weights than those of the coordinator.
//!
//! Invariant: at most one exchange is under way. [`Island::state`] between two steps has all that a resume needs: it sends the same
//! outer gradient again, which counts once.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::IslandError;
use crate::client::{BodyBytes, CoordinatorClient};
use crate::compression::GradientCompression;
use crate::coordinator::{JoinAnswer, JoinedState};
use crate::exchange::{OuterAnswer, RecordedAnswers, newest, start, update_parts};
use crate::frame::{RoundMessage, to_bytes, weights_digest};
use crate::outer::norm;
use crate::terms::IslandTerms;

/// Pause between two looks at the stop flag.
const LOOK_UP: Duration = Duration::from_millis(100);
/// Time that the thread of an exchange may take beside its requests.
const GRACE: Duration = Duration::from_secs(10);

/// How exchanges fit between the local steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct IslandSchedule {
    /// Local steps from the outer gradient to its answer. 0 waits for the answer; less than the steps of a round.
    pub overlap_steps: u64,
    /// Weight of the own weights when an answer is applied, 0 to 1.
    pub local_weight: f32,
}

/// An island.
#[derive(Debug)]
pub struct Island {
    client: Arc<CoordinatorClient>,
    terms: IslandTerms,
    schedule: IslandSchedule,
    answers: RecordedAnswers,
    coordinator: String,
    /// The round that its next outer gradient is for.
    round: u64,
    /// The step after which it sends that.
    next: u64,
    /// The outer weights, `[trained values]`.
    outer: Vec<f32>,
    residual: Vec<f32>,
    /// Whether the last outer gradient came late.
    was_late: bool,
    pending: Option<PendingExchange>,
    /// Ends a wait for an answer.
    stop: Arc<AtomicBool>,
    /// Bytes that reports have counted.
    reported: BodyBytes,
}

#[derive(Debug)]
struct PendingExchange {
    message: RoundMessage,
    /// The step that applies the answer.
    apply_at: u64,
    /// Norm of the outer gradient.
    norm: f64,
    /// Where the answer comes from; `None` if it is recorded.
    answer: Option<Receiver<Result<OuterAnswer, IslandError>>>,
}

/// What an exchange did to an island.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct IslandReport {
    /// Rounds that the outer weights of the island have behind them.
    pub round: u64,
    /// Islands whose outer gradients are in the last round.
    pub islands: u64,
    /// Bytes of bodies since the last report.
    pub bytes: BodyBytes,
    /// Time that the step has waited for the answer, seconds.
    pub wait_s: f64,
    /// Norm of the outer gradient that was answered.
    pub norm: f64,
    /// Whether the outer gradient came late.
    pub is_late: bool,
    /// Whether the newest outer weights were taken although a round has the outer gradient: its outer update is kept no more, or
    /// leads to other outer weights than those of the coordinator.
    pub is_replaced: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedIsland {
    run: String,
    coordinator: String,
    terms: IslandTerms,
    round: u64,
    next: u64,
    #[serde(default)]
    was_late: bool,
    pending: Option<SavedExchange>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedExchange {
    round: u64,
    apply_at: u64,
    norm: f64,
}

impl Island {
    /// Joins after step `step` with the trained values `values`, `[trained values]`. These become the first outer weights, or are
    /// replaced by the newest ones. Answers are recorded in the directory `answers`.
    ///
    /// # Errors
    /// A refusal, or no answer before the deadline.
    pub fn join(
        client: CoordinatorClient,
        terms: IslandTerms,
        schedule: IslandSchedule,
        answers: PathBuf,
        step: u64,
        values: &mut [f32],
    ) -> Result<(Self, JoinAnswer), IslandError> {
        let mut answer = client.join(&terms, None)?;
        if answer.coordinator.is_empty() {
            // Another island may be first.
            client.begin(&terms, values)?;
            answer = client.join(&terms, None)?;
        }
        let newest = client.weights(terms.values())?;
        let outer = GradientCompression::None.decode(&newest.payload, terms.values())?;
        values.copy_from_slice(&outer);
        let island = Self {
            client: Arc::new(client),
            schedule,
            answers: RecordedAnswers::open(answers)?,
            coordinator: answer.coordinator.clone(),
            round: newest.round,
            next: step + terms.steps_per_round(),
            residual: vec![0.0; outer.len()],
            outer,
            was_late: false,
            pending: None,
            stop: Arc::default(),
            reported: BodyBytes::default(),
            terms,
        };
        Ok((island, answer))
    }

    /// Comes back with the `state` of a checkpoint.
    ///
    /// # Errors
    /// A state of other terms, a refusal, or no answer before the deadline.
    pub fn resume(
        client: CoordinatorClient,
        terms: IslandTerms,
        schedule: IslandSchedule,
        answers: PathBuf,
        state: &[u8],
    ) -> Result<(Self, JoinAnswer), IslandError> {
        let wrong = |reason: &str| IslandError::State { reason: reason.to_owned() };
        let (saved, values) = parse(state).ok_or_else(|| wrong("is not valid"))?;
        if saved.terms != terms {
            return Err(IslandError::State {
                reason: format!(
                    "has other terms: the run has {}",
                    saved.terms.differences(&terms).join("; ")
                ),
            });
        }
        let count = terms.values();
        let (weights, payload) = values.split_at_checked(8 * count).ok_or_else(|| wrong("is cut off"))?;
        let (outer, residual) = weights.split_at(4 * count);
        let decode = |bytes| GradientCompression::None.decode(bytes, count);
        let (outer, residual) = (decode(outer)?, decode(residual)?);
        let at = JoinedState { coordinator: saved.coordinator.clone(), round: saved.round };
        let answer = client.join(&terms, Some(at))?;
        let mut island = Self {
            client: Arc::new(client),
            schedule,
            answers: RecordedAnswers::open(answers)?,
            coordinator: saved.coordinator,
            round: saved.round,
            next: saved.next,
            outer,
            residual,
            was_late: saved.was_late,
            pending: None,
            stop: Arc::default(),
            reported: BodyBytes::default(),
            terms,
        };
        if let Some(SavedExchange { round, apply_at, norm }) = saved.pending {
            let message = RoundMessage { round, islands: 1, payload: payload.to_vec() };
            island.send(message, apply_at, norm)?;
        }
        Ok((island, answer))
    }

    /// Ends a wait for an answer once `stop` is set. The exchange is then part of [`Self::state`].
    #[must_use]
    pub fn stopped_by(self, stop: Arc<AtomicBool>) -> Self {
        Self { stop, ..self }
    }

    /// What it has in common with the other islands.
    #[must_use]
    pub fn terms(&self) -> &IslandTerms {
        &self.terms
    }

    /// Whether [`Self::after_step`] has something to do after step `step`.
    #[must_use]
    pub fn is_due(&self, step: u64) -> bool {
        step >= self.next || self.pending.as_ref().is_some_and(|pending| step >= pending.apply_at)
    }

    /// Sends an outer gradient or applies an answer after step `step`. `values`, `[trained values]`, are the trained values after it.
    /// Returns a report if it has changed them; a wait that is stopped changes nothing.
    ///
    /// # Errors
    /// A refusal, no answer before the deadline, or values that are not finite.
    pub fn after_step(&mut self, step: u64, values: &mut [f32]) -> Result<Option<IslandReport>, IslandError> {
        let mut report = self.apply_due(step, values)?;
        if step >= self.next && self.pending.is_none() {
            self.next = step + self.terms.steps_per_round();
            let fragment = self.terms.fragment(self.round);
            let own = &values[fragment.clone()];
            let gradient: Vec<f32> =
                self.outer[fragment.clone()].iter().zip(own).map(|(outer, own)| outer - own).collect();
            let (payload, _) = self.terms.compression.encode_with(&gradient, &mut self.residual[fragment])?;
            let message = RoundMessage { round: self.round, islands: 1, payload };
            self.send(message, step + self.schedule.overlap_steps, norm(&gradient))?;
            report = self.apply_due(step, values)?.or(report);
        }
        Ok(report)
    }

    /// The state for a checkpoint.
    #[must_use]
    pub fn state(&self) -> Vec<u8> {
        let pending = self.pending.as_ref();
        let saved = SavedIsland {
            run: self.client.run().to_owned(),
            coordinator: self.coordinator.clone(),
            terms: self.terms.clone(),
            round: self.round,
            next: self.next,
            was_late: self.was_late,
            pending: pending.map(|PendingExchange { message, apply_at, norm, .. }| SavedExchange {
                round: message.round,
                apply_at: *apply_at,
                norm: *norm,
            }),
        };
        let header = serde_json::to_vec(&saved).unwrap_or_default();
        let payload = pending.map_or(&[][..], |pending| &pending.message.payload);
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], &header, &to_bytes(&self.outer), &to_bytes(&self.residual), payload].concat()
    }

    /// Removes recorded answers of the steps up to `step`: no resume goes back there.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn forget_through(&self, step: u64) -> Result<(), IslandError> {
        self.answers.remove_through(step)
    }

    /// Its connection to the coordinator.
    #[must_use]
    pub fn client(&self) -> &Arc<CoordinatorClient> {
        &self.client
    }

    fn send(&mut self, message: RoundMessage, apply_at: u64, norm: f64) -> Result<(), IslandError> {
        let answer = match self.answers.find(&self.terms, apply_at, message.round) {
            Some(_) => None,
            None => Some(start(&self.client, &self.terms, message.clone())?),
        };
        self.pending = Some(PendingExchange { message, apply_at, norm, answer });
        Ok(())
    }

    /// Applies the answer that step `step` applies, if there is one.
    fn apply_due(&mut self, step: u64, values: &mut [f32]) -> Result<Option<IslandReport>, IslandError> {
        let Some(pending) = self.pending.take_if(|pending| step >= pending.apply_at) else { return Ok(None) };
        let clock = Instant::now();
        let round = pending.message.round;
        let answer = match &pending.answer {
            None => self.answers.find(&self.terms, pending.apply_at, round),
            Some(receiver) => {
                let Some(answer) = self.received(round, receiver)? else {
                    // A checkpoint of this step has no answer: the next step applies it, and its file is kept for that one.
                    self.pending = Some(PendingExchange { apply_at: step + 1, ..pending });
                    return Ok(None);
                };
                let answer = self.compared(answer)?;
                self.answers.record(pending.apply_at, round, &answer)?;
                Some(answer)
            }
        };
        let answer = answer.ok_or(IslandError::Ended { round })?;
        let wait_s = clock.elapsed().as_secs_f64();
        let is_late = matches!(answer, OuterAnswer::Late(_));
        let is_replaced = matches!(answer, OuterAnswer::Newest(_));
        if is_late && !self.was_late {
            let fragment = self.terms.fragment(round);
            let sent = self.terms.compression.decode(&pending.message.payload, fragment.len())?;
            self.residual[fragment].iter_mut().zip(sent).for_each(|(residual, sent)| *residual += sent);
        }
        self.was_late = is_late;
        let islands = self.apply(step, answer, values)?;
        let (bytes, before) = (self.client.bytes(), self.reported);
        self.reported = bytes;
        let bytes = BodyBytes { sent: bytes.sent - before.sent, received: bytes.received - before.received };
        let (round, norm) = (self.round, pending.norm);
        Ok(Some(IslandReport { round, islands, bytes, wait_s, norm, is_late, is_replaced }))
    }

    /// The answer of the thread that `receiver` belongs to; `None` if it is stopped before.
    fn received(
        &self,
        round: u64,
        receiver: &Receiver<Result<OuterAnswer, IslandError>>,
    ) -> Result<Option<OuterAnswer>, IslandError> {
        // The thread has a deadline for each of its requests; this is longer than them together.
        let (begun, longest) = (Instant::now(), self.client.wait() * 4 + GRACE);
        loop {
            match receiver.recv_timeout(LOOK_UP) {
                Ok(answer) => return answer.map(Some),
                Err(RecvTimeoutError::Timeout) if self.stop.load(Ordering::Relaxed) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if begun.elapsed() < longest => {}
                Err(_) => return Err(IslandError::Ended { round }),
            }
        }
    }

    /// `answer`, or the newest outer weights if it leads to others than those of the coordinator.
    fn compared(&self, answer: OuterAnswer) -> Result<OuterAnswer, IslandError> {
        let OuterAnswer::Update(update) = &answer else { return Ok(answer) };
        let (values, expected) = update_parts(&self.terms, update)?;
        let outer = self.outer[self.terms.fragment(update.round)].iter().zip(values);
        let after: Vec<f32> = outer.map(|(outer, update)| outer - update).collect();
        if weights_digest(&after) == expected {
            return Ok(answer);
        }
        newest(&self.client, &self.terms, update.round).map(OuterAnswer::Newest)
    }

    /// Applies `answer`. Returns the islands of its round.
    fn apply(&mut self, step: u64, answer: OuterAnswer, values: &mut [f32]) -> Result<u64, IslandError> {
        match answer {
            OuterAnswer::Update(message) => {
                let RoundMessage { round, islands, .. } = message;
                let fragment = self.terms.fragment(round);
                let (update, _) = update_parts(&self.terms, &message)?;
                let outer = &mut self.outer[fragment.clone()];
                outer.iter_mut().zip(update).for_each(|(outer, update)| *outer -= update);
                let weight = self.schedule.local_weight;
                for (own, outer) in values[fragment].iter_mut().zip(&*outer) {
                    *own = if weight == 0.0 { *outer } else { weight * *own + (1.0 - weight) * outer };
                }
                self.round = round + 1;
                Ok(islands)
            }
            OuterAnswer::Late(message) | OuterAnswer::Newest(message) => {
                let RoundMessage { round, islands, payload } = message;
                self.outer = GradientCompression::None.decode(&payload, self.terms.values())?;
                values.copy_from_slice(&self.outer);
                self.round = round;
                self.next = step + self.terms.steps_per_round();
                Ok(islands)
            }
        }
    }
}

/// The id of the run in a saved state.
#[must_use]
pub fn saved_run(state: &[u8]) -> Option<String> {
    parse(state).map(|(saved, _)| saved.run)
}

/// Header and values of a saved state.
fn parse(state: &[u8]) -> Option<(SavedIsland, &[u8])> {
    let (length, rest) = state.split_first_chunk::<8>()?;
    let (header, values) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    Some((serde_json::from_slice(header).ok()?, values))
}
