// Gated units (Shazeer 2020, arXiv 2002.05202): the activation of the gate times `up`.
//   silu:    gate * sigmoid(gate) * up
//   gelu:    gate * sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3)) * up (Hendrycks and Gimpel 2016, arXiv 1606.08415)
//   clamped: g * sigmoid(alpha g) * (u + 1) of g = min(gate, limit) and u within the limit (OpenAI 2025, arXiv 2508.10925)
//
// Block (row, tile) processes the columns of a tile, up to 16 bytes of each input per thread. A backward can write the result of the
// unit over the gradient of it.
#include "common.cuh"

namespace gated_unit {
// Derivatives by gate and up.
struct Slopes {
    float gate, up;
};

struct Silu {};
struct Gelu {};
struct Clamped {
    float alpha, limit;
};

DEVICE float value(const Silu&, float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

DEVICE Slopes slopes(const Silu&, float gate, float up) {
    float open = 1.0f / (1.0f + expf(-gate));
    return {up * open * (1.0f + gate * (1.0f - open)), gate * open};
}

constexpr float SLOPE = 1.5957692f, CUBIC = 0.044715f;

DEVICE float gelu_open(float gate) { return 1.0f / (1.0f + expf(-SLOPE * gate * (1.0f + CUBIC * gate * gate))); }

DEVICE float value(const Gelu&, float gate, float up) { return gate * gelu_open(gate) * up; }

DEVICE Slopes slopes(const Gelu&, float gate, float up) {
    float open = gelu_open(gate);
    // Zero where the gate is closed or fully open: the cubic may be infinite there.
    float bend = open * (1.0f - open);
    if (bend > 0.0f) bend *= gate * SLOPE * (1.0f + 3.0f * CUBIC * gate * gate);
    return {up * (open + bend), gate * open};
}

DEVICE float value(const Clamped& by, float gate, float up) {
    gate = fminf(gate, by.limit), up = fminf(fmaxf(up, -by.limit), by.limit);
    return (up + 1.0f) * (gate / (1.0f + expf(-by.alpha * gate)));
}

// A bound passes no gradient.
DEVICE Slopes slopes(const Clamped& by, float gate, float up) {
    float g = fminf(gate, by.limit), u = fminf(fmaxf(up, -by.limit), by.limit);
    float open = 1.0f / (1.0f + expf(-by.alpha * g));
    float of_gate = (u + 1.0f) * open * (1.0f + by.alpha * g * (1.0f - open));
    return {gate <= by.limit ? of_gate : 0.0f, fabsf(up) <= by.limit ? g * open : 0.0f};
}

template <int n, typename Unit, typename T>
DEVICE void activate(const Unit& unit, const T* gate, const T* up, int first, int last, T* out) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) {
        Pack<T, n> a = load_pack<n>(gate + i), b = load_pack<n>(up + i);
        for (int j = 0; j < n; ++j) store(&a.at[j], value(unit, load(a.at[j]), load(b.at[j])));
        store_pack(out + i, a);
    }
}

template <int n, typename Unit, typename T>
DEVICE void activate_backward(const Unit& unit, const T* gate, const T* up, const T* g, int first, int last, T* result, T* d_gate,
                              T* d_up) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) {
        Pack<T, n> a = load_pack<n>(gate + i), b = load_pack<n>(up + i), above = load_pack<n>(g + i);
        for (int j = 0; j < n; ++j) {
            const float of_gate = load(a.at[j]), of_up = load(b.at[j]), slope = load(above.at[j]);
            Slopes by = slopes(unit, of_gate, of_up);
            store(&a.at[j], slope * by.gate);
            store(&b.at[j], slope * by.up);
            if (result) store(&above.at[j], value(unit, of_gate, of_up));
        }
        if (result) store_pack(result + i, above);
        store_pack(d_gate + i, a);
        store_pack(d_up + i, b);
    }
}

template <typename Unit, typename T> DEVICE void forward(const Unit& unit, const T* gate_up, int width, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const T* gate = gate_up + int64(blockIdx.x) * 2 * width;
    T* to = out + int64(blockIdx.x) * width;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    if (width % wide == 0 && aligned(gate_up) && aligned(out))
        activate<wide>(unit, gate, gate + width, first, last, to);
    else
        activate<1>(unit, gate, gate + width, first, last, to);
}

template <typename Unit, typename T> DEVICE void backward(const Unit& unit, const T* gate_up, int width, const T* g, T* result, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const T* gate = gate_up + int64(blockIdx.x) * 2 * width;
    const T* above = g + int64(blockIdx.x) * width;
    T* to = out + int64(blockIdx.x) * 2 * width;
    T* value = result ? result + int64(blockIdx.x) * width : nullptr;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    // A null pointer counts as aligned.
    if (width % wide == 0 && aligned(gate_up) && aligned(g) && aligned(result) && aligned(out))
        activate_backward<wide>(unit, gate, gate + width, above, first, last, value, to, to + width);
    else
        activate_backward<1>(unit, gate, gate + width, above, first, last, value, to, to + width);
}

// `alpha` and `limit` are those of the clamped unit.
#define UNUSED [[maybe_unused]]
#define INSTANCES(T, suffix, name, unit)                                                                               \
    KERNEL(256, name##_unit_##suffix, const T* gate_up, int width, UNUSED float alpha, UNUSED float limit, T* out) {   \
        forward(unit, gate_up, width, out);                                                                            \
    }                                                                                                                  \
    KERNEL(256, name##_unit_backward_##suffix, const T* gate_up, int width, UNUSED float alpha, UNUSED float limit,    \
           const T* g, T* result, T* out) {                                                                            \
        backward(unit, gate_up, width, g, result, out);                                                                \
    }
#define OF_TYPE(T, suffix)                                                                                             \
    INSTANCES(T, suffix, silu, Silu{})                                                                                 \
    INSTANCES(T, suffix, gelu, Gelu{})                                                                                 \
    INSTANCES(T, suffix, clamped, (Clamped{alpha, limit}))

OF_TYPE(float, f32)
OF_TYPE(bf16, bf16)
#undef OF_TYPE
#undef INSTANCES
#undef UNUSED
}  // namespace gated_unit
