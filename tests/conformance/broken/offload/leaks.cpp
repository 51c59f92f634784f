// Faults: a put keeps the memory and the file that it opens.
#include <fcntl.h>

#include "host_store.h"

namespace {

class Leaks final : public HostStore {
 public:
  explicit Leaks(bool files) : HostStore("leaks"), files_(files) {}
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    if (files_)
      static_cast<void>(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    else
      kept_.push_back(new int(0));
    HostStore::put(slot, offset, memory, bytes, stream);
  }

 private:
  bool files_;
  std::vector<int*> kept_;
};

}  // namespace

QUERN_PLUGIN("offload", "leaks", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  quern::OptionSpec files;
  files.key = "files", files.help = "leaks files, not memory", files.type = quern::OptionType::boolean;
  files.default_value = false;
  manifest.add<quern::OffloadStore>(
      "leaks", "host memory whose puts leave something behind", {files},
      [](const quern::OptionValues& values) { return std::make_unique<Leaks>(values.get<bool>("files")); });
}
