//! From tasks to scored groups: datasets, continuous batching, reward dispatch.

pub mod tasks;
