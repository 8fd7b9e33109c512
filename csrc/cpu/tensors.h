// Checks on tensors at the boundary: whatever a caller passes ends as an exception, never as a stray access.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

#define KVM_CHECK(condition, Kind) \
  if (!(condition)) TVM_FFI_THROW(Kind)

namespace kvmerge {

using tvm::ffi::TensorView;
typedef tvm::ffi::Array<tvm::ffi::Tensor> Tensors;
typedef tvm::ffi::Optional<TensorView> OptionalTensor;

// Rows of block ids, where they lie if they are int32: a server's table has as many columns as its longest sequence may
// have blocks, most of which no row uses. An id that is none is negative.
class BlockIds {
 public:
  BlockIds() = default;
  BlockIds(const int32_t* ids, int64_t row_step) : ids_(ids), row_step_(row_step) {}
  BlockIds(std::vector<int32_t>&& own, int64_t row_step) : own_(std::move(own)), ids_(own_.data()), row_step_(row_step) {}
  BlockIds(BlockIds&&) = default;
  BlockIds& operator=(BlockIds&&) = default;

  const int32_t* row(int64_t number) const { return ids_ + number * row_step_; }

 private:
  std::vector<int32_t> own_;
  const int32_t* ids_ = nullptr;
  int64_t row_step_ = 0;
};

// A tensor argument together with its name, for messages.
class Argument {
 public:
  Argument(const char* name, const TensorView& tensor) : name_(name), tensor_(tensor) {
    KVM_CHECK(tensor.device().device_type == kDLCPU, ValueError) << name << " must be on the CPU";
  }

  int64_t size(int i) const { return tensor_.size(i); }
  // Strides of dimensions of one element mean nothing, and DLPack may give any.
  int64_t stride(int i) const { return size(i) > 1 ? tensor_.stride(i) : 0; }

  void* data() const { return static_cast<char*>(tensor_.data_ptr()) + tensor_.byte_offset(); }

  bool is(DLDataTypeCode code, int bits) const {
    const DLDataType t = tensor_.dtype();
    return t.code == code && t.bits == bits && t.lanes == 1;
  }

  DType float_type() const {
    if (is(kDLFloat, 32)) return DType::f32;
    if (is(kDLBfloat, 16)) return DType::bf16;
    KVM_CHECK(is(kDLFloat, 16), TypeError) << name_ << " must be float32, bfloat16 or float16";
    return DType::f16;
  }

  // Of a cache.
  DType element_type() const {
    if (is(kDLFloat8_e4m3fn, 8)) return DType::e4m3;
    if (is(kDLFloat8_e5m2, 8)) return DType::e5m2;
    return float_type();
  }

  // sizes: -1 stands for any.
  void check_shape(const std::vector<int64_t>& sizes) const {
    bool right = tensor_.ndim() == static_cast<int>(sizes.size());
    for (size_t i = 0; right && i < sizes.size(); ++i) right = sizes[i] < 0 || size(static_cast<int>(i)) == sizes[i];
    if (right) return;
    std::string expected, actual;
    for (int64_t n : sizes) expected += (expected.empty() ? "" : ", ") + (n < 0 ? std::string("*") : std::to_string(n));
    for (int i = 0; i < tensor_.ndim(); ++i) actual += (i ? ", " : "") + std::to_string(size(i));
    TVM_FFI_THROW(ValueError) << name_ << " must have shape [" << expected << "], not [" << actual << "]";
  }

  // Elements of the last dimension lie side by side.
  void check_rows() const {
    const int last = tensor_.ndim() - 1;
    KVM_CHECK(size(last) <= 1 || tensor_.stride(last) == 1, ValueError)
        << name_ << " must be contiguous in its last dimension";
  }

  float* f32() const {
    KVM_CHECK(is(kDLFloat, 32), TypeError) << name_ << " must be float32";
    return static_cast<float*>(data());
  }
  uint8_t* boolean() const {
    KVM_CHECK(is(kDLBool, 8), TypeError) << name_ << " must be bool";
    return static_cast<uint8_t*>(data());
  }
  uint8_t* u8() const {
    KVM_CHECK(is(kDLUInt, 8), TypeError) << name_ << " must be uint8";
    return static_cast<uint8_t*>(data());
  }
  int64_t* i64() const {
    KVM_CHECK(is(kDLInt, 64), TypeError) << name_ << " must hold integers of 64 bits";
    return static_cast<int64_t*>(data());
  }

  bool is_contiguous() const {
    if (tensor_.numel() == 0) return true;
    int64_t expected = 1;
    for (int i = tensor_.ndim() - 1; i >= 0; --i) {
      if (size(i) > 1 && tensor_.stride(i) != expected) return false;
      expected *= size(i);
    }
    return true;
  }
  // Checks the shape, and that elements lie one after the other.
  const Argument& contiguous(const std::vector<int64_t>& sizes) const {
    check_shape(sizes);
    KVM_CHECK(is_contiguous(), ValueError) << name_ << " must be contiguous";
    return *this;
  }

  // A vector of integers of either width.
  std::vector<int64_t> integers(int64_t count) const {
    check_shape({count});
    std::vector<int64_t> values(count);
    const int64_t step = stride(0);
    if (is(kDLInt, 32)) {
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<const int32_t*>(data())[i * step];
    } else {
      for (int64_t i = 0; i < count; ++i) values[i] = i64()[i * step];
    }
    return values;
  }

  // Block ids of either width, [rows, columns] or one row, as int32.
  BlockIds block_ids() const {
    int64_t rows = 1, columns = 1;
    if (tensor_.ndim() == 2) rows = size(0), columns = size(1);
    else check_shape({-1}), columns = size(0);
    const int64_t row_step = tensor_.ndim() == 2 ? stride(0) : 0, step = stride(tensor_.ndim() - 1);
    if (is(kDLInt, 32) && (step == 1 || columns <= 1)) return BlockIds(static_cast<const int32_t*>(data()), row_step);
    std::vector<int32_t> ids(rows * columns);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t at = r * row_step + c * step;
        const int64_t id = is(kDLInt, 32) ? static_cast<const int32_t*>(data())[at] : i64()[at];
        ids[r * columns + c] = id >= 0 && id <= INT32_MAX ? static_cast<int32_t>(id) : -1;
      }
    return BlockIds(std::move(ids), columns);
  }

  // [tokens, heads, head_size] of any floating type.
  Rows rows(int64_t heads, int64_t head_size) const {
    check_shape({-1, heads, head_size});
    check_rows();
    return Rows{data(), stride(0), stride(1), float_type()};
  }

 private:
  const char* name_;
  const TensorView& tensor_;
};

// cap: 0: none. sinks: [heads, group] float32.
inline Softmax softmax_of(double cap, const OptionalTensor& sinks, int64_t heads, int64_t group) {
  KVM_CHECK(cap >= 0.0, ValueError) << "cap " << cap << " of logits is not positive or 0";
  Softmax softmax{static_cast<float>(cap), nullptr};
  if (sinks.has_value()) softmax.sinks = Argument("sinks", sinks.value()).contiguous({heads, group}).f32();
  return softmax;
}

// keys: [blocks, heads, head_size, block_size], the view that PagedKVCache.of makes.
inline PagedKVCache cache_of(const TensorView& keys) {
  const Argument a("cache.keys", keys);
  a.check_shape({-1, -1, -1, -1});
  PagedKVCache p{};
  p.dtype = a.element_type();
  p.item_size = p.dtype == DType::f32 ? 4 : p.dtype == DType::bf16 || p.dtype == DType::f16 ? 2 : 1;
  p.base = static_cast<char*>(a.data());
  p.num_blocks = a.size(0);
  p.num_heads = static_cast<int32_t>(a.size(1));
  p.head_size = static_cast<int32_t>(a.size(2));
  p.block_size = static_cast<int32_t>(a.size(3));
  const int64_t bytes = 2 * int64_t{p.head_size} * p.item_size * p.block_size, planes = 16 * int64_t{p.block_size};
  // Strides say where the metadata lie; a single region has none, and they follow it in any case.
  const int64_t step = a.size(1) > 1 ? a.stride(1) : a.stride(0), block_step = p.num_heads * step;
  p.region_stride = step > 0 ? step * p.item_size : bytes;
  const bool interleaved = p.region_stride == bytes + planes;
  p.metadata = p.base + (interleaved ? 1 : p.num_blocks * p.num_heads) * bytes;
  p.metadata_stride = interleaved ? p.region_stride : planes;
  KVM_CHECK(p.head_size % 16 == 0 && p.head_size >= 16 && p.head_size <= kMaxHeadSize, ValueError)
      << "head size " << p.head_size << " is not a multiple of 16 up to " << kMaxHeadSize;
  KVM_CHECK(p.block_size % 16 == 0 && p.block_size >= 16, ValueError)
      << "block size " << p.block_size << " is not a multiple of 16";
  KVM_CHECK(a.stride(3) == 1 && a.stride(2) == p.block_size, ValueError) << "cache.keys must be contiguous in a block";
  KVM_CHECK((p.region_stride == bytes || interleaved) && (p.num_blocks <= 1 || a.stride(0) == block_step), ValueError)
      << "cache.keys: regions of blocks and heads must follow each other";
  return p;
}

// Checks that a slot lies in one of the blocks, and that this is one of the cache's.
inline void check_slot(const PagedKVCache& cache, const int32_t* blocks, int64_t num_blocks, int64_t slot) {
  const int64_t at = slot / cache.block_size;
  KVM_CHECK(slot >= 0 && at < num_blocks && blocks[at] >= 0 && blocks[at] < cache.num_blocks, IndexError)
      << "slot " << slot << " is not in a block of the sequence";
}

// Checks that segments are in order and that the blocks they lie in exist. num_pages: of a head whose front does not lie
// in the blocks; negative: it does.
inline Segments segments_of(const PagedKVCache& cache, const int32_t* blocks, int64_t num_blocks, int64_t front,
                            int64_t tail, int64_t seq_len, int64_t num_pages = -1) {
  // Heads with pages of their own may have room in them for more than the sequence had tokens.
  KVM_CHECK(0 <= front && (front <= tail || num_pages >= 0) && 0 <= tail && tail <= seq_len, ValueError)
      << "segments [0, " << front << ") and [" << tail << ", " << seq_len << ") are not in order";
  const int64_t bs = cache.block_size;
  KVM_CHECK((seq_len + bs - 1) / bs <= num_blocks, ValueError)
      << "sequence of length " << seq_len << " does not fit in " << num_blocks << " blocks of " << bs;
  const auto check = [&](int64_t start, int64_t stop) {
    for (int64_t i = start / bs; i * bs < stop; ++i)
      KVM_CHECK(blocks[i] >= 0 && blocks[i] < cache.num_blocks, ValueError)
          << "block " << blocks[i] << " is not among the cache's " << cache.num_blocks;
  };
  if (num_pages < 0) check(0, front);
  else
    KVM_CHECK(front <= num_pages * bs, ValueError)
        << "a front of " << front << " does not fit in " << num_pages << " pages of " << bs;
  if (tail < seq_len) check(tail, seq_len);
  return Segments{blocks, front, tail, seq_len};
}

// Fronts of heads in pages of their own: rows * heads lists of num_pages each, where the list of a head goes on with its
// first page when it has no more; and the entries of each.
struct HeadPages {
  std::vector<Page> pages;
  const int64_t* fronts;
  int64_t num_pages;
};

// ids: [rows, heads, pages], (block * layers + layer) * heads + head each; fronts: [rows, heads]. A row of ids whose
// first is negative has no pages, and null pointers here. coded: [rows], places in kCodings; null: none are.
inline HeadPages head_pages_of(const std::vector<PagedKVCache>& layers, const TensorView& ids, const TensorView& fronts,
                               int64_t num_rows, const uint8_t* coded = nullptr) {
  const PagedKVCache& first = layers.front();
  const int64_t heads = first.num_heads, num_layers = static_cast<int64_t>(layers.size()), bs = first.block_size;
  const Argument table("pages", ids);
  HeadPages found{{}, Argument("fronts", fronts).contiguous({num_rows, heads}).i64(), table.size(2)};
  const int64_t *id = table.contiguous({num_rows, heads, -1}).i64(), count = found.num_pages;
  found.pages.resize(num_rows * heads * count, Page{nullptr, nullptr});
  for (int64_t row = 0; row < num_rows * heads; ++row, id += count) {
    if (count == 0 || id[0] < 0) {
      KVM_CHECK(found.fronts[row] == 0 || id[0] < 0, ValueError) << "a front without pages has entries";
      continue;
    }
    const int64_t size = coded ? kCodings[coded[row / heads]].slots * bs : bs, used = (found.fronts[row] + size - 1) / size;
    KVM_CHECK(0 <= used && used <= count, ValueError)
        << "a front of " << found.fronts[row] << " does not fit in " << count << " pages of " << size;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i < used ? id[i] : id[0];
      const PagedKVCache& layer = layers[at < 0 ? 0 : at / heads % num_layers];
      KVM_CHECK(0 <= at && at / heads / num_layers < layer.num_blocks, IndexError) << "there is no page " << at;
      const int64_t region = at / heads / num_layers * heads + at % heads;
      found.pages[row * count + i] =
          Page{layer.base + region * layer.region_stride,
               reinterpret_cast<float*>(layer.metadata + region * layer.metadata_stride)};
    }
  }
  return found;
}

// The layers' caches, all of one shape.
inline std::vector<PagedKVCache> caches_of(const Tensors& layers) {
  std::vector<PagedKVCache> caches;
  for (const tvm::ffi::Tensor& keys : layers) {
    caches.push_back(cache_of(TensorView(keys)));
    const PagedKVCache &first = caches.front(), &last = caches.back();
    KVM_CHECK(last.dtype == first.dtype && last.num_heads == first.num_heads && last.head_size == first.head_size &&
                  last.block_size == first.block_size,
              ValueError)
        << "layers differ in dtype, heads or block size";
  }
  return caches;
}

}  // namespace kvmerge
