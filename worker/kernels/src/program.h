// Kernels whose arguments are 64-bit words, so that a table holds calls of all of them.
#pragma once

#include "simd.h"

#include <type_traits>
#include <utility>

template <typename T>
INLINE T from_word(int64_t word) {
    if constexpr (std::is_same_v<T, float>) {
        float value;
        memcpy(&value, &word, sizeof value);
        return value;
    } else {
        return (T)word;
    }
}

template <typename... Args, size_t... I>
INLINE void call_with(void (*kernel)(Args...), const int64_t* words, std::index_sequence<I...>) {
    kernel(from_word<Args>(words[I])...);
}

template <typename... Args>
INLINE void call_with(void (*kernel)(Args...), const int64_t* words) {
    call_with(kernel, words, std::index_sequence_for<Args...>());
}

// Exports `kernel` with its arguments in words, as NAME_from_words.
#define FROM_WORDS(kernel) \
    EXPORT void kernel##_from_words(const int64_t* words) { call_with(kernel, words); }
