//! An open database whose drop never panics.
//!
//! Invariant: after a panic inside redb its locks are poisoned, and closing it panics again. If that happened while
//! another panic unwinds, the process would abort.

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};

use redb::Database;

/// An open database.
pub(super) struct PanicSafeDatabase(
    /// `None` only during drop.
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
        // The cause was reported with the first panic; the next opening repairs the file.
        drop(catch_unwind(AssertUnwindSafe(|| drop(database))));
    }
}
