#pragma once
// Memory of a plan that is given to its owners, one range behind the other: of the device's arena, or of a store.

#include <algorithm>
#include <string>
#include <utility>

#include "plan/plan.h"
#include "quern/checked.h"

namespace quern {

class Reserve {
 public:
  /// Both outlive it.
  Reserve(Plan& plan, const PlanParts& parts) : plan_(plan), parts_(parts) {}

 protected:
  int layers() const { return static_cast<int>(plan_.model.layers); }

  std::int64_t aligned(std::int64_t bytes) const { return rounded_up(bytes, plan_.alignment); }

  std::int64_t reserve(const std::string& owner, std::int64_t bytes, std::int32_t store = -1) {
    std::int64_t& end = store < 0 ? plan_.device_bytes : plan_.stores[static_cast<std::size_t>(store)].bytes;
    const std::int64_t offset = end;
    end = checked_sum(end, aligned(bytes));
    auto it = std::find_if(plan_.owners.begin(), plan_.owners.end(),
                           [&](const OwnerBytes& known) { return known.owner == owner && known.store == store; });
    if (it == plan_.owners.end()) it = plan_.owners.insert(it, {owner, MemoryKind::device, 0, store});
    it->bytes += aligned(bytes);
    return offset;
  }

  /// The store that has an owner's state of a layer; -1: the device.
  std::int32_t store_of(TensorOwner owner, int layer) {
    const Placement& placement = placement_of(owner, plan_.options.state);
    if (placement.on_device(layer)) return -1;
    const std::string& memory = placement.memory;
    auto it = std::find_if(plan_.stores.begin(), plan_.stores.end(),
                           [&](const StorePlan& store) { return store.id == memory; });
    if (it == plan_.stores.end()) {
      it = plan_.stores.insert(it, {memory, 0});
      if (const OffloadTraits* traits = parts_.store(memory)) {
        it->in_host_memory = traits->in_host_memory;
        it->in_place = traits->mappable;
        it->capacity = static_cast<std::int64_t>(traits->capacity);
        it->rates = {traits->put_rate, traits->get_rate};
      }
    }
    return static_cast<std::int32_t>(it - plan_.stores.begin());
  }

  /// The whole of what ranks have parts of, or what each use makes of that.
  void add_over_ranks(PlannedTensor tensor) {
    tensor.over_ranks = true;
    tensor.offset = plan_.over_ranks_bytes;
    plan_.over_ranks_bytes = checked_sum(plan_.over_ranks_bytes, aligned(tensor.bytes()));
    plan_.add(std::move(tensor));
  }

  void add_tensor(PlannedTensor tensor) {
    const TensorOwner beside = tensor.owner;
    add_tensor(std::move(tensor), beside);
  }

  /// In the memory of another owner's tensors, with room for so many bytes if it has fewer.
  void add_tensor(PlannedTensor tensor, TensorOwner beside, std::int64_t room = 0) {
    const std::int64_t bytes = std::max(room, tensor.bytes());
    tensor.store = store_of(beside, tensor.layer);
    tensor.offset = reserve(std::string(name_of(tensor.owner)), bytes, tensor.store);
    if (const std::int64_t spare = bytes - tensor.bytes(); tensor.store >= 0 && spare > 0)
      plan_.ring.spare[{tensor.store, tensor.offset + tensor.bytes()}] = spare;
    plan_.add(std::move(tensor));
  }

  Plan& plan_;
  const PlanParts& parts_;
};

}  // namespace quern
