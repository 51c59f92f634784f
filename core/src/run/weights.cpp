#include "run/weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <future>
#include <memory>
#include <numbers>
#include <thread>

#include "base/checksum.h"
#include "engine/host_tensor.h"
#include "program/names.h"
#include "quern/error.h"
#include "quern/random.h"
#include "transform/peft_folder.h"

namespace quern {

namespace {

// Box-Muller on the counter-based generator: two words give two numbers, so a block gives elements 4 b to 4 b + 3,
// which depend on the seed and the tensor alone.
std::array<float, 4> normal_block(const RandomKey& key, std::uint64_t block) {
  const auto words = random_block(key, 0, block);
  std::array<float, 4> values;
  for (std::size_t pair = 0; pair < 4; pair += 2) {
    const float radius = std::sqrt(-2.0f * std::log(to_unit(words[pair])));
    const float angle = 2.0f * std::numbers::pi_v<float> * to_unit(words[pair + 1]);
    values[pair] = radius * std::cos(angle);
    values[pair + 1] = radius * std::sin(angle);
  }
  return values;
}

/// Elements [begin, end) of a tensor, all of one part, stored from `out` on: so few at a time that they stay in a
/// cache.
void store_initial(const ParameterPart& part, const RandomKey& key, std::uint64_t begin, std::uint64_t end, DType dtype,
                   std::byte* out) {
  std::array<float, 4096> values;
  const bool random = part.init.kind == Init::Kind::normal;
  values.fill(part.init.kind == Init::Kind::ones ? 1.0f : 0.0f);
  std::array<float, 4> block{};
  while (begin < end) {
    const auto count = std::min<std::uint64_t>(values.size(), end - begin);
    for (std::uint64_t i = begin; random && i < begin + count; ++i) {
      if (i == begin || i % 4 == 0) block = normal_block(key, i / 4);
      values[i - begin] = static_cast<float>(part.init.deviation) * block[i % 4];
    }
    encode(std::span(values).first(count), dtype, out);
    out += count * size_of(dtype);
    begin += count;
  }
}

/// Elements [first, first + count) of one tensor, all of one part, which begins at `begin`.
struct Piece {
  const ParameterSpec* spec;
  const ParameterPart* part;
  const PlannedTensor* tensor;
  int layer;
  std::int64_t begin, first, count;

  std::size_t bytes() const { return static_cast<std::size_t>(count) * size_of(tensor->dtype); }
};

// Billions of numbers at 32B: all cores, each its own range.
void store_initial(const Piece& piece, const RandomKey& key, std::byte* out) {
  std::vector<std::jthread> threads;
  const auto first = static_cast<std::uint64_t>(piece.first), count = static_cast<std::uint64_t>(piece.count);
  const std::uint64_t workers = count < 100000 ? 1 : std::max(1u, std::thread::hardware_concurrency());
  for (std::uint64_t worker = 0; worker < workers; ++worker) {
    const std::uint64_t begin = first + count * worker / workers, end = first + count * (worker + 1) / workers;
    const DType dtype = piece.tensor->dtype;
    auto work = [=, &piece] {
      store_initial(*piece.part, key, begin, end, dtype, out + (begin - first) * size_of(dtype));
    };
    if (workers == 1)
      work();
    else
      threads.emplace_back(work);
  }
}

constexpr std::int64_t kMost = std::int64_t{16} << 20;  // elements of a piece
constexpr std::int64_t kRead = std::int64_t{1} << 20;   // decoded at once

void fill(const FirstWeights& weights, const Piece& piece, std::byte* out) {
  if (!weights.files_of(*piece.part, piece.layer))
    return store_initial(piece, weights.key_of(*piece.spec, piece.layer), out);
  const std::int64_t most = piece.part->as_stored() ? kRead : piece.count;
  std::vector<float> values;
  for (std::int64_t done = 0; done < piece.count; done += most) {
    values.resize(static_cast<std::size_t>(std::min(most, piece.count - done)));
    weights.read(*piece.spec, *piece.part, piece.layer, piece.first - piece.begin + done, values);
    encode(values, piece.tensor->dtype, out + static_cast<std::size_t>(done) * size_of(piece.tensor->dtype));
  }
}

/// Of a tensor whose rows ranks share, those that this rank keeps: a number depends on its place in the whole. Of
/// frozen tensors all, for the checksum.
void add_pieces(const ParameterSpec& spec, int layer, const PlannedTensor& tensor, std::vector<Piece>& pieces) {
  const std::int64_t low = spec.trainable ? tensor.first : 0;
  const std::int64_t high = spec.trainable ? low + element_count(tensor.extents) : spec.count();
  std::int64_t begin = 0;
  for (const ParameterPart& part : spec.parts) {
    const std::int64_t count = part.rows * spec.columns();
    std::int64_t first = std::max(begin, low);
    const std::int64_t end = std::min(begin + count, high);
    if (first < end && !part.as_stored()) pieces.push_back({&spec, &part, &tensor, layer, begin, begin, count});
    for (; first < end && part.as_stored(); first += kMost)
      pieces.push_back({&spec, &part, &tensor, layer, begin, first, std::min(kMost, end - first)});
    begin += count;
  }
}

// The next piece is made while one is written.
void write(Engine& engine, const FirstWeights& weights, const std::vector<Piece>& pieces, Checksum& frozen) {
  std::size_t most = 0;
  for (const Piece& piece : pieces) most = std::max(most, piece.bytes());
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(2 * most);
  auto stored = [&](std::size_t i) { return memory.get() + i % 2 * most; };
  auto make = [&](std::size_t i) { fill(weights, pieces[i], stored(i)); };
  std::future<void> made;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    i == 0 ? make(0) : made.get();
    if (i + 1 < pieces.size()) made = std::async(std::launch::async, make, i + 1);
    if (!pieces[i].spec->trainable) frozen.add({stored(i), pieces[i].bytes()});
    engine.write(*pieces[i].tensor, pieces[i].first, pieces[i].count, stored(i));
  }
}

/// A master in int8, and the scales of its rows.
void write_quantized(Engine& engine, const FirstWeights& weights, const ParameterSpec& spec,
                     const PlannedTensor& master) {
  const PlannedTensor& scale = engine.plan().tensor({names::kMasterScale, spec.name, master.layer});
  std::int64_t row = 0;
  for (const ParameterPart& part : spec.parts) {
    std::vector<float> values(static_cast<std::size_t>(part.rows * spec.columns()));
    std::vector<float> scales(static_cast<std::size_t>(part.rows));
    std::vector<std::byte> integers(values.size());
    weights.read(spec, part, master.layer, 0, values);
    encode_rows(values, spec.columns(), integers.data(), scales);
    engine.write(master, row * spec.columns(), part.rows * spec.columns(), integers.data());
    engine.write(scale, row, part.rows, scales.data());
    row += part.rows;
  }
}

/// visit(spec, layer) for every parameter tensor, in the order of their random keys.
template <class Visit>
void for_each_parameter(const FirstWeights& weights, Visit visit) {
  for (const ParameterSpec& spec : weights.specs())
    for_each_layer(spec, static_cast<int>(weights.layers()), [&](int layer) { visit(spec, layer); });
}

}  // namespace

FirstWeights::FirstWeights(std::vector<ParameterSpec> specs, std::int64_t layers, const From& from)
    : specs_(std::move(specs)), layers_(layers), from_(from) {
  std::vector<ParameterSpec> adapters;
  for (const ParameterSpec& spec : specs_) {
    if (!is_adapter(spec)) continue;
    adapters.push_back(spec);
    for (ParameterPart& part : adapters.back().parts) part.optional = false;
  }
  if (!from.adapter.empty()) {
    adapter_ = std::make_unique<WeightFiles>(from.adapter + "/" + kPeftWeights);
    check_hf_weights(*adapter_, adapters, layers);
  }
  if (from.model.empty()) return;
  model_ = std::make_unique<WeightFiles>(from.model);
  check_hf_weights(*model_, specs_, layers);
  std::size_t fresh = 0;
  std::string first;
  for_each_parameter(*this, [&](const ParameterSpec& spec, int layer) {
    if (is_adapter(spec)) return;  // no model's file has one
    for (const ParameterPart& part : spec.parts)
      if (!files_of(part, layer) && fresh++ == 0) first = hf_tensor_name(part, layer);
  });
  if (fresh > 0)
    notes_.push_back(std::to_string(fresh) + (fresh == 1 ? " tensor that " : " tensors that ") + from.model +
                     " lacks " + (fresh == 1 ? "begins" : "begin") + " with initial values: " + first +
                     (fresh > 1 ? " and so on" : ""));
}

const ParameterSpec& FirstWeights::spec(const std::string& parameter) const {
  for (const ParameterSpec& spec : specs_)
    if (spec.name == parameter) return spec;
  fail_internal("weights", "no parameter `" + parameter + "`");
}

const WeightFiles* FirstWeights::files_of(const ParameterPart& part, int layer) const {
  const std::string name = hf_tensor_name(part, layer);
  for (const WeightFiles* files : {adapter_.get(), model_.get()})
    if (files && files->find(name).file) return files;
  return nullptr;
}

RandomKey FirstWeights::key_of(const ParameterSpec& wanted, int layer) const {
  std::int64_t object = std::max(layer, 0);
  for (const ParameterSpec& spec : specs_) {
    if (spec.name == wanted.name) break;
    object += spec.group == ParameterGroup::block ? layers_ : 1;
  }
  return {from_.seed, RandomPurpose::init, static_cast<std::uint32_t>(object)};
}

void FirstWeights::read(const ParameterSpec& spec, const ParameterPart& part, int layer, std::int64_t first,
                        std::span<float> values) const {
  if (const WeightFiles* files = files_of(part, layer)) return read_hf_part(*files, spec, part, layer, first, values);
  std::int64_t begin = first;  // in the parameter
  for (const ParameterPart& before : spec.parts) {
    if (&before == &part) break;
    begin += before.rows * spec.columns();
  }
  store_initial(part, key_of(spec, layer), static_cast<std::uint64_t>(begin),
                static_cast<std::uint64_t>(begin) + values.size(), DType::f32,
                reinterpret_cast<std::byte*>(values.data()));
}

std::string load_weights(Engine& engine, const FirstWeights& weights, Loaded which) {
  const Plan& plan = engine.plan();
  std::vector<Piece> pieces;
  for_each_parameter(weights, [&](const ParameterSpec& spec, int layer) {
    const PlannedTensor& master = plan.tensor({names::kMaster, spec.name, layer});
    const bool wanted = which == Loaded::all || !spec.trainable;
    if (wanted && !plan.parameter(spec.name).quantized.empty())
      return write_quantized(engine, weights, weights.spec(spec.name), master);
    if (wanted && master.owner != TensorOwner::loading) add_pieces(spec, layer, master, pieces);
    if (!plan.options.train || !spec.trainable || !wanted) return;
    for (const OptimizerState& state : plan.parameter(spec.name).update.states)
      if (state.evaluated) add_pieces(spec, layer, plan.tensor({state.name, spec.name, layer}), pieces);
  });
  Checksum frozen;
  write(engine, weights, pieces, frozen);
  engine.load([&](const PlannedTensor& master) {
    pieces.clear();
    add_pieces(weights.spec(master.parameter), master.layer, master, pieces);
    write(engine, weights, pieces, frozen);
  });
  return plan.has_frozen() ? checksum_text(frozen.value()) : "";
}

FirstWeights first_weights(const Engine& engine, const FirstWeights::From& from) {
  return {specs_of(engine.plan()), engine.plan().model.layers, from};
}

void initialise_weights(Engine& engine, std::uint64_t seed) {
  load_weights(engine, first_weights(engine, {.seed = seed}), Loaded::all);
  engine.refresh();
}

void import_weights(Engine& engine, const std::string& path) {
  load_weights(engine, first_weights(engine, {.model = path}), Loaded::all);
  engine.refresh();
}

std::vector<ParameterSpec> specs_of(const Plan& plan) {
  std::vector<ParameterSpec> specs;
  for (const ParameterPlan& parameter : plan.parameters) specs.push_back(parameter.spec);
  return specs;
}

WeightReader master_reader(Engine& engine) {
  return [&engine, stored = std::vector<std::byte>()](const ParameterSpec& spec, std::int64_t layer, std::int64_t first,
                                                      std::span<float> values) mutable {
    const PlannedTensor& tensor = engine.plan().tensor({names::kMaster, spec.name, static_cast<int>(layer)});
    stored.resize(values.size() * size_of(tensor.dtype));
    engine.read(tensor, first, static_cast<std::int64_t>(values.size()), stored.data());
    decode(stored.data(), tensor.dtype, values);
    if (tensor.dtype != DType::i8) return;
    const PlannedTensor& scale = engine.plan().tensor({names::kMasterScale, spec.name, static_cast<int>(layer)});
    std::vector<float> scales(static_cast<std::size_t>(spec.extents[0]));
    engine.read(scale, scales.data());
    scale_rows(scales, spec.columns(), first, values);
  };
}

namespace {

/// Values of the model as it is exported, all of one part at a time.
class ExportedWeights {
 public:
  ExportedWeights(const WeightReader& masters, const FirstWeights& frozen, const LoraModel* adapter)
      : frozen_(frozen), adapter_(adapter), masters_(masters) {}

  void read(const ParameterSpec& wanted, int layer, std::int64_t first, std::span<float> values) {
    if (wanted.trainable) return masters_(wanted, layer, first, values);
    const ParameterSpec& spec = frozen_.spec(wanted.name);
    std::size_t part = 0;
    for (std::int64_t count = 0; part < spec.parts.size(); ++part, first -= count) {
      count = spec.parts[part].rows * spec.columns();
      if (first < count) break;
    }
    frozen_.read(spec, spec.parts[part], layer, first, values);
    for (const LoraTarget& target : adapter_ ? adapter_->targets() : std::vector<LoraTarget>{})
      if (target.base == spec.name && target.part == part)
        adapter_->merge(target, factor(target.a, layer, a_), factor(target.b, layer, b_), first, values);
  }

 private:
  struct Factor {
    std::string name;
    int layer = -1;
    std::vector<float> values;
  };
  const std::vector<float>& factor(const ParameterSpec& spec, int layer, Factor& last) {
    if (last.name == spec.name && last.layer == layer) return last.values;
    last = {spec.name, layer, std::vector<float>(static_cast<std::size_t>(spec.count()))};
    masters_(spec, layer, 0, last.values);
    return last.values;
  }

  const FirstWeights& frozen_;
  const LoraModel* adapter_;
  const WeightReader& masters_;
  Factor a_, b_;  // of the part that is read
};

}  // namespace

void export_weights(const WeightReader& masters, const FirstWeights& frozen, const LoraModel* adapter,
                    const std::string& directory, const HfExport& what) {
  std::vector<ParameterSpec> specs;
  for (const ParameterSpec& spec : frozen.specs())
    if (!is_adapter(spec)) specs.push_back(spec);
  ExportedWeights weights(masters, frozen, adapter);
  auto reader = [&](const ParameterSpec& spec, std::int64_t layer, std::int64_t first, std::span<float> values) {
    weights.read(spec, static_cast<int>(layer), first, values);
  };
  export_hf_model(directory, what, specs, frozen.layers(), reader);
}

}  // namespace quern
