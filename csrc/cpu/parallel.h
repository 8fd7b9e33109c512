// Parallel loops on the OpenMP runtime that the process already has.
//
// PyTorch brings a libgomp (or is run with another library of the same interface) and vLLM binds its threads to cores.
// A second runtime would compete for those cores, so none is linked: the entry points below, which GCC's and LLVM's
// runtimes both export, are weak references to whatever is loaded. Without any, loops run on the calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) int omp_in_parallel();
}

namespace kvmerge {

inline int max_threads() {
  if (!GOMP_parallel || !omp_get_max_threads || !omp_in_parallel || omp_in_parallel()) return 1;
  return omp_get_max_threads();
}

// Calls task(i) for i in [0, count), each once, in this order, on up to `threads` threads. Tasks must not throw.
template <class F>
void parallel_for(int64_t count, int threads, const F& task) {
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct Shared {
    const F& task;
    int64_t count;
    std::atomic<int64_t> next{0};
  } shared{task, count};
  GOMP_parallel(
      [](void* data) {
        Shared& s = *static_cast<Shared*>(data);
        for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) s.task(i);
      },
      &shared, static_cast<unsigned>(threads), 0);
}

// A buffer that its owner keeps between calls; contents are not preserved.
class Scratch {
 public:
  float* floats(int64_t count) {
    if (count > size_) {
      buffer_.reset();
      size_ = 0;
      buffer_.reset(static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t(64))));
      size_ = count;
    }
    return buffer_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::unique_ptr<float, Free> buffer_;
  int64_t size_ = 0;
};

}  // namespace kvmerge
