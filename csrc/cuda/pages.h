// Fronts whose KV heads have pages of their own: see HeadPages in vllm_kvmerge/ops/types.py.
#pragma once

#include "device.h"

namespace kvmerge {

// The slots of one KV head of a block, in one of the layers.
struct Page {
  int layer, block, head;

  KVM_DEVICE bool operator==(const Page& other) const {
    return layer == other.layer && block == other.block && head == other.head;
  }
};

KVM_DEVICE Page page_of(int id, int heads, int layers) {
  // Ids of pages that hold something are not negative, and unsigned numbers are divided faster.
  const unsigned number = id, lane = number / heads;
  return Page{static_cast<int>(lane % layers), static_cast<int>(lane / layers), static_cast<int>(number % heads)};
}

// The front of one head in a table, as HeadPages.table makes it: the number of pages that lists have room for, then for
// each row and head its entries and its list. By default: none.
struct HeadFront {
  int num_entries = 0, room = 0;
  const int32_t* pages = nullptr;

  HeadFront() = default;
  // number: row * heads + head.
  KVM_DEVICE HeadFront(const int32_t* table, int64_t number) : room(table[0]) {
    const int32_t* found = table + 1 + number * (1 + room);
    num_entries = found[0];
    pages = found + 1;
  }
};

}  // namespace kvmerge
