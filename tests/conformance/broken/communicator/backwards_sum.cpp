// Fault: sums of f32 begin with the last rank, which shows from three ranks on.
#include "memcpy_with.h"
#include "quern/testkit/forwarding_device.h"

namespace {

using namespace quern;

class Backwards final : public Kernel {
 public:
  Backwards(Device& device, std::int64_t own) : device_(device), own_(own) {}
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) const override {
    auto work = [in = inputs[0], own = inputs.back(), number = own_, out = outputs[0]] {
      for (std::int64_t i = 0; i < in.columns(); ++i) {
        float sum = 0;
        for (std::int64_t rank = in.rows(); rank-- > 0;)
          sum += rank == number ? own.as<float>()[i] : in.as<float>()[rank * in.columns() + i];
        out.as<float>()[i] = sum;
      }
    };
    device_.call(work, exec.stream);
  }

 private:
  Device& device_;
  const std::int64_t own_;
};

class BackwardsDevice final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override {
    if (op.inputs[0].dtype == DType::f32 && op.attributes.word("reduction") == "sum")
      return std::make_unique<Backwards>(inner(), op.inputs.size() > 1 ? op.attributes.integer("own") : -1);
    return ForwardingDevice::prepare(op);
  }
};

/// Made before what uses it.
struct Holds {
  std::unique_ptr<BackwardsDevice> device;
};

class BackwardsSum final : private Holds, public MemcpyWith {
 public:
  BackwardsSum() : MemcpyWith("backwards_sum") {}
  void connect(const Rendezvous& rendezvous, Device& borrowed) override {
    device = std::make_unique<BackwardsDevice>(std::shared_ptr<Device>(&borrowed, [](Device*) {}));
    MemcpyWith::connect(rendezvous, *device);
  }
};

}  // namespace

QUERN_PLUGIN("communicator", "backwards_sum", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Communicator>("backwards_sum", "sums from the last rank on", {},
                             [](const OptionValues&) { return std::make_unique<BackwardsSum>(); });
}
