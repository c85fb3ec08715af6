//! Linear layers `y = x W^T + b` over weights packed once per policy version.

use candle_core::{Result, Tensor};

use super::gemm::{Left, Panels, multiply, multiply_add};
use super::int8::Int8Linear;
use super::{matrix, values};

/// Weights of a linear layer, `[out, in]` as Hugging Face stores them, packed for the products that need them.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    forward: Forward,
    backward: Option<Panels>,
    bias: Option<Vec<f32>>,
}

/// The weights as the forward pass takes them.
#[derive(Clone, Debug)]
enum Forward {
    F32(Panels),
    /// With its bias; for sampling only.
    Int8(Int8Linear),
}

impl Linear {
    /// Packs `weight [out, in]`; with `trainable` also for the gradient of the input.
    pub(crate) fn new(weight: &[f32], input: usize, bias: Option<&[f32]>, trainable: bool) -> Self {
        Self {
            forward: Forward::F32(Panels::transposed(weight, input)),
            backward: trainable.then(|| Panels::straight(weight, input)),
            bias: bias.map(<[f32]>::to_vec),
        }
    }

    /// Quantises `weight [out, in]`: for sampling only.
    pub(crate) fn int8(weight: &[f32], input: usize, bias: Option<&[f32]>) -> Self {
        Self { forward: Forward::Int8(Int8Linear::new(weight, input, bias)), backward: None, bias: None }
    }

    /// `x [T, in]` to `[T, out]`.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let mut out = vec![0.0; x.dim(0)? * self.output()];
        self.apply_slice(&values(x)?, &mut out);
        matrix(out, self.output())
    }

    /// `base [T, out]` plus the layer's result for `x [T, in]`.
    pub(crate) fn add_to(&self, base: &Tensor, x: &Tensor) -> Result<Tensor> {
        let Forward::Int8(layer) = &self.forward else { return base + self.apply(x)? };
        let mut out = values(base)?.to_vec();
        layer.add_slice(&values(x)?, &mut out);
        matrix(out, self.output())
    }

    /// `x [T, in]` to `out [T, out]`, on plain rows.
    pub(crate) fn apply_slice(&self, x: &[f32], out: &mut [f32]) {
        match &self.forward {
            Forward::F32(weight) => multiply(Left::straight(x, weight.inner()), weight, out),
            Forward::Int8(layer) => layer.apply_slice(x, out),
        }
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }

    /// `dx [T, in]` for the gradient `g [T, out]` of the result; adds the gradients of weight `[out, in]` and bias
    /// `[out]` to what `gradient` holds (the bias directly after the weight).
    ///
    /// # Panics
    /// If the layer was not made trainable.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        g: &Tensor,
        weight: &mut [f32],
        bias: Option<&mut [f32]>,
    ) -> Result<Tensor> {
        let (x, g) = (values(x)?, values(g)?);
        let (input, output) = (self.input(), self.output());
        multiply_add(Left::transposed(&g, output), &Panels::straight(&x, input), weight);
        if let Some(bias) = bias {
            for g in g.chunks_exact(output) {
                bias.iter_mut().zip(g).for_each(|(b, g)| *b += g);
            }
        }
        let mut dx = vec![0.0; x.len()];
        self.backward_slice(&g, &mut dx);
        matrix(dx, input)
    }

    /// `dx [T, in]` alone, for the gradient `g [T, out]` of the result.
    pub(crate) fn backward_slice(&self, g: &[f32], dx: &mut [f32]) {
        let weight = self.backward.as_ref().expect("only a trainable layer is reversed");
        multiply(Left::straight(g, self.output()), weight, dx);
    }

    /// Number of outputs.
    pub(crate) fn output(&self) -> usize {
        match &self.forward {
            Forward::F32(weight) => weight.columns(),
            Forward::Int8(layer) => layer.output(),
        }
    }

    fn input(&self) -> usize {
        match &self.forward {
            Forward::F32(weight) => weight.inner(),
            Forward::Int8(layer) => layer.input(),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::super::check::{gradient, noise, weighted};
    use super::*;

    #[test]
    fn backward_is_the_derivative_and_adds_up() {
        let (rows, input, output) = (5, 19, 23);
        let (x, w, b, c) =
            (noise(rows * input, 1), noise(input * output, 2), noise(output, 3), noise(rows * output, 4));
        let tensor = |v: &[f32], n: usize| Tensor::from_vec(v.to_vec(), (rows, n), &Device::Cpu).unwrap();
        let loss = |x: &[f32], w: &[f32], b: &[f32]| {
            let y = Linear::new(w, input, Some(b), false).apply(&tensor(x, input)).unwrap();
            weighted(&values(&y).unwrap(), &c)
        };
        let (mut dw, mut db) = (vec![1.0; w.len()], vec![1.0; b.len()]);
        let layer = Linear::new(&w, input, Some(&b), true);
        let dx = layer.backward(&tensor(&x, input), &tensor(&c, output), &mut dw, Some(&mut db)).unwrap();
        dw.iter_mut().chain(&mut db).for_each(|g| *g -= 1.0);
        gradient(|x| loss(x, &w, &b), &x, &values(&dx).unwrap(), 1e-3);
        gradient(|w| loss(&x, w, &b), &w, &dw, 1e-3);
        gradient(|b| loss(&x, &w, b), &b, &db, 1e-3);
    }
}
