// What the level-independent drivers hand to the kernels of one instruction set level.
//
// Everything here is plain data: kernels.cpp is compiled once per level, and no inline function may be shared between
// objects compiled with different instruction sets (the linker would keep any one of the copies).
#pragma once

#include <cstdint>

namespace kvmerge {

// Of 8 bits: caches' alone; i8 and i4: of coded pages alone.
enum class DType : int32_t { f32, bf16, f16, e4m3, e5m2, i8, i4 };

// Largest is no mode of a tracker: scores are raised to the largest probability that any query gives (KVzip).
enum class ScoreMode : int32_t { none, sum, mean, log_ema, largest };

// Attention works on tiles of 32 slots within a block; a chunk of tiles shares one running maximum.
constexpr int kTile = 32;
constexpr int kChunkTiles = 4;
constexpr int kChunk = kTile * kChunkTiles;
constexpr int kMaxHeadSize = 512;

// One layer's cache. A (block, head) region holds K [head_size, block_size] and V [block_size, head_size] in the cache
// dtype, and four planes of metadata [block_size] of 4 bytes, log_votes, scores, aux, positions; these lie behind the
// region, or those of all regions behind all of them (vllm_kvmerge/ops/types.py).
//
// Coded pages are the same regions with more slots (vllm_kvmerge/ops/coded.py). i8: K, V, log_votes, then the scales of
// keys and those of values, float16, and no other metadata. i4: K, V, the ranges of keys and those of values; log_votes.
struct PagedKVCache {
  char *base, *metadata;
  int64_t region_stride, metadata_stride;  // bytes from those of one head to the next one's, and over blocks
  int64_t num_blocks;
  int32_t num_heads, head_size, block_size, item_size;
  DType dtype;
};

// By its number in tensors, how a row's pages are coded, and how many slots they have in place of one.
struct Coding {
  DType dtype;
  int32_t slots;
};
constexpr Coding kCodings[] = {{DType::f32, 1}, {DType::i8, 2}, {DType::i4, 3}};  // 0: not at all
constexpr int kNumCodings = sizeof kCodings / sizeof *kCodings;

// One head's slots of a block: K and V, and the planes of metadata.
struct Page {
  char* rows;
  float* metadata;
};

// The live entries of one sequence: logical slots [0, front) and [tail, seq_len). They lie in its blocks, in the head's
// own place of each, unless the front of this head has pages of its own.
struct Segments {
  const int32_t* blocks;
  int64_t front, tail, seq_len;
  const Page* pages = nullptr;  // slot s < front lies in pages[s / block_size]
};

// Rows of a [tokens, heads, head_size] tensor; strides in elements.
struct Rows {
  void* data;
  int64_t token_stride, head_stride;
  DType dtype;
};

// How logits become probabilities (Softmax in vllm_kvmerge/ops/types.py).
struct Softmax {
  float cap = 0.0f;              // 0: none
  const float* sinks = nullptr;  // [heads, group], or null
};

// Attention of some queries of one KV head over the tiles [tile_begin, tile_end) of a sequence: a partial result.
// R = num_queries * group rows, row r = (query r / group, query head r % group).
struct Attend {
  const PagedKVCache* cache;
  Segments segments;
  int32_t head, group, num_queries;
  int64_t first_query, total_queries;  // of the queries whose keys are the sequence's newest total_queries entries
  int64_t tile_begin, tile_end;        // begins at a multiple of kChunkTiles
  Rows query;                          // of token first_query
  float scale, cap;                    // cap: of logits, 0: none
  bool sees_all;      // every query sees every entry: those of the queries are not among them
  bool with_values;   // otherwise only the logits are wanted (and their softmax, unless mode is log_ema)
  DType dtype;        // of the cache whose accumulators these are like, where coded pages are read
  ScoreMode mode;     // what to store for the score update
  float* stored;      // [R, stored_stride]: exp(logit - chunk maximum)
  float* logits;      // [R, stored_stride]: without bias, of log_ema alone, which then stores the above only with_values
  float* chunk_max;   // [R, chunk_stride]: the maximum that a chunk's stored values are relative to
  int64_t stored_stride, chunk_stride;  // both indexed from the sequence's first tile
  float* maximum;     // [R] out
  float* sum;         // [R] out: of exp(logit - maximum)
  float* accumulator; // [R, padded head size] out: values weighted by exp(logit - maximum), in the level's own order
  float* scratch;     // attend_scratch(R, head_size) floats
};

// Combines the partial results of a sequence's pieces and writes the output.
struct Finish {
  const PagedKVCache* cache;
  int32_t head, group, num_queries, num_pieces;
  int64_t piece_stride;  // floats between the pieces' partial results
  const float *maximum, *sum, *accumulator;
  Rows output;
  DType query_dtype;      // as in Attend, as the next one: they decide the order of the accumulators
  int64_t total_queries;
  const float* sinks; // [group]: logits in the denominator alone, or null
  float value_scale;  // of the cache's values
  bool with_values;
  float *total_maximum, *total_sum;  // [R] out, may be the first piece's
};

// Updates the statistics of the entries in the tiles [tile_begin, tile_end) from what attention stored.
struct Update {
  const PagedKVCache* cache;
  Segments segments;
  int32_t head, group, num_queries;
  int64_t first_query, total_queries;
  int64_t tile_begin, tile_end;
  ScoreMode mode;
  float decay, log_decay, log_share, log_group;  // ln decay, ln(1 - decay), ln group
  const float *stored, *chunk_max, *logits;  // as in Attend; of log_ema the first two may be null
  int64_t stored_stride, chunk_stride;
  const float *maximum, *sum;  // [R], over all pieces
  float *scores, *aux;         // [entries] of this head, or null: the planes of the cache
  bool new_start_empty;        // whether the total_queries newest entries start from nothing
  const float* weights;        // [num_queries]: factors of each query's probabilities; largest alone, or null
  int64_t score_stride;        // largest alone: between the query heads' scores; 0: the group has one score
  float* scratch;              // [2 R]
};

// The target whose dot product with a source, divided by the target's length, is largest; the first of several.
struct Similar {
  bool in_pairs;  // whether keys are bfloat16; otherwise float32
  int32_t head_size, num_sources, num_targets;
  const void* sources;   // [num_sources, head_size]
  const void* targets;   // tiles [head_size, kTile]
  const float* inverse;  // [num_targets] rounded up to tiles: 1 / length
  float* best;           // [num_sources] out
  int32_t* where;        // [num_sources] out
  float* scratch;        // similar_scratch(...) floats
};

// What squares of keys are summed in. Each is exact in it, so a compiler that fuses multiplication and addition, at
// some levels and not at others, changes no bit: both ways of comparing keys must agree, whichever a batch gets.
template <class T>
struct SumOfSquares {
  typedef float type;
};
template <>
struct SumOfSquares<float> {
  typedef double type;
};

// The same for few sources of one KV head, among entries where they lie.
struct SimilarEntries {
  const PagedKVCache* cache;
  Segments segments;
  int32_t head, num_sources;
  bool in_pairs;
  const void* sources;   // [num_sources, head_size]
  const int32_t* ranks;  // [entries]: of equally similar ones that of lowest rank is taken, INT32_MAX never
  float* best;           // [num_sources] out: product with the key over its length; -inf: there is none
  int32_t* where;        // [num_sources] out: its rank
  float* scratch;        // similar_entries_scratch(...) floats
};

// How much the entries of one KV head get of the attention of some queries: summed over the query heads, then summed
// over the queries or the largest of them.
struct Fuse {
  const PagedKVCache* cache;
  Segments segments;
  int32_t head, group, num_queries;
  Rows queries;                    // [group, num_queries, head_size]; strides are not read
  const int64_t* query_positions;  // [num_queries]; a query sees entries up to its own position
  const float* log_votes;          // [entries]
  const int64_t* positions;        // [entries], negative where dead
  float scale, cap;
  const float* sinks;              // [group] or null
  bool largest;
  float* fused;    // [entries] out
  float* scratch;  // fuse_scratch(...) floats
};

// Which `count` of n entries rank highest; of equal ones those of lower index. 0 < count < n.
struct Ranking {
  const float* numbers;              // [n], or null. No NaN, unless the masks below are given
  const int64_t* integers;           // [n] where there are no numbers: of 32 bits, or INT64_MAX
  const uint8_t *first, *possible;   // [n] or null: what ranks above all others; what does not rank below all others
  int64_t n, count;
  int32_t* keys;  // [n] scratch
  uint8_t* mask;  // [n] out
};

// How many of each head's entries are among the largest of all heads together, of which each head has at least `least`
// and at most `most`, and all of them `total`; of equal ones, lower ranks in their heads first, then lower heads.
// num_heads * least <= total <= num_heads * min(most, n).
struct Split {
  const float* shares;  // [num_heads, n], no NaN
  int64_t num_heads, n, least, most, total;
  int32_t* keys;    // [num_heads, n] scratch
  int64_t* counts;  // [num_heads] out
  int64_t* level;   // [num_heads] scratch
};

// For each of the entries [start, stop) of one head the newest other one whose key's product with its own is above the
// threshold, which is no less than 0. Calls go through all entries from the newest backwards: what they find for older
// entries on the way stands in `found` and spares later ones the search.
struct Repeats {
  const float* keys;  // [stop, head_size], from the oldest to the newest
  int32_t head_size;
  float threshold;
  int64_t start, stop;
  int64_t* found;     // [stop] in and out, -1: none so far; of entries before `start` final where it is not -1
  float* similarity;  // [stop - start] out: the products, or 0
  float* scratch;     // repeats_scratch(stop, head_size) floats, aligned to 64 bytes
};

// For each value the sum of its products' absolute values with rows of weights.
struct Norms {
  const float* values;  // [n, head_size]
  int64_t n;
  int32_t head_size;
  const void* weights;  // [num_rows, head_size]
  DType dtype;          // of the weights
  int64_t num_rows;
  float* sums;     // [n] out
  float* scratch;  // norms_scratch(*this) floats, aligned to 64 bytes
};

// Sources of one head join slots one after the other, each that of largest product, which is then that of a mean.
struct Join {
  const float* keys;            // [num_slots, head_size]
  const float* joining;         // [num_sources, head_size]
  const float* source_weights;  // [num_sources]
  int64_t num_slots, num_sources, head_size;
  float* slot_weights;  // [num_slots] in and out; 0: there is no such slot
  int64_t* joined;      // [num_sources] out
  float* scratch;       // join_scratch(...) floats
};

// log_votes + scores - ln(1 - e^(counts log_decay)) of n entries; -inf where counts is not positive.
struct Contributions {
  const float *log_votes, *scores, *counts;  // [n]
  float log_decay;
  int64_t n;
  float* out;  // [n]
};

struct Kernels {
  const char* name;
  bool has_pairs;  // whether bfloat16 is multiplied as it is
  bool has_tiles;  // whether many queries are, best 16 rows at a time
  int64_t (*attend_scratch)(int64_t rows, int64_t head_size);
  void (*attend)(const Attend&);
  void (*finish)(const Finish&);
  void (*update)(const Update&);
  int64_t (*similar_scratch)(int64_t num_sources, int64_t head_size);
  void (*similar)(const Similar&);
  int64_t (*similar_entries_scratch)(int64_t num_sources, int64_t head_size);
  void (*similar_entries)(const SimilarEntries&);
  int64_t (*fuse_scratch)(int64_t group, int64_t num_queries, int64_t head_size, int64_t num_tiles);
  void (*fuse)(const Fuse&);
  int64_t (*repeats_scratch)(int64_t n, int64_t head_size);
  void (*newest_repeats)(const Repeats&);
  int64_t (*norms_scratch)(const Norms&);
  void (*norms)(const Norms&);
  bool (*mark_largest)(const Ranking&);  // false where integers are none that it can rank
  void (*split)(const Split&);
  int64_t (*join_scratch)(int64_t num_slots, int64_t num_sources, int64_t head_size);
  void (*join_slots)(const Join&);
  void (*log_contributions)(const Contributions&);
};

// The kernels of the level in use (module.cpp).
const Kernels& current();

}  // namespace kvmerge
