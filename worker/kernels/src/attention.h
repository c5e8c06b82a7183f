// What attention of single tokens and of chunks share.
#pragma once

#include "simd.h"

struct Attention {
    const void *q, *k, *v;                 // new rows [rows, (kv_)heads, dim], heads adjacent
    int64_t q_stride, k_stride, v_stride;  // elements between rows
    void *keys, *values;                   // caches [slots, kv_heads, capacity, dim]
    const float* sinks;                    // [heads], or null
    void* out;                             // [rows, heads, dim]
    int64_t capacity, window;              // window 0: all positions
    int heads, kv_heads, dim;
    float scale, cap;  // cap 0: none
    int threads;

    int group() const { return heads / kv_heads; }
    int64_t column(int64_t position) const { return window ? position % window : position; }
    // Elements of the caches before those of a slot and a head.
    int64_t plane(int64_t slot, int kv_head) const {
        return (slot * kv_heads + kv_head) * capacity * dim;
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
    const int64_t to = a.plane(slot, kv_head) + a.column(position) * a.dim;
    const int64_t from = (int64_t)kv_head * a.dim;
    memcpy((T*)a.keys + to, (const T*)a.k + row * a.k_stride + from, a.dim * sizeof(T));
    memcpy((T*)a.values + to, (const T*)a.v + row * a.v_stride + from, a.dim * sizeof(T));
}
