// All kernels, for whichever of nvcc and a C++ compiler compiles this.
#include "kernels.h"

#include <stdexcept>

#include "attention.h"
#include "merge.h"

#if !defined(KVM_TARGETS)
#define KVM_TARGETS "emulated"
#endif

namespace kvmerge {
namespace {

// How attention is launched, and the shared memory that a block of it takes.
struct Variant {
  int shared_bytes;
  void (*start)(const AttendParams& params, int num_rows, const Where& where);
};

template <class Product, int kWarps, int kStages>
Variant attend_with() {
  typedef Attend<Product, kWarps, kStages> Kernel;
  const auto start = [](const AttendParams& params, int num_rows, const Where& where) {
    launch<Kernel>(Grid{num_rows, params.heads, params.splits}, Kernel::kSharedBytes, params, where.device,
                   where.stream);
  };
  return Variant{Kernel::kSharedBytes, start};
}

// As many stages as let two blocks be on a multiprocessor of an H200, up to a head size of 128, and one on an A100's.
template <class T, int kHeadSize>
Variant attend_halves(int query_rows, bool bulk) {
  constexpr int kStages = kHeadSize == 64 ? 4 : kHeadSize == 128 ? 3 : 2;
  if (query_rows == 1) return attend_with<Cores<T, kHeadSize, 1, false>, 4, kStages>();
  if (query_rows == 2) return attend_with<Cores<T, kHeadSize, 2, false>, 4, kStages>();
  if (bulk) return attend_with<MatrixUnits<T, kHeadSize, true>, 4, kStages>();
  return attend_with<MatrixUnits<T, kHeadSize, false>, 4, kStages>();
}

template <int kHeadSize>
Variant attend_size(int query_rows, bool is_bfloat16, int bits, bool bulk) {
  if (bits == 32) {
    constexpr int kWarps = kHeadSize == 256 ? 2 : 4, kStages = kHeadSize == 64 ? 3 : 2;
    constexpr int kMost = max_query_rows(32, kHeadSize);
    if (query_rows <= 4) return attend_with<Cores<float, kHeadSize, 4, false>, kWarps, kStages>();
    return attend_with<Cores<float, kHeadSize, kMost, false>, kWarps, kStages>();
  }
  return is_bfloat16 ? attend_halves<Bf16, kHeadSize>(query_rows, bulk) : attend_halves<F16, kHeadSize>(query_rows, bulk);
}

Variant variant_of(int query_rows, bool is_bfloat16, int bits, int head_size, bool bulk) {
  const auto found = head_size == 64 ? attend_size<64> : head_size == 128 ? attend_size<128> : attend_size<256>;
  return found(query_rows, is_bfloat16, bits, bulk);
}

template <int kHeadSize>
void finish(const AttendParams& params, int num_rows, int blocks, const Where& where) {
  launch<Finish<kHeadSize>>(Grid{num_rows, params.heads, blocks}, Finish<kHeadSize>::kSharedBytes, params,
                            where.device, where.stream);
}

}  // namespace

void merge(const MergeParams& params, int num_rows, bool is_bfloat16, int bits, int shared_bytes, const Where& where) {
  const Grid grid{num_rows, 1, 1};
  if (bits == 32) launch<Merge<float>>(grid, shared_bytes, params, where.device, where.stream);
  else if (is_bfloat16) launch<Merge<Bf16>>(grid, shared_bytes, params, where.device, where.stream);
  else launch<Merge<F16>>(grid, shared_bytes, params, where.device, where.stream);
}

void attend(const AttendParams& params, int num_rows, int query_rows, bool is_bfloat16, int bits, int head_size,
            bool bulk, int finish_blocks, const Where& where) {
  variant_of(query_rows, is_bfloat16, bits, head_size, bulk).start(params, num_rows, where);
  if (finish_blocks == 0) return;
  const auto last = head_size == 64 ? finish<64> : head_size == 128 ? finish<128> : finish<256>;
  last(params, num_rows, finish_blocks, where);
}

int attend_bytes(int query_rows, int bits, int head_size, bool bulk) {
  return variant_of(query_rows, true, bits, head_size, bulk).shared_bytes;
}

const char* targets() { return KVM_TARGETS; }

}  // namespace kvmerge
