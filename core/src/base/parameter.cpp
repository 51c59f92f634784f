#include "quern/parameter.h"

#include <utility>

namespace quern {

ParameterSpec matrix(std::string name, ParameterGroup group, std::string hf_name, std::int64_t rows,
                     std::int64_t columns, Init init) {
  return packed(std::move(name), group, {{std::move(hf_name), rows, init}}, columns);
}

ParameterSpec vector(std::string name, ParameterGroup group, std::string hf_name, std::int64_t size, Init::Kind init) {
  return packed(std::move(name), group, {{std::move(hf_name), size, {init, 0.0}}}, 1);
}

ParameterSpec packed(std::string name, ParameterGroup group, std::vector<ParameterPart> parts, std::int64_t columns) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.group = group;
  std::int64_t rows = 0;
  for (const ParameterPart& part : parts) rows += part.rows;
  spec.extents = columns == 1 ? Extents{rows} : Extents{rows, columns};
  spec.parts = std::move(parts);
  spec.decay = columns != 1;
  return spec;
}

}  // namespace quern
