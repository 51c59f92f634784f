#include "run/hooks/same_weights.h"

#include <algorithm>

#include "base/checksum.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::int64_t kSlice = 16 << 20;  // bytes

std::vector<PlannedTensor> compute_weights(const Plan& plan) {
  std::vector<PlannedTensor> tensors;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.owner == TensorOwner::working && tensor.part_of < 0 && !tensor.over_ranks && tensor.whole.empty())
      tensors.push_back(tensor);
  return tensors;
}

/// Eight bytes.
std::string checksum_of(Engine& engine, const PlannedTensor& tensor, std::vector<std::byte>& buffer) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t count = element_count(tensor.extents), most = kSlice / size;
  Checksum checksum;
  for (std::int64_t first = 0; first < count; first += most) {
    const std::int64_t part = std::min(most, count - first);
    buffer.resize(static_cast<std::size_t>(part * size));
    engine.read(tensor, first, part, buffer.data());
    checksum.add(buffer);
  }
  const std::uint64_t value = checksum.value();
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string name_of(const PlannedTensor& tensor) {
  std::string name = tensor.parameter;
  if (tensor.kind != names::kWorking) name += " (" + tensor.kind + ")";
  return name + (tensor.layer < 0 ? "" : " of layer " + std::to_string(tensor.layer));
}

/// The first that is not the same on all ranks.
std::string first_that_differs(const std::vector<PlannedTensor>& tensors, const std::vector<std::string>& all) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (const std::string& one : all)
      if (one.compare(8 * i, 8, all[0], 8 * i, 8) != 0) return name_of(tensors[i]);
  return {};
}

}  // namespace

std::string ranks_that_differ(const std::vector<std::string>& all) {
  auto holders = [&](const std::string& one) { return std::count(all.begin(), all.end(), one); };
  const std::string& most = *std::max_element(
      all.begin(), all.end(), [&](const std::string& a, const std::string& b) { return holders(a) < holders(b); });
  const auto size = static_cast<std::ptrdiff_t>(all.size()), agreeing = holders(most);
  if (agreeing == size) return {};
  std::string ranks;
  int named = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (2 * agreeing > size && all[rank] == most) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    ++named;
  }
  return (named > 1 ? "ranks " : "rank ") + ranks;
}

void SameWeights::between_steps(const RunState& state) {
  const std::int64_t every = state.session.parallel.check_every;
  if (every == 0 || state.step % every != 0 || state.ranks.size() == 1) return;
  state.engine.apply_update();
  const std::vector<PlannedTensor> tensors = compute_weights(state.engine.plan());
  std::string own;
  std::vector<std::byte> buffer;
  for (const PlannedTensor& tensor : tensors) own += checksum_of(state.engine, tensor, buffer);
  const std::vector<std::string> all = state.ranks.exchange(std::move(own));
  const std::string ranks = ranks_that_differ(all);
  if (ranks.empty()) return;
  throw Error(
      ErrorCode::communication,
      {.where = "step " + std::to_string(state.step),
       .what = "the weights of " + ranks + " differ from the other ranks', first " + first_that_differs(tensors, all),
       .next = "memory or a link is faulty there: check it, and resume from a checkpoint of step " +
               std::to_string(state.step - every) + " or before"});
}

}  // namespace quern
