// SwiGLU (Shazeer 2020, arXiv 2002.05202): silu(gate) * up.
//
// Block (row, tile) processes the columns of a tile, up to 16 bytes of each input per thread.
#include "common.cuh"

namespace swiglu {
// `n` contiguous values, accessed together.
template <typename T, int n> struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Pack {
    T at[n];
};

template <int n, typename T> DEVICE Pack<T, n> load_pack(const T* from) { return *reinterpret_cast<const Pack<T, n>*>(from); }
template <int n, typename T> DEVICE void store_pack(T* to, const Pack<T, n>& pack) {
    *reinterpret_cast<Pack<T, n>*>(to) = pack;
}

DEVICE bool aligned(const void* pointer) { return (reinterpret_cast<uint64>(pointer) & 15u) == 0; }

DEVICE float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

template <int n, typename T> DEVICE void activate(const T* gate, const T* up, int first, int last, T* out) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) {
        Pack<T, n> a = load_pack<n>(gate + i), b = load_pack<n>(up + i);
        for (int j = 0; j < n; ++j) {
            float value = load(a.at[j]);
            store(&a.at[j], value / (1.0f + expf(-value)) * load(b.at[j]));
        }
        store_pack(out + i, a);
    }
}

template <int n, typename T>
DEVICE void activate_backward(const T* gate, const T* up, const T* g, int first, int last, T* d_gate, T* d_up) {
    for (int i = first + threadIdx.x * n; i < last; i += blockDim.x * n) {
        Pack<T, n> a = load_pack<n>(gate + i), b = load_pack<n>(up + i), slope = load_pack<n>(g + i);
        for (int j = 0; j < n; ++j) {
            float value = load(a.at[j]), above = load(slope.at[j]), open = sigmoid(value);
            store(&a.at[j], above * load(b.at[j]) * open * (1.0f + value * (1.0f - open)));
            store(&b.at[j], above * value * open);
        }
        store_pack(d_gate + i, a);
        store_pack(d_up + i, b);
    }
}

template <typename T> DEVICE void swiglu(const T* gate_up, int width, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const T* gate = gate_up + int64(blockIdx.x) * 2 * width;
    T* to = out + int64(blockIdx.x) * width;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    if (width % wide == 0 && aligned(gate_up) && aligned(out))
        activate<wide>(gate, gate + width, first, last, to);
    else
        activate<1>(gate, gate + width, first, last, to);
}

template <typename T> DEVICE void swiglu_backward(const T* gate_up, int width, const T* g, T* out) {
    constexpr int wide = 16 / sizeof(T);
    const T* gate = gate_up + int64(blockIdx.x) * 2 * width;
    const T* slopes = g + int64(blockIdx.x) * width;
    T* to = out + int64(blockIdx.x) * 2 * width;
    int first = blockIdx.y * blockDim.x * wide, last = min(width, int(first + blockDim.x * wide));
    if (width % wide == 0 && aligned(gate_up) && aligned(g) && aligned(out))
        activate_backward<wide>(gate, gate + width, slopes, first, last, to, to + width);
    else
        activate_backward<1>(gate, gate + width, slopes, first, last, to, to + width);
}

#define INSTANCES(T, suffix)                                                                            \
    KERNEL(256, swiglu_##suffix, const T* gate_up, int width, T* out) { swiglu(gate_up, width, out); }  \
    KERNEL(256, swiglu_backward_##suffix, const T* gate_up, int width, const T* g, T* out) {            \
        swiglu_backward(gate_up, width, g, out);                                                        \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace swiglu
