//! One exchange of an island: its outer gradient is sent, and the answer of the round comes back, beside the local steps.
//!
//! Invariant: an answer is checked before it is recorded, and on disk before it is applied. A run that is resumed from a checkpoint
//! before it applies the same answer again, so it computes the same bits, whatever the coordinator has done since.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use crate::IslandError;
use crate::client::CoordinatorClient;
use crate::compression::GradientCompression;
use crate::coordinator::ContributionOutcome;
use crate::frame::{RoundMessage, WEIGHTS_DIGEST};
use crate::store::replace;
use crate::terms::IslandTerms;

/// What an island gets for an outer gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OuterAnswer {
    /// The outer update of the round, in the form of [`IslandTerms::compression`], and the digest of the outer weights of its
    /// fragment after it.
    Update(RoundMessage),
    /// The newest outer weights in f32, because the outer gradient came late and is in no round.
    Late(RoundMessage),
    /// The newest outer weights in f32. A round has the outer gradient, but its outer update is kept no more, or leads to other
    /// outer weights than those of the coordinator.
    Newest(RoundMessage),
}

/// The answers of an island on disk, one file for each step that applies one.
#[derive(Debug)]
pub(crate) struct RecordedAnswers {
    dir: PathBuf,
}

/// Sends the outer gradient `message` and waits for the answer.
///
/// # Errors
/// A refusal, or no answer before the deadline.
pub fn exchange(
    client: &CoordinatorClient,
    terms: &IslandTerms,
    message: &RoundMessage,
) -> Result<OuterAnswer, IslandError> {
    let round = message.round;
    match client.contribute(message)? {
        ContributionOutcome::Late => newest(client, terms, round).map(OuterAnswer::Late),
        ContributionOutcome::Counted => match client.round(round, terms.update_bytes(round))? {
            Some(update) => checked(terms, round, OuterAnswer::Update(update)),
            None => newest(client, terms, round).map(OuterAnswer::Newest),
        },
    }
}

/// The newest outer weights, for an island whose last outer gradient was of `round`.
///
/// # Errors
/// A refusal, no answer before the deadline, or weights that cannot be these.
pub(crate) fn newest(
    client: &CoordinatorClient,
    terms: &IslandTerms,
    round: u64,
) -> Result<RoundMessage, IslandError> {
    let weights = client.weights(terms.values())?;
    check_newest(terms, round, &weights)?;
    Ok(weights)
}

/// The values of an outer update, `[values of its fragment]`, and the digest of the outer weights after it.
///
/// # Errors
/// A message of another length, or a value that is not finite.
pub(crate) fn update_parts(
    terms: &IslandTerms,
    RoundMessage { round, payload, .. }: &RoundMessage,
) -> Result<(Vec<f32>, [u8; WEIGHTS_DIGEST]), IslandError> {
    let (values, expected) = (terms.fragment(*round).len(), terms.update_bytes(*round));
    match payload.split_last_chunk::<WEIGHTS_DIGEST>() {
        Some((update, digest)) if payload.len() == expected => {
            Ok((terms.compression.decode(update, values)?, *digest))
        }
        _ => Err(IslandError::Length { values, expected, found: payload.len() }),
    }
}

/// `answer`, if it can be that to the outer gradient of `round`.
fn checked(terms: &IslandTerms, round: u64, answer: OuterAnswer) -> Result<OuterAnswer, IslandError> {
    match &answer {
        OuterAnswer::Update(update) if update.round != round => {
            return Err(IslandError::Round { expected: round, found: update.round });
        }
        OuterAnswer::Update(update) => drop(update_parts(terms, update)?),
        OuterAnswer::Late(weights) | OuterAnswer::Newest(weights) => check_newest(terms, round, weights)?,
    }
    Ok(answer)
}

fn check_newest(terms: &IslandTerms, round: u64, weights: &RoundMessage) -> Result<(), IslandError> {
    if weights.round < round {
        return Err(IslandError::Round { expected: round, found: weights.round });
    }
    GradientCompression::None.decode(&weights.payload, terms.values()).map(drop)
}

/// [`exchange`] in a thread. The receiver gets its result.
///
/// # Errors
/// The system has no thread.
pub(crate) fn start(
    client: &Arc<CoordinatorClient>,
    terms: &IslandTerms,
    message: RoundMessage,
) -> Result<Receiver<Result<OuterAnswer, IslandError>>, IslandError> {
    let (sender, receiver) = sync_channel(1);
    let (asking, terms) = (Arc::clone(client), terms.clone());
    let work = move || {
        // The receiver is dropped if the run has ended.
        let _ = sender.send(exchange(&asking, &terms, &message));
    };
    let spawned = std::thread::Builder::new().name("outer-exchange".to_owned()).spawn(work);
    spawned.map(|_| receiver).map_err(IslandError::file("start a thread for", Path::new("an exchange")))
}

impl RecordedAnswers {
    /// Those in `dir`, which is made if it does not exist.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, IslandError> {
        fs::create_dir_all(&dir).map_err(IslandError::file("make", &dir))?;
        Ok(Self { dir })
    }

    /// The answer to the outer gradient of `round` that step `step` applies, if it came before.
    pub(crate) fn find(&self, terms: &IslandTerms, step: u64, round: u64) -> Option<OuterAnswer> {
        // A file that cannot be read is asked for again.
        let mut message = RoundMessage::from_frame(fs::read(self.path(step, round)).ok()?).ok()?;
        let answer = match message.payload.pop()? {
            0 => OuterAnswer::Late(message),
            1 => OuterAnswer::Update(message),
            _ => OuterAnswer::Newest(message),
        };
        checked(terms, round, answer).ok()
    }

    /// Writes an answer.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn record(&self, step: u64, round: u64, answer: &OuterAnswer) -> Result<(), IslandError> {
        let (message, kind) = match answer {
            OuterAnswer::Late(message) => (message, 0),
            OuterAnswer::Update(message) => (message, 1),
            OuterAnswer::Newest(message) => (message, 2),
        };
        let payload = [&message.payload[..], &[kind]].concat();
        let frame = RoundMessage { payload, ..*message }.to_frame();
        replace(&self.path(step, round), &[&frame])
    }

    /// Removes the answers of the steps up to `step`, which are in a checkpoint.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn remove_through(&self, step: u64) -> Result<(), IslandError> {
        let entries = fs::read_dir(&self.dir).map_err(IslandError::file("list", &self.dir))?;
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let of = path.file_name().and_then(|name| name.to_str()?.split_once('-')?.0.parse::<u64>().ok());
            if of.is_some_and(|of| of <= step) {
                fs::remove_file(&path).map_err(IslandError::file("remove", &path))?;
            }
        }
        Ok(())
    }

    fn path(&self, step: u64, round: u64) -> PathBuf {
        self.dir.join(format!("{step:06}-{round}.bin"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::to_bytes;

    #[test]
    fn recorded_answers_are_found_until_they_are_in_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let answers = RecordedAnswers::open(dir.path().join("answers")).unwrap();
        let (model, compression) = ("a".repeat(64), GradientCompression::None);
        let terms = IslandTerms { model, local_steps: 1, compression, ends: vec![2] };
        let values = to_bytes(&[1.0, 2.0]);
        let message = |payload: &[u8]| RoundMessage { round: 7, islands: 2, payload: payload.to_vec() };
        let update = message(&[&values[..], &[9; WEIGHTS_DIGEST]].concat());
        for (step, answer) in [
            (8, OuterAnswer::Update(update.clone())),
            (16, OuterAnswer::Newest(message(&values))),
            (24, OuterAnswer::Late(message(&values))),
        ] {
            answers.record(step, 7, &answer).unwrap();
            assert_eq!(answers.find(&terms, step, 7), Some(answer));
            assert_eq!(answers.find(&terms, step, 8), None);
        }
        answers.remove_through(8).unwrap();
        assert_eq!(answers.find(&terms, 8, 7), None);
        assert!(answers.find(&terms, 16, 7).is_some());
        // What cannot be applied is asked for again.
        for wrong in [RoundMessage { round: 6, ..update }, message(&values)] {
            assert!(checked(&terms, 7, OuterAnswer::Update(wrong.clone())).is_err());
            answers.record(32, 7, &OuterAnswer::Update(wrong)).unwrap();
            assert_eq!(answers.find(&terms, 32, 7), None);
        }
    }
}
