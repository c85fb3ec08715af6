//! The order in which settings of a placement are tried: by the time of a step without waiting, in closed form.
//!
//! Invariant: degrees, stages and transports that the rules of recipes or the shape of the model refuse are never timed, and each
//! refusal is counted once for a placement. They are checked with the bound on staleness and the running sequences of the recipe; refusals
//! that depend on other settings are found when the best are checked. Of settings with the same time the one that is enumerated first
//! comes first, which has no degree above 1.

use std::collections::BTreeMap;

use simulator::{Scenario, TrainingCost};

use super::PlanSearch;
use super::candidate::{RoleDivision, SearchCandidate, SearchSpace};
use crate::recipe::Recipe;
use crate::recipe::words::WeightTransport;

/// Settings of training and of weights, with their time.
#[derive(Clone, Debug)]
pub(super) struct TimedSettings {
    pub(super) candidate: SearchCandidate,
    /// A step of training, and weights on their way, seconds.
    seconds: f64,
}

/// What was found about placements so far.
#[derive(Debug, Default)]
pub(super) struct KnownTimes {
    /// By what training depends on.
    timed: BTreeMap<String, Vec<TimedSettings>>,
    /// Whether rules accept settings.
    accepted: BTreeMap<String, bool>,
    /// Why settings were refused, with their number.
    pub(super) refused: BTreeMap<String, usize>,
}

impl TimedSettings {
    /// `placement` with these settings of training and of weights.
    pub(super) fn at(&self, placement: &SearchCandidate) -> SearchCandidate {
        let SearchCandidate { passes, parallel, transport, .. } = self.candidate;
        SearchCandidate { passes, parallel, transport, ..placement.clone() }
    }
}

impl KnownTimes {
    /// Whether `rules` accept the degrees, the ZeRO stage and the transport of a placement, with other settings of the recipe `own`.
    fn accepts(
        &mut self,
        candidate: &SearchCandidate,
        own: &Recipe,
        rules: &impl Fn(&SearchCandidate) -> Result<(), String>,
    ) -> bool {
        let SearchCandidate { division, passes, parallel, transport, .. } = candidate;
        let key = format!("{division:?} {parallel:?} {} {transport:?}", passes.zero);
        if let Some(known) = self.accepted.get(&key) {
            return *known;
        }
        let checked = rules(&SearchCandidate {
            max_staleness: own.buffer.max_staleness,
            max_running: own.rollout.max_running,
            ..candidate.clone()
        });
        self.accepted.insert(key, checked.is_ok());
        checked
            .map_err(|reason| {
                *self.refused.entry(reason).or_default() += 1;
            })
            .is_ok()
    }
}

impl PlanSearch<'_> {
    /// All accepted settings of training and of weights of `placement`, fastest first.
    pub(super) fn timed<'a>(
        &self,
        placement: &SearchCandidate,
        space: &SearchSpace,
        rules: &impl Fn(&SearchCandidate) -> Result<(), String>,
        known: &'a mut KnownTimes,
    ) -> &'a [TimedSettings] {
        let key = training_key(placement);
        if !known.timed.contains_key(&key) {
            let timed = self.times(placement, space, rules, known);
            known.timed.insert(key.clone(), timed);
        }
        &known.timed[&key]
    }

    fn times(
        &self,
        placement: &SearchCandidate,
        space: &SearchSpace,
        rules: &impl Fn(&SearchCandidate) -> Result<(), String>,
        known: &mut KnownTimes,
    ) -> Vec<TimedSettings> {
        let mut transports = space.transports(placement.division);
        if let RoleDivision::Split { samplers, ranks } = placement.division
            && !self.inputs.hardware.is_one_machine(samplers + ranks)
        {
            // The memory of a device is mapped on its host alone.
            transports.retain(|transport| *transport != WeightTransport::CudaIpc);
        }
        let delivered: Vec<f64> =
            transports.iter().map(|transport| self.delivery_s(placement, *transport)).collect();
        let mut all = Vec::new();
        for parallel in space.degrees(placement.division) {
            for passes in space.passes() {
                let candidate = SearchCandidate { passes: *passes, parallel, ..placement.clone() };
                let allowed = known.accepts(&candidate, self.recipe, rules);
                let Some(seconds) = allowed.then(|| self.training_s(&candidate)).flatten() else { continue };
                for (transport, delivery_s) in transports.iter().zip(&delivered) {
                    let other = SearchCandidate { transport: *transport, ..candidate.clone() };
                    // A transport has no rule about degrees.
                    let plain = SearchCandidate { parallel: placement.parallel, ..other.clone() };
                    if *transport == placement.transport || known.accepts(&plain, self.recipe, rules) {
                        all.push(TimedSettings { candidate: other, seconds: seconds + delivery_s });
                    }
                }
            }
        }
        all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        all
    }

    /// A step of training, seconds; `None` for settings that cannot be simulated.
    fn training_s(&self, candidate: &SearchCandidate) -> Option<f64> {
        let scenario = self.inputs.scenario(&candidate.applied(self.recipe), self.config, 2);
        scenario.ok().map(|(scenario, _)| seconds_of_step(&scenario))
    }

    /// Weights on their way, seconds.
    fn delivery_s(&self, placement: &SearchCandidate, transport: WeightTransport) -> f64 {
        let candidate = SearchCandidate { transport, ..placement.clone() };
        let scenario = self.inputs.scenario(&candidate.applied(self.recipe), self.config, 2);
        scenario.map_or(0.0, |(scenario, _)| scenario.weights.publish_s + scenario.weights.push_s)
    }
}

/// What the time of training depends on, beside the settings that are tried.
pub(super) fn training_key(placement: &SearchCandidate) -> String {
    format!("{:?} {} {:?}", placement.division, placement.batch_groups, placement.dtype)
}

/// Training of a batch of mean lengths, seconds.
fn seconds_of_step(scenario: &Scenario) -> f64 {
    let sequences = scenario.batch_groups * scenario.group_size;
    let length = scenario.lengths.mean() + scenario.prompt_tokens;
    let ranks = scenario.trainer.ranks as f64;
    let of_rank = (sequences as f64 / ranks).ceil();
    let one = TrainingCost { ranks: 1, ..scenario.trainer };
    one.seconds(&[]) + of_rank * (one.per_token_s * length + one.per_square_s * length * length)
}
