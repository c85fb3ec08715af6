// Gather, scatter and sum of rows: embedding and its gradient, selected rows.
//
// Block (row, tile) processes the columns of a tile, up to 16 bytes per thread. Sums are f32 in row order, so they are
// deterministic.
#include "common.cuh"

namespace rows {
template <int n, typename T> DEVICE void copy_columns(const T* from, int first, int last, T* to) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) store_pack(to + i, load_pack<n>(from + i));
}

template <typename T> DEVICE void gather_rows(const T* from, const uint32* rows, int width, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const T* row = from + int64(rows[blockIdx.x]) * width;
    T* to = out + int64(blockIdx.x) * width;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    if (width % wide == 0 && aligned(from) && aligned(out))
        copy_columns<wide>(row, first, last, to);
    else
        copy_columns<1>(row, first, last, to);
}

// Adds the rows `positions[0..count]` of g to `sums` in order, with several loads in flight.
template <int n, typename T>
DEVICE void add_positions(const T* g, const uint32* positions, int count, int64 width, int column, float (&sums)[n]) {
    constexpr int together = 4;
    int done = 0;
    for (; done + together <= count; done += together) {
        Pack<T, n> parts[together];
        for (int k = 0; k < together; ++k) parts[k] = load_pack<n>(g + positions[done + k] * width + column);
        for (int k = 0; k < together; ++k)
            for (int j = 0; j < n; ++j) sums[j] += load(parts[k].at[j]);
    }
    for (; done < count; ++done) {
        Pack<T, n> part = load_pack<n>(g + positions[done] * width + column);
        for (int j = 0; j < n; ++j) sums[j] += load(part.at[j]);
    }
}

template <int n, bool keep, typename T, typename To>
DEVICE void sum_group(const T* g, const uint32* positions, int count, int width, int first, int last, To* to) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) {
        float sums[n] = {};
        Pack<To, n> result;
        if (keep) {
            result = load_pack<n>(to + i);
            for (int j = 0; j < n; ++j) sums[j] = load(result.at[j]);
        }
        add_positions<n>(g, positions, count, width, i, sums);
        for (int j = 0; j < n; ++j) store(&result.at[j], sums[j]);
        store_pack(to + i, result);
    }
}

// Block (group, tile): sum of the rows of g with the group's key, into row `key` of `to`, added to its old value if
// `keep`. `starts` [groups + 1] has the start of each group in the positions.
template <bool keep, typename T, typename To>
DEVICE void sum_groups(const T* g, const uint32* keys, const uint32* starts, const uint32* positions, int width, To* to) {
    constexpr int wide = 16 / sizeof(T);
    uint32 start = starts[blockIdx.x];
    int count = starts[blockIdx.x + 1] - start;
    To* row = to + int64(keys[blockIdx.x]) * width;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    if (width % wide == 0 && aligned(g) && aligned(to))
        sum_group<wide, keep>(g, positions + start, count, width, first, last, row);
    else
        sum_group<1, keep>(g, positions + start, count, width, first, last, row);
}

template <int n, typename T> DEVICE void add_columns(const T* bias, int first, int last, T* x) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) {
        Pack<T, n> part = load_pack<n>(x + i), more = load_pack<n>(bias + i);
        for (int j = 0; j < n; ++j) store(&part.at[j], load(part.at[j]) + load(more.at[j]));
        store_pack(x + i, part);
    }
}

template <typename T> DEVICE void add_bias(const T* bias, int width, T* x) {
    constexpr int wide = 16 / sizeof(T);
    T* row = x + int64(blockIdx.x) * width;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    if (width % wide == 0 && aligned(bias) && aligned(x))
        add_columns<wide>(bias, first, last, row);
    else
        add_columns<1>(bias, first, last, row);
}

constexpr int WARPS = 8;

// Sums over the rows [first, last) of the columns from `column`, of which lane i has `n` from i * n. Each warp takes
// every eighth row; warps are summed in order. The old value of `sums` is added if `keep`.
template <int n, bool keep, typename T>
DEVICE void slab_sums(const T* g, int first, int last, int column, int width, float* sums) {
    STATIC_SHARED(float, parts, [WARPS * 32 * n]);
    float own[n] = {};
    int from = column + lane_index() * n;
    if (from < width) {
        for (int row = first + warp_index(); row < last; row += WARPS) {
            Pack<T, n> part = load_pack<n>(g + int64(row) * width + from);
            for (int j = 0; j < n; ++j) own[j] += load(part.at[j]);
        }
    }
    for (int j = 0; j < n; ++j) parts[(warp_index() * n + j) * 32 + lane_index()] = own[j];
    BLOCK_SYNC();
    for (int i = threadIdx.x; i < 32 * n; i += WARPS * 32) {
        float sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[(warp * n + i % n) * 32 + i / n];
        if (column + i < width) sums[column + i] = keep ? sums[column + i] + sum : sum;
    }
    BLOCK_SYNC();
}

// Block (tile of columns, slab of rows): partial sums into partial [slabs, width].
template <typename T> DEVICE void column_parts(const T* g, int rows, int slab, int width, float* partial) {
    constexpr int wide = 16 / sizeof(T), tile = 32 * wide;
    int first = blockIdx.y * slab, last = min(rows, first + slab);
    int column = blockIdx.x * tile;
    float* sums = partial + int64(blockIdx.y) * width;
    if (width % wide == 0 && aligned(g)) {
        slab_sums<wide, false>(g, first, last, column, width, sums);
    } else {
        for (int end = min(width, column + tile); column < end; column += 32)
            slab_sums<1, false>(g, first, last, column, width, sums);
    }
}

// to [width] += column sums of partial [slabs, width], 32 columns per block.
KERNEL(256, add_partial_sums, const float* partial, int slabs, int width, float* to) {
    slab_sums<1, true>(partial, 0, slabs, blockIdx.x * 32, width, to);
}

#define INSTANCES(T, suffix)                                                                                                \
    KERNEL(256, gather_rows_##suffix, const T* from, const uint32* rows, int width, T* out) {                               \
        gather_rows(from, rows, width, out);                                                                                \
    }                                                                                                                       \
    KERNEL(256, add_rows_##suffix, const T* g, const uint32* keys, const uint32* starts, const uint32* positions,           \
           int width, float* to) {                                                                                          \
        sum_groups<true>(g, keys, starts, positions, width, to);                                                            \
    }                                                                                                                       \
    KERNEL(256, scatter_rows_##suffix, const T* g, const uint32* keys, const uint32* starts, const uint32* positions,       \
           int width, T* to) {                                                                                              \
        sum_groups<false>(g, keys, starts, positions, width, to);                                                           \
    }                                                                                                                       \
    KERNEL(256, add_bias_##suffix, const T* bias, int width, T* x) { add_bias(bias, width, x); }                            \
    KERNEL(256, column_parts_##suffix, const T* g, int rows, int slab, int width, float* partial) {                         \
        column_parts(g, rows, slab, width, partial);                                                                        \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace rows
