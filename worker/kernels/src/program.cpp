// Kernel calls one after the other. From Python, a call costs as much as a small kernel takes.
#include "program.h"

// `program`: for each call the address of a kernel that takes words, their number, and the words.
EXPORT void call_all(const int64_t* program, int64_t words) {
    for (const int64_t* end = program + words; program < end; program += 2 + program[1])
        ((void (*)(const int64_t*))program[0])(program + 2);
}
