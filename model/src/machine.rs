//! CPU features of this machine.

/// Instruction sets that loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 F and VL, with AVX2 and FMA.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// The baseline of the target.
    Portable,
}

/// The widest instruction set of this machine.
#[must_use]
pub fn level() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx2") && has!("fma") {
            return if has!("avx512f") && has!("avx512vl") { Level::Avx512 } else { Level::Avx2 };
        }
    }
    Level::Portable
}
