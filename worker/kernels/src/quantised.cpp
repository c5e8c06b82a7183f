// Products with GGUF's quantised weights, in integers.
//
// Activations are rounded to int8 with one scale per token and 32 channels, so a row's result does
// not depend on the others. Weights stay quantised, but are packed at load: 16 output rows (a panel)
// lie side by side, four channels of each row adjacent, as integer dot products read them. All
// tiles add in the same order: a row's result is the same, bit for bit, in every batch. With AMX, many
// rows of bf16 (prefill) are not rounded, but multiplied with weights that are dequantised to bf16.
#include "program.h"
#include "simd.h"
#include "tiles.h"
#include "work.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <type_traits>

namespace {

constexpr int BLOCK = 32;   // channels with one activation scale
constexpr int SUPER = 256;  // channels of a block of the K formats
constexpr int PER_SUPER = SUPER / BLOCK;
constexpr int PANEL = LANES;      // output rows side by side
constexpr int QUAD = 4;           // channels of one integer dot product
constexpr int VECTOR = PANEL * QUAD;  // bytes of one quad of a panel
constexpr int QUADS = BLOCK / QUAD;
constexpr int WIDE_FROM = 64;  // rows from which the matrix unit multiplies in bf16

enum FormatCode { Q4_0, Q8_0, Q4_K, Q5_K, Q6_K };  // the codes in quantised.py
template <FormatCode F>
using Code = std::integral_constant<FormatCode, F>;

// ---- Integers, 16 sums at a time -----------------------------------------------------------------

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
// total + weights (unsigned bytes) · activations (signed bytes), by quads.
INLINE Ints dot(Ints total, Ints weights, Ints activations) {
    return _mm512_dpbusd_epi32(total, weights, activations);
}
INLINE Ints dot_8_bit(Ints total, Ints weights, Ints activations) {
    return dot(total, weights, activations);
}

#else

struct Ints {
    __m256i low, high;
};
constexpr bool SIGNED_BYTES = true;

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
// The 16-bit sums of pairs can't saturate: 2 · 63 · 127 for up to 6 bits, 2 · 128 · 127 for 8.
INLINE __m256i dot_half(__m256i total, __m256i weights, __m256i activations) {
    __m256i pairs = _mm256_maddubs_epi16(weights, activations);
    return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE Ints dot(Ints total, Ints weights, Ints activations) {
    return {dot_half(total.low, weights.low, activations.low),
            dot_half(total.high, weights.high, activations.high)};
}
// 8-bit weights are made signed, and their sign is moved to the activations.
INLINE __m256i dot_half_8_bit(__m256i total, __m256i weights, __m256i activations) {
    __m256i value = _mm256_xor_si256(weights, _mm256_set1_epi8((char)0x80));
    return dot_half(total, _mm256_abs_epi8(value), _mm256_sign_epi8(activations, value));
}
INLINE Ints dot_8_bit(Ints total, Ints weights, Ints activations) {
    return {dot_half_8_bit(total.low, weights.low, activations.low),
            dot_half_8_bit(total.high, weights.high, activations.high)};
}

#endif

// ---- Packed formats ------------------------------------------------------------------------------

// Bytes that a panel has per block of 32 channels, or with `per_super` per 256 channels.
struct Shape {
    int quants;   // low 4 bits, or all 8
    int high;     // further bits
    int scales;   // one byte per row, or two
    int minima;   // one byte per row
    int halves;   // fp16 numbers per row: d, dmin
    bool per_super;  // whether the halves belong to 256 channels
    int values;   // channels of a block in the file
    int bytes;    // of a block in the file
};

constexpr Shape SHAPES[] = {
    {256, 0, 0, 0, 1, false, BLOCK, 18},      // Q4_0
    {512, 0, 0, 0, 1, false, BLOCK, 34},      // Q8_0
    {256, 0, 16, 16, 2, true, SUPER, 144},    // Q4_K
    {256, 64, 16, 16, 2, true, SUPER, 176},   // Q5_K
    {256, 128, 32, 0, 1, true, SUPER, 210},   // Q6_K
};

// The parts of one panel, one after the other.
struct Panel {
    const uint8_t *quants, *high, *scales, *minima;
    const uint16_t *d, *dmin;
};

INLINE int64_t panel_bytes(const Shape& s, int64_t blocks) {
    int64_t groups = s.per_super ? blocks / PER_SUPER : blocks;
    int64_t bytes = blocks * (s.quants + s.high + s.scales + s.minima);
    bytes += groups * s.halves * PANEL * (int64_t)sizeof(uint16_t);
    return (bytes + VECTOR - 1) / VECTOR * VECTOR;
}

INLINE Panel panel_at(const uint8_t* packed, const Shape& s, int64_t blocks, int64_t index) {
    Panel p;
    p.quants = packed + index * panel_bytes(s, blocks);
    p.high = p.quants + blocks * s.quants;
    p.scales = p.high + blocks * s.high;
    p.minima = p.scales + blocks * s.scales;
    p.d = (const uint16_t*)(p.minima + blocks * s.minima);
    p.dmin = p.d + (s.per_super ? blocks / PER_SUPER : blocks) * PANEL;
    return p;
}

// Quad `c` of block `b` of a panel: unsigned bytes.
template <int F>
INLINE Ints quad(const Panel& p, int64_t b, int c) {
    if (F == Q8_0) return load_bytes(p.quants + b * 512 + c * VECTOR);
    Ints both = load_bytes(p.quants + b * 256 + (c % 4) * VECTOR);
    Ints low = masked(c < 4 ? both : right(both, 4), 0x0f);
    if (F == Q5_K) {  // bit c of each byte
        Ints bits = load_bytes(p.high + b * 64);
        return either(low, masked(c < 4 ? left(bits, 4 - c) : right(bits, c - 4), 0x10));
    }
    if (F == Q6_K) {  // two bits per byte and quad, four quads per vector
        Ints bits = load_bytes(p.high + b * 128 + c / 4 * VECTOR);
        int at = c % 4 * 2;
        return either(low, masked(at < 4 ? left(bits, 4 - at) : right(bits, at - 4), 0x30));
    }
    return low;
}

// ---- Products ------------------------------------------------------------------------------------

// Rounded activations of all rows.
struct Rounded {
    int8_t* values;     // [rows, columns]
    float* scales;      // [rows, blocks]
    int32_t* sums;      // [rows, blocks, 2]: of the values of each half block
    float* minus_sums;  // [rows, blocks]: of the whole block, negated
    int64_t columns;

    int64_t blocks() const { return columns / BLOCK; }
};

// What is subtracted from every weight, as a multiple of its scale.
template <int F>
constexpr int offset() {
    return F == Q4_0 ? 8 : F == Q6_K ? 32 : F == Q8_0 && !SIGNED_BYTES ? 128 : 0;
}

// The weight scales of one block of a panel: of its halves for Q6_K, or scale and minimum.
struct Scales {
    Floats first, second;
};

template <int F>
INLINE Scales scales_of(const Panel& p, int64_t block) {
    if (F == Q4_0 || F == Q8_0) return {load_f16(p.d + block * PANEL), zeros()};
    Floats d = load_f16(p.d + block / PER_SUPER * PANEL);
    if (F == Q6_K) {
        const int8_t* scales = (const int8_t*)p.scales + block * 2 * PANEL;
        return {d * load_s8(scales), d * load_s8(scales + PANEL)};
    }
    Floats dmin = load_f16(p.dmin + block / PER_SUPER * PANEL);
    return {d * load_u8(p.scales + block * PANEL), dmin * load_u8(p.minima + block * PANEL)};
}

// total + one block's product of a panel with a row. `a` and `b` are the integer sums of the block
// (of its halves for Q6_K), without the offset of the weights.
template <int F>
INLINE Floats add_block(Floats total, const Scales& s, Ints a, Ints b, float scale,
                        float minus_sum) {
    if (F == Q4_0 || F == Q8_0) return fma(to_floats(a), s.first * all(scale), total);
    Floats value = to_floats(a) * s.first;
    value = fma(s.second, F == Q6_K ? to_floats(b) : all(minus_sum), value);
    return fma(value, all(scale), total);
}

INLINE Ints broadcast_quad(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return ints(four);
}

// Where results go: y [rows, outputs] of either type, with `stride` elements between rows.
struct Output {
    void* y;
    int64_t stride;
    int type;
    int64_t first = 0;  // output of this matrix

    void put(int64_t row, int64_t panel, Floats x) const {
        int64_t at = row * stride + first + panel * PANEL;
        if (type == FLOAT32)
            store((float*)y + at, x);
        else
            store((bf16*)y + at, x);
    }
};

// Cache lines of a panel per block, rounded up.
template <int F>
constexpr int block_lines() {
    constexpr Shape s = SHAPES[F];
    constexpr int halves = s.halves * PANEL * 2 / (s.per_super ? PER_SUPER : 1);
    return (s.quants + s.high + s.scales + s.minima + halves + LINE - 1) / LINE;
}

// Where a tile finds a panel: as it is packed, or widened.
template <int F>
struct Packed {
    Panel panel;

    Ints weights(int64_t b, int c) const { return quad<F>(panel, b, c); }
    Scales scales(int64_t b) const { return scales_of<F>(panel, b); }
    // Both nibbles of a vector one after the other.
    static constexpr int order(int i) { return F == Q8_0 ? i : i / 2 + i % 2 * 4; }
};

// A panel with a byte for each weight and scales in float32, so that tiles of many rows needn't
// compute these again and again.
template <int F>
struct Widened {
    uint8_t* bytes;

    static constexpr int QUANTS = QUADS * VECTOR;
    static constexpr int BLOCK_BYTES = QUANTS + 2 * PANEL * (int)sizeof(float);

    float* scales_at(int64_t b) const { return (float*)(bytes + b * BLOCK_BYTES + QUANTS); }
    Ints weights(int64_t b, int c) const {
        return load_bytes(bytes + b * BLOCK_BYTES + c * VECTOR);
    }
    Scales scales(int64_t b) const { return {load(scales_at(b)), load(scales_at(b) + PANEL)}; }
    static constexpr int order(int i) { return i; }

    void fill(const Packed<F>& from, int64_t blocks) const {
        for (int64_t b = 0; b < blocks; b++) {
            for (int c = 0; c < QUADS; c++)
                store_ints(bytes + b * BLOCK_BYTES + c * VECTOR, from.weights(b, c));
            const Scales scales = from.scales(b);
            store(scales_at(b), scales.first);
            store(scales_at(b) + PANEL, scales.second);
        }
    }
};

// y of P panels, of which the first is `first_panel`, and R rows.
template <int F, int P, int R, typename Source>
void tile(const Source* panels, int64_t first_panel, const Rounded& x, int64_t first_row,
          const Output& y, Ahead& ahead) {
    constexpr int HALVES = F == Q6_K ? 2 : 1;
    const int64_t blocks = x.blocks();
    const int8_t* values = x.values + first_row * x.columns;
    const float* scales = x.scales + first_row * blocks;
    const int32_t* sums = x.sums + first_row * blocks * 2;
    const float* minus_sums = x.minus_sums + first_row * blocks;
    Floats total[P][R];
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) total[p][r] = zeros();
    for (int64_t b = 0; b < blocks; b++) {
        Ints dots[P][R][HALVES];
        for (int r = 0; r < R; r++) {
            const int32_t* half = sums + (r * blocks + b) * 2;
            for (int h = 0; h < HALVES; h++) {
                int sum = HALVES == 2 ? half[h] : half[0] + half[1];
                for (int p = 0; p < P; p++) dots[p][r][h] = ints(-offset<F>() * sum);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < QUADS; i++) {
            const int c = Source::order(i);
            const int h = HALVES == 2 ? c / 4 : 0;
            Ints weights[P];
            for (int p = 0; p < P; p++) weights[p] = panels[p].weights(b, c);
            for (int r = 0; r < R; r++) {
                Ints four = broadcast_quad(values + r * x.columns + b * BLOCK + c * QUAD);
                for (int p = 0; p < P; p++)
                    dots[p][r][h] = F == Q8_0 ? dot_8_bit(dots[p][r][h], weights[p], four)
                                              : dot(dots[p][r][h], weights[p], four);
            }
        }
        for (int p = 0; p < P; p++) {
            ahead.fetch(block_lines<F>());
            const Scales weight = panels[p].scales(b);
            for (int r = 0; r < R; r++)
                total[p][r] = add_block<F>(total[p][r], weight, dots[p][r][0],
                                           dots[p][r][HALVES - 1], scales[r * blocks + b],
                                           minus_sums[r * blocks + b]);
        }
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) y.put(first_row + r, first_panel + p, total[p][r]);
}

// Rows from which tiles have several panels, which are widened. Tiles are as large as there are
// registers for. By measurement, see docs/performance.md.
constexpr int MANY = 12;
constexpr int64_t UNIT_BYTES = 1 << 18, UNITS_PER_THREAD = 4;  // of few rows
#ifdef AVX512
constexpr int FEW = 8;  // rows of a tile of one panel
constexpr int PANELS = 2;
template <int F> constexpr int tile_rows() { return F == Q6_K ? 4 : 8; }
#else
constexpr int FEW = 4;
constexpr int PANELS = 1;
template <int F> constexpr int tile_rows() { return 4; }
#endif

template <int F>
void few_rows(const Packed<F>& panel, int64_t index, const Rounded& x, int64_t rows,
              const Output& y, Ahead& ahead) {
    int64_t row = 0;
    for (; row + FEW <= rows; row += FEW) tile<F, 1, FEW>(&panel, index, x, row, y, ahead);
    for (; row + 4 <= rows; row += 4) tile<F, 1, 4>(&panel, index, x, row, y, ahead);
    for (; row + 2 <= rows; row += 2) tile<F, 1, 2>(&panel, index, x, row, y, ahead);
    if (row < rows) tile<F, 1, 1>(&panel, index, x, row, y, ahead);
}

// MANY rows or more with `count` panels. The last tile overlaps with the one before; half a tile is
// enough where few rows are left.
template <int F, typename Source>
void many_rows(const Source* panels, int count, int64_t first_panel, const Rounded& x,
               int64_t rows, const Output& y, Ahead& ahead) {
    constexpr int R = tile_rows<F>();
    for (int64_t row = 0; row < rows; row += R) {
        const bool half = rows - row <= R / 2;
        const int64_t at = std::min(row, rows - (half ? R / 2 : R));
        if (count < PANELS)
            for (int p = 0; p < count; p++)
                tile<F, 1, R>(panels + p, first_panel + p, x, std::min(row, rows - R), y, ahead);
        else if (half)
            tile<F, PANELS, R / 2>(panels, first_panel, x, at, y, ahead);
        else
            tile<F, PANELS, R>(panels, first_panel, x, at, y, ahead);
    }
}

// ---- Tiles of the matrix unit --------------------------------------------------------------------

#ifdef __AMX_BF16__

// One block of a panel as bf16: pairs of channels of the 16 rows side by side.
template <int F>
INLINE void widen(const Panel& panel, int64_t b, uint8_t* out) {
    const Scales scales = scales_of<F>(panel, b);
    const Floats minimum = F == Q4_K || F == Q5_K ? scales.second : zeros();
    for (int c = 0; c < QUADS; c++) {
        const Ints bytes = quad<F>(panel, b, c);
        const Floats scale = F == Q6_K && c >= QUADS / 2 ? scales.second : scales.first;
        __m512i channels[QUAD];
        for (int i = 0; i < QUAD; i++) {
            Ints byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * i), ints(255));
            Floats value = (to_floats(byte) - all(offset<F>())) * scale - minimum;
            channels[i] = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
        }
        for (int i = 0; i < QUAD; i += 2)
            _mm512_store_si512(out + (c * QUAD + i) / 2 * VECTOR,
                               either(channels[i], _mm512_slli_epi32(channels[i + 1], 16)));
    }
}

// 2 · TILE_ROWS rows of x by two panels of bf16 → sums [panel][row][output].
INLINE void multiply_bf16(const bf16* x, int64_t stride, const uint8_t* first,
                          const uint8_t* second, int64_t blocks, float* sums) {
    constexpr int TILE = TILE_ROWS * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t b = 0; b < blocks; b++) {
        _tile_loadd(4, x + b * BLOCK, stride * sizeof(bf16));
        _tile_loadd(6, first + b * BLOCK * PANEL * sizeof(bf16), VECTOR);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + TILE_ROWS * stride + b * BLOCK, stride * sizeof(bf16));
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, second + b * BLOCK * PANEL * sizeof(bf16), VECTOR);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, VECTOR);
    _tile_stored(1, sums + TILE, VECTOR);
    _tile_stored(2, sums + 2 * TILE, VECTOR);
    _tile_stored(3, sums + 3 * TILE, VECTOR);
}

// y of at least WIDE_FROM rows in bf16, which are not rounded further: two panels at a time are
// dequantised once for all rows.
template <int F>
void product_in_bf16(const uint8_t* packed, const bf16* x, int64_t stride, int64_t rows,
                     int64_t columns, int64_t panels, const Output& y, int64_t& next) {
    constexpr int ROWS = 2 * TILE_ROWS;
    const int64_t blocks = columns / BLOCK, size = columns * PANEL * (int64_t)sizeof(bf16);
    uint8_t* widened = (uint8_t*)aligned_alloc(VECTOR, 2 * size);
    alignas(64) float sums[2 * ROWS * PANEL];
    configure_tiles(VECTOR, TILE_ROWS);
    hand_out((panels + 1) / 2, next, [&](int64_t unit, int64_t) {
        const int64_t first = 2 * unit;
        const int count = first + 1 < panels ? 2 : 1;
        for (int p = 0; p < count; p++) {
            const Panel panel = panel_at(packed, SHAPES[F], blocks, first + p);
            for (int64_t b = 0; b < blocks; b++)
                widen<F>(panel, b, widened + p * size + b * BLOCK * PANEL * sizeof(bf16));
        }
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t at = row + ROWS <= rows ? row : rows - ROWS;  // the last rows overlap
            multiply_bf16(x + at * stride, stride, widened, widened + (count - 1) * size, blocks,
                          sums);
            for (int p = 0; p < count; p++)
                for (int r = 0; r < ROWS; r++)
                    y.put(at + r, first + p, load(sums + (p * ROWS + r) * PANEL));
        }
    });
    _tile_release();
    free(widened);
}

#else

template <int F>
void product_in_bf16(const uint8_t*, const bf16*, int64_t, int64_t, int64_t, int64_t,
                     const Output&, int64_t&) {}

#endif

// Panels of a unit for few rows: memory is read faster in longer pieces, as long as there are enough
// for all threads.
INLINE int64_t panels_of_few_rows(int64_t bytes, int64_t panels) {
    const int64_t each = panels / (UNITS_PER_THREAD * omp_get_num_threads());
    return std::max<int64_t>(1, std::min(UNIT_BYTES / bytes, each));
}

// y of one matrix: the share of this thread of a parallel region, which all its threads enter.
// `next`: see `hand_out`.
template <int F>
void product(const uint8_t* packed, const Rounded& x, int64_t rows, int64_t panels,
             const Output& y, int64_t& next) {
    constexpr bool WIDENS = F != Q8_0;  // which has a byte for each weight already
    const int64_t blocks = x.blocks(), bytes = panel_bytes(SHAPES[F], blocks);
    const int64_t together = rows >= MANY ? PANELS : panels_of_few_rows(bytes, panels);
    Widened<F> widened[PANELS] = {};
    if (rows >= MANY && WIDENS)
        for (auto& panel : widened)
            panel.bytes = (uint8_t*)aligned_alloc(VECTOR, blocks * Widened<F>::BLOCK_BYTES);
    hand_out((panels + together - 1) / together, next, [&](int64_t unit, int64_t following) {
        Ahead ahead{};
        if (following >= 0) {
            ahead.at = (const char*)packed + following * together * bytes;
            ahead.end = ahead.at + together * bytes;
        }
        const int64_t first = unit * together;
        const int count = (int)std::min<int64_t>(together, panels - first);
        if (rows < MANY) {
            for (int p = 0; p < count; p++) {
                const Packed<F> panel{panel_at(packed, SHAPES[F], blocks, first + p)};
                few_rows(panel, first + p, x, rows, y, ahead);
            }
            return;
        }
        Packed<F> here[PANELS];
        for (int p = 0; p < count; p++)
            here[p].panel = panel_at(packed, SHAPES[F], blocks, first + p);
        if (!WIDENS) return many_rows<F>(here, count, first, x, rows, y, ahead);
        for (int p = 0; p < count; p++) widened[p].fill(here[p], blocks);
        many_rows<F>(widened, count, first, x, rows, y, ahead);
    });
    for (auto& panel : widened) free(panel.bytes);
}

// ---- Activations ---------------------------------------------------------------------------------

// Whole numbers within ±127 as bytes.
#ifdef AVX512
INLINE void store_bytes(int8_t* p, Floats x) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
#else
INLINE void store_bytes(int8_t* p, Floats x) {
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, high));
}
#endif

// One block: int8 values, their scale and the sums of both halves. A block with NaN or infinity
// gets the scale NaN, which makes the row's products NaN.
template <typename T>
void round_block(const T* x, int8_t* values, float* scale, int32_t* sums, float* minus_sum) {
    Floats parts[2] = {load(x), load(x + LANES)};
    Floats strange = (parts[0] - parts[0]) + (parts[1] - parts[1]);
    float highest = largest(larger(magnitude(parts[0]), magnitude(parts[1])));
    bool finite = sum(strange) == 0.0f;
    float factor = finite && highest > 0 ? 127.0f / highest : 0.0f;
    *scale = finite ? highest / 127.0f : NAN;
    if (!(factor < INFINITY)) factor = 0.0f;  // all values are denormal: they become zero
    for (int h = 0; h < 2; h++) {
        Floats rounded = finite ? nearest(parts[h] * all(factor)) : zeros();
        store_bytes(values + h * LANES, rounded);
        sums[h] = (int32_t)sum(rounded);
    }
    *minus_sum = (float)-(sums[0] + sums[1]);
}

// The share of this thread of all rows.
template <typename T>
void round_rows(const T* x, int64_t stride, int64_t rows, const Rounded& out) {
    const int64_t blocks = out.blocks();
#pragma omp for schedule(static)
    for (int64_t at = 0; at < rows * blocks; at++)
        round_block(x + at / blocks * stride + at % blocks * BLOCK, out.values + at * BLOCK,
                    out.scales + at, out.sums + at * 2, out.minus_sums + at);
}

// ---- Packing -------------------------------------------------------------------------------------

// One block of the file: 32 or 256 unsigned values, their scales and minima, d and dmin.
struct Unpacked {
    uint8_t values[SUPER], scales[16], minima[8];
    uint16_t halves[2];
};

void unpack_nibbles(const uint8_t* low, uint8_t* out, int half) {
    for (int i = 0; i < half; i++) {
        out[i] = low[i] & 15;
        out[half + i] = low[i] >> 4;
    }
}

// 6-bit scales and minima of 8 sub-blocks in 12 bytes.
void unpack_scales(const uint8_t* p, Unpacked& out) {
    for (int i = 0; i < 4; i++) {
        out.scales[i] = p[i] & 63;
        out.minima[i] = p[4 + i] & 63;
        out.scales[4 + i] = (p[8 + i] & 15) | (p[i] >> 6 << 4);
        out.minima[4 + i] = (p[8 + i] >> 4) | (p[4 + i] >> 6 << 4);
    }
}

void unpack_q6(const uint8_t* p, Unpacked& out) {
    const uint8_t *low = p, *high = p + 128;
    memcpy(out.scales, p + 192, 16);
    memcpy(out.halves, p + 208, 2);
    for (int half = 0; half < 2; half++, low += 64, high += 32)
        for (int quarter = 0; quarter < 4; quarter++) {
            uint8_t* values = out.values + half * 128 + quarter * 32;
            const uint8_t* nibbles = low + quarter % 2 * 32;
            for (int i = 0; i < 32; i++)
                values[i] = (nibbles[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
        }
}

void unpack(int format, const uint8_t* p, Unpacked& out) {
    if (format == Q6_K) return unpack_q6(p, out);
    if (format == Q4_0 || format == Q8_0) {
        memcpy(out.halves, p, 2);
        if (format == Q4_0) return unpack_nibbles(p + 2, out.values, 16);
        for (int i = 0; i < BLOCK; i++) out.values[i] = p[2 + i] ^ 0x80;
        return;
    }
    memcpy(out.halves, p, 4);
    unpack_scales(p + 4, out);
    const uint8_t* low = p + (format == Q5_K ? 48 : 16);
    for (int i = 0; i < 4; i++) unpack_nibbles(low + i * 32, out.values + i * 64, 32);
    if (format == Q5_K)
        for (int b = 0; b < PER_SUPER; b++)
            for (int i = 0; i < BLOCK; i++) out.values[b * BLOCK + i] |= (p[16 + i] >> b & 1) << 4;
}

// Values of one row of a panel into one block of the panel: the inverse of `quad`. The bytes of a
// quad lie together, and are moved as one word.
template <int F>
void pack_values(const uint8_t* values, int row, uint8_t* quants, uint8_t* high) {
    constexpr uint32_t EACH = 0x01010101;
    uint32_t words[QUADS], bits[2] = {0, 0};
    memcpy(words, values, BLOCK);
    quants += row * QUAD, high += row * QUAD;
    for (int c = 0; c < QUADS; c++) {
        uint32_t word = words[c];
        if (F == Q5_K) bits[0] |= (word >> 4 & EACH) << c;
        if (F == Q6_K) bits[c / 4] |= (word >> 4 & EACH * 3) << c % 4 * 2;
        if (F != Q8_0 && c >= 4) continue;
        if (F != Q8_0) word = (word & EACH * 15) | (words[c + 4] & EACH * 15) << 4;
        memcpy(quants + c * VECTOR, &word, QUAD);
    }
    if (F == Q5_K || F == Q6_K) memcpy(high, &bits[0], QUAD);
    if (F == Q6_K) memcpy(high + VECTOR, &bits[1], QUAD);
}

// One row of a panel, from the file's blocks.
template <int F>
void pack_row(const uint8_t* source, int64_t blocks, const Panel& p, int row) {
    constexpr Shape s = SHAPES[F];
    constexpr int INNER = s.values / BLOCK;  // blocks of 32 per block of the file
    constexpr int SCALES = s.scales / PANEL;
    for (int64_t outer = 0; outer < blocks / INNER; outer++, source += s.bytes) {
        Unpacked block;
        unpack(F, source, block);
        ((uint16_t*)p.d)[outer * PANEL + row] = block.halves[0];
        if (s.halves == 2) ((uint16_t*)p.dmin)[outer * PANEL + row] = block.halves[1];
        for (int i = 0; i < INNER; i++) {
            const int64_t b = outer * INNER + i;
            pack_values<F>(block.values + i * BLOCK, row, (uint8_t*)p.quants + b * s.quants,
                           (uint8_t*)p.high + b * s.high);
            if (s.minima) ((uint8_t*)p.minima)[b * PANEL + row] = block.minima[i];
            for (int j = 0; j < SCALES; j++)
                ((uint8_t*)p.scales)[b * s.scales + j * PANEL + row] = block.scales[i * SCALES + j];
        }
    }
}

template <int F>
void pack(const uint8_t* blocks, uint8_t* packed, int64_t rows, int64_t columns, int threads) {
    const int64_t row_bytes = columns / SHAPES[F].values * SHAPES[F].bytes;
#pragma omp parallel for num_threads(threads)
    for (int64_t index = 0; index < rows / PANEL; index++) {
        Panel p = panel_at(packed, SHAPES[F], columns / BLOCK, index);
        for (int row = 0; row < PANEL; row++)
            pack_row<F>(blocks + (index * PANEL + row) * row_bytes, columns / BLOCK, p, row);
    }
}

}  // namespace

// Bytes of `rows` (a multiple of 16) packed rows of `columns` channels.
EXPORT int64_t packed_bytes(int format, int64_t rows, int64_t columns) {
    return rows / PANEL * panel_bytes(SHAPES[format], columns / BLOCK);
}

// The file's blocks of `rows` rows → `packed`.
EXPORT void pack_rows(int format, const uint8_t* blocks, uint8_t* packed, int64_t rows,
                      int64_t columns, int threads) {
    switch (format) {
        case Q4_0: return pack<Q4_0>(blocks, packed, rows, columns, threads);
        case Q8_0: return pack<Q8_0>(blocks, packed, rows, columns, threads);
        case Q4_K: return pack<Q4_K>(blocks, packed, rows, columns, threads);
        case Q5_K: return pack<Q5_K>(blocks, packed, rows, columns, threads);
        case Q6_K: return pack<Q6_K>(blocks, packed, rows, columns, threads);
    }
}
FROM_WORDS(pack_rows)

// y [rows, all outputs] = x Wᵀ, with W the `parts` matrices one below the other. `table` holds the
// format, the packed rows and the number of outputs of each. `scratch`: 48 bytes per row and block.
EXPORT void quantised_linear(const void* x, int64_t stride, int64_t rows, int64_t columns,
                             int type, const int64_t* table, int parts, void* y, int64_t y_stride,
                             uint8_t* scratch, int threads) {
    const int64_t blocks = rows * (columns / BLOCK);
    float* scales = (float*)(scratch + blocks * BLOCK);
    const Rounded rounded{(int8_t*)scratch, scales, (int32_t*)(scales + 2 * blocks),
                          scales + blocks, columns};
    const bool wide = type == BFLOAT16 && rows >= WIDE_FROM && tiles_are_allowed();
    const std::unique_ptr<int64_t[]> next(new int64_t[parts]());
#pragma omp parallel num_threads(threads)
    {
        if (type == FLOAT32)
            round_rows((const float*)x, stride, rows, rounded);
        else if (!wide)
            round_rows((const bf16*)x, stride, rows, rounded);
        Output out{y, y_stride, type};
        for (int i = 0; i < parts; i++) {
            const int64_t* part = table + 3 * i;
            const uint8_t* packed = (const uint8_t*)part[1];
            const int64_t panels = part[2] / PANEL;
            const auto multiply = [&](auto format) {
                constexpr int F = decltype(format)::value;
                if (wide)
                    product_in_bf16<F>(packed, (const bf16*)x, stride, rows, columns, panels, out,
                                       next[i]);
                else
                    product<F>(packed, rounded, rows, panels, out, next[i]);
            };
            switch (part[0]) {
                case Q4_0: multiply(Code<Q4_0>()); break;
                case Q8_0: multiply(Code<Q8_0>()); break;
                case Q4_K: multiply(Code<Q4_K>()); break;
                case Q5_K: multiply(Code<Q5_K>()); break;
                case Q6_K: multiply(Code<Q6_K>()); break;
            }
            out.first += part[2];
        }
    }
}
FROM_WORDS(quantised_linear)
