// RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): y = factor * (w + offset) * x / sqrt(mean(x^2) + eps) per row.
//
// One block per row, which reads it twice: the second time from the L1 cache. A row is `width` columns of a longer row,
// whose successor is `stride` values later. The result, and the gradient, may be written over their operands.
#include "common.cuh"

namespace rms {
// Layout of the rows, and what weights and results are changed by.
struct Norm {
    int width, stride;
    float eps, offset, factor;
};

DEVICE float weight_of(const Norm& norm, float weight) { return (weight + norm.offset) * norm.factor; }

// Where the row of the calling block begins.
DEVICE int64 row_start(const Norm& norm) { return int64(blockIdx.x) * norm.stride; }

// Whether rows can be accessed in packs of `n`.
template <int n> DEVICE bool packed(const Norm& norm) { return norm.width % n == 0 && norm.stride % n == 0; }

// Inverse root mean square of a row, by the whole block.
template <int n, typename T> DEVICE float inverse_rms(const T* x, int width, float eps) {
    float squares = 0;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i);
        for (int j = 0; j < n; ++j) squares = fmaf(load(part.at[j]), load(part.at[j]), squares);
    }
    return 1.0f / sqrtf(block_sum(squares) / width + eps);
}

// `base` is added to the result unless it is null.
template <int n, typename T> DEVICE void normalize(const T* x, const T* weight, const Norm& norm, const T* base, T* out) {
    float inverse = inverse_rms<n>(x, norm.width, norm.eps);
    for (int i = threadIdx.x * n; i < norm.width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i), scale = load_pack<n>(weight + i), under;
        if (base) under = load_pack<n>(base + i);
        for (int j = 0; j < n; ++j) {
            float value = load(part.at[j]) * inverse * weight_of(norm, load(scale.at[j]));
            store(&part.at[j], base ? load(under.at[j]) + value : value);
        }
        store_pack(out + i, part);
    }
}

// Returns the inverse root mean square.
template <int n, typename T>
DEVICE float normalize_backward(const T* x, const T* weight, const Norm& norm, const T* g, const T* base, T* dx) {
    const int width = norm.width;
    float squares = 0, product = 0;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i), scale = load_pack<n>(weight + i), slope = load_pack<n>(g + i);
        for (int j = 0; j < n; ++j) {
            float value = load(part.at[j]);
            squares = fmaf(value, value, squares);
            product = fmaf(load(slope.at[j]) * weight_of(norm, load(scale.at[j])), value, product);
        }
    }
    float inverse = 1.0f / sqrtf(block_sum(squares) / width + norm.eps);
    float pull = block_sum(product) * inverse * inverse * inverse / width;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i), scale = load_pack<n>(weight + i), slope = load_pack<n>(g + i), under;
        if (base) under = load_pack<n>(base + i);
        for (int j = 0; j < n; ++j) {
            float sum = load(slope.at[j]) * weight_of(norm, load(scale.at[j])) * inverse - load(part.at[j]) * pull;
            if (base) sum += load(under.at[j]);
            store(&part.at[j], sum);
        }
        store_pack(dx + i, part);
    }
    return inverse;
}

template <typename T> DEVICE void rms_norm(const T* x, const T* weight, const Norm& norm, const T* base, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const int64 at = row_start(norm);
    const T* under = base ? base + at : base;
    // A null pointer counts as aligned.
    if (packed<wide>(norm) && aligned(x) && aligned(weight) && aligned(base) && aligned(out))
        normalize<wide>(x + at, weight, norm, under, out + at);
    else
        normalize<1>(x + at, weight, norm, under, out + at);
}

template <typename T>
DEVICE void rms_norm_backward(const T* x, const T* weight, const Norm& norm, const T* g, const T* base, T* dx, float* inverses) {
    constexpr int wide = 16 / sizeof(T);
    const int64 at = row_start(norm);
    const T* under = base ? base + at : base;
    const bool packs = packed<wide>(norm) && aligned(x) && aligned(weight) && aligned(g) && aligned(base) && aligned(dx);
    const float inverse = packs ? normalize_backward<wide>(x + at, weight, norm, g + at, under, dx + at)
                                : normalize_backward<1>(x + at, weight, norm, g + at, under, dx + at);
    if (inverses && threadIdx.x == 0) inverses[blockIdx.x] = inverse * norm.factor;
}

// The factor of each row of `x` in a normalised one, without the weight.
template <typename T> DEVICE void rms_inverses(const T* x, const Norm& norm, float* inverses) {
    constexpr int wide = 16 / sizeof(T);
    const T* row = x + row_start(norm);
    const float inverse = packed<wide>(norm) && aligned(x) ? inverse_rms<wide>(row, norm.width, norm.eps)
                                                          : inverse_rms<1>(row, norm.width, norm.eps);
    if (threadIdx.x == 0) inverses[blockIdx.x] = inverse * norm.factor;
}

constexpr int WARPS = 8;

// Sums of g * x * inverse over the rows [first, last), for the columns from `column`, of which lane i has `n` from i *
// n. Each warp takes every eighth row; warps are summed in order.
template <int n, typename T>
DEVICE void slope_sums(const T* x, const T* g, const float* inverses, int first, int last, int column, int width, int stride,
                       float* sums) {
    STATIC_SHARED(float, parts, [WARPS * 32 * n]);
    float own[n] = {};
    int from = column + lane_index() * n;
    if (from < width) {
        for (int row = first + warp_index(); row < last; row += WARPS) {
            int64 at = int64(row) * stride + from;
            Pack<T, n> part = load_pack<n>(x + at), slope = load_pack<n>(g + at);
            float inverse = inverses[row];
            for (int j = 0; j < n; ++j) own[j] = fmaf(load(slope.at[j]) * load(part.at[j]), inverse, own[j]);
        }
    }
    for (int j = 0; j < n; ++j) parts[(warp_index() * n + j) * 32 + lane_index()] = own[j];
    BLOCK_SYNC();
    for (int i = threadIdx.x; i < 32 * n; i += WARPS * 32) {
        float sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[(warp * n + i % n) * 32 + i / n];
        if (column + i < width) sums[column + i] = sum;
    }
    BLOCK_SYNC();
}

// Block (tile of columns, slab of rows): partial sums into partial [slabs, width].
template <typename T>
DEVICE void rms_norm_slopes(const T* x, const T* g, const float* inverses, int rows, int slab, int width, int stride,
                            float* partial) {
    constexpr int wide = 16 / sizeof(T), tile = 32 * wide;
    int first = blockIdx.y * slab, last = min(rows, first + slab);
    int column = blockIdx.x * tile;
    float* sums = partial + int64(blockIdx.y) * width;
    if (width % wide == 0 && stride % wide == 0 && aligned(x) && aligned(g)) {
        slope_sums<wide>(x, g, inverses, first, last, column, width, stride, sums);
    } else {
        for (int end = min(width, column + tile); column < end; column += 32)
            slope_sums<1>(x, g, inverses, first, last, column, width, stride, sums);
    }
}

#define INSTANCES(T, suffix)                                                                                                 \
    KERNEL(256, rms_norm_##suffix, const T* x, const T* weight, int width, int stride, float eps, float offset,              \
           float factor, const T* base, T* out) {                                                                            \
        rms_norm(x, weight, Norm{width, stride, eps, offset, factor}, base, out);                                            \
    }                                                                                                                        \
    KERNEL(256, rms_norm_backward_##suffix, const T* x, const T* weight, int width, int stride, float eps, float offset,     \
           float factor, const T* g, const T* base, T* dx, float* inverses) {                                                \
        rms_norm_backward(x, weight, Norm{width, stride, eps, offset, factor}, g, base, dx, inverses);                       \
    }                                                                                                                        \
    KERNEL(256, rms_inverses_##suffix, const T* x, int width, int stride, float eps, float factor, float* inverses) {        \
        rms_inverses(x, Norm{width, stride, eps, 0.0f, factor}, inverses);                                                   \
    }                                                                                                                        \
    KERNEL(256, rms_norm_slopes_##suffix, const T* x, const T* g, const float* inverses, int rows, int slab, int width,      \
           int stride, float* partial) {                                                                                     \
        rms_norm_slopes(x, g, inverses, rows, slab, width, stride, partial);                                                 \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace rms
