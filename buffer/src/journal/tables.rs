//! The tables of the journal and the rules of its format. Invariant: [`super::open`] reads them and [`super::writer`]
//! writes them.
//!
//! [`FORMAT`] is the one version number of everything in the file: rows, leases, watermarks, payloads. Formats from
//! [`OLDEST_FORMAT`] on are read and upgraded when they are opened; others are refused by name.
//! - A field that an older program may ignore keeps the number. It goes to the end, and has `#[serde(default)]`.
//! - A field or value that an older program would misread, such as a new state of a lease, increments the number. A
//!   new field still has a default, so files of earlier formats can be read.
//! - Incrementing the number adds a file of the previous format to the tests,
//!   `buffer/tests/journals/format_N.redb.zst`, written by the program of that format
//!   (`buffer/tests/buffer/formats.rs`).
//!
//! | format | change |
//! |---|---|
//! | 1 | never released |
//! | 2 | narrow rows beside payloads in segments |
//! | 3 | records of released leases; the acknowledgement that reported a lost lease |

use redb::TableDefinition;

/// `format` and `openings` to a little-endian u64, `mark` to [`Watermarks`](crate::store::Watermarks) in MessagePack.
pub(super) const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("meta");
/// Segment number to payloads.
pub(super) const SEGMENTS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("segments");
/// Oldest version and id to a [`StoredRow`](super::StoredRow) in MessagePack, an array of its fields: a new field
/// goes to the end and has a default.
pub(super) const ROWS: TableDefinition<'_, (u64, u64), &[u8]> = TableDefinition::new("rows");
/// Lease id to a [`LeaseRow`](crate::store::LeaseRow) in MessagePack with named fields.
pub(super) const LEASES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("leases");
/// Group id to the digest of its idempotency key.
pub(super) const KEYS: TableDefinition<'_, u64, u128> = TableDefinition::new("keys");

/// The format that is written.
pub(super) const FORMAT: u64 = 3;
/// The oldest format that can be read.
pub(super) const OLDEST_FORMAT: u64 = 2;
