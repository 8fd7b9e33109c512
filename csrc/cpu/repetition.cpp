// Scores of a context's entries by the queries that repeat it (KVzip): the largest probability that any of them gives.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "tensors.h"

namespace kvmerge {
namespace {

#include "tiles.h"

constexpr int64_t kRowsAtOnce = 32;           // query heads times queries that read K together
constexpr int64_t kStoredFloats = 128 << 10;  // of the chunk's exponentials, so that they stay in cache
constexpr int kRanges = 3;                    // sinks, chunk, repetition
constexpr int kScored = 1;                    // the chunk

struct Problem {
  const PagedKVCache& cache;
  Segments ranges[kRanges];
  Rows query, own;  // own: of the last range
  int64_t num_queries, group;
  float scale;
  Softmax softmax;
  const float* weights;  // of the queries, or null
  int64_t score_stride;  // between the query heads' scores; 0: those of a KV head have one
};

// Raises `scores` of the chunk in one head by the queries [first, last).
void raise_scores(const Problem& p, int64_t head, int64_t first, int64_t last, float* scores) {
  const Kernels& kernels = current();
  const int64_t num_tiles = Tiles(p.cache, p.ranges[kScored], head).count;
  const int64_t num_chunks = (num_tiles + kChunkTiles - 1) / kChunkTiles;
  const int64_t at_once = std::max<int64_t>(
      1, std::min(kRowsAtOnce / p.group, kStoredFloats / std::max<int64_t>(1, num_chunks * kChunk * p.group)));
  const int64_t rows = at_once * p.group, stored = rows * num_chunks * kChunk;
  thread_local Scratch results, scratch;
  float* partial = results.floats(2 * kRanges * rows + stored + rows * num_chunks);
  float* stored_at = partial + 2 * kRanges * rows;
  float* work = scratch.floats(std::max(rows, kernels.attend_scratch(rows, p.cache.head_size)));
  for (int64_t begin = first; begin < last; begin += at_once) {
    const int32_t num_queries = static_cast<int32_t>(std::min(at_once, last - begin));
    int32_t num_pieces = 0;
    for (int i = 0; i < kRanges; ++i) {
      if (p.ranges[i].tail == p.ranges[i].seq_len) continue;
      Attend a{};
      a.cache = &p.cache;
      a.segments = p.ranges[i];
      if (i == kRanges - 1) {  // the only one where a query does not see all
        a.segments.seq_len -= p.num_queries - begin - num_queries;
        a.total_queries = num_queries;
      }
      a.head = static_cast<int32_t>(head);
      a.group = static_cast<int32_t>(p.group);
      a.num_queries = num_queries;
      a.tile_end = Tiles(p.cache, a.segments, head).count;
      a.query = i == kRanges - 1 ? p.own : p.query;
      a.query.data = static_cast<char*>(a.query.data) +
                     begin * a.query.token_stride * (a.query.dtype == DType::f32 ? 4 : 2);
      a.scale = p.scale;
      a.cap = p.softmax.cap;
      a.dtype = p.cache.dtype;
      a.mode = i == kScored ? ScoreMode::largest : ScoreMode::none;
      a.stored = stored_at;
      a.chunk_max = stored_at + stored;
      a.stored_stride = num_chunks * kChunk;
      a.chunk_stride = num_chunks;
      a.maximum = partial + num_pieces * 2 * rows;
      a.sum = a.maximum + rows;
      a.scratch = work;
      kernels.attend(a);
      ++num_pieces;
    }
    Finish f{};
    f.cache = &p.cache;
    f.head = static_cast<int32_t>(head);
    f.group = static_cast<int32_t>(p.group);
    f.num_queries = num_queries;
    f.num_pieces = num_pieces;
    f.piece_stride = 2 * rows;
    f.maximum = f.total_maximum = partial;
    f.sum = f.total_sum = partial + rows;
    f.sinks = p.softmax.sinks ? p.softmax.sinks + head * p.group : nullptr;
    kernels.finish(f);
    Update u{};
    u.cache = &p.cache;
    u.segments = p.ranges[kScored];
    u.head = f.head;
    u.group = f.group;
    u.num_queries = num_queries;
    u.tile_end = num_tiles;
    u.mode = ScoreMode::largest;
    u.stored = stored_at;
    u.chunk_max = stored_at + stored;
    u.stored_stride = num_chunks * kChunk;
    u.chunk_stride = num_chunks;
    u.maximum = partial;
    u.sum = partial + rows;
    u.scores = scores;
    u.weights = p.weights ? p.weights + begin : nullptr;
    u.score_stride = p.score_stride;
    u.scratch = work;
    kernels.update(u);
  }
}

void call_score_repetition(TensorView query, TensorView keys, TensorView blocks, double scale, int64_t seq_len,
                           int64_t context, int64_t start, int64_t sinks, TensorView scores, OptionalTensor weights,
                           OptionalTensor own, double cap, OptionalTensor sink_logits) {
  const PagedKVCache cache = cache_of(keys);
  KVM_CHECK(query.ndim() == 3 && cache.num_heads > 0 && query.size(1) > 0 && query.size(1) % cache.num_heads == 0,
            ValueError)
      << "query must have shape [tokens, heads, head_size], with heads that share " << cache.num_heads << " KV heads";
  const Argument table("blocks", blocks), s("scores", scores);
  table.check_shape({-1});
  const BlockIds ids = table.block_ids();
  const int64_t heads = cache.num_heads, group = query.size(1) / heads;
  KVM_CHECK(scores.ndim() == 2 && (s.size(0) == heads || s.size(0) == heads * group), ValueError)
      << "scores must have a row for each of " << heads << " KV heads, or " << heads * group << " query heads";
  s.check_rows();
  float* const all = s.f32();
  const int64_t rows_per_head = s.size(0) / heads;
  const int64_t num_scored = s.size(1), num_queries = query.size(0), num_ids = table.size(0);
  const bool is_own = own.has_value();  // queries of the context's tokens
  KVM_CHECK(0 <= sinks && 0 <= start && start + num_scored <= context &&
                (is_own ? start + num_queries <= seq_len && context == seq_len : context + num_queries <= seq_len),
            ValueError)
      << "a context of " << context << " tokens has no tokens [" << start << ", " << start + num_scored
      << "), or is not followed by " << num_queries << " queries in " << seq_len << " tokens";
  if (num_scored == 0 || num_queries == 0) return;
  const Problem p{cache,
                  {segments_of(cache, ids.row(0), num_ids, 0, 0, std::min(sinks, start)),
                   segments_of(cache, ids.row(0), num_ids, 0, start, start + num_scored),
                   segments_of(cache, ids.row(0), num_ids, 0, is_own ? start : context, seq_len)},
                  Argument("query", query).rows(query.size(1), cache.head_size),
                  is_own ? Argument("own", own.value()).rows(query.size(1), cache.head_size)
                         : Argument("query", query).rows(query.size(1), cache.head_size),
                  num_queries,
                  group,
                  static_cast<float>(scale),
                  softmax_of(cap, sink_logits, heads, group),
                  weights.has_value() ? Argument("weights", weights.value()).contiguous({num_queries}).f32() : nullptr,
                  rows_per_head > 1 ? s.stride(0) : 0};
  // Queries of a head are spread over threads where there are fewer heads than threads could take; where several write
  // the same scores, each has its own first.
  const int threads = max_threads();
  const int64_t parts = std::min((num_queries + 63) / 64, threads > 1 ? (3 * threads + heads - 1) / heads : 1);
  const int64_t stride = s.stride(0), of_head = rows_per_head > 1 ? (rows_per_head - 1) * stride + num_scored : num_scored;
  thread_local Scratch scratch;
  const int64_t size = heads * (parts - 1) * of_head;
  float* others = scratch.floats(std::max<int64_t>(1, size));
  std::fill_n(others, size, 0.0f);
  const auto of_part = [&](int64_t head, int64_t part) {
    return part == 0 ? all + head * rows_per_head * stride : others + (head * (parts - 1) + part - 1) * of_head;
  };
  parallel_for(heads * parts, threads, [&](int64_t i) {
    const int64_t head = i % heads, part = i / heads;
    raise_scores(p, head, part * num_queries / parts, (part + 1) * num_queries / parts, of_part(head, part));
  });
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t row = 0; row < rows_per_head; ++row) {
        float* to = of_part(head, 0) + row * stride;
        const float* from = of_part(head, part) + row * stride;
        for (int64_t i = 0; i < num_scored; ++i) to[i] = from[i] > to[i] ? from[i] : to[i];
      }
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(score_repetition, kvmerge::call_score_repetition);
