/* Attention of rows over shared and private tokens. Keys and values are floats, or bfloat16 where
 * the processor multiplies it: then queries and the softmax's weights are rounded to it too, while
 * sums are float32. The denominator is the sum of the rounded weights, so that a result is a mean
 * of values, whose error is in proportion to how they differ and not to what they have in common.
 *
 * The bits of a row's result depend on the tokens that it sees and on nothing else: not on how they
 * are cut into segments, nor on the rows beside it, nor on which function below does it.
 *
 *   - A score is the sum over the dimensions in their order.
 *   - A weight is 2^(score - exponent), where the exponent is a whole number, of about the highest
 *     score so far. To go on to a higher one is to multiply by a power of two, which rounds nothing
 *     but what is too small for a float: less than 2^-126 of the highest weight, or of 1.
 *   - The sums of weights and of weighted values run over the tokens in their order. A segment goes
 *     on from the state in which the one before it left a row: exponent, sum of weights, sums. The
 *     softmax that is carried on is that of Milakov and Gimelshein 2018.
 *
 * Values have to be finite: a token that a row does not see may be multiplied by a weight of zero. */

#include <float.h>
#include <string.h>

#include "bf16.h"
#include "common.h"

enum {
    TOKENS = 128, /* keys that are scored at once */
    MAX_HEAD_DIM = 256,
    LINE_WORDS = 16 /* of a cache line */
};
#ifdef __AVX512F__
enum { STEP = 8, MAX_VECTORS = 3 };
#else
enum { STEP = 4, MAX_VECTORS = 2 };
#endif

/* A float, or two bfloat16 that are multiplied with the two in another word: neighbouring
 * dimensions of a key or query; the same dimension of two tokens' values, or two tokens' weights,
 * the first in the upper half, which the processor adds first. */
typedef int32_t word __attribute__((may_alias));
typedef int32_t words __attribute__((vector_size(VECTOR * 4), may_alias));

/* What both functions below attend with. `sums` [T, num_heads, dim] and `states` [T, num_heads, 2],
 * exponents and sums of weights, are of all rows of the step; scores are to the base 2. */
struct heads {
    const float *query;
    int64_t query_stride;
    const word *keys, *values;
    int64_t num_kv_heads, group, dim, num_words, token_stride; /* the last two in words */
    float scale, softcap, *sums, *states; /* no softcap if it is zero */
};

INLINE struct heads heads_of(const float *query, int64_t query_stride, const void *keys,
                             const void *values, int64_t is_bf16, int64_t num_kv_heads,
                             int64_t group, int64_t dim, float scale, float softcap, float *sums,
                             float *states) {
    int64_t num_words = is_bf16 ? dim / 2 : dim;
    return (struct heads){query, query_stride, keys, values, num_kv_heads, group, dim, num_words,
                          num_kv_heads * num_words, scale * LOG2_E, softcap, sums, states};
}

INLINE lanes multiply_add(lanes sum, words one, words other, const int is_bf16) {
#ifdef __AVX512BF16__
    if (is_bf16) return (lanes)add_pairs((__m512)sum, (__m512i)one, (__m512i)other);
#endif
    (void)is_bf16;
    return sum + (lanes)one * (lanes)other;
}

INLINE words all_words(word value) { return (words){0} + value; }

/* The first `count` words from there, at most a vector of them, and zeros. */
INLINE words load_words(const word *from, int64_t count) {
    words loaded = {0};
#ifdef __AVX512F__
    __mmask16 mask = (__mmask16)(count >= VECTOR ? 0xffff : count <= 0 ? 0 : (1u << count) - 1);
    loaded = (words)_mm512_maskz_loadu_epi32(mask, from);
#else
    if (count >= VECTOR) memcpy(&loaded, from, sizeof loaded);
    else
        for (int64_t i = 0; i < count; i++) loaded[i] = from[i];
#endif
    return loaded;
}

/* The first `count` of the words to there, at most all. */
INLINE void store_words(words from, word *to, int64_t count) {
#ifdef __AVX512F__
    __mmask16 mask = (__mmask16)(count >= VECTOR ? 0xffff : count <= 0 ? 0 : (1u << count) - 1);
    _mm512_mask_storeu_epi32(to, mask, (__m512i)from);
#else
    for (int64_t i = 0; i < VECTOR && i < count; i++) to[i] = from[i];
#endif
}

/* to [num_words] = a head's query times the scale. */
INLINE void load_query(const struct heads *heads, int64_t row, int64_t head, word *to,
                       const int is_bf16) {
    const float *from = heads->query + row * heads->query_stride + head * heads->dim;
#ifdef __AVX512BF16__
    if (is_bf16) {
        round_scaled(from, heads->scale, heads->dim, to);
        return;
    }
#endif
    (void)is_bf16;
    for (int64_t d = 0; d < heads->dim; d++) {
        float scaled = from[d] * heads->scale;
        memcpy(to + d, &scaled, sizeof scaled);
    }
}

/* The score of a token that a row does not see, and the exponent of a row that has seen none: the
 * one is so far below the other that its weight is zero. */
#define UNSEEN -FLT_MAX
#define NOTHING_SEEN -1e38f

/* 2^power for a whole number <= 1; 0 below -126 and for NaN. */
INLINE float power_of_two(float power) {
    union { int32_t bits; float value; } result;
    result.bits = ((int32_t)(power > -127.0f ? power : -127.0f) + 127) << 23;
    return result.value;
}

/* 2^(score - exponent) to 2 units in the last place. */
INLINE float weight_of(float score, float exponent) {
    float whole = rintf(score);
    return exp_near_zero((score - whole) * LN_2) * power_of_two(whole - exponent);
}

/* Scores become softcap * tanh(score / softcap), here with softcap in units of scores to the base e.
 *
 *     tanh(x) = (1 - e) / (1 + e) for x >= 0    where e = exp(-2 x) = scale * (1 + rise)
 *
 * and scale is a power of two, so that 1 - e has no less digits where it is small. */
APART void cap_scores(float *scores, int64_t count, float softcap) {
    const float slope = -2.0f / softcap, most = softcap * LOG2_E;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float power = fabsf(scores[i]) * slope; /* of two */
        power = power < -100.0f ? -100.0f : power;
        float whole = rintf(power), rest = (power - whole) * LN_2;
        float scale = power_of_two(whole), rise = exp_slope(rest) * rest;
        float above = (1.0f - scale) - scale * rise; /* 1 - e */
        float capped = copysignf(most * (above / (2.0f - above)), scores[i]);
        scores[i] = scores[i] == scores[i] ? capped : scores[i]; /* vectors' minima drop NaN */
    }
}

/* Lane j of vector i becomes lane i of vector j. */
#if defined(__GNUC__) && !defined(__clang__)
INLINE void transpose(words *vectors) { /* within blocks of four lanes first */
    words lane, low, high;
    for (int i = 0; i < VECTOR; i++) lane[i] = i;
    low = (lane & ~3) + (lane & 3) / 2 + (lane & 1) * VECTOR;
#pragma GCC unroll 8
    for (int i = 0; i < VECTOR; i += 2) {
        words one = vectors[i], other = vectors[i + 1];
        vectors[i] = __builtin_shuffle(one, other, low);
        vectors[i + 1] = __builtin_shuffle(one, other, low + 2);
    }
    low = (lane & ~3) + (lane & 1) + (lane & 2) / 2 * VECTOR;
#pragma GCC unroll 4
    for (int i = 0; i < VECTOR; i += 4) {
        words a = vectors[i], b = vectors[i + 1], c = vectors[i + 2], d = vectors[i + 3];
        vectors[i] = __builtin_shuffle(a, c, low);
        vectors[i + 1] = __builtin_shuffle(a, c, low + 2);
        vectors[i + 2] = __builtin_shuffle(b, d, low);
        vectors[i + 3] = __builtin_shuffle(b, d, low + 2);
    }
#pragma GCC unroll 2
    for (int apart = 4; apart < VECTOR; apart *= 2) {
        words is_upper = (lane & apart) != 0;
        low = lane + (is_upper & (VECTOR - apart));
        high = lane + apart + (is_upper & (VECTOR - apart));
#pragma GCC unroll 2
        for (int first = 0; first < VECTOR; first += 2 * apart)
#pragma GCC unroll 8
            for (int i = first; i < first + apart; i++) {
                words one = vectors[i], other = vectors[i + apart];
                vectors[i] = __builtin_shuffle(one, other, low);
                vectors[i + apart] = __builtin_shuffle(one, other, high);
            }
    }
}
#else
static void transpose(words *vectors) {
    int32_t from[VECTOR][VECTOR], to[VECTOR][VECTOR];
    memcpy(from, vectors, sizeof from);
    for (int i = 0; i < VECTOR; i++)
        for (int j = 0; j < VECTOR; j++) to[j][i] = from[i][j];
    memcpy(vectors, to, sizeof to);
}
#endif

/* ---- Many rows over the same tokens -------------------------------------------------------------
 *
 * Query vectors lie side by side in the lanes of vectors, so that keys and values are read as they
 * lie, one word for all lanes, and a row's softmax never leaves its lane. A block is STEP keys, or
 * STEP dimensions of a value, times up to three vectors: as many sums as there are registers. */

/* Query vectors, one a lane: their sums so far, the scores or weights of some tokens, and the
 * softmax: exponents, sums of weights, and the factor for the sums before those tokens. */
struct tile {
    lanes query[MAX_HEAD_DIM][MAX_VECTORS], sums[MAX_HEAD_DIM][MAX_VECTORS];
    lanes scores[TOKENS + STEP][MAX_VECTORS];
    lanes exponent[MAX_VECTORS], total[MAX_VECTORS], before[MAX_VECTORS];
    int64_t at[MAX_VECTORS * VECTOR]; /* each vector's place among the heads of all rows */
    int32_t begins[MAX_VECTORS * VECTOR], ends[MAX_VECTORS * VECTOR];
    int64_t first_begin, last_begin, first_end, last_end; /* the least and the greatest of them */
};

/* Go on with the scores of `length` tokens, which become weights. */
INLINE void weigh(struct tile *tile, int64_t length, const int num_vectors) {
    const int width = num_vectors * VECTOR;
    float *exponent = (float *)tile->exponent, *total = (float *)tile->total;
    float *before = (float *)tile->before, most[MAX_VECTORS * VECTOR];
#pragma omp simd
    for (int j = 0; j < width; j++) most[j] = -FLT_MAX;
    for (int64_t t = 0; t < length; t++) {
        const float *score = (const float *)tile->scores[t];
#pragma omp simd
        for (int j = 0; j < width; j++) most[j] = score[j] > most[j] ? score[j] : most[j];
    }
#pragma omp simd
    for (int j = 0; j < width; j++) {
        float now = floorf(most[j]);
        now = now > exponent[j] ? now : exponent[j];
        before[j] = power_of_two(exponent[j] - now);
        total[j] *= before[j];
        exponent[j] = now;
    }
    for (int64_t t = 0; t < length; t++) {
        float *score = (float *)tile->scores[t];
#pragma omp simd
        for (int j = 0; j < width; j++) {
            score[j] = weight_of(score[j], exponent[j]);
            total[j] += score[j];
        }
    }
}

#ifdef __AVX512BF16__
/* The same in bfloat16: scores[t] becomes the weights of the tokens 2 t and 2 t + 1. Beside an odd
 * last one there is a weight of zero, for which scores has room. */
INLINE void weigh_bf16(struct tile *tile, int64_t length, const int num_vectors) {
    lanes(*scores)[MAX_VECTORS] = tile->scores;
    __m512 exponent[MAX_VECTORS], total[MAX_VECTORS];
#pragma GCC unroll 3
    for (int v = 0; v < num_vectors; v++) exponent[v] = _mm512_set1_ps(-FLT_MAX);
    for (int64_t t = 0; t < length; t++)
#pragma GCC unroll 3
        for (int v = 0; v < num_vectors; v++)
            exponent[v] = _mm512_max_ps((__m512)scores[t][v], exponent[v]);
#pragma GCC unroll 3
    for (int v = 0; v < num_vectors; v++) {
        __m512 was = (__m512)tile->exponent[v];
        exponent[v] = _mm512_max_ps(floor_of(exponent[v]), was);
        __m512 before = _mm512_scalef_ps(_mm512_set1_ps(1.0f), was - exponent[v]);
        total[v] = (__m512)tile->total[v] * before;
        tile->before[v] = (lanes)before;
        tile->exponent[v] = (lanes)exponent[v];
        scores[length][v] = (lanes)_mm512_set1_ps(UNSEEN);
    }
    for (int64_t t = 0; t < length; t += 2)
#pragma GCC unroll 3
        for (int v = 0; v < num_vectors; v++) {
            __m512i pair = round_to_pairs(exp2_over((__m512)scores[t][v], exponent[v]),
                                          exp2_over((__m512)scores[t + 1][v], exponent[v]));
            total[v] = add_both(total[v], pair);
            scores[t / 2][v] = (lanes)pair;
        }
#pragma GCC unroll 3
    for (int v = 0; v < num_vectors; v++) tile->total[v] = (lanes)total[v];
}

/* Make value[t] point to the words of the tokens 2 t and 2 t + 1, in `pairs`. Beside an odd last
 * one there are zeros. */
INLINE void pair_values(const word **value, int64_t length, int64_t num_words, word *pairs) {
    int64_t width = (num_words + VECTOR - 1) / VECTOR * VECTOR * 2;
    for (int64_t t = 0; t < length; t += 2) {
        const word *one = value[t], *other = t + 1 < length ? value[t + 1] : NULL;
        word *to = pairs + t / 2 * width;
        for (int64_t w = 0; w < num_words; w += VECTOR) {
            words second = {0};
            if (other != NULL) second = load_words(other + w, num_words - w);
            struct chunks both =
                interleave((__m512i)load_words(one + w, num_words - w), (__m512i)second);
            _mm512_storeu_si512(to + 2 * w, both.low);
            _mm512_storeu_si512(to + 2 * w + VECTOR, both.high);
        }
        value[t / 2] = to;
    }
}
#endif

/* Query rows over the slots begins[i] ... ends[i] - 1 of `slots`, i from 0 to count - 1, at least
 * one; from the first on where `begins` is NULL. `is_first`: the rows have seen nothing before;
 * `is_last`: nothing comes after, the sums become results. */
struct segment {
    const int64_t *rows, *begins, *ends, *slots;
    int64_t count, is_first, is_last;
};

/* Query vectors first ... first + count - 1 of KV head `head`, from the state in which they are;
 * vector i is head i % group of row i / group. */
INLINE void fill_tile(struct tile *tile, const struct heads *heads, const struct segment *segment,
                      int64_t head, int64_t first, int64_t count, const int num_vectors,
                      const int is_bf16) {
    const int64_t dim = heads->dim, group = heads->group, num_words = heads->num_words;
    const int64_t num_heads = heads->num_kv_heads * group;
    word loaded[MAX_VECTORS * VECTOR][MAX_HEAD_DIM];
    tile->first_begin = tile->first_end = INT64_MAX;
    tile->last_begin = tile->last_end = 0;
    for (int64_t j = 0; j < num_vectors * VECTOR; j++) {
        int64_t vector = first + (j < count ? j : count - 1), row = vector / group;
        int64_t begin = segment->begins == NULL ? 0 : segment->begins[row], end = segment->ends[row];
        tile->begins[j] = (int32_t)begin;
        tile->ends[j] = (int32_t)end;
        tile->first_begin = begin < tile->first_begin ? begin : tile->first_begin;
        tile->last_begin = begin > tile->last_begin ? begin : tile->last_begin;
        tile->first_end = end < tile->first_end ? end : tile->first_end;
        tile->last_end = end > tile->last_end ? end : tile->last_end;
        load_query(heads, segment->rows[row], head * group + vector % group, loaded[j], is_bf16);
        tile->at[j] = segment->rows[row] * num_heads + head * group + vector % group;
        const float *state = heads->states + 2 * tile->at[j];
        ((float *)tile->exponent)[j] = segment->is_first ? NOTHING_SEEN : state[0];
        ((float *)tile->total)[j] = segment->is_first ? 0.0f : state[1];
    }
    for (int v = 0; v < num_vectors; v++) {
        for (int64_t w = 0; w < num_words; w += VECTOR) {
            words block[VECTOR];
            for (int j = 0; j < VECTOR; j++)
                block[j] = load_words(loaded[v * VECTOR + j] + w, num_words - w);
            transpose(block);
            for (int j = 0; j < VECTOR; j++) tile->query[w + j][v] = (lanes)block[j];
        }
        for (int64_t d = 0; d < dim; d += VECTOR) {
            words block[VECTOR] = {{0}};
            if (!segment->is_first) {
                for (int j = 0; j < VECTOR; j++) {
                    const float *from = heads->sums + tile->at[v * VECTOR + j] * dim + d;
                    block[j] = load_words((const word *)from, dim - d);
                }
                transpose(block);
            }
            for (int j = 0; j < VECTOR; j++) tile->sums[d + j][v] = (lanes)block[j];
        }
    }
}

/* Hide from each query vector the tokens before the first that it sees; as in score_tile. */
APART void hide_before(struct tile *tile, int64_t start, int64_t length, int64_t num_vectors) {
    for (int64_t t = 0; t < length; t++) {
        float *score = (float *)tile->scores[t];
#pragma omp simd
        for (int64_t j = 0; j < num_vectors * VECTOR; j++)
            score[j] = start + t >= tile->begins[j] ? score[j] : UNSEEN;
    }
}

/* Scores of `length` tokens, the first of which is the segment's token `start`. There are keys up
 * to a multiple of STEP. Meanwhile the tokens after them are fetched. */
INLINE void score_tile(struct tile *tile, const struct heads *heads, const struct segment *segment,
                       int64_t head, const word *const *key, int64_t start, int64_t length,
                       const int num_vectors, const int is_bf16) {
    const int64_t num_words = heads->num_words;
    for (int64_t t = 0; t < length; t += STEP) {
        const int64_t next = start + TOKENS + t;
        for (int64_t i = next; i < next + STEP && i < tile->last_end; i++) {
            int64_t token = segment->slots[i] * heads->token_stride + head * num_words;
            for (int64_t w = 0; w < num_words; w += LINE_WORDS) {
                __builtin_prefetch(heads->keys + token + w);
                __builtin_prefetch(heads->values + token + w);
            }
        }
        lanes sum[STEP][MAX_VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
            for (int v = 0; v < num_vectors; v++) sum[i][v] = (lanes){0};
        for (int64_t w = 0; w < num_words; w++) {
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < num_vectors; v++)
                    sum[i][v] = multiply_add(sum[i][v], all_words(key[t + i][w]),
                                             (words)tile->query[w][v], is_bf16);
        }
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
            for (int v = 0; v < num_vectors; v++) tile->scores[t + i][v] = sum[i][v];
    }
    if (heads->softcap > 0.0f)
        for (int64_t t = 0; t < length; t++)
            cap_scores((float *)tile->scores[t], num_vectors * VECTOR, heads->softcap);
    if (start < tile->last_begin) hide_before(tile, start, length, num_vectors);
    if (start + length <= tile->first_end) return;
    for (int64_t t = 0; t < length; t++) {
        float *score = (float *)tile->scores[t];
#pragma omp simd
        for (int64_t j = 0; j < num_vectors * VECTOR; j++)
            score[j] = start + t < tile->ends[j] ? score[j] : UNSEEN;
    }
}

/* Add the weighted values of num_steps words of tokens to the sums. */
INLINE void sum_tile(struct tile *tile, const word *const *value, int64_t num_steps, int64_t dim,
                     const int num_vectors, const int is_bf16) {
    for (int64_t d = 0; d < dim; d += STEP) {
        lanes sum[STEP][MAX_VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
            for (int v = 0; v < num_vectors; v++)
                sum[i][v] = tile->sums[d + i][v] * tile->before[v];
        for (int64_t t = 0; t < num_steps; t++) {
            const word *from = value[t] + d;
#pragma GCC unroll 8
            for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
                for (int v = 0; v < num_vectors; v++)
                    sum[i][v] = multiply_add(sum[i][v], all_words(from[i]),
                                             (words)tile->scores[t][v], is_bf16);
        }
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++)
#pragma GCC unroll 3
            for (int v = 0; v < num_vectors; v++) tile->sums[d + i][v] = sum[i][v];
    }
}

/* Leave the first `count` vectors' state, or their results. */
INLINE void empty_tile(struct tile *tile, const struct heads *heads, int64_t count,
                       int64_t is_last, const int num_vectors) {
    const int64_t dim = heads->dim;
    for (int v = 0; v < num_vectors; v++) {
        lanes share = (lanes){0} + 1.0f;
        if (is_last) share /= tile->total[v];
        int64_t left = count - v * VECTOR < VECTOR ? count - v * VECTOR : VECTOR;
        for (int64_t d = 0; d < dim; d += VECTOR) {
            words block[VECTOR];
            for (int j = 0; j < VECTOR; j++) block[j] = (words)(tile->sums[d + j][v] * share);
            transpose(block);
            for (int64_t j = 0; j < left; j++) {
                float *to = heads->sums + tile->at[v * VECTOR + j] * dim + d;
                store_words(block[j], (word *)to, dim - d);
            }
        }
    }
    for (int64_t j = 0; j < count; j++) {
        heads->states[2 * tile->at[j]] = ((float *)tile->exponent)[j];
        heads->states[2 * tile->at[j] + 1] = ((float *)tile->total)[j];
    }
}

/* The segment's tokens for query vectors first ... first + count - 1 of KV head `head`. */
INLINE void attend_tile(const struct heads *heads, const struct segment *segment, int64_t head,
                        int64_t first, int64_t count, const int num_vectors, const int is_bf16) {
    const int64_t num_words = heads->num_words;
    struct tile tile;
#ifdef __AVX512BF16__
    word pairs[TOKENS / 2 * MAX_HEAD_DIM];
#endif
    fill_tile(&tile, heads, segment, head, first, count, num_vectors, is_bf16);
    for (int64_t start = tile.first_begin; start < tile.last_end; start += TOKENS) {
        int64_t length = tile.last_end - start < TOKENS ? tile.last_end - start : TOKENS;
        const word *key[TOKENS + STEP], *value[TOKENS];
        for (int64_t t = 0; t < length; t++) {
            int64_t token = segment->slots[start + t] * heads->token_stride + head * num_words;
            key[t] = heads->keys + token;
            value[t] = heads->values + token;
        }
        for (int64_t t = length; t < length + STEP; t++) key[t] = key[length - 1];
        score_tile(&tile, heads, segment, head, key, start, length, num_vectors, is_bf16);
        int64_t num_steps = is_bf16 ? (length + 1) / 2 : length;
        if (is_bf16) {
#ifdef __AVX512BF16__
            weigh_bf16(&tile, length, num_vectors);
            pair_values(value, length, num_words, pairs);
#endif
        } else {
            weigh(&tile, length, num_vectors);
        }
        sum_tile(&tile, value, num_steps, heads->dim, num_vectors, is_bf16);
    }
    empty_tile(&tile, heads, count, segment->is_last, num_vectors);
}

/* As wide as the rest of the vectors needs. */
INLINE void attend_narrow_tile(const struct heads *heads, const struct segment *segment,
                               int64_t head, int64_t first, int64_t count, const int is_bf16) {
    if (count <= VECTOR) attend_tile(heads, segment, head, first, count, 1, is_bf16);
    else if (count <= 2 * VECTOR) attend_tile(heads, segment, head, first, count, 2, is_bf16);
    else attend_tile(heads, segment, head, first, count, MAX_VECTORS, is_bf16);
}

INLINE int64_t tile_width(int64_t num_vectors) {
    if (num_vectors <= VECTOR) return VECTOR;
    return num_vectors <= 2 * VECTOR ? 2 * VECTOR : MAX_VECTORS * VECTOR;
}

/* Segments of which no two have a row in common. Segment s is the rows first_rows[s] ...
 * first_rows[s + 1] - 1 of `rows`, `begins` and `ends`, over the slots from first_slots[s] on. A row
 * that is_first does not name has a state: an exponent of NOTHING_SEEN and zeros at first. query
 * [T, num_kv_heads * group, dim], its rows `query_stride` floats apart, keys and values
 * [num_slots, num_kv_heads, dim] of floats or bfloat16, dim a multiple of 8 and 256 at most; the
 * rest as in the structures above. */
void sapwood_attend_rows(const float *query, int64_t query_stride, const void *keys,
                         const void *values, int64_t is_bf16, const int64_t *rows,
                         const int64_t *begins, const int64_t *ends, const int64_t *slots,
                         const int64_t *first_rows, const int64_t *first_slots,
                         const int64_t *is_first, int64_t is_last, int64_t num_segments,
                         int64_t num_kv_heads, int64_t group, int64_t dim, float scale,
                         float softcap, float *sums, float *states) {
    const struct heads heads = heads_of(query, query_stride, keys, values, is_bf16, num_kv_heads,
                                        group, dim, scale, softcap, sums, states);
    int64_t num_tiles = 0;
    for (int64_t s = 0; s < num_segments; s++) {
        int64_t vectors = (first_rows[s + 1] - first_rows[s]) * group;
        num_tiles += (vectors + tile_width(vectors) - 1) / tile_width(vectors);
    }
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
    for (int64_t t = num_tiles - 1; t >= 0; t--) { /* later rows see more: the longest first */
        for (int64_t head = 0; head < num_kv_heads; head++) {
            int64_t tile = t, s = 0, vectors, width;
            for (;; s++) {
                vectors = (first_rows[s + 1] - first_rows[s]) * group;
                width = tile_width(vectors);
                int64_t here = (vectors + width - 1) / width;
                if (tile < here) break;
                tile -= here;
            }
            const int64_t first_row = first_rows[s];
            const struct segment segment = {rows + first_row,
                                            begins == NULL ? NULL : begins + first_row,
                                            ends + first_row,
                                            slots + first_slots[s],
                                            first_rows[s + 1] - first_row,
                                            is_first[s],
                                            is_last};
            int64_t first = tile * width, left = vectors - first < width ? vectors - first : width;
            if (!is_bf16) attend_narrow_tile(&heads, &segment, head, first, left, 0);
#ifdef __AVX512BF16__
            else attend_narrow_tile(&heads, &segment, head, first, left, 1);
#endif
        }
    }
}

/* ---- Single rows, each over tokens of its own ---------------------------------------------------
 *
 * Scores have a token in each lane, for which keys are transposed; results a dimension. Scores of
 * other tokens and sums of other heads and dimensions can be had apart, so that threads share even
 * one row. Keys and values of a block of tokens are used head by head, while the next block is
 * fetched as it lies: memory is fast only where it is read in a row. */

enum {
    MAX_HEADS = 4,           /* query heads of a KV head whose scores and sums are in registers */
    CHUNK_DIMS = 2 * VECTOR, /* dimensions likewise */
    MAX_CUTS = 16,           /* of a head's dimensions among threads */
    FEW = 8                  /* parts or blocks below which threads share them */
};
_Static_assert(MAX_CUTS * CHUNK_DIMS >= MAX_HEAD_DIM, "a head has more chunks than cuts");

/* Part p is row rows[p] over the slots [first_slots[p], first_slots[p + 1]) of `slots`, the last
 * that it sees; its blocks of TOKENS are first_blocks[p] ... first_blocks[p + 1] - 1 of `weights`
 * [num_blocks, num_heads, TOKENS] and `exponents` [num_blocks, num_heads]. `running` [num_parts,
 * num_heads, MAX_CUTS, 2] is what `states` is for rows, by dimensions. */
struct tails {
    const int64_t *rows, *is_first, *first_slots, *first_blocks, *slots;
    int64_t num_parts, num_slots;
    float *weights, *exponents, *running;
};

/* What is to be fetched from keys or values, two cache lines at a time. */
struct fetch {
    const word *tokens;
    const int64_t *slot, *end;
    int64_t token_stride, at;
};

INLINE void fetch_some(struct fetch *fetch) {
    if (fetch->slot >= fetch->end) return;
    const word *from = fetch->tokens + *fetch->slot * fetch->token_stride + fetch->at;
    __builtin_prefetch(from);
    __builtin_prefetch(from + 16);
    fetch->at += 32;
    if (fetch->at >= fetch->token_stride) {
        fetch->at = 0;
        fetch->slot++;
    }
}

/* At most a block of tokens from place `first` of the slots on, before `end`. */
INLINE struct fetch fetch_after(const struct tails *tails, int64_t first, int64_t end,
                                const word *tokens, const struct heads *heads) {
    if (end > first + TOKENS) end = first + TOKENS;
    return (struct fetch){tokens, tails->slots + first, tails->slots + end, heads->token_stride, 0};
}

/* scores [group][TOKENS] of two vectors of tokens, from their transposed keys [num_words][2]. */
INLINE void score_tokens(word (*query)[MAX_HEAD_DIM], words (*keys)[2], int64_t num_words,
                         const int group, float *scores, struct fetch *next, const int is_bf16) {
    lanes sum[MAX_HEADS][2];
#pragma GCC unroll 4
    for (int g = 0; g < group; g++) sum[g][0] = sum[g][1] = (lanes){0};
    for (int64_t w = 0; w < num_words; w++) {
        fetch_some(next);
#pragma GCC unroll 4
        for (int g = 0; g < group; g++) {
            words q = all_words(query[g][w]);
            sum[g][0] = multiply_add(sum[g][0], keys[w][0], q, is_bf16);
            sum[g][1] = multiply_add(sum[g][1], keys[w][1], q, is_bf16);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < group; g++) memcpy(scores + g * TOKENS, sum[g], sizeof sum[g]);
}

/* The weights of `length` scores, with zeros up to `padded`; returns their exponent. */
INLINE float weigh_tokens(float *scores, int64_t length, int64_t padded, const int is_bf16) {
    float most = -FLT_MAX;
    for (int64_t t = length; t < padded; t++) scores[t] = UNSEEN;
#pragma omp simd reduction(max : most)
    for (int64_t t = 0; t < padded; t++) most = scores[t] > most ? scores[t] : most;
    float exponent = floorf(most);
#ifdef __AVX512BF16__
    if (is_bf16) {
        for (int64_t t = 0; t < padded; t += VECTOR)
            _mm512_storeu_ps(scores + t,
                             exp2_over(_mm512_loadu_ps(scores + t), _mm512_set1_ps(exponent)));
        return exponent;
    }
#endif
    (void)is_bf16;
#pragma omp simd
    for (int64_t t = 0; t < padded; t++) scores[t] = weight_of(scores[t], exponent);
    return exponent;
}

/* Block `block` of part p for the query heads of KV heads [first_head, end_head). */
INLINE void score_block(const struct heads *heads, const struct tails *tails, int64_t p,
                        int64_t block, int64_t first_head, int64_t end_head, const int is_bf16) {
    const int64_t group = heads->group, num_words = heads->num_words;
    int64_t first = tails->first_slots[p] + (block - tails->first_blocks[p]) * TOKENS;
    int64_t length = tails->first_slots[p + 1] - first;
    if (length > TOKENS) length = TOKENS;
    int64_t padded = (length + 2 * VECTOR - 1) / (2 * VECTOR) * (2 * VECTOR);
    struct fetch next = fetch_after(tails, first + length, tails->num_slots, heads->keys, heads);
    words keys[MAX_HEAD_DIM][2];
    word query[MAX_HEADS][MAX_HEAD_DIM];
    const word *key[TOKENS];
    for (int64_t t = 0; t < padded; t++) {
        int64_t slot = tails->slots[first + (t < length ? t : length - 1)];
        key[t] = heads->keys + slot * heads->token_stride;
    }
    for (int64_t head = first_head; head < end_head; head++) {
        int64_t place = (block * heads->num_kv_heads + head) * group;
        float *weights = tails->weights + place * TOKENS;
        for (int64_t t = 0; t < length; t += 2 * VECTOR) {
            for (int i = 0; i < 2; i++)
                for (int64_t w = 0; w < num_words; w += VECTOR) {
                    words vectors[VECTOR];
#pragma GCC unroll 16
                    for (int j = 0; j < VECTOR; j++)
                        vectors[j] = load_words(
                            key[t + i * VECTOR + j] + head * num_words + w, num_words - w);
                    transpose(vectors);
#pragma GCC unroll 16
                    for (int j = 0; j < VECTOR; j++) keys[w + j][i] = vectors[j];
                }
            for (int64_t g = 0; g < group; g += MAX_HEADS) {
                int64_t size = group - g < MAX_HEADS ? group - g : MAX_HEADS;
                if (t == 0 || group > MAX_HEADS)
                    for (int64_t i = 0; i < size; i++)
                        load_query(heads, tails->rows[p], head * group + g + i, query[i], is_bf16);
                float *s = weights + g * TOKENS + t;
                switch (size) {
                    case 1: score_tokens(query, keys, num_words, 1, s, &next, is_bf16); break;
                    case 2: score_tokens(query, keys, num_words, 2, s, &next, is_bf16); break;
                    case 3: score_tokens(query, keys, num_words, 3, s, &next, is_bf16); break;
                    default: score_tokens(query, keys, num_words, MAX_HEADS, s, &next, is_bf16);
                }
            }
        }
        if (heads->softcap > 0.0f)
            for (int64_t g = 0; g < group; g++)
                cap_scores(weights + g * TOKENS, padded, heads->softcap);
        for (int64_t g = 0; g < group; g++)
            tails->exponents[place + g] =
                weigh_tokens(weights + g * TOKENS, length, padded, is_bf16);
    }
}

/* to = the words of `padded` weights, times a factor. */
INLINE void load_weights(const float *weights, int64_t padded, float factor, word *to,
                         const int is_bf16) {
#ifdef __AVX512BF16__
    if (is_bf16) {
        for (int64_t t = 0; t < padded; t += VECTOR) {
            __m512 scaled = _mm512_loadu_ps(weights + t) * _mm512_set1_ps(factor);
            __m256i pairs = (__m256i)_mm512_cvtneps_pbh(scaled);
            _mm256_storeu_si256((__m256i *)(to + t / 2), _mm256_rol_epi32(pairs, 16));
        }
        return;
    }
#endif
    (void)is_bf16;
    for (int64_t t = 0; t < padded; t++) {
        float scaled = weights[t] * factor;
        memcpy(to + t, &scaled, sizeof scaled);
    }
}

/* Two vectors of value words from word w on, of token t and, in bfloat16, the next. */
struct value_words { words low, high; };
INLINE struct value_words load_values(const word *const *value, int64_t t, int64_t w,
                                      int64_t num_words, const int is_bf16) {
#ifdef __AVX512BF16__
    if (is_bf16) {
        struct chunks both = interleave((__m512i)load_words(value[2 * t] + w, num_words - w),
                                        (__m512i)load_words(value[2 * t + 1] + w, num_words - w));
        return (struct value_words){(words)both.low, (words)both.high};
    }
#endif
    (void)is_bf16;
    return (struct value_words){load_words(value[t] + w, num_words - w),
                                load_words(value[t] + w + VECTOR, num_words - w - VECTOR)};
}

/* sums [group][dim] * before + the weighted values of dimensions d ... d + CHUNK_DIMS - 1; if asked
 * for, the same for the sum of the weights, total [group]. */
INLINE void add_values(const word *const *value, int64_t d, int64_t dim, int64_t num_words,
                       int64_t num_steps, word (*weights)[TOKENS], const float *before,
                       const int group, float *sums, float *totals, struct fetch *next,
                       const int with_total, const int is_bf16) {
    const words ones = all_words(is_bf16 ? 0x3f803f80 : 0x3f800000); /* 1.0 twice, or once */
    const int64_t w = is_bf16 ? d / 2 : d;
    lanes sum[MAX_HEADS][2], total[MAX_HEADS];
#pragma GCC unroll 4
    for (int g = 0; g < group; g++) {
        const word *from = (const word *)sums + g * dim + d;
        sum[g][0] = (lanes)load_words(from, dim - d) * before[g];
        sum[g][1] = (lanes)load_words(from + VECTOR, dim - d - VECTOR) * before[g];
        if (with_total) total[g] = (lanes){0} + totals[g] * before[g];
    }
    for (int64_t t = 0; t < num_steps; t++) {
        struct value_words both = load_values(value, t, w, num_words, is_bf16);
        fetch_some(next);
#pragma GCC unroll 4
        for (int g = 0; g < group; g++) {
            words weight = all_words(weights[g][t]);
            sum[g][0] = multiply_add(sum[g][0], both.low, weight, is_bf16);
            sum[g][1] = multiply_add(sum[g][1], both.high, weight, is_bf16);
            if (with_total) total[g] = multiply_add(total[g], ones, weight, is_bf16);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < group; g++) {
        word *to = (word *)sums + g * dim + d;
        store_words((words)sum[g][0], to, dim - d);
        store_words((words)sum[g][1], to + VECTOR, dim - d - VECTOR);
        if (with_total) totals[g] = total[g][0];
    }
}

/* What a thread sums up: the dimensions [first_dim, end_dim) of KV heads [first_head, end_head). */
struct share {
    int64_t first_head, end_head, first_dim, end_dim;
};

/* Block `block` of part p, `length` tokens from place `first` of the slots on, for query heads g
 * ... g + group - 1 of KV head `head`. */
INLINE void sum_block(const struct heads *heads, const struct tails *tails, int64_t p,
                      int64_t block, const word *const *value, int64_t length, int64_t head,
                      int64_t g, const int group, const struct share *share, struct fetch *next,
                      const int is_bf16) {
    const int64_t dim = heads->dim, num_words = heads->num_words;
    int64_t num_heads = heads->num_kv_heads * heads->group, at = head * heads->group + g;
    int64_t padded = (length + 2 * VECTOR - 1) / (2 * VECTOR) * (2 * VECTOR);
    int64_t num_steps = is_bf16 ? (length + 1) / 2 : length;
    int64_t place = block * num_heads + at;
    float *sums = heads->sums + (tails->rows[p] * num_heads + at) * dim;
    float *running =
        tails->running + ((p * num_heads + at) * MAX_CUTS + share->first_dim / CHUNK_DIMS) * 2;
    word weights[MAX_HEADS][TOKENS];
    float before[MAX_HEADS], totals[MAX_HEADS];
    for (int i = 0; i < group; i++) {
        float *state = running + i * MAX_CUTS * 2;
        float of_block = tails->exponents[place + i];
        float now = of_block > state[0] ? of_block : state[0];
        before[i] = power_of_two(state[0] - now);
        state[0] = now;
        totals[i] = state[1];
        load_weights(tails->weights + (place + i) * TOKENS, padded, power_of_two(of_block - now),
                     weights[i], is_bf16);
    }
    int64_t d = share->first_dim;
    add_values(value, d, dim, num_words, num_steps, weights, before, group, sums, totals, next, 1,
               is_bf16);
    for (d += CHUNK_DIMS; d < share->end_dim; d += CHUNK_DIMS)
        add_values(value, d, dim, num_words, num_steps, weights, before, group, sums, totals, next,
                   0, is_bf16);
    for (int i = 0; i < group; i++) running[i * MAX_CUTS * 2 + 1] = totals[i];
}

/* A share of part p's result. Values up to place `end_fetch` of the slots are fetched ahead. */
INLINE void sum_part(const struct heads *heads, const struct tails *tails, int64_t p,
                     const struct share *share, int64_t end_fetch, const int is_bf16) {
    static const word zeros[MAX_HEAD_DIM];
    const int64_t group = heads->group, dim = heads->dim, num_words = heads->num_words;
    int64_t num_heads = heads->num_kv_heads * group;
    int64_t first_of_row = tails->rows[p] * num_heads, cut = share->first_dim / CHUNK_DIMS;
    int64_t first_head = share->first_head * group, end_head = share->end_head * group;
    for (int64_t h = first_head; h < end_head; h++) {
        const float *state = heads->states + 2 * (first_of_row + h);
        float *running = tails->running + ((p * num_heads + h) * MAX_CUTS + cut) * 2;
        running[0] = tails->is_first[p] ? NOTHING_SEEN : state[0];
        running[1] = tails->is_first[p] ? 0.0f : state[1];
        if (tails->is_first[p])
            memset(heads->sums + (first_of_row + h) * dim + share->first_dim, 0,
                   (size_t)(share->end_dim - share->first_dim) * sizeof(float));
    }
    int64_t block = tails->first_blocks[p];
    for (int64_t first = tails->first_slots[p]; first < tails->first_slots[p + 1];
         first += TOKENS, block++) {
        int64_t length = tails->first_slots[p + 1] - first;
        if (length > TOKENS) length = TOKENS;
        struct fetch next = fetch_after(tails, first + length, end_fetch, heads->values, heads);
        for (int64_t head = share->first_head; head < share->end_head; head++) {
            const word *value[TOKENS + 1];
            for (int64_t t = 0; t < length; t++)
                value[t] = heads->values + tails->slots[first + t] * heads->token_stride +
                           head * num_words;
            value[length] = zeros; /* beside an odd last one */
            for (int64_t g = 0; g < group; g += MAX_HEADS)
                switch (group - g) {
#define CASE(LABEL, G)                                                                       \
    LABEL : sum_block(heads, tails, p, block, value, length, head, g, G, share, &next, is_bf16); \
        break;
                    CASE(case 1, 1) CASE(case 2, 2) CASE(case 3, 3) CASE(default, MAX_HEADS)
#undef CASE
                }
        }
    }
    for (int64_t h = first_head; h < end_head; h++) {
        float *sums = heads->sums + (first_of_row + h) * dim;
        float scale = 1.0f / tails->running[((p * num_heads + h) * MAX_CUTS + cut) * 2 + 1];
        for (int64_t d = share->first_dim; d < share->end_dim; d++) sums[d] *= scale;
    }
}

INLINE void attend_tails(const struct heads *heads, const struct tails *tails,
                         const int is_bf16) {
    const int64_t num_kv_heads = heads->num_kv_heads, dim = heads->dim;
    const int64_t num_parts = tails->num_parts, num_blocks = tails->first_blocks[num_parts];
    int64_t step = num_blocks < FEW ? 1 : num_kv_heads;
    int64_t num_cuts = num_parts * num_kv_heads < FEW ? (dim + CHUNK_DIMS - 1) / CHUNK_DIMS : 1;
    int64_t dims = num_cuts == 1 ? dim : CHUNK_DIMS;
#pragma omp parallel
    {
        int64_t p = 0;
#pragma omp for collapse(2) schedule(static)
        for (int64_t block = 0; block < num_blocks; block++)
            for (int64_t head = 0; head < num_kv_heads; head += step) {
                while (block >= tails->first_blocks[p + 1]) p++;
                score_block(heads, tails, p, block, head, head + step, is_bf16);
            }
        if (num_parts < FEW) {
#pragma omp for collapse(3) schedule(dynamic, 1)
            for (int64_t part = 0; part < num_parts; part++)
                for (int64_t head = 0; head < num_kv_heads; head++)
                    for (int64_t cut = 0; cut < num_cuts; cut++) {
                        int64_t d = cut * dims, end = d + dims < dim ? d + dims : dim;
                        const struct share share = {head, head + 1, d, end};
                        sum_part(heads, tails, part, &share, tails->first_slots[part + 1], is_bf16);
                    }
        } else {
            const struct share all = {0, num_kv_heads, 0, dim};
#pragma omp for schedule(static)
            for (int64_t part = 0; part < num_parts; part++)
                sum_part(heads, tails, part, &all, tails->num_slots, is_bf16);
        }
    }
}

/* The last tokens that single rows see; see struct tails, and sapwood_attend_rows for the rest. */
void sapwood_attend_tails(const float *query, int64_t query_stride, const void *keys,
                          const void *values, int64_t is_bf16, const int64_t *rows,
                          const int64_t *is_first, const int64_t *first_slots,
                          const int64_t *first_blocks, const int64_t *slots, int64_t num_parts,
                          int64_t num_kv_heads, int64_t group, int64_t dim, float scale,
                          float softcap, float *sums, float *states, float *weights,
                          float *exponents, float *running) {
    const struct heads heads = heads_of(query, query_stride, keys, values, is_bf16, num_kv_heads,
                                        group, dim, scale, softcap, sums, states);
    const struct tails tails = {rows,      is_first,  first_slots,            first_blocks,
                                slots,     num_parts, first_slots[num_parts], weights,
                                exponents, running};
    if (!is_bf16) attend_tails(&heads, &tails, 0);
#ifdef __AVX512BF16__
    else attend_tails(&heads, &tails, 1);
#endif
}

/* Results `sums` [rows, num_heads, dim] of which `states` has exponents and sums of weights, beside
 * one more token for each head that has a score, of sinks [num_heads], and no value. */
void sapwood_add_sinks(const float *states, const float *sinks, int64_t rows, int64_t num_heads,
                       int64_t dim, float *sums) {
    for (int64_t i = 0; i < rows * num_heads; i++) {
        float sink = sinks[i % num_heads] * LOG2_E, exponent = states[2 * i];
        sink = sink < NOTHING_SEEN ? NOTHING_SEEN : sink > -NOTHING_SEEN ? -NOTHING_SEEN : sink;
        float highest = floorf(sink) > exponent ? floorf(sink) : exponent;
        float seen = states[2 * i + 1] * power_of_two(exponent - highest);
        float share = seen / (seen + weight_of(sink, highest));
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) sums[i * dim + d] *= share;
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
