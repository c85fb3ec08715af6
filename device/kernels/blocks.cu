// Matrices in quantised blocks, with low-rank factors added: the weights of a unit of a model whose base stays quantised.
//
// Block `tile` writes up to 8 rows of 256 columns of one tensor, a thread a column. `scale B A` is added to the dequantised
// value in f32, a chain of multiply-adds over the rank, and the sum is rounded once. A value of A is read once for 8 rows.
#include "common.cuh"

namespace blocks {
typedef unsigned char byte;

// A tensor of the table. Places in the blocks are in units of 16 bytes.
struct BlockTensor {
    uint32 first_tile, format, rows, columns, place, to_low, to_high, a, b;
};

constexpr int ROWS = 8, COLUMNS = 256;
constexpr uint32 NONE = 0xffffffffu;
// The factors of an embedding are those of its transpose.
constexpr uint32 TRANSPOSED = 1u << 8;

enum Format { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, FLOAT8, MXFP4 };

DEVICE uint32 half_bits(const byte* at) { return uint32(at[0]) | uint32(at[1]) << 8; }

// A number of 16 bits in the IEEE format.
DEVICE float half(const byte* at) {
    uint32 bits = half_bits(at), sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
    if (exponent == 0) {
        float small = float(int(mantissa)) * bits_to_float(0x33800000u);
        return sign ? -small : small;
    }
    if (exponent == 31) return bits_to_float(sign | 0x7f800000u | mantissa << 13);
    return bits_to_float(sign | (exponent + 112u) << 23 | mantissa << 13);
}

DEVICE float single(const byte* at) {
    return bits_to_float(uint32(at[0]) | uint32(at[1]) << 8 | uint32(at[2]) << 16 | uint32(at[3]) << 24);
}

// E4M3: a sign, four bits of exponent, three of mantissa.
DEVICE float float8(uint32 bits) {
    uint32 exponent = bits >> 3 & 15u, mantissa = bits & 7u;
    float magnitude = exponent == 0 ? float(int(mantissa)) * bits_to_float(0x3b000000u)
                                    : bits_to_float((exponent + 120u) << 23 | mantissa << 20);
    return bits & 128u ? -magnitude : magnitude;
}

// E2M1: a sign, two bits of exponent, one of mantissa; under a power of two.
DEVICE float float4(uint32 code, uint32 power) {
    uint32 exponent = code >> 1 & 3u, mantissa = code & 1u;
    float magnitude = exponent == 0 ? 0.5f * float(int(mantissa)) : bits_to_float((exponent + 126u) << 23 | mantissa << 22);
    float scale = bits_to_float(power == 0 ? 1u << 22 : power << 23);
    return (code & 8u ? -magnitude : magnitude) * scale;
}

// The nibble `i` of 32: the low halves of 16 bytes, then the high ones.
DEVICE uint32 nibble(const byte* at, int i) { return i < 16 ? at[i] & 15u : at[i - 16] >> 4; }

// Value `i` of a block of 256 with 8 scales and minima of 6 bits.
DEVICE float q4_k(const byte* block, int i) {
    const byte* packed = block + 4;
    int group = i >> 5;
    uint32 scale, least;
    // The first four of each are whole bytes, whose upper 2 bits belong to the last four.
    if (group < 4) {
        scale = packed[group] & 63u;
        least = packed[group + 4] & 63u;
    } else {
        scale = (packed[group + 4] & 15u) | uint32(packed[group - 4] >> 6) << 4;
        least = uint32(packed[group + 4] >> 4) | uint32(packed[group] >> 6) << 4;
    }
    byte pair = block[16 + (group >> 1) * 32 + (i & 31)];
    uint32 quant = group & 1 ? pair >> 4 : pair & 15u;
    float d = half(block) * float(int(scale)), m = half(block + 2) * float(int(least));
    return d * float(int(quant)) - m;
}

// Value `i` of a block of 256 with 16 scales of 8 bits.
DEVICE float q6_k(const byte* block, int i) {
    int part = i >> 7, quarter = i >> 5 & 3, at = i & 31;
    byte low = block[part * 64 + (quarter & 1) * 32 + at], high = block[128 + part * 32 + at];
    uint32 nibble = quarter & 2 ? low >> 4 : low & 15u, bits = uint32(high >> (2 * quarter) & 3) << 4;
    int scale = (signed char)block[192 + part * 8 + at / 16 + 2 * quarter];
    return half(block + 208) * float(scale) * (float(int(nibble | bits)) - 32.0f);
}

// Value `column` of a row that begins at `row`.
DEVICE float value(uint32 format, const byte* row, int column) {
    switch (format) {
        case F32: return single(row + int64(column) * 4);
        case F16: return half(row + int64(column) * 2);
        case BF16: return bits_to_float(half_bits(row + int64(column) * 2) << 16);
        case Q8_0: {
            const byte* block = row + int64(column >> 5) * 34;
            return float(int((signed char)block[2 + (column & 31)])) * half(block);
        }
        case Q4_0: {
            const byte* block = row + int64(column >> 5) * 18;
            return (float(int(nibble(block + 2, column & 31))) - 8.0f) * half(block);
        }
        case Q4_1: {
            const byte* block = row + int64(column >> 5) * 20;
            return float(int(nibble(block + 4, column & 31))) * half(block) + half(block + 2);
        }
        case Q4_K: return q4_k(row + int64(column >> 8) * 144, column & 255);
        case Q6_K: return q6_k(row + int64(column >> 8) * 210, column & 255);
        case FLOAT8: {
            const byte* block = row + int64(column >> 7) * 132;
            return float8(block[4 + (column & 127)]) * single(block);
        }
        default: {
            const byte* block = row + int64(column >> 5) * 17;
            byte pair = block[1 + (column >> 1 & 15)];
            return float4(column & 1 ? pair >> 4 : pair & 15u, block[0]);
        }
    }
}

DEVICE int64 row_bytes(uint32 format, int columns) {
    switch (format) {
        case F32: return int64(columns) * 4;
        case F16: case BF16: return int64(columns) * 2;
        case Q8_0: return int64(columns >> 5) * 34;
        case Q4_0: return int64(columns >> 5) * 18;
        case Q4_1: return int64(columns >> 5) * 20;
        case Q4_K: return int64(columns >> 8) * 144;
        case Q6_K: return int64(columns >> 8) * 210;
        case FLOAT8: return int64(columns >> 7) * 132;
        default: return int64(columns >> 5) * 17;
    }
}

// The last of `tensors` whose first tile is not behind `tile`.
DEVICE BlockTensor tensor_of(const BlockTensor* table, int tensors, uint32 tile) {
    int low = 0, high = tensors - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (table[middle].first_tile <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return table[low];
}

template <typename T>
DEVICE void dequantize(const BlockTensor* table, int tensors, const byte* bytes, const float* factors, int rank, float scale, T* out) {
    BlockTensor of = tensor_of(table, tensors, blockIdx.x);
    uint32 tile = blockIdx.x - of.first_tile, across = (of.columns + COLUMNS - 1) / COLUMNS;
    int column = int(tile % across) * COLUMNS + threadIdx.x, first = int(tile / across) * ROWS;
    int rows = min(ROWS, int(of.rows) - first);
    if (column >= int(of.columns)) return;
    float sums[ROWS] = {};
    if (of.a != NONE) {
        bool transposed = of.format & TRANSPOSED;
        const float *a = factors + of.a, *b = factors + of.b;
        for (int r = 0; r < rank; ++r) {
            // A transposed product has its columns in B and its rows in A.
            float own = transposed ? b[int64(column) * rank + r] : a[int64(r) * of.columns + column];
            for (int j = 0; j < ROWS; ++j) {
                if (j >= rows) break;
                float other = transposed ? a[int64(r) * of.rows + first + j] : b[int64(first + j) * rank + r];
                sums[j] = fmaf(other, own, sums[j]);
            }
        }
    }
    uint32 format = of.format & ~TRANSPOSED;
    int64 pitch = row_bytes(format, int(of.columns));
    const byte* row = bytes + int64(of.place) * 16 + first * pitch;
    T* to = out + (int64(of.to_high) << 32 | int64(of.to_low)) + int64(first) * of.columns + column;
    for (int j = 0; j < rows; ++j) {
        float stored = value(format, row + j * pitch, column);
        store(to + int64(j) * of.columns, of.a == NONE ? stored : stored + scale * sums[j]);
    }
}
#define INSTANCES(T, suffix)                                                                                               \
    KERNEL(256, dequantize_##suffix, const BlockTensor* table, int tensors, const byte* bytes, const float* factors, int rank, \
           float scale, T* out) {                                                                                         \
        dequantize(table, tensors, bytes, factors, rank, scale, out);                                                     \
    }

INSTANCES(float, f32)
INSTANCES(bf16, bf16)
#undef INSTANCES
}  // namespace blocks
