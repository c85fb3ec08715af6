//! Products of experts over their rows, and what goes from tokens to rows and back.

use super::routes::{RoutedRows, Router, TileHeight};
use super::{THREADS, rows_of, size, tiles};
use crate::backend::Argument;
use crate::device::Device;
use crate::element::Storage;
use crate::error::Result;
use crate::memory::{View, ViewMut};

/// Inputs of a product: one for each token, which all rows of the token have, or one for each row of an expert.
#[derive(Clone, Copy, Debug)]
pub enum ExpertInputs<'a, T: Storage> {
    /// `[T, width]`
    OfTokens(View<'a, T>),
    /// `[T k, width]`
    OfRows(View<'a, T>),
}

/// A product of experts: every row times the weight of its expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertProduct<'a, T: Storage> {
    /// `[E, out, in]` weights.
    pub weights: View<'a, T>,
    /// `[E, out]` biases.
    pub bias: Option<View<'a, T>>,
    /// Width of the input.
    pub input: usize,
    /// Width of the result.
    pub output: usize,
}

impl<T: Storage> ExpertInputs<'_, T> {
    /// Kernel arguments: the values, and the slots if the values are those of tokens.
    fn arguments(self, routes: &RoutedRows<'_>, width: usize) -> [Argument; 2] {
        let rows = routes.slots.len();
        match self {
            Self::OfTokens(values) => {
                assert_eq!(values.len() * routes.router.per_token, rows * width, "a row for each token");
                [values.into(), routes.slots.into()]
            }
            Self::OfRows(values) => {
                assert_eq!(values.len(), rows * width, "a row for each slot");
                [values.into(), Argument::null()]
            }
        }
    }
}

/// Shape of the tiles of a product in `expert_products.cu`.
struct ProductTile {
    name: &'static str,
    width: usize,
    threads: usize,
    /// Shared memory, bytes.
    shared: usize,
}

impl ProductTile {
    fn of<T: Storage>(height: TileHeight) -> Self {
        // Two operands of so many values, in rows with a padding of 8, and stages of both; the larger of both orders of storage.
        let stages = |rows: usize, width: usize, deep: usize, stages: usize| {
            let (left, right) = (rows * (deep + 8), (width * (deep + 8)).max(deep * (width + 8)));
            stages * (left + right) * size_of::<T>()
        };
        match (height, T::NARROW) {
            (TileHeight::Low, false) => Self { name: "low", width: 64, threads: 256, shared: 0 },
            (TileHeight::High, false) => Self { name: "high", width: 64, threads: 256, shared: 0 },
            (TileHeight::Low, true) => {
                Self { name: "low", width: 64, threads: 128, shared: stages(16, 64, 64, 4) }
            }
            (TileHeight::High, true) => {
                Self { name: "high", width: 128, threads: 256, shared: stages(128, 128, 32, 3) }
            }
        }
    }
}

impl<T: Storage> ExpertProduct<'_, T> {
    /// `out [T k, out] = x W^T + b` of every row. Reads the weights of the experts in use, each once for every tile of its rows.
    ///
    /// # Errors
    /// If the launch fails.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn apply(
        &self,
        device: &Device,
        routes: &RoutedRows<'_>,
        x: ExpertInputs<'_, T>,
        out: ViewMut<'_, T>,
    ) -> Result<()> {
        self.launch(device, "product", routes, x, [self.input, self.output], out)
    }

    /// `out [T k, in] = g W` of every row: the gradient of the input for that of the result.
    ///
    /// # Errors
    /// If the launch fails.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn input_gradient(
        &self,
        device: &Device,
        routes: &RoutedRows<'_>,
        g: ExpertInputs<'_, T>,
        out: ViewMut<'_, T>,
    ) -> Result<()> {
        let inner_outer = [self.output, self.input];
        Self { bias: None, ..*self }.launch(device, "input_gradient", routes, g, inner_outer, out)
    }

    fn launch(
        &self,
        device: &Device,
        name: &str,
        routes: &RoutedRows<'_>,
        x: ExpertInputs<'_, T>,
        [inner, outer]: [usize; 2],
        out: ViewMut<'_, T>,
    ) -> Result<()> {
        let Router { experts, per_token, .. } = routes.router;
        let rows = routes.slots.len();
        assert_eq!(self.weights.len(), experts * inner * outer, "a weight for each expert");
        assert!(self.bias.is_none_or(|bias| bias.len() == experts * outer), "a bias for each expert");
        assert_eq!(out.len(), rows * outer, "a result for each row");
        let shape = ProductTile::of::<T>(routes.height);
        let [values, slots] = x.arguments(routes, inner);
        let arguments = [
            values,
            slots,
            size(per_token).into(),
            self.weights.into(),
            self.bias.into(),
            size(inner).into(),
            size(outer).into(),
            routes.tiles.into(),
            routes.starts.into(),
            out.into(),
        ];
        let tiles = routes.router.tiles(rows, routes.height.rows::<T>());
        let grid = [tiles * outer.div_ceil(shape.width), 1, 1];
        let kernel = format!("expert_{name}_{}_{}", shape.name, T::SUFFIX);
        device.launch(&kernel, grid, shape.threads, shape.shared, &arguments)
    }
}

/// Adds to `gradients [E, out, in]` those of the weights of [`ExpertProduct::apply`], for the gradient `g` of its result and its
/// input `x`. An expert without rows is not touched.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn weight_gradients<T: Storage>(
    device: &Device,
    routes: &RoutedRows<'_>,
    g: ExpertInputs<'_, T>,
    x: ExpertInputs<'_, T>,
    input: usize,
    gradients: ViewMut<'_, f32>,
) -> Result<()> {
    let Router { experts, per_token, .. } = routes.router;
    let output = rows_of(gradients.len(), experts * input);
    let shape = ProductTile::of::<T>(TileHeight::High);
    let ([g, g_slots], [x, x_slots]) = (g.arguments(routes, output), x.arguments(routes, input));
    let arguments = [
        g,
        g_slots,
        x,
        x_slots,
        size(per_token).into(),
        size(input).into(),
        size(output).into(),
        routes.starts.into(),
        gradients.into(),
    ];
    let height = TileHeight::High.rows::<T>();
    let grid = [input.div_ceil(shape.width) * output.div_ceil(height), experts, 1];
    let kernel = format!("expert_weight_gradient_{}", T::SUFFIX);
    device.launch(&kernel, grid, shape.threads, shape.shared, &arguments)
}

/// Adds to `gradients [E, width]` the sums of the rows of `g` of each expert: the gradients of biases. If `weighted`, each row is
/// multiplied with the weight of its slot.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn bias_gradients<T: Storage>(
    device: &Device,
    routes: &RoutedRows<'_>,
    g: ExpertInputs<'_, T>,
    weighted: bool,
    gradients: ViewMut<'_, f32>,
) -> Result<()> {
    let Router { experts, per_token, .. } = routes.router;
    let width = rows_of(gradients.len(), experts);
    let by_token = matches!(g, ExpertInputs::OfTokens(_));
    let [values, _] = g.arguments(routes, width);
    let arguments = [
        values,
        routes.slots.into(),
        weighted.then_some(routes.weights).into(),
        size(per_token).into(),
        size(by_token.into()).into(),
        routes.starts.into(),
        size(width).into(),
        gradients.into(),
    ];
    let grid = [width.div_ceil(32), experts, 1];
    device.launch(&format!("add_row_sums_{}", T::SUFFIX), grid, THREADS, 0, &arguments)
}

/// Adds to each row of `out [T, width]` the rows of `y [T k, width]` of the token, in the order of its experts. If `weighted`, each
/// row is multiplied with the weight of its slot.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn add_slots<T: Storage>(
    device: &Device,
    routes: &RoutedRows<'_>,
    y: View<'_, T>,
    weighted: bool,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let per_token = routes.router.per_token;
    let tokens = routes.rows.len() / per_token;
    assert!(y.len() == out.len() * per_token, "a row of {} values for each slot", y.len());
    if tokens == 0 {
        return Ok(());
    }
    let width = rows_of(out.len(), tokens);
    let (blocks, threads) = tiles::<T>(width);
    let arguments = [
        y.into(),
        routes.rows.into(),
        weighted.then_some(routes.weights).into(),
        size(per_token).into(),
        size(width).into(),
        out.into(),
    ];
    device.launch(&format!("add_slots_{}", T::SUFFIX), [tokens, blocks, 1], threads, 0, &arguments)
}

/// The gradient of the results of experts with biases.
#[derive(Clone, Copy, Debug)]
pub struct BiasedResults<'a, T: Storage> {
    /// `[T, width]` of the tokens.
    pub g: View<'a, T>,
    /// `[E, width]`
    pub bias: View<'a, T>,
}

/// Multiplies each row of `d` and `activated`, both `[T k, width]`, with the weight of its slot. Writes the gradient of the weights to
/// `d_weights [T, k]`: `d . activated`, if `d` is the gradient of `activated` without the weight, and `g . bias` of the results.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn weigh_rows<T: Storage>(
    device: &Device,
    routes: &RoutedRows<'_>,
    d: ViewMut<'_, T>,
    activated: ViewMut<'_, T>,
    biased: Option<BiasedResults<'_, T>>,
    d_weights: ViewMut<'_, f32>,
) -> Result<()> {
    let Router { experts, per_token, .. } = routes.router;
    let rows = routes.slots.len();
    assert!(d.len() == activated.len() && d_weights.len() == rows, "{} values of {rows} rows", d.len());
    if rows == 0 {
        return Ok(());
    }
    let (width, hidden) = (rows_of(d.len(), rows), biased.map_or(0, |biased| biased.bias.len() / experts));
    assert!(
        biased.is_none_or(|biased| biased.g.len() * per_token == rows * hidden),
        "a gradient for each token"
    );
    let arguments = [
        d.into(),
        activated.into(),
        size(width).into(),
        routes.slots.into(),
        routes.experts.into(),
        routes.weights.into(),
        size(per_token).into(),
        biased.map(|biased| biased.g).into(),
        biased.map(|biased| biased.bias).into(),
        size(hidden).into(),
        d_weights.into(),
    ];
    let threads = width.next_multiple_of(32).clamp(32, THREADS);
    device.launch(&format!("weigh_rows_{}", T::SUFFIX), [rows, 1, 1], threads, 0, &arguments)
}

/// Adds to each row of `out [T, width]` that of `y [T, width]` times the sigmoid of its `gate [T]`.
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn add_gated<T: Storage>(
    device: &Device,
    y: View<'_, T>,
    gate: View<'_, f32>,
    out: ViewMut<'_, T>,
) -> Result<()> {
    let rows = gate.len();
    assert_eq!(y.len(), out.len(), "a result for each value");
    if rows == 0 {
        return Ok(());
    }
    let width = rows_of(out.len(), rows);
    let threads = width.next_multiple_of(32).clamp(32, THREADS);
    let arguments = [y.into(), gate.into(), size(width).into(), out.into()];
    let grid = [rows, width.div_ceil(threads), 1];
    device.launch(&format!("add_gated_{}", T::SUFFIX), grid, threads, 0, &arguments)
}

/// Gradients of `y [T, width]` into `d_y`, and of `gate [T]` into `d_gate`, for the gradient `g [T, width]` of the result of
/// [`add_gated`].
///
/// # Errors
/// If the launch fails.
///
/// # Panics
/// If the shapes do not fit.
pub fn gated_backward<T: Storage>(
    device: &Device,
    y: View<'_, T>,
    gate: View<'_, f32>,
    g: View<'_, T>,
    d_y: ViewMut<'_, T>,
    d_gate: ViewMut<'_, f32>,
) -> Result<()> {
    let rows = gate.len();
    assert!(y.len() == g.len() && y.len() == d_y.len() && d_gate.len() == rows, "{} values", y.len());
    if rows == 0 {
        return Ok(());
    }
    let width = rows_of(y.len(), rows);
    let threads = width.next_multiple_of(32).clamp(32, THREADS);
    let arguments = [y.into(), gate.into(), g.into(), size(width).into(), d_y.into(), d_gate.into()];
    device.launch(&format!("gated_backward_{}", T::SUFFIX), [rows, 1, 1], threads, 0, &arguments)
}
