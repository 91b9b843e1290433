/* Projections in int8, products added in int32 and scaled in float32 for every GROUP inputs.
 *
 * A weight is unit * (scale * value + offset) with value in 0 ... 255: the 256 steps span a group's
 * weights from the least to the greatest, so that what lies on a coarser grid of 15, 17, 51 or 85
 * steps (checkpoints of 4 bits do) comes out as it was but for the rounding of scale and offset to
 * float16. `unit` is the largest weight of an output. An input is scale * value with value in
 * -127 ... 127. With sums over the inputs of one group,
 *
 *     out = unit * sum over groups of  x_scale * (scale * sum(value * x) + offset * sum(x))
 *
 * where the first sum is exact, whatever its order. With two planes a row's rounding error is
 * rounded once more, in 254 times finer steps, and multiplied as a second row. A row's result
 * depends on that row and on nothing else of the batch.
 *
 * Packed weights: blocks of LANES outputs, in each all groups in order, in each GROUP / 4 times
 * LANES times 4 values, then LANES scales and LANES offsets; behind all blocks the units. */

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

enum { GROUP_BYTES = LANES * (GROUP + 4) }; /* of a block: values, scales and offsets */

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

INLINE floats load_halves(const _Float16 *from) {
#if defined(__AVX512VNNI__)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    floats value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = (float)from[lane];
    return value;
#endif
}

static int64_t num_groups(int64_t n) { return (n + GROUP - 1) / GROUP; }

static int64_t num_blocks(int64_t outputs) { /* whole tiles */
    return (outputs + VECTORS * LANES - 1) / (VECTORS * LANES) * VECTORS;
}

int64_t sapwood_int8_num_bytes(int64_t outputs, int64_t n) {
    return num_blocks(outputs) * (num_groups(n) * GROUP_BYTES + LANES * (int64_t)sizeof(float));
}

static float *units_of(uint8_t *packed, int64_t outputs, int64_t groups) {
    return (float *)(packed + num_blocks(outputs) * groups * GROUP_BYTES);
}

/* weight [outputs, n] into packed, of sapwood_int8_num_bytes(outputs, n). Outputs and inputs beyond
 * the weight's are zero. */
void sapwood_int8_pack(const float *weight, int64_t outputs, int64_t n, uint8_t *packed) {
    int64_t groups = num_groups(n), num_lanes = num_blocks(outputs) * LANES;
    float *units = units_of(packed, outputs, groups);
#pragma omp parallel for schedule(static)
    for (int64_t output = 0; output < num_lanes; output++) {
        const float *row = weight + output * n;
        int64_t length = output < outputs ? n : 0, lane = output % LANES;
        float unit = 0.0f;
        for (int64_t j = 0; j < length; j++) unit = fabsf(row[j]) > unit ? fabsf(row[j]) : unit;
        float shrink = unit >= FLT_MIN ? 1.0f / unit : 0.0f;
        units[output] = unit;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *to = packed + (output / LANES * groups + g) * GROUP_BYTES;
            _Float16 *scales = (_Float16 *)(to + GROUP * LANES), *offsets = scales + LANES;
            float from[GROUP] = {0}, least = INFINITY, most = -INFINITY;
            for (int64_t j = g * GROUP; j < length && j < (g + 1) * GROUP; j++) {
                float value = row[j] * shrink;
                from[j % GROUP] = value;
                least = value < least ? value : least;
                most = value > most ? value : most;
            }
            if (least > most) least = most = 0.0f;
            scales[lane] = (_Float16)((most - least) / 255.0f);
            offsets[lane] = (_Float16)least;
            float scale = (float)scales[lane], offset = (float)offsets[lane];
            float steps = scale > 0.0f ? 1.0f / scale : 0.0f;
            for (int64_t j = 0; j < GROUP; j++) {
                float value = rintf((from[j] - offset) * steps);
                value = value < 0.0f ? 0.0f : value > 255.0f ? 255.0f : value;
                to[(j / 4 * LANES + lane) * 4 + j % 4] = (uint8_t)value;
            }
        }
    }
}

/* What was packed, weight [outputs, n]. */
void sapwood_int8_unpack(uint8_t *packed, int64_t outputs, int64_t n, float *weight) {
    int64_t groups = num_groups(n);
    const float *units = units_of(packed, outputs, groups);
    for (int64_t output = 0; output < outputs; output++)
        for (int64_t j = 0; j < n; j++) {
            int64_t lane = output % LANES, at = j % GROUP;
            const uint8_t *from = packed + (output / LANES * groups + j / GROUP) * GROUP_BYTES;
            const _Float16 *scales = (const _Float16 *)(from + GROUP * LANES);
            float value = from[(at / 4 * LANES + lane) * 4 + at % 4];
            value = (float)scales[lane] * value + (float)scales[LANES + lane];
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

/* `rows` rows over one tile of outputs, `valid` of which exist. out and residual [rows, outputs]
 * begin at the tile; bias and residual may be NULL. */
INLINE void multiply_tile(struct rounded x, const uint8_t *packed, int64_t groups, const int rows,
                          const int planes, const float *units, const float *bias,
                          const float *residual, int64_t outputs, int64_t valid, float *out) {
    const int64_t length = groups * GROUP, block_bytes = groups * GROUP_BYTES;
    floats total[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) total[r][v] = (floats){0};
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *weights = packed + g * GROUP_BYTES;
        ints sum[ROWS][VECTORS];
#pragma GCC unroll 4
        for (int r = 0; r < rows * planes; r++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) sum[r][v] = (ints){0};
#pragma GCC unroll 1
        for (int k = 0; k < STEPS; k++) {
            ints values[VECTORS];
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++)
                memcpy(&values[v], weights + v * block_bytes + k * LANES * 4, sizeof *values);
#pragma GCC unroll 4
            for (int r = 0; r < rows * planes; r++) {
                int32_t four;
                memcpy(&four, x.values + r * length + g * GROUP + k * 4, sizeof four);
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; v++) sum[r][v] = add_products(sum[r][v], values[v], four);
            }
        }
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) {
            const uint8_t *at = weights + v * block_bytes + GROUP * LANES;
            floats scale = load_halves((const _Float16 *)at);
            floats offset = load_halves((const _Float16 *)at + LANES);
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
 * x / rms(x) * norm_weight; if `is_gated` silu(gate) * up for x of gate and up, [rows, 2 n]. They
 * never go through memory as a whole. Returns -1 without memory for the rounded rows, else 0. */
int64_t sapwood_int8_linear(const float *x, const float *norm_weight, float eps, int64_t is_gated,
                            int64_t rows, int64_t n, const uint8_t *packed, int64_t outputs,
                            int64_t planes, const float *bias, const float *residual,
                            float *out) {
    const int64_t groups = num_groups(n), tiles = num_blocks(outputs) / VECTORS;
    const int64_t row_bytes = planes * groups * GROUP, scale_bytes = groups * (int64_t)sizeof(float);
    const int64_t own_bytes = omp_get_max_threads() * n * (int64_t)sizeof(float);
    int8_t *values = malloc((size_t)(rows * (row_bytes + 2 * scale_bytes) + own_bytes));
    if (values == NULL) return -1;
    float *scales = (float *)(values + rows * row_bytes), *sums = scales + rows * groups;
    float *own_rows = sums + rows * groups; /* each thread's */
    const float *units = units_of((uint8_t *)packed, outputs, groups);
    const int tile_rows = planes == 2 ? ROWS / 2 : ROWS;
#pragma omp parallel if (rows * n * outputs > GRAIN)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            float *own = own_rows + omp_get_thread_num() * n;
            const float *row = x + i * n;
            if (norm_weight) norm_row(row, norm_weight, eps, n, own), row = own;
            if (is_gated) gate_row(x + 2 * i * n, n, own), row = own;
            int8_t *to = values + i * row_bytes;
            if (planes == 2) round_row(row, n, 2, to, scales + i * groups, sums + i * groups);
            else round_row(row, n, 1, to, scales + i * groups, sums + i * groups);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = t * VECTORS * LANES;
            const uint8_t *weights = packed + t * VECTORS * groups * GROUP_BYTES;
            for (int64_t i = 0, step; i < rows; i += step) {
                int64_t left = rows - i;
                step = left >= tile_rows ? tile_rows : left >= 2 ? 2 : 1;
                struct rounded row = {values + i * row_bytes, scales + i * groups, sums + i * groups};
                const float *before = residual ? residual + i * outputs + first : NULL;
                const float *more = bias ? bias + first : NULL;
                float *to = out + i * outputs + first;
#define TILE(R, P)                                                                             \
    if (step == R && planes == P)                                                              \
        multiply_tile(row, weights, groups, R, P, units + first, more, before, outputs,        \
                      outputs - first, to);
                TILE(4, 1) TILE(2, 1) TILE(1, 1) TILE(2, 2) TILE(1, 2)
#undef TILE
            }
        }
    }
    free(values);
    return 0;
}
