// The input of an encoder: the values, which are x or a momentum that x is blended into, and a residual.

template <class X>
struct Plain {
    const X* x;

    __device__ void load(const Bucket& bucket, int group, float (&values)[PLANES][4]) const {
        load_group(x, bucket, group, values);
    }
};

// keep * m + fresh * x. A separate type, because a pointer that may be null would cost encoders of plain x registers.
template <class X>
struct Blended {
    const X* x;
    const float* m;
    float keep, fresh;

    __device__ void load(const Bucket& bucket, int group, float (&values)[PLANES][4]) const {
        load_group(x, bucket, group, values);
        float old[PLANES][4];
        load_group(m, bucket, group, old);
#pragma unroll
        for (int d = 0; d < PLANES; d++)
#pragma unroll
            for (int v = 0; v < 4; v++) values[d][v] = blend(keep, old[d][v], fresh, values[d][v]);
    }
};

// The kernel parameters for each type of values, and the object made from them.
#define PLAIN_PARAMETERS(X) const X* x
#define PLAIN_VALUES(X) Plain<X>{x}
#define BLENDED_PARAMETERS(X) const X *x, const float *m, float keep, float fresh
#define BLENDED_VALUES(X) Blended<X>{x, m, keep, fresh}

// The values, the residual or null, and the buffer for the new residual or null. That buffer may be x.
template <class Values>
struct Vector {
    Values values;
    const float* residual;
    float* out;

    // p = flush(flush(values) + residual)
    __device__ void load(const Bucket& bucket, int group, float (&p)[PLANES][4]) const {
        values.load(bucket, group, p);
        if (residual == nullptr) {
#pragma unroll
            for (int d = 0; d < PLANES; d++)
#pragma unroll
                for (int v = 0; v < 4; v++) p[d][v] = flush(p[d][v]);
            return;
        }
        float old[PLANES][4];
        load_group(residual, bucket, group, old);
#pragma unroll
        for (int d = 0; d < PLANES; d++)
#pragma unroll
            for (int v = 0; v < 4; v++) p[d][v] = flush(add(flush(p[d][v]), old[d][v]));
    }

    __device__ void store(const Bucket& bucket, int group, const float (&lost)[PLANES][4]) const {
        if (out != nullptr) store_group(out, bucket, group, lost);
    }
};

template <class Values>
Vector(Values, const float*, float*) -> Vector<Values>;
