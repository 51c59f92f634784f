#pragma once
// A device whose copies take as long as over a slower link: copies of one stream share the rate.

#include <chrono>
#include <memory>
#include <thread>

#include "quern/testkit/forwarding_device.h"

namespace quern::bench {

class ThrottledDevice final : public testkit::ForwardingDevice {
 public:
  /// `rate` in bytes/s.
  ThrottledDevice(std::shared_ptr<Device> inner, double rate) : ForwardingDevice(std::move(inner)), rate_(rate) {}

  /// Holds the stream behind the copy until its time is over.
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    using Clock = std::chrono::steady_clock;
    const auto least = std::chrono::duration<double>(static_cast<double>(bytes) / rate_);
    auto begin = std::make_shared<Clock::time_point>();
    call([begin] { *begin = Clock::now(); }, stream);
    ForwardingDevice::copy(to, from, bytes, stream);
    call([begin, least] { std::this_thread::sleep_until(*begin + least); }, stream);
  }

 private:
  double rate_;
};

}  // namespace quern::bench
