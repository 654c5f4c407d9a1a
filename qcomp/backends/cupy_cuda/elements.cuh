// Elements of a vector: their bits, their dtypes, and access to four neighbours at a time.

constexpr unsigned MAGNITUDE = 0x7fffffffu;
constexpr unsigned SIGN = 0x80000000u;
constexpr unsigned INFINITE = 0x7f800000u;
constexpr unsigned TINY = 0x00800000u;       // the bits of 2^-126
constexpr unsigned TOO_LARGE = 0x71800000u;  // the bits of 2^100: refused from here on; NaN has larger bits

__device__ inline unsigned bits_of(float x) { return __float_as_uint(x); }

__device__ inline float float_of(unsigned bits) { return __uint_as_float(bits); }

// x, or +0 if |x| is below 2^-126; NaN stays NaN.
__device__ inline float flush(float x) { return float_of((bits_of(x) & MAGNITUDE) < TINY ? 0u : bits_of(x)); }

__device__ inline float magnitude(float x) { return float_of(bits_of(x) & MAGNITUDE); }

// keep * m + fresh * x, each operation rounded.
__device__ inline float blend(float keep, float m, float fresh, float x) {
    return add(multiply(keep, m), multiply(fresh, x));
}

struct Half {
    unsigned short bits;
};

struct BFloat16 {
    unsigned short bits;
};

__device__ inline float to_float(float x) { return x; }

__device__ inline float to_float(Half x) {
    // The product is exact, even for a subnormal; 2^112 is the difference of the exponents' biases.
    unsigned bits = bits_of(multiply(float_of((x.bits & 0x7fffu) << 13), float_of(0x77800000u)));
    if ((x.bits & 0x7c00u) == 0x7c00u) bits |= INFINITE;
    return float_of(bits | (x.bits & 0x8000u) << 16);
}

__device__ inline float to_float(BFloat16 x) { return float_of((unsigned)x.bits << 16); }

__device__ inline void round_to(float x, float& result) { result = x; }

__device__ inline void round_to(float x, Half& result) {
    const unsigned sign = bits_of(x) >> 16 & 0x8000u;
    const unsigned bits = bits_of(x) & MAGNITUDE;
    unsigned half;
    if (bits > INFINITE) {
        half = 0x7e00u;
    } else if (bits >= 0x47800000u) {  // from 2^16 on
        half = 0x7c00u;
    } else if (bits < 0x38800000u) {  // below 2^-14: adding 1/2 leaves the rounded multiple of 2^-24 in the low bits
        half = bits_of(add(float_of(bits), 0.5f)) - 0x3f000000u;
    } else {
        half = (bits + 0xfffu + (bits >> 13 & 1u) - 0x38000000u) >> 13;  // a carry to infinity is correct
    }
    result.bits = (unsigned short)(half | sign);
}

__device__ inline void round_to(float x, BFloat16& result) {
    const unsigned bits = bits_of(x);
    const bool nan = (bits & MAGNITUDE) > INFINITE;
    const unsigned rounded = nan ? (bits & SIGN) | 0x7fc00000u : bits + 0x7fffu + (bits >> 16 & 1u);
    result.bits = (unsigned short)(rounded >> 16);
}

// Whether x is aligned for reading four neighbours at once at every multiple of four elements.
template <class X>
__device__ inline bool is_aligned(const X* x) {
    return (unsigned long long)x % (4 * sizeof(X)) == 0;
}

__device__ inline void load_four(const float* x, float (&values)[4]) {
    const float4 four = *reinterpret_cast<const float4*>(x);
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
}

template <class X>
__device__ inline void load_four(const X* x, float (&values)[4]) {
    const uint2 four = *reinterpret_cast<const uint2*>(x);
    const unsigned words[4] = {four.x & 0xffffu, four.x >> 16, four.y & 0xffffu, four.y >> 16};
#pragma unroll
    for (int v = 0; v < 4; v++) {
        X element;
        element.bits = (unsigned short)words[v];
        values[v] = to_float(element);
    }
}

// __stwb, because the compiler splits an assignment of four elements and does not always merge the parts again.
__device__ inline void store_four(float* x, const float (&values)[4]) {
    __stwb(reinterpret_cast<float4*>(x), make_float4(values[0], values[1], values[2], values[3]));
}

template <class X>
__device__ inline void store_four(X* x, const float (&values)[4]) {
    X elements[4];
#pragma unroll
    for (int v = 0; v < 4; v++) round_to(values[v], elements[v]);
    __stwb(reinterpret_cast<uint2*>(x), make_uint2((unsigned)elements[0].bits | (unsigned)elements[1].bits << 16,
                                                   (unsigned)elements[2].bits | (unsigned)elements[3].bits << 16));
}

// Up to four bytes of a payload, which may lie at any address.
__device__ inline unsigned load_word(const unsigned char* at, int count) {
    if (count == 4 && (unsigned long long)at % 4 == 0) return *reinterpret_cast<const unsigned*>(at);
    unsigned word = 0;
    for (int i = 0; i < count; i++) word |= (unsigned)at[i] << 8 * i;
    return word;
}

__device__ inline void store_word(unsigned char* at, unsigned word, int count) {
    if (count == 4 && (unsigned long long)at % 4 == 0) {
        *reinterpret_cast<unsigned*>(at) = word;
    } else {
        for (int i = 0; i < count; i++) at[i] = (unsigned char)(word >> 8 * i);
    }
}
