/* The CPU's small operations, each in one pass over its data, for what torch needs several for.
 * NaN and infinities go through to the result. */

#include "common.h"

/* out = x / rms(x) * weight for x [rows, n]. */
void sapwood_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t n,
                      float *out) {
#pragma omp parallel for schedule(static) if (rows * n > GRAIN)
    for (int64_t i = 0; i < rows; i++) {
        const float *from = x + i * n;
        float *to = out + i * n;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) sum += from[j] * from[j];
        float scale = 1.0f / sqrtf(sum / (float)n + eps);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) to[j] = from[j] * scale * weight[j];
    }
}

/* out [rows, n] = silu(gate) * up for gate and up side by side, gate_up [rows, 2 n]. */
void sapwood_silu_and_mul(const float *gate_up, int64_t rows, int64_t n, float *out) {
#pragma omp parallel for schedule(static) if (rows * n > GRAIN / 4)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = gate_up + 2 * i * n, *up = gate + n;
        float *to = out + i * n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            float x = gate[j];
            float e = exp_of_nonpositive(-fabsf(x)); /* sigmoid without overflow on either side */
            float share = (x < 0.0f ? e : 1.0f) / (1.0f + e);
            to[j] = x * share * up[j];
        }
    }
}

/* Rotate heads [rows, num_heads, dim], whose rows lie `stride` floats apart, into out, contiguous.
 * cos and sin [rows, dim] as Kernels.rotary describes them. */
void sapwood_rotary(const float *heads, int64_t stride, int64_t rows, int64_t num_heads,
                    int64_t dim, const float *cosines, const float *sines, float *out) {
    int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * num_heads * dim > GRAIN)
    for (int64_t i = 0; i < rows; i++) {
        const float *c = cosines + i * dim, *s = sines + i * dim;
        for (int64_t h = 0; h < num_heads; h++) {
            const float *from = heads + i * stride + h * dim;
            float *to = out + (i * num_heads + h) * dim;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                to[j] = from[j] * c[j] + from[half + j] * s[j];
                to[half + j] = from[half + j] * c[half + j] + from[j] * s[half + j];
            }
        }
    }
}

/* keys[slots[i]] = key[i] and the same for values, for rows of n floats. */
void sapwood_write_kv(const float *key, int64_t key_stride, const float *value,
                      int64_t value_stride, const int64_t *slots, int64_t rows, int64_t n,
                      float *keys, float *values) {
#pragma omp parallel for schedule(static) if (rows * n > GRAIN)
    for (int64_t i = 0; i < rows; i++) {
        const float *k = key + i * key_stride, *v = value + i * value_stride;
        float *to_k = keys + slots[i] * n, *to_v = values + slots[i] * n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) to_k[j] = k[j];
#pragma omp simd
        for (int64_t j = 0; j < n; j++) to_v[j] = v[j];
    }
}
