// Reading and writing single entries of one layer. Entry i of a sequence is slot i where i < front, else tail + i - front.
#pragma once

#include <vector>

#include "kernels.h"

namespace kvmerge {

// log_votes, scores, aux: [heads, n] float32; positions: [heads, n] int64. Votes and positions behind the front are
// implied.
void gather_metadata(const Pages& pages, const Segments& segments, float* log_votes, float* scores, float* aux,
                     int64_t* positions);

// rows: [heads, count, head_size] float32, of the entries index[h * count + i]; zeros where negative.
void gather_rows(const Pages& pages, bool keys, const Segments& segments, const int64_t* index, int64_t count,
                 float* rows);

// keys, values: [heads, n, head_size] float32.
void gather_all(const Pages& pages, const Segments& segments, float* keys, float* values);

// similarity, best: [heads, num_members].
void most_similar(const Kernels& kernels, const Pages& pages, const Segments& segments, const int64_t* members,
                  int64_t num_members, const int64_t* carriers, int64_t num_carriers, const uint8_t* usable,
                  float* similarity, int64_t* best);

void move_entries(const Pages& pages, const Segments& segments, const int32_t* destination, const int64_t* kept,
                  int64_t count);

// places: [heads, count] slots. keys, values: [heads, count, head_size] or null.
void write_rows(const Pages& pages, const int32_t* blocks, const int64_t* places, int64_t count, const float* keys,
                const float* values);

// [heads, count] each.
void write_metadata(const Pages& pages, const int32_t* blocks, int64_t count, const float* log_votes,
                    const float* scores, const float* aux, const int64_t* positions);

// slots: block * block_size + offset, negative: none.
void write_tokens(const Pages& pages, const std::vector<int64_t>& slots, const Rows& keys, const Rows& values);

}  // namespace kvmerge
