//! The tables of the journal. Invariant: what is in them is read by [`super::open`] and written by [`super::writer`].

use redb::TableDefinition;

/// `format` and `openings` to a little-endian u64, `mark` to a [`Mark`](crate::ledger::Mark) in MessagePack.
pub(super) const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
/// Number to payloads.
pub(super) const SEGMENTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("segments");
/// Oldest version and id to a [`StoredRow`](super::StoredRow) in MessagePack, its fields in their order: a new one goes to
/// the end and has a default.
pub(super) const ROWS: TableDefinition<'_, (u64, u64), &[u8]> = TableDefinition::new("rows");
/// Id to a [`LeaseRow`](crate::ledger::LeaseRow) in MessagePack with named fields.
pub(super) const LEASES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("leases");
/// Id to the digest of a key.
pub(super) const KEYS: TableDefinition<'_, u64, u128> = TableDefinition::new("keys");

/// Raised whenever an older program could misread what a newer one wrote. Format 1 was never released.
pub(super) const FORMAT: u64 = 2;
