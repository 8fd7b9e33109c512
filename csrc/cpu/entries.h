// Reading and writing single entries of layers. Entry i of a sequence is slot i where i < front, else tail + i - front.
//
// A unit is one layer of one sequence; all units of a call have equally many heads, and what operators take and give is
// [units * heads, ...].
#pragma once

#include <vector>

#include "kernels.h"

namespace kvmerge {

struct Unit {
  PagedKVCache pages;
  Segments segments;
};
typedef std::vector<Unit> SequenceLayers;

// log_votes, scores, aux: [rows, n] float32; positions: [rows, n] int64. Votes and positions behind the front are
// implied. All units have n entries.
void gather_metadata(const SequenceLayers& units, float* log_votes, float* scores, float* aux, int64_t* positions);

// rows: [rows, count, head_size] float32, of the entries index[row * count + i]; zeros where negative.
void gather_rows(const SequenceLayers& units, bool keys, const int64_t* index, int64_t count, float* rows);

// keys, values: [rows, n, head_size] float32.
void gather_all(const SequenceLayers& units, float* keys, float* values);

// similarity, best: [rows, num_members].
void most_similar(const Kernels& kernels, const SequenceLayers& units, const int64_t* members, int64_t num_members,
                  const int64_t* carriers, int64_t num_carriers, const uint8_t* usable, float* similarity,
                  int64_t* best);

// fused: [rows, n], see Fuse. queries: [rows, group, num_queries, head_size]; query_positions: [rows, num_queries];
// log_votes, positions: [rows, n].
void fused_attention(const Kernels& kernels, const SequenceLayers& units, const float* queries, int64_t group,
                     const int64_t* query_positions, int64_t num_queries, const float* log_votes,
                     const int64_t* positions, float scale, bool largest, float* fused);

// destination: per unit the blocks of the places; kept: [rows, count].
void move_entries(const SequenceLayers& units, const std::vector<const int32_t*>& destination, const int64_t* kept,
                  int64_t count);

// places: [rows, count] slots of each unit's segments.blocks. keys, values: [rows, count, head_size] or null.
void write_rows(const SequenceLayers& units, const int64_t* places, int64_t count, const float* keys, const float* values);

// [rows, count] each, to slots [0, count) of each unit's segments.blocks.
void write_metadata(const SequenceLayers& units, int64_t count, const float* log_votes, const float* scores, const float* aux,
                    const int64_t* positions);

// slots: block * block_size + offset, negative: none.
void write_tokens(const PagedKVCache& pages, const std::vector<int64_t>& slots, const Rows& keys, const Rows& values);

}  // namespace kvmerge
