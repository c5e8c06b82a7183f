// Products of rounded activations with packed weights, in tiles of panels and rows: few rows with the
// weights as they are packed, many rows with widened ones.
#pragma once

#include "quantised_formats.h"
#include "work.h"

namespace quantised {

namespace {

// The integer sums of one block, or of one of its parts.
template <int F>
using Dots = Sum<highest<F>(), QUADS / scaled_parts<F>()>;

// total + one block's product of a panel with a row. `dots` are the integer sums of the parts of the
// block, without the offset of the weights; `minus_sums` those of the activations, negated.
template <int F>
INLINE Floats add_block(Floats total, const Scales& s, const Dots<F>* dots, float scale,
                        const float* minus_sums) {
    constexpr int PARTS = scaled_parts<F>();
    if (PARTS == 1 && !has_minima<F>())
        return fma(to_floats(dots[0].result()), s.scale[0] * all(scale), total);
    Floats value = to_floats(dots[0].result()) * s.scale[0];
    if (PARTS == 2) value = fma(s.scale[1], to_floats(dots[1].result()), value);
    for (int h = 0; h < PARTS && has_minima<F>(); h++)
        value = fma(s.minimum[h], all(minus_sums[h]), value);
    return fma(value, all(scale), total);
}

INLINE Ints broadcast_quad(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return ints(four);
}

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
    // All fields of a vector one after the other; but one part after the other where `Sum` needs it.
    static constexpr int order(int i) {
        if (SIGNED_BYTES && scaled_parts<F>() == 2) return i;
        return i / fields<F>() + i % fields<F>() * low_bits<F>();
    }
};

// A panel with a byte for each weight and scales in float32, so that tiles of many rows needn't
// compute these again and again.
template <int F>
struct Widened {
    uint8_t* bytes;

    static constexpr int QUANTS = QUADS * VECTOR, PARTS = scaled_parts<F>();
    static constexpr int SCALES = PARTS * (has_minima<F>() ? 2 : 1);
    static constexpr int BLOCK_BYTES = QUANTS + SCALES * PANEL * (int)sizeof(float);

    float* scales_at(int64_t b) const { return (float*)(bytes + b * BLOCK_BYTES + QUANTS); }
    Ints weights(int64_t b, int c) const {
        return load_bytes(bytes + b * BLOCK_BYTES + c * VECTOR);
    }
    Scales scales(int64_t b) const {
        Scales out;
        for (int h = 0; h < PARTS; h++) {
            out.scale[h] = load(scales_at(b) + h * PANEL);
            if (has_minima<F>()) out.minimum[h] = load(scales_at(b) + (PARTS + h) * PANEL);
        }
        return out;
    }
    static constexpr int order(int i) { return i; }

    void fill(const Packed<F>& from, int64_t blocks) const {
        for (int64_t b = 0; b < blocks; b++) {
            for (int c = 0; c < QUADS; c++)
                store_ints(bytes + b * BLOCK_BYTES + c * VECTOR, from.weights(b, c));
            const Scales scales = from.scales(b);
            for (int h = 0; h < PARTS; h++) {
                store(scales_at(b) + h * PANEL, scales.scale[h]);
                if (has_minima<F>()) store(scales_at(b) + (PARTS + h) * PANEL, scales.minimum[h]);
            }
        }
    }
};

// y of P panels, of which the first is `first_panel`, and R rows. Each of `passes` over the panels fetches
// its part of the next ones with some of the blocks, so that memory and arithmetic units are both busy
// all the time.
template <int F, int P, int R, typename Source>
void tile(const Source* panels, int64_t first_panel, const Rounded& x, int64_t first_row,
          const Output& y, Ahead& ahead, int passes) {
    constexpr int HALVES = scaled_parts<F>();
    const int64_t blocks = x.blocks();
    const int8_t* values = x.values + first_row * x.columns;
    const float* scales = x.scales + first_row * blocks;
    const int32_t* sums = x.sums + first_row * blocks * 2;
    const float* minus_sums = x.minus_sums + first_row * blocks;
    int wait = 1;  // blocks until some lines are fetched
    Floats total[P][R];
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) total[p][r] = zeros();
    for (int64_t b = 0; b < blocks; b++) {
        Dots<F> dots[P][R][HALVES];
        for (int r = 0; r < R; r++) {
            const int32_t* half = sums + (r * blocks + b) * 2;
            for (int h = 0; h < HALVES; h++) {
                int sum = HALVES == 2 ? half[h] : half[0] + half[1];
                for (int p = 0; p < P; p++) dots[p][r][h].start(-offset<F>() * sum);
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
                    dots[p][r][h].add(weights[p], four, i % (QUADS / HALVES));
            }
        }
        if (--wait == 0) {
            ahead.fetch(P * block_lines<F>());
            wait = passes;
        }
        for (int p = 0; p < P; p++) {
            const Scales weight = panels[p].scales(b);
            for (int r = 0; r < R; r++) {
                const int64_t at = r * blocks + b;
                const float halves[2] = {(float)-sums[2 * at], (float)-sums[2 * at + 1]};
                total[p][r] = add_block<F>(total[p][r], weight, dots[p][r], scales[at],
                                           HALVES == 2 ? halves : minus_sums + at);
            }
        }
    }
    const bool streams = P == 2 && y.streams_from(first_panel);
    for (int r = 0; r < R; r++) {
        if (streams)
            y.stream(first_row + r, first_panel, total[0][r], total[P - 1][r]);
        else
            for (int p = 0; p < P; p++) y.put(first_row + r, first_panel + p, total[p][r]);
    }
}

// Rows from which tiles have several panels, which are widened. Tiles are as large as there are
// registers for, with some to spare: sums in memory cost more than smaller tiles. By measurement, see
// docs/optimisations.md.
constexpr int MANY = 8;
constexpr int64_t UNIT_BYTES = 1 << 18, UNITS_PER_THREAD = 4;  // of few rows
#ifdef AVX512
constexpr int PANELS = 2;
template <int F> constexpr int tile_rows() { return scaled_parts<F>() == 2 ? 4 : 6; }
#else
constexpr int PANELS = 1;
template <int F> constexpr int tile_rows() { return 4; }
#endif

template <int F>
void few_rows(const Packed<F>& panel, int64_t index, const Rounded& x, int64_t rows,
              const Output& y, Ahead& ahead) {
    static_assert(MANY == 8, "few rows are 4, 2 and 1");
    const int passes = __builtin_popcount(rows);
    int64_t row = 0;
    if (rows & 4) tile<F, 1, 4>(&panel, index, x, row, y, ahead, passes), row += 4;
    if (rows & 2) tile<F, 1, 2>(&panel, index, x, row, y, ahead, passes), row += 2;
    if (rows & 1) tile<F, 1, 1>(&panel, index, x, row, y, ahead, passes);
}

// MANY rows or more with P panels, in tiles of nearly equal numbers of rows.
template <int F, int P, typename Source>
void many_rows(const Source* panels, int64_t first_panel, const Rounded& x, int64_t rows,
               const Output& y, Ahead& ahead) {
    constexpr int R = tile_rows<F>();
    static_assert(R == 4 || R == 6, "tiles of MANY rows have R - 2 rows or more");
    const int64_t tiles = (rows + R - 1) / R;
    const int passes = (int)tiles;
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t row = i * rows / tiles;
        switch (R - ((i + 1) * rows / tiles - row)) {
            case 0: tile<F, P, R>(panels, first_panel, x, row, y, ahead, passes); break;
            case 1: tile<F, P, R - 1>(panels, first_panel, x, row, y, ahead, passes); break;
            case 2: tile<F, P, R - 2>(panels, first_panel, x, row, y, ahead, passes); break;
        }
    }
}

// The same with `count` panels, PANELS at most.
template <int F, typename Source>
void many_rows(const Source* panels, int count, int64_t first_panel, const Rounded& x,
               int64_t rows, const Output& y, Ahead& ahead) {
    if (count == PANELS) return many_rows<F, PANELS>(panels, first_panel, x, rows, y, ahead);
    for (int p = 0; p < count; p++)
        many_rows<F, 1>(panels + p, first_panel + p, x, rows, y, ahead);
}

// Panels of a unit for few rows: memory is read faster in longer pieces, as long as there are enough
// for all threads.
INLINE int64_t panels_of_few_rows(int64_t bytes, int64_t panels, int threads) {
    const int64_t each = panels / (UNITS_PER_THREAD * threads);
    return greatest(1, least(UNIT_BYTES / bytes, each));
}

// Bytes that a thread needs to widen panels of any format.
INLINE int64_t widened_bytes(int64_t blocks) { return PANELS * blocks * Widened<Q2_K>::BLOCK_BYTES; }

// See FormatKernels.
template <int F>
void multiply_panels(const Part& part, int64_t first, int count, const Rounded& x, const Output& y,
                     uint8_t* memory, Ahead& ahead) {
    const int64_t blocks = x.blocks();
    if (part.rows < MANY) {
        for (int p = 0; p < count; p++) {
            const Packed<F> panel{panel_at(part.packed, SHAPES[F], blocks, first + p)};
            few_rows(panel, first + p, x, part.rows, y, ahead);
        }
        return;
    }
    Packed<F> here[PANELS];
    for (int p = 0; p < count; p++)
        here[p].panel = panel_at(part.packed, SHAPES[F], blocks, first + p);
    if constexpr (F == Q8_0) {  // which has a byte for each weight already
        many_rows<F>(here, count, first, x, part.rows, y, ahead);
    } else {
        Widened<F> widened[PANELS];
        for (int p = 0; p < count; p++) {
            widened[p].bytes = memory + p * blocks * Widened<F>::BLOCK_BYTES;
            widened[p].fill(here[p], blocks);
        }
        many_rows<F>(widened, count, first, x, part.rows, y, ahead);
    }
}

}  // namespace

}  // namespace quantised
