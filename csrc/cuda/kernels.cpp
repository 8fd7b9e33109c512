// All kernels, for whichever of nvcc and a C++ compiler compiles this.
#include "kernels.h"

#include <stdexcept>

#include "attention.h"
#include "divide.h"

#if !defined(KVM_TARGETS)
#define KVM_TARGETS "emulated"
#endif

namespace kvmerge {
namespace {

// How attention is launched, and the shared memory that a block of it takes.
struct Variant {
  int shared_bytes;
  void (*start)(const AttendParams& params, const Where& where);
};

template <class Product, int kWarps, int kStages, bool kPages>
Variant attend_with() {
  typedef Attend<Product, kWarps, kStages, kPages> Kernel;
  const auto start = [](const AttendParams& params, const Where& where) {
    launch<Kernel>(Grid{params.heads, params.num_pieces}, Kernel::kSharedBytes, params, where.device, where.stream);
  };
  return Variant{Kernel::kSharedBytes, start};
}

// As many stages as let two blocks be on a multiprocessor of an H200, up to a head size of 128, and one on an A100's.
template <class T, int kHeadSize, bool kPages>
Variant attend_halves(int query_rows) {
  constexpr int kStages = kHeadSize == 64 ? 4 : kHeadSize == 128 ? 3 : 2;
  if (query_rows == 1) return attend_with<Cores<T, kHeadSize, 1>, 4, kStages, kPages>();
  if (query_rows == 2) return attend_with<Cores<T, kHeadSize, 2>, 4, kStages, kPages>();
  return attend_with<MatrixUnits<T, kHeadSize>, 4, kStages, kPages>();
}

template <int kHeadSize, bool kPages>
Variant attend_size(int query_rows, bool is_bfloat16, int bits) {
  if (bits == 32) {
    constexpr int kWarps = kHeadSize == 256 ? 2 : 4, kStages = kHeadSize == 64 ? 3 : 2;
    constexpr int kMost = max_query_rows(32, kHeadSize);
    if (query_rows <= 4) return attend_with<Cores<float, kHeadSize, 4>, kWarps, kStages, kPages>();
    return attend_with<Cores<float, kHeadSize, kMost>, kWarps, kStages, kPages>();
  }
  return is_bfloat16 ? attend_halves<Bf16, kHeadSize, kPages>(query_rows)
                     : attend_halves<F16, kHeadSize, kPages>(query_rows);
}

template <bool kPages>
Variant variant_of(int query_rows, bool is_bfloat16, int bits, int head_size) {
  const auto found = head_size == 64    ? attend_size<64, kPages>
                     : head_size == 128 ? attend_size<128, kPages>
                                        : attend_size<256, kPages>;
  return found(query_rows, is_bfloat16, bits);
}

typedef void (*Last)(const AttendParams& params, const Where& where);

template <int kHeadSize, class T>
void finish(const AttendParams& params, const Where& where) {
  typedef Finish<kHeadSize, T> Kernel;
  const int blocks = params.num_combined + (params.kept_rows > 0 ? kUpdates * params.num_pieces : 0);
  if (blocks == 0) return;
  launch<Kernel>(Grid{params.heads, blocks}, Kernel::kSharedBytes, params, where.device, where.stream);
}

template <class T>
Last finish_size(int head_size) {
  return head_size == 64 ? finish<64, T> : head_size == 128 ? finish<128, T> : finish<256, T>;
}

}  // namespace

void divide(const DivideParams& params, const Where& where) {
  const Grid grid{(params.rows + Divide::kThreads - 1) / Divide::kThreads, 1};
  launch<Divide>(grid, Divide::kSharedBytes, params, where.device, where.stream);
}

void attend(const AttendParams& params, bool is_bfloat16, int bits, int head_size, const Where& where) {
  const bool pages = params.tables != nullptr;
  const auto variant = pages ? variant_of<true> : variant_of<false>;
  variant(params.query_rows, is_bfloat16, bits, head_size).start(params, where);
  const auto last = !pages        ? finish_size<void>
                    : bits == 32  ? finish_size<float>
                    : is_bfloat16 ? finish_size<Bf16>
                                  : finish_size<F16>;
  last(head_size)(params, where);
}

int attend_bytes(int query_rows, int bits, int head_size, bool pages) {
  const auto variant = pages ? variant_of<true> : variant_of<false>;
  return variant(query_rows, true, bits, head_size).shared_bytes;
}

const char* targets() { return KVM_TARGETS; }

}  // namespace kvmerge
