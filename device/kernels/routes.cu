// Which experts a token goes to, and the rows of every expert (mixture of experts, Shazeer et al. 2017, arXiv 1701.06538).
//
// A token has `k` slots, one for each of its experts, ascending. Slots are grouped by expert, and within it in the order
// of tokens: slot and row have each other's number. Only numbers of tokens are added with atomics, so results are
// deterministic.
#include "common.cuh"

namespace routes {
// Warps of a block, each with one token.
constexpr int WARPS = 4;
// The expert, and the row, of a slot without one.
constexpr uint32 NOWHERE = 0xffffffffu;
// Added to the sum of sigmoids that divides them, which may all be 0.
constexpr float LEAST_TOTAL = 1e-20f;

// How experts are chosen and weighed; src/ops/routes.rs numbers them likewise.
enum Kind { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

struct Router {
    int experts, per_token, kind, normalized, groups, chosen_groups;
    float scale;
};

// An expert or a group, by its score. The first of equal ones precedes the others.
struct Candidate {
    int key, number;
};

// The order of `f32::total_cmp` as integers, so that also a NaN has a place.
DEVICE int order_of(float score) {
    int bits = int(float_to_bits(score));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

DEVICE bool precedes(const Candidate& a, const Candidate& b) {
    return a.key > b.key || (a.key == b.key && a.number < b.number);
}

// The best of the warp's candidates.
DEVICE Candidate warp_best(Candidate best) {
    for (int mask = 16; mask > 0; mask >>= 1) {
        Candidate other = {shuffle_xor(best.key, mask), shuffle_xor(best.number, mask)};
        if (precedes(other, best)) best = other;
    }
    return best;
}

// Replaces the logits of a token, plus a bias unless that is null, by the scores of which weights are made.
template <typename T> DEVICE void score(const Router& router, const T* bias, float* row) {
    const int lane = lane_index();
    for (int e = lane; bias && e < router.experts; e += 32) row[e] += load(bias[e]);
    if (router.kind == SOFTMAX) {
        float top = -INFINITE, total = 0.0f;
        for (int e = lane; e < router.experts; e += 32) top = fmaxf(top, row[e]);
        top = warp_max(top);
        for (int e = lane; e < router.experts; e += 32) {
            row[e] = expf(row[e] - top);
            total += row[e];
        }
        total = warp_sum(total);
        for (int e = lane; e < router.experts; e += 32) row[e] /= total;
    } else if (router.kind == SIGMOID) {
        for (int e = lane; e < router.experts; e += 32) row[e] = 1.0f / (1.0f + expf(-row[e]));
    }
    WARP_SYNC();
}

// The scores of a token that choose its experts.
template <typename T> struct Compared {
    const float* row;
    // Absent if it is null.
    const T* correction;
    // Experts per group, and whether a group is chosen; null if all are.
    int width;
    const float* open;
};

template <typename T> DEVICE float compared(const Compared<T>& of, int expert) {
    return of.correction ? of.row[expert] + load(of.correction[expert]) : of.row[expert];
}

template <typename T> DEVICE bool is_open(const Compared<T>& of, int expert) {
    return !of.open || of.open[expert / of.width] != 0.0f;
}

// Opens the groups with the largest sums of their two best scores. `sums` and `open` have a value for each group.
template <typename T> DEVICE void open_groups(const Router& router, const Compared<T>& of, float* sums, float* open) {
    const int width = router.experts / router.groups;
    for (int group = lane_index(); group < router.groups; group += 32) {
        float first = -INFINITE, second = -INFINITE;
        for (int e = group * width; e < (group + 1) * width; ++e) {
            float value = compared(of, e);
            if (value > first)
                second = first, first = value;
            else
                second = fmaxf(second, value);
        }
        sums[group] = first + second;
    }
    WARP_SYNC();
    for (int group = lane_index(); group < router.groups; group += 32) {
        const Candidate own = {order_of(sums[group]), group};
        int better = 0;
        for (int other = 0; other < router.groups; ++other)
            better += precedes({order_of(sums[other]), other}, own);
        open[group] = better < router.chosen_groups ? 1.0f : 0.0f;
    }
    WARP_SYNC();
}

// The experts of a token, ascending, into `chosen`.
template <typename T> DEVICE void choose(const Router& router, const Compared<T>& of, uint32* chosen) {
    const int lane = lane_index();
    // The best of those that follow the one before, as often as a token has experts.
    Candidate last = {0x7fffffff, -1};
    for (int k = 0; k < router.per_token; ++k) {
        Candidate best = {int(0x80000000u), 0x7fffffff};
        for (int e = lane; e < router.experts; e += 32) {
            const Candidate own = {order_of(compared(of, e)), e};
            if (is_open(of, e) && precedes(last, own) && precedes(own, best)) best = own;
        }
        last = warp_best(best);
    }
    int before = 0;
    for (int first = 0; first < router.experts; first += 32) {
        const int e = first + lane;
        const bool mine = e < router.experts && is_open(of, e) && !precedes(last, {order_of(compared(of, e)), e});
        int through = mine;
        for (int by = 1; by < 32; by <<= 1) {
            int other = shuffle_up(through, by);
            if (lane >= by) through += other;
        }
        if (mine) chosen[before + through - 1] = uint32(e);
        before += shuffle(through, 31);
    }
    WARP_SYNC();
}

// Replaces the chosen experts by those that are given, if they are all there. `counters` has the tokens with given
// experts, and those of them whose router chose another one.
DEVICE void replace(const Router& router, const unsigned short* given, uint32* chosen, uint32* counters) {
    int beyond = 0, changed = 0;
    for (int k = lane_index(); k < router.per_token; k += 32) {
        beyond += given[k] >= router.experts;
        changed += given[k] != chosen[k];
    }
    beyond = warp_sum(beyond), changed = warp_sum(changed);
    if (beyond > 0) return;
    for (int k = lane_index(); k < router.per_token; k += 32) chosen[k] = given[k];
    if (lane_index() == 0) {
        atomicAdd(&counters[0], 1u);
        if (changed > 0) atomicAdd(&counters[1], 1u);
    }
    WARP_SYNC();
}

// What the results of the chosen experts are multiplied with.
DEVICE void weigh(const Router& router, const float* row, const uint32* chosen, float* weights) {
    float top = -INFINITE, total = 0.0f;
    for (int k = 0; k < router.per_token; ++k) top = fmaxf(top, row[chosen[k]]);
    for (int k = 0; k < router.per_token; ++k)
        total += router.kind == SOFTMAX_OF_CHOSEN ? expf(row[chosen[k]] - top) : row[chosen[k]];
    for (int k = lane_index(); k < router.per_token; k += 32) {
        float own = row[chosen[k]];
        if (router.kind == SOFTMAX_OF_CHOSEN)
            own = expf(own - top) / total;
        else if (router.kind == SIGMOID)
            own = (router.normalized ? own / (total + LEAST_TOTAL) : own) * router.scale;
        else if (router.normalized)
            own /= total;
        weights[k] = own;
    }
}

// Routes the calling warp's token: turns its logits into scores, and writes its experts and their weights. `counters`
// [experts + 2] has the tokens of each expert, and those of `replace`. A token whose `slots` is not below `end` is padding.
template <typename T>
DEVICE void route(float* logits, int tokens, const Router& router, const T* bias, const T* correction,
                  const unsigned short* given, int given_stride, const uint32* slots, uint32 end, uint32* experts,
                  float* weights, uint32* counters) {
    DYNAMIC_SHARED(float, shared);
    const int token = blockIdx.x * WARPS + warp_index();
    if (token >= tokens) return;
    float* row = logits + int64(token) * router.experts;
    uint32* chosen = experts + int64(token) * router.per_token;
    weights += int64(token) * router.per_token;
    if (slots && slots[token] >= end) {
        for (int k = lane_index(); k < router.per_token; k += 32) chosen[k] = NOWHERE, weights[k] = 0.0f;
        return;
    }
    score(router, bias, row);
    Compared<T> of = {row, correction, 1, nullptr};
    if (router.kind == SIGMOID && router.chosen_groups < router.groups) {
        float *sums = shared + 2 * router.groups * warp_index(), *open = sums + router.groups;
        open_groups(router, of, sums, open);
        of.width = router.experts / router.groups, of.open = open;
    }
    choose(router, of, chosen);
    if (given) replace(router, given + int64(token) * given_stride, chosen, counters + router.experts);
    weigh(router, row, chosen, weights);
    for (int k = lane_index(); k < router.per_token; k += 32) atomicAdd(&counters[chosen[k]], 1u);
}

// Block `e` lists the rows of expert `e`: `slots` of its rows, `rows` of its slots, and the `tiles` of at most `height` of
// its rows, each an expert and its first row; `tiles` begins with their number. `starts` [experts + 1].
DEVICE void group(const uint32* experts, int entries, int height, const uint32* counters, uint32* starts, uint32* slots,
                  uint32* rows, uint32* tiles) {
    STATIC_SHARED(uint32, found, [32]);
    const uint32 expert = blockIdx.x, own = counters[expert];
    uint32 before = 0, tiles_before = 0;
    for (uint32 e = threadIdx.x; e < expert; e += blockDim.x) {
        before += counters[e];
        tiles_before += (counters[e] + height - 1) / height;
    }
    const uint32 start = block_sum(before), first_tile = block_sum(tiles_before);
    const uint32 own_tiles = (own + height - 1) / height;
    for (uint32 i = threadIdx.x; i < own_tiles; i += blockDim.x) {
        tiles[1 + 2 * (first_tile + i)] = expert;
        tiles[2 + 2 * (first_tile + i)] = start + i * height;
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert + 1 == gridDim.x) starts[expert + 1] = start + own, tiles[0] = first_tile + own_tiles;
    }
    // Padding has no rows; the first block says so.
    if (own == 0 && expert > 0) return;
    // Each warp searches a part of the slots, four neighbours per lane at a time, first for their number.
    const int warps = blockDim.x / 32, lane = lane_index();
    const int part = ((entries + warps - 1) / warps + 127) / 128 * 128;
    const int from = int(warp_index()) * part, to = min(entries, from + part);
    uint32 count = 0;
    for (int at = from + int(threadIdx.x & 31u); at < to; at += 32) count += experts[at] == expert;
    count = warp_sum(count);
    if (lane == 0) found[warp_index()] = count;
    BLOCK_SYNC();
    uint32 next = start;
    for (uint32 warp = 0; warp < warp_index(); ++warp) next += found[warp];
    for (int at = from; at < to; at += 128) {
        const int first = at + 4 * lane;
        uint32 through = 0;
        for (int i = first; i < min(to, first + 4); ++i) through += experts[i] == expert;
        const uint32 mine = through;
        for (int by = 1; by < 32; by <<= 1) {
            uint32 other = shuffle_up(through, by);
            if (lane >= by) through += other;
        }
        uint32 row = next + through - mine;
        for (int i = first; i < min(to, first + 4); ++i) {
            if (experts[i] == expert) {
                slots[row] = uint32(i);
                rows[i] = row++;
            } else if (expert == 0 && experts[i] == NOWHERE) {
                rows[i] = NOWHERE;
            }
        }
        next += shuffle(through, 31);
    }
}

// Replaces the scores of the calling warp's token by the gradient of its logits, for that of its weights. The correction
// has none: it chooses and does not weigh.
DEVICE void reverse(float* scores, int tokens, const Router& router, const uint32* experts, const float* weights,
                           const float* d_weights) {
    const int token = blockIdx.x * WARPS + warp_index(), lane = lane_index();
    if (token >= tokens) return;
    float* row = scores + int64(token) * router.experts;
    const int64 first = int64(token) * router.per_token;
    const uint32* chosen = experts + first;
    weights += first, d_weights += first;
    // Of w = s / sum(s) over the chosen: ds = (dw - sum(dw w)) / sum(s).
    float shift = 0.0f, total = 0.0f, mean = 0.0f;
    for (int k = 0; k < router.per_token; ++k) {
        shift += d_weights[k] * weights[k];
        total += row[chosen[k]];
    }
    if (router.kind != SOFTMAX_OF_CHOSEN && !router.normalized) shift = 0.0f, total = 1.0f;
    if (router.kind == SOFTMAX)
        for (int k = 0; k < router.per_token; ++k) mean += (d_weights[k] - shift) / total * row[chosen[k]];
    // Every lane has read the scores before they are replaced, and takes whole experts.
    WARP_SYNC();
    for (int e = lane; e < router.experts; e += 32) {
        const float own = row[e];
        float d = router.kind == SOFTMAX ? -own * mean : 0.0f;
        for (int k = 0; k < router.per_token; ++k) {
            if (chosen[k] != uint32(e)) continue;
            if (router.kind == SOFTMAX)
                d += own * ((d_weights[k] - shift) / total);
            else if (router.kind == SIGMOID)
                d = (d_weights[k] * router.scale - shift) / (total + LEAST_TOTAL) * own * (1.0f - own);
            else
                d = weights[k] * (d_weights[k] - shift);
        }
        row[e] = d;
    }
}

#define INSTANCES(T, suffix)                                                                                                  \
    KERNEL(128, route_##suffix, float* logits, int tokens, int count, int per_token, int kind, int normalized, int groups,    \
           int chosen_groups, float scale, const T* bias, const T* correction, const unsigned short* given,                   \
           int given_stride, const uint32* slots, uint32 end, uint32* experts, float* weights, uint32* counters) {            \
        route(logits, tokens, Router{count, per_token, kind, normalized, groups, chosen_groups, scale}, bias, correction,     \
              given, given_stride, slots, end, experts, weights, counters);                                                   \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES

KERNEL(512, group_routes, const uint32* experts, int entries, int height, const uint32* counters, uint32* starts,
       uint32* slots, uint32* rows, uint32* tiles) {
    group(experts, entries, height, counters, starts, slots, rows, tiles);
}

KERNEL(128, route_backward, float* scores, int tokens, int count, int per_token, int kind, int normalized, float scale,
       const uint32* experts, const float* weights, const float* d_weights) {
    reverse(scores, tokens, Router{count, per_token, kind, normalized, 1, 1, scale}, experts, weights, d_weights);
}
}  // namespace routes
