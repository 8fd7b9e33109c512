// The instruction set level that operators run on.
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
KVM_DECLARE(avx512_amx)

namespace {

#if defined(KVM_HAVE_avx512_amx)
// Whether the processor has AMX's tiles for bfloat16, and Linux lets this process use them, which it must be asked for.
bool may_use_tiles() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBF16 = 1u << 22, kTiles = 1u << 24;
  constexpr int kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (d & kBF16) && (d & kTiles) && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
}
#endif

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
#if defined(KVM_HAVE_avx512_amx)
  if (has_bf16 && may_use_tiles()) levels.push_back(&avx512_amx::kernels());
#endif
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
