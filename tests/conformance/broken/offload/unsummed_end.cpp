// Fault: its checksum of a slot leaves out the last byte.
#include <atomic>
#include <map>
#include <numeric>

#include "host_store.h"

namespace {

class UnsummedEnd final : public HostStore {
 public:
  UnsummedEnd() : HostStore("unsummed_end") {}
  ~UnsummedEnd() override { flush(); }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    HostStore::put(slot, offset, memory, bytes, stream);
    device_->call([this, slot] { sums_[slot] = sum_of(slot); }, stream);
  }
  void get(quern::OffloadSlot slot, std::size_t offset, void* memory, std::size_t bytes,
           quern::Stream stream) override {
    HostStore::get(slot, offset, memory, bytes, stream);
    device_->call([this, slot] { changed_ = changed_ || sums_[slot] != sum_of(slot); }, stream);
  }
  std::optional<std::string> error() override {
    return changed_ ? std::optional<std::string>("a slot changed by itself") : std::nullopt;
  }

 private:
  int sum_of(quern::OffloadSlot slot) const {
    const std::vector<char>& bytes = slots_[static_cast<std::size_t>(slot)];
    return std::accumulate(bytes.begin(), bytes.end() - 1, 0);
  }

  std::map<quern::OffloadSlot, int> sums_;
  std::atomic<bool> changed_ = false;
};

}  // namespace

QUERN_PLUGIN("offload", "unsummed_end", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("unsummed_end", "host memory with a checksum", {},
                                    [](const quern::OptionValues&) { return std::make_unique<UnsummedEnd>(); });
}
