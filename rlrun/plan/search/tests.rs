//! The search, on settings whose order is known.

use model::Recompute;

use super::candidate::RoleDivision;
use super::*;
use crate::args::CalibrationArgs;

fn search_with(text: &str, hardware: &str, gpus: usize) -> (Recipe, FoundSettings) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("r.toml");
    std::fs::write(&path, text).unwrap();
    let recipe = Recipe::load(&path, &[], &Program::default()).unwrap().0;
    let config = shape(&recipe).unwrap();
    let args = CalibrationArgs { hardware: Some(hardware.to_owned()), calibration: Vec::new(), seeds: 2 };
    let inputs = inputs_of(&recipe, &config, &args).unwrap();
    let search = PlanSearch { recipe: &recipe, config: &config, inputs: &inputs, seeds: 2 };
    let space = SearchSpace::new(&recipe, gpus, false);
    let found = search.found(&space, |candidate| rules(candidate, &path, &[], &Program::default())).unwrap();
    (recipe, found)
}

const TEXT: &str = "[model.random]\nhidden_size = 256\nintermediate_size = 1024\n[data.arithmetic]\n[rollout]\n\
                    max_completion_length = 256\n[buffer]\nbatch_groups = 8\n[[rewards]]\nkind = \"math\"\n[trainer]\nsteps = 100\n";

#[test]
fn the_best_settings_pass_the_rules_and_are_the_fastest_of_those_that_do() {
    let (recipe, found) = search_with(TEXT, "cpu", 0);
    assert_eq!(found.best.len(), BEST);
    let speeds: Vec<f64> = found.best.iter().map(|(ranked, _)| ranked.tokens_per_s).collect();
    let fastest = found.ranked.iter().map(|ranked| ranked.tokens_per_s).fold(0.0, f64::max);
    assert!(speeds[0] >= (1.0 - WORTH) * fastest, "{speeds:?} {fastest}");
    // No other setting of the same speed has less staleness.
    let best = &found.best[0].0;
    assert!(found.ranked.iter().all(|other| {
        other.tokens_per_s < best.tokens_per_s
            || other.candidate.max_staleness >= best.candidate.max_staleness
    }));
    // What is applied is what the keys say.
    let directory = tempfile::tempdir().unwrap();
    let (base, file) = (directory.path().join("base.toml"), directory.path().join("best.toml"));
    std::fs::write(&base, TEXT).unwrap();
    std::fs::write(&file, best.candidate.recipe_toml(&base, &["seed=7".to_owned()]).unwrap()).unwrap();
    let loaded = Recipe::load(&file, &[], &Program::default()).unwrap().0;
    assert_eq!(loaded.seed, 7);
    let mut applied = best.candidate.applied(&recipe);
    (applied.seed, applied.name) = (7, "best".to_owned());
    applied.placement.policy = loaded.placement.policy;
    assert_eq!(loaded, applied);
}

#[test]
fn gpus_are_divided_and_what_does_not_fit_is_counted() {
    let (_, found) = search_with(TEXT, "H200", 4);
    let divisions: std::collections::BTreeSet<String> =
        found.ranked.iter().map(|ranked| ranked.candidate.placement()).collect();
    for placement in ["by turns on 4", "1 sample, 3 train", "2 sample, 2 train", "3 sample, 1 train"] {
        assert!(divisions.contains(placement), "{divisions:?}");
    }
    assert_eq!(found.too_large.0, 0);
    // The same on a device of 2 GB: the largest settings do not fit.
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("small.toml");
    let text = include_str!("../../hardware/h200.toml").replace("1.41e11", "1.2e9");
    std::fs::write(&file, text).unwrap();
    let (_, found) = search_with(TEXT, file.to_str().unwrap(), 1);
    assert!(found.too_large.0 > 0 && found.too_large.1 > 1.2e9, "{:?}", found.too_large);
    assert!(found.ranked.iter().all(|ranked| ranked.memory <= 1.2e9));
}

#[test]
fn settings_that_are_hardly_faster_lose_to_less_staleness() {
    let passes = Passes { microbatch_tokens: 4096, recompute: Recompute::None, zero: 1 };
    let ranked = |max_staleness, tokens_per_s| Ranked {
        candidate: SearchCandidate {
            division: RoleDivision::Shared,
            on_gpus: false,
            max_staleness,
            batch_groups: 8,
            max_running: 64,
            passes,
            dtype: crate::recipe::words::ModelDtype::Auto,
        },
        tokens_per_s,
        limits: LimitingSide::Training,
        memory: 0.0,
    };
    let mut all = vec![ranked(0, 50.0), ranked(8, 100.0), ranked(1, 99.0), ranked(2, 97.0)];
    sort(&mut all);
    let order: Vec<u64> = all.iter().map(|ranked| ranked.candidate.max_staleness).collect();
    assert_eq!(order, [1, 8, 2, 0]);
}
