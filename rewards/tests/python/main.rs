//! Reward functions of users, in every dialect, and everything that they can do wrong.
//!
//! Invariant: the functions stand beside this file as their authors would write them; nothing in them knows of rlrun.
//! Without python3 every test says SKIPPED and passes.

mod dialects;
mod endings;
mod misbehaviour;
mod support;
