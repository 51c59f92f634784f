#pragma once
// The CPU as a device: every op in fp32 with results rounded to the declared formats. It is the oracle for other
// devices and runs whole trainings. Streams run at once, on the calling thread and its OpenMP team.

#include <chrono>
#include <deque>
#include <map>
#include <string>

#include "kernels.h"
#include "options.h"
#include "quern/device.h"

namespace quern::cpu {

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const CpuOptions& options);

  const DeviceTraits& traits() const override { return traits_; }
  std::span<const Fusion> fusions() const override;
  OpSupport query(const OpInstance& op) const override;

  void open(int ordinal) override;
  void add_kernel(CustomKernel kernel) override { added_[kernel.op] = std::move(kernel); }
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override;
  void* allocate(MemoryKind kind, std::size_t bytes) override;
  void release(MemoryKind kind, void* memory) noexcept override;
  Stream stream(StreamKind kind) override;
  Event make_event() override;

  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override;
  void fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) override;
  void record(Event event, Stream stream) override;
  void wait(Stream, Event) override {}
  void synchronize(Stream) override {}
  void synchronize(Event) override {}
  std::unique_ptr<Graph> capture(Stream stream, const std::function<void()>& work) override;
  double elapsed(Event from, Event to) override;

  Telemetry telemetry() override { return {}; }
  void begin_range(const char*) override {}
  void end_range() override {}

  /// What bits depend on beside the config. It is the machine's: what another one had cannot be taken over.
  std::string save_state() const override;
  void load_state(std::string_view) override {}

 private:
  using Clock = std::chrono::steady_clock;

  CpuOptions options_;
  DeviceTraits traits_;
  OpTable ops_;
  std::map<std::string, CustomKernel, std::less<>> added_;
  std::deque<Clock::time_point> events_;  ///< a deque keeps handles to its elements valid as it grows
  char streams_[4] = {};                  ///< one address a StreamKind: handles that are not null
};

}  // namespace quern::cpu
