// Units of work for the threads of a parallel region, and the rows that belong together.
#pragma once

#include <cstdint>
#include <immintrin.h>

constexpr int LINE = 64;  // bytes of a cache line

// Fetches memory in order, a few lines at a time.
struct Ahead {
    const char *at, *end;

    template <_mm_hint CACHE = _MM_HINT_T1>
    void fetch(int lines) {
        for (int i = 0; i < lines && at < end; i++, at += LINE) _mm_prefetch(at, CACHE);
    }
};

// Whether results [rows, row_bytes] are written past the caches: where they are larger than these, each
// line would otherwise be read before it is written. See docs/optimisations.md.
inline bool is_streamed(const void* y, int64_t rows, int64_t row_bytes) {
    constexpr int64_t CACHED = 2 << 20;
    return rows * row_bytes > CACHED && row_bytes % LINE == 0 && (intptr_t)y % LINE == 0;
}

// Rows of one sequence lie together, in their order. The end of those that begin with `row`, or `row`
// itself if it isn't the first one.
inline int64_t end_of_sequence(const int64_t* slots, int64_t row, int64_t rows) {
    if (row > 0 && slots[row - 1] == slots[row]) return row;
    int64_t end = row + 1;
    while (end < rows && slots[end] == slots[row]) end++;
    return end;
}

// Calls work(unit, following) for units 0 to count - 1, each on one of the threads that share
// `next`, which begins at 0. A thread takes a unit when it is free, so a core that another process
// shares doesn't hold up the others, and knows the unit after that, so that it can fetch its memory
// meanwhile. `following` is -1 where there is none.
template <typename Work>
void hand_out(int64_t count, int64_t& next, const Work& work) {
    int64_t unit, following;
#pragma omp atomic capture
    unit = next++;
    for (; unit < count; unit = following) {
#pragma omp atomic capture
        following = next++;
        work(unit, following < count ? following : -1);
    }
}
