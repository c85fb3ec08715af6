// Queries and keys between projection and attention: RMSNorm per head (QK norm), and rotary position embedding (RoPE,
// arXiv 2104.09864) in the half-split layout: the pairs (x[i], x[i + pairs]) are rotated by position * inv_freq[i]. The
// values behind the pairs are unchanged.
//
// The bias of the projection, if it has any, is added before, and keys and values can be written to pages of a cache after.
//
// A power of two of neighbouring lanes share a head, one lane per 16 bytes of each half. Both values of a pair are in
// one lane, and only the sums of the norm are exchanged between lanes.
#include "common.cuh"

namespace heads {
// Layout of a row, and the angles [rows, pairs] of the rotated pairs of a head.
struct Heads {
    int rows, heads, kv_heads, head_dim, pairs;
    const float *cos, *sin;
};

// Layout of a row of the projection.
DEVICE int64 width(const Heads& shape) { return int64(shape.heads + 2 * shape.kv_heads) * shape.head_dim; }

// Where keys and values are written as well, a layer of a paged cache (see `paged`): `slots[row]` is `page * PAGE + place`, or
// all ones for none; null for nowhere.
template <typename T> struct Pages {
    const uint32* slots;
    T* cache;
};

// Where head `head` of the keys and values of a row is written; null for nowhere.
template <typename T> DEVICE T* place_of(const Heads& shape, const Pages<T>& pages, int row, int head) {
    if (!pages.cache || head < 0) return nullptr;
    const uint32 slot = pages.slots[row];
    if (slot == 0xffffffffu) return nullptr;
    return pages.cache + ((int64(slot / PAGE) * 2 * shape.kv_heads + head) * PAGE + slot % PAGE) * shape.head_dim;
}

// `n` values of a head and their partners. The pairs (i, pairs + i) below `pairs` are rotated, the rest is divided into
// pairs in the same way.
template <int n> struct Pairs {
    float first[n], second[n];
};

// Columns of pair `i` in a head.
struct PairColumns { int first, second; };

DEVICE PairColumns pair_columns(const Heads& shape, int i) {
    if (i < shape.pairs) return {i, shape.pairs + i};
    return {shape.pairs + i, shape.head_dim / 2 + i};
}

template <int n, typename T> DEVICE Pairs<n> load_pairs(const T* head, PairColumns at) {
    Pack<T, n> a = load_pack<n>(head + at.first), b = load_pack<n>(head + at.second);
    Pairs<n> pairs;
    for (int j = 0; j < n; ++j) {
        pairs.first[j] = load(a.at[j]);
        pairs.second[j] = load(b.at[j]);
    }
    return pairs;
}

// The weights of a norm, with their offset.
template <int n, typename T> DEVICE Pairs<n> load_weights(const T* weight, PairColumns at, float offset) {
    Pairs<n> pairs = load_pairs<n>(weight, at);
    for (int j = 0; j < n; ++j) {
        pairs.first[j] += offset;
        pairs.second[j] += offset;
    }
    return pairs;
}

template <int n, typename T> DEVICE void store_pairs(T* head, PairColumns at, const Pairs<n>& pairs) {
    Pack<T, n> a, b;
    for (int j = 0; j < n; ++j) {
        store(&a.at[j], pairs.first[j]);
        store(&b.at[j], pairs.second[j]);
    }
    store_pack(head + at.first, a);
    store_pack(head + at.second, b);
}

// Rotates by the angles of `row`; `direction` -1 is the transpose. Pairs from `pairs` on are unchanged.
template <int n> DEVICE void rotate(Pairs<n>& pairs, const Heads& shape, int row, int i, float direction) {
    if (i >= shape.pairs) return;
    int64 at = int64(row) * shape.pairs + i;
    Pack<float, n> cos = load_pack<n>(shape.cos + at), sin = load_pack<n>(shape.sin + at);
    for (int j = 0; j < n; ++j) {
        float a = pairs.first[j], b = pairs.second[j], turn = direction * sin.at[j];
        pairs.first[j] = a * cos.at[j] - b * turn;
        pairs.second[j] = b * cos.at[j] + a * turn;
    }
}

template <int n> DEVICE int lanes_of_head(int half) {
    int lanes = 1;
    while (lanes < 32 && lanes * n < half) lanes *= 2;
    return lanes;
}

// Sum over the lanes of a head; all lanes of the warp take part.
DEVICE float head_sum(float value, int lanes) {
    for (int mask = lanes >> 1; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    return value;
}

DEVICE float inverse_rms(float squares, int width, float eps) { return 1.0f / sqrtf(squares / width + eps); }

// The head that the calling lane shares; `active` is false for lanes without a head, which only take part in sums.
struct Item {
    int row, head;
    bool active;
};

// Calls visit(item, lane in the head, lanes of a head) for the first `heads` heads of all rows, by whole warps.
template <int n, typename Visit> DEVICE void visit_heads(const Heads& shape, int heads, Visit visit) {
    int lanes = lanes_of_head<n>(shape.head_dim / 2);
    int each = 32 / lanes, warps = gridDim.x * (blockDim.x >> 5), count = shape.rows * heads;
    for (int64 base = int64(blockIdx.x * (blockDim.x >> 5) + warp_index()) * each; base < count; base += int64(warps) * each) {
        int number = int(base) + int(lane_index()) / lanes;
        Item item = {number / heads, number % heads, number < count};
        visit(item, int(lane_index()) % lanes, lanes);
    }
}

// A norm of each head, `[head_dim]` weights of queries and of keys; null for none.
template <typename T> struct HeadNorm {
    const T *query, *key;
    float eps, offset;
};

// `bias`, one value per column of a row, is null for none.
template <int n, typename T>
DEVICE void prepare_heads(const Heads& shape, const T* bias, const HeadNorm<T>& norm, T* qkv, const Pages<T>& pages) {
    const int rotated = shape.heads + shape.kv_heads;
    visit_heads<n>(shape, bias || pages.cache ? rotated + shape.kv_heads : rotated, [=](Item item, int lane, int lanes) {
        const int half = shape.head_dim / 2, last = item.active ? half : 0;
        const bool is_value = item.head >= rotated;
        T* head = qkv + item.row * width(shape) + item.head * shape.head_dim;
        const T* weight = item.head < shape.heads ? norm.query : norm.key;
        auto biased = [=](PairColumns columns) {
            Pairs<n> x = load_pairs<n>(head, columns);
            if (!bias) return x;
            const Pairs<n> added = load_pairs<n>(bias + item.head * shape.head_dim, columns);
            for (int j = 0; j < n; ++j) {
                x.first[j] += added.first[j];
                x.second[j] += added.second[j];
            }
            return x;
        };
        float inverse = 1.0f;
        if (norm.query) {
            float squares = 0;
            for (int i = lane * n; i < last; i += lanes * n) {
                Pairs<n> x = biased(pair_columns(shape, i));
                for (int j = 0; j < n; ++j) squares += x.first[j] * x.first[j] + x.second[j] * x.second[j];
            }
            inverse = inverse_rms(head_sum(squares, lanes), shape.head_dim, norm.eps);
        }
        if (!item.active) return;
        T* to = place_of(shape, pages, item.row, item.head - shape.heads);
        for (int i = lane * n; i < half; i += lanes * n) {
            const PairColumns columns = pair_columns(shape, i);
            Pairs<n> x = biased(columns);
            if (norm.query && !is_value) {
                Pairs<n> w = load_weights<n>(weight, columns, norm.offset);
                for (int j = 0; j < n; ++j) {
                    x.first[j] *= inverse * w.first[j];
                    x.second[j] *= inverse * w.second[j];
                }
            }
            if (!is_value) rotate(x, shape, item.row, i, 1.0f);
            store_pairs(head, columns, x);
            if (to) store_pairs(to, columns, x);
        }
    });
}

template <int n, typename T>
DEVICE void prepare_heads_backward(const Heads& shape, const T* raw, const T* query, const T* key, float eps, float offset, T* g) {
    visit_heads<n>(shape, shape.heads + shape.kv_heads, [=](Item item, int lane, int lanes) {
        int half = shape.head_dim / 2;
        int64 at = item.row * width(shape) + item.head * shape.head_dim;
        const T* weight = item.head < shape.heads ? query : key;
        float inverse = 1.0f, pull = 0.0f;
        if (query) {
            float squares = 0, product = 0;
            for (int i = lane * n; item.active && i < half; i += lanes * n) {
                const PairColumns columns = pair_columns(shape, i);
                Pairs<n> x = load_pairs<n>(raw + at, columns), w = load_weights<n>(weight, columns, offset);
                Pairs<n> slope = load_pairs<n>(g + at, columns);
                rotate(slope, shape, item.row, i, -1.0f);
                for (int j = 0; j < n; ++j) {
                    squares += x.first[j] * x.first[j] + x.second[j] * x.second[j];
                    product += slope.first[j] * w.first[j] * x.first[j] + slope.second[j] * w.second[j] * x.second[j];
                }
            }
            inverse = inverse_rms(head_sum(squares, lanes), shape.head_dim, eps);
            pull = head_sum(product, lanes) * inverse * inverse * inverse / shape.head_dim;
        }
        for (int i = lane * n; item.active && i < half; i += lanes * n) {
            const PairColumns columns = pair_columns(shape, i);
            Pairs<n> slope = load_pairs<n>(g + at, columns);
            rotate(slope, shape, item.row, i, -1.0f);
            if (query) {
                Pairs<n> x = load_pairs<n>(raw + at, columns), w = load_weights<n>(weight, columns, offset);
                for (int j = 0; j < n; ++j) {
                    slope.first[j] = slope.first[j] * w.first[j] * inverse - x.first[j] * pull;
                    slope.second[j] = slope.second[j] * w.second[j] * inverse - x.second[j] * pull;
                }
            }
            store_pairs(g + at, columns, slope);
        }
    });
}

constexpr int THREADS = 256;

// Block (slab of rows, 0 for queries or 1 for keys): partial gradient of the norm's weight, into partial [slabs, 2,
// head_dim]. Heads are assigned to groups of lanes round robin, and the groups are summed in order.
template <int n, typename T>
DEVICE void norm_slopes(const Heads& shape, const T* raw, float eps, const T* g, int slab, float* partial) {
    STATIC_SHARED(float, parts, [THREADS * 2 * n]);
    int half = shape.head_dim / 2, lanes = lanes_of_head<n>(half), groups = THREADS / lanes, across = lanes * n;
    int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    int heads = blockIdx.y == 0 ? shape.heads : shape.kv_heads, before = blockIdx.y == 0 ? 0 : shape.heads;
    int first = blockIdx.x * slab, count = min(slab, shape.rows - first) * heads;
    float* to = partial + (int64(blockIdx.x) * 2 + blockIdx.y) * shape.head_dim;
    // One iteration, unless the lanes of a warp together have less than a head.
    for (int chunk = 0; chunk < half; chunk += across) {
        Pairs<n> own = {};
        int column = chunk + lane * n;
        for (int base = 0; base < count; base += groups) {
            int item = base + group, row = first + item / heads;
            int64 at = row * width(shape) + (before + item % heads) * shape.head_dim;
            float squares = 0;
            for (int i = lane * n; item < count && i < half; i += across) {
                Pairs<n> x = load_pairs<n>(raw + at, pair_columns(shape, i));
                for (int j = 0; j < n; ++j) squares += x.first[j] * x.first[j] + x.second[j] * x.second[j];
            }
            float inverse = inverse_rms(head_sum(squares, lanes), shape.head_dim, eps);
            if (item >= count || column >= half) continue;
            const PairColumns columns = pair_columns(shape, column);
            Pairs<n> x = load_pairs<n>(raw + at, columns), slope = load_pairs<n>(g + at, columns);
            rotate(slope, shape, row, column, -1.0f);
            for (int j = 0; j < n; ++j) {
                own.first[j] += slope.first[j] * x.first[j] * inverse;
                own.second[j] += slope.second[j] * x.second[j] * inverse;
            }
        }
        for (int j = 0; j < n; ++j) {
            parts[group * 2 * across + lane * n + j] = own.first[j];
            parts[(group * 2 + 1) * across + lane * n + j] = own.second[j];
        }
        BLOCK_SYNC();
        for (int i = threadIdx.x; i < 2 * across; i += THREADS) {
            float sum = 0;
            for (int part = 0; part < groups; ++part) sum += parts[part * 2 * across + i];
            const PairColumns columns = pair_columns(shape, chunk + i % across);
            if (chunk + i % across < half) to[i < across ? columns.first : columns.second] = sum;
        }
        BLOCK_SYNC();
    }
}

template <int n> DEVICE bool wide_heads(const Heads& shape) {
    return shape.head_dim / 2 % n == 0 && shape.pairs % n == 0 && aligned(shape.cos) && aligned(shape.sin);
}

template <typename T>
DEVICE void prepare(const Heads& shape, const T* bias, const HeadNorm<T>& norm, T* qkv, const Pages<T>& pages) {
    constexpr int wide = 16 / sizeof(T);
    // A null pointer counts as aligned.
    if (wide_heads<wide>(shape) && aligned(bias) && aligned(norm.query) && aligned(norm.key) && aligned(qkv) && aligned(pages.cache))
        prepare_heads<wide>(shape, bias, norm, qkv, pages);
    else
        prepare_heads<1>(shape, bias, norm, qkv, pages);
}

template <typename T>
DEVICE void prepare_backward(const Heads& shape, const T* raw, const T* query, const T* key, float eps, float offset, T* g) {
    constexpr int wide = 16 / sizeof(T);
    if (wide_heads<wide>(shape) && aligned(raw) && aligned(query) && aligned(key) && aligned(g))
        prepare_heads_backward<wide>(shape, raw, query, key, eps, offset, g);
    else
        prepare_heads_backward<1>(shape, raw, query, key, eps, offset, g);
}

template <typename T>
DEVICE void head_norm_slopes(const Heads& shape, const T* raw, float eps, const T* g, int slab, float* partial) {
    constexpr int wide = 16 / sizeof(T);
    if (wide_heads<wide>(shape) && aligned(raw) && aligned(g))
        norm_slopes<wide>(shape, raw, eps, g, slab, partial);
    else
        norm_slopes<1>(shape, raw, eps, g, slab, partial);
}

KERNEL(256, angles, const uint32* positions, const float* inv_freq, float amplitude, int rows, int pairs, float* cos,
       float* sin) {
    int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= int64(rows) * pairs) return;
    float angle = float(positions[i / pairs]) * inv_freq[i % pairs];
    cos[i] = cosf(angle) * amplitude;
    sin[i] = sinf(angle) * amplitude;
}

#define INSTANCES(T, suffix)                                                                                                 \
    KERNEL(256, prepare_##suffix, int rows, int heads, int kv_heads, int head_dim, int pairs, const float* cos,              \
           const float* sin, const T* query, const T* key, float eps, float offset, const T* bias, T* qkv,                   \
           const uint32* slots, T* cache) {                                                                                  \
        Heads shape = {rows, heads, kv_heads, head_dim, pairs, cos, sin};                                                    \
        prepare(shape, bias, HeadNorm<T>{query, key, eps, offset}, qkv, Pages<T>{slots, cache});                             \
    }                                                                                                                        \
    KERNEL(256, prepare_backward_##suffix, int rows, int heads, int kv_heads, int head_dim, int pairs, const float* cos,     \
           const float* sin, const T* raw, const T* query, const T* key, float eps, float offset, T* g) {                    \
        Heads shape = {rows, heads, kv_heads, head_dim, pairs, cos, sin};                                                    \
        prepare_backward(shape, raw, query, key, eps, offset, g);                                                            \
    }                                                                                                                        \
    KERNEL(256, head_norm_slopes_##suffix, int rows, int heads, int kv_heads, int head_dim, int pairs, const float* cos,     \
           const float* sin, const T* raw, float eps, const T* g, int slab, float* partial) {                                \
        Heads shape = {rows, heads, kv_heads, head_dim, pairs, cos, sin};                                                    \
        head_norm_slopes(shape, raw, eps, g, slab, partial);                                                                 \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace heads
