#include "engine/progress.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/format.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kKept = 32;  // runs

std::string name_of(const Task& task, const Action& action) {
  return task.name + (action.layer >= 0 ? " of layer " + std::to_string(action.layer) : "");
}

}  // namespace

/// Written by streams, each word on a line of its own.
struct Progress::Words {
  alignas(64) std::uint32_t first;  ///< collectives of runs before
  alignas(64) std::uint32_t place;  ///< 2 i + 1 in the run's collective i, 2 i + 2 behind it
  alignas(64) std::uint32_t waits;  ///< 1: the compute stream waits for collectives
};

Progress::Progress(Device& device, const ScheduleSet& schedules) : device_(&device) {
  void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED)
    throw Error(ErrorCode::resources,
                {.where = "engine", .what = "no page of memory is left", .found = std::strerror(errno)});
  words_ = static_cast<Words*>(page);  // zeros
  for (const RunSchedule& schedule : schedules.runs) {
    Names& names = runs_[&schedule] = {schedule.name, {}};
    for (const Action& action : schedule.actions)
      if (action.kind == ActionKind::collective)
        names.collectives.push_back(name_of(schedules.task_of(action), action));
  }
  runs_[nullptr] = {"read", {"all_gather of a tensor that is read"}};
  try {
    device.pin(words_, kPage);
  } catch (...) {
    ::munmap(words_, kPage);
    throw;
  }
}

Progress::~Progress() {
  detach();
  ::munmap(words_, kPage);
}

void Progress::detach() noexcept {
  if (Device* device = std::exchange(device_, nullptr)) device->unpin(words_);
}

// ---- the thread that enqueues ----

void Progress::at_step(std::int64_t step) {
  const std::lock_guard lock(mutex_);
  step_ = step;
}

void Progress::begin(const Names& run, Stream stream) {
  const std::size_t count = run.collectives.size();
  {
    const std::lock_guard lock(mutex_);
    begun_.push_back({.first = first_, .run = &run, .step = step_, .when = now()});
    if (begun_.size() > kKept) begun_.pop_front();
  }
  if (count == 0) return;
  device_->write_word(&words_->place, 0, stream);
  device_->write_word(&words_->first, first_, stream);
  first_ += static_cast<std::uint32_t>(count);
}

void Progress::enter(std::size_t collective, Stream stream) const {
  device_->write_word(&words_->place, static_cast<std::uint32_t>(2 * collective + 1), stream);
}

void Progress::leave(std::size_t collective, Stream stream) const {
  device_->write_word(&words_->place, static_cast<std::uint32_t>(2 * collective + 2), stream);
}

void Progress::wait(Stream stream) const { device_->write_word(&words_->waits, 1, stream); }
void Progress::resume(Stream stream) const { device_->write_word(&words_->waits, 0, stream); }

// ---- any thread ----

Progress::Number Progress::number() const {
  return 2 * std::atomic_ref(words_->first).load(std::memory_order_acquire) +
         std::atomic_ref(words_->place).load(std::memory_order_acquire);
}

bool Progress::waiting() const { return std::atomic_ref(words_->waits).load(std::memory_order_relaxed) != 0; }

const Progress::Begun* Progress::run_of(std::uint32_t collective) const {
  for (auto begun = begun_.rbegin(); begun != begun_.rend(); ++begun)
    if (collective - begun->first < begun->run->collectives.size()) return &*begun;
  return nullptr;
}

std::string Progress::text_of(const Begun& begun) const {
  const std::string& run = begun.run->run;
  return begun.step > 0 ? "step " + std::to_string(begun.step) + ", " + run : run + " between steps";
}

std::string Progress::text(Number number) const {
  const std::uint32_t collective = (number - 1) / 2;
  const std::lock_guard lock(mutex_);
  const Begun* const begun = number == 0 ? nullptr : run_of(collective);
  if (!begun) return "no collective yet";
  return begun->run->collectives[collective - begun->first] + " (" + text_of(*begun) + ")";
}

std::string Progress::report() const {
  const Number number = this->number();
  std::string lines = (inside(number) ? "in " : "past ") + text(number) + "\n";
  if (waiting()) lines += "the compute stream waits for collectives\n";
  const std::lock_guard lock(mutex_);
  lines += "\nenqueued by the host, the latest last:\n";
  const double time = now();
  for (const Begun& begun : begun_)
    lines += "  " + format_duration(time - begun.when) + " ago: " + text_of(begun) + "\n";
  const Begun* const current = number == 0 ? nullptr : run_of((number - 1) / 2);
  if (!current) return lines;
  lines += "\ncollectives of " + text_of(*current) + ":\n";
  const std::vector<std::string>& names = current->run->collectives;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const Number in = 2 * (current->first + static_cast<std::uint32_t>(i)) + 1;
    lines += (earlier(in, number) ? "  done  " : in == number ? "  in    " : "        ") + names[i] + "\n";
  }
  return lines;
}

}  // namespace quern
