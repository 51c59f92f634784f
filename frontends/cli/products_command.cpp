// `quern bench products FILE`: how fast the device of a config multiplies matrices.
#include <algorithm>
#include <charconv>
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "bench/products.h"
#include "commands.h"
#include "quern/error.h"
#include "run/options/run_schemas.h"
#include "run/session.h"

namespace quern::cli {

using namespace bench;

namespace {

[[noreturn]] void refuse(const std::string& option, const std::string& word, const std::string& expected) {
  throw Error(ErrorCode::config, {.where = option, .what = "not known", .found = word, .expected = expected});
}

/// "8192" or "4096x896x128".
std::vector<ProductSize> sizes_of(const RunArguments& run, const Session& session) {
  constexpr const char* kExpected = "sizes such as model,8192,4096x896x128";
  std::vector<ProductSize> sizes;
  for (const std::string& word : listed(run.values["sizes"].as<std::string>())) {
    if (word == "model") {
      const std::vector<ProductSize> of_model = product_sizes(session.plan(session.plan_options()));
      sizes.insert(sizes.end(), of_model.begin(), of_model.end());
      continue;
    }
    std::vector<std::int64_t> numbers;
    for (const std::string& part : listed(word, 'x')) {
      std::int64_t number = 0;
      const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
      if (error != std::errc() || end != part.data() + part.size() || number < 1 || number > 1 << 24)
        refuse("--sizes", word, kExpected);
      numbers.push_back(number);
    }
    if (numbers.size() == 1) numbers.resize(3, numbers[0]);
    if (numbers.size() != 3) refuse("--sizes", word, kExpected);
    sizes.push_back({numbers[0], numbers[1], numbers[2]});
  }
  return sizes;
}

ProductsBenchOptions options_of(const RunArguments& run) {
  ProductsBenchOptions options;
  options.print = [](const std::string& text) { std::cout << text << std::flush; };
  for (const std::string& word : listed(run.values["formats"].as<std::string>())) {
    if (word == "int4") {
      options.int4 = true;
      continue;
    }
    const std::optional<DType> format = dtype_named(word);
    const auto known = {DType::f32, DType::bf16, DType::e4m3, DType::e5m2, DType::i8};
    if (!format || std::find(known.begin(), known.end(), *format) == known.end())
      refuse("--formats", word, "some of f32,bf16,e4m3,e5m2,i8,int4");
    options.formats.push_back(*format);
  }
  for (const std::string& word : listed(run.values["scales"].as<std::string>())) {
    const auto known = {ProductScales::tensor, ProductScales::row, ProductScales::line, ProductScales::square,
                        ProductScales::squares};
    const auto* mode =
        std::find_if(known.begin(), known.end(), [&](ProductScales scales) { return name_of(scales) == word; });
    if (mode == known.end()) refuse("--scales", word, "some of tensor,row,1x128,128x128,squares");
    options.scales.push_back(*mode);
  }
  return options;
}

}  // namespace

int products_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("sizes", po::value<std::string>()->default_value("model,8192"),
                        "M, MxNxK, or model: sizes of the config's training step")(
      "formats", po::value<std::string>()->default_value("bf16,e4m3,e5m2,i8"), "of the operands; e5m2 meets e4m3")(
      "scales", po::value<std::string>()->default_value("tensor,row,1x128,128x128,squares"),
      "of 8-bit operands: one each, one a row, or of blocks, which are 128x128 of the second operand only, or of both "
      "as squares")(
      "beside", po::value<std::string>()->value_name("a.b=v")->default_value(""),
      "time them in turn with the device under this setting too, such as device.cuda.matmul_search=listed")(
      "json", po::value<std::string>()->value_name("OUT"), "write the figures to this file too")(
      "commit", po::value<std::string>()->value_name("ID")->default_value(""),
      "the commit of the build, for that file");
  std::optional<RunArguments> run = parse_run(
      "quern bench products FILE [--sizes SIZES] [--formats FORMATS] [--scales SCALES] [--beside a.b=v] "
      "[--json OUT [--commit ID]] [--set a.b=v]...",
      options, arguments);
  if (!run) return 0;
  ProductsBenchOptions wanted = options_of(*run);
  const std::string path = output_of(*run, "json", kProductsBenchFile);
  ConfiguredRun configured(ConfigDocument::read(run->file, run->overrides));
  Session& session = configured.session;
  wanted.sizes = sizes_of(*run, session);
  session.device->open(static_cast<int>(session.device_options.ordinal));
  const std::string beside = run->values["beside"].as<std::string>();
  std::vector<std::string> overrides = run->overrides;
  if (!beside.empty()) overrides.push_back(beside);
  const ResolvedConfig other_config =
      resolve(ConfigDocument::read(run->file, overrides), run_schemas(), configured.host);
  const Session other(other_config, configured.host);
  if (!beside.empty()) {
    other.device->open(static_cast<int>(other.device_options.ordinal));
    wanted.beside = other.device.get();
  }
  const ProductsBenchResult result = run_products_bench(*session.device, wanted);
  if (!path.empty())
    write_output(
        path, products_bench_json(result, session.device->traits(), beside, run->values["commit"].as<std::string>()));
  return 0;
}

}  // namespace quern::cli
