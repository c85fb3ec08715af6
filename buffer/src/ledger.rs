//! The policy of the buffer as a pure state machine: ids, slots, order, staleness. No I/O, clock or lock.
//!
//! Invariant, with `v` the next step to be leased, `B = batch_groups` and `eta = max_staleness`: of the live groups
//! (admitted, claimed or finalized, not leased), at most `(d - v + 1) * B` have a deadline of `d` or less, for every
//! `d >= v`. The deadline of a group is the last step that may train it: its oldest version + `eta`.
//!
//! Why slots and earliest deadline first keep the bound in [`OnStale::Wait`]:
//! - Admission for a sampler that serves `a` leaves at most `(eta + 1) * B - (v - a) * B = (d - v + 1) * B` groups
//!   live, `d = a + eta` being the deadline of those it lets in; so it keeps the invariant at `d` and later, and
//!   earlier deadlines do not see it. Claiming and finalizing move a deadline only back, the other verbs only
//!   remove groups.
//! - The lease of step `v` takes the `B` earliest deadlines of what is finalized, and leaves only if afterwards at
//!   most `(d - v) * B` groups have a deadline of `d` or less: the invariant of `v + 1`. No other `B` finalized groups
//!   would cover any `d` better. If all live groups are finalized, it holds: either all `B` taken are due by `d`, which
//!   is what the invariant leaves to be done, or none due by `d` remains.
//! - With `d = v` the condition says that a group leaves with the step of its deadline at the latest: none is ever
//!   over the bound, and the slow one is waited for instead.
//! - Nobody waits in a circle: while the lease waits, no step is unfinished, so a sampler that serves `v` finds a
//!   free slot unless `(eta + 1) * B >= B` groups are live; those finish, and then the lease leaves.
//!
//! A crash only removes live groups, which keeps the invariant. What breaks it from outside (a trainer that skips
//! steps, a sampler that goes back in version, another `B` after a resume) costs groups, never the bound or progress:
//! groups over the bound are dropped, groups in flight over the bound are not waited for, and where more is due than
//! steps can take, a full batch of what is due leaves.

use std::collections::{BTreeMap, BTreeSet};

use trajectory::{GroupId, PolicyVersion};

use crate::{BufferConfig, BufferError, Finalized, OnStale, Stats};

/// What a store keeps of a group beside its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: GroupId,
    /// The oldest version in the group.
    pub(crate) oldest: PolicyVersion,
    /// The step it is leased for, if it is leased.
    pub(crate) step: Option<PolicyVersion>,
}

/// What rows cannot say: the ids and steps that left no row. Written with every change that removes rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Mark {
    /// The lowest id that was never admitted.
    pub(crate) next_id: u64,
    /// Ids below `next_id` without a finalized group that are still to be trained on; at most as many as slots.
    pub(crate) pending: Vec<GroupId>,
    /// The lowest step that was never leased.
    pub(crate) next_step: PolicyVersion,
    /// Groups of steps below are forgotten.
    pub(crate) acked: PolicyVersion,
}

/// A change of what a store keeps; all of it or nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Rows whose step changes.
    pub(crate) rows: Vec<Row>,
    /// Groups to forget, payload and row.
    pub(crate) forget: Vec<GroupId>,
    pub(crate) mark: Mark,
}

/// What a lease can do now.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// To be written before the groups are handed out.
    pub(crate) change: Option<Change>,
    /// The groups, ordered by id; `None` if the lease has to wait.
    pub(crate) groups: Option<Vec<GroupId>>,
}

/// What `finalize` has to do about a group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// Write it, then say [`Ledger::end_finalize`].
    Write,
    /// Another call is writing it: ask again when something changed.
    Elsewhere,
    /// Nothing; this is the answer.
    Answer(Finalized),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Admitted,
    Claimed,
    Writing,
    Finalized,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    stage: Stage,
    /// What counts as the oldest version: served at admission, then at the claim, then the oldest in the group.
    version: PolicyVersion,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    config: BufferConfig,
    next_id: u64,
    /// Ids to be admitted before new ones.
    again: BTreeSet<GroupId>,
    live: BTreeMap<GroupId, Live>,
    /// The groups of every lease that is not acknowledged, ordered by id, with their oldest versions.
    leases: BTreeMap<PolicyVersion, Vec<(GroupId, PolicyVersion)>>,
    next_step: PolicyVersion,
    acked: PolicyVersion,
    dropped_stale: u64,
    evicted: u64,
}

impl Ledger {
    /// A ledger of what a store kept. What was in flight is first in line again.
    pub(crate) fn restore(config: BufferConfig, rows: &[Row], mark: Mark) -> Self {
        let mut live = BTreeMap::new();
        let mut leases: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for row in rows {
            match row.step {
                Some(step) => leases.entry(step).or_default().push((row.id, row.oldest)),
                None => {
                    live.insert(row.id, Live { stage: Stage::Finalized, version: row.oldest });
                }
            }
        }
        leases.values_mut().for_each(|groups| groups.sort_unstable());
        let stored: BTreeSet<GroupId> = rows.iter().map(|row| row.id).collect();
        let next_id = stored.last().map_or(0, |id| id.0 + 1).max(mark.next_id);
        let unseen = (mark.next_id..next_id).map(GroupId);
        let again = mark.pending.into_iter().chain(unseen).filter(|id| !stored.contains(id)).collect();
        let next_step =
            leases.keys().next_back().map_or(mark.next_step, |step| step.next().max(mark.next_step));
        let acked = mark.acked;
        Self { config, next_id, again, live, leases, next_step, acked, dropped_stale: 0, evicted: 0 }
    }

    /// Slots that are free as seen by a sampler that serves `served`.
    ///
    /// Every step that it has not yet applied holds `batch_groups` of them.
    pub(crate) fn free(&self, served: PolicyVersion) -> usize {
        let unseen_steps = usize::try_from(served.staleness_at(self.next_step)).unwrap_or(usize::MAX);
        let used = unseen_steps.saturating_mul(self.config.batch_groups).saturating_add(self.live.len());
        self.config.slots().saturating_sub(used)
    }

    /// Takes up to `limit` free slots, for ids that are to be done again first, lowest first.
    pub(crate) fn admit(&mut self, served: PolicyVersion, limit: usize) -> Vec<GroupId> {
        let count = limit.min(self.free(served));
        let mut ids = Vec::with_capacity(count);
        for _ in 0..count {
            let id = self.again.pop_first().unwrap_or_else(|| {
                self.next_id += 1;
                GroupId(self.next_id - 1)
            });
            self.live.insert(id, Live { stage: Stage::Admitted, version: served });
            ids.push(id);
        }
        ids
    }

    pub(crate) fn claim(&mut self, group: GroupId, served: PolicyVersion) -> Result<(), BufferError> {
        match self.live.get_mut(&group) {
            Some(live) if live.stage == Stage::Admitted => {
                *live = Live { stage: Stage::Claimed, version: served };
                Ok(())
            }
            _ => Err(BufferError::WrongState { group, is: self.state(group), needs: "admitted" }),
        }
    }

    /// Announces that `group` is about to be written.
    pub(crate) fn begin_finalize(&mut self, group: GroupId, oldest: PolicyVersion) -> Begin {
        match self.live.get_mut(&group) {
            Some(live) => match live.stage {
                Stage::Admitted | Stage::Claimed => {
                    *live = Live { stage: Stage::Writing, version: oldest };
                    Begin::Write
                }
                Stage::Writing => Begin::Elsewhere,
                Stage::Finalized => Begin::Answer(Finalized::Duplicate),
            },
            None if group.0 >= self.next_id || self.again.contains(&group) => {
                Begin::Answer(Finalized::Refused)
            }
            None => Begin::Answer(Finalized::Duplicate),
        }
    }

    /// The write ended: from now on the group can be leased, or, if it failed, finalized again.
    pub(crate) fn end_finalize(&mut self, group: GroupId, durable: bool) {
        if let Some(live) = self.live.get_mut(&group) {
            live.stage = if durable { Stage::Finalized } else { Stage::Claimed };
        }
    }

    pub(crate) fn abort(&mut self, group: GroupId, retry: bool) -> Result<(), BufferError> {
        match self.live.get(&group) {
            Some(Live { stage: Stage::Admitted | Stage::Claimed, .. }) => self.live.remove(&group),
            _ => {
                return Err(BufferError::WrongState {
                    group,
                    is: self.state(group),
                    needs: "admitted or claimed",
                });
            }
        };
        if retry {
            self.again.insert(group);
        } else {
            self.evicted += 1;
        }
        Ok(())
    }

    /// Tries to put together the batch of `step`, dropping what is over the bound.
    pub(crate) fn lease(&mut self, step: PolicyVersion) -> Result<Attempt, BufferError> {
        if let Some(groups) = self.leases.get(&step) {
            return Ok(Attempt { change: None, groups: Some(groups.iter().map(|(id, _)| *id).collect()) });
        }
        if step < self.next_step {
            return Err(BufferError::StepPassed { step, next: self.next_step, acked: self.acked });
        }
        self.next_step = step;
        let forget = self.drop_stale(step);
        let groups = self.take_batch(step);
        let rows: Vec<Row> =
            groups.iter().flatten().map(|&(id, oldest)| Row { id, oldest, step: Some(step) }).collect();
        if groups.is_some() {
            self.next_step = step.next();
        }
        let change =
            (groups.is_some() || !forget.is_empty()).then(|| Change { rows, forget, mark: self.mark() });
        let ids = groups.as_ref().map(|groups| groups.iter().map(|(id, _)| *id).collect());
        if let Some(groups) = groups {
            self.leases.insert(step, groups);
        }
        Ok(Attempt { change, groups: ids })
    }

    /// Forgets the groups of every step below `through`.
    pub(crate) fn ack(&mut self, through: PolicyVersion) -> Option<Change> {
        if through <= self.acked {
            return None;
        }
        let kept = self.leases.split_off(&through);
        let gone = std::mem::replace(&mut self.leases, kept);
        self.acked = through;
        self.next_step = self.next_step.max(through);
        let forget = gone.into_values().flatten().map(|(id, _)| id).collect();
        Some(Change { rows: Vec::new(), forget, mark: self.mark() })
    }

    /// Takes the newest lease back as if it had not been given.
    pub(crate) fn release(&mut self, step: PolicyVersion) -> Result<Change, BufferError> {
        let newest = self.leases.last_entry().filter(|lease| *lease.key() == step);
        let Some(lease) = newest else {
            return Err(BufferError::NotNewestLease { step, next: self.next_step });
        };
        let mut rows = Vec::new();
        for (id, oldest) in lease.remove() {
            self.live.insert(id, Live { stage: Stage::Finalized, version: oldest });
            rows.push(Row { id, oldest, step: None });
        }
        self.next_step = step;
        Ok(Change { rows, forget: Vec::new(), mark: self.mark() })
    }

    pub(crate) fn stats(&self) -> Stats {
        let count = |stages: &[Stage]| self.live.values().filter(|live| stages.contains(&live.stage)).count();
        let mut in_flight: Vec<_> = self
            .live
            .iter()
            .filter(|(_, live)| live.stage != Stage::Finalized)
            .map(|(id, live)| (*id, live.version))
            .collect();
        in_flight.sort_unstable_by_key(|&(id, version)| (version, id));
        in_flight.truncate(Stats::NAMED_IN_FLIGHT);
        let oldest = self.live.values().map(|live| live.version).min();
        Stats {
            admitted: count(&[Stage::Admitted]),
            claimed: count(&[Stage::Claimed, Stage::Writing]),
            finalized: count(&[Stage::Finalized]),
            leased: self.leases.values().map(Vec::len).sum(),
            again: self.again.len(),
            dropped_stale: self.dropped_stale,
            evicted: self.evicted,
            oldest_age: oldest.map_or(0, |version| version.staleness_at(self.next_step)),
            oldest_in_flight: in_flight,
            slots: self.config.slots(),
            slots_free: self.free(self.next_step),
            next_id: GroupId(self.next_id),
            next_step: self.next_step,
        }
    }

    /// Whether enough groups are finalized for a batch, so that a lease that waits does so for slow ones.
    pub(crate) fn held_for_slow(&self) -> bool {
        let finalized = self.live.values().filter(|live| live.stage == Stage::Finalized).count();
        finalized >= self.config.batch_groups
    }

    fn drop_stale(&mut self, step: PolicyVersion) -> Vec<GroupId> {
        let bound = self.config.max_staleness;
        let over = |live: &Live| live.stage == Stage::Finalized && live.version.staleness_at(step) > bound;
        let stale: Vec<GroupId> =
            self.live.iter().filter(|(_, live)| over(live)).map(|(id, _)| *id).collect();
        for id in &stale {
            self.live.remove(id);
            self.again.insert(*id);
        }
        self.dropped_stale += stale.len() as u64;
        stale
    }

    /// Removes a batch from the live groups, ordered by id, if one may leave for `step`.
    fn take_batch(&mut self, step: PolicyVersion) -> Option<Vec<(GroupId, PolicyVersion)>> {
        let finalized = self.live.iter().filter(|(_, live)| live.stage == Stage::Finalized);
        let mut batch: Vec<(GroupId, PolicyVersion)> =
            finalized.map(|(id, live)| (*id, live.version)).collect();
        if batch.len() < self.config.batch_groups {
            return None;
        }
        batch.sort_unstable_by_key(|&(id, version)| (version, id));
        batch.truncate(self.config.batch_groups);
        if self.config.on_stale == OnStale::Wait && !self.leaves_time(step, &batch) {
            return None;
        }
        batch.sort_unstable();
        for (id, _) in &batch {
            self.live.remove(id);
        }
        Some(batch)
    }

    /// Whether the steps after `step` can still train in time all that stays behind `batch`, or at least nothing
    /// that is still in flight would make a better batch for them.
    fn leaves_time(&self, step: PolicyVersion, batch: &[(GroupId, PolicyVersion)]) -> bool {
        let deadline = |version: PolicyVersion| version.0.saturating_add(self.config.max_staleness);
        let mut due: BTreeMap<u64, (usize, usize)> = BTreeMap::new();
        for live in self.live.values() {
            due.entry(deadline(live.version)).or_default().0 += 1;
        }
        for (_, version) in batch {
            due.entry(deadline(*version)).or_default().1 += 1;
        }
        let (mut all, mut taken) = (0usize, 0usize);
        due.range(step.0..).all(|(deadline, (groups, in_batch))| {
            all += groups;
            taken += in_batch;
            let later_steps = usize::try_from(deadline - step.0).unwrap_or(usize::MAX);
            let room = later_steps.saturating_mul(self.config.batch_groups);
            taken >= all.saturating_sub(room).min(self.config.batch_groups)
        })
    }

    fn mark(&self) -> Mark {
        let in_flight =
            self.live.iter().filter(|(_, live)| live.stage != Stage::Finalized).map(|(id, _)| *id);
        Mark {
            next_id: self.next_id,
            pending: in_flight.chain(self.again.iter().copied()).collect(),
            next_step: self.next_step,
            acked: self.acked,
        }
    }

    fn state(&self, group: GroupId) -> &'static str {
        match self.live.get(&group).map(|live| live.stage) {
            Some(Stage::Admitted) => "admitted",
            Some(Stage::Claimed) => "claimed",
            Some(Stage::Writing | Stage::Finalized) => "finalized",
            None if self.again.contains(&group) => "in line to be admitted again",
            None if group.0 >= self.next_id => "not yet admitted",
            None => "leased, trained or evicted",
        }
    }
}

#[cfg(test)]
mod tests;
