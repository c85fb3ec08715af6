//! The kernels, each with its launcher.
