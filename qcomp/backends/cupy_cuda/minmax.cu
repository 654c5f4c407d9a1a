// Eight bits between the extremes of every bucket: qcomp.core.compressors.minmax.
//
// step = (max - min) / 255, rounded up to 16 bits; base = a whole number of steps if the bucket spans zero, else min;
// code = rint(flush(p - base) / step), clamped to 0 to 255; residual' = flush(p - (base + code * step)).

struct Extremes {
    int low;
    int high;
};

// Map the bits of floats to integers in the same order, and back.
__device__ inline int ordered(unsigned bits) { return (int)(bits ^ ((bits & SIGN) != 0 ? MAGNITUDE : 0u)); }

__device__ inline Extremes join_extremes(Extremes a, Extremes b) {
    return {a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

__device__ inline int clamp_code(int code) { return code < 0 ? 0 : code > 255 ? 255 : code; }

__device__ inline float value_of(int code, float base, float step) { return add(base, multiply((float)code, step)); }

template <bool LARGE, class Values>
__device__ inline void minmax_encode(Vector<Values> vector, unsigned char* data, unsigned char* refused, long long size,
                                     int bucket_size, int lanes, long long codes_end) {
    __shared__ Extremes memory[MOST_LANES];
    const Share<LARGE> share(bucket_size, lanes);
    const Bucket bucket = bucket_at(share.bucket, size, bucket_size);
    float p[PLANES][4];
    Extremes extremes = {0x7fffffff, -0x7fffffff - 1};
    unsigned largest = 0;
    for (int step = 0; step < share.steps; step++) {
        const int group = share.group(step);
        vector.load(bucket, group, p);
        const unsigned of_group = largest_bits(p);
        largest = of_group > largest ? of_group : largest;
#pragma unroll
        for (int d = 0; d < PLANES; d++)
#pragma unroll
            for (int v = 0; v < 4; v++)
                if (is_filled(bucket, group, d, v)) {  // padding does not count
                    const int value = ordered(bits_of(p[d][v]));
                    extremes = join_extremes(extremes, {value, value});
                }
    }
    refuse_too_large(largest, refused);
    extremes = reduce(extremes, memory, share.lane, lanes,
                      [](Extremes a, Extremes b) { return join_extremes(a, b); });
    const float low = float_of((unsigned)ordered((unsigned)extremes.low));
    const float high = float_of((unsigned)ordered((unsigned)extremes.high));
    const float width_of_code = round_up_step(flush(subtract(high, low)), 255, 0xffu);
    const float divisor = bits_of(width_of_code) == 0 ? 1.0f : width_of_code;
    float base = low;
    if (extremes.low <= 0 && extremes.high >= 0) {
        const int zero_code = clamp_code(round_to_int(divide(float_of(bits_of(low) ^ SIGN), divisor)));
        base = float_of(bits_of(multiply((float)zero_code, width_of_code)) ^ SIGN);
    }
    base = flush(base);
    if (share.lane == 0 && bucket.groups > 0) {
        const long long count = (size + bucket_size - 1) / bucket_size;
        store_scale(data, scales_at(codes_end) + 4 * bucket.index, base);
        store_scale(data, scales_at(codes_end) + 4 * (count + bucket.index), width_of_code);
        if (bucket.start + bucket.filled == size) close_codes(data, codes_end);
    }
    for (int step = 0; step < share.steps; step++) {
        const int group = share.group(step);
        if (group >= bucket.groups) continue;
        if (LARGE) vector.load(bucket, group, p);
        unsigned codes[PLANES] = {};
#pragma unroll
        for (int d = 0; d < PLANES; d++) {
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const float offset = flush(subtract(p[d][v], base));
                const int code = clamp_code(round_to_int(divide(offset, divisor)));
                if (is_filled(bucket, group, d, v)) codes[d] |= (unsigned)code << 8 * v;
                p[d][v] = flush(subtract(p[d][v], value_of(code, base, width_of_code)));
            }
            store_word(data + bucket.start + (long long)d * bucket.width + 4 * group, codes[d], bucket.bytes);
        }
        vector.store(bucket, group, p);
    }
}

template <class X>
__device__ inline void minmax_decode(const unsigned char* data, X* out, long long size, int bucket_size,
                                     long long codes_end, int accumulate) {
    const Place place(size, bucket_size);
    const long long count = (size + bucket_size - 1) / bucket_size;
    const Bucket bucket = place.bucket;
    const int group = place.group;
    if (group >= bucket.groups) return;
    const float base = load_scale(data, scales_at(codes_end) + 4 * bucket.index);
    const float step = load_scale(data, scales_at(codes_end) + 4 * (count + bucket.index));
    float values[PLANES][4];
#pragma unroll
    for (int d = 0; d < PLANES; d++) {
        const unsigned codes =
            load_word(data + bucket.start + (long long)d * bucket.width + 4 * group, bucket.bytes);
#pragma unroll
        for (int v = 0; v < 4; v++) values[d][v] = value_of((int)(codes >> 8 * v & 0xffu), base, step);
    }
    put_group(out, bucket, group, values, accumulate);
}

#define MINMAX_ENCODE(NAME, X, LARGE, INPUT)                                                                           \
    KERNEL NAME(INPUT##_PARAMETERS(X), const float* residual, float* out, unsigned char* data,                         \
                unsigned char* refused, long long size, int bucket_size, int lanes, long long codes_end) {             \
        minmax_encode<LARGE>(Vector{INPUT##_VALUES(X), residual, out}, data, refused, size, bucket_size, lanes,        \
                             codes_end);                                                                               \
    }

#define MINMAX_DECODE(NAME, X)                                                                                         \
    KERNEL NAME(const unsigned char* data, X* out, long long size, int bucket_size, long long codes_end,               \
                int accumulate) {                                                                                      \
        minmax_decode(data, out, size, bucket_size, codes_end, accumulate);                                            \
    }
