#pragma once
// Only main ends the program: exit code 0 says that its work is done. A plugin or library that calls exit() or throws
// past its caller would end it with any code; instead it ends with code 1 and a message that names the plugin.

namespace quern::cli {

/// The first thing in main; its destruction is main's end.
class EndOfMain {
 public:
  EndOfMain();
  ~EndOfMain();
  EndOfMain(const EndOfMain&) = delete;
  EndOfMain& operator=(const EndOfMain&) = delete;
};

}  // namespace quern::cli
