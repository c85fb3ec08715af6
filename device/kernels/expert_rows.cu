// Rows of experts: sums of their results by token, and gradients by row; and the gate of the network beside them.
//
// A block has a row, or a tile of its columns. Sums are f32 in an order that does not depend on other rows.
#include "common.cuh"

namespace expert_rows {
// A slot without a row, as in `routes.cu`.
constexpr uint32 NOWHERE = 0xffffffffu;

template <int n, typename T>
DEVICE void add_columns(const T* y, const uint32* rows, const float* weights, int count, int width, int first, int last, T* out) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) {
        Pack<T, n> own = load_pack<n>(out + i);
        float sums[n];
        for (int j = 0; j < n; ++j) sums[j] = load(own.at[j]);
        for (int k = 0; k < count; ++k) {
            if (rows[k] == NOWHERE) continue;
            const Pack<T, n> part = load_pack<n>(y + int64(rows[k]) * width + i);
            const float weight = weights ? weights[k] : 1.0f;
            for (int j = 0; j < n; ++j) sums[j] += weight * load(part.at[j]);
        }
        for (int j = 0; j < n; ++j) store(&own.at[j], sums[j]);
        store_pack(out + i, own);
    }
}

// Block (token, tile): adds the `rows` [per_token] of y of a token to its row of `out`, in the order of its slots, each times
// its weight unless that is null.
template <typename T>
DEVICE void add_slots(const T* y, const uint32* rows, const float* weights, int per_token, int width, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const int64 slot = int64(blockIdx.x) * per_token;
    T* to = out + int64(blockIdx.x) * width;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    const float* own = weights ? weights + slot : nullptr;
    if (width % wide == 0 && aligned(y) && aligned(out))
        add_columns<wide>(y, rows + slot, own, per_token, width, first, last, to);
    else
        add_columns<1>(y, rows + slot, own, per_token, width, first, last, to);
}

// Block (row): the gradient of the weight of a slot into `d_weights`, and both operands times that weight. `d` is the gradient
// of the activation `a` of an expert without the weight: g . (W a + b) = (W^T g) . a + g . b; the second part is of the
// gradient g [tokens, hidden] of the token and the bias of the expert, unless that is null.
template <typename T>
DEVICE void weigh(T* d, T* a, int width, const uint32* slots, const uint32* experts, const float* weights, int per_token,
                  const T* g, const T* bias, int hidden, float* d_weights) {
    const uint32 slot = slots[blockIdx.x];
    const float weight = weights[slot];
    T *own_d = d + int64(blockIdx.x) * width, *own_a = a + int64(blockIdx.x) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float left = load(own_d[i]), right = load(own_a[i]);
        sum = fmaf(left, right, sum);
        store(own_d + i, left * weight);
        store(own_a + i, right * weight);
    }
    if (bias) {
        const T *own_g = g + int64(slot / uint32(per_token)) * hidden, *own_bias = bias + int64(experts[slot]) * hidden;
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) sum = fmaf(load(own_g[i]), load(own_bias[i]), sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_weights[slot] = sum;
}

constexpr int WARPS = 8;

// Block (tile of 32 columns, expert): adds the rows of an expert to its `sums` [width], each times the weight of its slot
// unless that is null. Row i is that of token slots[i] / per_token, or row i of g if `by_token` is 0.
template <typename T>
DEVICE void add_row_sums(const T* g, const uint32* slots, const float* weights, int per_token, int by_token, const uint32* starts,
                         int width, float* sums) {
    STATIC_SHARED(float, parts, [WARPS * 32]);
    const int column = blockIdx.x * 32 + lane_index();
    float own = 0.0f;
    if (column < width) {
        for (int64 row = starts[blockIdx.y] + warp_index(); row < starts[blockIdx.y + 1]; row += WARPS) {
            const int64 from = by_token ? int64(slots[row] / uint32(per_token)) : row;
            const float value = load(g[from * width + column]);
            own += weights ? value * weights[slots[row]] : value;
        }
    }
    parts[threadIdx.x] = own;
    BLOCK_SYNC();
    if (warp_index() > 0 || column >= width) return;
    float sum = sums[int64(blockIdx.y) * width + column];
    for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp * 32 + lane_index()];
    sums[int64(blockIdx.y) * width + column] = sum;
}

// Block (row, tile): adds a row of y to that of `out`, times the sigmoid of the row's gate.
template <typename T> DEVICE void add_gated(const T* y, const float* gate, int width, T* out) {
    const float open = sigmoid(gate[blockIdx.x]);
    const int64 first = int64(blockIdx.x) * width;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += blockDim.x * gridDim.y)
        store(out + first + i, fmaf(open, load(y[first + i]), load(out[first + i])));
}

// Block (row): the gradients of y and of the gate for that of the result of `add_gated`.
template <typename T> DEVICE void gated_backward(const T* y, const float* gate, const T* g, int width, T* d_y, float* d_gate) {
    const float open = sigmoid(gate[blockIdx.x]);
    const int64 first = int64(blockIdx.x) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float above = load(g[first + i]);
        sum = fmaf(load(y[first + i]), above, sum);
        store(d_y + first + i, above * open);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) d_gate[blockIdx.x] = sum * open * (1.0f - open);
}

#define INSTANCES(T, suffix)                                                                                                    \
    KERNEL(256, add_slots_##suffix, const T* y, const uint32* rows, const float* weights, int per_token, int width, T* out) {   \
        add_slots(y, rows, weights, per_token, width, out);                                                                     \
    }                                                                                                                           \
    KERNEL(256, weigh_rows_##suffix, T* d, T* a, int width, const uint32* slots, const uint32* experts, const float* weights,   \
           int per_token, const T* g, const T* bias, int hidden, float* d_weights) {                                            \
        weigh(d, a, width, slots, experts, weights, per_token, g, bias, hidden, d_weights);                                     \
    }                                                                                                                           \
    KERNEL(256, add_row_sums_##suffix, const T* g, const uint32* slots, const float* weights, int per_token, int by_token,      \
           const uint32* starts, int width, float* sums) {                                                                      \
        add_row_sums(g, slots, weights, per_token, by_token, starts, width, sums);                                              \
    }                                                                                                                           \
    KERNEL(256, add_gated_##suffix, const T* y, const float* gate, int width, T* out) { add_gated(y, gate, width, out); }       \
    KERNEL(256, gated_backward_##suffix, const T* y, const float* gate, const T* g, int width, T* d_y, float* d_gate) {         \
        gated_backward(y, gate, g, width, d_y, d_gate);                                                                         \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace expert_rows
