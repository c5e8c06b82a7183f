// Sixteen floats at a time, with AVX-512 or with AVX2: the arithmetic that all kernels share.
//
// The compiler's flags select the instructions. `AVX512` here means AVX-512 F, BW, DQ and VL with
// the VNNI extension, `PAIRS` these with the BF16 extension, which multiplies pairs of bf16. NaN
// passes through every function, as in torch.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define AVX512 1
#ifdef __AVX512BF16__
#define PAIRS 1
#endif
#endif

#ifdef PAIRS
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE [[gnu::noinline]] static

// As std::min and std::max, whose header takes a compiler longer to read than all of this.
constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

struct bf16 {
    uint16_t bits;
};

INLINE float scalar(float x) { return x; }
INLINE float scalar(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

enum Type { FLOAT32 = 0, BFLOAT16 = 1 };  // the codes that library.py passes

constexpr int LANES = 16;

#ifdef AVX512

typedef __m512 Floats;  // the compiler defines + - * / on it

INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
INLINE Floats load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE Floats load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
INLINE Floats load_u8(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// Four bits of each of 16 bytes, from the bit `at` on.
INLINE Floats load_nibbles(const uint8_t* p, int at) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(bytes, at), _mm512_set1_epi32(15)));
}
INLINE Floats load_s8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
#ifdef PAIRS
INLINE __m256i rounded(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
INLINE __m512i rounded(Floats low, Floats high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
#else
// To bf16, nearest even; NaN becomes a quiet NaN.
INLINE __m256i rounded(Floats x) {
    const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i whole = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(whole, 16));
}
INLINE __m512i rounded(Floats low, Floats high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(rounded(low)), rounded(high), 1);
}
#endif
INLINE void store(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, rounded(x)); }
// 32 values, past the caches. `p` is 64-byte aligned.
INLINE void stream(bf16* p, Floats low, Floats high) {
    _mm512_stream_si512((__m512i*)p, rounded(low, high));
}
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand where one of them is NaN.
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
INLINE Floats times_power_of_2(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
INLINE float sum(Floats x) { return _mm512_reduce_add_ps(x); }
INLINE float largest(Floats x) { return _mm512_reduce_max_ps(x); }

// The first or the second numbers of 16 pairs of bf16, in float32.
INLINE Floats half_of(__m512i pairs, bool second) {
    const __m512i mask = _mm512_set1_epi32((int32_t)0xffff0000);
    return (Floats)(second ? _mm512_and_si512(pairs, mask) : _mm512_slli_epi32(pairs, 16));
}

// The sums of 16 vectors, in order, as one vector: a transposition that adds on the way.
INLINE Floats sums_of_16(const Floats* x) {
    Floats pairs[8], quads[4];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) +
                   _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) +
                   _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
    // Each quad holds, in every 128-bit part, partial sums of four vectors: add the parts.
    Floats low = _mm512_shuffle_f32x4(quads[0], quads[1], 0x44) +
                 _mm512_shuffle_f32x4(quads[0], quads[1], 0xee);
    Floats high = _mm512_shuffle_f32x4(quads[2], quads[3], 0x44) +
                  _mm512_shuffle_f32x4(quads[2], quads[3], 0xee);
    return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
}

// Element j of vector i becomes element i of vector j.
INLINE void transpose(Floats* x) {
    Floats pairs[LANES], quads[LANES];  // elements of 2 and of 4 vectors, side by side
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < LANES; i++) {
        __m512d a = _mm512_castps_pd(pairs[i / 4 * 4 + i % 4 / 2]);
        __m512d b = _mm512_castps_pd(pairs[i / 4 * 4 + i % 4 / 2 + 2]);
        quads[i] = _mm512_castpd_ps(i % 2 ? _mm512_unpackhi_pd(a, b) : _mm512_unpacklo_pd(a, b));
    }
    for (int i = 0; i < 4; i++) {
        Floats *first = quads + i, *last = quads + 8 + i;
        Floats even_low = _mm512_shuffle_f32x4(first[0], first[4], 0x88);
        Floats even_high = _mm512_shuffle_f32x4(last[0], last[4], 0x88);
        Floats odd_low = _mm512_shuffle_f32x4(first[0], first[4], 0xdd);
        Floats odd_high = _mm512_shuffle_f32x4(last[0], last[4], 0xdd);
        x[i] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        x[i + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        x[i + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
}

// y, but 0 where x < limit.
INLINE Floats zero_below(Floats limit, Floats x, Floats y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}

#else

struct Floats {
    __m256 low, high;
};

INLINE Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
INLINE Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
INLINE Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
INLINE Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE __m256 load_half(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE Floats load(const bf16* p) { return {load_half(p), load_half(p + 8)}; }
INLINE Floats load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE Floats floats_of(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
}
INLINE Floats load_u8(const uint8_t* p) { return floats_of(_mm_loadu_si128((const __m128i*)p)); }
INLINE Floats load_nibbles(const uint8_t* p, int at) {
    const __m128i bytes = _mm_srli_epi16(_mm_loadu_si128((const __m128i*)p), at);
    return floats_of(_mm_and_si128(bytes, _mm_set1_epi8(15)));
}
INLINE Floats load_s8(const int8_t* p) {
    __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
INLINE void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
// The upper 16 bits, rounded to nearest even; NaN becomes a quiet NaN.
INLINE __m256i rounded_bits(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i quiet = _mm256_set1_epi32(0x7fc00000);
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
}
INLINE void store(bf16* p, Floats x) {
    __m256i both = _mm256_packus_epi32(rounded_bits(x.low), rounded_bits(x.high));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
INLINE void stream(bf16* p, Floats low, Floats high) {  // tiles of one panel write no whole lines
    store(p, low);
    store(p + LANES, high);
}
INLINE Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Floats larger(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
INLINE Floats smaller(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
INLINE Floats nearest(Floats x) {
    constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, MODE), _mm256_round_ps(x.high, MODE)};
}
INLINE Floats magnitude(Floats x) {
    __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.low, mask), _mm256_and_ps(x.high, mask)};
}
// 2^n for integers -126 <= n <= 128; 2^128 is infinity.
INLINE __m256 power_of_2(__m256 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE Floats times_power_of_2(Floats x, Floats n) {
    return {x.low * power_of_2(n.low), x.high * power_of_2(n.high)};
}
INLINE float sum(Floats x) {
    __m256 eight = x.low + x.high;
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float largest(Floats x) {
    __m256 eight = _mm256_max_ps(x.low, x.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE void transpose_8(__m256* x) {
    __m256 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i++) {
        __m256d a = _mm256_castps_pd(pairs[i / 4 * 4 + i % 4 / 2]);
        __m256d b = _mm256_castps_pd(pairs[i / 4 * 4 + i % 4 / 2 + 2]);
        quads[i] = _mm256_castpd_ps(i % 2 ? _mm256_unpackhi_pd(a, b) : _mm256_unpacklo_pd(a, b));
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
}
// Element j of vector i becomes element i of vector j.
INLINE void transpose(Floats* x) {
    __m256 quarters[4][8];  // rows 0 to 7, low and high halves, then rows 8 to 15
    for (int i = 0; i < LANES; i++) {
        quarters[i / 8 * 2][i % 8] = x[i].low;
        quarters[i / 8 * 2 + 1][i % 8] = x[i].high;
    }
    for (int i = 0; i < 4; i++) transpose_8(quarters[i]);
    for (int i = 0; i < LANES; i++) x[i] = {quarters[i / 8][i % 8], quarters[2 + i / 8][i % 8]};
}

INLINE __m256 zero_below(__m256 limit, __m256 x, __m256 y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), y);
}
// y, but 0 where x < limit.
INLINE Floats zero_below(Floats limit, Floats x, Floats y) {
    return {zero_below(limit.low, x.low, y.low), zero_below(limit.high, x.high, y.high)};
}

#endif

INLINE Floats zeros() { return all(0.0f); }

// The first n < LANES elements; the others are zero. Ends of rows: not inlined, for the compiler's time.
template <typename T>
NOINLINE Floats load_some(const T* p, int n) {
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <typename T>
NOINLINE void store_some(T* p, Floats x, int n) {
    T padded[LANES];
    store(padded, x);
    memcpy(p, padded, n * sizeof(T));
}
template <typename T>
INLINE Floats load_up_to(const T* p, int n) {
    return n >= LANES ? load(p) : load_some(p, n);
}
template <typename T>
INLINE void store_up_to(T* p, Floats x, int n) {
    if (n >= LANES)
        store(p, x);
    else
        store_some(p, x, n);
}

// e^x within 2e-7 relative: e^x = 2^n e^r with |r| <= ln(2) / 2. Polynomial of Cephes' expf.
INLINE Floats exponential(Floats x) {
    x = smaller(all(89.0f), larger(all(-87.0f), x));
    Floats n = nearest(x * all(1.44269504f));
    Floats r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p * r, r, r + all(1.0f));
    return times_power_of_2(p, n);
}
// e^x of a softmax, where x = -inf is a hidden score.
INLINE Floats exponential_or_zero(Floats x) {
    return zero_below(all(-87.0f), x, exponential(x));
}
INLINE Floats sigmoid(Floats x) { return all(1.0f) / (all(1.0f) + exponential(zeros() - x)); }
INLINE Floats hyperbolic_tangent(Floats x) {
    return all(1.0f) - all(2.0f) / (exponential(x + x) + all(1.0f));
}
