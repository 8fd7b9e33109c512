// The instruction set level that operators run on.
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"

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
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
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

const Kernels*& chosen() {
  static const Kernels* kernels = supported_levels().front();
  return kernels;
}

std::string levels() {
  std::string names;
  for (const Kernels* k : supported_levels()) names += (names.empty() ? "" : " ") + std::string(k->name);
  return names;
}

std::string level() { return chosen()->name; }

void set_level(tvm::ffi::String name) {
  for (const Kernels* k : supported_levels())
    if (std::strcmp(k->name, name.c_str()) == 0) {
      chosen() = k;
      return;
    }
  TVM_FFI_THROW(ValueError) << "instruction set level " << name << " is not among: " << levels();
}

}  // namespace

const Kernels& current() { return *chosen(); }

}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(levels, kvmerge::levels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(level, kvmerge::level);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_level, kvmerge::set_level);
