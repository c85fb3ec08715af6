//! One exchange of an island: its outer gradient is sent, and the answer of the round comes back, beside the local steps.
//!
//! Invariant: an answer is on disk before it is applied. A run that is resumed from a checkpoint before it applies the same answer
//! again, so it computes the same bits, whatever the coordinator has done since.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use crate::IslandError;
use crate::client::CoordinatorClient;
use crate::coordinator::ContributionOutcome;
use crate::frame::RoundMessage;
use crate::store::replace;
use crate::terms::IslandTerms;

/// What an island gets for an outer gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OuterAnswer {
    /// The outer update of the round, in the form of [`IslandTerms::compression`].
    Update(RoundMessage),
    /// The newest outer weights in f32, because the outer gradient came late or the outer update is kept no more.
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
    let update = match client.contribute(message)? {
        ContributionOutcome::Counted => client.round(message.round, terms.message_bytes(message.round))?,
        ContributionOutcome::Late => None,
    };
    match update {
        Some(update) => Ok(OuterAnswer::Update(update)),
        None => client.weights(terms.values()).map(OuterAnswer::Newest),
    }
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
    pub(crate) fn find(&self, step: u64, round: u64) -> Option<OuterAnswer> {
        // A file that cannot be read is asked for again.
        let message = RoundMessage::from_frame(fs::read(self.path(step, round)).ok()?).ok()?;
        let RoundMessage { round, islands, mut payload } = message;
        let is_update = payload.pop()? == 1;
        let message = RoundMessage { round, islands, payload };
        Some(if is_update { OuterAnswer::Update(message) } else { OuterAnswer::Newest(message) })
    }

    /// Writes an answer.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn record(&self, step: u64, round: u64, answer: &OuterAnswer) -> Result<(), IslandError> {
        let (message, kind) = match answer {
            OuterAnswer::Update(message) => (message, 1),
            OuterAnswer::Newest(message) => (message, 0),
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

    #[test]
    fn recorded_answers_are_found_until_they_are_in_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let answers = RecordedAnswers::open(dir.path().join("answers")).unwrap();
        let message = RoundMessage { round: 7, islands: 2, payload: vec![1, 2, 3] };
        for (step, answer) in
            [(8, OuterAnswer::Update(message.clone())), (16, OuterAnswer::Newest(message.clone()))]
        {
            answers.record(step, 7, &answer).unwrap();
            assert_eq!(answers.find(step, 7), Some(answer));
            assert_eq!(answers.find(step, 8), None);
        }
        answers.remove_through(8).unwrap();
        assert_eq!(answers.find(8, 7), None);
        assert!(answers.find(16, 7).is_some());
    }
}
