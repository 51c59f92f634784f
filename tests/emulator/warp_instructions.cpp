// Barriers, and what the lanes of a warp do together: exchanges, votes, matrices between shared memory and registers.
#include <algorithm>
#include <bit>
#include <cstring>

#include "emulator/machine.h"
#include "emulator/registers.h"

namespace quern::emulator {

namespace {

enum Shuffle { up, down, across, index };

void shuffle(Warp& warp, const Instruction& i) {
  const std::vector<Thread*>& lanes = warp.standing;
  std::uint64_t given[32] = {};
  std::uint32_t present = 0;
  for (const Thread* lane : lanes) {
    given[lane->number % 32] = lane->registers[i.a];
    present |= 1u << (lane->number % 32);
  }
  for (Thread* thread : lanes) {
    const int lane = thread->number % 32;
    const auto by = static_cast<int>(low(thread->registers[i.b])),
               limits = static_cast<int>(low(thread->registers[i.c]));
    const int segment = limits >> 8 & 31, most = (lane & segment) | (limits & 31 & ~segment), least = lane & segment;
    int from = i.mode == up       ? lane - by
               : i.mode == down   ? lane + by
               : i.mode == across ? lane ^ by
                                  : least | (by & ~segment);
    const bool inside = i.mode == up ? from >= most : from <= most;
    if (!inside) from = lane;
    if ((present >> from & 1) == 0) stop(std::string("takes from a lane that takes no part: ") + i.text);
    thread->registers[i.to] = low(given[from]);
    if (i.also_to >= 0) thread->registers[i.also_to] = inside;
  }
}

enum Reduction { max_u32, min_u32, max_s32, min_s32, sum, any_bit, all_bits };

void reduce(Warp& warp, const Instruction& i) {
  const std::vector<Thread*>& lanes = warp.standing;
  std::uint32_t result = low(lanes[0]->registers[i.a]);
  for (std::size_t k = 1; k < lanes.size(); ++k) {
    const std::uint32_t value = low(lanes[k]->registers[i.a]);
    const auto as = static_cast<std::int32_t>(result), bs = static_cast<std::int32_t>(value);
    switch (i.mode) {
      case max_u32: result = std::max(result, value); break;
      case min_u32: result = std::min(result, value); break;
      case max_s32: result = static_cast<std::uint32_t>(std::max(as, bs)); break;
      case min_s32: result = static_cast<std::uint32_t>(std::min(as, bs)); break;
      case sum: result += value; break;
      case any_bit: result |= value; break;
      default: result &= value; break;
    }
  }
  for (Thread* lane : lanes) lane->registers[i.to] = result;
}

enum Vote { ballot, any, all };

void vote(Warp& warp, const Instruction& i) {
  const std::vector<Thread*>& lanes = warp.standing;
  std::uint32_t yes = 0;
  for (const Thread* lane : lanes)
    if ((lane->registers[i.a] != 0) != i.unless) yes |= 1u << (lane->number % 32);
  const bool holds = i.mode == any ? yes != 0 : std::popcount(yes) == static_cast<int>(lanes.size());
  for (Thread* lane : lanes) lane->registers[i.to] = i.mode == ballot ? yes : holds;
}

void nothing(Warp&, const Instruction&) {}

/// Of 8 x 8 elements of 16 bits, what a lane has of a matrix: places of two, or of a column where it is turned.
struct Place {
  int row, column;
  Place(int lane, int element, bool turned)
      : row(turned ? 2 * (lane % 4) + element : lane / 4), column(turned ? lane / 4 : 2 * (lane % 4) + element) {}
};

constexpr int kRowBytes = 16;

void load_matrices(Warp& warp, const Instruction& i) {
  std::uint8_t rows[32][kRowBytes];
  for (int row = 0; row < 8 * i.count; ++row) {
    Thread& lane = *warp.lanes[static_cast<std::size_t>(row)];
    const std::uint64_t address = lane.registers[i.a] + static_cast<std::uint64_t>(i.offset);
    std::memcpy(rows[row], shared_at(lane, address, kRowBytes, Does::read), kRowBytes);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < i.count; ++matrix) {
      std::uint32_t pair = 0;
      for (int element = 0; element < 2; ++element) {
        const Place place(lane, element, i.mode != 0);
        std::uint16_t value;
        std::memcpy(&value, rows[8 * matrix + place.row] + 2 * place.column, sizeof value);
        pair |= std::uint32_t{value} << 16 * element;
      }
      warp.lanes[static_cast<std::size_t>(lane)]->registers[i.values[static_cast<std::size_t>(matrix)]] = pair;
    }
}

void store_matrices(Warp& warp, const Instruction& i) {
  std::uint8_t* rows[32];
  for (int row = 0; row < 8 * i.count; ++row) {
    Thread& lane = *warp.lanes[static_cast<std::size_t>(row)];
    const std::uint64_t address = lane.registers[i.a] + static_cast<std::uint64_t>(i.offset);
    rows[row] = shared_at(lane, address, kRowBytes, Does::write);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < i.count; ++matrix) {
      const std::uint64_t pair =
          warp.lanes[static_cast<std::size_t>(lane)]->registers[i.values[static_cast<std::size_t>(matrix)]];
      for (int element = 0; element < 2; ++element) {
        const Place place(lane, element, i.mode != 0);
        const auto value = static_cast<std::uint16_t>(pair >> 16 * element);
        std::memcpy(rows[8 * matrix + place.row] + 2 * place.column, &value, sizeof value);
      }
    }
}

void together(Instruction& i, void (*run)(Warp&, const Instruction&)) {
  i.step = Step::together;
  i.run_warp = run;
}

}  // namespace

bool decode_warp_instruction(Instruction& i, const Words& name, const Words& operands, Operands& of) {
  const std::string& kind = name[0];
  auto mask = [&](const std::string& operand) {
    i.masked = true;
    i.extra = of.place(operand);
  };
  if (kind == "shfl") {
    together(i, shuffle);
    const std::size_t bar = operands[0].find('|');
    i.to = of.place(operands[0].substr(0, bar));
    if (bar != std::string::npos) i.also_to = of.place(operands[0].substr(bar + 1));
    i.a = of.place(operands[1]);
    i.b = of.place(operands[2]);
    i.c = of.place(operands[3]);
    mask(operands[4]);
    i.mode = has(name, "up") ? up : has(name, "down") ? down : has(name, "bfly") ? across : index;
  } else if (kind == "bar" && has(name, "warp")) {
    together(i, nothing);
    mask(operands[0]);
  } else if (kind == "redux") {
    together(i, reduce);
    i.to = of.place(operands[0]);
    i.a = of.place(operands[1]);
    mask(operands[2]);
    const bool is_signed = name.back() == "s32";
    i.mode = has(name, "max")   ? (is_signed ? max_s32 : max_u32)
             : has(name, "min") ? (is_signed ? min_s32 : min_u32)
             : has(name, "add") ? sum
             : has(name, "or")  ? any_bit
                                : all_bits;
  } else if (kind == "vote") {
    together(i, vote);
    i.to = of.place(operands[0]);
    i.unless = operands[1][0] == '!';
    i.a = of.place(operands[1].substr(i.unless ? 1 : 0));
    mask(operands[2]);
    i.mode = has(name, "ballot") ? ballot : has(name, "any") ? any : all;
  } else if (kind == "ldmatrix" || kind == "stmatrix") {
    const bool load = kind == "ldmatrix";
    together(i, load ? load_matrices : store_matrices);
    i.values = of.places(operands[load ? 0 : 1]);
    i.values_written = load;
    of.address(i, operands[load ? 1 : 0]);
    i.count = static_cast<int>(i.values.size());
    i.mode = has(name, "trans") ? 1 : 0;
  } else if (kind == "setmaxnreg") {
    together(i, nothing);
  } else if (kind == "barrier" && has(name, "cluster")) {
    i.step = has(name, "arrive") ? Step::cluster_arrive : Step::cluster_wait;
  } else if (kind == "bar" || kind == "barrier") {
    i.step = has(name, "arrive") ? Step::barrier_arrive : Step::barrier;
    i.a = of.place(operands[0]);
    if (operands.size() > 1) i.b = of.place(operands[1]);
  } else {
    return false;
  }
  return true;
}

}  // namespace quern::emulator
