// Low-rank factors of a linear operation whose rows have different adapters (LoRA, arXiv 2106.09685; rows of many adapters
// in one batch: Punica, arXiv 2310.18547): out[row] += B (scale A x[row]) with A [rank, in] and B [out, rank] of the adapter
// of the row. Rows whose adapter is not below the number of adapters have none.
//
// A table says where factors are. For each site, a part of the outputs that has factors of its own: its first column and its
// number of columns. Then for each network (an expert, or the only one), site and adapter: the places of A and B among all
// factors in two words each, rank, and the bits of the scale; a rank of 0 stands for no factors.
#include "common.cuh"

namespace adapters {
constexpr int SITE = 2, ENTRY = 6, WARPS = 8;

// The adapters of tokens, each of which has `per_token` slots, and the networks and the rows of slots; null for one network,
// where the slot of a token is its row.
struct Slots {
    const uint32 *adapters, *networks, *rows, *table;
    int per_token, count, sites;
};

struct Factors {
    int64 a, b;
    int rank;
    float scale;
};

DEVICE int64 place(const uint32* words) { return int64(uint64(words[1]) << 32 | words[0]); }

// The factors of `slot` at `site`; of rank 0 for none.
DEVICE Factors find(const Slots& slots, int64 slot, int site) {
    const uint32 adapter = slots.adapters[slot / slots.per_token];
    if (adapter >= uint32(slots.count)) return {0, 0, 0, 0.0f};
    const int64 network = slots.networks ? slots.networks[slot] : 0;
    const uint32* entry = slots.table + slots.sites * SITE + ((network * slots.sites + site) * slots.count + adapter) * ENTRY;
    return {place(entry), place(entry + 2), int(entry[4]), bits_to_float(entry[5])};
}

// The row of a slot that has an adapter: padding has none.
DEVICE int64 row_of(const Slots& slots, int64 slot) { return slots.rows ? slots.rows[slot] : slot; }

// Product of two vectors of `width` values; every lane of the warp gets it.
template <int n, typename T> DEVICE float dot(const T* x, const T* y, int width) {
    float sum = 0;
    for (int i = int(lane_index()) * n; i < width; i += 32 * n) {
        const Pack<T, n> a = load_pack<n>(x + i), b = load_pack<n>(y + i);
        for (int j = 0; j < n; ++j) sum += load(a.at[j]) * load(b.at[j]);
    }
    return warp_sum(sum);
}

// Block (slot, site and group of ranks): shrunk [slots, sites, most] = scale A x, one rank per warp. x [T, input] has a row
// for each token, or [rows, input] for each row.
template <typename T>
DEVICE void shrink(const Slots& slots, const T* factors, const T* x, int input, bool of_tokens, int most, float* shrunk) {
    constexpr int wide = 16 / sizeof(T);
    const int64 slot = blockIdx.x;
    const int groups = (most + WARPS - 1) / WARPS, site = blockIdx.y / groups;
    const int number = blockIdx.y % groups * WARPS + int(warp_index());
    const Factors of = find(slots, slot, site);
    // The same for all lanes of the warp.
    if (number >= of.rank) return;
    const T *own = x + (of_tokens ? slot / slots.per_token : row_of(slots, slot)) * input, *a = factors + of.a + int64(number) * input;
    const float product = aligned(own) && aligned(a) && input % wide == 0 ? dot<wide>(own, a, input) : dot<1>(own, a, input);
    if (lane_index() == 0) shrunk[(slot * slots.sites + site) * most + number] = of.scale * product;
}

// Block (token, 256 ranks) of an embedding, whose A is [rank, vocabulary] and which has one site: shrunk [T, most].
template <typename T>
DEVICE void look_up(const Slots& slots, const T* factors, const uint32* ids, int vocabulary, int most, float* shrunk) {
    const int64 token = blockIdx.x;
    const int number = int(blockIdx.y * blockDim.x + threadIdx.x);
    const Factors of = find(slots, token, 0);
    if (number >= of.rank) return;
    shrunk[token * most + number] = of.scale * load(factors[of.a + int64(number) * vocabulary + ids[token]]);
}

template <int n, typename T> DEVICE float expanded(const float* shrunk, const T* b, int rank) {
    float sum = 0;
    for (int i = 0; i < rank; i += n) {
        const Pack<T, n> pack = load_pack<n>(b + i);
        for (int j = 0; j < n; ++j) sum += shrunk[i + j] * load(pack.at[j]);
    }
    return sum;
}

// Block (slot, 256 columns): out [rows, width] += B shrunk, one column per thread.
template <typename T, typename Out>
DEVICE void expand(const Slots& slots, const T* factors, const float* shrunk, int most, int width, Out* out) {
    constexpr int wide = 16 / sizeof(T);
    const int64 slot = blockIdx.x;
    const int column = int(blockIdx.y * blockDim.x + threadIdx.x);
    if (column >= width) return;
    for (int site = 0; site < slots.sites; ++site) {
        const int within = column - int(slots.table[site * SITE]);
        if (within < 0 || within >= int(slots.table[site * SITE + 1])) continue;
        const Factors of = find(slots, slot, site);
        if (of.rank == 0) continue;
        const float* own = shrunk + (slot * slots.sites + site) * most;
        const T* b = factors + of.b + int64(within) * of.rank;
        const float sum = aligned(b) && of.rank % wide == 0 ? expanded<wide>(own, b, of.rank) : expanded<1>(own, b, of.rank);
        Out* to = out + row_of(slots, slot) * width + column;
        store(to, load(*to) + sum);
    }
}

#define EXPAND(T, Out, suffix)                                                                                               \
    KERNEL(256, expand_adapters_##suffix, const uint32* adapters, const uint32* networks, const uint32* rows,                \
           const uint32* table, int per_token, int count, int sites, const T* factors, const float* shrunk, int most,        \
           int width, Out* out) {                                                                                            \
        const Slots slots = {adapters, networks, rows, table, per_token, count, sites};                                      \
        expand(slots, factors, shrunk, most, width, out);                                                                    \
    }
#define INSTANCES(T, suffix)                                                                                                 \
    KERNEL(256, shrink_adapters_##suffix, const uint32* adapters, const uint32* networks, const uint32* rows,                \
           const uint32* table, int per_token, int count, int sites, const T* factors, const T* x, int input, int of_tokens, \
           int most, float* shrunk) {                                                                                        \
        const Slots slots = {adapters, networks, rows, table, per_token, count, sites};                                      \
        shrink(slots, factors, x, input, of_tokens != 0, most, shrunk);                                                      \
    }                                                                                                                        \
    KERNEL(256, look_up_adapters_##suffix, const uint32* adapters, const uint32* networks, const uint32* rows,               \
           const uint32* table, int per_token, int count, int sites, const T* factors, const uint32* ids, int vocabulary,    \
           int most, float* shrunk) {                                                                                        \
        const Slots slots = {adapters, networks, rows, table, per_token, count, sites};                                      \
        look_up(slots, factors, ids, vocabulary, most, shrunk);                                                              \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
EXPAND(float, float, f32_f32)
EXPAND(bf16, bf16, bf16_bf16)
EXPAND(bf16, float, bf16_f32)
#undef INSTANCES
#undef EXPAND
}  // namespace adapters
