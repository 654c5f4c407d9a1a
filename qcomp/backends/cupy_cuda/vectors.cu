// Passes over whole float32 vectors: the division of a sum over ranks, the momentum, the step with a frozen variance. A
// thread handles four neighbours.

struct Mine {
    long long first;
    int count;  // 0 or less past the end

    __device__ explicit Mine(long long size) {
        first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
        count = size - first >= 4 ? 4 : (int)(size - first);
    }
};

__device__ inline void load_mine(const float* x, Mine mine, float (&values)[4]) {
    x += mine.first;
    if (mine.count == 4 && is_aligned(x)) {
        load_four(x, values);
        return;
    }
#pragma unroll
    for (int v = 0; v < 4; v++) values[v] = v < mine.count ? x[v] : 0.0f;
}

__device__ inline void store_mine(float* x, Mine mine, const float (&values)[4]) {
    x += mine.first;
    if (mine.count == 4 && is_aligned(x)) {
        store_four(x, values);
        return;
    }
#pragma unroll
    for (int v = 0; v < 4; v++)
        if (v < mine.count) x[v] = values[v];
}

// total = flush(total / ranks)
KERNEL finish_mean(float* total, long long size, float ranks) {
    const Mine mine(size);
    float values[4];
    load_mine(total, mine, values);
#pragma unroll
    for (int v = 0; v < 4; v++) values[v] = flush(divide(values[v], ranks));
    store_mine(total, mine, values);
}

// out = keep * m + fresh * g
KERNEL momentum(const float* m, const float* g, float* out, long long size, float keep, float fresh) {
    const Mine mine(size);
    float values[4], gradient[4];
    load_mine(m, mine, values);
    load_mine(g, mine, gradient);
#pragma unroll
    for (int v = 0; v < 4; v++) values[v] = blend(keep, values[v], fresh, gradient[v]);
    store_mine(out, mine, values);
}

// m = m where v > 0, else 0; out = p - rate * ((m / correction) / (sqrt(v) + eps) [+ decay * p])
KERNEL frozen_step(const float* p, float* m, const float* v, float* out, long long size, float rate, float correction,
                   float eps, float decay, int decays) {
    const Mine mine(size);
    float values[4], moment[4], variance[4];
    load_mine(p, mine, values);
    load_mine(m, mine, moment);
    load_mine(v, mine, variance);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned bits = bits_of(variance[i]);
        if (bits == 0 || bits > INFINITE) moment[i] = 0.0f;
        float direction = divide(divide(moment[i], correction), add(square_root(variance[i]), eps));
        if (decays) direction = add(direction, multiply(decay, values[i]));
        values[i] = subtract(values[i], multiply(rate, direction));
    }
    store_mine(m, mine, moment);
    store_mine(out, mine, values);
}
