// BLAKE3 of memory: chaining values of chunks of 1024 bytes, merged down to a few values, which the host finishes.
//
// Invariant: values belong to subtrees other than the root. The tree of BLAKE3, whose left subtrees are full, results
// from merging neighbours level by level if an unpaired last value moves up unchanged.
//
// One thread per chunk. It reads whole sectors of 32 bytes and executes about 700 instructions per block of 64 bytes,
// so arithmetic bounds the rate and uncoalesced reads do not.
#include "common.cuh"

namespace digest {
constexpr uint32 CHUNK_START = 1, CHUNK_END = 2, PARENT = 4;
constexpr int CHUNK = 1024, BLOCK = 64;

// Eight words, accessed in two halves.
struct alignas(16) Value {
    uint32 words[8];
};

DEVICE Value initial_value() {
    return {{0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au, 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u}};
}

template <int by> DEVICE uint32 rotate_right(uint32 word) { return word >> by | word << (32 - by); }

DEVICE void mix(uint32 (&v)[16], int a, int b, int c, int d, uint32 x, uint32 y) {
    v[a] = v[a] + v[b] + x;
    v[d] = rotate_right<16>(v[d] ^ v[a]);
    v[c] = v[c] + v[d];
    v[b] = rotate_right<12>(v[b] ^ v[c]);
    v[a] = v[a] + v[b] + y;
    v[d] = rotate_right<8>(v[d] ^ v[a]);
    v[c] = v[c] + v[d];
    v[b] = rotate_right<7>(v[b] ^ v[c]);
}

// Compresses one block of a message into `value`.
DEVICE void compress(Value& value, uint32 (&m)[16], uint64 counter, uint32 length, uint32 flags) {
    constexpr int order[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    Value start = initial_value();
    uint32 v[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = value.words[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[8 + i] = start.words[i];
    v[12] = uint32(counter);
    v[13] = uint32(counter >> 32);
    v[14] = length;
    v[15] = flags;
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        mix(v, 0, 4, 8, 12, m[0], m[1]);
        mix(v, 1, 5, 9, 13, m[2], m[3]);
        mix(v, 2, 6, 10, 14, m[4], m[5]);
        mix(v, 3, 7, 11, 15, m[6], m[7]);
        mix(v, 0, 5, 10, 15, m[8], m[9]);
        mix(v, 1, 6, 11, 12, m[10], m[11]);
        mix(v, 2, 7, 8, 13, m[12], m[13]);
        mix(v, 3, 4, 9, 14, m[14], m[15]);
        uint32 before[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) before[i] = m[i];
#pragma unroll
        for (int i = 0; i < 16; ++i) m[i] = before[order[i]];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) value.words[i] = v[i] ^ v[i + 8];
}

struct alignas(16) Four {
    uint32 words[4];
};

// The words of `length` bytes, padded with zeros. `grain` is the alignment of the address: 16, 4 or 1 bytes.
template <int grain> DEVICE void load_block(uint32 (&m)[16], const unsigned char* from, int length) {
    if (grain == 16 && length == BLOCK) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Four four = reinterpret_cast<const Four*>(from)[i];
            for (int j = 0; j < 4; ++j) m[4 * i + j] = four.words[j];
        }
    } else if (grain >= 4 && length == BLOCK) {
#pragma unroll
        for (int i = 0; i < 16; ++i) m[i] = reinterpret_cast<const uint32*>(from)[i];
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            m[i] = 0;
            for (int j = 0; j < 4; ++j)
                if (4 * i + j < length) m[i] |= uint32(from[4 * i + j]) << 8 * j;
        }
    }
}

template <int grain> DEVICE Value chunk_value(const unsigned char* from, int length, uint64 counter) {
    Value value = initial_value();
    uint32 flags = CHUNK_START;
#pragma unroll 1
    for (int at = 0; at < length; at += BLOCK) {
        int here = min(BLOCK, length - at);
        if (at + BLOCK >= length) flags |= CHUNK_END;
        uint32 m[16];
        load_block<grain>(m, from + at, here);
        compress(value, m, counter, uint32(here), flags);
        flags = 0;
    }
    return value;
}

DEVICE Value parent_value(const Value& left, const Value& right) {
    Value value = initial_value();
    uint32 m[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        m[i] = left.words[i];
        m[8 + i] = right.words[i];
    }
    compress(value, m, 0, BLOCK, PARENT);
    return value;
}

template <int grain> DEVICE void chunks(const unsigned char* from, int64 length, uint64 counter, Value* values) {
    int64 chunk = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    int64 left = length - chunk * CHUNK;
    int here = int(min(left, int64(CHUNK)));
    if (left > 0) values[chunk] = chunk_value<grain>(from + chunk * CHUNK, here, counter + uint64(chunk));
}
}  // namespace digest

// values [ceil(length / 1024)]: chaining values of the chunks of `length` bytes; the first chunk has index `counter`.
KERNEL(128, digest_chunks, const unsigned char* from, int64 length, uint64 counter, uint32* values) {
    auto* out = reinterpret_cast<digest::Value*>(values);
    uint64 address = reinterpret_cast<uint64>(from);
    if (address % 16 == 0)
        digest::chunks<16>(from, length, counter, out);
    else if (address % 4 == 0)
        digest::chunks<4>(from, length, counter, out);
    else
        digest::chunks<1>(from, length, counter, out);
}

// out [ceil(count / 8)]: values [count] merged over three levels.
KERNEL(128, digest_parents, const uint32* values, int count, uint32* out) {
    int group = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (8 * int64(group) >= count) return;
    const auto* from = reinterpret_cast<const digest::Value*>(values) + 8 * int64(group);
    int left = min(8, count - 8 * group);
    digest::Value level[8];
    for (int i = 0; i < left; ++i) level[i] = from[i];
    for (int width = left; width > 1; width = (width + 1) / 2) {
#pragma unroll 1
        for (int i = 0; i < width / 2; ++i) level[i] = digest::parent_value(level[2 * i], level[2 * i + 1]);
        if (width % 2 == 1) level[width / 2] = level[width - 1];
    }
    reinterpret_cast<digest::Value*>(out)[group] = level[0];
}
