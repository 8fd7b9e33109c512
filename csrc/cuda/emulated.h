// device.h for a CPU: a block's threads are fibers that take turns, and change places only where they wait.
//
// It is meant to find mistakes. Threads run in an order that changes from turn to turn, so that what a missing barrier
// leaves open differs; shared memory starts as NaN; where an asynchronous copy goes is NaN from its start until it is
// waited for, so that what is read too early or overwritten too early is seen. What ends as an exception: a barrier that
// not all threads reach, a write behind the shared memory, and a copy from or to an address that is not aligned or of
// something that changes meanwhile.
//
// Built with ThreadSanitizer (build.py --emulated --races), it knows of the order among threads what a GPU guarantees
// and nothing else: barriers order memory, shuffles and matrix instructions do not, and blocks are in no order. Then
// any two accesses to shared or global memory that conflict are found, whatever the turns were.
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

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#define KVM_UNWATCHED __attribute__((no_sanitize("thread")))
#else
#define KVM_UNWATCHED
#endif

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
  int x, y;
};

namespace device {

// What a race detector is told: which thread runs, and what orders threads. It does not look at the emulation's own
// variables (KVM_UNWATCHED, Unwatched), which threads share freely.
#if defined(__SANITIZE_THREAD__)
typedef void* Watched;
KVM_UNWATCHED inline Watched watched_now() { return __tsan_get_current_fiber(); }
KVM_UNWATCHED inline Watched watch_new() { return __tsan_create_fiber(0); }
KVM_UNWATCHED inline void watch_no_more(Watched fiber) { __tsan_destroy_fiber(fiber); }
KVM_UNWATCHED inline void switch_watch(Watched fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
KVM_UNWATCHED inline void happened(void* mark) { __tsan_release(mark); }
KVM_UNWATCHED inline void happens_after(void* mark) { __tsan_acquire(mark); }
struct Unwatched {
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};
#else
struct Watched {};
inline Watched watched_now() { return {}; }
inline Watched watch_new() { return {}; }
inline void watch_no_more(Watched) {}
inline void switch_watch(Watched) {}
inline void happened(void*) {}
inline void happens_after(void*) {}
struct Unwatched {
  Unwatched() {}
};
#endif

// A block of threads that is being run; after its end it can run as the next block of a launch.
class Block {
 public:
  static constexpr int kStackBytes = 128 << 10;

  Block(int threads, int shared_bytes) : threads_(threads), fibers_(threads), shared_bytes_(shared_bytes) {
    scheduler_watch_ = watched_now();
    happened(&launch_);
    for (Fiber& fiber : fibers_) {
      fiber.stack.reset(new char[kStackBytes]);
      fiber.watch = watch_new();
    }
  }
  ~Block() {
    happens_after(&end_);
    for (Fiber& fiber : fibers_) watch_no_more(fiber.watch);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // The block whose thread is running.
  KVM_UNWATCHED static Block*& current() {
    static Block* block = nullptr;
    return block;
  }

  // Runs all threads of a block to their end.
  void run(const int (&index)[2], const std::function<void()>& body) {
    const Unwatched unwatched;
    for (int i = 0; i < 2; ++i) index_[i] = index[i];
    body_ = &body;
    // Another block's memory and barriers say nothing of this one's.
    shared_.reset();
    shared_.reset(new std::vector<char>(shared_bytes_ + 128 + kGuard, static_cast<char>(0xff)));
    meetings_.reset();
    meetings_.reset(new Meetings((threads_ + 31) / 32));
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
        switch_watch(fiber.watch);
        swapcontext(&scheduler_, &fiber.context);
      }
      if (!moved) throw std::logic_error("a barrier that not all threads reach");
    }
    current() = nullptr;
    for (int i = 0; i < kGuard; ++i)
      if (shared()[shared_bytes_ + i] != static_cast<char>(0xff)) fail("a write behind the shared memory");
    if (failure_) throw std::logic_error(failure_);
  }

  KVM_UNWATCHED int thread() const { return active_; }
  KVM_UNWATCHED int index(int axis) const { return index_[axis]; }
  char* shared() {
    const Unwatched unwatched;
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared_->data()) + 127) / 128 * 128);
  }

  KVM_UNWATCHED void barrier() { meet(meetings_->block, threads_, true); }
  KVM_UNWATCHED void warp_barrier() { meet(my_warp().meeting, 32, true); }

  // Lets all lanes of a warp see what each of them gives. That orders no other memory.
  template <class T>
  const T* exchange(const T& mine) {
    static_assert(sizeof(T) <= kSlot && std::is_trivially_copyable<T>::value, "too large");
    const Unwatched unwatched;
    Warp& warp = my_warp();
    meet(warp.meeting, 32, false);
    T* all = reinterpret_cast<T*>(warp.mail);
    std::memcpy(all + active_ % 32, &mine, sizeof(T));
    meet(warp.meeting, 32, false);
    return all;
  }

  struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool live;
    uint64_t sum = 0;  // of what is copied, as it was at first

    uint64_t sum_now() const {
      uint64_t found = 0;
      for (int i = 0; live && i < bytes; ++i) found = 1099511628211u * (found ^ static_cast<const uint8_t*>(from)[i]);
      return found;
    }
    // What is there until the copy is done, nobody may know.
    void begin() {
      sum = sum_now();
      std::memset(to, 0xff, bytes);
    }
    void make() const {
      if (sum_now() != sum) current()->fail("something changes while it is copied");
      if (live) std::memcpy(to, from, bytes);
      else std::memset(to, 0, bytes);
    }
  };
  void start(Copy copy) {
    copy.begin();
    const Unwatched unwatched;
    fibers_[active_].open.push_back(copy);
  }
  void commit() {
    const Unwatched unwatched;
    Fiber& fiber = fibers_[active_];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
  }
  // Others run meanwhile.
  void wait(size_t pending) {
    const std::vector<Copy> done = take_groups(pending);
    if (!done.empty()) pause();
    for (const Copy& copy : done) copy.make();
  }

  KVM_UNWATCHED void fail(const char* why) { failure_ = why; }

 private:
  static constexpr int kSlot = 32, kGuard = 1024;

  // Where threads wait for each other.
  struct Meeting {
    int arrived = 0;
    uint64_t generation = 0;
    uint64_t marks[2] = {0, 0};  // of this generation and the next, as addresses for the race detector
  };
  struct Warp {
    Meeting meeting;
    alignas(16) char mail[32 * kSlot];
  };
  struct Meetings {
    explicit Meetings(int num_warps) : warps(num_warps) {}
    Meeting block;
    std::vector<Warp> warps;
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Watched watch;
    bool done = false;
    Meeting* waits_for = nullptr;
    uint64_t generation = 0;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
  };

  KVM_UNWATCHED static void enter() {
    Block& block = *current();
    happens_after(&block.launch_);
    (*block.body_)();
    happened(&block.end_);
    block.leave();
    switch_watch(block.scheduler_watch_);
  }
  void leave() {
    const Unwatched unwatched;
    Fiber& fiber = fibers_[active_];
    if (!fiber.open.empty()) fail("copies that no group has");
    fiber.done = true;
    --running_;
  }

  KVM_UNWATCHED void pause() {
    ucontext_t* mine = &fibers_[active_].context;
    switch_watch(scheduler_watch_);
    swapcontext(mine, &scheduler_);
  }

  void meet(Meeting& meeting, int count, bool orders) {
    const Unwatched unwatched;
    const uint64_t generation = meeting.generation;
    if (orders) happened(meeting.marks + generation % 2);
    if (++meeting.arrived == count) {
      meeting.arrived = 0;
      ++meeting.generation;
    } else {
      Fiber& fiber = fibers_[active_];
      fiber.waits_for = &meeting;
      fiber.generation = generation;
      pause();
    }
    if (orders) happens_after(meeting.marks + generation % 2);
  }

  Warp& my_warp() {
    const Unwatched unwatched;
    return meetings_->warps[active_ / 32];
  }

  // The thread's copies but for those of the latest `pending` groups.
  std::vector<Copy> take_groups(size_t pending) {
    const Unwatched unwatched;
    auto& groups = fibers_[active_].groups;
    std::vector<Copy> found;
    while (groups.size() > pending) {
      found.insert(found.end(), groups.front().begin(), groups.front().end());
      groups.erase(groups.begin());
    }
    return found;
  }

  int threads_, running_ = 0, active_ = 0;
  int index_[2] = {0, 0};
  uint64_t turn_ = 0, launch_ = 0, end_ = 0;
  const char* failure_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  ucontext_t scheduler_;
  Watched scheduler_watch_;
  std::vector<Fiber> fibers_;
  std::unique_ptr<std::vector<char>> shared_;
  int shared_bytes_;
  std::unique_ptr<Meetings> meetings_;
};

inline int thread() { return Block::current()->thread(); }
inline int lane() { return thread() % 32; }
inline int warp() { return thread() / 32; }
inline int block_x() { return Block::current()->index(0); }
inline int block_y() { return Block::current()->index(1); }
inline char* shared_memory() { return Block::current()->shared(); }
inline void barrier() { Block::current()->barrier(); }
inline void warp_barrier() { Block::current()->warp_barrier(); }

template <class T>
T shuffle(T x, int from) {
  return Block::current()->exchange(x)[from % 32];
}
template <class T>
T shuffle_xor(T x, int mask) {
  const int mine = lane();
  return Block::current()->exchange(x)[mine ^ mask];
}
inline bool warp_any(bool x) {
  const bool* all = Block::current()->exchange(x);
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= all[i];
  return any;
}

inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline float exp(float x) { return std::exp(x); }
inline float log(float x) { return std::log(x); }

// As a GPU: addresses must be multiples of what is moved.
inline void check_aligned(const void* p, int bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) Block::current()->fail("an address that is not aligned");
}
inline void copy(void* to, const void* from, int bytes, bool live) {
  check_aligned(to, bytes);
  check_aligned(from, bytes);
  Block::current()->start({to, from, bytes, live});
}
inline void copy_chunk(void* to, const void* from, bool live) { copy(to, from, 16, live); }
inline void copy_word(void* to, const void* from, bool live) { copy(to, from, 4, live); }
inline void commit_copies() { Block::current()->commit(); }
template <int kPending>
void wait_copies() {
  Block::current()->wait(kPending);
}

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
  const std::function<void()> body = [&] { Kernel::run(params); };
  device::Block block(Kernel::kThreads, shared_bytes);
  for (int y = 0; y < grid.y; ++y)
    for (int x = 0; x < grid.x; ++x) block.run({x, y}, body);
}

}  // namespace kvmerge
