// Gates on the result of attention (Qiu et al. 2025, arXiv 2505.06708): the result times a sigmoid of the token's own.
//
// The projection has the gate of a query head behind the head: `[rows, 2 queries + keys + values]`. Threads move up to
// 16 bytes at a time.
#include "common.cuh"

namespace gates {
// Widths of the queries, and of keys and values together.
struct Layout {
    int64 rows;
    int queries, rest, dim;
};

// Moves between a row of the projection and its parts, `n` values at a time: visit(column in the row, column in the
// queries, keys and values or -1, column in the gates).
template <int n, typename Visit> DEVICE void visit_projection(const Layout& layout, Visit visit) {
    const int width = (2 * layout.queries + layout.rest) / n;
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < layout.rows * width; i += step) {
        const int64 row = i / width;
        const int column = int(i % width) * n, head = column / (2 * layout.dim), within = column % (2 * layout.dim);
        if (column >= 2 * layout.queries)
            visit(row, column, column - layout.queries, -1);
        else if (within < layout.dim)
            visit(row, column, head * layout.dim + within, -1);
        else
            visit(row, column, -1, head * layout.dim + within - layout.dim);
    }
}

template <int n, typename T> DEVICE void split(const Layout& layout, const T* projection, T* qkv, T* gates) {
    visit_projection<n>(layout, [=](int64 row, int column, int to, int to_gate) {
        const Pack<T, n> pack = load_pack<n>(projection + row * (2 * layout.queries + layout.rest) + column);
        if (to >= 0)
            store_pack(qkv + row * (layout.queries + layout.rest) + to, pack);
        else
            store_pack(gates + row * layout.queries + to_gate, pack);
    });
}

template <int n, typename T> DEVICE void join(const Layout& layout, const T* qkv, const T* gates, T* projection) {
    visit_projection<n>(layout, [=](int64 row, int column, int from, int from_gate) {
        const T* at = from >= 0 ? qkv + row * (layout.queries + layout.rest) + from : gates + row * layout.queries + from_gate;
        store_pack(projection + row * (2 * layout.queries + layout.rest) + column, load_pack<n>(at));
    });
}

template <typename T> DEVICE void split_gates(const Layout& layout, const T* projection, T* qkv, T* gates) {
    constexpr int wide = 16 / sizeof(T);
    if (layout.dim % wide == 0 && aligned(projection) && aligned(qkv) && aligned(gates))
        split<wide>(layout, projection, qkv, gates);
    else
        split<1>(layout, projection, qkv, gates);
}

template <typename T> DEVICE void join_gates(const Layout& layout, const T* qkv, const T* gates, T* projection) {
    constexpr int wide = 16 / sizeof(T);
    if (layout.dim % wide == 0 && aligned(projection) && aligned(qkv) && aligned(gates))
        join<wide>(layout, qkv, gates, projection);
    else
        join<1>(layout, qkv, gates, projection);
}

template <int n, typename T> DEVICE void apply(const T* x, const T* gates, int64 i, T* out) {
    Pack<T, n> part = load_pack<n>(x + i), gate = load_pack<n>(gates + i);
    for (int j = 0; j < n; ++j) store(&part.at[j], load(part.at[j]) * sigmoid(load(gate.at[j])));
    store_pack(out + i, part);
}

template <int n, typename T> DEVICE void apply_backward(const T* x, const T* gates, int64 i, T* g, T* d_gates) {
    Pack<T, n> part = load_pack<n>(x + i), gate = load_pack<n>(gates + i), slope = load_pack<n>(g + i);
    for (int j = 0; j < n; ++j) {
        const float open = sigmoid(load(gate.at[j])), above = load(slope.at[j]);
        store(&gate.at[j], above * load(part.at[j]) * open * (1.0f - open));
        store(&slope.at[j], above * open);
    }
    store_pack(d_gates + i, gate);
    store_pack(g + i, slope);
}

// Values of the calling thread: every `step`-th pack from `first` up to `packed`, then every `step`-th value.
struct Walk {
    int64 first, step, packed;
};

template <int wide> DEVICE Walk walk(int64 count, bool packed) {
    const int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x, step = int64(gridDim.x) * blockDim.x;
    return {first, step, packed ? count / wide * wide : 0};
}

template <typename T> DEVICE void gate(const T* x, const T* gates, int64 count, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const Walk by = walk<wide>(count, aligned(x) && aligned(gates) && aligned(out));
    for (int64 i = by.first * wide; i < by.packed; i += by.step * wide) apply<wide>(x, gates, i, out);
    for (int64 i = by.packed + by.first; i < count; i += by.step) apply<1>(x, gates, i, out);
}

template <typename T> DEVICE void gate_backward(const T* x, const T* gates, int64 count, T* g, T* d_gates) {
    constexpr int wide = 16 / sizeof(T);
    const Walk by = walk<wide>(count, aligned(x) && aligned(gates) && aligned(g) && aligned(d_gates));
    for (int64 i = by.first * wide; i < by.packed; i += by.step * wide) apply_backward<wide>(x, gates, i, g, d_gates);
    for (int64 i = by.packed + by.first; i < count; i += by.step) apply_backward<1>(x, gates, i, g, d_gates);
}

#define INSTANCES(T, suffix)                                                                                              \
    KERNEL(256, split_gates_##suffix, const T* projection, int64 rows, int queries, int rest, int dim, T* qkv, T* gates) { \
        split_gates(Layout{rows, queries, rest, dim}, projection, qkv, gates);                                            \
    }                                                                                                                     \
    KERNEL(256, join_gates_##suffix, const T* qkv, const T* gates, int64 rows, int queries, int rest, int dim,            \
           T* projection) {                                                                                               \
        join_gates(Layout{rows, queries, rest, dim}, qkv, gates, projection);                                             \
    }                                                                                                                     \
    KERNEL(256, gate_##suffix, const T* x, const T* gates, int64 count, T* out) { gate(x, gates, count, out); }           \
    KERNEL(256, gate_backward_##suffix, const T* x, const T* gates, int64 count, T* g, T* d_gates) {                      \
        gate_backward(x, gates, count, g, d_gates);                                                                       \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace gates
