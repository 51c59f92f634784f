#pragma once
// Runs programs: memory, streams, capture, and kernels by op kind. Kernels are looked up by kind instead of being
// virtual methods, so that fused and custom ops need no change here.

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

/// Handle to memory for another process of this machine. CUDA's IPC handle has only bytes; CUDA's exported allocations
/// and the CPU's shared memory also have a descriptor, which must be sent with them (SCM_RIGHTS).
struct SharedHandle {
  std::string bytes;    ///< made and read by devices of one kind
  int descriptor = -1;  ///< -1: none; the owner of the handle closes it
};

/// Properties for the planner, known without the hardware. Rates are rated or measured figures of this device.
struct DeviceTraits {
  std::string id;                                      ///< "cpu", "cuda"
  std::string name;                                    ///< "NVIDIA H100 80GB HBM3"; may say more once open
  std::size_t memory_bytes = 0;                        ///< usable for the arena; 0: not known
  std::size_t alignment = 256;                         ///< of every value in the arena
  double memory_rate = 0;                              ///< bytes/s, read + write
  std::size_t own_bytes = 0;                           ///< of its own memory: context, libraries
  double host_rate = 0;                                ///< bytes/s, pinned host to device
  double duplex_rate = 0;                              ///< bytes/s each way while both are busy; 0: as host_rate
  double peer_rate = 0;                                ///< bytes/s, one way, between two devices of a machine
  std::vector<std::pair<DType, double>> matmul_rates;  ///< peak FLOP/s by operand format
  bool can_capture = false;
  bool host_addressable = false;           ///< device memory can be read by the host (cpu)
  int numa_node = -1;                      ///< of the nearest host memory; -1: not known, or not open yet
  int units = 1;                           ///< hardware units that this process can open
  std::string unit = {};                   ///< globally unique name of the open unit, if ranks must not share it
  std::vector<std::string> warnings = {};  ///< why the open one is slower than it could be, each with the fix
};

/// A fused form that the device has a kernel for. `pattern` is a small program in text,
///   "s = add(a, b); y, r = rms_norm(s, w)",
/// whose free names are the fused op's inputs (in order of first use) and whose results are its
/// outputs (in order); `_` is an absent operand of a part. The attributes of the parts are merged;
/// parts that set one attribute differently do not match. It is used if `query` accepts the fused op
/// at the plan's sizes in all its forms: unread outputs are absent, and a form with an accumulating
/// output is queried with and without `accumulate`. Otherwise the parts stay. It must round each value
/// as its parts do, so it changes no bit; only a form with a matmul may sum in another order than the
/// separate matmul.
struct Fusion {
  std::string kind = {};
  std::string pattern = {};
};

/// Whether and how a device can run an op; asked when planning, without the hardware.
struct OpSupport {
  std::string refusal = {};         ///< empty: supported; else the reason, for people
  std::size_t workspace_bytes = 0;  ///< scratch a launch needs
  bool concurrent = true;  ///< one prepared kernel may run on two streams at once: it keeps no scratch of its own
  double seconds = 0;      ///< estimated time of a launch; 0: from the op's Cost and the traits' rates
  /// Why launches take much longer than similar ops do here, for people, in words that do not depend on the
  /// layer; empty: they do not. Printed once by plans and at the start of a run, with its cost.
  std::string slow = {};
  double fast_seconds = 0;  ///< with `slow`: about what a launch would take otherwise
};

/// Resources of a launch besides its operands.
struct Exec {
  Stream stream;
  void* workspace = nullptr;  ///< of the size that `query` stated; contents undefined
};

/// A prepared op instance: descriptors, plans and constants are built. Immutable; owned by the caller of `prepare`.
class Kernel {
 public:
  virtual ~Kernel() = default;
  /// Enqueues on exec.stream. Views are borrowed for the call; an absent operand or unread output is an empty view.
  /// Never allocates, never synchronises; may be captured.
  virtual void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) const = 0;
};
using KernelFactory = std::function<std::unique_ptr<Kernel>(const OpInstance&)>;

/// A plugin's kernel of an op kind for the device with that id. Without `query` it accepts every instance, keeps its
/// own scratch, and runs on one stream at a time.
struct CustomKernel {
  std::string device;
  std::string op;
  KernelFactory factory;
  std::function<OpSupport(const OpInstance&)> query = {};
};
inline OpSupport support_of(const CustomKernel& kernel, const OpInstance& op) {
  return kernel.query ? kernel.query(op) : OpSupport{.concurrent = false};
}

/// A captured segment; owned by the caller of `capture`.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch(Stream stream) = 0;
};

/// A sensor value of the hardware: {"power", 640.2, "W"}.
struct Reading {
  std::string name;
  double value = 0;
  std::string unit;  ///< empty: a count
};
struct Telemetry {
  std::vector<Reading> readings;
  std::vector<std::string> slowed_by;  ///< reasons for reduced clocks: "power limit"
  std::string unavailable;             ///< why expected readings are missing
};

class Device {
 public:
  virtual ~Device() = default;

  // ---- capabilities: answered without the hardware ----
  virtual const DeviceTraits& traits() const = 0;
  virtual std::span<const Fusion> fusions() const = 0;
  virtual OpSupport query(const OpInstance& op) const = 0;

  // ---- set-up ----
  /// Opens hardware unit `ordinal`; throws a resources error with the reason. Required by everything below.
  virtual void open(int ordinal) = 0;
  /// Adds or replaces the kernel of a kind (custom ops of plugins).
  virtual void add_kernel(CustomKernel kernel) = 0;
  virtual std::unique_ptr<Kernel> prepare(const OpInstance& op) = 0;
  /// Aligned to traits().alignment; contents undefined. Owned by the caller; freed by `release`.
  virtual void* allocate(MemoryKind kind, std::size_t bytes) = 0;
  virtual void release(MemoryKind kind, void* memory) noexcept = 0;
  /// Shares an allocation of kind `device` from `memory` to its end with other processes. The memory keeps its address
  /// and contents. Waits for all streams; throws a resources error with the reason if it cannot be shared.
  virtual SharedHandle export_memory(void* memory) = 0;
  /// Maps memory that a device of the same kind exported in this or another process, which may have ended. The caller
  /// keeps the handle. Unmapped by `release_imported`, at the latest before this device is destroyed.
  virtual void* import_memory(const SharedHandle& handle) = 0;
  virtual void release_imported(void* memory) noexcept = 0;
  /// Pins the caller's host memory (whole pages, possibly shared with other processes): copies from and to it overlap,
  /// and kernels and words access it at the same address. Throws a resources error with the reason.
  virtual void pin(void* memory, std::size_t bytes) = 0;
  virtual void unpin(void* memory) noexcept = 0;
  virtual Stream stream(StreamKind kind) = 0;
  virtual Event make_event() = 0;

  // ---- hot path ----
  /// Between any two memories; ordered on `stream`; host side must be pinned to overlap.
  virtual void copy(void* to, const void* from, std::size_t bytes, Stream stream) = 0;
  virtual void fill(void* to, std::uint8_t byte, std::size_t bytes, Stream stream) = 0;
  /// Runs `work` on the host in stream order; the stream waits until it returns. It may wait for another process, but
  /// not for a stream; it must not use the device or throw. Cannot be captured.
  virtual void call(std::function<void()> work, Stream stream) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  /// Signals between streams, also of several processes: words in memory that each of them has pinned. The write comes
  /// after all earlier work on `stream`, and is visible after it to a stream that waited for the value.
  virtual void write_word(std::uint32_t* word, std::uint32_t value, Stream stream) = 0;
  /// `stream` waits until a bit of `mask` is set in the word by a stream, or by the host with an atomic store. Uses no
  /// compute resources. Both can be captured if traits().can_capture.
  virtual void wait_word(const std::uint32_t* word, std::uint32_t mask, Stream stream) = 0;
  /// Blocks the host until `stream` is done, and reports its errors.
  virtual void synchronize(Stream stream) = 0;
  /// Blocks the host until the last record of `event` is done; returns at once if it was never recorded.
  virtual void synchronize(Event event) = 0;
  /// Runs `work`, which only enqueues on `stream`, and returns it as a graph. Refused unless traits().can_capture.
  virtual std::unique_ptr<Graph> capture(Stream stream, const std::function<void()>& work) = 0;
  /// Milliseconds between two recorded events that are done.
  virtual double elapsed(Event from, Event to) = 0;

  // ---- observation: on the host, beside the work; neither waits for it nor changes it ----
  /// Current clocks, power, temperature and the like; empty if the hardware has no sensors.
  virtual Telemetry telemetry() = 0;
  /// Names the work enqueued until end_range, for a profiler; ranges nest. `name` ends with a zero byte and is borrowed
  /// for the call. Has no measurable cost without a profiler.
  virtual void begin_range(const char* name) = 0;
  virtual void end_range() = 0;

  // ---- state: a JSON object of choices that bits depend on (made by timing, say), saved with checkpoints ----
  virtual std::string save_state() const = 0;
  virtual void load_state(std::string_view state) = 0;
};

}  // namespace quern
