#include "run/hooks/same_weights.h"

#include <algorithm>

#include "base/checksum.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::int64_t kSlice = 16 << 20;  // bytes
constexpr std::size_t kSum = 8;            // bytes of a checksum

/// In the order of the plan: the weights that every rank has whole, or the shards.
std::vector<PlannedTensor> compute_weights(const Plan& plan, bool shards) {
  std::vector<PlannedTensor> tensors;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.owner == TensorOwner::working && tensor.part_of < 0 && !tensor.over_ranks &&
        tensor.whole.empty() != shards)
      tensors.push_back(tensor);
  return tensors;
}

/// Of what this rank has of it: kSum bytes.
std::string checksum_of(Engine& engine, const PlannedTensor& tensor, std::vector<std::byte>& buffer) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t count = element_count(tensor.extents), most = kSlice / size;
  Checksum checksum;
  for (std::int64_t first = 0; first < count; first += most) {
    const std::int64_t part = std::min(most, count - first);
    buffer.resize(static_cast<std::size_t>(part * size));
    engine.read_part({tensor, first, {part}}, buffer.data());
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
      if (one.compare(kSum * i, kSum, all[0], kSum * i, kSum) != 0) return name_of(tensors[i]);
  return {};
}

/// Throws where `tensors`, of which `all` has the checksums, are not the same on all of these ranks: `first`, and each
/// `step` further.
void need_same(const RunState& state, const std::vector<PlannedTensor>& tensors, const std::vector<std::string>& all,
               int first, int step) {
  const std::string ranks = ranks_that_differ(all, first, step);
  if (ranks.empty()) return;
  const std::int64_t every = state.session.parallel.check_every;
  throw Error(ErrorCode::communication,
              {.where = "step " + std::to_string(state.step),
               .what = (step == 1 ? "the weights of " : "the shards of weights of ") + ranks +
                       " differ from the other ranks', first " + first_that_differs(tensors, all),
               .next = "memory or a link is faulty there: check it, and resume from a checkpoint of step " +
                       std::to_string(state.step - every) + " or before"});
}

}  // namespace

std::string ranks_that_differ(const std::vector<std::string>& all, int first, int step) {
  auto holders = [&](const std::string& one) { return std::count(all.begin(), all.end(), one); };
  const std::string& most = *std::max_element(
      all.begin(), all.end(), [&](const std::string& a, const std::string& b) { return holders(a) < holders(b); });
  const auto size = static_cast<std::ptrdiff_t>(all.size()), agreeing = holders(most);
  if (agreeing == size) return {};
  std::string ranks;
  int named = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (2 * agreeing > size && all[rank] == most) continue;
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(first + static_cast<int>(rank) * step);
    ++named;
  }
  return (named > 1 ? "ranks " : "rank ") + ranks;
}

void SameWeights::between_steps(const RunState& state) {
  const std::int64_t every = state.session.parallel.check_every;
  if (every == 0 || state.step % every != 0 || state.ranks.size() == 1) return;
  state.engine.apply_update();
  const Plan& plan = state.engine.plan();
  const int shards = state.ranks.shards();
  const auto whole = compute_weights(plan, false);
  const auto parts = shards < state.ranks.size() ? compute_weights(plan, true) : std::vector<PlannedTensor>{};
  std::string own;
  std::vector<std::byte> buffer;
  for (const auto* tensors : {&whole, &parts})
    for (const PlannedTensor& tensor : *tensors) own += checksum_of(state.engine, tensor, buffer);
  const std::vector<std::string> all = state.ranks.exchange(std::move(own));
  auto sums = [&](std::size_t rank, std::size_t first, std::size_t count) {
    return all[rank].substr(kSum * first, kSum * count);
  };
  std::vector<std::string> of_all;
  for (std::size_t rank = 0; rank < all.size(); ++rank) of_all.push_back(sums(rank, 0, whole.size()));
  need_same(state, whole, of_all, 0, 1);
  for (int shard = 0; shard < shards && !parts.empty(); ++shard) {
    std::vector<std::string> of_shard;
    for (auto rank = static_cast<std::size_t>(shard); rank < all.size(); rank += static_cast<std::size_t>(shards))
      of_shard.push_back(sums(rank, whole.size(), parts.size()));
    need_same(state, parts, of_shard, shard, shards);
  }
}

}  // namespace quern
