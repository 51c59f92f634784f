#include "run/ranks/machines_communicator.h"

#include <functional>
#include <utility>

#include "launch/rendezvous/rank_rendezvous.h"

namespace quern {

namespace {

/// Below this a sum in one exchange of all ranks takes less time than in three of slabs.
constexpr std::size_t kSmall = std::size_t{64} << 10;

std::vector<std::unique_ptr<Communicator>> both(std::unique_ptr<Communicator> inside,
                                                std::unique_ptr<Communicator> across) {
  std::vector<std::unique_ptr<Communicator>> parts;
  parts.push_back(std::move(inside));
  parts.push_back(std::move(across));
  return parts;
}

/// Of the ranks `first`, `first` + `step` and so on, out of all that exchange.
Rendezvous of_ranks(const Rendezvous& all, int first, int step, int size) {
  Rendezvous some{.rank = (all.rank - first) / step, .size = size, .address = {}, .timeout = all.timeout};
  some.exchange = [exchange = all.exchange, first, step, size](std::string own) {
    std::vector<std::string> every = exchange(std::move(own)), chosen;
    for (int i = 0; i < size; ++i) chosen.push_back(std::move(every[static_cast<std::size_t>(first + i * step)]));
    return chosen;
  };
  return some;
}

std::string names_of(const std::string& id, int first, int step, int size) {
  std::string text = id + " of ranks ";
  for (int i = 0; i < size; ++i) text += (i > 0 ? ", " : "") + std::to_string(first + i * step);
  return text;
}

}  // namespace

MachinesCommunicator::MachinesCommunicator(std::unique_ptr<Communicator> inside_one,
                                           std::unique_ptr<Communicator> across_all, int ranks, int machines)
    : CommunicatorParts(both(std::move(inside_one), std::move(across_all))), ranks_(ranks), machines_(machines) {
  auto bytes = [](const Communicator& part, int size) {
    return part.traits().own_bytes + static_cast<std::size_t>(size) * part.traits().peer_bytes;
  };
  traits_.own_bytes = bytes(inside(), size()) + bytes(across(), machines_);
  traits_.peer_bytes = 0;
  const std::string order = std::to_string(machines_) + " machines of " + std::to_string(size()) + " ranks";
  traits_.sums_by = traits_.sums_by.empty() ? order : order + "; " + traits_.sums_by;
}

// ---- set-up ----

void MachinesCommunicator::connect(const Rendezvous& rendezvous, Device& device) {
  const int machine = rendezvous.rank / size(), place = rendezvous.rank % size();
  auto join = [&](std::size_t number, int first, int step, int size) {
    const std::string& id = part(number).traits().id;
    name_part(number, names_of(id, first, step, size));
    const RankRendezvous folder(of_ranks(rendezvous, first, step, size));
    connect_part(number, folder.get(id), device);
    part(number).barrier();  // before the folder goes
  };
  join(0, machine * size(), 1, size());
  join(1, place, size(), machines_);
}

void MachinesCommunicator::barrier() {
  inside().barrier();
  across().barrier();
}

// ---- hot path ----

void MachinesCommunicator::all_reduce(const View& in_out, Reduction reduction, Stream stream) {
  const auto n = static_cast<std::int64_t>(size());
  if (in_out.bytes() < kSmall) {
    inside().all_reduce(in_out, reduction, stream);
    return across().all_reduce(in_out, reduction, stream);
  }
  constexpr std::int64_t kAligned = 64;  // elements
  const std::int64_t each = in_out.count() / n / kAligned * kAligned, begin = each * rank();
  std::vector<std::int64_t> counts(static_cast<std::size_t>(n), each);
  counts.back() += in_out.count() - n * each;
  const View whole{in_out.data, in_out.dtype, {in_out.count()}};
  const View own{in_out.as<char>() + static_cast<std::size_t>(begin) * size_of(in_out.dtype),
                 in_out.dtype,
                 {counts[static_cast<std::size_t>(rank())]}};
  reduce_scatter(whole, own, counts, reduction, stream);
  inside().all_gather(own, whole, counts, stream);
}

void MachinesCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                          Stream stream) {
  inside().reduce_scatter(in, out, counts, reduction, stream);
  if (out.count() > 0) across().all_reduce(out, reduction, stream);
}

}  // namespace quern
