// What the kernels are to the rest of the program: no CUDA header is needed to call them.
#pragma once

#include <cstdint>

namespace kvmerge {

struct AttendParams;
struct DivideParams;

// Where something runs. stream: a cudaStream_t.
struct Where {
  int device;
  void* stream;
};

// The lists of pieces that `attend` is given. Throws std::runtime_error, as all launches do.
void divide(const DivideParams& params, const Where& where);

// Attention, then the launch that puts pieces together and updates scores. bits: of an element; head_size: as it is
// padded, 64, 128 or 256. Heads of some rows have pages of their own where there are tables.
void attend(const AttendParams& params, bool is_bfloat16, int bits, int head_size, const Where& where);

// Shared memory of a block of `attend`, which may be more than a GPU has for one. pages: with tables.
int attend_bytes(int query_rows, int bits, int head_size, bool pages);

// "emulated", or the compute capabilities that there is machine code for.
const char* targets();

}  // namespace kvmerge
