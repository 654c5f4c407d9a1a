// The sign of every element and a scale for every bucket: qcomp.core.compressors.sign.
//
// scale = mean |p| or root mean p^2 of the bucket; code = 1 where p < 0; residual' = flush(p - (scale or -scale)).

template <bool LARGE, class Values>
__device__ inline void sign_encode(Vector<Values> vector, unsigned char* data, unsigned char* refused, long long size,
                                   int bucket_size, int lanes, long long codes_end, int rms) {
    __shared__ unsigned maxima[MOST_LANES];
    __shared__ float4 sums[MOST_LANES];
    const Share<LARGE> share(bucket_size, lanes);
    const Bucket bucket = bucket_at(share.bucket, size, bucket_size);
    float p[PLANES][4];
    unsigned largest = 0;
    LaneSum<LARGE> sum;
    for (int step = 0; step < share.steps; step++) {
        vector.load(bucket, share.group(step), p);
        const unsigned bits = largest_bits(p);
        largest = bits > largest ? bits : largest;
        if (!rms) sum.take(step, fold_magnitudes(p));
    }
    refuse_too_large(largest, refused);
    float power = 1.0f;
    if (rms) {
        power = power_of_two_below(reduce_max(largest, maxima, share.lane, lanes));
        const float inverse = divide(1.0f, power);
        for (int step = 0; step < share.steps; step++) {
            if (LARGE) vector.load(bucket, share.group(step), p);
            sum.take(step, fold_squares(p, inverse));
        }
    }
    float scale = divide(reduce_sum(sum.sum, sums, share.lane, lanes), (float)bucket.filled);
    scale = flush(rms ? multiply(square_root(scale), power) : scale);
    if (share.lane == 0 && bucket.groups > 0) {
        store_scale(data, scales_at(codes_end) + 4 * bucket.index, scale);
        if (bucket.start + bucket.filled == size) close_codes(data, codes_end);
    }
    for (int step = 0; step < share.steps; step++) {
        const int group = share.group(step);
        if (group >= bucket.groups) continue;
        if (LARGE) vector.load(bucket, group, p);
        unsigned codes = 0;
#pragma unroll
        for (int d = 0; d < PLANES; d++)
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const unsigned sign = bits_of(p[d][v]) & SIGN;
                codes |= sign >> 31 << (8 * v + d);
                p[d][v] = flush(subtract(p[d][v], float_of(bits_of(scale) | sign)));
            }
        store_word(data + bucket.start / 8 + 4 * group, codes, bucket.bytes);
        vector.store(bucket, group, p);
    }
}

template <class X>
__device__ inline void sign_decode(const unsigned char* data, X* out, long long size, int bucket_size,
                                   long long codes_end, int accumulate) {
    const Place place(size, bucket_size);
    const Bucket bucket = place.bucket;
    const int group = place.group;
    if (group >= bucket.groups) return;
    const unsigned codes = load_word(data + bucket.start / 8 + 4 * group, bucket.bytes);
    const unsigned scale = bits_of(load_scale(data, scales_at(codes_end) + 4 * bucket.index));
    float values[PLANES][4];
#pragma unroll
    for (int d = 0; d < PLANES; d++)
#pragma unroll
        for (int v = 0; v < 4; v++) values[d][v] = float_of(scale ^ (codes >> (8 * v + d) & 1u) << 31);
    put_group(out, bucket, group, values, accumulate);
}

#define SIGN_ENCODE(NAME, X, LARGE, INPUT)                                                                             \
    KERNEL NAME(INPUT##_PARAMETERS(X), const float* residual, float* out, unsigned char* data,                         \
                unsigned char* refused, long long size, int bucket_size, int lanes, long long codes_end, int rms) {    \
        sign_encode<LARGE>(Vector{INPUT##_VALUES(X), residual, out}, data, refused, size, bucket_size, lanes,          \
                           codes_end, rms);                                                                            \
    }

#define SIGN_DECODE(NAME, X)                                                                                           \
    KERNEL NAME(const unsigned char* data, X* out, long long size, int bucket_size, long long codes_end,               \
                int accumulate) {                                                                                      \
        sign_decode(data, out, size, bucket_size, codes_end, accumulate);                                              \
    }
