//! An open database that can always be let go.
//!
//! Invariant: dropping it never panics. After a panic inside of redb its locks are poisoned, and closing it panics again;
//! were that to happen while another panic unwinds, the process would end.

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};

use redb::Database;

/// An open database.
pub(super) struct PanicSafeDatabase(
    /// `None` only while it is being dropped.
    Option<Database>,
);

impl PanicSafeDatabase {
    pub(super) fn new(database: Database) -> Self {
        Self(Some(database))
    }
}

impl Deref for PanicSafeDatabase {
    type Target = Database;

    fn deref(&self) -> &Database {
        self.0.as_ref().expect("only dropping takes the database out")
    }
}

impl DerefMut for PanicSafeDatabase {
    fn deref_mut(&mut self) -> &mut Database {
        self.0.as_mut().expect("only dropping takes the database out")
    }
}

impl Drop for PanicSafeDatabase {
    fn drop(&mut self) {
        let database = self.0.take();
        // Why it cannot be closed was told when it panicked first; the file is put in order when it is opened again.
        drop(catch_unwind(AssertUnwindSafe(|| drop(database))));
    }
}
