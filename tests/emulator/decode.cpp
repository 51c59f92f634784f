// The text of PTX to instructions.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "emulator/kernel.h"

namespace quern::emulator {

void stop(const std::string& why) { throw Fault("emulator: " + why); }

bool has(const Words& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

namespace {

std::string trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t\n"), last = text.find_last_not_of(" \t\n");
  return first == text.npos ? std::string() : std::string(text.substr(first, last - first + 1));
}

/// At commas outside of brackets.
Words split_operands(std::string_view text) {
  Words operands;
  std::string operand;
  int depth = 0;
  for (const char letter : text) {
    depth += std::strchr("{[(", letter) != nullptr ? 1 : std::strchr("}])", letter) != nullptr ? -1 : 0;
    if (letter == ',' && depth == 0) {
      operands.push_back(trimmed(operand));
      operand.clear();
    } else {
      operand += letter;
    }
  }
  if (!trimmed(operand).empty()) operands.push_back(trimmed(operand));
  return operands;
}

Words split(std::string_view text, const char* separators) {
  Words words;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find_first_of(separators, at), text.size());
    if (end > at) words.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

/// Bytes of .b8, .u32, .f64.
int type_bytes(std::string_view type) {
  return std::atoi(std::string(type.substr(type.find_first_of("0123456789"))).c_str()) / 8;
}

/// name[count] behind .align and a type.
struct Declaration {
  std::string name;
  int bytes = 0, alignment = 1;
  explicit Declaration(std::string_view text) {
    const Words words = split(text, " \t\n");
    int element = 1, count = 1;
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (words[i] == ".align")
        alignment = std::atoi(words[++i].c_str());
      else if (words[i][0] != '.')
        name = words[i];
      else if (words[i].size() > 2 && std::isdigit(static_cast<unsigned char>(words[i].back())))
        element = type_bytes(words[i]);
    }
    const std::size_t bracket = name.find('[');
    if (bracket != name.npos) {
      count = std::atoi(name.c_str() + bracket + 1);
      name.resize(bracket);
    }
    bytes = element * count;
    alignment = std::max(alignment, element);
  }
};

int aligned(int at, int alignment) { return (at + alignment - 1) / alignment * alignment; }

/// A variable of the module, with its initial values.
void add_global(Module& module, std::string_view statement) {
  const std::size_t equals = statement.find('=');
  const Declaration variable(statement.substr(0, equals));
  auto* memory = static_cast<unsigned char*>(std::calloc(static_cast<std::size_t>(std::max(variable.bytes, 1)), 1));
  if (equals != statement.npos) {
    const Words values = split(statement.substr(equals + 1), "{}, \n");
    const std::size_t bytes = static_cast<std::size_t>(variable.bytes) / values.size();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const bool bits = values[i].size() > 2 && (values[i][1] == 'f' || values[i][1] == 'd') && values[i][0] == '0';
      const std::uint64_t value = std::strtoull(values[i].c_str() + (bits ? 2 : 0), nullptr, bits ? 16 : 0);
      std::memcpy(memory + i * bytes, &value, std::min<std::size_t>(bytes, 8));
    }
  }
  module.globals[variable.name] = reinterpret_cast<std::uint64_t>(memory);  // for as long as the process runs
}

std::size_t closing_brace(std::string_view text, std::size_t open) {
  int depth = 0;
  for (std::size_t at = open; at < text.size(); ++at) {
    depth += text[at] == '{' ? 1 : text[at] == '}' ? -1 : 0;
    if (depth == 0) return at;
  }
  stop("a kernel's end is missing");
}

void add_kernel(Module& module, std::string_view text, std::size_t entry, std::size_t open, std::size_t close) {
  Kernel kernel;
  const std::size_t list = text.find('(', entry);
  kernel.name = trimmed(text.substr(entry, list - entry));
  for (const std::string& parameter : split_operands(text.substr(list + 1, text.find(')', list) - list - 1))) {
    const Declaration declared(parameter);
    const int offset = aligned(kernel.parameter_bytes, declared.alignment);
    kernel.parameters.push_back({declared.name, offset, declared.bytes});
    kernel.parameter_bytes = offset + declared.bytes;
  }
  kernel.body = text.substr(open + 1, close - open - 1);
  module.kernels[kernel.name] = std::move(kernel);
}

const char* const kSpecialNames[kSpecials] = {
    "%tid.x",   "%tid.y",    "%tid.z",    "%ntid.x",   "%ntid.y", "%ntid.z", "%ctaid.x",         "%ctaid.y",
    "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%cluster_ctarank", "%cluster_nctarank"};

class Decoder final : public Operands {
 public:
  Decoder(const Module& module, Kernel& kernel) : module_(module), kernel_(kernel) {
    scopes_.emplace_back();
    for (const auto& [name, bytes] : module.shared) {
      if (kernel.body.find(name) == kernel.body.npos) continue;
      if (bytes > 0)
        add_shared(name, bytes, 16);
      else
        dynamic_ = name;
    }
  }
  void run();

  int place(const std::string& operand) override;
  std::vector<int> places(const std::string& list) override {
    std::vector<int> result;
    for (const std::string& operand : list[0] == '{' ? split_operands(list.substr(1, list.size() - 2)) : Words{list})
      result.push_back(place(operand));
    return result;
  }
  void address(Instruction& i, const std::string& operand) override {
    const std::string inside = trimmed(operand.substr(1, operand.size() - 2));
    const std::size_t sign = inside.find_first_of("+-", 1);
    i.offset =
        sign == inside.npos ? 0 : std::strtoll(inside.c_str() + sign + (inside[sign] == '+' ? 1 : 0), nullptr, 0);
    i.a = place(trimmed(inside.substr(0, sign)));
  }

 private:
  void declare(const std::string& statement);
  void add(std::string statement);
  bool decode_operands(Instruction& i, const std::string& name, const Words& operands);
  void add_shared(const std::string& name, int bytes, int alignment) {
    const int at = aligned(kernel_.shared_bytes, std::max(alignment, 16));
    shared_[name] = kSharedBegin + static_cast<std::uint64_t>(at);
    kernel_.shared_bytes = aligned(at + bytes, 128);
  }
  int constant(std::uint64_t value, Constant::Kind kind = Constant::Kind::value) {
    const auto [at, fresh] = constants_.try_emplace({value, kind}, next_);
    if (fresh) kernel_.constants.push_back({next_++, value, kind});
    return at->second;
  }

  const Module& module_;
  Kernel& kernel_;
  int next_ = kSpecials;
  std::map<std::pair<std::uint64_t, Constant::Kind>, int> constants_;
  std::unordered_map<std::string, int> families_;  ///< %r and so on: the place of the first
  std::vector<std::unordered_map<std::string, int>> scopes_;
  std::unordered_map<std::string, std::uint64_t> shared_;
  std::string dynamic_;
  std::vector<int> dynamic_places_;
  std::unordered_map<std::string, int> labels_;
  std::vector<std::pair<std::size_t, std::string>> jumps_;
};

int Decoder::place(const std::string& operand) {
  if (operand == "_") return next_++;
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
    if (const auto found = scope->find(operand); found != scope->end()) return found->second;
  if (operand[0] == '%') {
    for (int i = 0; i < kSpecials; ++i)
      if (operand == kSpecialNames[i]) return i;
    const std::size_t digits = operand.find_last_not_of("0123456789") + 1;
    const auto family = families_.find(operand.substr(0, digits));
    if (family == families_.end()) stop("unknown register " + operand);
    return family->second + std::atoi(operand.c_str() + digits);
  }
  if (operand == "WARP_SZ") return constant(32);
  if (operand[0] == '0' && operand.size() > 8 && (operand[1] == 'f' || operand[1] == 'd'))
    return constant(std::strtoull(operand.c_str() + 2, nullptr, 16));
  if (std::isdigit(static_cast<unsigned char>(operand[0]))) return constant(std::strtoull(operand.c_str(), nullptr, 0));
  if (operand[0] == '-') return constant(0 - std::strtoull(operand.c_str() + 1, nullptr, 0));
  const std::size_t plus = operand.find('+');
  const std::string name = operand.substr(0, plus);
  const std::uint64_t bytes = plus == operand.npos ? 0 : std::strtoull(operand.c_str() + plus + 1, nullptr, 0);
  for (const Parameter& parameter : kernel_.parameters)
    if (parameter.name == name)
      return constant(static_cast<std::uint64_t>(parameter.offset) + bytes, Constant::Kind::parameter);
  if (const auto found = shared_.find(name); found != shared_.end()) return constant(found->second + bytes);
  if (const auto found = module_.globals.find(name); found != module_.globals.end())
    return constant(found->second + bytes);
  if (name != dynamic_) stop("unknown name " + operand + " in " + kernel_.name);
  dynamic_places_.push_back(next_);  // behind the kernel's own names
  kernel_.constants.push_back({next_, bytes, Constant::Kind::value});
  return next_++;
}

void Decoder::declare(const std::string& statement) {
  if (statement.rfind(".reg", 0) == 0) {
    const std::size_t names = statement.find_first_of(" \t", 5);
    for (const std::string& name : split_operands(statement.substr(names))) {
      const std::size_t count = name.find('<');
      if (count == name.npos) {
        scopes_.back()[name] = next_++;
      } else {
        families_[name.substr(0, count)] = next_;
        next_ += std::atoi(name.c_str() + count + 1);
      }
    }
  } else if (statement.rfind(".shared", 0) == 0) {
    const Declaration variable(statement);
    add_shared(variable.name, variable.bytes, variable.alignment);
  } else if (statement.rfind(".local", 0) == 0) {
    const Declaration variable(statement);
    scopes_.front()[variable.name] = constant(static_cast<std::uint64_t>(kernel_.local_bytes), Constant::Kind::local);
    kernel_.local_bytes = aligned(kernel_.local_bytes + variable.bytes, 16);
  }
}

bool Decoder::decode_operands(Instruction& i, const std::string& name, const Words& operands) {
  const Words words = split(name, ".");
  const std::string& kind = words[0];
  if (kind == "ld" || kind == "st") {
    const bool load = kind == "ld";
    i.values = places(operands[load ? 0 : 1]);
    i.values_written = load;
    address(i, operands[load ? 1 : 0]);
    const bool shared = has(words, "shared") || name.find("shared::") != name.npos;
    i.run = memory_access(load, shared, words.back(), static_cast<int>(i.values.size()));
    return i.run != nullptr;
  }
  if (kind == "mov" && (operands[0][0] == '{' || operands[1][0] == '{')) {
    const bool apart = operands[0][0] == '{';
    i.values = places(operands[apart ? 0 : 1]);
    i.values_written = apart;
    (apart ? i.a : i.to) = place(operands[apart ? 1 : 0]);
    i.count = 8 * type_bytes(words[1]) / static_cast<int>(i.values.size());
    i.run = arithmetic(apart ? "mov.apart" : "mov.together");
    return true;
  }
  if (decode_warp_instruction(i, words, operands, *this) || decode_tensor_core(i, words, operands, *this) ||
      decode_copy(i, words, operands, *this))
    return true;
  i.run = arithmetic(name);
  if (i.run == nullptr && !decode_conversion(i, words)) return false;
  if (!operands.empty()) {  // to|also_to, and so on
    const std::size_t bar = operands[0].find('|');
    i.to = place(operands[0].substr(0, bar));
    if (bar != operands[0].npos) i.also_to = place(operands[0].substr(bar + 1));
  }
  int* const from[] = {&i.a, &i.b, &i.c, &i.extra};
  for (std::size_t k = 1; k < operands.size(); ++k) *from[k - 1] = place(operands[k]);
  return true;
}

void Decoder::add(std::string statement) {
  Instruction i;
  kernel_.texts.push_back(statement);
  i.text = kernel_.texts.back().c_str();
  if (statement[0] == '@') {
    const std::size_t end = statement.find_first_of(" \t");
    i.unless = statement[1] == '!';
    i.guard = place(statement.substr(i.unless ? 2 : 1, end - (i.unless ? 2 : 1)));
    statement = trimmed(statement.substr(end));
  }
  const std::size_t end = std::min(statement.find_first_of(" \t\n"), statement.size());
  const std::string name = statement.substr(0, end);
  const Words operands = split_operands(statement.substr(end));
  if (name == "bra" || name == "bra.uni") {
    i.step = Step::branch;
    jumps_.emplace_back(kernel_.code.size(), operands[0]);
  } else if (name == "ret" || name == "exit") {
    i.step = Step::leave;
  } else if (name == "trap") {
    i.step = Step::trap;
  } else if (!decode_operands(i, name, operands)) {
    stop(std::string("unknown instruction: ") + i.text);
  }
  kernel_.code.push_back(std::move(i));
}

void Decoder::run() {
  const std::string_view body = kernel_.body;
  for (std::size_t at = 0; at < body.size();) {
    const char letter = body[at];
    if (std::isspace(static_cast<unsigned char>(letter)) || letter == ';') {
      ++at;
    } else if (body.compare(at, 2, "//") == 0) {
      at = std::min(body.find('\n', at), body.size());
    } else if (letter == '{') {
      scopes_.emplace_back();
      ++at;
    } else if (letter == '}') {
      scopes_.pop_back();
      ++at;
    } else {
      std::size_t end = at;
      while (std::isalnum(static_cast<unsigned char>(body[end])) || body[end] == '_' || body[end] == '$') ++end;
      if (body[end] == ':' && body[end + 1] != ':') {
        labels_[std::string(body.substr(at, end - at))] = static_cast<int>(kernel_.code.size());
        at = end + 1;
        continue;
      }
      end = std::min(body.find(';', at), body.size());
      const std::string statement = trimmed(body.substr(at, end - at));
      at = end;
      if (statement[0] == '.')
        declare(statement);
      else
        add(statement);
    }
  }
  Instruction leave;
  leave.step = Step::leave;
  kernel_.code.push_back(leave);
  for (const auto& [instruction, label] : jumps_) {
    const auto found = labels_.find(label);
    if (found == labels_.end()) stop("unknown label " + label);
    kernel_.code[instruction].target = found->second;
  }
  for (Constant& constant : kernel_.constants)
    if (std::find(dynamic_places_.begin(), dynamic_places_.end(), constant.place) != dynamic_places_.end())
      constant.value += kSharedBegin + static_cast<std::uint64_t>(kernel_.shared_bytes);
  kernel_.registers = next_;
}

}  // namespace

void read(Module& module, std::string_view ptx) {
  for (std::size_t at = 0; at < ptx.size();) {
    if (std::isspace(static_cast<unsigned char>(ptx[at])) || ptx[at] == ';') {
      ++at;
      continue;
    }
    const std::size_t line_end = std::min(ptx.find('\n', at), ptx.size());
    const std::string_view line = ptx.substr(at, line_end - at);
    const bool function = line.find(".func") != line.npos;
    if (const std::size_t entry = line.find(".entry"); entry != line.npos || function) {
      const std::size_t open = ptx.find('{', at);
      if (function && ptx.find(';', at) < open) {  // declared alone
        at = ptx.find(';', at);
        continue;
      }
      const std::size_t close = closing_brace(ptx, open);
      if (!function) add_kernel(module, ptx, at + entry + 6, open, close);
      at = close + 1;
    } else if (line.find(".shared") != line.npos) {
      const Declaration variable(line.substr(0, line.find(';')));
      module.shared[variable.name] = line.find(".extern") != line.npos ? 0 : variable.bytes;
      at = line_end;
    } else if (line.find(".global ") != line.npos || line.find(".const ") != line.npos) {
      const std::size_t end = ptx.find(';', at);
      add_global(module, ptx.substr(at, end - at));
      at = end;
    } else {
      at = line_end;  // a directive, a comment
    }
  }
}

void decode(const Module& module, Kernel& kernel) {
  if (!kernel.code.empty()) return;
  Decoder(module, kernel).run();
  share_registers(kernel);
}

}  // namespace quern::emulator
