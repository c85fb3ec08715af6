// Causal attention of packed segments with grouped key-value heads, forward and backward.
//
// A segment's queries see all rows of its prefix and then its own up to themselves. Keys are numbered in that order, by
// "places", and tiles of keys begin at fixed places: a query meets the same tiles, and its result has the same bits,
// however its sequence is packed. The gradients of keys and values are sums over all segments that see them: one block
// owns a tile of keys (or a fixed part of its queries, added up afterwards) and goes through them in order, without atomics.
//
// Two families: on the tensor cores for bf16 heads of 64 and 128, and plain f32 for everything else, up to 256.
#include "common.cuh"

#define UNROLL _Pragma("unroll")

namespace attention {
// Queries, and keys, of one block; Segments of src/ops/attention.rs makes its lists by it.
constexpr int TILE = 64;
// Values between the rows of a tile in shared memory, so that rows begin in different banks.
constexpr int PAD = 8;
constexpr float LOG2_E = 1.4426950408889634f;

struct Segment { int first, end, prefix_first, prefix_end; };
// Queries from `first` to at most TILE later, in one segment.
struct QueryTile { int segment, first; };
// What one block does for the keys `first..first + count`: entries `begin..end` of the list of `Seen`. The result goes
// to slot `slot` of the scratch, or right to its place if that is negative.
struct KeyJob { int first, count, begin, end, slot; };
// Queries that see the keys of a range, those after themselves excepted.
struct Seen { int query_first, query_end, key_first, key_end; };
// The slots that make up the gradient of the keys `first..first + count`.
struct Split { int first, count, begin, end; };
// Columns of a row.
struct Heads { int heads, kv_heads, dim; };

DEVICE int64 row_width(const Heads& of) { return int64(of.heads + 2 * of.kv_heads) * of.dim; }
DEVICE int64 query_width(const Heads& of) { return int64(of.heads) * of.dim; }
DEVICE int group_of(const Heads& of) { return of.heads / of.kv_heads; }
DEVICE int key_column(const Heads& of, int kv) { return (of.heads + kv) * of.dim; }
DEVICE int value_column(const Heads& of, int kv) { return (of.heads + of.kv_heads + kv) * of.dim; }

// A tile of queries of one head: the place of the first query, and how many places the last one sees.
struct QueryBlock {
    Heads of;
    Segment segment;
    int head, kv, first, first_place, seen;
};

// Of the calling block, in a grid of [heads, tiles].
DEVICE QueryBlock query_block(const Segment* segments, const QueryTile* tiles, const Heads& of) {
    const QueryTile tile = tiles[blockIdx.y];
    const Segment segment = segments[tile.segment];
    const int head = blockIdx.x, first_place = segment.prefix_end - segment.prefix_first + tile.first - segment.first;
    return {of, segment, head, head / group_of(of), tile.first, first_place, first_place + min(TILE, segment.end - tile.first)};
}

// Rows of the pack, negative beyond the end.
DEVICE int query_row(const QueryBlock& block, int i) { return block.first + i < block.segment.end ? block.first + i : -1; }
DEVICE int key_row(const QueryBlock& block, int place) {
    const Segment& segment = block.segment;
    if (place >= block.seen) return -1;
    int own = place - (segment.prefix_end - segment.prefix_first);
    return own < 0 ? segment.prefix_first + place : segment.first + own;
}

// Part `which` (keys, values) of a slot of the scratch `[slots, kv_heads, 2, TILE, dim]`.
DEVICE float* slot_part(float* scratch, const KeyJob& job, const Heads& of, int kv, int which) {
    return scratch + ((int64(job.slot) * of.kv_heads + kv) * 2 + which) * TILE * of.dim;
}

// Goes through what a key job has to see: segments, in them heads of the group, in them tiles of queries.
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

// Starts to copy `D` columns of `N` rows to a tile; `row` tells the row for each, negative for one of zeros.
template <int D, int N, typename Row> DEVICE void copy_tile(bf16* to, const bf16* from, int64 stride, Row row) {
    constexpr int CHUNKS = D / 8;
    UNROLL for (int i = 0; i < N * CHUNKS / 128; ++i) {
        int chunk = i * 128 + int(threadIdx.x);
        int r = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        int at = row(r);
        copy_async(to + r * (D + PAD) + column, from + (at < 0 ? 0 : at) * stride + column, at < 0 ? 0 : 16);
    }
}

// Starts to copy the keys and values of the places from `first` on.
template <int D> DEVICE void fetch_keys(bf16* keys, bf16* values, const bf16* qkv, const QueryBlock& block, int first) {
    auto row = [&](int i) { return key_row(block, first + i); };
    copy_tile<D, TILE>(keys, qkv + key_column(block.of, block.kv), row_width(block.of), row);
    copy_tile<D, TILE>(values, qkv + value_column(block.of, block.kv), row_width(block.of), row);
    copy_commit();
}

// Two products with the halves of 16 x 16 values as `load_a` and `load_a_transposed` give them.
DEVICE void mma_pair(float (&low)[4], float (&high)[4], const uint32 (&a)[4], const uint32 (&b)[4]) {
    const uint32 first[2] = {b[0], b[2]}, second[2] = {b[1], b[3]};
    mma(low, a, first);
    mma(high, a, second);
}

// c [16, N] += a [16, D] * b [N, D]^T, `b` a tile; `load` gives the operand of 16 columns of `a`.
template <int D, int N, typename Load> DEVICE void add_dots(float (&c)[N / 8][4], const bf16* b, Load load) {
    UNROLL for (int k = 0; k < D / 16; ++k) {
        uint32 rows[4];
        load(rows, k);
        UNROLL for (int n = 0; n < N / 16; ++n) {
            uint32 columns[4];
            load_a(columns, b + 16 * n * (D + PAD) + 16 * k, D + PAD);
            mma_pair(c[2 * n], c[2 * n + 1], rows, columns);
        }
    }
}

// The same for the calling warp's 16 rows of a tile.
template <int D, int N> DEVICE void add_tile_dots(float (&c)[N / 8][4], const bf16* a, const bf16* b) {
    const bf16* own = a + 16 * warp_index() * (D + PAD);
    add_dots<D, N>(c, b, [&](uint32(&rows)[4], int k) { load_a(rows, own + 16 * k, D + PAD); });
}

// c [16, D] += weights [16, N] * b [N, D], `b` a tile: results of a product are the left side of the next as they lie.
template <int D, int N> DEVICE void add_weighted(float (&c)[D / 8][4], const float (&weights)[N / 8][4], const bf16* b) {
    UNROLL for (int k = 0; k < N / 16; ++k) {
        const float(&low)[4] = weights[2 * k];
        const float(&high)[4] = weights[2 * k + 1];
        const uint32 a[4] = {pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]),
                             pack_bf16(high[2], high[3])};
        UNROLL for (int n = 0; n < D / 16; ++n) {
            uint32 columns[4];
            load_a_transposed(columns, b + 16 * k * (D + PAD) + 16 * n, D + PAD);
            mma_pair(c[2 * n], c[2 * n + 1], a, columns);
        }
    }
}

// Waits for the tiles that the next products need, `more` having been started after them.
DEVICE void await_tiles(bool more) {
    more ? copy_wait<1>() : copy_wait<0>();
    BLOCK_SYNC();
}

// Over the lanes that hold one row of a result of `mma`.
DEVICE float quad_sum(float value) {
    value += shuffle_xor(value, 1);
    return value + shuffle_xor(value, 2);
}

DEVICE void store_pair(bf16* to, float low, float high) { *reinterpret_cast<uint32*>(to) = pack_bf16(low, high); }

// Scores of two rows of queries become weights `2^(scale * (score - top))`, and what was summed before is brought to the new top.
template <int D>
DEVICE void soften(float (&s)[TILE / 8][4], float (&sums)[D / 8][4], float (&top)[2], float (&total)[2], float scale) {
    UNROLL for (int r = 0; r < 2; ++r) {
        float high = top[r];
        UNROLL for (int n = 0; n < TILE / 8; ++n) high = fmaxf(high, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        high = fmaxf(high, shuffle_xor(high, 1));
        high = fmaxf(high, shuffle_xor(high, 2));
        float kept = exp2_fast((top[r] - high) * scale), shift = high * scale;
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

// Grid [heads, tiles].
template <int D>
DEVICE void forward(const bf16* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& all, float scale,
                    bf16* out, float* log_sums) {
    constexpr int SIZE = TILE * (D + PAD);
    DYNAMIC_SHARED(bf16, shared);
    bf16 *keys = shared, *values = shared + 2 * SIZE;
    const QueryBlock block = query_block(segments, tiles, {all.heads, all.kv_heads, D});
    const Heads& of = block.of;
    const int warp = warp_index(), g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    auto query = [&](int i) { return query_row(block, i); };
    auto fetch = [&](int t) { fetch_keys<D>(keys + (t & 1) * SIZE, values + (t & 1) * SIZE, qkv, block, t * TILE); };
    // Queries pass through the second tile of keys on their way to registers.
    copy_tile<D, TILE>(keys + SIZE, qkv + block.head * D, row_width(of), query);
    copy_commit();
    fetch(0);
    await_tiles(true);
    uint32 q[D / 16][4];
    UNROLL for (int k = 0; k < D / 16; ++k) load_a(q[k], keys + SIZE + 16 * warp * (D + PAD) + 16 * k, D + PAD);
    BLOCK_SYNC();

    float sums[D / 8][4] = {}, top[2] = {-INFINITE, -INFINITE}, total[2] = {};
    const int count = (block.seen + TILE - 1) / TILE;
    for (int t = 0; t < count; ++t) {
        if (t + 1 < count) fetch(t + 1);
        await_tiles(t + 1 < count);
        float s[TILE / 8][4] = {};
        add_dots<D, TILE>(s, keys + (t & 1) * SIZE, [&](uint32(&a)[4], int k) {
            UNROLL for (int i = 0; i < 4; ++i) a[i] = q[k][i];
        });
        if ((t + 1) * TILE - 1 > block.first_place) {
            UNROLL for (int i = 0; i < TILE / 2; ++i) {
                int n = i / 4, e = i % 4, place = t * TILE + 8 * n + t2 + (e & 1);
                if (place > block.first_place + 16 * warp + g + 8 * (e >> 1)) s[n][e] = -INFINITE;
            }
        }
        soften<D>(s, sums, top, total, scale * LOG2_E);
        add_weighted<D, TILE>(sums, s, values + (t & 1) * SIZE);
        BLOCK_SYNC();
    }

    UNROLL for (int r = 0; r < 2; ++r) {
        float sum = quad_sum(total[r]);
        int row = query(16 * warp + g + 8 * r);
        if (row < 0) continue;
        if (t2 == 0) log_sums[int64(block.head) * rows + row] = top[r] * scale + logf(sum);
        float inverse = 1.0f / sum;
        bf16* to = out + row * query_width(of) + block.head * D + t2;
        UNROLL for (int n = 0; n < D / 8; ++n) store_pair(to + 8 * n, sums[n][2 * r] * inverse, sums[n][2 * r + 1] * inverse);
    }
}

// Grid [heads, tiles]: the gradient of queries, and `deltas [heads, rows]`, the products of result and its gradient.
template <int D>
DEVICE void query_gradient(const bf16* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& all,
                           float scale, const bf16* out, const float* log_sums, const bf16* gradient, float* deltas, bf16* dqkv) {
    constexpr int SIZE = TILE * (D + PAD);
    DYNAMIC_SHARED(bf16, shared);
    bf16 *queries = shared, *slopes = shared + SIZE, *keys = shared + 2 * SIZE, *values = shared + 4 * SIZE;
    const QueryBlock block = query_block(segments, tiles, {all.heads, all.kv_heads, D});
    const Heads& of = block.of;
    const int warp = warp_index(), g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    auto query = [&](int i) { return query_row(block, i); };
    auto fetch = [&](int t) { fetch_keys<D>(keys + (t & 1) * SIZE, values + (t & 1) * SIZE, qkv, block, t * TILE); };
    copy_tile<D, TILE>(queries, qkv + block.head * D, row_width(of), query);
    copy_tile<D, TILE>(slopes, gradient + block.head * D, query_width(of), query);
    // The result is needed for `delta` alone and passes through the second tile of keys.
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
    const int count = (block.seen + TILE - 1) / TILE;
    for (int t = 0; t < count; ++t) {
        if (t + 1 < count) fetch(t + 1);
        await_tiles(t + 1 < count);
        float s[TILE / 8][4] = {}, d[TILE / 8][4] = {};
        add_tile_dots<D, TILE>(s, queries, keys + (t & 1) * SIZE);
        add_tile_dots<D, TILE>(d, slopes, values + (t & 1) * SIZE);
        UNROLL for (int i = 0; i < TILE / 2; ++i) {
            int n = i / 4, e = i % 4, r = e >> 1, place = t * TILE + 8 * n + t2 + (e & 1);
            float weight = exp2_fast(fmaf(s[n][e], scale * LOG2_E, -log_sum[r]));
            s[n][e] = place > block.first_place + 16 * warp + g + 8 * r ? 0.0f : weight * (d[n][e] - delta[r]);
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

// Grid [kv_heads, jobs]: the gradient of keys and values, with keys as rows of all products.
template <int D>
DEVICE void key_gradient(const bf16* qkv, const KeyJob* jobs, const Seen* seen, int rows, const Heads& all, float scale,
                         const float* log_sums, const bf16* gradient, const float* deltas, float* scratch, bf16* dqkv) {
    // Queries at a time: with 64 the sums of keys and values of 128 do not fit into registers.
    constexpr int N = D > 64 ? 32 : 64;
    constexpr int SIZE = TILE * (D + PAD), PART = N * (D + PAD);
    DYNAMIC_SHARED(bf16, shared);
    STATIC_SHARED(float, words, [2][2][N]);
    bf16 *keys = shared, *values = shared + SIZE, *queries = shared + 2 * SIZE, *slopes = queries + 2 * PART;
    const Heads of = {all.heads, all.kv_heads, D};
    const KeyJob job = jobs[blockIdx.y];
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
        // Queries behind the last are zeros and add nothing, so only keys have to be looked at.
        const int last = job.first + job.count - 1;
        const bool whole = at.query >= last && range.key_first <= job.first && range.key_end > last;
        UNROLL for (int i = 0; i < N / 2; ++i) {
            int n = i / 4, e = i % 4, query = 8 * n + t2 + (e & 1), row = job.first + 16 * warp + g + 8 * (e >> 1);
            float weight = exp2_fast((s[n][e] * scale - words[stage][0][query]) * LOG2_E);
            bool visible = whole || (row <= at.query + query && row >= range.key_first && row < range.key_end);
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

// ------------------------------------------------------------------------------------------------------------ plain

// Keys, or queries, that the lanes of a warp take at a time.
// Rows of a tile that each of the 8 warps has, and columns that each lane has, 32 apart.
constexpr int LANES = 32, SHARE = 8, COLUMNS = 8;

// `count` rows of `dim` values to rows `stride` apart; `row` tells the row for each, negative for one of zeros.
template <typename T, typename Row>
DEVICE void load_rows(float* to, int stride, int count, const T* from, int64 from_stride, int dim, Row row) {
    for (int i = warp_index(); i < count; i += 8) {
        int at = row(i);
        for (int c = lane_index(); c < dim; c += 32) to[i * stride + c] = at < 0 ? 0.0f : load(from[at * from_stride + c]);
    }
}

// The keys and values of the places from `first` on, when all are done with those before.
template <typename T> DEVICE void load_keys(float* keys, float* values, const T* qkv, const QueryBlock& block, int first) {
    auto row = [&](int i) { return key_row(block, first + i); };
    const int dim = block.of.dim;
    BLOCK_SYNC();
    load_rows(keys, dim + 1, LANES, qkv + key_column(block.of, block.kv), row_width(block.of), dim, row);
    load_rows(values, dim + 1, LANES, qkv + value_column(block.of, block.kv), row_width(block.of), dim, row);
    BLOCK_SYNC();
}

// The products of a warp's rows with the one of each lane, which lie `dim + 1` apart: in different banks.
DEVICE void dots(float (&s)[SHARE], const float* rows, const float* lanes, int dim) {
    const float* own = lanes + lane_index() * (dim + 1);
    for (int r = 0; r < SHARE; ++r) s[r] = 0.0f;
    for (int d = 0; d < dim; ++d) {
        float value = own[d];
        for (int r = 0; r < SHARE; ++r) s[r] = fmaf(rows[r * dim + d], value, s[r]);
    }
}

// sums += weights [SHARE, LANES] * from [LANES, dim], rows of the latter `dim + 1` apart.
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

// Grid [heads, tiles]. Forward: the results and `log_sums`. For the gradient: that of queries, and `deltas`.
template <typename T, bool GRADIENT>
DEVICE void plain_queries(const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& of, float scale,
                          const T* out, float* log_sums, const T* gradient, float* deltas, T* to) {
    DYNAMIC_SHARED(float, shared);
    const int dim = of.dim, part = LANES * (dim + 1), first = warp_index() * SHARE;
    float *queries = shared, *keys = queries + TILE * dim, *values = keys + part, *weights = values + part + first * LANES;
    float* slopes = values + part + TILE * LANES;
    const QueryBlock block = query_block(segments, tiles, of);
    auto query = [&](int i) { return query_row(block, i); };
    load_rows(queries, dim, TILE, qkv + block.head * dim, row_width(of), dim, query);
    if (GRADIENT) load_rows(slopes, dim, TILE, gradient + block.head * dim, query_width(of), dim, query);
    BLOCK_SYNC();

    // Of a row: the highest score so far and the sum of weights by it, or log_sum and delta.
    float top[SHARE], total[SHARE], sums[SHARE][COLUMNS] = {};
    UNROLL for (int r = 0; r < SHARE; ++r) {
        top[r] = -INFINITE, total[r] = 0.0f;
        int row = query(first + r);
        if (!GRADIENT || row < 0) continue;
        const T* result = out + row * query_width(of) + block.head * dim;
        for (int c = lane_index(); c < dim; c += 32) total[r] += load(result[c]) * slopes[(first + r) * dim + c];
        total[r] = warp_sum(total[r]);
        top[r] = log_sums[int64(block.head) * rows + row];
        if (lane_index() == 0) deltas[int64(block.head) * rows + row] = total[r];
    }
    for (int start = 0; start < block.seen; start += LANES) {
        load_keys(keys, values, qkv, block, start);
        float s[SHARE], d[SHARE];
        dots(s, queries + first * dim, keys, dim);
        if (GRADIENT) dots(d, slopes + first * dim, values, dim);
        UNROLL for (int r = 0; r < SHARE; ++r) {
            float score = start + int(lane_index()) <= block.first_place + first + r ? s[r] * scale : -INFINITE;
            if (GRADIENT) {
                weights[r * LANES + lane_index()] = expf(score - top[r]) * (d[r] - total[r]);
                continue;
            }
            float high = fmaxf(top[r], warp_max(score)), kept = expf(top[r] - high), weight = expf(score - high);
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
        if (!GRADIENT && lane_index() == 0) log_sums[int64(block.head) * rows + row] = top[r] + logf(sum);
        int64 stride = GRADIENT ? row_width(of) : query_width(of);
        store_row(to + row * stride + block.head * dim, sums[r], GRADIENT ? scale : 1.0f / sum, dim);
    }
}

template <typename T>
DEVICE void plain_forward(const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& of, float scale,
                          T* out, float* log_sums) {
    plain_queries<T, false>(qkv, segments, tiles, rows, of, scale, nullptr, log_sums, nullptr, nullptr, out);
}

template <typename T>
DEVICE void plain_query_gradient(const T* qkv, const Segment* segments, const QueryTile* tiles, int rows, const Heads& of,
                                 float scale, const T* out, float* log_sums, const T* gradient, float* deltas, T* dqkv) {
    plain_queries<T, true>(qkv, segments, tiles, rows, of, scale, out, log_sums, gradient, deltas, dqkv);
}

template <typename T>
DEVICE void plain_key_gradient(const T* qkv, const KeyJob* jobs, const Seen* seen, int rows, const Heads& of, float scale,
                               const float* log_sums, const T* gradient, const float* deltas, float* scratch, T* dqkv) {
    DYNAMIC_SHARED(float, shared);
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
            int row = job.first + first + r;
            bool visible = row <= own && row >= range.key_first && row < range.key_end;
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

// Grid [kv_heads, splits]: adds up the slots of keys whose queries are those of several jobs, in order.
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
           int kv_heads, int dim, float scale, T* out, float* log_sums) {                                                      \
        forward(qkv, segments, tiles, rows, Heads{heads, kv_heads, dim}, scale, out, log_sums);                                \
    }                                                                                                                          \
    KERNEL(threads, attention_query_gradient_##name, const T* qkv, const Segment* segments, const QueryTile* tiles, int rows,  \
           int heads, int kv_heads, int dim, float scale, const T* out, float* log_sums, const T* gradient,                    \
           float* deltas, T* dqkv) {                                                                                           \
        query_gradient(qkv, segments, tiles, rows, Heads{heads, kv_heads, dim}, scale, out, log_sums, gradient, deltas, dqkv); \
    }                                                                                                                          \
    KERNEL(threads, attention_key_gradient_##name, const T* qkv, const KeyJob* jobs, const Seen* seen, int rows, int heads,    \
           int kv_heads, int dim, float scale, const float* log_sums, const T* gradient, const float* deltas, float* scratch,  \
           T* dqkv) {                                                                                                          \
        key_gradient(qkv, jobs, seen, rows, Heads{heads, kv_heads, dim}, scale, log_sums, gradient, deltas, scratch, dqkv);    \
    }                                                                                                                          \
    KERNEL(256, attention_join_##name, const Split* splits, int heads, int kv_heads, int dim, const float* scratch, T* dqkv) { \
        join(splits, Heads{heads, kv_heads, dim}, scratch, dqkv);                                                              \
    }
ATTENTION_KERNELS(128, bf16_64, bf16, forward<64>, query_gradient<64>, key_gradient<64>)
ATTENTION_KERNELS(128, bf16_128, bf16, forward<128>, query_gradient<128>, key_gradient<128>)
ATTENTION_KERNELS(256, bf16, bf16, plain_forward<bf16>, plain_query_gradient<bf16>, plain_key_gradient<bf16>)
ATTENTION_KERNELS(256, f32, float, plain_forward<float>, plain_query_gradient<float>, plain_key_gradient<float>)
}  // namespace attention
