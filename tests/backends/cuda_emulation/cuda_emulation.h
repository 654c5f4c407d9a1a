// CUDA C++ as ordinary C++: what the kernels use of it, with every thread of a block as a fiber.
//
// The fibers of a block run one after the other, each to its next barrier, in an order that the caller chooses: what
// depends on the order lacks a barrier.

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

struct Index {
    unsigned x;
};

static Index threadIdx, blockIdx, blockDim, gridDim;

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }

inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1u) << (31 - i);
    return reversed;
}

template <class T>
void __stwb(T* to, T value) {
    *to = value;
}

// The operations of arithmetic.cuh, which this takes the place of.

inline float add(float a, float b) { return a + b; }

inline float subtract(float a, float b) { return a - b; }

inline float multiply(float a, float b) { return a * b; }

inline float divide(float a, float b) { return a / b; }

inline float square_root(float a) { return std::sqrt(a); }

inline int to_int(float a) {
    if (std::isnan(a)) return 0;
    return a >= 0x1p31f ? 0x7fffffff : a < -0x1p31f ? -0x7fffffff - 1 : (int)a;
}

inline int round_to_int(float a) { return to_int(std::nearbyint(a)); }

inline int truncate_to_int(float a) { return to_int(a); }

namespace emulation {

constexpr int WARP = 32;
constexpr std::size_t STACK = 64 << 10;

enum class State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

struct Fiber {
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t start;
    std::jmp_buf place;
    bool started = false;
    State state = State::READY;
};

struct Block {
    std::vector<Fiber> fibers;
    std::jmp_buf scheduler;
    int current = 0;
    void (*kernel)(void**) = nullptr;
    void** arguments = nullptr;
};

static Block block;

inline void leave(State state) {
    Fiber& fiber = block.fibers[block.current];
    fiber.state = state;
    // setjmp and longjmp, because swapcontext makes a system call.
    if (_setjmp(fiber.place) == 0) _longjmp(block.scheduler, 1);
}

inline void live() {
    for (;;) {
        block.kernel(block.arguments);
        leave(State::DONE);
    }
}

inline void enter(int thread) {
    Fiber& fiber = block.fibers[thread];
    block.current = thread;
    threadIdx.x = (unsigned)thread;
    if (_setjmp(block.scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK;
    makecontext(&fiber.start, live, 0);
    setcontext(&fiber.start);
}

// Let those threads go on that all wait for each other; return whether there were any.
inline bool release(int first, int last, State barrier) {
    for (int i = first; i < last; i++)
        if (block.fibers[i].state != barrier) return false;
    for (int i = first; i < last; i++) block.fibers[i].state = State::READY;
    return true;
}

// Run the threads of one block; return whether all of them came to the same barriers.
inline bool run_block(const std::vector<int>& order) {
    const int threads = (int)order.size();
    for (int i = 0; i < threads; i++) block.fibers[i].state = State::READY;
    for (;;) {
        for (int thread : order)
            if (block.fibers[thread].state == State::READY) enter(thread);
        bool moved = release(0, threads, State::AT_BLOCK_BARRIER);
        for (int i = 0; !moved && i < threads; i += WARP)
            if (release(i, std::min(i + WARP, threads), State::AT_WARP_BARRIER)) {
                moved = true;
                for (int j = i + WARP; j < threads; j += WARP)
                    release(j, std::min(j + WARP, threads), State::AT_WARP_BARRIER);
            }
        if (moved) continue;
        for (int i = 0; i < threads; i++)
            if (block.fibers[i].state != State::DONE) return false;
        return true;
    }
}

template <class... A, std::size_t... I>
void call_with(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}

template <auto KERNEL_FUNCTION>
struct Call;

template <class... A, void (*KERNEL_FUNCTION)(A...)>
struct Call<KERNEL_FUNCTION> {
    static void run(void** arguments) { call_with(KERNEL_FUNCTION, arguments, std::index_sequence_for<A...>{}); }

    // One letter for each parameter, as NumPy's dtypes have them.
    static std::string letters() { return (std::string() + ... + letter(A{})); }

    static const char* letter(const void*) { return "L"; }
    static const char* letter(long long) { return "l"; }
    static const char* letter(int) { return "i"; }
    static const char* letter(unsigned) { return "I"; }
    static const char* letter(float) { return "f"; }
};

struct Entry {
    void (*run)(void**);
    std::string letters;
};

template <auto KERNEL_FUNCTION>
Entry entry() {
    return {Call<KERNEL_FUNCTION>::run, Call<KERNEL_FUNCTION>::letters()};
}

extern const std::map<std::string, Entry> kernels;

// 0 forwards, 1 backwards, else shuffled.
inline std::vector<int> order_of(int threads, unsigned seed) {
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    if (seed == 1) std::reverse(order.begin(), order.end());
    if (seed > 1)
        for (int i = threads - 1; i > 0; i--) {
            seed = seed * 1664525u + 1013904223u;
            std::swap(order[i], order[(seed >> 8) % (i + 1)]);
        }
    return order;
}

}  // namespace emulation

inline void __syncthreads() { emulation::leave(emulation::State::AT_BLOCK_BARRIER); }

inline void __syncwarp() { emulation::leave(emulation::State::AT_WARP_BARRIER); }

// Return null, or what is wrong.
extern "C" const char* launch(const char* name, unsigned grid, unsigned threads, const char* letters, void** arguments,
                              unsigned order_seed) {
    using namespace emulation;
    const auto found = kernels.find(name);
    if (found == kernels.end()) return "there is no such kernel";
    if (found->second.letters != letters) return found->second.letters.c_str();
    if (threads < 1 || threads > 1024 || threads % WARP != 0) return "a block has 1 to 1024 threads in whole warps";
    if (block.fibers.size() < threads) block.fibers.resize(threads);
    block.kernel = found->second.run;
    block.arguments = arguments;
    blockDim.x = threads;
    gridDim.x = grid;
    const std::vector<int> order = order_of((int)threads, order_seed);
    for (unsigned i = 0; i < grid; i++) {
        blockIdx.x = i;
        if (!run_block(order)) {
            block.fibers.clear();
            return "the threads of a block came to different barriers";
        }
    }
    return nullptr;
}
