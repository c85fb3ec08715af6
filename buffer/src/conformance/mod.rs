//! The conformance suite of stores and buffers, for tests; a store in another crate runs it too, with the feature
//! `conformance`.
//!
//! - [`check_store`]: the guarantees of [`Store`](crate::store::Store), then the contract of a buffer over that store
//! - [`check_contract`]: the contract of [`Producer`] and [`Consumer`] alone, such as for a client of a served buffer
//! - [`fixtures`]: the groups and calls that the cases share
//! - `database`, with the feature `postgres`: a server for tests
//!
//! Invariant: the cases are independent of each other; each gets a buffer or a store of its own, without data.
//!
//! ```
//! use buffer::BufferError;
//! use buffer::conformance::{StoreUnderTest, check_store};
//! use buffer::store::OpenedStore;
//!
//! /// Where one store has its data: a directory, or a schema of a database.
//! struct Schema(String);
//!
//! impl StoreUnderTest for Schema {
//!     fn open(&self) -> Result<OpenedStore, BufferError> {
//!         // Connect to `self.0`, increment its epoch, read all records.
//! #       Ok(buffer::store::open_memory())
//!     }
//! }
//!
//! fn the_database_store_conforms() {
//!     check_store(|case| Schema(format!("test_{case}")));
//! }
//! ```

mod contract;
#[cfg(feature = "postgres")]
pub mod database;
pub mod fixtures;
mod model;
mod store;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) use self::model::RecordModel;
use crate::store::OpenedStore;
use crate::{Buffer, BufferConfig, BufferError, Consumer, Producer};

/// Threads that run cases.
const THREADS: usize = 8;

/// Both sides of a buffer.
pub trait BothSides: Producer + Consumer {}
impl<T: Producer + Consumer> BothSides for T {}

/// The data of a store in one case. A case opens it several times, one after the other.
pub trait StoreUnderTest: Send + Sync {
    /// Opens the store with its data; the first time there is none.
    ///
    /// # Errors
    /// Data that cannot be opened, such as while another opening has it.
    fn open(&self) -> Result<OpenedStore, BufferError>;

    /// Whether acknowledged writes survive that the store is dropped. If not, the cases about recovery are skipped.
    fn is_durable(&self) -> bool {
        true
    }
}

/// A case of the contract: what it checks of a buffer with this configuration.
struct ContractCase {
    name: &'static str,
    config: fn() -> BufferConfig,
    check: fn(&dyn BothSides),
}

/// Runs all cases of the contract. `open` makes an empty buffer of a configuration, gives it to the case, and removes it.
///
/// # Panics
/// If a case fails; the message names all that did.
pub fn check_contract(open: impl Fn(BufferConfig, &dyn Fn(&dyn BothSides)) + Sync) {
    let run = |case: &ContractCase| open((case.config)(), &|buffer: &dyn BothSides| (case.check)(buffer));
    report(&run_all(contract::CASES, |case| case.name, run), contract::CASES.len());
}

/// Runs all cases of a store, and the contract of a buffer over it. `empty` makes the data of one case, from its name.
///
/// # Panics
/// If a case fails; the message names all that did.
pub fn check_store<S: StoreUnderTest>(empty: impl Fn(&str) -> S + Sync) {
    let mut failed = run_all(store::CASES, |case| case.name, |case| (case.check)(&empty(case.name)));
    let over_store = |case: &ContractCase| {
        let data = empty(case.name);
        let opened = data.open().expect("data that is not open can be opened");
        let buffer = Buffer::with_store((case.config)(), opened).expect("the configuration is usable");
        (case.check)(&buffer);
    };
    failed.extend(run_all(contract::CASES, |case| case.name, over_store));
    report(&failed, store::CASES.len() + contract::CASES.len());
}

/// Runs all cases, several at a time; the names of those that panicked.
fn run_all<C: Sync>(
    cases: &[C],
    name: impl Fn(&C) -> &'static str + Sync,
    check: impl Fn(&C) + Sync,
) -> Vec<&'static str> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if catch_unwind(AssertUnwindSafe(|| check(case))).is_err() {
                        failed.lock().expect("a push does not panic").push(name(case));
                    }
                }
            });
        }
    });
    failed.into_inner().expect("a push does not panic")
}

fn report(failed: &[&str], cases: usize) {
    assert!(failed.is_empty(), "{} of {cases} cases failed: {}", failed.len(), failed.join(", "));
}
