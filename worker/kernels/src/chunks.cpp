// Attention of chunks: many new tokens of a sequence, of which each sees its cache and the chunk up to
// itself.
//
// A unit of work is a tile of 16 queries and some heads that read one key-value head. The queries of
// a tile are the lanes of vectors, so that nothing is summed across a register. Positions are read in
// blocks with fixed edges, keys before values, with a running maximum and sum (online softmax). What
// is hidden from a query adds exact zeros, so a token's result depends on what it sees alone, and not
// on where its chunk or its tile begins.
#include "attention.h"
#include "chunk_cells.h"
#include "program.h"
#include "work.h"

#include <algorithm>
#include <cmath>

namespace chunks {

namespace {

constexpr int BLOCK = 64;     // positions
constexpr int MAX_DIM = 512;  // channels of a head; attention.py checks it

#ifdef AVX512
constexpr int TOGETHER = 2;  // heads of a unit
#else
constexpr int TOGETHER = 1;
#endif

struct Chunk {
    int64_t slot, start, length, row;  // row: the first of the chunk

    int64_t tiles() const { return (length + LANES - 1) / LANES; }
};

struct Chunks : Attention {
    const Chunk* chunks;
    int64_t count;

    int units_per_head() const { return (group() + TOGETHER - 1) / TOGETHER; }
    int64_t units(const Chunk& chunk) const {
        return chunk.tiles() * kv_heads * units_per_head();
    }
    // Whether new keys take columns of a ring that the chunk's first queries see.
    bool wraps(const Chunk& chunk) const { return window && chunk.start + chunk.length > window; }
};

// ---- Tiles ---------------------------------------------------------------------------------------

constexpr float LOWEST = -3e38f;  // finite, so that differences to hidden scores are -inf

alignas(64) const float LIMITS[3 * LANES] = {
#define SIXTEEN(x) x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x
    SIXTEEN(-INFINITY), SIXTEEN(INFINITY), SIXTEEN(-INFINITY)};

// The greatest score that each of 16 queries may have with the key that is `after` positions after
// the first query: -inf where it is hidden.
INLINE Floats limits(int64_t after, int64_t window) {
    const int64_t first = std::clamp<int64_t>(after, 0, LANES);  // lane that sees it
    const Floats causal = load(LIMITS + LANES - first);
    if (!window) return causal;
    const int64_t end = std::clamp<int64_t>(after + window, 0, LANES);
    return smaller(causal, load(LIMITS + 2 * LANES - end));
}

// 16 queries of a chunk from the one at `first` on, and H heads from `head` on.
template <typename Cells, int H>
struct Tile {
    typedef typename Cells::Element T;
    static constexpr int PER = Cells::PER;

    const Chunks& a;
    const Chunk& chunk;
    const int64_t first;
    const int head, kv_head, dim, cells;
    const int rows;
    // Positions: of the first query, and the range that the tile sees.
    const int64_t position, last, low;

    alignas(64) float queries[MAX_DIM / PER][H][LANES];  // of each cell
    alignas(64) float keys[BLOCK * MAX_DIM / PER];       // [position][cell]
    alignas(64) float values[MAX_DIM / LANES][BLOCK / PER][LANES];  // LANES channels of PER positions
    alignas(64) float scores[BLOCK][H][LANES];  // of each position; then weights, as cells
    alignas(64) float sums[MAX_DIM][H][LANES];  // of each channel
    Floats top[H], total[H], correction[H];

    Tile(const Chunks& a, const Chunk& chunk, int64_t first, int head)
        : a(a),
          chunk(chunk),
          first(first),
          head(head),
          kv_head(head / a.group()),
          dim(a.dim),
          cells(dim / PER),
          rows((int)std::min<int64_t>(LANES, chunk.length - first)),
          position(chunk.start + first),
          last(position + rows - 1),
          low(a.window ? std::max<int64_t>(0, position - a.window + 1) : 0) {}

    void attend() {
        start();
        // From a multiple of SIDE on, so that pairs of positions are always the same.
        for (int64_t from = low / SIDE * SIDE, end; from <= last; from = end) {
            end = std::min(from / BLOCK * BLOCK + BLOCK, last + 1);
            const int count = (int)(end - from + SIDE - 1) / SIDE * SIDE;
            read(from, count);
            for (int j = 0; j < count; j += SIDE) multiply_keys(j);
            for (int h = 0; h < H; h++) weigh(h, from, count);
            for (int c = 0; c < dim; c += SIDE) add_values(c, count);
        }
        finish();
    }

    void start() {
        for (int h = 0; h < H; h++) {
            const T* q = (const T*)a.q + (chunk.row + first) * a.q_stride + (head + h) * dim;
            for (int c = 0; c < cells; c += LANES) {
                Floats block[LANES];
                for (int r = 0; r < LANES; r++)
                    block[r] = r < rows
                                   ? Cells::load_cells(q + r * a.q_stride + c * PER, dim - c * PER)
                                   : zeros();
                transpose(block);
                for (int i = 0; i < LANES; i++) store(queries[c + i][h], block[i]);
            }
            top[h] = all(a.sinks ? a.sinks[head + h] : LOWEST);
            total[h] = all(a.sinks ? 1.0f : 0.0f);  // e^(sink - top)
        }
        memset(sums, 0, sizeof sums[0] * dim);
    }

    // Keys and values from `from` on. Those that no query sees are repetitions of others.
    void read(int64_t from, int count) {
        const int64_t cached = a.wraps(chunk) ? chunk.start : last + 1;
        const T *key[PER], *value[PER];
        for (int j = 0; j < count; j += PER) {
            for (int i = 0; i < PER; i++) {
                const int64_t at = std::clamp(from + j + i, low, last);
                if (at < cached) {
                    const int64_t to = a.place(chunk.slot, kv_head, a.column(at));
                    key[i] = (const T*)a.keys + to;
                    value[i] = (const T*)a.values + to;
                } else {
                    const int64_t row = chunk.row + at - chunk.start;
                    key[i] = (const T*)a.k + row * a.k_stride + kv_head * dim;
                    value[i] = (const T*)a.v + row * a.v_stride + kv_head * dim;
                }
                Cells::copy(key[i], dim, keys + (j + i) * cells);
            }
            for (int c = 0; c < dim; c += LANES)
                store(values[c / LANES][j / PER], Cells::interleave(value, c));
        }
    }

    void multiply_keys(int j) {
        Floats products[H][SIDE];
        for (int h = 0; h < H; h++)
            for (int n = 0; n < SIDE; n++) products[h][n] = zeros();
        multiply<Cells, H>(queries[0][0], keys + j * cells, cells, 1, cells, products);
        for (int h = 0; h < H; h++)
            for (int n = 0; n < SIDE; n++) store(scores[j + n][h], products[h][n]);
    }

    // Scores of head h → weights e^(score - top).
    void weigh(int h, int64_t from, int count) {
        const bool hides = from + count - 1 > position || (a.window && from <= last - a.window);
        Floats best = top[h];
        for (int j = 0; j < count; j++) {
            Floats score = scaled(a, load(scores[j][h]));
            if (hides) score = smaller(limits(from + j - position, a.window), score);
            store(scores[j][h], score);
            best = larger(best, score);
        }
        correction[h] = exponential(top[h] - best);
        Floats sum = total[h] * correction[h];
        for (int j = 0; j < count; j += PER) {
            Floats weights[PER];
            for (int i = 0; i < PER; i++) {
                weights[i] = exponential_or_zero(load(scores[j + i][h]) - best);
                sum = sum + weights[i];
            }
            store(scores[j / PER][h], Cells::join(weights));
        }
        top[h] = best;
        total[h] = sum;
    }

    // Channels from c on.
    void add_values(int c, int count) {
        Floats totals[H][SIDE];
        for (int h = 0; h < H; h++)
            for (int n = 0; n < SIDE; n++) totals[h][n] = load(sums[c + n][h]) * correction[h];
        multiply<Cells, H>(scores[0][0], values[c / LANES][0] + c % LANES, 1, LANES, count / PER,
                           totals);
        for (int h = 0; h < H; h++)
            for (int n = 0; n < SIDE; n++) store(sums[c + n][h], totals[h][n]);
    }

    void finish() {
        for (int h = 0; h < H; h++) {
            const Floats factor = all(1.0f) / total[h];
            for (int c = 0; c < dim; c += LANES) {
                Floats block[LANES];
                for (int i = 0; i < LANES; i++) block[i] = load(sums[c + i][h]) * factor;
                transpose(block);
                T* out = (T*)a.out + ((chunk.row + first) * a.heads + head + h) * dim + c;
                for (int r = 0; r < rows; r++) store(out + (int64_t)r * a.heads * dim, block[r]);
            }
        }
    }
};

template <typename Cells>
void attend_unit(const Chunks& a, int64_t unit) {
    const Chunk* chunk = a.chunks;
    for (; unit >= a.units(*chunk); chunk++) unit -= a.units(*chunk);
    // Late tiles, which see most, come first.
    const int64_t tiles = chunk->tiles(), part = unit / tiles;
    const int64_t first = (tiles - 1 - unit % tiles) * LANES;
    const int kv_head = (int)(part / a.units_per_head());
    const int head = (int)(part % a.units_per_head()) * TOGETHER;  // of the group
    if (head + TOGETHER <= a.group())
        Tile<Cells, TOGETHER>(a, *chunk, first, kv_head * a.group() + head).attend();
    else
        Tile<Cells, 1>(a, *chunk, first, kv_head * a.group() + head).attend();
}

// Stores this thread's share of the new keys and values of chunks that wrap, or of those that do not.
template <typename T>
void store_chunks(const Chunks& a, bool wrapping) {
    for (int64_t i = 0; i < a.count; i++) {
        const Chunk& chunk = a.chunks[i];
        if (a.wraps(chunk) != wrapping) continue;
        const int64_t end = chunk.start + chunk.length;
        const int64_t first = wrapping ? std::max(chunk.start, end - a.window) : chunk.start;
#pragma omp for schedule(static) nowait
        for (int64_t at = first; at < end; at++)
            for (int head = 0; head < a.kv_heads; head++)
                store_row<T>(a, chunk.row + at - chunk.start, chunk.slot, at, head);
    }
}

template <typename Cells>
void attend_all(const Chunks& a) {
    int64_t units = 0, next = 0;
    for (int64_t i = 0; i < a.count; i++) units += a.units(a.chunks[i]);
#pragma omp parallel num_threads(a.threads)
    {
        store_chunks<typename Cells::Element>(a, false);
#pragma omp barrier
        hand_out(units, next, [&](int64_t unit, int64_t) { attend_unit<Cells>(a, unit); });
#pragma omp barrier
        store_chunks<typename Cells::Element>(a, true);
    }
}

}  // namespace

// Attends, and stores the new keys and values in the caches: see Attention. `table`: the chunks. `pairs`:
// whether to multiply bf16 in pairs, where there are instructions for it.
EXPORT void attend_chunks(const void* q, int64_t q_stride, const void* k, int64_t k_stride,
                          const void* v, int64_t v_stride, void* keys, void* values,
                          const int32_t* pages, const int64_t* table, int64_t count,
                          const float* sinks, void* out, int64_t capacity, int64_t window, int heads,
                          int kv_heads, int dim, float scale, float cap, int type, int pairs,
                          int threads) {
    const Chunks a{{q, k, v, q_stride, k_stride, v_stride, keys, values, pages, sinks, out, capacity,
                    window, heads, kv_heads, dim, scale, cap, threads},
                   (const Chunk*)table, count};
    if (type == FLOAT32) return attend_all<Single<float>>(a);
#ifdef PAIRS
    if (pairs) return attend_all<Pairs>(a);
#endif
    attend_all<Single<bf16>>(a);
}
FROM_WORDS(attend_chunks)

}  // namespace chunks
