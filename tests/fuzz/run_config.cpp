// A run's TOML, then, behind a zero byte, --set overrides a line each. What resolves is written out by to_toml() as a
// config that resolves to the same.
#include "config/document.h"
#include "config/resolve.h"
#include "data/token_dataset.h"
#include "fuzz.h"
#include "log/log_sinks.h"
#include "optimizer/optimizers.h"
#include "optimizer/schedules.h"
#include "run/options/run_schemas.h"

using namespace quern;

namespace {

struct StandInOptions {
  std::int64_t threads = 0;
  double eps = 1e-5;
  std::string mode = "fast";
  std::vector<std::string> names;
  std::vector<double> factors;
};

// The built-in plugins, and stand-ins of the other kinds: resolving makes nothing. No folder is searched.
PluginHost host_without_files() {
  OptionTable<StandInOptions> options;
  options.add("threads", &StandInOptions::threads, "a number").at_least(0).at_most(64);
  options.add("eps", &StandInOptions::eps, "a real").above(0);
  options.add("table.mode", &StandInOptions::mode, "a choice").one_of({"fast", "exact"});
  options.add("table.names", &StandInOptions::names, "texts");
  options.add("factors", &StandInOptions::factors, "reals");
  PluginHost host({});
  Manifest data;
  add_token_dataset(data);
  host.add_builtins(std::move(data));
  for (auto factories : {optimizer_factories(), schedule_factories(), log_sink_factories()})
    for (Factory& factory : factories) host.add_builtin(std::move(factory));
  for (const char* kind : {"model", "device", "precision", "communicator", "offload"}) {
    Factory factory;
    factory.kind = kind;
    factory.id = "any";
    factory.options = options.specs();
    factory.create = [](const OptionValues&) -> void* { return nullptr; };
    host.add_builtin(std::move(factory));
  }
  return host;
}

ResolvedConfig resolved(std::string_view text, std::string_view overrides, PluginHost& host) {
  ConfigDocument document = ConfigDocument::parse(text, "run.toml");
  while (!overrides.empty()) {
    const std::size_t end = std::min(overrides.find('\n'), overrides.size());
    document.set(overrides.substr(0, end));
    overrides.remove_prefix(std::min(end + 1, overrides.size()));
  }
  return resolve(document, run_schemas(), host);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static PluginHost host = host_without_files();
  const std::string_view all = fuzz::text(data, size), text = all.substr(0, all.find('\0'));
  const std::string_view overrides = text.size() < all.size() ? all.substr(text.size() + 1) : "";
  std::string written;
  if (!fuzz::accepted({ErrorCode::config}, [&] { written = resolved(text, overrides, host).to_toml(); })) return 0;
  std::string again;
  fuzz::accepted({}, [&] { again = resolved(written, "", host).to_toml(); });
  // From then on only which values count as defaults may differ, and not again.
  fuzz::accepted({}, [&] {
    if (resolved(again, "", host).to_toml() != again) fuzz::fail("to_toml() does not come back", written);
  });
  return 0;
}
