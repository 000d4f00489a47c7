// What encoder and decoder agree on: classes, costs, probabilities and contexts. docs/format.md says the same in words.
#pragma once

#include <cstddef>
#include <cstdint>

#include "inline.hpp"

namespace thinwire {

inline constexpr size_t kMaxChunkElements = size_t{1} << 20;
inline constexpr size_t kBlockElements = 128;
inline constexpr size_t kGroupElements = 8;
inline constexpr size_t kGroupsPerBlock = kBlockElements / kGroupElements;
inline constexpr int kClassCount = 32;
inline constexpr int kRateBias = 56;  // rate byte r: odds of a change are 2^-((r - 56) / 8)
inline constexpr int kRateMax = 255;
inline constexpr int kExpBits = 31;     // 2^-x is held as an integer of this many bits
inline constexpr int kSymbolBits = 24;  // weights of the first-change symbol are of 2^24
inline constexpr uint32_t kBitOne = 1u << 16;

// How a dtype's bits are read. `ordered`: sign and magnitude, so the order of the values is not that of the bits.
struct Layout {
  uint8_t word_bytes;   // 1, 2, 4 or 8
  uint8_t field_shift;  // class field = (word >> field_shift) & field_mask
  uint16_t field_mask;
  bool ordered;
};

// One table of the container: class 0 is the field value `top` and above, class c is top - c, class 31 the rest.
struct RateTable {
  uint16_t top;
  uint8_t rate[kClassCount];
  uint8_t one[kClassCount];  // P(size == 1) = (2 * one + 1) / 512 before the first change of that class
};

// Constant tables, computed once; the rounding margin is asserted by tests, so any correct libm gives the same.
struct Constants {
  uint32_t exp_high[256];     // round(2^31 * 2^-(i / 256))
  uint32_t exp_low[256];      // round(2^31 * 2^-(i / 65536))
  uint32_t cost[256];         // round(2^24 * log2(1 + odds)): -log2 P(no change) for a rate byte
  uint32_t cost_change[256];  // round(2^24 * log2(1 + 1 / odds)): -log2 P(change)
  uint32_t log2_high[257];    // round(2^16 * log2(1 + i / 256)), for hints only
  uint16_t reciprocal[256];   // round(65536 / (n + 1.5)), the adaption step after n observations
};
const Constants& constants();

// The costs of one chunk: -log2(1 - p_class) in units of 2^-unit_bits bits.
struct Costs {
  uint16_t top;
  int scale_shift;  // 16 - unit_bits: brings a cost to units of 2^-16 bits
  alignas(64) uint16_t cost[kClassCount];
  uint16_t by_field[256];       // the same by class field, where that has a byte
  alignas(64) uint8_t low[64];  // bytes of cost[], repeated to fill a register
  alignas(64) uint8_t high[64];
};

void make_costs(const RateTable& table, int rate_shift, Costs& out);

TW_INLINE int class_of_field(uint32_t field, uint32_t top) {
  const uint32_t distance = field >= top ? 0 : top - field;
  return static_cast<int>(distance < kClassCount - 1 ? distance : kClassCount - 1);
}

// 2^-(cost) as a 31-bit integer; `cost16` in units of 2^-16 bits.
TW_INLINE uint32_t exp2_neg(const Constants& k, uint32_t cost16) {
  const uint32_t whole = cost16 >> 16;
  if (whole >= kExpBits) return 0;
  const uint64_t product = static_cast<uint64_t>(k.exp_high[(cost16 >> 8) & 255]) * k.exp_low[cost16 & 255];
  return static_cast<uint32_t>(product >> kExpBits) >> whole;
}

// Weight, of 2^24 in all, of "the first change lies before the element at `distance`", where the elements up
// to there cost `cost16`. One is added per element, so that each stays possible whatever it costs, and 1/65536 taken
// away, so that "no change" stays possible.
TW_INLINE uint32_t first_before(const Constants& k, uint32_t cost16, uint32_t distance) {
  const uint32_t changed = ((1u << kExpBits) - exp2_neg(k, cost16)) >> (kExpBits - kSymbolBits);
  return changed - (changed >> 16) + distance;
}

// About the cost at which `first_before` reaches `place`, in units of 2^-16 bits: a hint, never part of the format.
TW_INLINE uint32_t inverse_first(const Constants& k, uint32_t place) {
  const uint32_t left = place < (1u << kSymbolBits) ? (1u << kSymbolBits) - place : 1;
  const int whole = __builtin_clz(left) - (31 - kSymbolBits);
  const uint32_t fraction = (left << whole) & ((1u << 24) - 1);
  const uint32_t index = fraction >> 16;
  const uint32_t log =
      k.log2_high[index] + (((k.log2_high[index + 1] - k.log2_high[index]) * (fraction & 0xFFFF)) >> 16);
  return (static_cast<uint32_t>(whole) << 16) - log;
}

// An adaptive bit: P(bit is 1) of 16 bits, moved towards what was seen by 1 / (n + 1.5), at least 1 / 160.
struct AdaptiveBit {
  uint16_t p;
  uint8_t seen;
};
inline constexpr int kSeenMax = 158;
inline constexpr int32_t kAdaptiveMin = 64;  // the target of a bit not seen: p never reaches 0 or 1

TW_INLINE void update(const Constants& k, AdaptiveBit& bit, uint32_t value) {
  const int32_t target =
      kAdaptiveMin + static_cast<int32_t>(value) * (static_cast<int32_t>(kBitOne) - 2 * kAdaptiveMin);
  const int32_t step = (target - static_cast<int32_t>(bit.p)) * static_cast<int32_t>(k.reciprocal[bit.seen]);
  bit.p = static_cast<uint16_t>(static_cast<int32_t>(bit.p) + (step >> 16));
  bit.seen = static_cast<uint8_t>(bit.seen + (bit.seen < kSeenMax));
}

inline constexpr int kOctaveMax = 64;
inline constexpr int kTopBits = 2;  // bits below the leading one of a size that are worth learning

// Everything a chunk learns while it is coded: about 9 KiB.
struct ValueModel {
  AdaptiveBit direction;
  AdaptiveBit one[kClassCount];
  AdaptiveBit octave[kClassCount][kOctaveMax];
  AdaptiveBit top[kOctaveMax][1 << kTopBits];  // by octave and the bits before, led by a one
};

void reset(ValueModel& model, const RateTable& table);

TW_INLINE uint64_t word_mask(int bits) { return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; }

// Sign-magnitude words to an unsigned order, and back; other words are their own order.
TW_INLINE uint64_t to_order(uint64_t word, int bits, bool ordered) {
  const uint64_t sign = uint64_t{1} << (bits - 1);
  if (!ordered) return word;
  return (word & sign) ? (~word & word_mask(bits)) : (word | sign);
}

TW_INLINE uint64_t from_order(uint64_t order, int bits, bool ordered) {
  const uint64_t sign = uint64_t{1} << (bits - 1);
  if (!ordered) return order;
  return (order & sign) ? (order & ~sign) : (~order & word_mask(bits));
}

}  // namespace thinwire
