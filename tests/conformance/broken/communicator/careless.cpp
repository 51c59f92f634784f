// Faults: it takes calls that do not fit, or goes on after abort().
#include "alone.h"

namespace {

class Careless final : public Alone {
 public:
  explicit Careless(std::string fault) : Alone("careless"), fault_(std::move(fault)) {}

 private:
  bool refuses() const override { return fault_ != "calls"; }
  bool ends() const override { return fault_ != "goes_on"; }

  std::string fault_;
};

}  // namespace

QUERN_PLUGIN("communicator", "careless", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  quern::OptionSpec fault;
  fault.key = "fault", fault.help = "what is wrong", fault.type = quern::OptionType::text;
  fault.choices = {"calls", "goes_on"}, fault.default_value = std::string("calls");
  manifest.add<quern::Communicator>("careless", "one rank", {fault}, [](const quern::OptionValues& values) {
    return std::make_unique<Careless>(values.get<std::string>("fault"));
  });
}
