// One launch that carries out a compaction: rows are written to the places that take them, entries that stay are moved
// to theirs, and metadata are written. See reference.merge_entries for what the arguments mean.
//
// A block has one head of a sequence layer, so that it alone reads and writes that head's slots. All that is written is
// in shared memory before the first of it is stored, because places may overlap; where whole rows of keys do not fit,
// it is done for some columns after the others, which do not depend on each other.
#pragma once

#include "arguments.h"
#include "device.h"

namespace kvmerge {

template <class T>
struct Merge {
  typedef MergeParams Params;
  static constexpr int kThreads = 256, kBlocks = 2, kChunk = 16 / sizeof(T);

  enum { kStays = -1, kEmpty = -2 };

  // What a block knows of its head, and its arrays in shared memory.
  struct Head {
    int number, head, front, gap;
    const int32_t *blocks, *destination;
    const int64_t* planes;
    float* statistics[3];  // planes of log votes, scores and aux
    int32_t* positions;

    char* staging;                     // [capacity]
    int *what, *row, *list;  // [places]: the entry that comes there, or kStays or kEmpty; the row of new keys and
                             // values, or negative; places that are written to
    int* count;  // places in the list

    KVM_DEVICE explicit Head(const MergeParams& p) {
      number = device::block_x();
      head = number % p.heads;
      const int seq_layer = number / p.heads;
      front = static_cast<int>(p.segments[3 * seq_layer]);
      gap = static_cast<int>(p.segments[3 * seq_layer + 1]) - front;
      blocks = p.blocks + seq_layer * p.blocks_row;
      destination = p.destination + seq_layer * p.destination_row;
      planes = p.addresses + 6 * p.layer[seq_layer];
      for (int i = 0; i < 3; ++i) statistics[i] = reinterpret_cast<float*>(planes[2 + i]);
      positions = reinterpret_cast<int32_t*>(planes[5]);

      staging = device::shared_memory();
      what = reinterpret_cast<int*>(staging + p.capacity);
      row = what + p.num_places;
      list = row + p.num_places;
      count = list + p.num_places;
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
    write_metadata(p, h);
    write_plane(p, h, 0, p.keys);
    write_plane(p, h, 1, p.values);
  }

 private:
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

  static KVM_DEVICE void write_metadata(const MergeParams& p, const Head& h) {
    const int64_t given = static_cast<int64_t>(h.number) * p.num_places;
    for (int i = device::thread(); i < p.num_places; i += kThreads) {
      const int64_t at = plane_at(p, h, place_of_slot(p, h.destination, i));
      h.statistics[0][at] = p.log_votes[given + i];
      h.statistics[1][at] = p.scores[given + i];
      h.statistics[2][at] = p.aux[given + i];
      h.positions[at] = static_cast<int>(p.positions[given + i]);
    }
  }

  // Writes the listed places of keys or values. rows: [heads, num_rows, head_size], or null: none are new.
  static KVM_DEVICE void write_plane(const MergeParams& p, const Head& h, int which, const float* rows) {
    const int count = *h.count, chunks = p.head_size / kChunk;
    if (count == 0) return;
    const bool has_rows = rows != nullptr;
    char* plane = reinterpret_cast<char*>(h.planes[which]);
    const int room = p.capacity / 16 / count, width = room < chunks ? room : chunks;
    for (int first = 0; first < chunks; first += width) {
      const int now = chunks - first < width ? chunks - first : width;
      for (int i = device::thread(); i < count * now; i += kThreads) {
        const int place = h.list[i / now], chunk = first + i % now, row = h.row[place], what = h.what[place];
        char* to = h.staging + 16 * i;
        if (row >= 0 && has_rows) {
          const float* from = rows + (static_cast<int64_t>(h.number) * p.num_rows + row) * p.head_size + chunk * kChunk;
          float x[kChunk];
          KVM_UNROLL
          for (int j = 0; j < kChunk; ++j) x[j] = from[j];
          *reinterpret_cast<Chunk*>(to) = device::pack(x, T());
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
