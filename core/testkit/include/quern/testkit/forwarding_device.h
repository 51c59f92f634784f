#pragma once
// A device that hands everything to another one: to change one thing about a device, derive and override that. The
// inner one is shared, so that it may also be borrowed.

#include <memory>
#include <utility>

#include "quern/device.h"

namespace quern::testkit {

class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::shared_ptr<Device> inner) : inner_(std::move(inner)) {}
  Device& inner() { return *inner_; }

  const DeviceTraits& traits() const override { return inner_->traits(); }
  std::span<const Fusion> fusions() const override { return inner_->fusions(); }
  OpSupport query(const OpInstance& op) const override { return inner_->query(op); }
  void open(int ordinal) override { inner_->open(ordinal); }
  void add_kernel(CustomKernel kernel) override { inner_->add_kernel(std::move(kernel)); }
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override { return inner_->prepare(op); }
  void* allocate(MemoryKind kind, std::size_t bytes) override { return inner_->allocate(kind, bytes); }
  void release(MemoryKind kind, void* memory) noexcept override { inner_->release(kind, memory); }
  SharedHandle export_memory(void* memory) override { return inner_->export_memory(memory); }
  void* import_memory(const SharedHandle& handle) override { return inner_->import_memory(handle); }
  void release_imported(void* memory) noexcept override { inner_->release_imported(memory); }
  void pin(void* memory, std::size_t bytes) override { inner_->pin(memory, bytes); }
  void unpin(void* memory) noexcept override { inner_->unpin(memory); }
  Stream stream(StreamKind kind) override { return inner_->stream(kind); }
  Event make_event() override { return inner_->make_event(); }
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    inner_->copy(to, from, bytes, stream);
  }
  void fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) override {
    inner_->fill(to, byte, bytes, stream);
  }
  void call(std::function<void()> work, Stream stream) override { inner_->call(std::move(work), stream); }
  void record(Event event, Stream stream) override { inner_->record(event, stream); }
  void wait(Stream stream, Event event) override { inner_->wait(stream, event); }
  void write_word(std::uint32_t* word, std::uint32_t value, Stream stream) override {
    inner_->write_word(word, value, stream);
  }
  void wait_word(const std::uint32_t* word, std::uint32_t mask, Stream stream) override {
    inner_->wait_word(word, mask, stream);
  }
  void synchronize(Stream stream) override { inner_->synchronize(stream); }
  void synchronize(Event event) override { inner_->synchronize(event); }
  std::unique_ptr<Graph> capture(Stream stream, const std::function<void()>& work) override {
    return inner_->capture(stream, work);
  }
  double elapsed(Event from, Event to) override { return inner_->elapsed(from, to); }
  Telemetry telemetry() override { return inner_->telemetry(); }
  void begin_range(const char* name) override { inner_->begin_range(name); }
  void end_range() override { inner_->end_range(); }
  std::string save_state() const override { return inner_->save_state(); }
  void load_state(std::string_view state) override { inner_->load_state(state); }

 private:
  std::shared_ptr<Device> inner_;
};

}  // namespace quern::testkit
