//! From a [`RawRecipe`] to a [`Recipe`]: the rules between keys, and the paths.
//!
//! Invariant: all rules are tried, so that one run reports everything; a rule that fails points at a line that the
//! user wrote, where there is one. What needs a model or a dataset to be opened is not checked here.

use std::path::{Path, PathBuf};

use buffer::database::has_password;

use super::curation::check_curation;
use super::diagnostic::Diagnostic;
use super::layers::{Origin, Origins};
use super::placement::check_placement;
use super::ranges::{Checker, check_ranges};
use super::schema::{BufferSection, RandomModel, RawData, RawModel, RawRecipe, Rollout, Warmup};
use super::training::{check_lora, check_trainer};
use super::words::{OnStale, Quantization, Reduction, SampleOrder, StoreWord, WeightDtypeWord};
use super::{Data, DataSource, Files, Model, Recipe};
use crate::huggingface::{RepositoryKind, RepositoryName};
use crate::program::Program;

/// Most leaves of a step.
const MAX_LEAVES: usize = 1 << 10;

/// Checks everything; `stem` names the run if the recipe does not.
pub(super) fn check(
    mut raw: RawRecipe,
    stem: &str,
    origins: &Origins,
    program: &Program,
) -> Result<Recipe, Vec<Diagnostic>> {
    let mut checker = Checker { origins, errors: Vec::new() };
    check_ranges(&raw, &mut checker);
    let name = raw.name.take().unwrap_or_else(|| stem.to_owned());
    check_name(&name, &mut checker);
    let (dtype, reduction) = (raw.model.dtype, raw.model.reduction);
    let model = check_model(std::mem::take(&mut raw.model), &mut checker);
    let data = check_data(std::mem::take(&mut raw.data), &mut checker);
    let generated = data.as_ref().is_some_and(|data| data.source.is_additions());
    let seeds = data.as_ref().is_some_and(|data| matches!(data.source, DataSource::Seeds(_)));
    if seeds && raw.environment.is_none() {
        let help = "write a section `[environment]`, or name files in `data.train`";
        checker.report("data.seeds", "`data.seeds` are tasks of an environment, and there is none", help);
    }
    let warmup = check_warmup(raw.warmup.take(), data.is_none() || generated || seeds, &mut checker);
    super::supervised::check(&raw, generated, &mut checker);
    let gives_rewards = raw.environment.as_ref().is_some_and(|environment| environment.kind != "tools");
    if raw.rewards.is_empty() && raw.supervised.is_none() && !gives_rewards {
        let help = "write a section `[[rewards]]` with `kind = \"math\"` or another kind";
        checker.report("rewards", "there is no reward: nothing could be learnt", help);
    }
    super::rewards::check(&mut raw, program.registry(), &mut checker);
    super::environment::check(&mut raw, program.environments(), &mut checker);
    check_connections(&mut raw, &mut checker);
    if let Some(data) = &data {
        check_tokens(&raw, data.max_prompt_length, &mut checker);
    }
    check_batch(&raw, &mut checker);
    check_replay(&raw.buffer, &mut checker);
    check_store(&mut raw.buffer, &mut checker);
    check_bitwise(&raw.rollout, &mut checker);
    check_reduction(reduction, &raw.rollout, &mut checker);
    check_rounding(&raw, &mut checker);
    check_trainer(&raw.trainer, &mut checker);
    check_lora(raw.lora.as_mut(), &mut checker);
    super::algorithm::check(&mut raw, &mut checker);
    super::eval::check(&mut raw, warmup.as_ref(), &mut checker);
    check_curation(&raw, &mut checker);
    let (Some(model), Some(data)) = (model, data) else { return Err(checker.errors) };
    let recipe = Recipe {
        name,
        seed: raw.seed,
        model,
        dtype,
        reduction,
        data,
        warmup,
        supervised: raw.supervised,
        rollout: raw.rollout,
        environment: raw.environment,
        rewards: raw.rewards,
        curation: raw.curation,
        buffer: raw.buffer,
        algorithm: raw.algorithm,
        critic: raw.critic,
        trainer: raw.trainer,
        lora: raw.lora,
        island: raw.island,
        endpoint: raw.endpoint,
        eval: raw.eval,
        checkpoint: raw.checkpoint,
        weights: raw.weights,
        log: raw.log,
        dashboard: raw.dashboard,
        placement: raw.placement,
        deadlines: raw.deadlines,
    };
    super::eval::check_effect(&recipe, &mut checker);
    check_placement(&recipe, &mut checker);
    super::island::check_run(&recipe, &mut checker);
    if checker.errors.is_empty() { Ok(recipe) } else { Err(checker.errors) }
}

/// The sections that name addresses.
fn check_connections(raw: &mut RawRecipe, checker: &mut Checker<'_>) {
    super::endpoint::check(raw, checker);
    super::island::check(raw, checker);
    super::log::check(raw, checker);
    super::engines::check(raw, checker);
}

fn check_replay(buffer: &BufferSection, checker: &mut Checker<'_>) {
    let replays = buffer.order != SampleOrder::Fifo || buffer.max_uses > 1;
    if replays && buffer.on_stale == OnStale::Wait {
        let message = "no waiting keeps slow groups within the bound if groups are taken out of order or more than once \
                       (`buffer.order`, `buffer.max_uses`)";
        let paths = ["buffer.order", "buffer.max_uses", "buffer.on_stale"];
        checker.report_latest(&paths, message, "set `buffer.on_stale` to \"drop\"");
    }
}

impl BufferSection {
    /// The keys that say nothing about the store that was chosen.
    pub(super) fn keys_without_effect(&self) -> &'static [&'static str] {
        const OF_OWN: &[&str] = &[
            "adapt_staleness",
            "on_stale",
            "order",
            "reward_temperature",
            "max_uses",
            "dedup",
            "max_mib",
            "listen",
            "credentials",
            "tls_cert",
            "tls_key",
            "insecure",
            "schema",
        ];
        match (self.store, &self.listen) {
            (StoreWord::Http, _) => OF_OWN,
            (StoreWord::Postgres, Some(_)) => &[],
            (StoreWord::Postgres, None) => &["token_file", "credentials", "tls_cert", "tls_key", "insecure"],
            (_, Some(_)) => &["url", "schema"],
            (_, None) => &["url", "schema", "token_file", "credentials", "tls_cert", "tls_key", "insecure"],
        }
    }
}

fn check_store(buffer: &mut BufferSection, checker: &mut Checker<'_>) {
    let remote = buffer.store.is_remote();
    if remote && buffer.url.is_none() {
        let help = "name the address that `rlrun serve buffer` printed";
        checker.report("buffer.store", "`buffer.store` is \"http\", but there is no `buffer.url`", help);
    }
    check_database(buffer, checker);
    for key in buffer.keys_without_effect() {
        let path = format!("buffer.{key}");
        let help = match (remote, *key) {
            (true, _) => "remove it; it is set where the buffer is served",
            (false, "url") => "remove it, or set `buffer.store` to \"http\" or \"postgres\"",
            (false, "schema") => "remove it, or set `buffer.store = \"postgres\"`",
            (false, _) => "remove it, or set `buffer.listen`",
        };
        if checker.given(&path) {
            let store = match buffer.store {
                StoreWord::Http => "\"http\"",
                StoreWord::Postgres => "\"postgres\"",
                StoreWord::Redb | StoreWord::Memory => StoreWord::OWN,
            };
            checker.report(&path, format!("`{path}` has no effect with `buffer.store` {store}"), help);
        }
    }
    check_listen(buffer, checker);
    if let Some(file) = buffer.token_file.take() {
        buffer.token_file = existing(&file, "buffer.token_file", "write the token into it", checker);
    }
}

/// A database has a URL without a password: the recipe is shown, and written into the run directory.
fn check_database(buffer: &BufferSection, checker: &mut Checker<'_>) {
    if buffer.store != StoreWord::Postgres {
        return;
    }
    if !buffer.store.is_built() {
        let help = "build it with `cargo install --path . --features postgres`";
        checker.report("buffer.store", "this program was built without PostgreSQL", help);
    }
    let Some(url) = &buffer.url else {
        let help = "name the database, such as `buffer.url = \"postgres://rlrun@localhost:5432/rlrun\"`";
        return checker.report(
            "buffer.store",
            "`buffer.store` is \"postgres\", but there is no `buffer.url`",
            help,
        );
    };
    if has_password(url) {
        let help =
            "take it out of the URL, and set PGPASSWORD, or write it into the file that PGPASSFILE names";
        // At the line of the store: a message shows the line of its key.
        checker.report(
            "buffer.store",
            "`buffer.url` has a password, which every file of the run would show",
            help,
        );
    }
}

/// The files of certificates are there, and there is one way to authenticate.
fn check_listen(buffer: &mut BufferSection, checker: &mut Checker<'_>) {
    for (key, file) in [("tls_cert", &mut buffer.tls_cert), ("tls_key", &mut buffer.tls_key)] {
        if let Some(named) = file.take() {
            *file = existing(&named, &format!("buffer.{key}"), "name a PEM file", checker);
        }
    }
    if buffer.tls_cert.is_some() != buffer.tls_key.is_some() {
        let help = "name both, or neither";
        checker.report(
            "buffer.tls_cert",
            "a certificate needs its key (`buffer.tls_key`), a key its certificate",
            help,
        );
    }
    if buffer.credentials.is_some() && buffer.token_file.is_some() && buffer.tls_cert.is_some() {
        let help = "remove `buffer.credentials`";
        let message = "there is nothing to make: tokens and certificate are given (`buffer.token_file`, `buffer.tls_cert`)";
        checker.report("buffer.credentials", message, help);
    }
}

fn check_name(name: &str, checker: &mut Checker<'_>) {
    let fine = !name.is_empty()
        && !name.starts_with('.')
        && name.chars().all(|c| !c.is_control() && !matches!(c, '/' | '\\' | ':'));
    if !fine {
        let message =
            format!("`name` is \"{}\"; it must be usable as the name of a directory", name.escape_debug());
        checker.report("name", message, "use letters, digits, `-` and `_`");
    }
}

fn check_model(raw: RawModel, checker: &mut Checker<'_>) -> Option<Model> {
    match (raw.path, raw.random) {
        (Some(path), None) => {
            let help = "give a Hugging Face model directory, a GGUF file, hf:OWNER/NAME, or `[model.random]` for a new model";
            model_or_dataset(&path, RepositoryKind::Model, "model.path", help, checker).map(Model::Path)
        }
        (None, Some(random)) => {
            check_heads(&random, checker);
            Some(Model::Random(random))
        }
        (Some(_), Some(_)) => {
            exclusive("model.path", "model.random", checker);
            None
        }
        (None, None) => {
            let help = "write `path = \"DIRECTORY\"` under `[model]`, or a section `[model.random]`";
            checker.report("model", "there is no model: neither `model.path` nor `model.random`", help);
            None
        }
    }
}

fn check_heads(random: &RandomModel, checker: &mut Checker<'_>) {
    let RandomModel { hidden_size, num_heads, num_kv_heads, .. } = *random;
    if hidden_size == 0 || num_heads == 0 || num_kv_heads == 0 {
        return;
    }
    if !hidden_size.is_multiple_of(num_heads) || !(hidden_size / num_heads).is_multiple_of(2) {
        let message = format!(
            "`hidden_size` {hidden_size} does not split into {num_heads} heads of an even width (`num_heads`)"
        );
        let paths = ["model.random.hidden_size", "model.random.num_heads", "model.random"];
        checker.report_latest(&paths, message, "rotary embeddings turn pairs of numbers");
    }
    if !num_heads.is_multiple_of(num_kv_heads) {
        let message =
            format!("{num_heads} heads (`num_heads`) do not share {num_kv_heads} key and value heads evenly");
        let paths = ["model.random.num_kv_heads", "model.random.num_heads", "model.random"];
        checker.report_latest(&paths, message, "it must divide `num_heads`");
    }
}

/// Reports that both keys are given, pointing at both.
fn exclusive(one: &str, other: &str, checker: &mut Checker<'_>) {
    let place = |path| checker.origins.get(path).map(|origin: &Origin| origin.key.clone());
    let message = format!("both `{one}` and `{other}` are given; there can only be one");
    let diagnostic = Diagnostic::new(message, place(one)).related(place(other), "given here too");
    checker.errors.push(diagnostic.help("remove one of them"));
}

fn check_data(raw: RawData, checker: &mut Checker<'_>) -> Option<Data> {
    let files_given = !raw.train.is_empty() || !raw.eval.is_empty();
    let sources = [
        (files_given && !raw.train.is_empty(), "data.train"),
        (files_given && raw.train.is_empty(), "data.eval"),
        (raw.arithmetic.is_some(), "data.arithmetic"),
        (raw.seeds.is_some(), "data.seeds"),
    ];
    let given: Vec<&str> = sources.into_iter().filter_map(|(given, name)| given.then_some(name)).collect();
    if let [one, other, ..] = given[..] {
        exclusive(one, other, checker);
        return None;
    }
    let source = match (raw.seeds, raw.arithmetic) {
        (None, None) if !files_given => {
            let help =
                "write `train = \"FILE\"` under `[data]`, or a section `[data.arithmetic]` or `[data.seeds]`";
            let message = "there are no tasks: neither `data.train` nor `data.arithmetic` nor `data.seeds`";
            checker.report("data", message, help);
            return None;
        }
        (Some(seeds), _) => {
            check_generated("data.seeds", false, checker);
            DataSource::Seeds(seeds)
        }
        (None, Some(arithmetic)) => {
            let additions = arithmetic.questions.is_empty();
            check_generated("data.arithmetic", additions, checker);
            let pairs = (u64::from(arithmetic.max_operand) + 1).pow(2);
            let wanted = (arithmetic.train_tasks as u64).saturating_add(arithmetic.eval_tasks as u64);
            if additions && wanted > pairs {
                let message = format!(
                    "{wanted} tasks are more than the {pairs} additions of numbers up to {}",
                    arithmetic.max_operand
                );
                let paths =
                    ["max_operand", "train_tasks", "eval_tasks"].map(|key| format!("data.arithmetic.{key}"));
                let paths = [&paths[0], &paths[1], &paths[2], "data.arithmetic"];
                checker.report_latest(&paths, message, "lower `train_tasks` or raise `max_operand`");
            }
            DataSource::Arithmetic(arithmetic)
        }
        (None, None) => {
            if raw.train.is_empty() {
                checker.report(
                    "data.eval",
                    "`data.eval` is given without `data.train`",
                    "name the training tasks too",
                );
                return None;
            }
            if raw.prompt_template.is_some() && raw.prompt_column.is_some() {
                exclusive("data.prompt_template", "data.prompt_column", checker);
            }
            DataSource::Files(Files {
                train: all_existing(&raw.train, "data.train", checker)?,
                eval: all_existing(&raw.eval, "data.eval", checker)?,
                prompt_column: raw.prompt_column,
                answer_column: raw.answer_column,
                prompt_template: raw.prompt_template,
            })
        }
    };
    Some(Data {
        source,
        system_prompt: raw.system_prompt,
        chat: raw.chat,
        max_prompt_length: raw.max_prompt_length,
        overlong_prompts: raw.overlong_prompts,
        shuffle: raw.shuffle,
    })
}

/// Generated tasks have no columns, and additions no messages: keys about them would be silently ignored.
fn check_generated(section: &str, additions: bool, checker: &mut Checker<'_>) {
    let messages: &[&str] = if additions { &["system_prompt", "chat"] } else { &[] };
    for key in ["prompt_column", "answer_column", "prompt_template"].iter().chain(messages) {
        let path = format!("data.{key}");
        if checker.given(&path) {
            let message = format!("`{path}` has no effect on the generated tasks of `{section}`");
            checker.report(&path, message, "remove it, or name files in `data.train`");
        }
    }
}

fn check_warmup(warmup: Option<Warmup>, generated: bool, checker: &mut Checker<'_>) -> Option<Warmup> {
    let warmup = warmup.filter(|warmup| warmup.steps > 0)?;
    if !generated {
        let help = "remove `[warmup]` or set `warmup.steps = 0`; a model from `model.path` needs none";
        let message = "`warmup` needs the demonstrations of `data.arithmetic`, or those of an environment with `data.seeds`";
        checker.report("warmup", message, help);
    }
    Some(warmup)
}

/// A sequence of full length must fit into every buffer for sequences.
fn check_tokens(raw: &RawRecipe, max_prompt_length: usize, checker: &mut Checker<'_>) {
    let longest = max_prompt_length.saturating_add(raw.rollout.max_completion_length);
    let lengths = "`data.max_prompt_length` + `rollout.max_completion_length`";
    for (path, capacity) in [
        ("trainer.microbatch_tokens", Some(raw.trainer.microbatch_tokens)),
        ("rollout.kv_cache_tokens", raw.rollout.kv_cache_tokens),
    ] {
        let Some(capacity) = capacity.filter(|capacity| *capacity < longest && *capacity > 0) else {
            continue;
        };
        let message =
            format!("a sequence of {longest} tokens ({lengths}) does not fit into `{path}`, {capacity}");
        let paths = [path, "rollout.max_completion_length", "data.max_prompt_length"];
        checker.report_latest(&paths, message, &format!("raise `{path}` to at least {longest}"));
    }
}

fn check_batch(raw: &RawRecipe, checker: &mut Checker<'_>) {
    if !(1..=3).contains(&raw.trainer.zero) {
        let message = format!("`trainer.zero` is {}, but the stages are 1, 2 and 3", raw.trainer.zero);
        checker.report(
            "trainer.zero",
            message,
            "1 shares the optimizer's state, 2 gradients too, 3 weights too",
        );
    }
    let leaves = raw.trainer.leaves;
    if leaves > 0 && !(leaves.is_power_of_two() && leaves <= MAX_LEAVES) {
        let message =
            format!("`trainer.leaves` is {leaves}, but must be a power of two of at most {MAX_LEAVES}");
        checker.report("trainer.leaves", message, "4 gives 1, 2 and 4 trainer workers the same bits");
    }
    let groups = raw.buffer.batch_groups;
    let data = raw.trainer.parallel.config().data(raw.trainer.world);
    for (path, parts) in [("trainer.minibatches", raw.trainer.minibatches), ("trainer.world", data)] {
        if parts > groups {
            let message =
                format!("`{path}` is {parts}, but a batch has only {groups} groups (`buffer.batch_groups`)");
            checker.report(path, message, "");
        }
    }
    let slots = raw.buffer.max_staleness.checked_add(1).and_then(|n| n.checked_mul(groups as u64));
    if slots.is_none_or(|slots| slots > u64::from(u32::MAX)) {
        let message =
            "(`buffer.max_staleness` + 1) * `buffer.batch_groups` is more groups than can be in flight";
        checker.report("buffer.max_staleness", message, "lower it");
    }
    if raw.trainer.warmup_steps > raw.trainer.steps {
        let (warmup, steps) = (raw.trainer.warmup_steps, raw.trainer.steps);
        let message = format!("`trainer.warmup_steps` is {warmup}, more than the {steps} steps of the run");
        checker.report("trainer.warmup_steps", message, "");
    }
}

/// An int8 layer quantises activations by the range of a whole row, which shards of the row do not know, and the sums of a
/// bf16 layer are chains.
fn check_reduction(reduction: Reduction, rollout: &Rollout, checker: &mut Checker<'_>) {
    if reduction == Reduction::Tree && rollout.quantization != Quantization::None {
        let message = "`model.reduction` is \"tree\", which promises the bits of any number of tensor-parallel ranks; \
                       `rollout.quantization` cannot, because its sums are not trees";
        let help = "set `model.reduction = \"chain\"` or `rollout.quantization = \"none\"`";
        checker.report_latest(&["model.reduction", "rollout.quantization"], message, help);
    }
}

/// Samplers of rounded weights compute other bits than the trainer.
fn check_rounding(raw: &RawRecipe, checker: &mut Checker<'_>) {
    if raw.rollout.bitwise && raw.weights.dtype == WeightDtypeWord::Bf16 {
        let message = "`rollout.bitwise` promises that sampler and trainer compute the same bits, which \
                       `weights.dtype` cannot";
        let paths = ["weights.dtype", "rollout.bitwise"];
        checker.report_latest(&paths, message, "set `bitwise = false` or `dtype = \"f32\"`");
    }
}

/// Samples of an approximation cannot have the bits of the original.
fn check_bitwise(rollout: &Rollout, checker: &mut Checker<'_>) {
    if rollout.bitwise && rollout.quantization != Quantization::None {
        let message = "`rollout.bitwise` promises that sampler and trainer compute the same bits, which \
                       `rollout.quantization` takes away";
        let paths = ["rollout.quantization", "rollout.bitwise"];
        checker.report_latest(&paths, message, "set `bitwise = false` or `quantization = \"none\"`");
    }
}

/// The absolute paths of several files, each reported where it is named.
pub(super) fn all_existing(paths: &[PathBuf], key: &str, checker: &mut Checker<'_>) -> Option<Vec<PathBuf>> {
    let help = "check the path";
    // A single string has its origin under the key itself, a list under its elements.
    let element = |index: usize| format!("{key}[{index}]");
    let found: Vec<_> = paths
        .iter()
        .enumerate()
        .map(|(index, path)| {
            let at = if checker.given(&element(index)) { element(index) } else { key.to_owned() };
            model_or_dataset(path, RepositoryKind::Dataset, &at, help, checker)
        })
        .collect();
    found.into_iter().collect()
}

/// A name on the Hugging Face Hub as it is written, or the absolute path of something that exists.
pub(super) fn model_or_dataset(
    path: &Path,
    kind: RepositoryKind,
    key: &str,
    help: &str,
    checker: &mut Checker<'_>,
) -> Option<PathBuf> {
    if !RepositoryName::is_name(path) {
        return existing(path, key, help, checker);
    }
    match RepositoryName::parse(path, kind) {
        Ok(_) => Some(path.to_path_buf()),
        Err(reason) => {
            let help = "a file of this name is written with `./` before it";
            checker.report(key, format!("`{key}`: {reason}"), help);
            None
        }
    }
}

/// The absolute path of something that exists, looked for beside the file that names it, then in the working
/// directory.
pub(super) fn existing(path: &Path, key: &str, help: &str, checker: &mut Checker<'_>) -> Option<PathBuf> {
    let beside =
        checker.origins.get(key).and_then(|origin| origin.directory.as_ref()).map(|dir| dir.join(path));
    let candidates: Vec<_> = beside.into_iter().chain([path.to_path_buf()]).collect();
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    let Some(found) = candidates.iter().find(|path| path.exists()) else {
        let mut looked: Vec<_> =
            candidates.iter().map(|path| format!("`{}`", absolute(path).display())).collect();
        looked.dedup();
        let message =
            format!("`{key}`: there is no `{}`; looked for {}", path.display(), looked.join(" and "));
        checker.report(key, message, help);
        return None;
    };
    let found = absolute(found);
    if found.to_str().is_none() {
        let message = format!("`{key}`: the path `{}` is not UTF-8", found.display());
        checker.report(key, message, "a recipe could not name it; rename the directory");
        return None;
    }
    Some(found)
}
