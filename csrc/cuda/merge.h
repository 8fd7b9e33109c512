// One launch that carries out a compaction: rows are written to the places that take them, entries that stay are moved
// to theirs, and metadata are written. See reference.merge_entries for what the arguments mean.
//
// A block has one head of a sequence layer, so that it alone reads and writes that head's slots. All that is written is
// in shared memory before the first of it is stored, because places may overlap; where whole rows of keys do not fit,
// it is done for some columns after the others, which do not depend on each other.
#pragma once

#include "arguments.h"
#include "device.h"
#include "pages.h"

namespace kvmerge {

// kPages: heads have pages of their own, before or after.
template <class T, bool kPages>
struct Merge {
  typedef MergeParams Params;
  static constexpr int kThreads = 256, kBlocks = 2, kChunk = 16 / sizeof(T);

  enum { kStays = -1, kEmpty = -2 };

  // Where a slot lies.
  struct Place {
    Page page;
    int offset;

    KVM_DEVICE bool operator==(const Place& other) const { return page == other.page && offset == other.offset; }
  };

  // What a block knows of its head, and its arrays in shared memory.
  struct Head {
    int number, head, layer, front, gap;
    int num_places;  // that are written: with pages no more than the head has room for
    const int32_t *blocks, *destination;
    HeadFront pages, new_pages;
    const int64_t* planes;  // addresses, of its own layer

    char* staging;           // [capacity]
    int *what, *row, *list;  // [places]: the entry that comes there, or kStays or kEmpty; the row of new keys and
                             // values, or negative; places that are written to
    int* count;  // places in the list

    KVM_DEVICE explicit Head(const MergeParams& p) {
      number = device::block_x();
      head = number % p.heads;
      const int seq_layer = number / p.heads;
      layer = static_cast<int>(p.layer[seq_layer]);
      front = static_cast<int>(p.segments[3 * seq_layer]);
      gap = static_cast<int>(p.segments[3 * seq_layer + 1]) - front;
      num_places = p.num_places;
      blocks = p.blocks + seq_layer * p.blocks_row;
      destination = p.destination + seq_layer * p.destination_row;
      if constexpr (kPages) {
        if (p.pages != nullptr) pages = HeadFront(p.pages, number);
        if (p.new_pages != nullptr) {
          new_pages = HeadFront(p.new_pages, number);
          if (new_pages.num_entries < num_places) num_places = new_pages.num_entries;
        }
      }
      planes = p.addresses + 6 * layer;

      staging = device::shared_memory();
      what = reinterpret_cast<int*>(staging + p.capacity);
      row = what + p.num_places;
      list = row + p.num_places;
      count = list + p.num_places;
    }
  };

  static KVM_DEVICE Place in_blocks(const MergeParams& p, const Head& h, const int32_t* blocks, int slot) {
    const int index = slot / p.block_size;
    return Place{{h.layer, blocks[index], h.head}, slot - index * p.block_size};
  }
  static KVM_DEVICE Place in_pages(const MergeParams& p, const HeadFront& front, int slot) {
    const int index = slot / p.block_size, last = front.room - 1;
    const int id = front.pages[index < last ? index : last];
    return Place{page_of(id, p.heads, p.num_layers), slot - index * p.block_size};
  }
  static KVM_DEVICE bool is_in_pages(const Head& h, int entry) {
    return kPages && h.pages.pages != nullptr && entry < h.front;
  }
  // An entry that its head has no room for lies anywhere, and is dead.
  static KVM_DEVICE bool is_dead(const Head& h, int entry) {
    return is_in_pages(h, entry) && entry >= h.pages.num_entries;
  }
  static KVM_DEVICE Place place_of_entry(const MergeParams& p, const Head& h, int entry) {
    if (is_in_pages(h, entry)) return in_pages(p, h.pages, entry);
    return in_blocks(p, h, h.blocks, entry < h.front ? entry : entry + h.gap);
  }
  static KVM_DEVICE Place place_to_write(const MergeParams& p, const Head& h, int place) {
    if (kPages && h.new_pages.pages != nullptr) return in_pages(p, h.new_pages, place);
    return in_blocks(p, h, h.destination, place);
  }

  // Addresses of the planes of the layer that a place lies in, in the order of PagedKVCache.
  static KVM_DEVICE const int64_t* planes_of(const MergeParams& p, const Head& h, const Place& at) {
    return kPages ? p.addresses + 6 * at.page.layer : h.planes;
  }
  static KVM_DEVICE int64_t plane_at(const MergeParams& p, const Place& at) {
    return at.page.block * p.plane_block + at.page.head * p.plane_head + at.offset;
  }
  static KVM_DEVICE int64_t cell_at(const MergeParams& p, const Place& at, int chunk) {
    return at.page.block * p.cell_block + at.page.head * p.cell_head + at.offset * p.cell_slot + 16 * chunk;
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
    for (int i = device::thread(); i < h.num_places; i += kThreads) {
      const int entry = kept_at(p, h, i);
      int what = kEmpty;
      if (entry >= 0) {
        if (place_of_entry(p, h, entry) == place_to_write(p, h, i)) what = kStays;
        else if (!is_dead(h, entry)) what = entry;
      }
      h.what[i] = what;
      h.row[i] = -1;
    }
    device::barrier();
    for (int r = device::thread(); r < p.num_rows; r += kThreads) {
      const int place = static_cast<int>(p.places[static_cast<int64_t>(h.number) * p.num_rows + r]);
      if (place >= 0 && place < h.num_places) h.row[place] = r;
    }
    device::barrier();
    for (int i = device::thread(); i < h.num_places; i += kThreads)
      if (h.what[i] != kStays || h.row[i] >= 0) h.list[device::shared_add(h.count, 1)] = i;
    device::barrier();
  }

  static KVM_DEVICE void write_metadata(const MergeParams& p, const Head& h) {
    const int64_t given = static_cast<int64_t>(h.number) * p.num_places;
    for (int i = device::thread(); i < h.num_places; i += kThreads) {
      const Place to = place_to_write(p, h, i);
      const int64_t *planes = planes_of(p, h, to), at = plane_at(p, to);
      reinterpret_cast<float*>(planes[2])[at] = p.log_votes[given + i];
      reinterpret_cast<float*>(planes[3])[at] = p.scores[given + i];
      reinterpret_cast<float*>(planes[4])[at] = p.aux[given + i];
      reinterpret_cast<int32_t*>(planes[5])[at] = static_cast<int>(p.positions[given + i]);
    }
  }

  // Writes the listed places of keys or values. rows: [heads, num_rows, head_size], or null: none are new.
  static KVM_DEVICE void write_plane(const MergeParams& p, const Head& h, int which, const float* rows) {
    const int count = *h.count, chunks = p.head_size / kChunk;
    if (count == 0) return;
    const bool has_rows = rows != nullptr;
    char* own = reinterpret_cast<char*>(h.planes[which]);
    const auto cell = [&](const Place& at, int chunk) {
      return (kPages ? reinterpret_cast<char*>(planes_of(p, h, at)[which]) : own) + cell_at(p, at, chunk);
    };
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
          device::copy_chunk(to, cell(place_of_entry(p, h, what), chunk), true);
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
        device::store_global(cell(place_to_write(p, h, place), chunk),
                             *reinterpret_cast<const Chunk*>(h.staging + 16 * i));
      }
    }
  }
};

}  // namespace kvmerge
