//! The writes of one transaction. Invariant: executing a batch twice leaves the same records as executing it once, so a batch
//! whose `COMMIT` was not answered can be repeated. A repetition writes its payloads under new numbers; those of the first
//! time, if it was committed after all, have no row any more and go with their table.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;

use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::Type;
use trajectory::{Group, GroupId};

use super::session::{DatabaseFailure, WriterSession};
use super::{CachedGroup, PayloadIndex, QueuedWrite, StoredPayload, block_of, digest};
use crate::LeaseId;
use crate::store::{GroupRow, LeaseRow, LedgerChange, Watermarks, WriteCompletion};

/// A payload of at least this size, bytes, is deleted with its group; smaller ones are dropped with their table.
const DELETED_BYTES: u64 = 64 << 10;

/// Queued writes that are committed together.
pub(super) struct WriteBatch {
    changes: NetChange,
    groups: Vec<AppendedGroup>,
    done: Vec<WriteCompletion>,
}

/// A group to append.
struct AppendedGroup {
    row: GroupRow,
    key: Option<u128>,
    payload: Vec<u8>,
    group: Arc<Group>,
    place: StoredPayload,
}

/// The sum of changes in their order.
#[derive(Default)]
struct NetChange {
    rows: BTreeMap<GroupId, GroupRow>,
    forget: BTreeSet<GroupId>,
    leases: BTreeMap<LeaseId, Option<LeaseRow>>,
    keys: BTreeSet<GroupId>,
    keys_below: Option<GroupId>,
    /// `None` without a change.
    watermarks: Option<Watermarks>,
}

impl WriteBatch {
    pub(super) fn new(writes: Vec<QueuedWrite>) -> Self {
        let mut batch = Self { changes: NetChange::default(), groups: Vec::new(), done: Vec::new() };
        for write in writes {
            match write {
                QueuedWrite::Change(change, done) => {
                    batch.changes.add(change);
                    batch.done.push(done);
                }
                QueuedWrite::Append(append) => {
                    let (row, payload) = (append.row, append.payload);
                    let (block, bytes) = (block_of(row.oldest), payload.len() as u64);
                    let place = StoredPayload { block, number: 0, digest: digest(&payload), bytes };
                    // An append replaces the group of its id.
                    batch.groups.retain(|group| group.row.id != row.id);
                    batch.groups.push(AppendedGroup {
                        row,
                        key: append.key,
                        payload,
                        group: append.group,
                        place,
                    });
                    batch.done.push(append.done);
                }
            }
        }
        batch
    }

    /// The tables of payloads that it needs.
    pub(super) fn blocks(&self) -> BTreeSet<u64> {
        self.groups.iter().map(|group| group.place.block).collect()
    }

    /// Gives every payload the next number of `numbers`.
    pub(super) fn number(&mut self, numbers: &mut i64) {
        for group in &mut self.groups {
            group.place.number = *numbers;
            *numbers += 1;
        }
    }

    /// Executes the statements of the batch in the open transaction of `session`.
    ///
    /// A change concerns a group only after its append was acknowledged, so no change concerns the appends here. But a change
    /// may remove a dropped group whose id is appended again here, so changes come first.
    pub(super) async fn execute(
        &self,
        session: &WriterSession,
        large: BTreeMap<u64, Vec<i64>>,
    ) -> Result<(), DatabaseFailure> {
        self.changes.execute(session).await?;
        for (block, numbers) in large {
            let delete = format!("DELETE FROM payload_{block} WHERE number = ANY($1)");
            session.client.execute_typed(&delete, &[(&numbers, Type::INT8_ARRAY)]).await?;
        }
        if self.groups.is_empty() {
            return Ok(());
        }
        for block in self.blocks() {
            self.copy_payloads(session, block).await?;
        }
        let ids: Vec<i64> = self.groups.iter().map(|group| number(group.row.id.0)).collect();
        let blocks: Vec<i64> = self.groups.iter().map(|group| number(group.place.block)).collect();
        let numbers: Vec<i64> = self.groups.iter().map(|group| group.place.number).collect();
        let digests: Vec<i64> = self.groups.iter().map(|group| number(group.place.digest)).collect();
        let rows = self.groups.iter().map(|group| encoded(&group.row)).collect::<Result<Vec<_>, _>>()?;
        let put = &session.statements.put_groups;
        session.client.execute(put, &[&ids, &blocks, &numbers, &digests, &rows]).await?;
        let keyed = self.groups.iter().filter_map(|group| Some((group.row.id, group.key?)));
        let (ids, keys): (Vec<i64>, Vec<Vec<u8>>) =
            keyed.map(|(id, key)| (number(id.0), key.to_be_bytes().to_vec())).unzip();
        if !ids.is_empty() {
            session.client.execute(&session.statements.put_keys, &[&ids, &keys]).await?;
        }
        Ok(())
    }

    async fn copy_payloads(&self, session: &WriterSession, block: u64) -> Result<(), DatabaseFailure> {
        let copy = format!("COPY payload_{block} (number, body) FROM STDIN (FORMAT binary)");
        let sink = session.client.copy_in(&copy).await?;
        let mut writer = pin!(BinaryCopyInWriter::new(sink, &[Type::INT8, Type::BYTEA]));
        for group in self.groups.iter().filter(|group| group.place.block == block) {
            writer.as_mut().write(&[&group.place.number, &group.payload]).await?;
        }
        writer.finish().await?;
        Ok(())
    }

    /// Payloads of groups to forget that are deleted now, by table.
    pub(super) fn large_payloads(&self, stored: &PayloadIndex) -> BTreeMap<u64, Vec<i64>> {
        let mut large: BTreeMap<u64, Vec<i64>> = BTreeMap::new();
        let places = self.changes.forget.iter().filter_map(|id| stored.places.get(id));
        for place in places.filter(|place| place.bytes >= DELETED_BYTES) {
            large.entry(place.block).or_default().push(place.number);
        }
        large
    }

    /// Appended groups with their places, removed groups, and the completions in order.
    pub(super) fn into_parts(
        self,
    ) -> (Vec<(StoredPayload, CachedGroup)>, BTreeSet<GroupId>, Vec<WriteCompletion>) {
        let cached = |AppendedGroup { row, group, place, .. }: AppendedGroup| {
            let bytes = crate::payload::weight(&group);
            (place, CachedGroup { id: row.id, group, bytes })
        };
        (self.groups.into_iter().map(cached).collect(), self.changes.forget, self.done)
    }
}

impl NetChange {
    fn add(&mut self, change: LedgerChange) {
        let LedgerChange { rows, forget, leases, keys, keys_below, watermarks } = change;
        self.rows.extend(rows.into_iter().map(|row| (row.id, row)));
        for (_, id) in forget {
            self.rows.remove(&id);
            self.forget.insert(id);
        }
        self.leases.extend(leases);
        self.keys.extend(keys);
        self.keys_below = self.keys_below.max(keys_below);
        self.watermarks = Some(watermarks);
    }

    async fn execute(&self, session: &WriterSession) -> Result<(), DatabaseFailure> {
        let Some(watermarks) = &self.watermarks else { return Ok(()) };
        let (client, statements) = (&session.client, &session.statements);
        if !self.rows.is_empty() {
            let ids: Vec<i64> = self.rows.keys().map(|id| number(id.0)).collect();
            let rows = self.rows.values().map(encoded).collect::<Result<Vec<_>, _>>()?;
            client.execute(&statements.update_rows, &[&ids, &rows]).await?;
        }
        if !self.forget.is_empty() {
            let ids: Vec<i64> = self.forget.iter().map(|id| number(id.0)).collect();
            client.execute(&statements.forget, &[&ids]).await?;
        }
        let gone: Vec<i64> =
            self.leases.iter().filter(|(_, lease)| lease.is_none()).map(|(id, _)| number(id.0)).collect();
        if !gone.is_empty() {
            client.execute(&statements.remove_leases, &[&gone]).await?;
        }
        let there = self.leases.iter().filter_map(|(id, lease)| Some((number(id.0), lease.as_ref()?)));
        let (ids, leases): (Vec<i64>, Vec<&LeaseRow>) = there.unzip();
        if !ids.is_empty() {
            let leases = leases.into_iter().map(encoded).collect::<Result<Vec<_>, _>>()?;
            client.execute(&statements.put_leases, &[&ids, &leases]).await?;
        }
        if !self.keys.is_empty() {
            let ids: Vec<i64> = self.keys.iter().map(|id| number(id.0)).collect();
            client.execute(&statements.remove_keys, &[&ids]).await?;
        }
        if let Some(below) = self.keys_below {
            client.execute(&statements.remove_keys_below, &[&number(below.0)]).await?;
        }
        client.execute(&statements.put_watermarks, &[&encoded(watermarks)?]).await?;
        Ok(())
    }
}

/// The same 64 bits as the database has them.
pub(super) fn number(value: u64) -> i64 {
    value.cast_signed()
}

fn encoded(value: &impl serde::Serialize) -> Result<Vec<u8>, DatabaseFailure> {
    rmp_serde::to_vec_named(value)
        .map_err(|error| DatabaseFailure::Permanent(format!("a record cannot be encoded: {error}")))
}
