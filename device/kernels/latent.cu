// The heads of multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): queries, keys and values of all heads, made
// of their parts, and the backward of that.
//
// A query or a key has a part without position, then one that is rotated; the rotated part of the keys is common to all
// heads. Values may be narrower than keys, and are padded with zeros. The values of a rotated pair are neighbours or halves
// before the rotation, and halves behind it. Threads move up to 16 bytes at a time.
#include "common.cuh"

namespace latent {
// Widths of the parts of a head, and the angles [rows, rope / 2] of the rotated pairs; null for no rotation.
struct Latents {
    int64 rows;
    int heads, nope, rope, value;
    bool neighbours;
    const float *cos, *sin;
};

// Widths of a query or a key, and of the rows of a head in the expanded keys and values.
DEVICE int key_width(const Latents& shape) { return shape.nope + shape.rope; }
DEVICE int expanded_width(const Latents& shape) { return shape.nope + shape.value; }

template <int n> struct Pairs {
    float first[n], second[n];
};

// Pairs from `i` on of the part `x [rope]` before the rotation.
template <int n, typename T> DEVICE Pairs<n> load_unrotated(const Latents& shape, const T* x, int i) {
    const int a = shape.neighbours ? 2 * i : i, b = shape.neighbours ? 2 * i + n : i + shape.rope / 2;
    const Pack<T, n> low = load_pack<n>(x + a), high = load_pack<n>(x + b);
    float all[2 * n];
    for (int j = 0; j < n; ++j) {
        all[j] = load(low.at[j]);
        all[n + j] = load(high.at[j]);
    }
    Pairs<n> pairs;
    for (int j = 0; j < n; ++j) {
        pairs.first[j] = shape.neighbours ? all[2 * j] : all[j];
        pairs.second[j] = shape.neighbours ? all[2 * j + 1] : all[n + j];
    }
    return pairs;
}

// The inverse of `load_unrotated`.
template <int n, typename T> DEVICE void store_unrotated(const Latents& shape, T* x, int i, const Pairs<n>& pairs) {
    const int a = shape.neighbours ? 2 * i : i, b = shape.neighbours ? 2 * i + n : i + shape.rope / 2;
    // Each value has one place in either order: registers are not indexed by what is known at run time.
    float halves[2 * n], neighbours[2 * n];
    for (int j = 0; j < n; ++j) {
        halves[j] = neighbours[2 * j] = pairs.first[j];
        halves[n + j] = neighbours[2 * j + 1] = pairs.second[j];
    }
    Pack<T, n> low, high;
    for (int j = 0; j < n; ++j) {
        store(&low.at[j], shape.neighbours ? neighbours[j] : halves[j]);
        store(&high.at[j], shape.neighbours ? neighbours[n + j] : halves[n + j]);
    }
    store_pack(x + a, low);
    store_pack(x + b, high);
}

template <int n, typename T> DEVICE Pairs<n> load_halves(const Latents& shape, const T* x, int i) {
    const Pack<T, n> first = load_pack<n>(x + i), second = load_pack<n>(x + i + shape.rope / 2);
    Pairs<n> pairs;
    for (int j = 0; j < n; ++j) {
        pairs.first[j] = load(first.at[j]);
        pairs.second[j] = load(second.at[j]);
    }
    return pairs;
}

template <int n, typename T> DEVICE void store_halves(const Latents& shape, T* x, int i, const Pairs<n>& pairs) {
    Pack<T, n> first, second;
    for (int j = 0; j < n; ++j) {
        store(&first.at[j], pairs.first[j]);
        store(&second.at[j], pairs.second[j]);
    }
    store_pack(x + i, first);
    store_pack(x + i + shape.rope / 2, second);
}

// Rotates by the angles of `row`; `direction` -1 is the transpose.
template <int n> DEVICE void rotate(Pairs<n>& pairs, const Latents& shape, int64 row, int i, float direction) {
    if (!shape.cos) return;
    const int64 at = row * (shape.rope / 2) + i;
    const Pack<float, n> cos = load_pack<n>(shape.cos + at), sin = load_pack<n>(shape.sin + at);
    for (int j = 0; j < n; ++j) {
        const float a = pairs.first[j], b = pairs.second[j], turn = direction * sin.at[j];
        pairs.first[j] = a * cos.at[j] - b * turn;
        pairs.second[j] = b * cos.at[j] + a * turn;
    }
}

// What a thread moves: `number` of the queries, keys or values of the row, and the first of its columns, or of its pairs.
struct Item {
    int number, at;
    bool rotated;
};

// Item `i` of heads that have `nope / n` packs, then `rope / 2 / n` packs of pairs.
template <int n> DEVICE Item item_of(const Latents& shape, int i) {
    const int plain = shape.nope / n, each = plain + shape.rope / 2 / n, part = i % each;
    return {i / each, (part < plain ? part : part - plain) * n, part >= plain};
}

template <int n, typename T>
DEVICE void assemble(const Latents& shape, const T* queries, const T* expanded, const T* rotary, T* out) {
    const int width = key_width(shape), heads = shape.heads, values = width / n;
    const int keys = heads * (shape.nope / n + shape.rope / 2 / n), each = 2 * keys + heads * values;
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < shape.rows * each; i += step) {
        const int64 row = i / each;
        const int number = int(i % each);
        const T* of_row = expanded + row * heads * expanded_width(shape);
        T* to = out + row * 3 * heads * width;
        if (number >= 2 * keys) {
            const int head = (number - 2 * keys) / values, column = (number - 2 * keys) % values * n;
            Pack<T, n> pack = {};
            if (column < shape.value) pack = load_pack<n>(of_row + head * expanded_width(shape) + shape.nope + column);
            store_pack(to + (2 * heads + head) * width + column, pack);
            continue;
        }
        const bool is_key = number >= keys;
        const Item item = item_of<n>(shape, is_key ? number - keys : number);
        const T* query = queries + (row * heads + item.number) * width;
        to += ((is_key ? heads : 0) + item.number) * width;
        if (item.rotated) {
            Pairs<n> x = load_unrotated<n>(shape, is_key ? rotary + row * shape.rope : query + shape.nope, item.at);
            rotate(x, shape, row, item.at, 1.0f);
            store_halves(shape, to + shape.nope, item.at, x);
        } else {
            const T* from = is_key ? of_row + item.number * expanded_width(shape) : query;
            store_pack(to + item.at, load_pack<n>(from + item.at));
        }
    }
}

template <int n, typename T>
DEVICE void assemble_backward(const Latents& shape, const T* g, T* d_queries, T* d_expanded) {
    const int width = key_width(shape), heads = shape.heads, of_expanded = expanded_width(shape) / n;
    const int queries = heads * (shape.nope / n + shape.rope / 2 / n), each = queries + heads * of_expanded;
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < shape.rows * each; i += step) {
        const int64 row = i / each;
        const int number = int(i % each);
        const T* from = g + row * 3 * heads * width;
        if (number >= queries) {
            const int head = (number - queries) / of_expanded, column = (number - queries) % of_expanded * n;
            // Of a key without position, or of a value.
            const T* at = column < shape.nope ? from + (heads + head) * width + column
                                              : from + (2 * heads + head) * width + column - shape.nope;
            store_pack(d_expanded + (row * heads + head) * expanded_width(shape) + column, load_pack<n>(at));
            continue;
        }
        const Item item = item_of<n>(shape, number);
        from += item.number * width;
        T* to = d_queries + (row * heads + item.number) * width;
        if (item.rotated) {
            Pairs<n> slope = load_halves<n>(shape, from + shape.nope, item.at);
            rotate(slope, shape, row, item.at, -1.0f);
            store_unrotated(shape, to + shape.nope, item.at, slope);
        } else {
            store_pack(to + item.at, load_pack<n>(from + item.at));
        }
    }
}

// The gradient of the rotated part of the keys, one pair per thread: the sum over heads in their order, rotated back, because
// the rotation is linear.
template <typename T> DEVICE void rotary_backward(const Latents& shape, const T* g, T* d_rotary) {
    const int width = key_width(shape), half = shape.rope / 2;
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < shape.rows * half; i += step) {
        const int64 row = i / half;
        const int pair = int(i % half);
        const T* keys = g + (row * 3 + 1) * shape.heads * width + shape.nope;
        Pairs<1> sum = {};
        for (int head = 0; head < shape.heads; ++head) {
            const Pairs<1> slope = load_halves<1>(shape, keys + int64(head) * width, pair);
            sum.first[0] += slope.first[0];
            sum.second[0] += slope.second[0];
        }
        rotate(sum, shape, row, pair, -1.0f);
        store_unrotated(shape, d_rotary + row * shape.rope, pair, sum);
    }
}

// Whether parts begin at multiples of 16 bytes.
template <int n> DEVICE bool wide_parts(const Latents& shape) {
    return shape.nope % n == 0 && shape.rope / 2 % n == 0 && shape.value % n == 0 && aligned(shape.cos) && aligned(shape.sin);
}

// Columns of rows that are `from_stride` and `to_stride` apart: `width` that are copied, then zeros up to `padded`.
struct Columns {
    int64 rows;
    int from_stride, to_stride, width, padded;
};

template <int n, typename T> DEVICE void copy(const Columns& columns, const T* from, T* to) {
    const int each = columns.padded / n;
    const int64 step = int64(gridDim.x) * blockDim.x;
    for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < columns.rows * each; i += step) {
        const int64 row = i / each;
        const int column = int(i % each) * n;
        Pack<T, n> pack = {};
        if (column < columns.width) pack = load_pack<n>(from + row * columns.from_stride + column);
        store_pack(to + row * columns.to_stride + column, pack);
    }
}

template <int n> DEVICE bool wide_columns(const Columns& columns) {
    return columns.from_stride % n == 0 && columns.to_stride % n == 0 && columns.width % n == 0 && columns.padded % n == 0;
}

#define INSTANCES(T, suffix)                                                                                                 \
    KERNEL(256, assemble_latents_##suffix, int64 rows, int heads, int nope, int rope, int value, int neighbours,             \
           const float* cos, const float* sin, const T* queries, const T* expanded, const T* rotary, T* out) {               \
        const Latents shape = {rows, heads, nope, rope, value, neighbours != 0, cos, sin};                                   \
        constexpr int wide = 16 / sizeof(T);                                                                                 \
        if (wide_parts<wide>(shape) && aligned(queries) && aligned(expanded) && aligned(rotary) && aligned(out))             \
            assemble<wide>(shape, queries, expanded, rotary, out);                                                           \
        else                                                                                                                 \
            assemble<1>(shape, queries, expanded, rotary, out);                                                              \
    }                                                                                                                        \
    KERNEL(256, assemble_latents_backward_##suffix, int64 rows, int heads, int nope, int rope, int value, int neighbours,    \
           const float* cos, const float* sin, const T* g, T* d_queries, T* d_expanded) {                                    \
        const Latents shape = {rows, heads, nope, rope, value, neighbours != 0, cos, sin};                                   \
        constexpr int wide = 16 / sizeof(T);                                                                                 \
        if (wide_parts<wide>(shape) && aligned(g) && aligned(d_queries) && aligned(d_expanded))                              \
            assemble_backward<wide>(shape, g, d_queries, d_expanded);                                                        \
        else                                                                                                                 \
            assemble_backward<1>(shape, g, d_queries, d_expanded);                                                           \
    }                                                                                                                        \
    KERNEL(256, rotary_keys_backward_##suffix, int64 rows, int heads, int nope, int rope, int value, int neighbours,         \
           const float* cos, const float* sin, const T* g, T* d_rotary) {                                                    \
        rotary_backward(Latents{rows, heads, nope, rope, value, neighbours != 0, cos, sin}, g, d_rotary);                    \
    }                                                                                                                        \
    KERNEL(256, copy_columns_##suffix, const T* from, int64 rows, int from_stride, int to_stride, int width, int padded,     \
           T* to) {                                                                                                          \
        const Columns columns = {rows, from_stride, to_stride, width, padded};                                               \
        constexpr int wide = 16 / sizeof(T);                                                                                 \
        if (wide_columns<wide>(columns) && aligned(from) && aligned(to))                                                     \
            copy<wide>(columns, from, to);                                                                                   \
        else                                                                                                                 \
            copy<1>(columns, from, to);                                                                                      \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace latent
