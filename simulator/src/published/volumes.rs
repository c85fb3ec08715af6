//! Volumes of weight transfers: closed forms.
//!
//! Invariant: no input is fitted.

use super::{PublishedRow, RowUse};
use crate::theory::ReshardingDegrees;

const HYBRIDFLOW: &str = "HybridFlow, arXiv 2409.19256, table 2";

pub(super) fn rows() -> Vec<PublishedRow> {
    let degrees = ReshardingDegrees {
        tensor: 8.0,
        pipeline: 1.0,
        data: 2.0,
        generation_tensor: 2.0,
        generation_pipeline: 1.0,
    };
    let row = |name: &str, source, unit, published, predicted, tolerance| PublishedRow {
        name: name.to_owned(),
        source,
        unit,
        published,
        predicted,
        tolerance,
        used: RowUse::Predicted,
    };
    vec![
        row(
            "resharding 8 to 2, without redundancy",
            HYBRIDFLOW,
            "models",
            0.375,
            degrees.without_redundancy(),
            1e-9,
        ),
        row(
            "resharding 8 to 2, gathered in the group",
            HYBRIDFLOW,
            "models",
            0.875,
            degrees.gathered_in_group(),
            1e-9,
        ),
        row(
            "resharding 8 to 2, gathered everywhere",
            HYBRIDFLOW,
            "models",
            0.9375,
            degrees.gathered_everywhere(),
            1e-9,
        ),
    ]
}
