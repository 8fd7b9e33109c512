// How a batch's attention is divided into pieces, each of which a block of every KV head attends to. See docs/gpu.md.
#pragma once

#include "arguments.h"
#include "device.h"

namespace kvmerge {

// Lists the pieces of all rows (DivideParams). Grid: any number of blocks that have a thread for each row; each block
// finds the same share for itself.
//
// No piece is longer than the share, the smallest with which `slots` blocks could do all at a time: one for each piece
// of a row longer than the share, and the others for the rest together. It is a multiple of kStep, as `least` is, its
// lower bound. Of a front in pages a row has what `fronts` says, whatever each head holds.
struct Divide {
  typedef DivideParams Params;
  static constexpr int kThreads = 256, kBlocks = 1, kWarps = kThreads / 32;

  struct Shared {
    int64_t sums[2][kWarps];
    int lengths[kThreads], counts[kThreads];
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  static KVM_DEVICE void run(const DivideParams& p) {
    Shared& shared = *reinterpret_cast<Shared*>(device::shared_memory());
    const int share = share_of(p, shared);
    const int thread = device::thread(), own = device::block_x() * kThreads + thread;
    const int length = own < p.rows ? length_of(p, own) : 0;
    int first = 0, rank = 0, num_pieces = 0;  // pieces and rows before the own, and all pieces
    for (int start = 0; start < p.rows; start += kThreads) {
      const int found = start + thread < p.rows ? length_of(p, start + thread) : 0;
      device::barrier();  // what was there before is not needed any more
      shared.lengths[thread] = found;
      shared.counts[thread] = count_of(found, share);
      device::barrier();
      for (int i = 0; i < kThreads && start + i < p.rows; ++i) {
        const int other = shared.lengths[i], count = shared.counts[i];
        const bool is_before = other > length || (other == length && start + i < own);
        first += is_before ? count : 0;
        rank += is_before;
        num_pieces += count;
      }
    }
    if (own < p.rows) {
      const int count = count_of(length, share);
      p.parts[2 * own] = first;
      p.parts[2 * own + 1] = count;
      p.order[rank] = own;
      for (int piece = first; piece < first + count; ++piece) p.pieces[piece] = own;
    }
    const int threads = (p.rows + kThreads - 1) / kThreads * kThreads;
    for (int piece = num_pieces + own; piece < p.num_pieces; piece += threads) p.pieces[piece] = -1;
  }

 private:
  // Entries that a row's queries see.
  static KVM_DEVICE int length_of(const DivideParams& p, int row) {
    return p.query_lens[row] > 0 ? p.fronts[row] + p.seq_lens[row] - p.tails[row] : 0;
  }

  static KVM_DEVICE int count_of(int length, int share) { return (length + share - 1) / share; }

  // Entries of all rows, those of a longer one than the share as whole shares; the same in all threads. sums: not those
  // of the call before, which other threads may still read.
  static KVM_DEVICE int64_t taken(const DivideParams& p, int share, int64_t* sums) {
    int64_t sum = 0;
    for (int row = device::thread(); row < p.rows; row += kThreads) {
      const int length = length_of(p, row);
      sum += length > share ? int64_t{count_of(length, share)} * share : length;
    }
    for (int mask = 1; mask < 32; mask *= 2) sum += device::shuffle_xor(sum, mask);
    if (device::lane() == 0) sums[device::warp()] = sum;
    device::barrier();
    sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
    return sum;
  }

  static KVM_DEVICE int share_of(const DivideParams& p, Shared& shared) {
    const int64_t total = taken(p, 0x7fffffff, shared.sums[0]), step = int64_t{kStep} * p.slots;
    // Less than an even share cannot do, and twice as much always does: fewer than half the slots' number of rows are
    // longer, and each of them takes less than a share more than it has entries.
    const int least = p.least / kStep, even = static_cast<int>((total + step - 1) / step);
    int low = even > least ? even : least, high = 2 * even > least ? 2 * even : least;
    for (int i = 1; low < high; ++i) {
      const int middle = (low + high) / 2, share = middle * kStep;
      if (taken(p, share, shared.sums[i % 2]) <= int64_t{share} * p.slots) high = middle;
      else low = middle + 1;
    }
    return high * kStep;
  }
};

}  // namespace kvmerge
