// Stochastic rounding to evenly spaced levels: qcomp.core.compressors.qsgd, and qcomp.Scaled around it.
//
// step = norm of the bucket / levels, rounded up to 17 bits; position = min(|p| / step, levels); level =
// floor(position), plus 1 if draw < rint(fraction * 65536); code = level, with the sign in the top bit; residual' =
// flush(p - decoded).

struct Draws {
    unsigned words[4];

    // Philox4x32-10.
    __device__ Draws(unsigned counter, unsigned hop, unsigned k0, unsigned k1) {
        unsigned c0 = counter, c1 = hop, c2 = 0, c3 = 0;
#pragma unroll
        for (int i = 0; i < 10; i++) {
            const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
            const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
            c0 = high1 ^ c1 ^ k0;
            c1 = low1;
            c2 = high0 ^ c3 ^ k1;
            c3 = low0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        words[0] = c0;
        words[1] = c1;
        words[2] = c2;
        words[3] = c3;
    }

    __device__ int operator[](int d) const { return (int)(words[d / 2] >> 16 * (d % 2) & 0xffffu); }
};

// Pack the codes of a group, four to a word, into the words of its bytes, and back: as code planes if BITS divides 8,
// else as bit planes.
template <int BITS>
__device__ inline void pack(const unsigned (&codes)[PLANES], unsigned (&words)[8]) {
#pragma unroll
    for (int r = 0; r < BITS; r++) {
        words[r] = 0;
        if (8 % BITS == 0) {
#pragma unroll
            for (int q = 0; q < 8 / BITS; q++) words[r] |= codes[q * BITS + r] << q * BITS;
        } else {
#pragma unroll
            for (int d = 0; d < PLANES; d++) words[r] |= (codes[d] >> r & 0x01010101u) << d;
        }
    }
}

template <int BITS>
__device__ inline void unpack(const unsigned (&words)[8], unsigned (&codes)[PLANES]) {
#pragma unroll
    for (int d = 0; d < PLANES; d++) {
        codes[d] = 0;
        if (8 % BITS == 0) {
            codes[d] = words[d % BITS] >> d / BITS * BITS & ((1u << BITS) - 1) * 0x01010101u;
        } else {
#pragma unroll
            for (int r = 0; r < BITS; r++) codes[d] |= (words[r] >> d & 0x01010101u) << r;
        }
    }
}

__device__ inline void pack_codes(const unsigned (&codes)[PLANES], int bits, unsigned (&words)[8]) {
    switch (bits) {
        case 2: pack<2>(codes, words); break;
        case 3: pack<3>(codes, words); break;
        case 4: pack<4>(codes, words); break;
        case 5: pack<5>(codes, words); break;
        case 6: pack<6>(codes, words); break;
        case 7: pack<7>(codes, words); break;
        default: pack<8>(codes, words);
    }
}

__device__ inline void unpack_codes(const unsigned (&words)[8], int bits, unsigned (&codes)[PLANES]) {
    switch (bits) {
        case 2: unpack<2>(words, codes); break;
        case 3: unpack<3>(words, codes); break;
        case 4: unpack<4>(words, codes); break;
        case 5: unpack<5>(words, codes); break;
        case 6: unpack<6>(words, codes); break;
        case 7: unpack<7>(words, codes); break;
        default: unpack<8>(words, codes);
    }
}

// A signed level times the step, which is exact; then times the factor of qcomp.Scaled, unless that is 0.
__device__ inline float value_of(int level, bool negative, float step, float factor) {
    const float product = multiply((float)level, step);
    const float value = float_of(negative ? bits_of(product) ^ SIGN : bits_of(product));
    if (bits_of(factor) == 0) return value;
    return flush(float_of(bits_of(multiply(value, factor)) & ~1u));
}

template <bool LARGE, class Values>
__device__ inline void qsgd_encode(Vector<Values> vector, unsigned char* data, unsigned char* refused, long long size,
                                   int bucket_size, int lanes, long long codes_end, int levels, int bits, int l2,
                                   float factor, unsigned k0, unsigned k1, unsigned hop, unsigned first_block) {
    __shared__ unsigned maxima[MOST_LANES];
    __shared__ float4 sums[MOST_LANES];
    const Share<LARGE> share(bucket_size, lanes);
    const Bucket bucket = bucket_at(share.bucket, size, bucket_size);
    float p[PLANES][4];
    unsigned largest = 0;
    for (int step = 0; step < share.steps; step++) {
        vector.load(bucket, share.group(step), p);
        const unsigned of_group = largest_bits(p);
        largest = of_group > largest ? of_group : largest;
    }
    refuse_too_large(largest, refused);
    largest = reduce_max(largest, maxima, share.lane, lanes);
    float norm = float_of(largest);
    if (l2) {
        const float power = power_of_two_below(largest), inverse = divide(1.0f, power);
        LaneSum<LARGE> sum;
        for (int step = 0; step < share.steps; step++) {
            if (LARGE) vector.load(bucket, share.group(step), p);
            sum.take(step, fold_squares(p, inverse));
        }
        norm = multiply(square_root(reduce_sum(sum.sum, sums, share.lane, lanes)), power);
    }
    const float width_of_level = round_up_step(norm, levels, 0x7fu);
    const float divisor = bits_of(width_of_level) == 0 ? 1.0f : width_of_level;
    const unsigned most = bits_of((float)levels), top = 1u << (bits - 1);
    if (share.lane == 0 && bucket.groups > 0) {
        store_scale(data, scales_at(codes_end) + 4 * bucket.index, width_of_level);
        if (bucket.start + bucket.filled == size) close_codes(data, codes_end);
    }
    for (int step = 0; step < share.steps; step++) {
        const int group = share.group(step);
        if (group >= bucket.groups) continue;
        if (LARGE) vector.load(bucket, group, p);
        const unsigned block = first_block + (unsigned)bucket.index * (unsigned)(bucket_size / 8) + 4 * group;
        unsigned codes[PLANES] = {};
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const Draws draws(block + v, hop, k0, k1);
#pragma unroll
            for (int d = 0; d < PLANES; d++) {
                const unsigned exact = bits_of(divide(magnitude(p[d][v]), divisor));
                const float position = float_of(exact < most ? exact : most);
                int level = truncate_to_int(position);
                const float fraction = subtract(position, (float)level);
                level += draws[d] < round_to_int(multiply(fraction, 65536.0f)) ? 1 : 0;
                const bool negative = (bits_of(p[d][v]) & SIGN) != 0 && level > 0;
                codes[d] |= ((unsigned)level | (negative ? top : 0u)) << 8 * v;
                p[d][v] = flush(subtract(p[d][v], value_of(level, negative, width_of_level, factor)));
            }
        }
        unsigned words[8];
        pack_codes(codes, bits, words);
        unsigned char* to = data + bucket.start / 8 * bits + 4 * group;
#pragma unroll
        for (int r = 0; r < 8; r++)
            if (r < bits) store_word(to + (long long)r * bucket.width, words[r], bucket.bytes);
        vector.store(bucket, group, p);
    }
}

template <class X>
__device__ inline void qsgd_decode(const unsigned char* data, X* out, long long size, int bucket_size,
                                   long long codes_end, int bits, float factor, int accumulate) {
    const Place place(size, bucket_size);
    const Bucket bucket = place.bucket;
    const int group = place.group;
    if (group >= bucket.groups) return;
    const unsigned char* from = data + bucket.start / 8 * bits + 4 * group;
    unsigned words[8], codes[PLANES];
#pragma unroll
    for (int r = 0; r < 8; r++)
        words[r] = r < bits ? load_word(from + (long long)r * bucket.width, bucket.bytes) : 0;
    unpack_codes(words, bits, codes);
    const float step = load_scale(data, scales_at(codes_end) + 4 * bucket.index);
    const unsigned top = 1u << (bits - 1);
    float values[PLANES][4];
#pragma unroll
    for (int d = 0; d < PLANES; d++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const unsigned code = codes[d] >> 8 * v & 0xffu;
            values[d][v] = value_of((int)(code & (top - 1)), code > top, step, factor);
        }
    put_group(out, bucket, group, values, accumulate);
}

#define QSGD_ENCODE(NAME, X, LARGE, INPUT)                                                                             \
    KERNEL NAME(INPUT##_PARAMETERS(X), const float* residual, float* out, unsigned char* data,                         \
                unsigned char* refused, long long size, int bucket_size, int lanes, long long codes_end,               \
                int levels, int bits, int l2, float factor, unsigned k0, unsigned k1, unsigned hop,                    \
                unsigned first_block) {                                                                                \
        qsgd_encode<LARGE>(Vector{INPUT##_VALUES(X), residual, out}, data, refused, size, bucket_size, lanes,          \
                           codes_end, levels, bits, l2, factor, k0, k1, hop, first_block);                             \
    }

#define QSGD_DECODE(NAME, X)                                                                                           \
    KERNEL NAME(const unsigned char* data, X* out, long long size, int bucket_size, long long codes_end,               \
                int bits, float factor, int accumulate) {                                                              \
        qsgd_decode(data, out, size, bucket_size, codes_end, bits, factor, accumulate);                                \
    }
