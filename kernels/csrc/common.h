/* What the files of this folder share. float32 rows are contiguous unless a stride is given. Every
 * row is computed in an order of its own data only, so that it does not depend on the rows beside
 * it. Built by native.py; kernels/cpu.py falls back on torch without it. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
/* What few callers need, out of the way of the others' registers. */
#define APART static __attribute__((noinline))

/* Floats that are computed with at once. */
#ifdef __AVX512F__
enum { VECTOR = 16 };
#else
enum { VECTOR = 8 };
#endif
typedef float lanes __attribute__((vector_size(VECTOR * 4)));

enum { GRAIN = 16384 }; /* elements below which a second thread costs more than it brings */

/* (exp(r) - 1) / r for |r| <= ln 2 / 2: a Taylor polynomial of degree 6. */
INLINE float exp_slope(float r) {
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    return p;
}

/* exp(r) likewise. */
INLINE float exp_near_zero(float r) { return exp_slope(r) * r + 1.0f; }

/* exp(x) for x <= 0 to 2 units in the last place: x = n ln 2 + r, |r| <= ln 2 / 2. */
INLINE float exp_of_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = exp_near_zero(r);
    union { int32_t bits; float value; } power;
    power.bits = ((int32_t)n + 127) << 23;
    return p * power.value;
}

/* out = x / rms(x) * weight for one row. */
INLINE void norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) sum += x[j] * x[j];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) out[j] = x[j] * scale * weight[j];
}

/* How gate and up become one: not at all, or by the nonlinearity of the gate. Both are x times the
 * sigmoid of something: x itself, or 2 sqrt(2 / pi) (x + 0.044715 x^3), since 1 + tanh(u) is twice
 * the sigmoid of 2 u. */
enum { UNGATED, SILU, GELU_TANH };

/* out [n] = activation(gate) * up for one row with gate and up side by side. */
INLINE void gate_row_by(const float *gate_up, int64_t n, float *out, const int activation) {
    const float *up = gate_up + n;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        float x = gate_up[j], y = x;
        if (activation == GELU_TANH) y = x * (1.59576912f + 0.0713548163f * (x * x));
        float e = exp_of_nonpositive(-fabsf(y)); /* sigmoid without overflow on either side */
        float share = (x < 0.0f ? e : 1.0f) / (1.0f + e);
        out[j] = x * share * up[j];
    }
}

INLINE void gate_row(const float *gate_up, int64_t n, float *out, int64_t activation) {
    if (activation == GELU_TANH) gate_row_by(gate_up, n, out, GELU_TANH);
    else gate_row_by(gate_up, n, out, SILU);
}

/* Row i of what a projection multiplies, n inputs: of x [rows, n], normed if there is a weight for
 * it, or with an activation of gate and up in x [rows, 2 n]. */
INLINE void prepare_row(const float *x, const float *norm_weight, float eps, int64_t activation,
                        int64_t i, int64_t n, float *out) {
    if (activation != UNGATED) gate_row(x + 2 * i * n, n, out, activation);
    else norm_row(x + i * n, norm_weight, eps, n, out);
}
