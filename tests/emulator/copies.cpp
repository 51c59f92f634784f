// mbarriers, and copies that engines make: of bytes and of boxes of tensors (ISA, "cp.async.bulk"), whose maps are the
// emulated driver's.
#include "emulator/copies.h"

#include <cstring>

#include "emulator/machine.h"
#include "emulator/registers.h"
#include "quern/numeric.h"

namespace quern::emulator {

namespace {

std::pair<Block*, std::uint32_t> barrier_place(const std::uint64_t* r, const Instruction& i, Thread& thread) {
  return thread.block->cluster->place(*thread.block, r[i.a] + static_cast<std::uint64_t>(i.offset));
}

void initialise(std::uint64_t* r, const Instruction& i, Thread& thread) {
  const auto [block, at] = barrier_place(r, i, thread);
  if (at % 8 != 0) stop(std::string("misaligned: ") + i.text);
  const std::uint32_t count = low(r[i.b]);
  block->phases.insert_or_assign(at, PhaseBarrier{count, count, thread.block->cluster->machine->next_phase_unit()});
}

/// b: bytes to expect, or none.
void arrive_once(std::uint64_t* r, const Instruction& i, Thread& thread) {
  const auto [block, at] = barrier_place(r, i, thread);
  arrive(block->phase_at(at), &thread.warp->known, 1, i.b >= 0 ? std::int64_t{low(r[i.b])} : 0);
  ++thread.warp->clock();
}

void map_rank(std::uint64_t* r, const Instruction& i, Thread&) {
  r[i.to] = (low(r[i.b]) + 1) << kRankShift | (low(r[i.a]) & ((1u << kRankShift) - 1));
}

void fence_engines(std::uint64_t*, const Instruction&, Thread& thread) {
  thread.block->fenced[static_cast<std::size_t>(thread.number)] = thread.writes;
}

TensorMap map_at(std::uint64_t address) {
  TensorMap map;
  std::memcpy(&map, reinterpret_cast<const void*>(address), sizeof map);
  if (map.rank < 1 || map.rank > 5) stop("a tensor map that the driver did not make");
  return map;
}

std::uint32_t box_bytes(const TensorMap& map) {
  std::uint32_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

/// f(bytes into the box, its place in memory; null: outside of the tensor) for each element.
template <class F>
void for_each_element(const TensorMap& map, const std::vector<std::int32_t>& first, F f) {
  const std::uint32_t bytes = box_bytes(map), row_bytes = std::uint32_t{map.box[0]} * map.element_bytes;
  for (std::uint32_t begin = 0; begin < bytes; begin += row_bytes) {
    std::uint64_t address = map.base;
    bool inside = true;
    std::uint32_t rest = begin / row_bytes;
    for (int d = 1; d < map.rank; ++d) {
      const std::int64_t at = std::int64_t{first[static_cast<std::size_t>(d)]} + rest % map.box[d];
      rest /= map.box[d];
      inside = inside && at >= 0 && at < map.sizes[d];
      address += static_cast<std::uint64_t>(at) * map.strides[d - 1];
    }
    for (std::uint32_t x = 0; x < map.box[0]; ++x) {
      const std::int64_t at = std::int64_t{first[0]} + x;
      const std::uint64_t element = address + static_cast<std::uint64_t>(at) * map.element_bytes;
      const std::uint32_t place = begin + x * map.element_bytes, mask = (1u << map.swizzle) - 1;
      f(place ^ (place >> 7 & mask) << 4,
        inside && at >= 0 && at < map.sizes[0] ? reinterpret_cast<std::uint8_t*>(element) : nullptr);
    }
  }
}

std::vector<std::int32_t> coordinates(const std::uint64_t* r, const Instruction& i, const TensorMap& map) {
  std::vector<std::int32_t> first;
  for (const int value : i.values) first.push_back(static_cast<std::int32_t>(r[value]));
  if (static_cast<int>(first.size()) != map.rank)
    stop(std::string("as many coordinates as the map has dimensions: ") + i.text);
  return first;
}

void check_place(const Block& block, std::uint32_t at, std::uint32_t bytes, bool swizzled, const char* text) {
  if (at % (swizzled ? 1024 : 128) != 0) stop(std::string("misaligned: ") + text);
  if (at < kSharedBegin || at + bytes > block.memory.size())
    stop(std::string("out of shared memory's bounds: ") + text);
}

/// An engine will write there, and its phase ends no earlier.
void expect_write(Block& block, Range range, std::uint32_t barrier, Thread& thread, const char* text) {
  const PhaseBarrier& phase = block.phase_at(barrier);
  block.races->write(range, {phase.unit, phase.phase + 1, thread.warp->known, text});
}

/// a: to, b: map, c: barrier, extra: ranks.
void load_box(std::uint64_t* r, const Instruction& i, Thread& thread) {
  Cluster& cluster = *thread.block->cluster;
  const TensorMap map = map_at(r[i.b]);
  const std::vector<std::int32_t> first = coordinates(r, i, map);
  const std::uint32_t to = low(r[i.a]), barrier = low(r[i.c]), bytes = box_bytes(map);
  const std::uint32_t ranks = i.extra >= 0 ? low(r[i.extra]) & 0xffff : 1u << thread.block->rank;
  std::vector<Block*> blocks;
  for (const auto& block : cluster.blocks)
    if ((ranks >> block->rank & 1) != 0) blocks.push_back(block.get());
  for (Block* block : blocks) {
    check_place(*block, to, bytes, map.swizzle > 0, i.text);
    expect_write(*block, {to, bytes}, barrier, thread, i.text);
  }
  cluster.machine->add_copy(cluster, nullptr, [=] {
    std::vector<std::uint8_t> box(bytes);
    for_each_element(map, first, [&](std::uint32_t place, const std::uint8_t* from) {
      if (from != nullptr) std::memcpy(box.data() + place, from, map.element_bytes);
    });
    for (Block* block : blocks) {
      std::memcpy(block->memory.data() + to, box.data(), bytes);
      arrive(block->phase_at(barrier), nullptr, 0, -std::int64_t{bytes});
    }
  });
}

/// a: to, b: from, c: bytes, extra: barrier.
void load_bytes(std::uint64_t* r, const Instruction& i, Thread& thread) {
  Block* const block = thread.block;
  const std::uint32_t to = low(r[i.a]), bytes = low(r[i.c]), barrier = low(r[i.extra]);
  const auto* from = reinterpret_cast<const std::uint8_t*>(r[i.b]);
  if (to % 16 != 0 || bytes % 16 != 0 || r[i.b] % 16 != 0) stop(std::string("misaligned: ") + i.text);
  if (to + bytes > block->memory.size()) stop(std::string("out of shared memory's bounds: ") + i.text);
  expect_write(*block, {to, bytes}, barrier, thread, i.text);
  block->cluster->machine->add_copy(*block->cluster, nullptr, [=] {
    std::memcpy(block->memory.data() + to, from, bytes);
    arrive(block->phase_at(barrier), nullptr, 0, -std::int64_t{bytes});
  });
}

void add_element(const TensorMap& map, std::uint8_t* to, const std::uint8_t* from) {
  if (map.kind == TensorMap::Kind::bf16) {
    std::uint16_t a, b;
    std::memcpy(&a, to, sizeof a);
    std::memcpy(&b, from, sizeof b);
    a = float_to_bf16(bf16_to_float(a) + bf16_to_float(b));
    std::memcpy(to, &a, sizeof a);
  } else if (map.kind == TensorMap::Kind::f32) {
    float a, b;
    std::memcpy(&a, to, sizeof a);
    std::memcpy(&b, from, sizeof b);
    a += b;
    std::memcpy(to, &a, sizeof a);
  } else {
    stop("copies that add are known for bf16 and fp32");
  }
}

/// a: from, b: map, mode: whether it adds.
void store_box(std::uint64_t* r, const Instruction& i, Thread& thread) {
  Block* const block = thread.block;
  const TensorMap map = map_at(r[i.b]);
  const std::vector<std::int32_t> first = coordinates(r, i, map);
  const Range range{low(r[i.a]), box_bytes(map)};
  check_place(*block, range.begin, range.bytes, map.swizzle > 0, i.text);
  block->races->check_fenced(range, block->fenced, i.text);
  block->races->read(range, thread.warp->access(i.text));
  block->races->hold(range);
  block->stored.emplace_back(&thread, range);
  const bool adds = i.mode != 0;
  block->cluster->machine->add_copy(*block->cluster, &thread, [=] {
    for_each_element(map, first, [&](std::uint32_t place, std::uint8_t* to) {
      const std::uint8_t* const from = block->memory.data() + range.begin + place;
      if (to != nullptr && adds) add_element(map, to, from);
      if (to != nullptr && !adds) std::memcpy(to, from, map.element_bytes);
    });
  });
}

void wait_stores(std::uint64_t*, const Instruction& i, Thread& thread) {
  std::vector<Copy>& copies = thread.block->cluster->copies;
  for (std::size_t k = 0; k < copies.size();) {
    if (copies[k].stores != &thread) {
      ++k;
      continue;
    }
    const Copy copy = std::move(copies[k]);
    copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(k));
    copy.run();
  }
  std::erase_if(thread.block->stored, [&](const auto& stored) {
    if (stored.first != &thread) return false;
    thread.block->races->done(stored.second, thread.warp->access(i.text));
    return true;
  });
}

void nothing(std::uint64_t*, const Instruction&, Thread&) {}

/// Copies of a thread that only its own wait orders: made at once. count: bytes; c: those that are copied.
void copy_early(std::uint64_t* r, const Instruction& i, Thread& thread) {
  std::uint8_t* const to = shared_at(thread, r[i.b], i.count, Does::write);
  std::memset(to, 0, static_cast<std::size_t>(i.count));
  std::memcpy(to, reinterpret_cast<const void*>(r[i.a] + static_cast<std::uint64_t>(i.offset)),
              i.c >= 0 ? low(r[i.c]) : static_cast<std::size_t>(i.count));
}

enum Atomic { add, largest, least, either, both, exchange, compare };
enum Kind { is_unsigned, is_signed, is_float };

template <class T>
T changed(const Instruction& i, T old, T b, T c) {
  switch (i.mode) {
    case add: return static_cast<T>(old + b);
    case largest: return std::max(old, b);
    case least: return std::min(old, b);
    case exchange: return b;
    case compare: return old == b ? c : old;
    default:
      if constexpr (std::is_integral_v<T>) return i.mode == either ? old | b : old & b;
      stop(std::string("not an operation of floats: ") + i.text);
  }
}

template <class T>
void change(std::uint64_t* r, const Instruction& i, Thread& thread) {
  const std::uint64_t address = r[i.a] + static_cast<std::uint64_t>(i.offset);
  std::uint8_t* at = reinterpret_cast<std::uint8_t*>(address);
  if (i.count != 0) {  // shared: atomics are ordered among themselves
    const auto [block, place] = thread.block->cluster->place(*thread.block, address);
    at = block->memory.data() + place;
  }
  T old, b, c = {};
  std::memcpy(&old, at, sizeof old);
  std::memcpy(&b, &r[i.b], sizeof b);
  if (i.c >= 0) std::memcpy(&c, &r[i.c], sizeof c);
  const T now = changed(i, old, b, c);
  std::memcpy(at, &now, sizeof now);
  if (i.to < 0) return;
  r[i.to] = 0;
  std::memcpy(&r[i.to], &old, sizeof old);
}

bool decode_atomic(Instruction& i, const Words& name, const Words& operands, Operands& of) {
  const bool returns = name[0] == "atom";
  const std::string& type = name.back();
  i.run = type == "f32"                    ? change<float>
          : type == "f64"                  ? change<double>
          : type == "s32"                  ? change<std::int32_t>
          : type == "s64"                  ? change<std::int64_t>
          : type == "u32" || type == "b32" ? change<std::uint32_t>
          : type == "u64" || type == "b64" ? change<std::uint64_t>
                                           : nullptr;
  const char* const names[] = {"add", "max", "min", "or", "and", "exch", "cas"};
  i.mode = -1;
  for (int k = 0; k < 7; ++k)
    if (has(name, names[k])) i.mode = k;
  if (i.run == nullptr || i.mode < 0) return false;
  std::size_t at = 0;
  if (returns) i.to = of.place(operands[at++]);
  of.address(i, operands[at++]);
  i.b = of.place(operands[at++]);
  if (i.mode == compare) i.c = of.place(operands[at]);
  i.count = has(name, "shared") || has(name, "shared::cta") ? 1 : 0;
  return true;
}

std::string inside(const std::string& brackets) { return brackets.substr(1, brackets.size() - 2); }

bool decode_box_copy(Instruction& i, const Words& name, const Words& operands, Operands& of) {
  const bool store = has(name, "bulk_group");
  const std::string map = inside(operands[store ? 0 : 1]);
  const std::size_t comma = map.find(','), open = map.find('{');
  i.b = of.place(map.substr(0, comma));
  i.values = of.places(map.substr(open, map.find('}') - open + 1));
  i.a = of.place(inside(operands[store ? 1 : 0]));
  i.mode = name[1] == "reduce" ? 1 : 0;
  i.run = store ? store_box : load_box;
  if (store) return true;
  i.c = of.place(inside(operands[2]));
  if (operands.size() > 3) i.extra = of.place(operands[3]);
  return true;
}

}  // namespace

bool decode_copy(Instruction& i, const Words& name, const Words& operands, Operands& of) {
  const std::string& kind = name[0];
  if (kind == "atom" || kind == "red") return decode_atomic(i, name, operands, of);
  if (kind == "mbarrier") {
    if (name[1] == "init") {
      i.run = initialise;
      of.address(i, operands[0]);
      i.b = of.place(operands[1]);
    } else if (name[1] == "arrive") {
      i.run = arrive_once;
      of.address(i, operands[1]);
      if (has(name, "expect_tx")) i.b = of.place(operands[2]);
    } else {
      i.step = name[1] == "try_wait" ? Step::phase_wait : Step::phase_test;
      i.to = of.place(operands[0]);
      of.address(i, operands[1]);
      i.b = of.place(operands[2]);
    }
  } else if (kind == "mapa") {
    i.run = map_rank;
    i.to = of.place(operands[0]);
    i.a = of.place(operands[1]);
    i.b = of.place(operands[2]);
  } else if (kind == "fence") {
    i.run = has(name, "proxy") ? fence_engines : nothing;
  } else if (kind == "cp" && has(name, "tensor")) {
    return decode_box_copy(i, name, operands, of);
  } else if (kind == "cp" && has(name, "bulk") && has(name, "wait_group")) {
    i.run = wait_stores;
  } else if (kind == "cp" && has(name, "bulk") && operands.size() == 4) {
    i.run = load_bytes;
    i.a = of.place(inside(operands[0]));
    i.b = of.place(inside(operands[1]));
    i.c = of.place(operands[2]);
    i.extra = of.place(inside(operands[3]));
  } else if (kind == "cp" && (has(name, "ca") || has(name, "cg"))) {
    i.run = copy_early;
    i.b = of.place(inside(operands[0]));
    of.address(i, operands[1]);
    i.count = std::atoi(operands[2].c_str());
    if (operands.size() > 3) i.c = of.place(operands[3]);
  } else if (kind == "cp" || kind == "prefetch") {  // groups; hints
    i.run = nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace quern::emulator
