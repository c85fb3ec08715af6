//! Causal depthwise convolution over the tokens of a sequence, with SiLU behind it: each channel of a token is a weighted sum of the
//! channel of the last tokens.
//!
//! Inputs are given with those of the `taps - 1` tokens before them, which are zero where a sequence begins. So a sequence has the
//! same bits in one piece and in many.

use super::simd::{exp, vectorized};

/// `[channels, taps]` as `[taps, channels]`.
pub(crate) fn transposed(kernel: &[f32], taps: usize) -> Vec<f32> {
    let channels = kernel.len() / taps;
    (0..taps * channels).map(|at| kernel[at % channels * taps + at / channels]).collect()
}

vectorized! {
    /// `[T, channels]` sums of `x [taps - 1 + T, channels]` for a `kernel [taps, channels]`, before the activation.
    pub(crate) fn convolve(x: &[f32], kernel: &[f32], channels: usize, sums: &mut [f32]) {
        sums.fill(0.0);
        for (token, sums) in sums.chunks_exact_mut(channels).enumerate() {
            let seen = x[token * channels..].chunks_exact(channels);
            for (x, kernel) in seen.zip(kernel.chunks_exact(channels)) {
                for ((sum, x), weight) in sums.iter_mut().zip(x).zip(kernel) {
                    *sum = weight.mul_add(*x, *sum);
                }
            }
        }
    }
}

vectorized! {
    /// SiLU of `sums [n]`, in place.
    pub(crate) fn activate(sums: &mut [f32]) {
        for x in sums {
            *x /= 1.0 + exp(-*x);
        }
    }
}

vectorized! {
    /// Turns the gradient `g [T, channels]` of the activated into that of the `sums [T, channels]`, in place.
    pub(crate) fn activate_backward(sums: &[f32], g: &mut [f32]) {
        for (g, x) in g.iter_mut().zip(sums) {
            let sigmoid = 1.0 / (1.0 + exp(-x));
            *g *= sigmoid * (1.0 + x * (1.0 - sigmoid));
        }
    }
}

vectorized! {
    /// Adds the gradient of the inputs to `dx [taps - 1 + T, channels]`, for the gradient `g [T, channels]` of the sums.
    pub(crate) fn convolve_backward(g: &[f32], kernel: &[f32], channels: usize, dx: &mut [f32]) {
        for (token, g) in g.chunks_exact(channels).enumerate() {
            let seen = dx[token * channels..].chunks_exact_mut(channels);
            for (dx, kernel) in seen.zip(kernel.chunks_exact(channels)) {
                for ((dx, g), weight) in dx.iter_mut().zip(g).zip(kernel) {
                    *dx = weight.mul_add(*g, *dx);
                }
            }
        }
    }
}

vectorized! {
    /// Adds the gradient of the kernel to `gradient [taps, channels]`, token by token.
    pub(crate) fn kernel_gradient(x: &[f32], g: &[f32], channels: usize, gradient: &mut [f32]) {
        for (token, g) in g.chunks_exact(channels).enumerate() {
            let seen = x[token * channels..].chunks_exact(channels);
            for (x, gradient) in seen.zip(gradient.chunks_exact_mut(channels)) {
                for ((sum, g), x) in gradient.iter_mut().zip(g).zip(x) {
                    *sum = g.mul_add(*x, *sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::{gradient, noise, weighted};
    use super::*;

    const TAPS: usize = 4;
    const CHANNELS: usize = 19;

    fn forward(x: &[f32], kernel: &[f32]) -> Vec<f32> {
        let mut out = vec![7.0; x.len() - (TAPS - 1) * CHANNELS];
        convolve(x, kernel, CHANNELS, &mut out);
        activate(&mut out);
        out
    }

    #[test]
    fn backward_is_the_derivative() {
        let (x, kernel) = (noise((TAPS - 1 + 6) * CHANNELS, 1), noise(TAPS * CHANNELS, 2));
        let mut g = noise(6 * CHANNELS, 3);
        let c = g.clone();
        let mut sums = vec![0.0; g.len()];
        convolve(&x, &kernel, CHANNELS, &mut sums);
        activate_backward(&sums, &mut g);
        let (mut dx, mut dk) = (vec![0.0; x.len()], vec![0.0; kernel.len()]);
        convolve_backward(&g, &kernel, CHANNELS, &mut dx);
        kernel_gradient(&x, &g, CHANNELS, &mut dk);
        gradient(|x| weighted(&forward(x, &kernel), &c), &x, &dx, 1e-2);
        gradient(|kernel| weighted(&forward(&x, kernel), &c), &kernel, &dk, 1e-2);
    }

    #[test]
    fn the_last_tap_is_the_token_itself() {
        let kernel = transposed(&[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 3);
        assert_eq!(kernel, [1.0, 8.0, 2.0, 16.0, 4.0, 32.0]);
        let x = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0];
        let mut sums = [9.0; 6];
        convolve(&x, &kernel, 2, &mut sums);
        assert_eq!(sums, [4.0, 32.0, 2.0, 16.0, 1.0, 8.0]);
    }
}
