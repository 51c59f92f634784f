#include "conformance/harness/meanwhile.h"

#include <utility>

namespace quern::conformance {

Meanwhile::Meanwhile(std::function<void()> work) {
  thread_ = std::thread([this, work = std::move(work)] {
    try {
      while (!ending_) {
        work();
        if (!started_.exchange(true)) started_.notify_one();
      }
    } catch (...) {
      fault_ = std::current_exception();
    }
    started_ = true;
    started_.notify_one();
  });
  started_.wait(false);
}

Meanwhile::~Meanwhile() { end(); }

void Meanwhile::end() noexcept {
  ending_ = true;
  if (thread_.joinable()) thread_.join();
}

void Meanwhile::finish() {
  end();
  if (fault_) std::rethrow_exception(std::exchange(fault_, nullptr));
}

}  // namespace quern::conformance
