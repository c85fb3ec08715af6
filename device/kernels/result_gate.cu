// The gate on the result of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): the normalised result times SiLU of the
// token's own gate, which is the end of each row of a projection.
#include "common.cuh"

namespace result_gate {
// visit(index in the result, index in the projection) for every value of [rows, width], with gates from `first` in rows of
// `stride`.
template <typename Visit> DEVICE void visit_gates(int64 rows, int width, int first, int stride, Visit visit) {
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * width; i += step)
        visit(i, i / width * stride + first + i % width);
}

template <typename T>
DEVICE void gate_result(const T* x, const T* projection, int64 rows, int width, int first, int stride, T* out) {
    visit_gates(rows, width, first, stride, [=](int64 at, int64 of_gate) {
        const float gate = load(projection[of_gate]);
        store(out + at, load(x[at]) * gate * sigmoid(gate));
    });
}

// Makes g [rows, width] the gradient of x, and writes that of the gates to their place in `d_projection`.
template <typename T>
DEVICE void gate_result_backward(const T* x, const T* projection, int64 rows, int width, int first, int stride, T* g,
                                 T* d_projection) {
    visit_gates(rows, width, first, stride, [=](int64 at, int64 of_gate) {
        const float gate = load(projection[of_gate]), open = sigmoid(gate), slope = load(g[at]);
        store(d_projection + of_gate, slope * load(x[at]) * open * (1.0f + gate * (1.0f - open)));
        store(g + at, slope * gate * open);
    });
}

#define INSTANCES(T, suffix)                                                                                                \
    KERNEL(256, gate_result_##suffix, const T* x, const T* projection, int64 rows, int width, int first, int stride,        \
           T* out) {                                                                                                        \
        gate_result(x, projection, rows, width, first, stride, out);                                                        \
    }                                                                                                                       \
    KERNEL(256, gate_result_backward_##suffix, const T* x, const T* projection, int64 rows, int width, int first,           \
           int stride, T* g, T* d_projection) {                                                                             \
        gate_result_backward(x, projection, rows, width, first, stride, g, d_projection);                                   \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace result_gate
