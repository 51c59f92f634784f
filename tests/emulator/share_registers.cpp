// PTX has a register for each result. Those that live within one basic block share places here, so that what threads
// have stays in the host's caches: of a GEMM's kernel, hundreds instead of 20,000.
#include <algorithm>
#include <set>

#include "emulator/kernel.h"

namespace quern::emulator {

namespace {

/// f(register, whether it is written), those that are read first.
template <class F>
void for_each_register(Instruction& i, F f) {
  for (int* read : {&i.guard, &i.a, &i.b, &i.c, &i.extra})
    if (*read >= 0) f(*read, false);
  for (int& read : i.operands) f(read, false);
  for (int& value : i.values) f(value, i.values_written);
  for (int* written : {&i.to, &i.also_to})
    if (*written >= 0) f(*written, true);
}

}  // namespace

void share_registers(Kernel& kernel) {
  const std::size_t count = kernel.code.size();
  std::vector<bool> leads(count + 1, false);
  for (std::size_t at = 0; at < count; ++at) {
    const Instruction& i = kernel.code[at];
    if (i.step == Step::branch) leads[static_cast<std::size_t>(i.target)] = leads[at + 1] = true;
    if (i.step == Step::leave || i.step == Step::trap) leads[at + 1] = true;
  }
  const auto registers = static_cast<std::size_t>(kernel.registers);
  std::vector<int> block_of(registers, -1), place(registers, -1);
  std::vector<std::size_t> last(registers, 0);
  std::vector<bool> global(registers, false);
  for (int i = 0; i < kSpecials; ++i) global[static_cast<std::size_t>(i)] = true;
  for (const Constant& constant : kernel.constants) global[static_cast<std::size_t>(constant.place)] = true;
  int block = 0;
  for (std::size_t at = 0; at < count; ++at) {
    block += leads[at] ? 1 : 0;
    for_each_register(kernel.code[at], [&](int& number, bool written) {
      const auto r = static_cast<std::size_t>(number);
      const bool first = block_of[r] < 0;
      if (first) block_of[r] = block;
      if (block_of[r] != block || (first && (!written || kernel.code[at].guard >= 0))) global[r] = true;
      last[r] = at;
    });
  }
  int used = 0;
  for (std::size_t r = 0; r < registers; ++r)
    if (global[r]) place[r] = used++;
  const int shared_from = used;
  int most = used;
  std::vector<int> spare;
  for (std::size_t at = 0; at < count; ++at) {
    if (leads[at]) {
      spare.clear();
      used = shared_from;
    }
    std::set<int> ended;
    for_each_register(kernel.code[at], [&](int& number, bool) {
      const auto r = static_cast<std::size_t>(number);
      if (!global[r] && place[r] < 0) {
        if (spare.empty()) {
          place[r] = used++;
        } else {
          place[r] = spare.back();
          spare.pop_back();
        }
      }
      if (!global[r] && last[r] == at) ended.insert(place[r]);
      number = place[r];
    });
    most = std::max(most, used);
    spare.insert(spare.end(), ended.begin(), ended.end());
  }
  for (Constant& constant : kernel.constants) constant.place = place[static_cast<std::size_t>(constant.place)];
  kernel.registers = most;
}

}  // namespace quern::emulator
