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

template <class Product, int kWarps, int kStages>
void attend_with(const AttendParams& params, int num_rows, const Where& where) {
  typedef Attend<Product, kWarps, kStages> Kernel;
  launch<Kernel>(Grid{num_rows, params.heads, params.splits}, Kernel::kSharedBytes, params, where.device, where.stream);
}

// As many stages as let two blocks be on a multiprocessor of an H200, or one on that of an A100.
template <class T, int kHeadSize>
void attend_halves(const AttendParams& params, int num_rows, int query_rows, bool bulk, const Where& where) {
  constexpr int kStages = kHeadSize == 64 ? 4 : kHeadSize == 128 ? 3 : 2;
  if (query_rows == 1) attend_with<Cores<T, kHeadSize, 1, false>, 4, kStages>(params, num_rows, where);
  else if (query_rows == 2) attend_with<Cores<T, kHeadSize, 2, false>, 4, kStages>(params, num_rows, where);
  else if (bulk) attend_with<MatrixUnits<T, kHeadSize, true>, 4, kStages>(params, num_rows, where);
  else attend_with<MatrixUnits<T, kHeadSize, false>, 4, kStages>(params, num_rows, where);
}

template <int kHeadSize>
void attend_size(const AttendParams& params, int num_rows, int query_rows, bool is_bfloat16, int bits, bool bulk,
                 int finish_blocks, const Where& where) {
  if (bits == 32) {
    constexpr int kWarps = kHeadSize == 256 ? 2 : 4, kStages = kHeadSize == 64 ? 3 : 2;
    constexpr int kMost = max_query_rows(32, kHeadSize);
    if (query_rows <= 4) attend_with<Cores<float, kHeadSize, 4, false>, kWarps, kStages>(params, num_rows, where);
    else attend_with<Cores<float, kHeadSize, kMost, false>, kWarps, kStages>(params, num_rows, where);
  } else if (is_bfloat16) {
    attend_halves<Bf16, kHeadSize>(params, num_rows, query_rows, bulk, where);
  } else {
    attend_halves<F16, kHeadSize>(params, num_rows, query_rows, bulk, where);
  }
  if (finish_blocks > 0)
    launch<Finish<kHeadSize>>(Grid{num_rows, params.heads, finish_blocks}, Finish<kHeadSize>::kSharedBytes, params,
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
  const auto run = head_size == 64 ? attend_size<64> : head_size == 128 ? attend_size<128> : attend_size<256>;
  run(params, num_rows, query_rows, is_bfloat16, bits, bulk, finish_blocks, where);
}

const char* targets() { return KVM_TARGETS; }

}  // namespace kvmerge
