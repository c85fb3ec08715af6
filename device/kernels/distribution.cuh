// The distribution over tokens that a row of logits stands for: its normaliser and its entropy.
//
// Invariant: what the sampler draws from and what the trainer differentiates is computed by this one function, by blocks of
// one size and in one order, so that equal logits give equal bits.
#pragma once
#include "common.cuh"

namespace distribution {
// Threads of a block, which takes a row.
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
// Logits that a warp has on their way at a time, four vectors of four for each lane.
constexpr int STEP = 512;
// Below every exponent that a power of e is told from 0 by, and far from overflow when multiplied.
constexpr float LOWEST = -1e30f;
constexpr int NONE = 0x7fffffff;

// The candidates of a row: logits[ids[i]], or all of them where there are no ids.
struct Row {
    const float* logits;
    const uint32* ids;
    int count;
};

DEVICE uint32 candidate(const Row& row, int slot) { return row.ids ? row.ids[slot] : uint32(slot); }
DEVICE float logit(const Row& row, int slot) { return row.logits[candidate(row, slot)]; }

struct alignas(16) Four {
    float at[4];
};

// Four candidates; minus infinity, which has no weight, past the last.
DEVICE void load_four(const Row& row, int slot, bool whole, float (&z)[4]) {
    if (whole) {
        Four four = *reinterpret_cast<const Four*>(row.logits + slot);
        for (int j = 0; j < 4; ++j) z[j] = four.at[j];
    } else {
        for (int j = 0; j < 4; ++j) z[j] = slot + j < row.count ? logit(row, slot + j) : -INFINITE;
    }
}

// Candidates of a warp: neighbours, so that the masses of the warps add up in the order of the candidates.
DEVICE int part_length(int count) { return (count + WARPS * STEP - 1) / (WARPS * STEP) * STEP; }

// Calls visit(slot, z) with four neighbours at a time, in ascending order for each lane, so that every candidate is visited
// by one thread. All lanes of a warp make the same number of calls, if need be with slots past the last.
template <typename Visit> DEVICE void visit_part(const Row& row, Visit visit) {
    int length = part_length(row.count);
    int begin = int(warp_index()) * length;
    int end = min(begin + length, row.count);
    bool aligned = !row.ids && (reinterpret_cast<uint64>(row.logits) & 15u) == 0;
    for (int base = begin; base < end; base += STEP) {
        bool whole = aligned && base + STEP <= row.count;
        int slot = base + 4 * int(lane_index());
        float z[4][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) load_four(row, slot + 128 * k, whole, z[k]);
#pragma unroll
        for (int k = 0; k < 4; ++k) visit(slot + 128 * k, z[k]);
    }
}

// What a logit is above another one, scaled; NaN stays NaN.
DEVICE float above(float z, float top, float scale) {
    float d = __fmul_rn(z - top, scale);
    return d < LOWEST ? LOWEST : d;
}

// The smallest over a block; every thread gets it.
DEVICE int block_smallest(int value) {
    STATIC_SHARED(int, parts, [WARPS]);
    for (int mask = 16; mask > 0; mask >>= 1) value = min(value, shuffle_xor(value, mask));
    if (lane_index() == 0) parts[warp_index()] = value;
    BLOCK_SYNC();
    int smallest = parts[0];
    for (int warp = 1; warp < WARPS; ++warp) smallest = min(smallest, parts[warp]);
    BLOCK_SYNC();
    return smallest;
}

// Sums over some candidates, relative to `top`, the greatest logit among them: of e^d, and of d e^d, where d is what a
// scaled logit is above the top.
struct Mass {
    float top, sum, moment;
};

// Its products are rounded before somebody adds them to something, in all kernels alike.
DEVICE void raise_top(Mass& mass, float top, float scale) {
    float d = above(mass.top, top, scale), factor = fast_exp(d);
    mass.moment = __fmul_rn(fmaf(d, mass.sum, mass.moment), factor);
    mass.sum = __fmul_rn(mass.sum, factor);
    mass.top = top;
}

// A row under a scale, which is 1 / temperature. Probabilities are e^d / sum.
struct Distribution {
    float top, scale, sum, log_sum, entropy;
};

// Of a candidate with this logit; at most 0, which rounding may leave by a little.
DEVICE float log_probability(const Distribution& of, float z) {
    float value = above(z, of.top, of.scale) - of.log_sum;
    return value > 0 ? 0 : value;
}

// The calling warp's part of a row.
DEVICE Mass part_mass(const Row& row, float scale) {
    Mass mass = {LOWEST, 0, 0};
    visit_part(row, [&](int, const float (&z)[4]) {
        float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        if (most > mass.top) raise_top(mass, most, scale);
        for (int j = 0; j < 4; ++j) {
            float d = above(z[j], mass.top, scale), e = fast_exp(d);
            mass.sum += e;
            mass.moment = fmaf(d, e, mass.moment);
        }
    });
    raise_top(mass, warp_max(mass.top), scale);
    mass.sum = warp_sum(mass.sum);
    mass.moment = warp_sum(mass.moment);
    return mass;
}

// Of a row that the calling block shares; `masses` become the sums of e^d of its warps' parts. Every thread gets the result.
DEVICE Distribution row_distribution(const Row& row, float scale, float (&masses)[WARPS]) {
    STATIC_SHARED(Mass, parts, [WARPS]);
    Mass own = part_mass(row, scale);
    if (lane_index() == 0) parts[warp_index()] = own;
    BLOCK_SYNC();
    Distribution result = {LOWEST, scale, 0, 0, 0};
    for (int warp = 0; warp < WARPS; ++warp) result.top = fmaxf(result.top, parts[warp].top);
    float moment = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        Mass part = parts[warp];
        raise_top(part, result.top, scale);
        result.sum += part.sum;
        moment += part.moment;
        masses[warp] = part.sum;
    }
    BLOCK_SYNC();
    result.log_sum = logf(result.sum);
    result.entropy = result.log_sum - moment / result.sum;
    return result;
}
}  // namespace distribution
