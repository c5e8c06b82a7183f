// What attention of single tokens and of chunks share.
#pragma once

#include "simd.h"

constexpr int PAGE = 16;  // tokens; as in kernels/attention.py

struct Attention {
    const void *q, *k, *v;                 // new rows [rows, (kv_)heads, dim], heads adjacent
    int64_t q_stride, k_stride, v_stride;  // elements between rows
    // Caches: with `pages` [pages, kv_heads, PAGE, dim], of which a slot has those of its row of `pages`
    // [slots, capacity]; else [slots, kv_heads, capacity, dim].
    void *keys, *values;
    const int32_t* pages;
    const float* sinks;                    // [heads], or null
    void* out;                             // [rows, heads, dim]
    int64_t capacity, window;              // window 0: all positions
    int heads, kv_heads, dim;
    float scale, cap;  // cap 0: none
    int threads;

    int group() const { return heads / kv_heads; }
    int64_t column(int64_t position) const { return window ? position % window : position; }
    // Elements of the caches before a column of a slot and a head. Those of a page follow each other.
    int64_t place(int64_t slot, int kv_head, int64_t column) const {
        if (!pages) return ((slot * kv_heads + kv_head) * capacity + column) * dim;
        const int64_t page = pages[slot * capacity + column / PAGE];
        return ((page * kv_heads + kv_head) * PAGE + column % PAGE) * dim;
    }
};

// Scores that take part in the softmax, from products of queries and keys.
INLINE Floats scaled(const Attention& a, Floats products) {
    const Floats scores = products * all(a.scale);
    return a.cap > 0 ? all(a.cap) * hyperbolic_tangent(scores * all(1 / a.cap)) : scores;
}

// Stores the new key and value of one row and head in the caches.
template <typename T>
void store_row(const Attention& a, int64_t row, int64_t slot, int64_t position, int kv_head) {
    const int64_t to = a.place(slot, kv_head, a.column(position));
    const int64_t from = (int64_t)kv_head * a.dim;
    memcpy((T*)a.keys + to, (const T*)a.k + row * a.k_stride + from, a.dim * sizeof(T));
    memcpy((T*)a.values + to, (const T*)a.v + row * a.v_stride + from, a.dim * sizeof(T));
}
