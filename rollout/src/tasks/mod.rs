//! Datasets as [`trajectory::Task`]s, and the endless order in which a run works through them.
//!
//! # Layout
//! - [`source`]: [`TaskSource`], which columns of a dataset make a task
//! - [`rows`]: files of every format as rows
//! - [`prompt`]: a prompt from a cell or a template
//! - [`stream`]: [`TaskStream`], which task every group of a run gets
//! - [`arithmetic`]: [`Arithmetic`], generated tasks that need no download
//! - [`questions`]: [`Questions`], generated arithmetic questions in words
//! - [`error`]: what can be wrong with a dataset, [`TaskError`]
//!
//! # Invariants
//! - A task depends on its files and the [`TaskSource`] alone, the task of a group on the tasks, the seed and the
//!   group's id alone: a resumed run gets the same tasks.
//! - What a dataset lacks is an error that names the file and the row, before anything is generated.

pub mod arithmetic;
pub mod error;
pub mod prompt;
pub mod questions;
pub(crate) mod random;
pub mod rows;
pub mod source;
pub mod stream;

pub use arithmetic::{Arithmetic, ArithmeticTasks, Sum};
pub use error::TaskError;
pub use questions::{QuestionKind, Questions};
pub use rows::TaskSplit;
pub use source::TaskSource;
pub use stream::{TaskOrder, TaskStream};
