//! What the coordinator refuses, and the rules of single requests.
//!
//! Invariant: a refusal has evidence and a remedy, and its request has changed nothing.

use crate::IslandError;
use crate::store::RUN_ID;
use crate::terms::{IslandTerms, is_name};

/// Largest magnitude of a value of an outer gradient, far above that of any weight. The outer optimizer stays finite with it.
const MAX_MAGNITUDE: f32 = 1e18;

/// A request that the coordinator refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorRefusal {
    /// Status of HTTP.
    pub status: u16,
    /// Evidence and remedy.
    pub reason: String,
}

impl CoordinatorRefusal {
    pub(crate) fn conflict(reason: impl Into<String>) -> Self {
        Self { status: 409, reason: reason.into() }
    }

    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self { status: 422, reason: reason.into() }
    }

    /// Files cannot be written now. The request can be repeated.
    pub(crate) fn unwritten(error: &IslandError) -> Self {
        Self { status: 503, reason: error.to_string() }
    }

    pub(crate) fn name_taken(name: &str) -> Self {
        Self::conflict(format!(
            "another run is live under the name `{name}`; choose another `island.name`, or wait until that run has missed a \
             round"
        ))
    }
}

pub(crate) fn check_names(name: &str, run: &str) -> Result<(), CoordinatorRefusal> {
    if !is_name(name) {
        let reason = "names of islands are 1 to 64 letters, digits, `.`, `_` and `-`, without a dot first";
        return Err(CoordinatorRefusal::invalid(format!("`{}`: {reason}", name.escape_debug())));
    }
    if run.len() != RUN_ID || !run.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(CoordinatorRefusal::invalid("the id of the run is not 32 hexadecimal digits"));
    }
    Ok(())
}

/// Refuses an outer gradient that would make the outer weights infinite, which no later round could mend.
pub(crate) fn check_magnitudes(name: &str, values: &[f32]) -> Result<(), CoordinatorRefusal> {
    let Some(index) = values.iter().position(|value| value.abs() > MAX_MAGNITUDE) else { return Ok(()) };
    Err(CoordinatorRefusal::invalid(format!(
        "value {index} of the outer gradient of island `{name}` is {:e}, and at most {MAX_MAGNITUDE:e} is taken; lower its \
         learning rate, or resume it from an earlier checkpoint",
        values[index]
    )))
}

pub(crate) fn check_terms(ours: &IslandTerms, theirs: &IslandTerms) -> Result<(), CoordinatorRefusal> {
    let differences = ours.differences(theirs);
    if differences.is_empty() {
        return Ok(());
    }
    let reason = format!("it has {}; islands that exchange must agree on these", differences.join("; "));
    Err(CoordinatorRefusal::conflict(reason))
}
