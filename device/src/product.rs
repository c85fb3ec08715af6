//! Matrix products: cuBLAS on a GPU.

use crate::backend::{Operand, Product};
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// A matrix that lies row by row.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T: Storage> {
    values: View<'a, T>,
    /// As it is taken.
    rows: usize,
    columns: usize,
    stride: usize,
    transposed: bool,
}

/// A matrix that lies row by row, to be written.
#[derive(Debug)]
pub struct MatrixMut<'a, T: Storage> {
    values: ViewMut<'a, T>,
    rows: usize,
    columns: usize,
}

impl<'a, T: Storage> Matrix<'a, T> {
    /// `[values / columns, columns]`.
    ///
    /// # Panics
    /// If the values are no whole rows.
    #[must_use]
    pub fn new(values: View<'a, T>, columns: usize) -> Self {
        assert!(
            columns > 0 && values.len().is_multiple_of(columns),
            "{} values in rows of {columns}",
            values.len()
        );
        Self { values, rows: values.len() / columns, columns, stride: columns, transposed: false }
    }

    /// The same, taken transposed.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

impl<'a, T: Storage> MatrixMut<'a, T> {
    /// `[values / columns, columns]`.
    ///
    /// # Panics
    /// If the values are no whole rows.
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
    /// `c = scale * a b + keep * c`, with sums in f32.
    ///
    /// # Errors
    /// If the library fails.
    ///
    /// # Panics
    /// If the shapes do not fit.
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
        if c.rows == 0 || c.columns == 0 {
            return Ok(());
        }
        let operand = |m: Matrix<'_, A>| Operand {
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
            c: Operand { address: c.values.address(), stride: c.columns, transposed: false },
            narrow_inputs: A::NARROW,
            narrow_output: C::NARROW,
            scale,
            keep,
        })
    }
}
