//! The search, on settings whose order is known.

use std::path::PathBuf;

use model::Recompute;

use super::candidate::{Passes, RoleDivision};
use super::*;
use crate::args::{CalibrationArgs, RecipeArgs};
use crate::recipe::schema::ParallelSection;
use crate::recipe::words::WeightTransport;

/// A directory with this recipe, its path, and the recipe.
fn loaded(text: &str) -> (tempfile::TempDir, PathBuf, Recipe) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("r.toml");
    std::fs::write(&path, text).unwrap();
    let recipe = Recipe::load(&path, &[], &Program::default()).unwrap().0;
    (directory, path, recipe)
}

/// Times of `hardware` without measurements.
fn estimates(recipe: &Recipe, config: &Config, hardware: &str) -> ScenarioInputs {
    let args = CalibrationArgs { hardware: Some(hardware.to_owned()), calibration: Vec::new(), seeds: 2 };
    inputs_of(recipe, recipe, config, &args).unwrap()
}

fn search_with(text: &str, hardware: &str, gpus: usize) -> (Recipe, FoundSettings) {
    let (_directory, path, recipe) = loaded(text);
    let config = shape(&recipe).unwrap();
    let inputs = estimates(&recipe, &config, hardware);
    let search = PlanSearch { recipe: &recipe, config: &config, inputs: &inputs, seeds: 2 };
    let space = SearchSpace::new(&recipe, &inputs, gpus, false);
    let accepts = |candidate: &SearchCandidate| {
        rules(candidate, &path, &[], &Program::default())?;
        search.divides_model(candidate)
    };
    let found = search.found(&space, accepts).unwrap();
    // What is applied is what the keys say.
    for (ranked, _) in &found.best {
        let keys = ranked.candidate.keys().into_iter().map(|(key, value)| format!("{key}={value}"));
        // Without CUDA no recipe with a GPU is loaded.
        let names_gpu = |key: &String| key.contains("\"cuda:") || key.ends_with("=\"cuda\"");
        let keys: Vec<String> = keys.filter(|key| cfg!(feature = "cuda") || !names_gpu(key)).collect();
        let Ok((loaded, _)) = Recipe::load(&path, &keys, &Program::default()) else {
            assert!(gpus > 0 && !cfg!(feature = "cuda"));
            continue;
        };
        let mut applied = ranked.candidate.applied(&recipe);
        let placement = &mut applied.placement;
        placement.policy = loaded.placement.policy;
        if !cfg!(feature = "cuda") {
            placement.device = loaded.placement.device;
            (placement.rollout_devices, placement.trainer_devices) = (None, None);
        }
        assert_eq!(loaded, applied);
    }
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
            parallel: ParallelSection::default(),
            transport: WeightTransport::Auto,
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

/// Four ranks on the processor, whose sums can be divided.
fn with_ranks(model: &str) -> String {
    TEXT.replace("[model.random]\n", &format!("[model]\nreduction = \"tree\"\n[model.random]\n{model}"))
        .replace("[trainer]\n", "[trainer]\nworld = 4\n")
}

/// The hardware file of a processor with so much memory, bytes.
fn processor(directory: &tempfile::TempDir, memory: f64) -> String {
    let file = directory.path().join("processor.toml");
    std::fs::write(&file, include_str!("../../hardware/cpu.toml").replace("2.5e10", &format!("{memory:.1}")))
        .unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn a_small_model_is_not_divided_and_every_degree_says_what_it_loses() {
    let (recipe, found) = search_with(&with_ranks(""), "cpu", 0);
    assert_eq!(recipe.trainer.world, 4);
    let degrees: std::collections::BTreeSet<String> =
        found.ranked.iter().map(|ranked| ranked.candidate.degrees()).collect();
    assert_eq!(found.best[0].0.candidate.degrees(), "none");
    assert!(["tensor 2", "context 2", "pipeline 2"].iter().all(|one| degrees.contains(*one)), "{degrees:?}");
    let text = show::text(&found, &recipe, &crate::simulate::hardware::Hardware::open("cpu").unwrap(), 0);
    let line =
        text.lines().find(|line| line.starts_with("  parallel degrees none; ") && line.contains(" % ("));
    assert!(line.is_some_and(|line| line.contains("tensor 2: ") && line.contains("context 2: ")), "{text}");
    // Four ranks do not share two key-value heads, and experts are none.
    assert!(found.refused.keys().any(|reason| reason.contains("expert")), "{:?}", found.refused);
}

#[test]
fn a_model_that_fits_no_rank_alone_is_divided() {
    let text = with_ranks("");
    let (directory, _, recipe) = loaded(&text);
    let config = shape(&recipe).unwrap();
    let inputs = estimates(&recipe, &config, "cpu");
    let search = PlanSearch { recipe: &recipe, config: &config, inputs: &inputs, seeds: 1 };
    let space = SearchSpace::new(&recipe, &inputs, 0, false);
    let least = |is_divided: bool| {
        let placements = space.placements().flat_map(|placement| {
            let degrees = space.degrees(placement.division);
            degrees.into_iter().map(move |parallel| SearchCandidate { parallel, ..placement.clone() })
        });
        let all = placements.filter(|candidate| {
            (candidate.degrees() != "none") == is_divided && search.divides_model(candidate).is_ok()
        });
        let passes = |candidate: SearchCandidate| {
            let of = |passes: &Passes| SearchCandidate { passes: *passes, ..candidate.clone() };
            space.passes().iter().map(of).collect::<Vec<_>>()
        };
        let memory = all.flat_map(passes).map(|candidate| search.memory(&candidate.applied(&recipe)));
        memory.fold(f64::INFINITY, f64::min)
    };
    let [alone, divided] = [least(false), least(true)];
    assert!(divided < 0.999 * alone, "{divided} {alone}");
    let (_, found) = search_with(&text, &processor(&directory, (divided + alone) / 2.0), 0);
    assert!(found.too_large.0 > 0);
    assert!(found.ranked.iter().all(|ranked| ranked.candidate.degrees() != "none"));
    let best = &found.best[0].0;
    assert!(best.memory <= (divided + alone) / 2.0, "{best:?}");
    // Nothing fits less than the smallest needs.
    let (_, found) = search_with(&text, &processor(&directory, divided / 2.0), 0);
    assert!(found.best.is_empty() && found.too_large.1 == divided, "{:?} {divided}", found.too_large);
}

#[test]
fn a_model_that_fits_no_gpu_is_refused_with_the_rule_about_degrees() {
    let sizes = "[model.random]\narchitecture = \"llama\"\nhidden_size = 8192\nintermediate_size = 28672\nnum_layers = 80\n\
                 num_heads = 64\nnum_kv_heads = 8\n";
    let text = TEXT.replace("[model.random]\nhidden_size = 256\nintermediate_size = 1024\n", sizes);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large.toml");
    std::fs::write(&path, text).unwrap();
    let args = PlanArgs {
        recipe: RecipeArgs { recipe: path, sets: Vec::new() },
        search: true,
        gpus: Some(2),
        any_batch: false,
        write: None,
        inputs: CalibrationArgs { hardware: Some("h100".to_owned()), calibration: Vec::new(), seeds: 1 },
    };
    let failure = run(&args, &Program::default()).unwrap_err();
    let text = failure.to_string();
    assert!(matches!(failure, Failure::DoesNotFit(_)), "{text}");
    assert!(text.contains("need too much memory, at least "), "{text}");
    assert!(text.contains("only ranks with shards of the weights divide experts"), "{text}");
}

#[test]
fn weights_go_from_gpu_to_gpu_where_each_role_has_its_own() {
    let text = TEXT
        .replace("[buffer]\n", "[buffer]\nstore = \"redb\"\n")
        .replace("hidden_size = 256", "hidden_size = 2048");
    let (recipe, found) = search_with(&text, "h100", 2);
    let split = |ranked: &&Ranked| matches!(ranked.candidate.division, RoleDivision::Split { .. });
    let of_split: Vec<&Ranked> = found.ranked.iter().filter(split).collect();
    assert!(!of_split.is_empty());
    for ranked in &found.ranked {
        let between = ranked.candidate.transport.is_between_devices();
        assert!(!between || (split(&ranked) && ranked.candidate.passes.zero < 3), "{ranked:?}");
    }
    assert!(of_split.iter().any(|ranked| ranked.candidate.transport.is_between_devices()), "{of_split:?}");
    // Beside the best all others are simulated.
    assert!(split(&&found.best[0].0), "{:?}", found.best[0]);
    let seen = |transport| found.ranked.iter().any(|ranked| ranked.candidate.transport == transport);
    let all = [WeightTransport::Auto, WeightTransport::Http, WeightTransport::CudaIpc, WeightTransport::Nccl];
    assert!(all.into_iter().all(seen));
    let hardware = crate::simulate::hardware::Hardware::open("h100").unwrap();
    let text = show::text(&found, &recipe, &hardware, 2);
    assert!(text.contains("  transport of weights ") && text.contains("http: "), "{text}");
    assert_eq!(recipe.weights.transport, WeightTransport::Auto);
}

#[test]
fn settings_that_adapt_keep_values_to_choose_from() {
    let text = TEXT
        .replace("[buffer]\n", "[buffer]\nadapt_staleness = true\n")
        .replace("[rollout]\n", "[rollout]\nadapt_running = true\ngroup_size = 16\n");
    let (_, found) = search_with(&text, "cpu", 0);
    assert_eq!(found.best.len(), BEST, "{:?}", found.refused);
    let has_choice = |of: &SearchCandidate| of.max_staleness > 0 && of.max_running > 16;
    assert!(found.ranked.iter().all(|ranked| has_choice(&ranked.candidate)));
}

#[test]
fn micro_batches_have_space_and_recomputation_of_the_recipe_is_compared() {
    let text = TEXT
        .replace("[data.arithmetic]\n", "[data]\nmax_prompt_length = 1024\n[data.arithmetic]\n")
        .replace("max_completion_length = 256", "max_completion_length = 3072")
        + "recompute = \"sequence\"\n";
    let (_directory, _, recipe) = loaded(&text);
    let config = shape(&recipe).unwrap();
    let inputs = estimates(&recipe, &config, "cpu");
    let space = SearchSpace::new(&recipe, &inputs, 0, false);
    assert!(space.passes().iter().all(|passes| passes.microbatch_tokens >= 4096));
    let own = space.passes().iter().find(|passes| passes.recompute == Recompute::Sequence).unwrap();
    let candidate = SearchCandidate { passes: *own, ..space.placements().next().unwrap() };
    assert!(candidate.keys().contains(&("trainer.recompute", "\"sequence\"".to_owned())));
    // GPUs have no such recomputation, and f32 is compared only where its speed is known.
    let mut inputs = estimates(&recipe, &config, "h200");
    let of_dtypes = |inputs: &ScenarioInputs| {
        let space = SearchSpace::new(&recipe, inputs, 1, false);
        assert!(space.passes().iter().all(|passes| passes.recompute != Recompute::Sequence));
        space.placements().any(|candidate| candidate.dtype == crate::recipe::words::ModelDtype::F32)
    };
    assert!(of_dtypes(&inputs));
    inputs.hardware.flops_f32_per_s = None;
    assert!(!of_dtypes(&inputs));
}

#[test]
fn a_recipe_that_places_roles_is_refused() {
    let (_directory, _, mut recipe) = loaded(TEXT);
    assert!(refuse_placed_roles(&recipe).is_ok());
    (recipe.placement.processes, recipe.placement.rollout_workers) = (true, Some(4));
    let said = refuse_placed_roles(&recipe).unwrap_err().to_string();
    assert!(said.contains("`placement.processes`, `placement.rollout_workers`"), "{said}");
}

/// No step is simulated for every version of a bound that no run of the search reaches.
#[test]
fn a_bound_that_is_never_reached_takes_few_steps() {
    let text = TEXT.replace("[buffer]\n", "[buffer]\nmax_staleness = 1000000\n");
    let (_, found) = search_with(&text, "cpu", 0);
    assert!(found.ranked.iter().any(|ranked| ranked.candidate.max_staleness == 1_000_000));
}
