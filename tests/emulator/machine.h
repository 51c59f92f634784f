#pragma once
// Runs kernels, without a GPU. The blocks of a cluster run together, clusters one after another. Warps run in an order
// at random, and copies end at random times: at once, some turns later, or as late as anybody can wait. Each lane runs
// alone up to the next instruction of its whole warp. So what a kernel leaves to chance happens in another order with
// every seed; races.h finds what stays right by luck.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator/kernel.h"
#include "emulator/races.h"

namespace quern::emulator {

struct Block;
struct Cluster;
struct TakenTile;

enum class State : std::uint8_t { runs, at_warp, at_barrier, at_phase, at_cluster, left };

struct Thread {
  int number;  ///< in its block
  Block* block;
  Warp* warp;
  std::uint64_t* registers;
  std::uint8_t* local;
  const Instruction* code;
  int at = 0;  ///< instruction
  State state = State::runs;
  int cluster_arrivals = 0;
  std::uint32_t writes = 0;  ///< of shared memory

  const Instruction& instruction() const { return code[at]; }
};

struct Warp {
  int number;
  Block* block;
  std::vector<Thread*> lanes;
  Clocks known;
  /// What tensor cores read: of groups that were committed, and of the one that was not.
  std::vector<std::vector<Range>> groups = {};
  std::vector<Range> open = {};

  int unit() const;
  std::uint32_t& clock() { return known.at[static_cast<std::size_t>(unit())]; }
  Access access(const char* text) { return {unit(), clock(), known, text}; }
  std::vector<Thread*> standing = {};  ///< the lanes that an instruction has
  bool done() const;
};

/// An mbarrier (ISA, "mbarrier"): a phase ends once as many arrived as are expected, and all bytes too.
struct PhaseBarrier {
  std::uint32_t expected, pending;
  int unit;  ///< of Clocks
  std::int64_t bytes = 0;
  std::uint32_t phase = 0;
  Clocks known = {}, next = {};
};

struct BlockBarrier {
  int arrived = 0, expected = 0;
  std::vector<Thread*> waiting = {};
  Clocks known = {};
};

struct Block {
  Block(Cluster& of, int number) : cluster(&of), rank(number) {}

  Cluster* cluster;
  int rank;
  std::vector<std::uint8_t> memory = {};  ///< shared
  std::unique_ptr<Races> races = {};
  std::vector<Thread> threads = {};
  std::vector<Warp> warps = {};
  std::vector<std::uint32_t> fenced = {};  ///< of each thread, its writes that engines see
  std::map<std::uint32_t, PhaseBarrier> phases = {};
  BlockBarrier barriers[16];
  std::vector<std::pair<Thread*, Range>> stored = {};  ///< what copies out may still read
  std::shared_ptr<TakenTile> taken = {};               ///< by tensor cores

  PhaseBarrier& phase_at(std::uint32_t address);
};

/// A copy that was asked for.
struct Copy {
  std::uint64_t due;
  std::function<void()> run;
  Thread* stores;  ///< for this thread; null: it loads
};

struct Extent {
  std::uint32_t x = 1, y = 1, z = 1;
  std::uint64_t count() const { return std::uint64_t{x} * y * z; }
};

struct LaunchShape {
  Extent grid, block;
  int cluster = 1;  ///< blocks
  std::size_t dynamic_bytes = 0;
};

class Machine;

struct Cluster {
  Machine* machine;
  const Kernel* kernel;
  const LaunchShape* shape;
  std::uint64_t arguments;  ///< address
  std::vector<std::unique_ptr<Block>> blocks = {};
  std::vector<Copy> copies = {};
  std::uint64_t turn = 0;
  Clocks arrived = {};

  /// Of an address of shared memory: the block that it names, and the bytes into its memory.
  std::pair<Block*, std::uint32_t> place(Block& own, std::uint64_t address) const;
};

class Machine {
 public:
  explicit Machine(std::uint64_t seed) : random_(seed) {}

  /// Runs a kernel to its end. `parameters`: as its PTX lays them out.
  void launch(const Kernel& kernel, const LaunchShape& shape, const std::vector<std::uint8_t>& parameters);
  void add_copy(Cluster& cluster, Thread* stores, std::function<void()> run);
  int next_phase_unit() { return kWarps + phase_units_++ % (kUnits - kWarps); }

 private:
  void add_block(Cluster& cluster, std::uint64_t number);
  void run_cluster(Cluster& cluster);
  bool run_warp(Warp& warp);
  bool run_together(Warp& warp);
  bool run_thread(Thread& thread);
  bool run_copies(Cluster& cluster, bool any);

  std::mt19937_64 random_;
  int phase_units_ = 0;
  std::vector<std::uint64_t> registers_;
  std::vector<std::uint8_t> local_;
};

// For instructions.

/// Addresses of shared memory among all addresses.
inline constexpr std::uint64_t kSharedWindow = std::uint64_t{6} << 60;
/// Of a block of the cluster: rank + 1 in the upper bits; 0: the thread's own.
inline constexpr int kRankShift = 24;

enum class Does { read, write };
/// Where a thread accesses shared memory: checked for bounds, alignment and races.
std::uint8_t* shared_at(Thread& thread, std::uint64_t address, int bytes, Does does);
std::uint8_t* memory_at(Thread& thread, std::uint64_t address, int bytes, Does does);
/// Of an mbarrier: may end its phase.
void arrive(PhaseBarrier& barrier, const Clocks* known, std::uint32_t arrivals, std::int64_t bytes);

}  // namespace quern::emulator
