// quern: picks a command, prints an Error once, and leaves with its code. Nothing escapes as an exception.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <exception>
#include <filesystem>
#include <iostream>
#include <system_error>

#include "base/shorten.h"
#include "commands.h"
#include "crash_report.h"
#include "end_of_main.h"
#include "launch/local_ranks.h"
#include "quern/error.h"
#include "quern/plugin.h"

namespace quern::cli {

namespace {

constexpr Command kCommands[] = {
    {"train", "train a model as a config says", train_command},
    {"generate", "continue prompts with a run's weights", generate_command},
    {"eval", "loss and perplexity of a run's weights over token files", eval_command},
    {"plan", "show the memory, work and programs of a run", plan_command},
    {"bench", "time training steps, op by op", bench_command},
    {"ab", "compare runs that differ in some keys", ab_command},
    {"data", "show the data of a run", data_command},
    {"checkpoint", "show and verify a checkpoint", checkpoint_command},
    {"export", "write a checkpoint's weights for other programs", export_command},
    {"config", "show, check and describe configurations", config_command},
    {"plugins", "list and describe plugins", plugins_command},
};

// With less, parsing or a plugin would end in a segmentation fault.
void check_stack() {
  constexpr rlim_t kLeast = 256 << 10;
  rlimit stack{};
  if (::getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= kLeast) return;
  throw Error(ErrorCode::resources, {.where = "quern",
                                     .what = "too little stack",
                                     .found = std::to_string(stack.rlim_cur >> 10) + " KiB",
                                     .expected = "at least " + std::to_string(kLeast >> 10) + " KiB",
                                     .next = "raise the limit: ulimit -s 8192"});
}

int run(const Arguments& arguments) {
  int code = 0;
  check_stack();
  if (!arguments.empty() && arguments[0] == "--version")
    std::cout << "quern " QUERN_VERSION " (SDK " << kSdkVersion << ", ABI " QUERN_ABI_TAG ")\n";
  else
    code = dispatch("quern", kCommands, arguments);
  if (!std::cout.flush() && code == 0)
    throw Error(ErrorCode::resources, {.where = "standard output",
                                       .what = "cannot be written",
                                       .found = {},
                                       .expected = {},
                                       .next = "check the disk or pipe that it goes to"});
  return code;
}

// A program may be started without its standard streams. Files that it opens must not get their numbers, or the
// output lands in them. Descriptors opened here fail when used, as closed streams do.
void reserve_standard_streams() {
  for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0 && errno == EBADF)
      ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // the lowest free number: this one
}

int fail(const char* text, ErrorCode code) {
  const std::string prefix = rank_prefix();
  std::cerr << "quern: error: " << (std::string_view(text).starts_with(prefix) ? "" : prefix) << text << "\n";
  return static_cast<int>(code);
}

// What no Error states: paths that the system cannot look up, and threads that it refuses.
std::string text_of(const std::system_error& error) {
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&error))
    return Error(ErrorCode::resources, {.where = shortened(file->path1().string()),
                                        .what = "the system cannot work with this path",
                                        .found = file->code().message(),
                                        .expected = {},
                                        .next = "check the path and its permissions"})
        .what();
  if (error.code() == std::errc::resource_unavailable_try_again)
    return std::string("the system refuses a thread: ") + error.what() +
           "; raise the limits on processes and memory (ulimit -u, ulimit -v)";
  return std::string("the system refuses: ") + error.what();
}

}  // namespace

}  // namespace quern::cli

int main(int argc, char** argv) {
  using namespace quern;
  const cli::EndOfMain end;
  cli::report_crashes();
  cli::reserve_standard_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error of the write, as a full disk is
  try {
    return cli::run(cli::Arguments(argv + 1, argv + argc));
  } catch (const Error& error) {
    return cli::fail(error.what(), error.code());
  } catch (const std::bad_alloc&) {
    return cli::fail("out of host memory", ErrorCode::resources);
  } catch (const std::system_error& e) {
    return cli::fail(cli::text_of(e).c_str(), ErrorCode::resources);
  } catch (const std::exception& e) {
    return cli::fail(e.what(), ErrorCode::internal);
  } catch (...) {
    return cli::fail("an exception of unknown type", ErrorCode::internal);
  }
}
