//! Matrix products (GEMM): cuBLAS on a GPU.

use std::ops::Range;

use crate::backend::{Product, ProductOperand};
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// A row-major matrix.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T: Storage> {
    values: View<'a, T>,
    /// Shape after transposition.
    rows: usize,
    columns: usize,
    stride: usize,
    transposed: bool,
}

/// A mutable row-major matrix.
#[derive(Debug)]
pub struct MatrixMut<'a, T: Storage> {
    values: ViewMut<'a, T>,
    rows: usize,
    columns: usize,
}

impl<'a, T: Storage> Matrix<'a, T> {
    /// The matrix `[values / columns, columns]`.
    ///
    /// # Panics
    /// If the number of values is not a multiple of `columns`.
    #[must_use]
    pub fn new(values: View<'a, T>, columns: usize) -> Self {
        assert!(
            columns > 0 && values.len().is_multiple_of(columns),
            "{} values in rows of {columns}",
            values.len()
        );
        Self { values, rows: values.len() / columns, columns, stride: columns, transposed: false }
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The values, row by row.
    ///
    /// # Panics
    /// If the matrix is a part of another, or transposed.
    #[must_use]
    pub fn values(&self) -> View<'a, T> {
        assert!(
            !self.transposed && self.values.len() == self.rows * self.columns,
            "the values are contiguous"
        );
        self.values
    }

    /// The columns `range` of all rows, without a copy.
    ///
    /// # Panics
    /// If the matrix is transposed, or the range is beyond its columns.
    #[must_use]
    pub fn columns_within(self, range: Range<usize>) -> Self {
        assert!(!self.transposed && range.end <= self.columns, "columns {range:?} of {}", self.columns);
        let values = self.values.slice(range.start.min(self.values.len())..self.values.len());
        Self { values, columns: range.len(), ..self }
    }

    /// The transposed matrix, without a copy.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

impl<'a, T: Storage> MatrixMut<'a, T> {
    /// The matrix `[values / columns, columns]`.
    ///
    /// # Panics
    /// If the number of values is not a multiple of `columns`.
    #[must_use]
    pub fn new(values: ViewMut<'a, T>, columns: usize) -> Self {
        assert!(
            columns > 0 && values.len().is_multiple_of(columns),
            "{} values in rows of {columns}",
            values.len()
        );
        Self { rows: values.len() / columns, columns, values }
    }
}

impl Device {
    /// `c [m, n] = scale * a [m, k] b [k, n] + keep * c`, with sums in f32 (`alpha` and `beta` of BLAS).
    ///
    /// # Errors
    /// If cuBLAS fails.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn product<A: Storage, C: Storage>(
        &self,
        a: Matrix<'_, A>,
        b: Matrix<'_, A>,
        c: MatrixMut<'_, C>,
        scale: f32,
        keep: f32,
    ) -> Result<()> {
        assert!(
            a.columns == b.rows && c.rows == a.rows && c.columns == b.columns,
            "[{}, {}] times [{}, {}] is not [{}, {}]",
            a.rows,
            a.columns,
            b.rows,
            b.columns,
            c.rows,
            c.columns
        );
        // Without an inner dimension nothing is added.
        if c.rows == 0 || c.columns == 0 || (a.columns == 0 && keep == 1.0) {
            return Ok(());
        }
        let operand = |m: Matrix<'_, A>| ProductOperand {
            address: m.values.address(),
            stride: m.stride,
            transposed: m.transposed,
        };
        self.inner.backend.product(&Product {
            m: c.rows,
            n: c.columns,
            k: a.columns,
            a: operand(a),
            b: operand(b),
            c: ProductOperand { address: c.values.address(), stride: c.columns, transposed: false },
            narrow_inputs: A::NARROW,
            narrow_output: C::NARROW,
            scale,
            keep,
        })
    }
}
