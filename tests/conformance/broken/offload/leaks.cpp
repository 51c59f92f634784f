// Faults: a put keeps memory, for good or until a flush, or the file that it opens; a store keeps a file or pinned
// memory.
#include <fcntl.h>
#include <unistd.h>

#include "host_store.h"

namespace {

class Leaks final : public HostStore {
 public:
  explicit Leaks(std::string kept) : HostStore("leaks"), kept_(std::move(kept)) {}
  ~Leaks() override {
    for (int file : files_) ::close(file);
  }
  void open(quern::Device& device, const quern::StorePlace& place) override {
    if (kept_ == "opened") static_cast<void>(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (kept_ == "pinned") static_cast<void>(device.allocate(quern::MemoryKind::pinned, 1 << 20));
    HostStore::open(device, place);
  }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    if (kept_ == "files")
      files_.push_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    else if (kept_ == "memory" || kept_ == "unflushed")
      blocks_.push_back(std::make_unique<int>(0));
    HostStore::put(slot, offset, memory, bytes, stream);
  }
  void flush() override {
    if (kept_ == "unflushed") blocks_.clear();
    HostStore::flush();
  }

 private:
  std::string kept_;
  std::vector<std::unique_ptr<int>> blocks_;
  std::vector<int> files_;
};

}  // namespace

QUERN_PLUGIN("offload", "leaks", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  quern::OptionSpec kept;
  kept.key = "kept", kept.help = "kind of leak", kept.type = quern::OptionType::text;
  kept.choices = {"memory", "unflushed", "files", "opened", "pinned"}, kept.default_value = std::string("memory");
  manifest.add<quern::OffloadStore>(
      "leaks", "host memory that leaves something behind", {kept},
      [](const quern::OptionValues& values) { return std::make_unique<Leaks>(values.get<std::string>("kept")); });
}
