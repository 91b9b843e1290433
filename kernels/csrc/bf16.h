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

/* sum + the products of each lane's two numbers with the other's, the upper half's first, each
 * rounded. */
INLINE __m512 add_pairs(__m512 sum, __m512i one, __m512i other) {
    return _mm512_dpbf16_ps(sum, (__m512bh)one, (__m512bh)other);
}

/* sum + each lane's two numbers. */
INLINE __m512 add_both(__m512 sum, __m512i pairs) {
    return add_pairs(sum, pairs, _mm512_set1_epi32(0x3f803f80)); /* twice 1.0 */
}

/* The rounded numbers of `one` and `other`, those of a lane side by side, one's in the upper half:
 * the processor adds the upper product first. */
INLINE __m512i round_to_pairs(__m512 one, __m512 other) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(one, other));
}

/* rounded = x * scale for a multiple of 8 numbers. */
INLINE void round_scaled(const float *x, float scale, int64_t n, void *rounded) {
    for (int64_t i = 0; i < n; i += 8) {
        __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale));
        _mm_storeu_si128((__m128i *)((uint16_t *)rounded + i), (__m128i)_mm256_cvtneps_pbh(scaled));
    }
}

struct chunks { __m512i low, high; };

/* Two rows' 32 numbers side by side, one's in the upper half: low holds the first 16 of each, high
 * the others. */
INLINE struct chunks interleave(__m512i one, __m512i other) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    return (struct chunks){_mm512_permutex2var_epi16(other, low, one),
                           _mm512_permutex2var_epi16(other, high, one)};
}

INLINE __m512 floor_of(__m512 x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

/* 2^(x - whole) for a whole number: a polynomial in what x lies above its floor, and an exponent, so
 * that the same bits come of any `whole`. It is off by 2^-18 at most, where rounding to bfloat16 is
 * by 2^-9, and exact for a whole x; of NaN and infinities it is NaN. */
INLINE __m512 exp2_over(__m512 x, __m512 whole) {
    __m512 floor = floor_of(x), rest = _mm512_sub_ps(x, floor);
    __m512 p = _mm512_set1_ps(0.0135557472f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.0520323690f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.241379763f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.693032121f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, _mm512_sub_ps(floor, whole));
}
#endif
