// The operators as apache-tvm-ffi functions: arguments are checked here and nowhere further in.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "attention.h"
#include "entries.h"
#include "index.h"
#include "tensors.h"

namespace kvmerge {

#define KVM_DECLARE(level)      \
  namespace level {             \
  const Kernels& kernels();     \
  }
KVM_DECLARE(baseline)
KVM_DECLARE(avx2)
KVM_DECLARE(avx512)
KVM_DECLARE(avx512_bf16)

namespace {

// Levels that were compiled in and that this machine can run, the best first.
std::vector<const Kernels*> supported_levels() {
  std::vector<const Kernels*> levels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  (void)has_bf16;
#if defined(KVM_HAVE_avx512_bf16)
  if (has_bf16) levels.push_back(&avx512_bf16::kernels());
#endif
#if defined(KVM_HAVE_avx512)
  if (has_avx512) levels.push_back(&avx512::kernels());
#endif
#if defined(KVM_HAVE_avx2)
  if (has_avx2) levels.push_back(&avx2::kernels());
#endif
#endif
  levels.push_back(&baseline::kernels());
  return levels;
}

const Kernels*& current() {
  static const Kernels* kernels = supported_levels().front();
  return kernels;
}

std::string levels() {
  std::string names;
  for (const Kernels* k : supported_levels()) names += (names.empty() ? "" : " ") + std::string(k->name);
  return names;
}

std::string level() { return current()->name; }

void set_level(tvm::ffi::String name) {
  for (const Kernels* k : supported_levels())
    if (std::strcmp(k->name, name.c_str()) == 0) {
      current() = k;
      return;
    }
  TVM_FFI_THROW(ValueError) << "instruction set level " << name << " is not among: " << levels();
}

ScoreMode mode_of(int64_t mode) {
  KVM_CHECK(0 <= mode && mode <= 3, ValueError) << "score update mode " << mode << " is not 0, 1, 2 or 3";
  return static_cast<ScoreMode>(mode);
}

// Query heads per KV head.
int64_t group_of(const PagedKVCache& pages, const TensorView& query) {
  KVM_CHECK(query.ndim() == 3, ValueError) << "query must have shape [tokens, heads, head_size]";
  KVM_CHECK(pages.num_heads > 0 && query.size(1) > 0 && query.size(1) % pages.num_heads == 0, ValueError)
      << query.size(1) << " query heads cannot share " << pages.num_heads << " KV heads";
  return query.size(1) / pages.num_heads;
}

void paged_attention(TensorView query, TensorView keys, TensorView block_table, TensorView query_starts,
                     TensorView query_lens, TensorView seq_lens, TensorView fronts, TensorView tails,
                     TensorView update_modes, TensorView update_decays, double scale, TensorView output) {
  const PagedKVCache pages = pages_of(keys);
  const int64_t group = group_of(pages, query), heads = query.size(1), d = pages.head_size;
  const Rows q = Argument("query", query).rows(heads, d), out = Argument("output", output).rows(heads, d);
  const Argument table("block_table", block_table), decays("update_decays", update_decays);
  table.check_shape({-1, -1});
  const std::vector<int32_t> blocks = table.block_ids();
  const int64_t num_rows = table.size(0), num_tokens = query.size(0);
  decays.check_shape({num_rows});
  const std::vector<int64_t> starts = Argument("query_starts", query_starts).integers(num_rows),
                             lens = Argument("query_lens", query_lens).integers(num_rows),
                             ends = Argument("seq_lens", seq_lens).integers(num_rows),
                             front = Argument("fronts", fronts).integers(num_rows),
                             tail = Argument("tails", tails).integers(num_rows),
                             modes = Argument("update_modes", update_modes).integers(num_rows);
  KVM_CHECK(output.size(0) >= num_tokens, ValueError) << "output has fewer tokens than query";
  std::vector<AttentionRow> rows(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    KVM_CHECK(0 <= starts[r] && 0 <= lens[r] && starts[r] + lens[r] <= num_tokens, ValueError)
        << "row " << r << ": tokens [" << starts[r] << ", " << starts[r] + lens[r] << ") are not in the query";
    AttentionRow& row = rows[r];
    row.segments =
        segments_of(pages, blocks.data() + r * table.size(1), table.size(1), front[r], tail[r], ends[r]);
    const int64_t entries = front[r] + ends[r] - tail[r];
    KVM_CHECK(lens[r] <= entries, ValueError) << "row " << r << ": " << lens[r] << " queries, " << entries << " entries";
    const int64_t bytes = q.dtype == DType::f32 ? 4 : 2, out_bytes = out.dtype == DType::f32 ? 4 : 2;
    row.query = q;
    row.query.data = static_cast<char*>(q.data) + starts[r] * q.token_stride * bytes;
    row.output = out;
    row.output.data = static_cast<char*>(out.data) + starts[r] * out.token_stride * out_bytes;
    row.num_queries = lens[r];
    row.mode = mode_of(modes[r]);
    row.decay = decays.f32()[r * decays.stride(0)];
    row.scores = row.aux = nullptr;
    row.score_stride = 0;
  }
  attend_rows(*current(), pages, rows, static_cast<int>(group), static_cast<float>(scale), true, true);
}

void score_prompt_queries(TensorView query, TensorView keys, TensorView blocks, int64_t seq_len, int64_t mode, double decay,
                   double scale, TensorView scores, TensorView aux) {
  const PagedKVCache pages = pages_of(keys);
  const int64_t group = group_of(pages, query), heads = query.size(1);
  const std::vector<int32_t> ids = Argument("blocks", blocks).block_ids();
  const Argument s("scores", scores), x("aux", aux);
  for (const Argument* a : {&s, &x}) {
    a->check_shape({pages.num_heads, seq_len});
    a->check_rows();
    a->f32();
  }
  KVM_CHECK(s.stride(0) == x.stride(0), ValueError) << "scores and aux must have the same strides";
  KVM_CHECK(query.size(0) <= seq_len, ValueError) << query.size(0) << " queries, but " << seq_len << " tokens";
  AttentionRow row{};
  row.segments = segments_of(pages, ids.data(), static_cast<int64_t>(ids.size()), 0, 0, seq_len);
  row.query = Argument("query", query).rows(heads, pages.head_size);
  row.num_queries = query.size(0);
  row.mode = mode_of(mode);
  row.decay = static_cast<float>(decay);
  row.scores = s.f32();
  row.aux = x.f32();
  row.score_stride = s.stride(0);
  if (row.mode == ScoreMode::none) return;
  attend_rows(*current(), pages, {row}, static_cast<int>(group), static_cast<float>(scale), false, false);
}

typedef tvm::ffi::Array<tvm::ffi::Tensor> Tensors;

// Layers of sequences: unit u lies in layer[u]'s pages, in row u of `blocks`.
struct Batch {
  std::vector<int32_t> blocks;
  int64_t num_blocks = 0, num_rows = 0, num_entries = 0, head_size = 0;
  SequenceLayers units;

  Batch(const Tensors& layers, const TensorView& layer, const TensorView& ids) {
    const int64_t num_units = layer.ndim() == 1 ? layer.size(0) : 0;
    const std::vector<int64_t> which = Argument("layer", layer).integers(num_units);
    const Argument table("blocks", ids);
    table.check_shape({num_units, -1});
    blocks = table.block_ids();
    num_blocks = table.size(1);
    std::vector<PagedKVCache> pages;
    for (const tvm::ffi::Tensor& keys : layers) {
      pages.push_back(pages_of(TensorView(keys)));
      const PagedKVCache &first = pages.front(), &last = pages.back();
      KVM_CHECK(last.dtype == first.dtype && last.num_heads == first.num_heads && last.head_size == first.head_size &&
                    last.block_size == first.block_size,
                ValueError)
          << "layers differ in dtype, heads or block size";
    }
    for (int64_t u = 0; u < num_units; ++u) {
      KVM_CHECK(0 <= which[u] && which[u] < static_cast<int64_t>(pages.size()), IndexError) << "no layer " << which[u];
      units.push_back(Unit{pages[which[u]], Segments{blocks.data() + u * num_blocks, 0, 0, 0}});
    }
    if (units.empty()) return;
    num_rows = num_units * pages.front().num_heads;
    head_size = pages.front().head_size;
  }

  // With the segments that the units' live entries are in, equally many each.
  Batch(const Tensors& layers, const TensorView& layer, const TensorView& ids, const TensorView& segments)
      : Batch(layers, layer, ids) {
    const Argument s("segments", segments);
    const int64_t* bounds = s.contiguous({static_cast<int64_t>(units.size()), 3}).i64();
    for (Unit& unit : units) {
      unit.segments = segments_of(unit.pages, unit.segments.blocks, num_blocks, bounds[0], bounds[1], bounds[2]);
      const int64_t count = bounds[0] + bounds[2] - bounds[1];
      KVM_CHECK(&unit == &units.front() || count == num_entries, ValueError) << "units differ in number of entries";
      num_entries = count;
      bounds += 3;
    }
  }

  // [rows, count] indices of entries, or negative where that is allowed.
  const int64_t* entries(const char* name, const TensorView& index, bool negative) const {
    const Argument a(name, index);
    const int64_t *values = a.contiguous({num_rows, -1}).i64(), lowest = negative ? INT64_MIN : 0;
    const int64_t count = a.size(0) * a.size(1);
    bool valid = true;
    for (int64_t i = 0; i < count; ++i) valid &= lowest <= values[i] && values[i] < num_entries;
    for (int64_t i = 0; !valid && i < count; ++i)
      KVM_CHECK(lowest <= values[i] && values[i] < num_entries, IndexError)
          << name << ": there is no entry " << values[i] << " among " << num_entries;
    return values;
  }

  // Checks that slots [0, count) of the blocks exist.
  void check_slots(int64_t count) const {
    for (const Unit& unit : units) segments_of(unit.pages, unit.segments.blocks, num_blocks, 0, 0, count);
  }
};

void call_gather_metadata(Tensors layers, TensorView layer, TensorView blocks, TensorView segments,
                          TensorView log_votes, TensorView scores, TensorView aux, TensorView positions) {
  const Batch batch(layers, layer, blocks, segments);
  const std::vector<int64_t> shape = {batch.num_rows, batch.num_entries};
  gather_metadata(batch.units, Argument("log_votes", log_votes).contiguous(shape).f32(),
                  Argument("scores", scores).contiguous(shape).f32(), Argument("aux", aux).contiguous(shape).f32(),
                  Argument("positions", positions).contiguous(shape).i64());
}

void call_gather_rows(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, bool of_keys,
                      TensorView index, TensorView rows) {
  const Batch batch(layers, layer, blocks, segments);
  const int64_t* entries = batch.entries("index", index, true);
  float* out = Argument("rows", rows).contiguous({batch.num_rows, index.size(1), batch.head_size}).f32();
  gather_rows(batch.units, of_keys, entries, index.size(1), out);
}

void call_gather_all(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, TensorView all_keys,
                     TensorView all_values) {
  const Batch batch(layers, layer, blocks, segments);
  const std::vector<int64_t> shape = {batch.num_rows, batch.num_entries, batch.head_size};
  gather_all(batch.units, Argument("keys", all_keys).contiguous(shape).f32(),
             Argument("values", all_values).contiguous(shape).f32());
}

void call_most_similar(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, TensorView members,
                       TensorView carriers, TensorView usable, TensorView similarity, TensorView best) {
  const Batch batch(layers, layer, blocks, segments);
  const int64_t *m = batch.entries("members", members, false), *c = batch.entries("carriers", carriers, false);
  const int64_t num_members = members.size(1), num_carriers = carriers.size(1);
  KVM_CHECK(num_carriers > 0 || num_members == 0, ValueError) << "there must be a carrier";
  const uint8_t* use = Argument("usable", usable).contiguous({batch.num_rows, num_carriers}).boolean();
  float* found = Argument("similarity", similarity).contiguous({batch.num_rows, num_members}).f32();
  int64_t* names = Argument("best", best).contiguous({batch.num_rows, num_members}).i64();
  most_similar(*current(), batch.units, m, num_members, c, num_carriers, use, found, names);
}

void call_fused_attention(Tensors layers, TensorView layer, TensorView blocks, TensorView segments, TensorView queries,
                          TensorView query_positions, TensorView log_votes, TensorView positions, double scale,
                          bool largest, TensorView fused) {
  const Batch batch(layers, layer, blocks, segments);
  const Argument q("queries", queries);
  const float* values = q.contiguous({batch.num_rows, -1, -1, batch.head_size}).f32();
  const int64_t group = q.size(1), num_queries = q.size(2);
  KVM_CHECK(group > 0 && num_queries > 0, ValueError) << "there must be a query";
  const std::vector<int64_t> shape = {batch.num_rows, batch.num_entries};
  fused_attention(*current(), batch.units, values, group,
                  Argument("query_positions", query_positions).contiguous({batch.num_rows, num_queries}).i64(),
                  num_queries, Argument("log_votes", log_votes).contiguous(shape).f32(),
                  Argument("positions", positions).contiguous(shape).i64(), static_cast<float>(scale), largest,
                  Argument("fused", fused).contiguous(shape).f32());
}

void call_move_entries(Tensors layers, TensorView layer, TensorView blocks, TensorView segments,
                       TensorView destination_blocks, TensorView kept) {
  const Batch batch(layers, layer, blocks, segments), to(layers, layer, destination_blocks);
  const int64_t* entries = batch.entries("kept", kept, true);
  to.check_slots(kept.size(1));
  std::vector<const int32_t*> destinations;
  for (const Unit& unit : to.units) destinations.push_back(unit.segments.blocks);
  move_entries(batch.units, destinations, entries, kept.size(1));
}

void call_write_rows(Tensors layers, TensorView layer, TensorView blocks, TensorView places,
                     tvm::ffi::Optional<TensorView> keys, tvm::ffi::Optional<TensorView> values) {
  const Batch batch(layers, layer, blocks);
  const int64_t* slots = Argument("places", places).contiguous({batch.num_rows, -1}).i64();
  const int64_t count = places.size(1), heads = batch.units.empty() ? 1 : batch.units[0].pages.num_heads;
  for (int64_t i = 0; i < batch.num_rows * count; ++i) {
    const Unit& unit = batch.units[i / count / heads];
    if (slots[i] >= 0) check_slot(unit.pages, unit.segments.blocks, batch.num_blocks, slots[i]);
  }
  const std::vector<int64_t> shape = {batch.num_rows, count, batch.head_size};
  const auto rows = [&](const char* name, const tvm::ffi::Optional<TensorView>& t) -> const float* {
    if (!t.has_value()) return nullptr;
    const TensorView view = t.value();
    return Argument(name, view).contiguous(shape).f32();
  };
  write_rows(batch.units, slots, count, rows("keys", keys), rows("values", values));
}

void call_write_metadata(Tensors layers, TensorView layer, TensorView blocks, TensorView log_votes, TensorView scores,
                         TensorView aux, TensorView positions) {
  const Batch batch(layers, layer, blocks);
  const float* votes = Argument("log_votes", log_votes).contiguous({batch.num_rows, -1}).f32();
  const int64_t count = log_votes.size(1);
  batch.check_slots(count);
  const std::vector<int64_t> shape = {batch.num_rows, count};
  write_metadata(batch.units, count, votes, Argument("scores", scores).contiguous(shape).f32(),
                 Argument("aux", aux).contiguous(shape).f32(), Argument("positions", positions).contiguous(shape).i64());
}

void call_write_tokens(TensorView cache_keys, TensorView slot_mapping, TensorView key, TensorView value) {
  const PagedKVCache pages = pages_of(cache_keys);
  KVM_CHECK(slot_mapping.ndim() == 1, ValueError) << "slot_mapping must have one dimension";
  const std::vector<int64_t> slots = Argument("slot_mapping", slot_mapping).integers(slot_mapping.size(0));
  for (int64_t slot : slots)
    KVM_CHECK(slot < pages.num_blocks * pages.block_size, IndexError) << "slot " << slot << " is not in the cache";
  const Rows keys = Argument("key", key).rows(pages.num_heads, pages.head_size),
             values = Argument("value", value).rows(pages.num_heads, pages.head_size);
  KVM_CHECK(key.size(0) >= slot_mapping.size(0) && value.size(0) >= slot_mapping.size(0), ValueError)
      << "fewer tokens than slots";
  KVM_CHECK(keys.dtype == values.dtype, TypeError) << "key and value must have the same dtype";
  write_tokens(pages, slots, keys, values);
}

// [rows, n]
const uint8_t* mask_of(const char* name, const TensorView& mask, int64_t rows, int64_t n) {
  return Argument(name, mask).contiguous({rows, n}).boolean();
}

void call_largest(TensorView ranking, int64_t count, TensorView mask) {
  const Argument a("ranking", ranking);
  a.contiguous({-1, -1});
  uint8_t* out = Argument("mask", mask).contiguous({a.size(0), a.size(1)}).boolean();
  if (a.is(kDLFloat, 32)) largest(*current(), a.f32(), a.size(0), a.size(1), count, out);
  else largest(*current(), a.i64(), a.size(0), a.size(1), count, out);
}

void call_top(TensorView ranking, TensorView is_protected, TensorView is_live, int64_t count, TensorView mask) {
  const Argument a("ranking", ranking);
  const float* values = a.contiguous({-1, -1}).f32();
  const int64_t rows = a.size(0), n = a.size(1);
  uint8_t* out = Argument("mask", mask).contiguous({rows, n}).boolean();
  top(*current(), values, mask_of("protected", is_protected, rows, n), mask_of("is_live", is_live, rows, n), rows, n,
      count, out);
}

void call_in_place(TensorView mask, TensorView index) {
  const Argument a("index", index);
  int64_t* out = a.contiguous({mask.ndim() == 2 ? mask.size(0) : -1, -1}).i64();
  const int64_t rows = a.size(0), n = mask.size(1), count = a.size(1);
  KVM_CHECK(count <= n, ValueError) << count << " of " << n << " entries";
  KVM_CHECK(in_place(mask_of("mask", mask, rows, n), rows, n, count, out), ValueError)
      << "mask must have " << count << " entries in each row";
}

void call_by_position(TensorView positions, TensorView order) {
  const Argument a("positions", positions);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  by_position(values, a.size(0), a.size(1), Argument("order", order).contiguous({a.size(0), a.size(1)}).i64());
}

int64_t call_most_true(TensorView mask) {
  const Argument a("mask", mask);
  const uint8_t* values = a.contiguous({-1, -1}).boolean();
  return most_true(values, a.size(0), a.size(1));
}

void call_padded_nonzero(TensorView mask, TensorView index) {
  const Argument a("mask", mask), b("index", index);
  const uint8_t* values = a.contiguous({-1, -1}).boolean();
  int64_t* out = b.contiguous({a.size(0), -1}).i64();
  KVM_CHECK(padded_nonzero(values, a.size(0), a.size(1), b.size(1), out), ValueError)
      << "mask has more than " << b.size(1) << " entries in a row";
}

void call_inverse(TensorView index, TensorView where) {
  const Argument a("index", index), b("where", where);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  int64_t* out = b.contiguous({a.size(0), -1}).i64();
  KVM_CHECK(inverse(values, a.size(0), a.size(1), b.size(1), out), IndexError)
      << "index has elements that are not below " << b.size(1);
}

void call_take(Tensors planes, TensorView index, Tensors taken) {
  const Argument a("index", index);
  const int64_t *values = a.contiguous({-1, -1}).i64(), rows = a.size(0), count = a.size(1);
  KVM_CHECK(planes.size() == taken.size(), ValueError) << "as many planes must be given as taken";
  for (size_t i = 0; i < planes.size(); ++i) {
    const TensorView from = planes[i], to = taken[i];
    const Argument plane("plane", from), out("taken", to);
    plane.contiguous({rows, -1});
    out.contiguous({rows, count});
    const int64_t n = plane.size(1);
    const bool fits = plane.is(kDLFloat, 32) ? take(plane.f32(), values, rows, n, count, out.f32())
                                             : take(plane.i64(), values, rows, n, count, out.i64());
    KVM_CHECK(fits, IndexError) << "index has elements that are not among " << n;
  }
}

void call_free_places(TensorView index, int64_t places, TensorView place) {
  const Argument a("index", index);
  const int64_t* values = a.contiguous({-1, -1}).i64();
  int64_t* out = Argument("place", place).contiguous({a.size(0), a.size(1)}).i64();
  KVM_CHECK(places >= 0 && free_places(values, a.size(0), a.size(1), places, out), ValueError)
      << "index does not fit in " << places << " places";
}

void call_join_slots(TensorView products, TensorView between, TensorView member_weights, TensorView slot_weights,
                     TensorView joined) {
  const Argument a("products", products);
  float* values = a.contiguous({-1, -1, -1}).f32();
  const int64_t rows = a.size(0), members = a.size(1), slots = a.size(2);
  KVM_CHECK(slots > 0 || members == 0, ValueError) << "there must be a slot";
  join_slots(values, Argument("between", between).contiguous({rows, members, members}).f32(),
             Argument("member_weights", member_weights).contiguous({rows, members}).f32(),
             Argument("slot_weights", slot_weights).contiguous({rows, slots}).f32(), rows, members, slots,
             Argument("joined", joined).contiguous({rows, members}).i64());
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(levels, kvmerge::levels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(level, kvmerge::level);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_level, kvmerge::set_level);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(paged_attention, kvmerge::paged_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(score_prompt_queries, kvmerge::score_prompt_queries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_metadata, kvmerge::call_gather_metadata);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_rows, kvmerge::call_gather_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_all, kvmerge::call_gather_all);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_similar, kvmerge::call_most_similar);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_attention, kvmerge::call_fused_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(move_entries, kvmerge::call_move_entries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_rows, kvmerge::call_write_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_metadata, kvmerge::call_write_metadata);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_tokens, kvmerge::call_write_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(largest, kvmerge::call_largest);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(top, kvmerge::call_top);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(in_place, kvmerge::call_in_place);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(by_position, kvmerge::call_by_position);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(most_true, kvmerge::call_most_true);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(padded_nonzero, kvmerge::call_padded_nonzero);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(inverse, kvmerge::call_inverse);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take, kvmerge::call_take);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(free_places, kvmerge::call_free_places);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(join_slots, kvmerge::call_join_slots);
