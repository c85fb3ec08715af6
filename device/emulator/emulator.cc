// Fibers, the matrix product, and the registry of kernels by name.

#include "emulator.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace emulator {
__thread Dimensions thread_index, block_index, block_size, grid_size;

namespace {
constexpr std::size_t STACK = 128 << 10;

[[noreturn]] void fail(const char* message) {
    std::fprintf(stderr, "emulator: %s\n", message);
    std::abort();
}

#if defined(__x86_64__) && defined(__linux__)
// Where a suspended stack goes on: its stack pointer, below the registers that a call preserves. A kernel suspends its fibers
// millions of times, and functions of the C library would take half of the emulator's time for it.
using Context = void*;

__attribute__((naked, noinline)) void switch_context(Context*, Context*) {
    asm volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n"
        "movq (%rsi), %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
        "ret\n");
}

// A context that calls `entry`, which never returns.
void make_context(Context* context, void* stack, void (*entry)()) {
    // Six registers, the address that the switch returns to, and that of a caller, which there is not. The stack is aligned as
    // after a call.
    void** top = reinterpret_cast<void**>(static_cast<char*>(stack) + STACK) - 8;
    top[6] = reinterpret_cast<void*>(entry);
    *context = top;
}
#else
// The same by functions of the C library.
struct Context {
    jmp_buf state;
    ucontext_t first;
    bool started = false;
};

void switch_context(Context* from, Context* to) {
    from->started = true;
    if (_setjmp(from->state) != 0) return;
    if (to->started) _longjmp(to->state, 1);
    setcontext(&to->first);
    fail("a fiber does not start");
}

void make_context(Context* context, void* stack, void (*entry)()) {
    getcontext(&context->first);
    context->first.uc_stack.ss_sp = stack;
    context->first.uc_stack.ss_size = STACK;
    context->first.uc_link = nullptr;
    makecontext(&context->first, entry, 0);
}
#endif

struct Barrier {
    unsigned expected = 0, arrived = 0;
    std::uint64_t passed = 0;

    void arrive() {
        if (++arrived == expected) release();
    }
    void leave() {
        --expected;
        if (expected > 0 && arrived == expected) release();
    }
    void release() {
        arrived = 0;
        ++passed;
    }
};

struct Warp {
    Barrier barrier;
    unsigned char rooms[2][32 * 64];
};

// A thread of a block. Its stack serves all blocks of a host thread.
struct Fiber {
    Context context;
    void* stack = nullptr;
    Dimensions index;
    unsigned number;
    unsigned exchanges;
    bool ended;
};

// Scheduler state of one host thread that launches kernels.
struct Block {
    // Their contexts must not move.
    std::deque<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    Context scheduler;
    Fiber* running = nullptr;
    Call call = nullptr;
    void** arguments = nullptr;
    std::vector<unsigned char> shared;
    // Whether a fiber has made progress since the last check.
    bool moved = false;
    // Blocks so far. Every second block runs its threads in reverse order, which exposes missing barriers.
    unsigned count = 0;

    ~Block() {
        for (Fiber& fiber : fibers) munmap(fiber.stack, STACK);
    }
};

// That of this host thread while it launches. A variable with a constructor would be checked at every use.
__thread Block* block;

// Yields to the scheduler.
void yield() {
    Fiber& fiber = *block->running;
    switch_context(&fiber.context, &block->scheduler);
    thread_index = fiber.index;
}

void wait(Barrier& barrier) {
    std::uint64_t before = barrier.passed;
    barrier.arrive();
    block->moved = true;
    while (barrier.passed == before) yield();
}

// Runs a thread of each block.
void life() {
    Fiber& fiber = *block->running;
    for (;;) {
        thread_index = fiber.index;
        block->call(block->arguments);
        fiber.ended = true;
        block->moved = true;
        block->warps[fiber.number / 32].barrier.leave();
        block->barrier.leave();
        switch_context(&fiber.context, &block->scheduler);
    }
}

void run_block() {
    unsigned threads = block_size.x * block_size.y * block_size.z;
    while (block->fibers.size() < threads) {
        void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) fail("no memory for the stack of a thread");
        Fiber& fiber = block->fibers.emplace_back();
        fiber.stack = stack;
        make_context(&fiber.context, stack, life);
    }
    block->warps.resize((threads + 31) / 32);
    for (unsigned w = 0; w < block->warps.size(); ++w) {
        Barrier barrier;
        barrier.expected = w * 32 + 32 <= threads ? 32 : threads - w * 32;
        block->warps[w].barrier = barrier;
    }
    block->barrier = Barrier();
    block->barrier.expected = threads;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = block->fibers[i];
        fiber.index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
        fiber.number = i;
        fiber.exchanges = 0;
        fiber.ended = false;
    }
    bool backwards = block->count++ & 1u;
    unsigned left = threads;
    while (left > 0) {
        block->moved = false;
        left = 0;
        for (unsigned turn = 0; turn < threads; ++turn) {
            unsigned i = backwards ? threads - 1 - turn : turn;
            Fiber& fiber = block->fibers[i];
            if (fiber.ended) continue;
            block->running = &fiber;
            switch_context(&block->scheduler, &fiber.context);
            left += !fiber.ended;
        }
        if (left > 0 && !block->moved) fail("some threads of a block wait at a barrier that the others do not come to");
    }
}

struct Known {
    unsigned threads;
    Call call;
};

std::map<std::string, Known>& kernels() {
    static std::map<std::string, Known> known;
    return known;
}

float widen(std::uint16_t bits) {
    std::uint32_t wide = std::uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

std::uint16_t narrow(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return std::uint16_t((bits | 0x400000u) >> 16);
    return std::uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
}  // namespace

int lane() { return int(block->running->number & 31u); }
void sync_warp() { wait(block->warps[block->running->number / 32].barrier); }
void sync_block() { wait(block->barrier); }
void* dynamic_shared() { return block->shared.data(); }

unsigned char* exchange() {
    Fiber& fiber = *block->running;
    return block->warps[fiber.number / 32].rooms[fiber.exchanges++ & 1u];
}

void mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    unsigned char* room = exchange();
    unsigned char* mine = room + 64 * lane();
    std::memcpy(mine, a, 16);
    std::memcpy(mine + 16, b, 8);
    sync_warp();
    auto half = [&](int owner, int offset, int which) {
        std::uint16_t bits;
        std::memcpy(&bits, room + 64 * owner + offset + 2 * which, 2);
        return widen(bits);
    };
    int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < 4; ++i) {
        int row = g + (i >= 2 ? 8 : 0), column = 2 * t + (i & 1);
        float sum = c[i];
        for (int k = 0; k < 16; ++k) {
            int pair = (k % 8) / 2, upper = k >= 8;
            float left = half((row % 8) * 4 + pair, 4 * ((row >= 8) + 2 * upper), k & 1);
            float right = half(column * 4 + pair, 16 + 4 * upper, k & 1);
            sum += left * right;
        }
        c[i] = sum;
    }
}

Registered::Registered(const char* name, unsigned threads, Call call) { kernels()[name] = {threads, call}; }
}  // namespace emulator

extern "C" {
// 0, or why the kernel was not run: 1 for an unknown name, 2 for a wrong block size.
int rlrun_emulator_launch(const char* name, const unsigned* grid, unsigned threads, std::size_t shared, void** arguments) {
    using namespace emulator;
    auto found = kernels().find(name);
    if (found == kernels().end()) return 1;
    if (found->second.threads < threads || threads == 0) return 2;
    static thread_local Block own;
    block = &own;
    block->call = found->second.call;
    block->arguments = arguments;
    block->shared.resize(shared + 16);
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {threads, 1, 1};
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0]; ++x) {
                block_index = {x, y, z};
                run_block();
            }
    return 0;
}

// c [m, n] = scale * op(a) op(b) + keep * c, row-major; op(a) is [m, k], op(b) is [k, n]. `narrow_inputs` and
// `narrow_output` say whether values are bf16.
void rlrun_emulator_product(std::size_t m, std::size_t n, std::size_t k, const void* a, std::size_t a_stride, int a_transposed,
                            const void* b, std::size_t b_stride, int b_transposed, void* c, std::size_t c_stride,
                            int narrow_inputs, int narrow_output, float scale, float keep) {
    auto value = [&](const void* from, std::size_t at) {
        return narrow_inputs ? emulator::widen(static_cast<const std::uint16_t*>(from)[at]) : static_cast<const float*>(from)[at];
    };
    std::vector<float> right(k * n), row(n), left(k);
    for (std::size_t p = 0; p < k; ++p)
        for (std::size_t j = 0; j < n; ++j) right[p * n + j] = value(b, b_transposed ? j * b_stride + p : p * b_stride + j);
    for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t p = 0; p < k; ++p) left[p] = value(a, a_transposed ? p * a_stride + i : i * a_stride + p);
        std::fill(row.begin(), row.end(), 0.0f);
        for (std::size_t p = 0; p < k; ++p)
            for (std::size_t j = 0; j < n; ++j) row[j] += left[p] * right[p * n + j];
        for (std::size_t j = 0; j < n; ++j) {
            std::size_t at = i * c_stride + j;
            if (narrow_output) {
                auto* out = static_cast<std::uint16_t*>(c);
                out[at] = emulator::narrow(scale * row[j] + (keep != 0 ? keep * emulator::widen(out[at]) : 0));
            } else {
                auto* out = static_cast<float*>(c);
                out[at] = scale * row[j] + (keep != 0 ? keep * out[at] : 0);
            }
        }
    }
}
}
