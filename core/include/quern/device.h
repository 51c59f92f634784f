#pragma once
// A place where programs run: memory, streams, capture, and kernels by op kind. Kernels are looked up, not virtual
// methods one by one, so that fused and custom ops need no change here.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quern/op_spec.h"
#include "quern/view.h"

namespace quern {

/// Write-combined memory is pinned, and slow for the host to read.
enum class MemoryKind : std::uint8_t { device, pinned, mapped, write_combined };
enum class StreamKind : std::uint8_t { compute, copy_in, copy_out, communication };

/// Handles of the device's own objects; owned by the device, valid until it is destroyed.
struct Stream {
  void* handle = nullptr;
};
struct Event {
  void* handle = nullptr;
};

/// How another process of this machine finds memory: CUDA's IPC handle is bytes alone, its exported allocation and the
/// CPU's shared memory also a descriptor, which has to be sent beside them (SCM_RIGHTS).
struct SharedHandle {
  std::string bytes;    ///< made and read by devices of one kind
  int descriptor = -1;  ///< -1: none; closed by who holds the handle
};

/// What the planner may assume, known without the hardware. Rates are rated or measured figures of this device.
struct DeviceTraits {
  std::string id;                                      ///< "cpu", "cuda"
  std::string name;                                    ///< "NVIDIA H100 80GB HBM3"; may say more once open
  std::size_t memory_bytes = 0;                        ///< usable for the arena; 0: not known
  std::size_t alignment = 256;                         ///< of every value in the arena
  double memory_rate = 0;                              ///< bytes/s, read + write
  std::size_t own_bytes = 0;                           ///< that it takes beside the arena: its context, libraries
  double host_rate = 0;                                ///< bytes/s, pinned host to device
  double duplex_rate = 0;                              ///< bytes/s each way while both are busy; 0: as host_rate
  double peer_rate = 0;                                ///< bytes/s, one way, between two devices of a machine
  std::vector<std::pair<DType, double>> matmul_rates;  ///< peak FLOP/s by operand format
  bool can_capture = false;
  bool host_addressable = false;  ///< device memory can be read by the host (cpu)
  int numa_node = -1;             ///< of the machine's memory that is near; -1: not known, or not open yet
  int units = 1;                  ///< that this process can open
  std::string unit = {};          ///< the open one's name, unlike any other's anywhere, where ranks must not share it
  std::vector<std::string> warnings = {};  ///< why the open one is slower than it could be, each with the fix
};

/// A fused form that the device has a kernel for. `pattern` is a small program in text,
///   "s = add(a, b); y, r = rms_norm(s, w)",
/// whose free names are the fused op's inputs (in order of first use) and whose results are its outputs (in order); `_`
/// is an operand that a part does without.
/// The attributes of the parts are merged; parts that set one attribute differently do not match.
/// It is taken where `query` accepts the fused op at the plan's sizes, in every form that it runs in: outputs that
/// nobody reads are not present, and where one sums up it is asked about with and without `accumulate`. Elsewhere the
/// parts stay. It rounds each value as its parts do, so it changes no bit; only one that has a matrix product in it may
/// sum in another order than the product alone.
struct Fusion {
  std::string kind = {};
  std::string pattern = {};
};

/// Answer to "can you run this": plan-time, without the hardware.
struct OpSupport {
  std::string refusal = {};         ///< empty: supported; else the reason, for people
  std::size_t workspace_bytes = 0;  ///< scratch a launch needs
  bool concurrent = true;  ///< one prepared kernel may run on two streams at once: it keeps no scratch of its own
  double seconds = 0;      ///< about what a launch takes; 0: what the op's Cost takes at the traits' rates
  /// Why launches take much longer than those of similar ops do here, for people, in words that do not depend on the
  /// layer; empty: they do not. Printed once by plans and at the start of a run, with its cost.
  std::string slow = {};
  double fast_seconds = 0;  ///< with `slow`: about what a launch would take otherwise
};

/// What a launch may use besides its operands.
struct Exec {
  Stream stream;
  void* workspace = nullptr;  ///< of the size that `query` stated; contents undefined
};

/// A prepared op instance: descriptors, plans and constants are built. Immutable; owned by who prepared it.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Enqueues on exec.stream. Views are borrowed for the call; an absent operand or unread output is an empty view.
  /// Never allocates, never synchronises; may be captured.
  virtual void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) const = 0;
};
using KernelFactory = std::function<std::unique_ptr<Kernel>(const OpInstance&)>;

/// A plugin's kernel of an op kind for the device with that id. Without `query` it takes every instance, with scratch
/// of its own, and runs on one stream at a time.
struct CustomKernel {
  std::string device;
  std::string op;
  KernelFactory factory;
  std::function<OpSupport(const OpInstance&)> query = {};
};
inline OpSupport support_of(const CustomKernel& kernel, const OpInstance& op) {
  return kernel.query ? kernel.query(op) : OpSupport{.concurrent = false};
}

/// A captured segment; owned by who captured it.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch(Stream stream) = 0;
};

/// A figure that the hardware gives of itself: {"power", 640.2, "W"}.
struct Reading {
  std::string name;
  double value = 0;
  std::string unit;  ///< empty: a count
};
struct Telemetry {
  std::vector<Reading> readings;
  std::vector<std::string> slowed_by;  ///< why its clocks are lower than they could be: "power limit"
  std::string unavailable;             ///< why there are no readings, where there could be
};

class Device {
 public:
  virtual ~Device() = default;

  // ---- capabilities: answered without the hardware ----
  virtual const DeviceTraits& traits() const = 0;
  virtual std::span<const Fusion> fusions() const = 0;
  virtual OpSupport query(const OpInstance& op) const = 0;

  // ---- set-up ----
  /// Takes hardware unit `ordinal`; throws a resources error that says why not. Everything below needs it.
  virtual void open(int ordinal) = 0;
  /// Adds or replaces the kernel of a kind (custom ops of plugins).
  virtual void add_kernel(CustomKernel kernel) = 0;
  virtual std::unique_ptr<Kernel> prepare(const OpInstance& op) = 0;
  /// Aligned to traits().alignment; contents undefined. Owned by the caller, given back by `release`.
  virtual void* allocate(MemoryKind kind, std::size_t bytes) = 0;
  virtual void release(MemoryKind kind, void* memory) noexcept = 0;
  /// For others to map: what the allocation holds from `memory` on, which has to be of the kind `device`. The memory
  /// keeps its address and contents. Waits for all streams; throws a resources error that says why it cannot be shared.
  virtual SharedHandle export_memory(void* memory) = 0;
  /// Maps what a device of the same kind exported, in this process or another, which may be gone by then. The handle
  /// remains the caller's. Given back by `release_imported`, at the latest before this device is destroyed.
  virtual void* import_memory(const SharedHandle& handle) = 0;
  virtual void release_imported(void* memory) noexcept = 0;
  /// Makes host memory of the caller's (whole pages, which other processes may share) as good as pinned: copies from
  /// and to it overlap, kernels and words reach it at the same address. Throws a resources error that says why not.
  virtual void pin(void* memory, std::size_t bytes) = 0;
  virtual void unpin(void* memory) noexcept = 0;
  virtual Stream stream(StreamKind kind) = 0;
  virtual Event make_event() = 0;

  // ---- hot path ----
  /// Between any two memories; ordered on `stream`; host side must be pinned to overlap.
  virtual void copy(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
  virtual void fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) = 0;
  /// Runs `work` on the host when `stream` comes to it, and holds the stream until it returns. It may wait for another
  /// process, but not for a stream; it uses nothing of the device and throws nothing. Cannot be captured.
  virtual void call(std::function<void()> work, Stream stream) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  /// Signals between streams, also of several processes: words in memory that is pinned or `pin`ned by each of them.
  /// Writing comes after all before it on `stream`, and who waited for the value sees what that wrote.
  virtual void write_word(std::uint32_t* word, std::uint32_t value, Stream stream) = 0;
  /// Holds `stream` until a bit of `mask` is set in the word, by whomever: the host too, by an atomic store. Takes no
  /// part of the device that computes. Both may be captured where traits().can_capture.
  virtual void wait_word(const std::uint32_t* word, std::uint32_t mask, Stream stream) = 0;
  /// Blocks the host until `stream` is done, and reports its errors.
  virtual void synchronize(Stream stream) = 0;
  /// Blocks the host until the last record of `event` is done; at once when it was never recorded.
  virtual void synchronize(Event event) = 0;
  /// Runs `work`, which only enqueues on `stream`, and returns it as a graph. Refused unless traits().can_capture.
  virtual std::unique_ptr<Graph> capture(Stream stream, const std::function<void()>& work) = 0;
  /// Milliseconds between two recorded events that are done.
  virtual double elapsed(Event from, Event to) = 0;

  // ---- observation: on the host, beside the work; neither waits for it nor changes it ----
  /// Clocks, power, temperature and the like at this moment; nothing where the hardware cannot be asked.
  virtual Telemetry telemetry() = 0;
  /// Names what the host enqueues until end_range, for a profiler; ranges nest. `name` ends with a zero byte and is
  /// borrowed for the call. Costs nothing worth measuring when no profiler is attached.
  virtual void begin_range(const char* name) = 0;
  virtual void end_range() = 0;

  // ---- state: a JSON object of choices that bits depend on (made by timing, say), saved with checkpoints ----
  virtual std::string save_state() const = 0;
  virtual void load_state(std::string_view state) = 0;
};

}  // namespace quern
