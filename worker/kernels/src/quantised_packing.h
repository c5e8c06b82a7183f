// Unpacks a file's blocks, and packs their values and scales as the products read them.
#pragma once

#include "quantised_formats.h"

namespace quantised {

namespace {

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

// 16 sub-blocks, each with a byte for scale and minimum.
void unpack_q2(const uint8_t* p, Unpacked& out) {
    memcpy(out.scales, p, 16);
    memcpy(out.halves, p + 80, 4);
    for (int i = 0; i < SUPER; i++)
        out.values[i] = p[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

// 16 sub-blocks with 6-bit scales less 32, in 12 bytes. A third bit is set where 4 is not subtracted.
void unpack_q3(const uint8_t* p, Unpacked& out) {
    memcpy(out.halves, p + 108, 2);
    for (int i = 0; i < 16; i++) {
        const int low = p[96 + i % 8] >> i / 8 * 4 & 15, high = p[104 + i % 4] >> i / 4 * 2 & 3;
        out.scales[i] = (uint8_t)((low | high << 4) - 32);
    }
    for (int i = 0; i < SUPER; i++) {
        const int low = p[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
        out.values[i] = low | (p[i % 32] >> i / 32 & 1) << 2;
    }
}

// 8 sub-blocks with 6-bit scales less 32: their low bits in 4 bytes, the high ones in 2.
void unpack_iq4_xs(const uint8_t* p, Unpacked& out) {
    memcpy(out.halves, p, 2);
    for (int i = 0; i < PER_SUPER; i++) {
        const int low = p[4 + i / 2] >> i % 2 * 4 & 15, high = p[2 + i / 4] >> i % 4 * 2 & 3;
        out.scales[i] = (uint8_t)((low | high << 4) - 32);
        unpack_nibbles(p + 8 + i * 16, out.values + i * BLOCK, 16);
    }
}

// 32 values: d, perhaps m, perhaps the fifth bits in 4 bytes, nibbles.
void unpack_legacy(const uint8_t* p, int halves, bool fifth, Unpacked& out) {
    memcpy(out.halves, p, 2 * halves);
    p += 2 * halves;
    unpack_nibbles(p + (fifth ? 4 : 0), out.values, 16);
    for (int i = 0; fifth && i < BLOCK; i++) out.values[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

// Q4_K and Q5_K.
void unpack_q4_q5(const uint8_t* p, bool fifth, Unpacked& out) {
    memcpy(out.halves, p, 4);
    unpack_scales(p + 4, out);
    const uint8_t* low = p + (fifth ? 48 : 16);
    for (int i = 0; i < 4; i++) unpack_nibbles(low + i * 32, out.values + i * 64, 32);
    for (int b = 0; fifth && b < PER_SUPER; b++)
        for (int i = 0; i < BLOCK; i++) out.values[b * BLOCK + i] |= (p[16 + i] >> b & 1) << 4;
}

void unpack(int format, const uint8_t* p, Unpacked& out) {
    switch (format) {
        case Q2_K: return unpack_q2(p, out);
        case Q3_K: return unpack_q3(p, out);
        case Q4_K: return unpack_q4_q5(p, false, out);
        case Q5_K: return unpack_q4_q5(p, true, out);
        case Q6_K: return unpack_q6(p, out);
        case IQ4_XS: return unpack_iq4_xs(p, out);
        case MXFP4: out.scales[0] = p[0]; return unpack_nibbles(p + 1, out.values, 16);
        case Q8_0:
            memcpy(out.halves, p, 2);
            for (int i = 0; i < BLOCK; i++) out.values[i] = p[2 + i] ^ 0x80;
            return;
        default:
            return unpack_legacy(p, SHAPES[format].halves, SHAPES[format].high > 0, out);
    }
}

// Values of one row of a panel into one block of the panel: the inverse of `quad`. The bytes of a
// quad lie together, and are moved as one word.
template <int F>
void pack_values(const uint8_t* values, int row, uint8_t* quants, uint8_t* high) {
    constexpr uint32_t EACH = 0x01010101;
    constexpr int LOW = low_bits<F>(), HIGH = high_bits<F>();
    uint32_t words[QUADS];
    memcpy(words, values, BLOCK);
    quants += row * QUAD, high += row * QUAD;
    for (int v = 0; v < LOW; v++) {
        uint32_t packed = 0;
        for (int field = 0; field < fields<F>(); field++)
            packed |= (words[v + field * LOW] & EACH * ((1 << LOW) - 1)) << field * LOW;
        memcpy(quants + v * VECTOR, &packed, QUAD);
    }
    for (int v = 0; v < HIGH; v++) {
        uint32_t packed = 0;
        for (int i = 0; i < QUADS / HIGH; i++)
            packed |= (words[v * (QUADS / HIGH) + i] >> LOW & EACH * ((1 << HIGH) - 1)) << i * HIGH;
        memcpy(high + v * VECTOR, &packed, QUAD);
    }
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
        if (s.halves) ((uint16_t*)p.d)[outer * PANEL + row] = block.halves[0];
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

// Rows beyond the last one of a panel are zeros.
template <int F>
void pack(const uint8_t* blocks, uint8_t* packed, int64_t rows, int64_t columns, int threads) {
    const int64_t row_bytes = columns / SHAPES[F].values * SHAPES[F].bytes;
    const int64_t size = panel_bytes(SHAPES[F], columns / BLOCK);
#pragma omp parallel for num_threads(threads)
    for (int64_t index = 0; index < panels_of(rows); index++) {
        const Panel p = panel_at(packed, SHAPES[F], columns / BLOCK, index);
        const int count = (int)least(PANEL, rows - index * PANEL);
        if (count < PANEL) memset(packed + index * size, 0, size);
        for (int row = 0; row < count; row++)
            pack_row<F>(blocks + (index * PANEL + row) * row_bytes, columns / BLOCK, p, row);
    }
}

}  // namespace

}  // namespace quantised
