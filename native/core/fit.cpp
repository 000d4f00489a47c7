// Rate tables from sampled counts. Tensors differ in scale more than in shape: a table holds the shape, each chunk
// moves it by one shift. So shape and shifts are fitted in turn, as in k-means, and for two tables the members too.
#include <algorithm>
#include <array>
#include <vector>

#include "chunk.hpp"

namespace thinwire {

namespace {

constexpr int kRounds = 2;            // of shape and shifts; more gained under 0.1 %
constexpr int kSplitRounds = 4;       // of members and shapes
constexpr int kRateReach = 12;        // how far a rate moves in one round
constexpr uint64_t kTableBits = 640;  // about what a second table adds to a packed index

using Rates = std::array<uint8_t, kClassCount>;

struct Source {
  uint64_t seen[kClassCount] = {}, changed[kClassCount] = {}, ones[kClassCount] = {};
  int shift = 0;
  bool second = false;
};

int moved(int rate, int shift) { return std::clamp(rate + shift, 0, kRateMax); }

// The rate of one class, between `low` and `high`, that suits all members at their shifts. Half a change more than
// seen is charged: a class that the sample shows unchanged may still change.
uint8_t best_rate(const std::vector<Source>& sources, bool second, int cls, int low, int high) {
  const Constants& k = constants();
  uint64_t bits[kRateMax + 1];
  for (int rate = low; rate <= high; ++rate) bits[rate] = k.cost_change[rate];
  for (const Source& source : sources) {
    if (source.second != second || source.seen[cls] == 0) continue;
    const uint64_t changed = 2 * source.changed[cls], unchanged = 2 * source.seen[cls] - changed;
    for (int rate = low; rate <= high; ++rate) {
      const int own = moved(rate, source.shift);
      bits[rate] += changed * k.cost_change[own] + unchanged * k.cost[own];
    }
  }
  return static_cast<uint8_t>(std::min_element(bits + low, bits + high + 1) - bits);
}

// All members as if they were one: where the rounds begin.
Rates pooled_rates(const std::vector<Source>& sources) {
  std::vector<Source> pool(1);
  for (const Source& source : sources) {
    for (int c = 0; c < kClassCount; ++c) {
      pool[0].seen[c] += source.seen[c];
      pool[0].changed[c] += source.changed[c];
    }
  }
  Rates rates;
  for (int c = 0; c < kClassCount; ++c) rates[c] = best_rate(pool, false, c, 0, kRateMax);
  return rates;
}

// Moves each member's shift to the shape; returns the bits in all.
uint64_t fit_shifts(std::vector<Source>& sources, bool second, const Rates& rates) {
  uint64_t total = 0;
  for (Source& source : sources) {
    if (source.second != second) continue;
    uint64_t bits = 0;
    source.shift = best_shift_of(constants(), rates.data(), source.seen, source.changed, bits);
    total += bits;
  }
  return total;
}

// One round: the shape to the members' shifts, then the shifts to the shape.
uint64_t fit_round(std::vector<Source>& sources, bool second, Rates& rates) {
  for (int c = 0; c < kClassCount; ++c) {
    const int low = std::max(0, rates[c] - kRateReach), high = std::min(kRateMax, rates[c] + kRateReach);
    rates[c] = best_rate(sources, second, c, low, high);
  }
  return fit_shifts(sources, second, rates);
}

RateTable table_of(const std::vector<Source>& sources, bool second, const Rates& rates, uint16_t top) {
  RateTable table{};
  table.top = top;
  for (int c = 0; c < kClassCount; ++c) {
    uint64_t seen = 0, changed = 0, ones = 0;
    for (const Source& source : sources) {
      if (source.second != second) continue;
      seen += source.seen[c];
      changed += source.changed[c];
      ones += source.ones[c];
    }
    const bool known = seen > 0 || c == 0;  // else as its neighbour, so that equal runs compress
    table.rate[c] = known ? rates[c] : table.rate[c - 1];
    table.one[c] =
        known ? static_cast<uint8_t>(std::min<uint64_t>(255, 256 * (ones + 3) / (changed + 4))) : table.one[c - 1];
  }
  return table;
}

}  // namespace

uint64_t bits_of(const Constants& k, const uint8_t* rate, const uint64_t* seen, const uint64_t* changed, int shift) {
  uint64_t total = 0;
  for (int c = 0; c < kClassCount; ++c) {
    const int own = moved(rate[c], shift);
    total += changed[c] * k.cost_change[own] + (seen[c] - changed[c]) * k.cost[own];
  }
  return total;
}

int best_shift_of(const Constants& k, const uint8_t* rate, const uint64_t* seen, const uint64_t* changed,
                  uint64_t& best) {
  int at = 0;
  best = bits_of(k, rate, seen, changed, 0);
  const auto look = [&](int shift) {
    if (shift < -kShiftMax || shift > kShiftMax) return;
    const uint64_t bits = bits_of(k, rate, seen, changed, shift);
    if (bits < best) {
      best = bits;
      at = shift;
    }
  };
  for (int shift = -kShiftMax; shift <= kShiftMax; shift += 8) look(shift);
  const int centre = at;
  for (int shift = centre - 7; shift <= centre + 7; ++shift) look(shift);
  return at;
}

size_t fit(const uint64_t* counts, size_t source_count, size_t field_count, uint64_t total_words, RateTable* tables) {
  const auto row = [&](size_t source, size_t kind) { return counts + (3 * source + kind) * field_count; };
  uint16_t top = 0;
  for (size_t s = 0; s < source_count; ++s) {
    for (size_t field = top; field < field_count; ++field) {
      if (row(s, 0)[field]) top = static_cast<uint16_t>(field);
    }
  }
  std::vector<Source> sources(source_count);
  uint64_t sampled = 0;
  for (size_t s = 0; s < source_count; ++s) {
    for (size_t field = 0; field < field_count; ++field) {
      const int cls = class_of_field(static_cast<uint32_t>(field), top);
      sources[s].seen[cls] += row(s, 0)[field];
      sources[s].changed[cls] += row(s, 1)[field];
      sources[s].ones[cls] += row(s, 2)[field];
      sampled += row(s, 0)[field];
    }
  }
  Rates one = pooled_rates(sources);
  uint64_t one_bits = fit_shifts(sources, false, one);
  for (int round = 0; round < kRounds; ++round) one_bits = fit_round(sources, false, one);
  tables[0] = table_of(sources, false, one, top);
  if (source_count < 2) return 1;

  std::vector<Source> split = sources;
  std::vector<int> shifts;
  for (const Source& source : split) shifts.push_back(source.shift);
  std::nth_element(shifts.begin(), shifts.begin() + static_cast<ptrdiff_t>(shifts.size() / 2), shifts.end());
  const int median = shifts[shifts.size() / 2];
  for (Source& source : split) source.second = source.shift >= median;
  Rates two[2] = {one, one};
  uint64_t two_bits = 0;
  for (int round = 0; round < kSplitRounds; ++round) {
    two_bits = fit_round(split, false, two[0]) + fit_round(split, true, two[1]);
    if (round + 1 == kSplitRounds) break;
    for (Source& source : split) {
      uint64_t first = 0, second = 0;
      const int first_shift = best_shift_of(constants(), two[0].data(), source.seen, source.changed, first);
      const int second_shift = best_shift_of(constants(), two[1].data(), source.seen, source.changed, second);
      source.second = second < first;
      source.shift = source.second ? second_shift : first_shift;
    }
  }
  // What the whole would save, not the sample; 24 bits of the counts' fraction are cut first.
  const uint64_t saved = two_bits < one_bits ? (one_bits - two_bits) >> 24 : 0;
  if (sampled == 0 || saved * (total_words / sampled + 1) <= kTableBits) return 1;
  tables[0] = table_of(split, false, two[0], top);
  tables[1] = table_of(split, true, two[1], top);
  return 2;
}

}  // namespace thinwire
