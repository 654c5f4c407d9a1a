// How threads share buckets, and the reductions over a bucket.
//
// In a bucket of B elements, padding included, W = B / 8, and byte j of a bit plane belongs to the elements d * W + j.
// A group is four neighbouring bytes j and their 32 elements. A lane is one of the threads that share a bucket. It
// works on one group at a time, with eight loads of 16 bytes, and packs its codes without other lanes. Buckets of 8 and
// 16 elements fill only a part of a group. A block handles one bucket or several small ones. LARGE buckets have more
// groups than a block has lanes, and every pass reads them again.

constexpr int PLANES = 8;
constexpr int MOST_LANES = 512;
constexpr int WARP = 32;

#define KERNEL extern "C" __global__ void __launch_bounds__(MOST_LANES)

struct Bucket {
    long long index;
    long long start;
    int filled;  // elements without padding; 0 past the end of the vector
    int width;
    int groups;
    int bytes;  // bytes of a group in one plane
};

__device__ inline Bucket bucket_at(long long index, long long size, int bucket_size) {
    Bucket bucket;
    bucket.index = index;
    bucket.start = index * bucket_size;
    const long long left = size - bucket.start;
    bucket.filled = left >= bucket_size ? bucket_size : left > 0 ? (int)left : 0;
    bucket.width = bucket.filled <= 8 ? 1 : 1 << (29 - __clz(bucket.filled - 1));  // of the next power of two
    bucket.groups = bucket.filled == 0 ? 0 : bucket.width < 4 ? 1 : bucket.width / 4;
    bucket.bytes = bucket.width < 4 ? bucket.width : 4;
    return bucket;
}

__device__ inline int groups_of(int bucket_size) { return bucket_size < 32 ? 1 : bucket_size / 32; }

// Whether an element of a group exists, that is, is not padding.
__device__ inline bool is_filled(const Bucket& bucket, int group, int plane, int v) {
    return group < bucket.groups && v < bucket.bytes && plane * bucket.width + 4 * group + v < bucket.filled;
}

// Whether a bucket has no padding and its groups are aligned for reading four neighbours at once.
template <class X>
__device__ inline bool in_fours(const Bucket& bucket, const X* x) {
    return bucket.bytes == 4 && bucket.filled == 8 * bucket.width && is_aligned(x);
}

// The values of a group, 0 for padding.
template <class X>
__device__ inline void load_group(const X* x, const Bucket& bucket, int group, float (&values)[PLANES][4]) {
    const X* from = x + bucket.start + 4 * group;
    if (in_fours(bucket, x) && group < bucket.groups) {
#pragma unroll
        for (int d = 0; d < PLANES; d++) load_four(from + d * bucket.width, values[d]);
        return;
    }
#pragma unroll
    for (int d = 0; d < PLANES; d++)
#pragma unroll
        for (int v = 0; v < 4; v++)
            values[d][v] = is_filled(bucket, group, d, v) ? to_float(from[d * bucket.width + v]) : 0.0f;
}

template <class X>
__device__ inline void store_group(X* x, const Bucket& bucket, int group, const float (&values)[PLANES][4]) {
    X* to = x + bucket.start + 4 * group;
    if (in_fours(bucket, x) && group < bucket.groups) {
#pragma unroll
        for (int d = 0; d < PLANES; d++) store_four(to + d * bucket.width, values[d]);
        return;
    }
#pragma unroll
    for (int d = 0; d < PLANES; d++)
#pragma unroll
        for (int v = 0; v < 4; v++)
            if (is_filled(bucket, group, d, v)) round_to(values[d][v], to[d * bucket.width + v]);
}

// Store decoded values in the dtype of the output, or add them to it.
template <class X>
__device__ inline void put_group(X* out, const Bucket& bucket, int group, float (&values)[PLANES][4], int accumulate) {
    if (accumulate) {
        float old[PLANES][4];
        load_group(out, bucket, group, old);
#pragma unroll
        for (int d = 0; d < PLANES; d++)
#pragma unroll
            for (int v = 0; v < 4; v++) {
                X rounded;
                round_to(values[d][v], rounded);
                values[d][v] = add(old[d][v], to_float(rounded));
            }
    }
    store_group(out, bucket, group, values);
}

// The bucket that this thread works on, and the thread's groups in it: one for each step.
template <bool LARGE>
struct Share {
    int lanes;
    int lane;
    long long bucket;
    int steps;

    __device__ Share(int bucket_size, int lanes_of_a_bucket) {
        lanes = lanes_of_a_bucket;
        lane = threadIdx.x % lanes;
        bucket = (long long)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
        steps = LARGE ? groups_of(bucket_size) / lanes : 1;
    }

    // Groups come in bit-reversed order, so that a halving tree adds consecutive ones.
    __device__ int group(int step) const {
        return LARGE ? (int)(__brev(step) >> (__clz(steps) + 1)) * lanes + lane : lane;
    }
};

// The halving tree over the groups of a lane, which arrive one by one: the sum `levels[k]` waits for its other half.
template <bool LARGE>
struct LaneSum {
    float4 levels[LARGE ? 7 : 1];
    float4 sum;

    __device__ void take(int step, float4 value) {
        sum = value;
        if (!LARGE) return;
        int level = 0;
        for (; step >> level & 1; level++) sum = add(levels[level], sum);
        levels[level] = sum;
    }

    __device__ static float4 add(float4 a, float4 b) {
        return make_float4(::add(a.x, b.x), ::add(a.y, b.y), ::add(a.z, b.z), ::add(a.w, b.w));
    }
};

// Combine the values of a bucket's lanes in a halving tree. All threads of a block must call this, with a barrier
// between two uses of the same memory.
template <class T, class Join>
__device__ inline T reduce(T own, T* memory, int lane, int lanes, Join join) {
    T* mine = memory + threadIdx.x;
    *mine = own;
    for (int half = lanes / 2; half > 0; half /= 2) {
        // Within a warp, which may hold several buckets, lanes need not wait for other warps.
        if (half > WARP / 2)
            __syncthreads();
        else
            __syncwarp();
        if (lane < half) *mine = join(mine[0], mine[half]);
    }
    if (lanes > WARP)
        __syncthreads();
    else
        __syncwarp();
    return mine[-lane];
}

__device__ inline unsigned reduce_max(unsigned own, unsigned* memory, int lane, int lanes) {
    return reduce(own, memory, lane, lanes, [](unsigned a, unsigned b) { return a > b ? a : b; });
}

__device__ inline float reduce_sum(float4 own, float4* memory, int lane, int lanes) {
    const float4 four = reduce(own, memory, lane, lanes, [](float4 a, float4 b) { return LaneSum<false>::add(a, b); });
    return add(add(four.x, four.z), add(four.y, four.w));
}

// The first three levels of the halving tree over f of each element.
template <class F>
__device__ inline float4 fold(const float (&p)[PLANES][4], F f) {
    float sums[4];
#pragma unroll
    for (int v = 0; v < 4; v++) {
        const float even = add(add(f(p[0][v]), f(p[4][v])), add(f(p[2][v]), f(p[6][v])));
        const float odd = add(add(f(p[1][v]), f(p[5][v])), add(f(p[3][v]), f(p[7][v])));
        sums[v] = add(even, odd);
    }
    return make_float4(sums[0], sums[1], sums[2], sums[3]);
}

__device__ inline float4 fold_magnitudes(const float (&p)[PLANES][4]) {
    return fold(p, [](float x) { return magnitude(x); });
}

// Squares of the values divided by a power of two; multiplying by its reciprocal rounds as the division does. Quotients
// below 2^-63 count as zero, and the last bit of each square is cleared.
__device__ inline float4 fold_squares(const float (&p)[PLANES][4], float inverse) {
    return fold(p, [inverse](float x) {
        const float scaled = multiply(magnitude(x), inverse);
        return bits_of(scaled) < 0x20000000u ? 0.0f : float_of(bits_of(multiply(scaled, scaled)) & ~1u);
    });
}

__device__ inline unsigned largest_bits(const float (&p)[PLANES][4]) {
    unsigned largest = 0;
#pragma unroll
    for (int d = 0; d < PLANES; d++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const unsigned bits = bits_of(p[d][v]) & MAGNITUDE;
            largest = bits > largest ? bits : largest;
        }
    return largest;
}

// The largest power of two up to the value with these bits; 1 for zero.
__device__ inline float power_of_two_below(unsigned bits) {
    return (bits & INFINITE) == 0 ? 1.0f : float_of(bits & INFINITE);
}

// norm / levels, rounded up until the low bits are zero, at least 2^-126; 0 for 0.
__device__ inline float round_up_step(float norm, int levels, unsigned low) {
    if (bits_of(norm) == 0) return 0.0f;
    const unsigned bits = (bits_of(divide(norm, (float)levels)) + low) & ~low;
    return float_of(bits < TINY ? TINY : bits);
}

__device__ inline void refuse_too_large(unsigned largest, unsigned char* refused) {
    if (largest >= TOO_LARGE) *refused = 1;
}

// The bucket and group of a decoder's thread. A thread whose group is beyond its bucket has nothing to do.
struct Place {
    Bucket bucket;
    int group;

    __device__ Place(long long size, int bucket_size) {
        const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
        const int groups = groups_of(bucket_size);  // a power of two
        bucket = bucket_at(thread >> (31 - __clz(groups)), size, bucket_size);
        group = (int)(thread & (groups - 1));
    }
};

// The offset of the scales, aligned to four bytes within the payload.
__device__ inline long long scales_at(long long codes_end) { return (codes_end + 3) / 4 * 4; }

// Zero the gap between codes and scales; called for the last bucket.
__device__ inline void close_codes(unsigned char* data, long long codes_end) {
    for (long long i = codes_end; i < scales_at(codes_end); i++) data[i] = 0;
}

__device__ inline void store_scale(unsigned char* data, long long at, float scale) {
    store_word(data + at, bits_of(scale), 4);
}

__device__ inline float load_scale(const unsigned char* data, long long at) {
    return float_of(load_word(data + at, 4));
}
