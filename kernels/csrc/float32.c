/* Projections in float32. Weights are packed in panels of PANEL outputs, in each all inputs in
 * order: what one sum needs next lies next, so that few rows read weights as fast as memory gives
 * them, and many rows have a panel in the cache. Each sum runs over the inputs in their order, in
 * one register, however many rows are multiplied together: a row's result depends on that row and
 * on nothing else of the batch. */

#include <stdlib.h>
#include <string.h>

#include "common.h"

#ifdef __AVX512F__
enum { ROWS = 8 };
#else
enum { ROWS = 4 };
#endif
enum { VECTORS = 3, PANEL = VECTORS * VECTOR }; /* ROWS * VECTORS sums fill the registers */

INLINE int64_t num_panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* Floats of a packed weight. */
int64_t sapwood_float32_num_floats(int64_t outputs, int64_t n) {
    return num_panels(outputs) * PANEL * n;
}

/* packed from weight [outputs, n]; zeros beside the last output. */
void sapwood_float32_pack(const float *weight, int64_t outputs, int64_t n, float *packed) {
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < num_panels(outputs); p++)
        for (int64_t k = 0; k < n; k++)
            for (int64_t j = 0; j < PANEL; j++) {
                int64_t output = p * PANEL + j;
                packed[(p * n + k) * PANEL + j] = output < outputs ? weight[output * n + k] : 0.0f;
            }
}

/* What is added to a panel's products and where they go: rows `outputs` floats apart, of which
 * `valid` are written. bias and residual may be NULL. */
struct ends {
    const float *bias, *residual;
    float *out;
    int64_t outputs, valid;
};

/* `rows` rows of x [rows, n] times a panel. */
INLINE void multiply_panel(const float *x, int64_t n, const float *panel, const int rows,
                           const struct ends *ends) {
    lanes sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sum[r][v] = (lanes){0};
    for (int64_t k = 0; k < n; k++) {
        lanes weights[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++)
            memcpy(&weights[v], panel + k * PANEL + v * VECTOR, sizeof weights[v]);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) sum[r][v] += weights[v] * x[r * n + k];
    }
    float result[ROWS][PANEL];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++)
            memcpy(result[r] + v * VECTOR, &sum[r][v], sizeof sum[r][v]);
    int64_t valid = ends->valid < PANEL ? ends->valid : PANEL;
    for (int r = 0; r < rows; r++) {
        float *to = ends->out + r * ends->outputs;
        for (int64_t j = 0; j < valid; j++) to[j] = result[r][j];
        if (ends->bias)
            for (int64_t j = 0; j < valid; j++) to[j] += ends->bias[j];
        if (ends->residual)
            for (int64_t j = 0; j < valid; j++) to[j] += ends->residual[r * ends->outputs + j];
    }
}

/* As sapwood_int8_linear, of weights packed above. */
int64_t sapwood_float32_linear(const float *x, const float *norm_weight, float eps,
                               int64_t activation, int64_t rows, int64_t n, const float *packed,
                               int64_t outputs, const float *bias, const float *residual,
                               float *out) {
    if (rows == 0) return 0;
    const int is_prepared = norm_weight != NULL || activation != UNGATED;
    float *inputs = is_prepared ? malloc((size_t)(rows * n) * sizeof(float)) : (float *)x;
    if (inputs == NULL) return -1;
#pragma omp parallel if (rows * n * outputs > GRAIN)
    {
        if (is_prepared) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < rows; i++)
                prepare_row(x, norm_weight, eps, activation, i, n, inputs + i * n);
        }
#pragma omp for schedule(static)
        for (int64_t p = 0; p < num_panels(outputs); p++) {
            const float *panel = packed + p * PANEL * n;
            const int64_t first = p * PANEL;
            for (int64_t i = 0, step; i < rows; i += step) {
                step = rows - i < ROWS ? rows - i : ROWS;
                const struct ends ends = {bias ? bias + first : NULL,
                                          residual ? residual + i * outputs + first : NULL,
                                          out + i * outputs + first, outputs, outputs - first};
                switch (step) {
#define CASE(R)                                               \
    case R:                                                   \
        multiply_panel(inputs + i * n, n, panel, R, &ends); \
        break;
                    CASE(1) CASE(2) CASE(3) CASE(4)
#if defined(__AVX512F__)
                    CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
                }
            }
        }
    }
    if (is_prepared) free(inputs);
    return 0;
}
