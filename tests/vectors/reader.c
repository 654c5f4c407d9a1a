/* Reads payload files of fixed length; C99 after docs/format.md, without scaled and whole_fields.

Each line of the input has a file in hexadecimal digits and float32 or float64, separated by a space. Each line of the
output has the decoded bits in hexadecimal digits, or "refused". */
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned char byte;

static jmp_buf refused;
static const byte *data;     /* the data of the payload */
static uint64_t length, at;  /* its bytes, and how many of them were read */
static int is_double;        /* whether to compute in float64 */

static void require(int holds) {
    if (!holds) longjmp(refused, 1);
}

static uint64_t load(const byte *p, int bytes) {
    uint64_t x = 0;
    while (bytes--) x = x << 8 | p[bytes];
    return x;
}

static double load_float(const byte *p) {
    uint32_t bits = (uint32_t)load(p, 4);
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static double load_double(const byte *p) {
    uint64_t bits = load(p, 8);
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

static double rounded(double x) { return is_double ? x : (double)(float)x; }

static double flushed(double x) { return fabs(x) < ldexp(1, -126) ? 0 : x; }

static uint32_t crc32(uint32_t crc, const byte *p, uint64_t count) {
    while (count--) {
        crc ^= *p++;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xEDB88320u & (0u - (crc & 1)));
    }
    return crc;
}

static int bit_length(uint64_t x) {
    int bits = 0;
    for (; x; x >>= 1) bits++;
    return bits;
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t padded(uint64_t count) {
    uint64_t size = 8;
    while (size < count) size *= 2;
    return size;
}

static uint64_t whole_bytes(uint64_t count) { return (count + 7) / 8 * 8; }

/* The next field, of items of some bytes. */
static const byte *field(uint64_t count, uint64_t bytes) {
    if (count) at = (at + bytes - 1) / bytes * bytes;
    require(at <= length && count <= (length - at) / bytes);
    const byte *start = data + at;
    at += count * bytes;
    return start;
}

/* The code of element e of a bucket with some bits per code and a padded length. */
static unsigned code_of(const byte *codes, unsigned bits, uint64_t size, uint64_t e) {
    if (8 % bits == 0) {
        uint64_t w = size * bits / 8;
        return codes[e % w] >> e / w * bits & ((1u << bits) - 1);
    }
    unsigned code = 0;
    for (unsigned p = 0; p < bits; p++) code |= (codes[p * (size / 8) + e % (size / 8)] >> e / (size / 8) & 1u) << p;
    return code;
}

static unsigned by_significance(const byte *p, uint64_t count, uint64_t width, uint64_t i) {
    unsigned x = 0;
    while (width--) x = x << 8 | p[width * count + i];
    return x;
}

static double half(unsigned h) {
    unsigned exponent = h >> 10 & 31, fraction = h & 1023;
    double x = exponent == 31  ? INFINITY
               : exponent == 0 ? ldexp(fraction, -24)
                               : ldexp(1024 + fraction, (int)exponent - 25);
    return h >> 15 ? -x : x;
}

static void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c[1] = (uint32_t)b;
        c[2] = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c[3] = (uint32_t)a;
    }
}

/* One code for each element, and one or two scales for each bucket. */
static void dense(const char *kind, unsigned bits, uint64_t size, uint64_t n, double *out) {
    static const byte numbers[5][8] = {{0}, {1}, {3, 10}, {10, 31, 55, 88}, {5, 15, 25, 36, 48, 62, 79, 104}};
    uint64_t (*pad)(uint64_t) = *kind == 'o' ? whole_bytes : padded, rest = n % size, m = (n + size - 1) / size;
    uint64_t bytes = pad(size) * bits / 8;
    const byte *codes = field(n / size * bytes + (rest ? pad(rest) * bits / 8 : 0), 1);
    const byte *first = field(m, 4), *second = strchr("om", *kind) ? field(m, 4) : first;
    require(at == length);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t b = i / size, count = least(size, n - b * size);
        unsigned code = code_of(codes + b * bytes, bits, pad(count), i % size), top = 1u << (bits - 1);
        double one = load_float(first + 4 * b), two = load_float(second + 4 * b);
        if (*kind == 's') out[i] = (1 - 2.0 * code) * one;
        if (*kind == 'o') out[i] = code ? two : one;
        if (*kind == 'm') out[i] = rounded(one + rounded(code * two));
        if (*kind == 'q') out[i] = code > top ? -rounded((code - top) * one) : rounded(code % top * one);
        if (*kind == 'l') out[i] = (code >= top ? -1 : 1) * rounded(numbers[bits][code % top] * one);
    }
}

static void topk(uint64_t k, uint64_t size, unsigned v, uint64_t n, double *out) {
    uint64_t total = n / size * k + least(n % size, k), m = (n + size - 1) / size;
    uint64_t width = ((uint64_t)bit_length((size << v % 32) - 1) + 7) / 8, before = 0;
    const byte *entries = field(width * total, 1), *lowest = field(v == 32 ? total : m, 4), *step = lowest;
    if (v != 32) step = field(m, 4);
    require(at == length);
    for (uint64_t i = 0; i < n; i++) out[i] = 0;
    for (uint64_t j = 0; j < total; j++) {
        uint64_t b = j / k, entry = by_significance(entries, total, width, j), i = entry >> v % 32;
        double x = rounded(load_float(lowest + 4 * (v == 32 ? j : b)));
        if (v != 32) {
            x = rounded(x + rounded(load_float(step + 4 * b) * (double)(entry & ((1u << (v - 1)) - 1))));
            x = flushed(entry >> (v - 1) & 1 ? -x : x);
        }
        if ((v == 32 || j % k == 0 || i > before) && b * size + i < n) out[b * size + i] = x;
        before = i;
    }
}

static void randk(uint64_t k, uint64_t size, unsigned v, uint64_t n, double *out) {
    uint64_t rest = n % size, m = (n + size - 1) / size, strata = least(k, rest ? padded(rest) : 0);
    uint64_t total = n / size * k + strata, width = size / k > 256 ? 2 : 1, held = (k < 8 ? 8 : k) * v / 8;
    uint64_t tail = rest ? (strata < 8 ? 8 : strata) * v / 8 : 0;
    const byte *first = field(v == 32 ? width * total : n / size * held + tail, 1), *values = field(v == 32 ? total : m, 4);
    const byte *stream = v == 32 ? first : field(4, 4);
    require(at == length);
    for (uint64_t i = 0; i < n; i++) out[i] = 0;
    for (uint64_t b = 0; b < m; b++) {
        uint64_t p = padded(least(size, n - b * size)), s = least(k, p), f = p / s;
        for (uint64_t j = 0; j < s; j++) {
            uint64_t number;
            double x;
            if (v == 32) {
                number = by_significance(first, total, width, b * k + j);
                x = rounded(load_float(values + 4 * (b * k + j)));
            } else {
                uint32_t start = (uint32_t)load(stream + 12, 4) + (uint32_t)b;
                uint32_t c[4] = {start * (uint32_t)(size / 8) + (uint32_t)(j % (p / 8)), (uint32_t)load(stream + 8, 4), 0, 0};
                unsigned d = (unsigned)(j / (p / 8)), top = 1u << (v - 1);
                unsigned code = code_of(first + b * held, v, s < 8 ? 8 : s, j);
                philox(c, (uint32_t)load(stream, 4), (uint32_t)load(stream + 4, 4));
                number = (c[d / 2] >> d % 2 * 16 & 0xFFFF) * f >> 16;
                x = rounded(code % top * load_float(values + 4 * b)) * (code > top ? -1 : 1);
            }
            if (number < f && b * size + number * s + j < n) out[b * size + number * s + j] = rounded(x * (double)f);
        }
    }
}

static int is_size(unsigned long size, unsigned long most) { return size >= 8 && size <= most && !(size & (size - 1)); }

/* Decodes the data of a compressor whose spec string qcomp has written: with all options, in their order. */
static void decode(const char *spec, uint64_t n, int is_wide, double *out) {
    char again[200] = "", word[10] = "";
    unsigned long a = 0, b = 0, v = 32;
    if (!strcmp(spec, "identity")) {
        const byte *values = field(n, is_wide ? 8 : 4);
        require(at == length);
        for (uint64_t i = 0; i < n; i++) out[i] = rounded(is_wide ? load_double(values + 8 * i) : load_float(values + 4 * i));
    } else if (sscanf(spec, "cast:dtype=%9[a-z0-9]", word) == 1) {
        const byte *values = field(n, 2);
        int is_bfloat = !strcmp(word, "bfloat16");
        require((is_bfloat || !strcmp(word, "float16")) && at == length && strlen(spec) == 11 + strlen(word));
        for (uint64_t i = 0; i < n; i++) {
            byte both[4] = {0, 0, values[2 * i], values[2 * i + 1]};
            out[i] = is_bfloat ? load_float(both) : half((unsigned)load(both + 2, 2));
        }
    } else if (sscanf(spec, "sign:bucket_size=%lu,scale=%9[a-z0-9]", &a, word) == 2) {
        snprintf(again, sizeof again, "sign:bucket_size=%lu,scale=%s", a, word);
        require(!strcmp(spec, again) && is_size(a, 1 << 20) && (!strcmp(word, "l1") || !strcmp(word, "rms")));
        dense("sign", 1, a, n, out);
    } else if (sscanf(spec, "qsgd:levels=%lu,bucket_size=%lu,norm=%9[a-z0-9]", &a, &b, word) == 3) {
        snprintf(again, sizeof again, "qsgd:levels=%lu,bucket_size=%lu,norm=%s", a, b, word);
        require(!strcmp(spec, again) && a >= 1 && a <= 127 && is_size(b, 1 << 20));
        require(!strcmp(word, "max") || !strcmp(word, "l2"));
        dense("qsgd", (unsigned)bit_length(a) + 1, b, n, out);
    } else if (sscanf(spec, "lloyd_max:bits=%lu,bucket_size=%lu,coding=fixed", &a, &b) == 2) {
        snprintf(again, sizeof again, "lloyd_max:bits=%lu,bucket_size=%lu,coding=fixed", a, b);
        require(!strcmp(spec, again) && a >= 1 && a <= 4 && is_size(b, 1 << 20));
        dense("lloyd_max", (unsigned)a, b, n, out);
    } else if (sscanf(spec, "minmax:bucket_size=%lu", &a) == 1) {
        snprintf(again, sizeof again, "minmax:bucket_size=%lu", a);
        require(!strcmp(spec, again) && is_size(a, 65536));
        dense("minmax", 8, a, n, out);
    } else if (sscanf(spec, "onebit_sgd:column_size=%lu", &a) == 1) {
        snprintf(again, sizeof again, "onebit_sgd:column_size=%lu", a);
        require(!strcmp(spec, again) && a >= 1 && a <= 1 << 20);
        dense("onebit_sgd", 1, a, n, out);
    } else if (sscanf(spec, "topk:k=%lu,bucket_size=%lu,value_bits=%lu", &a, &b, &v) >= 2) {
        snprintf(again, sizeof again, v == 32 ? "topk:k=%lu,bucket_size=%lu" : "topk:k=%lu,bucket_size=%lu,value_bits=%lu,coding=fixed", a, b, v);
        require(!strcmp(spec, again) && is_size(b, 65536) && a >= 1 && a <= b && ((v >= 1 && v <= 4) || v == 32));
        topk(a, b, (unsigned)v, n, out);
    } else {
        require(sscanf(spec, "randk:k=%lu,bucket_size=%lu,value_bits=%lu", &a, &b, &v) >= 2);
        snprintf(again, sizeof again, v == 32 ? "randk:k=%lu,bucket_size=%lu" : "randk:k=%lu,bucket_size=%lu,value_bits=%lu", a, b, v);
        require(!strcmp(spec, again) && is_size(b, 65536) && a >= 1 && a <= b && !(a & (a - 1)));
        require((v >= 2 && v <= 8) || v == 32);
        randk(a, b, (unsigned)v, n, out);
    }
}

static double *values; /* those of the file that is being read */

/* Reads the values of a file, and returns their number. */
static uint64_t read_file(const byte *file, uint64_t size) {
    char spec[1001] = "";
    require(size >= 24 && !memcmp(file, "QCMP\1", 5) && file[5] <= 1);
    uint64_t spec_bytes = load(file + 6, 2), start = 28 + spec_bytes;
    uint64_t n = load(file + 8, 8);
    length = load(file + 16, 8);
    require(spec_bytes <= 1000 && size >= start && size - start == length);
    uint32_t crc = crc32(crc32(~0u, file, start - 4), file + start, length);
    require(~crc == (uint32_t)load(file + start - 4, 4) && !memchr(file + 24, 0, spec_bytes));
    memcpy(spec, file + 24, spec_bytes);
    data = file + start;
    at = 0;
    require(n <= length << 20); /* a bucket has at most 2^20 elements, and at least one byte */
    values = malloc(8 * n + 8);
    require(values != NULL);
    decode(spec, n, file[5] == 1, values);
    return n;
}

int main(void) {
    static char line[1 << 17];
    static byte file[1 << 16];
    while (fgets(line, sizeof line, stdin)) {
        char *space = strchr(line, ' ');
        uint64_t size = (uint64_t)(space - line) / 2;
        is_double = !strncmp(space, " float64", 8);
        for (uint64_t i = 0; i < size; i++) {
            char digits[3] = {line[2 * i], line[2 * i + 1], 0};
            file[i] = (byte)strtoul(digits, NULL, 16);
        }
        values = NULL;
        if (setjmp(refused)) {
            free(values);
            puts("refused");
            continue;
        }
        uint64_t n = read_file(file, size);
        for (uint64_t i = 0; i < n; i++) {
            float single = (float)values[i];
            uint64_t bits = 0;
            memcpy(&bits, is_double ? (void *)&values[i] : (void *)&single, is_double ? 8 : 4); /* on little-endian machines */
            for (int b = 0; b < (is_double ? 8 : 4); b++) printf("%02x", (unsigned)(bits >> 8 * b & 255));
        }
        puts("");
        free(values);
    }
    return 0;
}
