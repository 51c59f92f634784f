// No fault: puts and gets take 0.25 s each before they return, and do not wait for the stream.
#include <chrono>
#include <thread>

#include "host_store.h"

namespace {

class Slow final : public HostStore {
 public:
  Slow() : HostStore("slow") {}

 private:
  void copy(void* to, const void* from, std::size_t bytes, quern::Stream stream) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    HostStore::copy(to, from, bytes, stream);
  }
};

}  // namespace

QUERN_PLUGIN("offload", "slow", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("slow", "host memory, slowly", {},
                                    [](const quern::OptionValues&) { return std::make_unique<Slow>(); });
}
