// Index arithmetic over the entries of each head: what policies/indexing.py does in every compression. All [rows, n].
#pragma once

#include "kernels.h"

namespace kvmerge {

// mask: the `count` of largest ranking in each row; of equal ones those of lower index. No NaN.
void largest(const Kernels& kernels, const float* ranking, int64_t rows, int64_t n, int64_t count, uint8_t* mask);
void largest(const Kernels& kernels, const int64_t* ranking, int64_t rows, int64_t n, int64_t count, uint8_t* mask);

// The same where what is not live ranks below everything, and what is live and protected above. Any ranking.
void top(const Kernels& kernels, const float* ranking, const uint8_t* is_protected, const uint8_t* is_live, int64_t rows,
         int64_t n, int64_t count, uint8_t* mask);

// index: [rows, count], the entries in mask, of which each row has `count`; entry i at i where i < count, the others in
// order where there is room. False where a row has more or fewer.
bool in_place(const uint8_t* mask, int64_t rows, int64_t n, int64_t count, int64_t* index);

// order: the entries by ascending position, which is at least -1, equal ones as they lie.
void by_position(const int64_t* positions, int64_t rows, int64_t n, int64_t* order);

// The most true elements of any row.
int64_t most_true(const uint8_t* mask, int64_t rows, int64_t n);

// index: [rows, width], where mask is true, ascending, then -1. False where a row has more.
bool padded_nonzero(const uint8_t* mask, int64_t rows, int64_t n, int64_t width, int64_t* index);

// where: [rows, size], the place in index ([rows, count]) of each number below `size`, else -1. Negative ones are nowhere.
// False where one is too large.
bool inverse(const int64_t* index, int64_t rows, int64_t count, int64_t size, int64_t* where);

// taken: [rows, count], elements of plane, [rows, n], at index, [rows, count]. False where one is not below n, or negative.
template <class T>
bool take(const T* plane, const int64_t* index, int64_t rows, int64_t n, int64_t count, T* taken);

// place: [rows, count]: index itself where 0 <= index < places, the others in order where there is room. False where a
// row has several of one index, or too many.
bool free_places(const int64_t* index, int64_t rows, int64_t count, int64_t places, int64_t* place);

// Members join slots one after the other, each that of largest product, which is then that of a mean.
// products: [rows, members, slots] and between: [rows, members, members], of keys; products change. member_weights:
// [rows, members]. slot_weights: [rows, slots], which grow. joined: [rows, members], which slot.
void join_slots(float* products, const float* between, const float* member_weights, float* slot_weights, int64_t rows,
                int64_t members, int64_t slots, int64_t* joined);

}  // namespace kvmerge
