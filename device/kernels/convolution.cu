// The inputs of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): a causal depthwise convolution with SiLU, queries and
// keys divided by their lengths, and the gates of the recurrence.
//
// A row has `channels` inputs: query heads, key heads, value heads. `sources [rows, taps - 1]` says where the inputs of the
// tokens before are, nearest first: a row, -1 for none, or -2 - n for entry n of the inputs that the sequence keeps. A warp
// computes a head of a row. Sums have the order of the taps.
#include "common.cuh"

namespace convolution {
constexpr int WARPS = 8;
// Values of a head per lane.
constexpr int OWN = 8;
constexpr int MAX_TAPS = 8;
constexpr float EPS = 1e-6f;
// Inputs of softplus from which on it is its input.
constexpr float LINEAR = 20.0f;

struct Shape {
    int key_heads, value_heads, key_dim, value_dim, taps;
};

DEVICE int channels_of(const Shape& shape) {
    return 2 * shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim;
}

// A head of a row.
struct Head {
    int64 row;
    int number, first, dim;
    bool is_query, is_key;
};

// The head of the calling warp; false beyond the last row.
DEVICE bool head_of(const Shape& shape, int64 rows, Head* head) {
    const int heads = 2 * shape.key_heads + shape.value_heads;
    const int64 at = int64(blockIdx.x) * WARPS + warp_index();
    if (at >= rows * heads) return false;
    head->row = at / heads;
    head->number = int(at % heads);
    head->is_query = head->number < shape.key_heads;
    head->is_key = !head->is_query && head->number < 2 * shape.key_heads;
    const bool is_value = head->number >= 2 * shape.key_heads;
    const int value = head->number - 2 * shape.key_heads;
    head->first = is_value ? 2 * shape.key_heads * shape.key_dim + value * shape.value_dim : head->number * shape.key_dim;
    head->dim = is_value ? shape.value_dim : shape.key_dim;
    return true;
}

template <typename T>
DEVICE float input_of(const T* x, int stride, const float* kept, int channels, int64 from, int channel) {
    if (from >= 0) return load(x[from * stride + channel]);
    return from == -1 ? 0.0f : kept[(-2 - from) * channels + channel];
}

// The row that is `back` tokens before `row`, as a source.
DEVICE int64 source_of(const int* sources, int taps, int64 row, int back) {
    return back == 0 ? row : sources[row * (taps - 1) + back - 1];
}

template <typename T>
DEVICE float convolved(const Shape& shape, const T* x, int stride, const T* kernel, const int* sources, const float* kept,
                       int64 row, int channel) {
    const int channels = channels_of(shape);
    float sum = 0;
    for (int tap = 0; tap < shape.taps; ++tap) {
        const int64 from = source_of(sources, shape.taps, row, shape.taps - 1 - tap);
        sum = fmaf(load(kernel[int64(channel) * shape.taps + tap]), input_of(x, stride, kept, channels, from, channel), sum);
    }
    return sum;
}

// Activates the sums of a head. Returns the inverse of its length.
DEVICE float activated(const float (&sums)[OWN], float (&values)[OWN]) {
    float squares = 0;
    for (int k = 0; k < OWN; ++k) {
        values[k] = sums[k] * sigmoid(sums[k]);
        squares = fmaf(values[k], values[k], squares);
    }
    return 1.0f / sqrtf(warp_sum(squares) + EPS);
}

DEVICE float scale_of(const Shape& shape, const Head& head) { return head.is_query ? 1.0f / sqrtf(float(shape.key_dim)) : 1.0f; }

// heads [rows, channels]. Sequence n, which has the rows whose owner it is, keeps inputs [taps - 1, channels] at `pool` + slots[n] *
// pool_stride; none if `pool` is null.
template <typename T>
DEVICE void convolve(const T* x, int stride, const T* kernel, const int* sources, const float* pool, const uint32* slots,
                     const uint32* owners, int64 pool_stride, int64 rows, const Shape& shape, T* out) {
    Head head;
    if (!head_of(shape, rows, &head)) return;
    const float* kept = pool ? pool + slots[owners[head.row]] * pool_stride : pool;
    float sums[OWN], values[OWN];
    for (int k = 0; k < OWN; ++k) {
        const int i = k * 32 + lane_index();
        sums[k] = i < head.dim ? convolved(shape, x, stride, kernel, sources, kept, head.row, head.first + i) : 0.0f;
    }
    const float inverse = activated(sums, values);
    const float factor = head.is_query || head.is_key ? inverse * scale_of(shape, head) : 1.0f;
    T* to = out + head.row * channels_of(shape) + head.first;
    for (int k = 0; k < OWN; ++k) {
        const int i = k * 32 + lane_index();
        if (i < head.dim) store(to + i, values[k] * factor);
    }
}

// d_sums [rows, channels] for the gradients of the heads: d_pairs [rows, value_heads, 2, key_dim] of queries and keys, by
// value head, and d_values [rows, value_heads * value_dim].
template <typename T>
DEVICE void convolve_backward(const T* x, int stride, const T* kernel, const int* sources, const float* d_pairs,
                              const float* d_values, int64 rows, const Shape& shape, float* d_sums) {
    Head head;
    if (!head_of(shape, rows, &head)) return;
    const int group = shape.value_heads / shape.key_heads;
    float sums[OWN], values[OWN], g[OWN];
    for (int k = 0; k < OWN; ++k) {
        const int i = k * 32 + lane_index();
        sums[k] = g[k] = 0;
        if (i >= head.dim) continue;
        sums[k] = convolved(shape, x, stride, kernel, sources, (const float*)nullptr, head.row, head.first + i);
        if (head.is_query || head.is_key) {
            const int first = (head.number % shape.key_heads) * group;
            for (int member = first; member < first + group; ++member)
                g[k] += d_pairs[((head.row * shape.value_heads + member) * 2 + (head.is_key ? 1 : 0)) * shape.key_dim + i];
        } else {
            const int value = head.number - 2 * shape.key_heads;
            g[k] = d_values[(head.row * shape.value_heads + value) * shape.value_dim + i];
        }
    }
    const float inverse = activated(sums, values);
    if (head.is_query || head.is_key) {
        float along = 0;
        for (int k = 0; k < OWN; ++k) along = fmaf(values[k], g[k], along);
        along = warp_sum(along) * inverse * inverse;
        const float factor = inverse * scale_of(shape, head);
        for (int k = 0; k < OWN; ++k) g[k] = (g[k] - along * values[k]) * factor;
    }
    float* to = d_sums + head.row * channels_of(shape) + head.first;
    for (int k = 0; k < OWN; ++k) {
        const int i = k * 32 + lane_index();
        const float open = sigmoid(sums[k]);
        if (i < head.dim) to[i] = g[k] * open * (1.0f + sums[k] * (1.0f - open));
    }
}

// Gradient of the inputs into dx [rows, stride], its first `channels` columns. Row i is seen by the rows uses[2 n], as the
// uses[2 n + 1]th token before them, for n from starts[i] to starts[i + 1].
template <typename T>
DEVICE void inputs_backward(const float* d_sums, const T* kernel, const int* starts, const int* uses, int64 rows, int channels,
                            int taps, int stride, T* dx) {
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * channels; i += step) {
        const int64 row = i / channels;
        const int channel = int(i % channels);
        float sum = 0;
        for (int n = starts[row]; n < starts[row + 1]; ++n) {
            const float weight = load(kernel[int64(channel) * taps + taps - 1 - uses[2 * n + 1]]);
            sum = fmaf(weight, d_sums[int64(uses[2 * n]) * channels + channel], sum);
        }
        store(dx + row * stride + channel, sum);
    }
}

// Block (tile of channels, slab of rows): partial sums of the gradient of the kernel into partial [slabs, channels, taps].
template <typename T>
DEVICE void kernel_parts(const T* x, int stride, const int* sources, const float* d_sums, int rows, int slab, int channels,
                         int taps, float* partial) {
    const int channel = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (channel >= channels) return;
    float sums[MAX_TAPS] = {};
    const int first = blockIdx.y * slab, last = min(rows, first + slab);
    for (int row = first; row < last; ++row) {
        const float g = d_sums[int64(row) * channels + channel];
        for (int tap = 0; tap < taps; ++tap) {
            const int64 from = source_of(sources, taps, row, taps - 1 - tap);
            sums[tap] = fmaf(g, input_of(x, stride, (const float*)nullptr, channels, from, channel), sums[tap]);
        }
    }
    float* to = partial + (int64(blockIdx.y) * channels + channel) * taps;
    for (int tap = 0; tap < taps; ++tap) to[tap] = sums[tap];
}

// Moves the last inputs of sequence blockIdx.y, of rows firsts[n] to firsts[n + 1], to what it keeps. A sequence that begins
// at position 0 keeps none before.
template <typename T>
DEVICE void keep_inputs(const T* x, int stride, const uint32* positions, const uint32* firsts, const uint32* slots,
                        int64 pool_stride, int channels, int taps, float* pool) {
    const int channel = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (channel >= channels) return;
    const int64 first = firsts[blockIdx.y], count = int64(firsts[blockIdx.y + 1]) - first;
    if (count == 0) return;
    const int64 known = positions[first];
    float* kept = pool + slots[blockIdx.y] * pool_stride + channel;
    for (int entry = 0; entry < taps - 1; ++entry) {
        // Tokens of the step from its first one on; negative for those before.
        const int64 at = count - (taps - 1) + entry;
        float value = 0;
        if (at >= 0)
            value = load(x[(first + at) * stride + channel]);
        else if (known + at >= 0)
            value = kept[(entry + count) * channels];
        kept[entry * int64(channels)] = value;
    }
}

DEVICE float softplus(float x) { return x > LINEAR ? x : fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// opened [rows, 2, heads]: strengths of updates, then decays, of x [rows, 2, heads].
template <typename T>
DEVICE void open_gates(const float* x, const T* logs, const T* bias, int64 rows, int heads, float* opened) {
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * 2 * heads; i += step) {
        const int column = int(i % (2 * heads)), head = column - heads;
        const float value = x[i];
        opened[i] = head < 0 ? sigmoid(value) : expf(-expf(load(logs[head])) * softplus(value + load(bias[head])));
    }
}

// Gradients of x, and of what each row adds to those of the logarithms of the rates and of the bias, [rows, 2, heads], for g
// [rows, 2, heads], that of strengths and of the logarithms of decays.
template <typename T>
DEVICE void open_gates_backward(const float* x, const T* logs, const T* bias, const float* g, int64 rows, int heads, T* dx,
                                float* d_vectors) {
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * 2 * heads; i += step) {
        const int column = int(i % (2 * heads)), head = column - heads;
        const float value = x[i];
        if (head < 0) {
            const float open = sigmoid(value);
            store(dx + i, g[i] * open * (1.0f - open));
            continue;
        }
        const float rate = expf(load(logs[head])), moved = value + load(bias[head]);
        const float d_moved = -g[i] * rate * (moved > LINEAR ? 1.0f : sigmoid(moved));
        store(dx + i, d_moved);
        d_vectors[i - heads] = -g[i] * rate * softplus(moved);
        d_vectors[i] = d_moved;
    }
}

#define INSTANCES(T, suffix)                                                                                                  \
    KERNEL(256, convolve_##suffix, const T* x, int stride, const T* kernel, const int* sources, const float* pool,            \
           const uint32* slots, const uint32* owners, int64 pool_stride, int64 rows, int key_heads, int value_heads,          \
           int key_dim, int value_dim, int taps, T* out) {                                                                    \
        convolve(x, stride, kernel, sources, pool, slots, owners, pool_stride, rows,                                          \
                 Shape{key_heads, value_heads, key_dim, value_dim, taps}, out);                                               \
    }                                                                                                                         \
    KERNEL(256, convolve_backward_##suffix, const T* x, int stride, const T* kernel, const int* sources,                      \
           const float* d_pairs, const float* d_values, int64 rows, int key_heads, int value_heads, int key_dim,              \
           int value_dim, int taps, float* d_sums) {                                                                          \
        convolve_backward(x, stride, kernel, sources, d_pairs, d_values, rows,                                                \
                          Shape{key_heads, value_heads, key_dim, value_dim, taps}, d_sums);                                   \
    }                                                                                                                         \
    KERNEL(256, convolution_inputs_backward_##suffix, const float* d_sums, const T* kernel, const int* starts,                \
           const int* uses, int64 rows, int channels, int taps, int stride, T* dx) {                                          \
        inputs_backward(d_sums, kernel, starts, uses, rows, channels, taps, stride, dx);                                      \
    }                                                                                                                         \
    KERNEL(256, convolution_kernel_parts_##suffix, const T* x, int stride, const int* sources, const float* d_sums, int rows, \
           int slab, int channels, int taps, float* partial) {                                                                \
        kernel_parts(x, stride, sources, d_sums, rows, slab, channels, taps, partial);                                        \
    }                                                                                                                         \
    KERNEL(256, keep_inputs_##suffix, const T* x, int stride, const uint32* positions, const uint32* firsts,                  \
           const uint32* slots, int64 pool_stride, int channels, int taps, float* pool) {                                     \
        keep_inputs(x, stride, positions, firsts, slots, pool_stride, channels, taps, pool);                                  \
    }                                                                                                                         \
    KERNEL(256, open_gates_##suffix, const float* x, const T* logs, const T* bias, int64 rows, int heads, float* opened) {    \
        open_gates(x, logs, bias, rows, heads, opened);                                                                       \
    }                                                                                                                         \
    KERNEL(256, open_gates_backward_##suffix, const float* x, const T* logs, const T* bias, const float* g, int64 rows,       \
           int heads, T* dx, float* d_vectors) {                                                                              \
        open_gates_backward(x, logs, bias, g, rows, heads, dx, d_vectors);                                                    \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace convolution
