//! Runtime dispatch of vectorised loops, and the two functions that the standard library has only in scalar form.
//!
//! Invariant: every instruction set computes the same bits. Loops are written once in plain Rust over fixed-width
//! arrays with explicit fused multiply-adds, and compiled once per instruction set; the order of every sum is fixed
//! by the source, never by the vector width.

/// Lanes of every vectorised reduction, whatever the machine: the order of summation does not depend on it.
pub(crate) const LANES: usize = 16;

/// Compiles a function for AVX-512, AVX2 with FMA and the baseline, and calls the best that the machine has.
#[macro_export]
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn portable($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                portable($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                portable($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            match $crate::machine::level() {
                #[expect(unsafe_code, reason = "the machine has the features of this level")]
                $crate::machine::Level::Avx512 => return unsafe { avx512($($arg),*) },
                #[expect(unsafe_code, reason = "the machine has the features of this level")]
                $crate::machine::Level::Avx2 => return unsafe { avx2($($arg),*) },
                $crate::machine::Level::Portable => {}
            }
            portable($($arg),*)
        }
    };
}
pub(crate) use vectorized;

/// Calls a generic function with the widest registers that the machine has.
macro_rules! widest {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) =
        $callee:ident::<$v512:ident $(, $p512:literal)*> | <$v256:ident $(, $p256:literal)*> | <$($p128:literal),*>) => {
        $(#[$meta])*
        fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::x86_64::{$v256, $v512};
                #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
                fn avx512($($arg: $ty),*) {
                    $callee::<$v512 $(, $p512)*>($($arg),*);
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) {
                    $callee::<$v256 $(, $p256)*>($($arg),*);
                }
                match $crate::machine::level() {
                    #[expect(unsafe_code, reason = "the machine has the features of this level")]
                    $crate::machine::Level::Avx512 => return unsafe { avx512($($arg),*) },
                    #[expect(unsafe_code, reason = "the machine has the features of this level")]
                    $crate::machine::Level::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::machine::Level::Portable => {}
                }
            }
            $callee::<[f32; 4] $(, $p128)*>($($arg),*);
        }
    };
}
pub(crate) use widest;

/// A register of f32, for the one loop that the compiler does not vectorise by itself: the tile of a matrix product.
pub(crate) trait Vector: Copy {
    /// Number of values.
    const WIDTH: usize;

    fn zero() -> Self;

    /// Loads from an address.
    ///
    /// # Safety
    /// `WIDTH` values can be read there.
    #[expect(unsafe_code, reason = "the loop of a tile checks its bounds once, before it begins")]
    unsafe fn load_at(from: *const f32) -> Self;

    /// Stores to an address.
    ///
    /// # Safety
    /// `WIDTH` values can be written there.
    #[expect(unsafe_code, reason = "the loop of a tile checks its bounds once, before it begins")]
    unsafe fn store_at(self, to: *mut f32);

    /// `a * self + sum`, rounded once.
    fn mul_add(self, a: f32, sum: Self) -> Self;

    /// Writes a block of 16 rows as columns: `to[k * stride + i] = rows[i][at + k]` for `k` in `0..16`.
    fn transpose(rows: &[&[f32]; 16], at: usize, to: &mut [f32], stride: usize);
}

impl Vector for [f32; 4] {
    const WIDTH: usize = 4;

    #[inline(always)]
    fn zero() -> Self {
        [0.0; 4]
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "the caller vouches for the address")]
    unsafe fn load_at(from: *const f32) -> Self {
        unsafe { from.cast::<Self>().read_unaligned() }
    }

    #[inline(always)]
    #[expect(unsafe_code, reason = "the caller vouches for the address")]
    unsafe fn store_at(self, to: *mut f32) {
        unsafe { to.cast::<Self>().write_unaligned(self) }
    }

    #[inline(always)]
    fn mul_add(self, a: f32, sum: Self) -> Self {
        std::array::from_fn(|i| a.mul_add(self[i], sum[i]))
    }

    #[inline(always)]
    fn transpose(rows: &[&[f32]; 16], at: usize, to: &mut [f32], stride: usize) {
        for k in 0..16 {
            for (to, row) in to[k * stride..][..16].iter_mut().zip(rows) {
                *to = row[at + k];
            }
        }
    }
}

/// A register of x86-64, by its intrinsics.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_vector {
    ($register:ident, $width:literal, $zero:ident, $load:ident, $store:ident, $splat:ident, $fma:ident, $transpose:ident) => {
        #[expect(
            unsafe_code,
            reason = "used only inside functions whose target features were detected; bounds are asserted"
        )]
        impl Vector for std::arch::x86_64::$register {
            const WIDTH: usize = $width;

            #[inline(always)]
            fn zero() -> Self {
                unsafe { std::arch::x86_64::$zero() }
            }

            #[inline(always)]
            unsafe fn load_at(from: *const f32) -> Self {
                unsafe { std::arch::x86_64::$load(from) }
            }

            #[inline(always)]
            unsafe fn store_at(self, to: *mut f32) {
                unsafe { std::arch::x86_64::$store(to, self) }
            }

            #[inline(always)]
            fn mul_add(self, a: f32, sum: Self) -> Self {
                unsafe { std::arch::x86_64::$fma(std::arch::x86_64::$splat(a), self, sum) }
            }

            #[inline(always)]
            fn transpose(rows: &[&[f32]; 16], at: usize, to: &mut [f32], stride: usize) {
                unsafe { $transpose(rows, at, to, stride) }
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
x86_vector!(
    __m256,
    8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    transpose_avx2
);
#[cfg(target_arch = "x86_64")]
x86_vector!(
    __m512,
    16,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    transpose_avx512
);

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[expect(unsafe_code, reason = "every load and store is of a slice of the full width")]
fn transpose_avx512(rows: &[&[f32]; 16], at: usize, to: &mut [f32], stride: usize) {
    use std::arch::x86_64::*;
    let mut v = [_mm512_setzero_ps(); 16];
    for (v, row) in v.iter_mut().zip(rows) {
        let row = &row[at..at + 16];
        *v = unsafe { _mm512_loadu_ps(row.as_ptr()) };
    }
    // Pairs of rows, then quads, then the 4 x 4 blocks themselves change places.
    for i in (0..16).step_by(2) {
        (v[i], v[i + 1]) = (_mm512_unpacklo_ps(v[i], v[i + 1]), _mm512_unpackhi_ps(v[i], v[i + 1]));
    }
    for i in (0..16).step_by(4) {
        let (a, b, c, d) = (v[i], v[i + 1], v[i + 2], v[i + 3]);
        v[i] = _mm512_shuffle_ps::<0x44>(a, c);
        v[i + 1] = _mm512_shuffle_ps::<0xee>(a, c);
        v[i + 2] = _mm512_shuffle_ps::<0x44>(b, d);
        v[i + 3] = _mm512_shuffle_ps::<0xee>(b, d);
    }
    for i in 0..4 {
        let (a, b) =
            (_mm512_shuffle_f32x4::<0x88>(v[i], v[i + 4]), _mm512_shuffle_f32x4::<0xdd>(v[i], v[i + 4]));
        let (c, d) = (
            _mm512_shuffle_f32x4::<0x88>(v[i + 8], v[i + 12]),
            _mm512_shuffle_f32x4::<0xdd>(v[i + 8], v[i + 12]),
        );
        v[i] = _mm512_shuffle_f32x4::<0x88>(a, c);
        v[i + 4] = _mm512_shuffle_f32x4::<0x88>(b, d);
        v[i + 8] = _mm512_shuffle_f32x4::<0xdd>(a, c);
        v[i + 12] = _mm512_shuffle_f32x4::<0xdd>(b, d);
    }
    for (k, v) in v.into_iter().enumerate() {
        let to = &mut to[k * stride..][..16];
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[expect(unsafe_code, reason = "every load and store is of a slice of the full width")]
fn transpose_avx2(rows: &[&[f32]; 16], at: usize, to: &mut [f32], stride: usize) {
    use std::arch::x86_64::*;
    for (half, rows) in rows.chunks_exact(8).enumerate() {
        for k in [0, 8] {
            let mut v = [_mm256_setzero_ps(); 8];
            for (v, row) in v.iter_mut().zip(rows) {
                let row = &row[at + k..at + k + 8];
                *v = unsafe { _mm256_loadu_ps(row.as_ptr()) };
            }
            for i in (0..8).step_by(2) {
                (v[i], v[i + 1]) = (_mm256_unpacklo_ps(v[i], v[i + 1]), _mm256_unpackhi_ps(v[i], v[i + 1]));
            }
            for i in [0, 4] {
                let (a, b) = (v[i], v[i + 2]);
                let (c, d) = (v[i + 1], v[i + 3]);
                v[i] = _mm256_shuffle_ps::<0x44>(a, b);
                v[i + 1] = _mm256_shuffle_ps::<0xee>(a, b);
                v[i + 2] = _mm256_shuffle_ps::<0x44>(c, d);
                v[i + 3] = _mm256_shuffle_ps::<0xee>(c, d);
            }
            for i in 0..4 {
                (v[i], v[i + 4]) = (
                    _mm256_permute2f128_ps::<0x20>(v[i], v[i + 4]),
                    _mm256_permute2f128_ps::<0x31>(v[i], v[i + 4]),
                );
            }
            for (i, v) in v.into_iter().enumerate() {
                let to = &mut to[(k + i) * stride + 8 * half..][..8];
                unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) };
            }
        }
    }
}

/// Asks for the cache lines of `count` values from an address on, which need not be one of anything, before they are
/// needed: where access jumps too far for the machine to foresee it.
#[inline(always)]
pub(crate) fn prefetch(address: *const f32, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..count).step_by(LANES) {
        #[expect(unsafe_code, reason = "a hint that reads nothing")]
        unsafe {
            let line = address.wrapping_add(line).cast();
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line);
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, count);
}

/// `e^x` to about 1 ulp, 0 below the smallest normal result. Vectorises, unlike [`f32::exp`].
///
/// Range reduction by `ln 2` and the degree-5 minimax polynomial of Cephes `expf`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, clamped);
    let r = n.mul_add(2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4_f32;
    p = p.mul_add(r, 1.398_2e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r + 1.0);
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < -87.0 { 0.0 } else { p * scale }
}

/// Sum of `[n]` values in a fixed order.
#[inline(always)]
pub(crate) fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += v;
        }
    }
    for (lane, v) in lanes.iter_mut().zip(tail) {
        *lane += v;
    }
    fold(lanes)
}

/// Dot product of two slices of equal length in a fixed order.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const WIDTH: usize = 8; // heads are 16 to 128 wide: a narrower accumulator leaves less to fold
    let mut lanes = [0.0_f32; WIDTH];
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let (a_chunks, b_chunks) = (a.chunks_exact(WIDTH), b.chunks_exact(WIDTH));
    let (a_tail, b_tail) = (a_chunks.remainder(), b_chunks.remainder());
    for (x, y) in a_chunks.zip(b_chunks) {
        for l in 0..WIDTH {
            lanes[l] = x[l].mul_add(y[l], lanes[l]);
        }
    }
    for (l, (x, y)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] = x.mul_add(*y, lanes[l]);
    }
    let half = [lanes[0] + lanes[4], lanes[1] + lanes[5], lanes[2] + lanes[6], lanes[3] + lanes[7]];
    (half[0] + half[2]) + (half[1] + half[3])
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Largest value, negative infinity for none.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = if *v > *lane { *v } else { *lane };
        }
    }
    for (lane, v) in lanes.iter_mut().zip(tail) {
        *lane = if *v > *lane { *v } else { *lane };
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Smallest value, positive infinity for none.
#[inline(always)]
pub(crate) fn min(values: &[f32]) -> f32 {
    let mut lanes = [f32::INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = if *v < *lane { *v } else { *lane };
        }
    }
    for (lane, v) in lanes.iter_mut().zip(tail) {
        *lane = if *v < *lane { *v } else { *lane };
    }
    lanes.into_iter().fold(f32::INFINITY, f32::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_standard_library() {
        for i in -8_700..8_800 {
            let x = i as f32 / 100.0;
            let (ours, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((ours - exact).abs() <= 3e-7 * exact, "exp({x}) = {ours}, exactly {exact}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-90.0), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_agree_with_f64() {
        let a: Vec<f32> = (0..103).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
        let b: Vec<f32> = a.iter().map(|x| x * 0.3 + 1.0).collect();
        for n in 0..a.len() {
            let (a, b) = (&a[..n], &b[..n]);
            let exact: f64 = a.iter().map(|x| f64::from(*x)).sum();
            assert!((f64::from(sum(a)) - exact).abs() < 1e-3);
            let exact: f64 = a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            assert!((f64::from(dot(a, b)) - exact).abs() < 2e-3);
            assert_eq!(max(a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            assert_eq!(min(a), a.iter().copied().fold(f32::INFINITY, f32::min));
        }
    }
}
