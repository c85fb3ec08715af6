//! Whole recipes: layers, errors as a user sees them, origins and the way back through the resolved form.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use ::rewards::{Registry, RewardSpec};
use trajectory::Prompt;

use super::*;

mod devices;
mod elements;
mod engines;
mod island;
mod manual;
mod messages;
mod peers;
mod resume;

/// A directory with `run.toml` and whatever else a test writes; removed at the end.
struct Case {
    directory: tempfile::TempDir,
}

const MINIMAL: &str =
    "[model.random]\n[data.arithmetic]\n[[rewards]]\nkind = \"exact\"\n[trainer]\nsteps = 5\n";

impl Case {
    fn new(text: &str) -> Self {
        let case = Self { directory: tempfile::tempdir().unwrap() };
        case.write("run.toml", text);
        case
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    fn load(&self, sets: &[&str], env: &[(&str, &str)]) -> Result<(Recipe, Origins), Vec<Diagnostic>> {
        let sets: Vec<_> = sets.iter().map(|set| (*set).to_owned()).collect();
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Recipe::load(&self.directory.path().join("run.toml"), &sets, &Program::new(Registry::builtin(), env))
    }

    /// All errors as shown, with the temporary directory written as `DIR`.
    fn errors(&self, sets: &[&str], env: &[(&str, &str)]) -> String {
        let errors = self.load(sets, env).unwrap_err();
        let shown: Vec<_> = errors.iter().map(ToString::to_string).collect();
        let real = self.directory.path().canonicalize().unwrap();
        let shown = shown.join("\n").replace(&real.display().to_string(), "DIR");
        shown.replace(&self.directory.path().display().to_string(), "DIR")
    }
}

#[test]
fn a_misspelt_key_is_underlined_and_its_nearest_name_shown() {
    let case = Case::new(&format!("{MINIMAL}learning_rat = 1e-6\n"));
    let expected = "\
error: unknown key `trainer.learning_rat`
  --> DIR/run.toml:7:1
  |
7 | learning_rat = 1e-6
  | ^^^^^^^^^^^^
   = help: did you mean `trainer.learning_rate`?";
    assert_eq!(case.errors(&[], &[]), expected);
}

#[test]
fn several_errors_are_reported_together() {
    let text = "\
sed = 1
[model.random]
num_layers = \"two\"
[data]
shufle = true
[[rewards]]
kind = \"math\"
weight = 1
[trainer]
steps = -3
epochs = 1.5
[zzz]
";
    let expected = "\
error: unknown key `sed`
  --> DIR/run.toml:1:1
  |
1 | sed = 1
  | ^^^
   = help: did you mean `seed`?
error: `model.random.num_layers`: expected a whole number, 0 or more, found string \"two\"
  --> DIR/run.toml:3:14
  |
3 | num_layers = \"two\"
  |              ^^^^^
error: unknown key `data.shufle`
  --> DIR/run.toml:5:1
  |
5 | shufle = true
  | ^^^^^^
   = help: did you mean `data.shuffle`?";
    let shown = Case::new(text).errors(&[], &[]);
    assert!(shown.starts_with(expected), "{shown}");
}

#[test]
fn errors_after_a_list_element_that_cannot_be_taken_out_are_not_invented() {
    let shown = Case::new("[[rewards]]\nweight = 1\n[[rewards]]\nkind = \"math\"\n").errors(&[], &[]);
    assert_eq!(
        shown,
        "error: `rewards[0]` needs the key `kind`\n  --> DIR/run.toml:1:1\n  |\n1 | [[rewards]]\n  | ^^^^^^^^^^^"
    );
}

#[test]
fn a_promise_of_equal_bits_and_a_quantized_sampler_point_at_each_other() {
    let case = Case::new(&format!("{MINIMAL}[rollout]\nbitwise = true\nquantization = \"int8\"\n"));
    let shown = case.errors(&[], &[]);
    assert!(shown.contains("`rollout.bitwise`") && shown.contains("`rollout.quantization`"), "{shown}");
    assert!(shown.contains("DIR/run.toml:"), "{shown}");
    for set in ["rollout.bitwise=false", "rollout.quantization=none"] {
        case.load(&[set], &[]).unwrap();
    }
    let tree = Case::new(&format!("{MINIMAL}[rollout]\nquantization = \"int8\"\n"));
    let shown = tree.errors(&["model.reduction=tree"], &[]);
    assert!(shown.contains("`model.reduction`") && shown.contains("`rollout.quantization`"), "{shown}");
    let rounded = Case::new(&format!("{MINIMAL}[rollout]\nbitwise = true\n[weights]\ndtype = \"bf16\"\n"));
    let shown = rounded.errors(&[], &[]);
    assert!(shown.contains("`rollout.bitwise`") && shown.contains("`weights.dtype`"), "{shown}");
}

#[test]
fn wrong_types_and_ranges_point_at_the_value() {
    for (set, message) in [
        ("trainer.steps=many", "`trainer.steps`: expected a whole number, 0 or more, found string \"many\""),
        ("trainer.steps=-1", "`trainer.steps`: expected a whole number, 0 or more, found integer `-1`"),
        ("trainer.steps=0", "`trainer.steps` is 0; it must be 1 or more"),
        ("trainer=3", "`trainer`: expected a table, found integer `3`"),
        ("data.shuffle=1", "`data.shuffle`: expected true or false, found integer `1`"),
        ("trainer.optimizer=adamw8bits", "`trainer.optimizer` cannot be \"adamw8bits\""),
        ("rollout.on_update=1", "`rollout.on_update`: expected a string"),
        ("rollout.stop=x", "`rollout.stop`: expected a list, found string \"x\""),
        ("rollout.top_p=1.5", "`rollout.top_p` is 1.5; it must be above 0 and at most 1"),
        ("rollout.temperature=nan", "`rollout.temperature` is NaN; it must be above 0"),
        ("rollout.temperature=0", "`rollout.temperature` is 0; it must be above 0"),
        ("trainer.learning_rate=inf", "`trainer.learning_rate` is inf; it must be above 0"),
        ("rollout.group_size=1", "`rollout.group_size` is 1: a trajectory that is compared with nothing"),
        ("buffer.max_staleness=9000000000", "(`buffer.max_staleness` + 1) * `buffer.batch_groups` is more"),
        ("trainer.zero=4", "`trainer.zero` is 4, but the stages are 1, 2 and 3"),
        ("trainer.leaves=3", "`trainer.leaves` is 3, but must be a power of two"),
        ("rollout.tensor=3", "`rollout.tensor` is 3, but must be a power of two"),
        ("rollout.tensor=2", "tensor parallelism of a sampler needs a summation order"),
        ("trainer.parallel.context=2", "`trainer.world` is 1, not a multiple of 2, the product"),
        ("trainer.parallel.sections=6", "`trainer.parallel.sections` is 6, but must be a power of two"),
        ("rollout.adapt_running=3", "`rollout.adapt_running`: expected true or false"),
        ("buffer.adapt_staleness=3", "`buffer.adapt_staleness`: expected true or false"),
        ("placement.adapt_samplers=3", "`placement.adapt_samplers`: expected true or false"),
        ("trainer.adapt_microbatch=3", "`trainer.adapt_microbatch`: expected true or false"),
        ("trainer.elastic.snapshot_every=1", "ranks that can be lost alone are processes"),
        ("trainer.elastic.min_world=0", "`trainer.elastic.min_world`"),
        ("trainer.elastic.patience_s=-1", "`trainer.elastic.patience_s`"),
        ("trainer.parallel.exchange=keys", "`trainer.parallel.exchange` has no effect with one context rank"),
        ("trainer.minibatches=64", "`trainer.minibatches` is 64, but a batch has only 32 groups"),
        ("trainer.microbatch_tokens=100", "a sequence of 1024 tokens"),
        ("rollout.max_completion_length=8000", "a sequence of 8512 tokens"),
        ("trainer.warmup_steps=6", "`trainer.warmup_steps` is 6, more than the 5 steps of the run"),
        ("trainer.momentum=0.9", "`trainer.momentum` has no effect without `trainer.optimizer = \"muon\"`"),
        ("trainer.dion_rank_fraction=0.5", "`trainer.dion_rank_fraction` has no effect without"),
        ("trainer.decay_steps=2", "`trainer.decay_steps` has no effect without `trainer.schedule = \"wsd\"`"),
        ("trainer.schedule=wsd", "`trainer.schedule` is \"wsd\", but there is no `trainer.decay_steps`"),
        ("lora.rank=0", "`lora.rank` is 0; it must be 1 or more"),
        ("lora.rank=9000000000", "`lora.rank` is 9000000000; no layer is that wide"),
        ("lora.alpha=0", "`lora.alpha` is 0; it must be above 0"),
        ("lora.target_modules=[]", "`lora.target_modules` is empty: nothing would be trained"),
        ("lora.path=nowhere", "`lora.path`: there is no `nowhere`"),
        ("data.chat=true", "`data.chat` has no effect on the generated tasks"),
        ("data.arithmetic.questions=[\"add\"]", "`data.arithmetic.questions[0]` cannot be \"add\""),
        ("data.arithmetic.max_operand=9", "8500 tasks are more than the 100 additions of numbers up to 9"),
        (
            "model.random.num_layers=1000000000000000000",
            "`model.random.num_layers` is 1000000000000000000; it must be",
        ),
        ("model.random.hidden_size=8589934592", "a model of these sizes has about "),
        ("model.random.hidden_size=66", "`hidden_size` 66 does not split into 4 heads"),
        ("model.random.num_kv_heads=3", "4 heads (`num_heads`) do not share 3 key and value heads evenly"),
        ("name=a/b", "`name` is \"a/b\"; it must be usable as the name of a directory"),
        ("seed=9223372036854775808", "`seed` is 9223372036854775808; it must be at most"),
        ("deadlines.wait_s=5", "`rewards[0].timeout_s` is longer than `deadlines.wait_s`, 5"),
    ] {
        let shown = Case::new(MINIMAL).errors(&[set], &[]);
        assert!(shown.starts_with(&format!("error: {message}")), "{set}: {shown}");
        assert_eq!(shown.matches("error: ").count(), 1, "{set}: {shown}");
        assert!(shown.contains(" --> --set:1:"), "{set}: {shown}");
    }
}

#[test]
fn a_limit_that_adapts_has_limits_to_choose_from() {
    let case = Case::new(MINIMAL);
    let shown = case.errors(&["rollout.adapt_running=true", "rollout.max_running=8"], &[]);
    let message = "error: `rollout.adapt_running` chooses between `rollout.group_size` and `rollout.max_running`, which are 8 and 8";
    assert!(shown.starts_with(message), "{shown}");
    assert!(case.load(&["rollout.adapt_running=true"], &[]).unwrap().0.rollout.adapt_running);
}

#[test]
fn what_adapts_has_a_choice() {
    let case = Case::new(MINIMAL);
    let short =
        ["data.max_prompt_length=64", "rollout.max_completion_length=32", "trainer.adapt_microbatch=true"];
    let refused = |more: &[&str], message: &str| {
        let shown = case.errors(&[&short[..], more].concat(), &[]);
        assert!(shown.contains(message), "{shown}");
    };
    refused(&["trainer.microbatch_tokens=255"], "`trainer.adapt_microbatch` chooses between 128 and");
    refused(
        &["trainer.world=2", "trainer.ranks=processes", "buffer.listen=127.0.0.1:0"],
        "is for ranks that are threads",
    );
    refused(
        &["supervised.kind=sft"],
        "`trainer.adapt_microbatch` has no effect on training without sampling",
    );
    refused(&["placement.adapt_samplers=true"], "in processes of their own get slots, and this run has none");
    let two = ["placement.adapt_samplers=true", "placement.processes=true", "buffer.store=redb"];
    refused(&two, "get slots, and this run has one");
    let more = [&short[..], &two, &["placement.rollout_workers=2"]].concat();
    let recipe = case.load(&more, &[]).unwrap().0;
    assert!(recipe.trainer.adapt_microbatch && recipe.placement.adapt_samplers);
    case.load(&["placement.adapt_samplers=true", "buffer.listen=127.0.0.1:0"], &[]).unwrap();
}

#[test]
fn a_decay_and_a_warm_up_fit_into_the_run() {
    let case = Case::new(MINIMAL);
    let wsd = ["trainer.schedule=wsd", "trainer.warmup_steps=2", "trainer.decay_steps=4"];
    let shown = case.errors(&wsd, &[]);
    let message = "error: `trainer.warmup_steps`, 2, and `trainer.decay_steps`, 4, are more than the 5 steps";
    assert!(shown.starts_with(message), "{shown}");
    let (recipe, _) = case.load(&[wsd[0], wsd[1], "trainer.decay_steps=3"], &[]).unwrap();
    assert_eq!(recipe.trainer.decay_steps, Some(3));
}

#[test]
fn layers_of_an_adapter_are_known_and_named_once() {
    let lora = |modules: &str| format!("{MINIMAL}[lora]\ntarget_modules = {modules}\n");
    let shown = Case::new(&lora("[\"q_proj\", \"up_proj\", \"q_proj\"]")).errors(&[], &[]);
    assert!(shown.contains("`lora.target_modules` names \"q_proj\" twice"), "{shown}");
    let of_recurrence = "[\"in_proj_qkvz\", \"in_proj_ba\", \"in_proj_qkv\", \"in_proj_z\", \"in_proj_b\", \"in_proj_a\", \"out_proj\"]";
    let (recipe, _) = Case::new(&lora(of_recurrence)).load(&[], &[]).unwrap();
    let names: Vec<&str> = recipe.lora.unwrap().target_modules.iter().map(|module| module.as_str()).collect();
    assert_eq!(format!("{names:?}"), of_recurrence);
    let shown = Case::new(&lora("[\"q_prj\"]")).errors(&[], &[]);
    assert!(shown.contains("did you mean \"q_proj\"?"), "{shown}");
    let shown = Case::new(&format!("{MINIMAL}[lora]\nlora_alpha = 8\n")).errors(&[], &[]);
    assert!(shown.contains("lora.alpha") || shown.contains("`alpha`"), "{shown}");
    let (recipe, _) = Case::new(&format!("{MINIMAL}[lora]\n")).load(&[], &[]).unwrap();
    let shared = ["algorithm.kind=ppo", "critic.kind=shared"];
    let shown = Case::new(&format!("{MINIMAL}[lora]\n")).errors(&shared, &[]);
    assert!(shown.contains("would freeze the value head"), "{shown}");
    let shown = Case::new(&format!("{MINIMAL}router_correction_rate = 0.1\n[lora]\n")).errors(&[], &[]);
    assert!(shown.contains("updates routers, and with `[lora]` all weights are frozen"), "{shown}");
    let lora = recipe.lora.unwrap();
    assert_eq!((lora.rank, lora.alpha, lora.target_modules.len()), (16, 32.0, 7));
}

#[test]
fn rewards_take_their_own_keys_only() {
    for (reward, message) in [
        ("kind = \"math\"\npattern = \"x\"", "the reward `math` does not take `pattern`"),
        ("kind = \"regex\"", "the reward `regex` needs the key `pattern`"),
        ("kind = \"maths\"", "there is no reward of kind \"maths\""),
        ("kind = \"length\"\ncache = 600", "`rewards[1].cache` is more than the length limit of 512 tokens"),
        ("kind = \"exact\"", "`rewards[0]` and `rewards[1]` are both named \"exact\""),
        ("kind = \"math\"\nweight = inf", "`rewards[1].weight` is inf; it must be a finite number"),
    ] {
        let shown = Case::new(&format!("{MINIMAL}[[rewards]]\n{reward}\n")).errors(&[], &[]);
        assert!(shown.starts_with(&format!("error: {message}")), "{shown}");
    }
    let episodes = "[environment]\nkind = \"guess_number\"\n[[rewards]]\nkind = \"length\"\ncache = 10\n";
    let shown = Case::new(&format!("{MINIMAL}{episodes}")).errors(&[], &[]);
    assert!(shown.contains("`rewards[1].max_length` is not given"), "{shown}");
}

#[test]
fn turns_of_agents_are_not_interrupted() {
    let interrupted =
        "[rollout]\ninterrupt_text = \"enough\"\ninterrupt_after_min = 2\ninterrupt_after_max = 3\n";
    let agents = "[environment]\nkind = \"sessions\"\n[endpoint]\nlisten = \"127.0.0.1:0\"\n";
    let shown = Case::new(&format!("{MINIMAL}{interrupted}{agents}")).errors(&[], &[]);
    assert!(shown.contains("agents' turns are not interrupted"), "{shown}");
}

#[test]
fn missing_parts_are_named() {
    let shown = Case::new("").errors(&[], &[]);
    for missing in
        ["`trainer.steps` is missing", "there is no model", "there are no tasks", "there is no reward"]
    {
        assert!(shown.contains(missing), "{shown}");
    }
}

#[test]
fn model_and_data_have_one_source_each() {
    let text = format!("{MINIMAL}[model]\npath = \".\"\n");
    let expected = "\
error: both `model.path` and `model.random` are given; there can only be one
  --> DIR/run.toml:8:1
  |
8 | path = \".\"
  | ^^^^
  --> DIR/run.toml:1:8
  |
1 | [model.random]
  |        ^^^^^^ given here too
   = help: remove one of them";
    assert_eq!(Case::new(&text).errors(&[], &[]), expected);
    let shown = Case::new(&format!("{MINIMAL}[data]\ntrain = \".\"\n")).errors(&[], &[]);
    assert!(shown.starts_with("error: both `data.train` and `data.arithmetic` are given"), "{shown}");
}

#[test]
fn a_layer_replaces_the_source_of_the_layer_below() {
    let case = Case::new(MINIMAL);
    fs::create_dir(case.directory.path().join("model")).unwrap();
    let path = format!("model.path={}/model", case.directory.path().display());
    let (recipe, _) = case.load(&[&path], &[]).unwrap();
    assert_eq!(recipe.model, Model::Path(case.directory.path().join("model")));
}

#[test]
fn a_path_is_looked_for_beside_the_file_that_names_it() {
    let case = Case::new("extends = \"sub/base.toml\"\n[trainer]\nsteps = 1\n[[rewards]]\nkind = \"math\"\n");
    fs::create_dir(case.directory.path().join("sub")).unwrap();
    let base = "[model.random]\n[data]\ntrain = [\"a.jsonl\", \"b.jsonl\"]\n";
    case.write("sub/base.toml", base);
    case.write("sub/a.jsonl", "");
    let shown = case.errors(&[], &[]);
    assert!(
        shown.starts_with("error: `data.train[1]`: there is no `b.jsonl`; looked for `DIR/sub/b.jsonl`"),
        "{shown}"
    );
    assert!(shown.contains("DIR/sub/base.toml:3:21"), "{shown}");
    case.write("sub/b.jsonl", "");
    let DataSource::Files(files) = case.load(&[], &[]).unwrap().0.data.source else {
        panic!("files are given")
    };
    let expected = ["sub/a.jsonl", "sub/b.jsonl"].map(|file| case.directory.path().join(file));
    assert_eq!(files.train, expected);
}

#[test]
fn a_circle_of_bases_is_an_error_with_its_members() {
    let case = Case::new("extends = [\"base.toml\"]\n");
    case.write("base.toml", "# base\nextends = \"run.toml\"\n");
    let expected = "\
error: `extends` runs in a circle: DIR/run.toml -> DIR/base.toml -> DIR/run.toml
  --> DIR/base.toml:2:11
  |
2 | extends = \"run.toml\"
  |           ^^^^^^^^^^
   = help: remove one `extends` of the circle";
    assert_eq!(case.errors(&[], &[]), expected);
}

#[test]
fn bases_that_are_named_again_and_again_are_an_error() {
    let case = Case::new("extends = \"a0.toml\"\n");
    for n in 0..40 {
        case.write(&format!("a{n}.toml"), &format!("extends = [\"a{0}.toml\", \"a{0}.toml\"]\n", n + 1));
    }
    case.write("a40.toml", "seed = 1\n");
    assert!(case.errors(&[], &[]).contains("`extends` names more than 256 files"));
}

#[test]
fn missing_files_and_broken_toml_are_placed() {
    let shown = Case::new("extends = \"nothing.toml\"\n").errors(&[], &[]);
    assert!(shown.starts_with("error: cannot read recipe `DIR/nothing.toml`: "), "{shown}");
    assert!(shown.contains("DIR/run.toml:1:11"), "{shown}");
    let shown = Case::new("[model\nx = 1\n").errors(&[], &[]);
    assert!(shown.starts_with("error: not TOML: ") && shown.contains("DIR/run.toml:1:7"), "{shown}");
    let shown = Case::new("seed = 1\nseed = 2\n").errors(&[], &[]);
    assert!(
        shown.starts_with("error: not TOML: duplicate key") && shown.contains("DIR/run.toml:2:1"),
        "{shown}"
    );
}

#[test]
fn later_layers_win_and_every_value_knows_its_origin() {
    let case =
        Case::new(&format!("extends = \"base.toml\"\n{MINIMAL}epochs = 2\nminibatches = 2\nworld = 2\n"));
    case.write("base.toml", "[trainer]\nepochs = 9\nadam_beta1 = 0.8\nsteps = 9\n");
    let env = [("RLRUN__TRAINER__MINIBATCHES", "3"), ("RLRUN__TRAINER__WORLD", "3"), ("PATH", "/bin")];
    let (recipe, origins) = case.load(&["trainer.world=4"], &env).unwrap();
    let trainer = &recipe.trainer;
    assert_eq!((trainer.adam_beta1, trainer.epochs, trainer.minibatches, trainer.world), (0.8, 2, 3, 4));
    let directory = case.directory.path().display().to_string();
    for (path, layer, described) in [
        ("trainer.adam_beta1", Some(Layer::Base), format!("{directory}/base.toml:3:1")),
        ("trainer.epochs", Some(Layer::Recipe), format!("{directory}/run.toml:8:1")),
        ("trainer.minibatches", Some(Layer::Environment), "environment".to_owned()),
        ("trainer.world", Some(Layer::Set), "--set".to_owned()),
        ("trainer.adam_beta2", None, "default".to_owned()),
        ("rewards[0].kind", Some(Layer::Recipe), format!("{directory}/run.toml:5:1")),
    ] {
        assert_eq!(origins.get(path).map(|origin| origin.layer), layer, "{path}");
        assert_eq!(origins.describe(path), described, "{path}");
    }
}

#[test]
fn an_error_in_the_environment_names_the_variable() {
    let shown = Case::new(MINIMAL).errors(&[], &[("RLRUN__TRAINER__LR", "1e-6")]);
    let expected = "\
error: unknown key `trainer.lr`
  --> environment:1:17
  |
1 | RLRUN__TRAINER__LR=1e-6
  |                 ^^
   = help: rlrun calls it `trainer.learning_rate`";
    assert_eq!(shown, expected);
}

#[test]
fn set_takes_toml_and_bare_words() {
    let sets = [
        "rollout.on_update=drain",
        "rollout.stop=[\"a\", \"b\"]",
        "buffer={batch_groups=4, store=\"memory\"}",
    ];
    let (recipe, _) = Case::new(MINIMAL).load(&sets, &[]).unwrap();
    assert_eq!(recipe.rollout.on_update, words::OnUpdate::Drain);
    assert_eq!(recipe.rollout.stop, ["a", "b"]);
    assert_eq!((recipe.buffer.batch_groups, recipe.buffer.store), (4, words::StoreWord::Memory));
    for (set, message) in [
        ("trainer.steps", "`trainer.steps` has no `=`"),
        ("=3", "`` is not a key"),
        ("trainer..steps=3", "`` is not a key"),
        ("rollout.stop=[1", "the value is not TOML: "),
        ("extends=a.toml", "`extends` can only stand in a file"),
        ("steps=3", "unknown key `steps`"),
    ] {
        let shown = Case::new(MINIMAL).errors(&[set], &[]);
        assert!(shown.starts_with(&format!("error: {message}")), "{set}: {shown}");
    }
    assert!(Case::new(MINIMAL).errors(&["steps=3"], &[]).contains("help: there is `trainer.steps`"));
    let deep = format!("{}a=1", "a.".repeat(100_000));
    assert!(Case::new(MINIMAL).errors(&[&deep], &[]).contains("the key has more than 64 parts"));
}

#[test]
fn the_resolved_recipe_loads_as_an_equal_one() {
    let files = "seed = 7\n[model.random]\n[data]\ntrain = \"t.jsonl\"\nprompt_template = \"\"\"\nQ: {question}\n\"A\":\"\"\"\n\
                 chat = true\n[[rewards]]\nkind = \"length\"\ncache = 10\n[[rewards]]\nkind = \"regex\"\npattern = '\\d+'\n\
                 weight = 0.1\n[trainer]\nsteps = 3\nadam_eps = 1e-12\n";
    let warm = format!("{MINIMAL}[warmup]\nsteps = 3\n[rollout]\nstop = [\"\\n\"]\nstop_token_ids = [3]\n");
    let optimizers = ["muon", "dion"].map(|optimizer| {
        format!(
            "{MINIMAL}optimizer = \"{optimizer}\"\nmomentum = 0.8\nschedule = \"wsd\"\ndecay_steps = 2\n[lora]\nrank = 4\n\
             target_modules = [\"q_proj\"]\npath = \"t.jsonl\"\n"
        )
    });
    for text in [files, MINIMAL, &warm, &optimizers[0], &optimizers[1]] {
        let case = Case::new(text);
        case.write("t.jsonl", "");
        let (recipe, origins) = case.load(&[], &[]).unwrap();
        let resolved = recipe.resolved_toml(&origins);
        let again =
            Recipe::load(&case.write("resolved.toml", &resolved), &[], &Program::default()).unwrap().0;
        assert_eq!(again, recipe, "{resolved}");
        assert!(
            resolved.lines().any(|line| line.starts_with("steps = ") && line.contains("  # /")),
            "{resolved}"
        );
        let rate = resolved.lines().find(|line| line.starts_with("learning_rate = 0.000001 "));
        assert!(rate.is_some_and(|line| line.ends_with("  # default")), "{resolved}");
    }
}

proptest! {
    #[test]
    fn every_input_can_be_reported(
        text in "([a-z.\\[\\]{}=\"' 0-9#-]|\n|rewards|model|trainer|\u{e9}){0,40}",
        set in "([a-z]{0,3}|trainer|rewards)(\\.[a-z]{0,2})?=?[\\[{\"a0. ]{0,4}\u{e9}?",
    ) {
        for error in Case::new(&text).load(&[&set], &[("RLRUN__X__Y", &set)]).err().unwrap_or_default() {
            prop_assert!(error.to_string().starts_with("error: "));
        }
    }
}

#[test]
fn names_are_filled_in() {
    let (recipe, _) = Case::new(MINIMAL).load(&[], &[]).unwrap();
    assert_eq!(recipe.name, "run");
    assert_eq!(recipe.rewards.iter().map(RewardSpec::name).collect::<Vec<_>>(), ["exact"]);
}

#[test]
fn warmup_of_no_steps_is_none_and_warmup_needs_generated_tasks() {
    let case = Case::new(&format!("{MINIMAL}[warmup]\nsteps = 0\n"));
    assert_eq!(case.load(&[], &[]).unwrap().0.warmup, None);
    case.write("t.jsonl", "");
    let train = format!("data.train={}/t.jsonl", case.directory.path().display());
    assert!(case.load(&[&train], &[]).is_ok());
    let shown = case.errors(&[&train, "warmup.steps=5"], &[]);
    assert!(shown.starts_with("error: `warmup` needs the demonstrations of `data.arithmetic`"), "{shown}");
}

#[test]
fn questions_take_messages_and_no_demonstrations() {
    let section = "[data.arithmetic]\nquestions = [\"sum\", \"two_steps\"]\n";
    let case = Case::new(&MINIMAL.replace("[data.arithmetic]\n", section));
    let sets =
        ["data.system_prompt=Number.", "data.arithmetic.train_tasks=4", "data.arithmetic.eval_tasks=2"];
    let (recipe, origins) = case.load(&sets, &[]).unwrap();
    let (train, eval) = recipe.tasks().unwrap();
    assert_eq!((train.len(), eval.len()), (4, 2));
    let Prompt::Messages(messages) = &train[0].prompt else { panic!("{:?}", train[0].prompt) };
    assert_eq!(
        (&messages[0].role[..], &messages[0].content[..], &messages[1].role[..]),
        ("system", "Number.", "user")
    );
    let again = Case::new(&recipe.resolved_toml(&origins));
    assert_eq!(again.load(&[], &[]).unwrap().0.tasks().unwrap(), (train, eval));
    let shown = case.errors(&["warmup.steps=5"], &[]);
    assert!(shown.starts_with("error: `warmup` needs the demonstrations of `data.arithmetic`"), "{shown}");
    let shown = case.errors(&["data.prompt_column=question"], &[]);
    assert!(shown.starts_with("error: `data.prompt_column` has no effect on the generated tasks"), "{shown}");
}

#[test]
fn the_recipes_of_the_repository_hold() {
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes");
    let (math, _) = Recipe::load(&recipes.join("grpo_math.toml"), &[], &Program::default()).unwrap();
    assert!(math.warmup.is_some() && math.has_eval_tasks());
    Recipe::load(&recipes.join("grpo_gsm8k.toml"), &[], &Program::default()).unwrap();
    // Every seed has enough different questions.
    for seed in 0..3 {
        let sets = [format!("seed={seed}")];
        let (smollm, _) =
            Recipe::load(&recipes.join("grpo_smollm.toml"), &sets, &Program::default()).unwrap();
        let (train, eval) = smollm.tasks().unwrap();
        assert_eq!((train.len(), eval.len()), (660, 150));
    }
}

#[test]
fn a_database_has_a_url_without_a_password_and_a_program_that_can_use_it() {
    let postgres = "buffer.store=postgres";
    let shown = Case::new(MINIMAL).errors(&[postgres], &[]);
    let what = if cfg!(feature = "postgres") { "there is no `buffer.url`" } else { "--features postgres" };
    assert!(shown.contains(what), "{shown}");
    let url = "buffer.url=postgres://u:opensesame@h/d";
    let shown = Case::new(MINIMAL).errors(&[postgres, url], &[]);
    assert!(shown.contains("has a password") && !shown.contains("opensesame"), "{shown}");
    let shown = Case::new(MINIMAL).errors(&["buffer.schema=a"], &[]);
    assert!(shown.contains("`buffer.schema` has no effect with `buffer.store` \"redb\""), "{shown}");
    if cfg!(feature = "postgres") {
        let sets = [postgres, "buffer.url=postgres://u@h/d", "buffer.schema=a"];
        let (recipe, _) = Case::new(MINIMAL).load(&sets, &[]).unwrap();
        assert_eq!(recipe.buffer.schema.as_deref(), Some("a"));
    }
}

#[test]
fn experts_are_for_families_that_have_them() {
    let shown = Case::new(MINIMAL).errors(&["model.random.experts=4"], &[]);
    assert!(shown.contains("`model.random.experts` has no effect"), "{shown}");
    let family = "model.random.architecture=olmoe";
    let shown = Case::new(MINIMAL).errors(&[family, "model.random.experts_per_token=9"], &[]);
    assert!(shown.contains("`model.random.experts_per_token` is 9, and `model.random.experts` 8"), "{shown}");
    let (recipe, _) = Case::new(MINIMAL).load(&[family, "model.random.experts=4"], &[]).unwrap();
    let Model::Random(random) = recipe.model else { panic!("the recipe has a new model") };
    assert_eq!((random.experts(), random.experts_per_token), ([4, 2], None));
}
