// Of devices: what they say of themselves, memory and events, and the plan-time answers. device_ops.cpp runs
// the ops.
#include <unistd.h>

#include <algorithm>

#include "conformance/contracts.h"
#include "conformance/device/device_ops.h"
#include "conformance/harness/late_work.h"
#include "quern/testkit/device_memory.h"
#include "quern/testkit/op_comparison.h"

namespace quern::conformance {

namespace {

using testkit::DeviceMemory;

std::string says(const Subject& subject) {
  auto device = subject.make<Device>();
  const DeviceTraits& traits = device->traits();
  need(traits.id == subject.factory.id, "traits().id", traits.id, subject.factory.id);
  need(!traits.name.empty(), "traits().name", "nothing", "what people call it");
  const std::size_t alignment = traits.alignment;
  need(alignment > 0 && (alignment & (alignment - 1)) == 0, "traits().alignment", std::to_string(alignment),
       "a power of two");
  need(traits.memory_rate > 0, "traits().memory_rate", number(traits.memory_rate), "an assumption, in bytes/s");
  need(!traits.matmul_rates.empty(), "traits().matmul_rates", "none", "one a format, for time estimates");
  for (auto [dtype, rate] : traits.matmul_rates)
    need(rate > 0, "matmul rate of " + std::string(name_of(dtype)), number(rate), "above 0");
  return traits.name;
}

class TestKernel final : public Kernel {
 public:
  void launch(std::span<const View>, std::span<const View>, const Exec&) const override {}
};

std::string takes_kernels(const Subject& subject) {
  auto device = subject.make<Device>();
  const OpInstance op{.kind = "quern_check_custom_op", .geometry = {}};
  need(!device->query(op).refusal.empty(), "an op of an unknown kind", "accepted",
       "refused when planning, with a reason");
  device->add_kernel({device->traits().id, op.kind, [](const OpInstance&) { return std::make_unique<TestKernel>(); }});
  need(device->query(op).refusal.empty(), "an op whose kernel was added", "refused: " + device->query(op).refusal,
       "accepted");
  return "";
}

std::string memory_works(Device& device) {
  Stream stream = device.stream(StreamKind::compute);
  for (MemoryKind kind : {MemoryKind::device, MemoryKind::pinned, MemoryKind::mapped, MemoryKind::write_combined}) {
    for (std::size_t bytes : {std::size_t{1}, std::size_t{255}, std::size_t{100003}}) {
      void* memory = device.allocate(kind, bytes);
      const auto address = reinterpret_cast<std::uintptr_t>(memory);
      device.release(kind, memory);
      need(address != 0 && address % device.traits().alignment == 0, "address of " + std::to_string(bytes) + " bytes",
           std::to_string(address), "a multiple of " + std::to_string(device.traits().alignment));
    }
  }
  for (auto [offset, bytes] : {std::pair<std::size_t, std::size_t>{0, 1}, {3, 7}, {1, 4097}, {129, 99991}}) {
    DeviceMemory block(device, offset + bytes), other(device, bytes);
    std::vector<std::uint8_t> want(bytes), got(bytes);
    for (std::size_t i = 0; i < bytes; ++i) want[i] = static_cast<std::uint8_t>(i * 37 + 1);
    char* at = static_cast<char*>(block.data()) + offset;
    device.copy(at, want.data(), bytes, stream);
    device.copy(other.data(), at, bytes, stream);
    device.copy(got.data(), other.data(), bytes, stream);
    device.synchronize(stream);
    const std::string where = std::to_string(bytes) + " bytes at " + std::to_string(offset);
    need(got == want, "a copy there, across and back of " + where, "other bytes", "the same");
    device.fill(at, 0x5C, bytes, stream);
    device.copy(got.data(), at, bytes, stream);
    device.synchronize(stream);
    need(got == std::vector<std::uint8_t>(bytes, 0x5C), "a fill of " + where, "other bytes", "the byte");
    need(block.touched().empty() && other.touched().empty(), "copies and fills of " + where,
         "bytes written beside them", "none");
  }
  return "";
}

/// Memory that is exported and mapped again: by this process, which a device may refuse.
std::string shares(Device& device) {
  Stream stream = device.stream(StreamKind::compute);
  DeviceMemory block(device, 4099);
  SharedHandle handle;
  void* mapped = nullptr;
  try {
    handle = device.export_memory(block.data());
    mapped = device.import_memory(handle);
  } catch (const Error& error) {
    if (handle.descriptor >= 0) ::close(handle.descriptor);
    need(error.code() == ErrorCode::resources && *error.what() != 0, "the refusal to share memory", error.what(),
         "a resources error that says why");
    return error.what();
  }
  if (handle.descriptor >= 0) ::close(handle.descriptor);
  std::vector<std::uint8_t> got(4099);
  device.copy(got.data(), mapped, got.size(), stream);
  device.synchronize(stream);
  need(got == std::vector<std::uint8_t>(4099, 0xFF), "mapped memory", "other bytes", "the exported memory's");
  device.fill(mapped, 0x2B, 4099, stream);
  device.synchronize(stream);
  block.read(got.data());
  need(got == std::vector<std::uint8_t>(4099, 0x2B), "memory after a fill where it is mapped", "other bytes",
       "the fill's");
  need(block.touched().empty(), "a fill where memory is mapped", "bytes written beside it", "none");
  device.release_imported(mapped);
  return "mapped twice";
}

std::string calls_host(Device& device) {
  Stream stream = device.stream(StreamKind::communication);
  DeviceMemory host(device, 1, MemoryKind::pinned);
  const auto* byte = static_cast<const volatile std::uint8_t*>(host.data());
  std::vector<int> seen;
  for (std::uint8_t value : {3, 5, 9}) {
    device.fill(host.data(), value, 1, stream);
    device.call([&seen, byte] { seen.push_back(*byte); }, stream);
  }
  device.synchronize(stream);
  need(seen == std::vector<int>{3, 5, 9}, "work of the host between three fills of a stream", "another order",
       "each after the fill before it");
  return "";
}

/// Fills of one block, one after another, so many that a stream which does not wait for them is seen. They end with
/// the byte that is returned.
std::uint8_t fill_again_and_again(Device& device, const DeviceMemory& block, Stream stream) {
  constexpr std::uint8_t kFills = 16;
  for (std::uint8_t byte = 1; byte <= kFills; ++byte) device.fill(block.data(), byte, block.bytes(), stream);
  return kFills;
}

constexpr std::size_t kBigBlock = (std::size_t{16} << 20) + 1;

/// Index and value of the first byte that is not `want`; empty: none.
std::string first_other(const std::uint8_t* bytes, std::size_t count, std::uint8_t want) {
  const std::uint8_t* end = bytes + count;
  const std::uint8_t* other = std::find_if(bytes, end, [want](std::uint8_t byte) { return byte != want; });
  return other == end ? "" : std::to_string(*other) + " at " + std::to_string(other - bytes);
}

/// Two streams alternate on one block, by events that are recorded again and again.
void need_streams_to_wait(Device& device) {
  Stream compute = device.stream(StreamKind::compute), copy = device.stream(StreamKind::copy_in);
  Event filled = device.make_event(), copied = device.make_event();
  DeviceMemory block(device, kBigBlock), kept(device, kBigBlock), last(device, kBigBlock);
  std::uint8_t byte = 0;
  LateWork late(device, compute);
  for (const DeviceMemory* to : {&last, &kept, &last}) {
    byte = fill_again_and_again(device, block, compute);
    device.record(filled, compute);
    device.wait(copy, filled);
    device.copy(to->data(), block.data(), kBigBlock, copy);
    device.record(copied, copy);
    device.wait(compute, copied);
  }
  late.during([&] { device.synchronize(copy); });
  late.end();
  std::vector<std::uint8_t> got(kBigBlock);
  for (const DeviceMemory* from : {&kept, &last}) {
    from->read(got.data());
    const std::string other = first_other(got.data(), got.size(), byte);
    need(other.empty(), "a copy on a stream that waits for fills on another one", other, std::to_string(byte));
  }
}

void need_host_to_wait(Device& device) {
  Stream compute = device.stream(StreamKind::compute);
  Event copied = device.make_event();
  DeviceMemory block(device, kBigBlock), host(device, kBigBlock, MemoryKind::pinned);
  device.synchronize(copied);  // never recorded: done
  device.wait(compute, copied);
  LateWork late(device, compute);
  const std::uint8_t byte = fill_again_and_again(device, block, compute);
  device.copy(host.data(), block.data(), kBigBlock, compute);
  device.record(copied, compute);
  late.during([&] { device.synchronize(copied); });
  const std::string other = first_other(static_cast<const std::uint8_t*>(host.data()), kBigBlock, byte);
  need(other.empty(), "what the host sees after synchronize() of the event after a copy", other, std::to_string(byte));
}

std::string events_work(Device& device) {
  need_streams_to_wait(device);
  need_host_to_wait(device);
  Stream compute = device.stream(StreamKind::compute);
  Event first = device.make_event(), second = device.make_event();
  DeviceMemory block(device, 1 << 20);
  device.record(first, compute);
  device.fill(block.data(), 1, block.bytes(), compute);
  device.record(second, compute);
  device.synchronize(compute);
  const double time = device.elapsed(first, second);
  need(time >= 0, "elapsed() between two events", number(time), "0 or more milliseconds");
  return "";
}

std::string captures(Device& device) {
  Stream stream = device.stream(StreamKind::compute);
  DeviceMemory block(device, 4099);
  auto work = [&] { device.fill(block.data(), 7, block.bytes(), stream); };
  if (!device.traits().can_capture) {
    need_refusal("capture() where traits().can_capture is false", ErrorCode::internal,
                 [&] { device.capture(stream, work); });
    return "says that it cannot";
  }
  std::unique_ptr<Graph> graph = device.capture(stream, work);
  std::vector<std::uint8_t> got(4099);
  block.read(got.data());
  need(got[0] == 0xFF, "memory after a capture", "written", "untouched until the graph is launched");
  for (int launch : {0, 1}) {
    device.fill(block.data(), 0, block.bytes(), stream);
    graph->launch(stream);
    device.synchronize(stream);
    block.read(got.data());
    need(got == std::vector<std::uint8_t>(4099, 7), "launch " + std::to_string(launch) + " of a graph", "other bytes",
         "the captured value");
  }
  return "";
}

std::string observes(Device& device) {
  device.begin_range("outer");
  device.begin_range("inner");
  device.end_range();
  device.end_range();
  Telemetry telemetry = device.telemetry();
  for (const Reading& reading : telemetry.readings) need(!reading.name.empty(), "a reading", "no name", "a name");
  return std::to_string(telemetry.readings.size()) + " readings" +
         (telemetry.unavailable.empty() ? "" : "; " + telemetry.unavailable);
}

std::string keeps_choices(const Subject& subject, Device& device) {
  const std::string state = device.save_state();
  auto other = subject.make<Device>();
  other->open(subject.options.ordinal);
  other->load_state(state);
  need(other->save_state() == state, "save_state() after load_state()", "another text", "the one that was loaded");
  return std::to_string(state.size()) + " bytes of timed choices";
}

}  // namespace

void check_device(Report& report, const Subject& subject) {
  report.contract("traits", [&] { return says(subject); });
  report.contract("added kernels", [&] { return takes_kernels(subject); });
  report.contract("plans ops", [&] { return plans_ops(*subject.make<Device>()); });

  std::unique_ptr<Device> device = subject.make<Device>();
  std::string absent;
  auto contract = [&](const std::string& name, const std::function<std::string()>& body) {
    report.contract(name, [&] {
      if (!absent.empty()) throw Skipped{absent};
      return body();
    });
  };
  report.needed("opens", [&]() -> std::string {
    try {
      device->open(subject.options.ordinal);
    } catch (const Error& error) {
      need(error.code() == ErrorCode::resources, "the refusal to open", error.what(), "a resources error");
      absent = "no hardware to run on";
      throw Skipped{error.what()};
    }
    return "unit " + std::to_string(subject.options.ordinal);
  });
  contract("memory", [&] { return memory_works(*device); });
  contract("memory for others", [&] { return shares(*device); });
  contract("work of the host", [&] { return calls_host(*device); });
  contract("events", [&] { return events_work(*device); });
  contract("capture", [&] { return captures(*device); });
  contract("observation", [&] { return observes(*device); });
  std::unique_ptr<Device> reference = oracle(subject.host);
  for (const OpFamily& family : op_families())
    contract("op " + family.name, [&] { return compare_family(family, *reference, *device); });
  contract("fusions", [&] { return fusions_change_no_bit(subject, *device); });
  contract("models", [&] { return models_agree(subject, *device); });
  contract("timed choices", [&] { return keeps_choices(subject, *device); });
}

}  // namespace quern::conformance
