// Fault: error() says nothing; with `of_calls`, nothing of a call that is not what or where the peers' is.
#include "memcpy_with.h"

namespace {

class Silent final : public MemcpyWith {
 public:
  explicit Silent(bool of_calls) : MemcpyWith("silent"), of_calls_(of_calls) {}
  std::optional<std::string> error() override {
    const std::optional<std::string> fault = MemcpyWith::error();
    const auto says = [&](const char* what) { return fault->find(what) != std::string::npos; };
    return of_calls_ && fault && !says("does not do the same") && !says("message") ? fault : std::nullopt;
  }

 private:
  bool of_calls_;
};

}  // namespace

QUERN_PLUGIN("communicator", "silent", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  quern::OptionSpec of_calls;
  of_calls.key = "of_calls", of_calls.help = "hides only these faults", of_calls.type = quern::OptionType::boolean;
  of_calls.default_value = false;
  manifest.add<quern::Communicator>("silent", "tells no fault", {of_calls}, [](const quern::OptionValues& values) {
    return std::make_unique<Silent>(values.get<bool>("of_calls"));
  });
}
