#pragma once
// Kernels as their PTX states them (ISA 9.0), decoded for machine.h to run. A register is a place of 64 bits, of which
// an instruction uses as many as its type has; constants are registers that threads begin with.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace quern::emulator {

struct Instruction;
struct Thread;
struct Warp;

/// Who takes part in an instruction, and what may hold it up.
enum class Step : std::uint8_t {
  alone,     ///< a thread: Instruction::run
  together,  ///< the lanes of a warp that stand at it: Instruction::run_warp
  branch,
  leave,
  trap,
  barrier,  ///< waits for a block's barrier
  barrier_arrive,
  phase_wait,  ///< waits for a phase of an mbarrier
  phase_test,
  cluster_arrive,
  cluster_wait,
};

/// Registers are numbers, -1 where there is none. What the rest means depends on the instruction. Two cache lines.
struct alignas(64) Instruction {
  void (*run)(std::uint64_t* registers, const Instruction&, Thread&) = nullptr;
  void (*run_warp)(Warp&, const Instruction&) = nullptr;
  Step step = Step::alone;
  bool unless = false;  ///< runs where the guard is false
  bool values_written = false;
  bool masked = false;  ///< `extra` tells which lanes take part; otherwise all do
  int guard = -1, to = -1, a = -1, b = -1, c = -1, extra = -1;
  int target = 0;           ///< instruction to go on at
  std::int64_t offset = 0;  ///< bytes from the address
  std::vector<int> values, operands;
  int also_to = -1, count = 0;
  std::int16_t mode = 0, type = 0;
  const char* text = "";  ///< for reports
};
static_assert(sizeof(Instruction) <= 128);

struct Constant {
  enum class Kind { value, parameter, local };  ///< the others: addresses of that many bytes into them
  int place;
  std::uint64_t value;
  Kind kind;
};

struct Parameter {
  std::string name;
  int offset, bytes;
};

/// Registers that threads find set: threads' and blocks' numbers, as decode.cpp names them.
inline constexpr int kSpecials = 16;

struct Kernel {
  std::string name, body;  ///< of PTX
  std::vector<Parameter> parameters;
  int parameter_bytes = 0;
  std::vector<Instruction> code;  ///< empty before decode()
  std::deque<std::string> texts;  ///< of the code
  std::vector<Constant> constants;
  int registers = 0, local_bytes = 0, shared_bytes = 0;
  int most_dynamic_bytes = 48 << 10;
};

/// The kernels of one translation unit, and its variables.
struct Module {
  std::map<std::string, Kernel> kernels;
  std::unordered_map<std::string, std::uint64_t> globals;  ///< addresses
  std::unordered_map<std::string, int> shared;             ///< bytes; 0: as many as a launch says
};

/// Shared memory begins here: the first bytes are the system's, as on a GPU.
inline constexpr std::uint32_t kSharedBegin = 1024;

/// Finds a module's kernels and variables.
void read(Module& module, std::string_view ptx);
/// Decodes a kernel. Throws where it has an instruction that is not known.
void decode(const Module& module, Kernel& kernel);

/// Gives decoded code fewer registers. share_registers.cpp
void share_registers(Kernel& kernel);

/// Of instructions that a thread does alone, by their whole names; null: not among them. arithmetic.cpp
using Run = decltype(Instruction::run);
Run arithmetic(const std::string& name);
/// setp and cvt by their modifiers and types; sets run, type, mode and count. conversions.cpp
bool decode_conversion(Instruction& i, const std::vector<std::string>& words);
/// Loads and stores of `count` elements, by space and type; null: not known. memory_access.cpp
Run memory_access(bool load, bool shared, std::string_view type, int count);

/// What the decoder offers to instructions that have operands of their own kinds.
struct Operands {
  virtual ~Operands() = default;
  virtual int place(const std::string& operand) = 0;
  virtual std::vector<int> places(const std::string& list) = 0;
  /// [register + bytes] into a and offset.
  virtual void address(Instruction& i, const std::string& operand) = 0;
};
using Words = std::vector<std::string>;
/// Each decodes an instruction of its kind, or says that it is none: name by words, and operands.
bool decode_warp_instruction(Instruction& i, const Words& name, const Words& operands, Operands& of);
bool decode_tensor_core(Instruction& i, const Words& name, const Words& operands, Operands& of);
bool decode_copy(Instruction& i, const Words& name, const Words& operands, Operands& of);
bool has(const Words& words, std::string_view word);

/// What a kernel does wrong, or the emulator does not know.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
[[noreturn]] void stop(const std::string& why);

}  // namespace quern::emulator
