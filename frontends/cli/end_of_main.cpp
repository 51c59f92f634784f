#include "end_of_main.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "plugin/plugin_file.h"
#include "quern/error.h"

namespace quern::cli {

namespace {

std::atomic<bool> ended = false;
std::terminate_handler terminate_before = nullptr;

[[noreturn]] void leave(const std::string& found) {
  const char* plugin = PluginAtWork::path();
  const Error error(ErrorCode::internal,
                    {.where = plugin ? plugin : "quern",
                     .what = "the program was ended from inside",
                     .found = found,
                     .expected = "a return",
                     .next = plugin ? "this is a fault in the plugin; please report it to its author"
                                    : "a plugin or a library did this; its output may give the reason"});
  std::cout.flush();
  std::cerr << "quern: error: " << error.what() << std::endl;
  ::_exit(static_cast<int>(ErrorCode::internal));
}

void at_exit(int code, void*) {
  if (!ended) leave("exit(" + std::to_string(code) + ")");
}

void at_quick_exit() { leave("quick_exit()"); }

/// An exception that nobody can catch: from a static initializer it would have to pass through the system's loader.
[[noreturn]] void at_terminate() {
  if (PluginAtWork::path() == nullptr) terminate_before();
  try {
    if (std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::exception& e) {
    leave(std::string("an exception that nothing catches: ") + e.what());
  } catch (...) {
    leave("an exception that nothing catches, of unknown type");
  }
  leave("std::terminate()");
}

}  // namespace

EndOfMain::EndOfMain() {
  ::on_exit(at_exit, nullptr);
  std::at_quick_exit(at_quick_exit);
  terminate_before = std::set_terminate(at_terminate);
}

EndOfMain::~EndOfMain() { ended = true; }

}  // namespace quern::cli
