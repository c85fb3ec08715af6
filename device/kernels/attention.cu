// Causal attention of packed segments with grouped key-value heads (GQA), forward and backward, tiled as in
// FlashAttention-2 (Dao 2023, arXiv 2307.08691).
//
// A query attends to all rows of its segment's prefix and to its own segment up to itself, or to the last of these under
// a sliding window (Beltagy et al. 2020, arXiv 2004.05150). Gradients of keys and values
// are sums over all segments that attend to them: one block computes a tile of keys (or a fixed part of its queries,
// summed by another kernel) in a fixed order, without atomics.
#include "common.cuh"
#include "attention.cuh"

namespace attention {
// Queries from `first`, at most TILE, of one segment.
struct QueryTile { int segment, first; };
// Work of one block for the keys `first..first + count`: the entries `begin..end` of the list of `Seen`. The result
// goes to slot `slot` of the scratch, or directly to the gradient if that is negative.
struct KeyJob { int first, count, begin, end, slot; };
// Queries that attend to a range of keys, except masked pairs. A query is `query - key + shift` places after a key.
struct Seen { int query_first, query_end, key_first, key_end, shift; };
// Slots whose sum is the gradient of the keys `first..first + count`.
struct Split { int first, count, begin, end; };
// Keys (`which` 0) or values (1) of a slot of the scratch `[slots, kv_heads, 2, TILE, dim]`.
DEVICE float* slot_part(float* scratch, const KeyJob& job, const Heads& of, int kv, int which) {
    return scratch + ((int64(job.slot) * of.kv_heads + kv) * 2 + which) * TILE * of.dim;
}

// Whether the query of a row attends to the key of another. Keys after the query are many places before it as an
// unsigned number.
DEVICE bool sees(const Seen& range, int window, int query, int key) {
    return uint32(query - key + range.shift) < uint32(window) && key >= range.key_first && key < range.key_end;
}

// Iterates over the work of a key job: segments, then heads of the group, then tiles of queries.
struct Cursor { int entry, head, query; };

DEVICE void advance(Cursor& at, const Seen* seen, const KeyJob& job, int queries, int head_first, int head_end) {
    at.query += queries;
    if (at.query < seen[at.entry].query_end) return;
    if (++at.head == head_end) {
        at.head = head_first;
        if (++at.entry == job.end) return;
    }
    at.query = seen[at.entry].query_first;
}

// The tile of the calling block in a grid of [heads, tiles].
DEVICE QueryBlock query_block(const Segment* segments, const QueryTile* tiles, const Heads& of, int window) {
    const QueryTile tile = tiles[blockIdx.y];
    return query_block(of, segments[tile.segment], tile.first, window);
}

// Grid [heads, tiles].
template <int D>
DEVICE void forward(const bf16* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& all,
                    const Rule<bf16>& rule, bf16* out, float* log_sums) {
    const QueryBlock block = query_block(segments, tiles, {all.heads, all.kv_heads, D}, rule.window);
    attend<D>(qkv, keys_in_pack(qkv, block), block, rows, rule, out, log_sums);
}

// Grid [heads, tiles]: gradient of the queries, and `deltas [heads, rows]`, the dot products of result and its
// gradient.
template <int D>
DEVICE void query_gradient(const bf16* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& all,
                           const Rule<bf16>& rule, const bf16* out, const float* log_sums, const bf16* gradient, float* deltas,
                           bf16* dqkv) {
    constexpr int SIZE = TILE * (D + PAD);
    DYNAMIC_SHARED(bf16, shared);
    bf16 *queries = shared, *slopes = shared + SIZE, *keys = shared + 2 * SIZE, *values = shared + 4 * SIZE;
    const QueryBlock block = query_block(segments, tiles, {all.heads, all.kv_heads, D}, rule.window);
    const Heads& of = block.of;
    const float scale = rule.scale;
    const int warp = warp_index(), g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    auto query = [&](int i) { return query_row(block, i); };
    const KeyRows<bf16> from = keys_in_pack(qkv, block);
    auto fetch = [&](int t) {
        const int stage = (t & 1) * SIZE;
        fetch_keys<D>(keys + stage, values + stage, from, block, block.begin + t * TILE);
    };
    copy_tile<D, TILE>(queries, qkv + block.head * D, row_width(of), query);
    copy_tile<D, TILE>(slopes, gradient + block.head * D, query_width(of), query);
    // The result is only needed for `delta`; it is loaded into the second buffer of keys.
    copy_tile<D, TILE>(keys + SIZE, out + block.head * D, query_width(of), query);
    copy_commit();
    fetch(0);
    await_tiles(true);
    float log_sum[2], delta[2];
    UNROLL for (int r = 0; r < 2; ++r) {
        int i = 16 * warp + g + 8 * r, row = query(i);
        float sum = 0.0f;
        const bf16 *left = slopes + i * (D + PAD), *right = keys + SIZE + i * (D + PAD);
        for (int c = t2 / 2; c < D; c += 4) sum = fmaf(load(left[c]), load(right[c]), sum);
        delta[r] = quad_sum(sum);
        log_sum[r] = row < 0 ? 0.0f : log_sums[int64(block.head) * rows + row] * LOG2_E;
        if (row >= 0 && t2 == 0) deltas[int64(block.head) * rows + row] = delta[r];
    }
    BLOCK_SYNC();

    float sums[D / 8][4] = {};
    const int count = (block.seen - block.begin + TILE - 1) / TILE;
    for (int t = 0; t < count; ++t) {
        if (t + 1 < count) fetch(t + 1);
        await_tiles(t + 1 < count);
        float s[TILE / 8][4] = {}, d[TILE / 8][4] = {};
        add_tile_dots<D, TILE>(s, queries, keys + (t & 1) * SIZE);
        add_tile_dots<D, TILE>(d, slopes, values + (t & 1) * SIZE);
        UNROLL for (int i = 0; i < TILE / 2; ++i) {
            int n = i / 4, e = i % 4, r = e >> 1, place = block.begin + t * TILE + 8 * n + t2 + (e & 1);
            float weight = exp2_fast(fmaf(s[n][e], scale * LOG2_E, -log_sum[r]));
            s[n][e] = hidden(block, 16 * warp + g + 8 * r, place) ? 0.0f : weight * (d[n][e] - delta[r]);
        }
        add_weighted<D, TILE>(sums, s, keys + (t & 1) * SIZE);
        BLOCK_SYNC();
    }
    UNROLL for (int r = 0; r < 2; ++r) {
        int row = query(16 * warp + g + 8 * r);
        if (row < 0) continue;
        bf16* to = dqkv + row * row_width(of) + block.head * D + t2;
        UNROLL for (int n = 0; n < D / 8; ++n) store_pair(to + 8 * n, sums[n][2 * r] * scale, sums[n][2 * r + 1] * scale);
    }
}

// Stores the gradient of 16 keys of a job, or of their values.
template <int D>
DEVICE void store_keys(const float (&sums)[D / 8][4], float by, const KeyJob& job, const Heads& of, int kv, int which,
                       float* scratch, bf16* dqkv) {
    const int t2 = lane_index() % 4 * 2;
    const int column = which == 0 ? key_column(of, kv) : value_column(of, kv);
    UNROLL for (int r = 0; r < 2; ++r) {
        int i = 16 * warp_index() + lane_index() / 4 + 8 * r;
        if (i >= job.count) continue;
        UNROLL for (int n = 0; n < D / 8; ++n) {
            float low = sums[n][2 * r] * by, high = sums[n][2 * r + 1] * by;
            if (job.slot < 0) {
                store_pair(dqkv + (job.first + i) * row_width(of) + column + 8 * n + t2, low, high);
            } else {
                float* to = slot_part(scratch, job, of, kv, which) + i * D + 8 * n + t2;
                to[0] = low;
                to[1] = high;
            }
        }
    }
}

// Grid [kv_heads, jobs]: gradient of keys and values; the rows of all products are keys.
template <int D>
DEVICE void key_gradient(const bf16* qkv, const KeyJob* jobs, const Seen* seen, int rows, const Heads& all,
                         const Rule<bf16>& rule, const float* log_sums, const bf16* gradient, const float* deltas, float* scratch,
                         bf16* dqkv) {
    // Queries per step: with 64, the accumulators of keys and values of dimension 128 do not fit in registers.
    constexpr int N = D > 64 ? 32 : 64;
    constexpr int SIZE = TILE * (D + PAD), PART = N * (D + PAD);
    DYNAMIC_SHARED(bf16, shared);
    STATIC_SHARED(float, words, [2][2][N]);
    bf16 *keys = shared, *values = shared + SIZE, *queries = shared + 2 * SIZE, *slopes = queries + 2 * PART;
    const Heads of = {all.heads, all.kv_heads, D};
    const KeyJob job = jobs[blockIdx.y];
    const float scale = rule.scale;
    const int kv = blockIdx.x, head_first = kv * group_of(of), head_end = head_first + group_of(of);
    auto fetch = [&](const Cursor& at, int stage) {
        int end = seen[at.entry].query_end;
        auto row = [&](int i) { return at.query + i < end ? at.query + i : -1; };
        copy_tile<D, N>(queries + stage * PART, qkv + at.head * D, row_width(of), row);
        copy_tile<D, N>(slopes + stage * PART, gradient + at.head * D, query_width(of), row);
        int i = threadIdx.x % N, which = threadIdx.x / N;
        const float* from = (which == 0 ? log_sums : deltas) + int64(at.head) * rows;
        if (which < 2) copy_async_word(&words[stage][which][i], from + (row(i) < 0 ? 0 : row(i)), row(i) >= 0);
        copy_commit();
    };
    auto key = [&](int i) { return i < job.count ? job.first + i : -1; };
    copy_tile<D, TILE>(keys, qkv + key_column(of, kv), row_width(of), key);
    copy_tile<D, TILE>(values, qkv + value_column(of, kv), row_width(of), key);
    Cursor next = {job.begin, head_first, seen[job.begin].query_first};
    fetch(next, 0);

    const int warp = warp_index(), g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    float key_sums[D / 8][4] = {}, value_sums[D / 8][4] = {};
    for (int stage = 0; next.entry < job.end; stage ^= 1) {
        const Cursor at = next;
        const Seen range = seen[at.entry];
        advance(next, seen, job, N, head_first, head_end);
        if (next.entry < job.end) fetch(next, stage ^ 1);
        await_tiles(next.entry < job.end);
        float s[N / 8][4] = {}, d[N / 8][4] = {};
        add_tile_dots<D, N>(s, keys, queries + stage * PART);
        add_tile_dots<D, N>(d, values, slopes + stage * PART);
        // Queries after the last are zero and contribute nothing, so only keys are masked.
        const int last = job.first + job.count - 1;
        const bool in_window = at.query + N - 1 - job.first + range.shift < rule.window;
        const bool whole = in_window && at.query >= last && range.key_first <= job.first && range.key_end > last;
        UNROLL for (int i = 0; i < N / 2; ++i) {
            int n = i / 4, e = i % 4, query = 8 * n + t2 + (e & 1), row = job.first + 16 * warp + g + 8 * (e >> 1);
            float weight = exp2_fast((s[n][e] * scale - words[stage][0][query]) * LOG2_E);
            bool visible = whole || sees(range, rule.window, at.query + query, row);
            s[n][e] = visible ? weight : 0.0f;
            d[n][e] = visible ? weight * (d[n][e] - words[stage][1][query]) : 0.0f;
        }
        add_weighted<D, N>(value_sums, s, slopes + stage * PART);
        add_weighted<D, N>(key_sums, d, queries + stage * PART);
        BLOCK_SYNC();
    }
    store_keys<D>(key_sums, scale, job, of, kv, 0, scratch, dqkv);
    store_keys<D>(value_sums, 1.0f, job, of, kv, 1, scratch, dqkv);
}

template <typename T>
DEVICE void plain_forward(const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& of,
                          const Rule<T>& rule, T* out, float* log_sums) {
    const QueryBlock block = query_block(segments, tiles, of, rule.window);
    plain_attend(qkv, keys_in_pack(qkv, block), block, rows, rule, out, log_sums);
}

template <typename T>
DEVICE void plain_query_gradient(const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& of,
                                 const Rule<T>& rule, const T* out, float* log_sums, const T* gradient, float* deltas, T* dqkv) {
    const QueryBlock block = query_block(segments, tiles, of, rule.window);
    plain_queries<T, true>(qkv, keys_in_pack(qkv, block), block, rows, rule, out, log_sums, gradient, deltas, dqkv);
}

template <typename T>
DEVICE void plain_key_gradient(const T* qkv, const KeyJob* jobs, const Seen* seen, int rows, const Heads& of, const Rule<T>& rule,
                               const float* log_sums, const T* gradient, const float* deltas, float* scratch, T* dqkv) {
    DYNAMIC_SHARED(float, shared);
    const float scale = rule.scale;
    const int dim = of.dim, part = LANES * (dim + 1), first = warp_index() * SHARE;
    float *keys = shared, *values = keys + TILE * dim, *queries = values + TILE * dim, *slopes = queries + part;
    float *weights = slopes + part + first * LANES, *changes = weights + TILE * LANES;
    const KeyJob job = jobs[blockIdx.y];
    const int kv = blockIdx.x, head_first = kv * group_of(of), head_end = head_first + group_of(of);
    auto key = [&](int i) { return i < job.count ? job.first + i : -1; };
    load_rows(keys, dim, TILE, qkv + key_column(of, kv), row_width(of), dim, key);
    load_rows(values, dim, TILE, qkv + value_column(of, kv), row_width(of), dim, key);

    float key_sums[SHARE][COLUMNS] = {}, value_sums[SHARE][COLUMNS] = {};
    Cursor at = {job.begin, head_first, seen[job.begin].query_first};
    for (; at.entry < job.end; advance(at, seen, job, LANES, head_first, head_end)) {
        const Seen range = seen[at.entry];
        auto query = [&](int i) { return at.query + i < range.query_end ? at.query + i : -1; };
        BLOCK_SYNC();
        load_rows(queries, dim + 1, LANES, qkv + at.head * dim, row_width(of), dim, query);
        load_rows(slopes, dim + 1, LANES, gradient + at.head * dim, query_width(of), dim, query);
        BLOCK_SYNC();
        float s[SHARE], d[SHARE];
        dots(s, keys + first * dim, queries, dim);
        dots(d, values + first * dim, slopes, dim);
        const int own = query(lane_index());
        const float log_sum = own < 0 ? 0.0f : log_sums[int64(at.head) * rows + own];
        const float delta = own < 0 ? 0.0f : deltas[int64(at.head) * rows + own];
        for (int r = 0; r < SHARE; ++r) {
            bool visible = sees(range, rule.window, own, job.first + first + r);
            float weight = visible ? expf(s[r] * scale - log_sum) : 0.0f;
            weights[r * LANES + lane_index()] = weight;
            changes[r * LANES + lane_index()] = weight * (d[r] - delta);
        }
        WARP_SYNC();
        add_rows(value_sums, weights, slopes, dim);
        add_rows(key_sums, changes, queries, dim);
    }
    UNROLL for (int r = 0; r < SHARE; ++r) {
        int i = first + r;
        if (i >= job.count) continue;
        T* to = dqkv + (job.first + i) * row_width(of);
        if (job.slot < 0) {
            store_row(to + key_column(of, kv), key_sums[r], scale, dim);
            store_row(to + value_column(of, kv), value_sums[r], 1.0f, dim);
        } else {
            store_row(slot_part(scratch, job, of, kv, 0) + i * dim, key_sums[r], scale, dim);
            store_row(slot_part(scratch, job, of, kv, 1) + i * dim, value_sums[r], 1.0f, dim);
        }
    }
}

// Grid [heads, slabs]: partial gradient of the sinks, into partial [slabs, heads].
template <typename T>
DEVICE void sink_gradient(const T* sinks, const float* log_sums, const float* deltas, int rows, int slab, float* partial) {
    const int head = blockIdx.x, first = blockIdx.y * slab, last = min(rows, first + slab);
    const float sink = load(sinks[head]);
    float sum = 0.0f;
    for (int row = first + int(threadIdx.x); row < last; row += 256) {
        const int64 at = int64(head) * rows + row;
        // Rows outside of all segments have the delta 0, and no log-sum-exp.
        if (deltas[at] != 0.0f) sum -= expf(sink - log_sums[at]) * deltas[at];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[int64(blockIdx.y) * gridDim.x + head] = sum;
}

// Grid [kv_heads, splits]: sums the slots of keys with several jobs, in order.
template <typename T> DEVICE void join(const Split* splits, const Heads& of, const float* scratch, T* dqkv) {
    const Split split = splits[blockIdx.y];
    const int kv = blockIdx.x;
    for (int which = 0; which < 2; ++which) {
        const int column = which == 0 ? key_column(of, kv) : value_column(of, kv);
        for (int i = threadIdx.x; i < split.count * of.dim; i += 256) {
            float sum = 0.0f;
            for (int slot = split.begin; slot < split.end; ++slot)
                sum += scratch[((int64(slot) * of.kv_heads + kv) * 2 + which) * TILE * of.dim + i];
            store(dqkv + (split.first + i / of.dim) * row_width(of) + column + i % of.dim, sum);
        }
    }
}

#define ATTENTION_KERNELS(threads, name, T, forward, query_gradient, key_gradient)                                             \
    KERNEL(threads, attention_##name, const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, int heads,      \
           int kv_heads, int dim, float scale, int window, const T* sinks, T* out, float* log_sums) {                          \
        const Heads of = {heads, kv_heads, dim};                                                                               \
        forward(qkv, segments, tiles, rows, of, Rule<T>{scale, window, sinks}, out, log_sums);                                 \
    }                                                                                                                          \
    KERNEL(threads, attention_query_gradient_##name, const T* qkv, const Segment* segments, const QueryTile* tiles, int rows,  \
           int heads, int kv_heads, int dim, float scale, int window, const T* sinks, const T* out, float* log_sums,           \
           const T* gradient, float* deltas, T* dqkv) {                                                                        \
        const Heads of = {heads, kv_heads, dim};                                                                               \
        const Rule<T> rule = {scale, window, sinks};                                                                           \
        query_gradient(qkv, segments, tiles, rows, of, rule, out, log_sums, gradient, deltas, dqkv);                           \
    }                                                                                                                          \
    KERNEL(threads, attention_key_gradient_##name, const T* qkv, const KeyJob* jobs, const Seen* seen, int rows, int heads,    \
           int kv_heads, int dim, float scale, int window, const T* sinks, const float* log_sums, const T* gradient,           \
           const float* deltas, float* scratch, T* dqkv) {                                                                     \
        const Heads of = {heads, kv_heads, dim};                                                                               \
        const Rule<T> rule = {scale, window, sinks};                                                                           \
        key_gradient(qkv, jobs, seen, rows, of, rule, log_sums, gradient, deltas, scratch, dqkv);                              \
    }                                                                                                                          \
    KERNEL(256, attention_join_##name, const Split* splits, int heads, int kv_heads, int dim, const float* scratch, T* dqkv) { \
        join(splits, Heads{heads, kv_heads, dim}, scratch, dqkv);                                                              \
    }
ATTENTION_KERNELS(128, bf16_64, bf16, forward<64>, query_gradient<64>, key_gradient<64>)
ATTENTION_KERNELS(128, bf16_128, bf16, forward<128>, query_gradient<128>, key_gradient<128>)
ATTENTION_KERNELS(256, bf16, bf16, plain_forward<bf16>, plain_query_gradient<bf16>, plain_key_gradient<bf16>)
ATTENTION_KERNELS(256, f32, float, plain_forward<float>, plain_query_gradient<float>, plain_key_gradient<float>)

KERNEL(256, sink_gradient_f32, const float* sinks, const float* log_sums, const float* deltas, int rows, int slab, float* partial) {
    sink_gradient(sinks, log_sums, deltas, rows, slab, partial);
}
KERNEL(256, sink_gradient_bf16, const bf16* sinks, const float* log_sums, const float* deltas, int rows, int slab, float* partial) {
    sink_gradient(sinks, log_sums, deltas, rows, slab, partial);
}
}  // namespace attention
