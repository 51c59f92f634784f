#include "emulator/machine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace quern::emulator {

int Warp::unit() const { return block->rank * 32 + number; }

bool Warp::done() const {
  return std::all_of(lanes.begin(), lanes.end(), [](const Thread* lane) { return lane->state == State::left; });
}

PhaseBarrier& Block::phase_at(std::uint32_t address) {
  const auto found = phases.find(address);
  if (found == phases.end()) stop("no mbarrier was initialised at " + std::to_string(address));
  return found->second;
}

std::pair<Block*, std::uint32_t> Cluster::place(Block& own, std::uint64_t address) const {
  const auto bits = static_cast<std::uint32_t>(address);
  const std::size_t rank = bits >> kRankShift;
  if (rank > blocks.size()) stop("an address names a block that the cluster lacks");
  return {rank == 0 ? &own : blocks[rank - 1].get(), bits & ((1u << kRankShift) - 1)};
}

std::uint8_t* shared_at(Thread& thread, std::uint64_t address, int bytes, Does does) {
  const auto [block, at] = thread.block->cluster->place(*thread.block, address);
  const auto size = static_cast<std::uint32_t>(bytes);
  const char* const text = thread.instruction().text;
  if (at < kSharedBegin || at + size > block->memory.size())
    stop(std::string("out of shared memory's bounds: ") + text);
  if (at % size != 0) stop(std::string("misaligned: ") + text);
  const Access access = thread.warp->access(text);
  if (does == Does::read) {
    block->races->read({at, size}, access);
  } else {
    block->races->write({at, size}, access);
    block->races->wrote({at, size}, thread.number, ++thread.writes);
  }
  return block->memory.data() + at;
}

std::uint8_t* memory_at(Thread& thread, std::uint64_t address, int bytes, Does does) {
  if (address >> 60 == kSharedWindow >> 60) return shared_at(thread, address, bytes, does);
  if (address % static_cast<std::uint64_t>(bytes) != 0) stop(std::string("misaligned: ") + thread.instruction().text);
  return reinterpret_cast<std::uint8_t*>(address);
}

void arrive(PhaseBarrier& barrier, const Clocks* known, std::uint32_t arrivals, std::int64_t bytes) {
  if (arrivals > barrier.pending) stop("more threads arrive at an mbarrier than it expects");
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (known != nullptr) barrier.next.join(*known);
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.known = barrier.next;
  barrier.known.at[static_cast<std::size_t>(barrier.unit)] = barrier.phase;
}

namespace {

/// Whether the thread goes on.
bool arrive_at_barrier(Thread& thread, const Instruction& i) {
  const auto number = thread.registers[i.a];
  const int expected =
      i.b >= 0 ? static_cast<int>(thread.registers[i.b]) : static_cast<int>(thread.block->threads.size());
  if (number > 15) stop(std::string("a block has 16 barriers: ") + i.text);
  BlockBarrier& barrier = thread.block->barriers[number];
  if (barrier.arrived > 0 && barrier.expected != expected)
    stop(std::string("threads expect others at a barrier: ") + i.text);
  barrier.expected = expected;
  barrier.known.join(thread.warp->known);
  if (i.step == Step::barrier) {
    thread.state = State::at_barrier;
    barrier.waiting.push_back(&thread);
  } else {
    ++thread.at;
    if (thread.warp->lanes.back() == &thread) ++thread.warp->clock();
  }
  if (++barrier.arrived == expected) {
    for (Thread* waiting : barrier.waiting) {
      waiting->warp->known.join(barrier.known);
      waiting->state = State::runs;
      ++waiting->at;
    }
    for (Thread* waiting : barrier.waiting)
      if (waiting->warp->lanes.front() == waiting) ++waiting->warp->clock();
    barrier = {};
  }
  return i.step == Step::barrier_arrive;
}

bool whole_cluster_arrived(const Thread& thread) {
  for (const auto& block : thread.block->cluster->blocks)
    for (const Thread& other : block->threads)
      if (other.state != State::left && other.cluster_arrivals < thread.cluster_arrivals) return false;
  return true;
}

[[noreturn]] void report_deadlock(const Cluster& cluster) {
  std::string text = "deadlock in " + cluster.kernel->name;
  for (const auto& block : cluster.blocks)
    for (const Warp& warp : block->warps) {
      std::map<int, int> standing;
      for (const Thread* lane : warp.lanes)
        if (lane->state != State::left) ++standing[lane->at];
      for (const auto& [at, lanes] : standing)
        text += "\n  block " + std::to_string(block->rank) + ", warp " + std::to_string(warp.number) + ": " +
                std::to_string(lanes) + " lanes at " + cluster.kernel->code[static_cast<std::size_t>(at)].text;
    }
  stop(text);
}

void check_end(const Cluster& cluster) {
  for (const auto& block : cluster.blocks) {
    for (const Warp& warp : block->warps)
      if (!warp.groups.empty() || !warp.open.empty()) stop("wgmmas without a wait in " + cluster.kernel->name);
    for (const auto& [address, phase] : block->phases)
      if (phase.bytes != 0) stop("copies are missing at the end of " + cluster.kernel->name);
  }
}

}  // namespace

bool Machine::run_thread(Thread& thread) {
  bool moved = false;
  std::uint64_t* r = thread.registers;
  for (;; moved = true) {
    const Instruction& i = thread.code[thread.at];
    if (i.guard >= 0 && (r[i.guard] != 0) == i.unless) {
      ++thread.at;
      continue;
    }
    switch (i.step) {
      case Step::alone:
        i.run(r, i, thread);
        ++thread.at;
        break;
      case Step::branch: thread.at = i.target; break;
      case Step::leave: thread.state = State::left; return true;
      case Step::trap: stop("trap in " + thread.block->cluster->kernel->name);
      case Step::together: thread.state = State::at_warp; return moved;
      case Step::barrier:
      case Step::barrier_arrive:
        if (!arrive_at_barrier(thread, i)) return true;
        break;
      case Step::phase_wait:
      case Step::phase_test: {
        const auto [block, at] =
            thread.block->cluster->place(*thread.block, r[i.a] + static_cast<std::uint64_t>(i.offset));
        const PhaseBarrier& barrier = block->phase_at(at);
        r[i.to] = barrier.phase % 2 != r[i.b] % 2;  // whether the phase of this parity has ended
        if (r[i.to] == 0 && i.step == Step::phase_wait) {
          thread.state = State::at_phase;
          return moved;
        }
        if (r[i.to] != 0 && barrier.phase > 0) thread.warp->known.join(barrier.known);
        ++thread.at;
        if (r[i.to] == 0) return true;
        break;
      }
      case Step::cluster_arrive:
        ++thread.cluster_arrivals;
        thread.block->cluster->arrived.join(thread.warp->known);
        if (thread.warp->lanes.back() == &thread) ++thread.warp->clock();
        ++thread.at;
        break;
      case Step::cluster_wait:
        if (!whole_cluster_arrived(thread)) {
          thread.state = State::at_cluster;
          return moved;
        }
        thread.warp->known.join(thread.block->cluster->arrived);
        ++thread.at;
        break;
    }
  }
}

bool Machine::run_together(Warp& warp) {
  std::uint32_t alive = 0;
  for (const Thread* lane : warp.lanes)
    if (lane->state != State::left) alive |= 1u << (lane->number % 32);
  for (const Thread* lane : warp.lanes) {
    if (lane->state != State::at_warp) continue;
    const Instruction& i = lane->instruction();
    warp.standing.clear();
    std::uint32_t here = 0;
    for (Thread* other : warp.lanes) {
      if (other->state != State::at_warp || other->at != lane->at) continue;
      warp.standing.push_back(other);
      here |= 1u << (other->number % 32);
    }
    const std::uint32_t needed = i.masked ? static_cast<std::uint32_t>(lane->registers[i.extra]) : ~0u;
    if ((needed & alive & ~here) != 0) continue;
    i.run_warp(warp, i);
    for (Thread* other : warp.standing) {
      other->state = State::runs;
      ++other->at;
    }
    return true;
  }
  return false;
}

bool Machine::run_warp(Warp& warp) {
  bool moved = false;
  std::vector<Thread*> order = warp.lanes;
  std::shuffle(order.begin(), order.end(), random_);
  for (std::uint64_t turns = random_() % 64 + 1; turns > 0 && !warp.done(); --turns) {
    bool now = false;
    for (Thread* lane : order) {
      const bool waits = lane->state == State::at_phase || lane->state == State::at_cluster;
      if (!waits && lane->state != State::runs) continue;
      lane->state = State::runs;
      now = run_thread(*lane) || now;
    }
    now = run_together(warp) || now;
    moved = moved || now;
    if (!now) break;
  }
  return moved;
}

void Machine::add_copy(Cluster& cluster, Thread* stores, std::function<void()> run) {
  constexpr std::uint64_t kLate = 1 << 30;
  const std::uint64_t delays[] = {0, kLate, random_() % 200};
  cluster.copies.push_back({cluster.turn + delays[random_() % 3], std::move(run), stores});
}

bool Machine::run_copies(Cluster& cluster, bool any) {
  bool ran = false;
  auto run = [&](std::size_t at) {
    const std::function<void()> copy = std::move(cluster.copies[at].run);
    cluster.copies.erase(cluster.copies.begin() + static_cast<std::ptrdiff_t>(at));
    copy();
    ran = true;
  };
  for (std::size_t i = 0; i < cluster.copies.size();)
    if (cluster.copies[i].due <= cluster.turn)
      run(i);
    else
      ++i;
  if (!ran && any && !cluster.copies.empty()) run(random_() % cluster.copies.size());
  return ran;
}

void Machine::run_cluster(Cluster& cluster) {
  std::vector<Warp*> warps;
  for (const auto& block : cluster.blocks)
    for (Warp& warp : block->warps) warps.push_back(&warp);
  while (!warps.empty()) {
    std::shuffle(warps.begin(), warps.end(), random_);
    bool moved = false;
    for (Warp* warp : warps) {
      ++cluster.turn;
      moved = run_warp(*warp) || moved;
      moved = run_copies(cluster, false) || moved;
    }
    std::erase_if(warps, [](const Warp* warp) { return warp->done(); });
    if (!moved && !run_copies(cluster, true) && !warps.empty()) report_deadlock(cluster);
  }
  while (run_copies(cluster, true)) {
  }
  check_end(cluster);
}

void Machine::launch(const Kernel& kernel, const LaunchShape& shape, const std::vector<std::uint8_t>& parameters) {
  const auto threads = static_cast<std::size_t>(shape.block.count()) * static_cast<std::size_t>(shape.cluster);
  const auto blocks = static_cast<std::uint64_t>(shape.cluster);
  if (shape.grid.count() % blocks != 0) stop("clusters do not divide the grid of " + kernel.name);
  registers_.assign(static_cast<std::size_t>(kernel.registers) * threads, 0xdeadbeefdeadbeef);
  local_.assign(static_cast<std::size_t>(kernel.local_bytes) * threads, 0xff);
  std::vector<std::uint64_t> memory(parameters.size() / 8 + 32);
  const std::uint64_t arguments = (reinterpret_cast<std::uint64_t>(memory.data()) + 127) / 128 * 128;
  std::memcpy(reinterpret_cast<void*>(arguments), parameters.data(), parameters.size());
  for (std::uint64_t first = 0; first < shape.grid.count(); first += blocks) {
    Cluster cluster{this, &kernel, &shape, arguments};
    for (std::uint64_t rank = 0; rank < blocks; ++rank) add_block(cluster, first + rank);
    run_cluster(cluster);
  }
}

void Machine::add_block(Cluster& cluster, std::uint64_t number) {
  const Kernel& kernel = *cluster.kernel;
  const Extent &grid = cluster.shape->grid, &extent = cluster.shape->block;
  const std::size_t rank = cluster.blocks.size(), threads = static_cast<std::size_t>(extent.count());
  cluster.blocks.push_back(std::make_unique<Block>(cluster, static_cast<int>(rank)));
  Block& block = *cluster.blocks.back();
  block.memory.assign(kSharedBegin + static_cast<std::size_t>(kernel.shared_bytes) + cluster.shape->dynamic_bytes,
                      0xff);
  block.races = std::make_unique<Races>(block.memory.size());
  block.fenced.assign(threads, 0);
  block.threads.reserve(threads);
  block.warps.reserve((threads + 31) / 32);
  for (std::size_t t = 0; t < threads; ++t) {
    if (t % 32 == 0) {
      block.warps.push_back({static_cast<int>(t / 32), &block, {}, {}});
      block.warps.back().clock() = 1;
    }
    const std::size_t place = rank * threads + t;
    block.threads.push_back({static_cast<int>(t), &block, &block.warps.back(),
                             registers_.data() + static_cast<std::size_t>(kernel.registers) * place,
                             local_.data() + static_cast<std::size_t>(kernel.local_bytes) * place, kernel.code.data()});
    Thread& thread = block.threads.back();
    thread.warp->lanes.push_back(&thread);
    const std::uint64_t specials[kSpecials] = {t % extent.x,
                                               t / extent.x % extent.y,
                                               t / extent.x / extent.y,
                                               extent.x,
                                               extent.y,
                                               extent.z,
                                               number % grid.x,
                                               number / grid.x % grid.y,
                                               number / grid.x / grid.y,
                                               grid.x,
                                               grid.y,
                                               grid.z,
                                               t % 32,
                                               t / 32,
                                               rank,
                                               static_cast<std::uint64_t>(cluster.shape->cluster)};
    std::copy(std::begin(specials), std::end(specials), thread.registers);
    const std::uint64_t bases[] = {0, cluster.arguments, reinterpret_cast<std::uint64_t>(thread.local)};
    for (const Constant& constant : kernel.constants)
      thread.registers[constant.place] = constant.value + bases[static_cast<std::size_t>(constant.kind)];
  }
}

}  // namespace quern::emulator
