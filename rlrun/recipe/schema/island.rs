//! The section `[island]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::words::GradientCompression;

/// `[island]`: the run is an island, which takes many local steps and then exchanges outer gradients with other runs over slow links.
///
/// `rlrun serve islands` is the coordinator, and has the outer learning rate and momentum (DiLoCo, arXiv 2311.08105; Streaming
/// DiLoCo, arXiv 2501.18512).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IslandSection {
    /// Address of the coordinator, such as `http://127.0.0.1:8703`; required.
    // resume = changes, worker = ignored
    pub url: String,
    /// Name of the island, different for each: letters, digits, `.`, `_` and `-`. Default: the
    /// name of the run directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = state, worker = ignored
    pub name: Option<String>,
    /// Training steps between two exchanges of the same weight, DiLoCo's H. Equal for all islands.
    // resume = state, worker = ignored
    pub steps: u64,
    /// Form of outer gradients and outer updates. What it loses is added to the next one. Equal for all islands.
    // resume = state, worker = ignored
    pub compression: GradientCompression,
    /// Parts of the weights that are exchanged by turns, one every `steps / fragments` steps, so that less is sent at a time.
    /// `steps` must be a multiple. Equal for all islands.
    // resume = state, worker = ignored
    pub fragments: usize,
    /// Steps that training continues while an exchange is under way. With 0 it waits. Less than `steps / fragments`.
    // resume = changes, worker = ignored
    pub overlap_steps: u64,
    /// Weight of the island's own weights when an outer update is applied, 0 to 1; the outer weights have the rest. With
    /// `overlap_steps` Streaming DiLoCo uses 0.5, which keeps half of what the island has learnt meanwhile.
    // resume = changes, worker = ignored
    pub local_weight: f64,
    /// File with the token of the coordinator. `url` then has https, or a host of this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub token_file: Option<PathBuf>,
    /// PEM file with the TLS certificates to trust. Default: those that browsers trust.
    #[serde(skip_serializing_if = "Option::is_none")]
    // resume = changes, worker = ignored
    pub tls_ca: Option<PathBuf>,
}

impl Default for IslandSection {
    fn default() -> Self {
        Self {
            url: String::new(),
            name: None,
            steps: 32,
            compression: GradientCompression::Int8,
            fragments: 1,
            overlap_steps: 0,
            local_weight: 0.0,
            token_file: None,
            tls_ca: None,
        }
    }
}
