#pragma once
// Hopper's bulk copies from memory into shared memory and the barriers that they complete on: thin wrappers of the PTX
// (ISA 8.0, "cp.async.bulk", "mbarrier"). Addresses of shared memory are 32-bit.

#include <cuda.h>

#include <cstdint>

namespace quern::cuda::tma {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Where in the ring of stages a walk is.
template <int kStages>
struct Ring {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// A barrier of `count` arrivals a phase.
__device__ __forceinline__ void init(std::uint32_t barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/// Lets the copy engine see barriers that were just initialised.
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Orders this thread's accesses to shared memory before the copy engine's later ones there: without it,
/// PTX orders no load or store of a thread against a bulk copy (ISA, "proxies").
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// All lanes of a warp arrive at a barrier that counts kWarpArrivals for each warp. One does for all; racecheck, which
/// does not follow __syncwarp there, needs them all (-DQUERN_RACECHECK=ON), which costs attention's gradient 2.6%.
#ifdef QUERN_RACECHECK
inline constexpr std::uint32_t kWarpArrivals = 32;
#else
inline constexpr std::uint32_t kWarpArrivals = 1;
#endif
__device__ __forceinline__ void arrive_as_warp(std::uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) arrive(barrier);
}
/// Arrives at the barrier that the block of this rank in the cluster has at the same address. Tells that reads are
/// done, and orders no writes for the other block: that would cost a fence of the whole GPU (docs/decisions/0012).
__device__ __forceinline__ void arrive_at(std::uint32_t barrier, std::uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// Arrives, and has the phase wait for `bytes` of copies too.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Whether the phase of this parity has ended: phases count from 0, and that before the first has.
__device__ __forceinline__ bool done(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}
/// Waits for the end of the phase.
__device__ __forceinline__ void wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

/// This block's place in its cluster.
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Waits for all threads of the cluster.
__device__ __forceinline__ void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Copies the map's box from these coordinates on; elements outside the tensor are zero.
__device__ __forceinline__ void load_box(std::uint32_t to, const CUtensorMap& map, int x, int y, int z,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

/// The same into the block of each cluster rank whose bit is set, there at the same address and for the same barrier.
__device__ __forceinline__ void load_box_to(std::uint32_t to, const CUtensorMap& map, int x, int y, int z,
                                            std::uint32_t barrier, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(ranks)
      : "memory");
}

/// The same of a dealt map (tensor_map.h).
__device__ __forceinline__ void load_dealt_box_to(std::uint32_t to, const CUtensorMap& map, int x, int group,
                                                  std::uint32_t barrier, std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %3, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(0), "r"(group), "r"(barrier), "h"(ranks)
      : "memory");
}

/// A box of a paired map.
__device__ __forceinline__ void load_paired_box(std::uint32_t to, const CUtensorMap& map, int x, int group,
                                                std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(0), "r"(group), "r"(barrier)
      : "memory");
}

/// Writes the map's box from these coordinates on, except elements outside the tensor, or adds to the values there,
/// rounded to nearest. Of this thread's copies of the kind those before a commit are a group.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, int z, std::uint32_t from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z), "r"(from)
               : "memory");
}
__device__ __forceinline__ void store_dealt_box(const CUtensorMap& map, int x, int group, std::uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %2, %2, %3}], [%4];" ::"l"(&map),
      "r"(x), "r"(0), "r"(group), "r"(from)
      : "memory");
}
__device__ __forceinline__ void add_box(const CUtensorMap& map, int x, int y, int z, std::uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(from)
      : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until shared memory was read by all of them.
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/// Copies `bytes`, a multiple of 16 between addresses that are such too.
__device__ __forceinline__ void load_bytes(std::uint32_t to, const void* from, std::uint32_t bytes,
                                           std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace quern::cuda::tma
