// Decode attention: new tokens, of which each attends to its sequence's cache.
//
// A unit of work is one token and one key-value head with the query heads that read it, so a
// token's result does not depend on the others that are computed beside it. Columns are read in blocks, keys before values,
// with a running maximum and sum (online softmax), so that the cache is read once. All tokens of a
// head follow each other: a page that several slots have comes from the second-level cache for all
// but the first.
#include "attention_products.h"
#include "program.h"

#include <cmath>

namespace {

constexpr int TOGETHER = 4;  // query heads for which one read of a key or value serves

struct Decode : Attention {
    const int64_t *slots, *positions;  // [rows]
    int64_t rows;
};

// A block, and the memory of the next one.
template <typename T>
struct Columns {
    Runs<T> keys, values;
    int count;
    AheadOfRuns next_keys, next_values;

    void fetch_meanwhile(const Columns& next, int dim) {
        next_keys = next.keys.ahead(next.count, dim);
        next_values = next.values.ahead(next.count, dim);
    }
};

// The running softmax of the query heads of one unit.
template <typename Way>
struct Softmax {
    alignas(64) float sums[MAX_STATE + LANES * MAX_GROUP];  // weighted values, [group, width]
    float top[MAX_GROUP], total[MAX_GROUP];
    int width;

    void start(const Attention& a, int kv_head) {
        width = padded(a.dim);
        memset(sums, 0, sizeof(float) * width * a.group());
        for (int g = 0; g < a.group(); g++) {
            top[g] = a.sinks ? a.sinks[kv_head * a.group() + g] : -INFINITY;
            total[g] = a.sinks ? 1.0f : 0.0f;  // e^(sink - top)
        }
    }

    // Scores → weights e^(score - top) of head g, after correcting what was summed before. Inlined into
    // the code of each number of heads, it takes half of the compiler's time.
    [[gnu::noinline]] void weigh(const Attention& a, int g, float* scores, int count) {
        for (int j = count; j < BLOCK; j++) scores[j] = -INFINITY;
        Floats best = all(-INFINITY);
        for (int j = 0; j < BLOCK; j += LANES) {
            Floats s = scaled(a, load(scores + j));
            store(scores + j, s);
            best = larger(best, s);
        }
        if (a.cap > 0)
            for (int j = count; j < BLOCK; j++) scores[j] = -INFINITY;
        float highest = largest(best);
        if (highest > top[g]) {
            float correction = std::exp(top[g] - highest);
            for (int i = 0; i < width; i += LANES)
                store(sums + g * width + i, load(sums + g * width + i) * all(correction));
            total[g] *= correction;
            top[g] = highest;
        }
        Floats added = zeros();
        for (int j = 0; j < BLOCK; j += LANES) {
            Floats weight = exponential(load(scores + j) - all(top[g]));
            store(scores + j, weight);
            added = added + weight;
        }
        total[g] += sum(added);
    }

    template <int G>
    void add_block(const Attention& a, int g, const typename Way::Query* q,
                   Columns<typename Way::Element>& columns) {
        typedef typename Way::template Products<G> Products;
        alignas(64) float scores[G][BLOCK];
        Products::scores(q + g * Way::stride(a.dim), columns.keys, columns.count, a.dim, scores,
                         columns.next_keys);
        for (int i = 0; i < G; i++) weigh(a, g + i, scores[i], columns.count);
        Products::add_values(scores, columns.values, columns.count, a.dim, sums + g * width,
                             columns.next_values);
    }
};

// A token and a key-value head.
struct Unit {
    int64_t row, slot, seen;  // seen: number of columns
    int kv_head;

    Unit(const Decode& a, int64_t row, int64_t kv_head)
        : row(row), slot(a.slots[row]), kv_head((int)kv_head) {
        const int64_t position = a.positions[row];
        seen = a.window && position >= a.window ? a.window : position + 1;
    }

    // The block that begins with column `start`.
    template <typename T>
    Columns<T> columns(const Decode& a, int64_t start) const {
        const int count = seen - start < BLOCK ? (int)(seen - start) : BLOCK;
        Columns<T> found{{}, {}, count, {}, {}};
        for (int run = 0; run * PAGE < count; run++) {
            const int64_t at = a.place(slot, kv_head, start + run * PAGE);
            found.keys.first[run] = (const T*)a.keys + at;
            found.values.first[run] = (const T*)a.values + at;
        }
        return found;
    }
};

// `following`: what this thread computes next, or null. No copy is made for null.
template <typename Way>
[[gnu::noclone]] void attend_one(const Decode& a, const Unit& unit, const Unit* following) {
    typedef typename Way::Element T;
    const int dim = a.dim, group = a.group();
    const int64_t head = (int64_t)unit.kv_head * group;
    alignas(64) typename Way::Query widened[Way::WIDENED];
    const T* queries = (const T*)a.q + unit.row * a.q_stride + head * dim;
    const typename Way::Query* q = Way::prepare(queries, group, dim, widened);
    Softmax<Way> softmax;
    softmax.start(a, unit.kv_head);
    for (int64_t start = 0; start < unit.seen; start += BLOCK) {
        const bool last = start + BLOCK >= unit.seen;
        Columns<T> columns = unit.columns<T>(a, start);
        if (const Unit* next = last ? following : &unit)
            columns.fetch_meanwhile(next->columns<T>(a, last ? 0 : start + BLOCK), dim);
        int g = 0;
        for (; g + TOGETHER <= group; g += TOGETHER)
            softmax.template add_block<TOGETHER>(a, g, q, columns);
        const int left = group - g;
        if (left == 3) softmax.template add_block<3>(a, g, q, columns);
        if (left == 2) softmax.template add_block<2>(a, g, q, columns);
        if (left == 1) softmax.template add_block<1>(a, g, q, columns);
    }
    T* out = (T*)a.out + (unit.row * a.heads + head) * dim;
    for (int g = 0; g < group; g++)
        Way::finish(softmax.sums + g * softmax.width, 1.0f / softmax.total[g], dim, out + g * dim);
}

template <typename Way>
void attend_all(const Decode& a) {
    typedef typename Way::Element T;
    const int64_t units = a.rows * a.kv_heads;
    if (a.window) {
        // In the order of a sequence: its tokens take columns of the ring that those before them see.
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t first = unit / a.kv_heads, kv_head = unit % a.kv_heads;
            const int64_t end = end_of_sequence(a.slots, first, a.rows);
            for (int64_t row = first; row < end; row++) {
                store_row<T>(a, row, a.slots[row], a.positions[row], (int)kv_head);
                attend_one<Way>(a, Unit(a, row, kv_head), nullptr);
            }
        }
        return;
    }
    int64_t next = 0;
#pragma omp parallel num_threads(a.threads)
    {
#pragma omp for
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t row = unit / a.kv_heads;
            store_row<T>(a, row, a.slots[row], a.positions[row], (int)(unit % a.kv_heads));
        }
        // All is stored: rows may belong to one sequence.
        hand_out(units, next, [&](int64_t index, int64_t following) {
            const Unit unit(a, index % a.rows, index / a.rows);
            if (following < 0) return attend_one<Way>(a, unit, nullptr);
            const Unit after(a, following % a.rows, following / a.rows);
            attend_one<Way>(a, unit, &after);
        });
    }
}

}  // namespace

// Stores the new keys and values in the caches, and attends: see Attention and Decode. `pairs`: whether to
// multiply bf16 in pairs, where there are instructions for it.
EXPORT void attend_decode(const void* q, int64_t q_stride, const void* k, int64_t k_stride,
                          const void* v, int64_t v_stride, void* keys, void* values,
                          const int32_t* pages, const int64_t* slots, const int64_t* positions,
                          const float* sinks, void* out, int64_t rows,
                          int64_t capacity, int64_t window, int heads, int kv_heads, int dim,
                          float scale, float cap, int type, int pairs,
                          int threads) {
    const Decode a{{q, k, v, q_stride, k_stride, v_stride, keys, values, pages, sinks, out,
                    capacity, window, heads, kv_heads, dim, scale, cap, threads},
                   slots, positions, rows};
    if (type == FLOAT32) return attend_all<AsTheyAre<float>>(a);
#ifdef PAIRS
    if (pairs) return attend_all<Pairs>(a);
#endif
#ifdef AVX512
    attend_all<Widened>(a);
#else
    attend_all<AsTheyAre<bf16>>(a);
#endif
}
FROM_WORDS(attend_decode)
