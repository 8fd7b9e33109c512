// Keys that repeat each other (R-KV): the newest one above a threshold, for each. See reference.newest_repeats.
#include <tvm/ffi/function.h>

#include "parallel.h"
#include "tensors.h"

namespace kvmerge {
namespace {

constexpr int64_t kLargestHead = 8192;  // so that sums of products of 8 bits fit in 32

void call_newest_repeats(TensorView keys, double threshold, TensorView found, int64_t start, int64_t stop,
                         TensorView similarity) {
  const Argument k("keys", keys);
  k.check_shape({-1, -1, -1});
  const int64_t heads = k.size(0), n = k.size(1), d = k.size(2);
  const float* from = k.contiguous({heads, n, d}).f32();
  KVM_CHECK(d <= kLargestHead && n <= INT32_MAX, ValueError)
      << n << " keys of " << d << " numbers are more than " << INT32_MAX << " or longer than " << kLargestHead;
  KVM_CHECK(threshold >= 0.0, ValueError) << "threshold " << threshold << " is not positive or 0";
  KVM_CHECK(0 <= start && start <= stop && stop <= n, ValueError)
      << "entries [" << start << ", " << stop << ") are not among " << n;
  int64_t* all = Argument("found", found).contiguous({heads, n}).i64();
  float* to = Argument("similarity", similarity).contiguous({heads, stop - start}).f32();
  for (int64_t i = 0; i < heads * n; ++i)
    KVM_CHECK(-1 <= all[i] && all[i] < n, IndexError) << "found holds " << all[i] << ", which is no entry and not -1";
  if (start == stop) return;
  const Kernels& kernels = current();
  parallel_for(heads, max_threads(), [&](int64_t head) {
    thread_local Scratch scratch;
    Repeats r{};
    r.keys = from + head * n * d;
    r.head_size = static_cast<int32_t>(d);
    r.threshold = static_cast<float>(threshold);
    r.start = start;
    r.stop = stop;
    r.found = all + head * n;
    r.similarity = to + head * (stop - start);
    r.scratch = scratch.floats(kernels.repeats_scratch(stop, d));
    kernels.newest_repeats(r);
  });
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(newest_repeats, kvmerge::call_newest_repeats);
