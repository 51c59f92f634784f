// Fault: error() says something behind a get of a whole page, though its bytes are right.
#include <atomic>

#include "host_store.h"

namespace {

class FalseAlarm final : public HostStore {
 public:
  FalseAlarm() : HostStore("false_alarm") {}
  void get(quern::OffloadSlot slot, std::size_t offset, void* memory, std::size_t bytes,
           quern::Stream stream) override {
    HostStore::get(slot, offset, memory, bytes, stream);
    if (bytes % 4096 == 0) alarmed_ = true;
  }
  std::optional<std::string> error() override {
    return alarmed_ ? std::optional<std::string>("page 1 changed by itself") : std::nullopt;
  }

 private:
  std::atomic<bool> alarmed_ = false;
};

}  // namespace

QUERN_PLUGIN("offload", "false_alarm", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("false_alarm", "host memory that is suspected", {},
                                    [](const quern::OptionValues&) { return std::make_unique<FalseAlarm>(); });
}
