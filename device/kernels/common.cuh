// Common definitions of all kernels: CUDA C++ without headers, for nvrtc and for the emulator on the CPU.
//
// A kernel is declared with KERNEL(threads, name, parameters...): `threads` per block, and the `name` of its launches.
// Storage types are f32 (float) and bf16; arithmetic is f32. Memory indices have 64 bits.
#pragma once

typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

#ifdef RLRUN_EMULATED
#include "emulator.h"
#define DEVICE static inline
#define WARP_SYNC() emulator::sync_warp()
#define BLOCK_SYNC() emulator::sync_block()
#define INFINITE __builtin_inff()
#else
#define KERNEL(threads, name, ...) extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
// Dynamic shared memory, of the size in the launch.
#define DYNAMIC_SHARED(type, name)                                 \
    extern __shared__ __align__(16) unsigned char rlrun_dynamic[]; \
    type* name = reinterpret_cast<type*>(rlrun_dynamic)
// Static shared memory: STATIC_SHARED(float, sums, [32]).
#define STATIC_SHARED(type, name, size) __shared__ type name size
#define DEVICE static __device__ __forceinline__
#define WARP_SYNC() __syncwarp()
#define BLOCK_SYNC() __syncthreads()
#define INFINITE __int_as_float(0x7f800000)
#endif

// Positions per page of the KV cache.
constexpr int PAGE = 16;

// The upper half of an f32, rounded to nearest, ties to even.
struct bf16 {
    unsigned short bits;
};

DEVICE float bits_to_float(uint32 bits) {
#ifdef RLRUN_EMULATED
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
#else
    return __uint_as_float(bits);
#endif
}

DEVICE uint32 float_to_bits(float value) {
#ifdef RLRUN_EMULATED
    uint32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
#else
    return __float_as_uint(value);
#endif
}

DEVICE float load(float value) { return value; }
DEVICE float load(bf16 value) { return bits_to_float(uint32(value.bits) << 16); }

// Rounds to the nearest bf16; NaN stays NaN.
DEVICE bf16 to_bf16(float value) {
    uint32 bits = float_to_bits(value);
    uint32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    if ((bits & 0x7fffffffu) > 0x7f800000u) rounded = bits | 0x400000u;
    bf16 result;
    result.bits = (unsigned short)(rounded >> 16);
    return result;
}

DEVICE void store(float* to, float value) { *to = value; }
DEVICE void store(bf16* to, float value) { *to = to_bf16(value); }

// `n` contiguous values, accessed together.
template <typename T, int n> struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Pack {
    T at[n];
};

template <int n, typename T> DEVICE Pack<T, n> load_pack(const T* from) { return *reinterpret_cast<const Pack<T, n>*>(from); }
template <int n, typename T> DEVICE void store_pack(T* to, const Pack<T, n>& pack) {
    *reinterpret_cast<Pack<T, n>*>(to) = pack;
}

// Whether 16 bytes at `pointer` can be accessed together.
DEVICE bool aligned(const void* pointer) { return (reinterpret_cast<uint64>(pointer) & 15u) == 0; }

DEVICE float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

// exp with an error of about 2 units in the last place for arguments near zero.
DEVICE float fast_exp(float value) {
#ifdef RLRUN_EMULATED
    return expf(value);
#else
    return __expf(value);
#endif
}

// Two values packed for the tensor cores; `low` in the lower half.
DEVICE uint32 pack_bf16(float low, float high) {
#ifdef RLRUN_EMULATED
    return uint32(to_bf16(low).bits) | uint32(to_bf16(high).bits) << 16;
#else
    uint32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#endif
}

// Index in the calling thread's warp.
DEVICE uint32 lane_index() { return threadIdx.x & 31u; }
DEVICE uint32 warp_index() { return threadIdx.x >> 5; }

#ifdef RLRUN_EMULATED
template <typename T> DEVICE T shuffle_xor(T value, int mask) { return emulator::shuffle(value, emulator::lane() ^ mask); }
template <typename T> DEVICE T shuffle(T value, int from) { return emulator::shuffle(value, from); }
template <typename T> DEVICE T shuffle_up(T value, int by) {
    int lane = emulator::lane();
    return emulator::shuffle(value, lane >= by ? lane - by : lane);
}
#else
template <typename T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
template <typename T> DEVICE T shuffle(T value, int from) { return __shfl_sync(0xffffffffu, value, from); }
template <typename T> DEVICE T shuffle_up(T value, int by) { return __shfl_up_sync(0xffffffffu, value, by); }
#endif

// Sum over a warp; every lane gets the result.
template <typename T> DEVICE T warp_sum(T value) {
    for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
    return value;
}

DEVICE float warp_max(float value) {
    for (int mask = 16; mask > 0; mask >>= 1) value = fmaxf(value, shuffle_xor(value, mask));
    return value;
}

// Sum over a block of at most 32 whole warps; every thread gets the result. The order of the additions is fixed.
template <typename T> DEVICE T block_sum(T value) {
    STATIC_SHARED(T, parts, [32]);
    value = warp_sum(value);
    if (lane_index() == 0) parts[warp_index()] = value;
    BLOCK_SYNC();
    T sum = parts[0];
    for (uint32 warp = 1; warp < (blockDim.x >> 5); ++warp) sum += parts[warp];
    BLOCK_SYNC();
    return sum;
}

DEVICE float block_max(float value) {
    STATIC_SHARED(float, parts, [32]);
    value = warp_max(value);
    if (lane_index() == 0) parts[warp_index()] = value;
    BLOCK_SYNC();
    float top = parts[0];
    for (uint32 warp = 1; warp < (blockDim.x >> 5); ++warp) top = fmaxf(top, parts[warp]);
    BLOCK_SYNC();
    return top;
}

// Asynchronous copy of 16 bytes from global to shared memory, both aligned to 16 bytes; complete after `copy_wait<n>`
// (all but the newest `n` groups) and BLOCK_SYNC. Reads `valid` bytes and fills the rest with zeros.
DEVICE void copy_async(void* to, const void* from, uint32 valid) {
#ifdef RLRUN_EMULATED
    __builtin_memset(to, 0, 16);
    __builtin_memcpy(to, from, valid);
#else
    uint32 address = (uint32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid));
#endif
}
DEVICE void copy_commit() {
#ifndef RLRUN_EMULATED
    asm volatile("cp.async.commit_group;");
#endif
}
template <int pending> DEVICE void copy_wait() {
#ifndef RLRUN_EMULATED
    asm volatile("cp.async.wait_group %0;" ::"n"(pending));
#endif
}

// c [16, 8] += a [16, 16] * b [16, 8] by one warp on the tensor cores, bf16 with f32 accumulators (PTX mma.m16n8k16).
// With g = lane / 4 and t = lane % 4 a lane has
//   a: (g, 2t..2t+1), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..)  pairs of neighbours in a row
//   b: (2t..2t+1, g), (2t + 8.., g)                                    pairs of neighbours in a column
//   c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
DEVICE void mma(float (&c)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
#ifdef RLRUN_EMULATED
    emulator::mma(c, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Operand `a` of `mma`: 16 rows of 16 values in shared memory, rows `stride` values apart (a multiple of 8).
DEVICE void load_a(uint32 (&a)[4], const bf16* from, int stride) {
#ifdef RLRUN_EMULATED
    int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < 4; ++i)
        __builtin_memcpy(&a[i], from + (g + (i & 1) * 8) * stride + 2 * t + (i >> 1) * 8, 4);
#else
    uint32 lane = lane_index();
    uint32 address = (uint32)__cvta_generic_to_shared(from + (lane & 15u) * stride + (lane >> 4) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
#endif
}

// Operand `a` as the transpose of 16 rows of 16 values in shared memory.
DEVICE void load_a_transposed(uint32 (&a)[4], const bf16* from, int stride) {
#ifdef RLRUN_EMULATED
    int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        int row = g + (i & 1) * 8, column = 2 * t + (i >> 1) * 8;
        a[i] = uint32(from[column * stride + row].bits) | uint32(from[(column + 1) * stride + row].bits) << 16;
    }
#else
    uint32 lane = lane_index();
    uint32 address = (uint32)__cvta_generic_to_shared(from + ((lane & 7u) + (lane >> 4) * 8) * stride + ((lane >> 3) & 1u) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address));
#endif
}

// Operand `b` of `mma` from 8 rows of 16 values in shared memory, which are its columns.
DEVICE void load_b(uint32 (&b)[2], const bf16* from, int stride) {
#ifdef RLRUN_EMULATED
    int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < 2; ++i) __builtin_memcpy(&b[i], from + g * stride + 2 * t + i * 8, 4);
#else
    uint32 lane = lane_index();
    uint32 address = (uint32)__cvta_generic_to_shared(from + (lane & 7u) * stride + ((lane >> 3) & 1u) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(address));
#endif
}

// Two operands `b` of `mma` from 16 rows of 16 values in shared memory, which are the columns of both, one after the other.
DEVICE void load_b_pair(uint32 (&b)[2][2], const bf16* from, int stride) {
#ifdef RLRUN_EMULATED
    load_b(b[0], from, stride);
    load_b(b[1], from + 8 * stride, stride);
#else
    uint32 lane = lane_index();
    uint32 address = (uint32)__cvta_generic_to_shared(from + ((lane & 7u) + (lane >> 4) * 8) * stride + ((lane >> 3) & 1u) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0][0]), "=r"(b[0][1]), "=r"(b[1][0]), "=r"(b[1][1]) : "r"(address));
#endif
}

// Operand `b` of `mma` from 16 rows of 8 values in shared memory.
DEVICE void load_b_rows(uint32 (&b)[2], const bf16* from, int stride) {
#ifdef RLRUN_EMULATED
    int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int i = 0; i < 2; ++i) {
        int row = 2 * t + i * 8;
        b[i] = uint32(from[row * stride + g].bits) | uint32(from[(row + 1) * stride + g].bits) << 16;
    }
#else
    uint32 address = (uint32)__cvta_generic_to_shared(from + (lane_index() & 15u) * stride);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(address));
#endif
}

// Two operands `b` of `mma` from 16 rows of 16 values in shared memory, the columns of one after those of the other.
DEVICE void load_b_rows_pair(uint32 (&b)[2][2], const bf16* from, int stride) {
#ifdef RLRUN_EMULATED
    load_b_rows(b[0], from, stride);
    load_b_rows(b[1], from + 8, stride);
#else
    uint32 lane = lane_index();
    uint32 address = (uint32)__cvta_generic_to_shared(from + (lane & 15u) * stride + (lane >> 4) * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0][0]), "=r"(b[0][1]), "=r"(b[1][0]), "=r"(b[1][1]) : "r"(address));
#endif
}
