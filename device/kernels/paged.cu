// Decode: attention of single tokens over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180), with
// grouped key-value heads.
//
// A layer of the cache is `[pages, 2, kv_heads, 16, head_dim]`: keys, then values, of the 16 positions of each page.
// Reading keys and values bounds the speed, so each is read once, by one warp, for all query heads of its group. A
// context is split every 256 positions (as in Flash-Decoding), independent of the batch, so that results do not depend
// on it; one block computes a part, and another kernel combines the parts of a token. The grid is that of the longest
// possible context, or of the window, so that launches can be recorded; blocks without work end at once.
#include "common.cuh"

#define UNROLL _Pragma("unroll")

namespace paged {
// Pages per part.
constexpr int PART = 16;
constexpr int WARPS = 4;
// Query heads per block: rows of a product on the tensor cores; limited by registers without them.
constexpr int WIDE_HEADS = 16, PLAIN_HEADS = 8;
// Columns per lane, 32 apart.
constexpr int COLUMNS = 8;
constexpr float LOG2_E = 1.4426950408889634f;

// 16 bytes, one memory access of a thread.
struct alignas(16) Pack {
    uint32 words[4];
};

// Load of data that is constant during the kernel and not reused soon.
DEVICE Pack stream(const void* from) {
    Pack pack;
#ifdef RLRUN_EMULATED
    __builtin_memcpy(&pack, from, 16);
#else
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3]) : "l"(from));
#endif
    return pack;
}

struct Heads { int heads, kv_heads, dim; };

// How scores become weights.
template <typename T> struct Rule {
    // Multiplies scores; positive.
    float scale;
    // Positions that a token sees, the last of which is its own.
    int window;
    // `[heads]` logits of the softmax that have no key, and the value zero; null for none.
    const T* sinks;
};

// The logit of a head without a key, in units of ln 2; minus infinity for none.
template <typename T> DEVICE float sink_of(const T* sinks, int head) { return sinks ? load(sinks[head]) * LOG2_E : -INFINITE; }

// The first position that a token sees.
DEVICE int first_seen(int position, int window) { return max(0, position - window + 1); }

// The result of a sum of weighted values, for the maximal score and the sum of the weights without the sink.
DEVICE float normalized(float sum, float top, float total, float sink) {
    const float high = fmaxf(top, sink), by = exp2f(top - high);
    return sum * by / fmaf(total, by, exp2f(sink - high));
}

DEVICE int64 row_width(const Heads& of) { return int64(of.heads + 2 * of.kv_heads) * of.dim; }
DEVICE int64 page_len(const Heads& of) { return int64(2 * of.kv_heads) * PAGE * of.dim; }

// Writes keys and values of all tokens to their slots, `page * 16 + place`; all ones for no slot. `U` is the unit of an
// access, in which `dim` and `count` are given.
template <typename U> DEVICE void write(const U* qkv, const uint32* slots, int64 count, const Heads& of, U* cache) {
    const int64 i = int64(blockIdx.x) * 256 + threadIdx.x, row = int64(2 * of.kv_heads) * of.dim;
    if (i >= count) return;
    const int64 token = i / row;
    const int column = int(i % row), part = column / of.dim;
    const uint32 slot = slots[token];
    if (slot == 0xffffffffu) return;
    U* to = cache + (slot / PAGE) * page_len(of) + (part * PAGE + slot % PAGE) * of.dim;
    to[column % of.dim] = qkv[token * row_width(of) + int64(of.heads) * of.dim + column];
}

// Grid [pairs, layers]: copies pages `(from, to)` of each layer; lengths in 16 bytes.
DEVICE void copy(const uint32* pairs, int64 layer_len, int page_len, Pack* cache) {
    Pack* layer = cache + blockIdx.y * layer_len;
    const Pack* from = layer + int64(pairs[2 * blockIdx.x]) * page_len;
    Pack* to = layer + int64(pairs[2 * blockIdx.x + 1]) * page_len;
    for (int i = threadIdx.x; i < page_len; i += 256) to[i] = from[i];
}

// The part of a token's context of a block, in a grid of [tokens, groups of heads, parts].
struct Work {
    Heads of;
    int token, kv, first_head, heads;
    // Positions of the part that the token sees, counted from the first of the part; empty if `end` is not after `first`.
    int first, end;
    // Number of the part among those that the token sees.
    int part, parts;
    const uint32* table;
};

struct Tokens { const uint32 *positions, *tables, *sequence_of; int max_pages; };

DEVICE Work work_of(const Heads& of, const Tokens& tokens, int window, int heads_at_once) {
    const int group = of.heads / of.kv_heads, chunks = (group + heads_at_once - 1) / heads_at_once;
    const int token = blockIdx.x, kv = int(blockIdx.y) / chunks, skipped = int(blockIdx.y) % chunks * heads_at_once;
    const int position = int(tokens.positions[token]), seen_first = first_seen(position, window);
    const int part = seen_first / (PART * PAGE) + int(blockIdx.z), start = part * PART * PAGE;
    const uint32* table = tokens.tables + int64(tokens.sequence_of[token]) * tokens.max_pages + int64(part) * PART;
    return {of, token, kv, kv * group + skipped, min(heads_at_once, group - skipped), max(0, seen_first - start),
            min(PART * PAGE, position + 1 - start), int(blockIdx.z), int(gridDim.z), table};
}

// Keys of the block's heads in page `page` of its part; values are `values_after` later.
template <typename T> DEVICE const T* keys_of(const T* cache, const Work& work, int page) {
    return cache + int64(work.table[page]) * page_len(work.of) + work.kv * PAGE * work.of.dim;
}
DEVICE int values_after(const Heads& of) { return of.kv_heads * PAGE * of.dim; }

// Combines the warps of a block: `sums [WARPS, rows, dim]` with the maximal score (in units of ln 2) and the sum of
// weights of each. Writes the result if this is the only part, or a partial result without the sink.
template <typename T>
DEVICE void finish(const Work& work, const T* sinks, const float* sums, const float* tops, const float* totals, int rows, T* out,
                   float* scratch, int tokens) {
    const int dim = work.of.dim;
    for (int i = threadIdx.x; i < work.heads * dim; i += 32 * WARPS) {
        const int h = i / dim, d = i % dim;
        float top = tops[h], sum = 0.0f, total = 0.0f;
        for (int w = 1; w < WARPS; ++w) top = fmaxf(top, tops[w * rows + h]);
        for (int w = 0; w < WARPS; ++w) {
            float by = exp2f(tops[w * rows + h] - top);
            sum = fmaf(by, sums[(w * rows + h) * dim + d], sum);
            total = fmaf(by, totals[w * rows + h], total);
        }
        const int64 head = int64(work.token) * work.of.heads + work.first_head + h;
        if (work.parts == 1) {
            store(out + head * dim + d, normalized(sum, top, total, sink_of(sinks, work.first_head + h)));
            continue;
        }
        const int64 at = head * work.parts + work.part;
        scratch[at * dim + d] = sum;
        float* words = scratch + int64(tokens) * work.of.heads * work.parts * dim + 2 * at;
        if (d == 0) words[0] = top, words[1] = total;
    }
}

// Tensor cores, one page per warp at a time. Both products sum over contiguous memory, or over columns in any order, so
// keys and values are loaded from memory to registers directly, 16 bytes at a time: lane (g, t) has columns 8t.. of
// every 32 of the keys g and g + 8, and columns 8g.. of every 64 of the values 2t, 2t + 1, 2t + 8, 2t + 9.
template <int D>
DEVICE void attend(const bf16* qkv, const bf16* cache, const Tokens& tokens, const Heads& all, const Rule<bf16>& rule, bf16* out,
                   float* scratch) {
    STATIC_SHARED(float, shared_sums, [WARPS * WIDE_HEADS * D]);
    STATIC_SHARED(float, tops, [WARPS * WIDE_HEADS]);
    STATIC_SHARED(float, totals, [WARPS * WIDE_HEADS]);
    const Work work = work_of({all.heads, all.kv_heads, D}, tokens, rule.window, WIDE_HEADS);
    if (work.first >= work.end) return;
    const float scale = rule.scale;
    const int g = lane_index() / 4, t = lane_index() % 4;
    Pack queries[2][D / 32] = {};
    const bf16* row = qkv + work.token * row_width(work.of) + work.first_head * D + 8 * t;
    UNROLL for (int r = 0; r < 2; ++r) {
        if (g + 8 * r >= work.heads) continue;
        UNROLL for (int c = 0; c < D / 32; ++c) queries[r][c] = stream(row + (g + 8 * r) * D + 32 * c);
    }

    float sums[D / 64][8][4] = {}, top[2] = {-INFINITE, -INFINITE}, total[2] = {};
    const int pages = (work.end + PAGE - 1) / PAGE;
    for (int p = work.first / PAGE + int(warp_index()); p < pages; p += WARPS) {
        const bf16* page_keys = keys_of(cache, work, p);
        const bf16* page_values = page_keys + values_after(work.of);
        // The `visible` positions of the page from `skipped` on are visible; at least one is.
        const int skipped = work.first - p * PAGE;
        const uint32 visible = work.end - work.first;
        Pack keys[2][D / 32], values[4][D / 64];
        UNROLL for (int j = 0; j < 2; ++j)
            UNROLL for (int c = 0; c < D / 32; ++c) keys[j][c] = stream(page_keys + (8 * j + g) * D + 32 * c + 8 * t);
        UNROLL for (int i = 0; i < 4; ++i) {
            const int place = 2 * t + (i & 1) + 8 * (i >> 1);
            // Unwritten positions may contain NaN, which a weight of 0 does not remove.
            UNROLL for (int c = 0; c < D / 64; ++c)
                values[i][c] = uint32(place - skipped) < visible ? stream(page_values + place * D + 64 * c + 8 * g) : Pack{};
        }
        float s[2][4] = {};
        UNROLL for (int k = 0; k < D / 16; ++k) {
            const int c = k / 2, w = k % 2 * 2;
            const uint32 a[4] = {queries[0][c].words[w], queries[1][c].words[w], queries[0][c].words[w + 1],
                                 queries[1][c].words[w + 1]};
            UNROLL for (int j = 0; j < 2; ++j) {
                const uint32 b[2] = {keys[j][c].words[w], keys[j][c].words[w + 1]};
                mma(s[j], a, b);
            }
        }
        UNROLL for (int r = 0; r < 2; ++r) {
            float high = top[r];
            UNROLL for (int i = 0; i < 4; ++i) {
                float& score = s[i / 2][2 * r + i % 2];
                const int place = 8 * (i / 2) + 2 * t + i % 2;
                score = uint32(place - skipped) < visible ? score * scale * LOG2_E : -INFINITE;
                high = fmaxf(high, score);
            }
            high = fmaxf(high, shuffle_xor(high, 1));
            high = fmaxf(high, shuffle_xor(high, 2));
            const float kept = exp2f(top[r] - high);
            total[r] *= kept;
            UNROLL for (int i = 0; i < 4; ++i) {
                float& weight = s[i / 2][2 * r + i % 2];
                weight = exp2f(weight - high);
                total[r] += weight;
            }
            UNROLL for (int i = 0; i < D / 8; ++i) {
                sums[i / 8][i % 8][2 * r] *= kept;
                sums[i / 8][i % 8][2 * r + 1] *= kept;
            }
            top[r] = high;
        }
        const uint32 a[4] = {pack_bf16(s[0][0], s[0][1]), pack_bf16(s[0][2], s[0][3]), pack_bf16(s[1][0], s[1][1]),
                             pack_bf16(s[1][2], s[1][3])};
        UNROLL for (int i = 0; i < D / 16; ++i) {
            const int c = i / 4, w = i % 4;
            const uint32 v[4] = {values[0][c].words[w], values[1][c].words[w], values[2][c].words[w], values[3][c].words[w]};
            const uint32 low[2] = {(v[0] & 0xffffu) | v[1] << 16, (v[2] & 0xffffu) | v[3] << 16};
            const uint32 high[2] = {v[0] >> 16 | (v[1] & 0xffff0000u), v[2] >> 16 | (v[3] & 0xffff0000u)};
            mma(sums[c][2 * w], a, low);
            mma(sums[c][2 * w + 1], a, high);
        }
    }

    UNROLL for (int r = 0; r < 2; ++r) {
        const int at = warp_index() * WIDE_HEADS + g + 8 * r;
        total[r] += shuffle_xor(total[r], 1);
        total[r] += shuffle_xor(total[r], 2);
        if (t == 0) tops[at] = top[r], totals[at] = total[r];
        UNROLL for (int i = 0; i < D / 8; ++i) {
            float* to = shared_sums + at * D + 64 * (i / 8) + 16 * t + i % 8;
            to[0] = sums[i / 8][i % 8][2 * r];
            to[8] = sums[i / 8][i % 8][2 * r + 1];
        }
    }
    BLOCK_SYNC();
    finish(work, rule.sinks, shared_sums, tops, totals, WIDE_HEADS, out, scratch, int(gridDim.x));
}

// Without tensor cores: 32 positions per warp at a time, for heads up to 256.
template <typename T>
DEVICE void plain_attend(const T* qkv, const T* cache, const Tokens& tokens, const Heads& of, const Rule<T>& rule, T* out,
                         float* scratch) {
    constexpr int HEADS = PLAIN_HEADS;
    DYNAMIC_SHARED(float, queries);
    STATIC_SHARED(float, all_weights, [WARPS * HEADS * 32]);
    STATIC_SHARED(float, tops, [WARPS * HEADS]);
    STATIC_SHARED(float, totals, [WARPS * HEADS]);
    const Work work = work_of(of, tokens, rule.window, HEADS);
    if (work.first >= work.end) return;
    const int dim = of.dim, warp = warp_index(), lane = lane_index();
    float *shared_sums = queries + HEADS * dim, *weights = all_weights + warp * HEADS * 32;
    const T* row = qkv + work.token * row_width(of) + work.first_head * dim;
    for (int i = threadIdx.x; i < HEADS * dim; i += 32 * WARPS) queries[i] = i < work.heads * dim ? load(row[i]) : 0.0f;
    BLOCK_SYNC();

    float sums[HEADS][COLUMNS] = {}, top[HEADS], total[HEADS] = {};
    UNROLL for (int h = 0; h < HEADS; ++h) top[h] = -INFINITE;
    for (int start = work.first + 32 * warp; start < work.end; start += 32 * WARPS) {
        const int own = start + lane;
        float s[HEADS] = {};
        if (own < work.end) {
            const T* key = keys_of(cache, work, own / PAGE) + own % PAGE * dim;
            for (int d = 0; d < dim; ++d) {
                float value = load(key[d]);
                UNROLL for (int h = 0; h < HEADS; ++h) s[h] = fmaf(queries[h * dim + d], value, s[h]);
            }
        }
        UNROLL for (int h = 0; h < HEADS; ++h) {
            const float score = own < work.end ? s[h] * rule.scale * LOG2_E : -INFINITE, high = fmaxf(top[h], warp_max(score));
            const float kept = exp2f(top[h] - high), weight = exp2f(score - high);
            weights[h * 32 + lane] = weight;
            total[h] = total[h] * kept + weight;
            top[h] = high;
            UNROLL for (int c = 0; c < COLUMNS; ++c) sums[h][c] *= kept;
        }
        WARP_SYNC();
        for (int j = 0; j < 32 && start + j < work.end; ++j) {
            const T* value = keys_of(cache, work, (start + j) / PAGE) + values_after(of) + (start + j) % PAGE * dim;
            UNROLL for (int c = 0; c < COLUMNS; ++c) {
                const int column = 32 * c + lane;
                const float v = column < dim ? load(value[column]) : 0.0f;
                UNROLL for (int h = 0; h < HEADS; ++h) sums[h][c] = fmaf(weights[h * 32 + j], v, sums[h][c]);
            }
        }
        WARP_SYNC();
    }
    UNROLL for (int h = 0; h < HEADS; ++h) {
        const int at = warp * HEADS + h;
        total[h] = warp_sum(total[h]);
        if (lane == 0) tops[at] = top[h], totals[at] = total[h];
        UNROLL for (int c = 0; c < COLUMNS; ++c)
            if (32 * c + lane < dim) shared_sums[at * dim + 32 * c + lane] = sums[h][c];
    }
    BLOCK_SYNC();
    finish(work, rule.sinks, shared_sums, tops, totals, HEADS, out, scratch, int(gridDim.x));
}

// Combines the parts of one head of a token, by one warp.
template <typename T>
DEVICE void join(const float* scratch, const uint32* positions, int tokens, int heads, int dim, int window, const T* sinks,
                 int parts, T* out) {
    const int64 head = int64(blockIdx.x) * WARPS + warp_index(), all = int64(tokens) * heads;
    if (head >= all) return;
    const int position = int(positions[head / heads]);
    const int count = position / (PART * PAGE) - first_seen(position, window) / (PART * PAGE) + 1;
    const float *sums = scratch + head * parts * dim, *words = scratch + all * parts * dim + 2 * head * parts;
    float top = -INFINITE, total = 0.0f, result[COLUMNS] = {};
    for (int p = 0; p < count; ++p) top = fmaxf(top, words[2 * p]);
    for (int p = 0; p < count; ++p) {
        const float by = exp2f(words[2 * p] - top);
        total = fmaf(by, words[2 * p + 1], total);
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            const int column = 32 * c + int(lane_index());
            if (column < dim) result[c] = fmaf(by, sums[int64(p) * dim + column], result[c]);
        }
    }
    const float sink = sink_of(sinks, int(head % heads));
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
        const int column = 32 * c + int(lane_index());
        if (column < dim) store(out + head * dim + column, normalized(result[c], top, total, sink));
    }
}

KERNEL(256, write_pages_pack, const Pack* qkv, const uint32* slots, int64 count, int heads, int kv_heads, int dim, Pack* cache) {
    write(qkv, slots, count, Heads{heads, kv_heads, dim}, cache);
}
KERNEL(256, write_pages_bf16, const bf16* qkv, const uint32* slots, int64 count, int heads, int kv_heads, int dim, bf16* cache) {
    write(qkv, slots, count, Heads{heads, kv_heads, dim}, cache);
}
KERNEL(256, write_pages_f32, const float* qkv, const uint32* slots, int64 count, int heads, int kv_heads, int dim, float* cache) {
    write(qkv, slots, count, Heads{heads, kv_heads, dim}, cache);
}
KERNEL(256, copy_pages, const uint32* pairs, int64 layer_len, int page_len, Pack* cache) {
    copy(pairs, layer_len, page_len, cache);
}

#define PAGED_KERNEL(name, T, attend)                                                                                  \
    KERNEL(128, paged_attention_##name, const T* qkv, const T* cache, const uint32* positions, const uint32* tables,   \
           const uint32* sequence_of, int max_pages, int heads, int kv_heads, int dim, float scale, int window,        \
           const T* sinks, T* out, float* scratch) {                                                                   \
        const Tokens tokens = {positions, tables, sequence_of, max_pages};                                             \
        attend(qkv, cache, tokens, Heads{heads, kv_heads, dim}, Rule<T>{scale, window, sinks}, out, scratch);          \
    }
PAGED_KERNEL(bf16_64, bf16, attend<64>)
PAGED_KERNEL(bf16_128, bf16, attend<128>)
PAGED_KERNEL(bf16, bf16, plain_attend<bf16>)
PAGED_KERNEL(f32, float, plain_attend<float>)

#define PAGED_JOIN(name, T)                                                                                                  \
    KERNEL(128, paged_join_##name, const float* scratch, const uint32* positions, int tokens, int heads, int dim, int window, \
           const T* sinks, int parts, T* out) {                                                                              \
        join(scratch, positions, tokens, heads, dim, window, sinks, parts, out);                                             \
    }
PAGED_JOIN(bf16, bf16)
PAGED_JOIN(f32, float)
}  // namespace paged
