//! Settings that a search compares, as changes of a recipe and as keys.
//!
//! Invariant: [`SearchCandidate::applied`] and [`SearchCandidate::keys`] say the same.

use std::path::Path;

use model::Recompute;
use toml::{Table, Value};
use trainer::microbatch::LEAST_TOKENS;

use crate::failure::Failure;
use crate::recipe::Recipe;
use crate::recipe::schema::ParallelSection;
use crate::recipe::words::{DeviceLocation, DeviceWord, ModelDtype, PolicyPlacement, WeightTransport};
use crate::simulate::inputs::ScenarioInputs;

/// Bounds on staleness that are compared, versions.
const STALENESS: [u64; 5] = [0, 1, 2, 4, 8];
/// Numbers of running sequences of a sampler that are compared.
const RUNNING: [usize; 7] = [16, 32, 64, 128, 256, 512, 1024];
/// Up to so many GPUs every division is compared.
const ALL_DIVISIONS: usize = 8;

/// How roles are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleDivision {
    /// Sampler and trainer work at the same time on the cores of one machine, or on one GPU.
    Shared,
    /// They take turns.
    Turns {
        /// GPUs, each with a rank of the trainer; 0 on the processor.
        gpus: usize,
    },
    /// Each role has GPUs of its own.
    Split {
        /// Samplers, with one GPU each.
        samplers: usize,
        /// Ranks of the trainer, with one GPU each.
        ranks: usize,
    },
}

/// How a rank computes the passes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passes {
    /// Tokens of a pass.
    pub microbatch_tokens: usize,
    /// What is computed again.
    pub recompute: Recompute,
    /// What ranks share.
    pub zero: usize,
}

/// One setting of everything that is searched.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchCandidate {
    /// Placement of roles.
    pub division: RoleDivision,
    /// Whether roles are on GPUs.
    pub on_gpus: bool,
    /// Bound on staleness, versions.
    pub max_staleness: u64,
    /// Groups of a step.
    pub batch_groups: usize,
    /// Sequences that a sampler decodes together.
    pub max_running: usize,
    /// Passes of training.
    pub passes: Passes,
    /// Number format on GPUs.
    pub dtype: ModelDtype,
    /// How ranks of the trainer share a pass.
    pub parallel: ParallelSection,
    /// How weights go to samplers in other processes.
    pub transport: WeightTransport,
}

/// All settings.
#[derive(Clone, Debug)]
pub struct SearchSpace {
    divisions: Vec<RoleDivision>,
    on_gpus: bool,
    staleness: Vec<u64>,
    batches: Vec<usize>,
    running: Vec<usize>,
    passes: Vec<Passes>,
    dtypes: Vec<ModelDtype>,
    /// Of the recipe.
    parallel: ParallelSection,
    transport: WeightTransport,
    world: usize,
    /// Whether the recipe has processes on the processor.
    processes: bool,
}

impl SearchSpace {
    /// The settings around `recipe`, on `gpus` GPUs or, with 0, on the processor, as far as `inputs` have their times.
    #[must_use]
    pub fn new(recipe: &Recipe, inputs: &ScenarioInputs, gpus: usize, any_batch: bool) -> Self {
        let mut divisions = vec![RoleDivision::Turns { gpus }];
        if gpus <= 1 {
            divisions.push(RoleDivision::Shared);
        } else if gpus <= ALL_DIVISIONS {
            divisions
                .extend((1..gpus).map(|samplers| RoleDivision::Split { samplers, ranks: gpus - samplers }));
        } else {
            let parts = [gpus / 8, gpus / 4, gpus / 2, gpus - gpus / 4, gpus - gpus / 8];
            divisions.extend(parts.map(|samplers| RoleDivision::Split { samplers, ranks: gpus - samplers }));
        }
        let (trainer, given) = (&recipe.trainer, recipe.trainer.microbatch_tokens);
        let shared = gpus > 1 || (gpus == 0 && trainer.world > 1);
        let stages: Vec<usize> = if shared { vec![1, 2, 3] } else { vec![trainer.zero] };
        let mut recomputed = vec![Recompute::None, Recompute::Block];
        if gpus == 0 && !recomputed.contains(&trainer.recompute) {
            recomputed.push(trainer.recompute);
        }
        // A micro-batch has space for the longest sequence, and one that adapts for two sizes.
        let longest = recipe.data.max_prompt_length.saturating_add(recipe.rollout.max_completion_length);
        let least = if trainer.adapt_microbatch { longest.max(2 * LEAST_TOKENS) } else { longest };
        let passes = [given, given / 2, given.saturating_mul(2), given.saturating_mul(4)]
            .into_iter()
            .filter(|tokens| *tokens >= least)
            .flat_map(|microbatch_tokens| {
                let (stages, recomputed) = (stages.clone(), recomputed.clone());
                recomputed.into_iter().flat_map(move |recompute| {
                    stages.clone().into_iter().map(move |zero| Passes { microbatch_tokens, recompute, zero })
                })
            });
        let mut staleness = with(&STALENESS, recipe.buffer.max_staleness);
        let mut running = with(&RUNNING, recipe.rollout.max_running);
        // Rules refuse a setting that adapts and has nothing to choose from.
        staleness.retain(|bound| *bound > 0 || !recipe.buffer.adapt_staleness);
        running.retain(|limit| *limit > recipe.rollout.group_size || !recipe.rollout.adapt_running);
        let groups = recipe.buffer.batch_groups;
        Self {
            divisions,
            on_gpus: gpus > 0,
            staleness,
            batches: if any_batch { vec![groups, (groups / 2).max(1), groups * 2] } else { vec![groups] },
            running,
            passes: passes.collect(),
            dtypes: if gpus > 0 { dtypes_on_gpus(recipe, inputs) } else { vec![recipe.dtype] },
            parallel: trainer.parallel,
            transport: recipe.weights.transport,
            world: trainer.world,
            processes: recipe.placement.processes,
        }
    }

    /// Degrees of the ranks of a placement: powers of two whose product divides their number, those without any first.
    #[must_use]
    pub fn degrees(&self, division: RoleDivision) -> Vec<ParallelSection> {
        let world = match division {
            RoleDivision::Split { ranks, .. } => ranks,
            RoleDivision::Turns { gpus } if gpus > 0 => gpus,
            _ if self.on_gpus => 1,
            _ => self.world,
        };
        let powers = || std::iter::successors(Some(1), |power| Some(power * 2)).take_while(|n| *n <= world);
        let products = powers().flat_map(|tensor| {
            powers().flat_map(move |context| powers().map(move |pipeline| [tensor, context, pipeline]))
        });
        let mut all = Vec::new();
        for [tensor, context, pipeline] in products {
            if !world.is_multiple_of(tensor * context * pipeline) {
                continue;
            }
            let parallel = ParallelSection { tensor, context, pipeline, expert: 1, ..self.parallel };
            all.push(parallel);
            let zero_ranks = world / (pipeline * tensor);
            let experts = powers().skip(1).filter(|expert| zero_ranks.is_multiple_of(*expert));
            all.extend(experts.map(|expert| ParallelSection { expert, ..parallel }));
        }
        all
    }

    /// Transports of weights of a placement, `auto` first.
    #[must_use]
    pub fn transports(&self, division: RoleDivision) -> Vec<WeightTransport> {
        use WeightTransport::{Auto, CudaIpc, Http, Nccl};
        match division {
            RoleDivision::Split { .. } => vec![Auto, Http, CudaIpc, Nccl],
            // Roles of one process share its memory.
            _ if self.on_gpus => vec![Auto],
            RoleDivision::Shared if self.processes => vec![Auto, Http],
            _ => vec![self.transport],
        }
    }

    /// Bounds on staleness, ascending.
    #[must_use]
    pub fn staleness(&self) -> Vec<u64> {
        self.staleness.clone()
    }

    /// All passes.
    #[must_use]
    pub fn passes(&self) -> &[Passes] {
        &self.passes
    }

    /// All placements, with the first passes and bound.
    pub fn placements(&self) -> impl Iterator<Item = SearchCandidate> + '_ {
        let passes = self.passes[0];
        self.divisions.iter().flat_map(move |division| {
            self.batches.iter().flat_map(move |batch_groups| {
                self.running.iter().flat_map(move |max_running| {
                    self.dtypes.iter().map(move |dtype| SearchCandidate {
                        division: *division,
                        on_gpus: self.on_gpus,
                        max_staleness: self.staleness[0],
                        batch_groups: *batch_groups,
                        max_running: *max_running,
                        passes,
                        dtype: *dtype,
                        parallel: ParallelSection {
                            tensor: 1,
                            context: 1,
                            pipeline: 1,
                            expert: 1,
                            ..self.parallel
                        },
                        transport: self.transports(*division)[0],
                    })
                })
            })
        })
    }
}

impl SearchCandidate {
    /// `recipe` with these settings. The rules of recipes are not checked.
    #[must_use]
    pub fn applied(&self, recipe: &Recipe) -> Recipe {
        let mut changed = recipe.clone();
        changed.buffer.max_staleness = self.max_staleness;
        changed.buffer.batch_groups = self.batch_groups;
        changed.rollout.max_running = self.max_running;
        changed.trainer.microbatch_tokens = self.passes.microbatch_tokens;
        changed.trainer.recompute = self.passes.recompute;
        changed.trainer.zero = self.passes.zero;
        changed.trainer.parallel = self.parallel;
        changed.weights.transport = self.transport;
        changed.dtype = self.dtype;
        let placement = &mut changed.placement;
        placement.policy =
            matches!(self.division, RoleDivision::Turns { .. }).then_some(PolicyPlacement::Colocated);
        if !self.on_gpus {
            return changed;
        }
        placement.device = gpu(0);
        (placement.trainer_device, placement.rollout_device) = (None, None);
        (placement.trainer_devices, placement.rollout_devices) = (None, None);
        (placement.processes, placement.rollout_workers) = (false, None);
        changed.trainer.world = match self.division {
            RoleDivision::Shared => 1,
            RoleDivision::Turns { gpus } => gpus.max(1),
            RoleDivision::Split { samplers, ranks } => {
                placement.processes = true;
                placement.rollout_workers = Some(samplers);
                placement.rollout_devices = Some((0..samplers).map(gpu).collect());
                placement.trainer_devices = Some((samplers..samplers + ranks).map(gpu).collect());
                ranks
            }
        };
        changed
    }

    /// The keys and their values in TOML.
    #[must_use]
    pub fn keys(&self) -> Vec<(&'static str, String)> {
        let recompute = match self.passes.recompute {
            Recompute::None => "none",
            Recompute::Block => "block",
            Recompute::Sequence => "sequence",
        };
        let policy =
            if matches!(self.division, RoleDivision::Turns { .. }) { "colocated" } else { "separated" };
        let mut keys = vec![
            ("buffer.max_staleness", self.max_staleness.to_string()),
            ("buffer.batch_groups", self.batch_groups.to_string()),
            ("rollout.max_running", self.max_running.to_string()),
            ("trainer.microbatch_tokens", self.passes.microbatch_tokens.to_string()),
            ("trainer.recompute", format!("\"{recompute}\"")),
            ("placement.policy", format!("\"{policy}\"")),
            ("trainer.zero", self.passes.zero.to_string()),
            ("trainer.parallel.tensor", self.parallel.tensor.to_string()),
            ("trainer.parallel.context", self.parallel.context.to_string()),
            ("trainer.parallel.pipeline", self.parallel.pipeline.to_string()),
            ("trainer.parallel.expert", self.parallel.expert.to_string()),
            ("weights.transport", format!("\"{}\"", self.transport.as_str())),
        ];
        if !self.on_gpus {
            return keys;
        }
        let dtype = if self.dtype == ModelDtype::F32 { "f32" } else { "auto" };
        keys.push(("model.dtype", format!("\"{dtype}\"")));
        keys.push(("placement.device", "\"cuda\"".to_owned()));
        let list = |from: usize, count: usize| {
            let names: Vec<String> =
                (from..from + count).map(|number| format!("\"cuda:{number}\"")).collect();
            format!("[{}]", names.join(", "))
        };
        match self.division {
            RoleDivision::Shared => keys.push(("trainer.world", "1".to_owned())),
            RoleDivision::Turns { gpus } => keys.push(("trainer.world", gpus.max(1).to_string())),
            RoleDivision::Split { samplers, ranks } => {
                keys.push(("trainer.world", ranks.to_string()));
                keys.push(("placement.processes", "true".to_owned()));
                keys.push(("placement.rollout_workers", samplers.to_string()));
                keys.push(("placement.rollout_devices", list(0, samplers)));
                keys.push(("placement.trainer_devices", list(samplers, ranks)));
            }
        }
        keys
    }

    /// Placement, in a few words.
    #[must_use]
    pub fn placement(&self) -> String {
        match (self.division, self.on_gpus) {
            (RoleDivision::Shared, false) => "at the same time".to_owned(),
            (RoleDivision::Shared, true) => "one GPU, at the same time".to_owned(),
            (RoleDivision::Turns { gpus }, true) => format!("by turns on {gpus}"),
            (RoleDivision::Turns { .. }, false) => "by turns".to_owned(),
            (RoleDivision::Split { samplers, ranks }, _) => format!("{samplers} sample, {ranks} train"),
        }
    }

    /// Degrees above 1, in a few words.
    #[must_use]
    pub fn degrees(&self) -> String {
        let ParallelSection { tensor, context, pipeline, expert, .. } = self.parallel;
        let all = [("tensor", tensor), ("context", context), ("pipeline", pipeline), ("expert", expert)];
        let above = all.iter().filter(|(_, degree)| *degree > 1);
        let words: Vec<String> = above.map(|(name, degree)| format!("{name} {degree}")).collect();
        if words.is_empty() { "none".to_owned() } else { words.join(" x ") }
    }

    /// A recipe that extends the one at `path` by `sets` and by these settings.
    ///
    /// # Errors
    /// A path that cannot be made absolute.
    pub fn recipe_toml(&self, path: &Path, sets: &[String]) -> Result<String, Failure> {
        let system = |source| Failure::System { what: format!("find {}", path.display()), source };
        let base = std::path::absolute(path).map_err(system)?;
        let mut table = Table::new();
        table.insert("extends".to_owned(), Value::from(base.to_string_lossy().into_owned()));
        for set in sets {
            let (key, value) = set.split_once('=').unwrap_or((set, ""));
            insert(&mut table, key.trim(), value.trim());
        }
        for (key, value) in self.keys() {
            insert(&mut table, key, &value);
        }
        Ok(format!("# The fastest settings that `rlrun plan --search` found.\n{table}"))
    }
}

/// Sets `key`, with dots, to a value in TOML, or to a text that is none.
fn insert(table: &mut Table, key: &str, value: &str) {
    let parsed =
        format!("value = {value}").parse::<Table>().ok().and_then(|mut parsed| parsed.remove("value"));
    let value = parsed.unwrap_or_else(|| Value::from(value));
    let mut table = table;
    let mut parts = key.split('.').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            table.insert(part.to_owned(), value);
            return;
        }
        let next = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
        let Value::Table(next) = next else { return };
        table = next;
    }
}

/// Number formats on GPUs: measurements are of that of the recipe, and the hardware may have no speed in f32.
fn dtypes_on_gpus(recipe: &Recipe, inputs: &ScenarioInputs) -> Vec<ModelDtype> {
    let own = if recipe.dtype == ModelDtype::F32 { ModelDtype::F32 } else { ModelDtype::Auto };
    let parts = &inputs.calibration.parts;
    if !parts.decode.is_empty() || !parts.training.is_empty() {
        vec![own]
    } else if inputs.hardware.flops(ModelDtype::F32).is_none() {
        vec![ModelDtype::Auto]
    } else {
        vec![ModelDtype::Auto, ModelDtype::F32]
    }
}

fn gpu(number: usize) -> DeviceWord {
    DeviceWord::At(DeviceLocation::Cuda(number))
}

/// `values` and the recipe's own, ascending, once each.
fn with<T: Ord + Copy>(values: &[T], own: T) -> Vec<T> {
    let mut all: Vec<T> = values.iter().copied().chain([own]).collect();
    all.sort_unstable();
    all.dedup();
    all
}
