//! The keys of `config.json` about positions and windows to the [`AttentionSpec`] of each layer.
//!
//! Invariant: as in `read`: a key that would change what the network computes is either honoured or refused.

use serde_json::{Map, Value};

use super::families::{Family, LocalRotary, RotaryRule, WindowRule};
use super::keys::JsonKeys;
use crate::ModelError;
use crate::layer::{AttentionSpec, LatentSpec};
use crate::rotary::{RopeScaling, Rotary, Yarn};

/// `no_rope_layer_interval` if `config.json` has no such key.
pub(super) const INTERVAL: usize = 4;

/// The attention of each of `num_layers` layers, which may have latents.
pub(super) fn of_layers(
    keys: &JsonKeys<'_>,
    family: &Family,
    latent: Option<LatentSpec>,
    num_layers: usize,
) -> Result<Vec<AttentionSpec>, ModelError> {
    let rotates = rotated(keys, family.rotary, num_layers)?;
    let windows = windows(keys, family, &rotates)?;
    let [full, local] = rotaries(keys, family)?;
    let of = |(window, rotates): (Option<usize>, bool)| {
        let rotary = if window.is_some() { local } else { full };
        let scale = latent.and_then(|latent| latent_scale(rotary.scaling, latent.head_dim()));
        AttentionSpec {
            window,
            rotary: rotates.then_some(rotary),
            scale,
            sinks: family.sinks,
            gated: family.gated,
            latent,
        }
    };
    Ok(windows.into_iter().zip(rotates).map(of).collect())
}

/// What multiplies scores of heads of `head_dim` values; `None` for `1 / sqrt(head_dim)`.
fn latent_scale(scaling: RopeScaling, head_dim: usize) -> Option<f32> {
    let RopeScaling::Yarn(Yarn { factor, score_weight, .. }) = scaling else { return None };
    let magnitude = Yarn::magnitude(factor, score_weight);
    (score_weight != 0.0).then(|| (libm::pow(head_dim as f64, -0.5) * magnitude * magnitude) as f32)
}

/// Whether a layer has a rotary embedding: all but the last of each interval.
pub(super) fn rotates(index: usize, interval: usize) -> bool {
    !(index + 1).is_multiple_of(interval)
}

/// Whether each layer has a rotary embedding.
fn rotated(keys: &JsonKeys<'_>, rule: RotaryRule, num_layers: usize) -> Result<Vec<bool>, ModelError> {
    if !rule.skips {
        return Ok(vec![true; num_layers]);
    }
    if !keys.has("no_rope_layers") {
        let interval = keys.optional_size("no_rope_layer_interval")?.unwrap_or(INTERVAL);
        return Ok((0..num_layers).map(|index| rotates(index, interval)).collect());
    }
    let bad = || keys.bad("no_rope_layers", &format!("a list of {num_layers} numbers, each 0 or 1"));
    let list = keys.map.get("no_rope_layers").and_then(Value::as_array).ok_or_else(bad)?;
    let of = |flag: &Value| flag.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1).ok_or_else(bad);
    let all = list.iter().take(num_layers).map(of).collect::<Result<Vec<_>, _>>()?;
    if all.len() < num_layers { Err(bad()) } else { Ok(all) }
}

/// The window of each layer under the rules of the family; `rotates` says which have a rotary embedding.
fn windows(keys: &JsonKeys<'_>, family: &Family, rotates: &[bool]) -> Result<Vec<Option<usize>>, ModelError> {
    let num_layers = rotates.len();
    let default = family.sliding_window.filter(|_| !keys.map.contains_key("sliding_window"));
    let window = keys.optional_size("sliding_window")?.or(default);
    let flagged = keys.flag("use_sliding_window", false)?;
    let listed = || layer_types(keys, num_layers);
    let slides = match family.window {
        WindowRule::Never => vec![false; num_layers],
        WindowRule::Always => vec![true; num_layers],
        WindowRule::FlaggedForAll => vec![flagged; num_layers],
        WindowRule::Flagged | WindowRule::FlaggedUnrotated if !flagged => vec![false; num_layers],
        WindowRule::FlaggedUnrotated => {
            listed()?.unwrap_or_else(|| rotates.iter().map(|rotates| !rotates).collect())
        }
        WindowRule::Flagged => {
            let first = keys.optional_size("max_window_layers")?.unwrap_or(28);
            listed()?.unwrap_or_else(|| (0..num_layers).map(|index| index >= first).collect())
        }
        WindowRule::Periodic { key, period } => {
            let period = key.map_or(Ok(None), |key| keys.optional_size(key))?.unwrap_or(period);
            let all_but_last = |index: usize| !(index + 1).is_multiple_of(period);
            listed()?.unwrap_or_else(|| (0..num_layers).map(all_but_last).collect())
        }
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

/// The rotary embeddings of layers without a window and of those with one.
fn rotaries(keys: &JsonKeys<'_>, family: &Family) -> Result<[Rotary; 2], ModelError> {
    let (rule, latent) = (family.rotary, family.latent);
    let empty = Map::new();
    let [old, new] = [object(keys, "rope_scaling")?, object(keys, "rope_parameters")?];
    let kinds = ["full_attention", "sliding_attention"];
    let nested = [old, new].into_iter().flatten().any(|map| kinds.iter().any(|kind| map.contains_key(*kind)));
    let of = |name, map, theta| {
        let inner = JsonKeys { path: keys.path, map };
        RotaryKeys { keys: *keys, name, inner, theta, latent }.rotary(rule)
    };
    let Some(LocalRotary { key, theta }) = rule.local else {
        if nested {
            return Err(keys.unsupported("rope_parameters", "one object for all layers of this family"));
        }
        // transformers lets the old key win where both are there.
        let (name, map) = match (old, new) {
            (None, Some(new)) => ("rope_parameters", Some(new)),
            (old, _) => ("rope_scaling", old),
        };
        if map.is_none() && !rule.plain {
            return Err(keys.missing(name));
        }
        let theta = keys.number("rope_theta", rule.theta)?;
        let rotary = of(name, map.unwrap_or(&empty), theta)?;
        return Ok([rotary; 2]);
    };
    if new.is_some() && !nested {
        return Err(keys.unsupported("rope_parameters", "objects full_attention and sliding_attention"));
    }
    let inner = JsonKeys { path: keys.path, map: new.unwrap_or(&empty) };
    let [full, local] = [object(&inner, kinds[0])?, object(&inner, kinds[1])?];
    let mut merged = full.cloned().unwrap_or_default();
    merged.extend(old.cloned().unwrap_or_default());
    let full = of("rope_parameters", &merged, keys.number("rope_theta", rule.theta)?)?;
    let theta = key.map_or(Ok(theta), |key| keys.number(key, theta))?;
    Ok([full, of("rope_parameters", local.unwrap_or(&empty), theta)?])
}

/// The object at `key`, if there is one.
fn object<'a>(keys: &JsonKeys<'a>, key: &str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
    match keys.map.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value.as_object().map(Some).ok_or_else(|| keys.bad(key, "an object")),
    }
}

/// The object that describes a rotary embedding, within the whole configuration.
struct RotaryKeys<'a> {
    keys: JsonKeys<'a>,
    /// The key of the object.
    name: &'static str,
    inner: JsonKeys<'a>,
    /// The base if the object has none.
    theta: f64,
    /// Whether it is that of a model with latents, in which `mscale_all_dim` multiplies scores.
    latent: bool,
}

impl RotaryKeys<'_> {
    fn rotary(&self, rule: RotaryRule) -> Result<Rotary, ModelError> {
        let Self { keys, name, inner, theta, latent } = self;
        let theta = inner.number("rope_theta", *theta)?;
        if theta <= 1.0 {
            return Err(keys.bad("rope_theta", "a number above 1"));
        }
        let key = "partial_rotary_factor";
        let share = inner.number(key, keys.number(key, rule.share)?)?;
        if !(0.0 < share && share <= 1.0) {
            return Err(keys.bad(key, "a number above 0, and at most 1"));
        }
        if share != 1.0 && !rule.partial {
            return Err(keys.unsupported(key, "1.0 for models of this family"));
        }
        let kind = ["rope_type", "type"].into_iter().find(|key| inner.has(key));
        let scaling = match kind.map(|key| inner.text(key)).transpose()? {
            None if inner.has("factor") => return Err(keys.bad(name, "an object with a `rope_type`")),
            None | Some("default") => RopeScaling::None,
            Some(_) if !rule.scaling => {
                return Err(keys.unsupported(name, "rope_type default for models of this family"));
            }
            Some("linear" | "llama3") if *latent && inner.has("mscale_all_dim") => {
                return Err(inner.unsupported("mscale_all_dim", "null without YaRN"));
            }
            Some("linear") => RopeScaling::Linear { factor: self.factor()? },
            Some("llama3") => self.llama3()?,
            Some("yarn") => RopeScaling::Yarn(self.yarn()?),
            Some(_) => return Err(keys.unsupported(name, "rope_type default, linear, llama3, yarn")),
        };
        Ok(Rotary { theta, share, scaling })
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
            score_weight: all_dim.filter(|_| self.latent).unwrap_or(0.0),
            truncate: inner.flag("truncate", true)?,
            original_max_position_embeddings: self.original_context()?,
        })
    }
}
