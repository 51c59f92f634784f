// Memory of runs with adapters: what a plan states is what the run takes, and what it takes is written to.
#include <algorithm>
#include <cstring>
#include <map>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "quern/testkit/forwarding_device.h"
#include "run/options/run_schemas.h"

using namespace quern;
using namespace quern::testing;

namespace {

struct Memory {
  std::int64_t device = 0, host = 0;  ///< bytes, at their peak
  std::int64_t written = 0;           ///< of the device's, in blocks of 64
};

/// The CPU device, counting the memory that a run holds. Memory is zero at first, so a block of zeros at the end was
/// never written to.
class Measured final : public testkit::ForwardingDevice {
 public:
  Measured(std::shared_ptr<Device> inner, Memory& memory) : ForwardingDevice(std::move(inner)), memory_(memory) {}

  void* allocate(MemoryKind kind, std::size_t bytes) override {
    void* memory = ForwardingDevice::allocate(kind, bytes);
    take(memory, bytes, kind == MemoryKind::device);
    return memory;
  }
  void release(MemoryKind kind, void* memory) noexcept override {
    if (kind == MemoryKind::device) count_written(memory);
    drop(memory, kind == MemoryKind::device);
    ForwardingDevice::release(kind, memory);
  }
  void pin(void* memory, std::size_t bytes) override {
    ForwardingDevice::pin(memory, bytes);
    take(memory, bytes, false);
  }
  void unpin(void* memory) noexcept override {
    drop(memory, false);
    ForwardingDevice::unpin(memory);
  }

 private:
  void take(void* memory, std::size_t bytes, bool on_device) {
    sizes_[memory] = static_cast<std::int64_t>(bytes);
    std::int64_t& now = on_device ? device_ : host_;
    std::int64_t& most = on_device ? memory_.device : memory_.host;
    most = std::max(most, now += static_cast<std::int64_t>(bytes));
  }
  void drop(void* memory, bool on_device) noexcept {
    if (sizes_.contains(memory)) (on_device ? device_ : host_) -= sizes_.at(memory);
    sizes_.erase(memory);
  }
  void count_written(const void* memory) noexcept {
    constexpr std::int64_t kBlock = 64;
    static constexpr char kZeros[kBlock] = {};
    const auto* bytes = static_cast<const char*>(memory);
    for (std::int64_t i = 0; memory && i + kBlock <= sizes_.at(const_cast<void*>(memory)); i += kBlock)
      if (std::memcmp(bytes + i, kZeros, kBlock) != 0) memory_.written += kBlock;
  }

  Memory& memory_;
  std::map<void*, std::int64_t> sizes_;
  std::int64_t device_ = 0, host_ = 0;
};

}  // namespace

TEST_CASE("a run of LoRA takes the bytes that its plan states, to 1%, and no byte of them in vain") {
  TinyFiles files;
  const Overrides larger{"model.llama.hidden_size=128",
                         "model.llama.intermediate_size=384",
                         "model.llama.num_hidden_layers=3",
                         "adapter.id=lora",
                         "adapter.rank=16",
                         "train.steps=3",
                         "checkpoint.every=0",
                         "checkpoint.export=false"};
  int runs = 0;
  for (const Overrides& form :
       {Overrides{"precision.id=fp32"}, Overrides{"precision.id=bf16"},
        Overrides{"precision.id=bf16", "optimizer.master=bf16", "adapter.dropout=0.1"}, Overrides{"precision.id=e4m3"},
        Overrides{"precision.id=int8"}, Overrides{"precision.id=e4m3", "memory.weights=host"},
        Overrides{"precision.id=bf16", "memory.weights=host", "memory.moments=host"},
        Overrides{"precision.id=bf16", "memory.recompute=['block']"}}) {
    CAPTURE(form[0]);
    CAPTURE(form.back());
    const Overrides all = with(larger, form);
    const ConfiguredRun planned(ConfigDocument::read(files.config(), all));
    const Plan plan = make_plan(planned.session.parts(), planned.session.plan_options());
    Memory memory;
    train_here(files, with(all, {files.run("run" + std::to_string(runs++))}), 0, [&](Session& session) {
      session.device = std::make_unique<Measured>(std::shared_ptr<Device>(std::move(session.device)), memory);
    });
    CHECK(memory.device == doctest::Approx(plan.device_total()).epsilon(0.01));
    CHECK(memory.written == doctest::Approx(plan.device_total()).epsilon(0.01));
    constexpr std::int64_t kHugePage = 1 << 21;  // to which the host store rounds up
    CHECK(memory.host >= plan.host_bytes());
    CHECK(memory.host <= plan.host_bytes() + plan.host_bytes() / 100 + kHugePage);
  }
}
