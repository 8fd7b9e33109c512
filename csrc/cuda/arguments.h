// What kernels are given.
#pragma once

#include <cstdint>

namespace kvmerge {

constexpr int kRows = 16;    // most rows of queries of one KV head, queries times query heads
constexpr int kStep = 64;    // entries of a piece are a multiple of it
constexpr int kUpdates = 4;  // blocks that share the update of a piece's scores: see Finish
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

enum ScoreMode { kNone, kSum, kMean, kLogEma };  // codes of ScoreMode in vllm_kvmerge/ops/types.py
enum Element { kFloat32, kBfloat16, kFloat16 };

struct DivideParams {
  const int32_t *query_lens, *seq_lens, *fronts, *tails;  // [rows]
  int32_t* pieces;                                        // [num_pieces]: each one's row; -1 behind the last one
  int32_t* parts;                                         // [rows, 2]: a row's first piece, and how many it has
  int32_t* order;                                         // [rows]: rows, longest first, as pieces are
  int rows, num_pieces, slots, least;
};

struct AttendParams {
  const void* query;
  void* output;
  const char *keys, *values;
  const float* log_votes;
  float *scores, *aux;
  const int32_t *block_table, *query_starts, *query_lens, *seq_lens, *fronts, *tails, *modes;
  const float* decays;
  const int32_t *pieces, *parts, *order;  // as Divide makes them
  float* partial;  // [pieces of rows that have several, heads, kRows, padded head size]: weighted means of values
  float* lse;      // [pieces, heads, kRows]: log2 of each one's sum of exponentials
  float* kept;     // [blocks, heads, group * queries, block size]: logits of entries whose score needs them
  int64_t query_token, query_head, output_token, output_head, table_row;  // strides, in elements
  int64_t cell_block, cell_head, cell_slot;                               // of keys and of values, in bytes
  int64_t plane_block, plane_head;                                        // of metadata, in elements
  float scale, cap;                                                       // times log2(e); cap: 0: none
  const float* sinks;                                                     // [heads * group], or null
  int heads, group, head_size, block_size, block_shift, kept_rows;
  int num_pieces, num_combined, query_rows;                               // see Finish
  int output_type;                                                        // Element
  // Where heads of some rows have pages of their own; null: nowhere.
  const int64_t* tables;     // [rows]: address of the row's table, which has all layers; 0: an ordinary front
  const int64_t* addresses;  // [layers, 6]: of each layer's planes, in the order of PagedKVCache
  int layer, num_layers;     // the number of this layer, and of all
};

// float32 rows of a large head are so many sums that a thread has no registers for more.
constexpr int max_query_rows(int bits, int64_t head_size) { return bits == 32 && head_size > 128 ? 8 : kRows; }

}  // namespace kvmerge
