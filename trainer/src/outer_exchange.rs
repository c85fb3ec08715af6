//! Changes of the trained values between the optimizer updates of a step and the publication of its version: islands that exchange
//! outer gradients over slow links.
//!
//! Invariant: the version that a step publishes has the changed values. The optimizer state stays that of the local steps.

use std::fmt::Debug;

use trajectory::PolicyVersion;

use crate::TrainerError;
use crate::learner::Learner;

/// What changes the trained values.
pub trait OuterExchange: Debug + Send {
    /// Looks at the policy after the updates of the step that makes `version`, and changes it if the version is due for that.
    ///
    /// # Errors
    /// [`TrainerError::Exchange`]; the version is then not published.
    fn after_updates(
        &mut self,
        version: PolicyVersion,
        learner: &mut Learner,
    ) -> Result<Option<ExchangeReport>, TrainerError>;

    /// The state that a checkpoint keeps. The [`OuterExchange`] of a resumed run is made from it.
    fn state(&self) -> Vec<u8>;
}

/// What an exchange of outer gradients did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExchangeReport {
    /// Rounds that the outer weights have behind them.
    pub round: u64,
    /// Islands whose outer gradients are in the last round.
    pub islands: u64,
    /// Bytes sent since the last exchange.
    pub sent_bytes: u64,
    /// Bytes received since the last exchange.
    pub received_bytes: u64,
    /// Time that the step has waited for the answer, seconds.
    pub wait_s: f64,
    /// Norm of the outer gradient.
    pub gradient_norm: f64,
    /// Whether the outer gradient came late and had no part in its round.
    pub is_late: bool,
}
