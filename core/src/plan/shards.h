#pragma once
// How the parameters of a run are split over its ranks: each rank keeps and updates some rows of every matrix that may
// be split, and makes its rows of the working copies, which all ranks then gather.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "plan/placement.h"
#include "quern/optimizer.h"

namespace quern {

/// Rows where the shards begin, by rank, and behind the last one the end. Empty: every rank has the whole.
using RowBounds = std::vector<std::int64_t>;

/// As even as shards can be that begin at multiples of `unit` rows; empty when a rank would be left without any.
RowBounds split_rows(std::int64_t rows, std::int64_t unit, int ranks);

/// Rows of a matrix of `of` rows; `of` = 0: all, of whatever.
struct RowSlice {
  std::int64_t begin = 0, end = 0, of = 0;
  bool whole() const { return of == 0; }
};

/// This rank's part of a matrix.
struct Shard {
  Extents extents;
  std::int64_t first = 0;  ///< element of the whole
};

/// The part of what has rows for the parameter's rows, or for groups of these.
Shard shard_of_rows(const Extents& whole, const RowBounds& bounds, int rank);
inline Shard shard_of_rows(const Extents& whole, const RowSlice& rows) {
  return shard_of_rows(whole, {0, rows.begin, rows.end, rows.of}, 1);
}

/// Numbers of rows that are multiples of this are multiples of `alignment` bytes in the parameter's tensors, in every
/// format, and in these states.
std::int64_t aligned_rows(const ParameterSpec& spec, std::span<const OptimizerState> states, std::int64_t alignment);

/// Elements of a tensor's parts, by rank: its rows, or where it is not split parts as even as can be.
std::vector<std::int64_t> slabs_of(const Extents& whole, const RowBounds& bounds, int ranks);

/// Where a parameter is cut, between groups of `row_groups` rows: into shards, and into the pieces of which a tree sums
/// the squares, alike for any number of ranks. Empty: not at all.
struct Cuts {
  RowBounds shards, pieces;
};
Cuts cuts_of(const StatePlacement& state, const ParameterSpec& spec, std::int64_t row_groups);

/// A refresh program (see StatePrograms::refresh) in the two parts that a rank runs before and after the gathering.
struct SplitRefresh {
  Program own;                       ///< this rank's rows
  Program rest;                      ///< made from gathered values
  std::vector<Value> made = {};      ///< working copies, whole
  std::vector<Value> gathered = {};  ///< those among them that are gathered
  std::string amax_format = {};      ///< not empty: `own` reads the amax of the whole master, for this format
};

/// Rows of the master that the program keeps together; 0: it cannot be split.
std::int64_t row_groups_of(const Program& refresh, const OpSet& ops);
/// The parameter's rows are split at `bounds`.
SplitRefresh split_refresh(const Program& refresh, const OpSet& ops, const RowBounds& bounds, int rank);

}  // namespace quern
