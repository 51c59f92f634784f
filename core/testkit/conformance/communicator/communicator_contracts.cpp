// Of communicators: what they say, how they join, and then every collective and fault over groups of processes.
#include <algorithm>
#include <functional>

#include "conformance/communicator/communicator_group.h"
#include "conformance/contracts.h"
#include "conformance/harness/growth.h"

namespace quern::conformance {

namespace {

constexpr double kLimit = 60;  // s

std::string joins(const Subject& subject, int size) {
  const RankDirectory scratch(subject, size);
  const auto outcomes = run_ranks(size, kLimit, [&](int rank) {
    Joined joined(subject, scratch.path(), rank, size);
    Communicator& c = *joined.communicator;
    need(c.traits().id == subject.factory.id, "traits().id", c.traits().id, subject.factory.id);
    need(c.rank() == rank && c.size() == size, "rank and size",
         std::to_string(c.rank()) + " of " + std::to_string(c.size()),
         std::to_string(rank) + " of " + std::to_string(size));
    c.barrier();
    if (auto fault = c.error()) broken("error() of a group without a fault", *fault, "nothing");
    c.barrier();
    return std::string();
  });
  std::string refusal;
  for (int rank = 0; rank < size; ++rank) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    if (outcome.kind == RankOutcome::Kind::threw && outcome.code == ErrorCode::config) refusal = outcome.text;
    need(outcome.kind == RankOutcome::Kind::returned || (size > 1 && !refusal.empty()),
         "rank " + std::to_string(rank) + " of " + std::to_string(size), outcome.text,
         size > 1 ? "to join, or a config error" : "to join");
  }
  return refusal;
}

std::string aborts(const Subject& subject) {
  const TestDirectory scratch;
  run_all_ranks(1, kLimit, [&](int rank) -> std::string {
    Joined joined(subject, scratch.path(), rank, 1);
    Communicator& c = *joined.communicator;
    // Their end would need all ranks.
    const Registered &from = *new Registered(joined, 4096), &to = *new Registered(joined, 4096);
    joined.device->fill(from.memory.data(), 1, 4096, joined.stream);
    joined.device->fill(to.memory.data(), 2, 4096, joined.stream);
    c.abort();
    const std::optional<std::string> fault = c.error();
    need(fault.has_value(), "error() after abort()", "nothing", "a fault");
    const View in{from.memory.data(), DType::f32, {1024}}, out{to.memory.data(), DType::f32, {1024}};
    const std::pair<const char*, std::function<void()>> calls[] = {
        {"all_reduce", [&] { c.all_reduce(in, Reduction::sum, joined.stream); }},
        {"broadcast", [&] { c.broadcast(in, 0, joined.stream); }},
        {"all_gather", [&] { c.all_gather(in, out, {}, joined.stream); }},
        {"reduce_scatter", [&] { c.reduce_scatter(in, out, {}, Reduction::sum, joined.stream); }},
        {"all_to_all", [&] { c.all_to_all(in, out, {}, joined.stream); }}};
    for (const auto& [name, call] : calls) {
      call();
      joined.device->synchronize(joined.stream);
      need_filled(from.memory, 1, std::string("the input of ") + name + " after abort()");
      need_filled(to.memory, 2, std::string("the output of ") + name + " after abort()");
    }
    need_refusal("barrier() after abort()", ErrorCode::communication, [&] { c.barrier(); });
    return *fault;
  });
  return "";
}

/// Calls whose dtypes, sizes or ranks do not fit, on one rank or two.
std::string refuses(const Subject& subject, int size) {
  const RankDirectory scratch(subject, size);
  run_all_ranks(size, kLimit, [&](int rank) -> std::string {
    Joined group(subject, scratch.path(), rank, size);
    const Registered block(group, 4096);
    Communicator& c = *group.communicator;
    auto view = [&](DType dtype, std::int64_t count) { return View{block.memory.data(), dtype, {count}}; };
    auto refused = [&](const char* what, const std::function<void()>& call) {
      need_refusal(what + std::string(size == 1 ? " by the only rank" : ""), ErrorCode::internal, call);
    };
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(size), 3);
    refused("a sum of i32", [&] { c.all_reduce(view(DType::i32, 8), Reduction::sum, group.stream); });
    refused("a maximum of bf16", [&] { c.all_reduce(view(DType::bf16, 8), Reduction::maximum, group.stream); });
    refused("a sum of u8, scattered", [&] {
      c.reduce_scatter(view(DType::u8, 3 * size), view(DType::u8, 3), counts, Reduction::sum, group.stream);
    });
    refused("slabs that do not fill the whole",
            [&] { c.all_gather(view(DType::u8, 3), view(DType::u8, 8), counts, group.stream); });
    refused("a slab of another size", [&] {
      c.reduce_scatter(view(DType::f32, 3 * size), view(DType::f32, 4), counts, Reduction::sum, group.stream);
    });
    refused("a slab of another dtype",
            [&] { c.all_gather(view(DType::u8, 3), view(DType::f32, 3 * size), counts, group.stream); });
    refused("an exchange of slabs with fewer elements",
            [&] { c.all_to_all(view(DType::u8, 2 * size), view(DType::u8, size), {}, group.stream); });
    refused("a broadcast from no rank", [&] { c.broadcast(view(DType::u8, 3), size, group.stream); });
    refused("a rank that sends to itself", [&] { c.send(view(DType::u8, 3), rank, group.stream); });
    refused("a rank that receives from itself", [&] { c.receive(view(DType::u8, 3), rank, group.stream); });
    c.barrier();
    need(!c.error(), "error() after calls that were refused", c.error().value_or(""), "nothing");
    return "";
  });
  return "10 calls";
}

/// Calls with memory that was not registered, is so no longer, or ends beyond its buffer.
std::string unregistered(const Subject& subject) {
  const TestDirectory scratch;
  run_all_ranks(1, kLimit, [&](int rank) -> std::string {
    Joined joined(subject, scratch.path(), rank, 1);
    Communicator& c = *joined.communicator;
    const testkit::DeviceMemory never(*joined.device, 4096), once(*joined.device, 4096);
    c.register_buffer(once.data(), 4096);
    c.unregister_buffer(once.data());
    const Registered block(joined, 4096);
    const View good{block.memory.data(), DType::f32, {512}};
    const std::pair<const char*, View> bad[] = {
        {"memory that is not registered", {never.data(), DType::f32, {512}}},
        {"memory that is not registered any more", {once.data(), DType::f32, {512}}},
        {"more than was registered", {block.memory.data(), DType::f32, {1025}}},
        {"memory behind a registered buffer", {static_cast<char*>(block.memory.data()) + 4096, DType::f32, {1}}}};
    for (const auto& [what, view] : bad) {
      auto refused = [&, of = std::string(" of ") + what](const char* call, const std::function<void()>& action) {
        need_refusal(call + of, ErrorCode::internal, action);
      };
      refused("all_reduce", [&] { c.all_reduce(view, Reduction::sum, joined.stream); });
      refused("broadcast", [&] { c.broadcast(view, 0, joined.stream); });
      refused("all_gather", [&] { c.all_gather(view, view, {}, joined.stream); });
      refused("reduce_scatter", [&] { c.reduce_scatter(view, view, {}, Reduction::sum, joined.stream); });
    }
    c.all_reduce(good, Reduction::sum, joined.stream);
    joined.device->synchronize(joined.stream);
    need(!c.error(), "error() after calls that were refused", c.error().value_or(""), "nothing");
    return "";
  });
  return "16 calls";
}

std::string grows(const Subject& subject) {
  const TestDirectory scratch;
  const auto outcomes = run_all_ranks(1, kLimit, [&](int rank) {
    Joined joined(subject, scratch.path(), rank, 1);
    Registered block(joined, 4096);
    const View view{block.memory.data(), DType::f32, {1024}};
    joined.device->fill(block.memory.data(), 0, 4096, joined.stream);
    return need_no_growth("an all_reduce, an all_gather and a barrier", [&] {
      joined.communicator->all_reduce(view, Reduction::sum, joined.stream);
      joined.communicator->all_gather(view, view, {}, joined.stream);
      joined.device->synchronize(joined.stream);
      joined.communicator->barrier();
    });
  });
  return outcomes[0].text;
}

}  // namespace

void check_communicator(Report& report, const Subject& subject) {
  if (!report.needed("connects", [&] { return joins(subject, 1), "one rank on device " + subject.options.device; }))
    return;
  std::vector<int> sizes{1};
  const bool holds = report.needed("connects several ranks", [&]() -> std::string {
    for (const int size : {2, 3, 4}) {
      try {
        if (const std::string refusal = joins(subject, size); !refusal.empty()) {
          need(size == 2, std::to_string(size) + " ranks", refusal, "to join, as fewer did");
          return "refuses 2 ranks: " + refusal;
        }
      } catch (const Skipped& missing) {
        if (size == 2) throw;
        return std::to_string(size - 1) + " ranks; of " + std::to_string(size) + ": " + missing.reason;
      }
      sizes.push_back(size);
    }
    return "2, 3 and 4 ranks";
  });
  if (!holds) sizes = {1};
  check_connecting(report, subject, sizes);
  check_collectives(report, subject, sizes);
  report.contract("memory that is not registered", [&] { return unregistered(subject); });
  report.contract("calls leave nothing", [&] { return grows(subject); });
  report.contract("abort", [&] { return aborts(subject); });
  report.contract("wrong calls", [&] {
    std::string text;
    for (const int size : sizes)
      if (size <= 2) text = refuses(subject, size) + " by each of " + std::to_string(size);
    return text;
  });
  if (sizes.size() > 1) check_communicator_faults(report, subject, std::min(sizes.back(), 3));
}

}  // namespace quern::conformance
