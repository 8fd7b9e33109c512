// Kernels with mistakes that a GPU would not forgive, and the same without them, for csrc/cuda/emulated.h to tell apart.
// Run with a kernel's name, and "right" for the one without the mistake. Exit status: 1 if the emulation throws, which
// it says why, or if a result is not the right one; 66 if ThreadSanitizer, with which it may be built, finds a race.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "device.h"

namespace {

using namespace kvmerge;

struct Params {
  bool right;
  const float* from;  // 32
  float* to;          // 32
};

template <int kWarps>
struct Kernel {
  typedef ::Params Params;
  static constexpr int kThreads = 32 * kWarps, kBlocks = 1;
};

float* floats() { return reinterpret_cast<float*>(device::shared_memory()); }

// Another lane's copy is read when only that lane has waited for it.
struct ReadsEarly : Kernel<1> {
  static void run(const Params& p) {
    const int lane = device::lane();
    device::copy_word(floats() + lane, p.from + lane, true);
    device::commit_copies();
    device::wait_copies<0>();
    if (p.right) device::warp_barrier();
    p.to[lane] = floats()[31 - lane];
  }
};

// A copy begins where another lane has not read yet what was there.
struct OverwritesEarly : Kernel<1> {
  static void run(const Params& p) {
    const int lane = device::lane();
    floats()[lane] = p.from[lane];
    device::warp_barrier();
    const float own = floats()[lane];
    if (p.right) p.to[lane] = floats()[31 - lane];
    if (p.right) device::warp_barrier();
    device::copy_word(floats() + lane, p.from + lane, true);
    device::commit_copies();
    if (!p.right) p.to[lane] = floats()[31 - lane] + 0.0f * own;
    device::wait_copies<0>();
  }
};

// What is copied is written to before the copy is done.
struct Changes : Kernel<1> {
  static void run(const Params& p) {
    const int lane = device::lane();
    device::copy_word(floats() + lane, p.to + lane, true);
    device::commit_copies();
    if (p.right) device::wait_copies<0>();
    p.to[lane] = p.from[31 - lane];
    device::wait_copies<0>();
  }
};

// Some threads leave before a barrier.
struct Leaves : Kernel<1> {
  static void run(const Params& p) {
    if (!p.right && device::lane() == 7) return;
    p.to[device::lane()] = p.from[31 - device::lane()];
    device::barrier();
  }
};

// A shuffle stands where a barrier of the warp should: it gives values, and orders no memory.
struct Shuffles : Kernel<1> {
  static void run(const Params& p) {
    const int lane = device::lane();
    floats()[lane] = p.from[lane];
    if (p.right) device::warp_barrier();
    else device::shuffle(lane, 0);
    p.to[lane] = floats()[31 - lane];
  }
};

// A barrier of warps, where one of the block is needed.
struct MeetsInWarps : Kernel<2> {
  static void run(const Params& p) {
    const int thread = device::thread();
    if (thread < 32) floats()[thread] = p.from[thread];
    if (p.right) device::barrier();
    else device::warp_barrier();
    if (thread >= 32) p.to[thread - 32] = floats()[63 - thread];
  }
};

// Blocks of a launch write to the same place.
struct Collides : Kernel<1> {
  static void run(const Params& p) {
    const int at = (device::lane() + device::block_x()) % 32;
    if (!p.right || device::block_x() == 0) p.to[at] = p.from[31 - at];
  }
};

template <class K>
void run(const Params& params) {
  launch<K>(Grid{2, 1}, 256, params, 0, nullptr);
}

}  // namespace

int main(int count, char** words) {
  const std::map<std::string, void (*)(const Params&)> kernels = {
      {"ReadsEarly", run<ReadsEarly>}, {"OverwritesEarly", run<OverwritesEarly>}, {"Changes", run<Changes>},
      {"Leaves", run<Leaves>},         {"Shuffles", run<Shuffles>},               {"MeetsInWarps", run<MeetsInWarps>},
      {"Collides", run<Collides>}};
  alignas(16) float from[32], to[32] = {};
  for (int i = 0; i < 32; ++i) from[i] = 1.0f + static_cast<float>(i);
  bool right = true;
  try {
    kernels.at(words[1])(Params{count > 2 && std::strcmp(words[2], "right") == 0, from, to});
  } catch (const std::logic_error& error) {
    std::puts(error.what());
    return 1;
  }
  for (int i = 0; i < 32; ++i) right = right && to[i] == from[31 - i];
  return right ? 0 : 1;
}
