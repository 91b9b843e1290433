/* bfloat16, the upper half of a float32, on processors that multiply it (AVX512_BF16). Products of
 * two neighbours each are added to a float32 sum, at twice the rate of float32's. The processor
 * takes denormal numbers (below 1.2e-38) for zeros there, NaN and infinities as they are. */

#pragma once

#include "common.h"

/* Rounded to the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE uint16_t bf16_of_float(float x) {
    union { float value; uint32_t bits; } from = {x};
    uint32_t rounded = (from.bits + 0x7fff + (from.bits >> 16 & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : from.bits >> 16 | 0x40);
}

/* Scores are to the base 2, for which exponentials are cheaper. */
#define LOG2_E 1.44269504f
#define LN_2 0.693147181f

#ifdef __AVX512BF16__
#include <immintrin.h>

enum { CHUNK = 32 }; /* bfloat16 in a vector */

/* sum + the products of each lane's two numbers with the other's. */
INLINE __m512 add_pairs(__m512 sum, __m512i one, __m512i other) {
    return _mm512_dpbf16_ps(sum, (__m512bh)one, (__m512bh)other);
}

/* sum + each lane's two numbers. */
INLINE __m512 add_both(__m512 sum, __m512i pairs) {
    return add_pairs(sum, pairs, _mm512_set1_epi32(0x3f803f80)); /* twice 1.0 */
}

/* The rounded numbers of `one` and `other`, those of a lane side by side, one's first. */
INLINE __m512i round_to_pairs(__m512 one, __m512 other) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(other, one));
}

/* rounded = x * scale for a multiple of 8 numbers. */
INLINE void round_scaled(const float *x, float scale, int64_t n, void *rounded) {
    for (int64_t i = 0; i < n; i += 8) {
        __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale));
        _mm_storeu_si128((__m128i *)((uint16_t *)rounded + i), (__m128i)_mm256_cvtneps_pbh(scaled));
    }
}

/* The lanes of a row's chunk from number `at` that lie within its n numbers, an even number. */
INLINE __mmask16 lanes_of_chunk(int64_t at, int64_t n) {
    return (__mmask16)(n - at >= CHUNK ? 0xffff : (1u << (n - at) / 2) - 1);
}

struct chunks { __m512i low, high; };

/* Two rows' chunks number beside number: low holds the first 16 of each, high the others. */
INLINE struct chunks interleave(__m512i one, __m512i other) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    return (struct chunks){_mm512_permutex2var_epi16(one, low, other),
                           _mm512_permutex2var_epi16(one, high, other)};
}

/* 2^x for x <= 0: 2^floor(x) times a polynomial in the rest. It is off by 2^-18 at most, where
 * rounding to bfloat16 is by 2^-9, and exact at 0; 2^-inf is 0, and NaN stays NaN. */
INLINE __m512 exp2_of_nonpositive(__m512 x) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(0.0135557472f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.0520323690f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.241379763f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.693032121f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}

/* Lane i is the sum of vectors[i]. */
INLINE __m512 sums_of_16(const __m512 *vectors) {
    __m512 by_2[8], by_4[4], by_8[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512 x = vectors[2 * i], y = vectors[2 * i + 1];
        by_2[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d x = (__m512d)by_2[2 * i], y = (__m512d)by_2[2 * i + 1];
        by_4[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m512 x = by_4[2 * i], y = by_4[2 * i + 1];
        by_8[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(by_8[0], by_8[1], 0x88),
                         _mm512_shuffle_f32x4(by_8[0], by_8[1], 0xdd));
}
#endif
