//! CPU features and caches of this machine, and what this process takes of its memory.

use std::sync::OnceLock;

/// Bytes of a second-level cache of unknown size.
const SMALL_CACHE: usize = 512 << 10;

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

/// Bytes of the second-level cache of a core.
pub(crate) fn second_level_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cache_bytes().filter(|bytes| *bytes > 0).unwrap_or(SMALL_CACHE))
}

/// The same as `cpuid` reports it: leaf 0x80000006 has its KiB, on processors of AMD and of Intel.
fn cache_bytes() -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        const LEAF: u32 = 0x8000_0006;
        let known = __cpuid(0x8000_0000).eax >= LEAF;
        known.then(|| (__cpuid(LEAF).ecx >> 16) as usize * 1024)
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
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

/// Most memory that was resident in this process so far, bytes. On Linux that of the process that started it counts too, until then.
#[must_use]
pub fn peak_memory() -> u64 {
    #[expect(unsafe_code, reason = "the structure is valid with any bytes, and the call fills it")]
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    // Apple's systems count bytes, others KiB (getrusage(2)).
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1 << 10 };
    u64::try_from(usage.ru_maxrss).unwrap_or(0) * unit
}
