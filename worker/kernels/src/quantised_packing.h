// Unpacks a file's blocks, and packs their values and scales as the products read them.
#pragma once

#include "quantised_formats.h"

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

void unpack(int format, const uint8_t* p, Unpacked& out) {
    if (format == Q6_K) return unpack_q6(p, out);
    if (format == Q4_0 || format == Q8_0) {
        memcpy(out.halves, p, 2);
        if (format == Q4_0) return unpack_nibbles(p + 2, out.values, 16);
        for (int i = 0; i < BLOCK; i++) out.values[i] = p[2 + i] ^ 0x80;
        return;
    }
    if (format == MXFP4) {
        out.scales[0] = p[0];
        return unpack_nibbles(p + 1, out.values, 16);
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
