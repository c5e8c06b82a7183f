// What the ranks of a model exchange: processes of one machine, over memory that they share.
//
// All ranks make the same calls in the same order. A call goes piece by piece: each rank writes its
// piece into a slot of its own, posts the piece's number, waits until all have posted it, and reads.
// A rank that has posted a piece has read the one before, so two slots, used in turn, are enough.
// When the group has ended, calls return, and what they should write is undefined.
#include "program.h"

#include <time.h>

namespace exchange {

namespace {

// The layout of the memory, which worker/ranks/exchange.py knows as well: a table with an entry for
// each rank and one for the group, then the slots.
constexpr int64_t ENTRY = 128;     // bytes: two lines, of which CPUs fetch both
constexpr int64_t TABLE = 1 << 14;
constexpr int64_t SLOT = 1 << 18;

constexpr int64_t SERIAL = 1 << 14;  // fewer elements than this are not worth a second thread
constexpr int64_t BLOCK = 1 << 12;   // elements per unit of work

// While a rank waits it first keeps its core, then sleeps. It never yields: two ranks that yield to each
// other stay on one core for long, while one that wakes up is put on a free core.
constexpr int SPINS = 5000;  // a tenth of a millisecond or two
constexpr timespec SLEEP{0, 50000};

struct Group {
    char* shared;
    int rank, ranks;

    int64_t* entry(int of) const { return (int64_t*)(shared + of * ENTRY); }
    int64_t* posted(int of) const { return entry(of); }  // the number of a rank's last piece
    int64_t* waits() const { return entry(rank) + 8; }   // 1: this rank has waited for a while
    bool ended() const { return __atomic_load_n(entry(ranks), __ATOMIC_ACQUIRE); }
    int64_t next() const { return *posted(rank) + 1; }
    char* slot(int of, int64_t number) const {
        return shared + TABLE + (2 * of + number % 2) * SLOT;
    }
};

bool have_posted(const Group& group, int64_t number) {
    for (int rank = 0; rank < group.ranks; rank++)
        if (__atomic_load_n(group.posted(rank), __ATOMIC_ACQUIRE) < number) return false;
    return true;
}

// Posts the piece that this rank has written, and waits for those of the others. False: the group
// has ended.
bool meet(const Group& group, int64_t number) {
    __atomic_store_n(group.posted(group.rank), number, __ATOMIC_RELEASE);
    for (int i = 0; i < SPINS; i++) {
        if (have_posted(group, number)) return true;
        _mm_pause();
    }
    __atomic_store_n(group.waits(), 1, __ATOMIC_RELAXED);
    bool ended = false;
    while (!ended && !have_posted(group, number)) {
        nanosleep(&SLEEP, nullptr);
        ended = group.ended();
    }
    __atomic_store_n(group.waits(), 0, __ATOMIC_RELAXED);
    return !ended;
}

// The piece of the sum from `start` on, in the order of the ranks: the same bits on each.
template <typename T>
void add_up(const Group& group, int64_t number, T* out, int64_t start, int64_t end) {
    for (int64_t i = start; i < end; i += LANES) {
        const int n = (int)least(end - i, LANES);
        Floats total = load_up_to((const T*)group.slot(0, number) + i, n);
        for (int rank = 1; rank < group.ranks; rank++)
            total = total + load_up_to((const T*)group.slot(rank, number) + i, n);
        store_up_to(out + i, total, n);
    }
}

template <typename T>
void sum_in_place(const Group& group, T* x, int64_t size, int threads) {
    constexpr int64_t MOST = SLOT / sizeof(T);
    for (int64_t done = 0; done < size; done += MOST) {
        const int64_t count = least(size - done, MOST), number = group.next();
        T *piece = x + done, *mine = (T*)group.slot(group.rank, number);
#pragma omp parallel for num_threads(threads) if (count >= SERIAL)
        for (int64_t i = 0; i < count; i += BLOCK)
            memcpy(mine + i, piece + i, least(count - i, BLOCK) * sizeof(T));
        if (!meet(group, number)) return;
#pragma omp parallel for num_threads(threads) if (count >= SERIAL)
        for (int64_t i = 0; i < count; i += BLOCK)
            add_up(group, number, piece, i, least(count, i + BLOCK));
    }
}

// Calls copy(in rows, in the piece, bytes) for the runs of a piece: the bytes [start, end) of rows of
// `row_bytes`, which are `stride` apart.
template <typename Copy>
void each_run(int64_t start, int64_t end, int64_t row_bytes, int64_t stride, const Copy& copy) {
    for (int64_t at = start, n; at < end; at += n) {
        const int64_t row = at / row_bytes, column = at % row_bytes;
        n = least(end - at, row_bytes - column);
        copy(row * stride + column, at - start, n);
    }
}

}  // namespace

// x [size] = the sum of the tensors of all ranks, added in float32.
EXPORT void exchange_sum(void* shared, int rank, int ranks, void* x, int64_t size, int type,
                         int threads) {
    const Group group{(char*)shared, rank, ranks};
    if (type == FLOAT32)
        sum_in_place(group, (float*)x, size, threads);
    else
        sum_in_place(group, (bf16*)x, size, threads);
}
FROM_WORDS(exchange_sum)

// x [rows, row_bytes], with `stride` between rows, = that of rank 0.
EXPORT void exchange_first(void* shared, int rank, int ranks, char* x, int64_t stride, int64_t rows,
                           int64_t row_bytes) {
    const Group group{(char*)shared, rank, ranks};
    const int64_t bytes = rows * row_bytes;
    for (int64_t done = 0; done < bytes; done += SLOT) {
        const int64_t end = least(bytes, done + SLOT), number = group.next();
        char* piece = group.slot(0, number);
        if (rank == 0)
            each_run(done, end, row_bytes, stride, [&](int64_t there, int64_t here, int64_t n) {
                memcpy(piece + here, x + there, n);
            });
        if (!meet(group, number)) return;
        if (rank != 0)
            each_run(done, end, row_bytes, stride, [&](int64_t there, int64_t here, int64_t n) {
                memcpy(x + there, piece + here, n);
            });
    }
}
FROM_WORDS(exchange_first)

// On rank 0, out [rows, ranks · row_bytes] = the rows x [rows, row_bytes] of all ranks side by side.
// Others have no `out`.
EXPORT void exchange_gather(void* shared, int rank, int ranks, const char* x, char* out,
                            int64_t rows, int64_t row_bytes) {
    const Group group{(char*)shared, rank, ranks};
    const int64_t bytes = rows * row_bytes;
    for (int64_t done = 0; done < bytes; done += SLOT) {
        const int64_t end = least(bytes, done + SLOT), number = group.next();
        if (rank != 0) memcpy(group.slot(rank, number), x + done, end - done);
        if (!meet(group, number)) return;
        for (int of = 0; rank == 0 && of < ranks; of++) {
            const char* piece = of == 0 ? x + done : group.slot(of, number);
            char* to = out + of * row_bytes;
            each_run(done, end, row_bytes, ranks * row_bytes,
                     [&](int64_t there, int64_t here, int64_t n) {
                         memcpy(to + there, piece + here, n);
                     });
        }
    }
}
FROM_WORDS(exchange_gather)

}  // namespace exchange
