// Vectors of bytes and their integer dot products, 16 sums at a time.
#pragma once

#include "simd.h"

namespace quantised {

namespace {

#ifdef AVX512

typedef __m512i Ints;
constexpr bool SIGNED_BYTES = false;  // 8-bit weights are used as 0..255, with an offset

INLINE Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Ints load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE void store_ints(uint8_t* p, Ints x) { _mm512_storeu_si512(p, x); }
INLINE Ints masked(Ints x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8((char)mask)); }
INLINE Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
INLINE Ints right(Ints x, int bits) { return _mm512_srli_epi16(x, bits); }
INLINE Ints left(Ints x, int bits) { return _mm512_slli_epi16(x, bits); }
INLINE Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
// The bytes of `table` whose numbers are those of x, below 16.
INLINE Ints look_up(Ints x, const uint8_t* table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), x);
}
// 2^(n - 128) of 16 bytes n: half of an e8m0 scale. Below 2^-126 it is 0.
INLINE Floats half_power_of_2(const uint8_t* p) {
    const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m512i less_one = _mm512_sub_epi32(_mm512_max_epi32(exponents, ints(1)), ints(1));
    return (Floats)_mm512_slli_epi32(less_one, 23);
}

// The sums of products of COUNT quads, and a number that is added: weights (unsigned bytes up to HIGHEST)
// by activations (signed bytes).
template <int HIGHEST, int COUNT>
struct Sum {
    Ints total;

    void start(int32_t with) { total = ints(with); }
    void add(Ints weights, Ints activations, int) {
        total = _mm512_dpbusd_epi32(total, weights, activations);
    }
    Ints result() const { return total; }
};

#else

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define VNNI 1  // of 256 bits
#endif

struct Ints {
    __m256i low, high;
};
#ifdef VNNI
constexpr bool SIGNED_BYTES = false;
#else
constexpr bool SIGNED_BYTES = true;
#endif

INLINE Ints ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Ints load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
INLINE void store_ints(uint8_t* p, Ints x) {
    _mm256_storeu_si256((__m256i*)p, x.low);
    _mm256_storeu_si256((__m256i*)(p + 32), x.high);
}
INLINE Ints masked(Ints x, int mask) {
    __m256i bytes = _mm256_set1_epi8((char)mask);
    return {_mm256_and_si256(x.low, bytes), _mm256_and_si256(x.high, bytes)};
}
INLINE Ints either(Ints a, Ints b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
INLINE Ints right(Ints x, int bits) {
    return {_mm256_srli_epi16(x.low, bits), _mm256_srli_epi16(x.high, bits)};
}
INLINE Ints left(Ints x, int bits) {
    return {_mm256_slli_epi16(x.low, bits), _mm256_slli_epi16(x.high, bits)};
}
INLINE Floats to_floats(Ints x) {
    return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
}
INLINE Ints look_up(Ints x, const uint8_t* table) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(both, x.low), _mm256_shuffle_epi8(both, x.high)};
}
INLINE __m256 half_power_of_2_of(__m128i bytes) {
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i exponents = _mm256_max_epi32(_mm256_cvtepu8_epi32(bytes), one);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_sub_epi32(exponents, one), 23));
}
INLINE Floats half_power_of_2(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return {half_power_of_2_of(bytes), half_power_of_2_of(_mm_srli_si128(bytes, 8))};
}

#ifdef VNNI

template <int HIGHEST, int COUNT>
struct Sum {
    Ints total;

    void start(int32_t with) { total = ints(with); }
    void add(Ints weights, Ints activations, int) {
        total = {_mm256_dpbusd_epi32(total.low, weights.low, activations.low),
                 _mm256_dpbusd_epi32(total.high, weights.high, activations.high)};
    }
    Ints result() const { return total; }
};

#else

INLINE Ints operator+(Ints a, Ints b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
INLINE __m256i pairs_of(__m256i weights, __m256i activations) {
    return _mm256_maddubs_epi16(weights, activations);
}
// Of 8-bit weights, which are made signed: their sign is moved to the activations.
INLINE __m256i pairs_of_8_bit(__m256i weights, __m256i activations) {
    __m256i value = _mm256_xor_si256(weights, _mm256_set1_epi8((char)0x80));
    return pairs_of(_mm256_abs_epi8(value), _mm256_sign_epi8(activations, value));
}
// Sums of two neighbours of 16 bits.
INLINE Ints neighbours(Ints pairs) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(pairs.low, one), _mm256_madd_epi16(pairs.high, one)};
}

// The sums of products of COUNT quads, and a number that is added: weights (unsigned bytes up to HIGHEST;
// with 255 they have an offset of 128) by activations (signed bytes). Products are added in 16 bits as
// often as these can't overflow: 2 · 127 · HIGHEST for a quad, 2 · 127 · 128 for 8 bits.
template <int HIGHEST, int COUNT>
struct Sum {
    static constexpr int DEPTH =
        (int)least(COUNT, HIGHEST < 16 ? 8 : HIGHEST < 32 ? 4 : HIGHEST < 64 ? 2 : 1);
    static_assert(DEPTH == 1 || DEPTH * 2 * 127 * HIGHEST < 1 << 15, "16 bits are too few");
    int32_t more;
    Ints total, pairs;

    void start(int32_t with) { more = with; }
    // `index`: of the quad among those that are added.
    void add(Ints weights, Ints activations, int index) {
        Ints products;
        if (HIGHEST > 127)
            products = {pairs_of_8_bit(weights.low, activations.low),
                        pairs_of_8_bit(weights.high, activations.high)};
        else
            products = {pairs_of(weights.low, activations.low),
                        pairs_of(weights.high, activations.high)};
        if (index % DEPTH == 0)
            pairs = products;
        else
            pairs = {_mm256_add_epi16(pairs.low, products.low),
                     _mm256_add_epi16(pairs.high, products.high)};
        if (index == DEPTH - 1)
            total = neighbours(pairs);
        else if (index % DEPTH == DEPTH - 1)
            total = total + neighbours(pairs);
    }
    Ints result() const { return total + ints(more); }
};

#endif

#endif

}  // namespace

}  // namespace quantised
