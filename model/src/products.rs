//! The decoder's matrix product (GEMM) on slices, for optimizers and low-rank factors.
//!
//! Invariant: every element is one chain of fused multiply-adds over the inner dimension in ascending order, so its bits
//! depend on its row and its column alone, not on the machine. A product runs on the calling thread; a caller with several
//! matrices gives each a thread.

use crate::ops::gemm::{self, Right};

pub use crate::ops::gemm::StridedMatrix;

/// `out = left [rows, inner] x right [inner, columns]`; `out` is `[rows, columns]`, row-major.
///
/// # Panics
/// If the shapes do not fit each other.
pub fn multiply(left: StridedMatrix<'_>, right: StridedMatrix<'_>, out: &mut [f32]) {
    gemm::multiply(left, Right::Unpacked(right), out);
}

/// `out [rows, columns] += left [rows, inner] x right [inner, columns]`.
///
/// # Panics
/// If the shapes do not fit each other.
pub fn multiply_add(left: StridedMatrix<'_>, right: StridedMatrix<'_>, out: &mut [f32]) {
    gemm::multiply_add(left, Right::Unpacked(right), out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_can_be_transposed_and_products_accumulate() {
        // [2, 3] and [3, 2], small whole numbers, so that every order of summation is exact.
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]);
        let (a, b) = (StridedMatrix::new(&a, 3), StridedMatrix::new(&b, 2));
        let mut out = [0.0; 4];
        multiply(a, b, &mut out);
        assert_eq!(out, [58.0, 64.0, 139.0, 154.0]);
        multiply_add(b.transposed(), a.transposed(), &mut out);
        assert_eq!(out, [116.0, 203.0, 203.0, 308.0]);
    }
}
