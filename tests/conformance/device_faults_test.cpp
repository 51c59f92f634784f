// Devices with one fault each.
#include "checked.h"

#include <algorithm>

#include <doctest/doctest.h>

#include "conformance/device/device_ops.h"
#include "quern/testkit/forwarding_device.h"
#include "run/options/run_schemas.h"

using namespace quern;
using namespace quern::conformance;

namespace {

// All ops of a device take half a minute: its faults are looked for among contracts that they could break.
const std::vector<std::string> kOps{"op "}, kModels{"fusions", "models", "8 bits"},
    kDevice{"memory", "work of the host", "events", "capture", "observation", "timed choices"};

/// A device whose kernels do not know an attribute.
class Ignoring final : public testkit::ForwardingDevice {
 public:
  Ignoring(std::shared_ptr<Device> inner, std::string attribute)
      : ForwardingDevice(std::move(inner)), attribute_(std::move(attribute)) {}
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override {
    if (op.kind == "soft_cap") return ForwardingDevice::prepare(op);  // nothing but its cap
    OpInstance plain = op;
    plain.attributes = {};
    for (const auto& [name, value] : op.attributes.all())
      if (name != attribute_) plain.attributes.set(name, value);
    return ForwardingDevice::prepare(plain);
  }

 private:
  std::string attribute_;
};

}  // namespace

TEST_CASE("an op that writes behind its output") {
  check_broken("device", "overrun", {"op add, swiglu, gelu, sums"}, {"add(", "written behind output 0"}, kOps);
}

TEST_CASE("an op that leaves elements of odd sizes unwritten") {
  check_broken("device", "short_tail", {"op add, swiglu, gelu, sums"}, {"swiglu(", "nan", "want "}, kOps);
}

TEST_CASE("an op that errs at one size, in 8 bits only") {
  check_broken("device", "half_codes", {"fusions", "models"}, {"in e4m3"}, kModels);
}

TEST_CASE("attention that sees beyond its window, and scores and logits without their caps") {
  struct Case {
    const char *attribute, *family;
  };
  PluginHost host = run_host();
  const std::unique_ptr<Device> reference = oracle(host);
  for (const Case& c : {Case{"window", "attention"}, {"cap", "attention"}, {"cap", "soft caps of logits"}}) {
    CAPTURE(c.attribute);
    CAPTURE(c.family);
    const auto family = std::ranges::find(op_families(), c.family, &OpFamily::name);
    REQUIRE(family != op_families().end());
    Ignoring device(oracle(host), c.attribute);
    CHECK_NOTHROW(compare_family(*family, *reference, device.inner()));
    CHECK_THROWS_AS(compare_family(*family, *reference, device), Broken);
  }
}

TEST_CASE("a stream that does not wait for an event") {
  check_broken("device", "no_wait", {"events"}, {"a copy on a stream that waits", "got ", "want 16"}, kDevice);
}

TEST_CASE("a host that does not wait for an event") {
  check_broken("device", "early_host", {"events"}, {"synchronize() of the event", "got ", "want 16"}, kDevice);
}
