#pragma once
// A stream whose text a thread of its own writes: a reader that stalls (a pager, a stopped terminal) holds up nobody.
// Text that finds the queue full is dropped by whole lines, and a line in its place says how many.

#include <chrono>
#include <cstddef>
#include <memory>
#include <ostream>
#include <streambuf>
#include <string>

namespace quern {

class BackgroundOutput final : private std::streambuf {
 public:
  /// Takes over what `stream` writes, as of each flush, and sends it to `descriptor`; both outlive this. One thread at
  /// a time writes to the stream. This one's own thread takes no signals. Throws std::system_error when no thread can
  /// be started.
  BackgroundOutput(std::ostream& stream, int descriptor, std::size_t capacity = std::size_t{64} << 10,
                   std::chrono::milliseconds patience = std::chrono::seconds(2));
  /// Waits for the reader as long as `patience`, then leaves the thread behind and reports on standard error how many
  /// lines are missing. Gives the stream its own buffer back, in a bad state when a write failed.
  ~BackgroundOutput() override;
  BackgroundOutput(const BackgroundOutput&) = delete;
  BackgroundOutput& operator=(const BackgroundOutput&) = delete;

 private:
  struct Queue;
  int_type overflow(int_type c) override;
  std::streamsize xsputn(const char* text, std::streamsize count) override;
  int sync() override;

  std::ostream& stream_;
  std::chrono::milliseconds patience_;
  std::shared_ptr<Queue> queue_;  // the thread's too, which may outlive this
  std::streambuf* own_;           // the stream's own buffer
  std::string text_;              // since the last flush
};

}  // namespace quern
