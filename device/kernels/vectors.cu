// Elementwise operations on flat vectors, and the sum of squares.
//
// Threads access four values at a time in a grid-stride loop; single values at the end, and where a pointer is not
// aligned to 16 bytes.
#include "common.cuh"

namespace vectors {
// Values of the calling thread: every `step`-th pack of four from 4 * first up to `packed`, then every `step`-th value.
struct Walk {
    int64 first, step, packed;
};

DEVICE Walk walk(int64 count, bool wide) {
    int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x, step = int64(gridDim.x) * blockDim.x;
    return {first, step, wide ? count / 4 * 4 : 0};
}

template <int n, typename From, typename To> DEVICE void cast_at(const From* from, To* to) {
    Pack<From, n> part = load_pack<n>(from);
    Pack<To, n> result;
    for (int j = 0; j < n; ++j) store(&result.at[j], load(part.at[j]));
    store_pack(to, result);
}

template <typename From, typename To> DEVICE void cast(const From* from, int64 count, To* to) {
    Walk by = walk(count, aligned(from) && aligned(to));
    for (int64 i = by.first * 4; i < by.packed; i += by.step * 4) cast_at<4>(from + i, to + i);
    for (int64 i = by.packed + by.first; i < count; i += by.step) cast_at<1>(from + i, to + i);
}

template <int n> DEVICE void add_at(const float* from, float* to) {
    Pack<float, n> part = load_pack<n>(from), sum = load_pack<n>(to);
    for (int j = 0; j < n; ++j) sum.at[j] += part.at[j];
    store_pack(to, sum);
}

template <int n, typename T> DEVICE void scale_at(float by, T* x) {
    Pack<T, n> part = load_pack<n>(x);
    for (int j = 0; j < n; ++j) store(&part.at[j], load(part.at[j]) * by);
    store_pack(x, part);
}

template <typename T> DEVICE void scale(float factor, int64 count, T* x) {
    Walk by = walk(count, aligned(x));
    for (int64 i = by.first * 4; i < by.packed; i += by.step * 4) scale_at<4>(factor, x + i);
    for (int64 i = by.packed + by.first; i < count; i += by.step) scale_at<1>(factor, x + i);
}

template <int n, typename T> DEVICE void add_multiple_at(const T* from, float factor, T* to) {
    Pack<T, n> part = load_pack<n>(from), sum = load_pack<n>(to);
    for (int j = 0; j < n; ++j) store(&sum.at[j], fmaf(factor, load(part.at[j]), load(sum.at[j])));
    store_pack(to, sum);
}

template <typename T> DEVICE void add_multiple(const T* from, float factor, int64 count, T* to) {
    Walk by = walk(count, aligned(from) && aligned(to));
    for (int64 i = by.first * 4; i < by.packed; i += by.step * 4) add_multiple_at<4>(from + i, factor, to + i);
    for (int64 i = by.packed + by.first; i < count; i += by.step) add_multiple_at<1>(from + i, factor, to + i);
}

template <int n> DEVICE double squares_at(const float* x) {
    Pack<float, n> part = load_pack<n>(x);
    double sum = 0;
    for (int j = 0; j < n; ++j) sum += double(part.at[j]) * double(part.at[j]);
    return sum;
}

KERNEL(256, cast_f32_f32, const float* from, int64 count, float* to) { cast(from, count, to); }
KERNEL(256, cast_f32_bf16, const float* from, int64 count, bf16* to) { cast(from, count, to); }
KERNEL(256, cast_bf16_f32, const bf16* from, int64 count, float* to) { cast(from, count, to); }
KERNEL(256, cast_bf16_bf16, const bf16* from, int64 count, bf16* to) { cast(from, count, to); }

KERNEL(256, add_f32, const float* from, int64 count, float* to) {
    Walk by = walk(count, aligned(from) && aligned(to));
    for (int64 i = by.first * 4; i < by.packed; i += by.step * 4) add_at<4>(from + i, to + i);
    for (int64 i = by.packed + by.first; i < count; i += by.step) add_at<1>(from + i, to + i);
}

KERNEL(256, scale_f32, float factor, int64 count, float* x) { scale(factor, count, x); }
KERNEL(256, scale_bf16, float factor, int64 count, bf16* x) { scale(factor, count, x); }
KERNEL(256, add_multiple_f32, const float* from, float factor, int64 count, float* to) { add_multiple(from, factor, count, to); }
KERNEL(256, add_multiple_bf16, const bf16* from, float factor, int64 count, bf16* to) { add_multiple(from, factor, count, to); }

// One sum per block in f64, in which squares of f32 neither overflow nor underflow.
KERNEL(256, squares_f32, const float* x, int64 count, double* sums) {
    Walk by = walk(count, aligned(x));
    double sum = 0;
    for (int64 i = by.first * 4; i < by.packed; i += by.step * 4) sum += squares_at<4>(x + i);
    for (int64 i = by.packed + by.first; i < count; i += by.step) sum += squares_at<1>(x + i);
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
}  // namespace vectors
