// Products of experts over their rows, without padding: every expert multiplies the rows that the router gave it.
//
// One kernel serves training and recorded decode steps: it reads on the device which rows are whose, so the host neither
// waits for the router nor launches a product per expert, of which there may be hundreds per layer. Rows of an expert are
// cut into tiles, and a block computes a tile of rows times a tile of columns. A tile is low where experts have few rows
// (decoding): then the cost is that of reading the weights of the experts in use once, and it is high where they have many.
//
// Two families of kernels: tensor cores for bf16, and f32. A sum runs over the inner dimension in ascending order, in
// steps that do not depend on the tile, so a row has the same bits whatever rows are beside it.
#include "common.cuh"

#define UNROLL _Pragma("unroll")

namespace expert_products {
// Padding of the rows of a shared-memory tile, values, so that rows begin in different banks.
constexpr int PAD = 8;

// A matrix whose rows a product takes as they are, or by the slots of a token: row i is that of token slots[i] / per_token.
template <typename T> struct Rows {
    const T* values;
    const uint32* slots;
    int per_token;
};

template <typename T> DEVICE const T* row_at(const Rows<T>& of, int64 row, int64 width) {
    return of.values + (of.slots ? int64(of.slots[row] / uint32(of.per_token)) : row) * width;
}

// The work of a block: the rows `first..first + rows` of an expert, and columns from `column`.
struct Work {
    int expert, first, rows, column;
};

// The tile of the calling block, of which there are `columns` per tile of rows. `tiles` is as in `routes.cu`.
DEVICE bool work_of_block(const uint32* tiles, const uint32* starts, int columns, int height, int width, Work& work) {
    const uint32 tile = blockIdx.x / uint32(columns);
    if (tile >= tiles[0]) return false;
    work.expert = int(tiles[1 + 2 * tile]);
    work.first = int(tiles[2 + 2 * tile]);
    work.rows = min(height, int(starts[work.expert + 1]) - work.first);
    work.column = int(blockIdx.x % uint32(columns)) * width;
    return true;
}

// ---------------------------------------------------------------------------------------------------- tensor cores

// A block computes a tile of HEIGHT x WIDTH, in DEEP steps of the inner dimension; each of ACROSS x DOWN warps a part of it.
template <int HEIGHT, int WIDTH, int DEEP, int DOWN, int ACROSS, int STAGES> struct Shape {
    static constexpr int height = HEIGHT, width = WIDTH, deep = DEEP, across = ACROSS, stages = STAGES;
    static constexpr int threads = 32 * DOWN * ACROSS;
    // Fragments of 16 x 16 per warp.
    static constexpr int down = HEIGHT / DOWN / 16, side = WIDTH / ACROSS / 16;
};
// src/ops/experts.rs launches these with the same numbers.
using Low = Shape<16, 64, 64, 1, 4, 4>;
using High = Shape<128, 128, 32, 2, 4, 3>;

// Values of a tile of `outer` rows of an operand, which is stored by the inner dimension if it is `turned`.
template <int outer, int deep, bool turned> struct Operand {
    static constexpr int rows = turned ? deep : outer, columns = turned ? outer : deep, stride = columns + PAD;
    static constexpr int size = rows * stride;
};

// Begins a copy of a tile from `from(i, row)`, the row of the matrix that row `row` of the tile is of, or null for zeros. Of
// `columns` values of a row it takes those from `column`. Calls with the same `i` have the same row.
template <typename Tile, int threads, typename From>
DEVICE void fetch(bf16* to, const bf16* base, From from, int column, int columns, bool wide) {
    constexpr int CHUNKS = Tile::columns / 8;
    UNROLL for (int i = 0; i < Tile::rows * CHUNKS / threads; ++i) {
        const int chunk = i * threads + int(threadIdx.x), r = chunk / CHUNKS, c = chunk % CHUNKS * 8;
        const bf16* row = from(i, r);
        const int valid = row ? max(0, min(8, columns - column - c)) : 0;
        bf16* at = to + r * Tile::stride + c;
        if (wide) {
            copy_async(at, valid > 0 ? row + column + c : base, uint32(valid) * 2);
        } else {
            for (int j = 0; j < 8; ++j) {
                bf16 zero;
                zero.bits = 0;
                at[j] = j < valid ? row[column + c + j] : zero;
            }
        }
    }
}

// 16 x 16 values of the left operand from row `at` and inner step `k`, and of the right one.
template <typename Tile, bool turned> DEVICE void load_fragment(uint32 (&a)[4], const bf16* tile, int at, int k) {
    if (turned)
        load_a_transposed(a, tile + 16 * k * Tile::stride + at, Tile::stride);
    else
        load_a(a, tile + at * Tile::stride + 16 * k, Tile::stride);
}

// The calling warp's part of a tile: `from_row`, `from_column` within it, and sums in the layout of `mma`.
template <typename Of> struct Sums {
    float of[Of::down][2 * Of::side][4];
};

// sums += left * right over `count` steps of the inner dimension; `fetch_left(to, step)` and `fetch_right` begin the copy of
// a step. Fragments beyond `rows` and `columns` of the tile are skipped.
template <typename Of, bool left_turned, bool right_turned, typename Left, typename Right>
DEVICE void multiply(Sums<Of>& sums, int count, int rows, int columns, Left fetch_left, Right fetch_right) {
    using A = Operand<Of::height, Of::deep, left_turned>;
    using B = Operand<Of::width, Of::deep, right_turned>;
    DYNAMIC_SHARED(bf16, shared);
    const int from_row = int(warp_index()) / Of::across * 16 * Of::down, from_column = int(warp_index()) % Of::across * 16 * Of::side;
    auto stage = [&](int step) { return shared + step % Of::stages * (A::size + B::size); };
    auto begin = [&](int step) {
        if (step < count) {
            fetch_left(stage(step), step);
            fetch_right(stage(step) + A::size, step);
        }
        copy_commit();
    };
    UNROLL for (int step = 0; step < Of::stages - 1; ++step) begin(step);
    for (int step = 0; step < count; ++step) {
        copy_wait<Of::stages - 2>();
        // All warps are done with the stage that is written next.
        BLOCK_SYNC();
        begin(step + Of::stages - 1);
        const bf16 *left = stage(step), *right = left + A::size;
        UNROLL for (int k = 0; k < Of::deep / 16; ++k) {
            uint32 a[Of::down][4];
            UNROLL for (int i = 0; i < Of::down; ++i)
                if (from_row + 16 * i < rows) load_fragment<A, left_turned>(a[i], left, from_row + 16 * i, k);
            UNROLL for (int j = 0; j < Of::side; ++j) {
                if (from_column + 16 * j >= columns) break;
                uint32 b[4];
                load_fragment<B, right_turned>(b, right, from_column + 16 * j, k);
                const uint32 low[2] = {b[0], b[2]}, high[2] = {b[1], b[3]};
                UNROLL for (int i = 0; i < Of::down; ++i) {
                    if (from_row + 16 * i >= rows) break;
                    mma(sums.of[i][2 * j], a[i], low);
                    mma(sums.of[i][2 * j + 1], a[i], high);
                }
            }
        }
    }
    copy_wait<0>();
}

// Calls `store(row, column, value)` for the values of the calling thread within `rows` and `columns` of the tile.
template <typename Of, typename Store> DEVICE void store_sums(const Sums<Of>& sums, int rows, int columns, Store store_value) {
    const int from_row = int(warp_index()) / Of::across * 16 * Of::down, from_column = int(warp_index()) % Of::across * 16 * Of::side;
    const int g = lane_index() / 4, t2 = lane_index() % 4 * 2;
    UNROLL for (int i = 0; i < Of::down; ++i) {
        UNROLL for (int j = 0; j < 2 * Of::side; ++j) {
            UNROLL for (int e = 0; e < 4; ++e) {
                const int row = from_row + 16 * i + g + 8 * (e >> 1), column = from_column + 8 * j + t2 + (e & 1);
                if (row < rows && column < columns) store_value(row, column, sums.of[i][j][e]);
            }
        }
    }
}

// out [row, outer] = x [row, inner] times the weight of the row's expert: its transpose [outer, inner], or [inner, outer]
// if it is `turned`; plus a bias [outer] of the expert unless it is null.
template <typename Of, bool turned>
DEVICE void product(const Rows<bf16>& x, const bf16* weights, const bf16* bias, int inner, int outer, const uint32* tiles,
                    const uint32* starts, bf16* out) {
    using A = Operand<Of::height, Of::deep, false>;
    using B = Operand<Of::width, Of::deep, turned>;
    Work work;
    if (!work_of_block(tiles, starts, (outer + Of::width - 1) / Of::width, Of::height, Of::width, work)) return;
    const bf16* weight = weights + int64(work.expert) * inner * outer;
    const int columns = min(Of::width, outer - work.column);
    const bool wide_x = inner % 8 == 0 && aligned(x.values);
    const bool wide_weight = (turned ? outer : inner) % 8 == 0 && int64(inner) * outer % 8 == 0 && aligned(weights);
    // The rows of a thread do not change from step to step.
    constexpr int EACH = A::rows * A::columns / 8 / Of::threads;
    const bf16* own[EACH];
    UNROLL for (int i = 0; i < EACH; ++i) {
        const int row = (i * Of::threads + int(threadIdx.x)) / (A::columns / 8);
        own[i] = row < work.rows ? row_at(x, work.first + row, inner) : nullptr;
    }
    auto left = [&](bf16* to, int step) {
        fetch<A, Of::threads>(to, x.values, [&](int i, int) { return own[i]; }, step * Of::deep, inner, wide_x);
    };
    auto right = [&](bf16* to, int step) {
        if (turned) {
            auto row = [&](int, int r) {
                const int k = step * Of::deep + r;
                return k < inner ? weight + int64(k) * outer : nullptr;
            };
            fetch<B, Of::threads>(to, weights, row, work.column, outer, wide_weight);
        } else {
            auto row = [&](int, int r) { return r < columns ? weight + int64(work.column + r) * inner : nullptr; };
            fetch<B, Of::threads>(to, weights, row, step * Of::deep, inner, wide_weight);
        }
    };
    Sums<Of> sums = {};
    multiply<Of, false, turned>(sums, (inner + Of::deep - 1) / Of::deep, work.rows, columns, left, right);
    const bf16* own_bias = bias ? bias + int64(work.expert) * outer + work.column : nullptr;
    bf16* to = out + int64(work.first) * outer + work.column;
    store_sums(sums, work.rows, columns, [&](int row, int column, float value) {
        store(to + int64(row) * outer + column, own_bias ? value + load(own_bias[column]) : value);
    });
}

// Fetches the rows of a step among the `count` rows from `start` on, from column `first` of `width`.
template <typename Tile, typename Of>
DEVICE void fetch_step(bf16* to, const Rows<bf16>& from, int64 start, int count, int step, int first, int width, bool wide) {
    auto row = [&](int, int r) {
        const int at = step * Of::deep + r;
        return at < count ? row_at(from, start + at, width) : nullptr;
    };
    fetch<Tile, Of::threads>(to, from.values, row, first, width, wide);
}

// Adds g^T x of the rows of expert blockIdx.y to its gradient [outer, inner]; a block has a tile of it.
template <typename Of>
DEVICE void weight_gradient(const Rows<bf16>& g, const Rows<bf16>& x, int inner, int outer, const uint32* starts, float* gradients) {
    using A = Operand<Of::height, Of::deep, true>;
    using B = Operand<Of::width, Of::deep, true>;
    const int64 start = starts[blockIdx.y];
    const int count = int(starts[blockIdx.y + 1] - uint32(start)), columns_of_all = (inner + Of::width - 1) / Of::width;
    if (count == 0) return;
    const int top = int(blockIdx.x) / columns_of_all * Of::height, column = int(blockIdx.x) % columns_of_all * Of::width;
    const int rows = min(Of::height, outer - top), columns = min(Of::width, inner - column);
    const bool wide_g = outer % 8 == 0 && aligned(g.values), wide_x = inner % 8 == 0 && aligned(x.values);
    auto left = [&](bf16* to, int step) {
        fetch_step<A, Of>(to, g, start, count, step, top, outer, wide_g);
    };
    auto right = [&](bf16* to, int step) {
        fetch_step<B, Of>(to, x, start, count, step, column, inner, wide_x);
    };
    Sums<Of> sums = {};
    multiply<Of, true, true>(sums, (count + Of::deep - 1) / Of::deep, rows, columns, left, right);
    float* to = gradients + (int64(blockIdx.y) * outer + top) * inner + column;
    store_sums(sums, rows, columns, [&](int row, int at, float value) { to[int64(row) * inner + at] += value; });
}

// ------------------------------------------------------------------------------------------------------------ f32

// A block of 256 threads computes a tile of HEIGHT x 64 in steps of 16; a thread every 16th row and column of it.
template <int HEIGHT> struct Plain {
    static constexpr int height = HEIGHT, width = 64, deep = 16, threads = 256;
};
using PlainLow = Plain<16>;
using PlainHigh = Plain<64>;

// Stores the values `from(outer, inner)` of a tile by the inner dimension. Neighbouring threads read neighbours of the inner
// dimension, or of the outer one if the operand is `turned`.
template <int outer, int deep, bool turned, typename From> DEVICE void load_plain(float* to, From from) {
    for (int i = threadIdx.x; i < outer * deep; i += 256) {
        const int m = turned ? i % outer : i / deep, k = turned ? i / outer : i % deep;
        to[k * (outer + 1) + m] = from(m, k);
    }
}

// Calls `store` as `store_sums` does, for the product of operands that are zero beyond their ends.
template <typename Of, bool left_turned, bool right_turned, typename Left, typename Right, typename Store>
DEVICE void multiply_plain(int inner, int rows, int columns, Left left, Right right, Store store_value) {
    STATIC_SHARED(float, a, [Of::deep * (Of::height + 1)]);
    STATIC_SHARED(float, b, [Of::deep * (Of::width + 1)]);
    constexpr int down = Of::height / 16, side = Of::width / 16;
    const int own_row = int(threadIdx.x) / 16, own_column = int(threadIdx.x) % 16;
    float sums[down][side] = {};
    for (int first = 0; first < inner; first += Of::deep) {
        BLOCK_SYNC();
        load_plain<Of::height, Of::deep, left_turned>(
            a, [&](int m, int k) { return m < rows && first + k < inner ? left(m, first + k) : 0.0f; });
        load_plain<Of::width, Of::deep, right_turned>(
            b, [&](int n, int k) { return n < columns && first + k < inner ? right(n, first + k) : 0.0f; });
        BLOCK_SYNC();
        for (int k = 0; k < Of::deep; ++k) {
            UNROLL for (int i = 0; i < down; ++i) {
                const float value = a[k * (Of::height + 1) + own_row + 16 * i];
                UNROLL for (int j = 0; j < side; ++j)
                    sums[i][j] = fmaf(value, b[k * (Of::width + 1) + own_column + 16 * j], sums[i][j]);
            }
        }
    }
    UNROLL for (int i = 0; i < down; ++i) {
        UNROLL for (int j = 0; j < side; ++j) {
            const int row = own_row + 16 * i, column = own_column + 16 * j;
            if (row < rows && column < columns) store_value(row, column, sums[i][j]);
        }
    }
}

template <typename Of, bool turned>
DEVICE void product(const Rows<float>& x, const float* weights, const float* bias, int inner, int outer, const uint32* tiles,
                    const uint32* starts, float* out) {
    Work work;
    if (!work_of_block(tiles, starts, (outer + Of::width - 1) / Of::width, Of::height, Of::width, work)) return;
    const float* weight = weights + int64(work.expert) * inner * outer;
    auto left = [&](int row, int k) { return row_at(x, work.first + row, inner)[k]; };
    auto right = [&](int column, int k) {
        const int64 at = work.column + column;
        return turned ? weight[int64(k) * outer + at] : weight[at * inner + k];
    };
    const float* own_bias = bias ? bias + int64(work.expert) * outer + work.column : nullptr;
    float* to = out + int64(work.first) * outer + work.column;
    multiply_plain<Of, false, turned>(inner, work.rows, min(Of::width, outer - work.column), left, right,
                                      [&](int row, int column, float value) {
                                          to[int64(row) * outer + column] = own_bias ? value + own_bias[column] : value;
                                      });
}

template <typename Of>
DEVICE void weight_gradient(const Rows<float>& g, const Rows<float>& x, int inner, int outer, const uint32* starts, float* gradients) {
    const int64 start = starts[blockIdx.y];
    const int count = int(starts[blockIdx.y + 1] - uint32(start)), columns_of_all = (inner + Of::width - 1) / Of::width;
    if (count == 0) return;
    const int top = int(blockIdx.x) / columns_of_all * Of::height, column = int(blockIdx.x) % columns_of_all * Of::width;
    auto left = [&](int row, int k) { return row_at(g, start + k, outer)[top + row]; };
    auto right = [&](int at, int k) { return row_at(x, start + k, inner)[column + at]; };
    float* to = gradients + (int64(blockIdx.y) * outer + top) * inner + column;
    multiply_plain<Of, true, true>(count, min(Of::height, outer - top), min(Of::width, inner - column), left, right,
                                   [&](int row, int at, float value) { to[int64(row) * inner + at] += value; });
}

#define PRODUCTS(T, suffix, height, Of)                                                                                          \
    KERNEL(256, expert_product_##height##_##suffix, const T* x, const uint32* slots, int per_token, const T* weights,            \
           const T* bias, int inner, int outer, const uint32* tiles, const uint32* starts, T* out) {                             \
        product<Of, false>(Rows<T>{x, slots, per_token}, weights, bias, inner, outer, tiles, starts, out);                       \
    }                                                                                                                            \
    KERNEL(256, expert_input_gradient_##height##_##suffix, const T* x, const uint32* slots, int per_token, const T* weights,     \
           const T* bias, int inner, int outer, const uint32* tiles, const uint32* starts, T* out) {                             \
        product<Of, true>(Rows<T>{x, slots, per_token}, weights, bias, inner, outer, tiles, starts, out);                        \
    }
#define GRADIENT(T, suffix, Of)                                                                                                  \
    KERNEL(256, expert_weight_gradient_##suffix, const T* g, const uint32* g_slots, const T* x, const uint32* x_slots,           \
           int per_token, int inner, int outer, const uint32* starts, float* gradients) {                                        \
        weight_gradient<Of>(Rows<T>{g, g_slots, per_token}, Rows<T>{x, x_slots, per_token}, inner, outer, starts, gradients);    \
    }

PRODUCTS(float, f32, low, PlainLow)
PRODUCTS(float, f32, high, PlainHigh)
PRODUCTS(bf16, bf16, low, Low)
PRODUCTS(bf16, bf16, high, High)
GRADIENT(float, f32, PlainHigh)
GRADIENT(bf16, bf16, High)
#undef GRADIENT
#undef PRODUCTS
}  // namespace expert_products
