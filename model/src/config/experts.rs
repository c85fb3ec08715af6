//! The keys of experts in `config.json`, by the rule of a family.
//!
//! Invariant: a key that changes which experts a token has, or what they compute, is read or refused, never skipped. Keys of
//! losses that balance experts in pre-training are not looked at: routers are trained by the loss of the recipe alone.

use serde_json::{Map, Value, json};

use super::keys::JsonKeys;
use crate::ModelError;
use crate::layer::{ExpertActivation, ExpertSpec, RouterKind, SwigluClamp};

const MAX_EXPERTS: usize = 4096;
/// Most tensors of a model, far above any that exists: each has a name and a shape in memory, whatever its size.
const MAX_TENSORS: usize = 1 << 20;

/// Whether layers have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertRule {
    Never,
    Keys(ExpertKeys),
}

/// Which keys say what experts a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertKeys {
    /// Keys of the number of experts, of which one has to be there.
    pub(super) count: &'static [&'static str],
    /// Key of the width of an expert.
    pub(super) width: &'static str,
    pub(super) layers: ExpertLayers,
    pub(super) router: RouterRule,
}

/// Which layers have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpertLayers {
    /// All.
    All,
    /// Each `decoder_sparse_step`th but those of `mlp_only_layers`.
    Sparse,
    /// Those from `first_k_dense_replace` on.
    AfterDense,
    /// Those that are `sparse` in `mlp_layer_types`, or all but the first.
    Listed,
}

/// How experts are chosen, and what they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouterRule {
    /// [`RouterKind::Softmax`] with `norm_topk_prob`.
    Softmax,
    /// [`RouterKind::Softmax`], normalised unless `norm_topk_prob` says otherwise where there is such a `flag`, and beside it a gated
    /// network of `shared_expert_intermediate_size` for all tokens.
    SoftmaxAndShared { flag: bool },
    /// [`RouterKind::Sigmoid`] with `norm_topk_prob`, `n_group`, `topk_group` and `routed_scaling_factor`, and beside it
    /// `n_shared_experts` for all tokens.
    Sigmoid,
    /// [`RouterKind::SoftmaxOfChosen`] over experts with biases and bounded operands, all in one tensor of the files.
    SoftmaxOfChosen,
}

/// Keys of experts of any family.
const KEYS: [&str; 18] = [
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "experts_per_token",
    "moe_intermediate_size",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "n_group",
    "topk_group",
    "topk_method",
    "scoring_func",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "moe_layer_freq",
    "mlp_layer_types",
    "swiglu_limit",
    "swiglu_alpha",
];

const SHARED_WIDTH: &str = "shared_expert_intermediate_size";

/// The experts that a `config.json` asks for, and which of its `num_layers` layers have them.
pub(super) fn read(
    keys: &JsonKeys<'_>,
    rule: ExpertRule,
    num_layers: usize,
) -> Result<Option<(ExpertSpec, Vec<bool>)>, ModelError> {
    let ExpertRule::Keys(rule) = rule else {
        let found = KEYS.into_iter().find(|key| keys.has(key));
        return found
            .map_or(Ok(None), |key| Err(keys.unsupported(key, "dense models, which have no experts")));
    };
    if let Some(key) = KEYS.into_iter().find(|key| keys.has(key) && !rule.reads(key)) {
        return Err(keys.unsupported(key, "models of this family without this key"));
    }
    let count = rule.count(keys)?;
    // A layer has up to 16 tensors, and each of its experts up to 4.
    if num_layers.saturating_mul(16 + 4 * count) > MAX_TENSORS {
        let expected = format!(
            "a number of layers that, with {} = {count}, makes at most {MAX_TENSORS} tensors",
            rule.count[0]
        );
        return Err(keys.bad("num_hidden_layers", &expected));
    }
    let per_token = keys.size("num_experts_per_tok")?;
    if keys.optional_size("experts_per_token")?.is_some_and(|other| other != per_token) {
        let expected = format!("num_experts_per_tok, which is {per_token}");
        return Err(keys.bad("experts_per_token", &expected));
    }
    if per_token > count {
        return Err(keys.bad("num_experts_per_tok", &format!("at most {}, which is {count}", rule.count[0])));
    }
    let width = keys.size(rule.width)?;
    let mut spec = rule.fresh(width);
    (spec.count, spec.per_token) = (count, per_token);
    match rule.router {
        RouterRule::Softmax => {
            spec.router = RouterKind::Softmax { normalized: keys.flag("norm_topk_prob", false)? };
        }
        RouterRule::SoftmaxAndShared { flag } => {
            let normalized = keys.flag("norm_topk_prob", true)?;
            if !flag && !normalized {
                return Err(keys.unsupported("norm_topk_prob", "true for models of this family"));
            }
            spec.router = RouterKind::Softmax { normalized };
            spec.shared_width = keys.size(SHARED_WIDTH)?;
        }
        RouterRule::Sigmoid => {
            spec.router = sigmoid(keys, &spec)?;
            spec.shared_width = keys.size("n_shared_experts")? * width;
        }
        RouterRule::SoftmaxOfChosen => {
            spec.activation = ExpertActivation::Clamped(SwigluClamp {
                alpha: keys.number("swiglu_alpha", f64::from(GPT_OSS.alpha))? as f32,
                limit: keys.number("swiglu_limit", f64::from(GPT_OSS.limit))? as f32,
            });
        }
    }
    let layers = rule.layers.read(keys, num_layers)?;
    if !layers.contains(&true) {
        return Err(keys.bad("num_hidden_layers", "a layer with experts"));
    }
    Ok(Some((spec, layers)))
}

/// The constants of gpt-oss.
const GPT_OSS: SwigluClamp = SwigluClamp { alpha: 1.702, limit: 7.0 };

fn sigmoid(keys: &JsonKeys<'_>, spec: &ExpertSpec) -> Result<RouterKind, ModelError> {
    for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if keys.has(key) && keys.text(key)? != only {
            return Err(keys.unsupported(key, only));
        }
    }
    let (groups, chosen_groups) = (keys.size("n_group")?, keys.size("topk_group")?);
    let ExpertSpec { count, per_token, .. } = *spec;
    // A group is as good as its two best experts.
    if !count.is_multiple_of(groups) || count / groups < 2 {
        return Err(keys
            .bad("n_group", &format!("a divisor of {count} experts, with two experts or more in a group")));
    }
    if chosen_groups > groups || chosen_groups * (count / groups) < per_token {
        let expected = format!("at most {groups} groups, with {per_token} experts for a token or more");
        return Err(keys.bad("topk_group", &expected));
    }
    if !keys.has("routed_scaling_factor") {
        return Err(keys.missing("routed_scaling_factor"));
    }
    let scale = keys.number("routed_scaling_factor", 1.0)? as f32;
    Ok(RouterKind::Sigmoid { normalized: keys.flag("norm_topk_prob", true)?, groups, chosen_groups, scale })
}

impl ExpertRule {
    /// Whether files may have experts in MXFP4.
    pub(super) fn reads_mxfp4(self) -> bool {
        matches!(self, Self::Keys(ExpertKeys { router: RouterRule::SoftmaxOfChosen, .. }))
    }
}

impl ExpertKeys {
    fn reads(&self, key: &str) -> bool {
        let of_router: &[&str] = match self.router {
            RouterRule::Softmax => &[],
            RouterRule::SoftmaxAndShared { .. } => &[SHARED_WIDTH],
            RouterRule::Sigmoid => &[
                "n_shared_experts",
                "n_group",
                "topk_group",
                "topk_method",
                "scoring_func",
                "routed_scaling_factor",
            ],
            RouterRule::SoftmaxOfChosen => &["swiglu_limit", "swiglu_alpha", "experts_per_token"],
        };
        let of_layers: &[&str] = match self.layers {
            ExpertLayers::All | ExpertLayers::Sparse => &[],
            ExpertLayers::AfterDense => &["first_k_dense_replace", "moe_layer_freq"],
            ExpertLayers::Listed => &["first_k_dense_replace", "mlp_layer_types"],
        };
        let of_all = [self.width, "num_experts_per_tok"];
        [self.count, &of_all[..], of_router, of_layers].iter().any(|known| known.contains(&key))
    }

    /// Number of experts: all keys of it that are there have to say the same.
    fn count(&self, keys: &JsonKeys<'_>) -> Result<usize, ModelError> {
        let mut found = None;
        for key in self.count {
            let Some(count) = keys.optional_size(key)? else { continue };
            match found {
                None if count > MAX_EXPERTS => return Err(keys.bad(key, &format!("at most {MAX_EXPERTS}"))),
                None => found = Some((key, count)),
                Some((first, other)) if other != count => {
                    return Err(keys.bad(key, &format!("{first}, which is {other}")));
                }
                Some(_) => {}
            }
        }
        found.map(|(_, count)| count).ok_or_else(|| keys.missing(self.count[0]))
    }

    /// Four experts of a width, of which a token has two.
    pub(super) fn fresh(&self, width: usize) -> ExpertSpec {
        let all = ExpertSpec {
            count: 4,
            per_token: 2,
            width,
            router: RouterKind::Softmax { normalized: true },
            shared_width: 0,
            shared_gate: false,
            bias: false,
            fused_files: false,
            activation: ExpertActivation::SwiGlu,
        };
        match self.router {
            RouterRule::Softmax => all,
            RouterRule::SoftmaxAndShared { .. } => {
                ExpertSpec { shared_width: width, shared_gate: true, ..all }
            }
            RouterRule::Sigmoid => {
                let router =
                    RouterKind::Sigmoid { normalized: true, groups: 1, chosen_groups: 1, scale: 1.0 };
                ExpertSpec { router, shared_width: width, ..all }
            }
            RouterRule::SoftmaxOfChosen => ExpertSpec {
                router: RouterKind::SoftmaxOfChosen,
                bias: true,
                fused_files: true,
                activation: ExpertActivation::Clamped(GPT_OSS),
                ..all
            },
        }
    }

    /// Writes the keys of `spec` to `map`; `has_experts` of each layer.
    pub(super) fn write(&self, spec: &ExpertSpec, has_experts: &[bool], map: &mut Map<String, Value>) {
        let mut put = |key: &str, value: Value| drop(map.insert(key.to_owned(), value));
        put(self.count[0], json!(spec.count));
        put("num_experts_per_tok", json!(spec.per_token));
        put(self.width, json!(spec.width));
        match spec.router {
            RouterKind::Softmax { normalized } => {
                put("norm_topk_prob", json!(normalized));
                if spec.shared_gate {
                    put(SHARED_WIDTH, json!(spec.shared_width));
                }
            }
            RouterKind::Sigmoid { normalized, groups, chosen_groups, scale } => {
                put("norm_topk_prob", json!(normalized));
                put("n_group", json!(groups));
                put("topk_group", json!(chosen_groups));
                put("routed_scaling_factor", json!(super::write::decimal(scale)));
                put("n_shared_experts", json!(spec.shared_width / spec.width));
            }
            RouterKind::SoftmaxOfChosen => {}
        }
        if let ExpertActivation::Clamped(SwigluClamp { alpha, limit }) = spec.activation {
            put("swiglu_alpha", json!(super::write::decimal(alpha)));
            put("swiglu_limit", json!(super::write::decimal(limit)));
        }
        let dense = has_experts.iter().enumerate().filter(|(_, has)| !**has).map(|(layer, _)| layer);
        match self.layers {
            ExpertLayers::All => {}
            ExpertLayers::Sparse => {
                put("decoder_sparse_step", json!(1));
                put("mlp_only_layers", json!(dense.collect::<Vec<usize>>()));
            }
            ExpertLayers::AfterDense => put("first_k_dense_replace", json!(dense.count())),
            ExpertLayers::Listed => {
                let kinds = has_experts.iter().map(|has| if *has { "sparse" } else { "dense" });
                put("mlp_layer_types", json!(kinds.collect::<Vec<_>>()));
            }
        }
    }
}

impl ExpertLayers {
    /// Whether each layer has experts.
    fn read(self, keys: &JsonKeys<'_>, num_layers: usize) -> Result<Vec<bool>, ModelError> {
        let layers = 0..num_layers;
        match self {
            Self::All => Ok(vec![true; num_layers]),
            Self::Sparse => {
                let step = keys.optional_size("decoder_sparse_step")?.unwrap_or(1);
                let dense = keys.map.get("mlp_only_layers").filter(|value| !value.is_null());
                let dense = dense.map_or(Some(Vec::new()), |value| {
                    value.as_array()?.iter().map(|layer| Some(layer.as_u64()? as usize)).collect()
                });
                let dense = dense.ok_or_else(|| keys.bad("mlp_only_layers", "a list of layers"))?;
                let sparse = |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
                Ok(layers.map(sparse).collect())
            }
            Self::AfterDense => {
                if keys.optional_size("moe_layer_freq")?.is_some_and(|step| step != 1) {
                    return Err(keys.unsupported("moe_layer_freq", "1"));
                }
                let first = keys.size("first_k_dense_replace")?;
                Ok(layers.map(|layer| layer >= first).collect())
            }
            Self::Listed => {
                let listed = keys.map.get("mlp_layer_types").filter(|value| !value.is_null());
                let Some(listed) = listed else {
                    // transformers does not look at this key.
                    if keys.optional_size("first_k_dense_replace")?.is_some_and(|first| first != 1) {
                        return Err(keys.unsupported("first_k_dense_replace", "1 without `mlp_layer_types`"));
                    }
                    return Ok(layers.map(|layer| layer > 0).collect());
                };
                let kinds = listed.as_array().filter(|kinds| kinds.len() == num_layers);
                let kinds = kinds.and_then(|kinds| kinds.iter().map(is_sparse).collect());
                let expected = format!("a list of {num_layers} texts, each dense or sparse");
                kinds.ok_or_else(|| keys.bad("mlp_layer_types", &expected))
            }
        }
    }
}

/// Whether a layer of this kind has experts.
fn is_sparse(kind: &Value) -> Option<bool> {
    match kind.as_str()? {
        "dense" => Some(false),
        "sparse" => Some(true),
        _ => None,
    }
}
