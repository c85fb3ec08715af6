//! Tensors of all experts of a layer in weight files, in place of those of each: `[experts, 2 width, hidden]` of gate and up, one after
//! the other, and `[experts, hidden, width]`. Models that read images too have them.
//!
//! Invariant: every part of such a tensor is the whole tensor of one expert.

use std::collections::HashMap;

use crate::file_tensors::{FilePart, FilePlace, FileTensor};
use crate::layer::ExpertSpec;
use crate::{Config, Layout};

/// A tensor of all experts of a layer.
#[derive(Debug)]
pub(crate) struct StackedExperts {
    /// Its parts in the order of `of_each`.
    pub(crate) file: FileTensor,
    /// Positions of the tensors of each expert among those of files.
    pub(crate) of_each: Vec<usize>,
}

/// The tensors of all layers by their names. `by_name` has the positions of tensors of files.
pub(crate) fn stacked_experts(
    config: &Config,
    layout: &Layout,
    by_name: &HashMap<String, usize>,
) -> HashMap<String, StackedExperts> {
    let mut all = HashMap::new();
    for (layer, spec) in config.layers.iter().enumerate() {
        let Some(ExpertSpec { count, width, .. }) = spec.feed_forward.experts() else { continue };
        let hidden = config.hidden_size;
        let module = format!("model.layers.{layer}.mlp.experts");
        for (name, parts, [rows, inputs]) in [
            ("gate_up_proj", &["gate_proj", "up_proj"][..], [2 * width, hidden]),
            ("down_proj", &["down_proj"], [hidden, width]),
        ] {
            let names = (0..count).flat_map(|expert| parts.iter().map(move |part| (expert, *part)));
            let names = names.map(|(expert, part)| format!("{module}.{expert}.{part}.weight"));
            let each = rows / parts.len();
            let part = |(at, name): (usize, String)| {
                let (file, spec) = (FilePlace::rows(at * each, inputs), layout.spec(&name)?);
                let part = FilePart { offset: spec.offset, shape: [each, inputs], place: file };
                Some((part, *by_name.get(&name)?))
            };
            let (parts, of_each) = names.enumerate().filter_map(part).unzip();
            let name = format!("{module}.{name}");
            let file = FileTensor { name: name.clone(), shape: vec![count, rows, inputs], parts };
            all.insert(name, StackedExperts { file, of_each });
        }
    }
    all
}
