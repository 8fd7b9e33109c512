// The kernels as apache-tvm-ffi functions. Compiled by a C++ compiler; tensors are of a GPU or, emulated, of the CPU.
//
// Values lie on the GPU, so only types, shapes and devices can be checked: whoever passes block ids and indices
// answers for them.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "arguments.h"
#include "kernels.h"

#define KVM_CHECK(condition, Kind) \
  if (!(condition)) TVM_FFI_THROW(Kind)

namespace kvmerge {
namespace {

using tvm::ffi::TensorView;
typedef tvm::ffi::Optional<TensorView> MaybeTensor;

// Checks tensors against the device of the first.
class Arguments {
 public:
  explicit Arguments(const TensorView& first) : device_(first.device()) {
    const bool emulated = std::strcmp(targets(), "emulated") == 0;
    KVM_CHECK(device_.device_type == (emulated ? kDLCPU : kDLCUDA), ValueError)
        << "these kernels run on " << (emulated ? "the CPU" : "a CUDA device");
  }

  Where where(int64_t stream) const { return Where{device_.device_id, reinterpret_cast<void*>(stream)}; }

  // Of this type and shape (-1 stands for any size), elements one after the other unless strided.
  template <class T = void>
  T* get(const char* name, const TensorView& t, DLDataTypeCode code, int bits, const std::vector<int64_t>& shape,
         bool strided = false) const {
    KVM_CHECK(t.device().device_type == device_.device_type && t.device().device_id == device_.device_id, ValueError)
        << name << " is on another device";
    KVM_CHECK(t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1, TypeError)
        << name << " is not of the type that it must have";
    bool right = t.ndim() == static_cast<int>(shape.size());
    for (int i = 0; right && i < t.ndim(); ++i) right = shape[i] < 0 || t.size(i) == shape[i];
    KVM_CHECK(right, ValueError) << name << " is not of the shape that it must have";
    int64_t step = 1;
    for (int i = t.ndim() - 1; i >= 0 && !strided; --i) {
      KVM_CHECK(t.size(i) <= 1 || t.stride(i) == step || t.numel() == 0, ValueError) << name << " must be contiguous";
      step *= t.size(i);
    }
    return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
  }

  template <class T>
  T* maybe(const char* name, const MaybeTensor& t, DLDataTypeCode code, int bits,
           const std::vector<int64_t>& shape) const {
    return t.has_value() ? get<T>(name, t.value(), code, bits, shape) : nullptr;
  }

 private:
  DLDevice device_;
};

int shift_of(int64_t size) {
  int shift = 0;
  while ((int64_t{1} << shift) < size) ++shift;
  return (int64_t{1} << shift) == size ? shift : -1;
}

int element_of(const TensorView& t) {
  const DLDataType type = t.dtype();
  if (type.code == kDLFloat && type.bits == 32) return kFloat32;
  if (type.code == kDLBfloat && type.bits == 16) return kBfloat16;
  KVM_CHECK(type.code == kDLFloat && type.bits == 16, TypeError) << "only float32, bfloat16 and float16 are known";
  return kFloat16;
}

// Keys and values [blocks, heads, head_size, block_size] and [blocks, heads, block_size, head_size], in the same places
// of their planes, rows together.
template <class Params>
void set_cells(Params& p, const Arguments& arguments, const TensorView& keys, const TensorView& values) {
  const DLDataType type = keys.dtype();
  (void)element_of(keys);
  arguments.get("keys", keys, static_cast<DLDataTypeCode>(type.code), type.bits, {-1, -1, -1, -1}, true);
  arguments.get("values", values, static_cast<DLDataTypeCode>(type.code), type.bits,
                {keys.size(0), keys.size(1), keys.size(3), keys.size(2)}, true);
  const int64_t bytes = type.bits / 8;
  p.heads = static_cast<int>(keys.size(1));
  p.head_size = static_cast<int>(keys.size(2));
  p.block_size = static_cast<int>(keys.size(3));
  p.cell_block = values.stride(0) * bytes;
  p.cell_head = values.stride(1) * bytes;
  p.cell_slot = values.stride(2) * bytes;
  KVM_CHECK(keys.stride(2) == 1 && values.stride(3) == 1, ValueError) << "keys and values must lie row by row";
  KVM_CHECK(keys.stride(0) == values.stride(0) && keys.stride(1) == values.stride(1) &&
                keys.stride(3) == values.stride(2),
            ValueError)
      << "keys and values must have the same strides";
  for (int64_t stride : {p.cell_block, p.cell_head, p.cell_slot, p.head_size * bytes})
    KVM_CHECK(stride % 16 == 0, ValueError) << "rows must begin at multiples of 16 bytes";
}

template <class Params>
float* set_plane(Params& p, const Arguments& arguments, const char* name, const TensorView& plane,
                 const TensorView& keys) {
  float* data = arguments.get<float>(name, plane, kDLFloat, 32, {keys.size(0), p.heads, p.block_size}, true);
  p.plane_block = plane.stride(0);
  p.plane_head = plane.stride(1);
  KVM_CHECK(plane.stride(2) == 1, ValueError) << name << ": slots must lie together";
  return data;
}

void call_divide(TensorView query_lens, TensorView seq_lens, TensorView fronts, TensorView tails, TensorView pieces,
                 TensorView parts, TensorView order, int64_t slots, int64_t least, int64_t stream) {
  const Arguments arguments(query_lens);
  DivideParams p{};
  const int64_t rows = order.numel();
  const auto list = [&](const char* name, const TensorView& t, int64_t size) {
    return arguments.get<int32_t>(name, t, kDLInt, 32, {size});
  };
  p.query_lens = list("query_lens", query_lens, rows);
  p.seq_lens = list("seq_lens", seq_lens, rows);
  p.fronts = list("fronts", fronts, rows);
  p.tails = list("tails", tails, rows);
  p.pieces = list("pieces", pieces, -1);
  p.parts = list("parts", parts, 2 * rows);
  p.order = list("order", order, rows);
  KVM_CHECK(slots > 0 && least > 0 && least % kStep == 0, ValueError) << "the pieces are not as they must be";
  p.rows = static_cast<int>(rows);
  p.num_pieces = static_cast<int>(pieces.numel());
  p.slots = static_cast<int>(slots);
  p.least = static_cast<int>(least);
  if (rows > 0) divide(p, arguments.where(stream));
}

void call_attend(TensorView query, TensorView keys, TensorView values, TensorView log_votes, TensorView scores,
                 TensorView aux, TensorView output, TensorView block_table, TensorView query_starts,
                 TensorView query_lens, TensorView seq_lens, TensorView fronts, TensorView tails,
                 TensorView score_modes, TensorView score_decays, MaybeTensor tables, MaybeTensor addresses,
                 int64_t layer, TensorView pieces, TensorView parts, TensorView order, TensorView partial,
                 TensorView lse, TensorView kept, double scale, double cap, MaybeTensor sinks, int64_t num_queries,
                 int64_t num_split, int64_t split_rows, int64_t padded, int64_t kept_rows, int64_t stream) {
  const Arguments arguments(query);
  AttendParams p{};
  set_cells(p, arguments, keys, values);
  const DLDataType type = keys.dtype();
  const auto code = static_cast<DLDataTypeCode>(type.code);
  KVM_CHECK(query.ndim() == 3 && query.size(1) > 0 && query.size(1) % p.heads == 0, ValueError)
      << "query must have shape [tokens, heads, head_size]";
  p.query = arguments.get("query", query, code, type.bits, {-1, -1, p.head_size}, true);
  p.output_type = element_of(output);
  p.output = arguments.get("output", output, static_cast<DLDataTypeCode>(output.dtype().code), output.dtype().bits,
                           {-1, query.size(1), p.head_size}, true);
  KVM_CHECK(query.stride(2) == 1 && output.stride(2) == 1, ValueError) << "heads' rows must lie together";
  KVM_CHECK(query.stride(0) * type.bits / 8 % 16 == 0 && query.stride(1) * type.bits / 8 % 16 == 0, ValueError)
      << "rows of the query must begin at multiples of 16 bytes";
  p.query_token = query.stride(0);
  p.query_head = query.stride(1);
  p.output_token = output.stride(0);
  p.output_head = output.stride(1);
  p.keys = arguments.get<const char>("keys", keys, code, type.bits, {-1, -1, -1, -1}, true);
  p.values = arguments.get<const char>("values", values, code, type.bits, {-1, -1, -1, -1}, true);
  p.log_votes = set_plane(p, arguments, "log_votes", log_votes, keys);
  p.scores = set_plane(p, arguments, "scores", scores, keys);
  p.aux = set_plane(p, arguments, "aux", aux, keys);
  const int64_t rows = block_table.size(0);
  p.block_table = arguments.get<const int32_t>("block_table", block_table, kDLInt, 32, {-1, -1}, true);
  KVM_CHECK(block_table.size(1) <= 1 || block_table.stride(1) == 1, ValueError) << "block ids must lie together";
  p.table_row = block_table.stride(0);
  const auto number = [&](const char* name, const TensorView& t) {
    return arguments.get<const int32_t>(name, t, kDLInt, 32, {rows});
  };
  p.query_starts = number("query_starts", query_starts);
  p.query_lens = number("query_lens", query_lens);
  p.seq_lens = number("seq_lens", seq_lens);
  p.fronts = number("fronts", fronts);
  p.tails = number("tails", tails);
  p.modes = number("score_modes", score_modes);
  p.decays = arguments.get<const float>("score_decays", score_decays, kDLFloat, 32, {rows});
  p.tables = arguments.maybe<const int64_t>("tables", tables, kDLInt, 64, {rows});
  p.addresses = arguments.maybe<const int64_t>("addresses", addresses, kDLInt, 64, {-1, 6});
  p.layer = static_cast<int>(layer);
  p.num_layers = addresses.has_value() ? static_cast<int>(addresses.value().size(0)) : 0;
  KVM_CHECK(!tables.has_value() || (0 <= layer && layer < p.num_layers), ValueError)
      << "there is no layer " << layer << " among " << p.num_layers;
  p.group = static_cast<int>(query.size(1) / p.heads);
  p.block_shift = shift_of(p.block_size);
  p.scale = static_cast<float>(scale) * kLog2E;
  p.cap = static_cast<float>(cap) * kLog2E;
  p.sinks = arguments.maybe<const float>("sinks", sinks, kDLFloat, 32, {p.heads, p.group});
  p.kept_rows = static_cast<int>(kept_rows);
  const int64_t query_rows = num_queries * p.group;
  KVM_CHECK(0 < query_rows && query_rows <= max_query_rows(type.bits, padded), ValueError)
      << query_rows << " rows of queries are too many";
  KVM_CHECK((padded == 64 || padded == 128 || padded == 256) && p.head_size <= padded, ValueError)
      << "head size " << p.head_size << " is not padded to 64, 128 or 256";
  KVM_CHECK(kept_rows == 0 || kept_rows == query_rows, ValueError) << "logits of all rows are kept, or none";
  p.pieces = arguments.get<const int32_t>("pieces", pieces, kDLInt, 32, {-1});
  p.parts = arguments.get<const int32_t>("parts", parts, kDLInt, 32, {2 * rows});
  p.order = arguments.get<const int32_t>("order", order, kDLInt, 32, {rows});
  p.num_pieces = static_cast<int>(pieces.numel());
  p.query_rows = static_cast<int>(query_rows);
  p.num_combined = static_cast<int>(split_rows * query_rows);
  KVM_CHECK(0 <= split_rows && split_rows <= rows, ValueError) << "no more rows are split than there are";
  const int64_t level = p.heads * kRows;
  p.partial = arguments.get<float>("partial", partial, kDLFloat, 32, {-1});
  p.lse = arguments.get<float>("lse", lse, kDLFloat, 32, {-1});
  p.kept = arguments.get<float>("kept", kept, kDLFloat, 32, {-1});
  KVM_CHECK(lse.numel() >= level * p.num_pieces &&
                (split_rows == 0 || partial.numel() >= level * num_split * padded) &&
                kept.numel() >= keys.size(0) * p.heads * kept_rows * p.block_size,
            ValueError)
      << "the workspace is too small";
  if (rows == 0) return;
  attend(p, code == kDLBfloat, type.bits, static_cast<int>(padded), arguments.where(stream));
}

int64_t call_attend_bytes(int64_t query_rows, int64_t bits, int64_t padded, bool pages) {
  return attend_bytes(static_cast<int>(query_rows), static_cast<int>(bits), static_cast<int>(padded), pages);
}

std::string call_targets() { return targets(); }

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend, kvmerge::call_attend);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attend_bytes, kvmerge::call_attend_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(divide, kvmerge::call_divide);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(targets, kvmerge::call_targets);
