//! What is written can be gone on from, bit for bit, and what is broken says so.

use std::sync::Arc;

use model::ModelDirectory;
use trainer::checkpoint::{Contents, NetworkState, Retention, list, load, path};
use trainer::moments::Moments;
use trainer::optimizer::{OptimizerConfig, OptimizerKind, TensorState};
use trainer::{Learner, TrainerState};
use trajectory::PolicyVersion;

use crate::{LEARNER, config, eight_bit, groups, policy_step, save, with_optimizer};

pub(crate) fn advance(learner: &mut Learner, steps: usize) {
    let groups = groups();
    for _ in 0..steps {
        policy_step(learner, &groups, 1e-2);
    }
}

#[test]
fn going_on_from_a_checkpoint_gives_the_same_bits() {
    for kind in OptimizerKind::ALL {
        let settings = with_optimizer(kind);
        let files = tempfile::tempdir().unwrap();
        let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
        let mut learner =
            Learner::new(settings.clone(), config(), directory.load_parameters().unwrap(), None).unwrap();
        advance(&mut learner, 3);
        let state = TrainerState::new(PolicyVersion(3), learner.updates(), 77, 1.5);
        let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
        let read = load(&dir, settings.optimizer, None).unwrap();
        assert_eq!((read.state, &read.optimizer), (state, &*learner.optimizer().unwrap()));
        let own = |state: &&TensorState| match state {
            TensorState::Moments(Moments::Full { .. }) => kind == OptimizerKind::Adamw,
            TensorState::Moments(Moments::Coded { .. }) => kind == OptimizerKind::Adamw8bit,
            TensorState::Muon(_) => kind == OptimizerKind::Muon,
            TensorState::Dion { .. } => kind == OptimizerKind::Dion,
        };
        assert!(read.optimizer.states().iter().filter(own).count() > 0, "{kind:?}");
        let mut resumed = Learner::new(settings, config(), read.parameters, Some(read.optimizer)).unwrap();
        advance(&mut resumed, 2);
        advance(&mut learner, 2);
        assert_eq!(resumed.parameters().unwrap().values(), learner.parameters().unwrap().values());
        assert_eq!(resumed.optimizer().unwrap(), learner.optimizer().unwrap());
    }
}

#[test]
fn a_checkpoint_of_another_optimizer_is_refused() {
    let muon = with_optimizer(OptimizerKind::Muon);
    for (saved, wanted) in
        [(LEARNER, eight_bit()), (eight_bit(), LEARNER), (muon.clone(), LEARNER), (LEARNER, muon)]
    {
        let files = tempfile::tempdir().unwrap();
        let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
        let learner =
            Learner::new(saved.clone(), config(), directory.load_parameters().unwrap(), None).unwrap();
        let state = TrainerState::new(PolicyVersion(1), 0, 0, 0.0);
        let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
        let message = load(&dir, wanted.optimizer, None).unwrap_err().to_string();
        let (saved, wanted) = (saved.optimizer.kind.as_str(), wanted.optimizer.kind.as_str());
        let says = format!(
            "`trainer.optimizer = \"{saved}\"`, but the recipe says \"{wanted}\"; go on with \"{saved}\""
        );
        assert!(message.contains(&says) && message.contains("optimizer.safetensors"), "{message}");
    }
}

#[test]
fn a_basis_of_another_rank_is_refused_with_its_key() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let settings = with_optimizer(OptimizerKind::Dion);
    let learner =
        Learner::new(settings.clone(), config(), directory.load_parameters().unwrap(), None).unwrap();
    let dir = save(files.path(), &directory, &learner, &TrainerState::new(PolicyVersion(1), 0, 0, 0.0), 2);
    let wanted = OptimizerConfig { dion_rank_fraction: 0.25, ..settings.optimizer };
    let message = load(&dir.unwrap(), wanted, None).unwrap_err().to_string();
    assert!(message.contains("basis.") && message.contains("`trainer.dion_rank_fraction`"), "{message}");
}

#[test]
fn only_the_newest_are_kept_and_the_same_step_can_be_written_again() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    for version in [1, 2, 3, 2] {
        save(files.path(), &directory, &learner, &TrainerState::new(PolicyVersion(version), 0, 0, 0.0), 2)
            .unwrap();
    }
    assert_eq!(list(files.path()), [PolicyVersion(2), PolicyVersion(3)]);
    assert!(list(&files.path().join("nowhere")).is_empty());
}

#[test]
fn multiples_are_kept_for_ever() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    for version in 0..7 {
        let state = TrainerState::new(PolicyVersion(version), 0, 0, 0.0);
        let contents =
            Contents { policy: NetworkState::of(&directory, &learner).unwrap(), critic: None, state: &state };
        let retention = Retention { keep_last: 1, keep_every: 3 };
        trainer::checkpoint::save(files.path(), &contents, retention).unwrap();
    }
    assert_eq!(list(files.path()), [0, 3, 6].map(PolicyVersion));
}

#[test]
fn broken_checkpoints_are_named() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    let state = TrainerState::new(PolicyVersion(1), 0, 0, 0.0);
    let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
    assert_eq!(dir, path(files.path(), PolicyVersion(1)));
    let message = || load(&dir, LEARNER.optimizer, None).unwrap_err().to_string();

    let optimizer = dir.join("optimizer.safetensors");
    let whole = std::fs::read(&optimizer).unwrap();
    std::fs::write(&optimizer, &whole[..whole.len() / 2]).unwrap();
    assert!(
        message().contains("optimizer.safetensors") && message().contains("earlier checkpoint"),
        "{}",
        message()
    );
    std::fs::write(&optimizer, whole).unwrap();

    let numbers = dir.join("trainer.json");
    let json = std::fs::read_to_string(&numbers).unwrap();
    std::fs::write(&numbers, json.replace("\"format\": 1", "\"format\": 9")).unwrap();
    assert!(message().contains("trainer.json") && message().contains("format 9"), "{}", message());
    std::fs::remove_file(&numbers).unwrap();
    assert!(message().contains("cannot be read"), "{}", message());
}
