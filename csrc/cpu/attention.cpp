// Attention over many sequences: how the work is cut into pieces and spread over threads.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "tensors.h"

namespace kvmerge {
namespace {

#include "tiles.h"

constexpr int64_t kRowsAtOnce = 32;            // query heads times queries that read K and V together
constexpr int64_t kTileRowsAtOnce = 256;       // where tiles are made of both for many queries
constexpr int64_t kStoredFloats = 128 << 10;   // of logits kept for the score update, so that they stay in cache
// Rounding follows from where pieces end, so that is the same whatever runs beside a row and on however many threads.
// Shorter pieces cost more to combine than they gain.
constexpr int64_t kPieceChunks = 4;
constexpr int64_t kMinParallelBytes = 64 << 10;

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct AttentionRow {
  Segments segments;
  // Where the heads' fronts have pages of their own: num_pages for each head, and how many entries it has.
  const Page* pages = nullptr;
  const int64_t* fronts = nullptr;
  int64_t num_pages = 0;
  uint8_t coded = 0;  // place in kCodings
  Rows query, output;  // of the row's first token
  int64_t num_queries;
  ScoreMode mode;
  float decay;
  float *scores, *aux;   // [heads, entries] for the statistics, or null: the planes of the cache
  int64_t score_stride;  // between heads

  Segments of_head(int64_t head) const {
    Segments s = segments;
    if (pages) {
      s.front = fronts[head];
      s.pages = pages + head * num_pages;
    }
    return s;
  }
  // The front, or what follows it, alone.
  Segments part_of_head(int64_t head, bool front) const {
    Segments s = of_head(head);
    if (front) s.tail = s.seq_len;
    else s.front = 0;
    return s;
  }
};

// A layer's coded pages.
PagedKVCache coded(PagedKVCache cache, Coding coding) {
  cache.block_size *= coding.slots;
  cache.item_size = 1;
  cache.dtype = coding.dtype;
  return cache;
}

// One (sequence, KV head). Its queries are taken in rounds, a few at a time, so that scores see them in order.
struct Unit {
  int64_t row, head;
  int64_t num_tiles, queries_at_once, num_pieces;
  int64_t front_pieces;  // those before are of a coded front alone, the others of what follows it
  int64_t rounds;
  bool is_split;            // whether its pieces are spread over threads
  float* shared = nullptr;  // partial results of the pieces, where they are
};

// How many numbers attention stores for the update, of each query and entry.
inline int64_t stored_planes(ScoreMode mode) { return mode == ScoreMode::log_ema ? 2 : 1; }

// Where a unit's partial results lie: per piece maximum, sum and accumulator; then what all pieces store.
struct Layout {
  int64_t rows, acc, piece, stored_stride, chunk_stride, total;
  Layout(const Unit& u, int64_t group, int64_t head_size, bool with_values, ScoreMode mode) {
    const bool keeps_scores = mode != ScoreMode::none;
    rows = u.queries_at_once * group;
    acc = with_values ? round_up(rows, 16) * round_up(head_size, 32) : 0;  // kernels may take 16 rows at a time
    piece = round_up(2 * rows, 16) + acc;
    stored_stride = keeps_scores ? round_up(u.num_tiles, kChunkTiles) * kTile : 0;
    chunk_stride = keeps_scores ? round_up(u.num_tiles, kChunkTiles) / kChunkTiles : 0;
    const int64_t per_row = stored_stride * stored_planes(mode) + chunk_stride;
    total = round_up(u.num_pieces * piece + rows * per_row, 16);
  }
};

// with_values: otherwise only the statistics are wanted, and output is not used.
class Driver {
 public:
  Driver(const Kernels& kernels, const PagedKVCache& cache, const std::vector<AttentionRow>& rows, int group,
         float scale, float value_scale, Softmax softmax, bool with_values, bool new_start_empty)
      : kernels_(kernels),
        cache_(cache),
        rows_(rows),
        group_(group),
        scale_(scale),
        value_scale_(value_scale),
        softmax_(softmax),
        with_values_(with_values),
        new_start_empty_(new_start_empty) {
    for (const Coding& coding : kCodings) coded_.push_back(coded(cache, coding));
  }

  void run() {
    int threads = max_threads();
    plan(threads);
    int64_t rounds = 1;
    for (const Unit& u : units_)
      if (u.is_split) rounds = std::max(rounds, u.rounds);
    for (int64_t round = 0; round < rounds; ++round) {
      struct Piece {
        const Unit* unit;
        int64_t piece;
      };
      std::vector<Piece> pieces, split;
      for (const Unit& u : units_) {
        if (!u.is_split) {
          if (round == 0) pieces.push_back({&u, 0});
        } else if (round < u.rounds) {
          for (int64_t i = 0; i < u.num_pieces; ++i) split.push_back({&u, i});
        }
      }
      // Pieces of the split units are the largest, so they come first; the small ones fill what is left.
      pieces.insert(pieces.begin(), split.begin(), split.end());
      parallel_for(static_cast<int64_t>(pieces.size()), threads_, [&](int64_t i) {
        const Unit& u = *pieces[i].unit;
        if (u.is_split) {
          attend(u, u.shared, round, pieces[i].piece);
          return;
        }
        thread_local Scratch scratch;
        float* partial = scratch.floats(layout(u).total);
        for (int64_t r = 0; r < u.rounds; ++r) {
          for (int64_t piece = 0; piece < u.num_pieces; ++piece) attend(u, partial, r, piece);
          finish(u, partial, r);
          for (int64_t piece = 0; piece < u.num_pieces; ++piece) update(u, partial, r, piece);
        }
      });
      if (split.empty()) continue;
      std::vector<const Unit*> combined;
      for (const Unit& u : units_)
        if (u.is_split && round < u.rounds) combined.push_back(&u);
      parallel_for(static_cast<int64_t>(combined.size()), threads_,
                   [&](int64_t i) { finish(*combined[i], combined[i]->shared, round); });
      parallel_for(static_cast<int64_t>(split.size()), threads_,
                   [&](int64_t i) { update(*split[i].unit, split[i].unit->shared, round, split[i].piece); });
    }
  }

 private:
  Layout layout(const Unit& u) const {
    return Layout(u, group_, cache_.head_size, with_values_, rows_[u.row].mode);
  }

  void plan(int threads) {
    struct Cost {
      int64_t row, head, tiles, work;
    };
    std::vector<Cost> costs;
    int64_t total = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(rows_.size()); ++i) {
      if (rows_[i].num_queries == 0) continue;
      for (int64_t head = 0; head < cache_.num_heads; ++head) {
        const int64_t tiles = front_tiles(rows_[i], head) + other_tiles(rows_[i], head);
        costs.push_back({i, head, tiles, tiles * rows_[i].num_queries});
        total += costs.back().work;
      }
    }
    const int64_t bytes = total * kTile * cache_.head_size * cache_.item_size * 2;
    threads_ = bytes < kMinParallelBytes ? 1 : threads;
    std::stable_sort(costs.begin(), costs.end(), [](const Cost& a, const Cost& b) { return a.work > b.work; });
    const int64_t share = std::max<int64_t>(1, total / (3 * threads_));
    int64_t shared = 0;
    for (const Cost& c : costs) {
      const AttentionRow& row = rows_[c.row];
      const int64_t chunks = (c.tiles + kChunkTiles - 1) / kChunkTiles;
      const bool in_tiles = kernels_.has_tiles && row.num_queries > 1;
      int64_t at_once = std::max<int64_t>(1, (in_tiles ? kTileRowsAtOnce : kRowsAtOnce) / group_);
      if (row.mode != ScoreMode::none)
        at_once = std::max<int64_t>(1, std::min(at_once, kStoredFloats / (chunks * kChunk * group_ * stored_planes(row.mode))));
      at_once = std::min(at_once, row.num_queries);
      const int64_t front_pieces = pieces_of(front_tiles(row, c.head));
      const int64_t pieces = std::max<int64_t>(1, front_pieces + pieces_of(other_tiles(row, c.head)));
      const bool is_split = threads_ > 1 && pieces > 1 && c.work > share;
      Unit u{c.row, c.head, c.tiles, at_once, pieces, front_pieces, (row.num_queries + at_once - 1) / at_once, is_split};
      if (is_split) shared += layout(u).total;
      units_.push_back(u);
    }
    if (shared == 0) return;
    thread_local Scratch scratch;
    float* next = scratch.floats(shared);
    for (Unit& u : units_)
      if (u.is_split) {
        u.shared = next;
        next += layout(u).total;
      }
  }

  // Of a coded front, which is attended to by itself; all others go with what follows them.
  int64_t front_tiles(const AttentionRow& row, int64_t head) const {
    return row.coded ? Tiles(coded_[row.coded], row.part_of_head(head, true), head).count : 0;
  }
  int64_t other_tiles(const AttentionRow& row, int64_t head) const {
    return Tiles(cache_, row.coded ? row.part_of_head(head, false) : row.of_head(head), head).count;
  }
  static int64_t pieces_of(int64_t tiles) {
    return (tiles + kPieceChunks * kChunkTiles - 1) / (kPieceChunks * kChunkTiles);
  }

  int64_t num_queries(const Unit& u, int64_t round) const {
    return std::min(u.queries_at_once, rows_[u.row].num_queries - round * u.queries_at_once);
  }

  Rows from(Rows rows, int64_t token) const {
    const int64_t bytes = rows.dtype == DType::f32 ? 4 : 2;
    if (rows.data) rows.data = static_cast<char*>(rows.data) + token * rows.token_stride * bytes;
    return rows;
  }

  void attend(const Unit& u, float* partial, int64_t round, int64_t piece) const {
    const AttentionRow& row = rows_[u.row];
    const Layout l = layout(u);
    thread_local Scratch scratch;
    float* mine = partial + piece * l.piece;
    float* stored = partial + u.num_pieces * l.piece;
    Attend a{};
    const bool in_front = piece < u.front_pieces;
    a.cache = in_front ? &coded_[row.coded] : &cache_;
    a.dtype = cache_.dtype;
    a.segments = row.coded ? row.part_of_head(u.head, in_front) : row.of_head(u.head);
    a.head = static_cast<int32_t>(u.head);
    a.group = group_;
    a.num_queries = static_cast<int32_t>(num_queries(u, round));
    a.first_query = round * u.queries_at_once;
    a.total_queries = row.num_queries;
    const int64_t num_tiles = in_front ? front_tiles(row, u.head) : other_tiles(row, u.head);
    a.tile_begin = (in_front ? piece : piece - u.front_pieces) * kPieceChunks * kChunkTiles;
    a.tile_end = std::min(num_tiles, a.tile_begin + kPieceChunks * kChunkTiles);
    if (row.mode == ScoreMode::none && !in_front) {  // otherwise what later tokens get is stored too, nothing as it is
      const Tiles tiles(cache_, a.segments, u.head);
      const int64_t seen = tiles.num_entries() - a.total_queries + a.first_query + a.num_queries;
      a.tile_end = std::max(a.tile_begin, std::min(a.tile_end, tiles.up_to(seen)));
    }
    a.sees_all = in_front;
    a.query = from(row.query, a.first_query);
    a.scale = scale_;
    a.cap = softmax_.cap;
    a.with_values = with_values_;
    a.mode = row.mode;
    a.stored = stored;
    a.logits = stored + l.rows * l.stored_stride;
    a.chunk_max = stored + l.rows * l.stored_stride * stored_planes(row.mode);
    a.stored_stride = l.stored_stride;
    a.chunk_stride = l.chunk_stride;
    a.maximum = mine;
    a.sum = mine + l.rows;
    a.accumulator = mine + l.piece - l.acc;
    a.scratch = scratch.floats(kernels_.attend_scratch(l.rows, cache_.head_size));
    kernels_.attend(a);
  }

  void finish(const Unit& u, float* partial, int64_t round) const {
    const AttentionRow& row = rows_[u.row];
    const Layout l = layout(u);
    Finish f{};
    f.cache = &cache_;
    f.head = static_cast<int32_t>(u.head);
    f.group = group_;
    f.num_queries = static_cast<int32_t>(num_queries(u, round));
    f.num_pieces = static_cast<int32_t>(u.num_pieces);
    f.piece_stride = l.piece;
    f.maximum = f.total_maximum = partial;
    f.sum = f.total_sum = partial + l.rows;
    f.accumulator = partial + l.piece - l.acc;
    f.output = from(row.output, round * u.queries_at_once);
    f.query_dtype = row.query.dtype;
    f.total_queries = row.num_queries;
    f.value_scale = value_scale_;
    f.sinks = softmax_.sinks ? softmax_.sinks + u.head * group_ : nullptr;
    f.with_values = with_values_;
    kernels_.finish(f);
  }

  void update(const Unit& u, float* partial, int64_t round, int64_t piece) const {
    const AttentionRow& row = rows_[u.row];
    if (row.mode == ScoreMode::none) return;
    const Layout l = layout(u);
    thread_local Scratch scratch;
    const float* stored = partial + u.num_pieces * l.piece;
    Update x{};
    x.cache = &cache_;
    x.segments = row.of_head(u.head);
    x.head = static_cast<int32_t>(u.head);
    x.group = group_;
    x.num_queries = static_cast<int32_t>(num_queries(u, round));
    x.first_query = round * u.queries_at_once;
    x.total_queries = row.num_queries;
    x.tile_begin = piece * kPieceChunks * kChunkTiles;
    x.tile_end = std::min(u.num_tiles, (piece + 1) * kPieceChunks * kChunkTiles);
    x.mode = row.mode;
    x.decay = row.decay;
    x.log_decay = std::log(row.decay);
    x.log_share = std::log1p(-row.decay);
    x.log_group = std::log(static_cast<float>(group_));
    x.logits = stored + l.rows * l.stored_stride;
    if (with_values_ || row.mode != ScoreMode::log_ema) {
      x.stored = stored;
      x.chunk_max = stored + l.rows * l.stored_stride * stored_planes(row.mode);
    }
    x.stored_stride = l.stored_stride;
    x.chunk_stride = l.chunk_stride;
    x.maximum = partial;
    x.sum = partial + l.rows;
    x.scores = row.scores ? row.scores + u.head * row.score_stride : nullptr;
    x.aux = row.scores ? row.aux + u.head * row.score_stride : nullptr;
    x.new_start_empty = new_start_empty_;
    x.scratch = scratch.floats(2 * l.rows);
    kernels_.update(x);
  }

  const Kernels& kernels_;
  const PagedKVCache& cache_;
  std::vector<PagedKVCache> coded_;  // by coding
  const std::vector<AttentionRow>& rows_;
  const int group_;
  const float scale_, value_scale_;
  const Softmax softmax_;
  const bool with_values_, new_start_empty_;
  int threads_ = 1;
  std::vector<Unit> units_;
};

// The operators as apache-tvm-ffi functions.

ScoreMode mode_of(int64_t mode) {
  KVM_CHECK(0 <= mode && mode <= 3, ValueError) << "score update mode " << mode << " is not 0, 1, 2 or 3";
  return static_cast<ScoreMode>(mode);
}

// Query heads per KV head.
int64_t group_of(const PagedKVCache& cache, const TensorView& query) {
  KVM_CHECK(query.ndim() == 3, ValueError) << "query must have shape [tokens, heads, head_size]";
  KVM_CHECK(cache.num_heads > 0 && query.size(1) > 0 && query.size(1) % cache.num_heads == 0, ValueError)
      << query.size(1) << " query heads cannot share " << cache.num_heads << " KV heads";
  return query.size(1) / cache.num_heads;
}

void call_paged_attention(TensorView query, TensorView keys, TensorView block_table, TensorView query_starts,
                          TensorView query_lens, TensorView seq_lens, TensorView fronts, TensorView tails,
                          TensorView score_modes, TensorView score_decays, double scale, TensorView output,
                          Tensors layers, OptionalTensor page_ids, OptionalTensor page_fronts,
                          OptionalTensor page_coded, double cap,
                          OptionalTensor sinks, double value_scale) {
  const PagedKVCache cache = cache_of(keys);
  const int64_t group = group_of(cache, query), heads = query.size(1), d = cache.head_size;
  const Rows q = Argument("query", query).rows(heads, d), out = Argument("output", output).rows(heads, d);
  const Argument table("block_table", block_table), decays("score_decays", score_decays);
  table.check_shape({-1, -1});
  const BlockIds blocks = table.block_ids();
  const int64_t num_rows = table.size(0), num_tokens = query.size(0);
  decays.check_shape({num_rows});
  const std::vector<int64_t> starts = Argument("query_starts", query_starts).integers(num_rows),
                             lens = Argument("query_lens", query_lens).integers(num_rows),
                             ends = Argument("seq_lens", seq_lens).integers(num_rows),
                             front = Argument("fronts", fronts).integers(num_rows),
                             tail = Argument("tails", tails).integers(num_rows),
                             modes = Argument("score_modes", score_modes).integers(num_rows);
  KVM_CHECK(output.size(0) >= num_tokens, ValueError) << "output has fewer tokens than query";
  HeadPages pages{{}, nullptr, 0};
  const uint8_t* codings = nullptr;
  if (page_ids.has_value() && page_fronts.has_value()) {
    const std::vector<PagedKVCache> caches = caches_of(layers);
    KVM_CHECK(!caches.empty() && caches[0].num_heads == cache.num_heads && caches[0].head_size == cache.head_size &&
                  caches[0].block_size == cache.block_size && caches[0].dtype == cache.dtype,
              ValueError)
        << "head pages are in layers of another shape";
    if (page_coded.has_value()) {
      codings = Argument("page_coded", page_coded.value()).contiguous({num_rows}).u8();
      for (int64_t r = 0; r < num_rows; ++r)
        KVM_CHECK(codings[r] < kNumCodings, ValueError) << "row " << r << ": there is no coding " << int{codings[r]};
    }
    pages = head_pages_of(caches, page_ids.value(), page_fronts.value(), num_rows, codings);
  }
  std::vector<AttentionRow> rows(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    KVM_CHECK(0 <= starts[r] && 0 <= lens[r] && starts[r] + lens[r] <= num_tokens, ValueError)
        << "row " << r << ": tokens [" << starts[r] << ", " << starts[r] + lens[r] << ") are not in the query";
    AttentionRow& row = rows[r];
    const int64_t of_row = r * cache.num_heads * pages.num_pages;
    const bool has_pages = pages.num_pages > 0 && pages.pages[of_row].rows != nullptr;
    int64_t entries = front[r] + ends[r] - tail[r];
    if (has_pages) {
      row.pages = pages.pages.data() + of_row;
      row.fronts = pages.fronts + r * cache.num_heads;
      row.num_pages = pages.num_pages;
      row.coded = codings ? codings[r] : 0;
      entries = ends[r] - tail[r];  // queries are never of a front
      for (int64_t i = 0; i < cache.num_heads * pages.num_pages; ++i)
        KVM_CHECK(row.pages[i].rows, ValueError) << "row " << r << ": a head has no pages";
    }
    row.segments = segments_of(cache, blocks.row(r), table.size(1), has_pages ? 0 : front[r],
                               tail[r], ends[r]);
    KVM_CHECK(lens[r] <= entries, ValueError)
        << "row " << r << ": " << lens[r] << " queries, " << entries << " entries";
    const int64_t bytes = q.dtype == DType::f32 ? 4 : 2, out_bytes = out.dtype == DType::f32 ? 4 : 2;
    row.query = q;
    row.query.data = static_cast<char*>(q.data) + starts[r] * q.token_stride * bytes;
    row.output = out;
    row.output.data = static_cast<char*>(out.data) + starts[r] * out.token_stride * out_bytes;
    row.num_queries = lens[r];
    row.mode = mode_of(modes[r]);
    KVM_CHECK(!row.coded || row.mode == ScoreMode::none, ValueError) << "row " << r << ": a coded front has no scores";
    row.decay = decays.f32()[r * decays.stride(0)];
    row.scores = row.aux = nullptr;
    row.score_stride = 0;
  }
  Driver(current(), cache, rows, static_cast<int>(group), static_cast<float>(scale),
         static_cast<float>(value_scale), softmax_of(cap, sinks, cache.num_heads, group), true, true)
      .run();
}

void call_score_prompt_queries(TensorView query, TensorView keys, TensorView blocks, int64_t mode, double decay,
                               double scale, TensorView scores, TensorView aux, double cap,
                               OptionalTensor sinks) {
  const PagedKVCache cache = cache_of(keys);
  const int64_t group = group_of(cache, query), heads = query.size(1);
  const Argument table("blocks", blocks), s("scores", scores), x("aux", aux);
  table.check_shape({-1});
  const BlockIds ids = table.block_ids();
  s.check_shape({cache.num_heads, -1});
  const int64_t seq_len = s.size(1);
  for (const Argument* a : {&s, &x}) {
    a->check_shape({cache.num_heads, seq_len});
    a->check_rows();
    a->f32();
  }
  KVM_CHECK(s.stride(0) == x.stride(0), ValueError) << "scores and aux must have the same strides";
  KVM_CHECK(query.size(0) <= seq_len, ValueError) << query.size(0) << " queries, but " << seq_len << " tokens";
  AttentionRow row{};
  row.segments = segments_of(cache, ids.row(0), table.size(0), 0, 0, seq_len);
  row.query = Argument("query", query).rows(heads, cache.head_size);
  row.num_queries = query.size(0);
  row.mode = mode_of(mode);
  row.decay = static_cast<float>(decay);
  row.scores = s.f32();
  row.aux = x.f32();
  row.score_stride = s.stride(0);
  if (row.mode == ScoreMode::none) return;
  Driver(current(), cache, {row}, static_cast<int>(group), static_cast<float>(scale), 1.0f,
         softmax_of(cap, sinks, cache.num_heads, group), false, false)
      .run();
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, kvmerge::call_paged_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(score_prompt_queries, kvmerge::call_score_prompt_queries);
