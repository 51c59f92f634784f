#pragma once
// The CPU device under another id, to spoil one thing about it.

#include "plugin/plugin_host.h"
#include "quern/testkit/forwarding_device.h"

class Cpu : public quern::testkit::ForwardingDevice {
 public:
  explicit Cpu(std::string id) : ForwardingDevice(made()), traits_(inner().traits()) { traits_.id = std::move(id); }
  const quern::DeviceTraits& traits() const override { return traits_; }

 private:
  static std::unique_ptr<quern::Device> made() {
    static quern::PluginHost host(quern::PluginHost::standard_folders());  // the device's code is never unloaded
    return host.create<quern::Device>("cpu", quern::default_values(host.require("device", "cpu").options));
  }

  quern::DeviceTraits traits_;
};

/// After the right kernel ran, `spoil` does something to its output.
class SpoiltKernel final : public quern::Kernel {
 public:
  using Spoil = void (*)(const quern::View& output);
  SpoiltKernel(quern::Device& device, std::unique_ptr<quern::Kernel> right, Spoil spoil)
      : device_(device), right_(std::move(right)), spoil_(spoil) {}
  void launch(std::span<const quern::View> inputs, std::span<const quern::View> outputs,
              const quern::Exec& exec) const override {
    right_->launch(inputs, outputs, exec);
    device_.synchronize(exec.stream);
    if (outputs[0]) spoil_(outputs[0]);
  }

 private:
  quern::Device& device_;
  std::unique_ptr<quern::Kernel> right_;
  Spoil spoil_;
};

/// With one op spoilt.
class CpuWith final : public Cpu {
 public:
  CpuWith(std::string id, std::string kind, SpoiltKernel::Spoil spoil)
      : Cpu(std::move(id)), kind_(std::move(kind)), spoil_(spoil) {}
  std::unique_ptr<quern::Kernel> prepare(const quern::OpInstance& op) override {
    auto right = ForwardingDevice::prepare(op);
    if (op.kind != kind_) return right;
    return std::make_unique<SpoiltKernel>(inner(), std::move(right), spoil_);
  }

 private:
  std::string kind_;
  SpoiltKernel::Spoil spoil_;
};
