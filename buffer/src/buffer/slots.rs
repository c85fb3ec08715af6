//! Who gets slots, beside what the bound on staleness allows.
//!
//! Invariant: nothing here gives more slots than the bound does, and nothing is stored.

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
    /// place of one that is lost. What they have begun they finish. Samplers are counted from the first call on. Not stored: a buffer that
    /// is opened again gives slots to all.
    ///
    /// # Errors
    /// A buffer that has failed.
    pub fn limit_holders(&self, most: usize) -> Result<(), BufferError> {
        self.shared.ledger()?.limit_holders(most);
        self.shared.notify();
        Ok(())
    }

    /// The samplers of other processes that have asked for slots since the first call of [`Self::limit_holders`], without those that
    /// were lost.
    ///
    /// # Errors
    /// A buffer that has failed.
    pub fn holders(&self) -> Result<usize, BufferError> {
        Ok(self.shared.ledger()?.holders())
    }

    /// Revokes all groups in flight of `holder`, whose process has ended, and queues them for re-admission; their
    /// number.
    ///
    /// # Errors
    /// A failed buffer.
    pub fn abandon(&self, holder: u64) -> Result<usize, BufferError> {
        let abandoned = self.shared.ledger()?.abandon(holder, self.shared.now());
        self.shared.notify();
        Ok(abandoned)
    }
}
