//! All calls of samplers, trainers and people to a buffer, in random order, and what follows from its answers.
//!
//! Invariant: [`Workload::check`] reads the buffer through its public interface only, and accepts no content that
//! contradicts an answer. A call that was answered has its full effect. A call that was cut off has its full effect or
//! none. Everything else is unchanged. Groups that were dropped over the bound on staleness are not checked further.

use std::collections::{BTreeMap, BTreeSet};

use buffer::{
    AdmitRequest, Buffer, BufferConfig, BufferError, Consumer, Finalized, GroupFilter, GroupState,
    LeaseEntry, LeaseId, LeaseRequest, OnStale, Order, Producer, WithPayload,
};
use trajectory::{Group, GroupId, PolicyVersion};

use super::simulated_disk::TestRng;
use super::{NOW, group_of};

/// The consumer that names its steps.
const TRAINER: &str = "trainer";
/// The consumer that does not.
const SCORER: &str = "scorer";
/// Appends that are made at the same time.
const TOGETHER: usize = 4;

/// What stands in a buffer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Content {
    /// Groups with their uses.
    pub(crate) groups: BTreeMap<GroupId, (Group, u32)>,
    pub(crate) leases: BTreeMap<LeaseId, OpenLease>,
}

/// A lease that was not acknowledged.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OpenLease {
    consumer: String,
    step: PolicyVersion,
    groups: Vec<GroupId>,
}

impl Content {
    pub(crate) fn of(buffer: &Buffer) -> Result<Self, BufferError> {
        let mut content = Self::default();
        for entry in buffer.list(&GroupFilter::default(), None, usize::MAX)?.groups {
            if matches!(entry.state, GroupState::Finalized | GroupState::Leased) {
                let WithPayload { entry, payload } = buffer.get(entry.id)?.expect("it was listed");
                let group = (*payload.expect("it is finalized")).clone();
                content.groups.insert(entry.id, (group, entry.uses));
            }
        }
        for lease in buffer.leases(None)? {
            let LeaseEntry { consumer, step, groups, .. } = lease;
            content.leases.insert(lease.id, OpenLease { consumer, step, groups });
        }
        Ok(content)
    }

    fn is_leased(&self, group: GroupId) -> bool {
        self.leases.values().any(|lease| lease.groups.contains(&group))
    }

    /// A use of every group of `lease` is over.
    fn ack(&mut self, lease: LeaseId, max_uses: u32) {
        let Some(OpenLease { groups, .. }) = self.leases.remove(&lease) else { return };
        for group in groups {
            let uses = self.groups.get_mut(&group).map_or(0, |(_, uses)| {
                *uses += 1;
                *uses
            });
            if uses >= max_uses && !self.is_leased(group) {
                self.groups.remove(&group);
            }
        }
    }

    fn evict(&mut self, group: GroupId) {
        self.groups.remove(&group);
        self.leases.values_mut().for_each(|lease| lease.groups.retain(|other| *other != group));
    }
}

/// A group on its way into the buffer.
#[derive(Clone, Debug)]
enum AppendOutcome {
    Admitted(Group),
    Keyed(String, Group),
}

/// What was cut off.
#[derive(Debug, Default)]
enum Doubt {
    #[default]
    Nothing,
    /// A call that leaves this content, if it took effect.
    Call(Content),
    /// A lease for this consumer.
    Lease(&'static str),
}

/// The workload and all answers of the buffer.
#[derive(Debug)]
pub(crate) struct Workload {
    dice: TestRng,
    config: BufferConfig,
    /// What is in the buffer, by its own word.
    content: Content,
    /// The lowest and the highest version that the buffer can be at.
    version: [PolicyVersion; 2],
    /// Over the bound, so that any lease may let them go.
    stale: BTreeSet<GroupId>,
    /// Acknowledged, evicted or stale, and gone.
    gone: BTreeSet<GroupId>,
    keys: BTreeMap<String, GroupId>,
    groups_made: u64,
    doubt: Doubt,
    cut_off: Vec<AppendOutcome>,
    /// Leases ever given.
    given: BTreeSet<LeaseId>,
}

impl Workload {
    pub(crate) fn new(seed: u64) -> Self {
        let roomy = BufferConfig { compact_above: 32 << 10, ..BufferConfig::new(4, 1000) };
        let tight = BufferConfig { batch_groups: 3, max_staleness: 2, on_stale: OnStale::Drop, ..roomy };
        let replay = BufferConfig { max_uses: 2, order: Order::Uniform, on_stale: OnStale::Drop, ..roomy };
        let mut dice = TestRng(seed);
        Self {
            config: [roomy, tight, replay][dice.below(3)],
            dice,
            content: Content::default(),
            version: [PolicyVersion(0); 2],
            stale: BTreeSet::new(),
            gone: BTreeSet::new(),
            keys: BTreeMap::new(),
            groups_made: 0,
            doubt: Doubt::Nothing,
            cut_off: Vec::new(),
            given: BTreeSet::new(),
        }
    }

    pub(crate) fn config(&self) -> BufferConfig {
        self.config
    }

    pub(crate) fn dice(&mut self) -> &mut TestRng {
        &mut self.dice
    }

    /// Makes `calls` calls, until one fails; the effect of that one is in doubt.
    pub(crate) fn run(&mut self, buffer: &Buffer, calls: usize) -> Result<(), BufferError> {
        (0..calls).try_for_each(|_| self.ask(buffer))
    }

    fn ask(&mut self, buffer: &Buffer) -> Result<(), BufferError> {
        match self.dice.below(16) {
            0..=4 => {
                let appends = (0..=self.dice.below(TOGETHER)).map(|_| self.keyed()).collect();
                self.append(buffer, appends)
            }
            5 | 6 => self.generate(buffer),
            7 | 8 => self.lease(buffer, TRAINER),
            9 => self.lease(buffer, SCORER),
            10 => self.end_lease(buffer, true),
            11 => self.end_lease(buffer, false),
            12 => self.ack_through(buffer),
            13 => self.evict(buffer),
            14 => self.evict_below(buffer),
            _ => self.advance(buffer),
        }
    }

    /// Some are small, some larger than a page of the disk, a few of many pages.
    fn make_group(&mut self, id: GroupId) -> Group {
        let tokens = [3, 40, 700, 9000][self.dice.below(16).saturating_sub(12)];
        self.groups_made += 1;
        group_of(id, self.version[0], self.groups_made, tokens)
    }

    fn keyed(&mut self) -> AppendOutcome {
        let group = self.make_group(GroupId(0));
        AppendOutcome::Keyed(format!("key {}", self.groups_made), group)
    }

    /// Stores groups at the same time, so that they share commits.
    fn append(&mut self, buffer: &Buffer, appends: Vec<AppendOutcome>) -> Result<(), BufferError> {
        let store = |append: &AppendOutcome| match append {
            AppendOutcome::Admitted(group) => {
                buffer.finalize(group.clone()).map(|answer| (answer, Some(group.id)))
            }
            AppendOutcome::Keyed(key, group) => {
                buffer.submit(key, group.clone()).map(|submitted| (submitted.answer, submitted.group))
            }
        };
        let answers: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = appends.iter().map(|append| scope.spawn(|| store(append))).collect();
            threads.into_iter().map(|thread| thread.join().expect("appending does not panic")).collect()
        });
        let mut result = Ok(());
        for (append, answer) in appends.into_iter().zip(answers) {
            match answer {
                Ok((Finalized::Accepted, id)) => {
                    self.accepted(append, id.expect("an accepted group has an id"))
                }
                Ok((Finalized::Duplicate, _)) => panic!("{append:?} was never stored before"),
                Ok((Finalized::Stale | Finalized::Full, _)) => {}
                Err(error) => {
                    self.cut_off.push(append);
                    result = Err(error);
                }
            }
        }
        result
    }

    fn accepted(&mut self, append: AppendOutcome, id: GroupId) {
        let group = match append {
            AppendOutcome::Admitted(group) => group,
            AppendOutcome::Keyed(key, group) => {
                self.keys.insert(key, id);
                Group { id, ..group }
            }
        };
        // What was over the bound is generated again under the same id.
        self.stale.remove(&id);
        let before = self.content.groups.insert(id, (group, 0));
        assert!(before.is_none() && !self.gone.contains(&id), "{id} was given to two groups");
    }

    /// Admits and claims groups as a sampler, and finalizes or aborts them.
    fn generate(&mut self, buffer: &Buffer) -> Result<(), BufferError> {
        let limit = 1 + self.dice.below(3);
        let served = self.version[0];
        let ids = buffer.admit(AdmitRequest { served, limit, hold: None, holder: None }, NOW)?;
        let mut appends = Vec::new();
        for id in ids {
            buffer.claim(id, served)?;
            match self.dice.below(6) {
                0 => buffer.abort(id, true)?,
                1 => buffer.abort(id, false)?,
                _ => appends.push(AppendOutcome::Admitted(self.make_group(id))),
            }
        }
        self.append(buffer, appends)
    }

    fn lease(&mut self, buffer: &Buffer, consumer: &'static str) -> Result<(), BufferError> {
        let mut request = LeaseRequest::step(consumer, self.version[0]);
        if consumer == SCORER {
            let groups = Some(1 + self.dice.below(3));
            request = LeaseRequest { step: None, groups, at_least: Some(1), ..request };
        }
        self.drop_stale();
        match buffer.lease(&request, NOW) {
            Ok(lease) => {
                let ids: Vec<GroupId> = lease.groups.iter().map(|group| group.id).collect();
                for group in &lease.groups {
                    assert_eq!(self.content.groups.get(&group.id).map(|(kept, _)| kept), Some(&**group));
                }
                let new = OpenLease { consumer: consumer.to_owned(), step: lease.step, groups: ids.clone() };
                let before = self.content.leases.insert(lease.id, new);
                if self.given.insert(lease.id) {
                    assert!(before.is_none(), "{} is the name of two leases", lease.id);
                } else {
                    assert_eq!(
                        before.expect("it is still there").groups,
                        ids,
                        "another batch for the same step"
                    );
                }
                Ok(())
            }
            Err(BufferError::LeaseTimeout { .. } | BufferError::StepPassed { .. }) => Ok(()),
            Err(error) => {
                self.doubt = Doubt::Lease(consumer);
                Err(error)
            }
        }
    }

    /// From the next lease on, what is over the bound may be gone.
    fn drop_stale(&mut self) {
        let Some(bound) = self.version[1].0.checked_sub(self.config.max_staleness) else { return };
        let content = &mut self.content;
        let over = |(id, (group, _)): (&GroupId, &(Group, u32))| {
            (group.oldest_version()? < PolicyVersion(bound)).then_some(*id)
        };
        let over: Vec<GroupId> = content.groups.iter().filter_map(over).collect();
        for id in over.into_iter().filter(|id| !content.is_leased(*id)).collect::<Vec<_>>() {
            content.groups.remove(&id);
            self.stale.insert(id);
            // Dropped untrained, it can be sent again under its key.
            self.keys.retain(|_, known| *known != id);
        }
    }

    /// Acknowledges or releases one lease.
    fn end_lease(&mut self, buffer: &Buffer, trained: bool) -> Result<(), BufferError> {
        let leases: Vec<LeaseId> = self.content.leases.keys().copied().collect();
        if leases.is_empty() {
            return Ok(());
        }
        let lease = leases[self.dice.below(leases.len())];
        let mut after = self.content.clone();
        if trained {
            after.ack(lease, self.config.max_uses);
            self.settle(after, || buffer.ack(lease))
        } else {
            after.leases.remove(&lease);
            self.settle(after, || buffer.release(lease))
        }
    }

    fn ack_through(&mut self, buffer: &Buffer) -> Result<(), BufferError> {
        let through = self.version[0];
        let mut after = self.content.clone();
        let done =
            self.content.leases.iter().filter(|(_, lease)| lease.consumer == TRAINER && lease.step < through);
        done.for_each(|(lease, _)| after.ack(*lease, self.config.max_uses));
        self.settle(after, || buffer.ack_through(TRAINER, through))
    }

    fn evict(&mut self, buffer: &Buffer) -> Result<(), BufferError> {
        let groups: Vec<GroupId> = self.content.groups.keys().copied().collect();
        if groups.is_empty() {
            return Ok(());
        }
        let group = groups[self.dice.below(groups.len())];
        let mut after = self.content.clone();
        after.evict(group);
        self.settle(after, || buffer.evict(group).map(|found| assert!(found, "{group} is not there")))
    }

    fn evict_below(&mut self, buffer: &Buffer) -> Result<(), BufferError> {
        let version = PolicyVersion(self.version[0].0.saturating_sub(1));
        let mut after = self.content.clone();
        after
            .groups
            .retain(|id, (group, _)| group.oldest_version() >= Some(version) || self.content.is_leased(*id));
        self.settle(after, || buffer.evict_below(version).map(drop))
    }

    fn advance(&mut self, buffer: &Buffer) -> Result<(), BufferError> {
        let next = self.version[0].next();
        self.version[1] = next;
        self.settle(self.content.clone(), || buffer.set_version(next, false))?;
        self.version[0] = next;
        Ok(())
    }

    /// Asks for what leads to `after`.
    fn settle(
        &mut self,
        after: Content,
        call: impl FnOnce() -> Result<(), BufferError>,
    ) -> Result<(), BufferError> {
        if let Err(error) = call() {
            self.doubt = Doubt::Call(after);
            return Err(error);
        }
        let before = std::mem::replace(&mut self.content, after);
        self.gone.extend(before.groups.into_keys().filter(|id| !self.content.groups.contains_key(id)));
        Ok(())
    }

    /// Compares a buffer that was opened again with all answers, and takes its content as the expected one.
    pub(crate) fn check(&mut self, buffer: &Buffer) {
        let mut found = Content::of(buffer).expect("what was written can be read");
        let version = buffer.stats().expect("the buffer works").policy_version;
        let [least, most] = self.version;
        assert!(least <= version && version <= most, "the version is {version}, not {least} to {most}");
        self.version = [version; 2];

        let mut stored_late = Vec::new();
        for append in std::mem::take(&mut self.cut_off) {
            let stored = self.find_cut_off(&append, &found);
            stored_late.extend(stored.and_then(|id| found.groups.remove_entry(&id)));
            let left = self.find_left_over(&append, &found);
            self.stale.extend(left);
            self.ask_again(buffer, append, stored.or(left));
        }
        self.stale.retain(|id| found.groups.remove(id).is_some());
        match std::mem::take(&mut self.doubt) {
            Doubt::Call(after) if found == after => drop(self.settle(after, || Ok(()))),
            Doubt::Lease(consumer) => {
                let new = found.leases.iter().filter(|(id, _)| !self.content.leases.contains_key(id));
                let new: Vec<_> = new.map(|(id, lease)| (*id, lease.clone())).collect();
                assert!(new.len() <= 1, "{new:?} cannot come from one call");
                for (id, lease) in new {
                    assert!(
                        lease.consumer == consumer && self.given.insert(id),
                        "{id} {lease:?} was never asked for"
                    );
                    let free = |group: &GroupId| self.content.groups.contains_key(group);
                    assert!(
                        lease.groups.iter().all(free),
                        "{id} has groups that were never stored: {lease:?}"
                    );
                    self.content.leases.insert(id, lease);
                }
            }
            Doubt::Call(_) | Doubt::Nothing => {}
        }
        assert_eq!(differences(&self.content, &found), Vec::<String>::new(), "not what was acknowledged");
        self.content.groups.extend(stored_late);
        self.adopt_answers(buffer);
        self.check_promises(buffer);
    }

    /// The id under which a group that was cut off is stored, if it is.
    fn find_cut_off(&self, append: &AppendOutcome, found: &Content) -> Option<GroupId> {
        let new = |id: &GroupId| !self.content.groups.contains_key(id);
        let (AppendOutcome::Admitted(group) | AppendOutcome::Keyed(_, group)) = append;
        let same = |(id, (stored, _)): (&GroupId, &(Group, u32))| {
            (new(id) && *stored == Group { id: *id, ..group.clone() }).then_some(*id)
        };
        found.groups.iter().find_map(same)
    }

    /// The id of a group that was cut off, if an older one is still stored under it: it was dropped over the bound and
    /// generated again, and the power failed before the disk had heard of either.
    fn find_left_over(&self, append: &AppendOutcome, found: &Content) -> Option<GroupId> {
        let AppendOutcome::Admitted(Group { id, .. }) = append else { return None };
        let left = !self.content.groups.contains_key(id) && found.groups.contains_key(id);
        left.then_some(*id)
    }

    /// Repeats a call that got no answer: a stored group is not stored twice.
    fn ask_again(&mut self, buffer: &Buffer, append: AppendOutcome, stored: Option<GroupId>) {
        let (answer, id) = match &append {
            AppendOutcome::Admitted(group) => match buffer.finalize(group.clone()) {
                // Admissions are not kept; this one is made again.
                Err(BufferError::UnknownGroup { .. }) if stored.is_none() => return,
                answer => (answer.expect("it works again"), Some(group.id)),
            },
            AppendOutcome::Keyed(key, group) => {
                let submitted = buffer.submit(key, group.clone()).expect("it works again");
                (submitted.answer, submitted.group)
            }
        };
        match stored {
            Some(_) => assert_eq!((answer, id), (Finalized::Duplicate, stored), "{append:?}"),
            None => assert_ne!(answer, Finalized::Duplicate, "{append:?} is not stored"),
        }
        if let (AppendOutcome::Keyed(key, _), Some(id)) = (append, id) {
            self.keys.insert(key, id);
        }
    }

    /// Takes over the answers to the repeated calls.
    fn adopt_answers(&mut self, buffer: &Buffer) {
        let now = Content::of(buffer).expect("what was written can be read");
        let new = now.groups.into_iter().filter(|(id, _)| !self.stale.contains(id));
        self.content.groups.extend(new);
    }

    /// What was answered is answered alike again.
    fn check_promises(&mut self, buffer: &Buffer) {
        for (id, OpenLease { consumer, step, groups }) in self.content.leases.clone() {
            if consumer != TRAINER {
                continue;
            }
            let lease = buffer.lease(&LeaseRequest::step(consumer, step), NOW).expect("it was leased before");
            let again: Vec<GroupId> = lease.groups.iter().map(|group| group.id).collect();
            assert_eq!((lease.id, &again), (id, &groups), "another batch for {step} than before");
            assert!(lease.groups.iter().all(|group| self.content.groups[&group.id].0 == **group));
        }
        for (key, id) in self.keys.iter().rev().take(3) {
            let submitted = buffer.submit(key, group_of(*id, self.version[0], 0, 1)).expect("it works again");
            assert_eq!((submitted.answer, submitted.group), (Finalized::Duplicate, Some(*id)), "{key}");
        }
    }
}

/// In words what `found` has else than `expected`.
pub(crate) fn differences(expected: &Content, found: &Content) -> Vec<String> {
    let mut differences = Vec::new();
    let ids: BTreeSet<&GroupId> = expected.groups.keys().chain(found.groups.keys()).collect();
    for id in ids {
        match (expected.groups.get(id), found.groups.get(id)) {
            (Some(_), None) => differences.push(format!("{id} is lost")),
            (None, Some(_)) => differences.push(format!("{id} should not be there")),
            (Some((a, uses)), Some((b, found))) if a != b || uses != found => {
                differences
                    .push(format!("{id} is another: {uses} uses, found {found}, same group: {}", a == b));
            }
            _ => {}
        }
    }
    let ids: BTreeSet<&LeaseId> = expected.leases.keys().chain(found.leases.keys()).collect();
    for id in ids {
        let (a, b) = (expected.leases.get(id), found.leases.get(id));
        if a != b {
            differences.push(format!("{id} was {a:?}, is {b:?}"));
        }
    }
    differences
}
