// The log.jsonl of a compared run, as `quern ab` reads it.
#include "ab/run_log.h"

#include "fuzz.h"

using namespace quern;
using namespace quern::ab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = fuzz::file("log.jsonl", fuzz::text(data, size));
  fuzz::accepted({ErrorCode::input}, [&] {
    const RunLog log = read_run_log(path);
    for (std::size_t i = 1; i < log.steps.size(); ++i)
      if (log.steps[i].step <= log.steps[i - 1].step)
        fuzz::fail("steps out of order", std::to_string(log.steps[i].step));
    if (first_difference(log, log)) fuzz::fail("a log differs from itself", path);
  });
  return 0;
}
