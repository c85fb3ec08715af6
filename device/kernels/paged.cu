// Decode: attention of single tokens over a paged KV cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180), with
// grouped key-value heads.
//
// A layer of the cache is `[pages, 2, kv_heads, 16, head_dim]`: keys, then values, of the 16 positions of each page.
// Reading keys and values bounds the speed, so each is read once, by one warp, for all query heads of its group. A
// context is split every 256 positions (as in Flash-Decoding), independent of the batch, so that results do not depend
// on it. A block computes one part or a few; the last block of a token and group to finish combines their parts, in
// their order. The grid is that of the longest possible context, or of the window, so that launches can be recorded;
// blocks without work end at once.
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
// Pages that a warp loads ahead.
template <int D> constexpr int STAGES = D == 64 ? 3 : 2;
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

// A value that another block wrote before it was known to have finished.
DEVICE float fresh(const float* from) {
#ifdef RLRUN_EMULATED
    return *from;
#else
    return __ldcg(from);
#endif
}

// What the calling thread wrote is visible to all that learn of it.
DEVICE void fence() {
#ifndef RLRUN_EMULATED
    __threadfence();
#endif
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

// The parts of a token's context of a block, in a grid of [tokens, groups of heads, blocks of `each` parts].
struct Work {
    Heads of;
    int token, kv, first_head, heads;
    // Positions of the block's parts that the token sees, counted from the first of them.
    int first, end;
    // Number of the block's first part among those that the token sees, and how many parts the block has; none if not positive.
    int part, own;
    // Parts that the token sees, and blocks that have one.
    int parts, blocks;
    const uint32* table;
};

// `each` is the number of parts of a block.
struct Tokens { const uint32 *positions, *tables, *sequence_of; int max_pages, each; };

// Where results go: `scratch` has partial sums [tokens, heads, parts, dim], then maximal score and sum of weights of each. Of
// `finished`, the number of finished blocks of each token and group of heads, all is zero between launches.
template <typename T> struct Results {
    T* out;
    float* scratch;
    uint32* finished;
    int parts;
};

DEVICE Work work_of(const Heads& of, const Tokens& tokens, int window, int heads_at_once) {
    const int group = of.heads / of.kv_heads, chunks = (group + heads_at_once - 1) / heads_at_once;
    const int token = blockIdx.x, kv = int(blockIdx.y) / chunks, skipped = int(blockIdx.y) % chunks * heads_at_once;
    const int position = int(tokens.positions[token]), seen_first = first_seen(position, window);
    const int before = seen_first / (PART * PAGE), parts = position / (PART * PAGE) - before + 1;
    const int part = int(blockIdx.z) * tokens.each, start = (before + part) * PART * PAGE;
    const uint32* table = tokens.tables + int64(tokens.sequence_of[token]) * tokens.max_pages + int64(before + part) * PART;
    return {of, token, kv, kv * group + skipped, min(heads_at_once, group - skipped), max(0, seen_first - start),
            min(tokens.each * PART * PAGE, position + 1 - start), part, min(tokens.each, parts - part), parts,
            (parts + tokens.each - 1) / tokens.each, table};
}

// Keys of the block's heads in a page; values are `values_after` later.
template <typename T> DEVICE const T* keys_of(const T* cache, const Work& work, uint32 page) {
    return cache + int64(page) * page_len(work.of) + work.kv * PAGE * work.of.dim;
}
DEVICE int values_after(const Heads& of) { return of.kv_heads * PAGE * of.dim; }

// Maximal scores (in units of ln 2), sums of weights and sums of weighted values of the warps of a block: `[WARPS, rows]`, and
// `[WARPS, rows, stride]` with column `Place::of(d)` of dimension `d`.
struct Sums {
    const float *tops, *totals, *values;
    int rows, stride;
};

// Combines the warps of a block for its part `own`. Writes the result if the token sees no other, or a partial result
// without the sink.
template <typename T, typename Place>
DEVICE void finish(const Work& work, int own, const T* sinks, const Sums& sums, Place, const Results<T>& to) {
    const int dim = work.of.dim;
    for (int i = threadIdx.x; i < work.heads * dim; i += 32 * WARPS) {
        const int h = i / dim, d = i % dim;
        float top = sums.tops[h], sum = 0.0f, total = 0.0f;
        for (int w = 1; w < WARPS; ++w) top = fmaxf(top, sums.tops[w * sums.rows + h]);
        for (int w = 0; w < WARPS; ++w) {
            const int row = w * sums.rows + h;
            const float by = exp2f(sums.tops[row] - top);
            sum = fmaf(by, sums.values[row * sums.stride + Place::of(d)], sum);
            total = fmaf(by, sums.totals[row], total);
        }
        const int64 head = int64(work.token) * work.of.heads + work.first_head + h;
        if (work.parts == 1) {
            store(to.out + head * dim + d, normalized(sum, top, total, sink_of(sinks, work.first_head + h)));
            continue;
        }
        const int64 at = head * to.parts + work.part + own;
        to.scratch[at * dim + d] = sum;
        float* words = to.scratch + int64(gridDim.x) * work.of.heads * to.parts * dim + 2 * at;
        if (d == 0) words[0] = top, words[1] = total;
    }
}

// Combines the parts of the block's heads, a head per warp at a time, in the block that finishes last.
template <typename T> DEVICE void join(const Work& work, const T* sinks, const Results<T>& to) {
    if (work.parts == 1) return;
    uint32* finished = to.finished + int64(blockIdx.x) * gridDim.y + blockIdx.y;
    if (work.blocks > 1) {
        STATIC_SHARED(uint32, before, [1]);
        fence();
        BLOCK_SYNC();
        if (threadIdx.x == 0) before[0] = atomicAdd(finished, 1u);
        BLOCK_SYNC();
        if (int(before[0]) + 1 < work.blocks) return;
        fence();
        if (threadIdx.x == 0) *finished = 0;
    } else {
        BLOCK_SYNC();
    }
    const int dim = work.of.dim, lane = lane_index();
    for (int h = warp_index(); h < work.heads; h += WARPS) {
        const int64 head = int64(work.token) * work.of.heads + work.first_head + h, all = int64(gridDim.x) * work.of.heads;
        const float *sums = to.scratch + head * to.parts * dim, *words = to.scratch + all * to.parts * dim + 2 * head * to.parts;
        float top = -INFINITE, total = 0.0f, result[COLUMNS] = {};
        for (int p = lane; p < work.parts; p += 32) top = fmaxf(top, fresh(words + 2 * p));
        top = warp_max(top);
        for (int first = 0; first < work.parts; first += 32) {
            const int count = min(32, work.parts - first);
            const float* word = words + 2 * (first + lane);
            const float own = lane < count ? exp2f(fresh(word) - top) : 0.0f;
            if (lane < count) total = fmaf(own, fresh(word + 1), total);
            _Pragma("unroll 4") for (int p = 0; p < count; ++p) {
                const float by = shuffle(own, p);
                UNROLL for (int c = 0; c < COLUMNS; ++c) {
                    const int column = 32 * c + lane;
                    if (column < dim) result[c] = fmaf(by, fresh(sums + int64(first + p) * dim + column), result[c]);
                }
            }
        }
        total = warp_sum(total);
        const float sink = sink_of(sinks, work.first_head + h);
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            const int column = 32 * c + lane;
            if (column < dim) store(to.out + head * dim + column, normalized(result[c], top, total, sink));
        }
    }
}

// 16 bytes per lane of each page that a warp loads ahead: keys [2][D / 32], then values [4][D / 64].
template <int D> constexpr int PACKS = D / 8;

// Where `attend` keeps dimension `d` of a sum, so that lanes write 16 bytes at a time to different banks.
struct SpreadPlace {
    DEVICE int of(int d) { return d / 64 * 64 + d % 16 / 4 * 16 + d % 64 / 16 * 4 + d % 4; }
};

// Loads a page of a warp to the lane's own part of `to`: each lane reads only what it loaded itself. Of positions that are not
// visible, which may contain NaN, values are zero.
template <int D> DEVICE void load_page(const bf16* keys, const bf16* values, int skipped, uint32 visible, Pack* to) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    UNROLL for (int j = 0; j < 2; ++j)
        UNROLL for (int c = 0; c < D / 32; ++c) copy_async(to + (j * (D / 32) + c) * 32, keys + (8 * j + g) * D + 32 * c + 8 * t, 16);
    UNROLL for (int i = 0; i < 4; ++i) {
        const int place = 2 * t + (i & 1) + 8 * (i >> 1);
        const uint32 valid = uint32(place - skipped) < visible ? 16 : 0;
        UNROLL for (int c = 0; c < D / 64; ++c)
            copy_async(to + (D / 16 + i * (D / 64) + c) * 32, values + place * D + 64 * c + 8 * g, valid);
    }
}

// Weighted values of the pages that a warp has seen; a lane has rows g and g + 8 (see `mma`).
template <int D> struct Running {
    float sums[D / 64][8][4], top[2], total[2];
};

// Adds a page: `own` is what the lane loaded of it.
template <int D>
DEVICE void add_page(const Pack (&queries)[2][D / 32], const Pack* own, int skipped, uint32 visible, float scale, Running<D>& to) {
    const int t = lane_index() % 4;
    float s[2][4] = {};
    UNROLL for (int c = 0; c < D / 32; ++c) {
        const Pack keys[2] = {own[c * 32], own[(D / 32 + c) * 32]};
        UNROLL for (int w = 0; w < 4; w += 2) {
            const uint32 a[4] = {queries[0][c].words[w], queries[1][c].words[w], queries[0][c].words[w + 1],
                                 queries[1][c].words[w + 1]};
            UNROLL for (int j = 0; j < 2; ++j) {
                const uint32 b[2] = {keys[j].words[w], keys[j].words[w + 1]};
                mma(s[j], a, b);
            }
        }
    }
    UNROLL for (int r = 0; r < 2; ++r) {
        float high = to.top[r];
        UNROLL for (int i = 0; i < 4; ++i) {
            float& score = s[i / 2][2 * r + i % 2];
            const int place = 8 * (i / 2) + 2 * t + i % 2;
            score = uint32(place - skipped) < visible ? score * scale * LOG2_E : -INFINITE;
            high = fmaxf(high, score);
        }
        high = fmaxf(high, shuffle_xor(high, 1));
        high = fmaxf(high, shuffle_xor(high, 2));
        const float kept = exp2f(to.top[r] - high);
        to.total[r] *= kept;
        UNROLL for (int i = 0; i < 4; ++i) {
            float& weight = s[i / 2][2 * r + i % 2];
            weight = exp2f(weight - high);
            to.total[r] += weight;
        }
        UNROLL for (int i = 0; i < D / 8; ++i) {
            to.sums[i / 8][i % 8][2 * r] *= kept;
            to.sums[i / 8][i % 8][2 * r + 1] *= kept;
        }
        to.top[r] = high;
    }
    const uint32 a[4] = {pack_bf16(s[0][0], s[0][1]), pack_bf16(s[0][2], s[0][3]), pack_bf16(s[1][0], s[1][1]),
                         pack_bf16(s[1][2], s[1][3])};
    UNROLL for (int c = 0; c < D / 64; ++c) {
        Pack values[4];
        UNROLL for (int i = 0; i < 4; ++i) values[i] = own[(D / 16 + i * (D / 64) + c) * 32];
        UNROLL for (int w = 0; w < 4; ++w) {
            const uint32 v[4] = {values[0].words[w], values[1].words[w], values[2].words[w], values[3].words[w]};
            const uint32 low[2] = {(v[0] & 0xffffu) | v[1] << 16, (v[2] & 0xffffu) | v[3] << 16};
            const uint32 high[2] = {v[0] >> 16 | (v[1] & 0xffff0000u), v[2] >> 16 | (v[3] & 0xffff0000u)};
            mma(to.sums[c][2 * w], a, low);
            mma(to.sums[c][2 * w + 1], a, high);
        }
    }
}

// Leaves what a warp has summed at `to`, `[heads, stride]` with places of dimensions as in `SpreadPlace`.
template <int D> DEVICE void leave(Running<D>& of, int heads, int stride, float* tops, float* totals, float* to) {
    const int g = lane_index() / 4, t = lane_index() % 4;
    UNROLL for (int r = 0; r < 2; ++r) {
        const int row = g + 8 * r;
        of.total[r] += shuffle_xor(of.total[r], 1);
        of.total[r] += shuffle_xor(of.total[r], 2);
        if (row >= heads) continue;
        if (t == 0) tops[row] = of.top[r], totals[row] = of.total[r];
        UNROLL for (int i = 0; i < D / 16; ++i) {
            const int c = i / 4, k = i % 4, m = k % 2 * 4, side = 2 * r + k / 2;
            ::Pack<float, 4> four;
            UNROLL for (int e = 0; e < 4; ++e) four.at[e] = of.sums[c][m + e][side];
            store_pack(to + row * stride + 64 * c + 16 * k + 4 * t, four);
        }
    }
}

// Tensor cores, one page per warp at a time. Both products sum over contiguous memory, or over columns in any order, so
// a lane has 16 bytes at a time of keys and values: lane (g, t) has columns 8t.. of every 32 of the keys g and g + 8, and
// columns 8g.. of every 64 of the values 2t, 2t + 1, 2t + 8, 2t + 9. The next pages of a warp are loaded to shared memory
// meanwhile.
template <int D>
DEVICE void attend(const bf16* qkv, const bf16* cache, const Tokens& tokens, const Heads& all, const Rule<bf16>& rule,
                   const Results<bf16>& to) {
    constexpr int STRIDE = D + 16, OF_PART = PART / WARPS;
    DYNAMIC_SHARED(Pack, loaded);
    STATIC_SHARED(float, tops, [WARPS * WIDE_HEADS]);
    STATIC_SHARED(float, totals, [WARPS * WIDE_HEADS]);
    const Work work = work_of({all.heads, all.kv_heads, D}, tokens, rule.window, WIDE_HEADS);
    if (work.own <= 0) return;
    const int g = lane_index() / 4, t = lane_index() % 4, warp = warp_index(), rows = min(WIDE_HEADS, all.heads / all.kv_heads);
    Pack* own = loaded + warp * STAGES<D> * PACKS<D> * 32 + lane_index();
    float* values = reinterpret_cast<float*>(loaded + WARPS * STAGES<D> * PACKS<D> * 32);
    Pack queries[2][D / 32] = {};
    const bf16* row = qkv + work.token * row_width(work.of) + work.first_head * D + 8 * t;
    UNROLL for (int r = 0; r < 2; ++r) {
        if (g + 8 * r >= work.heads) continue;
        UNROLL for (int c = 0; c < D / 32; ++c) queries[r][c] = stream(row + (g + 8 * r) * D + 32 * c);
    }

    // The warp has the pages `warp + WARPS * i` of the block with `begin <= i < end`; lane i has the number of page i.
    const int pages = (work.end + PAGE - 1) / PAGE, skipped_pages = work.first / PAGE;
    const int begin = max(0, skipped_pages - warp + WARPS - 1) / WARPS, end = max(0, pages - warp + WARPS - 1) / WARPS;
    const int lane = lane_index();
    const uint32 entry = lane < end ? work.table[warp + WARPS * lane] : 0;
    const uint32 visible = work.end - work.first;
    // The `visible` positions of page i from this one on are visible; at least one is.
    auto skipped = [&](int i) { return work.first - (warp + WARPS * i) * PAGE; };
    auto load_ahead = [&](int i, int stage) {
        if (i < end) {
            const bf16* keys = keys_of(cache, work, shuffle(entry, i));
            load_page<D>(keys, keys + values_after(work.of), skipped(i), visible, own + stage * PACKS<D> * 32);
        }
        copy_commit();
    };
    UNROLL for (int stage = 0; stage < STAGES<D>; ++stage) load_ahead(begin + stage, stage);

    int i = begin, stage = 0;
    for (int part = 0; part < work.own; ++part) {
        Running<D> running = {{}, {-INFINITE, -INFINITE}, {}};
        for (const int last = min(end, (part + 1) * OF_PART); i < last; ++i) {
            copy_wait<STAGES<D> - 1>();
            WARP_SYNC();
            add_page<D>(queries, own + stage * PACKS<D> * 32, skipped(i), visible, rule.scale, running);
            WARP_SYNC();
            load_ahead(i + STAGES<D>, stage);
            stage = stage + 1 < STAGES<D> ? stage + 1 : 0;
        }
        const int at = warp * rows;
        leave<D>(running, work.heads, STRIDE, tops + at, totals + at, values + at * STRIDE);
        BLOCK_SYNC();
        finish(work, part, rule.sinks, Sums{tops, totals, values, rows, STRIDE}, SpreadPlace{}, to);
        if (part + 1 < work.own) BLOCK_SYNC();
    }
    join(work, rule.sinks, to);
}

// Dimensions in their order.
struct PlainPlace {
    DEVICE int of(int d) { return d; }
};

// Without tensor cores: 32 positions per warp at a time, for heads up to 256.
template <typename T>
DEVICE void plain_attend(const T* qkv, const T* cache, const Tokens& tokens, const Heads& of, const Rule<T>& rule,
                         const Results<T>& to) {
    constexpr int HEADS = PLAIN_HEADS;
    DYNAMIC_SHARED(float, queries);
    STATIC_SHARED(float, all_weights, [WARPS * HEADS * 32]);
    STATIC_SHARED(float, tops, [WARPS * HEADS]);
    STATIC_SHARED(float, totals, [WARPS * HEADS]);
    const Work work = work_of(of, tokens, rule.window, HEADS);
    if (work.own <= 0) return;
    const int dim = of.dim, warp = warp_index(), lane = lane_index();
    float *shared_sums = queries + HEADS * dim, *weights = all_weights + warp * HEADS * 32;
    const T* row = qkv + work.token * row_width(of) + work.first_head * dim;
    for (int i = threadIdx.x; i < HEADS * dim; i += 32 * WARPS) queries[i] = i < work.heads * dim ? load(row[i]) : 0.0f;
    BLOCK_SYNC();

    for (int part = 0; part < work.own; ++part) {
        const int first = max(work.first, part * PART * PAGE), end = min(work.end, (part + 1) * PART * PAGE);
        float sums[HEADS][COLUMNS] = {}, top[HEADS], total[HEADS] = {};
        UNROLL for (int h = 0; h < HEADS; ++h) top[h] = -INFINITE;
        for (int start = first + 32 * warp; start < end; start += 32 * WARPS) {
            const int own = start + lane;
            float s[HEADS] = {};
            if (own < end) {
                const T* key = keys_of(cache, work, work.table[own / PAGE]) + own % PAGE * dim;
                for (int d = 0; d < dim; ++d) {
                    float value = load(key[d]);
                    UNROLL for (int h = 0; h < HEADS; ++h) s[h] = fmaf(queries[h * dim + d], value, s[h]);
                }
            }
            UNROLL for (int h = 0; h < HEADS; ++h) {
                const float score = own < end ? s[h] * rule.scale * LOG2_E : -INFINITE, high = fmaxf(top[h], warp_max(score));
                const float kept = exp2f(top[h] - high), weight = exp2f(score - high);
                weights[h * 32 + lane] = weight;
                total[h] = total[h] * kept + weight;
                top[h] = high;
                UNROLL for (int c = 0; c < COLUMNS; ++c) sums[h][c] *= kept;
            }
            WARP_SYNC();
            for (int j = 0; j < 32 && start + j < end; ++j) {
                const T* value = keys_of(cache, work, work.table[(start + j) / PAGE]) + values_after(of) + (start + j) % PAGE * dim;
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
        finish(work, part, rule.sinks, Sums{tops, totals, shared_sums, HEADS, dim}, PlainPlace{}, to);
        if (part + 1 < work.own) BLOCK_SYNC();
    }
    join(work, rule.sinks, to);
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

#define PAGED_KERNEL(name, T, attend)                                                                                       \
    KERNEL(128, paged_attention_##name, const T* qkv, const T* cache, const uint32* positions, const uint32* tables,        \
           const uint32* sequence_of, int max_pages, int heads, int kv_heads, int dim, float scale, int window,             \
           const T* sinks, int parts, int each, T* out, float* scratch, uint32* finished) {                                 \
        const Tokens tokens = {positions, tables, sequence_of, max_pages, each};                                            \
        const Results<T> to = {out, scratch, finished, parts};                                                              \
        attend(qkv, cache, tokens, Heads{heads, kv_heads, dim}, Rule<T>{scale, window, sinks}, to);                         \
    }
PAGED_KERNEL(bf16_64, bf16, attend<64>)
PAGED_KERNEL(bf16_128, bf16, attend<128>)
PAGED_KERNEL(bf16, bf16, plain_attend<bf16>)
PAGED_KERNEL(f32, float, plain_attend<float>)
}  // namespace paged
