// Attention of a decode step over pages: votes, and the update of scores. See docs/gpu.md.
//
// `Attend` works on a piece of a sequence's entries (divide.h) for one KV head; all query rows of the head, queries
// times query heads, at most kRows, row r being head r % group of query r / group, are multiplied together. Each of its
// warps goes through entries of its own, 16 at a time, which it loads ahead itself: warps meet only at the end.
// `Finish` puts pieces together and turns logits that were kept to scores. Logits are kept times log2(e), because a GPU
// has exp2.
#pragma once

#include <type_traits>

#include "arguments.h"
#include "device.h"
#include "pages.h"

namespace kvmerge {

constexpr float kNoLogit = -__builtin_huge_valf();

// Where an entry lies in this layer's cache, at its own KV head.
struct Place {
  int block, offset;
};

// Where an entry lies where heads have pages of their own.
struct PagedPlace {
  Place place;
  int head;
  int64_t shift;  // bytes from this layer's planes to those of the layer that it lies in
};

KVM_DEVICE int64_t cell_at(const AttendParams& p, Place place, int head) {
  return place.block * p.cell_block + head * p.cell_head + place.offset * p.cell_slot;
}
KVM_DEVICE int64_t cell_at(const AttendParams& p, const PagedPlace& at, int) {
  return at.shift + cell_at(p, at.place, at.head);
}

KVM_DEVICE int64_t plane_at(const AttendParams& p, Place place, int head) {
  return place.block * p.plane_block + head * p.plane_head + place.offset;
}
KVM_DEVICE int64_t plane_at(const AttendParams& p, const PagedPlace& at, int) {
  return at.shift / static_cast<int64_t>(sizeof(float)) + plane_at(p, at.place, at.head);
}

// Whether an entry's logits are kept. They lie by slots of this layer, where an entry in another layer's page has none:
// the slot there with the same block and head may be another entry of this layer.
KVM_DEVICE bool is_kept(Place) { return true; }
KVM_DEVICE bool is_kept(const PagedPlace& at) { return at.shift == 0; }

KVM_DEVICE int64_t kept_at(const AttendParams& p, Place place, int head) {
  return (static_cast<int64_t>(place.block) * p.heads + head) * p.kept_rows * p.block_size + place.offset;
}
KVM_DEVICE int64_t kept_at(const AttendParams& p, const PagedPlace& at, int) { return kept_at(p, at.place, at.head); }

// One sequence of a batch, as a block of one of its KV heads sees it. Entries are found in two steps: the second needs
// what the first one loads, and is done when that has had time to come.
struct Row {
  typedef Place EntryPlace;

  int num_queries, front, gap, old, seen, mode, first_piece, num_pieces;
  int64_t start_token;
  float decay;
  const int32_t* blocks;

  KVM_DEVICE Row(const AttendParams& p, int row, int /* head */)
      : num_queries(p.query_lens[row]),
        front(p.fronts[row]),
        gap(p.tails[row] - front),
        old(p.seq_lens[row] - gap - num_queries),  // entries that were there before this call
        seen(old + num_queries),
        mode(p.modes[row]),
        first_piece(p.parts[2 * row]),
        num_pieces(p.parts[2 * row + 1]),
        start_token(p.query_starts[row]),
        decay(p.decays[row]),
        blocks(p.block_table + row * p.table_row) {}

  KVM_DEVICE bool keeps_logits() const { return mode == kSum || mode == kMean; }

  // Entries of a piece, but for the last ones, which may have none where a head has pages of its own.
  KVM_DEVICE int piece_size() const {
    const int share = (seen + num_pieces - 1) / num_pieces;
    return (share + kStep - 1) / kStep * kStep;
  }

  KVM_DEVICE Place find(const AttendParams& p, int entry) const { return find_in(blocks, p, entry); }
  KVM_DEVICE Place place_of(const AttendParams&, int, int, Place found) const { return found; }

 protected:
  KVM_DEVICE Place find_in(const int32_t* list, const AttendParams& p, int entry) const {
    const int slot = entry < front ? entry : entry + gap;
    const int index = p.block_shift >= 0 ? slot >> p.block_shift : slot / p.block_size;
    return Place{list[index], slot - index * p.block_size};
  }
};

// The same where the head's front may be in pages of its own: then `find` gives the ids of those.
struct PagedRow : Row {
  typedef PagedPlace EntryPlace;

  const int32_t* pages;  // null: the front is in the blocks

  KVM_DEVICE PagedRow(const AttendParams& p, int row, int head) : Row(p, row, head), pages(nullptr) {
    // The table of a row without queries may be gone.
    if (num_queries == 0 || p.tables[row] == 0) return;
    const HeadFront own(reinterpret_cast<const int32_t*>(p.tables[row]),
                        static_cast<int64_t>(p.layer) * p.heads + head);
    const int more = own.num_entries - front;
    front += more;
    gap -= more;
    old += more;
    seen += more;
    pages = own.pages;
  }

  KVM_DEVICE Place find(const AttendParams& p, int entry) const {
    return find_in(in_pages(entry) ? pages : blocks, p, entry);
  }
  KVM_DEVICE PagedPlace place_of(const AttendParams& p, int head, int entry, Place found) const {
    if (!in_pages(entry)) return PagedPlace{found, head, 0};
    const Page page = page_of(found.block, p.heads, p.num_layers);
    return PagedPlace{{page.block, found.offset}, page.head,
                      p.addresses[6 * page.layer] - reinterpret_cast<int64_t>(p.keys)};
  }

 private:
  KVM_DEVICE bool in_pages(int entry) const { return pages != nullptr && entry < front; }
};

KVM_DEVICE float larger(float a, float b) { return a > b ? a : b; }
KVM_DEVICE float finite(float top) { return top == kNoLogit ? 0.0f : top; }

// log2(2^a + 2^b)
KVM_DEVICE float add_logs(float a, float b) {
  const float top = finite(larger(a, b));
  return top + device::log2(device::exp2(a - top) + device::exp2(b - top));
}

// A product of query and key as a logit: cap * tanh(logit / cap) where there is a cap.
KVM_DEVICE float logit_of(const AttendParams& p, float product) {
  const float logit = product * p.scale;
  if (p.cap == 0.0f) return logit;
  return p.cap * (1.0f - 2.0f / (device::exp2(logit * (2.0f * kLog2E / p.cap)) + 1.0f));
}

// decay^age; 0^0 is 1.
KVM_DEVICE float power(float decay, int age) {
  return age == 0 ? 1.0f : device::exp2(static_cast<float>(age) * device::log2(decay));
}

// The share that a row's logit has in what `log_ema` adds, log2.
KVM_DEVICE float ema_weight(const AttendParams& p, const Row& row, int query) {
  return static_cast<float>(row.num_queries - 1 - query) * device::log2(row.decay) +
         device::log2((1.0f - row.decay) / static_cast<float>(p.group));
}

// Adds to an entry's moving average; level: log2 of the sum of the rows' weighted exponentials.
template <class EntryPlace>
KVM_DEVICE void average(const AttendParams& p, const Row& row, const EntryPlace& place, int head, int entry,
                        float level) {
  const int64_t at = plane_at(p, place, head);
  const bool is_new = entry >= row.old;  // a new token's statistics start from nothing, whatever its place held
  const float count = is_new ? 0.0f : p.aux[at];
  const float counted = static_cast<float>(row.num_queries - (is_new ? entry - row.old : 0));
  const float before =
      count > 0.0f ? p.scores[at] * kLog2E + static_cast<float>(row.num_queries) * device::log2(row.decay) : kNoLogit;
  p.scores[at] = count + counted > 0.0f ? add_logs(before, level) * kLn2 : 0.0f;
  p.aux[at] = count + counted;
}

KVM_DEVICE void store_output(const AttendParams& p, int64_t at, float x) {
  if (p.output_type == kFloat32) device::from_float(static_cast<float*>(p.output)[at], x);
  else if (p.output_type == kBfloat16) device::from_float(static_cast<Bf16*>(p.output)[at], x);
  else device::from_float(static_cast<F16*>(p.output)[at], x);
}

// How rows of 16 entries lie in shared memory: with chunks exchanged within 128 bytes, so that eight threads that read the
// same chunk of eight rows, or eight chunks of one, never meet in a bank.
template <class T, int kHeadSize>
struct Tile {
  static constexpr int kEntries = 16, kChunk = 16 / sizeof(T), kChunks = kHeadSize / kChunk;
  static constexpr int kStride = kHeadSize * static_cast<int>(sizeof(T));
  static constexpr int kBytes = kEntries * kStride;

  static KVM_DEVICE int at(int entry, int chunk) { return entry * kStride + (chunk ^ (entry & 7)) * 16; }
};

// What a warp has of 16 entries.
template <class EntryPlace>
struct Step {
  const char *keys, *values;  // tiles
  const float* votes;
  const EntryPlace* places;
  int first, end;  // the first entry, and that behind the last one of the piece
};

// Products on the matrix units, for up to 16 rows. A thread has rows lane / 4 and that + 8, and of them every fourth
// pair of columns.
template <class T, int kSize>
struct MatrixUnits {
  typedef T Type;
  static constexpr int kHeadSize = kSize, kMaxRows = kRows;
  typedef Tile<T, kSize> Entries;
  static constexpr int kQueryBytes = Entries::kBytes;
  static constexpr bool kHoldsQuery = kSize <= 128;  // in registers, of which larger sums leave too few

  uint32_t query[kHoldsQuery ? kSize / 16 : 1][4];
  float sums[kSize / 8][4];
  float top[2], total[2], weight[2];
  int limit[2];  // entries that the row's query sees

  static KVM_DEVICE void put_query(char* shared, int row, int chunk, const Chunk& x) {
    *reinterpret_cast<Chunk*>(shared + Entries::at(row, chunk)) = x;
  }

  static KVM_DEVICE void load_query(uint32_t (&a)[4], const char* shared, int k) {
    const int lane = device::lane();
    device::load_matrices(a, shared + Entries::at(lane % 16, 2 * k + lane / 16));
  }

  KVM_DEVICE void start(const AttendParams& p, const Row& row, const char* shared) {
    KVM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = device::lane() / 4 + 8 * i, number = r / p.group;
      limit[i] = number < row.num_queries ? row.old + number + 1 : 0;
      weight[i] = row.mode == kLogEma ? ema_weight(p, row, number) : 0.0f;
      top[i] = kNoLogit;
      total[i] = 0.0f;
    }
    KVM_UNROLL
    for (int n = 0; n < kSize / 8; ++n) {
      KVM_UNROLL
      for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    }
    if (kHoldsQuery) {
      KVM_UNROLL
      for (int k = 0; k < kSize / 16; ++k) load_query(query[kHoldsQuery ? k : 0], shared, k);
    }
  }

  template <class EntryPlace>
  KVM_DEVICE void step(const AttendParams& p, const Row& row, int head, const char* shared, const Step<EntryPlace>& s) {
    const int lane = device::lane(), quarter = lane / 8;
    float logits[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
    KVM_UNROLL
    for (int k = 0; k < kSize / 16; ++k) {
      uint32_t a[4], b[4];
      if (!kHoldsQuery) load_query(a, shared, k);
      device::load_matrices(b, s.keys + Entries::at(lane % 8 + quarter / 2 * 8, 2 * k + quarter % 2));
      const uint32_t(&rows)[4] = kHoldsQuery ? query[kHoldsQuery ? k : 0] : a;
      device::multiply(logits[0], rows, b[0], b[1], T());
      device::multiply(logits[1], rows, b[2], b[3], T());
    }

    float level[2][2] = {{kNoLogit, kNoLogit}, {kNoLogit, kNoLogit}};
    float plain[2][4];
    KVM_UNROLL
    for (int n = 0; n < 2; ++n) {
      KVM_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + 2 * (lane % 4) + i % 2, entry = s.first + column;
        const bool seen = entry < limit[i / 2] && entry < s.end;
        const float logit = logit_of(p, logits[n][i]);
        plain[n][i] = seen ? logit + weight[i / 2] : kNoLogit;
        logits[n][i] = seen ? logit + s.votes[column] * kLog2E : kNoLogit;
        level[n][i % 2] = larger(level[n][i % 2], plain[n][i]);
      }
    }
    if (p.kept_rows > 0 && row.keeps_logits()) keep(p, head, logits, s);
    if (p.kept_rows > 0 && row.mode == kLogEma) {
      KVM_UNROLL
      for (int n = 0; n < 2; ++n) {
        KVM_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float most = finite(over_rows(level[n][i], true));
          const float sum = device::exp2(plain[n][i] - most) + device::exp2(plain[n][i + 2] - most);
          const float whole = most + device::log2(over_rows(sum, false));
          const int column = 8 * n + 2 * (lane % 4) + i;
          if (lane < 4 && s.first + column < s.end)
            average(p, row, s.places[column], head, s.first + column, whole);
        }
      }
    }

    float new_top[2] = {top[0], top[1]};
    KVM_UNROLL
    for (int i = 0; i < 4; ++i) new_top[i / 2] = larger(new_top[i / 2], larger(logits[0][i], logits[1][i]));
    KVM_UNROLL
    for (int i = 0; i < 2; ++i) {
      new_top[i] = larger(new_top[i], device::shuffle_xor(new_top[i], 1));
      new_top[i] = larger(new_top[i], device::shuffle_xor(new_top[i], 2));
    }
    if (device::warp_any(new_top[0] > top[0] || new_top[1] > top[1])) {  // seldom, after the first entries
      const float shrink[2] = {device::exp2(top[0] - finite(new_top[0])), device::exp2(top[1] - finite(new_top[1]))};
      KVM_UNROLL
      for (int i = 0; i < 2; ++i) {
        top[i] = new_top[i];
        total[i] *= shrink[i];
      }
      KVM_UNROLL
      for (int n = 0; n < kSize / 8; ++n) {
        KVM_UNROLL
        for (int i = 0; i < 4; ++i) sums[n][i] *= shrink[i / 2];
      }
    }
    const float safe[2] = {finite(top[0]), finite(top[1])};
    KVM_UNROLL
    for (int n = 0; n < 2; ++n) {
      KVM_UNROLL
      for (int i = 0; i < 4; ++i) {
        logits[n][i] = device::exp2(logits[n][i] - safe[i / 2]);
        total[i / 2] += logits[n][i];
      }
    }
    const uint32_t weights[4] = {
        device::pack(logits[0][0], logits[0][1], T()), device::pack(logits[0][2], logits[0][3], T()),
        device::pack(logits[1][0], logits[1][1], T()), device::pack(logits[1][2], logits[1][3], T())};
    KVM_UNROLL
    for (int j = 0; j < kSize / 16; ++j) {
      uint32_t b[4];
      device::load_transposed(b, s.values + Entries::at(lane % 8 + quarter % 2 * 8, 2 * j + quarter / 2));
      device::multiply(sums[2 * j], weights, b[0], b[1], T());
      device::multiply(sums[2 * j + 1], weights, b[2], b[3], T());
    }
  }

  // The warp's log2 of the largest exponential of each row, and their sum over that.
  KVM_DEVICE void give_levels(float* tops, float* totals) {
    KVM_UNROLL
    for (int i = 0; i < 2; ++i) {
      total[i] += device::shuffle_xor(total[i], 1);
      total[i] += device::shuffle_xor(total[i], 2);
      if (device::lane() % 4 == 0) {
        tops[device::lane() / 4 + 8 * i] = top[i];
        totals[device::lane() / 4 + 8 * i] = total[i];
      }
    }
  }

  // The warp's sums of values, times `shares`, to [rows, kSize].
  KVM_DEVICE void give_sums(float* found, const float* shares, int rows) {
    KVM_UNROLL
    for (int n = 0; n < kSize / 8; ++n) {
      KVM_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int r = device::lane() / 4 + i / 2 * 8;
        if (r < rows) found[r * kSize + 8 * n + 2 * (device::lane() % 4) + i % 2] = sums[n][i] * shares[r];
      }
    }
  }

 private:
  static KVM_DEVICE float over_rows(float x, bool largest) {
    KVM_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) {
      const float other = device::shuffle_xor(x, mask);
      x = largest ? larger(x, other) : x + other;
    }
    return x;
  }

  template <class EntryPlace>
  KVM_DEVICE void keep(const AttendParams& p, int head, const float (&logits)[2][4], const Step<EntryPlace>& s) {
    const int lane = device::lane();
    KVM_UNROLL
    for (int n = 0; n < 2; ++n) {
      KVM_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + 2 * (lane % 4) + i % 2, r = lane / 4 + i / 2 * 8;
        if (limit[i / 2] > 0 && s.first + column < s.end && is_kept(s.places[column]))
          p.kept[kept_at(p, s.places[column], head) + r * p.block_size] = logits[n][i];
      }
    }
  }
};

// Products on the ordinary units, for few rows and for float32. A thread has the logits of entry lane % 16, half of
// each product; and for the sums one chunk, or several, of every value or of every so many.
template <class T, int kSize, int kMost>
struct Cores {
  typedef T Type;
  static constexpr int kHeadSize = kSize, kMaxRows = kMost;
  typedef Tile<T, kSize> Entries;
  static constexpr int kChunk = Entries::kChunk, kChunks = Entries::kChunks;
  static constexpr int kParts = kChunks < 32 ? 32 / kChunks : 1, kOwn = kChunks > 32 ? kChunks / 32 : 1;
  static constexpr int kQueryBytes = kMost * kSize * 4;

  float sums[kMost][kOwn][kChunk];
  float top[kMost], total[kMost];

  static KVM_DEVICE void put_query(char* shared, int row, int chunk, const Chunk& x) {
    if (row >= kMost) return;
    float elements[kChunk];
    device::unpack(elements, x, T());
    KVM_UNROLL
    for (int i = 0; i < kChunk; ++i) reinterpret_cast<float*>(shared)[row * kSize + chunk * kChunk + i] = elements[i];
  }

  KVM_DEVICE void start(const AttendParams&, const Row&, const char*) {
    KVM_UNROLL
    for (int r = 0; r < kMost; ++r) {
      top[r] = kNoLogit;
      total[r] = 0.0f;
      KVM_UNROLL
      for (int i = 0; i < kOwn * kChunk; ++i) sums[r][i / kChunk][i % kChunk] = 0.0f;
    }
  }

  template <class EntryPlace>
  KVM_DEVICE void step(const AttendParams& p, const Row& row, int head, const char* shared, const Step<EntryPlace>& s) {
    const int lane = device::lane(), mine = lane % 16, entry = s.first + mine;
    const bool live = entry < s.end;
    float logits[kMost];
    KVM_UNROLL
    for (int r = 0; r < kMost; ++r) logits[r] = 0.0f;
    KVM_UNROLL
    for (int i = 0; i < kChunks / 2; ++i) {
      const int chunk = 2 * i + lane / 16;
      float key[kChunk];
      device::unpack(key, *reinterpret_cast<const Chunk*>(s.keys + Entries::at(mine, chunk)), T());
      KVM_UNROLL
      for (int r = 0; r < kMost; ++r) {
        const float* query = reinterpret_cast<const float*>(shared) + r * kSize + chunk * kChunk;
        KVM_UNROLL
        for (int j = 0; j < kChunk; ++j) logits[r] += query[j] * key[j];
      }
    }

    const bool averages = p.kept_rows > 0 && row.mode == kLogEma, keeps = p.kept_rows > 0 && row.keeps_logits();
    const float vote = s.votes[mine] * kLog2E;
    float level = kNoLogit, weights[kMost];
    KVM_UNROLL
    for (int r = 0; r < kMost; ++r) {
      const float plain = logit_of(p, logits[r] + device::shuffle_xor(logits[r], 16));
      const int number = r / p.group;
      const bool wanted = number < row.num_queries, seen = wanted && live && entry <= row.old + number;
      logits[r] = seen ? plain + vote : kNoLogit;
      if (averages && seen) level = add_logs(level, plain + ema_weight(p, row, number));
      if (keeps && wanted && live && lane < 16 && is_kept(s.places[mine]))
        p.kept[kept_at(p, s.places[mine], head) + r * p.block_size] = logits[r];
      float most = logits[r];
      KVM_UNROLL
      for (int mask = 1; mask < 16; mask *= 2) most = larger(most, device::shuffle_xor(most, mask));
      if (most > top[r]) {  // the same in all threads
        const float shrink = device::exp2(top[r] - most);
        top[r] = most;
        total[r] *= shrink;
        KVM_UNROLL
        for (int i = 0; i < kOwn * kChunk; ++i) sums[r][i / kChunk][i % kChunk] *= shrink;
      }
      weights[r] = device::exp2(logits[r] - finite(top[r]));
      total[r] += weights[r];
    }
    if (averages && live && lane < 16) average(p, row, s.places[mine], head, entry, level);

    KVM_UNROLL
    for (int i = 0; i < 16 / kParts; ++i) {
      const int other = i * kParts + lane / (32 / kParts);
      float weight[kMost];
      KVM_UNROLL
      for (int r = 0; r < kMost; ++r) weight[r] = device::shuffle(weights[r], other);
      KVM_UNROLL
      for (int own = 0; own < kOwn; ++own) {
        float value[kChunk];
        const int chunk = lane % (32 / kParts) + 32 * own;
        device::unpack(value, *reinterpret_cast<const Chunk*>(s.values + Entries::at(other, chunk)), T());
        KVM_UNROLL
        for (int r = 0; r < kMost; ++r) {
          KVM_UNROLL
          for (int j = 0; j < kChunk; ++j) sums[r][own][j] += weight[r] * value[j];
        }
      }
    }
  }

  KVM_DEVICE void give_levels(float* tops, float* totals) {
    KVM_UNROLL
    for (int r = 0; r < kMost; ++r) {
      float sum = total[r];
      KVM_UNROLL
      for (int mask = 1; mask < 16; mask *= 2) sum += device::shuffle_xor(sum, mask);
      if (device::lane() == 0) {
        tops[r] = top[r];
        totals[r] = sum;
      }
    }
  }

  KVM_DEVICE void give_sums(float* found, const float* shares, int rows) {
    KVM_UNROLL
    for (int r = 0; r < kMost; ++r) {
      KVM_UNROLL
      for (int own = 0; own < kOwn; ++own) {
        KVM_UNROLL
        for (int j = 0; j < kChunk; ++j) {
          float sum = sums[r][own][j];
          KVM_UNROLL
          for (int mask = 32 / kParts; mask < 32; mask *= 2) sum += device::shuffle_xor(sum, mask);
          const int chunk = device::lane() % (32 / kParts) + 32 * own;
          if (r < rows && device::lane() < 32 / kParts) found[r * kSize + chunk * kChunk + j] = sum * shares[r];
        }
      }
    }
  }
};

// Grid: heads, pieces, so that the longest ones of all heads come first. kPages: heads of some rows have pages of their
// own.
template <class Product, int kWarps, int kStages, bool kPages>
struct Attend {
  typedef AttendParams Params;
  typedef typename std::conditional<kPages, PagedRow, Row>::type Sequence;
  typedef typename Sequence::EntryPlace EntryPlace;
  typedef typename Product::Entries Entries;
  typedef typename Product::Type T;
  static constexpr int kThreads = 32 * kWarps, kBlocks = 2, kHeadSize = Product::kHeadSize;
  static constexpr int kChunk = Entries::kChunk, kChunks = Entries::kChunks;
  static_assert(kStep % (kWarps * Entries::kEntries) == 0, "a piece is whole steps of all warps");

  struct Stage {
    alignas(16) char keys[Entries::kBytes];
    alignas(16) char values[Entries::kBytes];
    float votes[16];
    EntryPlace places[16];
  };
  // What warps put together at the end lies where stages were.
  struct Meeting {
    float tops[kWarps][kRows], totals[kWarps][kRows], shares[kWarps][kRows], lse[kRows];
    float sums[kWarps * Product::kMaxRows * kHeadSize];
  };
  static_assert(sizeof(Meeting) <= kWarps * kStages * sizeof(Stage), "");
  static constexpr int kSharedBytes = Product::kQueryBytes + kWarps * kStages * static_cast<int>(sizeof(Stage));

  // Loads a warp's entries ahead: each thread knows where one of the next 16 is.
  struct Loader {
    const AttendParams& p;
    const Sequence& row;
    int head, first, end;
    Stage* stages;
    Place next;

    KVM_DEVICE int entry(int number) const { return first + (number * kWarps + device::warp()) * 16; }

    // Block ids of the entries after these, so that they are there when they are needed.
    KVM_DEVICE void look_up(int number) {
      const int mine = entry(number) + device::lane() % 16;
      next = mine < end ? row.find(p, mine) : Place{0, 0};
    }

    KVM_DEVICE void load(int number, int stage) {
      const int lane = device::lane(), from = entry(number), mine = from + lane % 16;
      Stage& to = stages[stage];
      const EntryPlace place = row.place_of(p, head, mine, next);
      if (lane < 16) {
        to.places[lane] = place;
        device::copy_word(&to.votes[lane], p.log_votes + plane_at(p, place, head), mine < end && mine < row.front);
      }
      const int64_t offset = cell_at(p, place, head);
      KVM_UNROLL
      for (int i = 0; i < kChunks / 2; ++i) {
        const int at = 32 * i + lane, r = at / kChunks, chunk = at % kChunks;
        const int64_t source = device::shuffle(offset, r) + 16 * chunk;
        const bool live = from + r < end && chunk * kChunk < p.head_size;
        device::copy_chunk(to.keys + Entries::at(r, chunk), p.keys + source, live);
        device::copy_chunk(to.values + Entries::at(r, chunk), p.values + source, live);
      }
    }
  };

  static KVM_DEVICE void run(const AttendParams& p) {
    const int head = device::block_x(), place = device::block_y(), warp = device::warp();
    const int number = p.pieces[place];
    if (number < 0) return;
    const Sequence row(p, number, head);
    const int piece = place - row.first_piece, size = row.piece_size(), first = piece * size;
    if (first >= row.seen) return;
    const int end = first + size < row.seen ? first + size : row.seen;
    const int rows = row.num_queries * p.group;

    char* query = device::shared_memory();
    Stage* all = reinterpret_cast<Stage*>(query + Product::kQueryBytes);
    const Chunk zeros = {0, 0, 0, 0};
    Loader loader{p, row, head, first, end, all + warp * kStages, Place{0, 0}};
    loader.look_up(0);
    for (int i = device::thread(); i < kRows * kChunks; i += kThreads) {
      const int r = i / kChunks, chunk = i % kChunks;
      const int64_t token = row.start_token + r / p.group;
      const T* from = static_cast<const T*>(p.query) + token * p.query_token +
                      (head * p.group + r % p.group) * p.query_head + chunk * kChunk;
      Chunk x = zeros;
      if (r < rows && chunk * kChunk < p.head_size) x = *reinterpret_cast<const Chunk*>(from);
      Product::put_query(query, r, chunk, x);
    }
    device::barrier();

    const int count = (end - first + 15) / 16, mine = (count - warp + kWarps - 1) / kWarps;
    KVM_UNROLL
    for (int i = 0; i < kStages - 1; ++i) {
      if (i < mine) {
        loader.load(i, i);
        loader.look_up(i + 1);
      }
      device::commit_copies();
    }
    Product product;
    product.start(p, row, query);
    int stage = 0;
    for (int i = 0; i < mine; ++i) {
      device::wait_copies<kStages - 2>();
      device::warp_barrier();  // all threads' copies are there, and what the stage before held is not needed any more
      if (i + kStages - 1 < mine) {
        loader.load(i + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        loader.look_up(i + kStages);
      }
      device::commit_copies();
      const Stage& at = loader.stages[stage];
      const Step<EntryPlace> step{at.keys, at.values, at.votes, at.places, loader.entry(i), end};
      product.step(p, row, head, query, step);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    device::wait_copies<0>();
    device::barrier();

    Meeting& meeting = *reinterpret_cast<Meeting*>(all);
    product.give_levels(meeting.tops[warp], meeting.totals[warp]);
    device::barrier();
    if (device::thread() < rows) {
      const int r = device::thread();
      const bool has_sink = p.sinks != nullptr && piece == 0;  // it counts in one piece
      const float sink = has_sink ? p.sinks[head * p.group + r % p.group] * kLog2E : kNoLogit;
      float top = sink, total = 0.0f;
      for (int w = 0; w < kWarps; ++w) top = larger(top, meeting.tops[w][r]);
      if (has_sink) total = device::exp2(sink - top);
      for (int w = 0; w < kWarps; ++w) total += meeting.totals[w][r] * device::exp2(meeting.tops[w][r] - finite(top));
      for (int w = 0; w < kWarps; ++w)
        meeting.shares[w][r] = total > 0.0f ? device::exp2(meeting.tops[w][r] - finite(top)) / total : 0.0f;
      meeting.lse[r] = total > 0.0f ? finite(top) + device::log2(total) : kNoLogit;
    }
    device::barrier();
    product.give_sums(meeting.sums + warp * rows * kHeadSize, meeting.shares[warp], rows);
    device::barrier();
    const int64_t base = (static_cast<int64_t>(place) * p.heads + head) * kRows;
    if (device::thread() < rows) p.lse[base + device::thread()] = meeting.lse[device::thread()];
    for (int i = device::thread(); i < rows * kHeadSize; i += kThreads) {
      const int r = i / kHeadSize, dim = i % kHeadSize;
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += meeting.sums[(w * rows + r) * kHeadSize + dim];
      if (row.num_pieces > 1) p.partial[(base + r) * kHeadSize + dim] = sum;
      else if (dim < p.head_size)
        store_output(p, (row.start_token + r / p.group) * p.output_token +
                            (head * p.group + r % p.group) * p.output_head + dim, sum);
    }
  }
};

// What scores get from entries whose logits are not kept: these are computed once more from the keys, one entry by each
// thread.
template <class T, int kHeadSize>
struct Recomputed {
  static constexpr int kChunk = 16 / sizeof(T), kTogether = 4;  // rows that share a reading of the key

  // Puts a row's queries into shared memory, [rows, kHeadSize]; a barrier must follow.
  static KVM_DEVICE void put_queries(float* queries, const AttendParams& p, const Row& row, int head, int threads) {
    const int chunks = p.head_size / kChunk;
    for (int i = device::thread(); i < row.num_queries * p.group * chunks; i += threads) {
      const int r = i / chunks, chunk = i % chunks;
      const T* from = static_cast<const T*>(p.query) + (row.start_token + r / p.group) * p.query_token +
                      (head * p.group + r % p.group) * p.query_head + chunk * kChunk;
      float x[kChunk];
      device::unpack(x, *reinterpret_cast<const Chunk*>(from), T());
      KVM_UNROLL
      for (int j = 0; j < kChunk; ++j) queries[r * kHeadSize + chunk * kChunk + j] = x[j];
    }
  }

  // The rows' probabilities of an entry, times their weights. levels: log2 of the sums of exponentials.
  static KVM_DEVICE float added(const AttendParams& p, const PagedRow& row, const PagedPlace& place, int head,
                                int entry, const float* queries, const float* levels, const float* weights) {
    const int rows = row.num_queries * p.group;
    const char* key = p.keys + cell_at(p, place, head);
    const float vote = p.log_votes[plane_at(p, place, head)] * kLog2E;
    float sum = 0.0f;
    for (int first = 0; first < rows; first += kTogether) {
      float logits[kTogether];
      KVM_UNROLL
      for (int i = 0; i < kTogether; ++i) logits[i] = 0.0f;
#pragma unroll 2
      for (int chunk = 0; chunk < p.head_size / kChunk; ++chunk) {
        float x[kChunk];
        device::unpack(x, reinterpret_cast<const Chunk*>(key)[chunk], T());
        KVM_UNROLL
        for (int i = 0; i < kTogether; ++i) {
          if (first + i >= rows) continue;
          const float* query = queries + (first + i) * kHeadSize + chunk * kChunk;
          KVM_UNROLL
          for (int j = 0; j < kChunk; ++j) logits[i] += query[j] * x[j];
        }
      }
      KVM_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const int r = first + i;
        if (r < rows && entry <= row.old + r / p.group)
          sum += device::exp2(logit_of(p, logits[i]) + vote - levels[r]) * weights[r];
      }
    }
    return sum;
  }
};

// Puts pieces together, and updates scores from the logits that were kept. Grid: heads; `num_combined` blocks, one for
// each of `query_rows` rows of queries of each of the longest sequences, which alone may have several pieces, and then
// kUpdates for each piece, which share its entries: so many because a thread has 32 bytes or so of an entry under way,
// and those of fewer would not be as many as a GPU can load meanwhile. T: of keys and queries, where heads of some rows
// have pages of their own; void: nowhere.
template <int kHeadSize, class T>
struct Finish {
  typedef AttendParams Params;
  static constexpr bool kPages = !std::is_void<T>::value;
  typedef typename std::conditional<kPages, PagedRow, Row>::type Sequence;
  static constexpr int kThreads = 128, kBlocks = kPages ? 6 : 8, kLevelBytes = 2 * kRows * 4;
  static constexpr int kSharedBytes = kLevelBytes + (kPages ? kRows * kHeadSize * 4 : 0);

  static KVM_DEVICE void run(const AttendParams& p) {
    const int head = device::block_x(), place = device::block_y(), update_place = place - p.num_combined;
    const bool combines = update_place < 0;
    const int piece = update_place / kUpdates, number = combines ? p.order[place / p.query_rows] : p.pieces[piece];
    if (number < 0) return;
    const Sequence row(p, number, head);
    if (combines) {
      const int r = place % p.query_rows;
      if (row.num_pieces > 1 && r < row.num_queries * p.group) combine(p, row, head, r);
    } else if (row.keeps_logits()) {
      update(p, row, head, piece - row.first_piece, update_place % kUpdates);
    }
  }

 private:
  // Sums of exponentials of a row of queries over its sequence's pieces.
  struct Levels {
    const float* lse;  // of the first piece
    int64_t stride;
    int count;         // pieces that have entries
    float top, total;  // total: of all, over 2^top

    // By all threads of a warp.
    KVM_DEVICE Levels(const AttendParams& p, const Row& row, int head, int r)
        : lse(p.lse + (static_cast<int64_t>(row.first_piece) * p.heads + head) * kRows + r),
          stride(static_cast<int64_t>(p.heads) * kRows),
          count((row.seen + row.piece_size() - 1) / row.piece_size()),
          top(kNoLogit),
          total(0.0f) {
      for (int piece = device::lane(); piece < count; piece += 32) top = larger(top, lse[piece * stride]);
      for (int mask = 1; mask < 32; mask *= 2) top = larger(top, device::shuffle_xor(top, mask));
      for (int piece = device::lane(); piece < count; piece += 32) total += share(piece);
      for (int mask = 1; mask < 32; mask *= 2) total += device::shuffle_xor(total, mask);
    }

    KVM_DEVICE float share(int piece) const { return device::exp2(lse[piece * stride] - finite(top)); }
  };

  static KVM_DEVICE void combine(const AttendParams& p, const Row& row, int head, int r) {
    const Levels levels(p, row, head, r);
    for (int dim = device::thread(); dim < p.head_size; dim += kThreads) {
      const float* from = p.partial + (levels.lse - p.lse) * kHeadSize + dim;
      float sum = 0.0f;
#pragma unroll 8
      for (int piece = 0; piece < levels.count; ++piece)
        sum += levels.share(piece) * from[piece * levels.stride * kHeadSize];
      store_output(p, (row.start_token + r / p.group) * p.output_token +
                          (head * p.group + r % p.group) * p.output_head + dim,
                   levels.total > 0.0f ? sum / levels.total : 0.0f);
    }
  }

  // Of one of the row's pieces. part: which of its kUpdates blocks this is.
  static KVM_DEVICE void update(const AttendParams& p, const Sequence& row, int head, int piece, int part) {
    const int size = row.piece_size(), first = piece * size + part * kThreads;
    const int end = (piece + 1) * size < row.seen ? (piece + 1) * size : row.seen;
    if (first >= end) return;
    const int rows = row.num_queries * p.group;
    float* levels = reinterpret_cast<float*>(device::shared_memory());
    float* weights = levels + kRows;
    float* queries = levels + kLevelBytes / 4;
    if constexpr (kPages) {
      if (row.pages != nullptr) Recomputed<T, kHeadSize>::put_queries(queries, p, row, head, kThreads);
    }
    for (int r = device::warp(); r < rows; r += kThreads / 32) {
      const Levels found(p, row, head, r);
      if (device::lane() == 0) {
        levels[r] = found.total > 0.0f ? finite(found.top) + device::log2(found.total) : 0.0f;
        weights[r] = power(row.decay, row.num_queries - 1 - r / p.group);
      }
    }
    device::barrier();
    const float shrink = power(row.decay, row.num_queries);
    constexpr int kTogether = kUpdates * kThreads;
    int entry = first + device::thread();
    Place next = entry < end ? row.find(p, entry) : Place{0, 0};
    for (; entry < end; entry += kTogether) {
      const auto place = row.place_of(p, head, entry, next);  // the next one is looked up meanwhile
      if (entry + kTogether < end) next = row.find(p, entry + kTogether);
      float added = 0.0f;
      if (is_kept(place)) {
        const float* logits = p.kept + kept_at(p, place, head);
#pragma unroll 4
        for (int r = 0; r < rows; ++r) added += device::exp2(logits[r * p.block_size] - levels[r]) * weights[r];
      } else if constexpr (kPages) {
        added = Recomputed<T, kHeadSize>::added(p, row, place, head, entry, queries, levels, weights);
      }
      const int64_t at = plane_at(p, place, head);
      // A new token's statistics start from nothing, whatever its place held.
      const bool is_new = entry >= row.old;
      p.scores[at] = (is_new ? 0.0f : p.scores[at] * shrink) + added;
      const int counted = row.mode == kMean ? row.num_queries - (is_new ? entry - row.old : 0) : 0;
      p.aux[at] = (is_new ? 0.0f : p.aux[at]) + static_cast<float>(counted);
    }
  }
};

}  // namespace kvmerge
