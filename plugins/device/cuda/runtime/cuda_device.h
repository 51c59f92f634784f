#pragma once
// An NVIDIA GPU as a device. Planning needs no hardware: facts come from the GPU that is here or from a table. Work is
// enqueued from the thread that opened the device.

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "options.h"
#include "quern/device.h"
#include "runtime/gpu_table.h"
#include "runtime/kernels.h"
#include "runtime/shareable_memory.h"
#include "runtime/telemetry.h"

namespace quern::cuda {

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(const CudaOptions& options);
  ~CudaDevice() override;

  const DeviceTraits& traits() const override { return facts_.device; }
  std::span<const Fusion> fusions() const override;
  OpSupport query(const OpInstance& op) const override;

  void open(int ordinal) override;
  void add_kernel(CustomKernel kernel) override { added_[kernel.op] = std::move(kernel); }
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override;
  void* allocate(MemoryKind kind, std::size_t bytes) override;
  void release(MemoryKind kind, void* memory) noexcept override;
  SharedHandle export_memory(void* memory) override;
  void* import_memory(const SharedHandle& handle) override;
  void release_imported(void* memory) noexcept override;
  void pin(void* memory, std::size_t bytes) override;
  void unpin(void* memory) noexcept override;
  Stream stream(StreamKind kind) override;
  Event make_event() override;

  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override;
  void fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) override;
  void call(std::function<void()> work, Stream stream) override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void write_word(std::uint32_t* word, std::uint32_t value, Stream stream) override;
  void wait_word(const std::uint32_t* word, std::uint32_t mask, Stream stream) override;
  void synchronize(Stream stream) override;
  void synchronize(Event event) override;
  std::unique_ptr<Graph> capture(Stream stream, const std::function<void()>& work) override;
  double elapsed(Event from, Event to) override;

  Telemetry telemetry() override;
  void begin_range(const char* name) override;
  void end_range() override;

  std::string save_state() const override;
  void load_state(std::string_view state) override;

  /// For tests: kernels that are prepared from here on divide their work among so many multiprocessors; plain GEMMs
  /// that were prepared before keep theirs.
  void divide_among(int multiprocessors) { context_.multiprocessors = multiprocessors; }

 private:
  void need_open(const char* what) const;
  std::string bus_id() const;
  void* make_constant(const void* host, std::size_t bytes);
  void close() noexcept;

  CudaOptions options_;
  GpuFacts facts_;
  OpTable ops_;
  std::map<std::string, CustomKernel, std::less<>> added_;

  int ordinal_ = -1;  ///< -1: not open
  CudaContext context_;
  std::unique_ptr<ShareableMemory> memory_;
  std::unique_ptr<TimedChoices> choices_;
  std::unique_ptr<MatmulPlans> plans_;
  std::unique_ptr<GpuTelemetry> telemetry_;  ///< from the first question on
  cudaStream_t streams_[4] = {};             ///< by StreamKind
  std::vector<cudaEvent_t> events_;
  std::vector<void*> constants_;
};

}  // namespace quern::cuda
