//! Rows that others have published, beside what is predicted for them.
//!
//! Invariant: a row says whether its number was used to fit an input ([`RowUse::Fitted`]), so that its agreement shows nothing but
//! that the model can express it, or whether it is a prediction. Inputs that were fitted are constants with a comment that names the
//! rows; `simulator/tests/published.rs` requires the tolerance of every row.

mod areal;
mod nemo;
mod verl;
mod volumes;

use crate::scenario::SimulationError;

/// What a published number was used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowUse {
    /// An input was fitted to it.
    Fitted,
    /// No input was fitted to it.
    Predicted,
}

impl std::fmt::Display for RowUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Fitted => "fitted",
            Self::Predicted => "predicted",
        })
    }
}

/// A published number and its prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedRow {
    /// System, experiment and case.
    pub name: String,
    /// Where it was published.
    pub source: &'static str,
    /// Unit of both numbers.
    pub unit: &'static str,
    /// The published number.
    pub published: f64,
    /// The predicted number.
    pub predicted: f64,
    /// Largest relative error that is accepted.
    pub tolerance: f64,
    /// Whether an input was fitted to it.
    pub used: RowUse,
}

impl PublishedRow {
    /// Relative error of the prediction.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.predicted / self.published - 1.0
    }

    /// Whether the error is within the tolerance.
    #[must_use]
    pub fn is_close(&self) -> bool {
        self.error().abs() <= self.tolerance
    }
}

/// All rows, in a fixed order.
///
/// # Errors
/// As [`simulate`](crate::simulate); never with the scenarios of this module.
pub fn rows() -> Result<Vec<PublishedRow>, SimulationError> {
    let mut rows = areal::rows()?;
    rows.extend(verl::rows()?);
    rows.extend(nemo::rows()?);
    rows.extend(volumes::rows());
    Ok(rows)
}

/// Steps of verl's 30B run by the number of its 128 GPUs that train, of which 32 were published: pairs of GPUs and seconds.
///
/// # Errors
/// As [`rows`].
pub fn divisions_of_30b() -> Result<Vec<(f64, f64)>, SimulationError> {
    verl::divisions_of_30b()
}
