#pragma once
// A model's parameters. Parameters are packed: one stored matrix may contain several Hugging Face tensors as row ranges
// (q, k and v; gate and up).

#include <cstdint>
#include <string>
#include <vector>

#include "quern/shape.h"

namespace quern {

/// embedding: used outside the layers; block: one instance a layer; head: final norm and LM head.
enum class ParameterGroup : std::uint8_t { embedding, block, head };

/// Initial values of a part.
struct Init {
  enum class Kind : std::uint8_t { normal, zeros, ones } kind = Kind::normal;
  double deviation = 0.02;  ///< of normal
};

/// Consecutive attention heads of a projection of queries, keys or values.
struct HeadRows {
  std::int64_t heads = 0;
  std::int64_t rows = 0;   ///< of each head
  std::int64_t group = 1;  ///< consecutive query heads that share a key and value head
  bool operator==(const HeadRows&) const = default;
};

/// A row range of a packed parameter: one Hugging Face tensor.
struct ParameterPart {
  std::string hf_name = {};  ///< "{layer}" stands for the layer's index; unique over all parts and layers
  std::int64_t rows = 0;     ///< of the packed matrix, or elements of a packed vector
  Init init = {};

  // ---- where the stored form is not the tensor's ----
  /// An order of the rows of each group of row_order.size(): row i of a group is the tensor's row row_order[i]. Empty:
  /// as in the tensor.
  std::vector<std::int32_t> row_order = {};
  bool transposed = false;  ///< the tensor is (columns, rows)
  double offset = 0;        ///< the stored value is the tensor's plus this
  Extents shape = {};       ///< the tensor's, of as many elements in the same order; empty: (rows, columns) or (rows)
  bool as_stored() const { return row_order.empty() && !transposed && offset == 0; }

  /// Whose rows they are, in order, if it is a projection of queries, keys or values. Empty: not of heads.
  std::vector<HeadRows> heads = {};

  bool optional = false;  ///< weights that a run starts from may lack it: it then has its initial values
};

struct ParameterSpec {
  std::string name = {};  ///< in programs: "qkv.weight"
  ParameterGroup group = ParameterGroup::block;
  Extents extents = {};                   ///< (rows, columns) or (elements)
  std::vector<ParameterPart> parts = {};  ///< in order; rows sum up to extents[0]
  bool decay = true;                      ///< weight decay applies: matrices, not norms and biases
  /// False: frozen. It has no gradient, master or optimizer state, only the form that ops read. The config can override
  /// this, decay, rate and optimizer by [[train.groups]].
  bool trainable = true;
  double rate = 1;             ///< of its learning rate to the schedule's
  std::string optimizer = {};  ///< id of the one that updates it; empty: the run's
  bool quantized = true;       ///< false: linears read it as it is, whatever the precision

  std::int64_t count() const { return element_count(extents); }
  std::int64_t columns() const { return extents.size() > 1 ? extents[1] : 1; }
};

/// A parameter that is one Hugging Face tensor.
ParameterSpec matrix(std::string name, ParameterGroup group, std::string hf_name, std::int64_t rows,
                     std::int64_t columns, Init init = {});
/// A norm weight (ones) or bias (zeros): no decay.
ParameterSpec vector(std::string name, ParameterGroup group, std::string hf_name, std::int64_t size, Init::Kind init);
/// Several Hugging Face tensors stacked by rows; `columns` 1 makes it a vector without decay.
ParameterSpec packed(std::string name, ParameterGroup group, std::vector<ParameterPart> parts, std::int64_t columns);

}  // namespace quern
