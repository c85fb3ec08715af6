//! The program that knows every crate.

pub mod recipe;
