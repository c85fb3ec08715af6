//! The cases of a store. Invariant: a case waits for a completion before it relies on a write, as the buffer does.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use trajectory::{GroupId, PolicyVersion};

use super::fixtures::{SOON, group, v};
use super::{RecordModel, StoreUnderTest};
use crate::payload::{FinishedGroup, IncomingGroup, PreparedGroup};
use crate::store::{
    AppendGroup, GroupRow, LeaseRow, LeaseState, LedgerChange, OpenedStore, Recovered, Store, Watermarks,
};
use crate::{BufferError, LeaseId};

/// A case: its name, and what it checks of a store without data.
pub(super) struct StoreCase {
    pub(super) name: &'static str,
    pub(super) check: fn(&dyn StoreUnderTest),
}

/// All cases.
pub(super) const CASES: &[StoreCase] = &[
    StoreCase {
        name: "groups_are_read_in_the_requested_order",
        check: groups_are_read_in_the_requested_order,
    },
    StoreCase {
        name: "an_append_replaces_the_group_of_its_id",
        check: an_append_replaces_the_group_of_its_id,
    },
    StoreCase { name: "a_removed_group_is_gone", check: a_removed_group_is_gone },
    StoreCase { name: "changes_take_effect_in_order", check: changes_take_effect_in_order },
    StoreCase { name: "random_writes_are_recovered_exactly", check: random_writes_are_recovered_exactly },
    StoreCase { name: "concurrent_appends_are_all_recovered", check: concurrent_appends_are_all_recovered },
    StoreCase {
        name: "a_dropped_store_leaves_no_caller_waiting",
        check: a_dropped_store_leaves_no_caller_waiting,
    },
    StoreCase { name: "a_second_opening_fences_the_first", check: a_second_opening_fences_the_first },
];

/// The result of a write, once it is there.
type Pending = Receiver<Result<(), BufferError>>;

/// Waits for a completion; panics if the store dropped it, or after the deadline.
fn wait(pending: &Pending) -> Result<(), BufferError> {
    pending.recv_timeout(SOON).expect("a working store completes every write")
}

/// A group as the buffer appends it.
fn finished(id: u64, sender: Option<&str>) -> FinishedGroup {
    let incoming = IncomingGroup::admitted(group(GroupId(id), v(id / 4)));
    let incoming = match sender {
        Some(sender) => incoming.sent_by(sender.to_owned()),
        None => incoming,
    };
    let prepared = PreparedGroup::new(incoming, false).expect("the group is valid");
    prepared.finish(GroupId(id), &[]).expect("the group can be encoded")
}

fn start_append(store: &dyn Store, finished: FinishedGroup, key: Option<u128>) -> Pending {
    let (done, pending) = channel();
    let FinishedGroup { row, payload, group, sender, .. } = finished;
    store.append(AppendGroup {
        row,
        key,
        payload,
        group: group.into(),
        sender,
        done: Box::new(move |result| drop(done.send(result))),
    });
    pending
}

fn append(store: &dyn Store, id: u64) -> GroupRow {
    let finished = finished(id, None);
    let row = finished.row.clone();
    wait(&start_append(store, finished, None)).expect("the append is acknowledged");
    row
}

fn start_commit(store: &dyn Store, change: LedgerChange) -> Pending {
    let (done, pending) = channel();
    store.check_capacity().expect("an idle store has capacity");
    store.commit(change, Box::new(move |result| drop(done.send(result))));
    pending
}

fn commit(store: &dyn Store, change: LedgerChange) {
    wait(&start_commit(store, change)).expect("the change is acknowledged");
}

fn open(data: &dyn StoreUnderTest) -> OpenedStore {
    data.open().expect("data that is not open can be opened")
}

fn sorted(mut recovered: Recovered) -> Recovered {
    recovered.rows.sort_unstable_by_key(|row| row.id);
    recovered.leases.sort_unstable_by_key(|(id, _)| *id);
    recovered.keys.sort_unstable();
    recovered
}

fn lease_row(groups: Vec<GroupId>, state: LeaseState) -> LeaseRow {
    let (consumer, step, hold_ms) = ("trainer".to_owned(), PolicyVersion(3), Some(1000));
    LeaseRow { consumer, step, named: true, groups, hold_ms, state, named_through: None }
}

fn groups_are_read_in_the_requested_order(data: &dyn StoreUnderTest) {
    let opened = open(data);
    assert_eq!((opened.recovered, opened.opening > 0), (Recovered::default(), true), "it begins empty");
    let store = &*opened.store;
    for id in 0..5 {
        let sender = (id == 1).then_some("10.0.0.1");
        wait(&start_append(store, finished(id, sender), None)).expect("the append is acknowledged");
    }
    let wanted = [3, 1, 4].map(GroupId);
    for last_read in [false, true] {
        let read = store.read(&wanted, last_read).expect("stored groups can be read");
        assert!(read.iter().zip(wanted).all(|(read, id)| **read == group(id, v(id.0 / 4))));
    }
    assert_eq!(store.sender(GroupId(1)).as_deref(), Some("10.0.0.1"));
    assert_eq!(store.sender(GroupId(2)), None);
    assert!(matches!(store.read(&[GroupId(9)], false), Err(BufferError::Gone { group: GroupId(9) })));
    assert!(store.failure().is_none());
}

fn an_append_replaces_the_group_of_its_id(data: &dyn StoreUnderTest) {
    let opened = open(data);
    append(&*opened.store, 4);
    let mut second = finished(4, None);
    second.group.task.id.0 = 99;
    let encoded =
        PreparedGroup::new(IncomingGroup::admitted(second.group), false).expect("the group is valid");
    let second = encoded.finish(GroupId(4), &[]).expect("the group can be encoded");
    let expected = second.row.clone();
    wait(&start_append(&*opened.store, second, None)).expect("the append is acknowledged");
    assert_eq!(opened.store.read(&[GroupId(4)], false).expect("it is stored")[0].task.id.0, 99);
    drop(opened);
    if data.is_durable() {
        assert_eq!(open(data).recovered.rows, [expected]);
    }
}

fn a_removed_group_is_gone(data: &dyn StoreUnderTest) {
    let opened = open(data);
    let rows: Vec<GroupRow> = (0..3).map(|id| append(&*opened.store, id)).collect();
    commit(&*opened.store, LedgerChange { forget: vec![(rows[1].oldest, rows[1].id)], ..Default::default() });
    assert!(matches!(opened.store.read(&[GroupId(1)], false), Err(BufferError::Gone { .. })));
    assert_eq!(opened.store.sender(GroupId(1)), None);
    assert_eq!(opened.store.read(&[GroupId(0), GroupId(2)], false).expect("the others stay").len(), 2);
}

/// Changes are queued without a wait between them; the last one wins.
fn changes_take_effect_in_order(data: &dyn StoreUnderTest) {
    let opened = open(data);
    let row = append(&*opened.store, 0);
    let changes = (1..=50).map(|uses| LedgerChange {
        rows: vec![GroupRow { uses, ..row.clone() }],
        leases: vec![(LeaseId(0), (uses % 2 == 0).then(|| lease_row(vec![row.id], LeaseState::Open)))],
        watermarks: Watermarks { next_id: u64::from(uses), ..Watermarks::default() },
        ..LedgerChange::default()
    });
    let pending: Vec<Pending> = changes.map(|change| start_commit(&*opened.store, change)).collect();
    pending.iter().for_each(|pending| wait(pending).expect("the change is acknowledged"));
    drop(opened);
    if data.is_durable() {
        let Recovered { rows, leases, watermarks, .. } = open(data).recovered;
        assert_eq!((rows[0].uses, leases.len(), watermarks.next_id), (50, 1, 50));
    }
}

/// Appends, row updates, removals, leases and keys at random, with openings between them.
fn random_writes_are_recovered_exactly(data: &dyn StoreUnderTest) {
    if !data.is_durable() {
        return;
    }
    let (mut rng, mut model, mut opened) = (ChaCha8Rng::seed_from_u64(7), RecordModel::default(), open(data));
    let (mut next_id, mut opening) = (0, opened.opening);
    for _ in 0..300 {
        match rng.next_u32() % 20 {
            0 => {
                drop(opened);
                opened = open(data);
                assert!(opened.opening > opening, "openings are counted");
                opening = opened.opening;
                assert_eq!(sorted(opened.recovered.clone()), model.recovered());
                let ids: Vec<GroupId> = model.rows.keys().copied().collect();
                let read = opened.store.read(&ids, false).expect("recovered groups can be read");
                assert!(read.iter().zip(&ids).all(|(read, id)| **read == group(*id, v(id.0 / 4))));
            }
            1..10 => {
                let key = rng.next_u32().is_multiple_of(2).then_some(u128::from(next_id) << 70);
                let finished = finished(next_id, None);
                model.append(finished.row.clone(), key);
                wait(&start_append(&*opened.store, finished, key)).expect("the append is acknowledged");
                next_id += 1;
            }
            _ => {
                let change = random_change(&mut rng, &model, next_id);
                model.commit(change.clone());
                commit(&*opened.store, change);
            }
        }
    }
}

fn random_change(rng: &mut ChaCha8Rng, model: &RecordModel, next_id: u64) -> LedgerChange {
    let mut change = LedgerChange { watermarks: model.watermarks.clone(), ..LedgerChange::default() };
    change.watermarks.next_id = next_id;
    change.watermarks.pending = vec![(next_id, u64::from(rng.next_u32()))];
    for row in model.rows.values() {
        match rng.next_u32() % 8 {
            0 => change.forget.push((row.oldest, row.id)),
            1 => change.rows.push(GroupRow { uses: row.uses + 1, ..row.clone() }),
            2 => change.keys.push(row.id),
            _ => {}
        }
    }
    let lease = LeaseId(u64::from(rng.next_u32() % 4));
    let groups = change.rows.iter().map(|row| row.id).collect();
    let state = [LeaseState::Open, LeaseState::Expired, LeaseState::Lost, LeaseState::Released];
    let row = lease_row(groups, state[(rng.next_u32() % 4) as usize]);
    change.leases.push((lease, (!rng.next_u32().is_multiple_of(3)).then_some(row)));
    change.keys_below = rng.next_u32().is_multiple_of(10).then_some(GroupId(next_id / 2));
    change
}

/// Many writers at a time, as group commit has them.
fn concurrent_appends_are_all_recovered(data: &dyn StoreUnderTest) {
    let opened = open(data);
    let store = &*opened.store;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || (0..20).for_each(|n| drop(append(store, thread * 20 + n))));
        }
    });
    let ids: Vec<GroupId> = (0..160).map(GroupId).collect();
    assert_eq!(store.read(&ids, false).expect("all are stored").len(), 160);
    drop(opened);
    if data.is_durable() {
        let rows = sorted(open(data).recovered).rows;
        assert_eq!(rows.iter().map(|row| row.id).collect::<Vec<_>>(), ids);
    }
}

fn a_dropped_store_leaves_no_caller_waiting(data: &dyn StoreUnderTest) {
    let opened = open(data);
    let pending: Vec<Pending> =
        (0..50).map(|id| start_append(&*opened.store, finished(id, None), None)).collect();
    drop(opened);
    let mut acknowledged = Vec::new();
    for (id, pending) in (0..).map(GroupId).zip(pending) {
        match pending.recv_timeout(SOON) {
            Ok(Ok(())) => acknowledged.push(id),
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => panic!("the append of {id} was never completed"),
        }
    }
    if data.is_durable() {
        let rows = open(data).recovered.rows;
        let missing = acknowledged.iter().find(|id| !rows.iter().any(|row| row.id == **id));
        assert_eq!(missing, None, "it was acknowledged and is not recovered");
    }
}

/// Either the second opening is refused, or the first acknowledges nothing any more.
fn a_second_opening_fences_the_first(data: &dyn StoreUnderTest) {
    if !data.is_durable() {
        return;
    }
    let first = open(data);
    append(&*first.store, 0);
    let Ok(second) = data.open() else { return };
    let late = start_append(&*first.store, finished(1, None), None).recv_timeout(SOON);
    assert!(!matches!(late, Ok(Ok(()))), "a deposed store acknowledged a write");
    assert!(first.store.failure().is_some(), "a deposed store says so");
    append(&*second.store, 2);
}
