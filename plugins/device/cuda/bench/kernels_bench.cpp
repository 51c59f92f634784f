// Times every op at the sizes of real models: achieved GB/s beside the rate of a device-to-device copy, or TFLOP/s for
// matmuls and attention; the median of captured runs.
//
//   cuda_kernels_bench [word ...]          cases whose line contains one of the words; none: all
//   cuda_kernels_bench --table NAME ...    tables: attention (by chunk), loss (by chunk, part by part), `products` (the
//                                          best that the library lists beside the one that is taken)

#include <algorithm>
#include <cstdio>
#include <map>

#include "bench.h"
#include "bench/peaks.h"
#include "quern/error.h"

namespace {

using namespace quern;
using namespace quern::cuda::bench;

void print_cases(Bench& bench, const std::vector<std::string>& words) {
  const double copy = bench::measure_memory_rate(bench.device());
  std::printf("%s, copy %.0f GB/s\n%-58s %9s %9s %8s\n", bench.device().traits().name.c_str(), copy * 1e-9, "op", "us",
              "GB/s", "of copy");
  for (const Case& c : all_cases()) {
    auto wanted = [&](const std::string& word) { return c.label.find(word) != std::string::npos; };
    if (!words.empty() && std::none_of(words.begin(), words.end(), wanted)) continue;
    try {
      const double seconds = 1e-3 * bench.run(c), rate = bytes_of(c) / seconds;
      if (c.flops > 0)
        std::printf("%-58s %9.1f %9.0f TFLOP/s\n", c.label.c_str(), seconds * 1e6, c.flops / seconds * 1e-12);
      else
        std::printf("%-58s %9.1f %9.0f %7.1f%%\n", c.label.c_str(), seconds * 1e6, rate * 1e-9, 100 * rate / copy);
    } catch (const std::exception& error) {
      std::printf("%-58s %s\n", c.label.c_str(), error.what());
    }
    std::fflush(stdout);
  }
}

void print_tables(Bench& bench, const std::vector<std::string>& names) {
  const std::map<std::string, void (*)(Bench&)> tables{
      {"attention", print_attention}, {"loss", print_loss}, {"products", print_products}};
  for (const std::string& name : names) {
    auto table = tables.find(name);
    if (table == tables.end())
      throw Error(ErrorCode::config, {.where = "--table",
                                      .what = "unknown table",
                                      .found = name,
                                      .expected = "attention, loss or `products`",
                                      .next = {}});
    table->second(bench);
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const bool tables = count > 1 && std::string(arguments[1]) == "--table";
    std::vector<std::string> words(arguments + (tables ? 2 : 1), arguments + count);
    cuda::CudaDevice device{cuda::CudaOptions{}};
    device.open(0);
    Bench bench(device);
    tables ? print_tables(bench, words) : print_cases(bench, words);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}
