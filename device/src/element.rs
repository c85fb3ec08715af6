//! What device memory holds.

use bytemuck::Pod;
use half::bf16;

/// A type that device memory can hold.
pub trait Element: Pod + Send + Sync + std::fmt::Debug {}

impl Element for f32 {}
impl Element for f64 {}
impl Element for bf16 {}
impl Element for i32 {}
impl Element for u32 {}
impl Element for u64 {}
impl Element for u8 {}

/// A type that weights and activations are stored in. Arithmetic is f32 whatever they are stored in.
pub trait Storage: Element + Default {
    /// What the names of kernels for it end with.
    const SUFFIX: &'static str;
    /// Whether it is bf16.
    const NARROW: bool;

    /// The nearest value.
    fn narrow(value: f32) -> Self;

    /// The same value.
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
