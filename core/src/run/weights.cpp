#include "run/weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <future>
#include <memory>
#include <numbers>
#include <thread>

#include "engine/host_tensor.h"
#include "program/names.h"
#include "quern/error.h"
#include "quern/random.h"

namespace quern {

namespace {

// Calls visit(parameter plan, layer) for every parameter tensor, layer -1 outside the blocks.
template <class Visit>
void for_each_parameter(const Plan& plan, Visit visit) {
  for (const ParameterPlan& parameter : plan.parameters) {
    bool in_layers = parameter.spec.group == ParameterGroup::block;
    for (int layer = in_layers ? 0 : -1; layer < (in_layers ? static_cast<int>(plan.model.layers) : 0); ++layer)
      visit(parameter.spec, layer);
  }
}

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

/// Elements [first, first + count) of one tensor.
struct Piece {
  const ParameterSpec* spec;
  const PlannedTensor* tensor;
  RandomKey key;
  std::uint64_t first, count;

  std::size_t bytes() const { return count * size_of(tensor->dtype); }
};

// Billions of numbers at 32B: all cores, each its own range.
void store_initial(const Piece& piece, std::byte* out) {
  std::uint64_t at = 0;
  std::vector<std::jthread> threads;
  for (const ParameterPart& part : piece.spec->parts) {
    const auto size = static_cast<std::uint64_t>(part.rows * piece.spec->columns());
    const std::uint64_t from = std::max(at, piece.first), to = std::min(at + size, piece.first + piece.count);
    at += size;
    if (from >= to) continue;
    const std::uint64_t count = to - from;
    const std::uint64_t workers = count < 100000 ? 1 : std::max(1u, std::thread::hardware_concurrency());
    for (std::uint64_t worker = 0; worker < workers; ++worker) {
      const std::uint64_t begin = from + count * worker / workers, end = from + count * (worker + 1) / workers;
      const DType dtype = piece.tensor->dtype;
      auto work = [=, &part, &piece] {
        store_initial(part, piece.key, begin, end, dtype, out + (begin - piece.first) * size_of(dtype));
      };
      if (workers == 1)
        work();
      else
        threads.emplace_back(work);
    }
  }
}

}  // namespace

// The next piece is made while one is written.
void initialise_weights(Engine& engine, std::uint64_t seed, const std::function<void()>& written) {
  constexpr std::uint64_t kMost = std::uint64_t{16} << 20;  // elements
  std::uint32_t object = 0;
  std::vector<Piece> pieces;
  std::size_t most = 0;
  for_each_parameter(engine.plan(), [&](const ParameterSpec& spec, int layer) {
    const PlannedTensor& tensor = engine.plan().tensor(names::kMaster, spec.name, layer);
    const auto count = static_cast<std::uint64_t>(spec.count());
    const RandomKey key{seed, RandomPurpose::init, object++};
    for (std::uint64_t first = 0; first < count; first += kMost) {
      pieces.push_back({&spec, &tensor, key, first, std::min(kMost, count - first)});
      most = std::max(most, pieces.back().bytes());
    }
  });
  const auto memory = std::make_unique_for_overwrite<std::byte[]>(2 * most);
  auto stored = [&](std::size_t i) { return memory.get() + i % 2 * most; };
  auto make = [&](std::size_t i) { store_initial(pieces[i], stored(i)); };
  std::future<void> made;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    i == 0 ? make(0) : made.get();
    if (i + 1 < pieces.size()) made = std::async(std::launch::async, make, i + 1);
    engine.write(*pieces[i].tensor, static_cast<std::int64_t>(pieces[i].first),
                 static_cast<std::int64_t>(pieces[i].count), stored(i));
  }
  written();
  engine.refresh();
}

void import_weights(Engine& engine, const std::string& path, const std::function<void()>& written) {
  std::vector<ParameterSpec> specs;
  for (const ParameterPlan& parameter : engine.plan().parameters) specs.push_back(parameter.spec);
  std::vector<std::byte> stored;
  auto sink = [&](const ParameterSpec& spec, std::int64_t layer, std::int64_t first, std::span<const float> values) {
    const PlannedTensor& tensor = engine.plan().tensor(names::kMaster, spec.name, static_cast<int>(layer));
    stored.resize(values.size() * size_of(tensor.dtype));
    encode(values, tensor.dtype, stored.data());
    engine.write(tensor, first, static_cast<std::int64_t>(values.size()), stored.data());
  };
  import_hf_weights(WeightFiles(path), specs, engine.plan().model.layers, sink);
  written();
  engine.refresh();
}

void export_weights(Engine& engine, const std::string& directory, const HfExport& what) {
  std::vector<ParameterSpec> specs;
  for (const ParameterPlan& parameter : engine.plan().parameters) specs.push_back(parameter.spec);
  std::vector<std::byte> stored;
  auto reader = [&](const ParameterSpec& spec, std::int64_t layer, std::int64_t first, std::span<float> values) {
    const PlannedTensor& tensor = engine.plan().tensor(names::kMaster, spec.name, static_cast<int>(layer));
    stored.resize(values.size() * size_of(tensor.dtype));
    engine.read(tensor, first, static_cast<std::int64_t>(values.size()), stored.data());
    decode(stored.data(), tensor.dtype, values);
  };
  export_hf_model(directory, what, specs, engine.plan().model.layers, reader);
}

}  // namespace quern
