//! From batches to new policy versions.
