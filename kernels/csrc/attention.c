/* Attention: rows over shared and private tokens, and the merge of partial results. */

#include "common.h"

enum {
    TOKENS = 64,      /* keys that are scored at once */
    MAX_HEAD_DIM = 256,
    MAX_GROUP = 16    /* query heads of a KV head that share one reading of its keys */
};

/* The query heads of one KV head over `count` tokens: a softmax that is carried on from one block
 * of tokens to the next (Milakov and Gimelshein 2018). query and out [group, dim], lse [group]. */
INLINE void attend_group(const float *query, const float *keys, const float *values,
                         const int64_t *slots, int64_t count, int64_t stride, float scale,
                         int64_t group, int64_t dim, float *out, float *lse) {
    float scores[MAX_GROUP][TOKENS], most[MAX_GROUP], total[MAX_GROUP];
    float sums[MAX_GROUP][MAX_HEAD_DIM];
    for (int64_t g = 0; g < group; g++) {
        most[g] = -INFINITY;
        total[g] = 0.0f;
        for (int64_t j = 0; j < dim; j++) sums[g][j] = 0.0f;
    }
    for (int64_t first = 0; first < count; first += TOKENS) {
        int64_t length = count - first < TOKENS ? count - first : TOKENS;
        for (int64_t t = 0; t < length; t++) {
            const float *key = keys + slots[first + t] * stride;
            for (int64_t g = 0; g < group; g++) {
                const float *q = query + g * dim;
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int64_t j = 0; j < dim; j++) dot += q[j] * key[j];
                scores[g][t] = dot * scale;
            }
        }
        for (int64_t g = 0; g < group; g++) {
            float now = most[g];
            for (int64_t t = 0; t < length; t++) now = scores[g][t] > now ? scores[g][t] : now;
            /* All are -inf or NaN: keep what makes the result NaN rather than zero. */
            float before = most[g] == now ? 1.0f : exp_of_nonpositive(most[g] - now);
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t t = 0; t < length; t++) {
                float p = exp_of_nonpositive(scores[g][t] - now);
                scores[g][t] = p;
                sum += p;
            }
            total[g] = total[g] * before + sum;
            most[g] = now;
            if (before != 1.0f)
                for (int64_t j = 0; j < dim; j++) sums[g][j] *= before;
        }
        for (int64_t t = 0; t < length; t++) {
            const float *value = values + slots[first + t] * stride;
            for (int64_t g = 0; g < group; g++) {
                float p = scores[g][t];
#pragma omp simd
                for (int64_t j = 0; j < dim; j++) sums[g][j] += p * value[j];
            }
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float share = 1.0f / total[g];
        for (int64_t j = 0; j < dim; j++) out[g * dim + j] = sums[g][j] * share;
        lse[g] = most[g] + logf(total[g]);
    }
}

/* Attention of single rows over tokens that lie anywhere: part p is query row rows[p] over the
 * slots [starts[p], starts[p] + counts[p]) of `slots`. query [T, num_kv_heads * group, dim], keys
 * and values [num_slots, num_kv_heads, dim], out [num_parts, num_kv_heads * group, dim], lse
 * [num_parts, num_kv_heads * group]. A key is read once for all query heads of its group. dim is 256
 * at most. */
void sapwood_attend(const float *query, const float *keys, const float *values,
                    const int64_t *rows, const int64_t *starts, const int64_t *counts,
                    const int64_t *slots, int64_t num_parts, int64_t num_kv_heads, int64_t group,
                    int64_t dim, float scale, float *out, float *lse) {
    int64_t num_heads = num_kv_heads * group, stride = num_kv_heads * dim;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) if (num_parts * num_kv_heads > 1)
    for (int64_t p = 0; p < num_parts; p++) {
        for (int64_t h = 0; h < num_kv_heads; h++) {
            const float *q = query + (rows[p] * num_heads + h * group) * dim;
            const float *k = keys + h * dim, *v = values + h * dim;
            const int64_t *s = slots + starts[p];
            float *o = out + (p * num_heads + h * group) * dim, *l = lse + p * num_heads + h * group;
#define CASE(G, D)                                                          \
    if (group == G && dim == D) {                                           \
        attend_group(q, k, v, s, counts[p], stride, scale, G, D, o, l);     \
        continue;                                                           \
    }
            CASE(1, 64) CASE(2, 64) CASE(3, 64) CASE(4, 64) CASE(7, 64) CASE(8, 64)
            CASE(1, 128) CASE(2, 128) CASE(3, 128) CASE(4, 128) CASE(5, 128) CASE(8, 128)
#undef CASE
            for (int64_t g = 0; g < group; g += MAX_GROUP) {
                int64_t size = group - g < MAX_GROUP ? group - g : MAX_GROUP;
                attend_group(q + g * dim, k, v, s, counts[p], stride, scale, size, dim,
                             o + g * dim, l + g);
            }
        }
    }
}

/* Row i of out [T, num_heads, dim] from the parts parts[first[i]] ... parts[first[i + 1] - 1],
 * weighted by their share of the softmax's denominator; outs [num_parts, num_heads, dim], lses
 * [num_parts, num_heads]. */
void sapwood_merge(const float *outs, const float *lses, const int64_t *parts,
                   const int64_t *first, int64_t rows, int64_t num_heads, int64_t dim,
                   float *out) {
#pragma omp parallel for schedule(static) if (rows * num_heads * dim > GRAIN)
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t h = 0; h < num_heads; h++) {
            float *to = out + (i * num_heads + h) * dim;
            float most = -INFINITY, total = 0.0f;
            for (int64_t p = first[i]; p < first[i + 1]; p++) {
                float lse = lses[parts[p] * num_heads + h];
                most = lse > most ? lse : most;
            }
            for (int64_t j = 0; j < dim; j++) to[j] = 0.0f;
            for (int64_t p = first[i]; p < first[i + 1]; p++) {
                const float *from = outs + (parts[p] * num_heads + h) * dim;
                float share = expf(lses[parts[p] * num_heads + h] - most);
                total += share;
#pragma omp simd
                for (int64_t j = 0; j < dim; j++) to[j] += share * from[j];
            }
            float scale = 1.0f / total;
#pragma omp simd
            for (int64_t j = 0; j < dim; j++) to[j] *= scale;
        }
    }
}

/* Attention of many rows over the same tokens. Query vectors lie side by side in the lanes of
 * vectors, so that keys and values are read as they lie, one number for all lanes, and a row's
 * softmax never leaves its lane. A block is STEP keys, or STEP dimensions of a value, times up to
 * three vectors: as many sums as there are registers. */
#ifdef __AVX512F__
enum { VECTOR = 16, STEP = 8, MAX_VECTORS = 3 };
#else
enum { VECTOR = 8, STEP = 4, MAX_VECTORS = 2 };
#endif
typedef float lanes __attribute__((vector_size(VECTOR * 4)));

struct tile_plan {
    const float *query, *keys, *values;
    const int64_t *rows, *seen, *slots;
    int64_t num_rows, num_kv_heads, group, dim;
    float scale, *out, *lse;
};

/* Query vectors first ... first + count - 1 of KV head `head`; vector i is head i % group of row
 * i / group. */
INLINE void attend_tile(const struct tile_plan *plan, int64_t head, int64_t first, int64_t count,
                        const int num_vectors) {
    const int64_t dim = plan->dim, group = plan->group, width = (int64_t)num_vectors * VECTOR;
    const int64_t num_heads = plan->num_kv_heads * group, stride = plan->num_kv_heads * dim;
    lanes query[MAX_HEAD_DIM][MAX_VECTORS], sums[MAX_HEAD_DIM][MAX_VECTORS];
    lanes scores[TOKENS + STEP][MAX_VECTORS];
    float most[MAX_VECTORS * VECTOR], total[MAX_VECTORS * VECTOR], before[MAX_VECTORS * VECTOR];
    int32_t seen[MAX_VECTORS * VECTOR];
    int64_t longest = 0, shortest = INT64_MAX;
    for (int64_t j = 0; j < width; j++) {
        int64_t vector = first + (j < count ? j : count - 1), row = vector / group;
        const float *from =
            plan->query + (plan->rows[row] * num_heads + head * group + vector % group) * dim;
        for (int64_t d = 0; d < dim; d++) ((float *)query[d])[j] = from[d] * plan->scale;
        int64_t now = plan->seen[row];
        seen[j] = (int32_t)now;
        longest = now > longest ? now : longest;
        shortest = now < shortest ? now : shortest;
        most[j] = -INFINITY;
        total[j] = 0.0f;
    }
    for (int64_t d = 0; d < dim; d++)
        for (int v = 0; v < num_vectors; v++) sums[d][v] = (lanes){0};
    for (int64_t start = 0; start < longest; start += TOKENS) {
        int64_t length = longest - start < TOKENS ? longest - start : TOKENS;
        const float *key[TOKENS + STEP], *value[TOKENS];
        for (int64_t t = 0; t < length; t++) {
            int64_t at = plan->slots[start + t] * stride + head * dim;
            key[t] = plan->keys + at;
            value[t] = plan->values + at;
        }
        for (int64_t t = length; t < length + STEP; t++) key[t] = key[length - 1];
        for (int64_t t = 0; t < length; t += STEP) {
            lanes sum[STEP][MAX_VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < num_vectors; v++) sum[i][v] = (lanes){0};
            for (int64_t d = 0; d < dim; d++) {
#pragma GCC unroll 8
                for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                    for (int v = 0; v < num_vectors; v++) sum[i][v] += key[t + i][d] * query[d][v];
            }
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < num_vectors; v++) scores[t + i][v] = sum[i][v];
        }
        const int is_masked = start + length > shortest;
        if (is_masked)
            for (int64_t t = 0; t < length; t++) {
                float *score = (float *)scores[t];
#pragma omp simd
                for (int64_t j = 0; j < width; j++)
                    score[j] = start + t < seen[j] ? score[j] : -INFINITY;
            }
#pragma omp simd
        for (int64_t j = 0; j < width; j++) before[j] = most[j];
        for (int64_t t = 0; t < length; t++) {
            const float *score = (const float *)scores[t];
#pragma omp simd
            for (int64_t j = 0; j < width; j++) most[j] = score[j] > most[j] ? score[j] : most[j];
        }
#pragma omp simd
        for (int64_t j = 0; j < width; j++) {
            float factor = exp_of_nonpositive(before[j] - most[j]);
            before[j] = before[j] == most[j] ? 1.0f : factor;
            total[j] *= before[j];
        }
        for (int64_t t = 0; t < length; t++) {
            float *score = (float *)scores[t];
#pragma omp simd
            for (int64_t j = 0; j < width; j++) {
                float p = exp_of_nonpositive(score[j] - most[j]);
                p = score[j] == -INFINITY ? 0.0f : p;
                score[j] = p;
                total[j] += p;
            }
        }
        for (int64_t d = 0; d < dim; d += STEP) {
            lanes sum[STEP][MAX_VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < num_vectors; v++)
                    sum[i][v] = sums[d + i][v] * *(const lanes *)(before + v * VECTOR);
            for (int64_t t = 0; t < length; t++) {
                const float *from = value[t] + d;
#pragma GCC unroll 8
                for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                    for (int v = 0; v < num_vectors; v++) sum[i][v] += from[i] * scores[t][v];
            }
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < num_vectors; v++) sums[d + i][v] = sum[i][v];
        }
    }
    for (int64_t j = 0; j < count; j++) {
        int64_t vector = first + j, row = vector / group;
        int64_t at = row * num_heads + head * group + vector % group;
        float share = 1.0f / total[j];
        for (int64_t d = 0; d < dim; d++) plan->out[at * dim + d] = ((float *)sums[d])[j] * share;
        plan->lse[at] = most[j] + logf(total[j]);
    }
}

/* Query rows rows[i] over the first seen[i] slots of `slots`. query [T, num_kv_heads * group, dim],
 * keys and values [num_slots, num_kv_heads, dim], out [num_rows, num_kv_heads * group, dim], lse
 * [num_rows, num_kv_heads * group]. dim is a multiple of 8, 256 at most. */
void sapwood_attend_rows(const float *query, const float *keys, const float *values,
                         const int64_t *rows, const int64_t *seen, const int64_t *slots,
                         int64_t num_rows, int64_t num_kv_heads, int64_t group, int64_t dim,
                         float scale, float *out, float *lse) {
    struct tile_plan plan = {query,    keys,         values, rows, seen,  slots, num_rows,
                             num_kv_heads, group, dim,  scale, out,   lse};
    int64_t count = num_rows * group, width = VECTOR * MAX_VECTORS;
    if (count <= VECTOR) width = VECTOR;
    else if (count <= 2 * VECTOR) width = 2 * VECTOR;
    int64_t num_blocks = (count + width - 1) / width;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t b = num_blocks - 1; b >= 0; b--) { /* later rows see more: the longest first */
        for (int64_t head = 0; head < num_kv_heads; head++) {
            int64_t first = b * width, left = count - first < width ? count - first : width;
            if (left <= VECTOR) attend_tile(&plan, head, first, left, 1);
            else if (left <= 2 * VECTOR) attend_tile(&plan, head, first, left, 2);
            else attend_tile(&plan, head, first, left, MAX_VECTORS);
        }
    }
}
