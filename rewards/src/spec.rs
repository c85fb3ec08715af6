//! A reward as a recipe states it, and its checked construction.
//!
//! Invariant: a parameter that the kind does not read is an error, so nothing that a user wrote is ignored.
//! This file does not know TOML, files or lines; the recipe layer adds where an error comes from.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Builtin, OnError, Reward, RewardError, exact, format, gsm8k, length, math, regex};

/// One `[[rewards]]` entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardSpec {
    /// Which reward function.
    pub kind: RewardKind,
    /// Name in metrics and components; the kind if not given.
    #[serde(default)]
    pub name: Option<String>,
    /// Factor of its value in the total.
    #[serde(default = "one")]
    pub weight: f64,
    /// What its failure means for the trajectory.
    #[serde(default)]
    pub on_error: OnError,
    /// `gsm8k`: how the answer is found; strict if not given.
    #[serde(default)]
    pub method: Option<Gsm8kMethod>,
    /// `regex` (required), `format` (think and answer tags if not given): regular expression.
    #[serde(default)]
    pub pattern: Option<String>,
    /// `regex`: compare the first capture group with the reference answer instead of only looking for the pattern.
    #[serde(default)]
    pub compare: Option<bool>,
    /// `length`: tokens at which the penalty is -1; `max_completion_length` if not given.
    #[serde(default)]
    pub max_length: Option<usize>,
    /// `length` (required): tokens before `max_length` over which the penalty grows from 0 to -1.
    #[serde(default)]
    pub cache: Option<usize>,
}

/// The built-in reward functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardKind {
    /// Is the final answer mathematically equal to the reference? See [`math`].
    Math,
    /// Is the number after `####` the reference, character by character? See [`gsm8k`].
    Gsm8k,
    /// Is the whole text the reference? See [`exact`].
    Exact,
    /// Does a pattern occur, or capture the reference? See [`regex`](mod@regex).
    Regex,
    /// Does the whole text have a form? See [`format`](mod@format).
    Format,
    /// Soft penalty for overlong completions. See [`length`].
    Length,
}

/// How `gsm8k` finds the answer in a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gsm8kMethod {
    /// The last number after `#### `.
    #[default]
    Strict,
    /// The last number of any kind.
    Flexible,
}

impl RewardKind {
    /// The kind as a recipe spells it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Math => "math",
            Self::Gsm8k => "gsm8k",
            Self::Exact => "exact",
            Self::Regex => "regex",
            Self::Format => "format",
            Self::Length => "length",
        }
    }

    /// The parameters that the kind reads beside `name`, `weight` and `on_error`.
    #[must_use]
    pub fn parameters(self) -> &'static [&'static str] {
        match self {
            Self::Math | Self::Exact => &[],
            Self::Gsm8k => &["method"],
            Self::Regex => &["pattern", "compare"],
            Self::Format => &["pattern"],
            Self::Length => &["max_length", "cache"],
        }
    }
}

impl fmt::Display for RewardKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl RewardSpec {
    /// A reward of weight 1 with default parameters.
    #[must_use]
    pub fn new(kind: RewardKind) -> Self {
        Self {
            kind,
            name: None,
            weight: one(),
            on_error: OnError::default(),
            method: None,
            pattern: None,
            compare: None,
            max_length: None,
            cache: None,
        }
    }

    /// Name of the reward: as given, else its kind.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or(self.kind.as_str())
    }

    /// Builds the reward; its weight and its failure mode are for the [`crate::RewardSet`].
    ///
    /// # Errors
    /// A parameter that is missing, wrong, or not one of the kind; an empty name.
    pub fn build(&self) -> Result<Box<dyn Reward>, RewardError> {
        self.check_fields()?;
        let name = self.name().to_owned();
        let label = name.clone();
        Ok(match self.kind {
            RewardKind::Math => Box::new(Builtin::new(name, move |input| math::score(&label, input))),
            RewardKind::Exact => Box::new(Builtin::new(name, move |input| exact::score(&label, input))),
            RewardKind::Gsm8k => {
                let method = self.method.unwrap_or_default();
                Box::new(Builtin::new(name, move |input| gsm8k::score(&label, method, input)))
            }
            RewardKind::Regex => {
                let pattern = self.required("pattern", self.pattern.as_deref())?;
                let rule = regex::Rule::new(&label, pattern, self.compare.unwrap_or_default())?;
                Box::new(Builtin::new(name, move |input| rule.score(&label, input)))
            }
            RewardKind::Format => {
                let form = format::Form::new(&label, self.pattern.as_deref())?;
                Box::new(Builtin::new(name, move |input| Ok(form.score(input.text))))
            }
            RewardKind::Length => {
                let cache = self.required("cache", self.cache)?;
                let penalty = length::Penalty::new(&label, self.max_length, cache)?;
                Box::new(Builtin::new(name, move |input| penalty.score(&label, input)))
            }
        })
    }

    fn check_fields(&self) -> Result<(), RewardError> {
        let given = [
            ("method", self.method.is_some()),
            ("pattern", self.pattern.is_some()),
            ("compare", self.compare.is_some()),
            ("max_length", self.max_length.is_some()),
            ("cache", self.cache.is_some()),
        ];
        let kind = self.kind;
        if self.name().trim().is_empty() {
            return Err(RewardError::EmptyName { kind });
        }
        let foreign = given.iter().find(|(field, given)| *given && !kind.parameters().contains(field));
        let Some(&(field, _)) = foreign else { return Ok(()) };
        let own = kind.parameters().iter().copied();
        let takes: Vec<_> =
            own.chain(["name", "weight", "on_error"]).map(|name| format!("`{name}`")).collect();
        Err(RewardError::ForeignField {
            reward: self.name().to_owned(),
            kind,
            field,
            takes: takes.join(", "),
        })
    }

    fn required<T>(&self, field: &'static str, value: Option<T>) -> Result<T, RewardError> {
        let reward = || self.name().to_owned();
        value.ok_or_else(|| RewardError::MissingField { reward: reward(), kind: self.kind, field })
    }
}

fn one() -> f64 {
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> Result<RewardSpec, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn defaults_are_weight_one_skip_and_the_kind_as_name() {
        let spec = spec(r#"{"kind": "gsm8k"}"#).unwrap();
        assert_eq!(spec, RewardSpec::new(RewardKind::Gsm8k));
        assert_eq!((spec.weight, spec.on_error), (1.0, OnError::Skip));
        assert_eq!(spec.build().unwrap().name(), "gsm8k");
    }

    #[test]
    fn unknown_keys_and_kinds_do_not_deserialise() {
        let key = spec(r#"{"kind": "math", "wieght": 2}"#).unwrap_err().to_string();
        assert!(key.contains("wieght"), "{key}");
        let kind = spec(r#"{"kind": "maths"}"#).unwrap_err().to_string();
        assert!(kind.contains("`math`"), "{kind}");
    }

    #[test]
    fn every_kind_spells_itself_as_serde_does_and_builds() {
        use RewardKind::{Exact, Format, Gsm8k, Length, Math, Regex};
        for kind in [Math, Gsm8k, Exact, Regex, Format, Length] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
            let mut spec = RewardSpec { name: Some("mine".into()), ..RewardSpec::new(kind) };
            spec.pattern = (kind == Regex).then(|| "x".into());
            spec.cache = (kind == Length).then_some(4);
            assert_eq!(spec.build().unwrap().name(), "mine");
        }
    }

    #[test]
    fn parameters_of_other_kinds_are_refused() {
        let wrong = RewardSpec { pattern: Some("x".into()), ..RewardSpec::new(RewardKind::Length) };
        let message = wrong.build().unwrap_err().to_string();
        assert_eq!(
            message,
            "reward `length` of kind `length` does not take `pattern`; \
             it takes `max_length`, `cache`, `name`, `weight`, `on_error`"
        );
        // Every parameter is refused by math, which has none: a new field must be added to the check.
        for field in [
            r#""method": "strict""#,
            r#""pattern": "x""#,
            r#""compare": false"#,
            r#""max_length": 1"#,
            r#""cache": 1"#,
        ] {
            let built = spec(&format!(r#"{{"kind": "math", {field}}}"#)).unwrap().build();
            assert!(matches!(built, Err(RewardError::ForeignField { .. })), "{field}");
        }
    }

    #[test]
    fn required_parameters_and_names_are_required() {
        for (kind, field) in [(RewardKind::Regex, "pattern"), (RewardKind::Length, "cache")] {
            let error = RewardSpec::new(kind).build().unwrap_err();
            assert_eq!(error, RewardError::MissingField { reward: kind.as_str().into(), kind, field });
        }
        let nameless = RewardSpec { name: Some(" ".into()), ..RewardSpec::new(RewardKind::Math) };
        assert!(matches!(nameless.build(), Err(RewardError::EmptyName { .. })));
    }
}
