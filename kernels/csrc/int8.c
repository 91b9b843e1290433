/* Projections in int8, products added in int32 and scaled in float32 for every GROUP inputs.
 *
 * A weight is unit * (scale * value + offset) with value in 0 ... 255: the steps span a group's
 * weights from the least to the greatest, so that what lies on a grid of 15 steps (checkpoints of 4
 * bits do) comes out as it was but for the rounding of scale and offset to float16. Where all groups
 * do, values are 0 ... 15 and kept in 4 bits, half of what a step of few rows waits for. `unit` is
 * the largest weight of an output. An input is scale * value with value in
 * -127 ... 127. With sums over the inputs of one group,
 *
 *     out = unit * sum over groups of  x_scale * (scale * sum(value * x) + offset * sum(x))
 *
 * where the first sum is exact, whatever its order. With two planes a row's rounding error is
 * rounded once more, in 254 times finer steps, and multiplied as a second row. A row's result
 * depends on that row and on nothing else of the batch.
 *
 * Packed weights: blocks of LANES outputs, in each all groups in order, in each GROUP / 4 steps of
 * LANES times 4 values, then LANES scales and LANES offsets; behind all blocks the units. In 4 bits
 * a byte's upper half belongs to the step that is GROUP / 8 later. */

#include <float.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

enum { GROUP = 32, STEPS = GROUP / 4, VECTORS = 3, ROWS = 4, LEVELS = 127, FINER = 254 };

#if defined(__AVX512VNNI__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));

/* Bytes of a group of a block: values, scales and offsets. */
#define VALUE_BYTES(BITS) (LANES * GROUP * (BITS) / 8)
#define GROUP_BYTES(BITS) (VALUE_BYTES(BITS) + LANES * 4)

/* sum + the products of each lane's four unsigned bytes with the four signed ones of x. */
INLINE ints add_products(ints sum, ints values, int32_t x) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)values, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    /* In pairs of 16 bits: a single product of bytes saturates. */
    __m256i low = _mm256_set1_epi16(255), w = (__m256i)values, four = _mm256_set1_epi32(x);
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
    __m256i odd = _mm256_srai_epi16(four, 8);
    __m256i first = _mm256_madd_epi16(_mm256_and_si256(w, low), even);
    __m256i second = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd);
    return sum + (ints)_mm256_add_epi32(first, second);
#else
    for (int byte = 0; byte < 4; byte++)
        sum += ((values >> (8 * byte)) & 255) * (int32_t)(int8_t)(x >> (8 * byte));
    return sum;
#endif
}

/* float16 by hand, for compilers that have no such type. Of magnitudes below 65520; NaN stays one. */
static float float_of_half(uint16_t half) {
    int32_t exponent = half >> 10 & 31;
    float fraction = (float)(half & 1023) / 1024.0f;
    float value = exponent ? ldexpf(1.0f + fraction, exponent - 15) : ldexpf(fraction, -14);
    if (exponent == 31) value = NAN;
    return half >> 15 ? -value : value;
}

/* Rounded to the nearest, ties to even. */
static uint16_t half_of_float(float value) {
    if (!(fabsf(value) < 65520.0f)) return 0x7e00;
    int exponent;
    frexpf(value, &exponent); /* in 0.5 ... 1 times 2^exponent */
    exponent = exponent < -13 ? -13 : exponent;
    int32_t steps = (int32_t)rintf(ldexpf(fabsf(value), 11 - exponent)); /* 2048: the next exponent */
    int32_t bits = steps < 1024 ? steps : ((exponent + 14) << 10) + steps - 1024;
    return (uint16_t)(bits | (value < 0.0f ? 0x8000 : 0));
}

INLINE floats load_halves(const uint16_t *from) {
#if defined(__AVX512VNNI__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    floats value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = float_of_half(from[lane]);
    return value;
#endif
}

static int64_t num_groups(int64_t n) { return (n + GROUP - 1) / GROUP; }

static int64_t num_blocks(int64_t outputs) { /* whole tiles */
    return (outputs + VECTORS * LANES - 1) / (VECTORS * LANES) * VECTORS;
}

int64_t sapwood_int8_num_bytes(int64_t outputs, int64_t n, int64_t bits) {
    int64_t unit_bytes = LANES * (int64_t)sizeof(float);
    return num_blocks(outputs) * (num_groups(n) * GROUP_BYTES(bits) + unit_bytes);
}

static float *units_of(uint8_t *packed, int64_t outputs, int64_t groups, int64_t bits) {
    return (float *)(packed + num_blocks(outputs) * groups * GROUP_BYTES(bits));
}

/* Where value j of a group is, and by how many bits it is shifted there. */
struct place {
    int64_t byte;
    int shift;
};

static struct place place_of(int64_t j, int64_t lane, int64_t bits) {
    int64_t step = j / 4, steps = bits == 4 ? STEPS / 2 : STEPS;
    return (struct place){(step % steps * LANES + lane) * 4 + j % 4, step < steps ? 0 : 4};
}

/* Whether x is NaN or an infinity. */
INLINE int has_no_value(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7f800000) == 0x7f800000;
}

/* The least and the greatest of one group of an output's row [n]. */
static void range_of(const float *row, int64_t n, int64_t group, float *least, float *most) {
    const float *from = row + group * GROUP;
    int64_t size = n - group * GROUP < GROUP ? n - group * GROUP : GROUP;
    *least = *most = from[0];
    for (int64_t j = 1; j < size; j++) {
        *least = from[j] < *least ? from[j] : *least;
        *most = from[j] > *most ? from[j] : *most;
    }
}

/* The bits that values of weight [outputs, n] take: 4 where those are no less exact than 8, of which
 * half a step is 1 / 34 of a step of 4, else 8. */
int64_t sapwood_int8_num_bits(const float *weight, int64_t outputs, int64_t n) {
    int64_t num_off = 0;
#pragma omp parallel for schedule(static) reduction(+ : num_off)
    for (int64_t output = 0; output < outputs; output++) {
        const float *row = weight + output * n;
        for (int64_t g = 0; g < num_groups(n) && num_off == 0; g++) {
            float least, most;
            range_of(row, n, g, &least, &most);
            float steps = most > least ? 15.0f / (most - least) : 0.0f;
            for (int64_t j = g * GROUP; j < n && j < (g + 1) * GROUP; j++) {
                float value = (row[j] - least) * steps;
                num_off += !(fabsf(value - rintf(value)) <= 1.0f / 34);
            }
        }
    }
    return num_off ? 8 : 4;
}

/* weight [outputs, n] into packed, of sapwood_int8_num_bytes(outputs, n, bits). Outputs and inputs
 * beyond the weight's are zero. */
void sapwood_int8_pack(const float *weight, int64_t outputs, int64_t n, int64_t bits,
                       uint8_t *packed) {
    const int64_t groups = num_groups(n);
    const float levels = bits == 4 ? 15.0f : 255.0f;
    float *units = units_of(packed, outputs, groups, bits);
    memset(packed, 0, (size_t)sapwood_int8_num_bytes(outputs, n, bits));
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < outputs; output++) {
        const float *row = weight + output * n;
        int64_t lane = output % LANES;
        float unit = 0.0f;
        int is_broken = 0;
        for (int64_t j = 0; j < n; j++) {
            unit = fabsf(row[j]) > unit ? fabsf(row[j]) : unit;
            is_broken |= has_no_value(row[j]);
        }
        if (is_broken) { /* what is computed of it is NaN, as with the weight itself */
            units[output] = NAN;
            continue;
        }
        float shrink = unit >= FLT_MIN ? 1.0f / unit : 0.0f;
        units[output] = unit;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *to = packed + (output / LANES * groups + g) * GROUP_BYTES(bits);
            uint16_t *scales = (uint16_t *)(to + VALUE_BYTES(bits)), *offsets = scales + LANES;
            float least, most;
            range_of(row, n, g, &least, &most);
            scales[lane] = half_of_float((most - least) * shrink / levels);
            offsets[lane] = half_of_float(least * shrink);
            float scale = float_of_half(scales[lane]), offset = float_of_half(offsets[lane]);
            float steps = scale > 0.0f ? 1.0f / scale : 0.0f;
            for (int64_t j = g * GROUP; j < n && j < (g + 1) * GROUP; j++) {
                float value = rintf((row[j] * shrink - offset) * steps);
                value = value < 0.0f ? 0.0f : value > levels ? levels : value;
                struct place at = place_of(j % GROUP, lane, bits);
                to[at.byte] |= (uint8_t)((uint8_t)value << at.shift);
            }
        }
    }
}

/* What was packed, weight [outputs, n]. */
void sapwood_int8_unpack(uint8_t *packed, int64_t outputs, int64_t n, int64_t bits,
                         float *weight) {
    const int64_t groups = num_groups(n);
    const float *units = units_of(packed, outputs, groups, bits);
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t j = 0; j < n; j++) {
            int64_t lane = output % LANES, block = output / LANES;
            const uint8_t *from = packed + (block * groups + j / GROUP) * GROUP_BYTES(bits);
            const uint16_t *scales = (const uint16_t *)(from + VALUE_BYTES(bits));
            struct place at = place_of(j % GROUP, lane, bits);
            float value = (float)(from[at.byte] >> at.shift & ((1 << bits) - 1));
            value = float_of_half(scales[lane]) * value + float_of_half(scales[LANES + lane]);
            weight[output * n + j] = units[output] * value;
        }
}

/* A row's inputs as integers: values [planes, groups * GROUP]; scales and sums [groups], the scale
 * of the second plane being FINER times smaller. A group with a NaN or an infinity gets a NaN for
 * a scale, so that all that is computed of it is NaN. */
INLINE void round_row(const float *x, int64_t n, const int planes, int8_t *values, float *scales,
                      float *sums) {
    int64_t groups = num_groups(n);
    for (int64_t g = 0; g < groups; g++) {
        int64_t size = n - g * GROUP < GROUP ? n - g * GROUP : GROUP;
        float from[GROUP] = {0};
        int32_t bits[GROUP], most_bits = 0;
        memcpy(from, x + g * GROUP, (size_t)size * sizeof *from);
        memcpy(bits, from, sizeof bits);
        /* As integers, magnitudes have the same order, and NaN and infinity come last. */
#pragma omp simd reduction(max : most_bits)
        for (int j = 0; j < GROUP; j++) {
            int32_t magnitude = bits[j] & INT32_MAX;
            most_bits = magnitude > most_bits ? magnitude : most_bits;
        }
        const int is_broken = most_bits >= 0x7f800000;
        float most;
        memcpy(&most, &most_bits, sizeof most);
        /* A group whose scale has no reciprocal counts as zeros. */
        float scale = most >= LEVELS * FLT_MIN ? most / LEVELS : 0.0f;
        float steps = scale > 0.0f ? 1.0f / scale : 0.0f;
        if (is_broken) {
            scale = NAN;
            for (int j = 0; j < GROUP; j++) from[j] = 0.0f;
        }
        int8_t *coarse = values + g * GROUP, *fine = coarse + groups * GROUP;
        int32_t sum = 0, fine_sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < GROUP; j++) {
            float value = rintf(from[j] * steps);
            coarse[j] = (int8_t)value;
            sum += (int32_t)value;
            from[j] = from[j] * steps - value;
        }
        if (planes == 2) {
#pragma omp simd reduction(+ : fine_sum)
            for (int j = 0; j < GROUP; j++) {
                float value = rintf(from[j] * FINER);
                fine[j] = (int8_t)value;
                fine_sum += (int32_t)value;
            }
        }
        scales[g] = scale;
        sums[g] = scale * ((float)sum + (float)fine_sum / FINER);
    }
}

struct rounded {
    const int8_t *values;
    const float *scales, *sums;
};

/* out = total * units + bias + residual for the first `valid` outputs of a tile. */
static void finish_row(const float *total, const float *units, const float *bias,
                       const float *residual, int64_t valid, float *out) {
    int64_t n = valid < VECTORS * LANES ? valid : VECTORS * LANES;
#pragma omp simd
    for (int64_t j = 0; j < n; j++) out[j] = total[j] * units[j];
    if (bias)
#pragma omp simd
        for (int64_t j = 0; j < n; j++) out[j] += bias[j];
    if (residual)
#pragma omp simd
        for (int64_t j = 0; j < n; j++) out[j] += residual[j];
}

/* sums += values times four inputs of each row, which lie `length` apart. */
INLINE void add_step(ints (*sums)[VECTORS], const ints *values, const int8_t *inputs,
                     int64_t length, const int rows) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, inputs + r * length, sizeof four);
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] = add_products(sums[r][v], values[v], four);
    }
}

/* `rows` rows over one tile of outputs, `valid` of which exist. out and residual [rows, outputs]
 * begin at the tile; bias and residual may be NULL. */
INLINE void multiply_tile(struct rounded x, const uint8_t *packed, int64_t groups, const int rows,
                          const int planes, const int bits, const float *units,
                          const float *bias, const float *residual, int64_t outputs,
                          int64_t valid, float *out) {
    const int64_t length = groups * GROUP, block_bytes = groups * GROUP_BYTES(bits);
    floats total[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) total[r][v] = (floats){0};
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *weights = packed + g * GROUP_BYTES(bits);
        ints sum[ROWS][VECTORS];
#pragma GCC unroll 4
        for (int r = 0; r < rows * planes; r++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) sum[r][v] = (ints){0};
#pragma GCC unroll 1
        for (int k = 0; k < STEPS * bits / 8; k++) {
            ints values[VECTORS];
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++)
                memcpy(&values[v], weights + v * block_bytes + k * LANES * 4, sizeof *values);
            const int8_t *inputs = x.values + g * GROUP + k * 4;
            if (bits == 8) {
                add_step(sum, values, inputs, length, rows * planes);
                continue;
            }
            ints low[VECTORS], high[VECTORS];
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) {
                low[v] = values[v] & 0x0f0f0f0f;
                high[v] = values[v] >> 4 & 0x0f0f0f0f;
            }
            add_step(sum, low, inputs, length, rows * planes);
            add_step(sum, high, inputs + GROUP / 2, length, rows * planes);
        }
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) {
            const uint8_t *at = weights + v * block_bytes + VALUE_BYTES(bits);
            floats scale = load_halves((const uint16_t *)at);
            floats offset = load_halves((const uint16_t *)at + LANES);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                floats product = __builtin_convertvector(sum[r * planes][v], floats);
                if (planes == 2)
                    product += __builtin_convertvector(sum[r * planes + 1][v], floats) * (1.0f / FINER);
                total[r][v] += product * scale * x.scales[r * groups + g];
                total[r][v] += offset * x.sums[r * groups + g];
            }
        }
    }
    float result[ROWS][VECTORS * LANES];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) memcpy(result[r] + v * LANES, &total[r][v], sizeof total[r][v]);
    for (int r = 0; r < rows; r++)
        finish_row(result[r], units, bias, residual ? residual + r * outputs : NULL, valid,
                   out + r * outputs);
}

/* out [rows, outputs] = inputs [rows, n] times the packed weight, plus bias [outputs] and residual
 * [rows, outputs], which may be NULL. `planes` is 1 or 2. The inputs are x; with `norm_weight` [n]
 * x / rms(x) * norm_weight; with an `activation` (see common.h) activation(gate) * up for x of gate
 * and up, [rows, 2 n]. They never go through memory as a whole. Returns -1 without memory for the
 * rounded rows, else 0. */
int64_t sapwood_int8_linear(const float *x, const float *norm_weight, float eps,
                            int64_t activation, int64_t rows, int64_t n, const uint8_t *packed, int64_t bits,
                            int64_t outputs, int64_t planes, const float *bias, const float *residual,
                            float *out) {
    const int64_t groups = num_groups(n), tiles = num_blocks(outputs) / VECTORS;
    const int64_t row_bytes = planes * groups * GROUP, scale_bytes = groups * (int64_t)sizeof(float);
    const int64_t own_bytes = omp_get_max_threads() * n * (int64_t)sizeof(float);
    int8_t *values = malloc((size_t)(rows * (row_bytes + 2 * scale_bytes) + own_bytes));
    if (values == NULL) return -1;
    float *scales = (float *)(values + rows * row_bytes), *sums = scales + rows * groups;
    float *own_rows = sums + rows * groups; /* each thread's */
    const float *units = units_of((uint8_t *)packed, outputs, groups, bits);
    const int tile_rows = planes == 2 ? ROWS / 2 : ROWS;
#pragma omp parallel if (rows * n * outputs > GRAIN)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            float *own = own_rows + omp_get_thread_num() * n;
            const float *row = x + i * n;
            if (norm_weight || activation != UNGATED) {
                prepare_row(x, norm_weight, eps, activation, i, n, own);
                row = own;
            }
            int8_t *to = values + i * row_bytes;
            if (planes == 2) round_row(row, n, 2, to, scales + i * groups, sums + i * groups);
            else round_row(row, n, 1, to, scales + i * groups, sums + i * groups);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = t * VECTORS * LANES;
            const uint8_t *weights = packed + t * VECTORS * groups * GROUP_BYTES(bits);
            for (int64_t i = 0, step; i < rows; i += step) {
                int64_t left = rows - i;
                step = left >= tile_rows ? tile_rows : left >= 2 ? 2 : 1;
                struct rounded row = {values + i * row_bytes, scales + i * groups, sums + i * groups};
                const float *before = residual ? residual + i * outputs + first : NULL;
                const float *more = bias ? bias + first : NULL;
                float *to = out + i * outputs + first;
#define TILE(R, P, B)                                                                          \
    if (step == R && planes == P && bits == B)                                                 \
        multiply_tile(row, weights, groups, R, P, B, units + first, more, before, outputs,     \
                      outputs - first, to);
                TILE(4, 1, 8) TILE(2, 1, 8) TILE(1, 1, 8) TILE(2, 2, 8) TILE(1, 2, 8)
                TILE(4, 1, 4) TILE(2, 1, 4) TILE(1, 1, 4) TILE(2, 2, 4) TILE(1, 2, 4)
#undef TILE
            }
        }
    }
    free(values);
    return 0;
}
