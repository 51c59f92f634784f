#pragma once
// What a data source may offer beside quern/data_source.h: to go on without reading. `quern data show` looks for it.

#include "quern/data_source.h"

namespace quern {

class SkippingSource : public DataSource {
 public:
  /// As that many calls of `next`. A config error when there are not as many.
  virtual void skip(std::int64_t batches) = 0;
};

}  // namespace quern
