// Faults: a group needs an exchange, though it has one rank; or it leaves a file open, or device memory, when it is
// gone.
#include <fcntl.h>

#include "alone.h"

namespace {

class Leaves final : public Alone {
 public:
  explicit Leaves(std::string fault) : Alone("leaves"), fault_(std::move(fault)) {}
  void connect(const quern::Rendezvous& rendezvous, quern::Device& device) override {
    if (fault_ == "exchange") rendezvous.exchange("hello");
    if (fault_ == "file") static_cast<void>(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (fault_ == "memory") static_cast<void>(device.allocate(quern::MemoryKind::device, 1 << 12));
    Alone::connect(rendezvous, device);
  }

 private:
  std::string fault_;
};

}  // namespace

QUERN_PLUGIN("communicator", "leaves", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  quern::OptionSpec fault;
  fault.key = "fault", fault.help = "what is wrong", fault.type = quern::OptionType::text;
  fault.choices = {"exchange", "file", "memory"}, fault.default_value = std::string("file");
  manifest.add<quern::Communicator>("leaves", "one rank", {fault}, [](const quern::OptionValues& values) {
    return std::make_unique<Leaves>(values.get<std::string>("fault"));
  });
}
