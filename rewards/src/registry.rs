//! The kinds of rewards that a recipe can name: the built-in ones, and those that a user's program registers.
//!
//! Invariant: a kind says which keys it takes and which it needs; both are checked here, for all kinds alike, before
//! anything is built.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::function::{FunctionError, FunctionInput, FunctionReward, UserFunction};
use crate::reward_model::{self, ModelContext};
use crate::{Limited, Reward, RewardError, RewardInput, RewardSpec};
use crate::{countdown, exact, format, gsm8k, hendrycks, length, math, math_dapo, python, regex, repetition};

/// Builds a reward from a checked spec.
type Build = dyn Fn(&RewardSpec, &RewardContext) -> Result<Box<dyn Reward>, RewardError> + Send + Sync;

/// A kind of reward, the key `kind` of a recipe.
#[derive(Clone)]
pub struct RewardKind {
    name: String,
    parameters: &'static [&'static str],
    required: &'static [&'static str],
    build: Arc<Build>,
    is_self_contained: bool,
}

/// The parts of a run that rewards use.
#[derive(Clone, Default)]
pub struct RewardContext {
    /// Environment variables of the process; a reward reads those that its recipe names.
    pub environment: Arc<BTreeMap<String, String>>,
    /// The runtime for futures, timers and blocking work; only rewards that are plain functions do without it.
    pub runtime: Option<Handle>,
    /// A directory of the run for logs and sockets.
    pub scratch: PathBuf,
    /// Text of tokens, special ones included.
    pub decode: Option<Arc<Decode>>,
    /// Training steps of the run.
    pub max_steps: u64,
    /// Most completions of a task that training samples together; 0 where there is no training.
    pub group_size: usize,
    /// The parts of a run that reward models use.
    pub models: ModelContext,
}

/// Text of tokens, special ones included.
pub type Decode = dyn Fn(&[u32]) -> String + Send + Sync;

/// All kinds by name.
#[derive(Clone, Debug)]
pub struct Registry {
    kinds: BTreeMap<String, RewardKind>,
}

impl RewardKind {
    /// A kind with its keys in addition to the common ones; `required` are among `parameters`.
    pub(crate) fn new(
        name: &str,
        parameters: &'static [&'static str],
        required: &'static [&'static str],
        build: impl Fn(&RewardSpec, &RewardContext) -> Result<Box<dyn Reward>, RewardError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self { name: name.to_owned(), parameters, required, build: Arc::new(build), is_self_contained: false }
    }

    /// [`RewardKind::new`] for a kind that needs nothing outside of rlrun but what its keys name.
    pub(crate) fn self_contained(
        name: &str,
        parameters: &'static [&'static str],
        required: &'static [&'static str],
        build: impl Fn(&RewardSpec, &RewardContext) -> Result<Box<dyn Reward>, RewardError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self { is_self_contained: true, ..Self::new(name, parameters, required, build) }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The keys that it takes in addition to those of all kinds.
    #[must_use]
    pub fn parameters(&self) -> &'static [&'static str] {
        self.parameters
    }

    /// Whether it needs nothing outside of rlrun but what its keys name: no file, program or server.
    #[must_use]
    pub fn is_self_contained(&self) -> bool {
        self.is_self_contained
    }
}

impl fmt::Debug for RewardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RewardKind")
            .field("name", &self.name)
            .field("parameters", &self.parameters)
            .finish_non_exhaustive()
    }
}

/// Without the values of the environment: secrets are among them.
impl fmt::Debug for RewardContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RewardContext")
            .field("scratch", &self.scratch)
            .field("max_steps", &self.max_steps)
            .finish_non_exhaustive()
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::builtin()
    }
}

/// Two registries are equal if they have the same names.
impl PartialEq for Registry {
    fn eq(&self, other: &Self) -> bool {
        self.kinds.keys().eq(other.kinds.keys())
    }
}

impl Registry {
    /// The kinds that every rlrun has.
    #[must_use]
    pub fn builtin() -> Self {
        let kinds = [
            math::kind(),
            math_dapo::kind(),
            hendrycks::kind(),
            gsm8k::kind(),
            countdown::kind(),
            exact::kind(),
            regex::kind(),
            format::kind(),
            length::kind(),
            #[cfg(target_os = "linux")]
            crate::code::kind(),
            crate::http::kind(),
            crate::judge::kind(),
            repetition::kind(),
            python::kind(),
            reward_model::kind(),
        ];
        Self { kinds: kinds.into_iter().map(|kind| (kind.name.clone(), kind)).collect() }
    }

    /// Adds a Rust function as the kind `name`. It runs on threads for blocking work, at most `concurrency` at a time,
    /// with the timeout `timeout_s`. A kind of that name is replaced.
    #[must_use]
    pub fn function(
        self,
        name: &str,
        function: impl Fn(&FunctionInput) -> Result<f64, FunctionError> + Send + Sync + 'static,
    ) -> Self {
        let function: Arc<UserFunction> = Arc::new(function);
        self.with(RewardKind::new(name, &[], &[], move |spec, context| {
            context.runtime(spec)?;
            Ok(Box::new(FunctionReward::new(spec, Arc::clone(&function))))
        }))
    }

    /// Adds any implementation of [`Reward`] as the kind `name`: `make` reads its own keys from the table `parameters` of the spec.
    /// `timeout_s` and `concurrency` are put around it. A kind of that name is replaced.
    #[must_use]
    pub fn register(
        self,
        name: &str,
        make: impl Fn(&RewardSpec, &RewardContext) -> Result<Box<dyn Reward>, RewardError> + Send + Sync + 'static,
    ) -> Self {
        self.with(RewardKind::new(name, &["parameters"], &[], move |spec, context| {
            context.runtime(spec)?;
            Ok(Box::new(Limited::new(make(spec, context)?, spec)))
        }))
    }

    fn with(mut self, kind: RewardKind) -> Self {
        self.kinds.insert(kind.name.clone(), kind);
        self
    }

    /// The names of all kinds.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }

    /// The kind of this name.
    #[must_use]
    pub fn kind(&self, name: &str) -> Option<&RewardKind> {
        self.kinds.get(name)
    }

    /// Whether the keys of `spec` are those of its kind.
    ///
    /// # Errors
    /// An unknown kind, an empty name, a key that the kind does not take, one that is missing.
    pub fn check(&self, spec: &RewardSpec) -> Result<&RewardKind, RewardError> {
        let known = || self.names().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let kind = self
            .kind(&spec.kind)
            .ok_or_else(|| RewardError::UnknownKind { kind: spec.kind.clone(), known: known() })?;
        if spec.name().trim().is_empty() {
            return Err(RewardError::EmptyName { kind: spec.kind.clone() });
        }
        let given = spec.given();
        if let Some(field) = given.iter().find(|field| !kind.parameters.contains(&field.as_str())) {
            let own = kind.parameters.iter().copied().chain([
                "name",
                "weight",
                "on_error",
                "timeout_s",
                "concurrency",
            ]);
            let takes: Vec<_> = own.map(|name| format!("`{name}`")).collect();
            return Err(RewardError::ForeignField {
                reward: spec.name().to_owned(),
                kind: spec.kind.clone(),
                field: field.clone(),
                takes: takes.join(", "),
            });
        }
        let missing = kind.required.iter().find(|field| !given.iter().any(|given| given == **field));
        missing.map_or(Ok(kind), |field| Err(spec.missing(field)))
    }

    /// Builds the reward; its weight and its failure mode are for the [`crate::RewardSet`].
    ///
    /// # Errors
    /// Those of [`Registry::check`], and a parameter with which the reward cannot be built.
    pub fn build(&self, spec: &RewardSpec, context: &RewardContext) -> Result<Box<dyn Reward>, RewardError> {
        (self.check(spec)?.build)(spec, context)
    }
}

impl RewardContext {
    /// The runtime for rewards that wait.
    ///
    /// # Errors
    /// There is no runtime.
    pub fn runtime(&self, spec: &RewardSpec) -> Result<&Handle, RewardError> {
        self.runtime.as_ref().ok_or_else(|| RewardError::NoRuntime { reward: spec.name().to_owned() })
    }
}

impl RewardSpec {
    /// The error of a required key that is missing.
    pub(crate) fn missing(&self, field: &str) -> RewardError {
        RewardError::MissingField {
            reward: self.name().to_owned(),
            kind: self.kind.clone(),
            field: field.to_owned(),
        }
    }

    /// The error of a key with an invalid value; `reason` ends a sentence that begins with the key.
    pub(crate) fn wrong(&self, field: &str, reason: &str) -> RewardError {
        RewardError::Parameter {
            reward: self.name().to_owned(),
            field: field.to_owned(),
            reason: reason.to_owned(),
        }
    }

    /// The value of a required key.
    pub(crate) fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, RewardError> {
        value.ok_or_else(|| self.missing(field))
    }
}

/// A reward that is a plain function of the input, for the built-in kinds.
pub(crate) fn pure<O: Into<crate::Outcome> + 'static>(
    spec: &RewardSpec,
    function: impl Fn(&str, &RewardInput<'_>) -> Result<O, RewardError> + Send + Sync + 'static,
) -> Box<dyn Reward> {
    let label = spec.name().to_owned();
    Box::new(crate::Builtin::new(label.clone(), move |input: &RewardInput<'_>| function(&label, input)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(spec: &RewardSpec) -> Result<Box<dyn Reward>, RewardError> {
        Registry::builtin().build(spec, &RewardContext::default())
    }

    #[test]
    fn required_parameters_and_names_are_required() {
        for (kind, field) in [("regex", "pattern"), ("length", "cache")] {
            let error = build(&RewardSpec::new(kind)).unwrap_err();
            let (kind, field) = (kind.to_owned(), field.to_owned());
            assert_eq!(error, RewardError::MissingField { reward: kind.clone(), kind, field });
        }
        let nameless = RewardSpec { name: Some(" ".into()), ..RewardSpec::new("math") };
        assert!(matches!(build(&nameless), Err(RewardError::EmptyName { .. })));
        let unknown = build(&RewardSpec::new("maths")).unwrap_err().to_string();
        assert!(unknown.contains("`maths`") && unknown.contains("`math`"), "{unknown}");
    }

    #[test]
    fn every_key_is_refused_by_a_kind_that_does_not_take_it() {
        let wrong = RewardSpec { pattern: Some("x".into()), ..RewardSpec::new("length") };
        assert_eq!(
            build(&wrong).unwrap_err().to_string(),
            "reward `length` of kind `length` does not take `pattern`; it takes `max_length`, `cache`, `name`, \
             `weight`, `on_error`, `timeout_s`, `concurrency`"
        );
        for kind in Registry::builtin().kinds.values() {
            assert!(kind.required.iter().all(|field| kind.parameters.contains(field)), "{kind:?}");
        }
    }

    #[test]
    fn a_function_of_the_user_is_a_kind_like_any_other() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
        let context = RewardContext { runtime: Some(runtime.handle().clone()), ..RewardContext::default() };
        let registry = Registry::builtin()
            .function("letters", |scored| Ok(scored.text.len() as f64))
            .function("late", |_| {
                std::thread::sleep(std::time::Duration::from_millis(300));
                Ok(0.0)
            })
            .function("broken", |scored| Err(format!("no vowel in {}", scored.text).into()));
        let task = crate::testing::task("4");
        let judge = |kind: &str, timeout_s: f64| {
            let spec = RewardSpec { timeout_s, ..RewardSpec::new(kind) };
            let reward = registry.build(&spec, &context).unwrap();
            runtime.block_on(reward.score(&[RewardInput::text(&task, "xyz")])).pop().unwrap()
        };
        assert_eq!(judge("letters", 30.0).unwrap().value, Some(3.0));
        assert!(matches!(judge("late", 0.02), Err(RewardError::Timeout { .. })));
        let broken = judge("broken", 30.0).unwrap_err().to_string();
        assert!(broken.contains("no vowel in xyz"), "{broken}");
        let foreign = RewardSpec { cache: Some(3), ..RewardSpec::new("letters") };
        assert!(matches!(registry.check(&foreign), Err(RewardError::ForeignField { .. })));
        assert!(matches!(
            registry.build(&RewardSpec::new("late"), &RewardContext::default()),
            Err(RewardError::NoRuntime { .. })
        ));
    }
}
