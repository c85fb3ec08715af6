//! The tables of the journal and the rule of its format. Invariant: what is in them is read by [`super::open`] and written by
//! [`super::writer`].
//!
//! One number, [`FORMAT`], is the format of all that is in the file: rows, leases, mark and payloads of groups. Formats from
//! [`OLDEST_FORMAT`] on are read, and become the current one when they are opened; others are refused by name.
//! - A field that an older program may ignore keeps the number: it goes to the end, and has `#[serde(default)]`.
//! - A field or value that an older program would misread, such as a new state of a lease, raises it. A new field still has
//!   a default, so that files of the formats before are read.
//! - A raised number brings a file of the format before along, `buffer/tests/journals/format_N.redb.zst`, written by the
//!   program that still had it (`buffer/tests/buffer/formats.rs`).
//!
//! | format | what came with it |
//! |---|---|
//! | 1 | never released |
//! | 2 | narrow rows beside payloads in segments |
//! | 3 | released leases are remembered; which acknowledgement named a lost lease |

use redb::TableDefinition;

/// `format` and `openings` to a little-endian u64, `mark` to a [`Watermarks`](crate::ledger::Mark) in MessagePack.
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

/// What is written.
pub(super) const FORMAT: u64 = 3;
/// The oldest that is read.
pub(super) const OLDEST_FORMAT: u64 = 2;
