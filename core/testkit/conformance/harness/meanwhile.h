#pragma once
// Work that goes on while a contract's calls run: what shares memory with it by mistake gives other bits then.

#include <atomic>
#include <exception>
#include <functional>
#include <thread>

namespace quern::conformance {

/// Repeats `work` on a thread of its own, from before the constructor returns until finish().
class Meanwhile {
 public:
  explicit Meanwhile(std::function<void()> work);
  ~Meanwhile();
  Meanwhile(const Meanwhile&) = delete;
  Meanwhile& operator=(const Meanwhile&) = delete;
  /// Ends it, and throws what `work` threw.
  void finish();

 private:
  void end() noexcept;

  std::atomic<bool> ending_ = false, started_ = false;
  std::exception_ptr fault_;
  std::thread thread_;
};

}  // namespace quern::conformance
