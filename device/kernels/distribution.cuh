// The softmax of a row of logits: its normaliser and entropy.
//
// Invariant: sampling and training use this one function, with one block size and one order of additions, so equal
// logits give equal bits.
#pragma once
#include "common.cuh"

namespace distribution {
// Threads per block; one block per row.
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
// Logits in flight per warp: four vectors of four per lane.
constexpr int STEP = 512;
// Below every exponent whose exp differs from 0, and far from overflow when multiplied.
constexpr float LOWEST = -1e30f;
constexpr int NONE = 0x7fffffff;

// Candidates of a row: logits[ids[i]], or all logits without ids.
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

// Four candidates; minus infinity, with weight 0, after the last.
DEVICE void load_four(const Row& row, int slot, bool whole, float (&z)[4]) {
    if (whole) {
        Four four = *reinterpret_cast<const Four*>(row.logits + slot);
        for (int j = 0; j < 4; ++j) z[j] = four.at[j];
    } else {
        for (int j = 0; j < 4; ++j) z[j] = slot + j < row.count ? logit(row, slot + j) : -INFINITE;
    }
}

// Candidates of a warp are contiguous, so that the masses of warps are prefix sums in candidate order.
DEVICE int part_length(int count) { return (count + WARPS * STEP - 1) / (WARPS * STEP) * STEP; }

// Calls visit(slot, z) with four contiguous candidates at a time, ascending per lane, so that each candidate is visited
// by one thread. All lanes of a warp make the same number of calls, with slots after the last if needed.
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

// Scaled difference of two logits; NaN stays NaN.
DEVICE float above(float z, float top, float scale) {
    float d = __fmul_rn(z - top, scale);
    return d < LOWEST ? LOWEST : d;
}

// Minimum over a block; every thread gets it.
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

// Sums over candidates relative to their maximal logit `top`: of e^d, and of d e^d, where d is the scaled difference to
// the top.
struct Mass {
    float top, sum, moment;
};

// Products are rounded before they are added, in all kernels alike.
DEVICE void raise_top(Mass& mass, float top, float scale) {
    float d = above(mass.top, top, scale), factor = fast_exp(d);
    mass.moment = __fmul_rn(fmaf(d, mass.sum, mass.moment), factor);
    mass.sum = __fmul_rn(mass.sum, factor);
    mass.top = top;
}

// Softmax of a row with scale 1 / temperature. Probabilities are e^d / sum.
struct Distribution {
    float top, scale, sum, log_sum, entropy;
};

// Log-probability of a candidate with this logit, clamped to at most 0 against rounding.
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

// Softmax of a row, by the whole block; `masses` receives the sums of e^d of its warps. Every thread gets the result.
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
