// The language-model head after its matrix product: log-probability of the target token and entropy from rows of
// logits, and the gradient of the logits.
//
// One block per row. Both directions read the row once.
#include "common.cuh"
#include "distribution.cuh"

namespace head {
using distribution::Distribution;
using distribution::Row;

// Targets of the rows, from the first row of the launch.
struct Targets {
    const uint32* tokens;
    const float* temperatures;
    // Row i is truncated to ids[starts[i]..starts[i + 1]], ascending; an empty range means all tokens.
    const uint64* starts;
    const uint32* ids;
};

DEVICE Row row_of_block(const float* logits, int vocabulary, const Targets& targets) {
    const float* row = logits + int64(blockIdx.x) * vocabulary;
    uint64 begin = targets.starts[blockIdx.x];
    int kept = int(targets.starts[blockIdx.x + 1] - begin);
    if (kept > 0) return {row, targets.ids + begin, kept};
    return {row, nullptr, vocabulary};
}

// Derivatives of a loss by the results of `predict` for a row.
struct Slopes {
    float logprob, entropy;
};

// d loss / d logit of a candidate other than the target: d log p_t / d z_i = -p_i and d H / d z_i = -p_i (log p_i + H),
// both times the scale. With a zero derivative by the entropy its term is skipped, even if it is NaN.
DEVICE float slope_of(float z, const Distribution& of, const Slopes& slopes) {
    float log_p = distribution::above(z, of.top, of.scale) - of.log_sum;
    float by = slopes.logprob;
    if (slopes.entropy != 0) by = fmaf(slopes.entropy, log_p + of.entropy, by);
    // Rounded before it is added, so that the slope of the only candidate of a row is zero.
    return -__fmul_rn(fast_exp(log_p) * by, of.scale);
}

template <typename T> struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

template <typename T> DEVICE void write_four(T* out, int slot, int count, bool aligned, const float (&values)[4]) {
    if (aligned && slot + 4 <= count) {
        Four<T> four;
        for (int j = 0; j < 4; ++j) store(&four.at[j], values[j]);
        *reinterpret_cast<Four<T>*>(out + slot) = four;
    } else {
        for (int j = 0; j < 4; ++j)
            if (slot + j < count) store(out + slot + j, values[j]);
    }
}

template <typename T>
DEVICE void write_slopes(const Row& row, int vocabulary, uint32 token, const Distribution& of, const Slopes& slopes,
                         T* out) {
    bool aligned = reinterpret_cast<uint64>(out) % sizeof(Four<T>) == 0;
    float hit = __fmul_rn(slopes.logprob, of.scale);
    if (!row.ids) {
        distribution::visit_part(row, [&](int slot, const float(&z)[4]) {
            float values[4];
            for (int j = 0; j < 4; ++j) values[j] = slope_of(z[j], of, slopes) + (uint32(slot + j) == token ? hit : 0.0f);
            write_four(out, slot, row.count, aligned, values);
        });
        return;
    }
    const float zeros[4] = {};
    for (int slot = 4 * int(threadIdx.x); slot < vocabulary; slot += 4 * distribution::THREADS)
        write_four(out, slot, vocabulary, aligned, zeros);
    BLOCK_SYNC();
    for (int slot = int(threadIdx.x); slot < row.count; slot += distribution::THREADS) {
        uint32 id = row.ids[slot];
        store(out + id, slope_of(row.logits[id], of, slopes) + (id == token ? hit : 0.0f));
    }
}

// Results of a row: the first two are asked for, the others are of its distribution.
struct Predicted {
    float logprob, entropy, top, log_sum;
};

template <typename T>
DEVICE void predict_backward(const float* logits, int vocabulary, const Targets& targets, const Predicted* predicted,
                             const Slopes* slopes, T* out) {
    Row row = row_of_block(logits, vocabulary, targets);
    const Predicted known = predicted[blockIdx.x];
    // The sum of weights is not needed.
    const Distribution of = {known.top, 1.0f / targets.temperatures[blockIdx.x], 0.0f, known.log_sum, known.entropy};
    T* to = out + int64(blockIdx.x) * vocabulary;
    write_slopes(row, vocabulary, targets.tokens[blockIdx.x], of, slopes[blockIdx.x], to);
}
}  // namespace head

// out [n, 4]: log-probability of the target token and entropy, nats; top logit and log of the sum of weights. starts [n + 1] may be
// part of a longer list.
KERNEL(512, predict, const float* logits, int vocabulary, const uint32* tokens, const float* temperatures,
       const uint64* starts, const uint32* ids, float* out) {
    distribution::Row row = head::row_of_block(logits, vocabulary, {tokens, temperatures, starts, ids});
    float masses[distribution::WARPS];
    distribution::Distribution of = distribution::row_distribution(row, 1.0f / temperatures[blockIdx.x], masses);
    if (threadIdx.x > 0) return;
    const float logprob = distribution::log_probability(of, row.logits[tokens[blockIdx.x]]);
    reinterpret_cast<head::Predicted*>(out)[blockIdx.x] = {logprob, of.entropy, of.top, of.log_sum};
}

// predicted [n, 4]: the result of `predict`; slopes [n, 2]: derivatives of a loss by log-probability and entropy; out [n, vocabulary]:
// by the logits.
#define PREDICT_BACKWARD(suffix, type)                                                                                  \
    KERNEL(512, predict_backward_##suffix, const float* logits, int vocabulary, const uint32* tokens,                   \
           const float* temperatures, const uint64* starts, const uint32* ids, const float* predicted,                  \
           const float* slopes, type* out) {                                                                            \
        head::predict_backward(logits, vocabulary, {tokens, temperatures, starts, ids},                                 \
                               reinterpret_cast<const head::Predicted*>(predicted),                                     \
                               reinterpret_cast<const head::Slopes*>(slopes), out);                                     \
    }
PREDICT_BACKWARD(f32, float)
PREDICT_BACKWARD(bf16, bf16)
