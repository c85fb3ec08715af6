// Tiled attention: the parts that kernels over packs and over a paged KV cache share.
//
// Keys are numbered by place, in the order in which a query attends to them, and tiles of keys begin at fixed places. A
// query therefore has the same tiles, and its result the same bits, for every memory layout of its keys and every
// batch. With a window a block visits the tiles that its queries see; a tile of which a query sees no key adds zeros.
//
// Two families of kernels: tensor cores for bf16 heads of 64 and 128, and f32 for all other heads up to 256.
#pragma once
#include "common.cuh"

#define UNROLL _Pragma("unroll")

namespace attention {
// Keys per tile; src/ops/attention.rs builds the work lists over keys with the same number.
constexpr int TILE = 64;
// Queries per entry of the work lists, which src/ops/attention.rs and src/ops/prefill.rs build with the same number.
constexpr int QUERIES = 128;
// Padding of the rows of a shared-memory tile, values, so that rows begin in different banks.
constexpr int PAD = 8;
constexpr float LOG2_E = 1.4426950408889634f;

// Rows of queries, and of the keys before them.
struct Segment { int first, end, prefix_first, prefix_end; };
// Column offsets in a row.
struct Heads { int heads, kv_heads, dim; };

DEVICE int row_width(const Heads& of) { return (of.heads + 2 * of.kv_heads) * of.dim; }
DEVICE int query_width(const Heads& of) { return of.heads * of.dim; }
DEVICE int group_of(const Heads& of) { return of.heads / of.kv_heads; }
DEVICE int key_column(const Heads& of, int kv) { return (of.heads + kv) * of.dim; }
DEVICE int value_column(const Heads& of, int kv) { return (of.heads + of.kv_heads + kv) * of.dim; }

// How scores become weights.
template <typename T> struct Rule {
    // Multiplies scores; positive.
    float scale;
    // Keys that a query sees, the last of which is its own.
    int window;
    // `[heads]` logits of the softmax that have no key, and the value zero; null for none.
    const T* sinks;
};

// The logit of a head without a key; minus infinity for none.
template <typename T> DEVICE float sink_of(const Rule<T>& rule, int head) {
    return rule.sinks ? load(rule.sinks[head]) : -INFINITE;
}

// Queries of one head: the place of the first query, the first place of the tiles that they see, and the number of
// places of the last one.
struct QueryBlock {
    Heads of;
    Segment segment;
    int window, head, kv, first, first_place, begin, seen;
};

// The queries of the calling block, at most ROWS, of the entry that begins at `entry`, in a grid of
// [heads * QUERIES / ROWS, entries]. There may be none.
template <int ROWS> DEVICE QueryBlock query_block(const Heads& of, const Segment& segment, int entry, int window) {
    constexpr int PARTS = QUERIES / ROWS;
    const int head = blockIdx.x / PARTS, first = entry + blockIdx.x % PARTS * ROWS;
    const int first_place = segment.prefix_end - segment.prefix_first + first - segment.first;
    const int begin = max(0, first_place - window + 1) / TILE * TILE;
    return {of, segment, window, head, head / group_of(of), first, first_place, begin,
            first_place + min(ROWS, segment.end - first)};
}

DEVICE bool empty(const QueryBlock& block) { return block.first >= block.segment.end; }

// Whether query `i` of a block does not see the key at a place: one after its own, which is many before it as an
// unsigned number, or one before its window.
DEVICE bool hidden(const QueryBlock& block, int i, int place) {
    return uint32(block.first_place + i - place) >= uint32(block.window);
}

// Whether `count` queries of a block from `i` see none of `keys` keys from the place `first`.
DEVICE bool all_hidden(const QueryBlock& block, int i, int count, int first, int keys) {
    const int place = block.first_place + i;
    return block.first + i >= block.segment.end || first >= place + count || place - first - keys + 1 >= block.window;
}

// Whether some of these queries does not see one of these keys.
DEVICE bool partly_hidden(const QueryBlock& block, int i, int count, int first, int keys) {
    const int place = block.first_place + i;
    return first + keys - 1 > place || place + count - 1 - first >= block.window;
}

// The row of a query; negative after the last.
DEVICE int query_row(const QueryBlock& block, int i) { return block.first + i < block.segment.end ? block.first + i : -1; }

// Location of the keys and values of a block: rows of the pack, or pages of the cache if there is a page table.
template <typename T> struct KeyRows {
    const T *keys, *values;
    int stride;
    const uint32* pages;
    // Distance between pages of the cache.
    int page_rows;
};

template <typename T> DEVICE KeyRows<T> keys_in_pack(const T* qkv, const QueryBlock& block) {
    const Heads& of = block.of;
    return {qkv + key_column(of, block.kv), qkv + value_column(of, block.kv), row_width(of), nullptr, 0};
}

// The row of a place; negative after the last.
template <typename T> DEVICE int key_row(const KeyRows<T>& from, const QueryBlock& block, int place) {
    const Segment& segment = block.segment;
    const int seen = min(place, block.seen - 1), own = seen - (segment.prefix_end - segment.prefix_first);
    int row = own < 0 ? segment.prefix_first + seen : segment.first + own;
    if (from.pages) row = int(from.pages[seen / PAGE]) * from.page_rows + seen % PAGE;
    return place == seen ? row : -1;
}

// ---------------------------------------------------------------------------------------------------- tensor cores

DEVICE float exp2_fast(float value) {
#ifdef RLRUN_EMULATED
    return exp2f(value);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
#endif
}

// `copy_async` of one f32, or zero.
DEVICE void copy_async_word(float* to, const float* from, bool valid) {
#ifdef RLRUN_EMULATED
    *to = valid ? *from : 0.0f;
#else
    uint32 address = (uint32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(valid ? 4 : 0));
#endif
}

// Begins an asynchronous copy of `N` rows of `D` columns to a tile; `row` maps each row, negative for zeros.
template <int D, int N, typename Row> DEVICE void copy_tile(bf16* to, const bf16* from, int stride, Row row) {
    constexpr int CHUNKS = D / 8;
    UNROLL for (int i = 0; i < N * CHUNKS / 128; ++i) {
        int chunk = i * 128 + int(threadIdx.x);
        int r = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        int at = row(r);
        copy_async(to + r * (D + PAD) + column, from + int64(max(at, 0)) * stride + column, at < 0 ? 0 : 16);
    }
}

// Begins an asynchronous copy of the keys and values of the places from `first`, to two tiles.
template <int D> DEVICE void fetch_keys(bf16* to, const KeyRows<bf16>& from, const QueryBlock& block, int first) {
    constexpr int CHUNKS = D / 8, SIZE = TILE * (D + PAD);
    UNROLL for (int i = 0; i < TILE * CHUNKS / 128; ++i) {
        const int chunk = i * 128 + int(threadIdx.x), r = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        const int row = key_row(from, block, first + r), valid = row < 0 ? 0 : 16;
        const int64 at = int64(max(row, 0)) * from.stride + column;
        copy_async(to + r * (D + PAD) + column, from.keys + at, valid);
        copy_async(to + SIZE + r * (D + PAD) + column, from.values + at, valid);
    }
    copy_commit();
}

// Tiles of 16 rows per warp. An operand from shared memory is used for all of them, and reads of shared memory bound
// the kernels otherwise; with heads of 128 the sums of two tiles do not fit in registers.
template <int D> constexpr int SPAN = D > 64 ? 1 : 2;

// The first `columns` of c [16 M, N] += a [16 M, D] * b [N, D]^T, with `b` a tile; `load` returns the operand of 16 rows
// and 16 columns of `a`.
template <int D, int M, int N, typename Load>
DEVICE void add_dots(float (&c)[M][N / 8][4], const bf16* b, int columns, Load load) {
    UNROLL for (int k = 0; k < D / 16; ++k) {
        uint32 rows[M][4];
        UNROLL for (int m = 0; m < M; ++m) load(rows[m], m, k);
        UNROLL for (int n = 0; n < N / 16; ++n) {
            if (16 * n >= columns) break;
            uint32 other[2][2];
            load_b_pair(other, b + 16 * n * (D + PAD) + 16 * k, D + PAD);
            UNROLL for (int i = 0; i < 2 * M; ++i) mma(c[i / 2][2 * n + i % 2], rows[i / 2], other[i % 2]);
        }
    }
}

// c [16 M, D] += weights [16 M, N] * b [N, D], with `b` a tile, of whose rows the first `columns` count; the layout of a
// product's result is that of a left operand.
template <int D, int M, int N>
DEVICE void add_weighted(float (&c)[M][D / 8][4], const float (&weights)[M][N / 8][4], const bf16* b, int columns) {
    UNROLL for (int k = 0; k < N / 16; ++k) {
        if (16 * k >= columns) break;
        uint32 a[M][4];
        UNROLL for (int m = 0; m < M; ++m) {
            UNROLL for (int i = 0; i < 4; ++i) {
                const float(&from)[4] = weights[m][2 * k + i / 2];
                a[m][i] = pack_bf16(from[i % 2 * 2], from[i % 2 * 2 + 1]);
            }
        }
        UNROLL for (int n = 0; n < D / 16; ++n) {
            uint32 other[2][2];
            load_b_rows_pair(other, b + 16 * k * (D + PAD) + 16 * n, D + PAD);
            UNROLL for (int i = 0; i < 2 * M; ++i) mma(c[i / 2][2 * n + i % 2], a[i / 2], other[i % 2]);
        }
    }
}

// Waits for the copies that were started, and until all threads have used the tiles before.
DEVICE void await_tiles() {
    copy_wait<0>();
    BLOCK_SYNC();
}

// The part of a block's queries that the calling warp has, of four. Later queries see more keys: their parts are in other
// warps in every second tile, so that the schedulers of a multiprocessor have equal work.
DEVICE int query_part() { return blockIdx.y % 2 == 0 ? warp_index() : 3 - warp_index(); }

// Reduction over the lanes that hold one row of a result of `mma`.
DEVICE float quad_sum(float value) {
    value += shuffle_xor(value, 1);
    return value + shuffle_xor(value, 2);
}

DEVICE void store_pair(bf16* to, float low, float high) { *reinterpret_cast<uint32*>(to) = pack_bf16(low, high); }

// Online softmax of two rows of queries: scores become weights `2^(scale * (score - top))`, and earlier sums are
// rescaled to the new maximum.
template <int D>
DEVICE void soften(float (&s)[TILE / 8][4], float (&sums)[D / 8][4], float (&top)[2], float (&total)[2], float scale) {
    UNROLL for (int r = 0; r < 2; ++r) {
        float high = top[r];
        UNROLL for (int n = 0; n < TILE / 8; ++n) high = fmaxf(high, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        high = fmaxf(high, shuffle_xor(high, 1));
        high = fmaxf(high, shuffle_xor(high, 2));
        // A row that has seen no key yet keeps its zeros.
        float base = high == -INFINITE ? 0.0f : high;
        float kept = exp2_fast((top[r] - base) * scale), shift = base * scale;
        float sum = total[r] * kept;
        UNROLL for (int i = 0; i < TILE / 4; ++i) {
            float& weight = s[i / 2][2 * r + i % 2];
            weight = exp2_fast(fmaf(weight, scale, -shift));
            sum += weight;
        }
        UNROLL for (int n = 0; n < D / 8; ++n) {
            sums[n][2 * r] *= kept;
            sums[n][2 * r + 1] *= kept;
        }
        total[r] = sum;
        top[r] = high;
    }
}

// Adds a tile of keys and values, from the place `first`, to the sums of a warp's queries, which begin at `own`.
template <int D, bool PARTLY_HIDDEN, int M>
DEVICE void attend_tile(float (&sums)[M][D / 8][4], float (&top)[M][2], float (&total)[M][2], const uint32 (&q)[M][D / 16][4],
                        const bf16* tiles, const QueryBlock& block, int own, int first, float scale) {
    // No query sees keys after that of the last one.
    const int columns = PARTLY_HIDDEN ? block.first_place + own + 16 * M - first : TILE;
    const int g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    float s[M][TILE / 8][4] = {};
    add_dots<D, M, TILE>(s, tiles, columns, [&](uint32(&a)[4], int m, int k) {
        UNROLL for (int i = 0; i < 4; ++i) a[i] = q[m][k][i];
    });
    UNROLL for (int m = 0; m < M; ++m) {
        UNROLL for (int i = 0; PARTLY_HIDDEN && i < TILE / 2; ++i) {
            int n = i / 4, e = i % 4;
            if (hidden(block, own + 16 * m + g + 8 * (e >> 1), first + 8 * n + t2 + (e & 1))) s[m][n][e] = -INFINITE;
        }
        soften<D>(s[m], sums[m], top[m], total[m], scale * LOG2_E);
    }
    add_weighted<D, M, TILE>(sums, s, tiles + TILE * (D + PAD), columns);
}

// Stores the results of a block's queries, and `log_sums [heads, rows]` if requested.
template <int D>
DEVICE void attend(const bf16* qkv, const KeyRows<bf16>& from, const QueryBlock& block, int rows, const Rule<bf16>& rule,
                   bf16* out, float* log_sums) {
    constexpr int M = SPAN<D>, PAIR = 2 * TILE * (D + PAD);
    DYNAMIC_SHARED(bf16, shared);
    const Heads& of = block.of;
    const int own = 16 * M * query_part(), g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    const float scale = rule.scale, sink = sink_of(rule, block.head);
    auto query = [&](int i) { return query_row(block, i); };
    auto fetch = [&](int t) { fetch_keys<D>(shared + (t & 1) * PAIR, from, block, block.begin + t * TILE); };
    // Queries are loaded to registers through the second pair of tiles.
    copy_tile<D, 64 * M>(shared + PAIR, qkv + block.head * D, row_width(of), query);
    fetch(0);
    await_tiles();
    uint32 q[M][D / 16][4];
    UNROLL for (int m = 0; m < M; ++m) {
        UNROLL for (int k = 0; k < D / 16; ++k) load_a(q[m][k], shared + PAIR + (own + 16 * m) * (D + PAD) + 16 * k, D + PAD);
    }

    // The sink is a score with the weight 1 at first, which one lane of a row counts.
    float sums[M][D / 8][4] = {}, top[M][2], total[M][2];
    UNROLL for (int i = 0; i < 2 * M; ++i) {
        top[i / 2][i % 2] = sink / scale;
        total[i / 2][i % 2] = rule.sinks && t2 == 0 ? 1.0f : 0.0f;
    }
    const int count = (block.seen - block.begin + TILE - 1) / TILE;
    for (int t = 0; t < count; ++t) {
        await_tiles();
        if (t + 1 < count) fetch(t + 1);
        const bf16* tiles = shared + (t & 1) * PAIR;
        const int first = block.begin + t * TILE;
        if (all_hidden(block, own, 16 * M, first, TILE)) continue;
        if (partly_hidden(block, own, 16 * M, first, TILE)) {
            attend_tile<D, true>(sums, top, total, q, tiles, block, own, first, scale);
        } else {
            attend_tile<D, false>(sums, top, total, q, tiles, block, own, first, scale);
        }
    }

    UNROLL for (int i = 0; i < 2 * M; ++i) {
        const int m = i / 2, r = i % 2, row = query(own + 16 * m + g + 8 * r);
        float sum = quad_sum(total[m][r]);
        if (row < 0) continue;
        if (log_sums && t2 == 0) log_sums[int64(block.head) * rows + row] = top[m][r] * scale + logf(sum);
        float inverse = 1.0f / sum;
        bf16* to = out + int64(row) * query_width(of) + block.head * D + t2;
        UNROLL for (int n = 0; n < D / 8; ++n)
            store_pair(to + 8 * n, sums[m][n][2 * r] * inverse, sums[m][n][2 * r + 1] * inverse);
    }
}

// ------------------------------------------------------------------------------------------------------------ f32

// Keys, or queries, per step of a warp.
// Rows of a tile per warp (of 8), and columns per lane, 32 apart.
constexpr int LANES = 32, SHARE = 8, COLUMNS = 8;

// Copies `count` rows of `dim` values to rows `stride` apart; `row` maps each row, negative for zeros.
template <typename T, typename Row>
DEVICE void load_rows(float* to, int stride, int count, const T* from, int from_stride, int dim, Row row) {
    for (int i = warp_index(); i < count; i += 8) {
        int at = row(i);
        for (int c = lane_index(); c < dim; c += 32) to[i * stride + c] = at < 0 ? 0.0f : load(from[int64(at) * from_stride + c]);
    }
}

// Loads the keys and values of the places from `first`, after all threads have used those before.
template <typename T>
DEVICE void load_keys(float* keys, float* values, const KeyRows<T>& from, const QueryBlock& block, int first) {
    auto row = [&](int i) { return key_row(from, block, first + i); };
    const int dim = block.of.dim;
    BLOCK_SYNC();
    load_rows(keys, dim + 1, LANES, from.keys, from.stride, dim, row);
    load_rows(values, dim + 1, LANES, from.values, from.stride, dim, row);
    BLOCK_SYNC();
}

// Dot products of a warp's rows with the row of each lane; lane rows are `dim + 1` apart, in different banks.
DEVICE void dots(float (&s)[SHARE], const float* rows, const float* lanes, int dim) {
    const float* own = lanes + lane_index() * (dim + 1);
    for (int r = 0; r < SHARE; ++r) s[r] = 0.0f;
    for (int d = 0; d < dim; ++d) {
        float value = own[d];
        for (int r = 0; r < SHARE; ++r) s[r] = fmaf(rows[r * dim + d], value, s[r]);
    }
}

// sums += weights [SHARE, LANES] * from [LANES, dim]; rows of `from` are `dim + 1` apart.
DEVICE void add_rows(float (&sums)[SHARE][COLUMNS], const float* weights, const float* from, int dim) {
    for (int j = 0; j < LANES; ++j) {
        for (int c = 0; c < COLUMNS; ++c) {
            int column = 32 * c + lane_index();
            if (32 * c >= dim) break;
            float value = column < dim ? from[j * (dim + 1) + column] : 0.0f;
            for (int r = 0; r < SHARE; ++r) sums[r][c] = fmaf(weights[r * LANES + j], value, sums[r][c]);
        }
    }
}

template <typename T> DEVICE void store_row(T* to, const float (&sums)[COLUMNS], float by, int dim) {
    for (int c = 0; c < COLUMNS; ++c) {
        int column = 32 * c + lane_index();
        if (column < dim) store(to + column, sums[c] * by);
    }
}

// Result of `attend`; for the gradient, that of a block's queries, and `deltas`.
template <typename T, bool GRADIENT>
DEVICE void plain_queries(const T* qkv, const KeyRows<T>& from, const QueryBlock& block, int rows, const Rule<T>& rule,
                          const T* out, float* log_sums, const T* gradient, float* deltas, T* to) {
    DYNAMIC_SHARED(float, shared);
    const Heads& of = block.of;
    const float scale = rule.scale;
    const int dim = of.dim, part = LANES * (dim + 1), first = warp_index() * SHARE;
    float *queries = shared, *keys = queries + TILE * dim, *values = keys + part, *weights = values + part + first * LANES;
    float* slopes = values + part + TILE * LANES;
    auto query = [&](int i) { return query_row(block, i); };
    load_rows(queries, dim, TILE, qkv + block.head * dim, row_width(of), dim, query);
    if (GRADIENT) load_rows(slopes, dim, TILE, gradient + block.head * dim, query_width(of), dim, query);
    BLOCK_SYNC();

    // Per row: maximal score and sum of weights so far, at first those of the sink; or log-sum-exp and delta.
    float top[SHARE], total[SHARE], sums[SHARE][COLUMNS] = {};
    UNROLL for (int r = 0; r < SHARE; ++r) {
        top[r] = sink_of(rule, block.head), total[r] = !GRADIENT && rule.sinks && lane_index() == 0 ? 1.0f : 0.0f;
        int row = query(first + r);
        if (!GRADIENT || row < 0) continue;
        const T* result = out + int64(row) * query_width(of) + block.head * dim;
        for (int c = lane_index(); c < dim; c += 32) total[r] += load(result[c]) * slopes[(first + r) * dim + c];
        total[r] = warp_sum(total[r]);
        top[r] = log_sums[int64(block.head) * rows + row];
        if (lane_index() == 0) deltas[int64(block.head) * rows + row] = total[r];
    }
    for (int start = block.begin; start < block.seen; start += LANES) {
        load_keys(keys, values, from, block, start);
        float s[SHARE], d[SHARE];
        dots(s, queries + first * dim, keys, dim);
        if (GRADIENT) dots(d, slopes + first * dim, values, dim);
        UNROLL for (int r = 0; r < SHARE; ++r) {
            float score = hidden(block, first + r, start + int(lane_index())) ? -INFINITE : s[r] * scale;
            if (GRADIENT) {
                weights[r * LANES + lane_index()] = expf(score - top[r]) * (d[r] - total[r]);
                continue;
            }
            // A row that has seen no key yet keeps its zeros.
            float high = fmaxf(top[r], warp_max(score)), base = high == -INFINITE ? 0.0f : high;
            float kept = expf(top[r] - base), weight = expf(score - base);
            weights[r * LANES + lane_index()] = weight;
            total[r] = total[r] * kept + weight;
            top[r] = high;
            UNROLL for (int c = 0; c < COLUMNS; ++c) sums[r][c] *= kept;
        }
        WARP_SYNC();
        add_rows(sums, weights, GRADIENT ? keys : values, dim);
    }
    UNROLL for (int r = 0; r < SHARE; ++r) {
        int row = query(first + r);
        float sum = GRADIENT ? 1.0f : warp_sum(total[r]);
        if (row < 0) continue;
        if (!GRADIENT && log_sums && lane_index() == 0) log_sums[int64(block.head) * rows + row] = top[r] + logf(sum);
        int stride = GRADIENT ? row_width(of) : query_width(of);
        store_row(to + int64(row) * stride + block.head * dim, sums[r], GRADIENT ? scale : 1.0f / sum, dim);
    }
}

template <typename T>
DEVICE void plain_attend(const T* qkv, const KeyRows<T>& from, const QueryBlock& block, int rows, const Rule<T>& rule, T* out,
                         float* log_sums) {
    plain_queries<T, false>(qkv, from, block, rows, rule, nullptr, log_sums, nullptr, nullptr, out);
}
}  // namespace attention
