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
// Queries from `first`, at most QUERIES, of one segment.
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

// Iterates over the work of a key job: segments, then heads of the group, then tiles of queries, which end at `end`.
struct Cursor { int entry, head, query, end; };

DEVICE void advance(Cursor& at, const Seen* seen, const KeyJob& job, int queries, int head_first, int head_end) {
    at.query += queries;
    if (at.query < at.end) return;
    if (++at.head == head_end) {
        at.head = head_first;
        if (++at.entry == job.end) return;
        at.end = seen[at.entry].query_end;
    }
    at.query = seen[at.entry].query_first;
}

// The queries of the calling block in a grid of [heads * QUERIES / ROWS, tiles].
template <int ROWS>
DEVICE QueryBlock query_block(const Segment* segments, const QueryTile* tiles, const Heads& of, int window) {
    const QueryTile tile = tiles[blockIdx.y];
    return query_block<ROWS>(of, segments[tile.segment], tile.first, window);
}

template <int D>
DEVICE void forward(const bf16* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& all,
                    const Rule<bf16>& rule, bf16* out, float* log_sums) {
    const QueryBlock block = query_block<64 * SPAN<D>>(segments, tiles, {all.heads, all.kv_heads, D}, rule.window);
    if (empty(block)) return;
    attend<D>(qkv, keys_in_pack(qkv, block), block, rows, rule, out, log_sums);
}

// Gradient of the queries, and `deltas [heads, rows]`, the dot products of result and its gradient.
template <int D>
DEVICE void query_gradient(const bf16* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& all,
                           const Rule<bf16>& rule, const bf16* out, const float* log_sums, const bf16* gradient, float* deltas,
                           bf16* dqkv) {
    // Keys per step: with two tiles of rows per warp, the sums and the scores of more do not fit in registers.
    constexpr int M = SPAN<D>, KEYS = TILE / M, ROW = D + PAD, SIZE = TILE * ROW;
    DYNAMIC_SHARED(bf16, shared);
    bf16 *queries = shared, *slopes = queries + M * SIZE, *pairs = slopes + M * SIZE;
    const QueryBlock block = query_block<64 * M>(segments, tiles, {all.heads, all.kv_heads, D}, rule.window);
    if (empty(block)) return;
    const Heads& of = block.of;
    const float scale = rule.scale;
    const int own = 16 * M * query_part(), g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    auto query = [&](int i) { return query_row(block, i); };
    const KeyRows<bf16> from = keys_in_pack(qkv, block);
    auto fetch = [&](int t) { fetch_keys<D>(pairs + (t & 1) * 2 * SIZE, from, block, block.begin + t * TILE); };
    copy_tile<D, 64 * M>(queries, qkv + block.head * D, row_width(of), query);
    copy_tile<D, 64 * M>(slopes, gradient + block.head * D, query_width(of), query);
    // The result is only needed for `delta`; it is loaded into the second pair of tiles.
    copy_tile<D, 64 * M>(pairs + 2 * SIZE, out + block.head * D, query_width(of), query);
    fetch(0);
    await_tiles();
    float log_sum[M][2], delta[M][2];
    UNROLL for (int i = 0; i < 2 * M; ++i) {
        const int m = i / 2, r = i % 2, at = own + 16 * m + g + 8 * r, row = query(at);
        float sum = 0.0f;
        const bf16 *left = slopes + at * ROW, *right = pairs + 2 * SIZE + at * ROW;
        UNROLL for (int c = 0; c < D; c += 32) {
            const Pack<bf16, 8> of_gradient = load_pack<8>(left + 4 * t2 + c), of_result = load_pack<8>(right + 4 * t2 + c);
            UNROLL for (int j = 0; j < 8; ++j) sum = fmaf(load(of_gradient.at[j]), load(of_result.at[j]), sum);
        }
        delta[m][r] = quad_sum(sum);
        log_sum[m][r] = row < 0 ? 0.0f : log_sums[int64(block.head) * rows + row] * LOG2_E;
        if (row >= 0 && t2 == 0) deltas[int64(block.head) * rows + row] = delta[m][r];
    }
    // With several steps per tile queries are held in registers; their gradients do not fit.
    uint32 held[M][D / 16][4];
    UNROLL for (int i = 0; M > 1 && i < M * D / 16; ++i)
        load_a(held[i % M][i / M], queries + (own + 16 * (i % M)) * ROW + 16 * (i / M), ROW);

    float sums[M][D / 8][4] = {};
    const int count = (block.seen - block.begin + TILE - 1) / TILE;
    for (int t = 0; t < count; ++t) {
        await_tiles();
        if (t + 1 < count) fetch(t + 1);
        UNROLL for (int part = 0; part < TILE; part += KEYS) {
            const bf16* keys = pairs + (t & 1) * 2 * SIZE + part * ROW;
            const int first = block.begin + t * TILE + part;
            if (all_hidden(block, own, 16 * M, first, KEYS)) continue;
            float s[M][KEYS / 8][4] = {}, d[M][KEYS / 8][4] = {};
            add_dots<D, M, KEYS>(s, keys, KEYS, [&](uint32(&a)[4], int m, int k) {
                if (M == 1) load_a(a, queries + own * ROW + 16 * k, ROW);
                UNROLL for (int i = 0; M > 1 && i < 4; ++i) a[i] = held[m][k][i];
            });
            add_dots<D, M, KEYS>(d, keys + SIZE, KEYS, [&](uint32(&a)[4], int m, int k) {
                load_a(a, slopes + (own + 16 * m) * ROW + 16 * k, ROW);
            });
            UNROLL for (int i = 0; i < M * KEYS / 2; ++i) {
                const int m = i / (KEYS / 2), n = i / 4 % (KEYS / 8), e = i % 4, r = e >> 1;
                float weight = exp2_fast(fmaf(s[m][n][e], scale * LOG2_E, -log_sum[m][r]));
                s[m][n][e] = weight * (d[m][n][e] - delta[m][r]);
            }
            if (partly_hidden(block, own, 16 * M, first, KEYS)) {
                UNROLL for (int i = 0; i < M * KEYS / 2; ++i) {
                    const int m = i / (KEYS / 2), n = i / 4 % (KEYS / 8), e = i % 4;
                    if (hidden(block, own + 16 * m + g + 8 * (e >> 1), first + 8 * n + t2 + (e & 1))) s[m][n][e] = 0.0f;
                }
            }
            add_weighted<D, M, KEYS>(sums, s, keys, KEYS);
        }
    }
    UNROLL for (int i = 0; i < 2 * M; ++i) {
        const int m = i / 2, r = i % 2, row = query(own + 16 * m + g + 8 * r);
        if (row < 0) continue;
        bf16* to = dqkv + int64(row) * row_width(of) + block.head * D + t2;
        UNROLL for (int n = 0; n < D / 8; ++n)
            store_pair(to + 8 * n, sums[m][n][2 * r] * scale, sums[m][n][2 * r + 1] * scale);
    }
}

// Stores the gradient of a warp's keys of a job, which begin at `own`, or of their values.
template <int D, int M>
DEVICE void store_keys(const float (&sums)[M][D / 8][4], float by, const KeyJob& job, int own, const Heads& of, int kv, int which,
                       float* scratch, bf16* dqkv) {
    const int t2 = lane_index() % 4 * 2;
    const int column = which == 0 ? key_column(of, kv) : value_column(of, kv);
    UNROLL for (int j = 0; j < 2 * M; ++j) {
        const int m = j / 2, r = j % 2, i = own + 16 * m + lane_index() / 4 + 8 * r;
        if (i >= job.count) continue;
        UNROLL for (int n = 0; n < D / 8; ++n) {
            float low = sums[m][n][2 * r] * by, high = sums[m][n][2 * r + 1] * by;
            if (job.slot < 0) {
                store_pair(dqkv + int64(job.first + i) * row_width(of) + column + 8 * n + t2, low, high);
            } else {
                float* to = slot_part(scratch, job, of, kv, which) + i * D + 8 * n + t2;
                to[0] = low;
                to[1] = high;
            }
        }
    }
}

// Copies a warp's sums to its place in shared memory.
template <int D, int M> DEVICE void leave_sums(float* room, const float (&sums)[M][D / 8][4]) {
    float* to = room + warp_index() * M * D / 2 * 32 + lane_index();
    UNROLL for (int i = 0; i < M * D / 2; ++i) to[32 * i] = sums[i / (D / 2)][i / 4 % (D / 8)][i % 4];
}

// Adds the sums that another warp left.
template <int D, int M> DEVICE void add_sums(float (&sums)[M][D / 8][4], const float* room, int warp) {
    const float* from = room + warp * M * D / 2 * 32 + lane_index();
    UNROLL for (int i = 0; i < M * D / 2; ++i) sums[i / (D / 2)][i / 4 % (D / 8)][i % 4] += from[32 * i];
}

// Grid [kv_heads, jobs]: gradient of keys and values; the rows of all products are keys. With two tiles of rows per
// warp, two warps have the same keys, each with half of the queries, and their sums are added at the end.
template <int D>
DEVICE void key_gradient(const bf16* qkv, const KeyJob* jobs, const Seen* seen, int rows, const Heads& all,
                         const Rule<bf16>& rule, const float* log_sums, const bf16* gradient, const float* deltas, float* scratch,
                         bf16* dqkv) {
    // Queries per step of a warp: with more, the accumulators of keys and values do not fit in registers.
    constexpr int N = 32;
    constexpr int M = SPAN<D>, ALL = M * N, ROW = D + PAD, SIZE = TILE * ROW, PART = ALL * ROW;
    DYNAMIC_SHARED(bf16, shared);
    STATIC_SHARED(float, words, [2][2][ALL]);
    bf16 *keys = shared, *values = shared + SIZE, *queries = shared + 2 * SIZE, *slopes = queries + 2 * PART;
    const Heads of = {all.heads, all.kv_heads, D};
    const KeyJob job = jobs[blockIdx.y];
    const float scale = rule.scale;
    const int kv = blockIdx.x, head_first = kv * group_of(of), head_end = head_first + group_of(of);
    auto fetch = [&](const Cursor& at, int stage) {
        auto row = [&](int i) { return at.query + i < at.end ? at.query + i : -1; };
        copy_tile<D, ALL>(queries + stage * PART, qkv + at.head * D, row_width(of), row);
        copy_tile<D, ALL>(slopes + stage * PART, gradient + at.head * D, query_width(of), row);
        int i = threadIdx.x % ALL, which = threadIdx.x / ALL;
        const float* from = (which == 0 ? log_sums : deltas) + int64(at.head) * rows;
        if (which < 2) copy_async_word(&words[stage][which][i], from + (row(i) < 0 ? 0 : row(i)), row(i) >= 0);
        copy_commit();
    };
    auto key = [&](int i) { return i < job.count ? job.first + i : -1; };
    copy_tile<D, TILE>(keys, qkv + key_column(of, kv), row_width(of), key);
    copy_tile<D, TILE>(values, qkv + value_column(of, kv), row_width(of), key);
    Cursor next = {job.begin, head_first, seen[job.begin].query_first, seen[job.begin].query_end};
    fetch(next, 0);

    // A warp's keys and queries.
    const int warp = warp_index(), half = warp / (4 / M), own = warp % (4 / M) * 16 * M, part = half * N;
    const int first = job.first + own, last = job.first + min(own + 16 * M, job.count) - 1;
    const int g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    float key_sums[M][D / 8][4] = {}, value_sums[M][D / 8][4] = {};
    for (int stage = 0; next.entry < job.end; stage ^= 1) {
        const int start = next.query + part;
        const Seen range = seen[next.entry];
        await_tiles();
        advance(next, seen, job, ALL, head_first, head_end);
        if (next.entry < job.end) fetch(next, stage ^ 1);
        // Places from the last key to the first query, and from the first key to the last query.
        const int least = start - last + range.shift, most = start + N - 1 - first + range.shift;
        const bool apart = most < 0 || least >= rule.window || start >= range.query_end;
        if (apart || last < first || range.key_end <= first || range.key_first > last) continue;
        const bf16 *some = queries + stage * PART + part * ROW, *some_slopes = slopes + stage * PART + part * ROW;
        float s[M][N / 8][4] = {}, d[M][N / 8][4] = {};
        add_dots<D, M, N>(s, some, N, [&](uint32(&a)[4], int m, int k) { load_a(a, keys + (own + 16 * m) * ROW + 16 * k, ROW); });
        add_dots<D, M, N>(d, some_slopes, N, [&](uint32(&a)[4], int m, int k) {
            load_a(a, values + (own + 16 * m) * ROW + 16 * k, ROW);
        });
        UNROLL for (int i = 0; i < N / 4; ++i) {
            const int n = i / 2, at = part + 8 * n + t2 + i % 2;
            const float log_sum = words[stage][0][at] * LOG2_E, delta = words[stage][1][at];
            UNROLL for (int j = 0; j < 2 * M; ++j) {
                const int m = j / 2, e = j % 2 * 2 + i % 2;
                s[m][n][e] = exp2_fast(fmaf(s[m][n][e], scale * LOG2_E, -log_sum));
                d[m][n][e] = s[m][n][e] * (d[m][n][e] - delta);
            }
        }
        // Queries after the last are zero and contribute nothing, so only keys are masked.
        if (least < 0 || most >= rule.window || range.key_first > first || range.key_end <= last) {
            UNROLL for (int i = 0; i < M * N / 2; ++i) {
                const int m = i / (N / 2), n = i / 4 % (N / 8), e = i % 4;
                if (sees(range, rule.window, start + 8 * n + t2 + (e & 1), first + 16 * m + g + 8 * (e >> 1))) continue;
                s[m][n][e] = 0.0f;
                d[m][n][e] = 0.0f;
            }
        }
        add_weighted<D, M, N>(value_sums, s, some_slopes, N);
        add_weighted<D, M, N>(key_sums, d, some, N);
    }
    if (M == 1) {
        store_keys<D>(key_sums, scale, job, own, of, kv, 0, scratch, dqkv);
        store_keys<D>(value_sums, 1.0f, job, own, of, kv, 1, scratch, dqkv);
        return;
    }
    // One warp of a pair stores the keys, and the other one the values.
    float* room = reinterpret_cast<float*>(shared);
    BLOCK_SYNC();
    half == 0 ? leave_sums<D>(room, value_sums) : leave_sums<D>(room, key_sums);
    BLOCK_SYNC();
    if (half == 0) {
        add_sums<D>(key_sums, room, warp + 2);
        store_keys<D>(key_sums, scale, job, own, of, kv, 0, scratch, dqkv);
    } else {
        add_sums<D>(value_sums, room, warp - 2);
        store_keys<D>(value_sums, 1.0f, job, own, of, kv, 1, scratch, dqkv);
    }
}

template <typename T>
DEVICE void plain_forward(const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& of,
                          const Rule<T>& rule, T* out, float* log_sums) {
    const QueryBlock block = query_block<TILE>(segments, tiles, of, rule.window);
    if (empty(block)) return;
    plain_attend(qkv, keys_in_pack(qkv, block), block, rows, rule, out, log_sums);
}

template <typename T>
DEVICE void plain_query_gradient(const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& of,
                                 const Rule<T>& rule, const T* out, float* log_sums, const T* gradient, float* deltas, T* dqkv) {
    const QueryBlock block = query_block<TILE>(segments, tiles, of, rule.window);
    if (empty(block)) return;
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
    Cursor at = {job.begin, head_first, seen[job.begin].query_first, seen[job.begin].query_end};
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
        T* to = dqkv + int64(job.first + i) * row_width(of);
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
            store(dqkv + int64(split.first + i / of.dim) * row_width(of) + column + i % of.dim, sum);
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
