// Attention over many sequences: how the work is cut into pieces and spread over threads.
#pragma once

#include <vector>

#include "kernels.h"

namespace kvmerge {

struct AttentionRow {
  Segments segments;
  Rows query, output;  // of the row's first token
  int64_t num_queries;
  ScoreMode mode;
  float decay;
  float *scores, *aux;  // [heads, entries] for the statistics, or null: the planes of the pages
  int64_t score_stride; // between heads
};

// with_values: otherwise only the statistics are wanted, and output is not used.
void attend_rows(const Kernels& kernels, const PagedKVCache& pages, const std::vector<AttentionRow>& rows, int group,
                 float scale, bool with_values, bool new_start_empty);

}  // namespace kvmerge
