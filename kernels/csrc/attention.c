/* Attention: rows over shared and private tokens, and the merge of partial results. Keys and values
 * are floats, or bfloat16 where the processor multiplies it. Then queries and the softmax's weights
 * are rounded to bfloat16 too, while sums are float32. The denominator is the sum of the rounded
 * weights: so a result is a mean of values, whose error is in proportion to how they differ and not
 * to what they have in common, and segments that are merged are weighted as within a segment. */

#include <float.h>
#include <string.h>

#include "bf16.h"
#include "common.h"

enum {
    TOKENS = 128,     /* keys that are scored at once */
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

#ifdef __AVX512BF16__
enum { MAX_GROUP_BF16 = 4, LANES = 16 };

/* The same for bfloat16, in chunks of 32 dimensions. */
INLINE void attend_group_bf16(const float *query, const uint16_t *keys, const uint16_t *values,
                              const int64_t *slots, int64_t count, int64_t stride, float scale,
                              const int group, int64_t dim, float *out, float *lse) {
    static const uint16_t zeros[MAX_HEAD_DIM];
    _Alignas(64) uint16_t rounded[MAX_GROUP_BF16][MAX_HEAD_DIM] = {0};
    _Alignas(64) float scores[MAX_GROUP_BF16][TOKENS];
    int32_t pairs[MAX_GROUP_BF16][TOKENS / 2]; /* weights of two tokens each */
    float most[MAX_GROUP_BF16], before[MAX_GROUP_BF16];
    __m512 total[MAX_GROUP_BF16], sums[MAX_HEAD_DIM / CHUNK][MAX_GROUP_BF16][2];
    int64_t num_chunks = (dim + CHUNK - 1) / CHUNK;
    for (int g = 0; g < group; g++) {
        round_scaled(query + g * dim, scale * LOG2_E, dim, rounded[g]);
        most[g] = -FLT_MAX;
        total[g] = _mm512_setzero_ps();
        for (int64_t c = 0; c < num_chunks; c++) sums[c][g][0] = sums[c][g][1] = total[g];
    }
    for (int64_t first = 0; first < count; first += TOKENS) {
        int64_t length = count - first < TOKENS ? count - first : TOKENS;
        int64_t padded = (length + LANES - 1) / LANES * LANES;
        const uint16_t *key[TOKENS], *value[TOKENS];
        for (int64_t t = 0; t < padded; t++) {
            int64_t at = slots[first + (t < length ? t : length - 1)] * stride;
            key[t] = keys + at;
            value[t] = t < length ? values + at : zeros;
        }
        for (int64_t t = 0; t < padded; t += LANES) {
            int64_t left = length - t;
            __mmask16 is_token = (__mmask16)(left >= LANES ? 0xffff : (1u << left) - 1);
            for (int g = 0; g < group; g++) {
                __m512 dots[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) dots[i] = _mm512_setzero_ps();
                for (int64_t d = 0; d < dim; d += CHUNK) {
                    __m512i q = _mm512_load_si512(rounded[g] + d);
                    __mmask16 mask = lanes_of_chunk(d, dim);
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; i++)
                        dots[i] = add_pairs(dots[i], q,
                                            _mm512_maskz_loadu_epi32(mask, key[t + i] + d));
                }
                __m512 nothing = _mm512_set1_ps(-INFINITY);
                _mm512_store_ps(scores[g] + t,
                                _mm512_mask_mov_ps(nothing, is_token, sums_of_16(dots)));
            }
        }
        for (int g = 0; g < group; g++) {
            __m512 highest = _mm512_set1_ps(most[g]);
            for (int64_t t = 0; t < padded; t += LANES)
                highest = _mm512_max_ps(_mm512_load_ps(scores[g] + t), highest);
            __m512 now = _mm512_set1_ps(_mm512_reduce_max_ps(highest));
            __m512 shrunk = exp2_of_nonpositive(_mm512_sub_ps(_mm512_set1_ps(most[g]), now));
            most[g] = _mm512_cvtss_f32(now);
            before[g] = _mm512_cvtss_f32(shrunk);
            total[g] = _mm512_mul_ps(total[g], shrunk);
            for (int64_t t = 0; t < padded; t += LANES) {
                __m512 p = exp2_of_nonpositive(_mm512_sub_ps(_mm512_load_ps(scores[g] + t), now));
                __m256i half = (__m256i)_mm512_cvtneps_pbh(p);
                _mm256_storeu_si256((__m256i *)(pairs[g] + t / 2), half);
                total[g] = add_both(total[g], _mm512_zextsi256_si512(half));
            }
        }
        for (int64_t c = 0; c < num_chunks; c++) {
            __m512 sum[MAX_GROUP_BF16][2];
            __mmask16 mask = lanes_of_chunk(c * CHUNK, dim);
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) {
                sum[g][0] = _mm512_mul_ps(sums[c][g][0], _mm512_set1_ps(before[g]));
                sum[g][1] = _mm512_mul_ps(sums[c][g][1], _mm512_set1_ps(before[g]));
            }
            for (int64_t t = 0; t < length; t += 2) {
                __m512i one = _mm512_maskz_loadu_epi32(mask, value[t] + c * CHUNK);
                __m512i other = _mm512_maskz_loadu_epi32(mask, value[t + 1] + c * CHUNK);
                struct chunks both = interleave(one, other);
#pragma GCC unroll 4
                for (int g = 0; g < group; g++) {
                    __m512i weights = _mm512_set1_epi32(pairs[g][t / 2]);
                    sum[g][0] = add_pairs(sum[g][0], both.low, weights);
                    sum[g][1] = add_pairs(sum[g][1], both.high, weights);
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < group; g++) {
                sums[c][g][0] = sum[g][0];
                sums[c][g][1] = sum[g][1];
            }
        }
    }
    for (int g = 0; g < group; g++) {
        float denominator = _mm512_reduce_add_ps(total[g]), share = 1.0f / denominator;
        for (int64_t d = 0; d < dim; d += 8) {
            __m256 sum = _mm256_loadu_ps((const float *)sums[d / CHUNK][g] + d % CHUNK);
            _mm256_storeu_ps(out + g * dim + d, _mm256_mul_ps(sum, _mm256_set1_ps(share)));
        }
        lse[g] = most[g] * LN_2 + logf(denominator);
    }
}

/* For any group: as many query heads at once as there are registers for. */
static void attend_all_bf16(const float *query, const uint16_t *keys, const uint16_t *values,
                            const int64_t *slots, int64_t count, int64_t stride, float scale,
                            int64_t group, int64_t dim, float *out, float *lse) {
    for (int64_t g = 0; g < group; g += MAX_GROUP_BF16) {
        const float *q = query + g * dim;
        float *o = out + g * dim, *l = lse + g;
        switch (group - g) {
#define CASE(LABEL, G)                                                                      \
    LABEL : attend_group_bf16(q, keys, values, slots, count, stride, scale, G, dim, o, l);  \
        break;
            CASE(case 1, 1) CASE(case 2, 2) CASE(case 3, 3) CASE(default, MAX_GROUP_BF16)
#undef CASE
        }
    }
}
#endif

/* Attention of single rows over tokens that lie anywhere: part p is query row rows[p] over the
 * slots [starts[p], starts[p] + counts[p]) of `slots`. query [T, num_kv_heads * group, dim], its
 * rows `query_stride` floats apart, keys and values [num_slots, num_kv_heads, dim] of floats or
 * bfloat16, out [num_parts, num_kv_heads * group, dim], lse [num_parts, num_kv_heads * group]. A
 * key comes from memory once for all query heads of its group. dim is a multiple of 8, 256 at
 * most. */
void sapwood_attend(const float *query, int64_t query_stride, const void *keys,
                    const void *values, int64_t is_bf16, const int64_t *rows,
                    const int64_t *starts, const int64_t *counts, const int64_t *slots,
                    int64_t num_parts, int64_t num_kv_heads, int64_t group, int64_t dim,
                    float scale, float *out, float *lse) {
    int64_t num_heads = num_kv_heads * group, stride = num_kv_heads * dim;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) if (num_parts * num_kv_heads > 1)
    for (int64_t p = 0; p < num_parts; p++) {
        for (int64_t h = 0; h < num_kv_heads; h++) {
            const float *q = query + rows[p] * query_stride + h * group * dim;
            const int64_t *s = slots + starts[p];
            int64_t at = p * num_heads + h * group;
            float *o = out + at * dim, *l = lse + at;
            if (is_bf16) {
#ifdef __AVX512BF16__
                attend_all_bf16(q, (const uint16_t *)keys + h * dim,
                                (const uint16_t *)values + h * dim, s, counts[p], stride, scale,
                                group, dim, o, l);
#endif
                continue;
            }
            const float *k = (const float *)keys + h * dim, *v = (const float *)values + h * dim;
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
 * vectors, so that keys and values are read as they lie, one word for all lanes, and a row's
 * softmax never leaves its lane. A block is STEP keys, or STEP dimensions of a value, times up to
 * three vectors: as many sums as there are registers.
 *
 * A word is a float, or two bfloat16 that are multiplied with the two in each lane. Two dimensions
 * of a key are neighbours as they lie; two tokens' values are made so once for all vectors of a
 * tile. */
#ifdef __AVX512F__
enum { VECTOR = 16, STEP = 8, MAX_VECTORS = 3 };
#else
enum { VECTOR = 8, STEP = 4, MAX_VECTORS = 2 };
#endif
typedef float lanes __attribute__((vector_size(VECTOR * 4)));
typedef int32_t word __attribute__((may_alias));

/* The softmax of a tile's query vectors so far, a lane each: the highest score, the sum of the
 * weights, and the factor by which the last tokens have shrunk the weights before them. */
struct softmax {
    lanes most[MAX_VECTORS], total[MAX_VECTORS], before[MAX_VECTORS];
};

/* Go on with the scores of `length` tokens, which become weights. */
INLINE void weigh(struct softmax *s, lanes (*scores)[MAX_VECTORS], int64_t length,
                  const int num_vectors) {
    const int width = num_vectors * VECTOR;
    float *most = (float *)s->most, *total = (float *)s->total, *before = (float *)s->before;
#pragma omp simd
    for (int j = 0; j < width; j++) before[j] = most[j];
    for (int64_t t = 0; t < length; t++) {
        const float *score = (const float *)scores[t];
#pragma omp simd
        for (int j = 0; j < width; j++) most[j] = score[j] > most[j] ? score[j] : most[j];
    }
#pragma omp simd
    for (int j = 0; j < width; j++) {
        float factor = exp_of_nonpositive(before[j] - most[j]);
        before[j] = before[j] == most[j] ? 1.0f : factor;
        total[j] *= before[j];
    }
    for (int64_t t = 0; t < length; t++) {
        float *score = (float *)scores[t];
#pragma omp simd
        for (int j = 0; j < width; j++) {
            float p = exp_of_nonpositive(score[j] - most[j]);
            p = score[j] == -INFINITY ? 0.0f : p;
            score[j] = p;
            total[j] += p;
        }
    }
}

#ifdef __AVX512BF16__
/* The same in bfloat16, for scores to the base 2: scores[t] becomes the weights of the tokens 2 t
 * and 2 t + 1. Beside an odd last one there is a weight of zero, for which scores has room. */
INLINE void weigh_bf16(struct softmax *s, lanes (*scores)[MAX_VECTORS], int64_t length,
                       const int num_vectors) {
    __m512 most[MAX_VECTORS], total[MAX_VECTORS];
#pragma GCC unroll 3
    for (int v = 0; v < num_vectors; v++) most[v] = s->most[v];
    for (int64_t t = 0; t < length; t++)
#pragma GCC unroll 3
        for (int v = 0; v < num_vectors; v++) most[v] = _mm512_max_ps(scores[t][v], most[v]);
#pragma GCC unroll 3
    for (int v = 0; v < num_vectors; v++) {
        s->before[v] = exp2_of_nonpositive(s->most[v] - most[v]);
        s->most[v] = most[v];
        total[v] = s->total[v] * s->before[v];
        scores[length][v] = _mm512_set1_ps(-INFINITY);
    }
    for (int64_t t = 0; t < length; t += 2)
#pragma GCC unroll 3
        for (int v = 0; v < num_vectors; v++) {
            __m512i pair = round_to_pairs(exp2_of_nonpositive(scores[t][v] - most[v]),
                                          exp2_of_nonpositive(scores[t + 1][v] - most[v]));
            total[v] = add_both(total[v], pair);
            scores[t / 2][v] = (lanes)pair;
        }
#pragma GCC unroll 3
    for (int v = 0; v < num_vectors; v++) s->total[v] = total[v];
}

/* Make value[t] point to the words of the tokens 2 t and 2 t + 1, in `pairs`. Beside an odd last
 * one there are zeros. */
INLINE void pair_values(const word **value, int64_t length, int64_t dim, word *pairs) {
    int64_t width = (dim + CHUNK - 1) / CHUNK * CHUNK;
    for (int64_t t = 0; t < length; t += 2) {
        const uint16_t *one = (const uint16_t *)value[t];
        const uint16_t *other = t + 1 < length ? (const uint16_t *)value[t + 1] : NULL;
        word *to = pairs + t / 2 * width;
        for (int64_t d = 0; d < dim; d += CHUNK) {
            __mmask16 mask = lanes_of_chunk(d, dim);
            __m512i second = _mm512_setzero_si512();
            if (other != NULL) second = _mm512_maskz_loadu_epi32(mask, other + d);
            struct chunks both = interleave(_mm512_maskz_loadu_epi32(mask, one + d), second);
            _mm512_storeu_si512(to + d, both.low);
            _mm512_storeu_si512(to + d + CHUNK / 2, both.high);
        }
        value[t / 2] = to;
    }
}
#endif

INLINE lanes multiply_add(lanes sum, const word *one, lanes other, const int is_bf16) {
#ifdef __AVX512BF16__
    if (is_bf16) return add_pairs(sum, _mm512_set1_epi32(*one), (__m512i)other);
#endif
    (void)is_bf16;
    return sum + *(const float *)one * other;
}

/* Lane `lane` of query = from * scale, in words. */
INLINE void load_query(lanes (*query)[MAX_VECTORS], int64_t lane, const float *from, float scale,
                       int64_t dim, const int is_bf16) {
    if (is_bf16) {
#ifdef __AVX512BF16__
        word rounded[MAX_HEAD_DIM / 2];
        round_scaled(from, scale * LOG2_E, dim, rounded);
        for (int64_t d = 0; d < dim / 2; d++) ((word *)query[d])[lane] = rounded[d];
#endif
    } else {
        for (int64_t d = 0; d < dim; d++) ((float *)query[d])[lane] = from[d] * scale;
    }
}

struct tile_plan {
    const float *query;
    const word *keys, *values;
    const int64_t *rows, *seen, *slots;
    int64_t query_stride, num_rows, num_kv_heads, group, dim;
    float scale, *out, *lse;
};

/* Query vectors first ... first + count - 1 of KV head `head`; vector i is head i % group of row
 * i / group. */
INLINE void attend_tile(const struct tile_plan *plan, int64_t head, int64_t first, int64_t count,
                        const int num_vectors, const int is_bf16) {
    const int64_t dim = plan->dim, group = plan->group, width = (int64_t)num_vectors * VECTOR;
    const int64_t num_heads = plan->num_kv_heads * group, num_words = is_bf16 ? dim / 2 : dim;
    const int64_t stride = plan->num_kv_heads * num_words;
    lanes query[MAX_HEAD_DIM][MAX_VECTORS], sums[MAX_HEAD_DIM][MAX_VECTORS];
    lanes scores[TOKENS + STEP][MAX_VECTORS];
    struct softmax softmax;
    int32_t seen[MAX_VECTORS * VECTOR];
    int64_t longest = 0, shortest = INT64_MAX;
#ifdef __AVX512BF16__
    word pairs[TOKENS / 2 * MAX_HEAD_DIM];
#endif
    for (int64_t j = 0; j < width; j++) {
        int64_t vector = first + (j < count ? j : count - 1), row = vector / group;
        const float *from = plan->query + plan->rows[row] * plan->query_stride +
                            (head * group + vector % group) * dim;
        load_query(query, j, from, plan->scale, dim, is_bf16);
        int64_t now = plan->seen[row];
        seen[j] = (int32_t)now;
        longest = now > longest ? now : longest;
        shortest = now < shortest ? now : shortest;
        ((float *)softmax.most)[j] = is_bf16 ? -FLT_MAX : -INFINITY;
        ((float *)softmax.total)[j] = 0.0f;
    }
    for (int64_t d = 0; d < dim; d++)
        for (int v = 0; v < num_vectors; v++) sums[d][v] = (lanes){0};
    for (int64_t start = 0; start < longest; start += TOKENS) {
        int64_t length = longest - start < TOKENS ? longest - start : TOKENS;
        const word *key[TOKENS + STEP], *value[TOKENS];
        for (int64_t t = 0; t < length; t++) {
            int64_t at = plan->slots[start + t] * stride + head * num_words;
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
            for (int64_t d = 0; d < num_words; d++) {
#pragma GCC unroll 8
                for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                    for (int v = 0; v < num_vectors; v++)
                        sum[i][v] = multiply_add(sum[i][v], key[t + i] + d, query[d][v], is_bf16);
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
        int64_t num_steps = is_bf16 ? (length + 1) / 2 : length;
        if (is_bf16) {
#ifdef __AVX512BF16__
            weigh_bf16(&softmax, scores, length, num_vectors);
            pair_values(value, length, dim, pairs);
#endif
        } else {
            weigh(&softmax, scores, length, num_vectors);
        }
        for (int64_t d = 0; d < dim; d += STEP) {
            lanes sum[STEP][MAX_VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < num_vectors; v++)
                    sum[i][v] = sums[d + i][v] * softmax.before[v];
            for (int64_t t = 0; t < num_steps; t++) {
                const word *from = value[t] + d;
#pragma GCC unroll 8
                for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                    for (int v = 0; v < num_vectors; v++)
                        sum[i][v] = multiply_add(sum[i][v], from + i, scores[t][v], is_bf16);
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
        float most = ((float *)softmax.most)[j], total = ((float *)softmax.total)[j];
        float share = 1.0f / total;
        for (int64_t d = 0; d < dim; d++) plan->out[at * dim + d] = ((float *)sums[d])[j] * share;
        plan->lse[at] = (is_bf16 ? most * LN_2 : most) + logf(total);
    }
}

/* As wide as the rest of the vectors needs. */
INLINE void attend_narrow_tile(const struct tile_plan *plan, int64_t head, int64_t first,
                               int64_t count, const int is_bf16) {
    if (count <= VECTOR) attend_tile(plan, head, first, count, 1, is_bf16);
    else if (count <= 2 * VECTOR) attend_tile(plan, head, first, count, 2, is_bf16);
    else attend_tile(plan, head, first, count, MAX_VECTORS, is_bf16);
}

/* Query rows rows[i] over the first seen[i] slots of `slots`. query [T, num_kv_heads * group, dim],
 * its rows `query_stride` floats apart, keys and values [num_slots, num_kv_heads, dim] of floats or
 * bfloat16, out [num_rows, num_kv_heads * group, dim], lse [num_rows, num_kv_heads * group]. dim is
 * a multiple of 8, 256 at most. */
void sapwood_attend_rows(const float *query, int64_t query_stride, const void *keys,
                         const void *values, int64_t is_bf16, const int64_t *rows,
                         const int64_t *seen, const int64_t *slots, int64_t num_rows,
                         int64_t num_kv_heads, int64_t group, int64_t dim, float scale, float *out,
                         float *lse) {
    struct tile_plan plan = {query,    keys,         values, rows, seen,  slots, query_stride,
                             num_rows, num_kv_heads, group,  dim,  scale, out,   lse};
    int64_t count = num_rows * group, width = VECTOR * MAX_VECTORS;
    if (count <= VECTOR) width = VECTOR;
    else if (count <= 2 * VECTOR) width = 2 * VECTOR;
    int64_t num_blocks = (count + width - 1) / width;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t b = num_blocks - 1; b >= 0; b--) { /* later rows see more: the longest first */
        for (int64_t head = 0; head < num_kv_heads; head++) {
            int64_t first = b * width, left = count - first < width ? count - first : width;
            if (!is_bf16) attend_narrow_tile(&plan, head, first, left, 0);
#ifdef __AVX512BF16__
            else attend_narrow_tile(&plan, head, first, left, 1);
#endif
        }
    }
}

/* Whether the functions above take bfloat16, which they do nothing with elsewhere. */
int64_t sapwood_has_bf16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}
