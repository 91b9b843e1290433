/* The CPU's small operations, each in one pass over its data, for what torch needs several for.
 * NaN and infinities go through to the result. */

#include "bf16.h"
#include "common.h"

/* out = x / rms(x) * weight over the n numbers of each head of x [rows, num_heads, n], whose rows
 * lie `stride` floats apart; out is contiguous. */
void sapwood_rms_norm(const float *x, int64_t stride, const float *weight, float eps, int64_t rows,
                      int64_t num_heads, int64_t n, float *out) {
#pragma omp parallel for schedule(static) if (rows * num_heads * n > GRAIN)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < num_heads; h++)
            norm_row(x + i * stride + h * n, weight, eps, n, out + (i * num_heads + h) * n);
}

/* out [rows, n] = activation(gate) * up for gate and up side by side, gate_up [rows, 2 n]. */
void sapwood_activate_and_mul(const float *gate_up, int64_t activation, int64_t rows, int64_t n,
                              float *out) {
#pragma omp parallel for schedule(static) if (rows * n > GRAIN / 4)
    for (int64_t i = 0; i < rows; i++) gate_row(gate_up + 2 * i * n, n, out + i * n, activation);
}

/* Rotate the first `rotary_dim` dimensions of heads [rows, num_heads, dim], whose rows lie `stride`
 * floats apart, into out, contiguous; the others go through. cos and sin [rows, rotary_dim] as
 * Kernels.rotary describes them. */
void sapwood_rotary(const float *heads, int64_t stride, int64_t rows, int64_t num_heads,
                    int64_t dim, int64_t rotary_dim, const float *cosines, const float *sines,
                    float *out) {
    int64_t half = rotary_dim / 2;
#pragma omp parallel for schedule(static) if (rows * num_heads * dim > GRAIN)
    for (int64_t i = 0; i < rows; i++) {
        const float *c = cosines + i * rotary_dim, *s = sines + i * rotary_dim;
        for (int64_t h = 0; h < num_heads; h++) {
            const float *from = heads + i * stride + h * dim;
            float *to = out + (i * num_heads + h) * dim;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                to[j] = from[j] * c[j] + from[half + j] * s[j];
                to[half + j] = from[half + j] * c[half + j] + from[j] * s[half + j];
            }
            for (int64_t j = rotary_dim; j < dim; j++) to[j] = from[j];
        }
    }
}

/* to[at] = from for rows of n floats, rounded if `to` is bfloat16. */
INLINE void write_row(const float *from, void *to, int64_t at, int64_t n, int64_t is_bf16) {
    if (is_bf16) {
        uint16_t *row = (uint16_t *)to + at * n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) row[j] = bf16_of_float(from[j]);
    } else {
        float *row = (float *)to + at * n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) row[j] = from[j];
    }
}

/* keys[slots[i]] = key[i] and the same for values, for rows of n floats; keys and values are floats
 * or bfloat16. */
void sapwood_write_kv(const float *key, int64_t key_stride, const float *value,
                      int64_t value_stride, const int64_t *slots, int64_t rows, int64_t n,
                      void *keys, void *values, int64_t is_bf16) {
#pragma omp parallel for schedule(static) if (rows * n > GRAIN)
    for (int64_t i = 0; i < rows; i++) {
        write_row(key + i * key_stride, keys, slots[i], n, is_bf16);
        write_row(value + i * value_stride, values, slots[i], n, is_bf16);
    }
}

/* Minus infinity in the rows [num_rows] of logits [*, vocab_size] where allowed [num_rows, words] has
 * no bit: bit i % 32 of word i / 32 is token i's. */
void sapwood_mask_logits(float *logits, int64_t vocab_size, const int64_t *rows, int64_t num_rows,
                         const uint32_t *allowed, int64_t num_words) {
#pragma omp parallel for schedule(static) if (num_rows * vocab_size > GRAIN)
    for (int64_t r = 0; r < num_rows; r++) {
        float *row = logits + rows[r] * vocab_size;
        const uint32_t *words = allowed + r * num_words;
        for (int64_t first = 0; first < vocab_size; first += 32) {
            uint32_t word = words[first / 32];
            if (word == UINT32_MAX) continue;
            if (first + 32 <= vocab_size) {
#pragma omp simd
                for (int64_t i = 0; i < 32; i++)
                    row[first + i] = word >> i & 1 ? row[first + i] : -INFINITY;
            } else {
                for (int64_t i = 0; i < vocab_size - first; i++)
                    if (!(word >> i & 1)) row[first + i] = -INFINITY;
            }
        }
    }
}
