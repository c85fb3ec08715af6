//! Limits of admission below the bound on staleness, and the slots of samplers that are lost.
//!
//! Invariant: nothing here admits more than the bound does, and no limit is stored.

use super::Buffer;
use crate::BufferError;

impl Buffer {
    /// Admits groups as a bound on staleness of `versions` would, from now on; at most the bound of the configuration, which leases
    /// keep. Not stored: a buffer that is opened again admits as its bound says.
    ///
    /// # Errors
    /// A buffer that has failed.
    pub fn run_ahead(&self, versions: u64) -> Result<(), BufferError> {
        self.shared.ledger()?.run_ahead(versions);
        self.shared.notify();
        Ok(())
    }

    /// Gives slots to `most` samplers of other processes alone, those that have joined first; the others are a reserve, which takes the
    /// place of one that is lost or lets the hold of a group expire. Each finishes what it has begun. Samplers are counted from the first
    /// call on. Not stored: a buffer that is opened again gives slots to all.
    ///
    /// # Errors
    /// A buffer that has failed.
    pub fn limit_samplers(&self, most: usize) -> Result<(), BufferError> {
        self.shared.ledger()?.limit_samplers(most);
        self.shared.notify();
        Ok(())
    }

    /// The samplers of other processes that have asked for slots since the first call of [`Self::limit_samplers`], without those that
    /// were lost.
    ///
    /// # Errors
    /// A buffer that has failed.
    pub fn counted_samplers(&self) -> Result<usize, BufferError> {
        Ok(self.shared.ledger()?.counted_samplers())
    }
}
