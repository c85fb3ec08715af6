// AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) with f32 moments, in one pass over weights, gradients and
// moments.
#include "common.cuh"

namespace adamw {
// Factors of an update.
struct Factors {
    float scale, beta1, beta2, eps, step_size, second_scale, keep;
};

// Updates `n` values from index `i`; `compute` (optional) receives the rounded values.
template <int n, typename T>
DEVICE void step(const Factors& by, int64 i, float* values, float* first, float* second, const float* gradient, T* compute) {
    Pack<float, n> value = load_pack<n>(values + i), slope = load_pack<n>(gradient + i);
    Pack<float, n> mean = load_pack<n>(first + i), square = load_pack<n>(second + i);
    Pack<T, n> rounded;
    for (int j = 0; j < n; ++j) {
        float g = slope.at[j] * by.scale;
        mean.at[j] = by.beta1 * mean.at[j] + (1.0f - by.beta1) * g;
        square.at[j] = by.beta2 * square.at[j] + (1.0f - by.beta2) * g * g;
        float root = sqrtf(square.at[j] * by.second_scale) + by.eps;
        value.at[j] = value.at[j] * by.keep - by.step_size * mean.at[j] / root;
        store(&rounded.at[j], value.at[j]);
    }
    store_pack(values + i, value);
    store_pack(first + i, mean);
    store_pack(second + i, square);
    if (compute) store_pack(compute + i, rounded);
}

template <typename T>
DEVICE void adamw(const Factors& by, int64 count, float* values, float* first, float* second, const float* gradient,
                  T* compute) {
    int64 number = int64(blockIdx.x) * blockDim.x + threadIdx.x, threads = int64(gridDim.x) * blockDim.x;
    // A null pointer counts as aligned.
    bool wide = aligned(values) && aligned(first) && aligned(second) && aligned(gradient) && aligned(compute);
    int64 packed = wide ? count / 4 * 4 : 0;
    for (int64 i = number * 4; i < packed; i += threads * 4) step<4>(by, i, values, first, second, gradient, compute);
    for (int64 i = packed + number; i < count; i += threads) step<1>(by, i, values, first, second, gradient, compute);
}

#define INSTANCE(T, suffix)                                                                                                  \
    KERNEL(256, adamw_##suffix, float scale, float beta1, float beta2, float eps, float step_size, float second_scale,       \
           float keep, int64 count, float* values, float* first, float* second, const float* gradient, T* compute) {         \
        Factors by = {scale, beta1, beta2, eps, step_size, second_scale, keep};                                              \
        adamw(by, count, values, first, second, gradient, compute);                                                          \
    }

INSTANCE(float, f32)
INSTANCE(bf16, bf16)
#undef INSTANCE
}  // namespace adamw
