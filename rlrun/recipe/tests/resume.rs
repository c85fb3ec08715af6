//! Recipes of runs that are resumed with other values.

use super::*;
use crate::recipe::manual::{self, Key};
use crate::recipe::resume::rules::{Rule, declared};

/// The resolved recipe of a run, written down.
fn resolved(case: &Case) -> PathBuf {
    let (recipe, origins) = case.load(&["trainer.steps=5"], &[]).unwrap();
    case.write("resolved.toml", &recipe.resolved_toml(&origins))
}

fn resume(path: &Path, sets: &[&str], env: &[(&str, &str)], number: usize) -> Result<Resumption, String> {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let program = Program::new(Registry::builtin(), env);
    let shown =
        |errors: Vec<Diagnostic>| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    Recipe::resume(path, &sets, &program, number).map_err(shown)
}

fn keys(resumption: &Resumption) -> Vec<&str> {
    resumption.changes.iter().map(|change| change.key.as_str()).collect()
}

#[test]
fn every_key_declares_whether_a_resume_may_change_it() {
    let open: Vec<_> = manual::keys().iter().filter(|key| declared(key).is_none()).collect();
    assert!(
        open.is_empty(),
        "write `// resume = changes` above {open:?}, or one of REASONS in resume/rules.rs"
    );
    let may_change = |key: &&&Key| declared(key) == Some(Rule::MayChange);
    assert!(manual::keys().iter().filter(may_change).count() > 80);
}

#[test]
fn a_change_is_applied_and_every_other_value_keeps_its_origin() {
    let case = Case::new(&format!("{MINIMAL}learning_rate = 1e-4\n[rollout]\nstop = [\"\\n\\\"\\u007f\"]\n"));
    let path = resolved(&case);
    let first = resume(&path, &["trainer.steps=9", "deadlines.quiet_s=5"], &[], 1).unwrap();
    assert_eq!(keys(&first), ["trainer.steps", "deadlines.quiet_s"]);
    assert_eq!(first.changes[0].to_string(), "trainer.steps 5 -> 9");
    let json = r#"{"key":"trainer.steps","from":5,"to":9}"#;
    assert_eq!(first.changes[0].to_json().to_string(), json);
    assert_eq!((first.recipe.trainer.steps, first.recipe.deadlines.quiet_s), (9, 5.0));
    let path = case.write("resolved.toml", &first.recipe.resolved_toml(&first.origins));

    let env = [("RLRUN__EVAL__INTERVAL", "3"), ("RLRUN__TRAINER__STEPS", "9")];
    let second = resume(&path, &[], &env, 2).unwrap();
    assert_eq!(keys(&second), ["eval.interval"]);
    let text = second.recipe.resolved_toml(&second.origins);
    let run = case.directory.path().join("run.toml").display().to_string();
    for (key, origin) in [
        ("steps = 9", "resume 1 (--set)"),
        ("quiet_s = 5.0", "resume 1 (--set)"),
        ("interval = 3", "resume 2 (environment)"),
        ("learning_rate = 0.0001", &format!("{run}:7:1")),
        ("stop = [\"\\n\\\"\\U0000007F\"]", &format!("{run}:9:1")),
        ("adam_beta1 = 0.9", "default"),
    ] {
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("{key}: {text}"));
        assert!(line.ends_with(&format!("  # {origin}")), "{line}");
    }
    let third = resume(&case.write("resolved.toml", &text), &[], &[], 3).unwrap();
    assert!(third.changes.is_empty());
    assert_eq!(third.recipe.resolved_toml(&third.origins), text);
}

#[test]
fn the_identity_of_a_run_cannot_change() {
    let case = Case::new(MINIMAL);
    fs::create_dir(case.directory.path().join("model")).unwrap();
    let path = resolved(&case);
    let model = format!("model.path={}/model", case.directory.path().display());
    for (set, key, why) in [
        (&model[..], "model.path", "the policy is that of the run's checkpoint"),
        ("seed=7", "seed", "position in the task order"),
        ("name=other", "name", "the directory of the run"),
        ("data.arithmetic.max_operand=150", "data.arithmetic.max_operand", "position in the task order"),
        ("rewards[0].weight=2", "rewards[0].weight", "were scored with it"),
        ("rewards.exact.kind=math", "rewards[0].kind", "were scored with it"),
        ("rollout.group_size=4", "rollout.group_size", "groups in the buffer depend"),
        ("buffer.store=memory", "buffer.store", "groups in the buffer depend"),
        ("algorithm.kind=cispo", "algorithm.kind", "what the run learns"),
        ("trainer.optimizer=adamw8bit", "trainer.optimizer", "the state in the checkpoint"),
        ("lora.rank=4", "lora.rank", "the state in the checkpoint"),
    ] {
        let error = resume(&path, &[set], &[], 1).unwrap_err();
        let start = format!("error: `{key}` cannot change when a run is resumed: ");
        assert!(error.starts_with(&start) && error.contains(why), "{set}: {error}");
        assert!(error.contains(" --> --set:1:") && error.contains("start a new run"), "{set}: {error}");
    }
    // Also where the change would be a mistake.
    for (set, key) in
        [("rewards.exact.kind=regex", "rewards[0].kind"), ("algorithm.kind=ppo", "algorithm.kind")]
    {
        let error = resume(&path, &[set, "algorithm.scale_rewards=batch"], &[], 1).unwrap_err();
        assert!(error.starts_with(&format!("error: `{key}` cannot change")), "{set}: {error}");
    }
    let error = resume(&path, &[], &[("RLRUN__SEED", "7")], 1).unwrap_err();
    assert!(error.contains(" --> environment:1:"), "{error}");
    // An equal value is no change.
    assert!(resume(&path, &["seed=0", "rollout.group_size=8"], &[], 1).unwrap().changes.is_empty());
}

#[test]
fn a_default_follows_the_key_that_it_is_taken_from() {
    let ppo = format!("{MINIMAL}[algorithm]\nkind = \"ppo\"\n");
    let case = Case::new(&ppo);
    let resumed = resume(&resolved(&case), &["trainer.learning_rate=1e-3"], &[], 1).unwrap();
    assert_eq!(resumed.recipe.critic.unwrap().learning_rate, Some(1e-3));
    let case = Case::new(&format!("{ppo}[critic]\nlearning_rate = 1e-5\n"));
    let resumed = resume(&resolved(&case), &["trainer.learning_rate=1e-3"], &[], 1).unwrap();
    assert_eq!(resumed.recipe.critic.unwrap().learning_rate, Some(1e-5));

    let case = Case::new(MINIMAL);
    let path = resolved(&case);
    let masked = resume(&path, &["algorithm.correction=geometric_mask"], &[], 1).unwrap();
    assert_eq!(masked.recipe.algorithm.behavior_weight_floor, Some(0.999));
    let anchored = resume(&path, &["algorithm.proximal=behavior"], &[], 1).unwrap();
    assert!(
        masked.changes.iter().chain(&anchored.changes).all(|change| change.key.starts_with("algorithm."))
    );
    let text = masked.recipe.resolved_toml(&masked.origins);
    let floor = text.lines().find(|line| line.starts_with("behavior_weight_floor"));
    assert!(floor.is_some_and(|line| line.ends_with("  # resume 1 (follows)")), "{text}");

    let case = Case::new(&format!("{MINIMAL}[[rewards]]\nkind = \"length\"\ncache = 10\n"));
    let path = resolved(&case);
    let longer = resume(&path, &["rollout.max_completion_length=600"], &[], 1).unwrap();
    assert_eq!(longer.recipe.rewards[1].max_length, Some(600));
    assert!(resume(&path, &["rewards.length.max_length=600"], &[], 1).is_err());
}

#[test]
fn a_run_that_compared_with_nothing_has_no_reference() {
    let case = Case::new(MINIMAL);
    let path = resolved(&case);
    let error = resume(&path, &["algorithm.kl_coef=0.1"], &[], 1).unwrap_err();
    assert!(error.contains("has not kept the policy") && error.contains("`algorithm.reference`"), "{error}");
    let reference = format!("algorithm.reference={}", case.directory.path().display());
    assert!(resume(&path, &["algorithm.kl_coef=0.1", &reference], &[], 1).is_ok());
}
