// RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): y = w * x / sqrt(mean(x^2) + eps) per row.
//
// One block per row, which reads it twice: the second time from the L1 cache.
#include "common.cuh"

namespace rms {
// `n` contiguous values, accessed together.
template <typename T, int n> struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Pack {
    T at[n];
};

template <int n, typename T> DEVICE Pack<T, n> load_pack(const T* from) { return *reinterpret_cast<const Pack<T, n>*>(from); }

DEVICE bool aligned(const void* pointer) { return (reinterpret_cast<uint64>(pointer) & 15u) == 0; }

// Inverse root mean square of a row, by the whole block.
template <int n, typename T> DEVICE float inverse_rms(const T* x, int width, float eps) {
    float squares = 0;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i);
        for (int j = 0; j < n; ++j) squares = fmaf(load(part.at[j]), load(part.at[j]), squares);
    }
    return 1.0f / sqrtf(block_sum(squares) / width + eps);
}

template <int n, typename T> DEVICE void normalize(const T* x, const T* weight, int width, float eps, T* out) {
    float inverse = inverse_rms<n>(x, width, eps);
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i), scale = load_pack<n>(weight + i);
        for (int j = 0; j < n; ++j) store(&part.at[j], load(part.at[j]) * inverse * load(scale.at[j]));
        *reinterpret_cast<Pack<T, n>*>(out + i) = part;
    }
}

template <int n, typename T>
DEVICE void normalize_backward(const T* x, const T* weight, int width, float eps, const T* g, const T* base, T* dx) {
    float squares = 0, product = 0;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i), scale = load_pack<n>(weight + i), slope = load_pack<n>(g + i);
        for (int j = 0; j < n; ++j) {
            float value = load(part.at[j]);
            squares = fmaf(value, value, squares);
            product = fmaf(load(slope.at[j]) * load(scale.at[j]), value, product);
        }
    }
    float inverse = 1.0f / sqrtf(block_sum(squares) / width + eps);
    float pull = block_sum(product) * inverse * inverse * inverse / width;
    for (int i = threadIdx.x * n; i < width; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i), scale = load_pack<n>(weight + i), slope = load_pack<n>(g + i), under;
        if (base) under = load_pack<n>(base + i);
        for (int j = 0; j < n; ++j) {
            float sum = load(slope.at[j]) * load(scale.at[j]) * inverse - load(part.at[j]) * pull;
            if (base) sum += load(under.at[j]);
            store(&part.at[j], sum);
        }
        *reinterpret_cast<Pack<T, n>*>(dx + i) = part;
    }
}

template <typename T> DEVICE void rms_norm(const T* x, const T* weight, int width, float eps, T* out) {
    constexpr int wide = 16 / sizeof(T);
    int64 at = int64(blockIdx.x) * width;
    if (width % wide == 0 && aligned(x) && aligned(weight) && aligned(out))
        normalize<wide>(x + at, weight, width, eps, out + at);
    else
        normalize<1>(x + at, weight, width, eps, out + at);
}

template <typename T>
DEVICE void rms_norm_backward(const T* x, const T* weight, int width, float eps, const T* g, const T* base, T* dx) {
    constexpr int wide = 16 / sizeof(T);
    int64 at = int64(blockIdx.x) * width;
    const T* under = base ? base + at : base;
    // A null pointer counts as aligned.
    if (width % wide == 0 && aligned(x) && aligned(weight) && aligned(g) && aligned(base) && aligned(dx))
        normalize_backward<wide>(x + at, weight, width, eps, g + at, under, dx + at);
    else
        normalize_backward<1>(x + at, weight, width, eps, g + at, under, dx + at);
}

template <typename T> DEVICE void rms_inverses(const T* x, int width, float eps, float* inverses) {
    constexpr int wide = 16 / sizeof(T);
    const T* row = x + int64(blockIdx.x) * width;
    float inverse = width % wide == 0 && aligned(x) ? inverse_rms<wide>(row, width, eps) : inverse_rms<1>(row, width, eps);
    if (threadIdx.x == 0) inverses[blockIdx.x] = inverse;
}

constexpr int WARPS = 8;

// Sums of g * x * inverse over the rows [first, last), for the columns from `column`, of which lane i has `n` from i *
// n. Each warp takes every eighth row; warps are summed in order.
template <int n, typename T>
DEVICE void slope_sums(const T* x, const T* g, const float* inverses, int first, int last, int column, int width, float* sums) {
    STATIC_SHARED(float, parts, [WARPS * 32 * n]);
    float own[n] = {};
    int from = column + lane_index() * n;
    if (from < width) {
        for (int row = first + warp_index(); row < last; row += WARPS) {
            int64 at = int64(row) * width + from;
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
DEVICE void rms_norm_slopes(const T* x, const T* g, const float* inverses, int rows, int slab, int width, float* partial) {
    constexpr int wide = 16 / sizeof(T), tile = 32 * wide;
    int first = blockIdx.y * slab, last = min(rows, first + slab);
    int column = blockIdx.x * tile;
    float* sums = partial + int64(blockIdx.y) * width;
    if (width % wide == 0 && aligned(x) && aligned(g)) {
        slope_sums<wide>(x, g, inverses, first, last, column, width, sums);
    } else {
        for (int end = min(width, column + tile); column < end; column += 32)
            slope_sums<1>(x, g, inverses, first, last, column, width, sums);
    }
}

#define INSTANCES(T, suffix)                                                                                               \
    KERNEL(256, rms_norm_##suffix, const T* x, const T* weight, int width, float eps, T* out) {                            \
        rms_norm(x, weight, width, eps, out);                                                                              \
    }                                                                                                                      \
    KERNEL(256, rms_norm_backward_##suffix, const T* x, const T* weight, int width, float eps, const T* g, const T* base,  \
           T* dx) {                                                                                                        \
        rms_norm_backward(x, weight, width, eps, g, base, dx);                                                             \
    }                                                                                                                      \
    KERNEL(256, rms_inverses_##suffix, const T* x, int width, float eps, float* inverses) {                                \
        rms_inverses(x, width, eps, inverses);                                                                             \
    }                                                                                                                      \
    KERNEL(256, rms_norm_slopes_##suffix, const T* x, const T* g, const float* inverses, int rows, int slab, int width,    \
           float* partial) {                                                                                               \
        rms_norm_slopes(x, g, inverses, rows, slab, width, partial);                                                       \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace rms
