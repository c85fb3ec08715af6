// CUDA on the CPU: the subset that the kernels use, so that their source is tested without a GPU.
//
// The threads of a block are fibers of one host thread, which run from barrier to barrier in turn; blocks run one after
// the other. Invariant: a kernel that is correct under CUDA's rules gives the same results here; one in which some
// threads skip a barrier ends the process with a message instead of a deadlock.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

struct Dimensions {
    unsigned x, y, z;
};

namespace emulator {
// Index of the running fiber.
extern __thread Dimensions thread_index, block_index, block_size, grid_size;

int lane();
void sync_warp();
void sync_block();
void* dynamic_shared();
// 64 bytes per lane of the calling warp, double-buffered: all lanes can read what a lane wrote before a `sync_warp`
// until the call after the next one.
unsigned char* exchange();

template <typename T> T shuffle(T value, int from) {
    static_assert(sizeof(T) <= 64, "a lane exchanges 64 bytes at most");
    unsigned char* room = exchange();
    std::memcpy(room + 64 * lane(), &value, sizeof(T));
    sync_warp();
    T other;
    std::memcpy(&other, room + 64 * (from & 31), sizeof(T));
    return other;
}

void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

using Call = void (*)(void** arguments);
struct Registered {
    Registered(const char* name, unsigned threads, Call call);
};

template <typename F> struct Unpack;
template <typename... Parameters> struct Unpack<void (*)(Parameters...)> {
    template <auto kernel, std::size_t... i> static void call(void** arguments, std::index_sequence<i...>) {
        kernel(*static_cast<Parameters*>(arguments[i])...);
    }
    template <auto kernel> static void call(void** arguments) {
        call<kernel>(arguments, std::index_sequence_for<Parameters...>{});
    }
};
}  // namespace emulator

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)
#define __restrict__ __restrict

#define KERNEL(threads, name, ...)                                                                      \
    static void name(__VA_ARGS__);                                                                      \
    static emulator::Registered registered_##name(#name, threads,                                       \
                                                  &emulator::Unpack<decltype(&name)>::call<&name>);     \
    static void name(__VA_ARGS__)
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(emulator::dynamic_shared())
#define STATIC_SHARED(type, name, size) alignas(16) static thread_local type name size

static inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
template <typename T> static inline T min(T a, T b) { return a < b ? a : b; }
template <typename T> static inline T max(T a, T b) { return a > b ? a : b; }
// Only one fiber runs at a time.
template <typename T> static inline T atomicAdd(T* to, T value) {
    T before = *to;
    *to += value;
    return before;
}
template <typename T> static inline T atomicMax(T* to, T value) {
    T before = *to;
    if (value > before) *to = value;
    return before;
}
