// What kernels use of a GPU, for nvcc; emulated.h has the same for a CPU. Kernels are written for both.
//
// A kernel is a class with run(Params), kThreads, and kBlocks, so many of which a multiprocessor has registers for at
// least; `launch` starts it. Whatever a thread does between two calls of
// `barrier` or `warp_barrier` may happen in any order among threads.
#pragma once

#include <cstdint>

#if !defined(__CUDACC__)
#include "emulated.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define KVM_DEVICE __device__ __forceinline__
#define KVM_UNROLL _Pragma("unroll")

namespace kvmerge {

typedef __nv_bfloat16 Bf16;
typedef __half F16;
typedef uint4 Chunk;  // 16 bytes, the unit of all traffic of keys and values

namespace device {

KVM_DEVICE int thread() { return threadIdx.x; }
KVM_DEVICE int lane() { return threadIdx.x % 32; }
KVM_DEVICE int warp() { return threadIdx.x / 32; }
KVM_DEVICE int block_x() { return blockIdx.x; }
KVM_DEVICE int block_y() { return blockIdx.y; }

// Aligned to 128 bytes.
KVM_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

KVM_DEVICE void barrier() { __syncthreads(); }
KVM_DEVICE void warp_barrier() { __syncwarp(); }

template <class T>
KVM_DEVICE T shuffle(T x, int from) {
  return __shfl_sync(0xffffffffu, x, from);
}
template <class T>
KVM_DEVICE T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
KVM_DEVICE bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }

KVM_DEVICE float exp2(float x) { return ::exp2f(x); }
KVM_DEVICE float log2(float x) { return ::log2f(x); }
KVM_DEVICE float exp(float x) { return ::expf(x); }
KVM_DEVICE float log(float x) { return ::logf(x); }

KVM_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Global to shared memory without registers; zeros where not live, and then nothing is read. Done when waited for.
KVM_DEVICE void copy_chunk(void* to, const void* from, bool live) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(live ? 16 : 0)
               : "memory");
}
KVM_DEVICE void copy_word(void* to, const void* from, bool live) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(live ? 4 : 0)
               : "memory");
}
// Closes a group of this thread's copies.
KVM_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the latest kPending groups of this thread are done.
template <int kPending>
KVM_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices of 16 bits; lane l gives the address of row l % 8 of matrix l / 8, and gets of each matrix the
// elements 2 * (l % 4) and the next one of row l / 4.
KVM_DEVICE void load_matrices(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same of the transposed matrices.
KVM_DEVICE void load_transposed(uint32_t (&x)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

// sum += a b: m16n8k16 (PTX ISA, fragments of mma.m16n8k16).
KVM_DEVICE void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KVM_DEVICE void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, F16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

KVM_DEVICE float to_float(float x) { return x; }
KVM_DEVICE float to_float(Bf16 x) { return __bfloat162float(x); }
KVM_DEVICE float to_float(F16 x) { return __half2float(x); }
KVM_DEVICE void from_float(float& to, float x) { to = x; }
KVM_DEVICE void from_float(Bf16& to, float x) { to = __float2bfloat16_rn(x); }
KVM_DEVICE void from_float(F16& to, float x) { to = __float2half_rn(x); }

// Elements of a chunk.
KVM_DEVICE void unpack(float (&x)[4], Chunk chunk, float) {
  x[0] = __uint_as_float(chunk.x);
  x[1] = __uint_as_float(chunk.y);
  x[2] = __uint_as_float(chunk.z);
  x[3] = __uint_as_float(chunk.w);
}
KVM_DEVICE void unpack(float (&x)[8], Chunk chunk, Bf16) {
  const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  KVM_UNROLL
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}
KVM_DEVICE void unpack(float (&x)[8], Chunk chunk, F16) {
  const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  KVM_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// Two numbers of 16 bits, the first in the lower half.
KVM_DEVICE uint32_t pack(float first, float second, Bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
KVM_DEVICE uint32_t pack(float first, float second, F16) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace device

struct Grid {
  int x, y;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    run_kernel(const __grid_constant__ typename Kernel::Params params) {
  Kernel::run(params);
}

// Throws std::runtime_error. What failed is forgotten then, so that the next launch does not find it and fail too.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes a device the current one as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != before_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Lets the blocks of a kernel have as much shared memory as the current device gives to one, and the device keep as much
// for them as it has, so that several find room on a multiprocessor. It is the same whatever a launch takes: a limit that
// a later launch lowers might hold for a graph that was captured before.
template <class Kernel>
void allow_shared_memory(int device) {
  int most = 0;
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  check_cuda(cudaFuncSetAttribute(run_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
             "shared memory");
  check_cuda(cudaFuncSetAttribute(run_kernel<Kernel>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "shared memory");
}

// Starts a kernel on a stream; waits for nothing, so that a graph may capture it. Throws std::runtime_error.
template <class Kernel>
void launch(const Grid& grid, int shared_bytes, const typename Kernel::Params& params, int device, void* stream) {
  const DeviceGuard guard(device);
  if (shared_bytes > 48 << 10) allow_shared_memory<Kernel>(device);
  const dim3 blocks(grid.x, grid.y);
  run_kernel<Kernel><<<blocks, Kernel::kThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(params);
  check_cuda(cudaGetLastError(), "launch");
}

}  // namespace kvmerge

#endif
