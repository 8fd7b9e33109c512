// ZIP-merging of entries (KeepKV): what groups of entries that become one come to. See reference.zip_groups.
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "tensors.h"

namespace kvmerge {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kMinParallelEntries = 4 << 10;
constexpr float kMaxScale = 10.0f, kAutoTolerance = 0.1f;  // ops/zipping.py
constexpr int64_t kSum = 1, kMean = 2, kLogEma = 3;          // ScoreMode.code
constexpr int64_t kScale = 0, kVotes = 1;                    // ZIP_MODES

struct Cap {
  float cap;

  float capped(float logit) const { return cap == 0.0f ? logit : std::tanh(logit / cap) * cap; }
  float uncapped(float logit) const {
    if (cap == 0.0f) return logit;
    const float limit = 1.0f - 0x1p-20f;
    return std::atanh(std::min(std::max(logit / cap, -limit), limit)) * cap;
  }
};

// Planes of one head, and its lists; G rows of log_scores.
struct Head {
  const int64_t *sources, *targets;
  const uint8_t* joins;
  const float *log_votes, *scores, *query_counts;
  const int64_t* positions;
  const uint8_t* is_protected;
  const float *log_scores, *log_norms;
  int64_t *target, *source, *group;
  float *share, *factor, *new_votes, *new_scores;
  int64_t* newest;
};

class Zipping {
 public:
  Zipping(int64_t n, int64_t m, int64_t heads, int64_t mode, int64_t zip_mode, float cap)
      : n_(n), m_(m), heads_(heads), mode_(mode), zip_mode_(zip_mode), cap_{cap} {}

  // Numbers of targets and sources.
  std::pair<int64_t, int64_t> count(const Head& h) const {
    std::vector<uint8_t> seen(n_, 0);
    int64_t targets = 0, sources = 0;
    for (int64_t i = 0; i < m_; ++i) {
      if (!h.joins[i]) continue;
      ++sources;
      targets += !seen[h.targets[i]];
      seen[h.targets[i]] = 1;
    }
    return {targets, sources};
  }

  // r, j: widths of the lists.
  void run(const Head& h, int64_t r, int64_t j) const {
    std::vector<int64_t> place(n_, -1);
    std::fill_n(h.target, r, -1), std::fill_n(h.source, j, -1), std::fill_n(h.group, j, 0);
    std::fill_n(h.share, j, 0.0f), std::fill_n(h.factor, r, 1.0f);
    std::fill_n(h.new_votes, r, 0.0f), std::fill_n(h.new_scores, r, 0.0f), std::fill_n(h.newest, r, -1);
    for (int64_t i = 0; i < m_; ++i)
      if (h.joins[i]) place[h.targets[i]] = 0;
    int64_t groups = 0, joined = 0;
    for (int64_t e = 0; e < n_; ++e)
      if (place[e] == 0) h.target[groups] = e, place[e] = groups++;
    for (int64_t i = 0; i < m_; ++i)
      if (h.joins[i]) h.source[joined] = h.sources[i], h.group[joined++] = place[h.targets[i]];
    if (groups == 0) return;

    const auto log_score = [&](int64_t g, int64_t entry) { return h.log_scores[g * n_ + entry]; };
    const auto log_weight = [&](int64_t g, int64_t entry) { return h.log_votes[entry] + log_score(g, entry); };
    // Per group, and per query head and group.
    std::vector<float> log_total(heads_ * groups), log_sum_votes(groups), top(groups), total(groups);
    const auto log_sum = [&](float* out, const auto& value) {
      for (int64_t t = 0; t < groups; ++t) top[t] = value(h.target[t]);
      for (int64_t s = 0; s < joined; ++s) top[h.group[s]] = std::max(top[h.group[s]], value(h.source[s]));
      for (int64_t t = 0; t < groups; ++t) total[t] = std::exp(value(h.target[t]) - top[t]);
      for (int64_t s = 0; s < joined; ++s) total[h.group[s]] += std::exp(value(h.source[s]) - top[h.group[s]]);
      for (int64_t t = 0; t < groups; ++t) out[t] = top[t] + std::log(total[t]);
    };
    for (int64_t g = 0; g < heads_; ++g)
      log_sum(&log_total[g * groups], [&](int64_t entry) { return log_weight(g, entry); });
    log_sum(log_sum_votes.data(), [&](int64_t entry) { return h.log_votes[entry]; });

    // Shares of query heads in a group, a_g.
    std::vector<float> head_shares(heads_ * groups), mean_logit(heads_ * groups);
    for (int64_t t = 0; t < groups; ++t) {
      float largest = -kInfinity, sum = 0.0f;
      for (int64_t g = 0; g < heads_; ++g)
        largest = std::max(largest, 2.0f * (log_total[g * groups + t] - h.log_norms[g]));
      for (int64_t g = 0; g < heads_; ++g)
        sum += head_shares[g * groups + t] =
            std::exp(2.0f * (log_total[g * groups + t] - h.log_norms[g]) - largest);
      for (int64_t g = 0; g < heads_; ++g) head_shares[g * groups + t] /= sum;
    }
    const auto share_in = [&](int64_t t, int64_t entry) {
      float share = 0.0f;
      for (int64_t g = 0; g < heads_; ++g)
        share += head_shares[g * groups + t] * std::exp(log_weight(g, entry) - log_total[g * groups + t]);
      return share;
    };
    std::vector<float> own_share(groups);
    for (int64_t t = 0; t < groups; ++t) own_share[t] = share_in(t, h.target[t]);
    for (int64_t s = 0; s < joined; ++s) h.share[s] = share_in(h.group[s], h.source[s]);
    for (int64_t g = 0; g < heads_; ++g) {
      float* mean = &mean_logit[g * groups];
      for (int64_t t = 0; t < groups; ++t) mean[t] = own_share[t] * cap_.uncapped(log_score(g, h.target[t]));
      for (int64_t s = 0; s < joined; ++s)
        mean[h.group[s]] += h.share[s] * cap_.uncapped(log_score(g, h.source[s]));
    }

    for (int64_t t = 0; t < groups; ++t) {
      const int64_t own = h.target[t];
      float squares = 0.0f, factor = 0.0f, votes = 0.0f;
      const auto square = [&](int64_t g) {
        return head_shares[g * groups + t] * mean_logit[g * groups + t] * mean_logit[g * groups + t];
      };
      for (int64_t g = 0; g < heads_; ++g) squares += square(g);
      for (int64_t g = 0; g < heads_; ++g) {
        const int64_t at = g * groups + t;
        factor += square(g) / squares * (cap_.uncapped(log_total[at] - log_sum_votes[t]) / mean_logit[at]);
        votes += head_shares[at] * (log_total[at] - cap_.capped(mean_logit[at]));
      }
      const bool scales = zip_mode_ == kVotes   ? false
                          : zip_mode_ == kScale ? factor > 0.0f && factor <= kMaxScale
                                                : std::abs(factor - 1.0f) <= kAutoTolerance;
      if (scales) h.factor[t] = factor;
      h.new_votes[t] = scales ? log_sum_votes[t] : votes;
      h.newest[t] = h.positions[own];
      float gained = 0.0f;
      if (mode_ == kLogEma) {
        const auto log_sum_of = [&](const auto& value) {
          float largest = -kInfinity, sum = 0.0f;
          for (int64_t g = 0; g < heads_; ++g) largest = std::max(largest, value(g));
          for (int64_t g = 0; g < heads_; ++g) sum += std::exp(value(g) - largest);
          return largest + std::log(sum);
        };
        gained = log_sum_of([&](int64_t g) {
          const int64_t at = g * groups + t;
          return scales ? log_total[at] - log_sum_votes[t] : cap_.capped(mean_logit[at]);
        });
        gained -= log_sum_of([&](int64_t g) { return log_score(g, own); });
      }
      h.new_scores[t] = h.scores[own] + gained;
    }
    for (int64_t s = 0; s < joined; ++s) {
      const int64_t t = h.group[s], own = h.target[t];
      if (!h.is_protected[own]) h.newest[t] = std::max(h.newest[t], h.positions[h.source[s]]);
    }
    if (mode_ != kSum && mode_ != kMean) return;
    std::fill_n(total.data(), groups, 0.0f);
    for (int64_t s = 0; s < joined; ++s) {
      const int64_t entry = h.source[s];
      total[h.group[s]] += mode_ == kMean ? h.scores[entry] / h.query_counts[entry] : h.scores[entry];
    }
    for (int64_t t = 0; t < groups; ++t)
      h.new_scores[t] += mode_ == kMean ? total[t] * h.query_counts[h.target[t]] : total[t];
  }

 private:
  int64_t n_, m_, heads_, mode_, zip_mode_;
  Cap cap_;
};

// planes: those of ZipPlanes. indices: targets, sources, groups and positions of ZipGroups, numbers: its other planes, in
// its order, each as wide as there are sources. Returns how much of them is filled: the numbers of targets and sources
// in the head that has most.
tvm::ffi::Array<int64_t> call_zip_groups(TensorView sources, TensorView targets, TensorView joins, Tensors planes,
                                         int64_t mode, int64_t zip_mode, double cap, TensorView indices,
                                         TensorView numbers) {
  KVM_CHECK(planes.size() == 7, ValueError) << "7 planes must be given";
  const Argument a("sources", sources);
  a.contiguous({-1, -1});
  const int64_t rows = a.size(0), m = a.size(1);
  std::vector<TensorView> given(planes.begin(), planes.end());
  const Argument first("log_votes", given[0]), scored("log_scores", given[5]);
  const int64_t n = first.contiguous({rows, -1}).size(1);
  const int64_t heads = scored.contiguous({rows, -1, n}).size(1);
  const std::vector<int64_t> of_sources = {rows, m}, of_entries = {rows, n};
  const auto plane = [&](int i, const char* name) { return Argument(name, given[i]).contiguous(of_entries); };
  int64_t* const index = Argument("indices", indices).contiguous({4, rows, m}).i64();
  float* const number = Argument("numbers", numbers).contiguous({4, rows, m}).f32();
  const int64_t size = rows * m;
  const Head all{
      a.i64(),
      Argument("targets", targets).contiguous(of_sources).i64(),
      Argument("joins", joins).contiguous(of_sources).boolean(),
      first.f32(),
      plane(1, "scores").f32(),
      plane(2, "query_counts").f32(),
      plane(3, "positions").i64(),
      plane(4, "protected").boolean(),
      scored.f32(),
      Argument("log_norms", given[6]).contiguous({rows, heads, 1}).f32(),
      index, index + size, index + 2 * size, number, number + size, number + 2 * size, number + 3 * size,
      index + 3 * size,
  };
  for (int64_t i = 0; i < rows * m; ++i)
    KVM_CHECK(!all.joins[i] || (0 <= all.sources[i] && all.sources[i] < n && 0 <= all.targets[i] && all.targets[i] < n),
              IndexError)
        << "sources and targets have elements that are not among " << n;
  const Zipping zipping(n, m, heads, mode, zip_mode, static_cast<float>(cap));
  const auto head = [&](int64_t row, int64_t r, int64_t j) {
    Head h = all;
    h.sources += row * m, h.targets += row * m, h.joins += row * m;
    h.log_votes += row * n, h.scores += row * n, h.query_counts += row * n, h.positions += row * n;
    h.is_protected += row * n, h.log_scores += row * heads * n, h.log_norms += row * heads;
    h.target += row * r, h.factor += row * r, h.new_votes += row * r;
    h.new_scores += row * r, h.newest += row * r;
    h.source += row * j, h.group += row * j, h.share += row * j;
    return h;
  };
  int64_t r = 0, j = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const auto [of_targets, of_joining] = zipping.count(head(row, 0, 0));
    r = std::max(r, of_targets), j = std::max(j, of_joining);
  }
  parallel_for(rows, rows * m < kMinParallelEntries ? 1 : max_threads(),
               [&](int64_t row) { zipping.run(head(row, r, j), r, j); });
  return {r, j};
}

}  // namespace
}  // namespace kvmerge

TVM_FFI_DLL_EXPORT_TYPED_FUNC(zip_groups, kvmerge::call_zip_groups);
