// device.h for a CPU: a block's threads are fibers that take turns, and change places only where they wait.
//
// It is meant to find mistakes. Threads run in an order that changes from turn to turn, so that what a missing barrier
// leaves open differs; shared memory starts as NaN; asynchronous copies are made when they are waited for, not before;
// what ends as an exception: a barrier that not all threads reach, a write behind the shared memory, and a copy from or
// to an address that is not aligned.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#define KVM_DEVICE inline
#define KVM_UNROLL

namespace kvmerge {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct Chunk {
  uint32_t x, y, z, w;
};

struct Grid {
  int x, y, z;
};

namespace device {

typedef uint64_t CopyBarrier;

// A block of threads that is being run.
class Block {
 public:
  static constexpr int kStackBytes = 128 << 10;

  Block(int threads, int shared_bytes)
      : threads_(threads),
        fibers_(threads),
        shared_(shared_bytes + 128 + kGuard),
        shared_bytes_(shared_bytes),
        warps_((threads + 31) / 32) {
    for (Fiber& fiber : fibers_) fiber.stack.reset(new char[kStackBytes]);
  }

  // The block whose thread is running.
  static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

  // Runs all threads of a block to their end.
  void run(const int (&index)[3], int blocks_z, const std::function<void()>& body) {
    for (int i = 0; i < 3; ++i) index_[i] = index[i];
    blocks_z_ = blocks_z;
    body_ = &body;
    std::fill(shared_.begin(), shared_.end(), static_cast<char>(0xff));
    barrier_ = Meeting{};
    for (Meeting& meeting : warps_) meeting = Meeting{};
    in_flight_.clear();
    current() = this;
    running_ = threads_;
    for (int i = 0; i < threads_; ++i) {
      Fiber& fiber = fibers_[i];
      fiber.done = false;
      fiber.waits_for = nullptr;
      fiber.groups.clear();
      fiber.open.clear();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::enter, 0);
    }
    while (running_ > 0) {
      // Warps and their threads by turns from the first on and from the last on, and not always from the same one.
      ++turn_;
      bool moved = false;
      for (int i = 0; i < threads_; ++i) {
        const int at = (i + static_cast<int>(turn_ * 37)) % threads_;
        active_ = turn_ % 2 ? at : threads_ - 1 - at;
        Fiber& fiber = fibers_[active_];
        if (fiber.done || (fiber.waits_for && fiber.waits_for->generation == fiber.generation)) continue;
        fiber.waits_for = nullptr;
        moved = true;
        swapcontext(&scheduler_, &fiber.context);
      }
      if (!moved) throw std::logic_error("a barrier that not all threads reach");
    }
    current() = nullptr;
    for (int i = 0; i < kGuard; ++i)
      if (shared()[shared_bytes_ + i] != static_cast<char>(0xff)) fail("a write behind the shared memory");
    if (failure_) throw std::logic_error(failure_);
  }

  int thread() const { return active_; }
  int index(int axis) const { return index_[axis]; }
  int blocks_z() const { return blocks_z_; }
  char* shared() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared_.data()) + 127) / 128 * 128); }

  void barrier() { meet(barrier_, threads_); }
  void warp_barrier() { meet(warps_[active_ / 32], 32); }

  // Lets all lanes of a warp see what each of them gives.
  template <class T>
  const T* exchange(const T& mine) {
    static_assert(sizeof(T) <= kSlot && std::is_trivially_copyable<T>::value, "too large");
    warp_barrier();
    T* all = reinterpret_cast<T*>(mail_[active_ / 32 % kMaxWarps]);
    std::memcpy(all + active_ % 32, &mine, sizeof(T));
    warp_barrier();
    return all;
  }

  struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool live;
    CopyBarrier* barrier;
    void make() const {
      if (live) std::memcpy(to, from, bytes);
      else std::memset(to, 0, bytes);
    }
  };
  void start(const Copy& copy) { fibers_[active_].open.push_back(copy); }
  void commit() {
    Fiber& fiber = fibers_[active_];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
  }
  void wait(size_t pending) {
    auto& groups = fibers_[active_].groups;
    while (groups.size() > pending) {
      for (const Copy& copy : groups.front()) copy.make();
      groups.erase(groups.begin());
    }
  }

  void start_bulk(const Copy& copy) { in_flight_.push_back(copy); }
  // A barrier is its phase in the highest bit, whether bytes are expected in the next, and the bytes that it waits for.
  void wait_bulk(CopyBarrier* barrier, int phase) {
    int pauses = 0;
    while (static_cast<int>(*barrier >> 63) == phase) {
      for (size_t i = 0; i < in_flight_.size();) {
        if (in_flight_[i].barrier != barrier) {
          ++i;
          continue;
        }
        in_flight_[i].make();
        *barrier -= in_flight_[i].bytes;
        in_flight_.erase(in_flight_.begin() + i);
      }
      if (*barrier << 1 == uint64_t{1} << 63) {  // expected, and none left
        *barrier = ~*barrier & (uint64_t{1} << 63);
      } else if (++pauses > 100 * threads_) {
        return fail("bytes that never come");
      } else {
        pause();
      }
    }
  }

  void fail(const char* why) { failure_ = why; }

 private:
  static constexpr int kSlot = 32, kMaxWarps = 32, kGuard = 1024;

  // Where threads wait for each other.
  struct Meeting {
    int arrived = 0;
    uint64_t generation = 0;
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false;
    Meeting* waits_for = nullptr;
    uint64_t generation = 0;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
  };

  static void enter() {
    Block& block = *current();
    (*block.body_)();
    Fiber& fiber = block.fibers_[block.active_];
    if (!fiber.open.empty()) block.fail("copies that no group has");
    fiber.done = true;
    --block.running_;
  }

  void pause() { swapcontext(&fibers_[active_].context, &scheduler_); }

  void meet(Meeting& meeting, int count) {
    if (++meeting.arrived == count) {
      meeting.arrived = 0;
      ++meeting.generation;
      return;
    }
    Fiber& fiber = fibers_[active_];
    fiber.waits_for = &meeting;
    fiber.generation = meeting.generation;
    pause();
  }

  int threads_, running_ = 0, active_ = 0, blocks_z_ = 1;
  int index_[3] = {0, 0, 0};
  uint64_t turn_ = 0;
  const char* failure_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  ucontext_t scheduler_;
  std::vector<Fiber> fibers_;
  std::vector<char> shared_;
  int shared_bytes_;
  std::vector<Copy> in_flight_;
  Meeting barrier_;
  std::vector<Meeting> warps_;
  alignas(16) char mail_[kMaxWarps][32 * kSlot];
};

inline int thread() { return Block::current()->thread(); }
inline int lane() { return thread() % 32; }
inline int warp() { return thread() / 32; }
inline int block_x() { return Block::current()->index(0); }
inline int block_y() { return Block::current()->index(1); }
inline int block_z() { return Block::current()->index(2); }
inline int num_blocks_z() { return Block::current()->blocks_z(); }
inline char* shared_memory() { return Block::current()->shared(); }
inline void barrier() { Block::current()->barrier(); }
inline void warp_barrier() { Block::current()->warp_barrier(); }

template <class T>
T shuffle(T x, int from) {
  return Block::current()->exchange(x)[from % 32];
}
inline float shuffle_xor(float x, int mask) {
  const int mine = lane();
  return Block::current()->exchange(x)[mine ^ mask];
}
inline bool warp_any(bool x) {
  const bool* all = Block::current()->exchange(x);
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= all[i];
  return any;
}
inline int shared_add(int* at, int x) {
  const int before = *at;
  *at += x;
  return before;
}

inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline float exp(float x) { return std::exp(x); }
inline float log(float x) { return std::log(x); }

// As a card: addresses must be multiples of what is moved.
inline void check_aligned(const void* p, int bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) Block::current()->fail("an address that is not aligned");
}
inline void copy(void* to, const void* from, int bytes, bool live) {
  check_aligned(to, bytes);
  check_aligned(from, bytes);
  Block::current()->start({to, from, bytes, live, nullptr});
}
inline void copy_chunk(void* to, const void* from, bool live) { copy(to, from, 16, live); }
inline void copy_word(void* to, const void* from, bool live) { copy(to, from, 4, live); }
inline void commit_copies() { Block::current()->commit(); }
template <int kPending>
void wait_copies() {
  Block::current()->wait(kPending);
}

inline void start_copy_barrier(CopyBarrier* barrier) { *barrier = 0; }
inline void show_to_bulk_copies() {}
inline void expect_bytes(CopyBarrier* barrier, int bytes) { *barrier += (uint64_t{1} << 62) + bytes; }
inline void copy_bulk(void* to, const void* from, int bytes, CopyBarrier* barrier) {
  check_aligned(to, 16);
  check_aligned(from, 16);
  if (bytes % 16) Block::current()->fail("a bulk copy of a size that is no multiple of 16");
  Block::current()->start_bulk({to, from, bytes, true, barrier});
}
inline void wait_bytes(CopyBarrier* barrier, int phase) { Block::current()->wait_bulk(barrier, phase); }

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float to_float(F16 x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return static_cast<float>(y);
}
inline void from_float(float& to, float x) { to = x; }
inline void from_float(Bf16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // To the nearest, to even where two are as near; a NaN stays one.
  to.bits = static_cast<uint16_t>(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void from_float(F16& to, float x) {
  const _Float16 y = static_cast<_Float16>(x);
  std::memcpy(&to, &y, 2);
}

template <class T, int kCount>
void unpack(float (&x)[kCount], Chunk chunk, T) {
  T elements[kCount];
  static_assert(sizeof elements == sizeof chunk, "");
  std::memcpy(elements, &chunk, sizeof chunk);
  for (int i = 0; i < kCount; ++i) x[i] = to_float(elements[i]);
}
template <class T, int kCount>
Chunk pack(const float (&x)[kCount], T) {
  T elements[kCount];
  Chunk chunk;
  static_assert(sizeof elements == sizeof chunk, "");
  for (int i = 0; i < kCount; ++i) from_float(elements[i], x[i]);
  std::memcpy(&chunk, elements, sizeof chunk);
  return chunk;
}
inline Chunk load_global(const void* from) {
  check_aligned(from, 16);
  Chunk x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store_global(void* to, Chunk x) {
  check_aligned(to, 16);
  std::memcpy(to, &x, sizeof x);
}
template <class T>
uint32_t pack(float first, float second, T) {
  T pair[2];
  from_float(pair[0], first);
  from_float(pair[1], second);
  uint32_t bits;
  std::memcpy(&bits, pair, 4);
  return bits;
}

inline void load_matrices(uint32_t (&x)[4], const void* row, bool transposed) {
  check_aligned(row, 16);
  const void* const* rows = Block::current()->exchange(row);
  const int mine = lane();
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int r = transposed ? 2 * (mine % 4) + j : mine / 4, c = transposed ? mine / 4 : 2 * (mine % 4) + j;
      std::memcpy(&pair[j], static_cast<const uint16_t*>(rows[8 * i + r]) + c, 2);
    }
    std::memcpy(&x[i], pair, 4);
  }
}
inline void load_matrices(uint32_t (&x)[4], const void* row) { load_matrices(x, row, false); }
inline void load_transposed(uint32_t (&x)[4], const void* row) { load_matrices(x, row, true); }

template <class T>
void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  struct Given {
    uint32_t a[4], b[2];
  };
  const Given* all = Block::current()->exchange(Given{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int mine = lane();
  const auto element = [](uint32_t pair, int which) {
    T x;
    std::memcpy(&x, reinterpret_cast<const char*>(&pair) + 2 * which, 2);
    return to_float(x);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = mine / 4 + i / 2 * 8, column = 2 * (mine % 4) + i % 2;
    float total = 0.0f;
    for (int k = 0; k < 16; ++k) {
      // a: rows 0 to 7 and 8 to 15, then columns 8 on likewise; b: rows 0 to 7, then 8 on.
      const uint32_t left = all[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      const uint32_t right = all[column * 4 + k % 8 / 2].b[k / 8];
      total += element(left, k % 2) * element(right, k % 2);
    }
    sum[i] += total;
  }
}

}  // namespace device

// Runs a kernel's blocks one after the other.
template <class Kernel>
void launch(const Grid& grid, int shared_bytes, const typename Kernel::Params& params, int, void*) {
  device::Block block(Kernel::kThreads, shared_bytes);
  const std::function<void()> body = [&] { Kernel::run(params); };
  for (int z = 0; z < grid.z; ++z)
    for (int y = 0; y < grid.y; ++y)
      for (int x = 0; x < grid.x; ++x) block.run({x, y, z}, grid.z, body);
}

}  // namespace kvmerge
