//! From batches to new policy versions: advantages, losses, packing, optimizer, checkpoints.
