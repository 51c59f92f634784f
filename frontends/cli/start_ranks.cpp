#include "start_ranks.h"

#include <fcntl.h>
#include <unistd.h>

#include <iostream>

#include "base/files/descriptor.h"
#include "launch/local_ranks.h"
#include "quern/error.h"
#include "run/ranks/start_ranks.h"

namespace quern::cli {

void take_place(const RankPlace& place, RunArguments& run) {
  if (place.rank > 0)
    if (const OwnedDescriptor nowhere{::open("/dev/null", O_WRONLY | O_CLOEXEC)}) ::dup2(nowhere.get(), STDOUT_FILENO);
  RunConfig config{.file = run.file, .overrides = run.overrides};
  quern::take_place(place, config);
  run.overrides = std::move(config.overrides);
}

std::optional<int> start_ranks(const RunArguments& run, Arguments command, const Arguments& arguments) {
  command.insert(command.begin(), this_program());
  command.insert(command.end(), arguments.begin(), arguments.end());
  return quern::start_ranks({.file = run.file, .overrides = run.overrides}, command,
                            [](const std::string& line) { std::cerr << line << std::endl; });
}

void need_several_ranks(const Session& session, const std::string& what) {
  if (session.parallel.ranks > 1) return;
  throw Error(ErrorCode::config, {.where = session.config.where("parallel", "ranks"),
                                  .what = what,
                                  .found = std::to_string(session.parallel.ranks),
                                  .expected = "2 or more",
                                  .next = "add --set parallel.ranks=2"});
}

}  // namespace quern::cli
