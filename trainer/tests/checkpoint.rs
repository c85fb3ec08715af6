//! Checkpoints: resuming gives the same bits, and broken checkpoints are reported.

use std::sync::Arc;

use model::{ModelDirectory, Parameters};
use trainer::checkpoint::{
    CheckpointContents, CheckpointIntegrity, NetworkState, Retention, list, load, path, set_aside_after,
};
use trainer::moments::Moments;
use trainer::optimizer::{OptimizerConfig, OptimizerKind, TensorState};
use trainer::{Learner, TrainerError, TrainerState};
use trajectory::PolicyVersion;

use crate::{LEARNER, config, eight_bit, groups, policy_step, save, with_optimizer};

pub(crate) fn advance(learner: &mut Learner, steps: usize) {
    let groups = groups();
    for _ in 0..steps {
        policy_step(learner, &groups, 1e-2);
    }
}

#[test]
fn resuming_from_a_checkpoint_gives_the_same_bits() {
    for kind in OptimizerKind::ALL {
        let settings = with_optimizer(kind);
        let files = tempfile::tempdir().unwrap();
        let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
        let mut learner =
            Learner::new(settings.clone(), config(), directory.load_parameters().unwrap(), None).unwrap();
        advance(&mut learner, 3);
        let state = TrainerState {
            updates: learner.updates(),
            trained_tokens: 77,
            time_s: 1.5,
            ..TrainerState::at(PolicyVersion(3))
        };
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
        let mut resumed = Learner::new(
            settings,
            config(),
            Parameters::clone(read.weights.whole().unwrap()),
            Some(read.optimizer),
        )
        .unwrap();
        advance(&mut resumed, 2);
        advance(&mut learner, 2);
        assert_eq!(resumed.parameters().unwrap().values(), learner.parameters().unwrap().values());
        assert_eq!(resumed.optimizer().unwrap(), learner.optimizer().unwrap());
    }
}

#[test]
fn a_checkpoint_of_another_optimizer_is_rejected() {
    let muon = with_optimizer(OptimizerKind::Muon);
    for (saved, wanted) in
        [(LEARNER, eight_bit()), (eight_bit(), LEARNER), (muon.clone(), LEARNER), (LEARNER, muon)]
    {
        let files = tempfile::tempdir().unwrap();
        let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
        let learner =
            Learner::new(saved.clone(), config(), directory.load_parameters().unwrap(), None).unwrap();
        let state = TrainerState::at(PolicyVersion(1));
        let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
        let message = load(&dir, wanted.optimizer, None).unwrap_err().to_string();
        let (saved, wanted) = (saved.optimizer.kind.as_str(), wanted.optimizer.kind.as_str());
        let says = format!(
            "`trainer.optimizer = \"{saved}\"`, but the recipe says \"{wanted}\"; continue with \"{saved}\""
        );
        assert!(message.contains(&says) && message.contains("optimizer.safetensors"), "{message}");
    }
}

#[test]
fn a_basis_of_another_rank_is_rejected_with_its_key() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let settings = with_optimizer(OptimizerKind::Dion);
    let learner =
        Learner::new(settings.clone(), config(), directory.load_parameters().unwrap(), None).unwrap();
    let dir = save(files.path(), &directory, &learner, &TrainerState::at(PolicyVersion(1)), 2);
    let wanted = OptimizerConfig { dion_rank_fraction: 0.25, ..settings.optimizer };
    let message = load(&dir.unwrap(), wanted, None).unwrap_err().to_string();
    assert!(message.contains("basis.") && message.contains("`trainer.dion_rank_fraction`"), "{message}");
}

#[test]
fn only_the_newest_are_kept_and_saving_a_step_again_is_a_no_op() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    for version in [1, 2, 3, 2] {
        save(files.path(), &directory, &learner, &TrainerState::at(PolicyVersion(version)), 2).unwrap();
    }
    assert_eq!(list(files.path()), [PolicyVersion(2), PolicyVersion(3)]);
    assert!(list(&files.path().join("nowhere")).is_empty());
}

#[test]
fn multiples_are_kept_forever() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    for version in 0..7 {
        let state = TrainerState::at(PolicyVersion(version));
        let contents = CheckpointContents {
            policy: NetworkState::of(&directory, &learner).unwrap(),
            critic: None,
            state: &state,
            island: None,
        };
        let retention = Retention { keep_last: 1, keep_every: 3 };
        trainer::checkpoint::save(files.path(), &contents, retention).unwrap();
    }
    assert_eq!(list(files.path()), [0, 3, 6].map(PolicyVersion));
}

#[test]
fn errors_name_the_broken_checkpoint() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    let state = TrainerState::at(PolicyVersion(1));
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
    std::fs::write(&numbers, json.replace("\"format\": 2", "\"format\": 9")).unwrap();
    model::manifest::write(&dir).unwrap();
    assert!(message().contains("trainer.json") && message().contains("format 9"), "{}", message());
    std::fs::remove_file(&numbers).unwrap();
    assert!(message().contains("trainer.json is damaged: it is missing"), "{}", message());
}

/// Every file is compared with its digest, including files whose change no reader would detect.
#[test]
fn a_flipped_bit_in_any_file_is_detected() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    let state = TrainerState::at(PolicyVersion(1));
    let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
    assert_eq!(load(&dir, LEARNER.optimizer, None).unwrap().integrity, CheckpointIntegrity::Digested);
    let names = ["trainer.json", "optimizer.safetensors", "model/model.safetensors", "model/config.json"];
    for name in names.into_iter().chain(["model/manifest.json", "model/tokenizer.json"]) {
        let path = dir.join(name);
        let whole = std::fs::read(&path).unwrap();
        let mut bytes = whole.clone();
        let last = bytes.len() - 2;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let error = load(&dir, LEARNER.optimizer, None).unwrap_err();
        assert!(matches!(error, TrainerError::Damaged { .. }), "{name}: {error}");
        assert!(error.to_string().contains(name), "{error}");
        std::fs::write(&path, &whole).unwrap();
    }
    std::fs::remove_file(dir.join("manifest.json")).unwrap();
    let error = load(&dir, LEARNER.optimizer, None).unwrap_err().to_string();
    assert!(error.contains("manifest.json is missing, and format 2 has one"), "{error}");
}

#[test]
fn a_checkpoint_of_format_1_is_read_without_digests() {
    let files = tempfile::tempdir().unwrap();
    let directory = Arc::new(ModelDirectory::fresh(&files.path().join("model"), &config(), 5).unwrap());
    let learner = Learner::new(LEARNER, config(), directory.load_parameters().unwrap(), None).unwrap();
    let state = TrainerState { format: 1, ..TrainerState::at(PolicyVersion(1)) };
    let dir = save(files.path(), &directory, &learner, &state, 2).unwrap();
    for manifest in ["manifest.json", "model/manifest.json"] {
        std::fs::remove_file(dir.join(manifest)).unwrap();
    }
    assert_eq!(load(&dir, LEARNER.optimizer, None).unwrap().integrity, CheckpointIntegrity::Undigested);
}

#[test]
fn checkpoints_that_are_set_aside_keep_their_files_and_are_not_listed() {
    let files = tempfile::tempdir().unwrap();
    for version in 1..4 {
        std::fs::create_dir(path(files.path(), PolicyVersion(version))).unwrap();
    }
    let aside = set_aside_after(files.path(), Some(PolicyVersion(1))).unwrap();
    assert_eq!(aside.iter().map(|(version, _)| version.0).collect::<Vec<_>>(), [3, 2]);
    assert!(aside.iter().all(|(_, place)| place.is_dir()));
    assert_eq!(list(files.path()), [PolicyVersion(1)]);
    std::fs::create_dir(path(files.path(), PolicyVersion(3))).unwrap();
    let again = set_aside_after(files.path(), Some(PolicyVersion(2))).unwrap();
    assert!(again[0].1.ends_with("step_000003.aside1"), "{again:?}");
    set_aside_after(files.path(), None).unwrap();
    assert!(list(files.path()).is_empty());
}
