//! The keys of `config.json` about positions and windows to the [`AttentionSpec`] of each layer.
//!
//! Invariant: as in `read`: a key that would change what the network computes is either honoured or refused.

use serde_json::{Map, Value};

use super::families::{Family, FamilyDefaults, WindowRule};
use super::keys::JsonKeys;
use crate::ModelError;
use crate::layer::AttentionSpec;
use crate::rotary::{RopeScaling, Rotary, Yarn};

/// The attention of each of `num_layers` layers.
pub(super) fn of_layers(
    keys: &JsonKeys<'_>,
    family: &Family,
    num_layers: usize,
) -> Result<Vec<AttentionSpec>, ModelError> {
    let windows = windows(keys, family.window, num_layers)?;
    let rotary = rotary(keys, &family.defaults)?;
    if rotary.share != 1.0 && !family.partial_rotary {
        return Err(keys.unsupported("partial_rotary_factor", "1.0 for models of this family"));
    }
    let rotary = Some(rotary);
    Ok(windows
        .into_iter()
        .map(|window| AttentionSpec { window, rotary, scale: None, sinks: family.sinks })
        .collect())
}

/// The window of each layer under the rules of the family.
fn windows(
    keys: &JsonKeys<'_>,
    rule: WindowRule,
    num_layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    if rule == WindowRule::Alternate && !keys.map.contains_key("sliding_window") {
        return Err(keys.missing("sliding_window"));
    }
    let default = if keys.map.contains_key("sliding_window") { None } else { Some(4096) };
    let window = keys.optional_size("sliding_window")?.or(default);
    let flagged = keys.flag("use_sliding_window", false)?;
    let slides = match rule {
        WindowRule::Never => vec![false; num_layers],
        WindowRule::Always => vec![true; num_layers],
        WindowRule::FlaggedForAll => vec![flagged; num_layers],
        WindowRule::Alternate => match layer_types(keys, num_layers)? {
            Some(types) => types,
            None => (0..num_layers).map(|index| index % 2 == 0).collect(),
        },
        WindowRule::Flagged if !flagged => vec![false; num_layers],
        WindowRule::Flagged => match layer_types(keys, num_layers)? {
            Some(types) => types,
            None => {
                let first = keys.optional_size("max_window_layers")?.unwrap_or(28);
                (0..num_layers).map(|index| index >= first).collect()
            }
        },
    };
    Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect())
}

/// Whether each layer has a window, if `layer_types` says it.
fn layer_types(keys: &JsonKeys<'_>, num_layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    if !keys.has("layer_types") {
        return Ok(None);
    }
    let types =
        keys.map.get("layer_types").and_then(Value::as_array).filter(|types| types.len() == num_layers);
    let types = types.ok_or_else(|| keys.bad("layer_types", &format!("a list of {num_layers} texts")))?;
    let slides = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(keys.unsupported("layer_types", "full_attention, sliding_attention")),
    };
    types.iter().map(slides).collect::<Result<_, _>>().map(Some)
}

/// The rotary embedding.
fn rotary(keys: &JsonKeys<'_>, defaults: &FamilyDefaults) -> Result<Rotary, ModelError> {
    // transformers lets the old key win where both are there.
    let found = ["rope_scaling", "rope_parameters"].into_iter().find(|key| keys.has(key));
    let empty = Map::new();
    let (name, object) = match found {
        None if !defaults.plain_rotary => return Err(keys.missing("rope_scaling")),
        None => ("rope_scaling", &empty),
        Some(name) => {
            (name, keys.map.get(name).and_then(Value::as_object).ok_or_else(|| keys.bad(name, "an object"))?)
        }
    };
    RotaryKeys { keys: *keys, name, inner: JsonKeys { path: keys.path, map: object } }.rotary(defaults)
}

/// The object that describes a rotary embedding, within the whole configuration.
struct RotaryKeys<'a> {
    keys: JsonKeys<'a>,
    /// The key of the object.
    name: &'static str,
    inner: JsonKeys<'a>,
}

impl RotaryKeys<'_> {
    fn rotary(&self, defaults: &FamilyDefaults) -> Result<Rotary, ModelError> {
        let Self { keys, name, inner } = self;
        let theta = self.number("rope_theta", defaults.rope_theta)?;
        if theta <= 1.0 {
            return Err(keys.bad("rope_theta", "a number above 1"));
        }
        let share = self.number("partial_rotary_factor", defaults.partial_rotary_factor)?;
        if !(0.0 < share && share <= 1.0) {
            return Err(keys.bad("partial_rotary_factor", "a number above 0, and at most 1"));
        }
        let kind = ["rope_type", "type"].into_iter().find(|key| inner.has(key));
        let scaling = match kind.map(|key| inner.text(key)).transpose()? {
            None if inner.has("factor") => return Err(keys.bad(name, "an object with a `rope_type`")),
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: self.factor()? },
            Some("llama3") => self.llama3()?,
            Some("yarn") => RopeScaling::Yarn(self.yarn()?),
            Some(_) => return Err(keys.unsupported(name, "rope_type default, linear, llama3, yarn")),
        };
        Ok(Rotary { theta, share, scaling })
    }

    /// A number of the object, or else of the configuration, or else the default.
    fn number(&self, key: &str, default: f64) -> Result<f64, ModelError> {
        if self.inner.has(key) { self.inner.number(key, default) } else { self.keys.number(key, default) }
    }

    fn factor(&self) -> Result<f64, ModelError> {
        match self.inner.number("factor", 0.0)? {
            factor if factor >= 1.0 => Ok(factor),
            _ => Err(self.keys.bad(self.name, "an object with a `factor` of at least 1")),
        }
    }

    /// Context of the pretraining, tokens.
    fn original_context(&self) -> Result<usize, ModelError> {
        let key = "original_max_position_embeddings";
        match self.keys.optional_size(key)? {
            Some(size) => Ok(size),
            None => {
                self.inner.optional_size(key)?.map_or_else(|| self.keys.size("max_position_embeddings"), Ok)
            }
        }
    }

    fn llama3(&self) -> Result<RopeScaling, ModelError> {
        let inner = &self.inner;
        for key in ["low_freq_factor", "high_freq_factor"] {
            if !inner.has(key) {
                return Err(inner.missing(key));
            }
        }
        let (low, high) = (inner.number("low_freq_factor", 0.0)?, inner.number("high_freq_factor", 0.0)?);
        if !(0.0 < low && low < high) {
            return Err(inner.bad(
                "low_freq_factor",
                &format!("a number above 0 and below high_freq_factor, which is {high}"),
            ));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.factor()?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: self.original_context()?,
        })
    }

    fn yarn(&self) -> Result<Yarn, ModelError> {
        let inner = &self.inner;
        let factor = self.factor()?;
        // A zero is as good as an absent key to transformers.
        let some = |key: &str| Ok(Some(inner.number(key, 0.0)?).filter(|value| *value != 0.0));
        let (mscale, all_dim): (Option<f64>, Option<f64>) = (some("mscale")?, some("mscale_all_dim")?);
        let attention_factor = match (inner.has("attention_factor"), mscale, all_dim) {
            (true, ..) => inner.number("attention_factor", 1.0)?,
            (false, Some(mscale), Some(all_dim)) => {
                Yarn::magnitude(factor, mscale) / Yarn::magnitude(factor, all_dim)
            }
            (false, ..) => Yarn::magnitude(factor, 1.0),
        };
        if attention_factor <= 0.0 {
            return Err(inner.bad("attention_factor", "a number above 0"));
        }
        let (beta_fast, beta_slow): (Option<f64>, Option<f64>) = (some("beta_fast")?, some("beta_slow")?);
        let (beta_fast, beta_slow) = (beta_fast.unwrap_or(32.0), beta_slow.unwrap_or(1.0));
        if !(0.0 < beta_slow && beta_slow <= beta_fast) {
            return Err(inner.bad("beta_fast", &format!("at least beta_slow, which is {beta_slow}, above 0")));
        }
        Ok(Yarn {
            factor,
            attention_factor,
            beta_fast,
            beta_slow,
            truncate: inner.flag("truncate", true)?,
            original_max_position_embeddings: self.original_context()?,
        })
    }
}
