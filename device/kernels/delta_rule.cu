// The recurrence of a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): every value head has a state S [key_dim, value_dim],
//   S = decay S; S += k ((v - S^T k) strength)^T; o = S^T q.
//
// Packs compute it in chunks of CHUNK tokens (Yang et al. 2024, arXiv 2406.06484). With S0 the state before a chunk, g_t the
// product of its decays up to token t, and r_ti that of the decays after token i up to t,
//   u_t = strength_t (v_t - g_t S0^T k_t - sum_{i<t} r_ti (k_t . k_i) u_i)
//   o_t = g_t S0^T q_t + sum_{i<=t} r_ti (q_t . k_i) u_i
//   S   = g_n S0 + sum_i r_ni k_i u_i^T.
// No value is divided by a decay, which may be 0. Decoding advances the state token by token. States and sums are f32.
//
// A block has COLUMNS columns of a state, which do not depend on each other, in one value head of one sequence: lane i of each
// warp has column i. The backward passes the columns tile by tile, since gradients of queries and keys are sums over all.
#include "common.cuh"

namespace delta_rule {
constexpr int CHUNK = 16;
constexpr int COLUMNS = 32;
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
// Rows of a tile of a state in shared memory: products along columns have no bank conflicts either way.
constexpr int TILE = COLUMNS + 1;
constexpr int MAX_KEY_DIM = 256;

// What all rows have: heads [rows, channels] of normalised queries and keys, and values; opened [rows, 2, value_heads] strengths
// and decays.
template <typename T> struct Tokens {
    const T* heads;
    const float* opened;
    int key_heads, value_heads, key_dim, value_dim;
};

template <typename T> DEVICE int64 channels_of(const Tokens<T>& tokens) {
    return 2 * int64(tokens.key_heads) * tokens.key_dim + int64(tokens.value_heads) * tokens.value_dim;
}
template <typename T> DEVICE const T* query_of(const Tokens<T>& tokens, int64 row, int head) {
    const int group = tokens.value_heads / tokens.key_heads;
    return tokens.heads + row * channels_of(tokens) + head / group * tokens.key_dim;
}
template <typename T> DEVICE const T* key_of(const Tokens<T>& tokens, int64 row, int head) {
    return query_of(tokens, row, head) + int64(tokens.key_heads) * tokens.key_dim;
}
template <typename T> DEVICE const T* value_of(const Tokens<T>& tokens, int64 row, int head) {
    const int64 first = 2 * int64(tokens.key_heads) * tokens.key_dim + int64(head) * tokens.value_dim;
    return tokens.heads + row * channels_of(tokens) + first;
}
template <typename T> DEVICE float strength_of(const Tokens<T>& tokens, int64 row, int head) {
    return tokens.opened[row * 2 * tokens.value_heads + head];
}
template <typename T> DEVICE float decay_of(const Tokens<T>& tokens, int64 row, int head) {
    return tokens.opened[(row * 2 + 1) * tokens.value_heads + head];
}
// Values of the state of a head.
template <typename T> DEVICE int64 size_of(const Tokens<T>& tokens) { return int64(tokens.key_dim) * tokens.value_dim; }

// A chunk in shared memory. Rows of `pairs` are CHUNK queries, then CHUNK keys; so are those of `dots` and `reads`.
struct Chunk {
    int count, stride;
    // [2 CHUNK, stride]
    float* pairs;
    // [2 CHUNK, CHUNK] their products with the keys.
    float* dots;
    // [CHUNK, CHUNK] r_ti; 0 for later columns.
    float* ratios;
    // [CHUNK]
    float* totals;
    float* strengths;
    // [2 CHUNK, COLUMNS] what they read of S0.
    float* reads;
    // [CHUNK, COLUMNS]
    float* updates;
};

DEVICE float* take(float*& memory, int count) {
    float* taken = memory;
    memory += count;
    return taken;
}

DEVICE Chunk chunk_in(float*& memory, int key_dim) {
    Chunk chunk;
    chunk.count = 0;
    chunk.stride = key_dim + 1;
    chunk.pairs = take(memory, 2 * CHUNK * chunk.stride);
    chunk.dots = take(memory, 2 * CHUNK * CHUNK);
    chunk.ratios = take(memory, CHUNK * CHUNK);
    chunk.totals = take(memory, CHUNK);
    chunk.strengths = take(memory, CHUNK);
    chunk.reads = take(memory, 2 * CHUNK * COLUMNS);
    chunk.updates = take(memory, CHUNK * COLUMNS);
    return chunk;
}

// Loads the rows [first, first + count) of a head, their products and ratios.
template <typename T> DEVICE void load_chunk(Chunk& chunk, const Tokens<T>& tokens, int64 first, int count, int head) {
    chunk.count = count;
    for (int i = threadIdx.x; i < 2 * CHUNK * tokens.key_dim; i += THREADS) {
        const int row = i / tokens.key_dim, d = i % tokens.key_dim, token = row % CHUNK;
        float value = 0;
        if (token < count) value = load((row < CHUNK ? query_of(tokens, first + token, head) : key_of(tokens, first + token, head))[d]);
        chunk.pairs[row * chunk.stride + d] = value;
    }
    if (threadIdx.x < CHUNK) {
        const int row = threadIdx.x;
        float ratio = 1.0f, total = 1.0f;
        for (int i = CHUNK - 1; i >= 0; --i) {
            chunk.ratios[row * CHUNK + i] = row < count && i <= row ? ratio : 0.0f;
            if (i < count && i <= row) ratio *= decay_of(tokens, first + i, head);
        }
        for (int i = 0; i <= row && i < count; ++i) total *= decay_of(tokens, first + i, head);
        chunk.totals[row] = total;
        chunk.strengths[row] = row < count ? strength_of(tokens, first + row, head) : 0.0f;
    }
    BLOCK_SYNC();
    for (int i = threadIdx.x; i < 2 * CHUNK * CHUNK; i += THREADS) {
        const float* left = chunk.pairs + i / CHUNK * chunk.stride;
        const float* key = chunk.pairs + (CHUNK + i % CHUNK) * chunk.stride;
        float sum = 0;
        for (int d = 0; d < tokens.key_dim; ++d) sum = fmaf(left[d], key[d], sum);
        chunk.dots[i] = sum;
    }
    BLOCK_SYNC();
}

// What queries and keys read of `state [key_dim, TILE]`.
DEVICE void read_state(const Chunk& chunk, const float* state, int key_dim) {
    for (int row = warp_index(); row < 2 * CHUNK; row += WARPS) {
        const float* left = chunk.pairs + row * chunk.stride;
        float sum = 0;
        for (int d = 0; d < key_dim; ++d) sum = fmaf(left[d], state[d * TILE + lane_index()], sum);
        chunk.reads[row * COLUMNS + lane_index()] = sum;
    }
    BLOCK_SYNC();
}

// The updates, by the first warp, and the errors if they are wanted, each [CHUNK, COLUMNS]. Rows are solved in order.
template <typename T>
DEVICE void solve(const Chunk& chunk, const Tokens<T>& tokens, int64 first, int head, int column, float* errors) {
    if (warp_index() == 0) {
        for (int row = 0; row < CHUNK; ++row) {
            float known = chunk.totals[row] * chunk.reads[(CHUNK + row) * COLUMNS + lane_index()];
            for (int i = 0; i < row; ++i) {
                const float weight = chunk.ratios[row * CHUNK + i] * chunk.dots[(CHUNK + row) * CHUNK + i];
                known = fmaf(weight, chunk.updates[i * COLUMNS + lane_index()], known);
            }
            const bool there = row < chunk.count && column < tokens.value_dim;
            const float error = there ? load(value_of(tokens, first + row, head)[column]) - known : 0.0f;
            if (errors) errors[row * COLUMNS + lane_index()] = error;
            chunk.updates[row * COLUMNS + lane_index()] = error * chunk.strengths[row];
        }
    }
    BLOCK_SYNC();
}

// The product of all decays of a chunk, and of those after token i.
DEVICE float whole(const Chunk& chunk) { return chunk.totals[chunk.count - 1]; }
DEVICE float last_ratio(const Chunk& chunk, int i) { return chunk.ratios[(chunk.count - 1) * CHUNK + i]; }

// Value `d` of a column of the state after the chunk.
DEVICE float advanced(const Chunk& chunk, float before, int d) {
    float sum = whole(chunk) * before;
    for (int i = 0; i < chunk.count; ++i) {
        const float update = last_ratio(chunk, i) * chunk.updates[i * COLUMNS + lane_index()];
        sum = fmaf(chunk.pairs[(CHUNK + i) * chunk.stride + d], update, sum);
    }
    return sum;
}

// Sequence blockIdx.x, of rows runs[4 n] to runs[4 n + 1], begins with state runs[4 n + 2] of `begins`, or zeros if that is -1;
// runs[4 n + 3] is its first chunk. Writes the states after the first `ended` sequences to `ends`; its results to `out`, and the
// states before its chunks to `kept`, each unless it is null. `begins` and `ends` are [_, value_heads, key_dim, value_dim] of all heads, `kept` [_, heads,
// key_dim, value_dim] of the heads of the grid, of which the first is `first_head`.
template <typename T>
DEVICE void advance(const Tokens<T>& tokens, const int* runs, const float* begins, float* ends, int ended,
                    float* kept, int first_head, T* out) {
    DYNAMIC_SHARED(float, memory);
    float* state = take(memory, tokens.key_dim * TILE);
    Chunk chunk = chunk_in(memory, tokens.key_dim);
    const int* run = runs + 4 * blockIdx.x;
    const int head = first_head + blockIdx.y, column = blockIdx.z * COLUMNS + lane_index();
    const bool there = column < tokens.value_dim;
    const int64 size = size_of(tokens);
    for (int d = warp_index(); d < tokens.key_dim; d += WARPS) {
        const int64 at = (int64(run[2]) * tokens.value_heads + head) * size + int64(d) * tokens.value_dim + column;
        state[d * TILE + lane_index()] = run[2] >= 0 && there ? begins[at] : 0.0f;
    }
    int64 number = run[3];
    for (int64 first = run[0]; first < run[1]; first += CHUNK, ++number) {
        if (kept) {
            float* to = kept + (number * gridDim.y + blockIdx.y) * size + column;
            for (int d = warp_index(); d < tokens.key_dim; d += WARPS)
                if (there) to[int64(d) * tokens.value_dim] = state[d * TILE + lane_index()];
        }
        load_chunk(chunk, tokens, first, min(CHUNK, int(run[1] - first)), head);
        read_state(chunk, state, tokens.key_dim);
        solve(chunk, tokens, first, head, column, (float*)nullptr);
        for (int row = warp_index(); out && row < chunk.count; row += WARPS) {
            float sum = chunk.totals[row] * chunk.reads[row * COLUMNS + lane_index()];
            for (int i = 0; i <= row; ++i) {
                const float weight = chunk.ratios[row * CHUNK + i] * chunk.dots[row * CHUNK + i];
                sum = fmaf(weight, chunk.updates[i * COLUMNS + lane_index()], sum);
            }
            if (there) store(out + ((first + row) * tokens.value_heads + head) * tokens.value_dim + column, sum);
        }
        for (int d = warp_index(); d < tokens.key_dim; d += WARPS)
            state[d * TILE + lane_index()] = advanced(chunk, state[d * TILE + lane_index()], d);
        BLOCK_SYNC();
    }
    for (int d = warp_index(); int(blockIdx.x) < ended && d < tokens.key_dim; d += WARPS) {
        const int64 at = (int64(blockIdx.x) * tokens.value_heads + head) * size + int64(d) * tokens.value_dim + column;
        if (there) ends[at] = state[d * TILE + lane_index()];
    }
}

// Sums of the backward of a chunk over all columns, in shared memory.
struct Sums {
    // [2 CHUNK, CHUNK] gradients of the products with their ratios.
    float* d_dots;
    // [CHUNK, CHUNK] gradients of the logarithms of the ratios.
    float* after;
    // [2 CHUNK] products of what was read with its gradient.
    float* of_rows;
    // [CHUNK] gradients of the strengths.
    float* strengths;
    float* of_state;
};

// What the backward of a tile of columns has in shared memory.
struct Slopes {
    // [key_dim, TILE] S0, and the gradient of the state after the chunk.
    float* state;
    float* d_state;
    // [2 CHUNK, COLUMNS] gradients of what was read, without its factor.
    float* d_reads;
    // [CHUNK, COLUMNS]
    float* errors;
    float* d_updates;
    float* of_keys;
};

template <typename T>
DEVICE void load_slopes(const Slopes& slopes, const Tokens<T>& tokens, const float* state, const float* d_state, const T* g,
                        int64 first, int count, int head, int column) {
    const bool there = column < tokens.value_dim;
    for (int d = warp_index(); d < tokens.key_dim; d += WARPS) {
        const int64 at = int64(d) * tokens.value_dim + column;
        slopes.state[d * TILE + lane_index()] = there ? state[at] : 0.0f;
        slopes.d_state[d * TILE + lane_index()] = there ? d_state[at] : 0.0f;
    }
    for (int row = warp_index(); row < CHUNK; row += WARPS) {
        const int64 at = ((first + row) * tokens.value_heads + head) * tokens.value_dim + column;
        slopes.d_reads[row * COLUMNS + lane_index()] = there && row < count ? load(g[at]) : 0.0f;
    }
    BLOCK_SYNC();
}

// Gradients of the updates, before they are solved, and what keys read of the gradient of the state.
DEVICE void updates_backward(const Chunk& chunk, const Slopes& slopes, int key_dim) {
    for (int row = warp_index(); row < CHUNK; row += WARPS) {
        const float* key = chunk.pairs + (CHUNK + row) * chunk.stride;
        float sum = 0;
        for (int d = 0; d < key_dim; ++d) sum = fmaf(key[d], slopes.d_state[d * TILE + lane_index()], sum);
        slopes.of_keys[row * COLUMNS + lane_index()] = sum;
        sum *= last_ratio(chunk, row);
        for (int later = row; later < chunk.count; ++later) {
            const float weight = chunk.ratios[later * CHUNK + row] * chunk.dots[later * CHUNK + row];
            sum = fmaf(weight, slopes.d_reads[later * COLUMNS + lane_index()], sum);
        }
        slopes.d_updates[row * COLUMNS + lane_index()] = sum;
    }
    BLOCK_SYNC();
}

// Makes the gradients of the updates those of the errors, which are those of the values, by the first warp; adds those of the
// strengths.
DEVICE void solve_backward(const Chunk& chunk, const Slopes& slopes, const Sums& sums) {
    if (warp_index() == 0) {
        for (int row = chunk.count - 1; row >= 0; --row) {
            const int at = row * COLUMNS + lane_index();
            const float g = slopes.d_updates[at];
            const float of_strength = warp_sum(g * slopes.errors[at]);
            if (lane_index() == 0) sums.strengths[row] += of_strength;
            const float d_error = g * chunk.strengths[row];
            slopes.d_updates[at] = d_error;
            for (int i = 0; i < row; ++i) {
                const float weight = chunk.ratios[row * CHUNK + i] * chunk.dots[(CHUNK + row) * CHUNK + i];
                float* before = slopes.d_updates + i * COLUMNS + lane_index();
                *before = fmaf(-weight, d_error, *before);
            }
        }
        for (int row = 0; row < CHUNK; ++row) {
            const float d_error = row < chunk.count ? slopes.d_updates[row * COLUMNS + lane_index()] : 0.0f;
            slopes.d_reads[(CHUNK + row) * COLUMNS + lane_index()] = -d_error;
        }
    }
    BLOCK_SYNC();
}

// Adds what the columns of a tile give to the sums.
DEVICE void add_sums(const Chunk& chunk, const Slopes& slopes, const Sums& sums, int key_dim) {
    for (int i = threadIdx.x; i < 2 * CHUNK * CHUNK; i += THREADS) {
        const float* g = slopes.d_reads + i / CHUNK * COLUMNS;
        const float* update = chunk.updates + i % CHUNK * COLUMNS;
        float sum = 0;
        for (int column = 0; column < COLUMNS; ++column) sum = fmaf(g[column], update[column], sum);
        sums.d_dots[i] += sum;
    }
    for (int row = warp_index(); row < 2 * CHUNK; row += WARPS) {
        const int at = row * COLUMNS + lane_index();
        const float sum = warp_sum(slopes.d_reads[at] * chunk.reads[at]);
        if (lane_index() == 0) sums.of_rows[row] += sum;
    }
    for (int row = warp_index(); row < CHUNK; row += WARPS) {
        const int at = row * COLUMNS + lane_index();
        const float sum = warp_sum(slopes.of_keys[at] * chunk.updates[at]);
        if (lane_index() == 0 && row < chunk.count)
            sums.after[(chunk.count - 1) * CHUNK + row] += last_ratio(chunk, row) * sum;
    }
    float own = 0;
    for (int d = warp_index(); d < key_dim; d += WARPS)
        own = fmaf(slopes.state[d * TILE + lane_index()], slopes.d_state[d * TILE + lane_index()], own);
    own = block_sum(own);
    if (threadIdx.x == 0) *sums.of_state += whole(chunk) * own;
}

// Writes the gradients of queries and keys through the state, d_pairs [2 CHUNK] rows by `place`, added to those of other columns
// if `keep`, and makes d_state [key_dim, value_dim] that of the state before the chunk.
template <typename T, typename Place>
DEVICE void state_backward(const Chunk& chunk, const Slopes& slopes, const Tokens<T>& tokens, int column, bool keep, Place place,
                           float* d_state) {
    for (int i = threadIdx.x; i < 2 * CHUNK * tokens.key_dim; i += THREADS) {
        const int row = i / tokens.key_dim, d = i % tokens.key_dim, token = row % CHUNK;
        if (token >= chunk.count) continue;
        const float* g = slopes.d_reads + row * COLUMNS;
        const float *state = slopes.state + d * TILE, *later = slopes.d_state + d * TILE;
        const float* update = chunk.updates + token * COLUMNS;
        float sum = 0, of_end = 0;
        for (int k = 0; k < COLUMNS; ++k) sum = fmaf(g[k], state[k], sum);
        if (row >= CHUNK)
            for (int k = 0; k < COLUMNS; ++k) of_end = fmaf(update[k], later[k], of_end);
        sum = chunk.totals[token] * sum + last_ratio(chunk, token) * of_end;
        float* to = place(row, d);
        *to = keep ? *to + sum : sum;
    }
    for (int d = warp_index(); d < tokens.key_dim; d += WARPS) {
        float sum = whole(chunk) * slopes.d_state[d * TILE + lane_index()];
        for (int row = 0; row < 2 * CHUNK; ++row) {
            if (row % CHUNK >= chunk.count) continue;
            const float g = chunk.totals[row % CHUNK] * slopes.d_reads[row * COLUMNS + lane_index()];
            sum = fmaf(chunk.pairs[row * chunk.stride + d], g, sum);
        }
        if (column < tokens.value_dim) d_state[int64(d) * tokens.value_dim + column] = sum;
    }
    BLOCK_SYNC();
}

// Adds the gradients of queries and keys through their products, and writes those of the logarithms of the decays to `logs`.
template <typename Place, typename Log>
DEVICE void finish(const Chunk& chunk, const Sums& sums, int key_dim, Place place, Log logs) {
    for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS) {
        const int row = i / CHUNK, column = i % CHUNK;
        const float of_query = sums.d_dots[i] * chunk.ratios[i];
        // The update of a token has the keys before its own.
        const float of_key = column < row ? sums.d_dots[CHUNK * CHUNK + i] * chunk.ratios[i] : 0.0f;
        sums.d_dots[i] = of_query;
        sums.d_dots[CHUNK * CHUNK + i] = of_key;
        sums.after[i] = fmaf(of_key, chunk.dots[CHUNK * CHUNK + i], fmaf(of_query, chunk.dots[i], sums.after[i]));
    }
    BLOCK_SYNC();
    for (int i = threadIdx.x; i < 2 * CHUNK * key_dim; i += THREADS) {
        const int row = i / key_dim, d = i % key_dim, token = row % CHUNK;
        if (token >= chunk.count) continue;
        float sum = 0;
        for (int column = 0; column <= token; ++column)
            sum = fmaf(sums.d_dots[row * CHUNK + column], chunk.pairs[(CHUNK + column) * chunk.stride + d], sum);
        if (row >= CHUNK)
            for (int later = 0; later < 2 * CHUNK; ++later)
                if (later % CHUNK >= token)
                    sum = fmaf(sums.d_dots[later * CHUNK + token], chunk.pairs[later * chunk.stride + d], sum);
        *place(row, d) += sum;
    }
    if (int(threadIdx.x) < chunk.count) {
        const int token = threadIdx.x;
        float sum = *sums.of_state;
        for (int row = token; row < chunk.count; ++row) {
            sum = fmaf(chunk.totals[row], sums.of_rows[row] + sums.of_rows[CHUNK + row], sum);
            for (int i = 0; i < token; ++i) sum += sums.after[row * CHUNK + i];
        }
        logs(token, sum);
    }
    BLOCK_SYNC();
}

// What the backward reads and writes, for the heads of the grid, of which the first is `first_head`.
template <typename T> struct Reverse {
    // [_, heads, key_dim, value_dim] the states before chunks.
    const float* kept;
    // [rows, value_heads, value_dim] gradient of the results.
    const T* g;
    // [runs, heads, key_dim, value_dim] gradients of states, which become those before the runs.
    float* d_states;
    // [rows, value_heads, 2, key_dim] of queries and keys; [rows, value_heads, value_dim]; [rows, 2, value_heads] of strengths
    // and of the logarithms of decays.
    float* d_pairs;
    float* d_values;
    float* d_opened;
};

// Backward of run `base` + blockIdx.x. Its state after all tokens has as its gradient the sum of those of the runs that continue
// it, runs[4 n + 2] to runs[4 n + 3] of `users`, whose backward was before.
template <typename T>
DEVICE void reverse(const Tokens<T>& tokens, const int* runs, const int* users, int base, const Reverse<T>& all, int first_head) {
    DYNAMIC_SHARED(float, memory);
    Slopes slopes;
    slopes.state = take(memory, tokens.key_dim * TILE);
    slopes.d_state = take(memory, tokens.key_dim * TILE);
    slopes.d_reads = take(memory, 2 * CHUNK * COLUMNS);
    slopes.errors = take(memory, CHUNK * COLUMNS);
    slopes.d_updates = take(memory, CHUNK * COLUMNS);
    slopes.of_keys = take(memory, CHUNK * COLUMNS);
    Chunk chunk = chunk_in(memory, tokens.key_dim);
    Sums sums;
    float* begin = memory;
    sums.d_dots = take(memory, 2 * CHUNK * CHUNK);
    sums.after = take(memory, CHUNK * CHUNK);
    sums.of_rows = take(memory, 2 * CHUNK);
    sums.strengths = take(memory, CHUNK);
    sums.of_state = take(memory, 1);
    const int of_sums = int(memory - begin);
    const int64 number = base + int64(blockIdx.x), size = size_of(tokens);
    const int* run = runs + 4 * number;
    const int head = first_head + blockIdx.y;
    float* d_state = all.d_states + (number * gridDim.y + blockIdx.y) * size;
    for (int64 i = threadIdx.x; i < size; i += THREADS) {
        float sum = 0;
        for (int user = users[2 * number]; user < users[2 * number + 1]; ++user)
            sum += all.d_states[(int64(user) * gridDim.y + blockIdx.y) * size + i];
        d_state[i] = sum;
    }
    BLOCK_SYNC();
    const int chunks = (run[1] - run[0] + CHUNK - 1) / CHUNK;
    for (int at = chunks - 1; at >= 0; --at) {
        const int64 first = run[0] + int64(at) * CHUNK;
        for (int i = threadIdx.x; i < of_sums; i += THREADS) begin[i] = 0;
        load_chunk(chunk, tokens, first, min(CHUNK, int(run[1] - first)), head);
        const float* state = all.kept + ((int64(run[3]) + at) * gridDim.y + blockIdx.y) * size;
        auto place = [&](int row, int d) {
            const int64 token = (first + row % CHUNK) * tokens.value_heads + head;
            return all.d_pairs + (token * 2 + row / CHUNK) * tokens.key_dim + d;
        };
        for (int tile = 0; tile < tokens.value_dim; tile += COLUMNS) {
            const int column = tile + lane_index();
            load_slopes(slopes, tokens, state, d_state, all.g, first, chunk.count, head, column);
            read_state(chunk, slopes.state, tokens.key_dim);
            solve(chunk, tokens, first, head, column, slopes.errors);
            updates_backward(chunk, slopes, tokens.key_dim);
            solve_backward(chunk, slopes, sums);
            for (int row = warp_index(); row < chunk.count; row += WARPS) {
                const int64 to = ((first + row) * tokens.value_heads + head) * tokens.value_dim + column;
                if (column < tokens.value_dim) all.d_values[to] = slopes.d_updates[row * COLUMNS + lane_index()];
            }
            add_sums(chunk, slopes, sums, tokens.key_dim);
            state_backward(chunk, slopes, tokens, column, tile > 0, place, d_state);
        }
        finish(chunk, sums, tokens.key_dim, place, [&](int token, float log) {
            const int64 row = (first + token) * 2;
            all.d_opened[row * tokens.value_heads + head] = sums.strengths[token];
            all.d_opened[(row + 1) * tokens.value_heads + head] = log;
        });
    }
}

// The rows firsts[n] to firsts[n + 1] of sequence blockIdx.x, token by token. Its states [value_heads, key_dim, value_dim] are at
// `pool` + slots[n] * pool_stride; a sequence that begins at position 0 begins with zeros.
template <typename T>
DEVICE void decode(const Tokens<T>& tokens, const uint32* positions, const uint32* firsts, const uint32* slots, int64 pool_stride,
                   float* pool, T* out) {
    STATIC_SHARED(float, parts, [2 * WARPS * COLUMNS]);
    constexpr int OWN = MAX_KEY_DIM / WARPS;
    const int head = blockIdx.y, column = blockIdx.z * COLUMNS + lane_index();
    const bool there = column < tokens.value_dim;
    const int64 begin = firsts[blockIdx.x], end = firsts[blockIdx.x + 1];
    float* place = pool + slots[blockIdx.x] * pool_stride + head * size_of(tokens) + column;
    const bool fresh = begin < end && positions[begin] == 0;
    float state[OWN];
    for (int k = 0; k < OWN; ++k) {
        const int d = k * WARPS + warp_index();
        state[k] = there && !fresh && d < tokens.key_dim ? place[int64(d) * tokens.value_dim] : 0.0f;
    }
    for (int64 row = begin; row < end; ++row) {
        const T *query = query_of(tokens, row, head), *key = key_of(tokens, row, head);
        const float decay = decay_of(tokens, row, head);
        float known = 0;
        for (int k = 0; k < OWN; ++k) {
            const int d = k * WARPS + warp_index();
            state[k] *= decay;
            if (d < tokens.key_dim) known = fmaf(load(key[d]), state[k], known);
        }
        parts[threadIdx.x] = known;
        BLOCK_SYNC();
        known = 0;
        for (int warp = 0; warp < WARPS; ++warp) known += parts[warp * COLUMNS + lane_index()];
        const float value = there ? load(value_of(tokens, row, head)[column]) : 0.0f;
        const float update = (value - known) * strength_of(tokens, row, head);
        float read = 0;
        for (int k = 0; k < OWN; ++k) {
            const int d = k * WARPS + warp_index();
            if (d >= tokens.key_dim) continue;
            state[k] = fmaf(load(key[d]), update, state[k]);
            read = fmaf(load(query[d]), state[k], read);
        }
        parts[WARPS * COLUMNS + threadIdx.x] = read;
        BLOCK_SYNC();
        if (warp_index() == 0 && there) {
            read = 0;
            for (int warp = 0; warp < WARPS; ++warp) read += parts[(WARPS + warp) * COLUMNS + lane_index()];
            store(out + (row * tokens.value_heads + head) * tokens.value_dim + column, read);
        }
    }
    for (int k = 0; k < OWN; ++k) {
        const int d = k * WARPS + warp_index();
        if (there && d < tokens.key_dim) place[int64(d) * tokens.value_dim] = state[k];
    }
}

#define INSTANCES(T, suffix)                                                                                                   \
    KERNEL(256, delta_rule_##suffix, const T* heads, const float* opened, int key_heads, int value_heads, int key_dim,         \
           int value_dim, const int* runs, const float* begins, float* ends, int ended, float* kept, int first_head, T* out) { \
        advance(Tokens<T>{heads, opened, key_heads, value_heads, key_dim, value_dim}, runs, begins, ends, ended, kept,         \
                first_head, out);                                                                                              \
    }                                                                                                                          \
    KERNEL(256, delta_rule_backward_##suffix, const T* heads, const float* opened, int key_heads, int value_heads,             \
           int key_dim, int value_dim, const int* runs, const int* users, int base, const float* kept, const T* g,             \
           float* d_states, float* d_pairs, float* d_values, float* d_opened, int first_head) {                                \
        reverse(Tokens<T>{heads, opened, key_heads, value_heads, key_dim, value_dim}, runs, users, base,                       \
                Reverse<T>{kept, g, d_states, d_pairs, d_values, d_opened}, first_head);                                       \
    }                                                                                                                          \
    KERNEL(256, delta_rule_decode_##suffix, const T* heads, const float* opened, int key_heads, int value_heads,               \
           int key_dim, int value_dim, const uint32* positions, const uint32* firsts, const uint32* slots,                     \
           int64 pool_stride, float* pool, T* out) {                                                                           \
        decode(Tokens<T>{heads, opened, key_heads, value_heads, key_dim, value_dim}, positions, firsts, slots, pool_stride,    \
               pool, out);                                                                                                     \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace delta_rule
