// One launch that carries out a compaction: sums of keys and values are written to the places that take them, entries
// that stay are moved to theirs, and metadata are written. See kernels/merge.py for what the arguments mean.
//
// A block has one head of a unit, so that it alone reads and writes that head's slots. All that is written is in shared
// memory before the first of it is stored, because places may overlap; where whole rows of keys do not fit, it is done
// for some columns after the others, which do not depend on each other.
#pragma once

#include "arguments.h"
#include "device.h"

namespace kvmerge {

template <class T>
struct Merge {
  typedef MergeParams Params;
  static constexpr int kThreads = 256, kBlocks = 2, kChunk = 16 / sizeof(T), kInFlight = 4;

  enum { kStays = -1, kEmpty = -2 };

  // What a block knows of its head, and its arrays in shared memory.
  struct Head {
    int number, head, front, gap;
    const int32_t *blocks, *destination;
    const int64_t* planes;
    float* statistics[3];  // planes of log votes, scores and aux
    int32_t* positions;

    char* staging;                     // [capacity]
    int *what, *row, *list;            // [places]: the entry that comes there, or kStays or kEmpty; the row of sums, or
                                       // negative; places that are written to
    int *joins, *order, *starts;       // [members]: their rows; members, row by row; [rows + 1]: where a row's begin
    float *key_shares, *value_shares;  // [members], kZip
    float *votes, *gains;              // [rows], kZip: log votes, and what is added to the score
    int* newest;                       // [rows], kZip: positions
    int* count;                        // places in the list

    KVM_DEVICE explicit Head(const MergeParams& p) {
      number = device::block_x();
      head = number % p.heads;
      const int unit = number / p.heads;
      front = static_cast<int>(p.segments[3 * unit]);
      gap = static_cast<int>(p.segments[3 * unit + 1]) - front;
      blocks = p.blocks + unit * p.blocks_row;
      destination = p.destination + unit * p.destination_row;
      planes = p.addresses + 6 * p.layer[unit];
      for (int i = 0; i < 3; ++i) statistics[i] = reinterpret_cast<float*>(planes[2 + i]);
      positions = reinterpret_cast<int32_t*>(planes[5]);

      staging = device::shared_memory();
      what = reinterpret_cast<int*>(staging + p.capacity);
      row = what + p.num_places;
      list = row + p.num_places;
      joins = list + p.num_places;
      order = joins + p.num_members;
      starts = order + p.num_members;
      key_shares = reinterpret_cast<float*>(starts + p.num_rows + 1);
      value_shares = key_shares + p.num_members;
      votes = value_shares + p.num_members;
      gains = votes + p.num_rows;
      newest = reinterpret_cast<int*>(gains + p.num_rows);
      count = newest + p.num_rows;
    }
  };

  // Where a slot lies.
  struct Place {
    int block, offset;
  };
  static KVM_DEVICE Place place_of_slot(const MergeParams& p, const int32_t* blocks, int slot) {
    const int index = slot / p.block_size;
    return Place{blocks[index], slot - index * p.block_size};
  }
  static KVM_DEVICE Place place_of_entry(const MergeParams& p, const Head& h, int entry) {
    return place_of_slot(p, h.blocks, entry < h.front ? entry : entry + h.gap);
  }
  static KVM_DEVICE int64_t plane_at(const MergeParams& p, const Head& h, Place place) {
    return place.block * p.plane_block + h.head * p.plane_head + place.offset;
  }
  static KVM_DEVICE int64_t cell_at(const MergeParams& p, const Head& h, Place place, int chunk) {
    return place.block * p.cell_block + h.head * p.cell_head + place.offset * p.cell_slot + 16 * chunk;
  }

  static KVM_DEVICE void run(const MergeParams& p) {
    const Head h(p);
    list_places(p, h);
    if (p.kind == kSums || p.kind == kZip) list_members(p, h);
    if (p.kind == kZip) weigh(p, h);
    write_metadata(p, h);
    write_plane(p, h, 0, p.keys, shares_of(p, h, p.key_weights, h.key_shares));
    write_plane(p, h, 1, p.values, shares_of(p, h, p.value_weights, h.value_shares));
  }

 private:
  // The head's weights of a plane: as they are given, or as they were found; null: the plane has no sums.
  static KVM_DEVICE const float* shares_of(const MergeParams& p, const Head& h, const float* given,
                                           const float* found) {
    if (p.kind == kZip) return found;
    return p.kind == kSums && given ? given + static_cast<int64_t>(h.number) * p.num_members : nullptr;
  }
  static KVM_DEVICE int entry_of_member(const MergeParams& p, const Head& h, int member) {
    return static_cast<int>(p.members[static_cast<int64_t>(h.number) * p.num_members + member]);
  }
  static KVM_DEVICE int kept_at(const MergeParams& p, const Head& h, int place) {
    return static_cast<int>(p.kept[static_cast<int64_t>(h.number) * p.num_places + place]);
  }

  // What comes to each place, and which places are written to, in any order.
  static KVM_DEVICE void list_places(const MergeParams& p, const Head& h) {
    if (device::thread() == 0) *h.count = 0;
    for (int i = device::thread(); i < p.num_places; i += kThreads) {
      const int entry = kept_at(p, h, i);
      int what = kEmpty;
      if (entry >= 0) {
        const Place from = place_of_entry(p, h, entry), to = place_of_slot(p, h.destination, i);
        what = from.block == to.block && from.offset == to.offset ? static_cast<int>(kStays) : entry;
      }
      h.what[i] = what;
      h.row[i] = -1;
    }
    device::barrier();
    for (int r = device::thread(); r < p.num_rows; r += kThreads) {
      const int place = static_cast<int>(p.places[static_cast<int64_t>(h.number) * p.num_rows + r]);
      if (place >= 0) h.row[place] = r;
    }
    device::barrier();
    for (int i = device::thread(); i < p.num_places; i += kThreads)
      if (h.what[i] != kStays || h.row[i] >= 0) h.list[device::shared_add(h.count, 1)] = i;
    device::barrier();
  }

  // Members by row, in each row in their own order, so that sums do not change from run to run.
  static KVM_DEVICE void list_members(const MergeParams& p, const Head& h) {
    for (int i = device::thread(); i < p.num_members; i += kThreads)
      h.joins[i] = entry_of_member(p, h, i) < 0
                       ? -1
                       : static_cast<int>(p.rows[static_cast<int64_t>(h.number) * p.num_members + i]);
    device::barrier();
    for (int r = device::thread(); r < p.num_rows; r += kThreads) {
      int size = 0;
      for (int i = 0; i < p.num_members; ++i) size += h.joins[i] == r;
      h.starts[r + 1] = size;
    }
    device::barrier();
    if (device::warp() == 0) {
      if (device::lane() == 0) h.starts[0] = 0;
      int before = 0;
      for (int first = 0; first < p.num_rows; first += 32) {
        const int r = first + device::lane();
        int sum = r < p.num_rows ? h.starts[r + 1] : 0;
        for (int distance = 1; distance < 32; distance *= 2) {
          const int other = device::shuffle(sum, device::lane() - distance);
          if (device::lane() >= distance) sum += other;
        }
        if (r < p.num_rows) h.starts[r + 1] = before + sum;
        before += device::shuffle(sum, 31);
      }
    }
    device::barrier();
    for (int r = device::thread(); r < p.num_rows; r += kThreads) {
      int at = h.starts[r];
      for (int i = 0; i < p.num_members; ++i)
        if (h.joins[i] == r) h.order[at++] = i;
    }
    device::barrier();
  }

  static KVM_DEVICE float vote_of(const MergeParams& p, const Head& h, int entry) {
    return entry < h.front ? h.statistics[0][plane_at(p, h, place_of_entry(p, h, entry))] : 0.0f;
  }
  static KVM_DEVICE int position_of(const MergeParams& p, const Head& h, int entry) {
    return entry < h.front ? h.positions[plane_at(p, h, place_of_entry(p, h, entry))] : entry + h.gap;
  }

  // KeepKV eq. 25, as policies/mergers/zip_merge.py has it: a thread does a row.
  static KVM_DEVICE void weigh(const MergeParams& p, const Head& h) {
    const float* importance = p.importance + static_cast<int64_t>(h.number) * p.num_entries;
    for (int r = device::thread(); r < p.num_rows; r += kThreads) {
      const int place = static_cast<int>(p.places[static_cast<int64_t>(h.number) * p.num_rows + r]);
      if (place < 0) continue;
      const int begin = h.starts[r], end = h.starts[r + 1], carrier = kept_at(p, h, place);
      float top_weight = -__builtin_huge_valf(), top_vote = top_weight;
      int newest = position_of(p, h, carrier);
      const bool fixed = p.fixed[static_cast<int64_t>(h.number) * p.num_entries + carrier] != 0;
      for (int i = begin; i < end; ++i) {
        const int entry = entry_of_member(p, h, h.order[i]);
        top_weight = fmaxf(top_weight, importance[entry]);
        top_vote = fmaxf(top_vote, vote_of(p, h, entry));
        const int position = position_of(p, h, entry);
        if (!fixed && position > newest) newest = position;
      }
      float weights = 0.0f, votes = 0.0f, mean = 0.0f;
      for (int i = begin; i < end; ++i) {
        const int entry = entry_of_member(p, h, h.order[i]);
        const float weight = device::exp(importance[entry] - top_weight), vote = vote_of(p, h, entry);
        weights += weight;
        votes += device::exp(vote - top_vote);
        mean += weight * (importance[entry] - vote);
      }
      mean /= weights;  // L_bar
      const float log_total = top_weight + device::log(weights), log_votes = top_vote + device::log(votes);
      const float level = log_total - log_votes, factor = level / mean;  // L_r
      const bool scales = p.zip_mode == kScale  ? factor > 0.0f && factor <= kMaxScale
                          : p.zip_mode == kAuto ? fabsf(factor - 1.0f) <= kAutoTolerance
                                                : false;
      for (int i = begin; i < end; ++i) {
        const float share = device::exp(importance[entry_of_member(p, h, h.order[i])] - log_total);
        h.value_shares[h.order[i]] = share;
        h.key_shares[h.order[i]] = scales ? share * factor : share;
      }
      h.votes[r] = scales ? log_votes : log_total - mean;
      h.gains[r] = (scales ? level : mean) - (importance[carrier] - vote_of(p, h, carrier));
      h.newest[r] = newest;
    }
    device::barrier();
  }

  // Metadata that are not given are read, all of them before the first is written.
  static KVM_DEVICE void write_metadata(const MergeParams& p, const Head& h) {
    const int64_t given = static_cast<int64_t>(h.number) * p.num_places;
    const bool reads = p.log_votes == nullptr;
    float* staged = reinterpret_cast<float*>(h.staging);
    if (reads) {
      for (int i = device::thread(); i < p.num_places; i += kThreads) {
        const int entry = kept_at(p, h, i);
        float* to = staged + 4 * i;
        to[0] = -__builtin_huge_valf();
        to[1] = to[2] = 0.0f;
        int position = -1;
        if (entry >= 0) {
          const int64_t at = plane_at(p, h, place_of_entry(p, h, entry));
          to[0] = vote_of(p, h, entry);
          to[1] = h.statistics[1][at];
          to[2] = h.statistics[2][at];
          position = position_of(p, h, entry);
        }
        reinterpret_cast<int*>(to)[3] = position;
      }
    }
    device::barrier();
    for (int i = device::thread(); i < p.num_places; i += kThreads) {
      const float* from = staged + 4 * i;
      float vote = reads ? from[0] : p.log_votes[given + i], score = reads ? from[1] : p.scores[given + i];
      const float aux = reads ? from[2] : p.aux[given + i];
      int position = reads ? reinterpret_cast<const int*>(from)[3] : static_cast<int>(p.positions[given + i]);
      if (p.kind == kZip && h.row[i] >= 0) {
        vote = h.votes[h.row[i]];
        score += h.gains[h.row[i]];
        position = h.newest[h.row[i]];
      }
      const int64_t at = plane_at(p, h, place_of_slot(p, h.destination, i));
      h.statistics[0][at] = vote;
      h.statistics[1][at] = score;
      h.statistics[2][at] = aux;
      h.positions[at] = position;
    }
    device::barrier();
  }

  // A chunk of a row of sums.
  static KVM_DEVICE Chunk sum_members(const MergeParams& p, const Head& h, const char* plane, const float* shares,
                                      int row, int chunk) {
    float sum[kChunk];
    KVM_UNROLL
    for (int i = 0; i < kChunk; ++i) sum[i] = 0.0f;
    const int end = h.starts[row + 1];
    for (int first = h.starts[row]; first < end; first += kInFlight) {
      Chunk chunks[kInFlight];
      float share[kInFlight];
      KVM_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        chunks[i] = Chunk{0, 0, 0, 0};
        share[i] = 0.0f;
        if (first + i < end) {
          const int member = h.order[first + i];
          share[i] = shares[member];
          const Place place = place_of_entry(p, h, entry_of_member(p, h, member));
          chunks[i] = device::load_global(plane + cell_at(p, h, place, chunk));
        }
      }
      KVM_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        float x[kChunk];
        device::unpack(x, chunks[i], T());
        KVM_UNROLL
        for (int j = 0; j < kChunk; ++j) sum[j] += share[i] * x[j];
      }
    }
    return device::pack(sum, T());
  }

  // Writes the listed places of keys or values; rows: [heads, num_rows, head_size], shares: of the members.
  static KVM_DEVICE void write_plane(const MergeParams& p, const Head& h, int which, const float* rows,
                                     const float* shares) {
    const int count = *h.count, chunks = p.head_size / kChunk;
    if (count == 0) return;
    const bool has_rows = p.kind == kRowsGiven ? rows != nullptr : shares != nullptr;
    char* plane = reinterpret_cast<char*>(h.planes[which]);
    const int room = p.capacity / 16 / count, width = room < chunks ? room : chunks;
    for (int first = 0; first < chunks; first += width) {
      const int now = chunks - first < width ? chunks - first : width;
      for (int i = device::thread(); i < count * now; i += kThreads) {
        const int place = h.list[i / now], chunk = first + i % now, row = h.row[place], what = h.what[place];
        char* to = h.staging + 16 * i;
        if (row >= 0 && has_rows && p.kind == kRowsGiven) {
          const float* from = rows + (static_cast<int64_t>(h.number) * p.num_rows + row) * p.head_size + chunk * kChunk;
          float x[kChunk];
          KVM_UNROLL
          for (int j = 0; j < kChunk; ++j) x[j] = from[j];
          *reinterpret_cast<Chunk*>(to) = device::pack(x, T());
        } else if (row >= 0 && has_rows) {
          *reinterpret_cast<Chunk*>(to) = sum_members(p, h, plane, shares, row, chunk);
        } else if (what >= 0) {
          device::copy_chunk(to, plane + cell_at(p, h, place_of_entry(p, h, what), chunk), true);
        } else if (what == kEmpty) {
          *reinterpret_cast<Chunk*>(to) = Chunk{0, 0, 0, 0};
        }
      }
      device::commit_copies();
      device::wait_copies<0>();
      device::barrier();  // everything is read; what a thread stores now it has staged itself
      for (int i = device::thread(); i < count * now; i += kThreads) {
        const int place = h.list[i / now], chunk = first + i % now;
        if (h.what[place] == kStays && !(h.row[place] >= 0 && has_rows)) continue;
        device::store_global(plane + cell_at(p, h, place_of_slot(p, h.destination, place), chunk),
                             *reinterpret_cast<const Chunk*>(h.staging + 16 * i));
      }
    }
  }
};

}  // namespace kvmerge
