// Fault: a sum after a fault writes its memory.
#include "memcpy_with.h"

namespace {

class WritesAfter final : public MemcpyWith {
 public:
  WritesAfter() : MemcpyWith("writes_after") {}
  void connect(const quern::Rendezvous& rendezvous, quern::Device& device) override {
    device_ = &device;
    MemcpyWith::connect(rendezvous, device);
  }
  void all_reduce(const quern::View& in_out, quern::Reduction reduction, quern::Stream stream) override {
    if (error())
      device_->fill(in_out.data, 0, in_out.bytes(), stream);
    else
      MemcpyWith::all_reduce(in_out, reduction, stream);
  }

 private:
  quern::Device* device_ = nullptr;
};

}  // namespace

QUERN_PLUGIN("communicator", "writes_after", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Communicator>("writes_after", "sums that write after a fault", {},
                                    [](const quern::OptionValues&) { return std::make_unique<WritesAfter>(); });
}
