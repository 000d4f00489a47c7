#include "model.hpp"

#include <algorithm>
#include <cmath>

namespace thinwire {

namespace {

Constants make_constants() {
  Constants k;
  for (int i = 0; i < 256; ++i) {
    k.exp_high[i] = static_cast<uint32_t>(std::llround(std::exp2(kExpBits - i / 256.0)));
    k.exp_low[i] = static_cast<uint32_t>(std::llround(std::exp2(kExpBits - i / 65536.0)));
    const double log_odds = (kRateBias - i) / 8.0;
    k.cost[i] = static_cast<uint32_t>(std::llround(std::ldexp(std::log2(1 + std::exp2(log_odds)), 24)));
    k.cost_change[i] = static_cast<uint32_t>(std::llround(std::ldexp(std::log2(1 + std::exp2(-log_odds)), 24)));
    k.reciprocal[i] = static_cast<uint16_t>(std::llround(65536 / (i + 1.5)));
  }
  for (int i = 0; i <= 256; ++i) k.log2_high[i] = static_cast<uint32_t>(std::llround(65536 * std::log2(1 + i / 256.0)));
  return k;
}

}  // namespace

const Constants& constants() {
  static const Constants k = make_constants();
  return k;
}

void make_costs(const RateTable& table, int rate_shift, Costs& out) {
  const Constants& k = constants();
  uint32_t cost24[kClassCount], most = 0;
  for (int c = 0; c < kClassCount; ++c) {
    cost24[c] = k.cost[std::clamp(table.rate[c] + rate_shift, 0, kRateMax)];
    most = std::max(most, cost24[c]);
  }
  // The finest unit in which the dearest class still fits 16 bits.
  out.top = table.top;
  out.scale_shift = 0;
  while ((most + (1u << (7 + out.scale_shift))) >> (8 + out.scale_shift) > 0xFFFF) ++out.scale_shift;
  const int cut = 8 + out.scale_shift;
  for (int c = 0; c < kClassCount; ++c) out.cost[c] = static_cast<uint16_t>((cost24[c] + (1u << (cut - 1))) >> cut);
  for (uint32_t field = 0; field < 256; ++field) out.by_field[field] = out.cost[class_of_field(field, out.top)];
  for (int i = 0; i < 64; ++i) {
    out.low[i] = static_cast<uint8_t>(out.cost[i % kClassCount]);
    out.high[i] = static_cast<uint8_t>(out.cost[i % kClassCount] >> 8);
  }
}

void reset(ValueModel& model, const RateTable& table) {
  model.direction = {1u << 15, 30};
  for (int c = 0; c < kClassCount; ++c) {
    model.one[c] = {static_cast<uint16_t>(256 * table.one[c] + 128), 14};
    // An update's size does not depend on the weight: octave o of a weight of class c is the scale of a single step of
    // the weights of class c - o. A guess, soon overruled.
    for (int o = 0; o < kOctaveMax; ++o) {
      model.octave[c][o] = {static_cast<uint16_t>(128 * table.one[c > o ? c - o : 0] + 18064), 2};
    }
  }
  for (auto& row : model.top) {
    for (auto& bit : row) bit = {1u << 15, 6};
  }
}

}  // namespace thinwire
