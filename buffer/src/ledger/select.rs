//! Which groups a lease takes. Invariant: no group exceeds the bound of the buffer or of the request, none is in an
//! open lease of the same step, and in [`OnStale::Wait`] the remaining groups can still be trained in time.

use std::collections::{BTreeMap, BTreeSet};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use trajectory::{GroupId, PolicyVersion};

use super::{LeaseState, Ledger};
use crate::{LeaseRequest, OnStale, Order};

/// A group that can be leased; ordered by version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LeaseCandidate {
    /// Of its oldest token.
    pub(super) version: PolicyVersion,
    pub(super) group: GroupId,
}

impl Ledger {
    /// The groups for `request`, sorted by id; `None` if the lease has to wait.
    pub(super) fn choose(&self, request: &LeaseRequest, last_call: bool) -> Option<Vec<GroupId>> {
        let (batch, complete) = self.collect(request);
        let at_least =
            request.at_least.or(request.groups).unwrap_or_else(|| self.least_groups(request)).max(1);
        if !complete && (!last_call || batch.len() < at_least) {
            return None;
        }
        if self.config.on_stale == OnStale::Wait && !self.leaves_time(&batch) {
            return None;
        }
        let mut groups: Vec<GroupId> = batch.into_iter().map(|candidate| candidate.group).collect();
        groups.sort_unstable();
        Some(groups)
    }

    /// The maximum number of groups for `request`.
    pub(super) fn most_groups(&self, request: &LeaseRequest) -> usize {
        let all = if request.tokens.is_some() { usize::MAX } else { self.config.batch_groups };
        request.groups.unwrap_or(all).max(1)
    }

    fn least_groups(&self, request: &LeaseRequest) -> usize {
        if request.tokens.is_some() { 1 } else { self.config.batch_groups }
    }

    /// Groups for `request` in the order of the buffer, and whether they are all that it asks for.
    fn collect(&self, request: &LeaseRequest) -> (Vec<LeaseCandidate>, bool) {
        let most = self.most_groups(request);
        let bound = request.max_staleness.unwrap_or(u64::MAX);
        let in_step = self.leased_for_step();
        let usable = |candidate: &LeaseCandidate| {
            candidate.version.staleness_at(self.step) <= bound && !in_step.contains(&candidate.group)
        };
        let candidates = self.pool.iter().copied().filter(usable);
        let mut left = request.tokens.unwrap_or(u64::MAX);
        let mut batch = Vec::new();
        let mut fill = |candidates: &mut dyn Iterator<Item = LeaseCandidate>| {
            for candidate in candidates {
                let tokens = self.stored[&candidate.group].row.tokens;
                if tokens > left && !batch.is_empty() {
                    return true;
                }
                left = left.saturating_sub(tokens);
                batch.push(candidate);
                if batch.len() == most {
                    return true;
                }
            }
            false
        };
        let complete = match self.config.order {
            Order::Fifo => fill(&mut { candidates }),
            Order::Recency => fill(&mut candidates.rev()),
            Order::Uniform => fill(&mut self.drawn(candidates, |_| 0.0).into_iter()),
            Order::Reward { temperature } => {
                let weight = |group| self.stored[&group].row.reward.unwrap_or(0.0) / temperature;
                fill(&mut self.drawn(candidates, weight).into_iter())
            }
        };
        (batch, complete)
    }

    /// Candidates in an order drawn without replacement with weights `exp(log_weight)`: sorted by `log_weight +
    /// Gumbel noise` (Kool et al. 2019, "Stochastic Beams and Where to Find Them", arXiv:1903.06059, section 2.2).
    /// The seed depends on the lease, so the same lease draws the same order.
    fn drawn(
        &self,
        candidates: impl Iterator<Item = LeaseCandidate>,
        log_weight: impl Fn(GroupId) -> f64,
    ) -> Vec<LeaseCandidate> {
        let mut random = ChaCha8Rng::seed_from_u64(self.config.seed);
        random.set_stream(self.next_lease);
        let mut keyed: Vec<(f64, LeaseCandidate)> = candidates
            .map(|candidate| {
                // 53 random bits, in (0, 1).
                let uniform = ((random.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
                (log_weight(candidate.group) - (-uniform.ln()).ln(), candidate)
            })
            .collect();
        keyed.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        keyed.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// Groups that are already leased for this step. Only with several uses can they be in the pool.
    fn leased_for_step(&self) -> BTreeSet<GroupId> {
        if self.config.max_uses == 1 {
            return BTreeSet::new();
        }
        let of_step = self
            .leases
            .values()
            .filter(|record| record.row.state == LeaseState::Open && record.row.step == self.step);
        of_step.flat_map(|record| record.row.groups.iter().copied()).collect()
    }

    /// Whether later leases can still train all groups that `batch` leaves, in time; or at least no group in flight
    /// would make a better batch.
    fn leaves_time(&self, batch: &[LeaseCandidate]) -> bool {
        let before = self.config.batch_groups.saturating_sub(self.taken);
        let after = before.saturating_sub(batch.len());
        let mut in_batch: BTreeMap<PolicyVersion, usize> = BTreeMap::new();
        batch.iter().for_each(|candidate| *in_batch.entry(candidate.version).or_default() += 1);
        // Groups in flight over the bound are not waited for.
        let usable = PolicyVersion(self.step.0.saturating_sub(self.config.max_staleness));
        let (mut all, mut taken) = (0usize, 0usize);
        self.due.range(usable..).all(|(version, live)| {
            all += live;
            taken += in_batch.get(version).copied().unwrap_or(0);
            // Capacity of this and later steps beside the batch.
            let capacity = self.capacity_through(self.last_step_of(*version)).saturating_sub(before) + after;
            taken >= all.saturating_sub(capacity).min(batch.len())
        })
    }
}
