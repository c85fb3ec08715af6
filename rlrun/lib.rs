//! The program that knows every crate.
