#pragma once
// Optional interface of a data source beside quern/data_source.h: skipping batches without reading. Ranks use it to
// skip each other's batches, and so does `quern data show`.

#include "quern/data_source.h"

namespace quern {

class SkippingSource : public DataSource {
 public:
  /// Equivalent to that many calls of `next`. A config error if there are fewer.
  virtual void skip(std::int64_t batches) = 0;
};

/// Equivalent to that many calls of `next`, without reading if the source supports it.
inline void skip(DataSource& source, std::int64_t batches) {
  if (auto* skipping = dynamic_cast<SkippingSource*>(&source)) return skipping->skip(batches);
  Batch batch;
  for (std::int64_t i = 0; i < batches; ++i) source.next(batch);
}

}  // namespace quern
