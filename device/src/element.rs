//! Element types of device memory.

use bytemuck::Pod;
use half::bf16;

/// An element type of device memory.
pub trait Element: Pod + Send + Sync + std::fmt::Debug {}

impl Element for f32 {}
impl Element for f64 {}
impl Element for bf16 {}
impl Element for i32 {}
impl Element for u16 {}
impl Element for u32 {}
impl Element for u64 {}
impl Element for u8 {}

/// A storage type of weights and activations; arithmetic is in f32.
pub trait Storage: Element + Default {
    /// Suffix of kernel names.
    const SUFFIX: &'static str;
    /// Whether it is bf16.
    const NARROW: bool;

    /// Rounds to the nearest value.
    fn narrow(value: f32) -> Self;

    /// Converts exactly.
    fn widen(self) -> f32;
}

impl Storage for f32 {
    const SUFFIX: &'static str = "f32";
    const NARROW: bool = false;

    fn narrow(value: f32) -> Self {
        value
    }

    fn widen(self) -> f32 {
        self
    }
}

impl Storage for bf16 {
    const SUFFIX: &'static str = "bf16";
    const NARROW: bool = true;

    fn narrow(value: f32) -> Self {
        Self::from_f32(value)
    }

    fn widen(self) -> f32 {
        self.to_f32()
    }
}
