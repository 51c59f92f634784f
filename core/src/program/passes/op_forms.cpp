#include "program/passes/op_forms.h"

#include <algorithm>

namespace quern {

OpForms::OpForms(const Program& program, const OpSet& ops, const Geometry& geometry)
    : program_(program),
      ops_(ops),
      geometry_(geometry),
      observed_(read_values(program)),
      unobserved_(without_observations(program).read) {}

std::vector<OpInstance> OpForms::of(const Op& op) const {
  std::vector<OpInstance> forms;
  auto add = [&](const OpInstance& form) {
    if (std::find(forms.begin(), forms.end(), form) == forms.end()) forms.push_back(form);
  };
  for (const std::vector<bool>* read : {&observed_, &unobserved_}) {
    OpInstance form = instantiate(program_, op, geometry_, *read);
    const bool idle =
        std::none_of(form.outputs.begin(), form.outputs.end(), [](const Operand& o) { return o.present; });
    if (read == &unobserved_ && idle) continue;  // it runs in steps that observe only
    add(form);
    for (std::size_t o = 0; o < op.outputs.size(); ++o)
      form.outputs[o].accumulate = form.outputs[o].present && sums_up(program_, ops_, op, o);
    add(form);
  }
  return forms;
}

}  // namespace quern
