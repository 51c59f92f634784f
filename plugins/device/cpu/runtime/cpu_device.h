#pragma once
// The CPU as a device: every op in fp32 with results rounded to the declared formats. It is the oracle for other
// devices and runs whole trainings. Streams run beside the host (streams.h); kernels of the compute stream with a team
// of OpenMP threads, the other streams' kernels on their own thread.

#include <map>
#include <string>

#include "options.h"
#include "quern/device.h"
#include "runtime/kernels.h"
#include "runtime/shared_memory.h"
#include "runtime/streams.h"
#include "runtime/words.h"

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
  /// Waits for all streams first, since work on them may use the memory.
  void release(MemoryKind kind, void* memory) noexcept override;
  /// Waits for all streams, since the memory's pages are exchanged.
  SharedHandle export_memory(void* memory) override;
  void* import_memory(const SharedHandle& handle) override { return memory_.import(handle); }
  void release_imported(void* memory) noexcept override;
  void pin(void*, std::size_t) override {}
  /// Waits for all streams first, since work on them may use the memory.
  void unpin(void*) noexcept override { streams_.drain(); }
  Stream stream(StreamKind kind) override { return streams_.stream(kind); }
  Event make_event() override { return streams_.make_event(); }

  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override;
  void fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) override;
  void call(std::function<void()> work, Stream stream) override { streams_.run(stream, std::move(work)); }
  void write_word(std::uint32_t* word, std::uint32_t value, Stream stream) override {
    streams_.run(stream, [=] { set_word(word, value); });
  }
  void wait_word(const std::uint32_t* word, std::uint32_t mask, Stream stream) override {
    streams_.run(stream, [=] { await_word(word, mask); });
  }
  void record(Event event, Stream stream) override { streams_.record(event, stream); }
  void wait(Stream stream, Event event) override { streams_.wait(stream, event); }
  void synchronize(Stream stream) override { streams_.synchronize(stream); }
  void synchronize(Event event) override { streams_.synchronize(event); }
  std::unique_ptr<Graph> capture(Stream stream, const std::function<void()>& work) override;
  double elapsed(Event from, Event to) override { return streams_.elapsed(from, to); }

  Telemetry telemetry() override { return {}; }
  void begin_range(const char*) override {}
  void end_range() override {}

  /// What bits depend on beside the config. It is the machine's: what another one had cannot be taken over.
  std::string save_state() const override;
  void load_state(std::string_view) override {}

 private:
  int threads_;  ///< of the compute stream's team
  DeviceTraits traits_;
  OpTable ops_;
  std::map<std::string, CustomKernel, std::less<>> added_;
  SharedMemory memory_;
  Streams streams_;
};

}  // namespace quern::cpu
