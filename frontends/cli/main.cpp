// quern: picks a command, prints an Error once, and leaves with its code. Nothing escapes as an exception.
#include <exception>
#include <iostream>

#include "commands.h"
#include "quern/error.h"
#include "quern/plugin.h"

namespace quern::cli {

namespace {

constexpr Command kCommands[] = {
    {"config", "show, check and describe configurations", config_command},
    {"plugins", "list and describe plugins", plugins_command},
};

void run(const Arguments& arguments) {
  if (!arguments.empty() && arguments[0] == "--version")
    std::cout << "quern " QUERN_VERSION " (SDK " << kSdkVersion << ", ABI " QUERN_ABI_TAG ")\n";
  else
    dispatch("quern", kCommands, arguments);
  if (!std::cout.flush())
    throw Error(ErrorCode::resources, {.where = "standard output",
                                       .what = "cannot be written",
                                       .found = {},
                                       .expected = {},
                                       .next = "check the disk or pipe that it goes to"});
}

int fail(const char* text, ErrorCode code) {
  std::cerr << "quern: error: " << text << "\n";
  return static_cast<int>(code);
}

}  // namespace

}  // namespace quern::cli

int main(int argc, char** argv) {
  using namespace quern;
  try {
    cli::run(cli::Arguments(argv + 1, argv + argc));
    return 0;
  } catch (const Error& error) {
    return cli::fail(error.what(), error.code());
  } catch (const std::bad_alloc&) {
    return cli::fail("out of host memory", ErrorCode::resources);
  } catch (const std::exception& e) {
    return cli::fail(e.what(), ErrorCode::internal);
  } catch (...) {
    return cli::fail("an exception of unknown type", ErrorCode::internal);
  }
}
