// Norms of values that a layer's output projection has been applied to. See reference.projected_norms.
#include <tvm/ffi/function.h>

#include <algorithm>

#include "parallel.h"
#include "tensors.h"

namespace kvmerge {
namespace {

constexpr int64_t kValuesAtOnce = 1024;
constexpr int64_t kMinValues = 64;  // for which reading the weights is worth while

// values: [heads, n, head_size]; weights: [heads, group, hidden, head_size]; sums: [heads, n], over the group.
void call_projected_norms(TensorView values, TensorView weights, TensorView sums) {
  const Argument v("values", values), w("weights", weights);
  v.check_shape({-1, -1, -1});
  const int64_t heads = v.size(0), n = v.size(1), d = v.size(2);
  const float* from = v.contiguous({heads, n, d}).f32();
  w.contiguous({heads, -1, -1, d});
  KVM_CHECK(0 < d && d <= kMaxHeadSize, ValueError) << "head size " << d << " is not from 1 to " << kMaxHeadSize;
  const int64_t rows = w.size(1) * w.size(2);
  const DType dtype = w.float_type();
  const char* rows_from = static_cast<const char*>(w.data());
  const int64_t head_bytes = rows * d * (dtype == DType::f32 ? 4 : 2);
  float* to = Argument("sums", sums).contiguous({heads, n}).f32();
  if (heads == 0 || n == 0) return;
  const Kernels& kernels = current();
  const int threads = max_threads();
  const int64_t wanted = (heads * n + threads - 1) / threads;
  const int64_t at_once = std::min(kValuesAtOnce, std::max(kMinValues, (wanted + 15) / 16 * 16));
  const int64_t parts = (n + at_once - 1) / at_once;
  parallel_for(heads * parts, threads, [&](int64_t i) {
    const int64_t head = i / parts, first = i % parts * at_once;
    thread_local Scratch scratch;
    Norms x{};
    x.values = from + (head * n + first) * d;
    x.n = std::min(at_once, n - first);
    x.head_size = static_cast<int32_t>(d);
    x.weights = rows_from + head * head_bytes;
    x.dtype = dtype;
    x.num_rows = rows;
    x.sums = to + head * n + first;
    x.scratch = scratch.floats(kernels.norms_scratch(x));
    kernels.norms(x);
  });
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(projected_norms, kvmerge::call_projected_norms);
