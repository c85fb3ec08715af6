// Prefill: attention of chunks of new tokens over a paged KV cache.
//
// The kernel in `paged.cu` reads the cache once per token; this one reads it once per tile of queries. It is the
// training forward with keys from pages, and gives the same bits.
#include "common.cuh"
#include "attention.cuh"

namespace prefill {
using namespace attention;

// At most QUERIES queries `first..end`; the first is at position `place` of its sequence.
struct PageTile { int first, end, place, sequence; };

// The queries of the calling block in a grid of [heads * QUERIES / ROWS, tiles].
template <int ROWS> DEVICE QueryBlock query_block(const PageTile& tile, const Heads& of, int window) {
    return attention::query_block<ROWS>(of, Segment{tile.first, tile.end, 0, tile.place}, tile.first, window);
}

template <typename T>
DEVICE KeyRows<T> keys_in_pages(const T* cache, const uint32* tables, int max_pages, const PageTile& tile, const QueryBlock& block) {
    const Heads& of = block.of;
    const T* keys = cache + block.kv * PAGE * of.dim;
    const T* values = keys + of.kv_heads * PAGE * of.dim;
    return {keys, values, of.dim, tables + int64(tile.sequence) * max_pages, 2 * of.kv_heads * PAGE};
}

template <int D>
DEVICE void forward(const bf16* qkv, const bf16* cache, const PageTile& tile, const uint32* tables, int max_pages,
                    const Heads& all, const Rule<bf16>& rule, bf16* out) {
    const QueryBlock block = query_block<64 * SPAN<D>>(tile, {all.heads, all.kv_heads, D}, rule.window);
    if (empty(block)) return;
    attend<D>(qkv, keys_in_pages(cache, tables, max_pages, tile, block), block, 0, rule, out, nullptr);
}

template <typename T>
DEVICE void plain_forward(const T* qkv, const T* cache, const PageTile& tile, const uint32* tables, int max_pages,
                          const Heads& of, const Rule<T>& rule, T* out) {
    const QueryBlock block = query_block<TILE>(tile, of, rule.window);
    if (empty(block)) return;
    plain_attend(qkv, keys_in_pages(cache, tables, max_pages, tile, block), block, 0, rule, out, nullptr);
}

#define PREFILL_KERNEL(threads, name, T, forward)                                                                           \
    KERNEL(threads, prefill_attention_##name, const T* qkv, const T* cache, const PageTile* tiles, const uint32* tables,    \
           int max_pages, int heads, int kv_heads, int dim, float scale, int window, const T* sinks, T* out) {              \
        const Heads of = {heads, kv_heads, dim};                                                                            \
        forward(qkv, cache, tiles[blockIdx.y], tables, max_pages, of, Rule<T>{scale, window, sinks}, out);                  \
    }
PREFILL_KERNEL(128, bf16_64, bf16, forward<64>)
PREFILL_KERNEL(128, bf16_128, bf16, forward<128>)
PREFILL_KERNEL(256, bf16, bf16, plain_forward<bf16>)
PREFILL_KERNEL(256, f32, float, plain_forward<float>)
}  // namespace prefill
