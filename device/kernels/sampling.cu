// Sampling: tokens from logits, and their log-probabilities under the truncated distributions.
//
// One block per row, without sorting. The cuts of top-k and top-p are found by radix selection over the bits of the
// logits, from the upper bits down, with counts and masses of the candidates that share a prefix. Masses are integers,
// so their sum does not depend on the order, and a cut is exact down to candidates with equal logits, which are ordered
// by id.
#include "common.cuh"
#include "distribution.cuh"

namespace sampling {
using distribution::block_smallest;
using distribution::candidate;
using distribution::logit;
using distribution::NONE;
using distribution::part_length;
using distribution::Row;
using distribution::THREADS;
using distribution::visit_part;
using distribution::WARPS;

constexpr int KEPT = 4096;
constexpr int BINS = 2048, BINS_OF_THREAD = BINS / THREADS;
// Unit of masses: the most likely candidate has 2^40.
constexpr float UNIT = 1099511627776.0f;

// Ascends with the logit, in IEEE total order.
DEVICE uint32 key_of(float z) {
    uint32 bits = float_to_bits(z);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
DEVICE float logit_of(uint32 key) { return bits_to_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }

// Candidates above a key, and the first `ties` of those equal to it.
struct Cut {
    uint32 key;
    int ties;
};

// Weight of a candidate in a cut: 1, or its probability relative to the most likely candidate, in units.
struct Measure {
    bool counts;
    float top, scale;
};

DEVICE float weight_of(const Measure& by, float z) { return fast_exp(distribution::above(z, by.top, by.scale)); }

DEVICE uint64 amount_of(const Measure& by, float z) {
    if (by.counts) return 1;
    float weight = weight_of(by, z);
    return weight > 0 ? uint64(weight * UNIT) : 0;
}

// Amounts per bin in two words, because shared-memory atomics have 32 bits.
struct Bins {
    uint32 low[BINS], high[BINS];
};

DEVICE void add_to_bin(Bins& bins, int bin, uint64 amount) {
    if (amount == 0) return;
    uint32 low = uint32(amount);
    uint32 before = atomicAdd(&bins.low[bin], low);
    uint32 high = uint32(amount >> 32) + (before + low < low ? 1u : 0u);
    if (high > 0) atomicAdd(&bins.high[bin], high);
}

DEVICE uint64 bin_amount(const Bins& bins, int bin) { return uint64(bins.high[bin]) << 32 | bins.low[bin]; }

// Inclusive prefix sum over the lanes of a warp.
template <typename T> DEVICE T warp_running_sum(T value) {
    for (int by = 1; by < 32; by <<= 1) {
        T before = shuffle_up(value, by);
        if (int(lane_index()) >= by) value += before;
    }
    return value;
}

// Inclusive prefix sum over the threads of a block.
template <typename T> DEVICE T block_running_sum(T value) {
    STATIC_SHARED(T, parts, [WARPS]);
    value = warp_running_sum(value);
    if (lane_index() == 31) parts[warp_index()] = value;
    BLOCK_SYNC();
    T before = 0;
    for (uint32 warp = 0; warp < warp_index(); ++warp) before += parts[warp];
    BLOCK_SYNC();
    return before + value;
}

// One level of the radix selection: the bin, counted from the largest, in which the cumulative amount reaches `wanted`.
struct Level {
    int bin;
    // Amount of the bins above it.
    uint64 above;
};

// `share` is a share of the total amount, for the first level of a cut by mass; if negative, `wanted` is known.
DEVICE Level reach(const Bins& bins, uint64& wanted, float share) {
    STATIC_SHARED(Level, found, [1]);
    STATIC_SHARED(uint64, total, [1]);
    int greatest = BINS - 1 - int(threadIdx.x) * BINS_OF_THREAD;
    uint64 own = 0;
    for (int k = 0; k < BINS_OF_THREAD; ++k) own += bin_amount(bins, greatest - k);
    uint64 reached = block_running_sum(own);
    if (threadIdx.x == THREADS - 1) {
        total[0] = reached;
        found[0] = {0, reached};
    }
    BLOCK_SYNC();
    if (share >= 0) {
        uint64 all = total[0], part = uint64(double(share) * double(all));
        wanted = max(uint64(1), min(part, all));
    }
    uint64 before = reached - own;
    if (before < wanted && wanted <= reached) {
        int bin = greatest;
        for (; before + bin_amount(bins, bin) < wanted; --bin) before += bin_amount(bins, bin);
        found[0] = {bin, before};
    }
    BLOCK_SYNC();
    return found[0];
}

// Bits of a key that a level distinguishes.
struct Bits {
    int shift, above_shift;
};

// Counts the candidates of `within` whose bits above the level equal `prefix`.
DEVICE void fill_bins(Bins& bins, const Row& row, const Cut& within, const Measure& by, Bits bits, uint32 prefix) {
    for (int i = int(threadIdx.x); i < BINS; i += THREADS) bins.low[i] = bins.high[i] = 0;
    BLOCK_SYNC();
    uint32 mask = (1u << (bits.above_shift - bits.shift)) - 1;
    auto here = [&](uint32 key) { return bits.above_shift == 32 || key >> bits.above_shift == prefix; };
    visit_part(row, [&](int slot, const float(&z)[4]) {
        for (int j = 0; j < 4; ++j) {
            uint32 key = key_of(z[j]);
            if (slot + j < row.count && key > within.key && here(key))
                add_to_bin(bins, int(key >> bits.shift & mask), amount_of(by, z[j]));
        }
    });
    // Candidates at the key of a cut are equal, and their number is known.
    if (threadIdx.x == 0 && within.ties > 0 && here(within.key))
        add_to_bin(bins, int(within.key >> bits.shift & mask), uint64(within.ties) * amount_of(by, logit_of(within.key)));
    BLOCK_SYNC();
}

// Candidates that pass a cut and the minimal probability.
struct Filter {
    Cut cut;
    Measure by;
    float min_p;
};

enum class Side { out, tie, in };

DEVICE Side side_of(const Filter& filter, float z) {
    uint32 key = key_of(z);
    if (key < filter.cut.key || (filter.min_p > 0 && !(weight_of(filter.by, z) >= filter.min_p))) return Side::out;
    return key > filter.cut.key ? Side::in : Side::tie;
}

// Number of candidates above a cut in the lower half, number of ties in the upper half.
DEVICE uint64 tally(Side side) { return side == Side::in ? 1 : side == Side::tie ? uint64(1) << 32 : 0; }

// Number of passing candidates before a candidate, from the tally before it.
DEVICE int passed(uint64 before, const Filter& filter) {
    return int(uint32(before)) + min(int(before >> 32), filter.cut.ties);
}

// Writes the ids of the passing candidates, ascending, if there are at most KEPT. Every thread gets their number.
DEVICE int collect(const Row& row, const Filter& filter, uint32* ids) {
    STATIC_SHARED(uint64, parts, [WARPS]);
    auto side = [&](int slot, float z) { return slot < row.count ? side_of(filter, z) : Side::out; };
    uint64 own = 0;
    visit_part(row, [&](int slot, const float(&z)[4]) {
        for (int j = 0; j < 4; ++j) own += tally(side(slot + j, z[j]));
    });
    own = warp_sum(own);
    if (lane_index() == 0) parts[warp_index()] = own;
    BLOCK_SYNC();
    uint64 before = 0, all = 0;
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < int(warp_index())) before += parts[warp];
        all += parts[warp];
    }
    int total = passed(all, filter);
    // Most warps have no passing candidate; all lanes agree.
    if (total <= KEPT && own > 0) {
        visit_part(row, [&](int slot, const float(&z)[4]) {
            uint64 here = 0;
            for (int j = 0; j < 4; ++j) here += tally(side(slot + j, z[j]));
            uint64 running = warp_running_sum(here);
            uint64 at = before + running - here;
            for (int j = 0; j < 4; ++j) {
                uint64 next = at + tally(side(slot + j, z[j]));
                int place = passed(at, filter);
                if (passed(next, filter) > place) ids[place] = candidate(row, slot + j);
                at = next;
            }
            before += shuffle(running, 31);
        });
    }
    BLOCK_SYNC();
    return total;
}

// Narrows `within` to the least likely candidate needed to reach `wanted`, or `share` of the total. `row` becomes a
// list of the remaining candidates in `ids` once they are few.
DEVICE Cut narrow(Row& row, const Cut& within, const Measure& by, uint64 wanted, float share, uint32* ids) {
    STATIC_SHARED(Bins, bins, [1]);
    uint32 prefix = 0;
    #pragma unroll 1
    for (int i = 0; i < 3; ++i) {
        Bits bits = {i == 0 ? 21 : i == 1 ? 10 : 0, i == 0 ? 32 : i == 1 ? 21 : 10};
        fill_bins(bins[0], row, within, by, bits, prefix);
        Level level = reach(bins[0], wanted, i == 0 ? share : -1.0f);
        wanted -= min(level.above, wanted);
        prefix = prefix << (bits.above_shift - bits.shift) | uint32(level.bin);
        if (!row.ids && prefix > 0) {
            // Candidates from the bin's lowest key on, which include the cut.
            Filter coarse = {{(prefix << bits.shift) - 1, 0}, by, 0};
            int left = collect(row, coarse, ids);
            if (left <= KEPT) row = {row.logits, ids, left};
        }
    }
    uint64 each = max(uint64(1), amount_of(by, logit_of(prefix)));
    return {prefix, int((wanted + each - 1) / each)};
}

struct Best {
    float z;
    int slot;
};

// The most likely candidate; the first of equal ones.
DEVICE Best most_likely(const Row& row) {
    Best best = {-INFINITE, NONE};
    visit_part(row, [&](int slot, const float(&z)[4]) {
        for (int j = 0; j < 4; ++j)
            if (z[j] > best.z) best = {z[j], slot + j};
    });
    float top = block_max(best.z);
    int slot = block_smallest(best.z == top ? best.slot : NONE);
    return {top, slot == NONE ? 0 : slot};
}

// The first candidate at which the cumulative probability exceeds `uniform` of the total; never one of probability 0.
// `masses` are those of the warps.
DEVICE int draw(const Row& row, const distribution::Distribution& of, const float (&masses)[WARPS], float uniform) {
    float left = uniform * of.sum;
    int part = 0;
    bool found = false;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        if (found || !(masses[warp] > 0)) continue;
        part = warp;
        found = left < masses[warp];
        if (!found) left -= masses[warp];
    }
    // Rounding left a small remainder: the last candidate with a probability.
    if (!found) left = INFINITE;
    int length = part_length(row.count), thread = int(threadIdx.x);
    int first = part * length + thread * (length / THREADS), last = min(first + length / THREADS, row.count);
    auto weight = [&](int slot) { return fast_exp(distribution::above(logit(row, slot), of.top, of.scale)); };
    float own = 0;
    for (int slot = first; slot < last; ++slot) own += weight(slot);
    float reached = block_running_sum(own);
    int passing = block_smallest(own > 0 && left < reached ? thread : NONE);
    int final = -block_smallest(own > 0 ? -thread : NONE);
    int chosen = NONE;
    if (thread == (passing == NONE ? final : passing)) {
        float rest = passing == NONE ? INFINITE : left - (reached - own);
        for (int slot = first; slot < last && !(rest < 0 && chosen != NONE); ++slot) {
            float p = weight(slot);
            if (!(p > 0)) continue;
            chosen = slot;
            rest -= p;
        }
    }
    chosen = block_smallest(chosen);
    return chosen == NONE ? 0 : chosen;
}

// Sampling parameters of a row.
struct Settings {
    float temperature, top_p, min_p, uniform;
    uint32 top_k;
};

// Unpacks the parameters of a row.
DEVICE Settings settings_of(const uint32* packed) {
    return {bits_to_float(packed[0]), bits_to_float(packed[1]), bits_to_float(packed[2]), bits_to_float(packed[3]), packed[4]};
}

// Truncation: top-k, then top-p within it, then min-p. Every thread gets the number of remaining candidates, whose ids
// are in `ids`, ascending, if there are at most KEPT. `scratch` has the size of `ids`.
DEVICE int truncate(Row row, const Settings& settings, uint32* ids, uint32* scratch) {
    Measure counts = {true, 0, 0}, masses = {false, most_likely(row).z, 1.0f / settings.temperature};
    // A min_p above 1 removes all but the most likely candidate, which is always kept.
    uint32 top_k = settings.min_p > 1 ? 1 : settings.top_k;
    bool by_count = top_k > 0 && top_k < uint32(row.count), by_mass = settings.top_p < 1;
    Cut cut = {0, 0};
#pragma unroll 1
    for (int stage = 0; stage < 2; ++stage) {
        if (!(stage == 0 ? by_count : by_mass)) continue;
        float share = stage == 0 ? -1.0f : max(settings.top_p, 0.0f);
        cut = narrow(row, cut, stage == 0 ? counts : masses, top_k, share, scratch);
    }
    return collect(row, {cut, masses, min(settings.min_p, 1.0f)}, ids);
}

// Results of a row: token, bits of its log-probability, number of kept tokens; and the kept ids.
struct Drawn {
    uint32 *draw, *kept_ids, *scratch;
};
constexpr int SETTINGS = 5, DRAW = 3;

DEVICE void sample(Row row, const Settings& asked, const Drawn& out) {
    uint32 token = 0;
    float logprob = 0;
    int kept = 0;
    if (asked.temperature == 0) {
        Best best = most_likely(row);
        token = uint32(best.slot);
        if (!(best.z < INFINITE && best.z > -INFINITE)) logprob = INFINITE - INFINITE;
    } else {
        if (asked.top_p < 1 || asked.top_k > 0 || asked.min_p > 0) {
            kept = truncate(row, asked, out.kept_ids, out.scratch);
            row = {row.logits, out.kept_ids, kept};
        }
        // Uniform over all threads.
        if (row.count == 0) {
            logprob = INFINITE - INFINITE;
        } else if (kept <= KEPT) {
            float masses[WARPS];
            distribution::Distribution of = distribution::row_distribution(row, 1.0f / asked.temperature, masses);
            int slot = draw(row, of, masses, asked.uniform);
            token = candidate(row, slot);
            logprob = distribution::log_probability(of, logit(row, slot));
        }
    }
    if (threadIdx.x > 0) return;
    out.draw[0] = token;
    out.draw[1] = float_to_bits(logprob);
    out.draw[2] = uint32(kept);
}
}  // namespace sampling

// settings [n, 5]: bits of temperature, top_p, min_p and of the uniform number in [0, 1), and top_k. draws [n, 3]:
// token, bits of its log-probability, and number of tokens after truncation (0 without truncation) of each row; their
// ids are in kept_ids [n, 4096], ascending. A row with more than 4096 kept tokens has their number and no token. A row
// with none, because its logits are NaN, has NaN as log-probability, as has a greedy choice.
KERNEL(512, sample, const float* logits, int vocabulary, const uint32* settings, uint32* draws, uint32* kept_ids,
       uint32* scratch) {
    int64 at = blockIdx.x, list = at * sampling::KEPT;
    sampling::sample({logits + at * vocabulary, nullptr, vocabulary}, sampling::settings_of(settings + sampling::SETTINGS * at),
                     {draws + sampling::DRAW * at, kept_ids + list, scratch + list});
}

// Concatenates the lists of all rows: draws [n, 3], ids [n, 4096], packed [n * 4096].
KERNEL(512, pack_kept, const uint32* draws, const uint32* ids, uint32* packed) {
    int row = int(blockIdx.x);
    auto listed = [&](int of) {
        uint32 count = draws[sampling::DRAW * of + 2];
        return count <= uint32(sampling::KEPT) ? count : 0u;
    };
    uint32 before = 0;
    for (int other = int(threadIdx.x); other < row; other += 512) before += listed(other);
    before = block_sum(before);
    const uint32* own = ids + int64(row) * sampling::KEPT;
    for (uint32 i = threadIdx.x; i < listed(row); i += 512) packed[before + i] = own[i];
}
